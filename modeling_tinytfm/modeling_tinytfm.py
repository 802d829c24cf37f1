"""The Transformer of "Attention Is All You Need" (Vaswani et al., 2017), built from the bottom up.

Every part is marked with the paper's section. Post-Norm stands in the two layers of section 3.1.

This file travels with every pushed model: it imports only the standard library, torch,
transformers, and the configuration beside it.

Shapes trail the names of tensors:
B batch, L length, T target length, Q query length, K key length, D d_model, H heads,
E width of a head (D / H), F width of continuous inputs, V vocabulary, C classes.

A mask is True (1) where a query may look.
"""

import copy
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    CausalLMOutputWithPast,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    SequenceClassifierOutput,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple

from .configuration_tinytfm import TinyTFMConfig

# transformers 5.24 renamed the cache, as an argument and as a field of every output.
CACHE = "cache" if "cache" in Seq2SeqLMOutput.__dataclass_fields__ else "past_key_values"


def is_traced() -> bool:
    """Whether a graph is being made, which must not depend on the values of this one batch."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


# Section 5.4: dropout


def drop(x: Tensor, p: float) -> Tensor:
    """Makes each element 0 with probability `p` and divides the others by 1 - p.

    On a CPU, F.dropout takes longer than the matrix product before it: one random number of 64 bits
    decides on four elements here, which rounds `p` down to a multiple of 2^-16.
    """
    if p == 0:
        return x
    dropped = int(p * 2**16)
    if x.device.type != "cpu" or dropped == 2**16 or is_traced():
        return F.dropout(x, p)
    numbers = torch.randint(-(2**63), 2**63 - 1, (-(-x.numel() // 4),))
    numbers = numbers.view(torch.int16)[: x.numel()].view(x.shape)
    # A byte an element, until the backward pass. Products with booleans take four times as long.
    kept = numbers.ge_(dropped - 2**15).to(torch.int8)
    return (x * kept).mul_(2**16 / (2**16 - dropped))


class Dropout(nn.Dropout):
    """`drop` in training, nothing otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        return drop(x, self.p) if self.training else x


# Section 3.2.1: scaled dot-product attention


