"""Inference for people: lines of text in, lines of text out, in the same order.

Lines are sorted by length and put into batches of a token budget, so that little is padded; the
longest come first, so that memory that does not suffice shows at once.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

BATCH_TOKENS = 4096
# Section 6.1 of the paper: outputs are at most this much longer than the input.
EXTRA_TOKENS = 50


class Hypothesis(NamedTuple):
    """An output and its score: its log-probability / length ** length_penalty."""

    text: str
    score: float


@dataclass(frozen=True)
class TokenScores:
    """How well a model predicts given targets token by token; sums, so that parts can be added."""

    loss: float = 0.0  # nats
    correct: int = 0
    tokens: int = 0

    def __add__(self, other: "TokenScores") -> "TokenScores":
        return TokenScores(
            self.loss + other.loss, self.correct + other.correct, self.tokens + other.tokens
        )


def translate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    lines: Iterable[str],
    *,
    max_source_length: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    show_progress: bool | None = None,
    **generation: Any,
) -> list[str]:
    """The best output for every line.

    Args:
        model: A sequence-to-sequence model.
        tokenizer: Its tokenizer.
        lines: Source texts. A line without any token gives an empty output.
        max_source_length: Longer lines are cut to so many tokens, `</s>` included, with a warning;
            the model's `max_position_embeddings` if None.
        batch_tokens: Source tokens of a batch, padding included. A single longer line is a batch.
        show_progress: Whether to draw a progress bar; only on a terminal if None.
        **generation: Arguments of `model.generate`, such as `num_beams` or `max_new_tokens`. What
            is not given is taken from the model's `generation_config`; an output may be 50 tokens
            longer than the input (section 6.1) where neither sets a length.

    Returns:
        One text for each line.

    Raises:
        ValueError: If `lines` is one string, or a setting is unusable.
    """
    hypotheses = translate_n_best(
        model,
        tokenizer,
        lines,
        1,
        with_scores=False,
        max_source_length=max_source_length,
        batch_tokens=batch_tokens,
        show_progress=show_progress,
        **generation,
    )
    return [best.text for (best,) in hypotheses]


def translate_n_best(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    lines: Iterable[str],
    n_best: int,
    *,
    with_scores: bool = True,
    max_source_length: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    show_progress: bool | None = None,
    **generation: Any,
) -> list[list[Hypothesis]]:
    """The `n_best` outputs for every line, best first, with their scores.

    Args:
        model: See `translate`, as for all others not named here.
        tokenizer: See there.
        lines: See there.
        n_best: Number of outputs for each line; the beam is made at least as wide.
        with_scores: Whether scores are wanted; without, they are NaN.
        max_source_length: See there.
        batch_tokens: See there.
        show_progress: See there.
        **generation: See there.

    Returns:
        For each line a list of `n_best` hypotheses.

    Raises:
        ValueError: As in `translate`.
    """
    if isinstance(lines, str):
        raise ValueError("lines is one string: pass a list of lines")
    if n_best < 1:
        raise ValueError(f"n_best={n_best} is not at least 1")
    if n_best > 1 and not generation.get("do_sample"):
        num_beams = generation.get("num_beams") or model.generation_config.num_beams or 1
        generation["num_beams"] = max(num_beams, n_best)
    limit = max_source_length or getattr(model.config, "max_position_embeddings", None)
    sources = encode(tokenizer, lines, limit)
    outputs: list[list[Hypothesis]] = [[Hypothesis("", 0.0)] * n_best for _ in sources]
    # A line without a token, and so nothing but </s>, has nothing to translate.
    rows = [row for row, ids in enumerate(sources) if len(ids) > 1]
    progress = tqdm(
        total=len(rows),
        desc="Translating",
        unit="line",
        disable=None if show_progress is None else not show_progress,
    )
    with progress:
        for batch in budget_batches([len(sources[row]) for row in rows], batch_tokens):
            chosen = [rows[number] for number in batch]
            hypotheses = generate_batch(
                model,
                tokenizer,
                [sources[row] for row in chosen],
                n_best=n_best,
                with_scores=with_scores,
                **generation,
            )
            for row, best in zip(chosen, hypotheses, strict=True):
                outputs[row] = best
            progress.update(len(chosen))
    return outputs


def encode(
    tokenizer: PreTrainedTokenizerBase, lines: Iterable[str], max_source_length: int | None
) -> list[list[int]]:
    """Token ids of lines, cut to `max_source_length` before their end token, with a warning."""
    lines = list(lines)
    if not lines:
        return []
    sources = tokenizer(lines)["input_ids"]
    if max_source_length is None:
        return sources
    too_long = [row for row, ids in enumerate(sources) if len(ids) > max_source_length]
    if too_long:
        logger.warning(
            "%d of %d lines are longer than %d tokens and were cut (the first is line %d)",
            len(too_long),
            len(sources),
            max_source_length,
            too_long[0] + 1,
        )
    for row in too_long:
        sources[row] = [*sources[row][: max_source_length - 1], sources[row][-1]]
    return sources


def budget_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Row numbers in batches of rows * longest <= batch_tokens, the longest rows first."""
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens={batch_tokens} is not at least 1")
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def pad(rows: Sequence[Sequence[int]], value: int, device: torch.device) -> Tensor:
    """Rows of ids as one tensor [B, L], padded on the right."""
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)
    return padded.to(device)


