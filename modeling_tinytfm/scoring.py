"""A trained model, scored again."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import Seq2SeqTrainingArguments

from .data import encode_pairs, load_pairs
from .experiment import read_pairs, with_texts
from .loading import load_model
from .machine import device_arguments
from .recipes import RECIPE_FILE, load_recipe
from .settings import DataSettings, EvaluationSettings
from .training import TinyTFMTrainer
from .translation import BATCH_TOKENS


def score_model(
    folder: str | Path,
    *,
    split: str = "test",
    file: str | Path | None = None,
    metrics: Sequence[str] | None = None,
    num_beams: int | None = None,
) -> dict[str, Any]:
    """Scores a trained model again.

    Args:
        folder: A finished run.
        split: A split of its recipe.
        file: In place of a split: a file of pairs, read with the recipe's columns.
        metrics: Names of text metrics; the recipe's if None.
        num_beams: Width of the search; the model's if None.

    Returns:
        Loss, perplexity, token accuracy and the metrics with their signatures, each named after
        the split, or `file`.

    Raises:
        ValueError: If a name or the data are unusable.
        OSError: If the folder holds no run, or the file cannot be read.
    """
    if num_beams is not None and num_beams < 1:
        raise ValueError(f"num_beams={num_beams} is not at least 1")
    data, evaluation, device = DataSettings(), EvaluationSettings(), {}
    if (kept := Path(folder) / RECIPE_FILE).is_file():
        recipe = load_recipe(kept)
        data, evaluation, device = recipe.data, recipe.evaluation, recipe.training.arguments
    elif file is None:
        raise FileNotFoundError(
            f"{folder} holds no {RECIPE_FILE}: name a folder that train.py made, or a file of pairs"
        )
    if file is None:
        texts, _ = read_pairs(data)
        rows, prefix = texts[split], split
    else:
        texts, _ = load_pairs(
            {"test": file},
            source_column=data.source_column,
            target_column=data.target_column,
            merge_references=data.merge_references,
        )
        rows, prefix = texts["test"], "file"
    model, tokenizer = load_model(folder)
    encoded, _ = encode_pairs(
        rows,
        tokenizer,
        max_source_length=data.max_source_length,
        max_target_length=data.max_target_length,
        drop_too_long=False,
        num_proc=data.num_proc,
    )
    with tempfile.TemporaryDirectory() as unused:
        trainer = TinyTFMTrainer(
            model=model,
            args=Seq2SeqTrainingArguments(output_dir=unused, **device_arguments(device)),
            processing_class=tokenizer,
            metrics=evaluation.metrics if metrics is None else metrics,
            generation={} if num_beams is None else {"num_beams": num_beams},
            eval_batch_tokens=data.max_tokens or BATCH_TOKENS,
        )
        trainer.accelerator.prepare_model(model, evaluation_mode=True)  # to its precision
        scores, _ = trainer.score(with_texts(encoded, rows), prefix)
    signatures = {f"{prefix}_{name}_signature": text for name, text in trainer.signatures.items()}
    return {**scores, **signatures}