def eager_attention(
    query_BHQE: Tensor,
    key_BHKE: Tensor,
    value_BHKE: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
    scaling: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V  (Eq. 1), spelled out.

    Args:
        query_BHQE: Queries.
        key_BHKE: Keys.
        value_BHKE: Values.
        mask: Boolean, broadcastable to [B, H, Q, K]; True where a query may look.
        is_causal: In place of a mask: query t may look at keys 0..t.
        dropout: Probability of dropping an attention weight.
        scaling: Factor on the dot products; 1 / sqrt(d_k) if not given.

    Returns:
        The context [B, H, Q, E] and the weights [B, H, Q, K] before dropout. A row of weights adds
        up to 1, or is 0 where everything is masked.
    """
    if scaling is None:
        scaling = query_BHQE.shape[-1] ** -0.5
    # In float32 at least, as dot products can exceed what half precision holds.
    wide = torch.promote_types(query_BHQE.dtype, torch.float32)
    if not torch.is_autocast_enabled(query_BHQE.device.type):  # which would undo it
        query_BHQE, key_BHKE = query_BHQE.to(wide), key_BHKE.to(wide)
    scores_BHQK = ((query_BHQE * scaling) @ key_BHKE.transpose(-1, -2)).to(wide)
    if is_causal and mask is not None:
        raise ValueError("give either mask or is_causal, not both")
    if is_causal:
        mask = causal_mask(scores_BHQK.shape[-2], scores_BHQK.shape[-1], device=scores_BHQK.device)
    if mask is None:
        weights_BHQK = scores_BHQK.softmax(dim=-1)
    else:
        # The lowest finite number instead of -inf: a row without any key gives 0, not 0 / 0.
        hidden = torch.zeros_like(mask, dtype=wide).masked_fill(~mask, torch.finfo(wide).min)
        weights_BHQK = (scores_BHQK + hidden).softmax(dim=-1)
        weights_BHQK = weights_BHQK * mask.any(dim=-1, keepdim=True).to(wide)
    weights_BHQK = weights_BHQK.to(value_BHKE.dtype)
    return drop(weights_BHQK, dropout) @ value_BHKE, weights_BHQK


def sdpa_attention(
    query_BHQE: Tensor,
    key_BHKE: Tensor,
    value_BHKE: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
    scaling: float | None = None,
) -> tuple[Tensor, None]:
    """Eq. 1 by torch's fused kernels, which never keep the weights: see `eager_attention`."""
    if is_causal and mask is not None:
        raise ValueError("give either mask or is_causal, not both")
    context_BHQE = F.scaled_dot_product_attention(
        query_BHQE,
        key_BHKE,
        value_BHKE,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scaling,
    )
    return context_BHQE, None


ATTENTION: dict[str, Callable] = {"eager": eager_attention, "sdpa": sdpa_attention}


def attention_function(name: str) -> Callable:
    """The attention of that name; ValueError if there is none."""
    if name not in ATTENTION:
        choices = ", ".join(ATTENTION)
        raise ValueError(f"attn_implementation={name!r} is unknown: choose one of {choices}")
    return ATTENTION[name]


def fused_trains_slower(key_BHKE: Tensor) -> bool:
    """Whether torch's kernels, backward pass included, take longer than Eq. 1 spelled out.

    They do on a CPU over short sequences: at 24 keys twice as long in float32, and five times in
    bfloat16; at 128 as long in float32. A graph has no lengths to decide by.
    """
    if is_traced():
        return False
    return key_BHKE.device.type == "cpu" and key_BHKE.shape[-2] <= 128


# Section 3.2.2: multi-head attention


def set_init_gain(gain: float, *layers: nn.Linear) -> None:
    """Has `_init_weights` scale these matrices."""
    for layer in layers:
        layer.init_gain = gain  # type: ignore[assignment]


class TinyTFMAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W_O, each head with its own projections.

    Args:
        config: Gives `d_model`, `attention_dropout` and the attention implementation.
        num_heads: h; each head is d_model / h wide.
        layer_idx: This layer's place in the cache, in a decoder.
    """

    def __init__(self, config: TinyTFMConfig, num_heads: int, layer_idx: int = 0):
        super().__init__()
        self.config = config
        self.num_heads = num_heads
        self.head_dim = config.d_model // num_heads
        self.layer_idx = layer_idx
        self.attention_dropout = config.attention_dropout
        self.q_proj = nn.Linear(config.d_model, config.d_model)
        self.k_proj = nn.Linear(config.d_model, config.d_model)
        self.v_proj = nn.Linear(config.d_model, config.d_model)
        self.out_proj = nn.Linear(config.d_model, config.d_model)
        set_init_gain(config.sublayer_init_gain, self.v_proj, self.out_proj)

    def split_heads(self, x_BLD: Tensor) -> Tensor:
        """[B, L, D] -> [B, H, L, E]."""
        return x_BLD.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def forward(
        self,
        query_BQD: Tensor,
        memory_BKD: Tensor | None = None,
        mask: Tensor | None = None,
        is_causal: bool = False,
        cache: Cache | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends from `query_BQD` to itself, or to `memory_BKD` (the encoder's output) if given.

        Args:
            query_BQD: Where queries come from.
            memory_BKD: Where keys and values come from, in cross-attention.
            mask: Boolean, broadcastable to [B, H, Q, K], or None if every key may be seen.
            is_causal: In place of a mask: query t may look at keys 0..t.
            cache: Keys and values of earlier calls; those of this call are added. With both halves
                of an `EncoderDecoderCache`, the memory's: projected in the first call only.
            output_attentions: Whether to return the weights, which needs the eager implementation.

        Returns:
            The output [B, Q, D], and the weights [B, H, Q, K] or None.
        """
        query_BHQE = self.split_heads(self.q_proj(query_BQD))
        if isinstance(cache, EncoderDecoderCache) and cache.is_updated.get(self.layer_idx):
            memory: Any = cache.cross_attention_cache.layers[self.layer_idx]
            key_BHKE, value_BHKE = memory.keys, memory.values
        else:
            source_BKD = given(memory_BKD, query_BQD)
            key_BHKE = self.split_heads(self.k_proj(source_BKD))
            value_BHKE = self.split_heads(self.v_proj(source_BKD))
            if isinstance(cache, EncoderDecoderCache):
                update = cache.cross_attention_cache.update
                key_BHKE, value_BHKE = update(key_BHKE, value_BHKE, self.layer_idx)
                cache.is_updated[self.layer_idx] = True
            elif cache is not None:
                place: dict[str, Any] = {}
                if static_cache_length(cache) is not None:  # older ones cannot count by themselves
                    past_length = cache.get_seq_length(self.layer_idx)
                    new = torch.arange(key_BHKE.shape[2], device=key_BHKE.device)
                    place = {"cache_kwargs": {"cache_position": new + past_length}}
                key_BHKE, value_BHKE = cache.update(key_BHKE, value_BHKE, self.layer_idx, **place)

        # A layer on its own has no model that would have chosen.
        implementation = given(self.config._attn_implementation, "sdpa")
        spelled_out = self.training and implementation == "sdpa" and fused_trains_slower(key_BHKE)
        attend = attention_function("eager" if output_attentions or spelled_out else implementation)
        context_BHQE, weights_BHQK = attend(
            query_BHQE,
            key_BHKE,
            value_BHKE,
            mask=mask,
            is_causal=is_causal,
            dropout=self.attention_dropout if self.training else 0.0,
        )
        context_BQD = context_BHQE.transpose(1, 2).flatten(2)
        return self.out_proj(context_BQD), weights_BHQK if output_attentions else None


# Section 3.2.3: which positions a query may see


def causal_mask(
    query_length: int,
    key_length: int,
    past_length: int | Tensor = 0,
    device: torch.device | None = None,
) -> Tensor:
    """[Q, K]: query t stands at position past_length + t and may look at keys up to there."""
    query_positions_Q = torch.arange(query_length, device=device) + past_length
    return torch.arange(key_length, device=device) <= query_positions_Q[:, None]


def padding_mask(
    name: str, mask: Tensor | None, shape: Sequence[int], shortcut: bool = True
) -> Tensor | None:
    """A caller's mask (int, bool or float; nonzero: attend) as booleans [B, L].

    Args:
        name: What the caller calls it.
        mask: The mask, or None.
        shape: (B, L) of the sequence it belongs to.
        shortcut: Whether to look at the values: None stands for a mask that hides nothing, as
            kernels are faster without.

    Raises:
        ValueError: If the mask has another shape, or, as far as its values are looked at, if it is
            not of zeros and ones, like the additive masks that some libraries use.
    """
    if mask is None:
        return None
    if tuple(mask.shape) != tuple(shape):
        raise ValueError(
            f"{name} has shape {tuple(mask.shape)}, but the sequence it belongs to has "
            f"{tuple(shape)} (batch, length)"
        )
    if not shortcut or is_traced():
        return mask.bool()
    if mask.dtype != torch.bool and mask.device.type == "cpu":
        wrong = mask[(mask != 0) & (mask != 1)]
        if wrong.numel():
            raise ValueError(f"{name} holds {wrong[0].item()}: 1 means attend, 0 means hide")
    mask = mask.bool()
    return None if mask.all() else mask


def mask_of_left_padding(ids_BL: Tensor, pad_token_id: int | None) -> Tensor | None:
    """The mask that a caller left out of a source padded on the left; None if it is not.

    Padding on the right is read as text then, as in all models of transformers.
    """
    if pad_token_id is None or ids_BL.ndim != 2 or is_traced():
        return None
    padding_BL = (ids_BL == pad_token_id).cumprod(dim=1)
    return 1 - padding_BL if padding_BL.any() else None


# Section 3.3: position-wise feed-forward networks


class TinyTFMLayer(GradientCheckpointingLayer):
    """What encoder and decoder layers have in common: self-attention and feed-forward.

    With gradient checkpointing, transformers runs a layer once more for its backward pass.
    """

    def __init__(self, config: TinyTFMConfig, num_heads: int, ffn_dim: int, layer_idx: int = 0):
        super().__init__()
        self.norm_first = config.norm_first
        self.dropout = Dropout(config.dropout)
        self.self_attn = TinyTFMAttention(config, num_heads, layer_idx)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.activation_fn = ACT2FN[config.activation_function]
        self.activation_dropout = Dropout(config.activation_dropout)
        self.fc1 = nn.Linear(config.d_model, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, config.d_model)
        set_init_gain(config.sublayer_init_gain, self.fc1, self.fc2)
        # The feed-forward's, the last of a layer; a stack's own final norm is its `layer_norm`.
        self.final_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def feed_forward(self, x_BLD: Tensor) -> Tensor:
        """FFN(x) = max(0, x W_1 + b_1) W_2 + b_2  (Eq. 2), at each position alike."""
        return self.fc2(self.activation_dropout(self.activation_fn(self.fc1(x_BLD))))


# Section 3.4: embeddings


def token_embedding(config: TinyTFMConfig) -> nn.Embedding:
    """An embedding matrix [V, D] whose padding row stays zero."""
    return nn.Embedding(config.vocab_size, config.d_model, padding_idx=config.pad_token_id)


# Section 3.5: positions


def sinusoids(positions: Tensor, d_model: int, base: float = 10000.0) -> Tensor:
    """PE(pos, 2i) = sin(pos / base^(2i/d_model)),  PE(pos, 2i+1) = cos(the same).

    Args:
        positions: Positions of any shape [...].
        d_model: Width; even.
        base: 10000 in the paper. Pair i turns once every 2 pi base^(2i/d_model) positions.

    Returns:
        [..., d_model] in float32, computed in float64.
    """
    pairs = torch.arange(0, d_model, 2, dtype=torch.float64, device=positions.device)
    angles = positions.to(torch.float64)[..., None] / base ** (pairs / d_model)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).float()


