import copy
import importlib
import json
import math
import re
import sys

import pytest
import torch
from tiny import TINY, tiny_config
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    MarianConfig,
    MarianMTModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import modeling_tinytfm
from modeling_tinytfm import (
    TinyTFMConfig,
    TinyTFMForCausalLM,
    TinyTFMForConditionalGeneration,
    TinyTFMForSequenceClassification,
    TinyTFMModel,
)

SHAPES = {
    "encoder-decoder": {},
    "decoder": {"is_encoder_decoder": False, "is_decoder": True},
    "encoder": {"is_encoder_decoder": False},
}
HEADS = {
    "encoder-decoder": TinyTFMForConditionalGeneration,
    "decoder": TinyTFMForCausalLM,
    "encoder": TinyTFMForSequenceClassification,
}
AUTO_CLASSES = {
    "encoder-decoder": AutoModelForSeq2SeqLM,
    "decoder": AutoModelForCausalLM,
    "encoder": AutoModelForSequenceClassification,
}
WRONG_HEADS = [
    (shape, head) for shape in SHAPES for head_shape, head in HEADS.items() if head_shape != shape
]
every_shape = pytest.mark.parametrize("shape", SHAPES)


@pytest.mark.parametrize(
    ("field", "default"),
    {
        "vocab_size": 37000,
        "d_model": 512,
        "encoder_layers": 6,
        "decoder_layers": 6,
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
        "encoder_ffn_dim": 2048,
        "decoder_ffn_dim": 2048,
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "activation_function": "relu",
        "position_embedding_type": "sinusoidal",
        "norm_first": False,
        "add_final_layer_norm": False,
        "layer_norm_eps": 1e-5,
        "sublayer_init_gain": 1.0,
        "scale_embedding": True,
        "tie_word_embeddings": True,
        "share_encoder_decoder_embeddings": True,
        "output_bias": False,
        "input_feature_size": None,
        "use_cache": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "is_encoder_decoder": True,
        "is_decoder": False,
    }.items(),
)
def test_defaults_are_the_papers_base_model(field, default):
    assert getattr(TinyTFMConfig(), field) == default
    assert type(getattr(TinyTFMConfig(), field)) is type(default)


def test_names_that_other_tools_read():
    config = tiny_config(decoder_layers=3, decoder_attention_heads=8)
    assert config.model_type == "tinytfm"
    assert config.hidden_size == config.d_model == 32
    config.hidden_size = 64
    assert config.d_model == 64
    assert tiny_config(hidden_size=64).d_model == 64
    assert "past_key_values" in config.keys_to_ignore_at_inference
    assert config.num_labels == 2
    assert tiny_config(num_labels=5).num_labels == 5
    assert tiny_config(id2label={0: "a", 1: "b", 2: "c"}).num_labels == 3


# A decoder's cache is sized by these two.
@pytest.mark.parametrize(
    ("shape", "layers", "heads"), [("encoder-decoder", 2, 4), ("decoder", 3, 8), ("encoder", 2, 4)]
)
def test_number_of_layers_and_heads_of_each_shape(shape, layers, heads):
    config = tiny_config(decoder_layers=3, decoder_attention_heads=8, **SHAPES[shape])
    assert (config.num_hidden_layers, config.num_attention_heads) == (layers, heads)
    config.num_hidden_layers, config.num_attention_heads = 5, 2
    assert (config.num_hidden_layers, config.num_attention_heads) == (5, 2)
    assert (config.decoder_layers, config.encoder_layers) == (
        (5, 2) if shape == "decoder" else (3, 5)
    )
    assert tiny_config(num_hidden_layers=5, **SHAPES[shape]).num_hidden_layers == 5


