"""The keys of a recipe: what may stand under each, what a value must be, and what is refused.

Our own keys come from the settings classes; those of `model`, `training` and `generation` are read
off `TinyTFMConfig`, the Trainer's arguments and `GenerationConfig`.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Literal, NamedTuple

from .settings import DataSettings, EvaluationSettings, TokenizerSettings, TrainingSettings

_UNIONS = (typing.Union, types.UnionType)  # Optional[int] and int | None
SECTIONS = ("model", "tokenizer", "data", "training", "generation", "evaluation")
OPEN_SECTIONS = {"training": "Seq2SeqTrainingArguments", "generation": "GenerationConfig"}
SETTINGS: dict[str, type] = {
    "tokenizer": TokenizerSettings,
    "data": DataSettings,
    "training": TrainingSettings,
    "evaluation": EvaluationSettings,
}


@dataclasses.dataclass(frozen=True)
class Key:
    """What may stand under one key."""

    annotation: Any
    default: Any = None
    text: str = ""
    minimum: float | None = None
    is_path: bool = False


class KeyDescription(NamedTuple):
    """One line of a recipe's documentation."""

    key: str
    type: str
    default: Any
    text: str


# The keys of `generation` that are of use in a recipe. GenerationConfig declares no types, and its
# own defaults are None since 5.x: those of generate() are described here.
GENERATION_KEYS: dict[str, Key] = {
    "num_beams": Key(int, 1, "beams of the search; 1 is greedy", minimum=1),
    "length_penalty": Key(
        float, 1.0, "exponent of the length by which a beam's score is divided; > 0 favours length"
    ),
    "length_penalty_form": Key(
        Literal["length", "gnmt"],
        "length",
        "what length_penalty is the exponent of: the length, or (5 + length) / 6 as in the paper; "
        "generate() itself knows the length alone",
    ),
    "early_stopping": Key(
        bool | Literal["never"], False, "stop as soon as num_beams hypotheses are finished"
    ),
    "max_new_tokens": Key(int, None, "tokens generated at most", minimum=1),
    "max_length": Key(int, None, "the same, the start token included", minimum=2),
    "min_new_tokens": Key(int, None, "tokens generated at least", minimum=0),
    "min_length": Key(int, 0, "the same, the start token included", minimum=0),
    "do_sample": Key(bool, False, "draw tokens instead of taking the best"),
    "temperature": Key(float, 1.0, "divides the logits when drawing", minimum=0),
    "top_k": Key(int, 50, "draw from the so many likeliest tokens", minimum=0),
    "top_p": Key(float, 1.0, "draw from the likeliest tokens up to this probability", minimum=0),
    "repetition_penalty": Key(float, 1.0, "divides the scores of tokens seen before", minimum=0),
    "no_repeat_ngram_size": Key(int, 0, "n-grams of this size occur once at most", minimum=0),
    "use_cache": Key(bool, True, "keep keys and values of earlier steps"),
}

# The Trainer's keys that a recipe is likely to set; it takes all others, too.
TRAINING_TEXTS: dict[str, str] = {
    "max_steps": "optimizer updates after which training ends; -1: by num_train_epochs",
    "num_train_epochs": "passes over the training set, where max_steps does not decide",
    "per_device_train_batch_size": "rows in a process's micro-batch, unless data.max_tokens is set",
    "gradient_accumulation_steps": "micro-batches of each process that make an update",
    "learning_rate": "peak of the schedule; noam has its own",
    "warmup_steps": "updates of linear growth; below 1 a share of all",
    "optim": "optimizer",
    "adam_beta1": "decay of Adam's mean gradient",
    "adam_beta2": "decay of Adam's mean squared gradient; 0.98 in the paper",
    "adam_epsilon": "1e-9 in the paper",
    "weight_decay": "AdamW's, of matrices only",
    "max_grad_norm": "gradients longer than this are shortened to it; 0: never",
    "label_smoothing_factor": "share of a target spread over the vocabulary (section 5.4)",
    "eval_strategy": "when to validate",
    "eval_steps": "updates from one validation to the next; logging_steps if null",
    "save_strategy": "when to write a checkpoint",
    "save_steps": "updates from one checkpoint to the next",
    "save_total_limit": "checkpoints that are kept, the best one among them; null: all",
    "load_best_model_at_end": "end with the checkpoint that validated best",
    "metric_for_best_model": "what tells: loss, perplexity, token_accuracy or an evaluation metric",
    "logging_steps": "updates from one line of the log to the next",
    "report_to": "where else the log goes: tensorboard (extra of that name; into runs/ in the "
    "run's folder, or $TENSORBOARD_LOGGING_DIR), wandb, mlflow and others of the Trainer's",
    "seed": "of initial weights, dropout and, without data_seed, the order of batches",
    "data_seed": "of the order of batches",
    "bf16": "compute in bfloat16; null: if a GPU has it",
    "fp16": "compute in float16, on a GPU",
    "use_cpu": "leave a GPU alone",
    "gradient_checkpointing": "compute activations twice and keep few: less memory, more time",
    "torch_compile": "compile the model with torch.compile",
    "dataloader_num_workers": "processes that make batches; 0: the training process itself",
    "push_to_hub": "publish the model when the run has its scores",
    "hub_model_id": "repository to publish to, as NAME/MODEL",
    "hub_private_repo": "whether a new repository can be seen by its owner only",
}

