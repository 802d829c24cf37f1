"""Streams of pairs: each row once a pass, on any number of processes and workers, without end."""

import itertools
import json
import multiprocessing
import os
import random
from collections import Counter
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from datasets import load_dataset
from safetensors.torch import load_file
from test_training import fork_server, launch  # noqa: F401 - fixtures
from tiny import TINIEST
from torch.utils.data import DataLoader

from modeling_tinytfm import experiment
from modeling_tinytfm.data import text_key
from modeling_tinytfm.encoding import PairEncoder
from modeling_tinytfm.experiment import prepare, run_recipe
from modeling_tinytfm.recipes import load_recipe
from modeling_tinytfm.streaming import BadStreamError, PairStream, Stream
from modeling_tinytfm.tokenization import train_tokenizer


def numbered(rows: int) -> list[tuple[str, str]]:
    """Pairs of different lengths; the source begins with its row's number."""
    drawn = random.Random(rows)
    return [
        (f"{row} " + "a " * drawn.randint(1, 9) + "b", "c " * drawn.randint(1, 9) + "d")
        for row in range(rows)
    ]


PAIRS = numbered(240)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def tokenizer():
    words = [side for pair in PAIRS for side in pair]
    return train_tokenizer(words, kind="word", vocab_size=999, show_progress=False)


