"""Inference for people: lines of text in, lines of text out, in the same order.

Lines are sorted by length and put into batches of a token budget, so that little is padded; the
longest come first, so that memory that does not suffice shows at once.
"""

import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

BATCH_TOKENS = 4096
# Section 6.1 of the paper: outputs are at most this much longer than the input.
EXTRA_TOKENS = 50
_SURROGATE = re.compile("[\ud800-\udfff]")  # of no use outside UTF-16; tokenizers refuse them
# Arguments of generate() that follow from those of the functions here.
_OWN_ARGUMENTS = ("num_return_sequences", "return_dict_in_generate", "output_scores")


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
        lines: Source texts. NUL characters are left out, as in training; a line without any token,
            or of white space alone, gives an empty output.
        max_source_length: Longer lines are cut to so many tokens, `</s>` included, with a warning;
            the model's `max_position_embeddings` if None.
        batch_tokens: Source tokens of a batch, padding included. A single longer line is a batch.
        show_progress: Whether to draw a progress bar; only on a terminal if None.
        **generation: Arguments of `model.generate`, such as `num_beams` or `max_new_tokens`. What
            is not given is taken from the model's `generation_config`; where neither sets a length,
            an output may be 50 tokens longer than the longest line (section 6.1).

    Returns:
        One text for each line.

    Raises:
        ValueError: If `lines` is one string or holds something else than strings, or a setting is
            unusable.
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
    limits = {name: generation.get(name) for name in ("num_beams", "max_new_tokens")}
    for name, value in {"n_best": n_best, "batch_tokens": batch_tokens, **limits}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} is not at least 1")
    for name in _OWN_ARGUMENTS:
        if name in generation:
            raise ValueError(f"{name}={generation[name]!r} cannot be set: n_best decides it")
    if n_best > 1 and not generation.get("do_sample"):
        num_beams = generation.get("num_beams") or model.generation_config.num_beams or 1
        generation["num_beams"] = max(num_beams, n_best)
    if max_source_length is None:
        max_source_length = _longest_input(model)
    sources = encode(tokenizer, lines, max_source_length)
    outputs: list[list[Hypothesis]] = [[Hypothesis("", 0.0)] * n_best for _ in sources]
    # A line without a token, and so nothing but </s>, has nothing to translate.
    rows = [row for row, ids in enumerate(sources) if len(ids) > 1]
    generation = with_output_limit(model, generation, max(map(len, sources), default=0))
    with progress_bar("Translating", len(rows), show_progress) as progress:
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


def _longest_input(model: PreTrainedModel) -> int | None:
    return getattr(model.config, "max_position_embeddings", None)


def encode(
    tokenizer: PreTrainedTokenizerBase, lines: Iterable[str], max_source_length: int | None
) -> list[list[int]]:
    """Token ids of lines, cut to `max_source_length` before their end token, with a warning.

    White space alone counts as no text, as in training: such a line is its end token.

    Raises:
        ValueError: If `lines` is one string or holds something else than strings, or if
            `max_source_length` is below 2.
    """
    if isinstance(lines, str):
        raise ValueError("lines is one string: pass a list of lines")
    if max_source_length is not None and max_source_length < 2:
        raise ValueError(
            f"max_source_length={max_source_length}: one token and </s> need at least 2"
        )
    texts = []
    for row, line in enumerate(lines):
        if not isinstance(line, str):
            raise ValueError(f"lines[{row}]={line!r} is no text")
        if _SURROGATE.search(line):
            raise ValueError(f"lines[{row}]={line!r} holds half a surrogate pair")
        text = line.replace("\0", "")
        texts.append("" if text.isspace() else text)
    if not texts:
        return []
    sources = tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
    if max_source_length is None:
        return sources
    too_long = [row for row, ids in enumerate(sources) if len(ids) > max_source_length]
    if too_long:
        logger.warning(
            "%d of %d lines are longer than %d tokens and were cut (the first begins with %r)",
            len(too_long),
            len(sources),
            max_source_length,
            texts[too_long[0]][:40],
        )
    for row in too_long:
        sources[row] = [*sources[row][: max_source_length - 1], sources[row][-1]]
    return sources


