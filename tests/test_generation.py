"""The cache and generate(): every way of decoding against full passes without a cache."""

import itertools
import json
import math

import pytest
import torch
from datasets import Dataset
from tiny import redraw, reversal_batch, tiny_config, tiny_model, token_ids
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    DataCollatorForSeq2Seq,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import BaseModelOutput

from modeling_tinytfm import TinyTFMForCausalLM, TinyTFMForConditionalGeneration
from modeling_tinytfm.modeling_tinytfm import CACHE

START, PAD, EOS = 0, 1, 2
# What transformers calls it: renamed within 5.x.
CHECKPOINTING = "activation_checkpointing"
if not hasattr(PreTrainedModel, f"{CHECKPOINTING}_enable"):
    CHECKPOINTING = "gradient_checkpointing"
SHAPES = ["encoder-decoder", "decoder"]
KINDS = [
    {},
    {"norm_first": True},
    {"position_embedding_type": "learned"},
    {"add_final_layer_norm": True, "scale_embedding": False, "output_bias": True},
]


def uneven_model(shape: str, **changes):
    """A tiny model whose stacks differ in depth and heads, so that none is taken for the other."""
    uneven = {
        "vocab_size": 20,
        "encoder_layers": 1,
        "decoder_layers": 3,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 8,
    }
    if shape == "decoder":
        alone = {"is_encoder_decoder": False, "is_decoder": True}
        return tiny_model(TinyTFMForCausalLM, **{**uneven, **alone, **changes})
    return tiny_model(**{**uneven, **changes})


