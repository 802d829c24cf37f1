"""Recipes: a YAML file plus command-line overrides, read into typed settings.

A recipe has the keys `task` and `threads` and the sections `model`, `tokenizer`, `data`,
`training`, `generation` and `evaluation`. Everything a user may write is checked here, before any
data, vocabulary or model is touched: unknown keys, wrong types, values out of range and keys that
contradict each other are refused with a `ValueError` that names the dotted key, its value and what
to write instead.

YAML is read by the core schema of YAML 1.2, where PyYAML on its own follows 1.1: `1e-3` is a
number, `no` is text (as in `eval_strategy: no`), and dates stay text.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import inspect
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml


class MetricDescription(NamedTuple):
    """What a metric measures, and which direction is better."""

    text: str
    higher_is_better: bool


# The metrics of `evaluation.metrics`. They are computed by modeling_tinytfm.metrics, whose import
# is too slow for reporting a typo; names and descriptions therefore stand here.
METRIC_DESCRIPTIONS: dict[str, MetricDescription] = {
    "bleu": MetricDescription("sacreBLEU on raw text (13a tokens), 0..100", True),
    "tokenized_bleu": MetricDescription(
        "BLEU on text that is tokenised already, as in older papers, 0..100", True
    ),
    "chrf": MetricDescription("chrF2, character n-gram F-score, 0..100", True),
    "ter": MetricDescription("translation edit rate, 0 is perfect, 100 and more is useless", False),
    "exact_match": MetricDescription("share of rows equal to one of their references, 0..1", True),
    "wer": MetricDescription(
        "word error rate of grapheme-to-phoneme conversion, where a row is a word: "
        "share of rows that equal none of their references, 0..1",
        False,
    ),
    "per": MetricDescription(
        "phoneme error rate: edits / phonemes of the closest reference, over all rows, from 0",
        False,
    ),
    "word_edit_rate": MetricDescription(
        "word error rate of sentences, as in speech recognition: "
        "edits / words of the closest reference, over all rows, from 0",
        False,
    ),
}

# Reported at every evaluation, from the loss and the logits; best models may be chosen by them.
LOSS_METRICS: dict[str, MetricDescription] = {
    "loss": MetricDescription("unsmoothed cross-entropy per target token", False),
    "perplexity": MetricDescription("exp(loss)", False),
    "token_accuracy": MetricDescription("share of target tokens predicted, teacher-forced", True),
}

_UNIONS = (typing.Union, types.UnionType)  # Optional[int] and int | None
_LATER_TASKS = ("classification", "language_model")
_NAME_PLACEHOLDER = "<recipe name>"
# How and where a run is made, not what it computes.
_KEYS_OUTSIDE_THE_RUN = (
    "threads",
    "data.num_proc",
    "training.output_dir",
    "training.overwrite",
    "training.resume_from_checkpoint",
)


def _setting(
    default: Any, text: str, *, minimum: float | None = None, is_path: bool = False
) -> Any:
    """A documented dataclass field."""
    metadata = {"text": text, "minimum": minimum, "is_path": is_path}
    if isinstance(default, tuple):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class TokenizerSettings:
    """Section `tokenizer`: how the joint vocabulary is trained."""

    kind: Literal["bpe", "word", "character", "regex"] = _setting(
        "bpe", "sub-words (bpe), whole words, characters, or words cut out by a regular expression"
    )
    vocab_size: int = _setting(8000, "entries at most, the four special tokens included", minimum=5)
    pattern: str | None = _setting(
        None, "regular expression whose matches are the words (kind: regex only)"
    )
    normalization: Literal["nfc", "nfkc", "nfd", "nfkd", "none"] = _setting(
        "nfc", "Unicode normal form of source and target"
    )
    lowercase: bool = _setting(False, "lower-case source and target")
    min_frequency: int | None = _setting(
        None,
        "occurrences that bring a merge (bpe; 2 if null) or a word (1 if null) into the vocabulary",
        minimum=1,
    )


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Section `data`: where the pairs come from, and how they are cut and batched."""

    train_file: str | None = _setting(
        None, "pairs to train on: .tsv, .csv or .jsonl, plain or .gz", is_path=True
    )
    validation_file: str | None = _setting(
        None,
        "pairs to validate on; without it a part of the training pairs is held out",
        is_path=True,
    )
    test_file: str | None = _setting(
        None, "pairs to test on; without it a part of the training pairs is held out", is_path=True
    )
    train_source_file: str | None = _setting(
        None, "source lines of parallel text files, one sentence a line", is_path=True
    )
    train_target_file: str | None = _setting(None, "their target lines", is_path=True)
    validation_source_file: str | None = _setting(None, "source lines to validate on", is_path=True)
    validation_target_file: str | None = _setting(None, "their target lines", is_path=True)
    test_source_file: str | None = _setting(None, "source lines to test on", is_path=True)
    test_target_file: str | None = _setting(None, "their target lines", is_path=True)
    dataset_name: str | None = _setting(
        None, "a dataset of the Hub, or its local folder", is_path=True
    )
    dataset_config_name: str | None = _setting(None, "that dataset's configuration")
    source_column: str = _setting("source", "column of the source text")
    target_column: str = _setting("target", "column of the target text")
    group_column: str | None = _setting(
        None, "rows with the same value here are never split between training and held-out rows"
    )
    generator: Literal["reverse", "cmudict"] | None = _setting(
        None, "pairs made on the spot: reversed digits, or words and their pronunciations"
    )
    seed: int = _setting(
        0, "of the generated pairs; training.seed leaves them as they are", minimum=0
    )
    merge_references: bool = _setting(
        False, "validation and test rows with the same source become one row with all references"
    )
    max_source_length: int | None = _setting(
        512,
        "tokens, </s> included (null: no limit); longer training pairs are dropped, others cut",
        minimum=2,
    )
    max_target_length: int | None = _setting(
        512,
        "tokens, </s> included (null: no limit); longer training pairs are dropped, others cut",
        minimum=2,
    )
    max_train_samples: int | None = _setting(
        None, "train on the first so many pairs; how many the generator reverse makes", minimum=1
    )
    max_tokens: int | None = _setting(
        None,
        "tokens in a process's micro-batch, rows x (longest source + longest target), padding "
        "included; the alternative to training.per_device_train_batch_size",
        minimum=4,
    )
    num_proc: int | None = _setting(None, "processes for preprocessing", minimum=1)


