"""Keys of a recipe that contradict each other, or cannot work together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .recipe_keys import config_class, own_keys_of, section_keys, wrong_choice
from .settings import (
    LOSS_METRICS,
    METRIC_DESCRIPTIONS,
    TASK_FIGURES,
    DataSettings,
    EvaluationSettings,
    TokenizerSettings,
    TrainingSettings,
)

if TYPE_CHECKING:
    from .recipes import Recipe


# Keys of the section data that only pairs have.
_PAIR_KEYS = (
    "train_source_file",
    "train_target_file",
    "validation_source_file",
    "validation_target_file",
    "test_source_file",
    "test_target_file",
    "source_column",
    "target_column",
    "generator",
    "seed",
    "merge_references",
    "max_target_length",
)


def check_recipe(recipe: Recipe) -> None:
    """Refuses a recipe whose keys do not go together.

    Raises:
        ValueError: With the keys' full names, their values and what to write instead.
    """
    _check_task(recipe)
    _check_tokenizer(recipe.tokenizer)
    _check_data(recipe.data)
    _check_evaluation(recipe.evaluation)
    _check_generation(recipe.generation)
    _check_training(recipe.training)
    _check_model(recipe)
    _check_across_sections(recipe)
    _check_what_changes(recipe)


def _check_task(recipe: Recipe) -> None:
    """Refuses keys that mean nothing to the recipe's task."""
    task, has_images = recipe.task, recipe.data.image_column is not None
    is_seq2seq, is_classification = task == "seq2seq", task == "classification"
    meaningful = {
        **dict.fromkeys(_PAIR_KEYS, is_seq2seq),
        "text_column": not is_seq2seq and not has_images,
        "label_column": is_classification,
        "image_column": is_classification,
        "image_shift": has_images,
        "group_column": not has_images,
        "max_source_length": not has_images,
    }
    keys = own_keys_of("data")
    for name, is_meaningful in meaningful.items():
        value = getattr(recipe.data, name)
        if value != keys[name].default and not is_meaningful:
            raise ValueError(
                f"data.{name}={value!r} means nothing to task={task}"
                + (" without data.image_column" if name == "image_shift" else "")
                + (f" with data.image_column={recipe.data.image_column!r}" if has_images else "")
            )
    for name, key in own_keys_of("tokenizer").items():
        value = getattr(recipe.tokenizer, name)
        if has_images and value != key.default:
            raise ValueError(
                f"tokenizer.{name}={value!r} means nothing with data.image_column="
                f"{recipe.data.image_column!r}: images have no tokens"
            )
    if not is_seq2seq and recipe.evaluation.metrics:
        raise ValueError(
            f"evaluation.metrics={recipe.evaluation.metrics!r} is for task=seq2seq: task={task} "
            f"always reports {', '.join(TASK_FIGURES[task])}"
        )
    if is_classification and recipe.generation:
        raise ValueError(f"generation={recipe.generation!r} means nothing to task=classification")
    if not is_seq2seq and "length_penalty_form" in recipe.generation:
        raise ValueError(
            f"generation.length_penalty_form={recipe.generation['length_penalty_form']!r} means "
            f"nothing to task={task}"
        )
    unused = {"classification": "decoder", "language_model": "encoder"}.get(task)
    for name, value in recipe.model.items():
        if unused and name.startswith(f"{unused}_"):
            raise ValueError(f"model.{name}={value!r}: a model for task={task} has no {unused}")


def _check_tokenizer(tokenizer: TokenizerSettings) -> None:
    if tokenizer.kind == "regex" and not tokenizer.pattern:
        raise ValueError("tokenizer.kind=regex needs tokenizer.pattern, a regular expression")
    if tokenizer.kind != "regex" and tokenizer.pattern is not None:
        raise ValueError(
            f"tokenizer.pattern={tokenizer.pattern!r} contradicts tokenizer.kind={tokenizer.kind}: "
            "only kind regex reads it"
        )
    if tokenizer.pattern is not None:
        from tokenizers import Regex

        try:
            Regex(tokenizer.pattern)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(
                f"tokenizer.pattern={tokenizer.pattern!r} is no regular expression: {error}"
            ) from None


