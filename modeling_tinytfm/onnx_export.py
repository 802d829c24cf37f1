"""ONNX: the graphs of an encoder and of a decoder with cache, for any runtime.

Three files, whose names and whose inputs and outputs are those that Optimum gives them: the
encoder; the decoder's first step, which also projects the encoder's output to the keys and values
of cross-attention; and all its later steps.
"""

import copy
import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from .conversion import check_class, check_config, deciding, required
from .modeling_tinytfm import CACHE, TinyTFMForConditionalGeneration

logger = logging.getLogger(__name__)

ENCODER_FILE = "encoder_model.onnx"
DECODER_FILE = "decoder_model.onnx"
DECODER_WITH_PAST_FILE = "decoder_with_past_model.onnx"

# Beyond this, weights go into a file beside the graph: protobuf ends at 2 GiB.
_LARGEST_FILE = 1_500_000_000

# What `ONNX_README` honours, and what is nothing to greedy search.
_HONOURED = {
    *("eos_token_id", "suppress_tokens", "bad_words_ids", "max_length", "max_new_tokens"),
    *("do_sample", "num_beams", "early_stopping", "length_penalty", "length_penalty_form"),
    "renormalize_logits",
}

ONNX_README = f"""\
# An encoder-decoder as ONNX graphs

`{ENCODER_FILE}` encodes. `{DECODER_FILE}` is the decoder's first step, `{DECODER_WITH_PAST_FILE}`
every later one, which is given the keys and values so far. Batches and lengths are free.

Greedy search, in this folder (`pip install onnxruntime transformers`):

```python
import json

import numpy as np
from onnxruntime import InferenceSession
from transformers import AutoTokenizer

lines, longest = ["..."], 50  # tokens of an output at most
ids = json.load(open("generation_config.json"))
never = ids.get("suppress_tokens") or []
never += [word[0] for word in ids.get("bad_words_ids") or [] if len(word) == 1]
tokenizer = AutoTokenizer.from_pretrained(".")
batch = tokenizer(lines, padding=True, return_tensors="np")
encoder, decoder, later = (
    InferenceSession(f"{{name}}_model.onnx") for name in ("encoder", "decoder", "decoder_with_past")
)
past = {{"encoder_hidden_states": encoder.run(None, dict(batch))[0]}}
tokens = np.full((len(lines), 1), ids["decoder_start_token_id"])
ended = np.zeros(len(lines), dtype=bool)
while tokens.shape[1] <= longest and not ended.all():
    inputs = {{"input_ids": tokens[:, -1:], "encoder_attention_mask": batch["attention_mask"]}}
    names = [output.name.replace("present", "past_key_values") for output in decoder.get_outputs()]
    logits, *present = decoder.run(None, inputs | past)
    logits[:, :, never] = -np.inf
    kept = past if decoder is later else {{}}  # the encoder's keys and values do not change
    past, decoder = kept | dict(zip(names[1:], present)), later
    best = np.where(ended, ids["pad_token_id"], logits[:, -1].argmax(-1))
    tokens = np.hstack((tokens, best[:, None]))
    ended |= np.isin(best, ids["eos_token_id"])
print(tokenizer.batch_decode(tokens, skip_special_tokens=True))
```
"""