# Ranges that TrainingArguments itself checks late or not at all.
_TRAINING_MINIMUMS: dict[str, float] = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 0,
    "max_steps": -1,
    "learning_rate": 0,
    "warmup_steps": 0,
    "weight_decay": 0,
    "max_grad_norm": 0,
    "label_smoothing_factor": 0,
    "logging_steps": 0,
    "eval_steps": 0,
    "save_steps": 0,
    "save_total_limit": 1,
    "seed": 0,
    "dataloader_num_workers": 0,
}
_FROM_TOKENIZER = "it follows from the tokenizer"
_BY_COMMAND = "the command sets it"
_BY_LOGIN = "a recipe is published with its run; log in by `hf auth login`"
_BY_LAUNCHER = "torchrun or accelerate launch sets it"
_OWN_BATCHES = "batches come from data.max_tokens or training.per_device_train_batch_size"
_EVALUATES_BY_TOKENS = "evaluation batches by tokens: data.max_tokens"
_SEVERAL_OUTPUTS = "the command keeps one prediction a row and nothing but its tokens"

# Valid names elsewhere, but not in a recipe: the reason, or what to write instead.
REFUSED_KEYS: dict[str, str] = {
    "model.vocab_size": f"{_FROM_TOKENIZER}; limit it by tokenizer.vocab_size",
    **{
        f"{section}.{token}_token_id": _FROM_TOKENIZER
        for section in ("model", "generation")
        for token in ("pad", "bos", "eos", "unk", "sep", "decoder_start")
    },
    "model.is_encoder_decoder": "the task decides it",
    "model.is_decoder": "the task decides it",
    "model.num_labels": "it follows from the classes in the data",
    "model.input_feature_size": "it follows from the images (data.image_column)",
    "generation.num_return_sequences": _SEVERAL_OUTPUTS,
    "generation.return_dict_in_generate": _SEVERAL_OUTPUTS,
    "generation.output_scores": _SEVERAL_OUTPUTS,
    "generation.output_logits": _SEVERAL_OUTPUTS,
    "generation.output_attentions": _SEVERAL_OUTPUTS,
    "generation.output_hidden_states": _SEVERAL_OUTPUTS,
    "generation.transformers_version": _BY_COMMAND,
    "training.enable_jit_checkpoint": "a run that was stopped would count as finished; save_steps, "
    "and resume_from_checkpoint=true, carry it over",
    "training.neftune_noise_alpha": "the stacks embed tokens by matrices that it does not reach",
    "training.do_train": _BY_COMMAND,
    "training.do_eval": f"{_BY_COMMAND}; write training.eval_strategy",
    "training.do_predict": _BY_COMMAND,
    "training.predict_with_generate": f"{_BY_COMMAND}; choose the scores by evaluation.metrics",
    "training.prediction_loss_only": f"{_BY_COMMAND}; choose the scores by evaluation.metrics",
    "training.include_for_metrics": _BY_COMMAND,
    "training.batch_eval_metrics": _BY_COMMAND,
    "training.eval_do_concat_batches": _BY_COMMAND,
    "training.generation_config": "write its fields in the section generation",
    "training.generation_max_length": "write generation.max_length or generation.max_new_tokens",
    "training.generation_num_beams": "write generation.num_beams",
    "training.sortish_sampler": "write data.max_tokens, which batches pairs of similar length",
    "training.local_rank": _BY_LAUNCHER,
    "training.hub_token": _BY_LOGIN,
    "training.hub_always_push": "the model is pushed before training goes on",
    "training.warmup_ratio": "write training.warmup_steps; below 1 it is a share of all updates",
    "training.evaluation_strategy": "write training.eval_strategy",
    "training.overwrite_output_dir": "write training.overwrite",
    "training.group_by_length": "write data.max_tokens, which batches pairs of similar length",
    "training.train_sampling_strategy": _OWN_BATCHES,
    "training.dataloader_drop_last": "no pair is ever left out",
    "training.auto_find_batch_size": _OWN_BATCHES,
    "training.per_device_eval_batch_size": _EVALUATES_BY_TOKENS,
    "training.eval_accumulation_steps": _EVALUATES_BY_TOKENS,
    "training.eval_use_gather_object": _EVALUATES_BY_TOKENS,
    "training.bf16_full_eval": "validation computes as training does; write training.bf16",
    "training.fp16_full_eval": "validation computes as training does; write training.fp16",
    "training.deepspeed": "no run could be continued from its checkpoints; start the run by "
    "configs/accelerate/fsdp.yaml",
    "training.accelerator_config": _OWN_BATCHES,
    "training.no_cuda": "write training.use_cpu",
    "training.use_mps_device": "the device is found by itself; training.use_cpu keeps to the CPU",
    "training.logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR",
    "training.per_gpu_train_batch_size": "write training.per_device_train_batch_size",
    "training.per_gpu_eval_batch_size": _EVALUATES_BY_TOKENS,
    "training.adafactor": "write training.optim: adafactor",
    "training.split_batches": _OWN_BATCHES,
    "training.dispatch_batches": _OWN_BATCHES,
    "training.push_to_hub_token": _BY_LOGIN,
    "training.push_to_hub_model_id": "write training.hub_model_id",
}