BAD_VALUES = {
    "vocab_size": [0, -1, 50.0, "50", None, True],
    "d_model": [0, -32, 32.0, "32", None],
    "encoder_layers": [0, -1, 1.5, "2", None, True],
    "decoder_layers": [0, -1, 1.5, "2", None],
    "encoder_attention_heads": [0, -4, 3, 64, 4.0, "4", None],
    "decoder_attention_heads": [0, -4, 3, 64, 4.0, "4", None],
    "encoder_ffn_dim": [0, -64, 64.0, "64", None],
    "decoder_ffn_dim": [0, -64, 64.0, "64", None],
    "max_position_embeddings": [0, -1, 16.0, "16", None, True],
    "input_feature_size": [0, -28, 28.0, "28", True],
    "num_labels": [0, -3, 2.5, "3", True],
    "dropout": [-0.1, 1.1, math.nan, math.inf, "0.1", None, True],
    "attention_dropout": [-0.1, 1.1, math.nan, "0.1", None],
    "activation_dropout": [-0.1, 1.1, math.nan, "0.1", None],
    "layer_norm_eps": [-1e-5, math.nan, math.inf, "1e-5", None],
    "sublayer_init_gain": [-0.5, math.nan, math.inf, "0.5", None],
    "activation_function": ["rleu", "", None, 3, ["relu"]],
    "position_embedding_type": ["rotary", "", None, ["learned"]],
    "norm_first": [1, "yes", None],
    "add_final_layer_norm": [0, "no", None],
    "scale_embedding": [1, "yes", None],
    "tie_word_embeddings": [1, "yes", None],
    "share_encoder_decoder_embeddings": [1, "yes", None],
    "output_bias": [1, "yes", None],
    "use_cache": [1, "yes", None],
    "is_encoder_decoder": ["yes", None],
    "pad_token_id": [-1, 50, 1.0, "1", True, [1]],
    "bos_token_id": [-1, 50, 0.0, "0", [0]],
    "eos_token_id": [-1, 50, 2.0, "2", [2, 50], [-1], [[2]]],
    "decoder_start_token_id": [-1, 50, 0.0, "0", [0]],
    "problem_type": ["classification", 3],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in BAD_VALUES.items() for value in values],
    ids=lambda value: repr(value) if not isinstance(value, str) else value,
)
def test_refuses_a_bad_value_by_name(field, value):
    with pytest.raises(ValueError, match=re.escape(repr(value))) as error:
        tiny_config(**{field: value})
    assert field in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"dropout": 0},
        {"dropout": 1, "attention_dropout": 1.0, "activation_dropout": 1.0},
        {"layer_norm_eps": 0.0},
        {"sublayer_init_gain": 0.0},
        {"d_model": 33, "encoder_attention_heads": 3, "decoder_attention_heads": 1}
        | {"position_embedding_type": "learned"},
        {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
        | {"decoder_start_token_id": None},
        {"eos_token_id": [2, 3]},
        {"pad_token_id": 49},
        {"activation_function": "gelu_new"},
        {"encoder_layers": 0, "encoder_attention_heads": 5, **SHAPES["decoder"]},
        {"decoder_layers": 0, "decoder_attention_heads": 5, **SHAPES["encoder"]},
        {"layerdrop": 0.1},  # transformers keeps what it does not know
    ],
    ids=str,
)
def test_accepts_unusual_values(settings):
    config = tiny_config(**settings)
    assert all(getattr(config, name) == value for name, value in settings.items())


@pytest.mark.parametrize("heads", [1, 3])
def test_b06_odd_width(heads):
    odd = {"d_model": 33, "encoder_attention_heads": heads, "decoder_attention_heads": heads}
    with pytest.raises(ValueError, match="d_model=33"):
        tiny_config(**odd)
    model = TinyTFMModel(tiny_config(position_embedding_type="learned", **odd))
    ids = torch.tensor([[3, 4, 5]])
    assert model(ids, decoder_input_ids=ids).last_hidden_state.shape == (1, 3, 33)


def test_what_transformers_4_kept_in_every_config_is_no_typo():
    config = tiny_config()
    again = TinyTFMConfig.from_dict({**config.to_dict(), "tie_encoder_decoder": False})
    assert again.is_encoder_decoder == config.is_encoder_decoder
    with pytest.raises(ValueError, match="did you mean 'is_encoder_decoder'"):
        TinyTFMConfig(is_encoder_decode=False)


