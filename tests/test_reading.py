"""Parquet files and data sets of the Hub's layout; test_data reads all other formats."""

import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from modeling_tinytfm.data import SplitReport, load_pairs
from modeling_tinytfm.reading import dataset_records, load_splits


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def parquet(path: Path, rows: list[dict] | pa.Table, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
    pq.write_table(table, path, **options)
    return path


def read(file, **columns) -> list[tuple[str, str]]:
    rows = load_pairs({"test": file}, **columns)[0]["test"]
    return list(zip(rows["source"], rows["target"], strict=True))


ODD = [
    ("a", "b"),
    ("two\nlines\r\n", "tab\there"),
    ("\ufeffmark", "👩‍👩‍👧 é e\u0301 \u2028"),
    ('"', "</s>, NA"),
] * 700  # more than one batch of reading
PLAIN = [{"id": n, "source": source, "target": target} for n, (source, target) in enumerate(ODD)]
NESTED = [{"translation": {"de": source, "en": target}, "id": 7} for source, target in ODD]


@pytest.mark.parametrize("options", [{}, {"row_group_size": 9, "compression": "zstd"}])
def test_any_text_comes_back_from_parquet(tmp_path, options):
    assert read(parquet(tmp_path / "a.parquet", PLAIN, **options)) == ODD
    assert read(
        parquet(tmp_path / "A.PARQUET", PLAIN), source_column="target", target_column="source"
    ) == [(target, source) for source, target in ODD]


@pytest.mark.parametrize("prefix", ["", "translation."])
@pytest.mark.parametrize("kind", ["parquet", "jsonl", "data set"])
def test_languages_are_found_below_translation(tmp_path, kind, prefix):
    columns = {"source_column": f"{prefix}de", "target_column": f"{prefix}en"}
    if kind == "data set":
        rows = datasets.Dataset.from_list(NESTED).flatten()
    elif kind == "parquet":
        rows = parquet(tmp_path / "a.parquet", NESTED)
    else:
        rows = tmp_path / "a.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in NESTED))
    assert read(rows, **columns) == ODD


def test_parquet_columns_may_have_any_text_type_and_nulls_are_empty_sides(tmp_path):
    table = pa.table(
        {
            "source": pa.array(["a", "b", None], pa.large_string()),
            "target": pa.array(["x", "x", "y"]).dictionary_encode(),
        }
    )
    splits, report = load_pairs({"test": parquet(tmp_path / "a.parquet", table)})
    assert splits["test"].select_columns(["source", "target"]).to_list() == [
        {"source": "a", "target": "x"},
        {"source": "b", "target": "x"},
    ]
    assert report["test"] == SplitReport(pairs=2, empty_side=1)


def test_parquet_groups_stay_together(tmp_path):
    rows = [{"source": f"s{n}", "target": "t", "group": n // 10} for n in range(400)]
    path = parquet(tmp_path / "a.parquet", rows)
    splits, _ = load_pairs({"train": path}, group_column="group")
    groups = [{int(source[1:]) // 10 for source in split["source"]} for split in splits.values()]
    assert sum(map(len, groups)) == len(set.union(*groups)) == 40


def damaged(path: Path) -> Path:
    parquet(path, [{"source": f"source {n}", "target": f"target {n}"} for n in range(5_000)])
    content = bytearray(path.read_bytes())
    content[100:20_000] = b"\xff" * 19_900
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda path: parquet(path, NESTED),
            ["'source'", "it has translation.de, translation.en, id"],
        ),
        (
            lambda path: parquet(path, [{"source": 1.5, "target": "a"}]),
            ["row 1", "'source'", "not text but float"],
        ),
        (lambda path: path.write_bytes(b"source\ttarget\n"), ["not valid Parquet"]),
        (lambda path: path.write_bytes(b""), ["not valid Parquet"]),
        (damaged, ["not valid Parquet"]),
        (lambda path: parquet(path, pa.table({"source": [], "target": []})), ["no pairs"]),
        (
            lambda path: parquet(path, pa.table({"source": [b"a", b"\xff"], "target": ["b", "c"]})),
            ["row 1", "'source'", "bytes"],
        ),
    ],
)
def test_unusable_parquet_is_refused_by_name(tmp_path, make, expected):
    path = tmp_path / "a.parquet"
    make(path)
    with pytest.raises(ValueError, match=r"a\.parquet") as error:
        load_pairs({"train": path})
    for part in expected:
        assert part in str(error.value)
    assert len(str(error.value).splitlines()) == 1


# Data sets of the Hub, as folders of the same layout


def hub_folder(folder: Path, split_files: dict[str, str], rows=NESTED[:40]) -> Path:
    """Parquet files as the Hub has them: data/train-00000-of-00001.parquet."""
    for split, pattern in split_files.items():
        if split == "train":
            half = len(rows) // 2
            parquet(folder / pattern.format(0, 2), rows[:half])
            parquet(folder / pattern.format(1, 2), rows[half:])
        else:
            parquet(folder / pattern.format(0, 1), rows[:3])
    return folder


LAYOUT = {
    split: f"data/{split}-{{:05}}-of-{{:05}}.parquet" for split in ("train", "validation", "test")
}


def test_a_folder_as_on_the_hub_is_a_data_set(tmp_path):
    splits = load_splits(str(hub_folder(tmp_path / "opus", LAYOUT)))
    texts, report = load_pairs(splits, source_column="de", target_column="en")
    assert [tuple(row.values()) for row in texts["train"]] == ODD[:40]
    assert [(row["source"], row["target"]) for row in texts["test"]] == ODD[:3]
    assert report["train"].pairs == 40
    with pytest.raises(ValueError, match=r"train split: no column 'fr'.*translation\.de, transl"):
        load_pairs(splits, source_column="fr", target_column="en")


@pytest.mark.parametrize("name", ["valid", "val", "dev"])
def test_a_validation_split_may_have_its_usual_names(tmp_path, name):
    for split in ("train", name, "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"en": "a", "de": "b"}\n' * 20)
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        + "".join(f"  - split: {s}\n    path: {s}.jsonl\n" for s in ("train", name, "test"))
        + "---\n"
    )
    splits = load_splits(str(tmp_path))
    assert list(splits) == ["train", "validation", "test"]
    assert splits["train"].column_names == ["en", "de"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("ending", "mark"), [("csv", ","), ("tsv", "\t")])
def test_cells_of_a_folder_are_read_as_they_are_written(tmp_path, ending, mark, streaming):
    odd = ["0001", "NA", "null", "None", "nan", "1.50", "True", "1e3", "2020-03-01", "ÄÖ", "-0"]
    if ending == "tsv":
        odd += ['"a', 'b" c']
    rows = [(text, text[::-1]) for text in odd]
    folder = tmp_path / "words"
    folder.mkdir()
    text = "".join(f"{mark.join(row)}\n" for row in [("source", "target"), *rows])
    for split in ("train", "test"):
        (folder / f"{split}.{ending}").write_text(text)
    splits = load_splits(str(folder), streaming=streaming)
    for records in splits.values():
        assert list(dataset_records(records, ("source", "target"), "words")) == [*map(list, rows)]


FEATURES = "".join(f"  - name: {name}\n    dtype: string\n" for name in ("source", "target"))


@pytest.mark.parametrize("card", ["", f"---\ndataset_info:\n  features:\n{FEATURES}---\n"])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("ending", "mark"), [("csv", ","), ("tsv", "\t")])
def test_no_cell_of_a_folder_shifts_the_others(tmp_path, ending, mark, streaming, card):
    def read(name: str, *lines: str) -> list[list[str]]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "README.md").write_text(card)
        text = "".join(f"{line.replace('|', mark)}\n" for line in ("source|target", *lines))
        (folder / f"train.{ending}").write_text(text)
        splits = load_splits(str(folder), streaming=streaming)
        return list(dataset_records(splits["train"], ("source", "target"), "the train split"))

    assert read("blank", "Hello|Hallo|", "a|b|") == [["Hello", "Hallo"], ["a", "b"]]
    place = "the train split" if streaming else "data.dataset_name=.*"
    for name, lines in {"first": ("a|b", "c|d"), "all": ("a|b|c", "d|e|f")}.items():
        with pytest.raises(ValueError, match=f"^{place}: a row has more cells than the header: is"):
            read(name, "Hello| world|Hallo Welt", *lines)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "2020-03-01",
            r"datetime: 2020-03-01 00:00:00; store it as text, or name its \.jsonl file by "
            r"data\.train_file, which reads dates as they are written$",
        ),
        (1.5, "float: 1.5; store it as text, which stands in quotes in JSON$"),
        ([{"a": "b"}], "list: "),
    ],
)
def test_what_is_no_text_is_shown_with_a_way_out(tmp_path, value, message):
    row = {"source": "day", "target": value}
    file = tmp_path / "days" / "train.jsonl"
    file.parent.mkdir()
    file.write_text(json.dumps(row) + "\n")
    (split,) = load_splits(str(file.parent)).values()
    with pytest.raises(ValueError, match=f"row 1: 'target' is not text but {message}"):
        list(dataset_records(split, ("source", "target"), "the train split"))
    if isinstance(value, str):
        assert read(file) == [("day", value)]


