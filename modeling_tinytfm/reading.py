"""Rows of files and data sets, as texts: every format, one by one, with errors that say where.

A record is a list of texts, one for each column that is asked for. A column may stand in the nested
column `translation`, as in the data sets of WMT: `de` then finds `translation.de`.
"""

import csv
import datetime
import gzip
import json
import os
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, zip_longest
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import (
    Dataset,
    DatasetDict,
    IterableDataset,
    IterableDatasetDict,
    load_dataset,
    load_dataset_builder,
)
from datasets.exceptions import DatasetGenerationError
from datasets.packaged_modules.csv.csv import CsvConfig
from pandas.errors import ParserWarning

SOURCE_COLUMN, TARGET_COLUMN = "source", "target"
NESTED_COLUMN = "translation"
_MOST_COLUMNS = 1_000
_TOO_WIDE = (
    "a row has more cells than the header: is there a separator too many, or are quotes missing?"
)
SPLIT_NAMES = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}


def excerpt(text: str) -> str:
    """As much of a text as fits into a message, in quotes."""
    return repr(text if len(text) <= 60 else text[:60] + "…")


def find_column(column: str, names: Iterable[str], where: str) -> str:
    """The full name of a column: it stands there, or below `translation`.

    Raises:
        ValueError: If it does not, with the names of those that do.
    """
    names = list(names)
    for name in (column, f"{NESTED_COLUMN}.{column}"):
        if names.count(name) > 1:
            raise ValueError(f"{where}: {names.count(name)} columns named {name!r}")
        if name in names:
            return name
    raise ValueError(f"{where}: no column {column!r}; it has {', '.join(names)[:200]}")


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with a name for each field of its nested columns: translation.de."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        nested = value.items() if isinstance(value, Mapping) else ()
        flat.update({f"{name}.{key}": part for key, part in nested})
        if not isinstance(value, Mapping):
            flat[name] = value
    return flat


def _record_texts(record: Mapping[str, Any], columns: Sequence[str], where: str) -> list[str]:
    """The texts of some columns of one row, nested or not."""
    row = record if all(column in record for column in columns) else _flat(record)
    return _texts([row[find_column(column, row, where)] for column in columns], columns, where)


def _texts(values: Sequence[Any], columns: Sequence[str], where: str) -> list[str]:
    """Source and target, texts or whole numbers, and whatever stands for the group, or nothing."""
    source, target, *group = ("" if value is None else value for value in values)
    pair = []
    for column, value in zip(columns, (source, target), strict=False):
        if isinstance(value, bool | int):
            value = json.dumps(value)
        if not isinstance(value, str):
            raise ValueError(f"{where}: {column!r} is not text but {_no_text(value)}")
        pair.append(value)
    return [*pair, *map(_group_text, group)]


def _no_text(value: Any) -> str:
    """What stands where a text should, and how it becomes one."""
    found = f"{type(value).__name__}: {excerpt(str(value))[1:-1]}"
    if isinstance(value, float):
        return f"{found}; store it as text, which stands in quotes in JSON"
    if isinstance(value, datetime.date | datetime.time):
        return (
            f"{found}; store it as text, or name its .jsonl file by data.train_file, which reads "
            "dates as they are written"
        )
    return found


def _group_text(value: Any) -> str:
    """One text for each group; a blank one where there is no value (a blank cell, null, NaN)."""
    if isinstance(value, str):
        return value
    return "" if value != value else json.dumps(value, default=str)


def _numbered_lines(path: str, keep_ends: bool = False) -> Iterator[tuple[int, str]]:
    r"""Lines from 1. Only \n, or \r\n, ends a line; a byte order mark in front is skipped."""
    number = 0
    try:
        with gzip.open(path) if path.lower().endswith(".gz") else open(path, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.endswith(b"\n") and not keep_ends:
                    line = line[:-2] if line.endswith(b"\r\n") else line[:-1]
                yield number, line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}, line {number}: not UTF-8: byte 0x{error.object[error.start]:02x} at offset "
            f"{error.start} of the line; convert the file to UTF-8"
        ) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}, line {number + 1}: damaged gzip file: {error}") from None


def _tsv_rows(path: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in _numbered_lines(path):
        yield number, line.split("\t")


# The csv module ends a row at any CR, and before Python 3.11 refuses NUL. NUL and a CR without LF
# are text here, so they pass through it as lone surrogates, which decoded UTF-8 cannot contain.
_HIDE = {0x00: 0xDC00, 0x0D: 0xDC0D}
_SHOW = {hidden: character for character, hidden in _HIDE.items()}


def _csv_rows(path: str) -> Iterator[tuple[int, list[str]]]:
    # The limit is the csv module's, for the whole process; its 131,072 refuses long documents.
    csv.field_size_limit(2**31 - 1)
    lines = (line.translate(_HIDE) for _, line in _numbered_lines(path, keep_ends=True))
    reader = csv.reader((line.replace("\udc0d\n", "\r\n") for line in lines), strict=True)
    number = 1
    try:
        for row in reader:
            yield number, [value.translate(_SHOW) for value in row]
            number = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}, line {number}: not valid CSV: {error}") from None


