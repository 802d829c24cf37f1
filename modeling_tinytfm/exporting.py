"""A folder made for another engine: CTranslate2, plain transformers (MarianMT) or ONNX.

    export_model("outputs/run", "ctranslate2", "outputs/run-ct2", quantization="int8")

Every folder also holds the tokenizer, the settings of generation, and a record of what it was made
of.
"""

import json
import logging
import os
from importlib.metadata import version
from pathlib import Path
from typing import Literal, get_args

from .conversion import EXPORT_FILE, check_class, to_marian
from .loading import load_model
from .modeling_tinytfm import TinyTFMForConditionalGeneration
from .search import penalty_form
from .tokenization import save_tokenizer
from .translation import new_folder

logger = logging.getLogger(__name__)

Engine = Literal["ctranslate2", "marian", "onnx"]
_PACKAGES = {
    "ctranslate2": ("transformers", "ctranslate2"),
    "marian": ("transformers",),
    "onnx": ("transformers", "torch", "onnx", "onnxscript"),
}


def export_model(
    model: str | os.PathLike[str],
    to: Engine,
    output: str | os.PathLike[str],
    *,
    quantization: str | None = None,
) -> Path:
    """Writes a trained model for another engine.

    Args:
        model: A folder, or a name on the Hub.
        to: The engine.
        output: A folder that does not exist, or is empty.
        quantization: For CTranslate2 only, such as "int8"; float32 if None.

    Returns:
        The folder.

    Raises:
        ValueError: If the engine cannot have this model, by the name of what it lacks; or if
            `output` is in use.
        OSError: If the model cannot be read, or the folder not be written.
        ModuleNotFoundError: If a package is missing.
    """
    if to not in get_args(Engine):
        raise ValueError(f"to={to!r} is unknown: choose one of {', '.join(get_args(Engine))}")
    if quantization is not None and to != "ctranslate2":
        raise ValueError(
            f"quantization={quantization!r} is for ctranslate2 only: leave it out with {to}"
        )
    with new_folder(output) as folder:
        loaded, tokenizer = load_model(os.fspath(model))
        check_class(os.fspath(model), loaded, TinyTFMForConditionalGeneration)
        if to == "ctranslate2":
            from .ctranslate2_model import write_ctranslate2

            write_ctranslate2(loaded, tokenizer, folder, quantization)
        elif to == "marian":
            to_marian(loaded).save_pretrained(folder)
        else:
            from .onnx_export import ONNX_README, write_onnx

            write_onnx(loaded, folder)
            (folder / "README.md").write_text(ONNX_README, encoding="utf-8")
        save_tokenizer(tokenizer, folder)
        loaded.generation_config.save_pretrained(folder)
        if penalty_form(loaded.generation_config, None) == "gnmt":
            logger.warning(
                "length_penalty_form='gnmt' is known to modeling_tinytfm alone: %s",
                "translate with num_beams=1 or length_penalty_form='length' (translate.py: "
                "--num-beams 1, --length-penalty-form length)"
                if to == "ctranslate2"
                else "others will rank beams by length^length_penalty",
            )
        config = loaded.config.to_diff_dict()
        config.pop("auto_map")  # there is no code beside it
        record = {
            "engine": to,
            "model": Path(model).name if Path(model).exists() else os.fspath(model),
            "quantization": quantization,
            "versions": {package: version(package) for package in _PACKAGES[to]},
            "config": config,
        }
        text = json.dumps(record, indent=2, sort_keys=True) + "\n"
        (folder / EXPORT_FILE).write_text(text, encoding="utf-8")
    return Path(output)