class SinusoidalPositions(nn.Module):
    """The first positions as a table; whatever lies beyond it is computed when asked for."""

    table: Tensor

    def __init__(self, config: TinyTFMConfig):
        super().__init__()
        self.d_model = config.d_model
        # Not saved: computed, so the same everywhere.
        table_LD = torch.empty(config.max_position_embeddings, config.d_model)
        self.register_buffer("table", table_LD, persistent=False)
        self.fill()

    def fill(self) -> None:
        """Writes the table; from_pretrained leaves buffers uninitialised and calls this again."""
        with torch.no_grad():
            positions_L = torch.arange(len(self.table), device="cpu")
            self.table.copy_(sinusoids(positions_L, self.d_model))

    def _apply(self, fn: Callable, recurse: bool = True) -> Any:
        """Of to(), to_empty(), bfloat16() and their like: the table is computed anew, not cast."""
        super()._apply(fn, recurse)
        if not self.table.is_meta:
            self.fill()
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        """Of load_state_dict(assign=True), after which only the table is still on "meta"."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if self.table.is_meta and local_metadata.get("assign_to_params_buffers"):
            self.table = torch.empty_like(self.table, device="cpu")
            self.fill()

    def forward(self, positions: Tensor, length: int) -> Tensor:
        """[...] positions, all below `length` -> [..., D]."""
        if length <= len(self.table):
            return self.table[positions]
        # On the CPU, because not every device has float64.
        return sinusoids(positions.cpu(), self.d_model).to(self.table)


class LearnedPositions(nn.Embedding):
    """A learned vector for each position up to a limit."""

    def __init__(self, config: TinyTFMConfig):
        super().__init__(config.max_position_embeddings, config.d_model)

    def forward(self, positions: Tensor, length: int) -> Tensor:  # type: ignore[override]
        """[...] positions, all below `length` -> [..., D].

        Raises:
            ValueError: If `length` exceeds the table.
        """
        if length > self.num_embeddings:
            raise ValueError(
                f"a sequence of length {length} exceeds max_position_embeddings="
                f"{self.num_embeddings}, the number of learned positions"
            )
        return super().forward(positions)


# Section 3.1: encoder and decoder


class TinyTFMEncoderLayer(TinyTFMLayer):
    """x = LayerNorm(x + Dropout(Sublayer(x))) for self-attention, then for feed-forward."""

    def __init__(self, config: TinyTFMConfig):
        super().__init__(config, config.encoder_attention_heads, config.encoder_ffn_dim)

    def forward(
        self, x_BLD: Tensor, mask: Tensor | None = None, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """[B, L, D] -> [B, L, D], and the attention weights [B, H, L, L] if asked for."""

        def attend(x: Tensor) -> tuple[Tensor, Tensor | None]:
            return self.self_attn(x, None, mask, output_attentions=output_attentions)

        if not self.norm_first:  # Post-Norm, the paper's
            y_BLD, weights = attend(x_BLD)
            x_BLD = self.self_attn_layer_norm(x_BLD + self.dropout(y_BLD))
            x_BLD = self.final_layer_norm(x_BLD + self.dropout(self.feed_forward(x_BLD)))
            return x_BLD, weights

        y_BLD, weights = attend(self.self_attn_layer_norm(x_BLD))
        x_BLD = x_BLD + self.dropout(y_BLD)
        x_BLD = x_BLD + self.dropout(self.feed_forward(self.final_layer_norm(x_BLD)))
        return x_BLD, weights


class TinyTFMDecoderLayer(TinyTFMLayer):
    """An encoder layer whose self-attention is causal, with cross-attention in its middle.

    A decoder without an encoder (`is_encoder_decoder=False`) has no cross-attention.
    """

    def __init__(self, config: TinyTFMConfig, layer_idx: int):
        num_heads = config.decoder_attention_heads
        super().__init__(config, num_heads, config.decoder_ffn_dim, layer_idx)
        if config.is_encoder_decoder:
            self.encoder_attn = TinyTFMAttention(config, num_heads, layer_idx)
            self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self,
        x_BLD: Tensor,
        memory_BKD: Tensor | None = None,
        mask: Tensor | None = None,
        is_causal: bool = False,
        memory_mask: Tensor | None = None,
        cache: Cache | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """[B, L, D] -> [B, L, D], and the weights of self-attention and of cross-attention.

        Args:
            x_BLD: Target states.
            memory_BKD: The encoder's output, [B, K, D]; None without an encoder.
            mask: Which target positions each may see, broadcastable to [B, H, L, past + L].
            is_causal: In place of `mask`: position t sees positions 0..t.
            memory_mask: Which source positions may be seen, [B, 1, 1, K].
            cache: Keys and values of earlier positions, extended by this call.
            output_attentions: Whether to return weights.
        """
        self_cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        memory_weights = None

        def attend(x: Tensor) -> tuple[Tensor, Tensor | None]:
            return self.self_attn(x, None, mask, is_causal, self_cache, output_attentions)

        def attend_memory(x: Tensor) -> tuple[Tensor, Tensor | None]:
            return self.encoder_attn(x, memory_BKD, memory_mask, False, cache, output_attentions)

        if not self.norm_first:  # Post-Norm, the paper's
            y_BLD, weights = attend(x_BLD)
            x_BLD = self.self_attn_layer_norm(x_BLD + self.dropout(y_BLD))
            if memory_BKD is not None:
                y_BLD, memory_weights = attend_memory(x_BLD)
                x_BLD = self.encoder_attn_layer_norm(x_BLD + self.dropout(y_BLD))
            x_BLD = self.final_layer_norm(x_BLD + self.dropout(self.feed_forward(x_BLD)))
            return x_BLD, weights, memory_weights

        y_BLD, weights = attend(self.self_attn_layer_norm(x_BLD))
        x_BLD = x_BLD + self.dropout(y_BLD)
        if memory_BKD is not None:
            y_BLD, memory_weights = attend_memory(self.encoder_attn_layer_norm(x_BLD))
            x_BLD = x_BLD + self.dropout(y_BLD)
        x_BLD = x_BLD + self.dropout(self.feed_forward(self.final_layer_norm(x_BLD)))
        return x_BLD, weights, memory_weights


class TinyTFMStack(nn.Module):
    """What encoder and decoder have in common: positions, layers, an optional final norm."""

    embed_tokens: nn.Embedding

    def __init__(self, config: TinyTFMConfig, layers: Sequence[nn.Module]):
        super().__init__()
        self.config = config
        self.embed_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        learned = config.position_embedding_type == "learned"
        self.embed_positions = (LearnedPositions if learned else SinusoidalPositions)(config)
        self.dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(layers)
        self.layer_norm: nn.Module = nn.Identity()
        if config.norm_first or config.add_final_layer_norm:
            self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def embed(
        self, prefix: str, input_ids: Tensor | None, inputs_embeds: Tensor | None, look: bool = True
    ) -> Tensor:
        """Token embeddings [B, L, D], scaled by sqrt(d_model) (section 3.4).

        Args:
            prefix: What stands before the names of the arguments in the caller's words.
            input_ids: Token ids [B, L]; or
            inputs_embeds: their embeddings, not yet scaled.
            look: Whether to check the ids.
        """
        exactly_one(**{f"{prefix}input_ids": input_ids, f"{prefix}inputs_embeds": inputs_embeds})
        if input_ids is not None:
            if look:
                check_ids(f"{prefix}input_ids", input_ids, self.config.vocab_size)
            inputs_embeds = self.embed_tokens(input_ids)
        name, width = f"{prefix}inputs_embeds", self.config.d_model
        return of_width(name, inputs_embeds, width, "d_model") * self.embed_scale

    def run_layers(self, x_BLD: Tensor, *args) -> tuple[Tensor, tuple, list[tuple]]:
        """Runs the layers and the final norm.

        Returns:
            The last hidden state; all of them, from the embeddings to the last; and for each kind
            of attention the weights of all layers.
        """
        hidden_states, weights = [], []
        for layer in self.layers:
            hidden_states.append(x_BLD)
            x_BLD, *layer_weights = layer(x_BLD, *args)
            weights.append(layer_weights)
        x_BLD = self.layer_norm(x_BLD)
        return x_BLD, (*hidden_states, x_BLD), list(zip(*weights, strict=True))


class TinyTFMEncoder(TinyTFMStack):
    """Source tokens, or continuous features, to hidden states."""

    def __init__(self, config: TinyTFMConfig):
        super().__init__(
            config, [TinyTFMEncoderLayer(config) for _ in range(config.encoder_layers)]
        )
        if config.input_feature_size is None:
            self.embed_tokens = token_embedding(config)
        else:
            self.feature_projection = nn.Linear(config.input_feature_size, config.d_model)

    def embed_features(self, input_features: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Continuous inputs, projected to [B, L, D] and not scaled; or what stands for that."""
        exactly_one(input_features=input_features, inputs_embeds=inputs_embeds)
        if input_features is not None:
            size = self.feature_projection.in_features
            features_BLF = of_width("input_features", input_features, size, "input_feature_size")
            inputs_embeds = self.feature_projection(features_BLF)
        return of_width("inputs_embeds", inputs_embeds, self.config.d_model, "d_model")

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        input_features: Tensor | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> BaseModelOutput:
        """Encodes a batch of sources: see `TinyTFMModel.forward`."""
        feature_size = self.config.input_feature_size
        if feature_size is None:
            refuse("a model without input_feature_size", input_features=input_features)
            x_BLD = self.embed("", input_ids, inputs_embeds)
        else:
            refuse(f"a model with input_feature_size={feature_size}", input_ids=input_ids)
            x_BLD = self.embed_features(input_features, inputs_embeds)
        length = x_BLD.shape[1]
        padding_BL = padding_mask("attention_mask", attention_mask, x_BLD.shape[:2])
        positions = torch.arange(length, device=x_BLD.device)
        mask = None
        if padding_BL is not None:
            mask = padding_BL[:, None, None, :]
            # Padding on the left moves the positions: the result is that of the unpadded source.
            positions = (positions - padding_BL.int().argmax(dim=1)[:, None]).clamp(min=0)
        x_BLD = self.dropout(x_BLD + self.embed_positions(positions, length).to(x_BLD.dtype))
        x_BLD, hidden_states, (weights,) = self.run_layers(x_BLD, mask, output_attentions)
        return BaseModelOutput(
            last_hidden_state=x_BLD,
            hidden_states=hidden_states if output_hidden_states else None,
            attentions=weights if output_attentions else None,
        )


