"""The model card: what a folder tells about its model, for those who find it on the Hub.

Everything on it comes from the files of the folder itself. What they do not tell is left out.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors import safe_open
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from .configuration_tinytfm import TinyTFMConfig
from .reading import one_line
from .recipes import RECIPE_FILE, Recipe, load_recipe
from .run_folder import CURVES_FILE, PREDICTIONS_FILE, RESULTS_FILE, RUN_FILE
from .settings import LOSS_METRICS, METRIC_DESCRIPTIONS
from .tokenization import TOKENIZER_FILES
from .translation import whole_file

CARD_FILE = "README.md"

_MARK = "Written by modeling_tinytfm, and written anew for as long as nobody edits it"
_MARK_LINE = re.compile(rf"<!-- {_MARK}: (\w+) -->\n")
# What the Hub and `evaluate` call our metrics, and how a person reads them.
_HUB_METRICS = {
    "bleu": ("bleu", "BLEU"),
    "tokenized_bleu": ("bleu", "BLEU of tokenised text"),
    "chrf": ("chrf", "chrF2"),
    "ter": ("ter", "TER"),
    "exact_match": ("exact_match", "Exact match"),
    "wer": ("wer", "WER, a row being a word"),
    "per": ("per", "PER"),
    "word_edit_rate": ("wer", "WER"),
    "perplexity": ("perplexity", "Perplexity"),
    "token_accuracy": ("accuracy", "Token accuracy"),
    "accuracy": ("accuracy", "Accuracy"),
    "macro_f1": ("f1", "Macro F1"),
    "bits_per_character": ("bits_per_character", "Bits per character"),
}
_GENERATED_DATA = {
    "reverse": "strings of digits and their reversals, generated",
    "cmudict": "CMU Pronouncing Dictionary",
}
# ISO 639-1. A data set's columns that are named so are taken for languages.
_LANGUAGES = frozenset(
    """aa ab ae af ak am an ar as av ay az ba be bg bi bm bn bo br bs ca ce ch co cr cs cu cv cy da
    de dv dz ee el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz
    ia id ie ig ii ik io is it iu ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln
    lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no nr nv ny oc oj om or os pa pi
    pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw ta te tg th ti
    tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu""".split()  # noqa: SIM905
)


def write_card(folder: str | Path, name: str | None = None, **choices: Any) -> bool:
    """Writes `README.md` into a model's folder, unless a person wrote or edited the one there.

    Args:
        folder: Holds the model.
        name: What the snippets load; the folder itself if None.
        **choices: See `make_card`.

    Returns:
        Whether it was written.
    """
    file = Path(folder) / CARD_FILE
    if file.is_file() and not is_generated(file.read_text(encoding="utf-8")):
        return False
    text = make_card(folder, name, **choices)
    with whole_file(file) as stream:
        stream.write(text)
    return True


def is_generated(card: str) -> bool:
    """Whether a card is as `make_card` made it, untouched since."""
    mark = _MARK_LINE.search(card.replace("\r\n", "\n"))
    return mark is not None and mark[1] == _digest(card)


def _digest(card: str) -> str:
    text = _MARK_LINE.sub("", card.replace("\r\n", "\n"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_card(
    folder: str | Path,
    name: str | None = None,
    *,
    revision: str | None = None,
    license: str | None = None,
    languages: Sequence[str] = (),
) -> str:
    """The text of a model card, with its metadata.

    Args:
        folder: Holds the model and, if training left them, recipe, scores and facts of the run.
        name: What the snippets load; the folder itself if None.
        revision: The branch that the snippets load; the main one if None.
        license: The weights' licence as the Hub calls it; none is stated if None, but what an
            earlier card in the folder states stays.
        languages: Codes of the languages, the source's first; those that the data's columns are
            named after if empty, but what an earlier card states stays.

    Raises:
        ValueError: If something in the folder cannot be read, or does not fit together.
        OSError: If there is no model.
    """
    facts = read_facts(folder)
    shown = _shown_path(Path(folder)) if name is None else name
    before = facts.earlier_card
    license = license or before.get("license")
    languages = list(languages or before.get("language") or facts.languages())
    start = facts.start() or ""
    title = shown.rstrip("/").rpartition("/")[2]
    data = ModelCardData(
        language=languages or None,
        license=license,
        base_model=start if "/" in start else None,
        library_name="transformers",
        pipeline_tag=facts.pipeline_tag(languages),
        tags=["tinytfm"],
        datasets=facts.hub_dataset(),
        metrics=facts.hub_metrics() or None,
        model_name=title,
        eval_results=facts.eval_results(languages) or None,
    )
    if data.eval_results is None:
        data.pop("model_name")
    parts = [
        f"# {title}",
        facts.summary(languages),
        *_how_to_use(shown, facts, revision),
        *_results(facts),
        *_training(facts),
        "## Limits",
        "\n".join(f"- {limit}" for limit in facts.limits()),
        "## Licence",
        "The two Python files are Apache-2.0. "
        + (
            f"The weights: {license}."
            if license
            else "No licence of the weights is stated: ask whoever published them."
        ),
    ]
    body = "\n\n".join(parts) + "\n"
    text = f"---\n{data.to_yaml()}\n---\n\n{body}"
    mark = f"<!-- {_MARK}: {_digest(text)} -->\n"
    return f"---\n{data.to_yaml()}\n---\n\n{mark}{body}"


def _shown_path(folder: Path) -> str:
    """A folder as somebody here can name it, without where it lies on this machine."""
    absolute, here = folder.absolute(), Path.cwd()
    inside = absolute.is_relative_to(here) and absolute != here
    return absolute.relative_to(here).as_posix() if inside else absolute.name


@dataclass(frozen=True)
class Facts:
    """What the files of a folder tell.

    Attributes:
        config: The model's.
        generation: How it generates.
        parameters: Number of weights, shared ones counted once.
        has_tokenizer: Whether a tokenizer lies beside it.
        recipe: What trained it, without the paths of the machine that did.
        results: Scores, as `all_results.json` holds them.
        run: Hardware, versions and data, as `run.json` holds them.
        example: A source from the test set and the model's output.
        has_curves: Whether there is a picture of the training.
        earlier_card: Metadata of the card that lies there.
    """

    config: TinyTFMConfig
    generation: GenerationConfig
    parameters: int
    has_tokenizer: bool
    recipe: Recipe | None
    results: dict[str, Any]
    run: dict[str, Any]
    example: tuple[str, str] | None
    has_curves: bool
    earlier_card: dict[str, Any]

    def head(self) -> str:
        """The Auto class that loads the model with its head."""
        if self.config.is_encoder_decoder:
            return "AutoModelForSeq2SeqLM"
        if self.config.is_decoder:
            return "AutoModelForCausalLM"
        return "AutoModelForSequenceClassification"

    def pipeline_tag(self, languages: Sequence[str]) -> str | None:
        """The Hub's name of the task; None where it has none."""
        if self.config.is_encoder_decoder:
            if self.config.input_feature_size:
                return None
            return "translation" if len(languages) > 1 else "text2text-generation"
        if self.config.is_decoder:
            return "text-generation"
        if not self.config.input_feature_size:
            return "text-classification"
        reads_images = self.recipe is not None and self.recipe.data.image_column is not None
        return "image-classification" if reads_images else None

    def languages(self) -> list[str]:
        """Source and target language, if the data's columns are named after them."""
        if self.recipe is None:
            return []
        columns = (self.recipe.data.source_column, self.recipe.data.target_column)
        codes = [column.rpartition(".")[2] for column in columns]
        return codes if set(codes) <= _LANGUAGES and len(set(codes)) == 2 else []

    def start(self) -> str | None:
        """The model that training began from; None if it began from scratch."""
        return None if self.recipe is None else self.recipe.model.get("from_pretrained")

    def hub_dataset(self) -> list[str] | None:
        """The data set of the Hub that trained the model, if one did."""
        name = None if self.recipe is None else self.recipe.data.dataset_name
        return [name] if name is not None and "/" in name else None

    def data_name(self) -> str:
        """The data in a few words."""
        if self.recipe is None:
            return "unknown data"
        data = self.recipe.data
        if data.generator is not None:
            return _GENERATED_DATA[data.generator]
        if data.dataset_name is not None:
            config = f" ({data.dataset_config_name})" if data.dataset_config_name else ""
            return f"{data.dataset_name}{config}"
        files = (data.train_file, data.train_source_file, data.train_target_file)
        return " and ".join(file for file in files if file is not None) or "unknown data"

    def metric_names(self) -> list[str]:
        """The metrics that the test set was scored by, the loss aside."""
        known = dict.fromkeys((*METRIC_DESCRIPTIONS, *LOSS_METRICS))
        return [name for name in known if name != "loss" and f"test_{name}" in self.results]

    def hub_metrics(self) -> list[str]:
        """The Hub's names of these metrics."""
        names = [_HUB_METRICS.get(name, (name,))[0] for name in self.metric_names()]
        return list(dict.fromkeys(names))

    def eval_results(self, languages: Sequence[str]) -> list[EvalResult]:
        """The scores of the test set as the Hub shows them."""
        if self.recipe is None:
            return []
        data = self.recipe.data
        dataset = data.dataset_name or data.generator or data.test_file or data.train_file
        results = []
        for name in self.metric_names():
            kind, reading = _HUB_METRICS.get(name, (name, name))
            signature = self.results.get(f"test_{name}_signature")
            results.append(
                EvalResult(
                    task_type=self.pipeline_tag(languages) or "other",
                    dataset_type=dataset or data.test_source_file or self.data_name(),
                    dataset_name=self.data_name(),
                    dataset_config=data.dataset_config_name,
                    dataset_split="test",
                    metric_type=kind,
                    metric_name=reading,
                    metric_value=round(self.results[f"test_{name}"], 4),
                    metric_args=None if signature is None else {"signature": signature},
                )
            )
        return results

    def summary(self, languages: Sequence[str]) -> str:
        """What the model is, in a sentence or two."""
        config = self.config
        order = "Pre-Norm" if config.norm_first else "Post-Norm"
        paper = "[*Attention Is All You Need*](https://arxiv.org/abs/1706.03762)"
        if config.is_encoder_decoder:
            task = "turns a source text into a target text"
            if len(languages) > 1:
                task = f"translates {languages[0]} to {' and '.join(languages[1:])}"
            shape = f"encoder and decoder, {config.encoder_layers} + {config.decoder_layers} layers"
        elif config.is_decoder:
            task, shape = "continues a text", f"decoder only, {config.decoder_layers} layers"
        else:
            task = f"tells {config.num_labels} classes apart"
            shape = f"encoder only, {config.encoder_layers} layers"
        if config.input_feature_size:
            what = f"{config.input_feature_size} numbers a step"
        else:
            what = f"a vocabulary of {config.vocab_size:,} tokens"
        return (
            f"A Transformer that {task}: the model of {paper} ({order}; {shape}, d_model "
            f"{config.d_model}), with {self.parameters:,} parameters and {what}."
        )

    def limits(self) -> Iterator[str]:
        """What a reader should not expect."""
        if self.recipe is None:
            yield "How it was trained is not recorded here."
        else:
            yield (
                f"It has seen nothing but its training data ({self.data_name()}): on other kinds "
                "of input it will do worse, and it repeats what is wrong in them."
            )
            if any(name.startswith("test_") for name in self.results):
                seed = self.recipe.training.arguments.get("seed", 42)
                yield f"The scores are those of one run (seed {seed}) on one test set."
            data = self.recipe.data
            if self.config.is_encoder_decoder and data.max_source_length:
                yield (
                    f"It has seen no source of more than {data.max_source_length} tokens; what it "
                    "does with longer ones is not known."
                )
        if self.config.position_embedding_type == "learned":
            yield f"More than {self.config.max_position_embeddings} positions are refused."
        if self.config.is_encoder_decoder and self.generation.max_new_tokens:
            yield (
                f"Outputs end after {self.generation.max_new_tokens} tokens unless "
                "`max_new_tokens` says otherwise."
            )
        if getattr(self.generation, "length_penalty_form", None) == "gnmt":
            yield (
                "The scores are of beams ranked by ((5 + length) / 6)^alpha, as modeling_tinytfm's "
                "`translate` ranks them; `generate()` knows length^alpha alone."
            )
        yield "Attention weights show where a head looked, not why the model decided."