def _check_data(data: DataSettings) -> None:
    for split in ("train", "validation", "test"):
        pair = (f"{split}_source_file", f"{split}_target_file")
        given = [key for key in pair if getattr(data, key) is not None]
        if len(given) == 1:
            missing = pair[1] if given[0] == pair[0] else pair[0]
            raise ValueError(
                f"data.{given[0]}={getattr(data, given[0])!r} needs data.{missing} beside it"
            )
        if given and getattr(data, f"{split}_file") is not None:
            raise ValueError(
                f"data.{split}_file={getattr(data, f'{split}_file')!r} contradicts "
                f"data.{pair[0]}={getattr(data, pair[0])!r}: keep one of the two"
            )
    sources = {
        key: getattr(data, key)
        for key in ("train_file", "train_source_file", "dataset_name", "generator")
        if getattr(data, key) is not None
    }
    if not sources:
        raise ValueError(
            "data names no pairs to train on: give one of data.train_file, data.train_source_file "
            "with data.train_target_file, data.dataset_name, or data.generator"
        )
    if len(sources) > 1:
        named = " and ".join(f"data.{key}={value!r}" for key, value in sources.items())
        raise ValueError(f"{named} contradict each other: keep one and set the others to null")
    (source,) = sources
    if source in ("dataset_name", "generator"):
        for key in own_keys_of("data"):
            if key.endswith("_file") and getattr(data, key) is not None:
                raise ValueError(
                    f"data.{key}={getattr(data, key)!r} contradicts "
                    f"data.{source}={sources[source]!r}, which brings its own splits"
                )
    belongs_to = {
        "dataset_config_name": ("dataset_name",),
        "seed": ("generator",),
        "group_column": ("train_file", "dataset_name"),
    }
    for key, owners in belongs_to.items():
        if getattr(data, key) and source not in owners:
            raise ValueError(
                f"data.{key}={getattr(data, key)!r} contradicts "
                f"data.{source}={sources[source]!r}: it belongs to data.{' or data.'.join(owners)}"
            )


def _check_what_changes(recipe: Recipe) -> None:
    """Refuses streams, and dropout in sub-words, where they cannot be or would be spoilt."""
    data, dropout = recipe.data, recipe.tokenizer.bpe_dropout
    arguments = recipe.training.arguments
    for key, value in (("tokenizer.bpe_dropout", dropout), ("data.streaming", data.streaming)):
        if value and recipe.task != "seq2seq":
            raise ValueError(f"{key}={value} is for task=seq2seq, not for task={recipe.task}")
    if dropout and recipe.tokenizer.kind != "bpe":
        raise ValueError(
            f"tokenizer.bpe_dropout={dropout} is for tokenizer.kind=bpe, not for "
            f"tokenizer.kind={recipe.tokenizer.kind}"
        )
    if dropout > 1:
        raise ValueError(f"tokenizer.bpe_dropout={dropout} must be at most 1; usual is 0.1")
    persistent = arguments.get("dataloader_persistent_workers")
    if dropout and persistent and not data.streaming:
        raise ValueError(
            "training.dataloader_persistent_workers=True would feed the first epoch again and "
            f"again, and tokenizer.bpe_dropout={dropout} makes another one each time: leave it out"
        )
    if not data.streaming:
        return
    if arguments.get("max_steps", -1) <= 0:
        raise ValueError("data.streaming=true needs training.max_steps: a stream has no epochs")
    for key in ("eval_strategy", "save_strategy", "logging_strategy"):
        if arguments.get(key) == "epoch":
            raise ValueError(
                f"training.{key}=epoch never comes with data.streaming=true: a stream has no "
                "epochs; write steps"
            )
    for key in ("generator", "group_column", "max_train_samples"):
        if getattr(data, key) is not None:
            raise ValueError(
                f"data.{key}={getattr(data, key)!r} contradicts data.streaming=true: it needs all "
                "rows at once"
            )
    limits = (data.max_source_length, data.max_target_length)
    longest = math.inf if None in limits else sum(filter(None, limits))
    if data.max_tokens is not None and longest > data.max_tokens:
        raise ValueError(
            f"data.max_tokens={data.max_tokens} cannot hold every pair of a stream, whose lengths "
            f"are not known: set data.max_source_length={limits[0]} and data.max_target_length="
            f"{limits[1]} to no more than that together"
        )


