"""Sub-words that are drawn anew each epoch: what is fed keeps its limits, and no row is lost."""

import json
import math
import multiprocessing
import os
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import yaml
from datasets import Dataset
from test_training import arguments, fork_server, launch  # noqa: F401 - fixtures, too
from tiny import TINIEST, tiny_config
from transformers import DataCollatorForSeq2Seq, TrainerCallback, set_seed

from modeling_tinytfm import TinyTFMForConditionalGeneration, experiment
from modeling_tinytfm.data import encode_pairs
from modeling_tinytfm.encoding import PairEncoder, TokenRows
from modeling_tinytfm.experiment import prepare, run_recipe
from modeling_tinytfm.recipes import load_recipe
from modeling_tinytfm.resegmentation import ResegmentedPairs, ResegmentingSampler
from modeling_tinytfm.tokenization import train_tokenizer
from modeling_tinytfm.training import TinyTFMTrainer

UNLIMITED = {"max_source_length": None, "max_target_length": None}


def sentences(rows: int) -> list[tuple[str, str]]:
    """Different sentences of words whose syllables come again."""
    drawn = random.Random(rows)
    syllables = ["ka", "to", "mi", "ren", "sul", "pa"]
    words = ["".join(drawn.choices(syllables, k=drawn.randint(1, 4))) for _ in range(60)]
    sources: dict[str, None] = {}
    while len(sources) < rows:
        sources[" ".join(drawn.choices(words, k=drawn.randint(1, 12)))] = None
    return [(source, " ".join(source.split()[::-1])) for source in sources]


PAIRS = sentences(400)


@pytest.fixture(scope="module")
def tokenizer():
    lines = [side for pair in PAIRS for side in pair]
    return train_tokenizer(lines, vocab_size=80, show_progress=False)


def texts(pairs=PAIRS) -> Dataset:
    return Dataset.from_dict(
        {"source": [pair[0] for pair in pairs], "target": [pair[1] for pair in pairs]}
    )


def sides(pairs) -> tuple[list[str], list[str]]:
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


# Encoding


def test_without_dropout_pairs_are_encoded_as_ever(tokenizer):
    encoder = PairEncoder(tokenizer, max_source_length=20, max_target_length=18)
    expected, report = encode_pairs(
        texts(), tokenizer, max_source_length=20, max_target_length=18, drop_too_long=True
    )
    rows = TokenRows([sides(PAIRS[:150]), sides(PAIRS[150:])], encoder)
    assert 0 < len(rows) == report.pairs < 400
    assert [rows[row] for row in range(len(rows))] == expected.to_list()
    assert rows.lengths.tolist() == [
        [len(row["input_ids"]), len(row["labels"])] for row in expected.to_list()
    ]


def test_large_vocabularies_keep_their_ids():
    lines = [chr(number) for number in range(0x20000, 0x20000 + 70_000)]
    tokenizer = train_tokenizer(lines, kind="character", vocab_size=80_000, show_progress=False)
    rows = TokenRows([(lines[-3:], lines[:3])], PairEncoder(tokenizer, **UNLIMITED))
    assert [rows[row]["input_ids"] for row in range(3)] == tokenizer(lines[-3:]).input_ids
    assert rows.ids.max() > 1 << 16


def test_dropout_that_makes_a_pair_too_long_is_left_out_for_it(tokenizer):
    clean = PairEncoder(tokenizer, **UNLIMITED)(*sides(PAIRS))
    lengths = np.array([[len(side) for side in pair] for pair in clean])
    longest = lengths.max(axis=0)
    for limits in (
        {"max_source_length": int(longest[0]), "max_target_length": None},
        {"max_source_length": None, "max_target_length": int(longest[1])},
        {**UNLIMITED, "max_tokens": int(lengths.sum(axis=1).max())},
    ):
        encoder = PairEncoder(tokenizer, **limits, bpe_dropout=0.3)
        encoded = encoder(*sides(PAIRS))
        assert len(encoded) == len(PAIRS)
        unchanged = [row for row, pair in enumerate(encoded) if pair == clean[row]]
        assert int(lengths.sum(axis=1).argmax()) in unchanged
        assert len(unchanged) < 250
        for source, target in encoded:
            assert len(source) <= (limits["max_source_length"] or math.inf)
            assert len(target) <= (limits["max_target_length"] or math.inf)
            assert len(source) + len(target) <= limits.get("max_tokens", math.inf)


