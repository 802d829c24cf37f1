"""Checkpoints of a run: which are complete, which validated best, and their mean."""

import json
import logging
import math
import zipfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, TrainerState

from .loading import load_tokenizer, load_weights
from .recipes import RECIPE_FILE, load_recipe
from .tokenization import TOKENIZER_FILES, save_tokenizer
from .translation import new_folder

logger = logging.getLogger(__name__)

# What the Trainer writes of its optimizer, without and with FSDP.
OPTIMIZER_FILES = (("optimizer.pt",), ("pytorch_model_fsdp.bin", "optimizer.bin"))


def checkpoint_step(folder: Path) -> int:
    """The update after which the Trainer wrote a `checkpoint-N`."""
    return int(folder.name.removeprefix("checkpoint-"))


def checkpoints(run: str | Path) -> list[Path]:
    """The checkpoints of a run, oldest first, complete or not."""
    folders = [path for path in Path(run).glob("checkpoint-*") if path.is_dir()]
    numbered = [path for path in folders if path.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(numbered, key=checkpoint_step)


def what_is_missing(
    checkpoint: str | Path, world_size: int | None = None, *, sharded: bool = False
) -> str | None:
    """Why a checkpoint cannot be used, e.g. because the run was killed while writing it.

    Args:
        checkpoint: A folder that the Trainer wrote.
        world_size: Number of processes that are to resume from it; None: only its weights are used.
        sharded: Whether those share the weights out among them (FSDP).

    Returns:
        The first fault in words, or None if the checkpoint is complete.
    """
    names = ["config.json", "model.safetensors", "trainer_state.json"]
    if world_size is not None:
        others = OPTIMIZER_FILES[not sharded]
        if any((Path(checkpoint) / name).is_file() for name in others):
            return f"it was written {'without' if sharded else 'with'} FSDP ({others[-1]})"
        names += [*OPTIMIZER_FILES[sharded], "scheduler.pt"]
        ranks = random_state_names(world_size)
        names += ranks
        more = {file.name for file in Path(checkpoint).glob("rng_state_*.pth")} - {*ranks}
        if world_size > 1 and more:  # of fewer processes, a file is missing
            return f"it was written by {world_size + len(more)} processes"
    for name in names:
        file = Path(checkpoint) / name
        if not file.is_file():
            return f"{name} is missing"
        if not _is_whole(file):
            return f"{name} is cut off"
    return None


def random_state_names(world_size: int) -> list[str]:
    """The files in which the processes of a run keep the states of their random numbers."""
    if world_size == 1:
        return ["rng_state.pth"]
    return [f"rng_state_{rank}.pth" for rank in range(world_size)]


def _is_whole(file: Path) -> bool:
    """Whether a file of a checkpoint was written to its end."""
    try:
        if file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))
        elif file.suffix == ".safetensors":
            with safe_open(file, "pt"):
                pass
        else:
            return zipfile.is_zipfile(file)
    except (ValueError, SafetensorError):
        return False
    return True


def last_complete_checkpoint(
    run: str | Path, world_size: int = 1, *, sharded: bool = False
) -> Path | None:
    """The newest checkpoint that can be resumed from; others are passed over with a warning.

    Args:
        run: The folder of the run.
        world_size: Number of processes that are to resume.
        sharded: Whether those share the weights out among them (FSDP).

    Raises:
        ValueError: If another number of processes, which share the rows out otherwise, wrote them,
            or one that shared the weights out otherwise.
    """
    folders = checkpoints(run)[::-1]
    for folder in folders:
        fault = what_is_missing(folder, world_size, sharded=sharded)
        if fault is None:
            return folder
        logger.warning("%s is not complete (%s): passed over", folder, fault)
    for folder in folders:
        writers = len(list(folder.glob("rng_state*.pth")))
        for with_fsdp in (False, True):
            if writers and what_is_missing(folder, writers, sharded=with_fsdp) is None:
                raise ValueError(
                    f"{folder} was written by {writers} processes{' with FSDP' * with_fsdp} and "
                    f"cannot be resumed by {world_size}{' with FSDP' * sharded}"
                )
    return None