class TinyTFMDecoder(TinyTFMStack):
    """Target tokens so far, and the encoder's output where there is one, to hidden states."""

    def __init__(self, config: TinyTFMConfig):
        layers = [TinyTFMDecoderLayer(config, layer_idx=i) for i in range(config.decoder_layers)]
        super().__init__(config, layers)
        self.embed_tokens = token_embedding(config)
        self.argument_prefix = "decoder_" if config.is_encoder_decoder else ""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decodes a batch of targets: see `TinyTFMModel.forward`."""
        # What generate() chose itself is not looked at again.
        look = cache is None or input_ids is None or input_ids.shape[1] > 1
        x_BLD = self.embed(self.argument_prefix, input_ids, inputs_embeds, look)
        cache = self.prepare_cache(cache, use_cache)
        mask, is_causal, positions, limit = self.look_back(attention_mask, x_BLD, cache)
        memory_mask = None
        if self.config.is_encoder_decoder:
            memory_BKD = of_width(
                "encoder_outputs", encoder_hidden_states, self.config.d_model, "d_model"
            )
            memory_mask = self.look_at(memory_BKD, encoder_attention_mask, x_BLD, cache)
        x_BLD = self.dropout(x_BLD + self.embed_positions(positions, limit).to(x_BLD.dtype))
        x_BLD, hidden_states, (weights, memory_weights) = self.run_layers(
            x_BLD, encoder_hidden_states, mask, is_causal, memory_mask, cache, output_attentions
        )
        crossed = output_attentions and self.config.is_encoder_decoder
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=x_BLD,
            hidden_states=hidden_states if output_hidden_states else None,
            attentions=weights if output_attentions else None,
            cross_attentions=memory_weights if crossed else None,
            **{CACHE: cache},
        )

    def prepare_cache(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        """The given cache in the form that this decoder needs, or a new one, or none."""
        if self.training and any(layer.gradient_checkpointing for layer in self.layers):
            if cache is not None:
                raise ValueError(
                    "gradient checkpointing runs layers twice, which would extend the cache twice: "
                    "call eval(), or pass no cache"
                )
            return None
        if cache is None and not given(use_cache, self.config.use_cache and not self.training):
            return None
        cache = DynamicCache() if cache is None else cache
        if not isinstance(cache, Cache):
            raise ValueError(f"the cache must be a transformers Cache, not {type(cache).__name__}")
        if self.config.is_encoder_decoder and not isinstance(cache, EncoderDecoderCache):
            cache = EncoderDecoderCache(cache, DynamicCache())
        return cache

    def look_back(
        self, attention_mask: Tensor | None, x_BLD: Tensor, cache: Cache | None
    ) -> tuple[Tensor | None, bool, Tensor, int]:
        """Which keys each new token may see, and where it stands.

        Positions count real tokens, so padding changes nothing, on whichever side it stands.

        Returns:
            A mask broadcastable to [B, 1, L, past + L], or None; whether plain causality applies in
            its place; positions [L] or [B, L]; a number above all positions.
        """
        batch_size, length = x_BLD.shape[:2]
        past_length = 0 if cache is None else cache.get_seq_length()  # a tensor if static
        room = static_cache_length(cache)
        key_length = past_length + length if room is None else room
        positions = torch.arange(length, device=x_BLD.device) + past_length
        if room is not None:
            attention_mask = pad_to_room(attention_mask, room)  # hidden by causality
        padding_BK = padding_mask(
            f"{self.argument_prefix}attention_mask",
            attention_mask,
            (batch_size, key_length),
            shortcut=length > 1,
        )
        if padding_BK is None and room is None and length == 1:
            return None, False, positions, key_length
        if padding_BK is None and room is None and length == key_length:
            return None, True, positions, key_length
        mask_LK = causal_mask(length, key_length, past_length, x_BLD.device)
        if padding_BK is None:
            return mask_LK[None, None], False, positions, key_length
        positions = (padding_BK.cumsum(dim=1) - 1).clamp(min=0).index_select(1, positions)
        return mask_LK & padding_BK[:, None, None, :], False, positions, key_length

    def look_at(
        self, memory_BKD: Tensor, mask: Tensor | None, x_BLD: Tensor, cache: Cache | None
    ) -> Tensor | None:
        """Which source positions may be seen: [B, 1, 1, K], or None if all."""
        if memory_BKD.shape[0] != x_BLD.shape[0]:  # torch.export takes a len() for a constant
            raise ValueError(
                f"a batch of {len(x_BLD)} targets cannot attend to {len(memory_BKD)} sources"
            )
        generating = cache is not None and x_BLD.shape[1] == 1
        mask_BK = padding_mask(
            "attention_mask", mask, memory_BKD.shape[:2], shortcut=not generating
        )
        return None if mask_BK is None else mask_BK[:, None, None, :]


# What callers pass


def given(value, default):
    """`value`, or `default` where it is None."""
    return default if value is None else value


def check_ids(name: str, ids: Tensor, size: int, bound: str = "vocab_size") -> None:
    """Raises ValueError unless `ids` are integers [B, L] from 0 to size - 1.

    Their values are looked at only on the CPU: elsewhere this would wait for the device.
    """
    if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{name} must be integers [batch, length], not {ids.dtype} of shape {tuple(ids.shape)}"
        )
    if ids.device.type != "cpu" or not ids.numel() or is_traced():
        return
    lowest, highest = (int(value) for value in ids.aminmax())
    if lowest < 0 or highest >= size:
        value = lowest if lowest < 0 else highest
        raise ValueError(
            f"{name} holds {value}, which is not from 0 to {size - 1} ({bound}={size})"
        )


def check_labels(labels: Tensor, size: int, bound: str = "vocab_size") -> None:
    """Raises ValueError unless `labels` are ids, or -100."""
    check_ids("labels", labels.masked_fill(labels == -100, 0), size, bound)


def of_width(name: str, x: Any, width: int, bound: str) -> Tensor:
    """Returns `x`; raises ValueError unless it is [B, L, width]."""
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[-1] != width:
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be [batch, length, {width}] ({bound}={width}), not {shape}")
    return x


def exactly_one(**inputs: Tensor | None) -> None:
    """Raises ValueError unless exactly one of the named inputs is given."""
    given = [name for name, value in inputs.items() if value is not None]
    if len(given) != 1:
        raise ValueError(f"give exactly one of {' and '.join(inputs)}, not {given or 'neither'}")


def refuse(where: str, **arguments) -> None:
    """Raises ValueError for the first argument that is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} has no use in {where}")