_WITHOUT_HEADER = (
    f"A .tsv file without a header is read with data.source_column={SOURCE_COLUMN} "
    f"data.target_column={TARGET_COLUMN} and a data.group_column, if any, of these"
)


def _table_records(
    path: str, rows: Iterator[tuple[int, list[str]]], columns: Sequence[str], has_header: bool
) -> Iterator[list[str]]:
    first = next(rows, None)
    if first is None:
        return
    names = [name.strip() for name in first[1]]
    missing = [column for column in columns if column not in names]
    own = (SOURCE_COLUMN, TARGET_COLUMN)
    width = len(names)
    if not missing:
        positions = [names.index(column) for column in columns]
        above = f"under a header of {width}"
        for column in columns:
            if names.count(column) > 1:
                raise ValueError(f"{path}, line 1: {names.count(column)} columns named {column!r}")
    elif not has_header and tuple(columns[:2]) == own and set(columns) == set(own):
        positions = [own.index(column) for column in columns]
        above = f"below a first line of {width}, which is no header"
        rows = chain([first], rows)
    else:
        raise ValueError(
            f"{path}, line 1: no column {missing[0]!r}; the line has {excerpt(', '.join(names))}"
            + ("" if has_header else f". {_WITHOUT_HEADER}")
        )
    for number, row in rows:
        if any(value.strip() for value in row[width:]):
            raise ValueError(
                f"{path}, line {number}: {len(row)} columns {above}: "
                f"{excerpt(row[0])}; is there a separator too many, or are quotes missing?"
            )
        if len(row) > max(positions):
            yield [row[position] for position in positions]
        elif not any(value.strip() for value in row):
            yield [""] * len(positions)
        else:
            raise ValueError(
                f"{path}, line {number}: {len(row)} of {max(positions) + 1} columns found: "
                f"{excerpt(row[0])}; is a separator missing?"
            )


_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can escape half a pair; UTF-8 cannot write it


def _jsonl_records(path: str, columns: Sequence[str]) -> Iterator[list[str]]:
    for number, line in _numbered_lines(path):
        if not line.strip():
            yield [""] * len(columns)
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not valid JSON: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: an object is needed, not {excerpt(line)}")
        texts = _record_texts(record, columns, f"{path}, line {number}")
        for column, text in zip(columns, texts, strict=True):
            if _SURROGATE.search(text):
                raise ValueError(f"{path}, line {number}: {column!r} has half a surrogate pair")
        yield texts


def _parquet_records(path: str, columns: Sequence[str]) -> Iterator[list[str]]:
    number = 0
    try:
        file = pq.ParquetFile(path)
        names: list[str] = []
        for entry in file.schema_arrow:
            parts = entry.type if pa.types.is_struct(entry.type) else ()
            names += [f"{entry.name}.{part.name}" for part in parts] or [entry.name]
        found = [find_column(column, names, path) for column in columns]
        for batch in file.iter_batches(batch_size=1_000, columns=list(dict.fromkeys(found))):
            table = pa.Table.from_batches([batch]).flatten()
            for row in zip(*(table[name].to_pylist() for name in found), strict=True):
                number += 1
                yield _texts(row, columns, f"{path}, row {number}")
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        where = f"{path}, after row {number}" if number else path
        raise ValueError(f"{where}: not valid Parquet: {one_line(error)}") from None


def _parallel_records(source_path: str, target_path: str) -> Iterator[list[str]]:
    source_lines = target_lines = 0
    for source, target in zip_longest(_numbered_lines(source_path), _numbered_lines(target_path)):
        if source is not None:
            source_lines, source_text = source
        if target is not None:
            target_lines, target_text = target
        if source is not None and target is not None:
            yield [source_text, target_text]
    if source_lines != target_lines:
        raise ValueError(
            f"{source_path} has {source_lines:,} lines and {target_path} has {target_lines:,}: "
            "line n of one must translate line n of the other"
        )


def dataset_records(
    dataset: Dataset | IterableDataset, columns: Sequence[str], name: str
) -> Iterator[list[str]]:
    """The texts of a data set's rows.

    Args:
        dataset: Has the columns, nested or not.
        columns: Of the source, the target and possibly the group.
        name: Of the data set, for messages.

    Raises:
        ValueError: If a column is missing, or does not hold texts.
    """
    if isinstance(dataset, IterableDataset):
        # Row by row, it would share itself out among a loader's workers; by batches it does not.
        streamed = (
            dict(zip(batch, values, strict=True))
            for batch in _whole_rows(dataset.iter(batch_size=1_000), name)
            for values in zip(*batch.values(), strict=True)
        )
        for number, record in enumerate(streamed, start=1):
            yield _record_texts(record, columns, f"{name}, row {number}")
        return
    found = [find_column(column, dataset.column_names, name) for column in columns]
    batches = dataset.with_format(None).select_columns(list(dict.fromkeys(found)))
    rows = chain.from_iterable(
        zip(*(batch[column] for column in found), strict=True)
        for batch in batches.iter(batch_size=1_000)
    )
    for number, row in enumerate(rows, start=1):
        yield _texts(row, columns, f"{name}, row {number}")