def talkative(shape: str, **changes):
    """An `uneven_model` whose tokens follow one another in a varied order and sometimes end.

    Redrawn weights alone repeat one token for ever. Here sublayers disturb the residual only a
    little, and the output projection answers each token with the next one of the vocabulary.
    """
    model = uneven_model(shape, tie_word_embeddings=False, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(mean=float(name.endswith("weight")), std=0.2)
            elif parameter.dim() == 1:
                parameter.normal_(std=0.1)
            elif "q_proj" in name or "k_proj" in name:
                parameter.normal_(std=0.6)
            else:
                parameter.normal_(std=0.12 if "out_proj" in name or "fc2" in name else 0.3)
        model.lm_head.weight.add_(model.model.decoder.embed_tokens.weight.roll(1, 0))
    return model


def endless(shape: str = "encoder-decoder", eos: int = EOS, **changes):
    """A model that never emits the end token."""
    model = uneven_model(shape, output_bias=True, eos_token_id=eos, **changes)
    with torch.no_grad():
        model.lm_head.bias[eos] = -1e9
    return model


def curt(shape: str = "encoder-decoder", eos: int = EOS, **changes):
    """A model whose most likely token is always the end token."""
    model = uneven_model(shape, output_bias=True, eos_token_id=eos, **changes)
    with torch.no_grad():
        model.lm_head.bias[eos] = 100.0
    return model


def pad(rows: list[Tensor], side: str = "right") -> dict[str, Tensor]:
    """Rows of ids in one batch, and its mask."""
    return {
        name: pad_sequence(values, batch_first=True, padding_value=filler, padding_side=side)
        for name, values, filler in (
            ("input_ids", rows, PAD),
            ("attention_mask", [torch.ones_like(row) for row in rows], 0),
        )
    }


def prompts(shape: str, lengths=(7, 4, 1)) -> dict[str, Tensor]:
    """A padded batch of sources, or of prompts padded as a decoder needs them: on the left."""
    rows = [token_ids(length, vocab_size=20) for length in lengths]
    return pad(rows, side="left" if shape == "decoder" else "right")


def alone(batch: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """One row of a padded batch as a batch of its own, without its padding."""
    keep = batch["attention_mask"][row].bool()
    return {name: value[row : row + 1, keep] for name, value in batch.items()}


def ids_argument(model) -> tuple[str, str]:
    """The names of what the decoder reads and of its mask."""
    if model.config.is_encoder_decoder:
        return "decoder_input_ids", "decoder_attention_mask"
    return "input_ids", "attention_mask"


def greedy(model, ids: Tensor, steps: int, **source) -> Tensor:
    """The reference: full passes over all tokens so far, for one unpadded row, no cache."""
    name, _ = ids_argument(model)
    for _ in range(steps):
        logits = model(**source, **{name: ids}, use_cache=False).logits
        ids = torch.cat((ids, logits[:, -1:].argmax(dim=-1)), dim=1)
        if ids[0, -1] == model.config.eos_token_id:
            break
    return ids


def greedy_alone(model, batch: dict[str, Tensor], row: int, steps: int) -> list[int]:
    """`greedy` for one row of a batch, without its prompt where there is no encoder."""
    source = alone(batch, row)
    if model.config.is_encoder_decoder:
        start = torch.tensor([[model.config.decoder_start_token_id]])
        return greedy(model, start, steps, **source)[0].tolist()
    prompt = source["input_ids"]
    return greedy(model, prompt, steps)[0, prompt.shape[1] :].tolist()


def stripped(row: Tensor, eos: int = EOS) -> list[int]:
    """Ids up to and with the end token."""
    ids = row.tolist()
    return ids[: ids.index(eos) + 1] if eos in ids else ids


def answers(model, batch: dict[str, Tensor], sequences: Tensor) -> list[list[int]]:
    """What a model of either shape has added to each prompt, up to and with the end token."""
    if not model.config.is_encoder_decoder:
        sequences = sequences[:, batch["input_ids"].shape[1] :]
    return [stripped(row, model.config.eos_token_id) for row in sequences]


def log_probabilities(model, sequences: Tensor, prompt_length: int, **source) -> Tensor:
    """The log-probability of each sequence up to its end token, teacher-forced in one pass."""
    name, _ = ids_argument(model)
    logits = model(**source, **{name: sequences[:, :-1]}, use_cache=False).logits
    scores = logits.log_softmax(dim=-1).gather(2, sequences[:, 1:, None])[..., 0]
    scores, generated = scores[:, prompt_length - 1 :], sequences[:, prompt_length:]
    ended = (generated == model.config.eos_token_id).cumsum(dim=1)
    ended_before = ended - (generated == model.config.eos_token_id).long()
    return scores.masked_fill(ended_before > 0, 0.0).sum(dim=1)


def generated_lengths(sequences: Tensor, prompt_length: int) -> Tensor:
    """Tokens generated for each sequence, the end token counted."""
    return torch.tensor([len(stripped(row[prompt_length:])) for row in sequences])


class Counter:
    """Counts the calls of modules."""

    def __init__(self, *modules: nn.Module):
        self.calls = dict.fromkeys(range(len(modules)), 0)
        for number, module in enumerate(modules):
            module.register_forward_hook(self.counting(number))

    def counting(self, number: int):
        def count(*_):
            self.calls[number] += 1

        return count


# One pass, or many with a cache


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("changes", KINDS, ids=str)
@pytest.mark.parametrize("target_padding", ["none", "left", "right"])
def test_b11_chunks_equal_a_full_pass(target_padding, changes, attention):
    model = uneven_model("encoder-decoder", attn_implementation=attention, **changes)
    source = prompts("encoder-decoder", lengths=(7, 4))
    ids = token_ids(2, 6, vocab_size=20)
    mask = torch.ones(2, 6, dtype=torch.long)
    if target_padding == "left":
        mask[1, :2] = 0
    elif target_padding == "right":
        mask[1, 3:] = 0
    full = model(
        **source, decoder_input_ids=ids, decoder_attention_mask=mask, use_cache=False
    ).logits
    for sizes in ([1] * 6, [2, 1, 3], [6]):
        cache, done = None, 0
        for size in sizes:
            end = done + size
            outputs = model(
                **source,
                decoder_input_ids=ids[:, done:end],
                decoder_attention_mask=None if target_padding == "none" else mask[:, :end],
                cache=cache,
                use_cache=True,
            )
            cache = outputs[CACHE]
            real = mask[:, done:end].bool()
            torch.testing.assert_close(
                outputs.logits[real], full[:, done:end][real], atol=2e-5, rtol=0
            )
            done = end
        assert isinstance(cache, EncoderDecoderCache)
        assert cache.get_seq_length() == 6


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("changes", KINDS, ids=str)
@pytest.mark.parametrize("padding", ["none", "left", "right", "middle"])
def test_b11_chunks_equal_a_full_pass_of_a_decoder(padding, changes, attention):
    model = uneven_model("decoder", attn_implementation=attention, **changes)
    ids = token_ids(2, 6, vocab_size=20)
    mask = torch.ones(2, 6, dtype=torch.long)
    hidden = {"none": [], "left": [0, 1], "right": [4, 5], "middle": [1, 2, 4]}[padding]
    mask[1, hidden] = 0
    full = model(ids, mask, use_cache=False).logits
    real_alone = model(ids[1:, mask[1].bool()], use_cache=False).logits
    torch.testing.assert_close(full[1:, mask[1].bool()], real_alone, atol=2e-5, rtol=0)
    for sizes in ([1] * 6, [2, 1, 3], [6]):
        cache, done = None, 0
        for size in sizes:
            end = done + size
            given_mask = None if padding == "none" else mask[:, :end]
            outputs = model(ids[:, done:end], given_mask, cache=cache, use_cache=True)
            cache = outputs[CACHE]
            real = mask[:, done:end].bool()
            torch.testing.assert_close(
                outputs.logits[real], full[:, done:end][real], atol=2e-5, rtol=0
            )
            done = end
        assert isinstance(cache, DynamicCache)


@pytest.mark.parametrize("shape", SHAPES)
def test_cache_has_the_decoders_layers_and_heads(shape):
    model = uneven_model(shape)
    batch = prompts(shape, lengths=(5,))
    outputs = model.generate(**batch, max_new_tokens=3, min_new_tokens=3, **as_dict())
    cache = outputs[CACHE]
    own = cache.self_attention_cache if shape == "encoder-decoder" else cache
    assert len(own.layers) == 3
    prompt_length = 1 if shape == "encoder-decoder" else 5
    assert {tuple(layer.keys.shape) for layer in own.layers} == {(1, 8, prompt_length + 2, 4)}
    if shape == "decoder":  # what transformers sizes a cache by beforehand
        assert (model.config.num_hidden_layers, model.config.num_attention_heads) == (3, 8)
    else:
        cross = cache.cross_attention_cache
        assert [tuple(layer.keys.shape) for layer in cross.layers] == [(1, 8, 5, 4)] * 3


def as_dict() -> dict:
    return {"return_dict_in_generate": True, "output_scores": True}


# The old name is still right on transformers before 5.24.
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_names_of_the_cache_are_understood(shape, name):
    model = uneven_model(shape)
    batch = prompts(shape, lengths=(5,))
    ids, _ = ids_argument(model)
    target = token_ids(1, 4, vocab_size=20)
    source = batch if shape == "encoder-decoder" else {}
    full = model(**source, **{ids: target}).logits
    cache = model(**source, **{ids: target[:, :3]}, use_cache=True)[CACHE]
    last = model(**source, **{ids: target[:, 3:], name: cache}).logits
    torch.testing.assert_close(last, full[:, 3:], atol=2e-5, rtol=0)


def test_a_plain_decoder_cache_is_completed():
    model = uneven_model("encoder-decoder")
    source, target = prompts("encoder-decoder"), token_ids(3, 4, vocab_size=20)
    full = model(**source, decoder_input_ids=target).logits
    first = model(**source, decoder_input_ids=target[:, :3], cache=DynamicCache())
    assert isinstance(first[CACHE], EncoderDecoderCache)
    last = model(**source, decoder_input_ids=target[:, 3:], cache=first[CACHE]).logits
    torch.testing.assert_close(last, full[:, 3:], atol=2e-5, rtol=0)


def test_a_cache_of_another_kind_is_refused():
    model = uneven_model("decoder")
    with pytest.raises(ValueError, match=r"cache must be a transformers Cache, not tuple"):
        model(token_ids(1, 2, vocab_size=20), cache=((torch.zeros(1), torch.zeros(1)),))


def test_reordering_the_cache_moves_both_halves():
    """Beams of one source share their source's keys: only rows of different sources tell."""
    model = uneven_model("encoder-decoder")
    source, target = prompts("encoder-decoder"), token_ids(3, 5, vocab_size=20)
    order = torch.tensor([2, 0, 1])
    moved = {name: value[order] for name, value in source.items()}
    full = model(**moved, decoder_input_ids=target[order]).logits
    outputs = model(**source, decoder_input_ids=target[:, :4], use_cache=True)
    cache = outputs[CACHE]
    cache.reorder_cache(order)
    states = (outputs.encoder_last_hidden_state[order],)
    last = model(
        encoder_outputs=states,
        attention_mask=moved["attention_mask"],
        decoder_input_ids=target[order, 4:],
        cache=cache,
    ).logits
    torch.testing.assert_close(last, full[:, 4:], atol=2e-5, rtol=0)


@pytest.mark.parametrize("cache", [None, "static"])
def test_beams_trade_places_without_the_keys_of_their_source(reverser, cache, monkeypatch):
    batch = reversal_batch(6, torch.Generator().manual_seed(5))
    options = {"num_beams": 4, "max_new_tokens": 16, **as_dict()}
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = reverser.generate(**inputs, use_cache=False, **options)
    moved = []
    reorder = Cache.reorder_cache
    monkeypatch.setattr(
        Cache, "reorder_cache", lambda self, rows: moved.append(self) or reorder(self, rows)
    )
    outputs = reverser.generate(**inputs, cache_implementation=cache, **options)
    assert outputs.sequences.equal(expected.sequences)
    torch.testing.assert_close(outputs.sequences_scores, expected.sequences_scores)
    assert moved
    assert all(one is outputs[CACHE].self_attention_cache for one in moved)


def test_cached_source_keys_are_used_instead_of_the_states():
    model = uneven_model("encoder-decoder")
    source, target = prompts("encoder-decoder"), token_ids(3, 3, vocab_size=20)
    outputs = model(**source, decoder_input_ids=target[:, :2], use_cache=True)
    garbage = torch.full_like(outputs.encoder_last_hidden_state, 1e3)
    mask = source["attention_mask"]
    last = model(
        encoder_outputs=(garbage,),
        attention_mask=mask,
        decoder_input_ids=target[:, 2:],
        cache=outputs[CACHE],
    ).logits
    full = model(**source, decoder_input_ids=target).logits
    torch.testing.assert_close(last, full[:, 2:], atol=2e-5, rtol=0)


# generate() with a cache, without, and with another kind of cache


@pytest.mark.parametrize("options", [{}, {"num_beams": 4, "num_return_sequences": 4}], ids=str)
@pytest.mark.parametrize("changes", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_b11_use_cache_changes_no_token(shape, changes, options):
    model = talkative(shape, **changes)
    batch = prompts(shape)
    with_cache = model.generate(**batch, max_new_tokens=12, use_cache=True, **options)
    without = model.generate(**batch, max_new_tokens=12, use_cache=False, **options)
    assert with_cache.tolist() == without.tolist()


@pytest.mark.parametrize("num_beams", [1, 4])
def test_b11_use_cache_changes_no_token_of_a_trained_model(reverser, num_beams):
    batch = reversal_batch(16, torch.Generator().manual_seed(1))
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    options = {"num_beams": num_beams, "num_return_sequences": num_beams, "max_new_tokens": 16}
    with_cache = reverser.generate(**source, use_cache=True, **options)
    assert with_cache.tolist() == reverser.generate(**source, use_cache=False, **options).tolist()
    right = [row[row != -100].tolist() for row in batch["labels"]]
    found = [stripped(row)[1:] for row in with_cache[::num_beams]]
    assert sum(map(list.__eq__, found, right)) >= 14
    assert len({len(row) for row in found}) > 4


@pytest.mark.parametrize("options", [{}, {"num_beams": 4, "num_return_sequences": 2}], ids=str)
@pytest.mark.parametrize("changes", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_b45_static_cache_changes_no_token(shape, changes, options):
    model = talkative(shape, **changes)
    batch = prompts(shape)
    options = {**options, "max_new_tokens": 12}
    options |= {"output_logits": True, **as_dict()}
    static = model.generate(**batch, cache_implementation="static", **options)
    dynamic = model.generate(**batch, **options)
    assert static.sequences.tolist() == dynamic.sequences.tolist()
    for found, expected in zip(static.logits, dynamic.logits, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_b45_static_cache_is_one_and_can_be_used_again():
    model = talkative("encoder-decoder")
    static = {"cache_implementation": "static", "max_new_tokens": 8}
    for _ in range(3):
        batch = prompts("encoder-decoder")
        outputs = model.generate(**batch, **static, **as_dict())
        assert "Static" in type(outputs[CACHE].self_attention_cache).__name__
        assert outputs.sequences.tolist() == model.generate(**batch, max_new_tokens=8).tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_b45_static_cache_after_a_padded_prefix(shape):
    model = talkative(shape)
    if shape == "decoder":
        batch = prompts(shape, lengths=(2, 6))
    else:
        prefixes = pad([torch.tensor([START]), torch.tensor([START, 5, 9])], side="left")
        batch = {
            **prompts(shape, lengths=(3, 6)),
            "decoder_input_ids": prefixes["input_ids"],
            "decoder_attention_mask": prefixes["attention_mask"],
        }
    static = model.generate(**batch, max_new_tokens=8, cache_implementation="static")
    assert static.tolist() == model.generate(**batch, max_new_tokens=8).tolist()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("num_beams", [1, 4])
def test_b11_encoder_and_source_keys_are_computed_once(num_beams, cache):
    model = talkative("encoder-decoder")
    source_keys = [layer.encoder_attn.k_proj for layer in model.model.decoder.layers]
    source_values = [layer.encoder_attn.v_proj for layer in model.model.decoder.layers]
    own_keys = [layer.self_attn.k_proj for layer in model.model.decoder.layers]
    once = Counter(model.model.encoder, *source_keys, *source_values)
    each_step = Counter(*own_keys)
    outputs = model.generate(
        **prompts("encoder-decoder"),
        num_beams=num_beams,
        max_new_tokens=6,
        min_new_tokens=6,
        cache_implementation=None if cache == "dynamic" else cache,
        **as_dict(),
    )
    assert set(once.calls.values()) == {1}
    assert set(each_step.calls.values()) == {6}
    assert isinstance(outputs[CACHE], EncoderDecoderCache)


def test_given_encoder_outputs_spare_the_encoder():
    model = talkative("encoder-decoder")
    batch = prompts("encoder-decoder")
    expected = model.generate(**batch, max_new_tokens=8, num_beams=3)
    states = model.get_encoder()(**batch)
    assert isinstance(states, BaseModelOutput)
    counter = Counter(model.model.encoder)
    mask = batch["attention_mask"]
    found = model.generate(
        encoder_outputs=states, attention_mask=mask, max_new_tokens=8, num_beams=3
    )
    assert found.tolist() == expected.tolist()
    assert counter.calls == {0: 0}


# Ways of decoding


@pytest.mark.parametrize("changes", [*KINDS, {"decoder_start_token_id": PAD}], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_takes_the_most_likely_token_of_a_full_pass(shape, changes):
    model = talkative(shape, **changes)
    batch = prompts(shape)
    sequences = model.generate(**batch, max_new_tokens=12)
    expected = [greedy_alone(model, batch, row, steps=12) for row in range(3)]
    assert answers(model, batch, sequences) == expected
    for row, answer in zip(sequences, expected, strict=True):
        start = batch["input_ids"].shape[1] if shape == "decoder" else 0
        assert set(row[start + len(answer) :].tolist()) <= {PAD}


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize(
    ("shape", "side"),
    [("encoder-decoder", "left"), ("encoder-decoder", "right"), ("decoder", "left")],
)
def test_padded_rows_are_generated_as_alone(shape, side, num_beams):
    model = talkative(shape)
    batch = pad([token_ids(length, vocab_size=20) for length in (9, 5, 1)], side)
    options = {
        "num_beams": num_beams,
        "num_return_sequences": num_beams,
        "max_new_tokens": 10,
        **as_dict(),
    }
    together = model.generate(**batch, **options)
    for row in range(3):
        single = alone(batch, row)
        expected = model.generate(**single, **options)
        rows = slice(row * num_beams, (row + 1) * num_beams)
        found = answers(model, batch, together.sequences[rows])
        assert found == answers(model, single, expected.sequences)
        if num_beams > 1:
            torch.testing.assert_close(
                together.sequences_scores[rows], expected.sequences_scores, atol=1e-5, rtol=0
            )


def test_a_prompt_padded_on_the_right_is_refused():
    """generate() goes on after the last column, which would be padding."""
    model = talkative("decoder")
    batch = pad([token_ids(length, vocab_size=20) for length in (5, 3)], side="right")
    for options in ({}, {"use_cache": False}, {"cache_implementation": "static"}, {"num_beams": 2}):
        with pytest.raises(ValueError, match=r"attention_mask.*left"):
            model.generate(**batch, max_new_tokens=6, **options)


@pytest.mark.parametrize("shape", SHAPES)
def test_sampling_follows_the_seed_and_not_the_cache(shape):
    model = talkative(shape)
    batch = prompts(shape)
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 8, "top_k": 0}
    runs = []
    for seed, use_cache in ((1, True), (1, True), (1, False), (2, True)):
        torch.manual_seed(seed)
        runs.append(model.generate(**batch, use_cache=use_cache, **options).tolist())
    assert runs[0] == runs[1] == runs[2] != runs[3]
    assert len({tuple(row) for row in runs[0]}) > 3


@pytest.mark.parametrize("shape", SHAPES)
def test_sampling_draws_from_the_models_distribution(shape):
    model = talkative(shape)
    batch = prompts(shape, lengths=(5,))
    draws = 4000
    options = {"max_new_tokens": 1, "do_sample": True, "top_k": 0}
    found = model.generate(**batch, num_return_sequences=draws, **options)[:, -1]
    frequencies = found.bincount(minlength=20) / draws
    target = batch if shape == "decoder" else {**batch, "decoder_input_ids": torch.tensor([[0]])}
    expected = model(**target).logits[0, -1].softmax(dim=-1)
    deviation = (expected * (1 - expected) / draws).sqrt()
    assert ((frequencies - expected).abs() <= 5 * deviation + 1e-9).all()
    assert expected.max() < 0.9
    greedy_draws = model.generate(**batch, max_new_tokens=6, do_sample=True, top_k=1)
    assert greedy_draws.tolist() == model.generate(**batch, max_new_tokens=6).tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_beam_sampling_and_its_scores(shape):
    model = talkative(shape)
    batch = prompts(shape)
    options = {"do_sample": True, "num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 8}
    outputs = model.generate(**batch, **options, **as_dict())
    assert outputs.sequences_scores.isfinite().all()
    assert len(outputs.sequences) == 9


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("shape", [*SHAPES, "trained"])
def test_beam_scores_are_teacher_forced_log_probabilities(shape, length_penalty, reverser):
    if shape == "trained":
        model, shape = reverser, "encoder-decoder"
        batch = reversal_batch(4, torch.Generator().manual_seed(3))
        del batch["labels"]
    else:
        model, batch = talkative(shape), prompts(shape)
    outputs = model.generate(
        **batch,
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=12,
        length_penalty=length_penalty,
        **as_dict(),
    )
    sequences, scores = outputs.sequences, outputs.sequences_scores
    assert len({tuple(row) for row in sequences.tolist()}) == len(sequences)
    assert (scores.view(-1, 4).diff(dim=1) <= 0).all()
    for row in range(len(batch["input_ids"])):
        rows = slice(4 * row, 4 * row + 4)
        single = alone(batch, row)
        if shape == "decoder":
            prompt_length = single["input_ids"].shape[1]
            padding = batch["input_ids"].shape[1] - prompt_length
            beams, source = sequences[rows, padding:], {}
        else:
            prompt_length, beams = 1, sequences[rows]
            source = {name: value.expand(4, -1) for name, value in single.items()}
        expected = log_probabilities(model, beams, prompt_length, **source)
        lengths = generated_lengths(beams, prompt_length)
        expected = expected / lengths**length_penalty
        torch.testing.assert_close(scores[rows], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_full_beam_equals_exhaustive_search(shape, length_penalty):
    model = talkative(shape, vocab_size=6)
    batch = prompts(shape, lengths=(4,))
    batch["input_ids"] = batch["input_ids"] % 3 + 3
    if shape == "decoder":
        start, source = batch["input_ids"], {}
    else:
        start, source = torch.tensor([[START]]), batch
    others = [token for token in range(6) if token != EOS]
    endings = [
        (*tokens, EOS) for length in range(4) for tokens in itertools.product(others, repeat=length)
    ]
    endings += list(itertools.product(others, repeat=4))
    assert len(endings) == 5**0 + 5**1 + 5**2 + 5**3 + 5**4
    ranked = []
    for length in range(1, 5):
        group = [ending for ending in endings if len(ending) == length]
        sequences = torch.cat((start.expand(len(group), -1), torch.tensor(group)), dim=1)
        expanded = {name: value.expand(len(group), -1) for name, value in source.items()}
        scores = log_probabilities(model, sequences, start.shape[1], **expanded)
        ranked += zip((scores / length**length_penalty).tolist(), group, strict=True)
    ranked.sort(reverse=True)

    outputs = model.generate(
        **batch,
        num_beams=len(endings),
        num_return_sequences=len(endings),
        max_new_tokens=4,
        length_penalty=length_penalty,
        **as_dict(),
    )
    found = [tuple(stripped(row[start.shape[1] :])) for row in outputs.sequences]
    assert sorted(found) == sorted(endings)
    expected_scores = torch.tensor([score for score, _ in ranked])
    torch.testing.assert_close(outputs.sequences_scores, expected_scores, atol=1e-5, rtol=1e-5)
    by_ending = {ending: score for score, ending in ranked}
    own_scores = torch.tensor([by_ending[ending] for ending in found])
    torch.testing.assert_close(outputs.sequences_scores, own_scores, atol=1e-5, rtol=1e-5)
    assert found[0] == ranked[0][1]


@pytest.mark.parametrize("shape", SHAPES)
def test_step_scores_lead_to_the_beam_scores(shape):
    model = talkative(shape)
    outputs = model.generate(
        **prompts(shape), num_beams=3, num_return_sequences=3, max_new_tokens=8, **as_dict()
    )
    steps = model.compute_transition_scores(
        outputs.sequences, outputs.scores, outputs.beam_indices, normalize_logits=False
    )
    lengths = (outputs.beam_indices >= 0).sum(dim=1)
    torch.testing.assert_close(
        steps.sum(dim=1) / lengths, outputs.sequences_scores, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("draft", ["itself", "another", "n-grams of the prompt"])
@pytest.mark.parametrize("shape", SHAPES)
def test_assisted_generation_gives_the_greedy_tokens(shape, draft):
    model = talkative(shape)
    assistants = {
        "itself": {"assistant_model": model},
        "another": {"assistant_model": talkative(shape, encoder_layers=2, decoder_layers=1)},
        "n-grams of the prompt": {"prompt_lookup_num_tokens": 3},
    }
    batch = prompts(shape, lengths=(6,))
    batch["input_ids"][:, 3:] = batch["input_ids"][:, :3]
    plain = model.generate(**batch, max_new_tokens=14)
    assert model.generate(**batch, max_new_tokens=14, **assistants[draft]).tolist() == (
        plain.tolist()
    )


def test_a_trained_assistant_saves_passes(reverser):
    batch = reversal_batch(1, torch.Generator().manual_seed(5))
    del batch["labels"]
    plain = reverser.generate(**batch, max_new_tokens=14)
    helper = TinyTFMForConditionalGeneration(reverser.config).eval()
    helper.load_state_dict(reverser.state_dict())
    counter = Counter(reverser.model.encoder, reverser.model.decoder)
    assisted = reverser.generate(**batch, max_new_tokens=14, assistant_model=helper)
    assert assisted.tolist() == plain.tolist()
    assert counter.calls[0] == 1
    assert counter.calls[1] < plain.shape[1] - 1


def test_two_end_tokens():
    model = talkative("encoder-decoder")
    batch = prompts("encoder-decoder")
    first = model.generate(**batch, max_new_tokens=12)
    other = int(first[0, 3])
    ended = model.generate(**batch, max_new_tokens=12, eos_token_id=[EOS, other])
    for row, longer in zip(ended, first, strict=True):
        ids = longer.tolist()[1:]
        stops = [ids.index(token) for token in (EOS, other) if token in ids]
        expected = ids[: min(stops) + 1] if stops else ids
        assert row.tolist()[1 : len(expected) + 1] == expected
        assert set(row.tolist()[len(expected) + 1 :]) <= {PAD}


def test_intermediate_results_are_those_of_a_full_pass():
    model = uneven_model("encoder-decoder")
    batch = prompts("encoder-decoder", lengths=(5, 3))
    outputs = model.generate(
        **batch,
        max_new_tokens=4,
        min_new_tokens=4,
        output_attentions=True,
        output_hidden_states=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    full = model(
        **batch,
        decoder_input_ids=outputs.sequences[:, :-1],
        output_attentions=True,
        output_hidden_states=True,
        use_cache=False,
    )
    close = {"atol": 2e-5, "rtol": 0}
    torch.testing.assert_close(torch.stack(outputs.logits, dim=1), full.logits, **close)
    assert len(outputs.encoder_hidden_states) == 2
    assert len(outputs.encoder_attentions) == 1
    torch.testing.assert_close(outputs.encoder_hidden_states, full.encoder_hidden_states)
    for step in range(4):
        for layer in range(3):
            for kind in ("cross_attentions", "decoder_attentions"):
                found = getattr(outputs, kind)[step][layer][:, :, 0]
                expected = getattr(full, kind)[layer][:, :, step, : found.shape[-1]]
                torch.testing.assert_close(found, expected, **close)
            states = outputs.decoder_hidden_states[step][layer + 1][:, 0]
            expected = full.decoder_hidden_states[layer + 1][:, step]
            torch.testing.assert_close(states, expected, **close)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_streamer_sees_every_token(shape):
    class Collector(BaseStreamer):
        def __init__(self):
            self.seen, self.ended = [], False

        def put(self, value):
            self.seen += value.flatten().tolist()

        def end(self):
            self.ended = True

    model, collector = talkative(shape), Collector()
    batch = prompts(shape, lengths=(5,))
    sequences = model.generate(**batch, max_new_tokens=8, streamer=collector)
    assert collector.seen == sequences[0].tolist()
    assert collector.ended


# A target that has begun already


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("start", [[START], []], ids=["with start token", "without"])
def test_b17_a_prefix_is_kept_and_continued(reverser, start, num_beams):
    batch = reversal_batch(1, torch.Generator().manual_seed(7))
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    unlikely = [12, 3]
    prefix = torch.tensor([[*start, *unlikely]])
    options = {"decoder_input_ids": prefix, "num_beams": num_beams, "max_new_tokens": 8}
    sequences = reverser.generate(**source, **options)
    assert sequences[0, :3].tolist() == [START, *unlikely]
    assert START not in sequences[0, 1:].tolist()
    assert sequences.tolist() == reverser.generate(**source, **options, use_cache=False).tolist()
    if num_beams == 1:
        expected = greedy(reverser, torch.tensor([[START, *unlikely]]), 8, **source)
        assert sequences.tolist() == expected.tolist()


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_b17_a_batch_of_prefixes_padded_on_the_left(changes, num_beams, use_cache):
    model = talkative("encoder-decoder", **changes)
    batch = prompts("encoder-decoder", lengths=(6, 4, 5))
    prefixes = [torch.tensor(ids) for ids in ([START], [START, 5, 9], [START, 7])]
    padded = pad(prefixes, side="left")
    options = {
        "max_new_tokens": 8,
        "num_beams": num_beams,
        "num_return_sequences": num_beams,
        "use_cache": use_cache,
    }
    together = model.generate(
        **batch,
        decoder_input_ids=padded["input_ids"],
        decoder_attention_mask=padded["attention_mask"],
        **options,
    )
    for row, prefix in enumerate(prefixes):
        expected = model.generate(**alone(batch, row), decoder_input_ids=prefix[None], **options)
        rows = together[row * num_beams : (row + 1) * num_beams, 3 - len(prefix) :]
        assert [stripped(found) for found in rows] == [stripped(found) for found in expected]


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("num_beams", [1, 2])
def test_b17_prefixes_padded_on_the_right_are_refused(num_beams, cache):
    model = talkative("encoder-decoder")
    padded = pad([torch.tensor([START]), torch.tensor([START, 5, 9])], side="right")
    with pytest.raises(ValueError, match=r"decoder_attention_mask.*left"):
        model.generate(
            **prompts("encoder-decoder", lengths=(6, 4)),
            decoder_input_ids=padded["input_ids"],
            decoder_attention_mask=padded["attention_mask"],
            num_beams=num_beams,
            max_new_tokens=4,
            cache_implementation=cache,
        )


@pytest.mark.parametrize("num_beams", [1, 4])
def test_a_prompt_of_embeddings(num_beams):
    model = talkative("decoder")
    batch = prompts("decoder")
    expected = model.generate(**batch, max_new_tokens=8, num_beams=num_beams)
    embeds = model.get_input_embeddings()(batch["input_ids"])
    for use_cache in (True, False):
        found = model.generate(
            inputs_embeds=embeds,
            attention_mask=batch["attention_mask"],
            max_new_tokens=8,
            num_beams=num_beams,
            use_cache=use_cache,
        )
        assert found.tolist() == expected[:, batch["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("lengths", [(5,), (7, 4, 1)])
def test_embeddings_stand_for_the_prompt_that_is_given_beside_them(lengths):
    model = talkative("decoder")
    batch, other = prompts("decoder", lengths), prompts("decoder", lengths)
    for read in (batch, other):
        embeds = model.get_input_embeddings()(read["input_ids"])
        expected = model.generate(**read, max_new_tokens=6)[:, read["input_ids"].shape[1] :]
        found = model.generate(**batch, inputs_embeds=embeds, max_new_tokens=6)
        assert found[:, : -expected.shape[1]].tolist() == batch["input_ids"].tolist()
        assert found[:, -expected.shape[1] :].tolist() == expected.tolist()


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_source_padded_on_the_left_needs_no_mask(num_beams):
    model = talkative("encoder-decoder")
    ids = token_ids(2, 6, vocab_size=20)
    expected = model.generate(ids, max_new_tokens=6, num_beams=num_beams)
    padded = torch.cat((torch.full((2, 3), model.config.pad_token_id), ids), dim=1)
    for arguments in ((padded,), ()):
        named = {} if arguments else {"input_ids": padded}
        found = model.generate(*arguments, **named, max_new_tokens=6, num_beams=num_beams)
        assert found.tolist() == expected.tolist()


def test_embeddings_of_a_target_are_not_passed_over():
    model = talkative("encoder-decoder")
    with pytest.raises(ValueError, match="decoder_inputs_embeds has no use in generate"):
        model.generate(
            **prompts("encoder-decoder"),
            decoder_inputs_embeds=torch.randn(3, 2, 32),
            max_new_tokens=3,
        )


def test_a_source_of_embeddings():
    model = talkative("encoder-decoder")
    batch = prompts("encoder-decoder")
    embeds = model.get_input_embeddings()(batch["input_ids"])
    for num_beams in (1, 4):
        expected = model.generate(**batch, max_new_tokens=8, num_beams=num_beams)
        found = model.generate(
            inputs_embeds=embeds,
            attention_mask=batch["attention_mask"],
            max_new_tokens=8,
            num_beams=num_beams,
        )
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("passed", ["all tokens", "only the new tokens"])
def test_going_on_with_the_cache_of_an_earlier_call(passed):
    model = talkative("decoder")
    batch = prompts("decoder", lengths=(5, 3))
    options = {"max_new_tokens": 4, "min_new_tokens": 4}
    first = model.generate(**batch, **options, **as_dict())
    turn = token_ids(2, 3, vocab_size=20)
    longer = torch.cat((first.sequences, turn), dim=1)
    mask = torch.cat((batch["attention_mask"], torch.ones(2, 7, dtype=torch.long)), dim=1)
    expected = model.generate(longer, attention_mask=mask, **options)[:, -4:]
    fed = []
    model.model.decoder.register_forward_pre_hook(
        lambda _, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    # The last token of the first answer has not been read yet.
    ids = longer if passed == "all tokens" else longer[:, -4:]
    found = model.generate(ids, attention_mask=mask, **options, **{CACHE: first[CACHE]})
    assert fed == [4, 1, 1, 1]
    assert found[:, -4:].tolist() == expected.tolist()


@pytest.mark.parametrize("lengths", [(5, 2), (2, 5), (1, 1)])
@pytest.mark.parametrize("masked", [True, False])
def test_going_on_with_new_tokens_alone_that_no_padding_precedes(lengths, masked):
    """transformers leaves out a mask of ones, whose length told how many tokens there were."""
    model = talkative("decoder")
    first, turn = (token_ids(1, length, vocab_size=20) for length in lengths)
    longer = torch.cat((first, turn), dim=1)
    options = {"max_new_tokens": 4, "min_new_tokens": 4}
    expected = model.generate(longer, **options)[:, -4:]
    mask = torch.ones_like(longer) if masked else None
    ids = turn if masked else longer
    cache = model(first, use_cache=True)[CACHE]
    found = model.generate(ids, attention_mask=mask, **options, **{CACHE: cache})
    assert found[:, -4:].tolist() == expected.tolist()


def test_going_on_with_a_target_and_its_cache():
    model = talkative("encoder-decoder")
    batch = prompts("encoder-decoder")
    options = {"max_new_tokens": 4, "min_new_tokens": 4}
    first = model.generate(**batch, **options, **as_dict())
    longer = torch.cat((first.sequences, token_ids(3, 2, vocab_size=20)), dim=1)
    found = model.generate(**batch, decoder_input_ids=longer, **options, **{CACHE: first[CACHE]})
    expected = model.generate(**batch, decoder_input_ids=longer, **options)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32], ids=str)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("shape", SHAPES)
def test_masks_of_every_type(shape, cache, dtype):
    model, batch = talkative(shape), prompts(shape)
    expected = model.generate(**batch, max_new_tokens=5)
    batch["attention_mask"] = batch["attention_mask"].to(dtype)
    options = {} if cache == "dynamic" else {"cache_implementation": cache}
    assert model.generate(**batch, max_new_tokens=5, **options).tolist() == expected.tolist()


def test_a_prompt_read_in_chunks():
    model = talkative("decoder")
    batch = prompts("decoder", lengths=(9, 4))
    expected = model.generate(**batch, max_new_tokens=6)
    assert model.generate(**batch, max_new_tokens=6, prefill_chunk_size=2).tolist() == (
        expected.tolist()
    )
    ids = token_ids(1, 9, vocab_size=20)
    expected = model.generate(ids, max_new_tokens=6)
    assert model.generate(ids, max_new_tokens=6, prefill_chunk_size=2).tolist() == expected.tolist()


def test_a_prompt_of_the_target_is_read_as_a_whole():
    model, batch = talkative("encoder-decoder"), prompts("encoder-decoder")
    rows = len(batch["attention_mask"])
    start = torch.full((rows, 1), model.config.decoder_start_token_id)
    begun = torch.cat((start, token_ids(rows, 4, vocab_size=20)), dim=1)
    options = {"decoder_input_ids": begun, "max_new_tokens": 6}
    expected = model.generate(**batch, **options)
    assert model.generate(**batch, **options, prefill_chunk_size=2).tolist() == expected.tolist()
    model.generation_config.prefill_chunk_size = 2
    assert model.generate(**batch, **options).tolist() == expected.tolist()
    del options["decoder_input_ids"]
    found = model.generate(**batch, **options)
    model.generation_config.prefill_chunk_size = None
    assert found.tolist() == model.generate(**batch, **options).tolist()


def test_a_decoder_starts_from_its_bos_token_alone():
    model = talkative("decoder")
    expected = greedy(model, torch.tensor([[model.config.bos_token_id]]), 6)
    assert model.generate(max_new_tokens=6).tolist() == expected.tolist()


# Lengths, forced and suppressed tokens


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("eos", [EOS, 7])
def test_b19_limits_count_tokens(eos, num_beams):
    options = {"num_beams": num_beams}
    model, batch = endless(eos=eos), prompts("encoder-decoder")
    assert model.generate(**batch, max_new_tokens=5, **options).shape == (3, 6)
    assert model.generate(**batch, max_length=5, **options).shape == (3, 5)
    model, batch = endless("decoder", eos=eos), prompts("decoder")
    assert model.generate(**batch, max_new_tokens=5, **options).shape == (3, 7 + 5)
    assert model.generate(**batch, max_length=9, **options).shape == (3, 9)


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("eos", [EOS, 7])
def test_b19_minimum_lengths(eos, num_beams):
    options = {"num_beams": num_beams, "max_new_tokens": 10}
    model, batch = curt(eos=eos), prompts("encoder-decoder")
    assert model.generate(**batch, **options)[:, 1].tolist() == [eos] * 3
    for row in model.generate(**batch, min_new_tokens=4, **options).tolist():
        assert row.index(eos) == 5
    for row in model.generate(**batch, min_length=4, **options).tolist():
        assert row.index(eos) == 4
    model, batch = curt("decoder", eos=eos), prompts("decoder")
    batch["input_ids"][batch["input_ids"] == eos] = 8
    for row in model.generate(**batch, min_new_tokens=4, **options).tolist():
        assert row.index(eos) == 7 + 4


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("eos", [EOS, 7])
def test_b19_the_last_token_is_forced_only_when_asked(eos, num_beams):
    model, batch = endless(eos=eos), prompts("encoder-decoder")
    options = {"num_beams": num_beams, "max_new_tokens": 5}
    free = model.generate(**batch, **options)
    assert eos not in free.tolist()[0]
    forced = model.generate(**batch, forced_eos_token_id=eos, **options)
    assert forced[:, -1].tolist() == [eos] * 3
    assert eos not in forced[:, :-1].flatten().tolist()


@pytest.mark.parametrize("num_beams", [1, 4])
def test_forced_first_token(num_beams):
    model, batch = talkative("encoder-decoder"), prompts("encoder-decoder")
    options = {"num_beams": num_beams, "max_new_tokens": 6}
    forced = model.generate(**batch, forced_bos_token_id=17, **options)
    assert forced[:, :2].tolist() == [[START, 17]] * 3
    if num_beams == 1:
        for row in range(3):
            expected = greedy(model, torch.tensor([[START, 17]]), 5, **alone(batch, row))
            assert stripped(forced[row]) == expected[0].tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_b19_suppressed_tokens_are_in_no_beam(shape):
    model, batch = talkative(shape), prompts(shape)
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 8}
    width = batch["input_ids"].shape[1] if shape == "decoder" else 1
    free = model.generate(**batch, **options)[:, width:]
    by_frequency = free.flatten().bincount().argsort(descending=True).tolist()
    banned = [token for token in by_frequency if token not in (PAD, EOS)][:2]
    kept = model.generate(**batch, suppress_tokens=banned, **options)[:, width:]
    assert set(banned) <= set(free.flatten().tolist())
    assert not set(banned) & set(kept.flatten().tolist())
    later = model.generate(**batch, begin_suppress_tokens=[int(free[0, 0])], **options)
    assert int(free[0, 0]) not in later[:, width].tolist()
    pairs = model.generate(**batch, bad_words_ids=[free[0, :2].tolist()], **options)[:, width:]
    found = {tuple(row[i : i + 2]) for row in pairs.tolist() for i in range(len(row) - 1)}
    assert tuple(free[0, :2].tolist()) not in found


def test_only_allowed_tokens():
    model, batch = talkative("encoder-decoder"), prompts("encoder-decoder")

    def after(row: int, ids: Tensor) -> list[int]:
        return [3 + row, EOS] if len(ids) % 2 else [10 + row]

    sequences = model.generate(
        **batch, prefix_allowed_tokens_fn=after, num_beams=2, max_new_tokens=6, min_new_tokens=6
    )
    expected = [[START, *[3 + row, 10 + row] * 3] for row in range(3)]
    assert sequences.tolist() == expected


def test_no_repeated_pairs_and_a_repetition_penalty():
    model, batch = endless(), prompts("encoder-decoder")
    free = model.generate(**batch, max_new_tokens=12)
    assert len(set(free[0].tolist())) < 8
    for row in model.generate(**batch, max_new_tokens=12, no_repeat_ngram_size=1).tolist():
        assert len(set(row)) == 13
    penalised = model.generate(**batch, max_new_tokens=12, repetition_penalty=50.0)
    assert len(set(penalised[0].tolist())) > len(set(free[0].tolist()))


def text_tokenizer(words: int = 40, **special) -> PreTrainedTokenizerFast:
    """Words w3, w4, ... with the ids of `tiny_config`, and no beginning-of-sequence token."""
    vocabulary = {"<start>": START, "<pad>": PAD, "</s>": EOS}
    vocabulary |= {f"w{number}": number for number in range(3, words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "w3", **special}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def rows_of_ids(count: int) -> Dataset:
    ids = [[*token_ids(4 + number % 3).clamp(max=39).tolist(), EOS] for number in range(count)]
    return Dataset.from_dict({"input_ids": ids, "labels": [[*row[-2::-1], EOS] for row in ids]})


def seq2seq_trainer(model, folder, **options) -> Seq2SeqTrainer:
    tokenizer = text_tokenizer()
    arguments = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "disable_tqdm": True,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        **options,
    }
    return Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(**arguments),
        train_dataset=rows_of_ids(4),
        eval_dataset=rows_of_ids(5),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
    )


def test_b19_generation_max_length_of_the_trainer(tmp_path):
    model = endless(vocab_size=50)
    options = {"predict_with_generate": True, "generation_max_length": 26}
    trainer = seq2seq_trainer(model, tmp_path, **options)
    assert trainer.predict(trainer.eval_dataset).predictions.shape == (5, 26)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_b19_no_limit_in_the_generation_config_crashes_no_trainer(tmp_path):
    model = curt(vocab_size=50)
    model.generation_config.max_length = None
    trainer = seq2seq_trainer(model, tmp_path, predict_with_generate=True)
    predictions = trainer.predict(trainer.eval_dataset).predictions
    assert predictions[:, :2].tolist() == [[START, EOS]] * 5


# Longer than the table


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("cache", ["none", "dynamic", "static"])
@pytest.mark.parametrize("shape", SHAPES)
def test_sinusoids_go_on_beyond_the_table(shape, cache, num_beams):
    model = talkative(shape, max_position_embeddings=16)
    longer = type(model)(tiny_config(**{**model.config.to_dict(), "max_position_embeddings": 99}))
    longer.load_state_dict(model.state_dict())
    batch = prompts(shape, lengths=(20, 9) if shape == "encoder-decoder" else (9, 4))
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "num_beams": num_beams}
    options["use_cache"] = cache != "none"
    if cache == "static":
        options["cache_implementation"] = cache
    found = model.generate(**batch, **options)
    assert found.tolist() == longer.eval().generate(**batch, **options).tolist()
    assert found.shape[1] >= 21


@pytest.mark.parametrize("cache", ["none", "dynamic", "static"])
@pytest.mark.parametrize("shape", SHAPES)
def test_learned_positions_name_the_limit(shape, cache):
    model = endless(shape, position_embedding_type="learned", max_position_embeddings=16)
    batch = prompts(shape, lengths=(4,))
    room = 16 if shape == "encoder-decoder" else 16 - 4 + 1
    options = {"use_cache": cache != "none"}
    if cache == "static":
        options["cache_implementation"] = cache
    assert model.generate(**batch, max_new_tokens=room, **options).shape == (1, 17)
    with pytest.raises(ValueError, match=r"length (17|40|43) exceeds max_position_embeddings=16"):
        model.generate(**batch, max_new_tokens=40, **options)


def test_learned_positions_name_the_limit_of_a_source():
    model = endless(position_embedding_type="learned", max_position_embeddings=16)
    with pytest.raises(ValueError, match=r"length 17 exceeds max_position_embeddings=16"):
        model.generate(**prompts("encoder-decoder", lengths=(17, 3)), max_new_tokens=2)


# Continuous sources


@pytest.mark.parametrize("positional", [True, False])
@pytest.mark.parametrize("num_beams", [1, 4])
def test_generating_from_continuous_features(num_beams, positional):
    model = talkative("encoder-decoder", input_feature_size=5)
    features = torch.randn(2, 6, 5)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    source = (features,) if positional else ()
    named = {"attention_mask": mask} | ({} if positional else {"input_features": features})
    counter = Counter(model.model.encoder)
    options = {"num_beams": num_beams, "max_new_tokens": 8}
    sequences = model.generate(*source, **named, **options)
    assert counter.calls == {0: 1}
    for other in ({"use_cache": False}, {"cache_implementation": "static"}):
        found = model.generate(*source, **named, **options, **other)
        assert found.tolist() == sequences.tolist()
    for row, length in enumerate((6, 4)):
        single = {"input_features": features[row : row + 1, :length]}
        expected = model.generate(**single, **options)
        assert stripped(sequences[row]) == stripped(expected[0])
        if num_beams == 1:
            assert expected.tolist() == greedy(model, torch.tensor([[START]]), 8, **single).tolist()


# Training and generating by turns


@pytest.mark.parametrize("shape", SHAPES)
def test_b28_generation_with_gradient_checkpointing(shape):
    model, batch = talkative(shape), prompts(shape)
    options = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 8}
    expected = model.generate(**batch, **options)
    getattr(model, f"{CHECKPOINTING}_enable")()
    model.train()
    model(**batch, labels=batch["input_ids"]).loss.backward()
    model.eval()
    assert model.generate(**batch, **options).tolist() == expected.tolist()


def test_b28_trainer_with_checkpointing_and_generation(tmp_path):
    model = redraw(TinyTFMForConditionalGeneration(tiny_config()))
    options = {"generation_max_length": 7, "generation_num_beams": 2, CHECKPOINTING: True}
    trainer = seq2seq_trainer(model, tmp_path, predict_with_generate=True, **options)
    trainer.train()
    scores = trainer.evaluate()
    assert math.isfinite(scores["eval_loss"])
    predictions = trainer.predict(trainer.eval_dataset).predictions
    source = DataCollatorForSeq2Seq(text_tokenizer())([trainer.eval_dataset[i] for i in (0, 1)])
    source.pop("labels")
    getattr(model, f"{CHECKPOINTING}_disable")()
    expected = model.generate(**source, max_length=7, num_beams=2)
    assert predictions[:2, : expected.shape[1]].tolist() == expected.tolist()


# Start tokens that survive saving


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_b18_start_tokens_survive_a_trainer_and_a_save(tmp_path, elsewhere):
    model = redraw(TinyTFMForConditionalGeneration(tiny_config()))
    trainer = seq2seq_trainer(model, tmp_path / "run")
    tokenizer = trainer.processing_class
    assert tokenizer.bos_token_id is None
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    ids = {"pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": START}
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD, EOS)
    for name in ("config.json", "generation_config.json"):
        saved = json.loads((tmp_path / "saved" / name).read_text())
        found = {key: saved.get(key) for key in ids}
        if found["eos_token_id"] == [EOS]:  # so written by earlier versions of transformers
            found["eos_token_id"] = EOS
        assert found == ids, name

    # A second folder that says neither where to start.
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in (tmp_path / "saved").iterdir():
        (bare / file.name).write_bytes(file.read_bytes())
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((bare / name).read_text())
        settings |= {"decoder_start_token_id": None, "bos_token_id": None}
        (bare / name).write_text(json.dumps(settings))

    source = token_ids(2, 5)
    model.eval()
    expected = model.generate(source).tolist()
    assert [row[0] for row in expected] == [START] * 2
    printed = elsewhere(
        """
import json, sys, torch
from transformers import AutoModelForSeq2SeqLM
source = torch.tensor(json.loads(sys.argv[1]))
model = AutoModelForSeq2SeqLM.from_pretrained("saved", trust_remote_code=True)
found = model.generate(source).tolist()
bare = AutoModelForSeq2SeqLM.from_pretrained("bare", trust_remote_code=True)
errors = []
for call in (lambda: bare.generate(source), lambda: bare(source, labels=source)):
    try:
        call()
    except ValueError as error:
        errors.append(str(error))
print(json.dumps([found, errors]))
""",
        json.dumps(source.tolist()),
    )
    found, errors = json.loads(printed.splitlines()[-1])
    assert found == expected
    assert len(errors) == 2
    assert all("decoder_start_token_id" in error for error in errors)