def read_facts(folder: str | Path) -> Facts:
    """Reads what a folder tells.

    Raises:
        ValueError: If a file in it cannot be read, or it holds another kind of model.
        OSError: If there is no model.
    """
    folder = Path(folder)
    config = TinyTFMConfig.from_pretrained(folder)
    generation = GenerationConfig()
    if (folder / GENERATION_CONFIG_NAME).is_file():
        generation = GenerationConfig.from_pretrained(folder)
    recipe = None
    if (folder / RECIPE_FILE).is_file():
        recipe = load_recipe(folder / RECIPE_FILE).without_paths()
    earlier: dict[str, Any] = {}
    if (folder / CARD_FILE).is_file():
        try:
            card = ModelCard.load(folder / CARD_FILE, ignore_metadata_errors=True)
        except yaml.YAMLError as error:
            where = folder / CARD_FILE
            raise ValueError(f"{where}: no YAML above its text: {one_line(error)}") from None
        earlier = card.data.to_dict()
    codes = earlier.pop("language", None)
    if codes is not None:  # YAML takes an unquoted no, Norwegian, for false
        codes = codes if isinstance(codes, list) else [codes]
        earlier["language"] = ["no" if code is False else str(code) for code in codes]
    return Facts(
        config=config,
        generation=generation,
        parameters=_count_parameters(folder),
        has_tokenizer=(folder / TOKENIZER_FILES[1]).is_file(),
        recipe=recipe,
        results=_read_json(folder / RESULTS_FILE),
        run=_read_json(folder / RUN_FILE),
        example=_find_example(folder / PREDICTIONS_FILE),
        has_curves=(folder / CURVES_FILE).is_file(),
        earlier_card=earlier,
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error


def _count_parameters(folder: Path) -> int:
    count = 0
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, "pt") as weights:
            names = weights.keys()
            count += sum(prod(weights.get_slice(name).get_shape()) for name in names)
    return count