@dataclasses.dataclass(frozen=True)
class TrainingSettings:
    """Section `training`: this project's own keys, and the Trainer's in `arguments`."""

    output_dir: str = _setting(f"outputs/{_NAME_PLACEHOLDER}", "folder of the run", is_path=True)
    lr_scheduler_type: str = _setting(
        "linear", "noam (the paper's, Eq. 3, from d_model and warmup_steps) or one of the Trainer's"
    )
    average_last: int | None = _setting(
        None, "average the last so many checkpoints, kept if it validates better", minimum=1
    )
    average_best: int | None = _setting(
        None, "average the best so many checkpoints, kept if it validates better", minimum=1
    )
    early_stopping_patience: int | None = _setting(
        None, "evaluations without improvement after which training stops", minimum=1
    )
    overwrite: bool = _setting(False, "move an earlier run's folder aside and start anew")
    resume_from_checkpoint: bool | str = _setting(
        False, "continue from the last complete checkpoint, or from this one", is_path=True
    )
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_noam(self) -> bool:
        """Whether the learning rate follows the paper's schedule."""
        return self.lr_scheduler_type == "noam"

    def trainer_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `Seq2SeqTrainingArguments`, as far as the recipe decides them.

        The Noam schedule is not among the Trainer's: with it, `lr_scheduler_type` is left out.
        """
        arguments = {"output_dir": self.output_dir, **self.arguments}
        if not self.is_noam:
            arguments["lr_scheduler_type"] = self.lr_scheduler_type
        return arguments


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """Section `evaluation`: what is measured and shown."""

    metrics: list[str] = _setting(  # noqa: RUF009 - it makes a field with a default factory
        ("bleu", "chrf", "exact_match"), f"any of {', '.join(METRIC_DESCRIPTIONS)}"
    )
    num_sample_predictions: int = _setting(5, "predictions shown at the end of the run", minimum=0)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A checked recipe.

    `model` and `generation` hold what the recipe sets; the defaults of the other fields are those
    of `TinyTFMConfig` and `GenerationConfig`.
    """

    name: str = dataclasses.field(compare=False)
    tokenizer: TokenizerSettings
    data: DataSettings
    training: TrainingSettings
    evaluation: EvaluationSettings
    model: dict[str, Any]
    generation: dict[str, Any]
    task: Literal["seq2seq"] = _setting("seq2seq", "what is learned: target text from source text")
    threads: int | None = _setting(
        None,
        "CPU threads of a process; all cores divided by the local processes if null",
        minimum=1,
    )

    def to_dict(self) -> dict[str, Any]:
        """The resolved recipe as plain values; `load_recipe` reads the same recipe from it."""
        resolved: dict[str, Any] = {"task": self.task}
        if self.threads is not None:
            resolved["threads"] = self.threads
        for section in _SECTIONS:
            settings = getattr(self, section)
            if not dataclasses.is_dataclass(settings):
                resolved[section] = copy.deepcopy(settings)
                continue
            # null is worth a line only where it is not what a missing key means anyway.
            resolved[section] = {
                name: copy.deepcopy(getattr(settings, name))
                for name, key in _own_keys(section).items()
                if getattr(settings, name) is not None or key.default is not None
            }
        resolved["training"].update(copy.deepcopy(self.training.arguments))
        return resolved

    def to_yaml(self) -> str:
        """`to_dict` as a YAML document."""
        return yaml.dump(
            self.to_dict(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
        )

    def differences(self, other: Recipe) -> list[str]:
        """Dotted keys in which two recipes describe different runs.

        A key that is missing means its default. Where a run is kept, how it is started and how
        many processors work on it (`training.output_dir`, `training.overwrite`,
        `training.resume_from_checkpoint`, `threads`, `data.num_proc`) makes no difference.
        """
        mine, theirs = _dotted(self.to_dict()), _dotted(other.to_dict())
        return [
            key
            for key in dict.fromkeys((*mine, *theirs))
            if key not in _KEYS_OUTSIDE_THE_RUN
            and mine.get(key, _default(key)) != theirs.get(key, _default(key))
        ]

    def same_run(self, other: Recipe) -> bool:
        """Whether both recipes describe the same run, wherever it is kept."""
        return not self.differences(other)


_SECTIONS = ("model", "tokenizer", "data", "training", "generation", "evaluation")
_OPEN_SECTIONS = {"training": "Seq2SeqTrainingArguments", "generation": "GenerationConfig"}
_SETTINGS: dict[str, type] = {
    "tokenizer": TokenizerSettings,
    "data": DataSettings,
    "training": TrainingSettings,
    "evaluation": EvaluationSettings,
}


@dataclasses.dataclass(frozen=True)
class _Key:
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
_GENERATION_KEYS: dict[str, _Key] = {
    "num_beams": _Key(int, 1, "beams of the search; 1 is greedy", minimum=1),
    "length_penalty": _Key(
        float, 1.0, "exponent of the length by which a beam's score is divided; > 0 favours length"
    ),
    "early_stopping": _Key(
        bool | Literal["never"], False, "stop as soon as num_beams hypotheses are finished"
    ),
    "max_new_tokens": _Key(int, None, "tokens generated at most", minimum=1),
    "max_length": _Key(int, None, "the same, the start token included", minimum=2),
    "min_new_tokens": _Key(int, None, "tokens generated at least", minimum=0),
    "min_length": _Key(int, 0, "the same, the start token included", minimum=0),
    "do_sample": _Key(bool, False, "draw tokens instead of taking the best"),
    "temperature": _Key(float, 1.0, "divides the logits when drawing", minimum=0),
    "top_k": _Key(int, 50, "draw from the so many likeliest tokens", minimum=0),
    "top_p": _Key(float, 1.0, "draw from the likeliest tokens up to this probability", minimum=0),
    "repetition_penalty": _Key(float, 1.0, "divides the scores of tokens seen before", minimum=0),
    "no_repeat_ngram_size": _Key(int, 0, "n-grams of this size occur once at most", minimum=0),
    "use_cache": _Key(bool, True, "keep keys and values of earlier steps"),
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
_BY_LAUNCHER = "torchrun or accelerate launch sets it"
_OWN_BATCHES = "batches come from data.max_tokens or training.per_device_train_batch_size"
_EVALUATES_BY_TOKENS = "evaluation batches by tokens: data.max_tokens"
_SEVERAL_OUTPUTS = "the command keeps one prediction a row and nothing but its tokens"
# Valid names elsewhere, but not in a recipe: the reason, or what to write instead.
_REFUSED_KEYS: dict[str, str] = {
    "model.vocab_size": f"{_FROM_TOKENIZER}; limit it by tokenizer.vocab_size",
    **{
        f"{section}.{token}_token_id": _FROM_TOKENIZER
        for section in ("model", "generation")
        for token in ("pad", "bos", "eos", "unk", "sep", "decoder_start")
    },
    "model.is_encoder_decoder": "the task decides it",
    "model.is_decoder": "the task decides it",
    "model.num_labels": "task seq2seq has no classes",
    "model.input_feature_size": "task seq2seq reads tokens",
    "generation.num_return_sequences": _SEVERAL_OUTPUTS,
    "generation.return_dict_in_generate": _SEVERAL_OUTPUTS,
    "generation.output_scores": _SEVERAL_OUTPUTS,
    "generation.output_logits": _SEVERAL_OUTPUTS,
    "generation.output_attentions": _SEVERAL_OUTPUTS,
    "generation.output_hidden_states": _SEVERAL_OUTPUTS,
    "generation.transformers_version": _BY_COMMAND,
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
    "training.hub_token": "a recipe is published with its run; log in by `hf auth login`",
    "training.warmup_ratio": "write training.warmup_steps; below 1 it is a share of all updates",
    "training.evaluation_strategy": "write training.eval_strategy",
    "training.overwrite_output_dir": "write training.overwrite",
    "training.group_by_length": "write data.max_tokens, which batches pairs of similar length",
    "training.train_sampling_strategy": _OWN_BATCHES,
    "training.dataloader_drop_last": "no pair is ever left out",
    "training.auto_find_batch_size": _OWN_BATCHES,
    "training.per_device_eval_batch_size": _EVALUATES_BY_TOKENS,
    "training.eval_accumulation_steps": _EVALUATES_BY_TOKENS,
    "training.accelerator_config": _OWN_BATCHES,
    "training.no_cuda": "write training.use_cpu",
    "training.use_mps_device": "the device is found by itself; training.use_cpu keeps to the CPU",
    "training.logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR",
    "training.per_gpu_train_batch_size": "write training.per_device_train_batch_size",
    "training.per_gpu_eval_batch_size": _EVALUATES_BY_TOKENS,
    "training.adafactor": "write training.optim: adafactor",
    "training.split_batches": _OWN_BATCHES,
    "training.dispatch_batches": _OWN_BATCHES,
    "training.push_to_hub_token": "a recipe is published with its run; log in by `hf auth login`",
    "training.push_to_hub_model_id": "write training.hub_model_id",
}


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and check everything that can be checked without loading anything.

    Args:
        path: The YAML file. Its stem names the recipe.
        overrides: `section.key=value` each, the value in YAML; they win over the file, the later
            over the earlier. `null` takes a key back to its default.

    Returns:
        The resolved recipe.

    Raises:
        ValueError: Broken YAML (with the line), an unknown key (with the nearest valid one), a
            value of the wrong type or out of range, or keys that contradict each other.
        OSError: The file cannot be read.
    """
    path = Path(path)
    document = _read_yaml(path)
    texts = {}
    for override in overrides:
        key, text = _apply_override(document, override)
        texts[key] = text
    try:
        return _build_recipe(path.stem, document, texts)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def describe_keys() -> list[KeyDescription]:
    """Every key of a recipe with its type, default and meaning, in the order of `to_dict`.

    The Trainer's and GenerationConfig's further fields, which a recipe may also set, stand in one
    line each.
    """
    rows = [_describe(name, key) for name, key in _dataclass_keys(Recipe).items()]
    for section in _SECTIONS:
        keys = _section_keys(section) if section == "model" else _own_keys(section)
        rows += [
            _describe(f"{section}.{name}", key)
            for name, key in keys.items()
            if f"{section}.{name}" not in _REFUSED_KEYS
        ]
        if section in _OPEN_SECTIONS:
            others = f"any other field of transformers.{_OPEN_SECTIONS[section]}"
            rows.append(KeyDescription(f"{section}.*", "see there", None, others))
    return rows


class _Loader(yaml.SafeLoader):
    """Reads YAML by the 1.2 core schema, and refuses a mapping that has a key twice."""

    yaml_implicit_resolvers: typing.ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.composer.ComposerError(
                        None, None, f"the key {key.value!r} stands here twice", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return node

    def construct_core_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


class _Dumper(yaml.SafeDumper):
    """Quotes what YAML 1.1 or 1.2 would read as something else than text."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # Line ends of Unicode come back as spaces or \n from any style but the double-quoted.
        style = '"' if re.search("[\x85\u2028\u2029]", text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _teach_core_schema() -> None:
    """Register YAML 1.2's core schema with the loader and the dumper."""
    core_schema = {
        "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
        "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
        "float": (
            r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
            "-+.0123456789",
        ),
        "null": (r"~|null|Null|NULL|", "~nN\0"),
        "merge": (r"<<", "<"),
    }
    for tag, (pattern, first_characters) in core_schema.items():
        for yaml_class in (_Loader, _Dumper):
            # The empty scalar is looked up under "".
            yaml_class.add_implicit_resolver(
                f"tag:yaml.org,2002:{tag}",
                re.compile(rf"(?:{pattern})\Z"),
                [character.strip("\0") for character in first_characters],
            )
    _Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_core_int)
    _Dumper.add_representer(str, _Dumper.represent_text)


_teach_core_schema()


def _read_yaml(path: Path) -> dict[str, Any]:
    """The recipe's document as nested dicts."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name the recipe's .yaml file")
    if not path.exists():
        raise FileNotFoundError(f"the recipe {path} does not exist")
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: not UTF-8 ({error.reason})") from None
    try:
        document = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        raise ValueError(f"{where}: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(
            f"{path}, line {line}: the character U+{error.character:04X} is not allowed"
        ) from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ValueError(f"{path}: a recipe is a mapping of keys, not {document!r}")
    return document


def _apply_override(document: dict[str, Any], override: str) -> tuple[str, str]:
    """Write one `section.key=value` into the document; returns the key and the value's text."""
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise ValueError(f"the override {override!r} is not of the form section.key=value")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        value = text  # a regular expression, say: whether text fits here is checked with the types
    mapping = document
    for depth, part in enumerate(parts[:-1], start=1):
        if mapping.get(part) is None:
            mapping[part] = {}
        mapping = mapping[part]
        if not isinstance(mapping, dict):
            raise ValueError(
                f"the override {override!r} finds no keys below {'.'.join(parts[:depth])}, "
                f"which is {mapping!r}"
            )
    mapping[parts[-1]] = value
    return key, text


def _build_recipe(name: str, document: dict[str, Any], texts: Mapping[str, str]) -> Recipe:
    """Check the whole document.

    Args:
        name: The recipe's name.
        document: Nested dicts as read.
        texts: Dotted key -> the text of its override, before YAML gave it a type.
    """
    scalars = _dataclass_keys(Recipe)
    for key, value in document.items():
        if key not in scalars and key not in _SECTIONS:
            raise ValueError(_unknown_top_level_key(key, value, scalars))
    _check_task(document.get("task"))
    top = _check_values("", {key: document.get(key) for key in scalars}, scalars, texts)

    checked: dict[str, dict[str, Any]] = {}
    # The sections whose keys stand here come first: their typos show before any slow import.
    for section in ("tokenizer", "data", "evaluation", "generation", "model", "training"):
        content = document.get(section)
        if content is None:
            content = {}
        if not isinstance(content, dict):
            raise ValueError(f"{section}={content!r} must be a mapping of keys")
        for key, value in content.items():
            _refuse_unusable_key(section, key, value)
        checked[section] = _check_values(section, content, _section_keys(section), texts)

    recipe = Recipe(
        name=name,
        tokenizer=TokenizerSettings(**checked["tokenizer"]),
        data=DataSettings(**checked["data"]),
        training=_training_settings(name, checked["training"]),
        evaluation=EvaluationSettings(**checked["evaluation"]),
        model=checked["model"],
        generation=checked["generation"],
        **top,
    )
    _check_tokenizer(recipe.tokenizer)
    _check_data(recipe.data)
    _check_evaluation(recipe.evaluation)
    _check_generation(recipe.generation)
    _check_training(recipe.training)
    _check_model(recipe)
    _check_across_sections(recipe)
    arguments = {**recipe.training.arguments, **_model_selection(recipe)}
    training = dataclasses.replace(recipe.training, arguments=arguments)
    return dataclasses.replace(recipe, training=training)


def _training_settings(name: str, values: Mapping[str, Any]) -> TrainingSettings:
    """Sort the section's values into our own keys and the Trainer's."""
    own_keys = _own_keys("training")
    own = {key: value for key, value in values.items() if key in own_keys}
    output_dir = own.pop("output_dir", own_keys["output_dir"].default)
    return TrainingSettings(
        output_dir=output_dir.replace(_NAME_PLACEHOLDER, name),
        arguments={key: value for key, value in values.items() if key not in own_keys},
        **own,
    )


def _check_task(task: object) -> None:
    if task in _LATER_TASKS:
        raise ValueError(f"task={task} is not available yet; this version learns seq2seq")


def _check_values(
    section: str, values: Mapping[str, Any], keys: Mapping[str, _Key], texts: Mapping[str, str]
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


def _checked_value(dotted: str, value: Any, key: _Key, text: str | None) -> Any:
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
        raise ValueError(_wrong_choice(dotted, value, words))
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


def _wrong_type(dotted: str, value: Any, key: _Key) -> str:
    message = f"{dotted}={value!r} has the wrong type: it takes {_type_name(key.annotation)}"
    if isinstance(value, str) and _allows(True, key.annotation):
        return f"{message}, without quotes"
    if not isinstance(value, list | dict) and _takes_text(key.annotation):
        return f"{message}; put it in quotes"
    return message


def _wrong_choice(dotted: str, value: str, choices: Iterable[str]) -> str:
    return (
        f"{dotted}={value!r} is none of {', '.join(choices)}; "
        f"the nearest is {_nearest(value, choices)}"
    )


def _nearest(word: str, words: Iterable[str]) -> str:
    return difflib.get_close_matches(word, list(words), n=1, cutoff=0.0)[0]


def _unknown_top_level_key(key: Any, value: Any, scalars: Iterable[str]) -> str:
    if not isinstance(key, str):
        return f"{key!r} is not a key of a recipe: keys are text"
    for section in _SECTIONS:
        if key in _own_keys(section):
            return f"unknown key {key} (={value!r}); write it in its section: {section}.{key}"
    kind = "section" if isinstance(value, dict) else "key"
    nearest = _nearest(key, (*scalars, *_SECTIONS))
    return f"unknown {kind} {key} (={value!r}); the nearest valid one is {nearest}"


def _refuse_unusable_key(section: str, key: Any, value: Any) -> None:
    """Raise for a key that a section does not have, or not in a recipe."""
    if not isinstance(key, str):
        raise ValueError(f"{section}.{key!r} is not a key of a recipe: keys are text")
    dotted = f"{section}.{key}"
    if dotted in _REFUSED_KEYS:
        raise ValueError(f"{dotted}={value!r} cannot be set: {_REFUSED_KEYS[dotted]}")
    keys = _section_keys(section)
    if key in keys:
        return
    if section == "model" and key in _config_class().attribute_map:
        nearest = f"model.{_config_class().attribute_map[key]}"
    elif close := difflib.get_close_matches(key, keys, n=1, cutoff=0.75):
        nearest = f"{section}.{close[0]}"
    elif homes := [other for other in _SECTIONS if key in _section_keys(other)]:
        nearest = f"{homes[0]}.{key}"
    else:
        nearest = f"{section}.{_nearest(key, keys)}"
    raise ValueError(f"unknown key {dotted} (={value!r}); the nearest valid one is {nearest}")


@functools.cache
def _dataclass_keys(settings: type) -> dict[str, _Key]:
    """The documented fields of a settings class."""
    hints = typing.get_type_hints(settings)
    return {
        field.name: _Key(
            annotation=hints[field.name], default=_plain_default(field), **field.metadata
        )
        for field in dataclasses.fields(settings)
        if field.metadata
    }


def _own_keys(section: str) -> Mapping[str, _Key]:
    """The keys of a section that stand in this module."""
    if section == "generation":
        return _GENERATION_KEYS
    return _dataclass_keys(_SETTINGS[section]) if section in _SETTINGS else {}


@functools.cache
def _section_keys(section: str) -> dict[str, _Key]:
    """All keys of a section, those of transformers' classes and of `TinyTFMConfig` included."""
    inspected = {"model": _model_keys, "training": _training_keys, "generation": _generation_keys}
    return inspected[section]() if section in inspected else _dataclass_keys(_SETTINGS[section])


def _config_class() -> Any:
    """`TinyTFMConfig`, as the package registered it; this module may not import it."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING["tinytfm"]


def _model_keys() -> dict[str, _Key]:
    config_class = _config_class()
    constructor = config_class.__init__
    hints = typing.get_type_hints(constructor)
    texts = _documented_arguments(inspect.getdoc(config_class) or "")
    return {
        name: _Key(
            annotation=hints.get(name, Any), default=parameter.default, text=texts.get(name, "")
        )
        for name, parameter in inspect.signature(constructor).parameters.items()
        if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }


def _documented_arguments(docstring: str) -> dict[str, str]:
    """Argument -> text, from the `Args:` of a Google-style docstring."""
    _, _, block = docstring.partition("Args:\n")
    entries = re.finditer(
        r"^    (\w+)(?: \([^)]*\))?:(.*(?:\n {5,}.*)*)", block, flags=re.MULTILINE
    )
    return {entry[1]: " ".join(entry[2].split()) for entry in entries}


def _training_keys() -> dict[str, _Key]:
    from transformers import Seq2SeqTrainingArguments

    hints = typing.get_type_hints(Seq2SeqTrainingArguments)
    trainer_keys = {
        field.name: _Key(
            annotation=hints[field.name],
            default=_plain_default(field),
            minimum=_TRAINING_MINIMUMS.get(field.name),
        )
        for field in dataclasses.fields(Seq2SeqTrainingArguments)
    }
    own_keys = _dataclass_keys(TrainingSettings)
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


def _generation_keys() -> dict[str, _Key]:
    from transformers import GenerationConfig

    names = [name for name in GenerationConfig().to_dict() if not name.startswith("_")]
    return {**{name: _Key(Any) for name in names}, **_GENERATION_KEYS}


def _describe(dotted: str, key: _Key) -> KeyDescription:
    return KeyDescription(dotted, _type_name(key.annotation), key.default, key.text)


def _dotted(document: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's dict with one dotted key for every value."""
    flat = {}
    for key, value in document.items():
        if key in _SECTIONS:
            flat.update({f"{key}.{name}": item for name, item in value.items()})
        else:
            flat[key] = value
    return flat


def _default(dotted: str) -> Any:
    """What a missing key means."""
    section, _, name = dotted.rpartition(".")
    return (_section_keys(section) if section else _dataclass_keys(Recipe))[name].default


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


def _check_model(recipe: Recipe) -> None:
    """Builds the config, as far as it is known before there is a vocabulary."""
    try:
        _config_class()(vocab_size=max(recipe.tokenizer.vocab_size, 5), **recipe.model)
    except (TypeError, ValueError) as error:
        raise ValueError(f"model: {error}") from None


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
        for key in _own_keys("data"):
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


def _check_evaluation(evaluation: EvaluationSettings) -> None:
    for name in evaluation.metrics:
        if name in LOSS_METRICS:
            raise ValueError(f"evaluation.metrics: {name} is always reported and needs no entry")
        if name not in METRIC_DESCRIPTIONS:
            raise ValueError(_wrong_choice("evaluation.metrics", name, METRIC_DESCRIPTIONS))
    if len(set(evaluation.metrics)) < len(evaluation.metrics):
        raise ValueError(f"evaluation.metrics={evaluation.metrics!r} names a metric twice")


def _check_generation(generation: Mapping[str, Any]) -> None:
    from transformers import GenerationConfig

    for longer, shorter in (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length")):
        if generation.get(longer) is not None and generation.get(shorter) is not None:
            raise ValueError(
                f"generation.{longer}={generation[longer]} contradicts "
                f"generation.{shorter}={generation[shorter]}: keep one of the two"
            )
    try:
        GenerationConfig(**generation)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"generation={dict(generation)!r}: {error}") from None


def _check_training(training: TrainingSettings) -> None:
    arguments = training.trainer_arguments()
    keys = _section_keys("training")

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
    if effective("fp16") and effective("bf16"):
        raise ValueError("training.fp16=True contradicts training.bf16=True: keep one of the two")
    if effective("label_smoothing_factor") >= 1:
        raise ValueError(
            f"training.label_smoothing_factor={effective('label_smoothing_factor')} must be below 1"
        )
    if training.is_noam:
        _check_noam(training.arguments)
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
        if training.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
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


def _model_selection(recipe: Recipe) -> dict[str, Any]:
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
    known = LOSS_METRICS | {name: METRIC_DESCRIPTIONS[name] for name in recipe.evaluation.metrics}
    if name in METRIC_DESCRIPTIONS and name not in known:
        raise ValueError(
            f"training.metric_for_best_model={metric!r} is not measured: "
            f"add it to evaluation.metrics={recipe.evaluation.metrics!r}"
        )
    if name not in known:
        raise ValueError(_wrong_choice("training.metric_for_best_model", metric, known))
    greater_is_better = arguments.get("greater_is_better")
    if greater_is_better not in (None, known[name].higher_is_better):
        raise ValueError(
            f"training.greater_is_better={greater_is_better} contradicts "
            f"training.metric_for_best_model={metric!r} ({known[name].text}); set it to null"
        )
    return {"metric_for_best_model": metric, "greater_is_better": known[name].higher_is_better}


def _check_across_sections(recipe: Recipe) -> None:
    arguments, data = recipe.training.arguments, recipe.data
    batch_size = arguments.get("per_device_train_batch_size")
    if data.max_tokens is not None and batch_size:
        raise ValueError(
            f"training.per_device_train_batch_size={batch_size!r} contradicts data.max_tokens="
            f"{data.max_tokens}, which batches by itself: set one of the two to null"
        )
    keys = _section_keys("model")

    def effective(name: str) -> Any:
        return recipe.model.get(name, keys[name].default)

    if effective("position_embedding_type") == "learned":
        for key in ("max_source_length", "max_target_length"):
            limit = getattr(data, key)
            if limit is None or limit > effective("max_position_embeddings"):
                raise ValueError(
                    f"data.{key}={limit} is above the learned positions, "
                    f"model.max_position_embeddings={effective('max_position_embeddings')}"
                )