@pytest.mark.parametrize(
    ("misspelt", "field"),
    [
        ("d_modle", "d_model"),
        ("dmodel", "d_model"),
        ("droput", "dropout"),
        ("encoder_layer", "encoder_layers"),
        ("encoder_attention_head", "encoder_attention_heads"),
        ("vocab_sise", "vocab_size"),
        ("norm_frist", "norm_first"),
        ("position_embeddings_type", "position_embedding_type"),
        ("is_encoder_decode", "is_encoder_decoder"),
        ("pad_tokens_id", "pad_token_id"),
    ],
)
def test_refuses_a_misspelt_field(misspelt, field):
    with pytest.raises(ValueError, match=f"'{misspelt}'.*'{field}'"):
        tiny_config(**{misspelt: 1})


def test_refuses_a_contradictory_shape():
    with pytest.raises(ValueError, match=r"is_encoder_decoder=True and is_decoder=True"):
        tiny_config(is_decoder=True)


def test_refuses_features_without_an_encoder():
    with pytest.raises(ValueError, match="input_feature_size=28"):
        tiny_config(input_feature_size=28, **SHAPES["decoder"])


CHANGES = [
    {},
    {
        "encoder_layers": 1,
        "decoder_layers": 3,
        "dropout": 0.25,
        "norm_first": True,
        "position_embedding_type": "learned",
        "tie_word_embeddings": False,
        "share_encoder_decoder_embeddings": False,
        "output_bias": True,
        "eos_token_id": [2, 4],
        "use_cache": False,
        "num_labels": 3,
    },
    # What transformers takes for a default, and we do not.
    {
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "decoder_start_token_id": None,
        "add_final_layer_norm": True,
        "scale_embedding": False,
    },
]


@every_shape
@pytest.mark.parametrize("changed", CHANGES, ids=["none", "many", "unset"])
@pytest.mark.parametrize("reader", [TinyTFMConfig, AutoConfig])
def test_json_round_trip(tmp_path, shape, reader, changed):
    config = tiny_config(**changed, **SHAPES[shape])
    config.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    json.loads(text, parse_constant=pytest.fail)  # neither NaN nor Infinity
    again = reader.from_pretrained(tmp_path)
    assert type(again) is TinyTFMConfig
    for name, value in {**TINY, **changed, **SHAPES[shape]}.items():
        assert getattr(again, name) == value, name
    unsaved = {"_name_or_path": ""}
    assert again.to_dict() | unsaved == config.to_dict() | unsaved
    again.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text() == text
    assert copy.deepcopy(config).to_dict() == config.to_dict()
    assert TinyTFMConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


@every_shape
def test_auto_map_names_every_class_of_the_shape(shape):
    assert tiny_config(**SHAPES[shape]).auto_map == {
        "AutoConfig": "configuration_tinytfm.TinyTFMConfig",
        "AutoModel": "modeling_tinytfm.TinyTFMModel",
        AUTO_CLASSES[shape].__name__: f"modeling_tinytfm.{HEADS[shape].__name__}",
    }


def test_auto_map_of_another_repository_is_replaced():
    foreign = {"AutoConfig": "user/repo--configuration_tinytfm.TinyTFMConfig"}
    assert tiny_config(auto_map=foreign).auto_map == tiny_config().auto_map


@every_shape
def test_registered_with_the_auto_classes(shape):
    config = tiny_config(**SHAPES[shape])
    assert type(AutoModel.from_config(config)) is TinyTFMModel
    assert type(AutoModelForSeq2SeqLM.from_config(tiny_config())) is HEADS["encoder-decoder"]
    assert type(AUTO_CLASSES[shape].from_config(config)) is HEADS[shape]
    assert type(AutoConfig.for_model("tinytfm")) is TinyTFMConfig


@every_shape
def test_no_class_edits_its_config(shape):
    config = tiny_config(**SHAPES[shape])
    before = copy.deepcopy(config.to_dict())
    for model_class in (TinyTFMModel, HEADS[shape]):
        model_class(config)
    assert config.to_dict() == before


@pytest.mark.parametrize(("shape", "head"), WRONG_HEADS)
@pytest.mark.parametrize("auto", [False, True])
def test_a_class_given_another_shape_names_the_right_one(shape, head, auto):
    config = tiny_config(**SHAPES[shape])
    before = copy.deepcopy(config.__dict__)
    fields = "is_encoder_decoder={is_encoder_decoder}.*is_decoder={is_decoder}".format(
        **config.to_dict()
    )
    right = HEADS[shape].__name__
    auto_class = next(AUTO_CLASSES[name] for name in HEADS if HEADS[name] is head)
    with pytest.raises(ValueError, match=f"{head.__name__} needs .*{fields}.* use {right}"):
        auto_class.from_config(config) if auto else head(config)
    assert config.__dict__ == before


