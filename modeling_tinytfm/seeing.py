"""A trained encoder-decoder at work on one sentence, measured, for a page that shows it.

    look(model, tokenizer, "3 7 5 9").save_html("page.html")

The model generates first, and then reads what it wrote in ONE teacher-forced pass, whose numbers
are those shown: beam search's own attentions can belong to another hypothesis. Everything beyond
attention weights and hidden states comes from hooks on modules by their usual names, so Marian's
models are seen like ours; a view whose modules are missing is left out, and the page says why.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .decoding import with_output_limit
from .explorer import FORMAT, VERSION, Trace, tokens
from .search import beam_search, penalty_form
from .sight import Sight, Stack
from .translation import check_text, encode

DETAILS = ("attention", "full")
MOST_TOKENS = 128  # on either side, with all layers kept
CONFIG_FIELDS = [
    "vocab_size",
    "d_model",
    "encoder_layers",
    "decoder_layers",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "activation_function",
    "norm_first",
    "add_final_layer_norm",
    "position_embedding_type",
    "scale_embedding",
    "tie_word_embeddings",
]


@torch.no_grad()
def look(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    target: str | None = None,
    *,
    num_beams: int | None = None,
    max_new_tokens: int | None = None,
    detail: str = "full",
    layers: Sequence[int] | None = None,
    name: str | None = None,
) -> Trace:
    """Runs a model on one sentence and keeps what the explorer page shows.

    Args:
        model: A sequence-to-sequence model: ours, or another whose modules have the usual names.
            It is run in evaluation mode with eager attention, and left as it was.
        tokenizer: Its tokenizer.
        text: The source.
        target: What the model is made to write; what it generates if None.
        num_beams: Width of the search; the model's if None.
        max_new_tokens: Longest output in tokens; the model's limit if None.
        detail: "full", or "attention" for the weights alone, which is quickest and smallest.
        layers: Which layers are kept, counted from 1 in encoder and decoder alike; all if None.
        name: What the page calls the model; the folder or Hub name it came from if None.

    Returns:
        The trace, with `save_html` and `save_json`; a notebook shows it as the page.

    Raises:
        ValueError: If source or target have no token, or more than 128 of them with all layers
            kept; if a setting is unusable, or the model gives no attention weights.
    """
    if detail not in DETAILS:
        raise ValueError(f"detail={detail!r} is unknown: choose one of {', '.join(DETAILS)}")
    if tokenizer is None:
        raise ValueError("tokenizer=None: a model that reads features has no tokens to show")
    for limit, value in (("num_beams", num_beams), ("max_new_tokens", max_new_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{limit}={value} is not at least 1")
    if target is not None and (num_beams is not None or max_new_tokens is not None):
        raise ValueError("num_beams and max_new_tokens have no use where a target is given")
    stacks = find_stacks(model, layers)
    (source,) = encode(tokenizer, [text], max_source_length=None)
    if not source:
        raise ValueError(f"text={text!r} has no token")
    check_length("source", len(source), layers)
    with as_it_was(model):
        written = [] if target is None else target_ids(tokenizer, target)
        source_ids = torch.tensor([source], device=model.device)
        if target is None:
            limits = {"num_beams": num_beams, "max_new_tokens": max_new_tokens}
            limits = {key: value for key, value in limits.items() if value is not None}
            start, *written = generate(model, source_ids, limits)
        else:
            start = start_id(model)
        check_length("target", len(written), layers)
        for part in parts(model):
            part.set_attn_implementation("eager")
        sight = Sight(model, source_ids, start, written, stacks)
        sight.measure(detail)
    special = [*tokenizer.all_special_ids, start]
    top_ids = sight.arrays["lens.id"].ravel().tolist() if "lens.id" in sight.arrays else []
    show = functools.partial(tokens, tokenizer, special_ids=special)
    config = model.config
    folder = str(getattr(config, "_name_or_path", "")).rstrip("/").rpartition("/")[2]
    header = {
        "format": FORMAT,
        "version": VERSION,
        "model": {
            "name": name or folder or config.model_type,
            "type": config.model_type,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "config": {
            key: getattr(config, key)
            for key in CONFIG_FIELDS
            if getattr(config, key, None) is not None
        },
        "detail": detail,
        "source_text": text,
        "target_text": tokenizer.decode(written, skip_special_tokens=True),
        "target_given": target is not None,
        "source": show(source),
        "read": show([start, *written[:-1]]),
        "write": show(written),
        "vocabulary": show(sorted(set(top_ids))),
        **sight.header,
        "missing": sight.missing,
    }
    return Trace(header, sight.arrays)


def find_stacks(model: Any, layers: Sequence[int] | None) -> dict[str, Stack]:
    """Encoder and decoder, and which of their layers are kept.

    Raises:
        ValueError: If the model lacks one, or neither has a layer of such a number.
    """
    if not model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is no encoder-decoder: is_encoder_decoder=False")
    stacks = {}
    for name in ("encoder", "decoder"):
        module = model.get_encoder() if name == "encoder" else model.get_decoder()
        all_layers = list(getattr(module, "layers", None) or getattr(module, "block", []))
        chosen = range(1, len(all_layers) + 1) if layers is None else sorted(set(layers))
        kept = [number - 1 for number in chosen if 1 <= number <= len(all_layers)]
        stacks[name] = Stack(module, all_layers, kept)
    depth = {name: len(stack.layers) for name, stack in stacks.items()}
    highest = max(depth.values())
    for number in layers or ():
        if not 1 <= number <= highest:
            raise ValueError(f"layers={list(layers or ())}: {number} is not from 1 to {highest}")
    for name, stack in stacks.items():
        if not stack.kept:
            raise ValueError(f"layers={layers}: none of them is one of the {name}'s {depth[name]}")
    return stacks


def check_length(side: str, length: int, layers: Sequence[int] | None) -> None:
    """Raises ValueError for a sequence that a page with all layers cannot show."""
    if length > MOST_TOKENS and layers is None:
        raise ValueError(
            f"the {side} has {length} tokens, and a page shows at most {MOST_TOKENS} with all "
            "layers: shorten it, or choose some with layers=[...] (see.py: --layers 1 2)"
        )


def target_ids(tokenizer: Any, target: str) -> list[int]:
    """Token ids of a target, as the model should have written them.

    Raises:
        ValueError: If there are none.
    """
    check_text("target", target)
    ids = tokenizer(text_target=target.replace("\0", ""), verbose=False)["input_ids"]
    if not ids:
        raise ValueError(f"target={target!r} has no token")
    return ids


def start_id(model: Any) -> int:
    """The id that the decoder reads first."""
    for settings in (model.generation_config, model.config):
        found = getattr(settings, "decoder_start_token_id", None)
        if found is not None:
            return found
    raise ValueError("the model's config has no decoder_start_token_id")


def generate(model: Any, source_ids: Tensor, limits: dict[str, Any]) -> list[int]:
    """What the model writes, from the start token to the end token."""
    arguments = with_output_limit(model, limits, source_ids.shape[1])
    mask = torch.ones_like(source_ids)
    form = penalty_form(model.generation_config)
    if form != "length":
        arguments["custom_generate"] = functools.partial(
            beam_search,
            models=[model],
            source={"input_ids": source_ids, "attention_mask": mask},
            prefixes=[],
            form=form,
            filler=model.config.pad_token_id,
        )
    found = model.generate(
        input_ids=source_ids,
        attention_mask=mask,
        do_sample=False,
        num_return_sequences=1,
        **arguments,
    )
    (output,) = getattr(found, "sequences", found).tolist()
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    for place, token in enumerate(output[1:], start=1):
        if token in ends:
            return output[: place + 1]
    return output


def parts(model: Any) -> list[PreTrainedModel]:
    """The model and its stacks; older transformers leave a stack with its own config as it was."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


@contextmanager
def as_it_was(model: Any) -> Iterator[None]:
    """Evaluation mode inside; the mode and the attention implementations of before afterwards."""
    was_training = model.training
    implementations = [(part, part.config._attn_implementation) for part in parts(model)]
    model.eval()
    try:
        yield
    finally:
        for part, implementation in implementations:
            part.set_attn_implementation(implementation)
        model.train(was_training)