def _check_evaluation(evaluation: EvaluationSettings) -> None:
    metrics = evaluation.metrics or []
    for name in metrics:
        if name in LOSS_METRICS:
            raise ValueError(f"evaluation.metrics: {name} is always reported and needs no entry")
        if name not in METRIC_DESCRIPTIONS:
            raise ValueError(wrong_choice("evaluation.metrics", name, METRIC_DESCRIPTIONS))
    if len(set(metrics)) < len(metrics):
        raise ValueError(f"evaluation.metrics={metrics!r} names a metric twice")


def _check_generation(generation: Mapping[str, Any]) -> None:
    from transformers import GenerationConfig

    for longer, shorter in (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length")):
        if generation.get(longer) is not None and generation.get(shorter) is not None:
            raise ValueError(
                f"generation.{longer}={generation[longer]} contradicts "
                f"generation.{shorter}={generation[shorter]}: keep one of the two"
            )
    known = {name: value for name, value in generation.items() if name != "length_penalty_form"}
    try:
        mode = GenerationConfig(**known).get_generation_mode().value
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"generation={dict(generation)!r}: {error}") from None
    form = generation.get("length_penalty_form")
    if form == "gnmt" and mode not in ("greedy_search", "beam_search"):
        raise ValueError(
            f"generation.length_penalty_form={form!r} is for greedy and beam search: "
            f"generation={dict(generation)!r} asks for {mode}"
        )


# Schedules that follow what is evaluated.
_BY_EVALUATION = ("reduce_lr_on_plateau", "greedy")


def _check_training(training: TrainingSettings) -> None:
    arguments = training.trainer_arguments()
    keys = section_keys("training")

    def effective(name: str) -> Any:
        return arguments.get(name, keys[name].default)

    if training.average_last is not None and training.average_best is not None:
        raise ValueError(
            f"training.average_last={training.average_last} contradicts "
            f"training.average_best={training.average_best}: keep one of the two"
        )
    if training.overwrite and training.resume_from_checkpoint:
        raise ValueError(
            "training.overwrite=True contradicts training.resume_from_checkpoint="
            f"{training.resume_from_checkpoint!r}: a run is either started anew or continued"
        )
    if effective("max_steps") == 0:
        raise ValueError(
            "training.max_steps=0 would learn nothing; -1 leaves it to training.num_train_epochs"
        )
    if effective("fp16") and effective("bf16"):
        raise ValueError("training.fp16=True contradicts training.bf16=True: keep one of the two")
    if arguments.get("hub_strategy") in ("checkpoint", "all_checkpoints"):
        raise ValueError(
            f"training.hub_strategy={arguments['hub_strategy']} would publish the optimizer's "
            "pickles: write end, or every_save for the model alone after every checkpoint"
        )
    if effective("label_smoothing_factor") >= 1:
        raise ValueError(
            f"training.label_smoothing_factor={effective('label_smoothing_factor')} must be below 1"
        )
    if training.is_noam:
        _check_noam(training.arguments)
    else:
        _check_schedule(training.lr_scheduler_type, effective("lr_scheduler_kwargs"))
    if effective("warmup_steps") and training.lr_scheduler_type in ("constant", *_BY_EVALUATION):
        raise ValueError(
            f"training.warmup_steps={effective('warmup_steps')} contradicts training."
            f"lr_scheduler_type={training.lr_scheduler_type}, which has no warmup: leave it out"
            + ", or write constant_with_warmup"
            * (training.lr_scheduler_type == "constant")
        )
    if training.cooldown_steps is not None and training.lr_scheduler_type in _BY_EVALUATION:
        raise ValueError(
            f"training.cooldown_steps={training.cooldown_steps} contradicts "
            f"training.lr_scheduler_type={training.lr_scheduler_type}, which follows evaluations"
        )
    optimizer = effective("optim")
    if str(optimizer).startswith("schedule_free"):
        raise ValueError(
            f"training.optim={optimizer} keeps the weights that are to be scored and saved apart "
            "from those it trains, which evaluation here does not know of: write adamw_torch_fused "
            "and training.cooldown_steps"
        )
    if training.cooldown_steps is not None and str(optimizer).endswith("layerwise"):
        raise ValueError(
            f"training.cooldown_steps={training.cooldown_steps} contradicts training.optim="
            f"{optimizer}, whose schedule is not known to the Trainer"
        )
    needs_checkpoints = {
        key: getattr(training, key)
        for key in ("average_last", "average_best")
        if getattr(training, key) is not None
    }
    for key, count in needs_checkpoints.items():
        limit = effective("save_total_limit")
        if effective("save_strategy") == "no" or (limit is not None and limit < count):
            raise ValueError(
                f"training.{key}={count} needs so many checkpoints, but training.save_strategy="
                f"{effective('save_strategy')!r} with training.save_total_limit={limit} keeps fewer"
            )
    needs_evaluations = {
        "early_stopping_patience": training.early_stopping_patience,
        "average_best": training.average_best,
        "load_best_model_at_end": effective("load_best_model_at_end") or None,
        "save_strategy": "best" if effective("save_strategy") == "best" else None,
        "lr_scheduler_type": training.lr_scheduler_type
        if training.lr_scheduler_type in _BY_EVALUATION
        else None,
    }
    for key, value in needs_evaluations.items():
        if value is not None and effective("eval_strategy") == "no":
            raise ValueError(
                f"training.{key}={value!r} needs evaluations, but training.eval_strategy='no'; "
                "write steps or epoch"
            )
    if effective("load_best_model_at_end") and effective("save_strategy") != "best":
        _check_saves_are_evaluated(effective)