def static_cache_length(cache: Cache | None) -> int | None:
    """How many tokens a static cache has room for; None if the cache grows, or is none."""
    cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    layers = getattr(cache, "layers", None)
    return getattr(layers[0], "max_cache_len", None) if layers else None


def pad_to_room(mask: Tensor | None, room: int) -> Tensor | None:
    """A mask [B, L], extended to all the tokens that a static cache has room for."""
    return mask if mask is None else F.pad(mask, (0, room - mask.shape[1]), value=1)


# The model, and its three heads


class TinyTFMPreTrainedModel(PreTrainedModel):
    """What transformers needs to know of every model here: initial values, ties, embeddings."""

    config: TinyTFMConfig
    config_class = TinyTFMConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # the loss is divided by the Trainer's num_items_in_batch
    shape: tuple[bool, bool] | None = None  # (is_encoder_decoder, is_decoder) that a head needs
    _no_split_modules = ["TinyTFMEncoderLayer", "TinyTFMDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _can_compile_fullgraph = True

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # every call reads it from the config

    def __init__(self, config: TinyTFMConfig):
        config.check()
        shape = (config.is_encoder_decoder, config.is_decoder)
        if self.shape not in (None, shape):
            heads = {head.shape: head.__name__ for head in TinyTFMPreTrainedModel.__subclasses__()}
            raise ValueError(
                f"{type(self).__name__} needs a config with is_encoder_decoder={self.shape[0]} and "
                f"is_decoder={self.shape[1]}; for this one (is_encoder_decoder={shape[0]}, "
                f"is_decoder={shape[1]}) use {heads[shape]}"
            )
        super().__init__(config)
        attention_function(config._attn_implementation)
        if config.input_feature_size is not None:
            self.main_input_name = "input_features"

    def ties(self) -> dict[str, str]:
        """Which parameter of this class is to be which other one: {name: the other's name}."""
        return {}

    def post_init(self) -> None:
        """Initialises, ties, and prepares for loading: the last line of every __init__."""
        self._tied_weights_keys = self.ties()
        layers = {type(module).__name__ for module in self.modules()}
        self._no_split_modules = [name for name in self._no_split_modules if name in layers]
        # Exactly what a checkpoint lacks: the Trainer warns of any other missing key on resuming.
        self._keys_to_ignore_on_save = list(self.get_expanded_tied_weights_keys(all_submodels=True))
        super().post_init()

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As all models of transformers do; what has been untied since is saved, too."""
        self._keys_to_ignore_on_save = list(self.get_expanded_tied_weights_keys(all_submodels=True))
        super().save_pretrained(save_directory, *args, **kwargs)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """All `ties()`: transformers' own share nothing where `tie_word_embeddings` is False."""
        ties = self.ties()
        if all_submodels and self.base_model is not self:
            prefix = self.base_model_prefix
            base: Any = self.base_model
            for target, source in base.ties().items():
                ties[f"{prefix}.{target}"] = f"{prefix}.{source}"
        return ties

    def _tie_weights(self) -> None:
        # How transformers 4 asks for the ties.
        for target, source in self.ties().items():
            module, _, name = target.rpartition(".")
            setattr(self.get_submodule(module), name, self.get_parameter(source))

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight, gain=getattr(module, "init_gain", 1.0))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.d_model**-0.5)
            loaded = getattr(module.weight, "_is_hf_initialized", False)
            if module.padding_idx is not None and not loaded:
                module.weight[module.padding_idx].zero_()
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, SinusoidalPositions):
            module.fill()

    def _input_embeddings(self) -> tuple[nn.Module, str]:
        """Where they are: the shared matrix, the encoder's, or the only one."""
        model: Any = self.base_model
        config = self.config
        if hasattr(model, "shared"):
            return model, "shared"
        if config.is_decoder or (config.input_feature_size and config.is_encoder_decoder):
            return model.decoder, "embed_tokens"
        return model.encoder, "feature_projection" if config.input_feature_size else "embed_tokens"

    def get_input_embeddings(self) -> nn.Module:
        """The matrix that token ids index (or the projection of continuous inputs)."""
        module, name = self._input_embeddings()
        return getattr(module, name)

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces what `get_input_embeddings` returns."""
        module, name = self._input_embeddings()
        setattr(module, name, value)
        self.tie_weights()

    def enable_input_require_grads(self) -> None:
        """Has what the stacks embed require gradients, though the embeddings may be frozen.

        Adapters need it under gradient checkpointing that re-enters autograd.
        """

        def require(module: nn.Module, inputs: Any, output: Tensor) -> None:
            output.requires_grad_(True)

        self.disable_input_require_grads()
        # The stacks call matrices of their own, which share the weight of get_input_embeddings().
        names = ("embed_tokens", "feature_projection")
        embeddings = [
            getattr(stack, name)
            for stack in self.base_model.children()
            for name in names
            if hasattr(stack, name)
        ]
        self._require_grads_hooks = [each.register_forward_hook(require) for each in embeddings]

    def disable_input_require_grads(self) -> None:
        """Takes back `enable_input_require_grads`."""
        for hook in getattr(self, "_require_grads_hooks", []):
            hook.remove()
        self._require_grads_hooks = []

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """The encoder; the model itself where there is none, as transformers does."""
        return getattr(self.base_model, "encoder", self)

    def get_decoder(self) -> nn.Module:
        """The decoder; the model itself where there is none."""
        return getattr(self.base_model, "decoder", self)

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Grows or shrinks the vocabulary everywhere: embeddings, output projection, config.

        Args:
            new_num_tokens: New number of tokens; None keeps it.
            pad_to_multiple_of: Rounds the number up to a multiple of this.
            mean_resizing: Draws new rows around the mean of the old ones.

        Raises:
            ValueError: If a special token would lie outside the vocabulary.
        """
        multiple = given(pad_to_multiple_of, 1)
        if isinstance(multiple, int):  # transformers refuses others
            changed = copy.deepcopy(self.config)
            changed.vocab_size = (
                -(-given(new_num_tokens, changed.vocab_size) // multiple) * multiple
            )
            changed.check()
        resized = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        size = len(resized.weight)
        for stack in self.base_model.children():
            own = getattr(stack, "embed_tokens", None)
            if own is not None and len(own.weight) != size:
                own = self._get_resized_embeddings(own, size, mean_resizing=mean_resizing)
                stack.embed_tokens = own
            if own is not None:
                own.num_embeddings = size
        self.tie_weights()
        return resized


class TinyTFMModel(TinyTFMPreTrainedModel):
    """The stacks that the config's shape has, without a head: hidden states out."""

    def __init__(self, config: TinyTFMConfig):
        super().__init__(config)
        if config.is_encoder_decoder and config.share_encoder_decoder_embeddings:
            self.shared = token_embedding(config)
        if not config.is_decoder:
            self.encoder = TinyTFMEncoder(config)
        if config.is_decoder or config.is_encoder_decoder:
            self.decoder = TinyTFMDecoder(config)
        self.post_init()

    def ties(self) -> dict[str, str]:
        """With shared embeddings both stacks read the one matrix (section 3.4)."""
        if not hasattr(self, "shared"):
            return {}
        stacks = ["decoder"] if self.config.input_feature_size else ["encoder", "decoder"]
        return {f"{stack}.embed_tokens.weight": "shared.weight" for stack in stacks}

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        input_features: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        past_key_values: Cache | None = None,
    ) -> Any:
        """Runs the stacks. A decoder without an encoder reads `input_ids` and `attention_mask`.

        Args:
            input_ids: Source token ids [B, L].
            attention_mask: [B, L], nonzero for real source tokens. Padding may stand on either
                side; it changes nothing.
            decoder_input_ids: Target token ids [B, T] that follow those in the cache, beginning
                with the start token.
            decoder_attention_mask: [B, past + T], nonzero for real target tokens. Without it every
                target token counts as real: causality alone protects those before padding.
            encoder_outputs: In place of a source: the encoder's output of an earlier call, as a
                `BaseModelOutput` or a tuple.
            cache: Keys and values of earlier target tokens; extended in place.
            inputs_embeds: In place of source ids: embeddings [B, L, D], not yet scaled.
            decoder_inputs_embeds: In place of target ids: embeddings [B, T, D], not yet scaled.
            input_features: In place of source ids, with `input_feature_size`: [B, L, F].
            use_cache: Whether to make a cache if none is given; `config.use_cache` if None, but
                not in training.
            output_attentions: Whether to return attention weights [B, H, Q, K] of every layer.
            output_hidden_states: Whether to return the embeddings and every layer's output.
            past_key_values: The cache's name before transformers 5.24.

        Returns:
            Of encoder and decoder: `Seq2SeqModelOutput`. Of an encoder: `BaseModelOutput`. Of a
            decoder: `BaseModelOutputWithPastAndCrossAttentions`. With `return_dict=False` a tuple.

        Raises:
            ValueError: Naming the argument, if inputs contradict each other or the config.
        """
        config = self.config
        cache = given(cache, past_key_values)
        if past_key_values is not None and CACHE == "cache":
            message = "`past_key_values` is deprecated: it is `cache` now"
            warnings.warn(message, FutureWarning, stacklevel=2)
        wanted = {
            "output_attentions": given(output_attentions, config.output_attentions),
            "output_hidden_states": given(output_hidden_states, config.output_hidden_states),
            "return_dict": True,
        }
        if not config.is_encoder_decoder:
            refuse(
                f"a model that is only a {'decoder' if config.is_decoder else 'encoder'}",
                decoder_input_ids=decoder_input_ids,
                decoder_attention_mask=decoder_attention_mask,
                decoder_inputs_embeds=decoder_inputs_embeds,
                encoder_outputs=encoder_outputs,
                input_features=input_features if config.is_decoder else None,
                cache=None if config.is_decoder else cache,
            )
        if config.is_decoder:
            source = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
            return self.decoder(
                attention_mask=attention_mask, cache=cache, use_cache=use_cache, **source, **wanted
            )
        if input_ids is not None and attention_mask is None:
            attention_mask = mask_of_left_padding(input_ids, config.pad_token_id)
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids, attention_mask, inputs_embeds, input_features, **wanted
            )
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs[:3])
        if not config.is_encoder_decoder:
            return encoder_outputs

        decoder_outputs = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            cache=cache,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **wanted,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
            **{CACHE: decoder_outputs.get(CACHE)},
        )


