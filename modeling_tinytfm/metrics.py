"""Scores of predicted texts: BLEU, chrF, TER, exact match and error rates.

Every metric is an `evaluate.Metric` that works on its own, without the Hub and without files:

    >>> PhonemeErrorRate().compute(predictions=["K AE T"], references=[["K AH T", "K AE T S"]])
    {'per': 0.25, 'signature': 'nrefs:2|edits:tokens'}

`predictions` are texts. `references` have a text, or a list of texts, for each of them; rows may
have different numbers of references. All are brought to Unicode's form NFC first, so that an é of
two characters is the é of one.

Three error rates are easily confused:

- `wer` is the word error rate of grapheme-to-phoneme conversion, where a row is one word and its
  tokens are phonemes: the share of words with any error.
- `per`, its companion, is the phoneme error rate: the phonemes to edit per phoneme.
- `word_edit_rate` is what speech recognition calls WER, where a row is a sentence and its tokens
  are words: the words to edit per word. It is computed exactly as `per` is.

Token accuracy and perplexity follow from a model's logits and loss, not from texts; `perplexity`
turns the one into the other.
"""

import difflib
import logging
import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, ClassVar, cast

import evaluate
import sacrebleu.metrics
from datasets import Features, List, Value
from rapidfuzz.distance import Levenshtein
from transformers import PreTrainedTokenizerBase

from .settings import METRIC_DESCRIPTIONS

logger = logging.getLogger(__name__)

References = str | Sequence[str]  # of one row


class TextMetric(evaluate.Metric):
    """Base of the metrics here: checks the rows, and keeps them in memory.

    Args:
        keep_in_memory: Whether rows wait for `compute` in memory and not in a file of the cache
            folder; None: in memory, unless several processes share the work.
        num_process: Number of processes that share the work.
        process_id: This process's number, from 0.
        experiment_id: Tells the files of simultaneous computations apart.
        cache_dir: Folder of such files; None: the one of `evaluate`.
    """

    name: ClassVar[str]

    def __init__(
        self,
        *,
        keep_in_memory: bool | None = None,
        num_process: int = 1,
        process_id: int = 0,
        experiment_id: str | None = None,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(
            keep_in_memory=num_process == 1 if keep_in_memory is None else keep_in_memory,
            num_process=num_process,
            process_id=process_id,
            experiment_id=experiment_id,
            cache_dir=cache_dir,
        )

    def score(self, predictions: list[str], references: list[list[str]]) -> tuple[float, str]:
        """Score rows that have been checked.

        Args:
            predictions: A text for each row; there is at least one row.
            references: At least one text for each row.

        Returns:
            The score, and its signature: how it was computed, and from how many references.
        """
        raise NotImplementedError

    def add(self, *, prediction: str, reference: References) -> None:
        """Add one row.

        Args:
            prediction: The text to score.
            reference: A text, or several of which one would do.

        Raises:
            ValueError: As in `add_batch`.
        """
        self.add_batch(predictions=[prediction], references=[reference])

    def add_batch(self, *, predictions: Iterable[str], references: Iterable[References]) -> None:
        """Add rows.

        Args:
            predictions: The texts to score.
            references: For each of them a text, or several of which one would do.

        Raises:
            ValueError: If the two differ in length, a row is no text, or it has no reference.
        """
        texts, references_by_row = _checked_rows(predictions, references)
        if texts:
            super().add_batch(predictions=texts, references=references_by_row)

    def compute(
        self,
        *,
        predictions: Iterable[str] | None = None,
        references: Iterable[References] | None = None,
    ) -> dict[str, Any] | None:
        """Score these rows together with those added before.

        Args:
            predictions: As in `add_batch`; None: no further rows.
            references: As in `add_batch`; None: no further rows.

        Returns:
            The score under the metric's name, and `signature`. None on all but the first of
            several processes.

        Raises:
            ValueError: If there is no row at all, or as in `add_batch`.
        """
        if predictions is not None or references is not None:
            if predictions is None or references is None:
                missing = "predictions" if predictions is None else "references"
                raise ValueError(f"{self.name} needs {missing}, too")
            self.add_batch(predictions=predictions, references=references)
        if self.writer is None:
            raise ValueError(f"{self.name}: there are no predictions to score (0 rows)")
        return super().compute()

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=METRIC_DESCRIPTIONS[self.name].text,
            citation="",
            features=Features(
                {"predictions": Value("string"), "references": List(Value("string"))}
            ),
        )

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, Any]:
        score, signature = self.score(predictions, references)
        return {self.name: score, "signature": signature}

    def _build_data_dir(self) -> str:
        # evaluate makes a cache folder in the user's home even where nothing would go into it.
        return "" if self.keep_in_memory else super()._build_data_dir()


