"""Training pairs that are encoded while training runs: at random, or from a stream.

`data.encode_pairs` encodes once, for all epochs, into a file. This is for what changes.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from .tokenization import with_bpe_dropout


class PairEncoder:
    """Turns pairs of texts into token ids, with BPE dropout if wanted.

    A pair that the dropout makes too long is encoded without it, as it is in evaluation: what fits
    there is never lost, and what is fed keeps its limits.

    Args:
        tokenizer: A fast tokenizer that ends every line with its eos token.
        max_source_length: In tokens, `</s>` included; None for no limit.
        max_target_length: The same for targets.
        max_tokens: For both together; None for no limit.
        bpe_dropout: Probability of leaving out each merge.

    Raises:
        ValueError: If dropout is wanted of a tokenizer that is not of kind `bpe`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        max_source_length: int | None,
        max_target_length: int | None,
        max_tokens: int | None = None,
        bpe_dropout: float = 0.0,
    ):
        self.tokenizers = [tokenizer]
        if bpe_dropout:
            self.tokenizers.insert(0, with_bpe_dropout(tokenizer, bpe_dropout))
        unlimited = np.iinfo(np.int64).max
        self.limits = np.array(
            [
                unlimited if limit is None else limit
                for limit in (max_source_length, max_target_length)
            ]
        )
        self.max_tokens = unlimited if max_tokens is None else max_tokens
        self.dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.int32

    def __call__(self, sources: list[str], targets: list[str]) -> list[list[list[int]]]:
        """Token ids of the source and the target of each pair that fits, in order."""
        encoded: dict[int, list[list[int]]] = {}
        waiting = list(range(len(sources)))
        for tokenizer in self.tokenizers:
            if waiting:
                texts, wanted = ([side[row] for row in waiting] for side in (sources, targets))
                source_ids = tokenizer(texts, verbose=False)["input_ids"]
                target_ids = tokenizer(text_target=wanted, verbose=False)["input_ids"]
                for row, *pair in zip(waiting, source_ids, target_ids, strict=True):
                    if self._fits([len(side) for side in pair]):
                        encoded[row] = pair
            waiting = [row for row in waiting if row not in encoded]
        return [encoded[row] for row in sorted(encoded)]

    def _fits(self, lengths: list[int]) -> bool:
        return bool((np.array(lengths) <= self.limits).all()) and sum(lengths) <= self.max_tokens


class TokenRows(Dataset):
    """Token ids of pairs, one after the other in one array.

    Lists of Python's numbers would take more than ten times the memory.

    Args:
        batches: Sources and targets of the pairs, batch by batch.
        encoder: Encodes them; pairs that do not fit are left out.

    Attributes:
        lengths: [rows, 2], tokens of source and target.
    """

    def __init__(self, batches: Iterable[tuple[list[str], list[str]]], encoder: PairEncoder):
        parts, lengths = [], []
        for sources, targets in batches:
            pairs = encoder(sources, targets)
            lengths += [[len(side) for side in pair] for pair in pairs]
            flat = [token for pair in pairs for side in pair for token in side]
            parts.append(np.array(flat, dtype=encoder.dtype))
        self.ids = np.concatenate([np.empty(0, encoder.dtype), *parts])
        self.lengths = np.array(lengths, dtype=np.int64).reshape(-1, 2)
        self.ends = self.lengths.sum(axis=1).cumsum()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Lists of ids, under `input_ids` and `labels`."""
        source, target = self.lengths[row].tolist()
        middle = int(self.ends[row]) - target
        return {
            "input_ids": self.ids[middle - source : middle].tolist(),
            "labels": self.ids[middle : middle + target].tolist(),
        }
