"""Training pairs that are cut into other sub-words each epoch: BPE dropout (arXiv:1910.13267).

Lengths change with every cut, so batches are planned anew each epoch: the budget of tokens holds
for what is fed. How many batches an epoch has therefore changes a little, from epoch to epoch and,
as no seed reaches the dropout, from run to run.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch.utils.data import Sampler

from .batching import PairBatchSampler
from .encoding import PairEncoder, TokenRows
from .translation import progress_bar

_LINES = 1_000  # that are encoded at once


class ResegmentedPairs(torch.utils.data.Dataset):
    """Pairs of texts; their token ids are those of the last `resegment`.

    Args:
        texts: Columns `source` and `target`; no pair is too long without dropout.
        encoder: Encodes them.
        show_progress: Whether there is a progress bar; None: if somebody watches.
    """

    def __init__(self, texts: Dataset, encoder: PairEncoder, show_progress: bool | None = None):
        self.texts = texts.select_columns(["source", "target"])
        self.encoder = encoder
        self.show_progress = show_progress
        self.rows = TokenRows([], encoder)

    def resegment(self, rows: np.ndarray) -> None:
        """Encodes some of the pairs anew; they are the rows 0, 1, ... from now on."""

        def batches() -> Iterator[tuple[list[str], list[str]]]:
            chosen = self.texts.select(rows)
            with progress_bar("Cutting into sub-words", len(rows), self.show_progress) as progress:
                for batch in chosen.iter(batch_size=_LINES):
                    yield batch["source"], batch["target"]
                    progress.update(len(batch["source"]))

        self.rows = TokenRows(batches(), self.encoder)

    def __len__(self) -> int:
        """Pairs of all processes, each of which has encoded its share of them."""
        return len(self.texts)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Token ids of one of the pairs that were encoded last."""
        return self.rows[row]


class ResegmentingSampler(Sampler[list[int]]):
    """Batches for one process of pairs that it encodes anew each epoch.

    Each epoch shares all pairs out among the processes, by chance but each pair once. A process
    encodes its own and plans its own batches; then all make as many as the one that needs most.

    Args:
        pairs: What `__iter__` numbers.
        max_tokens: See `batching.PairBatchSampler`, as for the following.
        batch_size: See there.
        seed: See there.
        num_replicas: See there.
        rank: See there.

    Raises:
        ValueError: See there; on all processes.
    """

    def __init__(
        self,
        pairs: ResegmentedPairs,
        *,
        max_tokens: int | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
    ):
        if len(pairs) < num_replicas:
            raise ValueError(
                f"{len(pairs)} rows for {num_replicas} processes: each needs at least one row; "
                "start fewer processes or give more data"
            )
        self.pairs = pairs
        self.options: dict[str, Any] = {
            "max_tokens": max_tokens,
            "batch_size": batch_size,
            "seed": seed,
        }
        self.num_replicas, self.rank = num_replicas, rank
        self.epoch = -1
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Encodes and plans an epoch, unless it is the one that is planned.

        All processes must call it together.

        Raises:
            ValueError: If a process has fewer pairs than another needs batches.
        """
        if epoch == self.epoch:
            return
        self.epoch = epoch
        shuffled = np.random.default_rng([self.options["seed"], epoch]).permutation(len(self.pairs))
        self.pairs.resegment(np.sort(shuffled[self.rank :: self.num_replicas]))
        plan = self._plan()
        batches = max(gather_object([len(plan)]))
        if batches > len(self.pairs) // self.num_replicas:
            name = "max_tokens" if self.options["batch_size"] is None else "batch_size"
            raise ValueError(
                f"{name}={self.options[name]}: every batch holds one row, and "
                f"{len(self.pairs):,} rows do not divide by {self.num_replicas} processes; "
                f"raise {name}"
            )
        self.plan = plan if len(plan) == batches else self._plan(batches)
        self.plan.set_epoch(epoch)

    def _plan(self, min_batches: int = 0) -> PairBatchSampler:
        lengths = self.pairs.rows.lengths
        return PairBatchSampler(*lengths.T, min_batches=min_batches, **self.options)

    def __len__(self) -> int:
        """Batches of one process in this epoch."""
        return len(self.plan)

    def __iter__(self) -> Iterator[list[int]]:
        """Row numbers of this process's batches in this epoch."""
        return iter(self.plan)

    @property
    def tokens(self) -> int:
        """Real tokens of this epoch, over all processes, as far as this one can tell."""
        return self.plan.tokens * self.num_replicas

    def padding_waste(self) -> float:
        """Share of padding among the tokens of this process's batches in this epoch, 0 to 1."""
        return self.plan.padding_waste()
