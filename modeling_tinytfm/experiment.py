"""A recipe, run: data -> vocabulary -> model -> training -> scores -> a folder that loads anywhere.

`prepare` does everything that can fail because of what a user wrote, and nothing that would be lost
if it failed; `Experiment.run` trains.
"""

import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import Dataset, DatasetDict, concatenate_datasets
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    Seq2SeqTrainingArguments,
    set_seed,
)

from .configuration_tinytfm import TinyTFMConfig
from .data import SplitReport, cmudict_pairs, encode_pairs, load_pairs, reverse_pairs, token_lengths
from .metrics import METRICS
from .modeling_tinytfm import TinyTFMForConditionalGeneration
from .recipes import DataSettings, Recipe, load_recipe
from .tokenization import save_tokenizer, train_tokenizer
from .training import (
    TinyTFMTrainer,
    average_checkpoints,
    best_checkpoints,
    last_checkpoints,
    last_complete_checkpoint,
    what_is_missing,
)
from .translation import BATCH_TOKENS, EXTRA_TOKENS

logger = logging.getLogger(__name__)

RECIPE_FILE = "recipe.yaml"
PREDICTIONS_FILE = "predictions_test.jsonl"
CURVES_FILE = "curves.png"
LAST_FILE = "test_results.json"  # written last: a folder that holds it is a finished run

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
    """Loads and checks all that a run needs.

    Args:
        recipe: What to run.
        say: See `run_recipe`.

    Returns:
        The experiment, ready to run; or the scores, if the folder holds this run, finished.

    Raises:
        ValueError: As `run_recipe`.
        OSError: As `run_recipe`.
    """
    threads = use_threads(recipe.threads)
    arguments = training_arguments(recipe)
    state = PartialState()
    folder = Path(recipe.training.output_dir)
    if not state.is_main_process:
        say = logger.debug

    with state.main_process_first():
        if state.is_main_process:
            check_folder(recipe, folder)
    if (folder / LAST_FILE).is_file():
        say(f"{folder} holds this run, finished; training.overwrite=true starts it anew.")
        scores = json.loads((folder / "all_results.json").read_text(encoding="utf-8"))
        say(describe_scores(scores, "test"))
        return scores

    with state.main_process_first():
        texts, reports = read_pairs(recipe.data)
    missing = [split for split in ("train", "validation", "test") if not len(texts.get(split, []))]
    if missing:
        raise ValueError(f"data: there are no pairs in {' and '.join(missing)}")
    with state.main_process_first():
        tokenizer = make_tokenizer(recipe, texts["train"], folder, state.is_main_process)
    sets: dict[str, Dataset] = {}
    with state.main_process_first():
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

    set_seed(arguments.seed)
    model = build_model(recipe, len(tokenizer), sets["train"])
    callbacks: list[Any] = []
    if recipe.training.early_stopping_patience is not None:
        callbacks.append(EarlyStoppingCallback(recipe.training.early_stopping_patience))
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
    experiment.checkpoint = find_checkpoint(recipe, folder, state)
    return experiment


def training_arguments(recipe: Recipe) -> Seq2SeqTrainingArguments:
    """The Trainer's arguments, with the choices that depend on the machine.

    Raises:
        ValueError: If the machine cannot do what they ask for.
    """
    values = recipe.training.trainer_arguments()
    accelerator = torch.cuda.is_available() or torch.backends.mps.is_available()
    on_cpu = values.get("use_cpu", False) or not accelerator
    if on_cpu and values.get("fp16"):
        raise ValueError("training.fp16=true needs a GPU: a CPU has no fast fp16; leave it out")
    if on_cpu:
        values["use_cpu"] = True
    elif torch.cuda.is_available() and not values.get("fp16"):
        values.setdefault("bf16", torch.cuda.is_bf16_supported())
    values.setdefault("ddp_find_unused_parameters", False)
    values.setdefault("ddp_broadcast_buffers", False)  # none changes
    return Seq2SeqTrainingArguments(**values)


def check_folder(recipe: Recipe, folder: Path) -> None:
    """Makes the run's folder usable for this recipe, or says why it is not; never deletes.

    Raises:
        ValueError: If it holds something else, or an unfinished run that is not to be resumed.
        OSError: If it cannot be written.
    """
    if recipe.training.overwrite and folder.exists() and any(folder.iterdir()):
        number = 1
        while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        folder.rename(aside)
        logger.warning("%s was moved to %s", folder, aside)
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / RECIPE_FILE
    if not kept.is_file():
        others = sorted(path.name for path in folder.iterdir())
        if others:
            raise ValueError(
                f"training.output_dir={folder} holds files that are not this project's run "
                f"({others[0]}): choose another folder, or training.overwrite=true moves it aside"
            )
        kept.write_text(recipe.to_yaml(), encoding="utf-8")
        return
    differences = recipe.differences(load_recipe(kept))
    if differences:
        raise ValueError(
            f"training.output_dir={folder} holds the run of another recipe (it differs in "
            f"{', '.join(differences[:5])}): choose another folder, or training.overwrite=true "
            "moves it aside"
        )
    if not (folder / LAST_FILE).is_file() and not recipe.training.resume_from_checkpoint:
        raise ValueError(
            f"training.output_dir={folder} holds this run, unfinished: "
            "training.resume_from_checkpoint=true continues it, training.overwrite=true moves it "
            "aside and starts anew"
        )
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"training.output_dir={folder} cannot be written")