@functools.cache
def dataclass_keys(settings: type) -> dict[str, Key]:
    """The documented fields of a settings class."""
    hints = typing.get_type_hints(settings)
    return {
        field.name: Key(
            annotation=hints[field.name], default=_plain_default(field), **field.metadata
        )
        for field in dataclasses.fields(settings)
        if field.metadata
    }


def own_keys_of(section: str) -> Mapping[str, Key]:
    """The keys of a section that stand in this module."""
    if section == "generation":
        return GENERATION_KEYS
    return dataclass_keys(SETTINGS[section]) if section in SETTINGS else {}


@functools.cache
def section_keys(section: str) -> dict[str, Key]:
    """All keys of a section, those of transformers' classes and of `TinyTFMConfig` included."""
    inspected = {"model": _model_keys, "training": _training_keys, "generation": _generation_keys}
    return inspected[section]() if section in inspected else dataclass_keys(SETTINGS[section])


def config_class() -> Any:
    """`TinyTFMConfig`, as the package registered it; this module may not import it."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING["tinytfm"]


def _model_keys() -> dict[str, Key]:
    described = config_class()
    constructor = described.__init__
    hints = typing.get_type_hints(constructor)
    texts = _documented_arguments(inspect.getdoc(described) or "")
    fields = {
        name: Key(
            annotation=hints.get(name, Any), default=parameter.default, text=texts.get(name, "")
        )
        for name, parameter in inspect.signature(constructor).parameters.items()
        if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    start = Key(
        str | None,
        None,
        "a trained model to go on from, a folder or a name on the Hub: its weights, sizes and "
        "tokenizer (task seq2seq); of the other keys only dropouts may differ from its own",
        is_path=True,
    )
    return {"from_pretrained": start, **fields}


def _documented_arguments(docstring: str) -> dict[str, str]:
    """Argument -> text, from the `Args:` of a Google-style docstring."""
    _, _, block = docstring.partition("Args:\n")
    entries = re.finditer(
        r"^    (\w+)(?: \([^)]*\))?:(.*(?:\n {5,}.*)*)", block, flags=re.MULTILINE
    )
    return {entry[1]: " ".join(entry[2].split()) for entry in entries}


def _training_keys() -> dict[str, Key]:
    from transformers import Seq2SeqTrainingArguments

    hints = typing.get_type_hints(Seq2SeqTrainingArguments)
    trainer_keys = {
        field.name: Key(
            annotation=hints[field.name],
            default=_plain_default(field),
            text=TRAINING_TEXTS.get(field.name, ""),
            minimum=_TRAINING_MINIMUMS.get(field.name),
        )
        for field in dataclasses.fields(Seq2SeqTrainingArguments)
    }
    trainer_keys["bf16"] = dataclasses.replace(trainer_keys["bf16"], default=None)  # the GPU's
    own_keys = dataclass_keys(TrainingSettings)
    schedules = ("noam", *_choices(trainer_keys["lr_scheduler_type"].annotation))
    schedule = dataclasses.replace(own_keys["lr_scheduler_type"], annotation=Literal[schedules])
    return {**trainer_keys, **own_keys, "lr_scheduler_type": schedule}


def _plain_default(field: dataclasses.Field) -> Any:
    """A field's default as a recipe would write it."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    if field.default is dataclasses.MISSING:
        return None
    return field.default.value if isinstance(field.default, Enum) else field.default