def with_output_limit(
    model: Any, generation: dict[str, Any], longest_source: int
) -> dict[str, Any]:
    """Arguments of generate(), with a limit of the output where neither they nor the model set one.

    Args:
        model: The model that is to generate.
        generation: The arguments so far.
        longest_source: Tokens of the longest source.
    """
    names = ("max_new_tokens", "max_length")
    if any(generation.get(name) or getattr(model.generation_config, name, None) for name in names):
        return generation
    limit = longest_source + EXTRA_TOKENS
    return {**generation, "max_new_tokens": min(limit, _longest_input(model) or limit)}


def progress_bar(description: str, lines: int, show: bool | None) -> tqdm:
    """A progress bar over lines; with `show` None only on a terminal."""
    disable = None if show is None else not show
    return tqdm(total=lines, desc=description, unit="line", leave=False, disable=disable)


def budget_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Row numbers in batches of rows * longest <= batch_tokens, the longest rows first."""
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
    generation = with_output_limit(model, generation, inputs["input_ids"].shape[1])
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
            penalty = generation.get("length_penalty", model.generation_config.length_penalty)
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
    show_progress: bool | None = False,
) -> TokenScores:
    """Teacher-forced scores of given targets, unsmoothed and per token, in evaluation mode.

    Args:
        model: A sequence-to-sequence model.
        sources: Token ids of each source.
        targets: Token ids of each target, end token included.
        batch_tokens: Source and target tokens of a batch, padding included.
        show_progress: Whether to draw a progress bar; only on a terminal if None.

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
        with progress_bar("Scoring", len(lengths), show_progress) as progress:
            for batch in budget_batches(lengths, batch_tokens):
                inputs = source_tensors(
                    [sources[row] for row in batch], int(model.config.pad_token_id), model.device
                )
                labels = pad([targets[row] for row in batch], -100, model.device)
                logits = model(**inputs, labels=labels).logits
                loss = F.cross_entropy(
                    logits.flatten(0, 1).float(), labels.flatten(), reduction="sum"
                )
                correct = (logits.argmax(-1) == labels).sum()
                total += TokenScores(loss.item(), int(correct), int((labels != -100).sum()))
                progress.update(len(batch))
    finally:
        model.train(was_training)
    return total


def read_lines(stream: Iterable[bytes], name: str) -> Iterator[str]:
    r"""Lines of a binary stream as text.

    Only \n, or \r\n, ends a line; a byte order mark in front is skipped. What is not UTF-8 becomes
    U+FFFD, with a warning at the first such line, so that every line has its output.

    Args:
        stream: Lines as bytes, such as a file opened with "rb".
        name: What messages call it.
    """
    warned = False
    for number, line in enumerate(stream, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.endswith(b"\n"):
            line = line[:-2] if line.endswith(b"\r\n") else line[:-1]
        text = line.decode("utf-8", errors="replace")
        if not warned and "\ufffd" in text and "\ufffd".encode() not in line:
            logger.warning("%s, line %d: not UTF-8: read with U+FFFD in its place", name, number)
            warned = True
        yield text


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """Opens a text file that takes an old one's place when all is written, and not before.

    Args:
        path: The file. What is no ordinary file, such as `/dev/stdout`, is written to directly.

    Raises:
        OSError: If it cannot be written.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8", newline="\n") as stream:
            yield stream
        return
    path = path.resolve()  # through links, which stay
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(f"{path} cannot be written")
    half_written = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with half_written.open("w", encoding="utf-8", newline="\n") as stream:
            yield stream
        if path.exists():
            shutil.copymode(path, half_written)
        half_written.replace(path)
    finally:
        half_written.unlink(missing_ok=True)