def last_checkpoints(run: str | Path, count: int) -> list[Path]:
    """The `count` newest complete checkpoints of a run, oldest first.

    Raises:
        ValueError: If there are fewer.
    """
    folders = [folder for folder in checkpoints(run) if what_is_missing(folder) is None]
    if len(folders) < count:
        raise ValueError(
            f"{run} holds {len(folders)} complete checkpoints, not {count}: save more often, or "
            "keep more of them (training.save_total_limit)"
        )
    return folders[-count:]


def best_checkpoints(
    run: str | Path, count: int, metric: str = "loss", greater_is_better: bool = False
) -> list[Path]:
    """The `count` complete checkpoints of a run that validated best, best first.

    Args:
        run: The folder of the run.
        count: How many.
        metric: The figure that decides, with or without `eval_`.
        greater_is_better: Whether a higher figure is better.

    Raises:
        ValueError: If fewer checkpoints were evaluated with that metric.
    """
    name = f"eval_{metric.removeprefix('eval_')}"
    folders = [folder for folder in checkpoints(run) if what_is_missing(folder) is None]
    values: dict[int, float] = {}
    for folder in folders[-1:]:  # the last one remembers all
        history = TrainerState.load_from_json(str(folder / "trainer_state.json")).log_history
        values = {entry["step"]: entry[name] for entry in history if name in entry}
    evaluated = [f for f in folders if not math.isnan(values.get(checkpoint_step(f), math.nan))]
    if len(evaluated) < count:
        raise ValueError(
            f"{run} holds {len(evaluated)} checkpoints with an {name}, not {count}: evaluate "
            "whenever a checkpoint is saved, and keep more of them (training.save_total_limit)"
        )
    best_first = sorted(
        evaluated, key=lambda folder: values[checkpoint_step(folder)], reverse=greater_is_better
    )
    return best_first[:count]


def average_checkpoints(folders: Sequence[str | Path]) -> PreTrainedModel:
    """The model whose weights are the mean of several checkpoints' (section 6.1).

    Args:
        folders: Checkpoints of one run.

    Returns:
        The last checkpoint's model with the mean weights, computed in float64.

    Raises:
        ValueError: If there is none, or if they are not of one model.
    """
    if not folders:
        raise ValueError("no checkpoints to average")
    paths = [Path(folder) for folder in folders]
    configs = [json.loads((path / "config.json").read_text(encoding="utf-8")) for path in paths]
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path / "model.safetensors", "pt")) for path in paths]
        shapes = [
            {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}
            for file in files
        ]
        for path, config, shape in zip(paths, configs, shapes, strict=True):
            config.pop("transformers_version", None)
            if config != configs[0] or shape != shapes[0]:
                raise ValueError(f"{path} holds another model than {paths[0]}")
        mean = {
            name: torch.stack([file.get_tensor(name) for file in files]).double().mean(0)
            for name in shapes[0]
        }
    model = load_weights(paths[-1])
    model.load_state_dict(mean, strict=False)  # what it lacks is tied to what it has
    return model


def save_average(
    run: Path, output: Path, *, last: int | None = None, best: int | None = None
) -> list[Path]:
    """Averages checkpoints of a run and saves the model, with the run's tokenizer and recipe.

    Args:
        run: The run's folder.
        output: A folder that does not exist, or is empty.
        last: Take so many of the newest checkpoints.
        best: Or so many of those that validated best.

    Returns:
        The checkpoints.

    Raises:
        ValueError: If there are too few checkpoints, or `output` is in use.
        OSError: If a folder cannot be read or written.
    """
    count = last if last is not None else best
    if count is None or count < 1:
        raise ValueError(f"{count} checkpoints cannot be averaged: give at least 1")
    recipe = load_recipe(run / RECIPE_FILE)
    if last is not None:
        folders = last_checkpoints(run, count)
    else:
        chosen = recipe.training.arguments
        folders = best_checkpoints(
            run,
            count,
            chosen.get("metric_for_best_model") or "loss",
            bool(chosen.get("greater_is_better")),
        )
    with new_folder(output) as folder:
        average_checkpoints(folders).save_pretrained(folder)
        if any((run / name).is_file() for name in TOKENIZER_FILES):
            save_tokenizer(load_tokenizer(run), folder)
        (folder / RECIPE_FILE).write_text(recipe.to_yaml(), encoding="utf-8")
    return folders
