"""A trained model, scored again."""

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from transformers import Seq2SeqTrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .data import SplitReport
from .experiment import TASKS
from .loading import load_model
from .machine import device_arguments
from .metrics import check_metrics
from .recipes import RECIPE_FILE, Recipe, load_recipe
from .run_folder import check_data, digest
from .settings import (
    TEXT_METRICS,
    DataSettings,
    EvaluationSettings,
    TokenizerSettings,
    TrainingSettings,
)
from .tasks import SPLITS
from .translation import BATCH_TOKENS

logger = logging.getLogger(__name__)


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
        folder: A finished run, a checkpoint of a run, or, with `file`, any encoder-decoder.
        split: A split of its recipe.
        file: In place of a split: a file of pairs, read with the recipe's columns.
        metrics: Names of text metrics; the recipe's if None.
        num_beams: Width of the search; the model's if None.

    Returns:
        Loss, perplexity, token accuracy, the metrics with their signatures, and `samples`, the
        number of rows, each named after the split, or `file`.

    Raises:
        ValueError: If a name or the data are unusable, or the split is not the run's any more.
        OSError: If the folder holds no run, or the file cannot be read.
    """
    if num_beams is not None and num_beams < 1:
        raise ValueError(f"num_beams={num_beams} is not at least 1")
    check_metrics(metrics or ())
    if split not in SPLITS[1:]:
        raise ValueError(f"split={split!r} is none of {', '.join(SPLITS[1:])}")
    kept = _recipe_file(Path(folder))
    if kept is None and file is None:
        raise FileNotFoundError(
            f"{folder} holds no {RECIPE_FILE}: name a folder that train.py made, or a file of pairs"
        )
    model, tokenizer = load_model(folder)
    recipe = _recipe_for(str(folder), model) if kept is None else load_recipe(kept)
    task = TASKS[recipe.task](recipe)
    for option, value in (("metrics", metrics), ("num_beams", num_beams)):
        if value is not None and recipe.task != "seq2seq":
            raise ValueError(f"{option}={value!r} means nothing to task={recipe.task}")
    known = None  # the plan of a run has told of its own splits
    if file is None:
        rows = task.read()[0][split]
        instead = f"score other {task.rows} by file=... (evaluate_model.py: --file)"
        check_data(cast(Path, kept).parent, {split: digest(rows)}, instead)
    else:
        rows, known = task.read_file(file)
    prefix = split if file is None else "file"
    task.adopt(model.config)
    encoded, report = task.encode(rows, tokenizer, training=False, report=known)
    if report != SplitReport(pairs=report.pairs, blocks=report.blocks):  # not every row as it is
        logger.warning("%s: %s", prefix, report.describe(task.rows))
    with tempfile.TemporaryDirectory() as unused:
        arguments = device_arguments(recipe.training.arguments, training=False)
        trainer = task.trainer_class(
            model=model,
            args=Seq2SeqTrainingArguments(output_dir=unused, **arguments),
            processing_class=tokenizer,
            data_collator=task.collator(tokenizer, model),
            metrics=(recipe.evaluation.metrics or ()) if metrics is None else metrics,
            generation={} if num_beams is None else {"num_beams": num_beams},
            eval_batch_tokens=recipe.data.max_tokens or BATCH_TOKENS,
        )
        trainer.accelerator.prepare_model(model, evaluation_mode=True)  # to its precision
        scores, _ = trainer.score(encoded, prefix)
    signatures = {f"{prefix}_{name}_signature": text for name, text in trainer.signatures.items()}
    return {**scores, **signatures, f"{prefix}_samples": len(encoded)}


def _recipe_file(folder: Path) -> Path | None:
    """The recipe of a run; of a checkpoint, that of the run around it."""
    homes = [folder]
    if folder.name.startswith(f"{PREFIX_CHECKPOINT_DIR}-"):
        homes.append(folder.absolute().parent)
    return next((path for home in homes if (path := home / RECIPE_FILE).is_file()), None)


def _recipe_for(name: str, model: Any) -> Recipe:
    """What scores a model of pairs that came without a recipe.

    Raises:
        ValueError: If it is a model of something else.
    """
    if not model.config.is_encoder_decoder:
        raise ValueError(
            f"{name} is a {type(model).__name__} without its {RECIPE_FILE}, which tells how its "
            "rows are read: name the folder that train.py made"
        )
    data = DataSettings()
    if getattr(model.config, "position_embedding_type", None) == "learned":
        limit = min(data.max_source_length or 0, model.config.max_position_embeddings)
        data = replace(data, max_source_length=limit, max_target_length=limit)
    return Recipe(
        name=Path(name).name,
        tokenizer=TokenizerSettings(),
        data=data,
        training=TrainingSettings(),
        evaluation=EvaluationSettings(metrics=list(TEXT_METRICS)),
        model={},
        generation={},
    )