class SacreMetric(TextMetric):
    """Base of the metrics that sacreBLEU computes."""

    def scorer(self) -> sacrebleu.metrics.base.Metric:
        """Make a scorer of sacreBLEU."""
        raise NotImplementedError

    def score(self, predictions: list[str], references: list[list[str]]) -> tuple[float, str]:
        """See `TextMetric.score`; the signature is sacreBLEU's."""
        scorer = self.scorer()
        # The first references of all rows, then the second ones, and so on; None is a missing one.
        streams: list[list[Any]] = [
            [row[number] if number < len(row) else None for row in references]
            for number in range(max(map(len, references)))
        ]
        return float(scorer.corpus_score(predictions, streams).score), str(scorer.get_signature())


class BLEU(SacreMetric):
    """BLEU of raw text, 0..100 (Papineni et al., 2002), as sacreBLEU standardises it.

    Where no reference has 4 tokens, not even perfect outputs score above 0.
    """

    name = "bleu"

    def scorer(self) -> sacrebleu.metrics.BLEU:
        """Make sacreBLEU's default: 13a tokens, case-sensitive."""
        return sacrebleu.metrics.BLEU()

    def score(self, predictions: list[str], references: list[list[str]]) -> tuple[float, str]:
        """See `SacreMetric.score`; warns once where no reference is long enough."""
        scorer = self.scorer()
        order = scorer.max_ngram_order
        lengths = (len(scorer.tokenizer(text).split()) for row in references for text in row)
        if all(length < order for length in lengths):
            _warn_once(
                f"{self.name}: no reference has {order} tokens, as it counts them, so that not "
                "even perfect outputs score above 0: use chrf or exact_match"
            )
        return super().score(predictions, references)


class TokenizedBLEU(BLEU):
    """BLEU of text that is tokenised already, 0..100: tokens are what stands between spaces.

    Comparable with papers that scored tokenised, often lower-cased, text; not with `BLEU`.
    """

    name = "tokenized_bleu"

    def scorer(self) -> sacrebleu.metrics.BLEU:
        """Make one without a tokenizer, and without the warning against tokenised text."""
        return sacrebleu.metrics.BLEU(tokenize="none", force=True)


class ChrF(SacreMetric):
    """Character n-gram F-score chrF2, 0..100 (Popović, 2015)."""

    name = "chrf"

    def scorer(self) -> sacrebleu.metrics.CHRF:
        """Make sacreBLEU's default: character 6-grams, no word n-grams, beta 2."""
        return sacrebleu.metrics.CHRF()


class TER(SacreMetric):
    """Translation edit rate in percent (Snover et al., 2006): 0 is perfect, 100 is not the worst.

    Of several references the one with the fewest edits counts, over their average length.
    """

    name = "ter"

    def scorer(self) -> sacrebleu.metrics.TER:
        """Make sacreBLEU's default: words between spaces, case-insensitive."""
        return sacrebleu.metrics.TER()


class ExactMatch(TextMetric):
    """Share of rows, 0..1, whose prediction is one of their references, character by character."""

    name = "exact_match"

    def score(self, predictions: list[str], references: list[list[str]]) -> tuple[float, str]:
        """See `TextMetric.score`."""
        matches = sum(text in row for text, row in zip(predictions, references, strict=True))
        return matches / len(predictions), f"nrefs:{_reference_count(references)}|equal:rows"


