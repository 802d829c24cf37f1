"""A recipe, run: data -> vocabulary -> model -> training -> scores -> a folder that loads anywhere.

`prepare` does everything that can fail because of what a user wrote, and nothing that would be lost
if it failed; `Experiment.run` trains.
"""

import json
import logging
import math
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset, DatasetDict, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import speed_metrics

from .configuration_tinytfm import TinyTFMConfig
from .data import SplitReport, cmudict_pairs, encode_pairs, load_pairs, reverse_pairs, token_lengths
from .metrics import METRICS
from .modeling_tinytfm import TinyTFMForConditionalGeneration
from .recipes import DataSettings, EvaluationSettings, Recipe, load_recipe
from .tokenization import save_tokenizer, train_tokenizer
from .training import (
    TinyTFMTrainer,
    average_checkpoints,
    best_checkpoints,
    last_checkpoints,
    last_complete_checkpoint,
    what_is_missing,
)
from .translation import BATCH_TOKENS, EXTRA_TOKENS, translate, whole_file

logger = logging.getLogger(__name__)

RECIPE_FILE = "recipe.yaml"
PREDICTIONS_FILE = "predictions_test.jsonl"
CURVES_FILE = "curves.png"
RESULTS_FILE = "all_results.json"  # written last: a folder that holds it is a finished run
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
# What a person can mend; anything else that preparation raises is a bug, and shows its traceback.
PREPARATION_ERRORS = (ValueError, OSError, ImportError)

Say = Callable[[str], None]


def run_recipe(recipe: Recipe, say: Say = logger.info) -> dict[str, float]:
    """Runs a recipe, or reports the finished run that its folder holds.

    Args:
        recipe: What to run.
        say: Takes the lines meant for a person: the plan, the scores, what to do next.

    Returns:
        The scores, as `all_results.json` holds them.

    Raises:
        ValueError: If the recipe, the data or the folder do not allow the run.
        OSError: If a file cannot be read or written.
        ImportError: If the recipe's data need a package that is not installed.
        NonFiniteLossError: If training broke down.
    """
    experiment = prepare(recipe, say)
    return experiment.run() if isinstance(experiment, Experiment) else experiment