def test_a_column_that_stands_twice_is_refused(tmp_path):
    table = pa.Table.from_arrays([["a"], ["b"], ["c"]], names=["source", "source", "target"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: 2 columns named 'source'"):
        load_pairs({"test": tmp_path / "a.parquet"})


@pytest.fixture
def configured(tmp_path) -> Path:
    """Two configurations, as WMT has them, named by the YAML in front of the card."""
    feature = "  - name: translation\n    dtype:\n      translation:\n        languages: [de, en]\n"
    infos = [f"- config_name: {name}\n  features:\n{feature}" for name in ("de-en", "cs-en")]
    card = f"---\ndataset_info:\n{''.join(infos)}configs:\n"
    folder = tmp_path / "wmt"
    for name in ("de-en", "cs-en"):
        layout = {split: path.replace("data", name) for split, path in LAYOUT.items()}
        hub_folder(folder, layout, [{"translation": row["translation"]} for row in NESTED[:40]])
        card += f"- config_name: {name}\n  data_files:\n"
        card += "".join(f"  - split: {s}\n    path: {name}/{s}-*\n" for s in LAYOUT)
    (folder / "README.md").write_text(card + "---\n")
    return folder


def test_a_data_set_may_have_configurations(configured):
    splits = load_splits(str(configured), "de-en")
    assert {split: len(rows) for split, rows in splits.items()} == {
        "train": 40,
        "validation": 3,
        "test": 3,
    }
    streamed = load_splits(str(configured), "de-en", streaming=True)
    assert isinstance(streamed["train"].features["translation"], datasets.Translation)
    columns = {"source_column": "de", "target_column": "en"}
    assert read(splits["train"], **columns) == ODD[:40]
    for rows in streamed.values():
        records = list(dataset_records(rows, ("de", "en"), "a name"))
        assert records == list(map(list, ODD[: len(records)]))
    for name in (None, "fr-en"):
        with pytest.raises(ValueError, match=r"dataset_name=.*wmt: .*'de-en', 'cs-en'\].*config"):
            load_splits(str(configured), name)


def test_data_sets_that_cannot_be_read_say_so_in_one_line(tmp_path):
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "script.py").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train.jsonl").write_text('{"a": 1}\n{"a"')
    (tmp_path / "untrained").mkdir()
    (tmp_path / "untrained" / "test.jsonl").write_text('{"en": "a", "de": "b"}\n')
    cases = {
        "script": (ValueError, "script.*Parquet, CSV or JSONL files first"),
        "empty": (OSError, "empty.* any data files"),
        "broken": (ValueError, "JSON parse error"),
        "untrained": (ValueError, "has no split train; it has test"),
    }
    for name, (kind, message) in cases.items():
        with pytest.raises(kind, match=f"data.dataset_name=.*{name}.*{message}") as error:
            load_splits(str(tmp_path / name))
        assert "\n" not in str(error.value)
    for name in ("wmt/wmt14", str(tmp_path / "nowhere")):
        with pytest.raises(OSError, match=rf"dataset_name={name}: .*nor is there a folder of that"):
            load_splits(name)


def test_b50_a_data_set_is_read_once(tmp_path):
    folder = hub_folder(tmp_path / "opus", LAYOUT)

    def files():
        load_pairs(load_splits(str(folder)), source_column="de", target_column="en")
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.arrow")}

    first = files()
    assert first
    assert files() == first
    path = parquet(tmp_path / "a.parquet", PLAIN)
    read(path)
    first = set((tmp_path / "cache").rglob("*.arrow"))
    assert read(parquet(tmp_path / "elsewhere" / "b.parquet", PLAIN)) == ODD
    assert set((tmp_path / "cache").rglob("*.arrow")) == first