class EncoderGraph(nn.Module):
    """Token ids and mask -> the encoder's output."""

    def __init__(self, model: TinyTFMForConditionalGeneration):
        super().__init__()
        self.encoder = model.get_encoder()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[B, L] and [B, L] -> [B, L, D]."""
        return self.encoder(input_ids, attention_mask).last_hidden_state


class DecoderGraph(nn.Module):
    """The decoder's first step: logits, and the keys and values of both attentions."""

    def __init__(self, model: TinyTFMForConditionalGeneration):
        super().__init__()
        self.model = model

    def forward(
        self, encoder_attention_mask: Tensor, input_ids: Tensor, encoder_hidden_states: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns logits [B, T, V], then for each layer what `cache_names` names."""
        outputs = self.model(
            encoder_outputs=BaseModelOutput(encoder_hidden_states),
            attention_mask=encoder_attention_mask,
            decoder_input_ids=input_ids,
            use_cache=True,
        )
        cache: Any = outputs[CACHE]
        own, memory = cache.self_attention_cache.layers, cache.cross_attention_cache.layers
        pairs = zip(own, memory, strict=True)
        return outputs.logits, *(x for pair in pairs for y in pair for x in (y.keys, y.values))


class DecoderWithPastGraph(nn.Module):
    """A later step: one token for each row, whose keys and values are added to those so far."""

    def __init__(self, model: TinyTFMForConditionalGeneration):
        super().__init__()
        self.model = model

    def forward(
        self, encoder_attention_mask: Tensor, input_ids: Tensor, past: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Returns logits [B, 1, V], then for each layer the decoder's own keys and values."""
        own: Any = DynamicCache()
        memory = DynamicCache()
        cache = EncoderDecoderCache(own, memory)
        for layer in range(self.model.config.decoder_layers):
            first = 4 * layer
            own.update(past[first], past[first + 1], layer)
            memory.update(past[first + 2], past[first + 3], layer)
            cache.is_updated[layer] = True
        batch_size, length = encoder_attention_mask.shape
        # Of the encoder's output only the shape is looked at: keys and values stand for it.
        states = past[0].new_zeros(()).expand(batch_size, length, self.model.config.d_model)
        outputs = self.model(
            encoder_outputs=BaseModelOutput(states),
            attention_mask=encoder_attention_mask,
            decoder_input_ids=input_ids,
            **{CACHE: cache},
        )
        return outputs.logits, *(x for y in own.layers for x in (y.keys, y.values))


def cache_names(prefix: str, layers: int, kinds: Sequence[str]) -> list[str]:
    """Names of a cache's tensors: `prefix.0.decoder.key`, ..."""
    return [
        f"{prefix}.{layer}.{kind}.{part}"
        for layer in range(layers)
        for kind in kinds
        for part in ("key", "value")
    ]


def write_onnx(model: TinyTFMForConditionalGeneration, folder: str | os.PathLike[str]) -> None:
    """Writes the three graphs, in float32, for batches of any size and length.

    Positions end at `max_position_embeddings`.

    Args:
        model: The model; it stays as it is.
        folder: An existing folder.

    Raises:
        ValueError: If it is no encoder-decoder that reads token ids.
        ModuleNotFoundError: If a package is missing.
    """
    check_class("model", model, TinyTFMForConditionalGeneration)
    check_config("ONNX", model.config, input_feature_size=None)
    required("onnx", "onnx")
    required("onnxscript", "onnx")
    settings = deciding(model.generation_config.to_dict())
    unheard = [f"{name}={value!r}" for name, value in settings.items() if name not in _HONOURED]
    if any(len(word) > 1 for word in settings.get("bad_words_ids", [])):
        unheard.append("bad_words_ids of several tokens")
    if unheard:
        logger.warning(
            "the greedy search in the folder's README.md does not know %s", ", ".join(unheard)
        )
    layers, folder = model.config.decoder_layers, Path(folder)
    model = as_float32(model)
    batch, longest = torch.export.Dim("batch"), model.config.max_position_embeddings
    length, target = (torch.export.Dim(name, max=longest) for name in ("length", "target"))
    past_length = torch.export.Dim("past", max=longest - 1)
    # Two rows of different length, as a size of 1 would be taken for a constant.
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    source, tokens = torch.zeros_like(mask), torch.zeros(2, 2, dtype=torch.long)
    mask_axes, both = {0: batch, 1: length}, ("decoder", "encoder")
    encoder, first, later = EncoderGraph(model), DecoderGraph(model), DecoderWithPastGraph(model)
    with torch.no_grad():
        states = encoder(source, mask)
        _, *past = first(mask, tokens, states)
    _write(
        encoder,
        (source, mask),
        (mask_axes, mask_axes),
        folder / ENCODER_FILE,
        ["input_ids", "attention_mask"],
        ["last_hidden_state"],
    )
    _write(
        first,
        (mask, tokens, states),
        (mask_axes, {0: batch, 1: target}, mask_axes),
        folder / DECODER_FILE,
        ["encoder_attention_mask", "input_ids", "encoder_hidden_states"],
        ["logits", *cache_names("present", layers, both)],
    )
    own_axes, memory_axes = {0: batch, 2: past_length}, {0: batch, 2: length}
    _write(
        later,
        (mask, tokens[:, :1], past),
        (mask_axes, {0: batch}, [own_axes, own_axes, memory_axes, memory_axes] * layers),
        folder / DECODER_WITH_PAST_FILE,
        ["encoder_attention_mask", "input_ids", *cache_names("past_key_values", layers, both)],
        ["logits", *cache_names("present", layers, ["decoder"])],
    )


def as_float32(model: Any) -> Any:
    """The model itself, or a copy, on the CPU, in float32 and in evaluation mode."""
    if model.dtype == torch.float32 and model.device.type == "cpu" and not model.training:
        return model
    return copy.deepcopy(model).float().cpu().eval()


def _write(
    graph: nn.Module,
    inputs: tuple[Any, ...],
    axes: tuple[Any, ...],
    file: Path,
    input_names: list[str],
    output_names: list[str],
) -> None:
    size = sum(x.numel() * x.element_size() for x in (*graph.parameters(), *graph.buffers()))
    # It tells of every operator of torchvision that is not installed.
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = registration.level
    registration.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # torch's own use of what it has deprecated, and axes that bear one name on purpose.
            warnings.simplefilter("ignore")
            # By itself first: torch.onnx would make sizes constant rather than fail.
            program = torch.export.export(graph.eval(), inputs, dynamic_shapes=axes)
            torch.onnx.export(
                program,
                (),
                file,
                dynamo=True,
                dynamic_shapes=axes,
                input_names=input_names,
                output_names=output_names,
                external_data=size > _LARGEST_FILE,
                verbose=False,
            )
    finally:
        registration.setLevel(level)
