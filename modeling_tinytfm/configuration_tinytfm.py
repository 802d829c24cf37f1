"""Configuration of the Transformer of "Attention Is All You Need" (Vaswani et al., 2017).

This file travels with every pushed model: it imports only the standard library and transformers.
"""

import copy
import difflib
import inspect
import math
from typing import TYPE_CHECKING

from transformers import PretrainedConfig

if TYPE_CHECKING:
    # Never executed. transformers tells two repositories' code apart by a hash over the config's
    # file and those that it imports: so the model's file counts, too.
    from .modeling_tinytfm import TinyTFMPreTrainedModel  # noqa: F401

PROBLEM_TYPES = (None, "regression", "single_label_classification", "multi_label_classification")
# Fields of ours that PretrainedConfig's __init__ takes, too: in transformers 4 it would reset them.
BASE_FIELDS = (
    "is_encoder_decoder",
    "is_decoder",
    "tie_word_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "decoder_start_token_id",
)


class TinyTFMConfig(PretrainedConfig):
    """Sizes and switches of a TinyTFM model; the defaults are the paper's base model (Table 3).

    One config describes three shapes, told apart by two fields that transformers already reads:

    | `is_encoder_decoder` | `is_decoder` | shape | class with a head |
    |---|---|---|---|
    | True (default) | False | encoder and decoder | `TinyTFMForConditionalGeneration` |
    | False | True | decoder only | `TinyTFMForCausalLM` |
    | False | False | encoder only | `TinyTFMForSequenceClassification` |

    Args:
        vocab_size: Number of tokens in the one vocabulary that source and target share.
        d_model: Width of embeddings and hidden states.
        encoder_layers: Number of encoder layers (N in the paper).
        decoder_layers: Number of decoder layers.
        encoder_attention_heads: Heads per attention in the encoder (h); must divide `d_model`.
        decoder_attention_heads: Heads per attention in the decoder; must divide `d_model`.
        encoder_ffn_dim: Inner width of the encoder's feed-forward sublayer (d_ff).
        decoder_ffn_dim: Inner width of the decoder's feed-forward sublayer.
        dropout: Probability of dropping a unit of a sublayer's output, and of the sum of embedding
            and position (section 5.4).
        attention_dropout: The same for attention weights; 0 in the paper.
        activation_dropout: The same for the feed-forward sublayer's inner units; 0 in the paper.
        activation_function: Name of the feed-forward sublayer's activation in `ACT2FN`; Eq. 2 has
            "relu".
        max_position_embeddings: Rows of the position table. Sinusoidal positions simply continue
            beyond it; learned positions cannot.
        position_embedding_type: "sinusoidal" (section 3.5) or "learned".
        norm_first: False is the paper's Post-Norm, `LayerNorm(x + Dropout(Sublayer(x)))`. True is
            Pre-Norm, `x + Dropout(Sublayer(LayerNorm(x)))`, with a final norm after each stack.
        add_final_layer_norm: Puts a final norm after each Post-Norm stack too, as
            `torch.nn.Transformer` does and the paper does not.
        layer_norm_eps: Added to the variance inside LayerNorm's square root.
        sublayer_init_gain: Gain of the first Xavier-uniform values of what sublayers add: value and
            output projections of attention, and the feed-forward. 1 is plain Xavier. Less lets
            Post-Norm start nearer to the identity, and learn faster.
        scale_embedding: Multiplies token embeddings by sqrt(d_model) (section 3.4).
        tie_word_embeddings: The output projection is the decoder's embedding matrix.
        share_encoder_decoder_embeddings: Encoder and decoder read one embedding matrix.
        output_bias: Adds a bias to the output projection, to take over Marian's weights exactly.
        input_feature_size: Width F of continuous inputs `input_features [B, L, F]`, projected to
            `d_model` and not scaled, in place of the encoder's token ids. None: token ids.
        num_labels: Number of classes of `TinyTFMForSequenceClassification`; 2 if not given.
        use_cache: Whether `forward` returns keys and values for fast generation.
        pad_token_id: Id of the padding token; its embedding is zero.
        bos_token_id: Id of the beginning-of-sequence token.
        eos_token_id: Id of the end-of-sequence token.
        decoder_start_token_id: Id that the decoder reads first.
        is_encoder_decoder: See the table.
        is_decoder: See the table.
        **kwargs: What every transformers config accepts (`id2label`, `dtype`, ...). A name that
            looks like a misspelt field of this class is refused.

    Raises:
        ValueError: Naming the field and its value, for a value that cannot make a model.
    """

    model_type = "tinytfm"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012 - read as a plain class attribute
    attribute_map = {"hidden_size": "d_model"}  # noqa: RUF012 - the same

    def __init__(
        self,
        vocab_size: int = 37000,
        d_model: int = 512,
        encoder_layers: int = 6,
        decoder_layers: int = 6,
        encoder_attention_heads: int = 8,
        decoder_attention_heads: int = 8,
        encoder_ffn_dim: int = 2048,
        decoder_ffn_dim: int = 2048,
        dropout: float = 0.1,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        activation_function: str = "relu",
        max_position_embeddings: int = 1024,
        position_embedding_type: str = "sinusoidal",
        norm_first: bool = False,
        add_final_layer_norm: bool = False,
        layer_norm_eps: float = 1e-5,
        sublayer_init_gain: float = 1.0,
        scale_embedding: bool = True,
        tie_word_embeddings: bool = True,
        share_encoder_decoder_embeddings: bool = True,
        output_bias: bool = False,
        input_feature_size: int | None = None,
        num_labels: int | None = None,
        use_cache: bool = True,
        pad_token_id: int | None = 0,
        bos_token_id: int | None = 1,
        eos_token_id: int | list[int] | None = 2,
        decoder_start_token_id: int | None = 1,
        is_encoder_decoder: bool = True,
        is_decoder: bool = False,
        **kwargs,
    ):
        refuse_misspelt(kwargs)
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.encoder_layers = encoder_layers
        self.decoder_layers = decoder_layers
        self.encoder_attention_heads = encoder_attention_heads
        self.decoder_attention_heads = decoder_attention_heads
        self.encoder_ffn_dim = encoder_ffn_dim
        self.decoder_ffn_dim = decoder_ffn_dim
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.activation_dropout = activation_dropout
        self.activation_function = activation_function
        self.max_position_embeddings = max_position_embeddings
        self.position_embedding_type = position_embedding_type
        self.norm_first = norm_first
        self.add_final_layer_norm = add_final_layer_norm
        self.layer_norm_eps = layer_norm_eps
        self.sublayer_init_gain = sublayer_init_gain
        self.scale_embedding = scale_embedding
        self.share_encoder_decoder_embeddings = share_encoder_decoder_embeddings
        self.output_bias = output_bias
        self.input_feature_size = input_feature_size
        self.use_cache = use_cache
        # The base class keeps these, too, but not in all versions.
        self.tie_word_embeddings = tie_word_embeddings
        self.pad_token_id = pad_token_id
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.decoder_start_token_id = decoder_start_token_id
        # Looked at first: some versions check these two when they are set, in words of their own.
        check_boolean("is_encoder_decoder", is_encoder_decoder)
        check_problem_type(kwargs.get("problem_type"))
        self.is_encoder_decoder = is_encoder_decoder
        self.is_decoder = is_decoder
        self.problem_type = kwargs.get("problem_type")
        self.check()
        if num_labels is not None:
            if not is_integer(num_labels) or num_labels < 1:
                raise ValueError(f"num_labels={num_labels!r} is not an integer >= 1")
            kwargs["num_labels"] = num_labels
        # A repository's own code always stands beside its weights, so a saved reference to some
        # other repository ("user/repo--modeling_tinytfm.X") is replaced. The head's own entry alone
        # is what transformers would write; AutoModel of the same repository needs one, too.
        kwargs["auto_map"] = auto_map(is_encoder_decoder, is_decoder)
        for name in BASE_FIELDS:
            kwargs[name] = getattr(self, name)
        super().__init__(**kwargs)
        self.check()  # with what came under another name, such as hidden_size

    def to_diff_dict(self) -> dict:
        """The fields that a saved config holds: all of this class.

        transformers leaves out those that equal its own defaults, which are not ours.
        """
        saved = super().to_diff_dict()
        for name in FIELDS:
            if name in self.__dict__:
                saved[name] = getattr(self, name)
        saved["auto_map"] = auto_map(self.is_encoder_decoder, self.is_decoder)
        return saved

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None):
        """Returns this config; for a decoder beside an encoder, one that sizes its cache."""
        if not (decoder and not encoder and self.is_encoder_decoder):
            return self
        config = copy.copy(self)
        config.is_decoder = True
        return config

    # transformers sizes a decoder's cache by these two; an attribute_map could name one stack only.
    @property
    def num_hidden_layers(self) -> int:
        """Layers of the encoder, or of the decoder where there is no encoder."""
        return self.decoder_layers if self.is_decoder else self.encoder_layers

    @num_hidden_layers.setter
    def num_hidden_layers(self, value: int) -> None:
        setattr(self, "decoder_layers" if self.is_decoder else "encoder_layers", value)

    @property
    def num_attention_heads(self) -> int:
        """Heads of the encoder, or of the decoder where there is no encoder."""
        return self.decoder_attention_heads if self.is_decoder else self.encoder_attention_heads

    @num_attention_heads.setter
    def num_attention_heads(self, value: int) -> None:
        name = "decoder_attention_heads" if self.is_decoder else "encoder_attention_heads"
        setattr(self, name, value)

    def check(self) -> None:
        """Refuses values that cannot make a model; models call it again, as fields can be set.

        Raises:
            ValueError: Naming the field, its value, and what is expected.
        """
        from transformers.activations import ACT2FN  # imports torch: not wanted to read a config

        stacks = [
            name
            for name, present in (
                ("encoder", not self.is_decoder),
                ("decoder", self.is_decoder or self.is_encoder_decoder),
            )
            if present
        ]
        if self.is_encoder_decoder and self.is_decoder:
            raise ValueError(
                "is_encoder_decoder=True and is_decoder=True contradict each other: set "
                "is_decoder=False for an encoder-decoder, is_encoder_decoder=False for a decoder"
            )
        self._check_integer("vocab_size", at_least=1)
        self._check_integer("d_model", at_least=1)
        self._check_integer("max_position_embeddings", at_least=1)
        if self.input_feature_size is not None:
            self._check_integer("input_feature_size", at_least=1)
            if self.is_decoder:
                raise ValueError(
                    f"input_feature_size={self.input_feature_size} needs an encoder: "
                    "a decoder-only model reads token ids (is_decoder=True)"
                )
        for stack in ("encoder", "decoder"):
            present = stack in stacks
            self._check_integer(f"{stack}_layers", at_least=1 if present else 0)
            self._check_integer(f"{stack}_ffn_dim", at_least=1)
            heads = self._check_integer(f"{stack}_attention_heads", at_least=1)
            if present and self.d_model % heads:
                raise ValueError(
                    f"{stack}_attention_heads={heads} does not divide d_model={self.d_model}: "
                    "every head is d_model / heads wide"
                )
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value <= 1:
                raise ValueError(f"{name}={value!r} is not a probability between 0 and 1")
        for name in ("layer_norm_eps", "sublayer_init_gain"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < math.inf:
                raise ValueError(f"{name}={value!r} is not a number >= 0")
        if not isinstance(self.activation_function, str) or self.activation_function not in ACT2FN:
            raise ValueError(
                f"activation_function={self.activation_function!r} is unknown: "
                f"choose one of {', '.join(sorted(ACT2FN))}"
            )
        if self.position_embedding_type not in ("sinusoidal", "learned"):
            raise ValueError(
                f"position_embedding_type={self.position_embedding_type!r} is unknown: "
                "choose 'sinusoidal' or 'learned'"
            )
        if self.position_embedding_type == "sinusoidal" and self.d_model % 2:
            raise ValueError(
                f"d_model={self.d_model} is odd: sinusoidal positions pair sines with cosines. "
                "Choose an even d_model, or position_embedding_type='learned'"
            )
        for name in (
            "norm_first",
            "add_final_layer_norm",
            "scale_embedding",
            "tie_word_embeddings",
            "share_encoder_decoder_embeddings",
            "output_bias",
            "use_cache",
            "is_encoder_decoder",
            "is_decoder",
        ):
            check_boolean(name, getattr(self, name))
        check_problem_type(self.problem_type)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
            value = getattr(self, name)
            several = name == "eos_token_id" and isinstance(value, list | tuple)
            for token_id in value if several else [value]:
                if token_id is not None and not (
                    is_integer(token_id) and 0 <= token_id < self.vocab_size
                ):
                    raise ValueError(
                        f"{name}={value!r} is not a token id between 0 and {self.vocab_size - 1} "
                        f"(vocab_size={self.vocab_size})"
                    )

    def _check_integer(self, name: str, at_least: int) -> int:
        value = getattr(self, name)
        if not is_integer(value) or value < at_least:
            raise ValueError(f"{name}={value!r} is not an integer >= {at_least}")
        return value


def is_integer(value: object) -> bool:
    """Whether `value` is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether `value` is an int or a float, and not a bool."""
    return is_integer(value) or isinstance(value, float)


def check_boolean(name: str, value: object) -> None:
    """Raises ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is neither True nor False")


def check_problem_type(value: object) -> None:
    """Raises ValueError unless `value` is a problem type of transformers, or None."""
    if value not in PROBLEM_TYPES:
        raise ValueError(
            f"problem_type={value!r} is unknown: choose one of "
            f"{', '.join(map(repr, PROBLEM_TYPES))}"
        )


def auto_map(is_encoder_decoder: bool, is_decoder: bool) -> dict[str, str]:
    """Which class of the two travelling files each Auto class of transformers should load."""
    if is_encoder_decoder:
        head = {"AutoModelForSeq2SeqLM": "modeling_tinytfm.TinyTFMForConditionalGeneration"}
    elif is_decoder:
        head = {"AutoModelForCausalLM": "modeling_tinytfm.TinyTFMForCausalLM"}
    else:
        name = "AutoModelForSequenceClassification"
        head = {name: "modeling_tinytfm.TinyTFMForSequenceClassification"}
    return {
        "AutoConfig": "configuration_tinytfm.TinyTFMConfig",
        "AutoModel": "modeling_tinytfm.TinyTFMModel",
        **head,
    }


FIELDS = tuple(inspect.signature(TinyTFMConfig.__init__).parameters)[1:-1]


def refuse_misspelt(names: dict[str, object]) -> None:
    """Raises ValueError for a keyword that is no field but looks like one (`d_modle`, `droput`)."""
    # transformers 4 keeps `tie_encoder_decoder` in every config; it looks like another field.
    theirs = {*inspect.signature(PretrainedConfig.__init__).parameters, "tie_encoder_decoder"}
    for name in (name for name in names if name not in theirs):
        nearest = difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.85)
        # Longer names are what other tools keep in a config, such as `layer_norm_epsilon`.
        if nearest and not name.startswith(nearest[0]) and not hasattr(TinyTFMConfig, name):
            raise ValueError(f"TinyTFMConfig has no field {name!r}; did you mean {nearest[0]!r}?")
