"""Which source token, or word, each one of an output came from, in the Pharaoh format.

A pair is source position, hyphen, target position, both counted from 0: `0-1 1-0` are two words
that changed places.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

AlignmentUnit = Literal["token", "word"]
Alignment = tuple[tuple[int, int], ...]  # (source, target) positions


def check_unit(unit: str | None) -> None:
    """Raises ValueError unless positions can count `unit`."""
    choices = get_args(AlignmentUnit)
    if unit is not None and unit not in choices:
        raise ValueError(f"alignments={unit!r} is unknown: use {' or '.join(choices)}")


def pharaoh(alignment: Alignment) -> str:
    """Pairs as text."""
    return " ".join(f"{source}-{target}" for source, target in alignment)


def align(
    attention: Tensor,
    tokenizer: Any,
    source: Sequence[int],
    target: Sequence[int],
    unit: AlignmentUnit = "token",
) -> Alignment:
    """The source position that each target position looked at most.

    Args:
        attention: Weights [target, source].
        tokenizer: The tokenizer of both.
        source: Token ids; its special tokens, such as `</s>`, are looked at by no position.
        target: Token ids, likewise.
        unit: What positions count: tokens (`<unk>` is one of them), or the words that white space
            separates in the texts. A word is looked at by the sum over its tokens, and looks where
            its tokens do on average.

    Returns:
        A pair for each target token, or word, in their order.
    """
    columns = _positions(tokenizer, source, unit, with_unknown=True)
    # The text of an output leaves its unknown tokens out.
    rows = _positions(tokenizer, target, unit, with_unknown=unit == "token")
    if not rows or not columns:
        return ()
    real = attention[list(rows)][:, list(columns)]
    by_source = real.new_zeros(len(real), max(columns.values()) + 1)
    by_source.index_add_(1, torch.tensor(list(columns.values())), real)
    looks = real.new_zeros(max(rows.values()) + 1, by_source.shape[1])
    looks.index_add_(0, torch.tensor(list(rows.values())), by_source)
    best = looks.argmax(dim=1).tolist()
    return tuple((best[position], position) for position in sorted(set(rows.values())))


def _positions(
    tokenizer: Any, ids: Sequence[int], unit: AlignmentUnit, with_unknown: bool
) -> dict[int, int]:
    """The position of each token: {its place in `ids`: what number of its kind it is}."""
    passed_over = set(tokenizer.all_special_ids)
    if with_unknown:
        passed_over.discard(tokenizer.unk_token_id)
    places = [place for place, token in enumerate(ids) if token not in passed_over]
    if unit == "token":
        return {place: number for number, place in enumerate(places)}
    positions, before = {}, ""
    for count, place in enumerate(places, start=1):
        # A word may begin within a token, so the words of the text so far tell.
        text = tokenizer.decode([ids[earlier] for earlier in places[:count]]).rstrip()
        if len(text) > len(before):  # and not white space alone
            positions[place] = len(text.split()) - 1
        before = text
    return positions
