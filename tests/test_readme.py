"""README is tested: its Python blocks run, its file map is complete, its commands exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from modeling_tinytfm.recipes import load_recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


COMMANDS = re.findall(r"scripts/train\.py (configs/.*)", README.replace("\\\n", ""))


def block_with(text: str) -> str:
    (block,) = [block for block in PYTHON_BLOCKS if text in block]
    return block


def run(code: str, folder: Path, timeout: float = 300) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", "import torch; torch.set_num_threads(1)\n" + code],
        cwd=folder,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.parametrize("command", [text for text in COMMANDS if "`" not in text])
def test_what_it_says_of_training_is_a_recipe(command):
    recipe, *overrides = shlex.split(command)
    load_recipe(ROOT / recipe, overrides)


@pytest.mark.slow
def test_the_ten_lines_learn_to_reverse(tmp_path):
    output = run(
        "import transformers; transformers.set_seed(0)\n" + block_with("300 * 64"), tmp_path
    )
    assert "[[ 1,  6,  4, 12,  7,  9,  5,  2]]" in output


def test_the_conversions_run(tmp_path):
    run(block_with("from_marian(marian)"), tmp_path)


def test_all_python_blocks_are_run_by_some_test():
    tested_here = ("300 * 64", "from_marian(marian)")
    # The loading snippet runs in test_scripts, on the folder that the command leaves.
    # Those of the other tasks run in test_configs.
    tested_elsewhere = (
        'folder = "outputs/reverse"',
        'folder = "outputs/language_model"',
        '"outputs/mnist_rows"',
        '"outputs/classes"',
        # These run in test_ecosystem.
        "LoraConfig(",
        "quantize_dynamic(",
    )
    for block in PYTHON_BLOCKS:
        assert any(text in block for text in (*tested_here, *tested_elsewhere)), block


def test_the_file_map_names_every_module():
    named = set(re.findall(r"^\| `(modeling_tinytfm/\w+\.py)`", README, flags=re.MULTILINE))
    modules = {f"modeling_tinytfm/{path.name}" for path in (ROOT / "modeling_tinytfm").glob("*.py")}
    assert named == modules - {"modeling_tinytfm/__init__.py"}


def test_files_and_scripts_that_it_mentions_exist():
    for path in re.findall(r"\b((?:scripts|configs|tests|\.ci)/[\w./]*\w)", README):
        assert (ROOT / path).exists(), path
    for script in (ROOT / "scripts").glob("*.py"):
        assert script.name in README
    for recipe in (ROOT / "configs").glob("*.yaml"):
        assert recipe.name in README