def _check_saves_are_evaluated(effective: Callable[[str], Any]) -> None:
    """The best checkpoint is known only if every checkpoint has been evaluated."""
    evaluates, saves = effective("eval_strategy"), effective("save_strategy")
    if evaluates != saves:
        raise ValueError(
            f"training.load_best_model_at_end=True: training.save_strategy={saves!r} and "
            f"training.eval_strategy={evaluates!r} must be the same"
        )
    eval_steps = effective("eval_steps") or effective("logging_steps")
    save_steps = effective("save_steps")
    if saves == "steps" and eval_steps >= 1 and save_steps >= 1 and save_steps % eval_steps:
        raise ValueError(
            f"training.load_best_model_at_end=True: training.save_steps={save_steps} must be a "
            f"multiple of training.eval_steps={eval_steps}"
        )


def _check_schedule(name: str, kwargs: Any) -> None:
    """Has the Trainer's schedule made once, which would else be done after the data are read."""
    import torch
    from transformers import get_scheduler

    stated = f"training.lr_scheduler_type={name}"
    if kwargs:
        stated += f" with training.lr_scheduler_kwargs={kwargs}"
    if kwargs and name in ("constant", "constant_with_warmup"):
        raise ValueError(f"{stated}: this schedule has no such keys")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    try:
        get_scheduler(name, optimizer, 1, 2, scheduler_specific_kwargs=dict(kwargs or {}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{stated}: {error}") from None


def _check_noam(arguments: Mapping[str, Any]) -> None:
    warmup_steps = arguments.get("warmup_steps")
    if warmup_steps is None:
        raise ValueError(
            "training.lr_scheduler_type=noam needs training.warmup_steps (the paper: 4000)"
        )
    if warmup_steps != int(warmup_steps):
        raise ValueError(
            f"training.warmup_steps={warmup_steps}: training.lr_scheduler_type=noam counts them in "
            "updates, not in shares of the training"
        )
    for key in ("learning_rate", "lr_scheduler_kwargs"):
        if arguments.get(key) is not None:
            raise ValueError(
                f"training.{key}={arguments[key]!r} contradicts training.lr_scheduler_type=noam, "
                "which computes the rate from model.d_model and training.warmup_steps"
            )


def _check_model(recipe: Recipe) -> None:
    """Builds the config, as far as it is known before there is a vocabulary."""
    name = recipe.model.get("from_pretrained")
    if name is not None:
        _check_start(recipe, name)
        return  # the rest is known when it is loaded
    try:
        config_class()(vocab_size=max(recipe.tokenizer.vocab_size, 5), **recipe.model)
    except (TypeError, ValueError) as error:
        raise ValueError(f"model: {error}") from None


def _check_start(recipe: Recipe, name: str) -> None:
    """Refuses what a trained model brings by itself."""
    if recipe.task != "seq2seq":
        raise ValueError(f"model.from_pretrained={name!r} is for task=seq2seq, not {recipe.task}")
    for key, described in own_keys_of("tokenizer").items():
        value = getattr(recipe.tokenizer, key)
        if value != described.default and key != "bpe_dropout":
            raise ValueError(
                f"tokenizer.{key}={value!r} contradicts model.from_pretrained={name!r}, which "
                "brings its tokenizer: leave it out (tokenizer=null)"
            )


def check_positions(recipe: Recipe, positions: int) -> None:
    """Raises ValueError if a sequence may be longer than there are learned positions."""
    lengths = ("max_source_length", "max_target_length")
    read = {"seq2seq": lengths, "language_model": lengths[:1], "classification": lengths[:1]}
    for key in read[recipe.task] if recipe.data.image_column is None else ():
        limit = getattr(recipe.data, key)
        if limit is None or limit > positions:
            raise ValueError(
                f"data.{key}={limit} is above the learned positions, "
                f"model.max_position_embeddings={positions}"
            )


def _check_across_sections(recipe: Recipe) -> None:
    arguments, data = recipe.training.arguments, recipe.data
    batch_size = arguments.get("per_device_train_batch_size")
    if data.max_tokens is not None and batch_size:
        raise ValueError(
            f"training.per_device_train_batch_size={batch_size!r} contradicts data.max_tokens="
            f"{data.max_tokens}, which batches by itself: set one of the two to null"
        )
    keys = section_keys("model")

    def effective(name: str) -> Any:
        return recipe.model.get(name, keys[name].default)

    if recipe.model.get("from_pretrained") is not None:
        return  # how many positions there are is known when it is loaded
    if effective("position_embedding_type") == "learned":
        check_positions(recipe, effective("max_position_embeddings"))


def model_selection(recipe: Recipe) -> dict[str, Any]:
    """The Trainer's arguments by which the best checkpoint is told, where one is asked for.

    The Trainer would take every metric that is not a loss as better when higher, error rates too.
    """
    arguments, training = recipe.training.arguments, recipe.training
    metric = arguments.get("metric_for_best_model")
    if metric is None:
        is_needed = (
            arguments.get("load_best_model_at_end")
            or training.average_best is not None
            or training.early_stopping_patience is not None
            or arguments.get("save_strategy") == "best"
            or training.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
        )
        if not is_needed:
            return {}
        metric = "loss"
    name = metric.removeprefix("eval_")
    known = {name: LOSS_METRICS[name] for name in TASK_FIGURES[recipe.task]}
    known |= {name: METRIC_DESCRIPTIONS[name] for name in recipe.evaluation.metrics or ()}
    if name in METRIC_DESCRIPTIONS and name not in known:
        raise ValueError(
            f"training.metric_for_best_model={metric!r} is not measured: "
            f"add it to evaluation.metrics={recipe.evaluation.metrics!r}"
        )
    if name not in known:
        raise ValueError(wrong_choice("training.metric_for_best_model", metric, known))
    greater_is_better = arguments.get("greater_is_better")
    if greater_is_better not in (None, known[name].higher_is_better):
        raise ValueError(
            f"training.greater_is_better={greater_is_better} contradicts "
            f"training.metric_for_best_model={metric!r} ({known[name].text}); set it to null"
        )
    higher_is_better = known[name].higher_is_better
    choice: dict[str, Any] = {"metric_for_best_model": metric}
    choice["greater_is_better"] = higher_is_better
    if training.lr_scheduler_type in _BY_EVALUATION:  # which would take it as better when lower
        kwargs = arguments.get("lr_scheduler_kwargs") or {}
        mode = "max" if higher_is_better else "min"
        if kwargs.get("mode", mode) != mode:
            raise ValueError(
                f"training.lr_scheduler_kwargs.mode={kwargs['mode']!r} contradicts "
                f"training.metric_for_best_model={metric!r} ({known[name].text}): leave it out"
            )
        choice["lr_scheduler_kwargs"] = {**kwargs, "mode": mode}
    return choice