class WordErrorRate(TextMetric):
    """Share of rows, 0..1, whose tokens are those of none of their references.

    The WER of grapheme-to-phoneme conversion, where a row is a word. Speech recognition calls
    another figure WER: see `WordEditRate`.
    """

    name = "wer"

    def score(self, predictions: list[str], references: list[list[str]]) -> tuple[float, str]:
        """See `TextMetric.score`."""
        errors = sum(
            text.split() not in [reference.split() for reference in row]
            for text, row in zip(predictions, references, strict=True)
        )
        return errors / len(predictions), f"nrefs:{_reference_count(references)}|wrong:rows"


class PhonemeErrorRate(TextMetric):
    """Edits per phoneme, from 0; above 1 where more is inserted than there is.

    Tokens stand between white space; an edit inserts, deletes or replaces one. Every row counts
    with the reference of the smallest edits / length, and the rate is the sum of these edits by
    the sum of these lengths.
    """

    name = "per"
    token = "phoneme"
    advice = "write spaces between phonemes, or use wer or exact_match"

    def score(self, predictions: list[str], references: list[list[str]]) -> tuple[float, str]:
        """See `TextMetric.score`; warns once where nothing stands between tokens."""
        if all(len(text.split()) < 2 for row in references for text in row):
            _warn_once(
                f"{self.name}: no reference has white space in it, so that each counts as one "
                f"{self.token}: {self.advice}"
            )
        edits, tokens = 0, 0
        for text, row in zip(predictions, references, strict=True):
            row_edits, row_tokens = _edits_to_closest(text, row)
            edits += row_edits
            tokens += row_tokens
        # Nothing but empty references: as in TER, whatever was predicted is wrong.
        rate = edits / tokens if tokens else float(edits > 0)
        return rate, f"nrefs:{_reference_count(references)}|edits:tokens"


class WordEditRate(PhonemeErrorRate):
    """Edits per word, from 0, computed as `PhonemeErrorRate`: the WER of speech recognition."""

    name = "word_edit_rate"
    token = "word"
    advice = "use chrf or exact_match"


METRICS: dict[str, type[TextMetric]] = {
    metric.name: metric
    for metric in (
        BLEU,
        TokenizedBLEU,
        ChrF,
        TER,
        ExactMatch,
        WordErrorRate,
        PhonemeErrorRate,
        WordEditRate,
    )
}


def compute_metrics(
    names: Iterable[str], predictions: Iterable[str], references: Iterable[References]
) -> tuple[dict[str, float], dict[str, str]]:
    """Score predictions by several metrics.

    Args:
        names: Keys of `METRICS`.
        predictions: The texts to score.
        references: For each of them a text, or several of which one would do.

    Returns:
        The scores and the signatures, each by metric name. BLEU, chrF and TER are percentages,
        exact match and error rates are fractions.

    Raises:
        ValueError: If a name is unknown, if there are no rows, if predictions and references
            differ in length, or if a row is no text or has no reference.
    """
    texts, references_by_row = _checked_rows(predictions, references)
    if not texts:
        raise ValueError("there are no predictions to score (0 rows)")
    names = list(names)
    check_metrics(names)
    scores, signatures = {}, {}
    for name in names:
        scores[name], signatures[name] = METRICS[name]().score(texts, references_by_row)
    return scores, signatures


def check_metrics(names: Iterable[str]) -> None:
    """Raises ValueError for a name that is none of `METRICS`, with the nearest one."""
    for name in names:
        if name not in METRICS:
            nearest = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"metric {name!r} is none of {', '.join(METRICS)}; the nearest is {nearest}"
            )


