"""A recipe, run: data -> vocabulary -> model -> training -> scores -> a folder that loads anywhere.

`prepare` does everything that can fail because of what a user wrote, and nothing that would be lost
if it failed; `Experiment.run` trains.
"""

import logging
import math
import os
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import SaveStrategy, speed_metrics

from .checkpoints import (
    average_checkpoints,
    best_checkpoints,
    checkpoints,
    last_checkpoints,
    what_is_missing,
)
from .classification import Classification
from .data import SplitReport
from .flops import describe_flops
from .language_modeling import LanguageModel
from .loading import load_tokenizer
from .machine import (
    allocator,
    bf16_advice,
    from_main_process,
    machine_facts,
    main_process_first,
    precision,
    training_arguments,
    use_threads,
)
from .model_card import write_card
from .reading import one_line
from .recipes import Recipe
from .reports import describe_scores, draw_curves, mean_training_loss, write_json, write_predictions
from .run_folder import (
    CURVES_FILE,
    DATA_FILE,
    PREDICTIONS_FILE,
    RESULTS_FILE,
    RUN_FILE,
    Say,
    check_data,
    check_folder,
    claim_folder,
    digest,
    find_checkpoint,
)
from .seq2seq import Seq2Seq
from .tasks import SPLITS, Task
from .tokenization import TOKENIZER_FILES, save_tokenizer, train_tokenizer
from .training import TinyTFMTrainer
from .translation import BATCH_TOKENS

logger = logging.getLogger(__name__)

TASKS: dict[str, type[Task]] = {
    "seq2seq": Seq2Seq,
    "classification": Classification,
    "language_model": LanguageModel,
}


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
        if arguments.push_to_hub:
            say(f"publish it by: python scripts/push_to_hub.py {shlex.quote(str(folder))} NAME")
        return scores

    task = TASKS[recipe.task](recipe)
    with main_process_first(state):
        texts, reports = task.read()
        missing = [name for name in SPLITS if not len(texts.get(name, ()))]
        if missing:
            raise ValueError(f"data: there are no {task.rows} in {' and '.join(missing)}")
    with main_process_first(state):
        if state.is_main_process:
            found = make_tokenizer(task, texts["train"], folder, say)
    tokenizer: Any = from_main_process(found)
    sets: dict[str, Dataset] = {}
    with main_process_first(state):
        for split, rows in texts.items():
            sets[split], reports[split] = task.encode(
                rows, tokenizer, training=split == "train", report=reports[split]
            )
    encodes_on = recipe.data.streaming or recipe.tokenizer.bpe_dropout > 0
    if arguments.dataloader_num_workers or not encodes_on:
        # From here on processes are forked, which a tokenizer's threads would not survive.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    set_seed(arguments.seed)
    model = task.model(tokenizer, sets["train"])
    callbacks: list[TrainerCallback] = []
    if recipe.training.early_stopping_patience is not None:
        callbacks.append(EarlyStopping(recipe.training.early_stopping_patience))
    trainer = task.trainer_class(
        model=model,
        args=arguments,
        train_dataset=task.feed(sets["train"], tokenizer, arguments),
        eval_dataset=sets["validation"],
        data_collator=task.collator(tokenizer, model),
        processing_class=tokenizer,
        callbacks=callbacks,
        max_tokens=recipe.data.max_tokens,
        noam=recipe.training.is_noam,
        cooldown_steps=recipe.training.cooldown_steps or 0,
        metrics=recipe.evaluation.metrics or (),
        eval_batch_tokens=recipe.data.max_tokens or BATCH_TOKENS,
    )
    _check_optimizer(trainer)
    example = task.example(texts["train"][0])
    experiment = Experiment(task, folder, trainer, sets, reports, example, threads, say)
    with main_process_first(state):
        if state.is_main_process:
            sharded = trainer.is_fsdp_enabled
            found = find_checkpoint(recipe, folder, model, state.num_processes, sharded=sharded)
            digests = {split: digest(rows) for split, rows in texts.items()}
            if found is not None:
                run = Path(found).absolute().parent
                own = run.resolve() == folder.resolve()
                instead = "training.overwrite=true moves it aside and starts anew"
                if not own:
                    instead = f"model.from_pretrained={found} trains its model on, as a new run"
                check_data(run, digests, instead)
            claim_folder(recipe, folder, tokenizer, say)
            write_json(digests, folder / DATA_FILE)
    experiment.checkpoint = from_main_process(found)
    return experiment