# Batches


def make_sampler(tokenizer, pairs=PAIRS, dropout=0.5, **options) -> ResegmentingSampler:
    encoder = PairEncoder(
        tokenizer, **UNLIMITED, max_tokens=options.get("max_tokens"), bpe_dropout=dropout
    )
    return ResegmentingSampler(ResegmentedPairs(texts(pairs), encoder, False), **options)


def decoded(tokenizer, rows) -> list[tuple[str, str]]:
    return [
        tuple(
            tokenizer.decode(row[side], skip_special_tokens=True)
            for side in ("input_ids", "labels")
        )
        for row in rows
    ]


@pytest.mark.parametrize("options", [{"max_tokens": 400}, {"batch_size": 9}])
def test_each_epoch_has_every_row_once_within_the_budget_of_its_new_lengths(tokenizer, options):
    sampler = make_sampler(tokenizer, **options)
    seen = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        batches = [[sampler.pairs[row] for row in batch] for batch in sampler]
        assert len(batches) == len(sampler)
        rows = [row for batch in batches for row in batch]
        assert sorted(decoded(tokenizer, rows)) == sorted(PAIRS)
        padded = [
            len(batch) * sum(max(len(row[side]) for row in batch) for side in batch[0])
            for batch in batches
        ]
        real = sum(len(side) for row in rows for side in row.values())
        if "max_tokens" in options:
            assert max(padded) <= 400
            assert sampler.padding_waste() == pytest.approx(1 - real / sum(padded))
        assert sampler.tokens == real
        seen.append({tuple(row["input_ids"]) for row in rows})
    # Most rows are cut otherwise in the next epoch.
    assert all(len(first & second) < 200 for first, second in pairwise(seen))


def test_an_epoch_is_cut_once(tokenizer):
    sampler = make_sampler(tokenizer, max_tokens=400)
    first = [sampler.pairs[row] for row in range(400)]
    sampler.set_epoch(0)
    assert [sampler.pairs[row] for row in range(400)] == first
    sampler.set_epoch(1)
    assert [sampler.pairs[row] for row in range(400)] != first


def test_processes_share_the_rows_and_make_equally_many_batches(tokenizer, monkeypatch):
    """One after the other: each is told what the other would have said."""
    said: list[int] = []
    monkeypatch.setattr(
        "modeling_tinytfm.resegmentation.gather_object", lambda values: said + values
    )
    said += [57]
    samplers = [make_sampler(tokenizer, max_tokens=400, num_replicas=2, rank=r) for r in (0, 1)]
    assert [len(sampler) for sampler in samplers] == [57, 57]
    rows = [sampler.pairs[row] for sampler in samplers for batch in sampler for row in batch]
    assert sorted(decoded(tokenizer, rows)) == sorted(PAIRS)
    said[:] = [201]
    with pytest.raises(ValueError, match=r"400 rows do not divide by 2 processes; raise max_tok"):
        make_sampler(tokenizer, max_tokens=400, num_replicas=2)
    with pytest.raises(ValueError, match="1 rows for 2 processes"):
        make_sampler(tokenizer, PAIRS[:1], max_tokens=400, num_replicas=2)


# Training


class Lengthening(PairEncoder):
    """Encodes 8 symbols; a source is as much longer as its epoch's number says."""

    def __init__(self, more: list[int]):
        self.more, self.dtype = iter(more), np.int32

    def __call__(self, sources, targets):
        more = next(self.more)
        return [[[3 + int(source)] * (2 + more), [4, 2]] for source in sources]


class Updates(TrainerCallback):
    """The batches of each epoch, as numbers of rows."""

    def __init__(self):
        self.epochs: list[list[list[int]]] = []

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.epochs.append([])

    def __call__(self, features):
        self.epochs[-1].append([row["input_ids"][0] - 3 for row in features])
        return self.collator(features)


def lengthening_trainer(folder, tokenizer, more, **changes):
    set_seed(1)
    updates = Updates()
    numbers = [str(number) for number in range(12)]
    rows = Dataset.from_dict({"source": numbers, "target": numbers})
    model = TinyTFMForConditionalGeneration(tiny_config())
    updates.collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    trainer = TinyTFMTrainer(
        model=model,
        args=arguments(folder, max_steps=-1, **changes),
        train_dataset=ResegmentedPairs(rows, Lengthening(more), False),
        data_collator=updates,
        processing_class=tokenizer,
        callbacks=[updates],
        max_tokens=24,
    )
    return trainer, updates


