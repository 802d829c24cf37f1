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
import os
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from .recipe_checks import check_recipe, model_selection
from .recipe_keys import (
    OPEN_SECTIONS,
    REFUSED_KEYS,
    SECTIONS,
    TRAINING_TEXTS,
    KeyDescription,
    check_values,
    dataclass_keys,
    describe,
    own_keys_of,
    refuse_unusable_key,
    section_keys,
    unknown_top_level_key,
)
from .settings import (
    NAME_PLACEHOLDER,
    TEXT_METRICS,
    DataSettings,
    EvaluationSettings,
    TokenizerSettings,
    TrainingSettings,
    setting,
)

RECIPE_FILE = "recipe.yaml"  # in the folder of a run

# How and where a run is made, not what it computes.
_KEYS_OUTSIDE_THE_RUN = (
    "threads",
    "data.num_proc",
    "training.output_dir",
    "training.overwrite",
    "training.resume_from_checkpoint",
    "training.push_to_hub",
    "training.hub_model_id",
    "training.hub_private_repo",
    "training.hub_revision",
    "training.hub_strategy",
)
# Where a folder and a name on the Hub look alike.
_KEYS_OF_THE_HUB = ("data.dataset_name", "model.from_pretrained")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


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
    task: Literal["seq2seq", "classification", "language_model"] = setting(
        "seq2seq",
        "what is learned: target text from source text, the class of a text or an image, "
        "or the next token of a text",
    )
    threads: int | None = setting(
        None,
        "CPU threads of a process; all cores divided by the local processes if null",
        minimum=1,
    )

    def to_dict(self) -> dict[str, Any]:
        """The resolved recipe as plain values; `load_recipe` reads the same recipe from it."""
        resolved: dict[str, Any] = {"task": self.task}
        if self.threads is not None:
            resolved["threads"] = self.threads
        for section in SECTIONS:
            settings = getattr(self, section)
            if not dataclasses.is_dataclass(settings):
                resolved[section] = copy.deepcopy(settings)
                continue
            # null is worth a line only where it is not what a missing key means anyway.
            resolved[section] = {
                name: copy.deepcopy(getattr(settings, name))
                for name, key in own_keys_of(section).items()
                if getattr(settings, name) is not None or key.default is not None
            }
        resolved["training"].update(copy.deepcopy(self.training.arguments))
        return resolved

    def to_yaml(self) -> str:
        """`to_dict` as a YAML document."""
        return yaml.dump(
            self.to_dict(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
        )

    def without_paths(self) -> Recipe:
        """The recipe as anybody may see it.

        Files and folders have their bare names. Where the run was kept and published is left out.
        """
        document = self.to_dict()
        for section in SECTIONS:
            for name, value in list(document[section].items()):
                if f"{section}.{name}" in _KEYS_OUTSIDE_THE_RUN:
                    del document[section][name]
                elif isinstance(value, str) and _is_path(section, name, value):
                    document[section][name] = Path(value).name
        return _build_recipe(self.name, document, {})

    def value(self, dotted: str) -> Any:
        """What a dotted key is set to, or its default."""
        return _dotted(self.to_dict()).get(dotted, _default(dotted))

    def differences(self, other: Recipe) -> list[str]:
        """Dotted keys in which two recipes describe different runs.

        A key that is missing means its default. Where a run is kept and published, how it is
        started and how many processors work on it (`training.output_dir`, `training.overwrite`,
        `training.resume_from_checkpoint`, `training.push_to_hub` and its like, `threads`,
        `data.num_proc`) makes no difference.
        """
        mine, theirs = _dotted(self.to_dict()), _dotted(other.to_dict())
        for flat in (mine, theirs):  # a folder that is gone has lost its ./
            flat |= {key: flat[key].removeprefix("./") for key in _KEYS_OF_THE_HUB if flat.get(key)}
        return [
            key
            for key in dict.fromkeys((*mine, *theirs))
            if key not in _KEYS_OUTSIDE_THE_RUN
            and mine.get(key, _default(key)) != theirs.get(key, _default(key))
        ]

    def same_run(self, other: Recipe) -> bool:
        """Whether both recipes describe the same run, wherever it is kept."""
        return not self.differences(other)


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
    """Every key of a recipe with its type, default and meaning, section by section.

    The Trainer's and GenerationConfig's further fields, which a recipe may also set, stand in one
    line each.
    """
    rows = [describe(name, key) for name, key in dataclass_keys(Recipe).items()]
    for section in SECTIONS:
        keys = section_keys(section)
        # This project's own first, then those of others, as far as they are explained here.
        names = dict.fromkeys((*own_keys_of(section), *TRAINING_TEXTS, *keys))
        rows += [
            describe(f"{section}.{name}", keys[name])
            for name in names
            if name in keys and keys[name].text and f"{section}.{name}" not in REFUSED_KEYS
        ]
        if section in OPEN_SECTIONS:
            others = f"any other field of transformers.{OPEN_SECTIONS[section]}"
            rows.append(KeyDescription(f"{section}.*", "see there", None, others))
    return rows


def _is_path(section: str, name: str, value: str) -> bool:
    """Whether a value names a file or folder of this machine."""
    key = section_keys(section).get(name)
    if key is None or not (key.is_path or section == "training"):
        return False
    if os.path.isabs(value) or value.startswith(("~", "./", "../")):
        return True
    if f"{section}.{name}" in _KEYS_OF_THE_HUB and _HUB_NAME.fullmatch(value):
        return False  # a folder would have got its ./ when the recipe was read
    return key.is_path


def _mark_folders(section: str, values: dict[str, Any]) -> None:
    """Puts ./ before a folder that looks like a name on the Hub: it may be gone when one asks."""
    for name, value in values.items():
        looks_alike = f"{section}.{name}" in _KEYS_OF_THE_HUB and _HUB_NAME.fullmatch(value or "")
        if looks_alike and os.path.exists(value):
            values[name] = f"./{value}"


def _dotted(document: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's dict with one dotted key for every value."""
    flat = {}
    for key, value in document.items():
        if key in SECTIONS:
            flat.update({f"{key}.{name}": item for name, item in value.items()})
        else:
            flat[key] = value
    return flat


def _default(dotted: str) -> Any:
    """What a missing key means."""
    section, _, name = dotted.rpartition(".")
    return (section_keys(section) if section else dataclass_keys(Recipe))[name].default


def _build_recipe(name: str, document: dict[str, Any], texts: Mapping[str, str]) -> Recipe:
    """Check the whole document.

    Args:
        name: The recipe's name.
        document: Nested dicts as read.
        texts: Dotted key -> the text of its override, before YAML gave it a type.
    """
    scalars = dataclass_keys(Recipe)
    for key, value in document.items():
        if key not in scalars and key not in SECTIONS:
            raise ValueError(unknown_top_level_key(key, value, scalars))
    top = check_values("", {key: document.get(key) for key in scalars}, scalars, texts)

    checked: dict[str, dict[str, Any]] = {}
    # The sections whose keys stand here come first: their typos show before any slow import.
    for section in ("tokenizer", "data", "evaluation", "generation", "model", "training"):
        content = document.get(section)
        if content is None:
            content = {}
        if not isinstance(content, dict):
            raise ValueError(f"{section}={content!r} must be a mapping of keys")
        for key, value in content.items():
            refuse_unusable_key(section, key, value)
        checked[section] = check_values(section, content, section_keys(section), texts)
        _mark_folders(section, checked[section])

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
    if recipe.evaluation.metrics is None:
        metrics = list(TEXT_METRICS) if recipe.task == "seq2seq" else []
        evaluation = dataclasses.replace(recipe.evaluation, metrics=metrics)
        recipe = dataclasses.replace(recipe, evaluation=evaluation)
    check_recipe(recipe)
    arguments = {**recipe.training.arguments, **model_selection(recipe)}
    training = dataclasses.replace(recipe.training, arguments=arguments)
    return dataclasses.replace(recipe, training=training)


def _training_settings(name: str, values: Mapping[str, Any]) -> TrainingSettings:
    """Sort the section's values into our own keys and the Trainer's."""
    own_keys = own_keys_of("training")
    own = {key: value for key, value in values.items() if key in own_keys}
    output_dir = own.pop("output_dir", own_keys["output_dir"].default)
    return TrainingSettings(
        output_dir=output_dir.replace(NAME_PLACEHOLDER, name),
        arguments={key: value for key, value in values.items() if key not in own_keys},
        **own,
    )


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