def _check_optimizer(trainer: Trainer) -> None:
    """Asks for the optimizer before the folder is claimed: its package or settings may be missing.

    Raises:
        ValueError: If it cannot be had.
    """
    try:
        trainer.get_optimizer_cls_and_kwargs(trainer.args, cast(Any, trainer.model))
    except (ImportError, ValueError, TypeError, NotImplementedError) as error:
        optimizer = getattr(trainer.args.optim, "value", trainer.args.optim)
        raise ValueError(f"training.optim={optimizer}: {one_line(error)}") from error


def make_tokenizer(task: Task, train: Dataset, folder: Path, say: Say) -> Any:
    """The tokenizer of the folder, or of the model or checkpoint to go on from; else a new one.

    None for a task without a vocabulary.

    Raises:
        ValueError: If no vocabulary can be trained with the recipe's settings.
    """
    recipe, lines = task.recipe, task.lines(train)
    if lines is None:
        return None
    checkpoint = recipe.training.resume_from_checkpoint
    homes = [] if recipe.training.overwrite else [folder]
    for home in (Path(checkpoint), *homes) if isinstance(checkpoint, str) else homes:
        if (home / TOKENIZER_FILES[0]).is_file():
            say(f"taking the tokenizer that {home} holds")
            return load_tokenizer(home)
    if (start := recipe.model.get("from_pretrained")) is not None:
        say(f"taking the tokenizer of {start}")
        return load_tokenizer(start)
    settings = recipe.tokenizer
    say(f"training tokenizer on {len(train):,} {task.rows}")
    tokenizer = train_tokenizer(
        lines,
        kind=settings.kind,
        vocab_size=settings.vocab_size,
        pattern=settings.pattern,
        normalization=settings.normalization,
        lowercase=settings.lowercase,
        min_frequency=settings.min_frequency,
        show_progress=sys.stderr.isatty(),
    )
    task.finish_tokenizer(tokenizer)
    with tempfile.TemporaryDirectory() as unused:
        # What trains is what everybody will load.
        save_tokenizer(tokenizer, unused)
        return load_tokenizer(unused)


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
        if self.has_ended(args, state):
            control.should_training_stop = True

    def has_ended(self, args: TrainingArguments, state: TrainerState) -> bool:
        """Whether a run of this log is at its end."""
        name = f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}"
        sign = -1 if args.greater_is_better else 1
        # By update: a run that is resumed may evaluate once more where it had been stopped.
        found = {entry["step"]: sign * entry[name] for entry in state.log_history if name in entry}
        values = list(found.values())
        return bool(values) and len(values) - 1 - values.index(min(values)) >= self.patience