def _find_example(predictions: Path) -> tuple[str, str] | None:
    """The first test source that fits on a line of code, with what the model made of it."""
    if not predictions.is_file():
        return None
    with predictions.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            texts = (row.get("source"), row.get("prediction"))
            if all(isinstance(text, str) and 0 < len(text) <= 60 for text in texts) and not any(
                re.search(r"[`\\\x00-\x1f\x7f-\x9f\u2028\u2029]", text) for text in texts
            ):
                return texts
    return None


# The parts of the card


def loading_lines(name: str, facts: Facts, revision: str | None = None) -> list[str]:
    """The lines of Python that load a model and, if it has one, its tokenizer."""
    options = "trust_remote_code=True"
    if revision is not None:
        options = f"revision={_quoted(revision)}, {options}"
    head = facts.head()
    lines = [f"from transformers import {head}"]
    if facts.has_tokenizer:
        lines = [f"from transformers import {head}, AutoTokenizer"]
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({_quoted(name)}, {options})")
    lines.append(f"model = {head}.from_pretrained({_quoted(name)}, {options})")
    return lines


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _how_to_use(name: str, facts: Facts, revision: str | None) -> Iterator[str]:
    config = facts.config
    source, output = facts.example or ("Hello.", None)
    shown = "" if output is None else f"  # {output}"
    imports, *loading = loading_lines(name, facts, revision)
    limit = facts.generation.max_new_tokens or facts.generation.max_length
    result = "model.generate(**batch)"
    if config.is_decoder and not config.is_encoder_decoder:
        shown = ""
        result = "model.generate(**batch, max_new_tokens=40)"
    elif limit in (None, 20):  # what transformers falls back to
        result = "model.generate(**batch, max_new_tokens=200)"
    if config.input_feature_size:
        size = config.input_feature_size
        pixels = f"torch.randint(256, (1, 28, {size}))"  # of any number of rows
        batch = (
            f'batch = {{"input_features": {pixels} / 255}}'
            "  # in place of your image: its rows of grey pixels, from 0 to 1"
        )
    elif facts.has_tokenizer:
        batch = f'batch = tokenizer([{_quoted(source)}], return_tensors="pt", padding=True)'
    else:
        eos = config.eos_token_id
        batch = f'batch = {{"input_ids": torch.tensor([[5, 6, {eos}]])}}  # without a tokenizer'
    needs_torch = "torch." in batch
    if facts.head() == "AutoModelForSequenceClassification":
        prints = f"print(model.config.id2label[model(**batch).logits.argmax(-1).item()]){shown}"
    elif facts.has_tokenizer:
        prints = f"print(tokenizer.batch_decode({result}, skip_special_tokens=True)){shown}"
    else:
        prints = f"print({result})"

    yield "## How to use it"
    yield "With nothing but transformers (4.57 or 5) and torch; two Python files come along:"
    yield _fenced("python", ["import torch"] * needs_torch + [imports, "", *loading, batch, prints])
    plain = [line.replace("trust_remote_code=True", "trust_remote_code=False") for line in loading]
    yield "With the package `modeling_tinytfm` installed, no code of this repository is run:"
    if config.is_encoder_decoder and facts.has_tokenizer and not config.input_feature_size:
        prints = f"print(modeling_tinytfm.translate(model, tokenizer, [{_quoted(source)}])){shown}"
        yield _fenced("python", [imports, "", "import modeling_tinytfm", "", *plain, prints])
        if revision is None:
            yield "Or on the command line, in a checkout of that project:"
            text = f"echo {shlex.quote(source)} | python scripts/translate.py {shlex.quote(name)}"
            yield _fenced("bash", [text])
    else:
        first = ["import torch"] * needs_torch + [imports, "", "import modeling_tinytfm", ""]
        yield _fenced("python", [*first, *plain, batch, prints])


