"""The folder of a run: whose it is, what it holds, and where a run goes on."""

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset
from safetensors import safe_open
from transformers import PreTrainedModel

from .checkpoints import checkpoints, last_complete_checkpoint, what_is_missing
from .recipes import RECIPE_FILE, Recipe, load_recipe
from .tokenization import TOKENIZER_FILES, save_tokenizer

PREDICTIONS_FILE = "predictions_test.jsonl"
CURVES_FILE = "curves.png"
RUN_FILE = "run.json"
DATA_FILE = "data.json"  # a hash of each split, by which a run that goes on knows its data
RESULTS_FILE = "all_results.json"  # written last: a folder that holds it is a finished run
Say = Callable[[str], None]

_LENGTH_OF_A_RUN = {
    "training.max_steps",
    "training.num_train_epochs",
    "training.early_stopping_patience",
}


def check_folder(recipe: Recipe, folder: Path) -> dict[str, float] | None:
    """Says why a run's folder is not usable for this recipe; changes nothing in it.

    Returns:
        The scores, if it holds this run, finished.

    Raises:
        ValueError: If it holds something else, or an unfinished run that is not to be resumed.
        OSError: If it cannot be written.
    """
    name = f"training.output_dir={folder}"
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{name} is a file: name a folder")
    if recipe.training.overwrite:
        here = Path.cwd()
        if folder.resolve() in (here, *here.parents):
            raise ValueError(f"{name} holds the working folder and cannot be moved aside")
        check_writable(folder.absolute().parent, name)
        return None
    check_writable(folder, name)
    kept = folder / RECIPE_FILE
    if not kept.is_file():
        # A hidden file may be what a process that was killed left half-written.
        names = {path.name for path in folder.glob("*") if not path.name.startswith(".")}
        if others := sorted(names - set(TOKENIZER_FILES)):
            raise ValueError(
                f"{name} holds files that are not this project's run ({others[0]}): choose another "
                "folder, or training.overwrite=true moves it aside"
            )
        return None
    differences = recipe.differences(load_recipe(kept))
    if differences:
        advice = "choose another folder, or training.overwrite=true moves it aside"
        if set(differences) <= _LENGTH_OF_A_RUN and checkpoints(folder):
            advice += (
                "; to train this run longer, choose another folder and "
                f"training.resume_from_checkpoint={folder / 'checkpoint-N'}"
            )
        raise ValueError(
            f"{name} holds the run of another recipe (it differs in {', '.join(differences[:5])}): "
            f"{advice}"
        )
    scores = finished_scores(folder)
    if scores is None and not recipe.training.resume_from_checkpoint:
        raise ValueError(
            f"{name} holds this run, unfinished: training.resume_from_checkpoint=true continues "
            "it, training.overwrite=true moves it aside and starts anew"
        )
    return scores


def check_writable(folder: Path, name: str) -> None:
    """Tries whether a file can be made in a folder, or in the one that it would be made in.

    Raises:
        OSError: With `name` in the message.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise OSError(f"{name} cannot be written: {error.strerror}") from error


def finished_scores(folder: Path) -> dict[str, float] | None:
    """The scores of a finished run; None if it is not finished."""
    try:
        scores = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return scores if "test_loss" in scores else None


def claim_folder(recipe: Recipe, folder: Path, tokenizer: Any, say: Say) -> None:
    """Makes a folder this recipe's, with recipe and tokenizer; an old one is moved, not deleted.

    Raises:
        OSError: If it cannot be written.
    """
    begun = recipe.training.resume_from_checkpoint
    if not isinstance(begun, str):
        begun = not recipe.training.overwrite and _begun_from(folder)
    training = replace(recipe.training, overwrite=False, resume_from_checkpoint=begun)
    recipe_text = replace(recipe, training=training).to_yaml()
    if recipe.training.overwrite and folder.exists() and any(folder.iterdir()):
        number = 1
        while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        folder.rename(aside)
        say(f"{folder} was moved to {aside}")
    folder.mkdir(parents=True, exist_ok=True)
    # Renaming leaves no file half-written when the process is killed.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as half_written:
        new = Path(half_written)
        (new / RECIPE_FILE).write_text(recipe_text, encoding="utf-8")
        if tokenizer is not None:
            save_tokenizer(tokenizer, new)
        # The tokenizer's own file comes last: it is what tells that there is one.
        for path in sorted(new.iterdir(), key=lambda path: path.name == TOKENIZER_FILES[0]):
            path.replace(folder / path.name)


def find_checkpoint(
    recipe: Recipe, folder: Path, model: PreTrainedModel, num_processes: int, *, sharded: bool
) -> str | None:
    """The checkpoint to resume from; None to start anew.

    Args:
        recipe: What to run.
        folder: The run's.
        model: The model that is to be trained.
        num_processes: How many train it.
        sharded: Whether they share its weights out among them (FSDP).

    Raises:
        ValueError: If the recipe names one that is not complete, or of another model.
    """
    wanted = recipe.training.resume_from_checkpoint
    if wanted is True:
        checkpoint = last_complete_checkpoint(folder, num_processes, sharded=sharded)
        if checkpoint is not None:
            return str(checkpoint)
        wanted = _begun_from(folder)
    if isinstance(wanted, str):
        fault = what_is_missing(wanted, num_processes, sharded=sharded)
        if fault is not None:
            raise ValueError(f"training.resume_from_checkpoint={wanted} is not complete: {fault}")
        with safe_open(Path(wanted) / "model.safetensors", "pt") as weights:
            names = weights.keys()
            there = {name: list(weights.get_slice(name).get_shape()) for name in names}
        tied = model.get_expanded_tied_weights_keys(all_submodels=True)
        here = {
            name: list(weight.shape)
            for name, weight in model.state_dict().items()
            if name in there or name not in tied
        }
        for name in sorted(here.keys() | there.keys()):
            if here.get(name) != there.get(name):
                raise ValueError(
                    f"training.resume_from_checkpoint={wanted} is of another model: {name} is "
                    f"{there.get(name)} there and {here.get(name)} here"
                )
        return wanted
    return None


def digest(rows: Dataset) -> str:
    """A hash of all rows."""
    found = hashlib.blake2b(digest_size=16)
    for batch in rows.with_format(None).iter(batch_size=1_000):
        found.update(json.dumps(batch, sort_keys=True).encode())
    return found.hexdigest()


def check_data(run: Path, digests: Mapping[str, str], instead: str) -> None:
    """Refuses to go on with a run, or to score it, where its data have changed since it was begun.

    Args:
        run: The folder of the run.
        digests: `digest` of the splits that are at hand.
        instead: What a user may do who cannot bring the data back.

    Raises:
        ValueError: With the names of the splits.
    """
    try:
        before = json.loads((run / DATA_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return  # of an earlier version, or killed while it was written
    changed = [split for split, value in digests.items() if before.get(split, value) != value]
    if changed:
        raise ValueError(
            f"the rows of {' and '.join(changed)} are not those with which the run in {run} was "
            f"begun: bring them back, or {instead}"
        )


def _begun_from(folder: Path) -> str | Literal[False]:
    """The checkpoint, named by its path, from which a folder's run was begun."""
    kept = folder / RECIPE_FILE
    named = load_recipe(kept).training.resume_from_checkpoint if kept.is_file() else False
    return named if isinstance(named, str) else False