def perplexity(loss: float) -> float:
    """exp(loss), or infinity where that is beyond a float.

    Args:
        loss: Cross-entropy per target token in nats, without label smoothing.

    Returns:
        The perplexity per target token.
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def decode_predictions(
    tokenizer: PreTrainedTokenizerBase, token_ids: Iterable[Sequence[int]]
) -> list[str]:
    """Texts of generated or labelled token ids, without special tokens.

    Args:
        tokenizer: The tokenizer that made the ids.
        token_ids: Rows of ids, as lists or as an array or tensor [B, T]. Negative ids, such as the
            -100 with which the Trainer pads predictions and collators pad labels, are no tokens.

    Returns:
        A text for each row.
    """
    rows = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    # Row by row: transformers 5.17 makes one text of no rows in batch_decode.
    texts = []
    for row in rows:
        tokens = [token_id for token_id in row if token_id >= 0]
        texts.append(cast(str, tokenizer.decode(tokens, skip_special_tokens=True)))
    return texts


def _checked_rows(
    predictions: Iterable[str], references: Iterable[References]
) -> tuple[list[str], list[list[str]]]:
    """Rows as lists, in NFC, every row with a list of references."""
    for name, rows in (("predictions", predictions), ("references", references)):
        if isinstance(rows, str):
            raise ValueError(f"{name}={rows!r} is one text: give a list of texts, one for each row")
    texts = list(predictions)
    references_by_row = [
        [row] if isinstance(row, str) else list(row) if row is not None else []
        for row in references
    ]
    if len(texts) != len(references_by_row):
        raise ValueError(
            f"{len(texts)} predictions cannot be scored by {len(references_by_row)} references"
        )
    for number, (text, row) in enumerate(zip(texts, references_by_row, strict=True)):
        if not isinstance(text, str):
            raise ValueError(f"predictions[{number}]={text!r} is no text")
        if not row:
            raise ValueError(f"references[{number}] is empty: every row needs a reference")
        for reference in row:
            if not isinstance(reference, str):
                raise ValueError(f"references[{number}] has {reference!r}, which is no text")
    return list(map(_composed, texts)), [list(map(_composed, row)) for row in references_by_row]


@cache
def _warn_once(message: str) -> None:
    """Warns, unless the process has been told so: a run scores its validation set many times."""
    logger.warning(message)


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _reference_count(references: Iterable[Sequence[str]]) -> str:
    """References of each row, in the words of sacreBLEU's signatures."""
    counts = {len(row) for row in references}
    return str(counts.pop()) if len(counts) == 1 else "var"


def _edits_to_closest(text: str, references: Iterable[str]) -> tuple[int, int]:
    """Edits from a text to the closest of its references, and that reference's length, in tokens.

    Of equally close references the shortest counts, whatever their order. One that is empty is
    infinitely far from everything but an empty text.
    """
    tokens = text.split()
    candidates = []
    for reference in references:
        reference_tokens = reference.split()
        edits = Levenshtein.distance(tokens, reference_tokens)
        if reference_tokens:
            rate = edits / len(reference_tokens)
        else:
            rate = math.inf if edits else 0.0
        candidates.append((rate, edits, len(reference_tokens)))
    _, edits, length = min(candidates)
    return edits, length


def class_scores(predictions: Sequence[int], labels: Sequence[int]) -> dict[str, float]:
    """Accuracy, and the mean F1 over the classes that occur among predictions or labels.

    A class's F1 is 2 tp / (2 tp + fp + fn), from 0 to 1.

    Args:
        predictions: A class of each row.
        labels: The right ones.

    Raises:
        ValueError: If there is no row, or the two differ in length.
    """
    pairs = list(zip(predictions, labels, strict=True))
    if not pairs:
        raise ValueError("class_scores: there are no rows")
    hits = Counter(label for prediction, label in pairs if prediction == label)
    sizes = Counter(predictions) + Counter(labels)  # 2 tp + fp + fn
    return {
        "accuracy": hits.total() / len(pairs),
        "macro_f1": sum(2 * hits[name] / size for name, size in sizes.items()) / len(sizes),
    }
