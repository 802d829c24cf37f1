"""Batches of pairs: by a budget of tokens, or of a fixed size; the same ones after a resume.

Batches are planned once from the lengths: rows are put into buckets of similar length, and an epoch
only reorders rows inside the buckets. The number of batches therefore never changes.

Padding a batch needs no code of ours: `transformers.DataCollatorForSeq2Seq` does it.
"""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

BATCHES_PER_BUCKET = 4  # fewer leave less padding, more leave more chance to an epoch's shuffle


def _batches(rows: np.ndarray, longest: np.ndarray, max_tokens: int) -> np.ndarray:
    """How many batches `rows` rows of `longest` padded tokens each need."""
    # Where a long source and a long target of different rows pass the budget only together,
    # batches of one row keep it.
    return -(-rows // np.maximum(1, max_tokens // longest))


def _length_buckets(lengths: np.ndarray, max_tokens: int) -> np.ndarray:
    """Groups rows of similar lengths, a k-d tree over the two lengths.

    The rows are parted again and again, by source or by target length, where it saves most batches
    and padded tokens, as long as both parts fill `BATCHES_PER_BUCKET` batches.

    Args:
        lengths: [rows, 2], tokens of source and target.
        max_tokens: padded tokens of a batch.

    Returns:
        [rows], number of each row's bucket, from 0.
    """
    # Rows of equal lengths are one cell; the tree is over cells, far fewer than rows.
    width = int(lengths[:, 1].max()) + 1
    codes, cell_of_row, counts = np.unique(
        lengths @ [width, 1], return_inverse=True, return_counts=True
    )
    cells = np.stack([codes // width, codes % width], axis=1)

    def batches_and_cost(rows: np.ndarray, longest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        batches = _batches(rows, longest, max_tokens)
        return batches, batches * max_tokens + rows * longest

    bucket_of_cell = np.zeros(len(cells), dtype=np.int64)
    buckets = 0
    pending = [np.arange(len(cells))]
    while pending:
        members = pending.pop()
        rows = counts[members].sum()
        _, least = batches_and_cost(rows, cells[members].max(axis=0).sum())
        parts = None
        for side in (0, 1):
            order = members[np.argsort(cells[members, side], kind="stable")]
            left_rows = np.cumsum(counts[order])[:-1]
            left_longest = np.maximum.accumulate(cells[order]).sum(axis=1)[:-1]
            right_longest = np.maximum.accumulate(cells[order][::-1]).sum(axis=1)[-2::-1]
            left, left_cost = batches_and_cost(left_rows, left_longest)
            right, right_cost = batches_and_cost(rows - left_rows, right_longest)
            enough = np.minimum(left, right) >= BATCHES_PER_BUCKET
            cost = np.where(enough, left_cost + right_cost, least)
            if len(cost) and cost.min() < least:
                cut = int(cost.argmin())
                least = cost[cut]
                parts = [order[: cut + 1], order[cut + 1 :]]
        if parts:
            pending += parts
        else:
            bucket_of_cell[members] = buckets
            buckets += 1
    return bucket_of_cell[cell_of_row]


def _even_sizes(rows: int, batches: int) -> list[int]:
    return [(rows + batch) // batches for batch in reversed(range(batches))]


def _split_largest(sizes: list[int]) -> None:
    """Makes two batches of the largest one."""
    largest = int(np.argmax(sizes))
    sizes[largest : largest + 1] = _even_sizes(sizes[largest], 2)


def _budget_sizes(
    rows: np.ndarray, longest: np.ndarray, max_tokens: int, num_replicas: int, min_batches: int
) -> list[int]:
    """Rows of each batch, bucket after bucket, a multiple of `num_replicas` of them."""
    sizes: list[int] = []
    for bucket_rows, batches in zip(rows, _batches(rows, longest, max_tokens), strict=True):
        sizes += _even_sizes(int(bucket_rows), int(batches))
    while len(sizes) % num_replicas or len(sizes) < min_batches:
        if max(sizes) == 1:
            raise ValueError(
                f"max_tokens={max_tokens}: every batch holds one row, and {len(sizes):,} rows do "
                f"not divide by {num_replicas} processes; raise max_tokens"
            )
        _split_largest(sizes)
    return sizes


def _fixed_sizes(rows: int, batch_size: int, num_replicas: int) -> list[int]:
    """Rows of each batch, step after step, `num_replicas` batches a step."""
    step_rows = batch_size * num_replicas
    steps = [step_rows] * (rows // step_rows)
    rest = rows % step_rows
    if rest >= num_replicas:
        steps.append(rest)
    elif rest and batch_size > 1:
        # Too few for every process: the step before gives what is missing.
        steps[-1:] = [step_rows - (num_replicas - rest), num_replicas]
    elif rest:
        steps[-1] += rest
    return [size for step in steps for size in _even_sizes(step, num_replicas)]


class PairBatchSampler(Sampler[list[int]]):
    """Batches of row numbers for one process, by a budget of tokens or of a fixed size.

    With `max_tokens`, a batch has rows of similar lengths and never more than
    rows * (longest source + longest target) = max_tokens. With `batch_size`, rows are drawn
    regardless of length, and a step of n processes takes the same rows as n steps of one process or
    one step of n times the size.

    Over all processes each row occurs once an epoch, and every process has the same number of
    batches in every epoch. Where that does not come out even, batches are split. The one exception
    is batch_size=1, whose last step takes the rest in batches of two. Fixed-size steps equal those
    of other numbers of processes up to the last two of an epoch, which share their rows if the rest
    is less than one row for each process.

    Order depends on `seed` and epoch only. It is its own distributed sampler: no other sharding may
    be put around it.

    Args:
        source_lengths: [rows], tokens of each source as the model sees it.
        target_lengths: [rows], tokens of each target.
        max_tokens: padded tokens of one process's batch, source and target together.
        batch_size: rows of one process's batch; exactly one of the two is given.
        seed: of the shuffle, not negative.
        num_replicas: number of processes.
        rank: number of this process, from 0.
        min_batches: how many to make at least, over all processes, by splitting the largest.

    Raises:
        ValueError: if neither or both of max_tokens and batch_size are given, if one row exceeds
            max_tokens, or if there are fewer rows than processes or min_batches.
    """

    def __init__(
        self,
        source_lengths: np.ndarray,
        target_lengths: np.ndarray,
        *,
        max_tokens: int | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
        min_batches: int = 0,
    ) -> None:
        if len(source_lengths) != len(target_lengths):
            raise ValueError(
                f"{len(source_lengths)} source_lengths and {len(target_lengths)} target_lengths"
            )
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank={rank}: it must be from 0 to {num_replicas - 1}")
        rows = len(source_lengths)
        if rows < num_replicas:
            raise ValueError(
                f"{rows} rows for {num_replicas} processes: each needs at least one row; "
                "start fewer processes or give more data"
            )
        if rows < min_batches:
            raise ValueError(f"{rows} rows do not make min_batches={min_batches}")
        if (max_tokens is None) == (batch_size is None):
            raise ValueError(
                f"max_tokens={max_tokens} and batch_size={batch_size}: give exactly one of them"
            )
        self.seed, self.num_replicas, self.rank = seed, num_replicas, rank
        self.epoch = 0
        self._skipped = 0
        self._by_length = max_tokens is not None
        self._lengths = np.stack([source_lengths, target_lengths], axis=1).astype(np.int64)
        if max_tokens is not None:
            row = int(self._lengths.sum(axis=1).argmax())
            source, target = self._lengths[row].tolist()
            if source + target > max_tokens:
                raise ValueError(
                    f"max_tokens={max_tokens} cannot hold the longest row: {source} source and "
                    f"{target} target tokens; raise max_tokens, or lower max_source_length or "
                    "max_target_length"
                )
            self._buckets = _length_buckets(self._lengths, max_tokens)
            bucket_rows = np.bincount(self._buckets)
            by_bucket = self._lengths[np.argsort(self._buckets, kind="stable")]
            starts = np.cumsum(bucket_rows) - bucket_rows
            longest = np.maximum.reduceat(by_bucket, starts)
            # Noise of 1 shuffles equal lengths; half the range changes most of a row's company.
            self._noise = np.maximum(1, (longest - np.minimum.reduceat(by_bucket, starts)) / 2)
            sizes = _budget_sizes(
                bucket_rows, longest.sum(axis=1), max_tokens, num_replicas, min_batches
            )
        elif batch_size is not None and batch_size >= 1:
            sizes = _fixed_sizes(rows, batch_size, num_replicas)
            while len(sizes) < min_batches or len(sizes) % num_replicas:
                _split_largest(sizes)
        else:
            raise ValueError(f"batch_size={batch_size}: it must be at least 1")
        self._ends = np.cumsum(np.array(sizes, dtype=np.int64))
        self._starts = self._ends - sizes

    def __len__(self) -> int:
        """Batches of one process in an epoch, whatever was skipped."""
        return len(self._starts) // self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next iterations."""
        self.epoch = epoch

    def skip(self, batches: int) -> None:
        """Lets the next iteration, and only that one, begin after so many batches of its epoch."""
        if not 0 <= batches <= len(self):
            raise ValueError(f"batches={batches}: an epoch has {len(self)}")
        self._skipped = batches

    def __iter__(self) -> Iterator[list[int]]:
        """Row numbers of this process's batches in the current epoch."""
        generator = np.random.default_rng([self.seed, self.epoch])
        order = self._order(generator)
        steps = self._steps(order, generator)[self._skipped :, self.rank].tolist()
        self._skipped = 0
        return (order[self._starts[batch] : self._ends[batch]].tolist() for batch in steps)

    @property
    def tokens(self) -> int:
        """Real tokens of an epoch, source and target, over all processes."""
        return int(self._lengths.sum())

    def padding_waste(self) -> float:
        """Share of padding among the tokens of all batches of the current epoch, 0 to 1."""
        order = self._order(np.random.default_rng([self.seed, self.epoch]))
        return 1 - int(self._lengths.sum()) / int(self._padded_tokens(order).sum())

    def _order(self, generator: np.random.Generator) -> np.ndarray:
        """[rows], row numbers in the order in which batches are cut from them."""
        rows = len(self._lengths)
        if not self._by_length:
            return generator.permutation(rows)
        # In each bucket by one of the two lengths, drawn anew for the epoch, and noise.
        side = generator.integers(2, size=len(self._noise))[self._buckets]
        length = np.where(side, self._lengths[:, 1], self._lengths[:, 0])
        noisy = length + generator.random(rows) * self._noise[self._buckets, side]
        return np.lexsort((noisy, self._buckets))

    def _padded_tokens(self, order: np.ndarray) -> np.ndarray:
        """[batches], rows * (longest source + longest target)."""
        longest = np.maximum.reduceat(self._lengths[order], self._starts).sum(axis=1)
        return longest * (self._ends - self._starts)

    def _steps(self, order: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """[steps, num_replicas], batch numbers; batches of one step have similar sizes."""
        batches = np.arange(len(self._starts))
        if not self._by_length:
            return batches.reshape(-1, self.num_replicas)
        shuffled = generator.permutation(batches)
        by_size = shuffled[np.argsort(self._padded_tokens(order)[shuffled], kind="stable")]
        return generator.permutation(by_size.reshape(-1, self.num_replicas))