# A batch of 24 tokens holds 6, 3, 2 or 1 rows of 2 + 2, 6 + 2, 9 + 2 or 12 + 2.
MORE = [0, 4, 10, 7]
BATCHES = [2, 4, 12, 6]


@pytest.mark.parametrize("accumulation", [1, 4])
def test_epochs_of_other_lengths_are_whole(tmp_path, tokenizer, accumulation):
    trainer, updates = lengthening_trainer(
        tmp_path, tokenizer, MORE, num_train_epochs=4, gradient_accumulation_steps=accumulation
    )
    trainer.train()
    assert [len(batches) for batches in updates.epochs] == BATCHES
    for batches in updates.epochs:
        assert sorted(row for batch in batches for row in batch) == list(range(12))
    assert trainer.state.global_step == sum(-(-n // accumulation) for n in BATCHES)
    assert trainer.state.epoch == 4
    ends = [line["epoch"] for line in trainer.state.log_history if "loss" in line]
    assert {1.0, 2.0, 3.0, 4.0} <= set(ends)


def test_epochs_of_other_lengths_may_end_in_the_middle(tmp_path, tokenizer):
    trainer, updates = lengthening_trainer(tmp_path, tokenizer, MORE, num_train_epochs=2.5)
    trainer.train()
    assert trainer.state.global_step == 2 + 4 + 6
    trainer, updates = lengthening_trainer(tmp_path, tokenizer, [10, 0, 0, 0, 0])
    trainer.args.max_steps = 19  # more than two epochs as long as the first: no
    trainer.train()
    assert trainer.state.global_step == 12 + 2 + 2 + 2 + 1
    assert len(updates.epochs) == 5


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, tokenizer) -> Path:
    """A run of 4 epochs with some of its checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    trainer, _ = lengthening_trainer(
        folder, tokenizer, MORE, num_train_epochs=4, save_strategy="steps", save_steps=6
    )
    trainer.train()
    assert trainer.state.global_step == 24
    return folder


@pytest.mark.parametrize(
    ("step", "epochs", "done"), [(6, [12, 6], 0), (12, [12, 6], 6), (18, [6], 0), (24, [], 0)]
)
def test_training_goes_on_in_the_epoch_where_it_stopped(
    tmp_path, tokenizer, whole_run, step, epochs, done
):
    # A new process cuts its first epoch, too, before it knows where it is to go on.
    more = [0, *MORE[4 - len(epochs) :], 7]
    resumed, updates = lengthening_trainer(tmp_path, tokenizer, more, num_train_epochs=4)
    resumed.train(resume_from_checkpoint=str(whole_run / f"checkpoint-{step}"))
    assert resumed.state.epoch == 4
    assert resumed.state.global_step == 24
    made = [len(batches) for batches in updates.epochs]
    assert made == [batches - (done if epoch == 0 else 0) for epoch, batches in enumerate(epochs)]
    for batches in updates.epochs[done > 0 :]:
        assert sorted(row for batch in batches for row in batch) == list(range(12))


# The whole command


RECIPE = {
    "threads": 1,
    "model": TINIEST,
    "tokenizer": {"kind": "bpe", "vocab_size": 80, "bpe_dropout": 0.3},
    "data": {"train_file": "pairs.tsv", "max_tokens": 1000},
    "training": {
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "logging_steps": 1,
        "disable_tqdm": True,
    },
    "generation": {"max_new_tokens": 8},
    "evaluation": {"metrics": ["exact_match"]},
}


@pytest.fixture
def recipe(workplace):
    Path("pairs.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in PAIRS))

    def make(*overrides: str):
        Path("tiny.yaml").write_text(yaml.safe_dump(RECIPE))
        return load_recipe("tiny.yaml", overrides)

    return make


def test_no_tokenizer_of_a_run_carries_the_dropout(recipe):
    said: list[str] = []
    run_recipe(recipe(), said.append)
    assert "BPE dropout:  0.3, drawn anew each epoch" in said[1]
    assert "cannot be repeated bit for bit" in said[1]
    saved = sorted(Path("outputs/tiny").rglob("tokenizer.json"))
    assert len(saved) == 3  # in the folder and in two checkpoints
    for path in saved:
        assert json.loads(path.read_text())["model"]["dropout"] is None
    assert "dropout" not in Path("outputs/tiny/tokenizer_config.json").read_text()
    # Without it, nothing is said and nothing is drawn.
    plain = prepare(recipe("tokenizer.bpe_dropout=0", "training.output_dir=plain"))
    assert "BPE dropout" not in plain.plan()
    assert isinstance(plain.trainer.train_dataset, Dataset)


def test_evaluation_is_without_dropout(recipe):
    prepared = prepare(recipe("tokenizer.bpe_dropout=1"))
    fed = prepared.trainer.train_dataset
    assert all(len(ids) > 0 for ids in prepared.sets["test"]["input_ids"])
    ids = [fed[row]["input_ids"] for row in range(5)]
    tokenizer = prepared.trainer.processing_class
    assert all(len(token) == 1 for token in tokenizer.convert_ids_to_tokens(ids[0][:-1]))
    for row in prepared.sets["test"]:
        assert row["input_ids"] == tokenizer(row["source"]).input_ids
    first, second = (prepared.trainer.evaluate()["eval_loss"] for _ in range(2))
    assert first == second


def test_b50_dropout_leaves_no_cache_files(recipe, tmp_path):
    run_recipe(recipe())
    before = sorted((tmp_path / "cache").rglob("*.arrow"))
    run_recipe(recipe("training.output_dir=again"))
    assert sorted((tmp_path / "cache").rglob("*.arrow")) == before


def test_b50_loader_processes_are_fed_the_new_cuts(recipe):
    prepared = prepare(recipe("training.dataloader_num_workers=2"))
    trainer, fed = prepared.trainer, {}
    step = trainer.training_step

    def remember(model, inputs, *more):
        fed.setdefault(trainer.sampler.epoch, []).extend(inputs["input_ids"].tolist())
        return step(model, inputs, *more)

    trainer.training_step = remember
    trainer.train()
    pad = trainer.processing_class.pad_token_id
    cuts = [sorted([token for token in row if token != pad] for row in fed[n]) for n in (0, 1)]
    lines = [sorted(trainer.processing_class.batch_decode(ids, True)) for ids in cuts]
    assert len(lines[0]) == 360
    assert lines[0] == lines[1]
    assert len({*map(tuple, cuts[0])} & {*map(tuple, cuts[1])}) < 180
    assert multiprocessing.active_children() == []


def run_on_a_rank(folder: str) -> dict:
    """A run in the folder's recipe; the sources that this process was fed, by epoch."""
    os.chdir(folder)
    datasets.config.HF_DATASETS_CACHE = Path(folder, "cache")
    experiment.draw_curves = lambda *_, **__: None
    prepared = prepare(load_recipe("tiny.yaml", ["training.dataloader_num_workers=0"]))
    trainer, fed = prepared.trainer, {}
    collator = trainer.data_collator

    def watch(features):
        rows = decoded(trainer.processing_class, features)
        width = sum(max(len(row[side]) for row in features) for side in features[0])
        fed.setdefault(trainer.sampler.epoch, []).append((rows, len(rows) * width))
        return collator(features)

    trainer.data_collator = watch
    prepared.run()
    return {
        "fed": fed,
        "weights": {name: w.clone() for name, w in trainer.model.state_dict().items()},
        "steps": trainer.state.global_step,
    }


@pytest.mark.slow
def test_two_processes_feed_each_row_once_and_agree(recipe, launch, tmp_path):  # noqa: F811
    recipe()
    first, second = launch(run_on_a_rank, str(tmp_path), world_size=2)
    assert first["steps"] == second["steps"] > 0
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name])
    for epoch in (0, 1):
        batches = [rank["fed"][epoch] for rank in (first, second)]
        assert len(batches[0]) == len(batches[1])
        assert max(tokens for own in batches for _, tokens in own) <= 1000
        fed = Counter(row for own in batches for rows, _ in own for row in rows)
        assert len(fed) == 360
        assert set(fed.values()) == {1}
    shares = [{row for rows, _ in first["fed"][epoch] for row in rows} for epoch in (0, 1)]
    assert shares[0] != shares[1]
