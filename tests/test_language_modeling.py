"""Tests of modeling_tinytfm.language_modeling: every token of a text is predicted once."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_tinytfm.experiment import prepare, run_recipe
from modeling_tinytfm.language_modeling import load_texts
from modeling_tinytfm.recipes import load_recipe
from modeling_tinytfm.scoring import score_model

RECIPE = {
    "task": "language_model",
    "threads": 1,
    "model": {
        "d_model": 32,
        "decoder_layers": 1,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 32,
        "dropout": 0.0,
    },
    "tokenizer": {"kind": "word", "vocab_size": 40},
    "data": {"train_file": "lines.txt", "max_tokens": 512},
    "training": {
        "max_steps": 60,
        "learning_rate": 0.02,
        "logging_steps": 10,
        "eval_strategy": "steps",
        "eval_steps": 30,
        "save_strategy": "steps",
        "save_steps": 30,
        "disable_tqdm": True,
    },
    "generation": {"max_new_tokens": 12},
}


pytestmark = pytest.mark.usefixtures("workplace")


def counting(count: int = 26) -> list[str]:
    """Texts that count upwards from different numbers."""
    return [" ".join(str(n) for n in range(first, first + 10)) for first in range(count)]


def recipe(*overrides: str):
    if not Path("lines.txt").exists():
        Path("lines.txt").write_text("".join(f"{line}\n" for line in counting()))
    Path("tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    return load_recipe("tiny.yaml", overrides)


def predicted(folder: str) -> list[dict]:
    lines = Path(folder, "predictions_test.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_language_model_counts_and_continues_elsewhere():
    said: list[str] = []
    scores = run_recipe(recipe("training.label_smoothing_factor=0.1"), said.append)
    assert scores["test_token_accuracy"] > 0.8  # all but the first number, and where to stop
    rows = predicted("outputs/tiny")
    for row in rows:
        whole = f"{row['prompt']} {row['reference']}"
        assert whole in counting()
        assert row["reference"].startswith(row["prediction"][:5])
    assert f"{rows[0]['prompt']}  ->  {rows[0]['prediction']}" in said[-1]

    model = AutoModelForCausalLM.from_pretrained("outputs/tiny").eval()
    tokenizer = AutoTokenizer.from_pretrained("outputs/tiny")
    prompt = tokenizer("3 4 5", return_tensors="pt")
    assert tokenizer.convert_ids_to_tokens(prompt.input_ids[0]) == ["<s>", "3", "4", "5"]
    text = tokenizer.decode(model.generate(**prompt)[0], skip_special_tokens=True)
    assert text.startswith("3 4 5 6 7 8")


def test_figures_are_those_of_the_definitions():
    scores = run_recipe(recipe("training.max_steps=20"))
    model = AutoModelForCausalLM.from_pretrained("outputs/tiny").eval()
    tokenizer = AutoTokenizer.from_pretrained("outputs/tiny")
    texts = [f"{row['prompt']} {row['reference']}" for row in predicted("outputs/tiny")]
    losses, hits = [], []
    for text in texts:  # one at a time, with a shift of our own
        ids = torch.tensor([[*tokenizer(text).input_ids, tokenizer.eos_token_id]])
        logits = model(ids).logits[0, :-1]
        losses += F.cross_entropy(logits, ids[0, 1:], reduction="none").tolist()
        hits += (logits.argmax(-1) == ids[0, 1:]).tolist()
    assert scores["test_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert scores["test_perplexity"] == pytest.approx(math.exp(scores["test_loss"]))
    assert scores["test_token_accuracy"] == pytest.approx(sum(hits) / len(hits))
    bits = sum(losses) / math.log(2) / sum(map(len, texts))
    assert scores["test_bits_per_character"] == pytest.approx(bits, rel=1e-4)
    again = score_model("outputs/tiny")
    assert again["test_loss"] == pytest.approx(scores["test_loss"], rel=1e-5)
    Path("same.txt").write_text("".join(f"{text}\n" for text in texts))
    of_file = score_model("outputs/tiny", file="same.txt")
    assert of_file["file_bits_per_character"] == pytest.approx(
        scores["test_bits_per_character"], rel=1e-5
    )


@pytest.mark.parametrize("limit", [2, 3, 4, 11, 12, 13])
def test_every_token_is_predicted_once_however_texts_are_cut(limit):
    Path("one.txt").write_text("5 6 7 8 9 5 6 7 8 9\n5\n")
    files = [f"data.{split}_file=one.txt" for split in ("train", "validation", "test")]
    prepared = prepare(recipe(*files, f"data.max_source_length={limit}"))
    tokenizer = prepared.trainer.processing_class
    wanted = [[*tokenizer(text).input_ids, 2] for text in Path("one.txt").read_text().splitlines()]
    for split in ("train", "test"):
        blocks = prepared.sets[split]
        assert all(2 <= len(ids) <= limit for ids in blocks["input_ids"])
        texts: list[list[int]] = []
        for ids, labels in zip(blocks["input_ids"], blocks["labels"], strict=True):
            assert labels == [-100, *ids[1:]]
            if ids[0] == tokenizer.bos_token_id:
                texts.append([ids[0]])
            assert ids[0] == texts[-1][-1]  # given again, not predicted again
            texts[-1] += ids[1:]
        assert texts == wanted
        assert prepared.reports[split].blocks == len(blocks)
    assert sum(prepared.sets["test"]["characters"]) == len("5 6 7 8 9 5 6 7 8 9") + 1
    assert "2 texts; cut into" in prepared.plan()
    assert "target that also stands" not in prepared.plan()


def test_smoothing_shifts_labels_as_the_model_does():
    trainer = prepare(recipe("training.label_smoothing_factor=0.2")).trainer
    batch = trainer.data_collator([trainer.train_dataset[row] for row in range(4)])
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, dict(batch))
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    log_p = trainer.model(**inputs).logits.log_softmax(-1)
    terms = []
    for row, labels in enumerate(batch["labels"]):
        for position, label in enumerate(labels.tolist()):
            if label != -100:
                scores = log_p[row, position - 1]  # what the token before it predicts
                terms.append(-0.8 * scores[label] - 0.2 * scores.mean())
    assert loss.item() == pytest.approx(torch.stack(terms).mean().item(), rel=1e-5)
    trainer.model.eval()
    plain = trainer.compute_loss(trainer.model, dict(batch)).item()
    nll = [
        -log_p[row, position - 1, label]
        for row, labels in enumerate(batch["labels"])
        for position, label in enumerate(labels.tolist())
        if label != -100
    ]
    assert plain == pytest.approx(torch.stack(nll).mean().item(), rel=1e-4)


def test_accumulated_batches_have_the_loss_of_one():
    """Blocks of different lengths: each token counts alike, in whichever batch it is."""
    Path("lines.txt").write_text(
        "".join(f"{line[:number]}\n" for number, line in enumerate(counting(), 3))
    )
    logged = []
    for size, steps in ((8, 1), (2, 4)):
        batches = (
            f"training.per_device_train_batch_size={size}",
            f"training.gradient_accumulation_steps={steps}",
            f"training.output_dir=run{size}",
        )
        chosen = recipe(
            "data.max_tokens=null", "training.max_steps=2", *batches, "training.logging_steps=1"
        )
        experiment_ = prepare(chosen)
        experiment_.run()
        history = experiment_.trainer.state.log_history
        logged.append([entry["loss"] for entry in history if "loss" in entry])
    assert logged[0] == pytest.approx(logged[1], rel=1e-4)


def test_a_resumed_run_ends_as_if_it_had_never_stopped():
    whole = run_recipe(recipe())
    resume = "training.resume_from_checkpoint=outputs/tiny/checkpoint-30"
    again = run_recipe(recipe(resume, "training.output_dir=again"))
    assert again["test_loss"] == whole["test_loss"]


@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv", "dataset"])
def test_texts_come_from_every_kind_of_file(kind, tmp_path):
    texts = ["one text", 'a "second", with a comma', "", "the\tlast"]
    name = f"texts.{kind}"
    data = {"train_file": name}
    if kind == "txt":
        Path(name).write_text("".join(f"{text}\n" for text in texts))
    elif kind == "jsonl":
        Path(name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    elif kind == "csv":
        quoted = [text.replace('"', '""') for text in texts]
        Path(name).write_text("text\n" + "".join(f'"{text}"\n' for text in quoted))
    else:
        folder = tmp_path / "texts"
        folder.mkdir()
        Dataset.from_dict({"text": texts}).to_parquet(folder / "train.parquet")
        data = {"dataset_name": str(folder)}
    from modeling_tinytfm.tasks import files_of

    settings = type(recipe().data)(**data)
    splits, report = load_texts({"test": files_of(settings)["train"]}, "text")
    assert splits["test"]["source"][:] == [text for text in texts if text]
    assert report["test"].empty_side == 1


def test_a_missing_column_is_told():
    Path("texts.jsonl").write_text('{"line": "a"}\n')
    with pytest.raises(ValueError, match=r"texts\.jsonl, line 1: .*'text'"):
        prepare(recipe("data.train_file=texts.jsonl"))


def test_learned_positions_bound_blocks_and_continuations():
    learned = ("model.position_embedding_type=learned", "model.max_position_embeddings=8")
    with pytest.raises(ValueError, match=r"data\.max_source_length=512 is above the learned pos"):
        prepare(recipe(*learned))
    scores = run_recipe(recipe(*learned, "data.max_source_length=8", "training.max_steps=2"))
    assert math.isfinite(scores["test_loss"])
    assert len(predicted("outputs/tiny")) == scores["test_samples"]