def shift_right(labels_BT: Tensor, config: TinyTFMConfig) -> Tensor:
    """The decoder's input for `labels`: the start token, then all labels but the last.

    -100, which the loss ignores, becomes padding; `labels` stay as they are.

    Raises:
        ValueError: If the config does not say which tokens these are.
    """
    start: Any = config.decoder_start_token_id
    padding: Any = config.pad_token_id
    for name, value in (("decoder_start_token_id", start), ("pad_token_id", padding)):
        if value is None:
            raise ValueError(f"{name} is None in the config: labels cannot be shifted right")
    start_B1 = labels_BT.new_full((len(labels_BT), 1), start)
    shifted_BT = torch.cat((start_B1, labels_BT[:, :-1]), dim=1)
    return shifted_BT.masked_fill(shifted_BT == -100, padding)


def mean_loss(total: Tensor, labels: Tensor, num_items_in_batch: int | Tensor | None) -> Tensor:
    """A summed loss, divided by the number of labels that are not -100; 0 if there is none.

    The Trainer tells that number for the whole accumulated batch of all processes; without it, it
    is counted in `labels`.
    """
    count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return total / torch.as_tensor(count, device=total.device).clamp(min=1)


def token_loss(
    logits_BTV: Tensor, labels_BT: Tensor, num_items_in_batch: int | Tensor | None = None
) -> Tensor:
    """Mean cross-entropy in nats of raw logits against labels; -100 is ignored.

    Raises:
        ValueError: If the labels belong to another length.
    """
    if labels_BT.shape != logits_BTV.shape[:2]:
        raise ValueError(
            f"labels have shape {tuple(labels_BT.shape)}, but there are logits for "
            f"{tuple(logits_BTV.shape[:2])} (batch, length)"
        )
    logits, labels = logits_BTV.flatten(0, 1).float(), labels_BT.flatten().long()
    total = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return mean_loss(total, labels, num_items_in_batch)