def file_records(paths: tuple[str, ...], columns: Sequence[str]) -> Iterator[list[str]]:
    """The texts of the rows of one file, or of two parallel text files.

    Args:
        paths: One or two; the ending of a name tells the format.
        columns: Of the source, the target and possibly the group.

    Raises:
        ValueError: If a file cannot be read as rows, with the line and what was found there.
    """
    if len(paths) == 2:
        if len(columns) > 2:
            raise ValueError(
                f"group_column={columns[2]!r} needs a file with named columns; "
                f"{paths[0]} and {paths[1]} are plain text"
            )
        return _parallel_records(*paths)
    path = paths[0]
    kind = path.lower().removesuffix(".gz").rpartition(".")[2]
    if kind == "tsv":
        return _table_records(path, _tsv_rows(path), columns, has_header=False)
    if kind == "csv":
        return _table_records(path, _csv_rows(path), columns, has_header=True)
    if kind == "jsonl":
        return _jsonl_records(path, columns)
    if kind == "parquet":
        return _parquet_records(path, columns)
    raise ValueError(
        f"{path}: the name of a file of rows must end in .tsv, .csv or .jsonl (or with .gz after "
        "it) or in .parquet; plain text is read by task=language_model, from .txt, and by "
        "task=seq2seq, from two parallel files, *_source_file and *_target_file"
    )


def load_splits(
    name: str, config_name: str | None = None, *, streaming: bool = False
) -> dict[str, Dataset] | dict[str, IterableDataset]:
    """The splits of a data set of the Hub, or of a local folder, under the names used here.

    Args:
        name: On the Hub, or a folder's path.
        config_name: The configuration, where it has several.
        streaming: Whether rows are read when they are needed, and nothing is kept.

    Returns:
        "train" and, if there are any, "validation" (also where it is called valid, val or dev) and
        "test". Without `streaming` the fields of a nested column are columns: `translation.de`.

    Raises:
        ValueError: If it has no training split or no such configuration, or cannot be read.
        OSError: If it cannot be found.
    """
    label = f"data.dataset_name={name}"
    splits: DatasetDict | IterableDatasetDict
    try:
        config = load_dataset_builder(name, config_name).config
        with _no_lost_cells():
            splits = load_dataset(name, config_name, streaming=streaming, **_as_written(config))
    except DatasetGenerationError as error:
        cause = error.__cause__ or error
        problem = _TOO_WIDE if isinstance(cause, ParserWarning) else one_line(cause)
        raise ValueError(f"{label}: {problem}") from error
    except OSError as error:
        folder = "" if os.path.exists(name) else "; nor is there a folder of that name here"
        raise OSError(f"{label}: {one_line(error)}{folder}") from error
    except RuntimeError as error:
        raise ValueError(
            f"{label}: {one_line(error)}. A data set that needs code of its own must be made into "
            "Parquet, CSV or JSONL files first; a folder of these can be named here"
        ) from error
    except ValueError as error:
        # What follows shows a call in Python.
        problem = one_line(error).partition(" Example of usage")[0]
        hint = "; write data.dataset_config_name" if "onfig" in problem else ""
        raise ValueError(f"{label}: {problem}{hint}") from error
    found = {
        split: splits[choice]
        for split, choices in SPLIT_NAMES.items()
        for choice in reversed(choices)  # where a set has several, the first one counts
        if choice in splits
    }
    if "train" not in found:
        raise ValueError(f"{label} has no split train; it has {', '.join(splits)}")
    if streaming:
        return found
    return {split: dataset.flatten() for split, dataset in found.items()}


def _as_written(config: Any) -> dict[str, Any]:
    """What keeps cells of CSV files texts: pandas makes 7 of 007, and nothing of NA."""
    if not isinstance(config, CsvConfig):
        return {}
    # Else a first row with a cell too many makes an index of the first column.
    options: dict[str, Any] = {} if config.index_col is not None else {"index_col": False}
    if config.features is not None:
        return options
    options |= {"converters": dict.fromkeys(range(_MOST_COLUMNS), str), "keep_default_na": False}
    return options | ({"quoting": csv.QUOTE_NONE} if config.sep == "\t" else {})


@contextmanager
def _no_lost_cells() -> Iterator[None]:
    """Makes an error of what pandas only warns of, when it drops cells that have no column."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Length of header", ParserWarning)
        yield


def _whole_rows(batches: Iterator[dict[str, Any]], name: str) -> Iterator[dict[str, Any]]:
    """The same batches, each of them read without the loss of a cell."""
    while True:
        try:
            with _no_lost_cells():
                batch = next(batches, None)
        except ParserWarning:
            raise ValueError(f"{name}: {_TOO_WIDE}") from None
        if batch is None:
            return
        yield batch


def one_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split())[:300]
