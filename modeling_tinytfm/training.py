"""The paper's training recipe on the Hugging Face Trainer.

The Trainer stays in charge of devices, processes, precision, logging and checkpoints. What is its
own here: batches by a token budget, the paper's schedule, label smoothing in training only, a short
way to the loss, evaluation by the token and on generated text, and a stop at a loss that is not
finite.
"""

import copy
import logging
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import DistributedType, gather_object, is_compiled_module
from datasets import Dataset
from huggingface_hub import HfApi
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, speed_metrics

from .batching import PairBatchSampler
from .checkpoints import random_state_names
from .data import token_lengths
from .decoding import generate_batch
from .flops import SpeedMeter
from .losses import short_loss, smoothed_loss
from .metrics import compute_metrics, perplexity
from .modeling_tinytfm import TinyTFMForConditionalGeneration
from .publishing import open_repository, push
from .resegmentation import ResegmentedPairs, ResegmentingSampler
from .sharding import (
    check_sharding,
    copy_whole,
    embeddings_in_the_outermost_group,
    refuse_deepspeed,
    shard_on_cpus_too,
)
from .streaming import PairStream
from .tokenization import mend_tokenizer_class
from .translation import BATCH_TOKENS, TokenScores, budget_batches, progress_bar, score_targets

logger = logging.getLogger(__name__)

# Of the Trainer's ways to publish, those that take whole checkpoints along.
PICKLING_STRATEGIES = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)

# transformers 5.17 loads the optimizer of several processes on a CPU to "cpu:0", which torch does
# not know.
torch.serialization.register_package(
    100, lambda storage: None, lambda storage, place: storage if place.startswith("cpu:") else None
)


class NonFiniteLossError(RuntimeError):
    """The loss, or a weight, became infinite or NaN: training has stopped."""


def noam_rate(step: int, d_model: int, warmup_steps: int) -> float:
    """d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5)  (Eq. 3).

    Args:
        step: Number of the optimizer update, from 1.
        d_model: Width of the model.
        warmup_steps: Updates of linear growth; 0 for none.
    """
    decay = step**-0.5
    return d_model**-0.5 * (min(decay, step * warmup_steps**-1.5) if warmup_steps else decay)


def cool_down(scheduler: LambdaLR, updates: int, cooldown_steps: int) -> None:
    """Multiplies the rates of the last of `updates`, or of all, by what falls linearly to zero.

    Raises:
        ValueError: If the schedule is no plan for all updates.
    """
    if not isinstance(scheduler, LambdaLR):
        raise ValueError(
            f"cooldown_steps={cooldown_steps} cannot change {type(scheduler).__name__}"
        )
    cooldown_steps = min(cooldown_steps, updates)

    def cooled(rate: Callable[[int], float]) -> Callable[[int], float]:
        return lambda done: rate(done) * min(1.0, max(0, updates - done) / cooldown_steps)

    scheduler.lr_lambdas = [cooled(rate) for rate in scheduler.lr_lambdas]


