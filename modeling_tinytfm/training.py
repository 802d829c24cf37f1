"""The paper's training recipe on the Hugging Face Trainer.

The Trainer stays in charge of devices, processes, precision, logging and checkpoints. What is its
own here: batches by a token budget, the paper's schedule, label smoothing in training only,
evaluation by the token and on generated text, a stop at a loss that is not finite, checkpoints that
are checked before they are resumed from, and the average of several.
"""

import json
import logging
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from datasets import Dataset
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import (
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    Seq2SeqTrainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import speed_metrics

from .data import PairBatchSampler, token_lengths
from .metrics import compute_metrics, perplexity
from .modeling_tinytfm import mean_loss
from .tokenization import mend_tokenizer_class
from .translation import BATCH_TOKENS, TokenScores, budget_batches, generate_batch, score_targets

logger = logging.getLogger(__name__)


class NonFiniteLossError(RuntimeError):
    """The loss became infinite or NaN: training has stopped before it could spoil the weights."""


def noam_rate(step: int, d_model: int, warmup_steps: int) -> float:
    """d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5)  (Eq. 3).

    Args:
        step: Number of the optimizer update, from 1.
        d_model: Width of the model.
        warmup_steps: Updates of linear growth; 0 for none.
    """
    decay = step**-0.5
    return d_model**-0.5 * (min(decay, step * warmup_steps**-1.5) if warmup_steps else decay)


def smoothed_loss(
    logits_BTV: Tensor, labels_BT: Tensor, smoothing: float, num_items: int | Tensor | None = None
) -> Tensor:
    """(1 - e) * NLL + e * mean over the vocabulary of -log p, per real target (section 5.4).

    Args:
        logits_BTV: Raw logits.
        labels_BT: Token ids; -100 is ignored.
        smoothing: e.
        num_items: What the sum is divided by; the number of real targets if None.
    """
    total = F.cross_entropy(
        logits_BTV.flatten(0, 1).float(),
        labels_BT.flatten(),
        label_smoothing=smoothing,
        reduction="sum",
    )
    return mean_loss(total, labels_BT, num_items)


class EpochCallback(TrainerCallback):
    """Tells the batch sampler which epoch begins, also where a run is resumed in the middle of it.

    accelerate would have to pass this on through its own wrappers, and not all of them do.
    """

    def __init__(self, sampler: PairBatchSampler):
        self.sampler = sampler

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Sets the epoch; `state.epoch` counts whole epochs and the part that is done."""
        self.sampler.set_epoch(int(state.epoch or 0))


class TinyTFMTrainer(Seq2SeqTrainer):
    """A Seq2SeqTrainer for pairs that `data.encode_pairs` made.

    Args:
        *args: See `transformers.Seq2SeqTrainer`.
        max_tokens: Token budget of a process's micro-batch, padding included; None: batches of
            `args.per_device_train_batch_size` rows.
        noam: Whether the learning rate follows the paper's schedule, from `args.warmup_steps`.
        metrics: Names of text metrics; with any, evaluation generates.
        generation: Arguments of generate() in evaluation.
        eval_batch_tokens: Token budget of a batch in evaluation.
        **kwargs: See `transformers.Seq2SeqTrainer`. An evaluation set has the columns `source`,
            `references`, `input_ids` and `labels`.
    """

    def __init__(
        self,
        *args: Any,
        max_tokens: int | None = None,
        noam: bool = False,
        metrics: Sequence[str] = (),
        generation: dict[str, Any] | None = None,
        eval_batch_tokens: int = BATCH_TOKENS,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.model: Any
        self.processing_class: Any
        self.max_tokens = max_tokens
        self.noam = noam
        self.metric_names = list(metrics)
        self.generation = generation or {}
        self.eval_batch_tokens = eval_batch_tokens
        self.smoothing = self.args.label_smoothing_factor
        # The Trainer's smoother takes the labels away from the model, in evaluation too.
        self.label_smoother = None
        self.sampler: PairBatchSampler | None = None
        self.signatures: dict[str, str] = {}
        if self.train_dataset is not None:
            self.sampler = self._make_sampler()
            self.add_callback(EpochCallback(self.sampler))

    # Batches

    def _make_sampler(self) -> PairBatchSampler:
        source_lengths, target_lengths = token_lengths(self.train_dataset)
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
        batch_size = self._train_batch_size if self.max_tokens is None else None
        return PairBatchSampler(
            source_lengths,
            target_lengths,
            max_tokens=self.max_tokens,
            batch_size=batch_size,
            seed=seed,
            num_replicas=self.args.world_size,
            rank=self.args.process_index,
        )

    def get_train_dataloader(self) -> DataLoader:
        """Batches of this process; not prepared by accelerate, which would share them out again."""
        dataset = self._remove_unused_columns(self.train_dataset, description="training")
        return DataLoader(
            dataset,
            batch_sampler=self.sampler,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=self.args.dataloader_persistent_workers,
        )

    # The paper's schedule and loss

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's; under the Noam schedule, which gives the rate itself, of base rate 1."""
        if self.noam:
            self.args.learning_rate = 1.0
        return super().create_optimizer(model) if model is not None else super().create_optimizer()

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """The paper's schedule, or the Trainer's."""
        if not self.noam:
            return super().create_scheduler(num_training_steps, optimizer)
        optimizer = optimizer or self.optimizer
        if self.lr_scheduler is None and optimizer is not None:
            d_model, warmup = self.model.config.d_model, int(self.args.warmup_steps)
            self.lr_scheduler = LambdaLR(
                optimizer, lambda updates: noam_rate(updates + 1, d_model, warmup)
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The model's own loss; in training with label smoothing, the smoothed one."""
        if not (model.training and self.smoothing):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs["labels"]
        if "decoder_input_ids" not in inputs:
            shifted = self.model.prepare_decoder_input_ids_from_labels(labels)
            inputs = {**inputs, "decoder_input_ids": shifted}
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        loss = smoothed_loss(outputs.logits, labels, self.smoothing, num_items_in_batch)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            # The number is that of all processes, over which gradients are averaged.
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """A step of the Trainer, unless its loss is not finite.

        Raises:
            NonFiniteLossError: Before the optimizer could use the gradient.
        """
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not torch.isfinite(loss):
            raise NonFiniteLossError(
                f"the loss is {loss.item()} at update {self.state.global_step + 1}. Try a lower "
                "training.learning_rate or more training.warmup_steps, a lower "
                "training.max_grad_norm, or training.fp16=false (bf16 has float32's range). "
                f"Checkpoints in {self.args.output_dir} are from before it"
            )
        return loss

    # Evaluation

    def evaluate(  # type: ignore[override]
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Scores a set: unsmoothed loss per token, accuracy, perplexity, and text metrics.

        Args:
            eval_dataset: The set; the Trainer's own if None.
            ignore_keys: Not used: no outputs are gathered.
            metric_key_prefix: Put before the names of the figures.

        Returns:
            The figures, as they are logged.
        """
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        start = time.time()
        metrics, _ = self.score(dataset, metric_key_prefix)
        metrics.update(speed_metrics(metric_key_prefix, start, num_samples=len(dataset)))
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def score(self, dataset: Dataset, prefix: str) -> tuple[dict[str, float], list[str] | None]:
        """Scores a set, sharing its rows out among the processes.

        Args:
            dataset: With the columns `source`, `references`, `input_ids` and `labels`.
            prefix: Put before the names of the figures.

        Returns:
            The figures, and the predictions in the order of the set (None without text metrics).
        """
        mine = range(self.args.process_index, len(dataset), self.args.world_size)
        own = dataset.select(mine) if self.args.world_size > 1 else dataset
        sources, targets = own["input_ids"][:], own["labels"][:]
        with self.autocast_smart_context_manager():
            part = score_targets(self.model, sources, targets, batch_tokens=self.eval_batch_tokens)
            texts = self._generate(sources) if self.metric_names else None
        if self.args.world_size > 1:
            part = sum(gather_object([part]), TokenScores())
            pairs = gather_object(list(zip(mine, texts, strict=True))) if texts is not None else []
            texts = [text for _, text in sorted(pairs)] if texts is not None else None
        loss = part.loss / max(part.tokens, 1)
        metrics = {
            f"{prefix}_loss": loss,
            f"{prefix}_perplexity": perplexity(loss),
            f"{prefix}_token_accuracy": part.correct / max(part.tokens, 1),
        }
        if texts is not None:
            scores, self.signatures = compute_metrics(
                self.metric_names, texts, dataset["references"][:]
            )
            metrics.update({f"{prefix}_{name}": value for name, value in scores.items()})
        return metrics, texts

    def _generate(self, sources: Sequence[Sequence[int]]) -> list[str]:
        texts = [""] * len(sources)
        progress = tqdm(
            total=len(sources),
            desc="Generating",
            unit="line",
            leave=False,
            disable=None if self.is_world_process_zero() else True,
        )
        with progress:
            for rows in budget_batches([len(ids) for ids in sources], self.eval_batch_tokens):
                batch = [sources[row] for row in rows]
                best = generate_batch(self.model, self.processing_class, batch, **self.generation)
                for row, (hypothesis,) in zip(rows, best, strict=True):
                    texts[row] = hypothesis.text
                progress.update(len(rows))
        return texts

    # Checkpoints

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save and self.processing_class is not None:
            mend_tokenizer_class(output_dir or str(self.args.output_dir))


def checkpoint_step(folder: Path) -> int:
    """The update after which the Trainer wrote a `checkpoint-N`."""
    return int(folder.name.rpartition("-")[2])


def checkpoints(run: str | Path) -> list[Path]:
    """The checkpoints of a run, oldest first, complete or not."""
    folders = [
        folder
        for folder in Path(run).glob("checkpoint-*")
        if folder.is_dir() and folder.name.rpartition("-")[2].isdigit()
    ]
    return sorted(folders, key=checkpoint_step)


def what_is_missing(checkpoint: str | Path, world_size: int = 1) -> str | None:
    """Why a run cannot be resumed from a checkpoint, e.g. because it was killed while writing it.

    Args:
        checkpoint: A folder that the Trainer wrote.
        world_size: Number of processes that are to resume.

    Returns:
        The first fault in words, or None if the checkpoint is complete.
    """
    folder = Path(checkpoint)
    generators = ["rng_state.pth"]
    if world_size > 1:
        generators = [f"rng_state_{rank}.pth" for rank in range(world_size)]
    try:
        json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
        with safe_open(folder / "model.safetensors", "pt"):
            pass
        for name in ("optimizer.pt", "scheduler.pt", *generators):
            if not (folder / name).is_file():
                return f"{name} is missing"
            if not zipfile.is_zipfile(folder / name):
                return f"{name} is cut off"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name if error.filename else error} is missing"
    except (ValueError, OSError, SafetensorError) as error:
        return f"it holds a damaged file ({error})"
    return None


def last_complete_checkpoint(run: str | Path, world_size: int = 1) -> Path | None:
    """The newest checkpoint that can be resumed from; others are passed over with a warning."""
    for folder in reversed(checkpoints(run)):
        fault = what_is_missing(folder, world_size)
        if fault is None:
            return folder
        logger.warning("%s is not complete (%s): passed over", folder, fault)
    return None


def best_checkpoints(
    run: str | Path, count: int, metric: str = "loss", greater_is_better: bool = False
) -> list[Path]:
    """The `count` complete checkpoints of a run that validated best.

    Args:
        run: The folder of the run.
        count: How many.
        metric: The figure that decides, with or without `eval_`.
        greater_is_better: Whether a higher figure is better.

    Raises:
        ValueError: If fewer checkpoints were evaluated with that metric.
    """
    folders = [folder for folder in checkpoints(run) if what_is_missing(folder) is None]
    name = f"eval_{metric.removeprefix('eval_')}"
    values: dict[int, float] = {}
    if folders:
        state = TrainerState.load_from_json(str(folders[-1] / "trainer_state.json"))
        values = {entry["step"]: entry[name] for entry in state.log_history if name in entry}
    evaluated = [folder for folder in folders if checkpoint_step(folder) in values]
    if len(evaluated) < count:
        raise ValueError(
            f"{run} holds {len(evaluated)} checkpoints with an {name}, not {count}: evaluate "
            "whenever a checkpoint is saved, and keep more of them (training.save_total_limit)"
        )
    sign = -1 if greater_is_better else 1
    return sorted(evaluated, key=lambda folder: sign * values[checkpoint_step(folder)])[:count]


def last_checkpoints(run: str | Path, count: int) -> list[Path]:
    """The `count` newest complete checkpoints of a run.

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


def average_checkpoints(folders: Sequence[str | Path]) -> PreTrainedModel:
    """The model whose weights are the mean of several checkpoints' (section 6.1).

    Args:
        folders: Checkpoints of one run.

    Returns:
        The last checkpoint's model with the mean weights, summed in float64.

    Raises:
        ValueError: If there is none, or if they are not of one model.
    """
    if not folders:
        raise ValueError("no checkpoints to average")
    model = AutoModelForSeq2SeqLM.from_pretrained(folders[-1])
    mean: dict[str, Tensor] = {}
    for folder in folders:
        weights = load_file(Path(folder) / "model.safetensors")
        if mean and {name: w.shape for name, w in weights.items()} != {
            name: w.shape for name, w in mean.items()
        }:
            raise ValueError(f"{folder} holds weights of another model than {folders[0]}")
        for name, weight in weights.items():
            mean[name] = mean.get(name, 0) + weight.double() / len(folders)
    missing, unexpected = model.load_state_dict(mean, strict=False)
    lacking = set(missing) - set(model.get_expanded_tied_weights_keys(all_submodels=True))
    if lacking or unexpected:
        raise ValueError(f"{folders[-1]}: weights {sorted(lacking) or unexpected} do not fit")
    return model