def _generation_keys() -> dict[str, Key]:
    from transformers import GenerationConfig

    names = [name for name in GenerationConfig().to_dict() if not name.startswith("_")]
    return {**{name: Key(Any) for name in names}, **GENERATION_KEYS}


def describe(dotted: str, key: Key) -> KeyDescription:
    return KeyDescription(dotted, _type_name(key.annotation), key.default, key.text)


def check_values(
    section: str, values: Mapping[str, Any], keys: Mapping[str, Key], texts: Mapping[str, str]
) -> dict[str, Any]:
    """The values of a section in their right types, without those that null leaves to default."""
    checked = {}
    for name, value in values.items():
        key = keys[name]
        if value is None and not _allows(None, key.annotation):
            continue
        dotted = f"{section}.{name}" if section else name
        checked[name] = _checked_value(dotted, value, key, texts.get(dotted))
    return checked


def _checked_value(dotted: str, value: Any, key: Key, text: str | None) -> Any:
    """One value in its right type.

    Args:
        dotted: The key's full name, for messages.
        value: The value that YAML read.
        key: What may stand there.
        text: What an override wrote, before YAML gave it a type: it stands wherever text is
            wanted, because shells take away the quotes that would have made it text.
    """
    try:
        value = _convert(value, key.annotation)
    except TypeError:
        if text is None or not _takes_text(key.annotation):
            raise ValueError(_wrong_type(dotted, value, key)) from None
        value = text
    choices = _choices(key.annotation)
    if choices and isinstance(value, str) and value not in choices:
        words = ("true", "false", *choices) if _allows(True, key.annotation) else choices
        raise ValueError(wrong_choice(dotted, value, words))
    if key.minimum is not None and isinstance(value, int | float) and value < key.minimum:
        raise ValueError(f"{dotted}={value!r} must be at least {key.minimum}")
    if key.is_path and isinstance(value, str):
        # Shells leave the ~ of section.key=~/file alone.
        return os.path.expanduser(value)
    return value