def source_tensors(
    sources: Sequence[Sequence[int]], pad_token_id: int, device: torch.device
) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` [B, L] of rows of ids."""
    lengths = torch.tensor([len(ids) for ids in sources], device=device)
    input_ids = pad(sources, pad_token_id, device)
    mask = torch.arange(input_ids.shape[1], device=device) < lengths[:, None]
    return {"input_ids": input_ids, "attention_mask": mask.long()}


@torch.inference_mode()
def generate_batch(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[Sequence[int]],
    *,
    n_best: int = 1,
    with_scores: bool = False,
    **generation: Any,
) -> list[list[Hypothesis]]:
    """Generates for one batch of token ids, in evaluation mode: see `translate_n_best`."""
    inputs = source_tensors(sources, int(tokenizer.pad_token_id), model.device)
    config = model.generation_config
    lengths = ("max_new_tokens", "max_length")
    if not any(generation.get(name) or getattr(config, name, None) for name in lengths):
        generation["max_new_tokens"] = inputs["input_ids"].shape[1] + EXTRA_TOKENS
    was_training = model.training
    model.eval()
    try:
        outputs = model.generate(
            **inputs,
            num_return_sequences=n_best,
            return_dict_in_generate=True,
            output_scores=with_scores,
            **generation,
        )
        texts = tokenizer.batch_decode(outputs.sequences, skip_special_tokens=True)
        scores = [float("nan")] * len(texts)
        if with_scores and getattr(outputs, "sequences_scores", None) is not None:
            scores = outputs.sequences_scores.tolist()
        elif with_scores:
            penalty = generation.get("length_penalty", config.length_penalty)
            scores = _score_sequences(model, inputs, outputs.sequences, penalty)
    finally:
        model.train(was_training)
    hypotheses = [Hypothesis(*pair) for pair in zip(texts, scores, strict=True)]
    return [hypotheses[i : i + n_best] for i in range(0, len(hypotheses), n_best)]


def _score_sequences(
    model: PreTrainedModel, inputs: dict[str, Tensor], sequences: Tensor, penalty: float | None
) -> list[float]:
    """Scores of generated `sequences` [B * n, T] as beam search would have scored them."""
    copies = len(sequences) // len(inputs["input_ids"])
    repeated = {name: value.repeat_interleave(copies, 0) for name, value in inputs.items()}
    logits = model(**repeated, decoder_input_ids=sequences[:, :-1], use_cache=False).logits
    targets = sequences[:, 1:]
    log_probabilities = -F.cross_entropy(logits.transpose(1, 2).float(), targets, reduction="none")
    eos = model.generation_config.eos_token_id
    ends = torch.isin(targets, torch.as_tensor(eos, device=targets.device))
    real = (ends.cumsum(1) - ends.long()) == 0  # up to the first end token, and with it
    total = (log_probabilities * real).sum(1)
    return (total / real.sum(1) ** (1.0 if penalty is None else penalty)).tolist()


@torch.inference_mode()
def score_targets(
    model: PreTrainedModel,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    batch_tokens: int = BATCH_TOKENS,
) -> TokenScores:
    """Teacher-forced scores of given targets, unsmoothed and per token, in evaluation mode.

    Args:
        model: A sequence-to-sequence model.
        sources: Token ids of each source.
        targets: Token ids of each target, end token included.
        batch_tokens: Source and target tokens of a batch, padding included.

    Returns:
        Sums over all target tokens.
    """
    total = TokenScores()
    was_training = model.training
    model.eval()
    try:
        lengths = [
            len(source) + len(target) for source, target in zip(sources, targets, strict=True)
        ]
        for batch in budget_batches(lengths, batch_tokens):
            inputs = source_tensors(
                [sources[row] for row in batch], int(model.config.pad_token_id), model.device
            )
            labels = pad([targets[row] for row in batch], -100, model.device)
            logits = model(**inputs, labels=labels).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
            correct = (logits.argmax(-1) == labels).sum()
            total += TokenScores(loss.item(), int(correct), int((labels != -100).sum()))
    finally:
        model.train(was_training)
    return total
