import importlib.util
import json
from pathlib import Path

import pytest
from PIL import Image
from test_experiment import RECIPE

from modeling_tinytfm.comparing import compare_runs, describe_groups, draw_comparison
from modeling_tinytfm.experiment import run_recipe
from modeling_tinytfm.recipes import load_recipe

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(tmp_path):
    """Writes a folder as a finished run leaves it."""

    def write(name: str, losses: list[float], *overrides: str) -> str:
        folder = tmp_path / name
        folder.mkdir()
        recipe = load_recipe(ROOT / "configs/reverse.yaml", overrides)
        (folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
        history = [{"step": 10 * (n + 1), "eval_loss": loss} for n, loss in enumerate(losses)]
        history.insert(1, {"step": 10, "loss": 9.0})
        state = json.dumps({"log_history": history})
        (folder / "trainer_state.json").write_text(state, encoding="utf-8")
        return str(folder)

    return write


def test_runs_of_one_recipe_are_one_group_whatever_their_seeds(run):
    folders = [
        run("a", [3.0, 2.0], "training.seed=1"),
        run("b", [3.0, 1.0, 0.5], "training.seed=2", "model.norm_first=true"),
        run("c", [5.0, 4.0], "training.seed=2", "training.output_dir=elsewhere"),
        run("d", [3.0, 2.0, 0.7], "training.seed=1", "model.norm_first=true", "threads=1"),
    ]
    post, pre = compare_runs(folders)
    assert (post.label, pre.label) == ("model.norm_first=false", "model.norm_first=true")
    assert (post.steps(), pre.steps()) == ([10, 20], [10, 20, 30])
    assert post.at(20) == (3.0, 2.0, 4.0)
    assert describe_groups([post, pre], "loss").splitlines() == [
        "model.norm_first=false: loss 3 [2, 4] after 20 updates, 2 runs",
        "model.norm_first=true: loss 0.6 [0.5, 0.7] after 30 updates, 2 runs",
    ]


def test_groups_are_named_after_all_keys_in_which_any_differ(run):
    folders = [
        run("a", [3.0]),
        run("b", [2.0], "training.warmup_steps=7"),
        run("c", [1.0], "model.activation_function=gelu"),
    ]
    labels = [group.label for group in compare_runs(folders)]
    assert len(labels) == len(set(labels)) == 3
    assert "training.warmup_steps=7" in labels[1]
    assert "model.activation_function=relu" in labels[0]
    assert "model.activation_function=gelu" in labels[2]
    assert [group.label for group in compare_runs(folders[:1])] == ["one recipe"]


def test_what_cannot_be_compared_is_named(run, tmp_path):
    first = run("a", [3.0])
    with pytest.raises(ValueError, match=r"b holds a run that another folder holds, too"):
        compare_runs([first, run("b", [3.0])])
    with pytest.raises(ValueError, match=r"a did not measure bleu in validation"):
        compare_runs([first], "bleu")
    other = run("c", [], "training.seed=7")
    state = json.dumps({"log_history": [{"step": 15, "eval_loss": 2.0}]})
    Path(other, "trainer_state.json").write_text(state, encoding="utf-8")
    with pytest.raises(ValueError, match="the runs of one recipe were never measured at the same"):
        compare_runs([first, other])
    with pytest.raises(ValueError, match=r"'blue' is none of loss, "):
        compare_runs([first], "blue")
    (tmp_path / "a/trainer_state.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"a holds no run that was trained to its end"):
        compare_runs([first])


def test_the_picture_has_a_curve_and_a_band_for_each_group(run, tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn = []
    plot, fill = Axes.plot, Axes.fill_between
    monkeypatch.setattr(
        Axes, "plot", lambda self, *a, **k: (drawn.append((k["label"], *a)), plot(self, *a, **k))[1]
    )
    monkeypatch.setattr(
        Axes,
        "fill_between",
        lambda self, *a, **k: (drawn.append(("band", *a)), fill(self, *a, **k))[1],
    )
    folders = [run("a", [3.0, 2.0], "training.seed=1"), run("b", [5.0, 1.0], "training.seed=2")]
    draw_comparison(compare_runs(folders), "loss", tmp_path / "curves.png")
    assert drawn == [
        ("one recipe", [10, 20], (4.0, 1.5)),
        ("band", [10, 20], (3.0, 1.0), (5.0, 2.0)),
    ]
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.size == (840, 600)


def test_the_command_compares_what_train_leaves(workplace, capsys):
    path = ROOT / "scripts/compare_runs.py"
    specification = importlib.util.spec_from_file_location("script_compare_runs", path)
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    Path("pairs.tsv").write_text(
        "".join(f"{n} {n + 1}\t{n + 1} {n}\n" for n in range(40)), encoding="utf-8"
    )
    Path("tiny.yaml").write_text(json.dumps({**RECIPE, "data": {"train_file": "pairs.tsv"}}))
    for seed in (1, 2):
        settings = [f"training.seed={seed}", f"training.output_dir={seed}"]
        run_recipe(load_recipe("tiny.yaml", settings), lambda _: None)
    assert script.main(["1", "2", "--measure", "token_accuracy", "-o", "seeds.png"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("one recipe: token_accuracy 0.")
    assert line.endswith(" after 4 updates, 2 runs")
    assert Path("seeds.png").stat().st_size > 10_000
    assert script.main(["1", "none"]) == 2
    assert capsys.readouterr().err.startswith("compare_runs.py: none holds no run that was")