def _fenced(language: str, lines: Sequence[str]) -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def _results(facts: Facts) -> Iterator[str]:
    names = ["loss", *facts.metric_names()]
    known = {**LOSS_METRICS, **METRIC_DESCRIPTIONS}
    rows = []
    for name in names:
        validation, test = (facts.results.get(f"{split}_{name}") for split in ("eval", "test"))
        if test is not None:
            reading = _HUB_METRICS.get(name, (name, name))[1]
            seen = "" if validation is None else f"{validation:.4g}"
            rows.append(f"| {reading} | {seen} | {test:.4g} | {known[name].text} |")
    if not rows:
        return
    yield "## Results"
    yield "\n".join(["| | validation | test | |", "|---|---|---|---|", *rows])
    sizes = [facts.results.get(f"{split}_samples") for split in ("eval", "test")]
    if all(sizes):
        yield f"{sizes[0]:,} rows of validation data, {sizes[1]:,} rows of test data."
    if facts.config.is_encoder_decoder and not facts.config.input_feature_size:
        beams = facts.generation.num_beams or 1
        yield f"Outputs were searched for with {beams} beams." if beams > 1 else "Greedy outputs."
    signatures = [
        f"- {_HUB_METRICS.get(name, (name, name))[1]}: `{text}`"
        for name in names
        if (text := facts.results.get(f"test_{name}_signature")) is not None
    ]
    if signatures:
        yield "\n".join(["Signatures:", "", *signatures])