def _convert(value: Any, annotation: Any) -> Any:
    """`value` as the annotation wants it: 1e3 is a whole number too, 1 is not a truth value.

    Raises:
        TypeError: The value does not fit.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (Any, inspect.Parameter.empty):
        return value
    if origin in _UNIONS:
        for member in arguments:
            try:
                return _convert(value, member)
            except TypeError:
                continue
    elif origin is Literal:
        # Text that is none of the choices is no wrong type: it gets a message with the nearest.
        if isinstance(value, str):
            return value
    elif origin is list and isinstance(value, list | str):
        return [
            _convert(item, arguments[0]) for item in ([value] if isinstance(value, str) else value)
        ]
    elif annotation is list or annotation is dict or origin is dict:
        if isinstance(value, origin or annotation):
            return value
    elif annotation is float:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return value
    elif annotation is int:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif isinstance(annotation, type) and issubclass(annotation, Enum):
        if value in [member.value for member in annotation]:
            return value
    elif isinstance(annotation, type) and isinstance(value, annotation):
        return value
    raise TypeError


def _allows(value: Any, annotation: Any) -> bool:
    try:
        _convert(value, annotation)
    except TypeError:
        return False
    return True


def _takes_text(annotation: Any) -> bool:
    """Whether any text may stand alone here."""
    if typing.get_origin(annotation) in _UNIONS:
        return str in typing.get_args(annotation)
    return annotation is str


def _choices(annotation: Any) -> tuple[str, ...]:
    """The words that an annotation lists, in a Literal or an Enum."""
    if typing.get_origin(annotation) is Literal:
        return tuple(choice for choice in typing.get_args(annotation) if isinstance(choice, str))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return tuple(member.value for member in annotation)
    if typing.get_origin(annotation) in _UNIONS:
        return tuple(
            choice for member in typing.get_args(annotation) for choice in _choices(member)
        )
    return ()


def _type_name(annotation: Any) -> str:
    """An annotation in words."""
    if annotation in (Any, inspect.Parameter.empty):
        return "any"
    if annotation is types.NoneType:
        return "null"
    choices = _choices(annotation)
    members = typing.get_args(annotation)
    if typing.get_origin(annotation) in _UNIONS:
        names = [_type_name(member) for member in members if not (choices and member is str)]
        return " or ".join(dict.fromkeys(sorted(names, key=lambda name: name == "null")))
    if choices:
        return " | ".join(choices)
    if typing.get_origin(annotation) is list:
        return f"list of {_type_name(members[0])}"
    if annotation is dict or typing.get_origin(annotation) is dict:
        return "mapping"
    return {bool: "true or false"}.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _wrong_type(dotted: str, value: Any, key: Key) -> str:
    message = f"{dotted}={value!r} has the wrong type: it takes {_type_name(key.annotation)}"
    if isinstance(value, str) and _allows(True, key.annotation):
        return f"{message}, without quotes"
    if not isinstance(value, list | dict) and _takes_text(key.annotation):
        return f"{message}; put it in quotes"
    return message


def wrong_choice(dotted: str, value: str, choices: Iterable[str]) -> str:
    return (
        f"{dotted}={value!r} is none of {', '.join(choices)}; "
        f"the nearest is {_nearest(value, choices)}"
    )


def _nearest(word: str, words: Iterable[str]) -> str:
    return difflib.get_close_matches(word, list(words), n=1, cutoff=0.0)[0]


def unknown_top_level_key(key: Any, value: Any, scalars: Iterable[str]) -> str:
    if not isinstance(key, str):
        return f"{key!r} is not a key of a recipe: keys are text"
    for section in SECTIONS:
        if key in own_keys_of(section):
            return f"unknown key {key} (={value!r}); write it in its section: {section}.{key}"
    kind = "section" if isinstance(value, dict) else "key"
    nearest = _nearest(key, (*scalars, *SECTIONS))
    return f"unknown {kind} {key} (={value!r}); the nearest valid one is {nearest}"


def refuse_unusable_key(section: str, key: Any, value: Any) -> None:
    """Raise for a key that a section does not have, or not in a recipe."""
    if not isinstance(key, str):
        raise ValueError(f"{section}.{key!r} is not a key of a recipe: keys are text")
    dotted = f"{section}.{key}"
    if dotted in REFUSED_KEYS:
        shown = "..." if "token" in key and isinstance(value, str) else repr(value)  # a secret
        raise ValueError(f"{dotted}={shown} cannot be set: {REFUSED_KEYS[dotted]}")
    keys = section_keys(section)
    if key in keys:
        return
    if section == "model" and key in config_class().attribute_map:
        nearest = f"model.{config_class().attribute_map[key]}"
    elif close := difflib.get_close_matches(key, keys, n=1, cutoff=0.75):
        nearest = f"{section}.{close[0]}"
    elif homes := [other for other in SECTIONS if key in section_keys(other)]:
        nearest = f"{homes[0]}.{key}"
    else:
        nearest = f"{section}.{_nearest(key, keys)}"
    raise ValueError(f"unknown key {dotted} (={value!r}); the nearest valid one is {nearest}")