def parquet_folder(folder: Path, files: int, pairs=PAIRS) -> Path:
    """The rows in the Hub's layout, in so many files."""
    (folder / "data").mkdir(parents=True)
    size = -(-len(pairs) // files)
    for number in range(files):
        part = pairs[number * size : (number + 1) * size]
        rows = [{"translation": {"de": source, "en": target}} for source, target in part]
        name = f"train-{number:05}-of-{files:05}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), folder / "data" / name)
    return folder


def make_stream(folder: Path, kind: str, pairs=PAIRS) -> Stream:
    columns = ("source", "target")
    if kind.isdigit():
        splits = load_dataset(str(parquet_folder(folder / kind, int(kind), pairs)), streaming=True)
        return Stream.of(splits["train"], ("de", "en"), "train")
    if kind == "parallel":
        paths = (folder / "a.src", folder / "a.tgt")
        for path, side in zip(paths, zip(*pairs, strict=True), strict=True):
            path.write_text("".join(f"{line}\n" for line in side))
        return Stream.of(paths, columns, "train")
    path = folder / f"a.{kind}"
    rows = [{"source": source, "target": target} for source, target in pairs]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    return Stream.of(path, columns, "train")


KINDS = ("tsv", "jsonl", "parquet", "parallel", "1", "3", "4")


@pytest.mark.parametrize("kind", KINDS)
def test_shares_are_disjoint_and_together_the_whole(tmp_path, kind):
    stream = make_stream(tmp_path, kind)
    assert [tuple(record) for record in stream.records()] == PAIRS
    for shares in (1, 2, 3, 4, 7):
        for epoch in (0, 1):
            parts = [
                [tuple(record) for record in stream.share(number, shares, 5, epoch)]
                for number in range(shares)
            ]
            assert sorted(itertools.chain(*parts)) == sorted(PAIRS)
            assert min(map(len, parts)) > 0


def test_files_come_in_another_order_in_each_pass(tmp_path):
    stream = make_stream(tmp_path, "4")
    orders = [[record[0] for record in stream.share(0, 1, 5, epoch)] for epoch in range(6)]
    assert len({tuple(order) for order in orders}) > 1


def pair_stream(stream: Stream, tokenizer, buffer=1000, **options) -> PairStream:
    encoder = PairEncoder(tokenizer, max_source_length=None, max_target_length=None)
    if "batch_size" not in options:
        options = {"max_tokens": 120, **options}
    return PairStream(stream, encoder, None, buffer=buffer, **options)


def texts(tokenizer, batch) -> list[tuple[str, str]]:
    return [
        tuple(
            tokenizer.decode(row[side], skip_special_tokens=True)
            for side in ("input_ids", "labels")
        )
        for row in batch
    ]


def one_pass(batches, tokenizer, rows: int) -> list[list[tuple[str, str]]]:
    """The next batches, as texts, until they hold so many rows."""
    taken: list[list[tuple[str, str]]] = []
    while sum(map(len, taken)) < rows:
        taken.append(texts(tokenizer, next(batches)))
    assert sum(map(len, taken)) == rows
    return taken


@pytest.mark.parametrize("buffer", [1000, 50, 7])
@pytest.mark.parametrize("options", [{"max_tokens": 120}, {"batch_size": 6}])
def test_each_pass_has_every_row_once_in_batches_within_the_budget(
    tmp_path, tokenizer, options, buffer
):
    stream = pair_stream(make_stream(tmp_path, "tsv"), tokenizer, buffer, **options)
    batches, passes = iter(stream), []
    for _ in range(3):
        passes.append(one_pass(batches, tokenizer, 240))
        assert sorted(itertools.chain(*passes[-1])) == sorted(PAIRS)
        for batch in passes[-1]:
            longest = [max(len(row[side].split()) + 1 for row in batch) for side in (0, 1)]
            assert len(batch) * sum(longest) <= options.get("max_tokens", 10**9)
            assert len(batch) <= options.get("batch_size", 10**9)
    company = [{frozenset(batch) for batch in batches if len(batch) > 1} for batches in passes]
    assert len(company[0] & company[1]) < 0.3 * len(company[0])
    assert len(company[1] & company[2]) < 0.3 * len(company[1])
    again = iter(pair_stream(make_stream(tmp_path, "tsv"), tokenizer, buffer, **options))
    assert one_pass(again, tokenizer, 240) == passes[0]
    other = iter(pair_stream(make_stream(tmp_path, "tsv"), tokenizer, buffer, seed=1, **options))
    assert one_pass(other, tokenizer, 240) != passes[0]


def test_rows_of_a_buffer_are_batched_together_and_no_others(tmp_path, tokenizer):
    batches = iter(pair_stream(make_stream(tmp_path, "tsv"), tokenizer, buffer=60))
    for start in range(0, 240, 60):
        chunk = itertools.chain(*one_pass(batches, tokenizer, 60))
        assert sorted(chunk) == sorted(PAIRS[start : start + 60])


def test_what_is_no_pair_or_held_out_or_too_long_is_not_fed(tmp_path, tokenizer):
    odd = [("", "d"), ("b", " \u3000"), ("17  a b", "c"), ("a\0 b", "d\0"), ("a " * 50, "d")]
    stream = make_stream(tmp_path, "tsv", [*PAIRS[:20], *odd])
    held_out = frozenset({text_key("17 a  b"), text_key(PAIRS[3][0])})
    fed = pair_stream(stream, tokenizer, held_out=held_out, max_tokens=60)
    fed.encoder = PairEncoder(tokenizer, max_source_length=30, max_target_length=30)
    rows = itertools.chain(*one_pass(iter(fed), tokenizer, 20))
    assert sorted(rows) == sorted([*PAIRS[:3], *PAIRS[4:20], ("a b", "d")])


def first(batches):
    return batches


@pytest.mark.parametrize("kind", ["tsv", "1", "4"])
def test_b50_processes_and_their_workers_never_share_a_row(tmp_path, tokenizer, kind):
    """2 processes with 2 workers each: 60 rows for each of the four, in one buffer."""
    stream = make_stream(tmp_path, kind)
    taken: list[list[tuple[str, str]]] = []
    for rank in range(2):
        loader = DataLoader(
            pair_stream(stream, tokenizer, batch_size=6, num_replicas=2, rank=rank),
            batch_size=None,
            collate_fn=first,
            num_workers=2,
        )
        batches = iter(loader)
        taken += [texts(tokenizer, batch) for batch in itertools.islice(batches, 20)]
        del batches
    assert sorted(itertools.chain(*taken)) == sorted(PAIRS)


def test_too_few_rows_for_all_are_an_error_and_no_endless_search(tmp_path, tokenizer):
    stream = make_stream(tmp_path, "tsv", PAIRS[:3])
    fed = pair_stream(stream, tokenizer, num_replicas=4, rank=3)
    with pytest.raises(ValueError, match=r"a\.tsv: no pairs for share 4 of 4; start fewer"):
        next(iter(fed))
    empty = tmp_path / "empty.tsv"
    empty.write_text("")
    with pytest.raises(ValueError, match=r"empty\.tsv: no pairs"):
        Stream.of(empty, ("source", "target"), "train").front(None)
    with pytest.raises(FileNotFoundError, match=r"gone\.tsv: no such file, given for the train"):
        Stream.of(tmp_path / "gone.tsv", ("source", "target"), "train")


def test_a_damaged_row_stops_with_its_place(tmp_path, tokenizer):
    stream = make_stream(tmp_path, "tsv")
    with Path(stream.source[0]).open("a") as file:
        file.write("only one column\n")
    batches = iter(pair_stream(stream, tokenizer, buffer=60))
    one_pass(batches, tokenizer, 180)
    with pytest.raises(ValueError, match=r"a\.tsv, line 241: 1 of 2 columns"):
        list(batches)


def test_the_front_is_the_first_rows_and_known_again(tmp_path):
    stream = make_stream(tmp_path, "4")
    front = stream.front(70)
    assert list(zip(front["de"], front["en"], strict=True)) == PAIRS[:70]
    assert stream.front(70)._fingerprint == front._fingerprint
    assert stream.front(71)._fingerprint != front._fingerprint
    assert len(stream.front(None)) == 240
    (tmp_path / "shifted").mkdir()
    shifted = [(f"{source} {target[0]}", target[1:]) for source, target in PAIRS]
    other = make_stream(tmp_path / "shifted", "4", shifted)
    assert other.front(70)._fingerprint != front._fingerprint


# The whole command


RECIPE = {
    "threads": 1,
    "model": TINIEST,
    "tokenizer": {"kind": "word", "vocab_size": 400},
    "data": {
        "train_file": "pairs.tsv",
        "max_tokens": 240,
        "max_source_length": 60,
        "max_target_length": 60,
        "streaming": True,
        "streaming_sample": 100,
        "streaming_buffer": 50,
    },
    "training": {
        "max_steps": 20,
        "learning_rate": 0.01,
        "eval_strategy": "steps",
        "eval_steps": 10,
        "save_strategy": "steps",
        "save_steps": 10,
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


def watch(prepared) -> list[list[tuple[str, str]]]:
    """Makes a run remember what it is fed."""
    fed, collator = [], prepared.trainer.data_collator

    def remember(features):
        fed.append(texts(prepared.trainer.processing_class, features))
        return collator(features)

    prepared.trainer.data_collator = remember
    return fed


def test_a_file_is_streamed_beyond_its_front_and_without_what_is_held_out(recipe):
    said: list[str] = []
    prepared = prepare(recipe("training.max_steps=40"), said.append)
    plan = prepared.plan()
    assert "90 pairs; the front of a stream; 10 held out for other splits" in plan
    assert "updates:      40\n" in plan
    assert "50 rows at a time are shuffled and batched together" in plan
    assert "no epochs of exact length; resuming" in plan
    assert "need not be exact to the bit" in plan
    assert "training tokenizer on 90 pairs" in said
    vocabulary = prepared.trainer.processing_class.get_vocab()
    assert {"0", "99"} & vocabulary.keys()
    assert not {"100", "239"} & vocabulary.keys()

    fed = watch(prepared)
    scores = prepared.run()
    assert prepared.trainer.state.global_step == 40
    assert "train_samples" not in scores
    assert scores["test_samples"] == len(prepared.sets["test"]) == 5
    held_out = {
        row["source"].split()[0] for split in ("validation", "test") for row in prepared.sets[split]
    }
    assert len(held_out) == 10
    numbers = [source.split()[0] for batch in fed for source, _ in batch]
    assert not held_out & set(numbers)
    # The sample's rows have known numbers, all others are <unk>, which decoding leaves out.
    first_pass = numbers[:230]
    counts = Counter(number for number in first_pass if number.isdigit())
    assert counts.keys() == {str(n) for n in range(100)} - held_out
    assert set(counts.values()) == {1}
    assert len(numbers) > 230
    assert (
        max(len(b) * sum(max(len(r[s].split()) + 1 for r in b) for s in (0, 1)) for b in fed) <= 240
    )


def test_a_stream_is_resumed_where_it_stopped(recipe):
    run_recipe(recipe())
    whole = load_file("outputs/tiny/model.safetensors")
    Path("outputs/tiny/all_results.json").unlink()
    for path in Path("outputs/tiny/checkpoint-20").iterdir():
        path.unlink()
    prepared = prepare(recipe("training.resume_from_checkpoint=true"))
    assert prepared.checkpoint == "outputs/tiny/checkpoint-10"
    prepared.run()
    resumed = load_file("outputs/tiny/model.safetensors")
    assert all(torch.equal(resumed[name], weight) for name, weight in whole.items())


@pytest.mark.parametrize("with_splits", [False, True])
def test_a_data_set_is_streamed(recipe, tmp_path, with_splits):
    folder = parquet_folder(tmp_path / "opus", 3)
    if with_splits:
        for split in ("validation", "test"):
            rows = [{"translation": {"de": s, "en": t}} for s, t in PAIRS[:7]]
            name = folder / "data" / f"{split}-00000-of-00001.parquet"
            pq.write_table(pa.Table.from_pylist(rows), name)
    prepared = prepare(
        recipe(
            *("data.train_file=null", f"data.dataset_name={folder}"),
            *("data.source_column=de", "data.target_column=en", "training.max_steps=12"),
        )
    )
    assert len(prepared.sets["train"]) == (100 if with_splits else 90)
    assert len(prepared.sets["test"]) == (7 if with_splits else 5)
    fed = watch(prepared)
    prepared.run()
    assert len({target for batch in fed for _, target in batch}) > 5
    before = sorted((tmp_path / "cache").rglob("*.arrow"))
    overrides = ("data.train_file=null", f"data.dataset_name={folder}", "data.source_column=de")
    prepare(recipe(*overrides, "data.target_column=en", "training.output_dir=again"))
    assert sorted((tmp_path / "cache").rglob("*.arrow")) == before


def test_bpe_dropout_in_a_stream(recipe):
    prepared = prepare(
        recipe("tokenizer.kind=bpe", "tokenizer.bpe_dropout=0.5", "tokenizer.vocab_size=60")
    )
    batches = iter(prepared.trainer.train_dataset)
    tokenizer = prepared.trainer.processing_class
    cuts: dict[str, set[tuple[int, ...]]] = {}
    for batch in itertools.islice(batches, 60):
        for row, (source, _) in zip(batch, texts(tokenizer, batch), strict=True):
            cuts.setdefault(source, set()).add(tuple(row["input_ids"]))
        longest = [max(len(row[side]) for row in batch) for side in batch[0]]
        assert len(batch) * sum(longest) <= 240
    assert sum(len(ways) > 1 for ways in cuts.values()) > 100


def run_on_a_rank(folder: str, workers: int) -> dict:
    """A streamed run; the sources that this process was fed."""
    os.chdir(folder)
    datasets.config.HF_DATASETS_CACHE = Path(folder, "cache")
    experiment.draw_curves = lambda *_, **__: None
    prepared = prepare(load_recipe("tiny.yaml", [f"training.dataloader_num_workers={workers}"]))
    fed: list[list[int]] = []
    step = prepared.trainer.training_step

    def remember(model, inputs, *more):
        fed.extend(inputs["input_ids"].tolist())
        return step(model, inputs, *more)

    prepared.trainer.training_step = remember
    prepared.run()
    tokenizer = prepared.trainer.processing_class
    return {
        "fed": tokenizer.batch_decode(fed, skip_special_tokens=True),
        "held out": [row["source"] for s in ("validation", "test") for row in prepared.sets[s]],
        "weights": {n: w.clone() for n, w in prepared.trainer.model.state_dict().items()},
        "left over": len(multiprocessing.active_children()),
    }


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_b50_two_processes_feed_different_rows(recipe, launch, tmp_path, workers):  # noqa: F811
    # 400 words hold every number; the first pass is 115 rows for each process.
    recipe("data.streaming_sample=1000")
    document = {**RECIPE, "data": {**RECIPE["data"], "streaming_sample": 1000}}
    document["training"] = {**RECIPE["training"], "max_steps": 6, "save_strategy": "no"}
    Path("tiny.yaml").write_text(yaml.safe_dump(document))
    ranks = launch(run_on_a_rank, str(tmp_path), workers, world_size=2)
    for name, weight in ranks[0]["weights"].items():
        assert torch.equal(weight, ranks[1]["weights"][name])
    fed = Counter(source for rank in ranks for source in rank["fed"])
    assert len(fed) > 50
    assert set(fed.values()) == {1}
    assert not fed.keys() & set(ranks[0]["held out"])
    assert [rank["left over"] for rank in ranks] == [0, 0]


def test_a_bad_row_behind_the_front_ends_training_with_one_line(monkeypatch, tmp_path):
    """Not with a traceback, after days."""
    monkeypatch.chdir(tmp_path)
    rows = [f"{number} 1 2\t2 1 {number}\n" for number in range(60)]
    Path("pairs.tsv").write_text("".join(rows) + "one column only\n")
    Path("held.tsv").write_text("".join(rows[:4]))
    document = {
        "threads": 1,
        "model": {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8}
        | {"decoder_ffn_dim": 8, "encoder_attention_heads": 1, "decoder_attention_heads": 1},
        "tokenizer": {"kind": "character", "vocab_size": 40},
        "data": {"streaming": True, "streaming_sample": 20, "streaming_buffer": 10}
        | {"train_file": "pairs.tsv", "validation_file": "held.tsv", "test_file": "held.tsv"},
        "training": {"max_steps": 50, "per_device_train_batch_size": 4, "disable_tqdm": True},
    }
    Path("stream.yaml").write_text(yaml.safe_dump(document))
    prepared = prepare(load_recipe("stream.yaml"))
    with pytest.raises(BadStreamError, match=r"pairs\.tsv, line 61: 1 of 2 columns"):
        prepared.run()
    assert issubclass(BadStreamError, OSError)  # which train.py tells in one line