class TinyTFMGenerationMixin(GenerationMixin):
    """What generate() needs, in words that every version of transformers understands."""

    config: TinyTFMConfig
    get_input_embeddings: Callable[[], nn.Module]

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        decoder_attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs,
    ) -> dict:
        """The arguments of `forward` for those of all tokens so far that the cache does not hold.

        `kwargs` are what the encoder has read, and generate()'s bookkeeping: on transformers 5, how
        many of the ids are new.
        """
        cache = given(cache, past_key_values)
        past_length = 0 if cache is None else int(cache.get_seq_length())
        inputs = {
            CACHE: cache,
            "use_cache": use_cache,
            "output_attentions": output_attentions,
            "output_hidden_states": output_hidden_states,
        }
        if self.config.is_encoder_decoder:
            ids_name, mask_name, mask = (
                "decoder_input_ids",
                "decoder_attention_mask",
                decoder_attention_mask,
            )
            refuse("generate()", decoder_inputs_embeds=kwargs.get("decoder_inputs_embeds"))
            inputs |= {"encoder_outputs": encoder_outputs, "attention_mask": attention_mask}
            inputs_embeds = None  # those were the encoder's
        else:
            ids_name, mask_name, mask = "input_ids", "attention_mask", attention_mask
        is_first = kwargs.get("is_first_iteration")  # None before transformers 5
        total_length = input_ids.shape[1]
        if inputs_embeds is not None:  # a prompt of embeddings, which input_ids may hold, too
            total_length = (0 if is_first else total_length) + inputs_embeds.shape[1]
        if mask is not None:  # input_ids may be the new ones only
            total_length = mask.shape[1]
            if past_length == 0 and (mask.bool().any(dim=1) & ~mask[:, -1].bool()).any():
                raise ValueError(f"{mask_name}: pad prompts on the left, not on the right")
        if (room := static_cache_length(cache)) is not None:
            mask = pad_to_room(mask, room)  # of one width, so that forward is compiled once
        if mask is not None:
            inputs[mask_name] = mask

        new_length = total_length - past_length
        # transformers tells that all ids are new; of chunks of a prompt by saying nothing.
        is_told = "next_sequence_length" in kwargs or (mask is None and is_first is not None)
        if kwargs.get("next_sequence_length") is not None:
            new_length = kwargs["next_sequence_length"]
        elif is_told and inputs_embeds is None and not self.config.is_encoder_decoder:
            new_length = input_ids.shape[1]
        if new_length < 1:
            raise ValueError(f"the cache holds all {total_length} tokens: crop it by one at least")
        if inputs_embeds is not None and is_first:
            return {**inputs, "inputs_embeds": inputs_embeds[:, -new_length:]}
        if inputs_embeds is not None and new_length > input_ids.shape[1]:
            embeds = torch.cat((inputs_embeds, self.get_input_embeddings()(input_ids)), dim=1)
            return {**inputs, "inputs_embeds": embeds[:, -new_length:]}
        ids = input_ids[:, -new_length:].clone(memory_format=torch.contiguous_format)
        return {**inputs, ids_name: ids}

    def _reorder_cache(self, cache: Cache, beam_idx: Any) -> Cache:
        # Beams trade places within their source, whose keys are the same for all of them.
        own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        own.reorder_cache(beam_idx)
        return cache

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args, **kwargs):
        # Without dropout, also if somebody forgot eval().
        model: Any = self
        ids = kwargs.get("inputs", kwargs.get("input_ids", args[0] if args else None))
        if self.config.is_encoder_decoder and isinstance(ids, Tensor):
            given_inputs = {name for name, value in kwargs.items() if value is not None}
            if not given_inputs & {"attention_mask", "encoder_outputs", "input_features"}:
                # generate() gives the encoder what forward() would look at.
                mask = mask_of_left_padding(ids, self.config.pad_token_id)
                kwargs |= {} if mask is None else {"attention_mask": mask}
        settings = given(kwargs.get("generation_config"), model.generation_config)
        chunk_size = kwargs.get("prefill_chunk_size", getattr(settings, "prefill_chunk_size", None))
        if self.config.is_encoder_decoder and chunk_size is not None:
            # Only to save memory; with the target's prompt, it would cut the source's mask up, too.
            kwargs["prefill_chunk_size"] = None
        training = [module for module in model.modules() if module.training]
        model.eval()
        try:
            return super().generate(*args, **kwargs)
        finally:
            for module in training:
                module.training = True


