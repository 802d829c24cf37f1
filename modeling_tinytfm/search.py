"""Beam search with four things more than that of transformers, of which it is a copy otherwise.

These are the length penalty of section 6.1, several models whose probabilities are averaged,
outputs that begin with a given prefix, and batches that shrink: a source that is done leaves, where
transformers computes on until the last one is. It runs inside `generate()`, which prepares all the
rest.

Shapes trail the names of tensors: B sources, K beams, C candidates, T target length, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import EncoderDecoderCache, GenerationConfig
from transformers.generation import GenerationMode, StoppingCriteria
from transformers.modeling_outputs import BaseModelOutput

from .modeling_tinytfm import CACHE

LengthPenaltyForm = Literal["length", "gnmt"]
ONLY_SEARCHED = "with several models, a prefix or length_penalty_form='gnmt'"
OF_BEAMS = ("length_penalty", "early_stopping")
CROWDED = 0.75  # sources leave when at most so many of the batch go on


class Found(NamedTuple):
    """What `beam_search` found, the best of each source first."""

    sequences: Tensor  # [B * n_best, T], padded on the right
    sequences_scores: Tensor  # [B * n_best]


def length_penalty(lengths: Any, exponent: float, form: LengthPenaltyForm = "length") -> Any:
    """What a log-probability is divided by to become a score.

    Args:
        lengths: Generated tokens, the end token counted; start token and prefix are not.
        exponent: `length_penalty` of generate(), the paper's alpha (0.6): 0 compares sums of
            log-probabilities, larger ones favour longer outputs.
        form: "length" is length ^ exponent, as in transformers; "gnmt" is
            ((5 + length) / 6) ^ exponent (Wu et al. 2016, Eq. 14), as in section 6.1.
    """
    return (lengths if form == "length" else (5 + lengths) / 6) ** exponent


def penalty_form(config: Any, given: str | None = None) -> LengthPenaltyForm:
    """The form that was `given`, or else that of a generation config; "length" if it has none.

    Raises:
        ValueError: If there is no such form.
    """
    form: Any = given or getattr(config, "length_penalty_form", None) or "length"
    if form not in get_args(LengthPenaltyForm):
        choices = " or ".join(get_args(LengthPenaltyForm))
        raise ValueError(f"length_penalty_form={form!r} is unknown: use {choices}")
    return form


def keep_penalty_form(model: Any, form: str) -> None:
    """Makes the form the model's own, in its generation config, where saving keeps it.

    `generate()` itself passes over that key, on transformers 4.57 to 5.24.

    Raises:
        ValueError: If there is no such form.
    """
    settings = model.generation_config.to_dict()
    settings["length_penalty_form"] = penalty_form(None, form)
    # Without its mark of one that was made from the model's config: such a one loses unknown keys.
    settings = {name: value for name, value in settings.items() if not name.startswith("_")}
    model.generation_config = GenerationConfig(**settings)


def without_beams(config: GenerationConfig) -> GenerationConfig:
    """The same settings for greedy search: transformers saves none that only beams read."""
    of_beams = (*OF_BEAMS, "num_beams", "length_penalty_form")
    settings = config.to_dict().items()
    return GenerationConfig(
        **{
            name: value
            for name, value in settings
            if not name.startswith("_") and name not in of_beams
        }
    )


class _NextToken:
    """A model that has read its sources: log-probabilities of next tokens, one step at a time."""

    def __init__(
        self, model: Any, encoder_outputs: Any, attention_mask: Tensor | None, use_cache: bool
    ):
        self.model = model
        self.read = {"encoder_outputs": encoder_outputs, "attention_mask": attention_mask}
        self.use_cache = use_cache
        self.cache: Any = None

    def log_probabilities(self, ids: Tensor) -> Tensor:
        """Of what follows all ids so far [B * K, T], as [B * K, V] in float32."""
        earlier = {} if self.cache is None else {CACHE: self.cache}
        new = ids if self.cache is None else ids[:, -1:]
        outputs = self.model(
            **self.read, decoder_input_ids=new, use_cache=self.use_cache, **earlier
        )
        self.cache = outputs.get(CACHE) if self.use_cache else None
        return outputs.logits[:, -1].float().log_softmax(dim=-1)

    def reorder(self, rows: Any, left: bool) -> None:
        """Lets each beam go on from what another one has read and written.

        Args:
            rows: Which one, [those that go on]; always one of the same source.
            left: Whether some sources have none.
        """
        if isinstance(self.cache, EncoderDecoderCache):
            self.cache.self_attention_cache.reorder_cache(rows)
            if left:  # the keys of a source are the same for all its beams
                self.cache.cross_attention_cache.reorder_cache(rows)
        elif self.cache is not None:
            self.cache.reorder_cache(rows)
        if left:
            states = self.read["encoder_outputs"].last_hidden_state.index_select(0, rows)
            self.read["encoder_outputs"] = BaseModelOutput(last_hidden_state=states)
            if self.read["attention_mask"] is not None:
                self.read["attention_mask"] = self.read["attention_mask"].index_select(0, rows)


def beam_search(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    *,
    models: Sequence[Any],
    source: dict[str, Tensor],
    prefixes: Sequence[Sequence[int]],
    form: LengthPenaltyForm,
    filler: int,
    **model_kwargs: Any,
) -> Found:
    """The beam search of transformers; with one beam, greedy search. For `custom_generate`.

    A hypothesis that ends, among the best K of its step, is finished: its score is its
    log-probability / `length_penalty`. A source is done when its K finished ones are better than
    the best unfinished one could become, as `early_stopping` reckons it. It leaves the batch then,
    unless a logits processor or a criterion of the caller's may count on its place.

    Args:
        model: The first of `models`, which has read the sources already.
        input_ids: Start tokens [B * K, 1].
        logits_processor: What generate() made of its settings; works on log-probabilities.
        stopping_criteria: The same.
        generation_config: The same, complete.
        models: All models; each next token has the mean of their probabilities.
        source: `input_ids` and `attention_mask` [B, L].
        prefixes: What each output begins with; none at all, or one for each source.
        form: See `length_penalty`.
        filler: The id that stands after the end of a sequence.
        **model_kwargs: What generate() prepared for the model.

    Raises:
        ValueError: If the settings ask for another way to generate, or a prefix is too long.
    """
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.BEAM_SEARCH):
        raise ValueError(f"{mode.value} cannot be used {ONLY_SEARCHED}")
    num_beams, exponent = generation_config.num_beams, generation_config.length_penalty
    batch, start, longest = (
        len(source["input_ids"]),
        input_ids.shape[1],
        generation_config.max_length,
    )
    device = input_ids.device
    forced_BT, prefix_lengths_B1 = _forced(prefixes, batch, longest - start, device)
    steps = _readers(models, source, generation_config, model_kwargs)
    # With one beam the first end is the end.
    only_until_full = num_beams == 1 or generation_config.early_stopping is True
    hopeful = generation_config.early_stopping == "never" and exponent > 0
    # So many that K of them go on, even if every beam ends in every way it can.
    num_candidates = num_beams * max(2, 1 + len(as_list(generation_config.eos_token_id)))
    criteria = {type(one).__module__ for one in stopping_criteria}
    may_leave = not logits_processor and criteria <= {StoppingCriteria.__module__}

    here_B = torch.arange(batch, device=device)  # the sources that have not left
    found_scores_BK = torch.empty((batch, num_beams), dtype=torch.float32, device=device)
    found_BKT = input_ids.new_empty((batch, num_beams, longest))
    ids_BKT = input_ids.unflatten(0, (batch, num_beams))
    scores_BK = torch.full_like(found_scores_BK, -math.inf)
    scores_BK[:, 0] = 0.0  # all beams are still the same one
    finished_BK = torch.full_like(scores_BK, -math.inf)
    finished_BKT = ids_BKT.new_full((batch, num_beams, longest), filler)
    open_B1 = torch.ones((batch, 1), dtype=torch.bool, device=device)

    for length in range(start, longest):
        flat_ids = ids_BKT.flatten(0, 1)
        log_probabilities = _mean([step.log_probabilities(flat_ids) for step in steps])
        log_probabilities = logits_processor(flat_ids, log_probabilities)
        log_probabilities_BKV = log_probabilities.unflatten(0, (-1, num_beams))
        if length - start < forced_BT.shape[1]:
            log_probabilities_BKV = _force(log_probabilities_BKV, forced_BT[:, length - start])
        total_BV = (scores_BK[..., None] + log_probabilities_BKV).flatten(1)
        scores_BC, places_BC = total_BV.topk(min(num_candidates, total_BV.shape[1]))
        vocab_size = log_probabilities_BKV.shape[-1]
        parents_BC, tokens_BC = places_BC // vocab_size, places_BC % vocab_size
        ids_BCT = torch.cat((_rows(ids_BKT, parents_BC), tokens_BC[..., None]), dim=2)

        ends_BC = stopping_criteria(ids_BCT.flatten(0, 1), None).view_as(places_BC)
        generated_B1 = (length + 1 - start - prefix_lengths_B1).clamp(min=1)
        counts_BC = ends_BC & open_B1
        counts_BC[:, num_beams:] = False
        if counts_BC.any():
            final_BC = scores_BC / length_penalty(generated_B1, exponent, form)
            merged = torch.cat((finished_BK, final_BC.masked_fill(~counts_BC, -math.inf)), dim=1)
            finished_BK, best_BK = merged.topk(num_beams)
            padded_BCT = F.pad(ids_BCT, (0, longest - length - 1), value=filler)
            finished_BKT = _rows(torch.cat((finished_BKT, padded_BCT), dim=1), best_BK)

        scores_BK, kept_BK = scores_BC.masked_fill(ends_BC, -math.inf).topk(num_beams)
        ids_BKT, parents_BK = _rows(ids_BCT, kept_BK), parents_BC.gather(1, kept_BK)
        worst_B1 = finished_BK[:, -1:]
        attainable = longest - start - prefix_lengths_B1 if hopeful else generated_B1
        open_B1 &= scores_BK[:, :1] / length_penalty(attainable, exponent, form) > worst_B1
        if only_until_full:
            open_B1 &= worst_B1.isneginf()
        if not open_B1.any():
            break
        going_on_B = torch.arange(len(here_B), device=device)
        left = may_leave and int(open_B1.sum()) <= CROWDED * len(here_B)
        if left:
            found_scores_BK[here_B], found_BKT[here_B] = finished_BK, finished_BKT
            going_on_B = open_B1[:, 0].nonzero()[:, 0]
            here_B, open_B1, forced_BT, prefix_lengths_B1 = (
                of_B[going_on_B] for of_B in (here_B, open_B1, forced_BT, prefix_lengths_B1)
            )
            scores_BK, finished_BK, parents_BK, ids_BKT, finished_BKT = (
                of_B[going_on_B]
                for of_B in (scores_BK, finished_BK, parents_BK, ids_BKT, finished_BKT)
            )
        if num_beams > 1 or left:
            rows = (parents_BK + going_on_B[:, None] * num_beams).flatten()
            for step in steps:
                step.reorder(rows, left)

    found_scores_BK[here_B], found_BKT[here_B] = finished_BK, finished_BKT
    # What was forbidden is no output, though a place was left for one.
    found_BKT[..., 1:].masked_fill_(found_scores_BK.isneginf()[..., None], filler)
    n_best = generation_config.num_return_sequences
    return Found(
        found_BKT[:, :n_best, : length + 1].flatten(0, 1), found_scores_BK[:, :n_best].flatten()
    )


def _readers(
    models: Sequence[Any], source: dict[str, Tensor], config: Any, prepared: dict[str, Any]
) -> list[_NextToken]:
    """The models, each with its sources read, and one copy of them for each beam."""
    mask = prepared.get("attention_mask")
    readers = [_NextToken(models[0], prepared["encoder_outputs"], mask, config.use_cache)]
    for model in models[1:]:
        states = model.get_encoder()(**source).last_hidden_state
        copied = BaseModelOutput(last_hidden_state=states.repeat_interleave(config.num_beams, 0))
        readers.append(_NextToken(model, copied, mask, config.use_cache))
    return readers


def _mean(log_probabilities: Sequence[Tensor]) -> Tensor:
    """The logarithm of the mean of probabilities."""
    if len(log_probabilities) == 1:
        return log_probabilities[0]
    return torch.stack(list(log_probabilities)).logsumexp(0) - math.log(len(log_probabilities))


def _forced(
    prefixes: Sequence[Sequence[int]], batch: int, room: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The ids that outputs begin with [B, T], -1 after them, and their numbers [B, 1].

    Raises:
        ValueError: If an output could not go on after its prefix.
    """
    rows = prefixes or [[]] * batch
    most = max(map(len, rows))
    if most >= room:
        raise ValueError(
            f"a prefix of {most} tokens leaves no room in outputs of {room} tokens: raise "
            "max_new_tokens"
        )
    return pad(rows, -1, device), torch.tensor([[len(row)] for row in rows], device=device)


def _force(log_probabilities_BKV: Tensor, tokens_B: Tensor) -> Tensor:
    """Where a token is not -1, it alone is possible, and its probability does not count."""
    places_BK1 = tokens_B.clamp(min=0)[:, None, None].expand(-1, log_probabilities_BKV.shape[1], 1)
    only = torch.full_like(log_probabilities_BKV, -math.inf).scatter(2, places_BK1, 0.0)
    return torch.where((tokens_B < 0)[:, None, None], log_probabilities_BKV, only)


def _rows(ids_BKT: Tensor, rows_BC: Tensor) -> Tensor:
    """Rows [B, C] of each source's ids [B, K, T], as [B, C, T]."""
    return ids_BKT.gather(1, rows_BC[..., None].expand(-1, -1, ids_BKT.shape[2]))


def pad(rows: Sequence[Sequence[int]], value: int, device: torch.device) -> Tensor:
    """Rows of ids as one tensor [B, L], padded on the right."""
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)
    return padded.to(device)


def as_list(ids: int | list[int] | None) -> list[int]:
    """Token ids as transformers keeps them: none, one or several."""
    return [] if ids is None else [ids] if isinstance(ids, int) else ids
