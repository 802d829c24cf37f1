"""Saved models and tokenizers, read with errors that a person can act on."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from .configuration_tinytfm import TinyTFMConfig
from .conversion import EXPORT_FILE
from .modeling_tinytfm import TinyTFMForConditionalGeneration
from .tokenization import portable
from .translation import same_vocabulary


def load_tokenizer(name: str | Path) -> Any:
    """A saved tokenizer.

    Raises:
        OSError: If there is none that can be read.
    """
    try:
        with warnings.catch_warnings():
            # Marian's would normalise punctuation by sacremoses, in a method that it never calls.
            warnings.filterwarnings("ignore", message="Recommended: pip install sacremoses")
            return portable(AutoTokenizer.from_pretrained(name, trust_remote_code=False))
    except OSError as error:
        if str(name) in str(error):
            raise
        raise OSError(f"{name}: {error}") from error  # that the Hub cannot be reached, say
    except Exception as error:  # what tokenizers raises for a damaged file is no narrower
        raise OSError(f"{name}: the tokenizer cannot be read: {error}") from error


def load_weights(name: str | Path) -> Any:
    """A saved model, by the class that its config tells.

    Raises:
        ValueError: If there is no such class.
        OSError: If there is none that can be read.
    """
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    auto_class: Any = AutoModelForSequenceClassification
    if config.is_encoder_decoder:
        auto_class = AutoModelForSeq2SeqLM
    elif getattr(config, "is_decoder", False):
        auto_class = AutoModelForCausalLM
    try:
        return auto_class.from_pretrained(name, config=config, trust_remote_code=False)
    except SafetensorError as error:
        raise OSError(f"{name}: the weights cannot be read: {error}") from error


def load_start(name: str, settings: dict[str, Any], tokens: int) -> Any:
    """A trained encoder-decoder to go on from, in float32.

    Args:
        name: A folder, or a name on the Hub.
        settings: Fields of its config that somebody has written down; only dropouts may change it.
        tokens: How many its tokenizer has.

    Raises:
        ValueError: If it is no such model, or a field contradicts it.
        OSError: If there is none that can be read.
    """
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if not isinstance(config, TinyTFMConfig):
        raise ValueError(
            f"model.from_pretrained={name!r} is a model of type {config.model_type}: make it one "
            "of ours by scripts/import_model.py"
        )
    for field, value in settings.items():
        if field.endswith("dropout"):
            setattr(config, field, value)
        elif value != getattr(config, field):
            raise ValueError(
                f"model.{field}={value!r} contradicts model.from_pretrained={name!r}, where it is "
                f"{getattr(config, field)!r}: leave it out"
            )
    if tokens > config.vocab_size:
        raise ValueError(
            f"model.from_pretrained={name!r}: its tokenizer has {tokens} tokens, more than "
            f"vocab_size={config.vocab_size}"
        )
    return TinyTFMForConditionalGeneration.from_pretrained(name, config=config, dtype=torch.float32)


def load_model(name: str | Path) -> tuple[Any, Any]:
    """A trained model in evaluation mode, on a GPU if there is one, and its tokenizer.

    The tokenizer is None for a model that reads continuous features.

    Raises:
        ValueError: If it is no model.
        OSError: If there is none that can be read.
    """
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"{name} is no model: it holds no config.json")
    if not folder.exists() and folder.parent != Path() and folder.parent.is_dir():
        # A name on the Hub looks the same, but would have no folder of its owner's name here.
        raise FileNotFoundError(f"{name}: no such folder")
    model = load_weights(name)
    reads_features = getattr(model.config, "input_feature_size", None) is not None
    tokenizer = None if reads_features else load_tokenizer(name)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def load_translator(names: Sequence[str | Path]) -> tuple[Any, Any]:
    """What `translate_n_best` takes as model and tokenizer.

    Args:
        names: Models that decode together, or one folder that was exported to CTranslate2.

    Raises:
        ValueError: If they cannot decode together, or one is no model.
        OSError: If there is none that can be read.
        ModuleNotFoundError: If CTranslate2 is needed and not installed.
    """
    for name in names:
        if not (record := Path(name) / EXPORT_FILE).is_file():
            continue
        engine = json.loads(record.read_text(encoding="utf-8"))["engine"]
        if engine == "onnx":
            raise ValueError(f"{name} holds ONNX graphs: its README.md shows how to run them")
        if engine == "ctranslate2":
            if len(names) > 1:
                raise ValueError(f"{name} was exported to CTranslate2: it decodes alone")
            from .ctranslate2_model import CTranslate2Translator

            tokenizer = load_tokenizer(name)
            return CTranslate2Translator(name, tokenizer), tokenizer
    models, tokenizers = zip(*map(load_model, names), strict=True)
    for name, model in zip(names, models, strict=True):
        if not model.config.is_encoder_decoder:
            raise ValueError(f"{name} is a {type(model).__name__}, which does not translate")
    return models, same_vocabulary(tokenizers)
