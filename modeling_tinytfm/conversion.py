"""Other Transformers into a TinyTFM model, and back: MarianMTModel and torch.nn.Transformer.

    model = from_marian(MarianMTModel.from_pretrained("Helsinki-NLP/opus-mt-en-de"))
    encoder, decoder = to_torch_stacks(model)

Model in, model out. The result computes the same as the original, on the same device, in the same
dtype and in the same mode (training or evaluation). The original stays as it is and shares no
memory with the result. What cannot be carried over is refused with a ValueError that names it.
"""

import copy
import functools
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import MarianConfig, MarianMTModel
from transformers.activations import ACT2FN

from .configuration_tinytfm import TinyTFMConfig
from .modeling_tinytfm import TinyTFMForConditionalGeneration, sinusoids

EXPORT_FILE = "export.json"  # in a folder made for another engine: what it was made of

# Settings of generate() that decide nothing elsewhere: ids that the engines' files know, and how
# generate() works and answers.
_NO_MATTER = {
    "bos_token_id", "decoder_start_token_id", "pad_token_id", "use_cache", "output_attentions",
    "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "num_return_sequences", "cache_implementation", "cache_config", "max_cache_len",
    "compile_config", "disable_compile", "continuous_batching_config", "low_memory",
    "prefill_chunk_size", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind",
    "target_lookbehind", "max_matching_ngram_size", "transformers_version", "_from_model_config",
    # Of no use where nothing is drawn:
    "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
}  # fmt: skip
# Values with which it does nothing.
_NEUTRAL = {
    "do_sample": False,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "guidance_scale": 1.0,
    "remove_invalid_values": False,
    "token_healing": False,
    "assistant_ensemble_weight": 0.0,
}

StateDict = dict[str, Tensor]
M = TypeVar("M", bound=nn.Module)


class Row(NamedTuple):
    """What becomes of a module of TinyTFM elsewhere.

    In torch it has another name, and q_proj, k_proj and v_proj are one in_proj.

    In Marian it has the same name, but the residual stream has its dimensions in another order:
    the positions added to it are first all sines, then all cosines, where the paper alternates
    them. So each weight that writes or reads the stream is permuted along the axis that does.
    """

    encoder: str | None = None  # its name in torch's encoder
    decoder: str | None = None  # its name in torch's decoder
    weight: int | None = None  # the axis of its weight that is the residual stream's
    bias: int | None = None  # the same of its bias