def _training(facts: Facts) -> Iterator[str]:
    recipe, run = facts.recipe, facts.run
    rows = []
    if recipe is not None:
        training, data = recipe.training, recipe.data
        chosen = training.arguments
        rows.append(("begun from", facts.start() or "scratch"))
        rows.append(("data", facts.data_name()))
        rows += [(f"{split} data", text) for split, text in run.get("data", {}).items()]
        if data.max_tokens is not None:
            batch = f"up to {data.max_tokens:,} tokens, source and target, padding included"
        else:
            batch = f"{chosen.get('per_device_train_batch_size', 8)} rows"
        accumulated = chosen.get("gradient_accumulation_steps", 1)
        processes = run.get("processes", 1)
        rows.append(("batch", f"{batch}; x {accumulated} accumulated x {processes} processes"))
        rows.append(("learning rate", training.describe_schedule()))
        if smoothing := chosen.get("label_smoothing_factor"):
            rows.append(("label smoothing", f"{smoothing}"))
    if "updates" in run:
        rows.append(("updates", f"{run['updates']:,}"))
    seconds, resumed = run.get("training_seconds"), "over all times it was resumed"
    if seconds is None:
        seconds, resumed = facts.results.get("train_runtime"), "since it was last resumed"
    if seconds is not None:
        resumed = f", {resumed}" if run.get("resumed") else ""
        rows.append(("time", f"{_duration(seconds)}{resumed}, evaluation included"))
    if "hardware" in run:
        rows.append(("hardware", f"{run['hardware']}; {run['precision']}"))
    if "versions" in run:
        rows.append(("versions", ", ".join(f"{k} {v}" for k, v in run["versions"].items())))
    if not rows:
        return
    yield "## Training"
    yield "\n".join(["| | |", "|---|---|", *(f"| {name} | {_cell(text)} |" for name, text in rows)])
    if recipe is not None:
        yield (
            f"All settings are in [`{RECIPE_FILE}`]({RECIPE_FILE}); with the data beside it, "
            f"`python scripts/train.py {RECIPE_FILE}` of modeling_tinytfm repeats the run."
        )
    if facts.has_curves:
        yield f"![Loss and scores over the updates]({CURVES_FILE})"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