@pytest.mark.parametrize(("shape", "head"), WRONG_HEADS)
def test_a_class_never_loads_half_a_checkpoint_of_another_shape(tmp_path, shape, head):
    HEADS[shape](tiny_config(**SHAPES[shape])).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"use {HEADS[shape].__name__}"):
        head.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("d_model", 33),
        ("d_model", 30),
        ("encoder_attention_heads", 5),
        ("decoder_layers", -1),
        ("dropout", 1.5),
        ("dropout", math.nan),
        ("activation_function", "rleu"),
        ("pad_token_id", 50),
        ("vocab_size", 2),
        ("position_embedding_type", "rotary"),
        ("is_decoder", True),
        ("scale_embedding", "no"),
    ],
)
@pytest.mark.parametrize("model_class", [TinyTFMModel, TinyTFMForConditionalGeneration])
def test_a_value_set_later_is_refused_by_the_model(model_class, field, value):
    config = tiny_config()
    setattr(config, field, value)
    with pytest.raises(ValueError, match=f"{field}={value}|{field}='{value}'"):
        model_class(config)


def test_a_value_given_to_from_pretrained_is_refused_by_the_model(tmp_path):
    TinyTFMModel(tiny_config()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="d_model=33"):
        TinyTFMModel.from_pretrained(tmp_path, d_model=33)


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention", "quick", "paged|eager"])
def test_an_attention_implementation_that_is_not_there(name):
    with pytest.raises(ValueError, match=f"(?i){name[:5]}"):
        TinyTFMModel(tiny_config(attn_implementation=name))


@pytest.fixture
def _modules():
    """Puts the package's modules and registrations back after a test that replaces them."""
    before = {name: module for name, module in sys.modules.items() if "modeling_tinytfm" in name}
    yield
    for name in [name for name in sys.modules if "modeling_tinytfm" in name]:
        del sys.modules[name]
    sys.modules.update(before)
    importlib.reload(modeling_tinytfm)


def second_import():
    for name in [name for name in sys.modules if name.startswith("modeling_tinytfm")]:
        del sys.modules[name]
    return importlib.import_module("modeling_tinytfm")


@pytest.mark.usefixtures("_modules")
@pytest.mark.parametrize(
    "again", [lambda: importlib.reload(modeling_tinytfm), second_import], ids=["reload", "anew"]
)
def test_b44_importing_twice_is_harmless(again):
    second = again()
    config = second.TinyTFMConfig(**TINY)
    model = AutoModelForSeq2SeqLM.from_config(config)
    assert type(model) is second.TinyTFMForConditionalGeneration
    assert type(AutoConfig.for_model("tinytfm")) is second.TinyTFMConfig


@pytest.mark.usefixtures("_modules")
def test_b44_import_under_a_second_name():
    folder = modeling_tinytfm.__path__[0]
    spec = importlib.util.spec_from_file_location(
        "other_modeling_tinytfm", f"{folder}/__init__.py", submodule_search_locations=[folder]
    )
    second = importlib.util.module_from_spec(spec)
    sys.modules["other_modeling_tinytfm"] = second
    spec.loader.exec_module(second)
    assert second.TinyTFMConfig is not TinyTFMConfig
    model = AutoModelForSeq2SeqLM.from_config(second.TinyTFMConfig(**TINY))
    assert type(model) is second.TinyTFMForConditionalGeneration


def test_b44_other_models_are_left_alone(tmp_path):
    assert TinyTFMConfig.model_type not in CONFIG_MAPPING_NAMES
    config = MarianConfig(
        vocab_size=20,
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        pad_token_id=19,
        decoder_start_token_id=19,
        max_position_embeddings=16,
    )
    MarianMTModel(config).save_pretrained(tmp_path)
    assert type(AutoModelForSeq2SeqLM.from_pretrained(tmp_path)) is MarianMTModel