def use_threads(threads: int | None) -> int:
    """Gives torch so many CPU threads, or all cores divided by this machine's processes.

    accelerate's launcher allows one, which leaves all other cores of a CPU idle.
    """
    if threads is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        threads = max(1, (cores or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.set_num_threads(threads)
    return threads


def prepare(recipe: Recipe, say: Say = logger.info) -> "Experiment | dict[str, float]":
    """Loads and checks all that a run needs, and only then claims the run's folder.

    Args:
        recipe: What to run.
        say: See `run_recipe`.

    Returns:
        The experiment, ready to run; or the scores, if the folder holds this run, finished.

    Raises:
        ValueError: As `run_recipe`, on every process what went wrong on one.
        OSError: As `run_recipe`.
        ImportError: As `run_recipe`.
    """
    arguments = training_arguments(recipe)
    state = PartialState()
    threads = use_threads(recipe.threads)
    folder = Path(recipe.training.output_dir)
    if not state.is_main_process:
        say = logger.debug

    found: Any = None
    with main_process_first(state):
        if state.is_main_process:
            found = check_folder(recipe, folder)
    scores = from_main_process(found)
    if scores is not None:
        say(f"{folder} holds this run, finished; training.overwrite=true starts it anew.")
        say(describe_scores(scores, "test"))
        return scores

    with main_process_first(state):
        texts, reports = read_pairs(recipe.data)
        missing = [name for name in ("train", "validation", "test") if not len(texts[name])]
        if missing:
            raise ValueError(f"data: there are no pairs in {' and '.join(missing)}")
    with main_process_first(state):
        if state.is_main_process:
            found = make_tokenizer(recipe, texts["train"], folder, say)
    tokenizer: Any = from_main_process(found)
    sets: dict[str, Dataset] = {}
    with main_process_first(state):
        for split, rows in texts.items():
            encoded, reports[split] = encode_pairs(
                rows,
                tokenizer,
                max_source_length=recipe.data.max_source_length,
                max_target_length=recipe.data.max_target_length,
                drop_too_long=split == "train",
                num_proc=recipe.data.num_proc,
                report=reports[split],
            )
            sets[split] = encoded if split == "train" else with_texts(encoded, rows)
    # From here on processes are forked, which a tokenizer's threads would not survive.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    set_seed(arguments.seed)
    model = build_model(recipe, len(tokenizer), sets["train"])
    callbacks: list[TrainerCallback] = []
    if recipe.training.early_stopping_patience is not None:
        callbacks.append(EarlyStopping(recipe.training.early_stopping_patience))
    trainer = TinyTFMTrainer(
        model=model,
        args=arguments,
        train_dataset=sets["train"],
        eval_dataset=sets["validation"],
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        callbacks=callbacks,
        max_tokens=recipe.data.max_tokens,
        noam=recipe.training.is_noam,
        metrics=recipe.evaluation.metrics,
        eval_batch_tokens=recipe.data.max_tokens or BATCH_TOKENS,
    )
    experiment = Experiment(recipe, folder, trainer, sets, reports, threads, say)
    with main_process_first(state):
        if state.is_main_process:
            found = find_checkpoint(recipe, folder, model, state.num_processes)
            claim_folder(recipe, folder, tokenizer, say)
    experiment.checkpoint = from_main_process(found)
    return experiment


@contextmanager
def main_process_first(state: PartialState) -> Iterator[None]:
    """Lets the main process fill the caches that the others then find.

    An error on one process becomes an error on all: accelerate's own context manager of this name
    would leave the others waiting for a process that has ended.
    """
    if not state.is_main_process:
        _share_error(None)
    error = None
    try:
        yield
    except PREPARATION_ERRORS as caught:
        error = caught
    if state.is_main_process:
        _share_error(error)
    _share_error(error)


def _share_error(error: Exception | None) -> None:
    messages = gather_object([None if error is None else str(error)])
    if error is not None:
        raise error
    for message in messages:
        if message is not None:
            raise ValueError(message)


def from_main_process(value: Any) -> Any:
    """The main process's value, on every process."""
    return broadcast_object_list([value])[0]


def training_arguments(recipe: Recipe) -> Seq2SeqTrainingArguments:
    """The Trainer's arguments, with the choices that depend on the machine.

    Making them also joins this process to the group of all.

    Raises:
        ValueError: If the machine cannot do what they ask for.
    """
    values = recipe.training.trainer_arguments()
    chosen = device_arguments(values)
    if values.get("fp16") and not chosen["fp16"]:
        raise ValueError("training.fp16=true needs a GPU: a CPU has no fast fp16; leave it out")
    values.update(chosen)
    values.setdefault("ddp_find_unused_parameters", False)
    values.setdefault("ddp_broadcast_buffers", False)  # none changes
    debug_level = torch.distributed.get_debug_level()
    if chosen["use_cpu"]:
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL the CPUs' group would come in a wrapper, which DDP of
        # torch 2.13 takes for the group itself: it crashes.
        torch.distributed.set_debug_level(torch.distributed.DebugLevel.OFF)
    try:
        return Seq2SeqTrainingArguments(**values)
    finally:
        torch.distributed.set_debug_level(debug_level)


def device_arguments(values: dict[str, Any]) -> dict[str, Any]:
    """Device and precision for the given arguments of the Trainer, on this machine."""
    has_accelerator = torch.cuda.is_available() or torch.backends.mps.is_available()
    use_cpu = values.get("use_cpu", False) or not has_accelerator
    fp16 = values.get("fp16", False) and not use_cpu
    bf16 = values.get("bf16")
    if bf16 is None:
        has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(False)
        bf16 = has_bf16 and not use_cpu and not fp16
    return {"use_cpu": use_cpu, "fp16": fp16, "bf16": bf16}


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
        raise ValueError(
            f"{name} holds the run of another recipe (it differs in {', '.join(differences[:5])}): "
            "choose another folder, or training.overwrite=true moves it aside"
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
    training = replace(recipe.training, overwrite=False, resume_from_checkpoint=False)
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
        save_tokenizer(tokenizer, new)
        # The tokenizer's own file comes last: it is what tells that there is one.
        for path in sorted(new.iterdir(), key=lambda path: path.name == TOKENIZER_FILES[0]):
            path.replace(folder / path.name)


def find_checkpoint(
    recipe: Recipe, folder: Path, model: PreTrainedModel, num_processes: int
) -> str | None:
    """The checkpoint to resume from; None to start anew.

    Raises:
        ValueError: If the recipe names one that is not complete, or of another model.
    """
    wanted = recipe.training.resume_from_checkpoint
    if isinstance(wanted, str):
        fault = what_is_missing(wanted, num_processes)
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
    checkpoint = last_complete_checkpoint(folder, num_processes) if wanted else None
    return None if checkpoint is None else str(checkpoint)


def read_pairs(data: DataSettings) -> tuple[DatasetDict, dict[str, SplitReport]]:
    """The texts of all splits, and what became of their lines.

    Raises:
        ValueError: See `data.load_pairs`.
        OSError: See there.
    """
    if data.generator == "reverse":
        sizes = {} if data.max_train_samples is None else {"train_pairs": data.max_train_samples}
        return reverse_pairs(seed=data.seed, **sizes)
    if data.generator == "cmudict":
        texts, reports = cmudict_pairs()
        if data.max_train_samples is not None:
            pairs = len(texts["train"])
            kept = min(pairs, data.max_train_samples)
            texts["train"] = texts["train"].select(range(kept))
            reports["train"] = SplitReport(pairs=kept, over_max_train_samples=pairs - kept)
        return texts, reports
    files: dict[str, Any] = {} if data.dataset_name is None else read_dataset(data)
    for split in ("train", "validation", "test"):
        one = getattr(data, f"{split}_file")
        source = getattr(data, f"{split}_source_file")
        target = getattr(data, f"{split}_target_file")
        if one is not None:
            files[split] = one
        elif source is not None:
            files[split] = (source, target)
    return load_pairs(
        files,
        source_column=data.source_column,
        target_column=data.target_column,
        group_column=data.group_column,
        max_train_samples=data.max_train_samples,
        merge_references=data.merge_references,
    )


def read_dataset(data: DataSettings) -> dict[str, Dataset]:
    """The splits of a data set of the Hub or of a local folder, under the names used here.

    The fields of a nested column become columns: `translation.de`.

    Raises:
        ValueError: If it has no training split, or no such configuration.
        OSError: If it cannot be found.
    """
    try:
        splits = load_dataset(str(data.dataset_name), data.dataset_config_name)
    except DatasetGenerationError as error:
        raise ValueError(f"data.dataset_name={data.dataset_name}: {error.__cause__}") from error
    names = {"train": ("train",), "validation": ("validation", "valid", "dev"), "test": ("test",)}
    found = {
        split: splits[name].flatten()
        for split, choices in names.items()
        for name in choices
        if name in splits
    }
    if "train" not in found:
        raise ValueError(
            f"data.dataset_name={data.dataset_name} has no split train; it has {', '.join(splits)}"
        )
    return found


def make_tokenizer(recipe: Recipe, train: Dataset, folder: Path, say: Say) -> Any:
    """The tokenizer of the folder, or of the checkpoint to resume from; else a new one.

    Raises:
        ValueError: If no vocabulary can be trained with the recipe's settings.
    """
    checkpoint = recipe.training.resume_from_checkpoint
    homes = [] if recipe.training.overwrite else [folder]
    for home in (Path(checkpoint), *homes) if isinstance(checkpoint, str) else homes:
        if (home / TOKENIZER_FILES[0]).is_file():
            say(f"taking the tokenizer that {home} holds")
            return load_tokenizer(home)
    settings = recipe.tokenizer
    say(f"training tokenizer on {len(train):,} pairs")
    tokenizer = train_tokenizer(
        _Lines(train),
        kind=settings.kind,
        vocab_size=settings.vocab_size,
        pattern=settings.pattern,
        normalization=settings.normalization,
        lowercase=settings.lowercase,
        min_frequency=settings.min_frequency,
        show_progress=sys.stderr.isatty(),
    )
    with tempfile.TemporaryDirectory() as unused:
        # What trains is what everybody will load.
        save_tokenizer(tokenizer, unused)
        return load_tokenizer(unused)


class _Lines:
    """All texts of both columns, in batches, without holding them."""

    def __init__(self, pairs: Dataset):
        self.pairs = pairs

    def __len__(self) -> int:
        return 2 * len(self.pairs)

    def __iter__(self):
        for batch in self.pairs.select_columns(["source", "target"]).iter(batch_size=10_000):
            yield from batch["source"]
            yield from batch["target"]


def with_texts(encoded: Dataset, texts: Dataset) -> Dataset:
    """The encoded rows beside the texts that they come from."""
    return concatenate_datasets([encoded, texts.select_columns(["source", "references"])], axis=1)


def build_model(recipe: Recipe, vocab_size: int, train: Dataset) -> TinyTFMForConditionalGeneration:
    """A new model of the recipe's size, which knows how to generate.

    Raises:
        ValueError: If the recipe's sizes do not fit together, or its settings of generate().
    """
    model = TinyTFMForConditionalGeneration(TinyTFMConfig(vocab_size=vocab_size, **recipe.model))
    generation = dict(recipe.generation)
    positions = math.inf
    if model.config.position_embedding_type == "learned":
        positions = model.config.max_position_embeddings
    if not {"max_length", "max_new_tokens"} & set(generation):
        # As far as training reached, and some more; transformers' own default is 20.
        _, target_lengths = token_lengths(train)
        generation["max_new_tokens"] = min(int(target_lengths.max()) + EXTRA_TOKENS, positions)
    model.generation_config.update(**generation)
    longest = longest_output(model)
    if longest > positions:
        raise ValueError(
            f"generation lets outputs grow to {longest} tokens, above the learned positions, "
            f"model.max_position_embeddings={positions}"
        )
    try:
        # Saving does the same, which would be after hours of training.
        model.generation_config.validate(strict=True)
    except ValueError as error:
        raise ValueError(f"generation: {error}") from None
    return model


def longest_output(model: Any) -> int:
    """Tokens that generate() makes at most, the start token aside."""
    config = model.generation_config
    return config.max_new_tokens or config.max_length - 1


class EarlyStopping(TrainerCallback):
    """Stops training when so many evaluations in a row have not improved on the best.

    It counts in the run's log: a run that was killed, even after it had been stopped, ends at the
    same update as one that was not.

    Args:
        patience: Number of evaluations.
    """

    def __init__(self, patience: int):
        self.patience = patience

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stops a run that is resumed where it had been stopped."""
        self.on_evaluate(args, state, control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stops where the best evaluation lies `patience` evaluations back."""
        name = f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}"
        sign = -1 if args.greater_is_better else 1
        values = [sign * entry[name] for entry in state.log_history if name in entry]
        if values and len(values) - 1 - values.index(min(values)) >= self.patience:
            control.should_training_stop = True


@dataclass
class Experiment:
    """A run that is ready to begin.

    Attributes:
        recipe: What to run.
        folder: Where the run is kept.
        trainer: Holds model, tokenizer and data.
        sets: Encoded pairs by split.
        reports: What became of the lines of each split.
        threads: CPU threads of each process.
        say: Takes the lines meant for a person.
        checkpoint: What to resume from.
    """

    recipe: Recipe
    folder: Path
    trainer: TinyTFMTrainer
    sets: dict[str, Dataset]
    reports: dict[str, SplitReport]
    threads: int
    say: Say
    checkpoint: str | None = field(default=None)

    def run(self) -> dict[str, float]:
        """Trains, chooses the best model, scores it and writes everything into the folder.

        Returns:
            The scores, as `all_results.json` holds them.

        Raises:
            NonFiniteLossError: If training broke down.
        """
        trainer = self.trainer
        self.say(self.plan())
        trained = trainer.train(resume_from_checkpoint=self.checkpoint).metrics
        history = list(trainer.state.log_history)
        if self.checkpoint is not None:
            # The Trainer's own is the mean over the updates since the checkpoint.
            trained["train_loss"] = mean_training_loss(history)
        trained["train_samples"] = len(self.sets["train"])
        evaluated = self.choose_model()
        evaluated["eval_samples"] = len(self.sets["validation"])
        test, predictions = self.score_test()
        results = {"train": trained, "eval": evaluated, "test": test}
        scores = {name: value for part in results.values() for name, value in part.items()}
        if trainer.is_world_process_zero():
            if predictions is None:
                predictions = self.translate_test()
            self.save_model()
            smoothed = trainer.args.label_smoothing_factor > 0
            draw_curves(history, self.folder / CURVES_FILE, smoothed=smoothed)
            write_predictions(self.sets["test"], predictions, self.folder / PREDICTIONS_FILE)
            for split, part in results.items():
                write_json(part, self.folder / f"{split}_results.json")
            write_json(scores, self.folder / RESULTS_FILE)
            self.say(self.summary(scores, predictions))
        # Nobody leaves before all is written: a launcher ends the others when one process crashes
        # on its way out.
        return from_main_process(scores)

    def score_test(self) -> tuple[dict[str, Any], list[str] | None]:
        """Figures of the test set with their signatures, and its predictions if there are any."""
        trainer, rows = self.trainer, self.sets["test"]
        start = time.time()
        scores, predictions = trainer.score(rows, "test")
        signatures = {f"test_{name}_signature": text for name, text in trainer.signatures.items()}
        speed = speed_metrics("test", start, num_samples=len(rows))
        return {**scores, **speed, **signatures, "test_samples": len(rows)}, predictions

    def translate_test(self) -> list[str]:
        """Predictions for the test set where no metric asked for any."""
        return translate(
            self.trainer.model,
            self.trainer.processing_class,
            self.sets["test"]["source"][:],
            max_source_length=self.recipe.data.max_source_length,
            batch_tokens=self.trainer.eval_batch_tokens,
        )

    def plan(self) -> str:
        """What is going to be done, in lines that a person can check."""
        trainer, arguments, recipe = self.trainer, self.trainer.args, self.recipe
        config = trainer.model.config
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        sampler: Any = trainer.sampler
        updates_an_epoch = -(-len(sampler) // arguments.gradient_accumulation_steps)
        updates = f"{math.ceil(updates_an_epoch * arguments.num_train_epochs):,}"
        if arguments.max_steps > 0:
            updates = f"{arguments.max_steps:,}"
        if recipe.training.early_stopping_patience is not None:
            updates += (
                f" at most, until {arguments.metric_for_best_model} has not improved "
                f"{recipe.training.early_stopping_patience} times in a row"
            )
        if recipe.data.max_tokens is None:
            batch = f"{arguments.per_device_train_batch_size} pairs"
        else:
            batch = f"up to {recipe.data.max_tokens:,} tokens, source and target, padding included"
        source_lengths, target_lengths = token_lengths(self.sets["train"])
        real_tokens = (source_lengths.sum() + target_lengths.sum()) / max(updates_an_epoch, 1)
        precision = "bf16" if arguments.bf16 else "fp16" if arguments.fp16 else "fp32"
        rows = [
            ("recipe", f"{recipe.name} -> {self.folder}"),
            *((split, str(report)) for split, report in self.reports.items()),
            ("vocabulary", f"{recipe.tokenizer.kind}, {config.vocab_size:,} tokens"),
            (
                "model",
                f"{parameters:,} parameters; {config.encoder_layers} + {config.decoder_layers} "
                f"layers, d_model {config.d_model}",
            ),
            (
                "batch",
                f"{batch}; x {arguments.gradient_accumulation_steps} accumulated "
                f"x {arguments.world_size} processes; {real_tokens:,.0f} real tokens an update; "
                f"{sampler.padding_waste():.1%} padding",
            ),
            ("updates", f"{updates}; {updates_an_epoch:,} an epoch"),
            ("outputs", f"up to {longest_output(trainer.model)} tokens"),
            ("device", f"{arguments.device.type}, {self.threads} threads a process, {precision}"),
        ]
        if self.checkpoint is not None:
            rows.append(("resumed from", self.checkpoint))
        elif recipe.training.resume_from_checkpoint:
            rows.append(("resumed from", "nothing: there is no complete checkpoint"))
        return "\n".join(f"{name + ':':14}{text}" for name, text in rows)

    def choose_model(self) -> dict[str, float]:
        """Validates the trained model and, if wanted, an average of checkpoints; keeps the better.

        Returns:
            The figures of the one that is kept.
        """
        trainer, settings = self.trainer, self.recipe.training
        kept = trainer.evaluate()
        name = (trainer.args.metric_for_best_model or "loss").removeprefix("eval_")
        greater_is_better = bool(trainer.args.greater_is_better)
        try:
            if settings.average_last is not None:
                folders = last_checkpoints(self.folder, settings.average_last)
            elif settings.average_best is not None:
                folders = best_checkpoints(
                    self.folder, settings.average_best, name, greater_is_better
                )
            else:
                return kept
        except ValueError as error:
            # A run that stopped early has fewer: no reason to lose it.
            self.say(f"no average: {error}")
            return kept
        before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
        trainer.model.load_state_dict(average_checkpoints(folders).state_dict())
        averaged = trainer.evaluate()
        old, new = kept[f"eval_{name}"], averaged[f"eval_{name}"]
        better = new > old if greater_is_better else new < old
        self.say(
            f"average of {', '.join(folder.name for folder in folders)}: validation {name} "
            f"{new:.4g}, without {old:.4g}: {'kept' if better else 'not kept'}"
        )
        if better:
            return averaged
        trainer.model.load_state_dict(before)
        return kept

    def save_model(self) -> None:
        """Writes model and tokenizer into the folder, as they are published."""
        self.trainer.model.save_pretrained(self.folder)
        save_tokenizer(self.trainer.processing_class, self.folder)

    def summary(self, scores: dict[str, float], predictions: list[str]) -> str:
        """The scores, some predictions, and what to type next."""
        lines = [describe_scores(scores, "test")]
        samples = predictions[: self.recipe.evaluation.num_sample_predictions]
        for row, prediction in zip(self.sets["test"], samples, strict=False):
            line = f"  {_shortened(row['source'])}  ->  {_shortened(prediction)}"
            if prediction not in row["references"]:
                line += f"  (reference: {_shortened(row['references'][0])})"
            lines.append(line)
        lines.append(f"next: python scripts/translate.py {shlex.quote(str(self.folder))}")
        return "\n".join(lines)


def _shortened(text: str) -> str:
    """A text as it may stand in a line on a terminal."""
    text = re.sub("[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text)
    return text if len(text) <= 100 else f"{text[:99]}…"


def mean_training_loss(history: Sequence[dict[str, Any]]) -> float:
    """The mean of a run's logged losses over all updates up to the last of them."""
    total, step = 0.0, 0
    for entry in history:
        if "loss" in entry:
            total += entry["loss"] * (entry["step"] - step)
            step = entry["step"]
    return total / max(step, 1)


def write_json(content: dict[str, Any], path: str | Path) -> None:
    """Writes a JSON file whole or not at all."""
    with whole_file(path) as stream:
        stream.write(json.dumps(content, indent=2) + "\n")


def describe_scores(scores: dict[str, float], prefix: str) -> str:
    """The scores of a split in one line."""
    names = ("loss", "perplexity", "token_accuracy", *METRICS)
    found = {name: scores[f"{prefix}_{name}"] for name in names if f"{prefix}_{name}" in scores}
    return f"{prefix}: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items())


def write_predictions(rows: Dataset, predictions: list[str], path: Path) -> None:
    """One JSON object a line: `source`, `prediction`, `references`."""
    with path.open("w", encoding="utf-8") as stream:
        for row, prediction in zip(rows, predictions, strict=True):
            record = {
                "source": row["source"],
                "prediction": prediction,
                "references": row["references"],
            }
            stream.write(json.dumps(record, ensure_ascii=False) + "\n")


def draw_curves(history: list[dict[str, Any]], path: Path, *, smoothed: bool = False) -> None:
    """Draws training and validation loss, and below them the validation metrics, over updates.

    Args:
        history: What the Trainer logged.
        path: The picture.
        smoothed: Whether the training loss has label smoothing, which the validation loss has not.
    """
    from matplotlib.figure import Figure  # slow to import, and only needed once

    def points(name: str) -> tuple[list[int], list[float]]:
        found = [(entry["step"], entry[name]) for entry in history if name in entry]
        return [step for step, _ in found], [value for _, value in found]

    names = [name for name in ("token_accuracy", *METRICS) if points(f"eval_{name}")[0]]
    figure = Figure(figsize=(7, 2.5 * (1 + len(names))), layout="constrained")
    axes = figure.subplots(1 + len(names), 1, sharex=True, squeeze=False)[:, 0]
    training = "training, with label smoothing" if smoothed else "training"
    for label, name in ((training, "loss"), ("validation", "eval_loss")):
        axes[0].plot(*points(name), marker=".", label=label)
    axes[0].set_ylabel("loss, nats per token")
    axes[0].legend()
    for axis, name in zip(axes[1:], names, strict=True):
        axis.plot(*points(f"eval_{name}"), marker=".", color="C1")
        axis.set_ylabel(f"validation {name}")
    axes[-1].set_xlabel("updates")
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def load_tokenizer(name: str | Path) -> Any:
    """A saved tokenizer.

    Raises:
        OSError: If there is none that can be read.
    """
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except OSError:
        raise
    except Exception as error:  # what tokenizers raises for a damaged file is no narrower
        raise OSError(f"{name}: the tokenizer cannot be read: {error}") from error


def load_model(name: str | Path) -> tuple[Any, Any]:
    """A trained model in evaluation mode, on a GPU if there is one, and its tokenizer.

    Raises:
        ValueError: If it is no sequence-to-sequence model.
        OSError: If there is none that can be read.
    """
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"{name} is no model: it holds no config.json")
    if not folder.exists() and folder.parent != Path() and folder.parent.is_dir():
        # A name on the Hub looks the same, but would have no folder of its owner's name here.
        raise FileNotFoundError(f"{name}: no such folder")
    tokenizer = load_tokenizer(name)
    try:
        model = AutoModelForSeq2SeqLM.from_pretrained(name, trust_remote_code=False)
    except SafetensorError as error:
        raise OSError(f"{name}: the weights cannot be read: {error}") from error
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


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
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"{output} exists and is no empty folder: choose another")
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
    average_checkpoints(folders).save_pretrained(output)
    save_tokenizer(load_tokenizer(run), output)
    (output / RECIPE_FILE).write_text(recipe.to_yaml(), encoding="utf-8")
    return folders
