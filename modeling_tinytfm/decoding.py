"""From source ids to hypotheses: one model or several, by `generate()` or by our own search."""

import abc
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutput

from .modeling_tinytfm import TinyTFMForConditionalGeneration
from .search import ONLY_SEARCHED, as_list, beam_search, length_penalty, pad, penalty_form

# Section 6.1 of the paper: outputs are at most this much longer than the input.
EXTRA_TOKENS = 50
# Arguments of generate() of which the search here has no use.
_NOT_SEARCHED = ("assistant_model", "streamer")
# Settings with which it finds what generate() finds. What changes probabilities is not among them:
# in greedy search, generate() changes logits.
_PLAIN = {
    *("num_beams", "early_stopping", "length_penalty", "max_length", "max_new_tokens", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("length_penalty_form", "transformers_version", "_from_model_config"),
}


class Hypothesis(NamedTuple):
    """An output for a line."""

    text: str
    score: float  # its log-probability / `length_penalty`
    tokens: tuple[int, ...] = ()  # what the text was made of, without start and end token
    alignment: tuple[tuple[int, int], ...] = ()  # (source, target) positions, if asked for


class Translator(abc.ABC):
    """What makes hypotheses of source ids: models of transformers, or something exported."""

    tokenizer: PreTrainedTokenizerBase
    generation_config: Any  # the defaults of `generate`
    longest_input: int | None  # tokens of a source at most

    @abc.abstractmethod
    def generate(
        self,
        sources: Sequence[Sequence[int]],
        *,
        prefixes: Sequence[Sequence[int]] | None = None,
        n_best: int = 1,
        with_scores: bool = False,
        **generation: Any,
    ) -> list[list[Hypothesis]]:
        """The `n_best` hypotheses of each source of one batch: see `generate_batch`."""

    @abc.abstractmethod
    def attend(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """Cross-attention of given targets, [target, source] for each: see `cross_attention`."""


class ModelTranslator(Translator):
    """Sequence-to-sequence models of transformers: one, or several that decode together.

    Args:
        models: The models; their probabilities are averaged. The settings of the first one count.
        tokenizer: The one that all of them were trained with.

    Raises:
        ValueError: If there is no model, or one that writes no text for text, or if their ids mean
            different things.
    """

    def __init__(self, models: Sequence[Any], tokenizer: PreTrainedTokenizerBase):
        if not models:
            raise ValueError("models is empty: give one at least")
        for model in models:
            if not model.config.is_encoder_decoder or tokenizer is None:
                kind = "reads no text" if tokenizer is None else "has no encoder and decoder"
                raise ValueError(f"{model.name_or_path} cannot translate: it {kind}")
            for name in ("vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id"):
                first, other = (getattr(each.config, name, None) for each in (models[0], model))
                if first != other:
                    raise ValueError(
                        f"models that decode together need one vocabulary: {name} is {first} in "
                        f"{models[0].name_or_path}, and {other} in {model.name_or_path}"
                    )
        self.models = list(models)
        self.tokenizer = tokenizer
        self.generation_config = models[0].generation_config
        limits = [limit for model in models if (limit := longest_input(model)) is not None]
        self.longest_input = min(limits, default=None)

    def generate(
        self,
        sources: Sequence[Sequence[int]],
        *,
        prefixes: Sequence[Sequence[int]] | None = None,
        n_best: int = 1,
        with_scores: bool = False,
        **generation: Any,
    ) -> list[list[Hypothesis]]:
        """See `generate_batch`."""
        return generate_batch(
            self.models,
            self.tokenizer,
            sources,
            prefixes=prefixes,
            n_best=n_best,
            with_scores=with_scores,
            **generation,
        )

    def attend(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """The mean of the models' `cross_attention`."""
        found = [cross_attention(model, sources, targets) for model in self.models]
        return [torch.stack(weights).mean(0) for weights in zip(*found, strict=True)]


def longest_input(model: Any) -> int | None:
    """Tokens of a source at most, or None."""
    return getattr(model.config, "max_position_embeddings", None)


def with_output_limit(
    model: Any, generation: dict[str, Any], longest_source: int
) -> dict[str, Any]:
    """Arguments of generate(), with a limit of the output where neither they nor the model set one.

    Args:
        model: The model that is to generate, or a `Translator`.
        generation: The arguments so far.
        longest_source: Tokens of the longest source.
    """
    names = ("max_new_tokens", "max_length")
    if any(generation.get(name) or getattr(model.generation_config, name, None) for name in names):
        return generation
    limit = longest_source + EXTRA_TOKENS
    most = model.longest_input if isinstance(model, Translator) else longest_input(model)
    return {**generation, "max_new_tokens": min(limit, most or limit)}


def output_limit(model: Any, generation: dict[str, Any]) -> int:
    """Tokens of an output at most, by these arguments of generate() or the model's settings."""
    for settings in (generation, model.generation_config.to_dict()):
        if settings.get("max_new_tokens"):
            return int(settings["max_new_tokens"])
        if settings.get("max_length"):
            return int(settings["max_length"]) - 1  # the start token counts there
    raise ValueError("nothing limits the output: set max_new_tokens")


def source_tensors(
    sources: Sequence[Sequence[int]], pad_token_id: int, device: torch.device
) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` [B, L] of rows of ids."""
    lengths = torch.tensor([len(ids) for ids in sources], device=device)
    input_ids = pad(sources, pad_token_id, device)
    mask = torch.arange(input_ids.shape[1], device=device) < lengths[:, None]
    return {"input_ids": input_ids, "attention_mask": mask.long()}


@contextmanager
def evaluating(*models: Any) -> Iterator[None]:
    """Evaluation mode inside, and what was before afterwards."""
    were_training = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, was_training in zip(models, were_training, strict=True):
            model.train(was_training)


@torch.inference_mode()
def generate_batch(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[Sequence[int]],
    *,
    prefixes: Sequence[Sequence[int]] | None = None,
    n_best: int = 1,
    with_scores: bool = False,
    length_penalty_form: str | None = None,
    **generation: Any,
) -> list[list[Hypothesis]]:
    """Generates for one batch of token ids, in evaluation mode.

    Args:
        model: A sequence-to-sequence model, or several whose probabilities are averaged.
        tokenizer: Their tokenizer.
        sources: Ids of each source, end token included.
        prefixes: Ids that each output begins with, which count as output where a length is limited
            and do not count in scores.
        n_best: Hypotheses for each source.
        with_scores: Whether scores are wanted; without, they may be NaN.
        length_penalty_form: See `length_penalty`; the model's if None.
        **generation: Arguments of `model.generate`. With several models, prefixes or the form
            "gnmt" only those of greedy and beam search.

    Returns:
        For each source `n_best` hypotheses, best first. Where fewer than that are possible, the
        others have no text and a score of -inf.

    Raises:
        ValueError: If a setting is unknown or does not go with the others.
    """
    models = list(model) if isinstance(model, Sequence) else [model]
    model = models[0]
    form = penalty_form(model.generation_config, length_penalty_form)
    inputs = source_tensors(sources, int(tokenizer.pad_token_id), model.device)
    settings = with_output_limit(model, generation, inputs["input_ids"].shape[1])
    settings = {**settings, "num_return_sequences": n_best, "return_dict_in_generate": True}
    ends = as_list(generation.get("eos_token_id", model.generation_config.eos_token_id))
    with evaluating(*models):
        only_searched = len(models) > 1 or prefixes is not None or form != "length"
        unused = [name for name in _NOT_SEARCHED if generation.get(name) is not None]
        if only_searched and unused:
            raise ValueError(f"{unused[0]} cannot be used {ONLY_SEARCHED}")
        if only_searched or (not unused and _searches_alike(model, generation)):
            search = functools.partial(
                beam_search,
                models=models,
                source=inputs,
                prefixes=prefixes or [],
                form=form,
                filler=int(tokenizer.pad_token_id),
            )
            outputs = model.generate(**inputs, **settings, custom_generate=search)
        else:
            outputs = model.generate(**inputs, **settings, output_scores=with_scores)
        scores = [float("nan")] * len(outputs.sequences)
        if with_scores and getattr(outputs, "sequences_scores", None) is not None:
            scores = outputs.sequences_scores.tolist()
        elif with_scores:
            exponent = generation.get("length_penalty", model.generation_config.length_penalty)
            scores = _score_sequences(model, inputs, outputs.sequences, exponent, ends)
    texts = tokenizer.batch_decode(outputs.sequences, skip_special_tokens=True)
    tokens = [
        _without_ends(row, ends, tokenizer.pad_token_id) for row in outputs.sequences.tolist()
    ]
    hypotheses = [Hypothesis(*parts) for parts in zip(texts, scores, tokens, strict=True)]
    return [hypotheses[i : i + n_best] for i in range(0, len(hypotheses), n_best)]


def _searches_alike(model: Any, generation: dict[str, Any]) -> bool:
    """Whether `beam_search` finds what `generate()` would, and sooner."""
    settings = {**model.generation_config.to_diff_dict(), **generation}
    asked = {name for name, value in settings.items() if value is not None and value is not False}
    return isinstance(model, TinyTFMForConditionalGeneration) and asked <= _PLAIN


def _without_ends(row: list[int], ends: Sequence[int], pad_token_id: int | None) -> tuple[int, ...]:
    """Generated ids between the start token and the first end token, or the padding."""
    row = row[1:]
    row = row[: next((place for place, token in enumerate(row) if token in ends), len(row))]
    while row and row[-1] == pad_token_id:
        row.pop()
    return tuple(row)


def _score_sequences(
    model: PreTrainedModel,
    inputs: dict[str, Tensor],
    sequences: Tensor,
    exponent: float | None,
    end_ids: Sequence[int],
) -> list[float]:
    """Scores of generated `sequences` [B * n, T] as beam search would have scored them."""
    copies = len(sequences) // len(inputs["input_ids"])
    repeated = {name: value.repeat_interleave(copies, 0) for name, value in inputs.items()}
    logits = model(**repeated, decoder_input_ids=sequences[:, :-1], use_cache=False).logits
    targets = sequences[:, 1:]
    log_probabilities = -F.cross_entropy(logits.transpose(1, 2).float(), targets, reduction="none")
    ends = torch.isin(targets, torch.tensor(end_ids, device=targets.device, dtype=targets.dtype))
    real = (ends.cumsum(1) - ends.long()) == 0  # up to the first end token, and with it
    total = (log_probabilities * real).sum(1)
    return (total / length_penalty(real.sum(1), 1.0 if exponent is None else exponent)).tolist()


@torch.inference_mode()
def cross_attention(
    model: Any, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> list[Tensor]:
    """How much each target token was predicted from each source token.

    The last decoder layer's cross-attention, the mean over its heads, from one pass over the whole
    target. On strings that a model had learnt to reverse, its maximum lay on the right digit for
    99 % of the digits (three seeds of configs/reverse.yaml); that of the first of two layers for
    70 %, that of the mean of both for 98 %, and that of the last layer's best head for 96 %.

    Args:
        model: A sequence-to-sequence model.
        sources: Ids of each source, end token included.
        targets: Ids of each target, without start token.

    Returns:
        For each pair the weights [target, source] in float32.

    Raises:
        ValueError: If the model does not tell its attention weights.
    """
    inputs = source_tensors(sources, int(model.config.pad_token_id), model.device)
    begun = [[_start_id(model), *target[:-1]] for target in targets]
    with evaluating(model):
        states = model.get_encoder()(**inputs).last_hidden_state
        outputs = model(
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            attention_mask=inputs["attention_mask"],
            decoder_input_ids=pad(begun, int(model.config.pad_token_id), model.device),
            output_attentions=True,
            use_cache=False,
        )
    layers = outputs.cross_attentions
    if not layers or layers[-1] is None:
        raise ValueError(
            f"{type(model).__name__} does not tell its attention weights: load it with "
            "attn_implementation='eager'"
        )
    weights = layers[-1].float().mean(1).cpu()
    return [
        weights[row, : len(target), : len(source)]
        for row, (source, target) in enumerate(zip(sources, targets, strict=True))
    ]


def _start_id(model: Any) -> int:
    start = getattr(model.generation_config, "decoder_start_token_id", None)
    return model.config.decoder_start_token_id if start is None else start