NAMES = {
    "shared": Row(weight=1),
    "embed_tokens": Row(weight=1),
    "embed_positions": Row(weight=1),
    "self_attn": Row("self_attn", "self_attn"),
    "self_attn_layer_norm": Row("norm1", "norm1", weight=0, bias=0),
    "encoder_attn": Row(None, "multihead_attn"),
    "encoder_attn_layer_norm": Row(None, "norm2", weight=0, bias=0),
    "q_proj": Row("in_proj", "in_proj", weight=1),
    "k_proj": Row("in_proj", "in_proj", weight=1),
    "v_proj": Row("in_proj", "in_proj", weight=1),
    "out_proj": Row("out_proj", "out_proj", weight=0, bias=0),
    "fc1": Row("linear1", "linear1", weight=1),
    "fc2": Row("linear2", "linear2", weight=0, bias=0),
    "final_layer_norm": Row("norm2", "norm3", weight=0, bias=0),
    "layer_norm": Row("norm", "norm"),
    "lm_head": Row(weight=1),
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj")  # in in_proj's order

# A field of this name means the same in both configs.
MARIAN_FIELDS = (
    inspect.signature(TinyTFMConfig.__init__).parameters.keys() & MarianConfig().to_dict().keys()
)
# Which fact about torch's modules tells a field: see `torch_facts`.
TORCH_FIELDS = {
    "vocab_size": "source_embedding.num_embeddings",
    "d_model": "transformer.encoder.layers.0.self_attn.out_proj.out_features",
    "encoder_layers": "transformer.encoder.num_layers",
    "decoder_layers": "transformer.decoder.num_layers",
    "encoder_attention_heads": "transformer.encoder.layers.0.self_attn.num_heads",
    "decoder_attention_heads": "transformer.decoder.layers.0.self_attn.num_heads",
    "encoder_ffn_dim": "transformer.encoder.layers.0.linear1.out_features",
    "decoder_ffn_dim": "transformer.decoder.layers.0.linear1.out_features",
    "dropout": "transformer.encoder.layers.0.dropout1.p",
    "attention_dropout": "transformer.encoder.layers.0.self_attn.dropout",
    "activation_dropout": "transformer.encoder.layers.0.dropout.p",
    "activation_function": "transformer.encoder.layers.0.activation",
    "norm_first": "transformer.encoder.layers.0.norm_first",
    "layer_norm_eps": "transformer.encoder.layers.0.norm1.eps",
}
# Attributes that decide what a module of torch's computes, besides its class and weights.
TORCH_ATTRIBUTES = re.compile(
    "num_layers|num_heads|dropout|add_zero_attn|norm_first|out_features|p|eps|"
    "num_embeddings|embedding_dim|padding_idx|max_norm|scale_grad_by_freq"
)


def marian_order(d_model: int) -> Tensor:
    """Where Marian keeps each of TinyTFM's dimensions: 0, D/2, 1, D/2 + 1, ..."""
    return torch.arange(d_model).view(2, -1).T.flatten()


def permuted(state: StateDict, order: Tensor) -> StateDict:
    """`state` with the dimensions of the residual stream in another order."""
    result = {}
    for name, tensor in state.items():
        *_, module, kind = f".{name}".split(".")
        axis = getattr(NAMES.get(module), kind, None)
        if axis is not None:
            tensor = tensor.index_select(axis, order.to(tensor.device))
        result[name] = tensor
    return result


def state_from_marian(state: StateDict) -> StateDict:
    """Marian's weights and position tables by TinyTFM's names and in its order."""
    state = dict(state)
    state["lm_head.bias"] = state.pop("final_logits_bias").squeeze(0)
    return permuted(state, marian_order(state["lm_head.weight"].shape[1]))


def state_to_marian(state: StateDict) -> StateDict:
    """The reverse of `state_from_marian`; a bias of zeros where there is none."""
    vocab_size, d_model = state["lm_head.weight"].shape
    state = permuted(state, marian_order(d_model).argsort())
    bias = state.pop("lm_head.bias", state["lm_head.weight"].new_zeros(vocab_size))
    return state | {"final_logits_bias": bias.unsqueeze(0)}


def state_from_torch(state: StateDict) -> StateDict:
    """The weights of an nn.Transformer by TinyTFM's names."""
    result = {}
    for name, tensor in state.items():
        stack, *path = name.split(".")
        names = {getattr(row, stack): ours for ours, row in NAMES.items()}
        name = ".".join(["model", stack, *(names.get(part, part) for part in path)])
        attention, joined, kind = name.partition("in_proj_")
        if joined:
            for projection, part in zip(PROJECTIONS, tensor.chunk(3), strict=True):
                result[f"{attention}{projection}.{kind}"] = part
        else:
            result[name] = tensor
    return result


def state_to_torch(state: StateDict) -> StateDict:
    """TinyTFM's layers and final norms by nn.Transformer's names; the rest is left out."""
    result = {}
    for name, tensor in state.items():
        _, stack, *path = name.split(".")
        if path[:1] not in (["layers"], ["layer_norm"]):
            continue
        *attention, module, kind = name.split(".")
        if module in PROJECTIONS:
            tensor = torch.cat([state[".".join([*attention, part, kind])] for part in PROJECTIONS])
        names = {ours: getattr(row, stack) for ours, row in NAMES.items()}
        name = ".".join([stack, *(names.get(part, part) for part in path)])
        result[name.replace("in_proj.", "in_proj_")] = tensor
    return result


def share(state: StateDict, shared: bool) -> None:
    """Makes `model.shared` the decoder's embedding matrix, or takes it away."""
    state.pop("model.shared.weight", None)
    if shared:
        state["model.shared.weight"] = state["model.decoder.embed_tokens.weight"]


def filled(make: Callable[[], M], state: StateDict, training: bool) -> M:
    """A new module whose weights are copies of `state`, with their dtype and on their device.

    Raises:
        ValueError: If names differ, or the weights are of several dtypes or on several devices.
    """
    kinds = {(tensor.dtype, tensor.device) for tensor in state.values()}
    if len(kinds) > 1:
        raise ValueError(f"weights are of several dtypes or devices: {sorted(map(str, kinds))}")
    dtype, device = kinds.pop()
    with torch.random.fork_rng(devices=[]):  # whatever is drawn is overwritten
        module = make().to(device=device, dtype=dtype)
    missing, surplus = module.load_state_dict(state, strict=False)
    if missing or surplus:
        raise ValueError(
            f"weights cannot be carried over to {type(module).__name__}: there are none for "
            f"{missing}, and no place for {surplus}"
        )
    return module.train(training)


def check_config(target: str, config: object, **required: object) -> None:
    """Raises ValueError for the first field that has another value than `target` requires."""
    for name, expected in required.items():
        value = getattr(config, name)
        if value != expected:
            raise ValueError(
                f"{name}={value!r} cannot be carried over to {target}, where it is {expected!r}"
            )


def deciding(settings: dict[str, Any]) -> dict[str, Any]:
    """Those settings of generate() that may change what it finds."""
    return {
        name: value
        for name, value in settings.items()
        if value is not None and name not in _NO_MATTER and _NEUTRAL.get(name, ()) != value
    }


def required(module: str, extra: str) -> Any:
    """Imports a module of an optional package.

    Args:
        module: The module.
        extra: The project's extra that brings its package.

    Raises:
        ModuleNotFoundError: If it is not installed, with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is not installed: pip install 'modeling-tinytfm[{extra}]'"
        ) from None


def check_class(name: str, value: object, expected: type) -> None:
    """Raises ValueError if `value` is of another class."""
    if not isinstance(value, expected):
        raise ValueError(f"{name} must be a {expected.__name__}, not a {type(value).__qualname__}")


# MarianMTModel


def from_marian(model: MarianMTModel) -> TinyTFMForConditionalGeneration:
    """The TinyTFM model, with an output bias, that computes what a MarianMTModel does.

    The logits are the same, unless a source is padded on the left: Marian's positions count
    padding. Matrices are shared where Marian's are in fact, whatever its config says. The output
    bias, which Marian does not train, becomes a parameter. Generation settings come along.

    Raises:
        ValueError: If source and target have vocabularies of different sizes, or the model has
            layer drop, an odd `d_model`, or weights or positions that TinyTFM has not.
    """
    check_class("model", model, MarianMTModel)
    check_config(
        "TinyTFM",
        model.config,
        decoder_vocab_size=model.config.vocab_size,
        encoder_layerdrop=0,
        decoder_layerdrop=0,
    )
    fields = {name: getattr(model.config, name) for name in MARIAN_FIELDS} | sharing(model)
    config = TinyTFMConfig(**fields, output_bias=True)
    state = state_from_marian(model.state_dict())
    for name in ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"):
        table = state.pop(name)
        expected = sinusoids(torch.arange(len(table)), config.d_model).to(table)
        if not torch.allclose(table, expected, rtol=0, atol=torch.finfo(table.dtype).eps):
            raise ValueError(f"{name} cannot be carried over to TinyTFM: these are no sinusoids")
    share(state, config.share_encoder_decoder_embeddings)
    result = filled(lambda: TinyTFMForConditionalGeneration(config), state, model.training)
    result.generation_config = copy.deepcopy(model.generation_config)
    return result


def to_marian(model: TinyTFMForConditionalGeneration) -> MarianMTModel:
    """The MarianMTModel that computes what a TinyTFM model does, where there is one.

    The logits are the same up to `max_position_embeddings`, where Marian ends, unless a source is
    padded on the left: Marian's positions count padding. Marian does not train an output bias, and
    shares embeddings only if it ties the output projection to them: where that has weights of its
    own, encoder and decoder get a copy each. Generation settings come along.

    Raises:
        ValueError: If the model has what Marian has not: learned positions, `norm_first`, final
            norms, a `layer_norm_eps` other than 1e-5, continuous inputs, or no start token.
    """
    check_class("model", model, TinyTFMForConditionalGeneration)
    check_config(
        "MarianMTModel",
        model.config,
        position_embedding_type="sinusoidal",
        norm_first=False,
        add_final_layer_norm=False,
        layer_norm_eps=1e-5,
        input_feature_size=None,
    )
    if model.config.decoder_start_token_id is None:
        raise ValueError("decoder_start_token_id=None cannot be carried over to MarianMTModel")
    fields = {name: getattr(model.config, name) for name in MARIAN_FIELDS} | sharing(model)
    fields["share_encoder_decoder_embeddings"] &= fields["tie_word_embeddings"]
    # The default would be a token of Marian's own vocabularies.
    forced_eos_token_id = model.generation_config.forced_eos_token_id
    config = MarianConfig(**fields, forced_eos_token_id=forced_eos_token_id)
    state = model.state_dict()
    for name in ("model.encoder.embed_positions", "model.decoder.embed_positions"):
        state[f"{name}.weight"] = model.get_buffer(f"{name}.table").to(model.dtype)
    share(state, config.share_encoder_decoder_embeddings)
    result = filled(lambda: MarianMTModel(config), state_to_marian(state), model.training)
    result.generation_config = copy.deepcopy(model.generation_config)
    return result


def sharing(model: Any) -> dict[str, Any]:
    """Which embedding matrices of a TinyTFM or Marian model are one, as fields of a config."""
    source = model.model.encoder.embed_tokens.weight
    target = model.model.decoder.embed_tokens.weight
    return {
        "share_encoder_decoder_embeddings": source is target,
        "tie_word_embeddings": model.lm_head.weight is target,
    }


# torch.nn.Transformer


def from_torch_transformer(
    transformer: nn.Transformer,
    source_embedding: nn.Embedding,
    target_embedding: nn.Embedding | None = None,
    output: nn.Linear | None = None,
    config: TinyTFMConfig | None = None,
) -> TinyTFMForConditionalGeneration:
    """The TinyTFM model made of the layers of an nn.Transformer, whatever its `batch_first`.

    What no module tells is taken from `config`: whether embeddings are multiplied by sqrt(d_model)
    before sinusoidal positions are added, and the special tokens. In training, `dropout` is applied
    to that sum, too. Embeddings and output projection are tied where they share a parameter.

    Args:
        transformer: With a final norm after both stacks, or after none.
        source_embedding: [V, D], for source tokens; its `padding_idx`, if any, is the padding's id.
        target_embedding: [V, D], for target tokens; the source's if not given.
        output: From D to V, makes the logits; the target embedding's matrix does if not given.
        config: The paper's if not given. Sizes and switches that modules tell are replaced.

    Raises:
        ValueError: If modules do not fit each other, are not torch's own, are set differently from
            layer to layer, or have (or lack, with `bias=False`) anything that TinyTFM has not.
    """
    target_embedding = source_embedding if target_embedding is None else target_embedding
    embeddings = {"source_embedding": source_embedding, "target_embedding": target_embedding}
    theirs = {"transformer": transformer, **embeddings}
    if output is not None:
        theirs["output"] = output
    given = torch_facts(theirs)
    if missing := [fact for fact in TORCH_FIELDS.values() if fact not in given]:
        raise ValueError(f"{missing[0]} is missing: is this an nn.Transformer, an nn.Embedding?")
    config = TinyTFMConfig() if config is None else copy.deepcopy(config)
    config.update({field: given[fact] for field, fact in TORCH_FIELDS.items()})
    config.add_final_layer_norm = "transformer.encoder.norm" in given and not config.norm_first
    config.pad_token_id = given.get("source_embedding.padding_idx", config.pad_token_id)
    config.output_bias = "output.bias" in given

    vocab_size, d_model = config.vocab_size, config.d_model
    with torch.device("meta"):
        ours: dict[str, nn.Module] = {"transformer": torch_transformer(config)}
        for name in embeddings:
            ours[name] = nn.Embedding(vocab_size, d_model, source_embedding.padding_idx)
        if output is not None:
            ours["output"] = nn.Linear(d_model, vocab_size, bias=config.output_bias)
    wanted = torch_facts(ours)
    for name in {**wanted, **given}:
        if given.get(name) != wanted.get(name):
            raise ValueError(
                f"{name}={given.get(name)} cannot be carried over to TinyTFM: all else makes it "
                f"{wanted.get(name)}"
            )

    source, target = source_embedding.weight, target_embedding.weight
    state = state_from_torch(transformer.state_dict())
    state["model.encoder.embed_tokens.weight"] = source
    state["model.decoder.embed_tokens.weight"] = state["lm_head.weight"] = target
    if output is not None:
        state |= {f"lm_head.{name}": tensor for name, tensor in output.named_parameters()}
    share(state, source is target)
    config.share_encoder_decoder_embeddings = source is target
    config.tie_word_embeddings = state["lm_head.weight"] is target
    return filled(lambda: TinyTFMForConditionalGeneration(config), state, transformer.training)


def to_torch_transformer(model: TinyTFMForConditionalGeneration) -> nn.Transformer:
    """The layers and final norms as an nn.Transformer with `batch_first=True`.

    It maps vectors to vectors: embeddings, positions and output projection are left behind.

    Raises:
        ValueError: If the model has no final norms, or an activation with weights.
    """
    check_class("model", model, TinyTFMForConditionalGeneration)
    state = state_to_torch(model.state_dict())
    if "encoder.norm.weight" not in state:
        raise ValueError(
            "add_final_layer_norm=False: this model has no final norms, and every nn.Transformer "
            "has. Use to_torch_stacks"
        )
    return filled(lambda: torch_transformer(model.config), state, model.training)


def to_torch_stacks(
    model: TinyTFMForConditionalGeneration,
) -> tuple[nn.TransformerEncoder, nn.TransformerDecoder]:
    """Like `to_torch_transformer`, but two stacks, whose norm is None where the model has none.

    Raises:
        ValueError: If the model has an activation with weights.
    """
    check_class("model", model, TinyTFMForConditionalGeneration)
    state = state_to_torch(model.state_dict())
    transformer = filled(lambda: torch_transformer(model.config), state, model.training)
    return transformer.encoder, transformer.decoder


def torch_transformer(config: TinyTFMConfig) -> nn.Transformer:
    """An nn.Transformer as `config` describes it, final norms or none, with random weights."""
    activation = config.activation_function
    if activation not in ("relu", "gelu"):  # the two that torch knows by name
        # No module: copies of a decoder layer take ReLU in its place (torch 2.13).
        activation = ACT2FN[activation].forward
    # Nested tensors would cut off what is padding in the whole batch.
    make_encoder = functools.partial(nn.TransformerEncoder, enable_nested_tensor=False)
    has_norm = config.norm_first or config.add_final_layer_norm
    stacks: dict[str, Any] = {}
    for name, make_stack, make_layer in (
        ("encoder", make_encoder, nn.TransformerEncoderLayer),
        ("decoder", nn.TransformerDecoder, nn.TransformerDecoderLayer),
    ):
        layer: Any = make_layer(
            config.d_model,
            getattr(config, f"{name}_attention_heads"),
            getattr(config, f"{name}_ffn_dim"),
            config.dropout,
            activation,
            config.layer_norm_eps,
            batch_first=True,
            norm_first=config.norm_first,
        )
        layer.dropout.p = config.activation_dropout
        for module in layer.children():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = config.attention_dropout
        norm = nn.LayerNorm(config.d_model, config.layer_norm_eps) if has_norm else None
        stacks[f"custom_{name}"] = make_stack(layer, getattr(config, f"{name}_layers"), norm)
    heads = config.encoder_attention_heads
    return nn.Transformer(config.d_model, heads, **stacks, batch_first=True)


def torch_facts(modules: dict[str, nn.Module]) -> dict[str, Any]:
    """All that decides what modules of torch's compute, but for the values of their weights."""
    facts: dict[str, Any] = {}
    for name, module in nn.ModuleDict(modules).named_modules(remove_duplicate=False):
        if name.endswith(".activation"):
            continue
        facts[name] = type(module)
        for attribute, value in vars(module).items():
            if isinstance(value, int | float) and TORCH_ATTRIBUTES.fullmatch(attribute):
                facts[f"{name}.{attribute}"] = value
        if hasattr(module, "activation"):
            facts[f"{name}.activation"] = activation_name(module.activation)
        for kind, parameter in module.named_parameters(recurse=False):
            facts[f"{name}.{kind}"] = tuple(parameter.shape)
    return facts


def activation_name(activation: Callable[[Tensor], Tensor]) -> str:
    """The name in `ACT2FN` of the activation that computes the same.

    Raises:
        ValueError: If there is none.
    """
    names = [name for name in ACT2FN if name not in ("prelu", "xielu")]  # these have weights
    x = torch.linspace(-8, 8, 4001) ** 5  # dense around 0, and so wide that any clipping shows
    y = activation(x.clone())
    for name in names:
        if torch.equal(ACT2FN[name](x), y):
            return name
    raise ValueError(f"activation={activation!r} is none of {', '.join(names)}")