def find_checkpoint(recipe: Recipe, folder: Path, state: PartialState) -> str | None:
    """The checkpoint to resume from, the same one on every process; None to start anew."""
    wanted = recipe.training.resume_from_checkpoint
    if isinstance(wanted, str):
        fault = what_is_missing(wanted, state.num_processes)
        if fault is not None:
            raise ValueError(f"training.resume_from_checkpoint={wanted} is not complete: {fault}")
        return wanted
    found: list[Any] = [None]
    if wanted and state.is_main_process:
        checkpoint = last_complete_checkpoint(folder, state.num_processes)
        found = [None if checkpoint is None else str(checkpoint)]
    return broadcast_object_list(found)[0] if state.num_processes > 1 else found[0]


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
            texts["train"] = texts["train"].select(range(data.max_train_samples))
            reports["train"] = SplitReport(pairs=len(texts["train"]))
        return texts, reports
    files: dict[str, Any] = {}
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


def make_tokenizer(recipe: Recipe, train: Dataset, folder: Path, is_main_process: bool) -> Any:
    """The folder's tokenizer; trained on the training pairs, once, if it has none."""
    if is_main_process and not (folder / "tokenizer.json").is_file():
        settings = recipe.tokenizer
        logger.info("training tokenizer")
        tokenizer = train_tokenizer(
            _Lines(train),
            kind=settings.kind,
            vocab_size=settings.vocab_size,
            pattern=settings.pattern,
            normalization=settings.normalization,
            lowercase=settings.lowercase,
            min_frequency=settings.min_frequency,
        )
        save_tokenizer(tokenizer, folder)
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


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
        ValueError: If the recipe's sizes do not fit together.
    """
    model = TinyTFMForConditionalGeneration(TinyTFMConfig(vocab_size=vocab_size, **recipe.model))
    generation = dict(recipe.generation)
    if not {"max_length", "max_new_tokens"} & set(generation):
        # As far as training reached, and some more; transformers' own default is 20.
        _, target_lengths = token_lengths(train)
        limit = int(target_lengths.max()) + EXTRA_TOKENS
        if model.config.position_embedding_type == "learned":
            limit = min(limit, model.config.max_position_embeddings - 1)
        generation["max_new_tokens"] = limit
    model.generation_config.update(**generation)
    return model


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
        trained = trainer.train(resume_from_checkpoint=self.checkpoint)
        evaluated = self.choose_model()
        test, predictions = trainer.score(self.sets["test"], "test")
        trained.metrics["train_samples"] = len(self.sets["train"])
        evaluated["eval_samples"] = len(self.sets["validation"])
        test["test_samples"] = len(self.sets["test"])
        signatures = {f"test_{name}_signature": text for name, text in trainer.signatures.items()}

        if trainer.is_world_process_zero():
            self.save_model()
            draw_curves(trainer.state.log_history, self.folder / CURVES_FILE)
            if predictions is not None:
                write_predictions(self.sets["test"], predictions, self.folder / PREDICTIONS_FILE)
        trainer.save_metrics("train", trained.metrics)
        trainer.save_metrics("eval", evaluated)
        trainer.save_metrics("test", {**test, **signatures})
        self.say(self.summary(test, predictions or []))
        return {**trained.metrics, **evaluated, **test}

    def plan(self) -> str:
        """What is going to be done, in lines that a person can check."""
        trainer, arguments = self.trainer, self.trainer.args
        model = trainer.model
        parameters = sum(parameter.numel() for parameter in model.parameters())
        sampler: Any = trainer.sampler
        updates_an_epoch = -(-len(sampler) // arguments.gradient_accumulation_steps)
        if arguments.max_steps > 0:
            updates = arguments.max_steps
        else:
            updates = round(updates_an_epoch * arguments.num_train_epochs)
        if self.recipe.data.max_tokens is None:
            batch = f"{arguments.per_device_train_batch_size} pairs"
        else:
            batch = (
                f"up to {self.recipe.data.max_tokens:,} tokens, source and target, padding included"
            )
        source_lengths, target_lengths = token_lengths(self.sets["train"])
        real_tokens = (source_lengths.sum() + target_lengths.sum()) / max(updates_an_epoch, 1)
        precision = "bf16" if arguments.bf16 else "fp16" if arguments.fp16 else "fp32"
        device = f"{arguments.device.type}, {self.threads} threads"
        rows = [
            ("recipe", f"{self.recipe.name} -> {self.folder}"),
            *((split, str(report)) for split, report in self.reports.items()),
            ("vocabulary", f"{self.recipe.tokenizer.kind}, {model.config.vocab_size:,} tokens"),
            ("model", f"{parameters:,} parameters"),
            (
                "batch",
                f"{batch}; x {arguments.gradient_accumulation_steps} accumulated "
                f"x {arguments.world_size} processes; {real_tokens:,.0f} real tokens an update; "
                f"{sampler.padding_waste():.1%} padding",
            ),
            ("updates", f"{updates:,}; {updates_an_epoch:,} an epoch"),
            ("outputs", f"up to {self.longest_output()} tokens"),
            ("device", f"{device} a process, {precision}"),
        ]
        if self.checkpoint is not None:
            rows.append(("resumed from", self.checkpoint))
        elif self.recipe.training.resume_from_checkpoint:
            rows.append(("resumed from", "nothing: there is no complete checkpoint"))
        return "\n".join(f"{name + ':':14}{text}" for name, text in rows)

    def longest_output(self) -> int:
        """Tokens that generate() makes at most."""
        config = self.trainer.model.generation_config
        return config.max_new_tokens or config.max_length

    def choose_model(self) -> dict[str, float]:
        """Validates the trained model and, if wanted, an average of checkpoints; keeps the better.

        Returns:
            The figures of the one that is kept.
        """
        trainer, settings = self.trainer, self.recipe.training
        kept = trainer.evaluate()
        name = (trainer.args.metric_for_best_model or "loss").removeprefix("eval_")
        greater_is_better = bool(trainer.args.greater_is_better)
        if settings.average_last is not None:
            folders = last_checkpoints(self.folder, settings.average_last)
        elif settings.average_best is not None:
            folders = best_checkpoints(self.folder, settings.average_best, name, greater_is_better)
        else:
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
        self.trainer.model.config.use_cache = True  # the Trainer turned it off
        self.trainer.model.save_pretrained(self.folder)
        save_tokenizer(self.trainer.processing_class, self.folder)

    def summary(self, scores: dict[str, float], predictions: list[str]) -> str:
        """The scores, some predictions, and what to type next."""
        lines = [describe_scores(scores, "test")]
        shown = predictions[: self.recipe.evaluation.num_sample_predictions]
        for row, prediction in zip(self.sets["test"], shown, strict=False):
            lines.append(f"  {row['source']}  ->  {prediction}")
        lines.append(f"next: python scripts/translate.py {self.folder}")
        return "\n".join(lines)


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


def draw_curves(history: list[dict[str, Any]], path: Path) -> None:
    """Draws training and validation loss, and below them the validation metrics, over updates."""
    from matplotlib.figure import Figure  # slow to import, and only needed once

    def points(name: str) -> tuple[list[int], list[float]]:
        found = [(entry["step"], entry[name]) for entry in history if name in entry]
        return [step for step, _ in found], [value for _, value in found]

    names = [name for name in ("token_accuracy", *METRICS) if points(f"eval_{name}")[0]]
    figure = Figure(figsize=(7, 2.5 * (1 + len(names))), layout="constrained")
    axes = figure.subplots(1 + len(names), 1, sharex=True, squeeze=False)[:, 0]
    for label, name in (("training", "loss"), ("validation", "eval_loss")):
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


def load_model(name: str | Path) -> tuple[Any, Any]:
    """A trained model in evaluation mode, on a GPU if there is one, and its tokenizer.

    Raises:
        OSError: If there is none.
    """
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    model = AutoModelForSeq2SeqLM.from_pretrained(name, trust_remote_code=False).eval()
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


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
    recipe = load_recipe(Path(folder) / RECIPE_FILE)
    data = recipe.data
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
            args=Seq2SeqTrainingArguments(output_dir=unused, use_cpu=model.device.type == "cpu"),
            processing_class=tokenizer,
            metrics=recipe.evaluation.metrics if metrics is None else metrics,
            generation={} if num_beams is None else {"num_beams": num_beams},
            eval_batch_tokens=data.max_tokens or BATCH_TOKENS,
        )
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
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty: choose another folder")
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
    tokenizer: Any = AutoTokenizer.from_pretrained(run, trust_remote_code=False)
    save_tokenizer(tokenizer, output)
    (output / RECIPE_FILE).write_text(recipe.to_yaml(), encoding="utf-8")
    return folders
