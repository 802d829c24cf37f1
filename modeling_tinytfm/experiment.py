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
from typing import Any

from accelerate import PartialState
from datasets import Dataset, DatasetDict, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers import (
    DataCollatorForSeq2Seq,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import speed_metrics

from .checkpoints import average_checkpoints, best_checkpoints, last_checkpoints
from .configuration_tinytfm import TinyTFMConfig
from .data import SplitReport, cmudict_pairs, encode_pairs, load_pairs, reverse_pairs, token_lengths
from .loading import load_tokenizer
from .machine import from_main_process, main_process_first, training_arguments, use_threads
from .modeling_tinytfm import TinyTFMForConditionalGeneration
from .recipes import Recipe
from .reports import (
    describe_scores,
    draw_curves,
    mean_training_loss,
    shortened,
    write_json,
    write_predictions,
)
from .run_folder import (
    CURVES_FILE,
    PREDICTIONS_FILE,
    RESULTS_FILE,
    Say,
    check_folder,
    claim_folder,
    find_checkpoint,
)
from .settings import DataSettings
from .tokenization import TOKENIZER_FILES, save_tokenizer, train_tokenizer
from .training import TinyTFMTrainer
from .translation import BATCH_TOKENS, EXTRA_TOKENS, translate

logger = logging.getLogger(__name__)


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
            line = f"  {shortened(row['source'])}  ->  {shortened(prediction)}"
            if prediction not in row["references"]:
                line += f"  (reference: {shortened(row['references'][0])})"
            lines.append(line)
        lines.append(f"next: python scripts/translate.py {shlex.quote(str(self.folder))}")
        return "\n".join(lines)
