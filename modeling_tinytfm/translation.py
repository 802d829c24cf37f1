"""Inference for people: lines of text in, lines of text out, in the same order.

Lines are sorted by length and put into batches of a token budget, so that little is padded; the
longest come first, so that memory that does not suffice shows at once.
"""

import json
import logging
import os
import re
import shutil
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .alignment import AlignmentUnit, align, check_unit, pharaoh
from .decoding import (
    Hypothesis,
    ModelTranslator,
    Translator,
    evaluating,
    output_limit,
    source_tensors,
    with_output_limit,
)
from .search import pad

logger = logging.getLogger(__name__)

BATCH_TOKENS = 4096
_SURROGATE = re.compile("[\ud800-\udfff]")  # of no use outside UTF-16; tokenizers refuse them
# Arguments of generate() that follow from those of the functions here.
_OWN_ARGUMENTS = ("num_return_sequences", "return_dict_in_generate", "output_scores")


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
    model: PreTrainedModel | Sequence[PreTrainedModel] | Translator,
    tokenizer: PreTrainedTokenizerBase,
    lines: Iterable[str],
    *,
    prefixes: Sequence[str] | None = None,
    max_source_length: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    show_progress: bool | None = None,
    **generation: Any,
) -> list[str]:
    """The best output for every line.

    Args:
        model: A sequence-to-sequence model; or several with one vocabulary, which decode together
            by the mean of their probabilities; or another `Translator`.
        tokenizer: Its tokenizer.
        lines: Source texts. NUL characters are left out, as in training; a line without any token,
            or of white space alone, gives an empty output, or its prefix.
        prefixes: For each line the text that its output begins with, or "". White space around it
            is left out, and a word in which it ends may be continued.
        max_source_length: Longer lines are cut to so many tokens, `</s>` included, with a warning;
            the model's `max_position_embeddings` if None.
        batch_tokens: Source tokens of a batch, padding included. A single longer line is a batch.
        show_progress: Whether to draw a progress bar; only on a terminal if None.
        **generation: Arguments of `model.generate`, such as `num_beams` or `max_new_tokens`, and
            `length_penalty_form` ("length", as in transformers, or "gnmt", as in section 6.1). What
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
        prefixes=prefixes,
        max_source_length=max_source_length,
        batch_tokens=batch_tokens,
        show_progress=show_progress,
        **generation,
    )
    return [best.text for (best,) in hypotheses]


def translate_n_best(
    model: PreTrainedModel | Sequence[PreTrainedModel] | Translator,
    tokenizer: PreTrainedTokenizerBase,
    lines: Iterable[str],
    n_best: int,
    *,
    with_scores: bool = True,
    alignments: AlignmentUnit | None = None,
    prefixes: Sequence[str] | None = None,
    first_line: int = 1,
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
        with_scores: Whether scores are wanted; without, they may be NaN.
        alignments: Whether to tell which source token, or word, each one of an output came from:
            see `align` and `cross_attention`.
        prefixes: See there.
        first_line: What messages call the first line.
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
    if generation.pop("generation_config", None) is not None:
        raise ValueError(
            "generation_config cannot be given: pass its settings by name, such as num_beams=4, or "
            "set model.generation_config"
        )
    check_unit(alignments)
    if not isinstance(model, Translator):
        models = model if isinstance(model, Sequence) else [model]
        model = ModelTranslator(models, tokenizer)
    if n_best > 1 and not generation.get("do_sample"):
        num_beams = generation.get("num_beams") or model.generation_config.num_beams or 1
        generation["num_beams"] = max(num_beams, n_best)
    if max_source_length is None:
        max_source_length = model.longest_input
    sources = encode(tokenizer, lines, max_source_length)
    _warn_of_unknown(tokenizer, sources, first_line)
    begun = None
    if prefixes is not None:
        begun = _encode_prefixes(tokenizer, prefixes, len(sources), first_line)
    # A line without a token, and so nothing but </s>, has nothing to translate.
    rows = [row for row, ids in enumerate(sources) if len(ids) > 1]
    outputs = [
        [Hypothesis("" if prefixes is None else prefixes[row].strip(), 0.0)] * n_best
        for row in range(len(sources))
    ]
    longest = max(map(len, [*sources, *(begun or [])]), default=0)
    given, generation = generation, with_output_limit(model, generation, longest)
    if begun is not None:
        _check_room(begun, output_limit(model, generation), first_line)
    with progress_bar("Translating", len(rows), show_progress) as progress:
        for batch in budget_batches([len(sources[row]) for row in rows], batch_tokens):
            chosen = [rows[number] for number in batch]
            hypotheses = model.generate(
                [sources[row] for row in chosen],
                prefixes=None if begun is None else [begun[row] for row in chosen],
                n_best=n_best,
                with_scores=with_scores,
                **generation,
            )
            for row, best in zip(chosen, hypotheses, strict=True):
                outputs[row] = best
            if alignments is not None:
                for rank in range(n_best):
                    _align(model, sources, outputs, chosen, rank, alignments)
            progress.update(len(chosen))
    if not {"max_new_tokens", "max_length"} & {name for name, value in given.items() if value}:
        limit = output_limit(model, generation)
        # Some models, such as Marian's, write the end token last whether they have ended or not.
        forced = getattr(model.generation_config, "forced_eos_token_id", None) is not None
        _warn_of_cut_outputs(outputs, limit - forced, first_line)
    _warn_of_unknown_outputs(outputs, tokenizer, first_line)
    return outputs


def _warn_of_cut_outputs(
    outputs: Sequence[Sequence[Hypothesis]], limit: int, first_line: int
) -> None:
    """Warns once where the best outputs ended at a limit that the call did not ask for."""
    cut = [row for row, best in enumerate(outputs) if len(best[0].tokens) >= limit]
    if cut:
        logger.warning(
            "line %d: the output was cut at %d tokens, before its end%s: raise max_new_tokens, or "
            "give shorter lines",
            first_line + cut[0],
            limit,
            f" (so were others: {len(cut) - 1})" if len(cut) > 1 else "",
        )


def _warn_of_unknown_outputs(
    outputs: Sequence[Sequence[Hypothesis]], tokenizer: Any, first_line: int
) -> None:
    """Warns once where the best outputs hold the unknown token, which no text shows."""
    unknown = tokenizer.unk_token_id
    rows = [row for row, best in enumerate(outputs) if unknown in best[0].tokens]
    if rows:
        logger.warning(
            "line %d: the output holds the unknown token, which its text leaves out%s: "
            "suppress_tokens=[%d], a setting of generation, forbids it",
            first_line + rows[0],
            f" (so do others: {len(rows) - 1})" if len(rows) > 1 else "",
            unknown,
        )


def _check_room(prefixes: Sequence[Sequence[int]], limit: int, first_line: int) -> None:
    """Raises ValueError, before anything is translated, where a prefix leaves no token to add."""
    for number, prefix in enumerate(prefixes):
        if len(prefix) >= limit:
            raise ValueError(
                f"line {first_line + number}: a prefix of {len(prefix)} tokens leaves no room in "
                f"outputs of {limit} tokens: raise max_new_tokens"
            )


def _align(
    translator: Translator,
    sources: Sequence[Sequence[int]],
    outputs: list[list[Hypothesis]],
    rows: Sequence[int],
    rank: int,
    unit: AlignmentUnit,
) -> None:
    """Tells the hypotheses of one rank of some rows where they came from, in place."""
    rows = [row for row in rows if outputs[row][rank].tokens]
    if not rows:
        return
    targets = [outputs[row][rank].tokens for row in rows]
    weights = translator.attend([sources[row] for row in rows], targets)
    for row, target, attention in zip(rows, targets, weights, strict=True):
        pairs = align(attention, translator.tokenizer, sources[row], target, unit)
        outputs[row][rank] = outputs[row][rank]._replace(alignment=pairs)


def same_vocabulary(tokenizers: Sequence[Any]) -> Any:
    """The first of several tokenizers that all do the same.

    Raises:
        ValueError: Naming the two, if they do not.
    """

    def behaviour(tokenizer: Any) -> tuple[Any, ...]:
        if tokenizer is None:  # reads no text
            return ()
        backend = getattr(tokenizer, "backend_tokenizer", None)
        parts = {} if backend is None else json.loads(backend.to_str())
        for last_call in ("padding", "truncation"):
            parts.pop(last_call, None)
        return tokenizer.get_vocab(), tokenizer.special_tokens_map, parts

    first = tokenizers[0]
    for other in tokenizers[1:]:
        if behaviour(other) != behaviour(first):
            raise ValueError(
                f"{first.name_or_path} and {other.name_or_path} have different vocabularies: only "
                "models that were trained with the same tokenizer can decode together"
            )
    return first


def _warn_of_unknown(tokenizer: Any, sources: Sequence[Sequence[int]], first_line: int) -> None:
    """Warns once of unknown tokens, by the line of which they are the largest share."""
    texts = [ids[:-1] for ids in sources]  # without </s>
    counts = [ids.count(tokenizer.unk_token_id) for ids in texts]
    unknown = [row for row, count in enumerate(counts) if count]
    if unknown:
        worst = max(unknown, key=lambda row: counts[row] / len(texts[row]))
        logger.warning(
            "line %d: the model's vocabulary does not know %d of its %d tokens%s",
            first_line + worst,
            counts[worst],
            len(texts[worst]),
            f" (other lines with unknown tokens: {len(unknown) - 1})" if len(unknown) > 1 else "",
        )


def _encode_prefixes(
    tokenizer: Any, prefixes: Sequence[str], lines: int, first_line: int
) -> list[list[int]]:
    """Token ids of what outputs begin with, without an end token.

    Raises:
        ValueError: If one cannot be written with the vocabulary, or if there are more or fewer than
            lines.
    """
    if isinstance(prefixes, str) or len(prefixes) != lines:
        count = "one string" if isinstance(prefixes, str) else f"a list of {len(prefixes)}"
        raise ValueError(f"prefixes is {count}: pass a list with one for each of {lines} lines")
    encoded = []
    for number, prefix in enumerate(prefixes, start=first_line):
        text = prefix.strip()
        ids: list[int] = []
        if text:
            ids = tokenizer(text_target=text, add_special_tokens=False, verbose=False)["input_ids"]
        written = tokenizer.decode(ids, skip_special_tokens=True)
        if unicodedata.normalize("NFC", written) != unicodedata.normalize("NFC", text):
            raise ValueError(
                f"line {number}: the vocabulary cannot write the prefix {text!r}, but {written!r}"
            )
        encoded.append(ids)
    return encoded


def check_text(name: str, text: Any) -> None:
    """Raises ValueError for what no tokenizer reads."""
    if not isinstance(text, str):
        raise ValueError(f"{name}={text!r} is no text")
    if _SURROGATE.search(text):
        raise ValueError(f"{name}={text!r} holds half a surrogate pair")


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
        check_text(f"lines[{row}]", line)
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


def progress_bar(description: str, lines: int | None, show: bool | None) -> tqdm:
    """A progress bar over lines, of unknown number if None; with `show` None only on a terminal."""
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
    lengths = [len(source) + len(target) for source, target in zip(sources, targets, strict=True)]
    with evaluating(model), progress_bar("Scoring", len(lengths), show_progress) as progress:
        for batch in budget_batches(lengths, batch_tokens):
            inputs = source_tensors(
                [sources[row] for row in batch], int(model.config.pad_token_id), model.device
            )
            labels = pad([targets[row] for row in batch], -100, model.device)
            logits = model(**inputs, labels=labels).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
            correct = (logits.argmax(-1) == labels).sum()
            total += TokenScores(loss.item(), int(correct), int((labels != -100).sum()))
            progress.update(len(batch))
    return total


def row(hypothesis: Hypothesis, with_score: bool = False, with_alignment: bool = False) -> str:
    """A hypothesis as one line: score, text and alignment, those that are wanted, between tabs."""
    # Whatever a model writes, a row stays a row, and a column a column.
    text = " ".join(hypothesis.text.splitlines())
    columns = [text.replace("\t", " ") if with_score or with_alignment else text]
    if with_score:
        columns.insert(0, f"{hypothesis.score:.6f}")
    if with_alignment:
        columns.append(pharaoh(hypothesis.alignment))
    return "\t".join(columns)


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


@contextmanager
def new_folder(output: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder that takes its place when all is written, and not before.

    Raises:
        ValueError: If `output` exists and is no empty folder.
        OSError: If it cannot be written.
    """
    output = Path(output)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"{output} exists and is no empty folder: choose another")
    output.parent.mkdir(parents=True, exist_ok=True)
    half_written = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        yield half_written
        half_written.chmod(0o777 & ~_umask())  # mkdtemp's is for its owner only
        if output.exists():
            output.rmdir()
        half_written.rename(output)
    except SafetensorError as error:  # as which a full disk shows
        raise OSError(f"{output} was not written: {error}") from error
    finally:
        shutil.rmtree(half_written, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