@dataclass
class Experiment:
    """A run that is ready to begin.

    Attributes:
        task: What is learned, by which recipe.
        folder: Where the run is kept.
        trainer: Holds model, tokenizer and data.
        sets: Encoded rows by split.
        reports: What became of the lines of each split.
        example: The first training row.
        threads: CPU threads of each process.
        say: Takes the lines meant for a person.
        checkpoint: What to resume from.
    """

    task: Task
    folder: Path
    trainer: TinyTFMTrainer
    sets: dict[str, Dataset]
    reports: dict[str, SplitReport]
    example: str
    threads: int
    say: Say
    checkpoint: str | None = field(default=None)

    @property
    def recipe(self) -> Recipe:
        """What is run."""
        return self.task.recipe

    def run(self) -> dict[str, float]:
        """Trains, chooses the best model, scores it and writes everything into the folder.

        Returns:
            The scores, as `all_results.json` holds them.

        Raises:
            NonFiniteLossError: If training broke down.
            MemoryError: If a GPU's memory is too small for it.
        """
        trainer = self.trainer
        self.say(self.plan())
        try:
            trained = trainer.train(resume_from_checkpoint=self.checkpoint).metrics
        except torch.OutOfMemoryError as error:
            by_tokens = self.recipe.data.max_tokens is not None
            size = "data.max_tokens" if by_tokens else "training.per_device_train_batch_size"
            raise MemoryError(
                f"the GPU's memory is too small: halve {size} and double "
                f"training.gradient_accumulation_steps; {self.how_to_go_on()}"
            ) from error
        trainer.save_state()  # what was logged
        history = list(trainer.state.log_history)
        if self.checkpoint is not None:
            # The Trainer's own is the mean over the updates since the checkpoint.
            trained["train_loss"] = mean_training_loss(history)
        if not self.recipe.data.streaming:  # nobody has counted its rows
            trained["train_samples"] = len(self.sets["train"])
        evaluated = self.choose_model()
        if trainer.is_world_process_zero():
            self.save_model()  # first: scoring and predicting may take long, or be stopped
        evaluated["eval_samples"] = len(self.sets["validation"])
        test, predictions = self.score_test()
        results = {"train": trained, "eval": evaluated, "test": test}
        scores = {name: value for part in results.values() for name, value in part.items()}
        if trainer.is_world_process_zero():
            if predictions is None:
                predictions = self.task.predict(trainer, self.sets["test"])
            records = list(self.task.records(self.sets["test"], predictions))
            smoothed = trainer.args.label_smoothing_factor > 0
            draw_curves(history, self.folder / CURVES_FILE, smoothed=smoothed)
            write_predictions(records, self.folder / PREDICTIONS_FILE)
            for split, part in results.items():
                write_json(part, self.folder / f"{split}_results.json")
            write_json(self.facts(), self.folder / RUN_FILE)
            write_json(scores, self.folder / RESULTS_FILE)
            write_card(self.folder)
            self.say(self.summary(scores, records))
            if trainer.args.push_to_hub:
                self.publish()
        # Nobody leaves before all is written: a launcher ends the others when one process crashes
        # on its way out.
        return from_main_process(scores)

    def facts(self) -> dict[str, Any]:
        """What a reader of the results should know beside the recipe."""
        return {
            "updates": self.trainer.state.global_step,
            "resumed": self.checkpoint is not None,
            "training_seconds": self.trainer.clock.seconds(),
            "data": {name: text.describe(self.task.rows) for name, text in self.reports.items()},
            **machine_facts(self.trainer.args, self.threads),
        }

    def publish(self) -> None:
        """Pushes the folder, and says how anybody loads it.

        Raises:
            OSError: If that fails; the run itself is safe.
        """
        try:
            published = self.trainer.push_to_hub(save=False, say=self.say)
        except (ValueError, OSError) as error:
            raise OSError(
                f"{error}. {self.folder} holds the finished run: python scripts/push_to_hub.py "
                f"{shlex.quote(str(self.folder))} {self.trainer.hub_model_id} publishes it"
            ) from error
        self.say(f"{published.url}\n{published.loading}")

    def score_test(self) -> tuple[dict[str, Any], list[str] | None]:
        """Figures of the test set with their signatures, and its predictions if there are any."""
        trainer, rows = self.trainer, self.sets["test"]
        start = time.time()
        scores, predictions = trainer.score(rows, "test")
        signatures = {f"test_{name}_signature": text for name, text in trainer.signatures.items()}
        speed = speed_metrics("test", start, num_samples=len(rows))
        return {**scores, **speed, **signatures, "test_samples": len(rows)}, predictions

    def how_to_go_on(self) -> str:
        """What to do after an interrupt, or what is lost by it."""
        last, processes = self.checkpoint, self.trainer.args.world_size
        for path in checkpoints(self.folder):
            sharded = self.trainer.is_fsdp_enabled
            if what_is_missing(path, processes, sharded=sharded) is None:
                last = str(path)
        if last is not None:
            return f"training.resume_from_checkpoint=true continues this run from {last}"
        if (self.folder / "model.safetensors").is_file():
            return f"{self.folder} holds the trained model, without its scores"
        return (
            "there is no checkpoint to continue from (training.save_strategy="
            f"{SaveStrategy(self.trainer.args.save_strategy).value}): this run would begin anew"
        )

    def plan(self) -> str:
        """What is going to be done, in lines that a person can check."""
        trainer, arguments, recipe = self.trainer, self.trainer.args, self.recipe
        config = trainer.model.config
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        sampler: Any = trainer.sampler
        updates_an_epoch = -(-len(sampler) // arguments.gradient_accumulation_steps)
        an_epoch = f"{updates_an_epoch:,} an epoch"
        planned = math.ceil(updates_an_epoch * arguments.num_train_epochs)
        if arguments.max_steps > 0:
            planned = arguments.max_steps
        updates = f"{planned:,}"
        if recipe.training.early_stopping_patience is not None:
            updates += (
                f" at most, until {arguments.metric_for_best_model} has not improved "
                f"{recipe.training.early_stopping_patience} times in a row"
            )
        if recipe.data.max_tokens is None:
            batch = f"{arguments.per_device_train_batch_size} {self.task.rows}"
        else:
            batch = f"up to {recipe.data.max_tokens:,} tokens, source and target, padding included"
        real_tokens = sampler.tokens / max(updates_an_epoch, 1)
        vocabulary = []
        if trainer.processing_class is not None:
            size = f"{recipe.tokenizer.kind}, {config.vocab_size:,} tokens"
            vocabulary.append(("vocabulary", size))
        layers = str(config.decoder_layers if config.is_decoder else config.encoder_layers)
        if config.is_encoder_decoder:
            layers += f" + {config.decoder_layers}"
        advice = bf16_advice(arguments)
        rows = [
            ("recipe", f"{recipe.name} -> {self.folder}"),
            *((split, text.describe(self.task.rows)) for split, text in self.reports.items()),
            ("first row", self.example),
            *vocabulary,
            ("model", f"{parameters:,} parameters; {layers} layers, d_model {config.d_model}"),
            (
                "batch",
                f"{batch}; x {arguments.gradient_accumulation_steps} accumulated "
                f"x {arguments.world_size} processes; {real_tokens:,.0f} real tokens an update; "
                f"{sampler.padding_waste():.1%} padding",
            ),
            ("updates", updates if recipe.data.streaming else f"{updates}; {an_epoch}"),
            ("schedule", self._schedule(planned)),
            *self.task.plan(trainer.model),
            ("arithmetic", describe_flops(config)),
            (
                "device",
                f"{arguments.device.type}, {self.threads} threads a process, {precision(arguments)}"
                + (f"; {advice}" if advice else "")
                + "; weights shared out among the processes (FSDP)" * trainer.is_fsdp_enabled,
            ),
        ]
        if (memory := allocator(arguments)) is not None:
            rows.append(("allocator", memory))
        if self.checkpoint is not None:
            rows.append(("resumed from", self.checkpoint + self._why_no_further()))
        elif recipe.training.resume_from_checkpoint:
            rows.append(("resumed from", "nothing: there is no complete checkpoint"))
        return "\n".join(f"{name + ':':14}{text}" for name, text in rows)

    def _why_no_further(self) -> str:
        """What to tell of a checkpoint at which early stopping has ended a run; or nothing."""
        patience = self.recipe.training.early_stopping_patience
        if self.checkpoint is None or patience is None:
            return ""
        state = TrainerState.load_from_json(str(Path(self.checkpoint) / TRAINER_STATE_NAME))
        if not EarlyStopping(patience).has_ended(self.trainer.args, state):
            return ""
        return "; early stopping ended it there, and a larger early_stopping_patience trains on"

    def _schedule(self, updates: int) -> str:
        """The learning rate over a run, and what of it the run is too short for."""
        settings = self.recipe.training
        text = settings.describe_schedule()
        warmup = self.trainer.args.get_warmup_steps(updates)
        if 0 < updates <= warmup:
            return f"{text}; the run ends before its warmup does"
        if warmup + (settings.cooldown_steps or 0) > updates:
            return f"{text}; the run is too short for that"
        return text

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
        if self.trainer.processing_class is not None:
            save_tokenizer(self.trainer.processing_class, self.folder)

    def summary(self, scores: dict[str, float], records: list[dict[str, Any]]) -> str:
        """The scores, some predictions, and what to type next."""
        samples = records[: self.recipe.evaluation.num_sample_predictions]
        return "\n".join(
            [
                describe_scores(scores, "test"),
                *(f"  {self.task.describe(record)}" for record in samples),
                f"next: {self.task.next_step(self.folder)}",
            ]
        )
