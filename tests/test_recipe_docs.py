"""Tests of modeling_tinytfm.recipe_docs: one source for --help, README's table and the checks."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from test_scripts import one_line, train

from modeling_tinytfm.recipe_docs import BEGIN, END, help_text, markdown, refresh
from modeling_tinytfm.recipe_keys import TRAINING_TEXTS, section_keys
from modeling_tinytfm.recipes import describe_keys

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))


def rows_of(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    return [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]


def test_readme_has_the_table_of_these_keys(tmp_path):
    constraints = (ROOT / "constraints.txt").read_text()
    if f"transformers=={version('transformers')}" not in constraints.split():
        pytest.skip(
            "the Trainer's defaults and choices are those of the version in constraints.txt"
        )
    copy = tmp_path / "README.md"
    copy.write_bytes(README.read_bytes())
    refresh(copy)
    same = copy.read_text() == README.read_text()
    assert same, "run: python -m modeling_tinytfm.recipe_docs README.md"


def test_the_table_and_the_help_have_every_key_once():
    described = describe_keys()
    rows = rows_of(markdown())
    assert [row[0] for row in rows] == [f"`{key.key}`" for key in described]
    assert {len(row) for row in rows} == {4}
    text = help_text()
    for key in described:
        assert text.count(f"  {key.key} (") == 1
        assert key.text in text
    defaults = {row[0].strip("`"): row[2] for row in rows}
    assert defaults["model.d_model"] == "512"
    assert defaults["training.adam_epsilon"] == "1e-08"
    assert (defaults["training.bf16"], defaults["training.overwrite"]) == ("null", "false")
    assert defaults["training.report_to"] == "none"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_key_of_the_recipes_here_is_explained_by_name(path):
    keys = {key.key for key in describe_keys()}
    for section, values in yaml.safe_load(path.read_text()).items():
        names = [section] if not isinstance(values, dict) else [f"{section}.{n}" for n in values]
        assert set(names) <= keys


def test_explained_keys_of_the_trainer_are_keys_of_the_trainer():
    assert TRAINING_TEXTS.keys() <= section_keys("training").keys()


def test_refresh_replaces_what_is_between_the_marks(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    subprocess.run(
        [sys.executable, "-m", "modeling_tinytfm.recipe_docs", readme],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=100,
    )
    assert readme.read_text() == f"before\n\n{BEGIN}\n{markdown()}{END}\n\nafter\n"
    for text in ("nothing", BEGIN, END, f"{END}{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"):
        readme.write_text(text)
        with pytest.raises(ValueError, match="has no table between"):
            refresh(readme)
        assert readme.read_text() == text


def test_the_examples_of_the_help_are_read_as_they_stand(monkeypatch):
    monkeypatch.chdir(ROOT)
    examples = re.findall(r"(?<=train\.py)(?: [a-z]\S*)*", help_text().partition("A recipe is")[0])
    assert len(examples) == 5
    for example in examples:
        recipe, overrides = train.parse(example.split())
        assert Path(recipe).is_file()
        assert overrides == example.split()[1:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--training.max_steps=3", "keys have no dashes, write training.max_steps=3"),
        ("x.yaml --training.max_steps 3", "keys have no dashes, write training.max_steps=VALUE"),
        ("x.yaml model.d_model=8 -model.dropout=0", "no dashes, write model.dropout=0"),
        ("data.train_file=a.tsv", "train.py configs/pairs.yaml data.train_file=a.tsv"),
        ("training.seed=1 data.test_source_file=a", "configs/pairs.yaml data.test_source_file=a"),
        ("task=classification data.train_file=a", "train.py configs/classes.yaml data.train_file"),
        ("data.train_file=a task=language_model", "train.py configs/language_model.yaml data.tr"),
        ("data.dataset_name=x/y", "needs a recipe before it: train.py configs/pairs.yaml data.dat"),
    ],
)
def test_train_says_what_to_write_instead(capsys, arguments, message):
    assert train.main(arguments.split()) == 2
    line = one_line(capsys.readouterr().err)
    assert line.startswith("train.py: ")
    assert message in line