class EpochCallback(TrainerCallback):
    """Tells the batch sampler which epoch begins, also where a run is resumed in the middle of it.

    accelerate would have to pass this on through its own wrappers, and not all of them do.
    """

    def __init__(self, sampler: PairBatchSampler | ResegmentingSampler):
        self.sampler = sampler

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Sets the epoch; `state.epoch` counts whole epochs and the part that is done."""
        self.sampler.set_epoch(int(state.epoch or 0))


class TrainingClock(TrainerCallback, ExportableState):
    """Seconds that a run has trained, evaluation and checkpoints included, however often resumed.

    Every checkpoint carries what had passed; what came after it is lost with it, and not counted.
    """

    def __init__(self) -> None:
        self.earlier: float | None = 0.0
        self.running_since: float | None = None

    def seconds(self) -> float | None:
        """Up to now, or to the end of training; None after a checkpoint that does not tell."""
        if self.running_since is None or self.earlier is None:
            return self.earlier
        return self.earlier + time.perf_counter() - self.running_since

    def state(self) -> dict[str, Any]:
        """What a checkpoint's `trainer_state.json` keeps."""
        return {"args": {}, "attributes": {"earlier": self.seconds()}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Goes on from what the checkpoint says, if the run is resumed from one."""
        kept: Any = state.stateful_callbacks
        name = type(self).__name__
        self.earlier = 0.0
        if state.global_step > 0:
            self.earlier = kept[name]["attributes"]["earlier"] if name in kept else None
        self.running_since = time.perf_counter()
        kept[name] = self.state()  # the Trainer saves the states of those that are there

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stops."""
        self.earlier, self.running_since = self.seconds(), None


def batch_options(args: TrainingArguments, max_tokens: int | None) -> dict[str, Any]:
    """What decides the batches of this process: see `batching.PairBatchSampler`."""
    return {
        "max_tokens": max_tokens,
        "batch_size": args.per_device_train_batch_size if max_tokens is None else None,
        "seed": args.seed if args.data_seed is None else args.data_seed,
        "num_replicas": args.world_size,
        "rank": args.process_index,
    }


class TinyTFMTrainer(Seq2SeqTrainer):
    """A Seq2SeqTrainer for pairs that `data.encode_pairs` made, or that are encoded as it trains.

    Args:
        model: The model to train or to score.
        args: The Trainer's arguments; their `per_device_eval_batch_size` is not used.
        max_tokens: Token budget of a process's micro-batch, padding included; None: batches of
            `args.per_device_train_batch_size` rows.
        noam: Whether the learning rate follows the paper's schedule, from `args.warmup_steps`, and
            not `args.lr_scheduler_type` and `args.learning_rate`.
        cooldown_steps: Last updates, whose rates are multiplied by what falls linearly to zero.
        metrics: Names of text metrics; with any, evaluation generates.
        generation: Arguments of generate() in evaluation.
        eval_batch_tokens: Token budget of a batch in evaluation.
        **kwargs: See `transformers.Seq2SeqTrainer`. An evaluation set has the columns `input_ids`
            and `labels` and, for text metrics, `references`.

    Raises:
        ValueError: If the training set cannot be shared out in batches: see
            `batching.PairBatchSampler`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: Seq2SeqTrainingArguments,
        *,
        max_tokens: int | None = None,
        noam: bool = False,
        cooldown_steps: int = 0,
        metrics: Sequence[str] = (),
        generation: dict[str, Any] | None = None,
        eval_batch_tokens: int = BATCH_TOKENS,
        **kwargs: Any,
    ):
        strategy = HubStrategy(args.hub_strategy)
        if args.push_to_hub and strategy in PICKLING_STRATEGIES:
            raise ValueError(
                f"hub_strategy={strategy.value} would publish the optimizer's pickles: take end, "
                "or every_save for the model alone after every checkpoint"
            )
        use_cache = model.config.use_cache
        refuse_deepspeed(args)
        shard_on_cpus_too(args)
        super().__init__(model, args, **kwargs)
        # The Trainer turned it off, in all checkpoints too. In training the model makes no cache.
        model.config.use_cache = use_cache
        self.model: Any
        self.processing_class: Any
        self.hub_model_id: Any
        self.max_tokens = max_tokens
        self.noam = noam
        self.cooldown_steps = cooldown_steps
        self.metric_names = list(metrics)
        self.generation = generation or {}
        self.eval_batch_tokens = eval_batch_tokens
        self.smoothing = self.args.label_smoothing_factor
        # The Trainer's smoother takes the labels away from the model, in evaluation too.
        self.label_smoother = None
        self.update_loss = torch.zeros((), device=self.args.device)
        self.signatures: dict[str, str] = {}
        self.whole_model: Any = None
        if self.is_fsdp_enabled:
            check_sharding(self.accelerator)
            self.whole_model = copy.deepcopy(model)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}
        self.meter = SpeedMeter(
            model.config, dtype.get(self.accelerator.mixed_precision, torch.float32)
        )
        self.add_callback(self.meter)
        self.add_callback(TrainingClock())
        self.sampler: PairBatchSampler | ResegmentingSampler | None = None
        if self.train_dataset is not None:
            self.sampler = self._make_sampler()
            if not isinstance(self.train_dataset, PairStream):
                self.add_callback(EpochCallback(self.sampler))

    @property
    def clock(self) -> TrainingClock:
        """The one that runs: the Trainer may have put another in the place of the first."""
        callbacks: list[Any] = self.callback_handler.callbacks
        return next(one for one in callbacks if isinstance(one, TrainingClock))

    # Batches

    def _make_sampler(self) -> PairBatchSampler | ResegmentingSampler:
        """What makes batches; for a stream, what would make those of its sample."""
        if self.args.n_gpu > 1:
            raise ValueError(
                f"one process has {self.args.n_gpu} GPUs: start a process for each (torchrun "
                f"--nproc_per_node {self.args.n_gpu}), or let it see one (CUDA_VISIBLE_DEVICES=0)"
            )
        options = batch_options(self.args, self.max_tokens)
        if isinstance(self.train_dataset, ResegmentedPairs):
            return ResegmentingSampler(self.train_dataset, **options)
        return PairBatchSampler(*self.lengths(self._countable_rows()), **options)

    def _countable_rows(self) -> Any:
        """The training rows; of a stream, its sample."""
        rows: Any = self.train_dataset
        return rows.sample if isinstance(rows, PairStream) else rows

    def lengths(self, dataset: Any) -> tuple[np.ndarray, np.ndarray]:
        """Positions of each row on the source and on the target side, [rows] each."""
        return token_lengths(dataset)

    def get_train_dataloader(self) -> DataLoader:
        """Batches of this process; not prepared by accelerate, which would share them out again."""
        if self.sampler is None:
            raise ValueError("train_dataset=None: there is nothing to train on")
        dataset: Any = self.train_dataset
        batches: dict[str, Any] = {"batch_sampler": self.sampler}
        if isinstance(dataset, PairStream):
            batches = {"batch_size": None}  # it makes them itself
        elif isinstance(dataset, Dataset):
            dataset = self._remove_unused_columns(dataset, description="training")
        return DataLoader(
            dataset,
            **batches,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            persistent_workers=self.args.dataloader_persistent_workers,
            multiprocessing_context=self.args.dataloader_multiprocessing_context,
            in_order=self.args.dataloader_in_order,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
            generator=torch.Generator(),  # takes nothing from the one that dropout draws from
        )

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Pairs of an update on average, from which the Trainer computes its speed."""
        pairs, batches = self._countable_rows(), cast(Any, self.sampler)
        return round(len(pairs) / len(batches) * args.gradient_accumulation_steps)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.sampler, ResegmentingSampler):
            self._fit_epoch(kwargs, len(self.sampler))
        if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            # Resumed from its last checkpoint: the Trainer would make one more update.
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's, unless epochs vary and a number of updates ends the training."""
        epochs, *others = super().set_initial_training_values(*args, **kwargs)
        if isinstance(self.sampler, ResegmentingSampler) and self.args.max_steps > 0:
            epochs = sys.maxsize  # as for a stream
        return (epochs, *others)

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        trained = super()._init_training_state(max_steps, *args, **kwargs)
        # The checkpoint's own steps of logging, evaluating and saving came with its state.
        self.state.compute_steps(self.args, max_steps)
        if self.state.best_global_step:  # the folder may have been moved since
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            if (best := Path(str(self.args.output_dir)) / name).is_dir():
                self.state.best_model_checkpoint = str(best)
        if not isinstance(self.sampler, ResegmentingSampler) or not self.state.epoch:
            return trained
        # Resumed: the epochs before had other numbers of batches than the Trainer divides by.
        epoch = int(self.state.epoch)
        self.sampler.set_epoch(epoch)
        if self.args.ignore_data_skip:
            return epoch, 0
        accumulation = self.args.gradient_accumulation_steps
        updates = -(-len(self.sampler) // accumulation)
        return epoch, round((self.state.epoch - epoch) * updates) * accumulation

    def _fit_epoch(self, epoch: dict[str, Any], batches: int) -> None:
        """Tells the Trainer, which counts batches once, how many this epoch has.

        Training ends after its number of epochs, not of updates, unless the latter is given.
        """
        updates = -(-batches // self.args.gradient_accumulation_steps)
        if self.args.max_steps <= 0:
            begun = self.state.global_step
            if epoch["epoch"] == epoch["epochs_trained"]:
                begun -= (
                    epoch["steps_trained_in_current_epoch"] // self.args.gradient_accumulation_steps
                )
            rest = math.ceil((self.args.num_train_epochs - epoch["epoch"]) * updates)
            self.state.max_steps = begun + rest
        epoch.update(steps_in_epoch=batches, num_update_steps_per_epoch=updates)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's; leaves a whole model where the weights were sharded."""
        if self.whole_model is None:
            return super().train(*args, **kwargs)
        with embeddings_in_the_outermost_group(self.model):
            output = super().train(*args, **kwargs)
        with self._whole_model():
            whole = self.model
        self.model = self.model_wrapped = whole
        return output

    @contextmanager
    def _whole_model(self) -> Iterator[None]:
        """Puts a whole model in the place of a sharded one; all processes enter it together."""
        trained = self.model
        if self.whole_model is not None and trained is not self.whole_model:
            copy_whole(trained, self.whole_model.to(self.args.device))
            self.model = self.whole_model
        try:
            yield
        finally:
            self.model = trained

    # The paper's schedule and loss

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """The paper's schedule, or the Trainer's; cooled down at its end if that is asked for."""
        optimizer = self.optimizer if optimizer is None else optimizer
        if self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        if not self.noam or optimizer is None:
            scheduler: Any = super().create_scheduler(num_training_steps, optimizer)
        else:
            for group in optimizer.param_groups:
                group["lr"] = 1.0  # the schedule multiplies it
            d_model = self.model.config.d_model
            warmup = self.args.get_warmup_steps(num_training_steps)
            scheduler = LambdaLR(optimizer, lambda n: noam_rate(n + 1, d_model, warmup))
            self.lr_scheduler, self._created_lr_scheduler = scheduler, True
        if self.cooldown_steps:
            cool_down(scheduler, num_training_steps, self.cooldown_steps)
        return scheduler

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The model's own loss; in training with label smoothing, the smoothed one."""
        outputs = None
        if model.training and not return_outputs and self._needs_no_logits(model):
            inputs = dict(inputs)
            labels = inputs.pop("labels")
            loss = short_loss(model, self.model, inputs, labels, self.smoothing, num_items_in_batch)
        elif model.training and self.smoothing:
            loss, outputs = self.smoothed(model, dict(inputs), num_items_in_batch)
        else:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            # The number is that of all processes, over which gradients are averaged.
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def _needs_no_logits(self, model: nn.Module) -> bool:
        """Whether the short way to the loss leads through `model`, which may be wrapped."""
        ways = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
        return (
            isinstance(self.model, TinyTFMForConditionalGeneration)
            and self.accelerator.distributed_type in ways
            and getattr(model, "module", model) is self.model  # no copy with compiled layers
            and not is_compiled_module(model)
        )

    def smoothed(
        self, model: nn.Module, inputs: dict[str, Any], num_items: Tensor | int | None
    ) -> tuple[Tensor, Any]:
        """The smoothed loss of a batch, and the model's outputs."""
        labels = inputs.pop("labels")
        if "decoder_input_ids" not in inputs:
            inputs["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(labels)
        outputs = model(**inputs)
        return smoothed_loss(outputs.logits, labels, self.smoothing, num_items), outputs

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """A step of the Trainer, unless the loss of its update is not finite.

        Raises:
            NonFiniteLossError: Before the optimizer could use the gradient, on all processes.
        """
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.update_loss = self.update_loss + loss
        if self.accelerator.sync_gradients:
            # One process that goes on alone would save weights that the others' gradients spoilt.
            total = self.accelerator.gather(self.update_loss).sum()
            self.update_loss = torch.zeros_like(loss)
            if not torch.isfinite(total):
                step = self.state.global_step + 1
                raise self._non_finite(f"the loss of update {step} is {total.item()}")
        return loss

    def _non_finite(self, what: str) -> NonFiniteLossError:
        return NonFiniteLossError(
            f"{what}. Try a lower training.learning_rate or more training.warmup_steps, a lower "
            "training.max_grad_norm, or training.fp16=false (bf16 has float32's range). "
            f"Checkpoints in {self.args.output_dir} are from before it"
        )

    # Speed

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:  # type: ignore[override]
        """FLOPs of a batch, forward and backward: see `flops`."""
        return self.meter.count(inputs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The Trainer's; training's lines tell its speed, too: see `flops.SpeedMeter.rates`."""
        if "loss" in logs:
            logs.update(self.meter.rates(self._sum_of_processes))
        elif "total_flos" in logs:
            rates = self.meter.overall(self._sum_of_processes)
            logs.update({f"train_{name}": value for name, value in rates.items()})
        super().log(logs, start_time)

    def _sum_of_processes(self, values: list[float]) -> list[float]:
        if self.args.world_size == 1:
            return values
        own = torch.tensor(values, dtype=torch.float64, device=self.args.device)
        return self.accelerator.reduce(own, "sum").tolist()

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
        with self._whole_model():
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
            dataset: With the columns `input_ids`, `labels` and, for text metrics, `references`.
            prefix: Put before the names of the figures.

        Returns:
            The figures, and the predictions in the order of the set (None without text metrics).
        """
        mine = range(self.args.process_index, len(dataset), self.args.world_size)
        own = dataset.select(mine) if self.args.world_size > 1 else dataset
        sources, targets = own["input_ids"][:], own["labels"][:]
        with self.accelerator.autocast():  # generate() would run the encoder without it
            part = score_targets(
                self.model,
                sources,
                targets,
                batch_tokens=self.eval_batch_tokens,
                show_progress=self._show_progress(),
            )
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
        with progress_bar("Generating", len(sources), self._show_progress()) as progress:
            for rows in budget_batches([len(ids) for ids in sources], self.eval_batch_tokens):
                batch = [sources[row] for row in rows]
                best = generate_batch(self.model, self.processing_class, batch, **self.generation)
                for row, (hypothesis,) in zip(rows, best, strict=True):
                    texts[row] = hypothesis.text
                progress.update(len(rows))
        return texts

    def _show_progress(self) -> bool | None:
        return None if self.is_world_process_zero() and not self.args.disable_tqdm else False

    # Checkpoints

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._save_checkpoint(*args, **kwargs)
        except (RuntimeError, SafetensorError) as error:
            if isinstance(error, NonFiniteLossError):
                raise
            # What torch and safetensors raise for a full disk is no OSError.
            raise OSError(
                f"{self.args.output_dir}: the checkpoint of update {self.state.global_step} cannot "
                f"be written (is the disk full?): {error}"
            ) from error

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        with self._whole_model():
            if not all(torch.isfinite(weight).all() for weight in self.model.state_dict().values()):
                # The last good checkpoint may be deleted for this one.
                raise self._non_finite(
                    f"update {self.state.global_step} left weights that are not finite"
                )
            super()._save(output_dir)
        folder = Path(output_dir or str(self.args.output_dir))
        if not self.args.should_save:
            return
        if (folder / "tokenizer_config.json").is_file():
            mend_tokenizer_class(folder)
        if not re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", folder.name):
            # A pickle, which only resuming would read.
            (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
            return
        # What another number of processes may have left there, killed as they wrote it.
        for file in list(folder.glob("rng_state*.pth")):
            if file.name not in random_state_names(self.args.world_size):
                file.unlink()

    # The Hub

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Makes the repository before training begins, unless it is there.

        Raises:
            ValueError: See `publishing.open_repository`.
            OSError: See there.
        """
        if self.is_world_process_zero():
            args = self.args
            self.hub_model_id, _ = open_repository(
                args.hub_model_id or Path(str(args.output_dir)).absolute().name,
                private=args.hub_private_repo if private is None else private,
                token=token or args.hub_token,
            )

    def push_to_hub(
        self,
        commit_message: str | None = None,
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        *,
        save: bool = True,
        **choices: Any,
    ) -> Any:
        """Publishes the model with its tokenizer and card: see `publishing.push`.

        Args:
            commit_message: What the commit says.
            blocking: Whether to wait until it is there.
            token: A token of the Hub; the arguments', or the one logged in with, if None.
            revision: A branch; the arguments' if None.
            private: Whether only its owner may read a new repository.
            save: Whether the model is written into `args.output_dir` first.
            **choices: More of `publishing.push`.

        Returns:
            What `publishing.push` returns, or its Future; None on all processes but one.

        Raises:
            ValueError: See `publishing.push`.
            OSError: See there.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        if save:
            self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        options = {
            "revision": revision or self.args.hub_revision,
            "message": commit_message,
            "token": token or self.args.hub_token,
            **choices,
        }
        folder = str(self.args.output_dir)
        if blocking:
            return push(folder, str(self.hub_model_id), **options)
        return HfApi().run_as_future(push, folder, str(self.hub_model_id), **options)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # The Trainer's own would publish its pickled arguments, and write into the run's folder.
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        try:
            push(
                checkpoint_folder,
                str(self.hub_model_id),
                revision=self.args.hub_revision,
                token=self.args.hub_token,
                message=f"Training in progress, update {self.state.global_step}",
            )
        except (OSError, ValueError) as error:
            logger.warning("not published: %s", error)  # no reason to lose the run