class TinyTFMForConditionalGeneration(TinyTFMPreTrainedModel, TinyTFMGenerationMixin):
    """The Transformer: encoder, decoder, and a projection to the vocabulary."""

    shape = (True, False)

    def __init__(self, config: TinyTFMConfig):
        super().__init__(config)
        self.model = TinyTFMModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=config.output_bias)
        self.post_init()

    def ties(self) -> dict[str, str]:
        """The output projection is the decoder's embedding matrix (section 3.4)."""
        if not self.config.tie_word_embeddings:
            return {}
        shared = self.config.share_encoder_decoder_embeddings
        return {"lm_head.weight": f"model.{'shared' if shared else 'decoder.embed_tokens'}.weight"}

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """See `shift_right`; data collators call this."""
        return shift_right(labels, self.config)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        input_features: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        **inputs,
    ) -> Seq2SeqLMOutput:
        """Scores every next target token; arguments not named here are `TinyTFMModel.forward`'s.

        Args:
            decoder_input_ids: Made from `labels` where nothing is given.
            labels: Target token ids [B, T], end token included, not shifted; -100 is ignored.
            num_items_in_batch: What the summed loss is divided by: see `mean_loss`.

        Returns:
            Logits [B, T, V] and, with labels, the mean loss in nats.
        """
        if labels is not None:
            check_labels(labels, self.config.vocab_size)
            inputs["use_cache"] = inputs.get("use_cache") or False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = shift_right(labels, self.config)
        outputs = self.model(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            input_features=input_features,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            return_dict=True,
            **inputs,
        )
        logits_BTV = self.lm_head(outputs.last_hidden_state)
        loss = None if labels is None else token_loss(logits_BTV, labels, num_items_in_batch)
        fields = {name: outputs[name] for name in outputs if name != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, logits=logits_BTV, **fields)


class TinyTFMForSequenceClassification(TinyTFMPreTrainedModel):
    """Encoder only: the mean of the hidden states of all real positions, projected to classes."""

    shape = (False, False)

    def __init__(self, config: TinyTFMConfig):
        super().__init__(config)
        self.model = TinyTFMModel(config)
        self.classifier = nn.Linear(config.d_model, config.num_labels or 0)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        input_features: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **inputs,
    ) -> SequenceClassifierOutput:
        """Scores every class; arguments not named here are `TinyTFMModel.forward`'s.

        Args:
            labels: Classes [B]; or, by `config.problem_type`, numbers [B] or [B, num_labels]
                ("regression") or zeros and ones [B, num_labels] ("multi_label_classification").
                Without a problem type, one label is a regression, and integers are classes.
            num_items_in_batch: What the summed loss is divided by: see `mean_loss`.

        Returns:
            Logits [B, num_labels] and, with labels, the mean loss.
        """
        if input_ids is not None and attention_mask is None:
            attention_mask = mask_of_left_padding(input_ids, self.config.pad_token_id)
        outputs = self.model(
            input_ids,
            attention_mask,
            input_features=input_features,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **inputs,
        )
        x_BLD = outputs.last_hidden_state
        real_BL = x_BLD.new_ones(x_BLD.shape[:2])
        if attention_mask is not None:
            real_BL = attention_mask.bool().to(x_BLD.dtype)
        summed_BD = (x_BLD * real_BL[..., None]).sum(dim=1)
        logits_BC = self.classifier(summed_BD / real_BL.sum(dim=1, keepdim=True).clamp(min=1))
        return SequenceClassifierOutput(
            loss=None if labels is None else self.loss(logits_BC, labels, num_items_in_batch),
            logits=logits_BC,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def loss(
        self, logits_BC: Tensor, labels: Tensor, num_items_in_batch: int | Tensor | None
    ) -> Tensor:
        """The mean loss of the problem that config and labels tell."""
        problem, num_labels = self.config.problem_type, logits_BC.shape[-1]
        if problem is None and num_labels == 1:
            problem = "regression"
        elif problem is None and not labels.is_floating_point():
            problem = "single_label_classification"
        if problem == "single_label_classification":
            classes_B1 = labels.reshape(-1, 1)
            check_labels(classes_B1, logits_BC.shape[-1], "num_labels")
            return token_loss(logits_BC[:, None], classes_B1, num_items_in_batch)
        if labels.shape != logits_BC.shape and (
            num_labels > 1 or labels.shape != logits_BC.shape[:1]
        ):
            raise ValueError(
                f"labels of shape {tuple(labels.shape)} do not fit logits of shape "
                f"{tuple(logits_BC.shape)} (problem_type={problem!r})"
            )
        regression = problem == "regression"
        criterion = F.mse_loss if regression else F.binary_cross_entropy_with_logits
        total = criterion(logits_BC.float(), labels.view_as(logits_BC).float(), reduction="sum")
        return total / given(num_items_in_batch, labels.numel())


# By this table of names the stock Trainer knows whose labels its label smoothing has to shift.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TinyTFMConfig.model_type] = "TinyTFMForCausalLM"


class TinyTFMForCausalLM(TinyTFMPreTrainedModel, TinyTFMGenerationMixin):
    """Decoder only: self-attention and feed-forward under a causal mask, no cross-attention."""

    shape = (False, True)

    def __init__(self, config: TinyTFMConfig):
        super().__init__(config)
        self.model = TinyTFMModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=config.output_bias)
        self.post_init()

    def ties(self) -> dict[str, str]:
        """The output projection is the embedding matrix (section 3.4)."""
        tied = self.config.tie_word_embeddings
        return {"lm_head.weight": "model.decoder.embed_tokens.weight"} if tied else {}

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **inputs,
    ) -> CausalLMOutputWithPast:
        """Scores every next token; arguments not named here are `TinyTFMModel.forward`'s.

        Args:
            input_ids: Token ids [B, L] that follow those in the cache.
            attention_mask: [B, past + L], nonzero for real tokens, padding on either side.
            labels: The tokens themselves [B, L]: logits at t are scored against the label at t + 1;
                -100 is ignored.
            num_items_in_batch: What the summed loss is divided by: see `mean_loss`.
            **inputs: May hold `shift_labels` [B, L] in place of labels: the label of each logit.

        Returns:
            Logits [B, L, V] and, with labels, the mean loss in nats.
        """
        # No argument by name: the Trainer takes all that are named after labels to be needed.
        shift_labels = inputs.pop("shift_labels", None)
        if shift_labels is None and labels is not None:
            check_labels(labels, self.config.vocab_size)
            shift_labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        loss = None
        if shift_labels is not None:
            check_labels(shift_labels, self.config.vocab_size)
            inputs["use_cache"] = inputs.get("use_cache") or False
        outputs = self.model(
            input_ids, attention_mask, inputs_embeds=inputs_embeds, return_dict=True, **inputs
        )
        logits_BLV = self.lm_head(outputs.last_hidden_state)
        if shift_labels is not None:
            loss = token_loss(logits_BLV, shift_labels, num_items_in_batch)
        fields = {name: outputs[name] for name in outputs if name != "last_hidden_state"}
        return CausalLMOutputWithPast(loss=loss, logits=logits_BLV, **fields)
