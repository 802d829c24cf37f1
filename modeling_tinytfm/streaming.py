"""Training pairs that are read while training runs, for data that do not fit on the disk.

The front of the stream is read into memory as ordinary pairs: from it come the vocabulary, the
held-out splits and the plan. Training reads the whole stream, again and again: `buffer` rows at a
time, which are encoded, shuffled and batched among themselves as any training set is. No row is fed
twice in a pass, whatever the number of processes and of their loaders' workers: each of n consumers
of the stream takes every n-th file, or, where n does not divide their number, every n-th row.
"""

import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, IterableDataset

from .batching import PairBatchSampler
from .data import text_key
from .encoding import PairEncoder, TokenRows
from .reading import dataset_records, file_records
from .translation import progress_bar

_LINES = 1_000  # that are encoded at once

StreamSource: TypeAlias = tuple[str, ...] | IterableDataset


class Stream:
    """Pairs of texts, read one by one, as often as wanted.

    Args:
        source: One file, two parallel text files, or a data set that is streamed.
        columns: Names of the columns of source and target.
        name: What messages call it.
    """

    def __init__(self, source: StreamSource, columns: Sequence[str], name: str):
        self.source, self.columns, self.name = source, tuple(columns), name

    @classmethod
    def of(cls, source: Any, columns: Sequence[str], split: str) -> "Stream":
        """The stream of what a recipe names for a split.

        Raises:
            FileNotFoundError: If it is a file that does not exist.
        """
        if isinstance(source, IterableDataset):
            return cls(source, columns, f"the {split} split")
        paths = tuple(map(os.fspath, source if isinstance(source, tuple) else (source,)))
        for path in paths:
            if not os.path.exists(path):
                raise FileNotFoundError(f"{path}: no such file, given for the {split} split")
        return cls(paths, columns, " and ".join(paths))

    def records(self) -> Iterator[list[str]]:
        """All rows in their order, source and target."""
        if isinstance(self.source, IterableDataset):
            return dataset_records(self.source, self.columns, self.name)
        return file_records(self.source, self.columns)

    def share(self, number: int, shares: int, seed: int, epoch: int) -> Iterator[list[str]]:
        """The rows of one of so many shares, in the order in which a pass reads them.

        Files of a data set come in another order each pass; a single file is read from its front.
        """
        if not isinstance(self.source, IterableDataset):
            return itertools.islice(self.records(), number, None, shares)
        files = self.source.num_shards
        order = np.random.default_rng([seed, epoch]).permutation(files).tolist()
        if files % shares == 0:
            order, number, shares = order[number::shares], 0, 1
        rows = itertools.chain.from_iterable(
            dataset_records(
                self.source.shard(files, file), self.columns, f"{self.name}, file {file + 1}"
            )
            for file in order
        )
        return itertools.islice(rows, number, None, shares)

    def front(self, rows: int | None) -> Dataset:
        """The first rows, or all, in memory, with the stream's own names of the columns.

        Equal texts give equal fingerprints, so what is made of them is found in the cache.
        """
        content = hashlib.blake2b(digest_size=16)
        records, tables = itertools.islice(self.records(), rows), []
        with progress_bar("Reading the front of the stream", rows, None) as progress:
            while batch := list(itertools.islice(records, 10_000)):
                sides = dict(zip(self.columns, map(list, zip(*batch, strict=True)), strict=True))
                tables.append(pa.table(sides))
                for text in itertools.chain.from_iterable(batch):
                    content.update(len(text).to_bytes(8, "big") + text.encode())
                progress.update(len(batch))
        if not tables:
            raise ValueError(f"{self.name}: no pairs, it is empty or a header only")
        return Dataset(pa.concat_tables(tables), fingerprint=content.hexdigest())


class BadStreamError(OSError, ValueError):
    """What is wrong with a stream's rows, found while it trains; a person can mend it."""


class PairStream(torch.utils.data.IterableDataset):
    """Batches of encoded pairs, without end: after the last row of the stream its first follows.

    Args:
        stream: What is read.
        encoder: Encodes the rows; those that do not fit are left out.
        sample: Encoded rows of the stream's front, from which averages are taken.
        max_tokens: See `batching.PairBatchSampler`, as for the following.
        batch_size: See there.
        seed: See there.
        num_replicas: See there.
        rank: See there.
        buffer: Rows that a consumer reads, shuffles and batches together.
        held_out: `data.text_key` of sources that other splits have taken out of the stream.
    """

    def __init__(
        self,
        stream: Stream,
        encoder: PairEncoder,
        sample: Dataset,
        *,
        max_tokens: int | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
        buffer: int,
        held_out: frozenset[int] = frozenset(),
    ):
        self.stream, self.encoder, self.sample = stream, encoder, sample
        self.max_tokens, self.batch_size, self.seed = max_tokens, batch_size, seed
        self.num_replicas, self.rank = num_replicas, rank
        self.buffer, self.held_out = buffer, held_out

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        """Batches of this process, or of one of its loader's workers.

        Raises:
            BadStreamError: If a pass over the stream finds no row for it, or a row is no pair.
        """
        try:
            yield from self._batches()
        except ValueError as error:
            raise BadStreamError(str(error)) from error

    def _batches(self) -> Iterator[list[dict[str, Any]]]:
        worker = torch.utils.data.get_worker_info()
        workers, number = (1, 0) if worker is None else (worker.num_workers, worker.id)
        shares = self.num_replicas * workers
        number += self.rank * workers
        for epoch in itertools.count():
            rows = self._rows(number, shares, epoch)
            generator = np.random.default_rng([self.seed, epoch, number])
            # Later passes cut the stream elsewhere, so that rows come into other company.
            size = int(generator.integers(1, self.buffer + 1)) if epoch else self.buffer
            is_empty = True
            while buffered := list(itertools.islice(rows, size)):
                size = self.buffer
                encoded = TokenRows(_columns(buffered), self.encoder)
                if not len(encoded):
                    continue
                is_empty = False
                batches = PairBatchSampler(
                    *encoded.lengths.T,
                    max_tokens=self.max_tokens,
                    batch_size=self.batch_size,
                    seed=int(generator.integers(2**31)),
                )
                yield from ([encoded[row] for row in batch] for batch in batches)
            if is_empty:
                raise ValueError(
                    f"{self.stream.name}: no pairs for share {number + 1} of {shares}; start fewer "
                    "processes, or fewer workers (training.dataloader_num_workers)"
                )

    def _rows(self, number: int, shares: int, epoch: int) -> Iterator[tuple[str, str]]:
        """A share of a pass: the pairs that have two sides and are not held out."""
        for record in self.stream.share(number, shares, self.seed, epoch):
            source, target = (text.replace("\0", "") for text in record)
            is_pair = source.strip() and target.strip()
            if is_pair and not (self.held_out and text_key(source) in self.held_out):
                yield source, target


def _columns(pairs: list[tuple[str, str]]) -> Iterator[tuple[list[str], list[str]]]:
    """Sources and targets of so many pairs at once as are encoded together."""
    for start in range(0, len(pairs), _LINES):
        sources, targets = zip(*pairs[start : start + _LINES], strict=True)
        yield list(sources), list(targets)
