"""The house's rules: floors, the two files that travel, and a README that names every module."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "modeling_tinytfm"
# A module imports only from floors below its own.
FLOORS = (
    {"configuration_tinytfm", "settings", "explorer"},
    {"recipe_keys"},
    {"recipe_checks"},
    {"recipes"},
    {"recipe_docs"},
    {"modeling_tinytfm", "reading"},
    {"search", "alignment", "losses"},
    {"decoding"},
    {"tokenization", "data", "batching", "metrics", "translation", "conversion"},
    {"encoding", "flops", "sharding", "sight"},
    {"ctranslate2_model", "onnx_export"},
    {"loading", "reports", "comparing", "seeing", "resegmentation", "streaming"},
    {"checkpoints", "exporting"},
    {"importing"},
    {"machine", "run_folder"},
    {"model_card"},
    {"publishing"},
    {"training"},
    {"tasks"},
    {"seq2seq", "classification", "language_modeling"},
    {"experiment", "benchmarking"},
    {"scoring", "end_to_end"},
)
TRAVELLING = ("configuration_tinytfm", "modeling_tinytfm")
MODULES = sorted((ROOT / PACKAGE).rglob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
# How transformers finds what a file of code needs beside it: by expression, docstrings included.
RELATIVE_IMPORT = re.compile(r"^\s*(?:import\s+\.(\S+)|from\s+\.(\S+)\s+import)", re.MULTILINE)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(path: Path) -> Iterator[str]:
    """Everything a file imports when it runs, also inside functions, by its absolute name."""
    waiting: list[ast.AST] = [parse(path)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = ".".join(part for part in (PACKAGE, module) if part)
            yield module
            # `from package import module`
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif is_for_type_checkers(node):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def own_imports(path: Path) -> set[str]:
    """The modules of this package that a file imports; "" is the package itself."""
    names = {path.stem for path in MODULES}
    found = set()
    for name in imports(path):
        first, _, rest = name.partition(".")
        second = rest.partition(".")[0]
        if first == PACKAGE:
            found.add(second if second in names else "")
    return found


def floor_of(module: str) -> int:
    return next(number for number, floor in enumerate(FLOORS) if module in floor)


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_every_module_has_its_floor():
    names = {path.stem for path in MODULES if path.name != "__init__.py"}
    planned = set().union(*FLOORS)
    assert names <= planned, "a new module needs a floor here and in the design"
    assert sum(len(floor) for floor in FLOORS) == len(planned)
    assert all(path.parent == ROOT / PACKAGE for path in MODULES), "the package is flat"


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.name != "__init__.py"], ids=shown
)
def test_modules_import_only_from_lower_floors(path):
    own_floor = floor_of(path.stem)
    for module in own_imports(path) - {""}:
        assert floor_of(module) < own_floor, f"{path.stem} imports {module}"
    # The package itself imports some modules, and these cannot import it.
    if "" in own_imports(path):
        exported = own_imports(ROOT / PACKAGE / "__init__.py") - {""}
        assert own_floor > max(map(floor_of, exported))


def test_the_package_itself_needs_no_trainer():
    """Whoever imports it to load a model should not wait for what only training needs."""
    imported = own_imports(ROOT / PACKAGE / "__init__.py") - {""}
    assert imported >= set(TRAVELLING)
    assert all(floor_of(module) < floor_of("training") for module in imported)


@pytest.mark.parametrize("path", MODULES, ids=shown)
def test_nothing_in_the_package_imports_scripts_or_tests(path):
    forbidden = {"scripts", "tests", "tiny", "conftest", *(script.stem for script in SCRIPTS)}
    forbidden -= sys.stdlib_module_names
    assert not {name.partition(".")[0] for name in imports(path)} & forbidden


def test_scripts_do_not_import_each_other():
    names = {script.stem for script in SCRIPTS} - {"environment"}
    for script in SCRIPTS:
        assert not {name.partition(".")[0] for name in imports(script)} & (names | {"scripts"})


def test_scripts_hide_no_library():
    """A script's folder comes first on its path: a datasets.py there would shadow the library."""
    taken = {"evaluate", "datasets", "tokenizers", "transformers", "torch", "accelerate"}
    for path in (*SCRIPTS, *MODULES):
        assert path.stem not in sys.stdlib_module_names | taken


@pytest.mark.parametrize("name", TRAVELLING)
def test_travelling_files_import_little(name):
    path = ROOT / PACKAGE / f"{name}.py"
    for imported in imports(path):
        top = imported.partition(".")[0]
        assert top in {"torch", "transformers", PACKAGE} or top in sys.stdlib_module_names
        if name == "configuration_tinytfm":
            assert top != "torch", "a config can be read without torch"


def test_travelling_files_have_one_relative_import():
    own = {name: own_imports(ROOT / PACKAGE / f"{name}.py") for name in TRAVELLING}
    assert own["configuration_tinytfm"] == set()
    assert own["modeling_tinytfm"] - {""} == {"configuration_tinytfm"}
    for name in TRAVELLING:
        for node in ast.walk(parse(ROOT / PACKAGE / f"{name}.py")):
            if isinstance(node, ast.ImportFrom) and node.level:
                # Not `from . import x` and not `from ..x import y`: neither travels.
                assert (node.level, f"{node.module}" in TRAVELLING) == (1, True)
            elif isinstance(node, ast.ImportFrom | ast.Import):
                assert PACKAGE not in ast.unparse(node), "an absolute import of itself"


@pytest.mark.parametrize("name", TRAVELLING)
def test_no_text_of_travelling_files_reads_like_a_relative_import(name):
    path = ROOT / PACKAGE / f"{name}.py"
    real = [
        node for node in ast.walk(parse(path)) if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert len(RELATIVE_IMPORT.findall(path.read_text(encoding="utf-8"))) == len(real)


@pytest.mark.parametrize("path", MODULES, ids=shown)
def test_the_library_does_not_print(path):
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in {"print", "pprint", "sys.stdout.write"}, (
                f"{path.name}:{node.lineno}"
            )


def test_readme_maps_every_module_and_script():
    """Its table of files has a row for each module and for each folder, which names its scripts."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\|\s*`([^`|\s]*/[^`|\s]*)`\s*\|\s*(.+?)\s*\|$", readme, re.MULTILINE))
    modules = {shown(path) for path in MODULES if path.name != "__init__.py"}
    assert modules - rows.keys() == set()
    assert {script.name for script in SCRIPTS} == set(re.findall(r"\w+\.py", rows["scripts/"]))
    for file, text in rows.items():
        assert (ROOT / file).exists(), f"README lists {file}, which does not exist"
        assert len(text) > 10, f"README says nothing of {file}"


def test_the_top_level_holds_nothing_else():
    planned = {PACKAGE, "configs", "scripts", "tests", "docs", "pyproject.toml", "README.md"}
    planned |= {"LICENSE", "constraints.txt", ".ci", ".gitignore"}
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("only git knows what belongs to the project")
    listed = subprocess.run([git, "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {file.split("/")[0] for file in listed.stdout.splitlines()} <= planned


def test_importing_the_package_loads_nothing_that_only_training_needs():
    code = "import sys, modeling_tinytfm; print(*sys.modules)"
    run = [sys.executable, "-c", code]
    loaded = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    unwanted = {"datasets", "evaluate", "matplotlib", "pandas", "transformers.trainer"}
    assert not unwanted & set(loaded.split())
