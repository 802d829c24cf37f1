"""Tests of modeling_tinytfm.classification: classes of texts and of images, through a recipe."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
import yaml
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as Picture
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from modeling_tinytfm.classification import (
    ImageCollator,
    class_name,
    grey_pixels,
    load_images,
    moved,
    natural_order,
    read_images,
)
from modeling_tinytfm.experiment import prepare, run_recipe
from modeling_tinytfm.loading import load_translator
from modeling_tinytfm.metrics import class_scores
from modeling_tinytfm.recipes import load_recipe
from modeling_tinytfm.scoring import score_model

SMALL = {
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "dropout": 0.0,
}
TRAINING = {
    "num_train_epochs": 8,
    "learning_rate": 0.01,
    "logging_steps": 10,
    "disable_tqdm": True,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "load_best_model_at_end": True,
    "metric_for_best_model": "accuracy",
    "report_to": "none",
}


OTHER_FOLDER = "training.output_dir=outputs/other"

pytestmark = pytest.mark.usefixtures("workplace")


def recipe(data: dict, *overrides: str):
    document = {"task": "classification", "threads": 1, "model": SMALL, "training": TRAINING}
    document |= {"data": data}
    if "image_column" not in data:
        document["tokenizer"] = {"kind": "word", "vocab_size": 60}
    Path("tiny.yaml").write_text(yaml.safe_dump(document))
    return load_recipe("tiny.yaml", overrides)


def texts(count: int = 200) -> list[dict[str, str]]:
    """A text is "even" unless it holds a 3 or a 5."""
    generator = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        digits = generator.integers(10, size=generator.choice([3, 5, 7]))
        kind = "odd" if {3, 5} & set(digits.tolist()) else "even"
        rows.append({"text": " ".join(map(str, digits)), "label": kind})
    return rows


def write_texts(path: str = "texts.jsonl") -> str:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in texts()))
    return path


def images(count: int = 200) -> dict[str, np.ndarray]:
    """Class 0 is bright above, class 1 below."""
    generator = np.random.default_rng(0)
    labels = generator.integers(2, size=count)
    pixels = generator.integers(60, size=(count, 6, 4))
    pixels[labels == 0, :3] += 150
    pixels[labels == 1, 3:] += 150
    return {"images": pixels.astype(np.uint8), "labels": labels.astype(np.uint8)}


IMAGES = {"train_file": "digits.npz", "image_column": "images", "label_column": "labels"}


def predicted(folder: str) -> list[dict]:
    lines = Path(folder, "predictions_test.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_texts_are_classified_and_the_folder_loads_elsewhere():
    said: list[str] = []
    scores = run_recipe(recipe({"train_file": write_texts(), "max_tokens": 256}), said.append)
    assert scores["test_accuracy"] >= 0.9
    rows = predicted("outputs/tiny")
    assert len(rows) == scores["test_samples"]
    wanted = {row["text"]: row["label"] for row in texts()}
    assert all(row["label"] == wanted[row["source"]] for row in rows)
    right = [row["prediction"] == row["label"] for row in rows]
    assert scores["test_accuracy"] == pytest.approx(np.mean(right))
    assert f"{rows[0]['source']}  ->  {rows[0]['prediction']} (" in said[-1]
    assert "classes:      2: even, odd" in "\n".join(said)

    # What the folder alone gives, with nothing of this package's Trainer.
    model = AutoModelForSequenceClassification.from_pretrained("outputs/tiny").eval()
    tokenizer = AutoTokenizer.from_pretrained("outputs/tiny")
    assert model.config.id2label == {0: "even", 1: "odd"}
    for row in rows:  # one at a time: padding changes nothing
        chances = model(**tokenizer(row["source"], return_tensors="pt")).logits[0].softmax(-1)
        assert model.config.id2label[int(chances.argmax())] == row["prediction"]
        assert chances.max().item() == pytest.approx(row["probability"], abs=1e-4)
    labels = [model.config.label2id[row["label"]] for row in rows]
    logits = [model(**tokenizer(row["source"], return_tensors="pt")).logits[0] for row in rows]
    loss = F.cross_entropy(torch.stack(logits), torch.tensor(labels))
    assert scores["test_loss"] == pytest.approx(loss.item(), rel=1e-4)


def test_scoring_again_gives_the_same_figures_also_of_a_file():
    scores = run_recipe(recipe({"train_file": write_texts()}, "training.num_train_epochs=2"))
    again = score_model("outputs/tiny")
    assert again["test_loss"] == pytest.approx(scores["test_loss"], rel=1e-5)
    assert again["test_macro_f1"] == scores["test_macro_f1"]
    of_file = score_model("outputs/tiny", file="texts.jsonl")
    assert 0 < of_file["file_accuracy"] <= 1
    rows = predicted("outputs/tiny")
    Path("few.jsonl").write_text(
        "".join(
            json.dumps({"text": row["source"], "label": row["prediction"]}) + "\n" for row in rows
        )
    )
    assert score_model("outputs/tiny", file="few.jsonl")["file_accuracy"] == 1


def test_images_are_classified_by_their_rows():
    np.savez("digits.npz", **images())
    said: list[str] = []
    chosen = recipe(IMAGES, "training.per_device_train_batch_size=16", "data.image_shift=1")
    scores = run_recipe(chosen, said.append)
    assert scores["test_accuracy"] >= 0.9
    # By position: 160 to train on, the next 20 to validate, the last 20 to test.
    assert "train:        160 examples; 40 held out for other splits" in said[0]
    rows = predicted("outputs/tiny")
    assert [row["label"] for row in rows] == [str(label) for label in images()["labels"][180:]]
    model = AutoModelForSequenceClassification.from_pretrained("outputs/tiny").eval()
    features = torch.from_numpy(images()["images"][180:]).float() / 255
    chances = model(input_features=features).logits.softmax(-1)
    assert [model.config.id2label[int(n)] for n in chances.argmax(-1)] == [
        row["prediction"] for row in rows
    ]
    assert not Path("outputs/tiny/tokenizer.json").exists()
    assert score_model("outputs/tiny")["test_loss"] == pytest.approx(scores["test_loss"], rel=1e-5)


def test_smoothing_is_for_training_alone_and_as_the_formula_says():
    np.savez("digits.npz", **images(40))
    trainer = prepare(recipe(IMAGES, "training.label_smoothing_factor=0.2")).trainer
    batch = trainer.data_collator([trainer.train_dataset[row] for row in range(8)])
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, dict(batch))
    log_p = trainer.model(input_features=batch["input_features"]).logits.log_softmax(-1)
    nll = -log_p.gather(1, batch["labels"][:, None])[:, 0]
    expected = (0.8 * nll - 0.2 * log_p.mean(-1)).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    trainer.model.eval()
    plain = trainer.compute_loss(trainer.model, dict(batch))
    assert plain.item() == pytest.approx(nll.mean().item(), rel=1e-4)


@pytest.mark.parametrize(
    "saving",
    [
        (),
        ("training.save_strategy=steps", "training.save_steps=7"),
        (
            "training.save_strategy=steps",
            "training.save_steps=7",
            "training.dataloader_num_workers=1",
        ),
    ],
    ids=["epoch", "between", "worker"],
)
def test_a_run_that_is_resumed_ends_as_if_it_had_never_stopped(saving):
    np.savez("digits.npz", **images())
    chosen = ("training.num_train_epochs=2", "data.image_shift=1", *saving)
    if saving:
        chosen += ("training.load_best_model_at_end=false",)
    whole = run_recipe(recipe(IMAGES, *chosen))
    last = max(Path("outputs/tiny").glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
    first = min(Path("outputs/tiny").glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
    assert first != last
    again = run_recipe(
        recipe(
            IMAGES, *chosen, "training.output_dir=again", f"training.resume_from_checkpoint={first}"
        )
    )
    assert again["test_loss"] == whole["test_loss"]
    assert again["eval_loss"] == whole["eval_loss"]


def test_an_average_of_checkpoints_is_a_classifier():
    from modeling_tinytfm.checkpoints import save_average

    np.savez("digits.npz", **images(60))
    run_recipe(recipe(IMAGES, "training.num_train_epochs=2"))
    save_average(Path("outputs/tiny"), Path("mean"), last=2)
    assert "test_accuracy" in score_model("mean")


def test_a_hub_data_set_names_its_classes(tmp_path):
    """The layout of the Hub's MNIST: pictures, and numbers that stand for names."""
    content = images(60)
    features = Features({"image": Image(), "label": ClassLabel(names=["above", "below"])})
    folder = tmp_path / "mnist" / "data"
    folder.mkdir(parents=True)
    for split, rows in (("train", slice(0, 40)), ("test", slice(40, 60))):
        pictures = [Picture.fromarray(image) for image in content["images"][rows]]
        columns = {"image": pictures, "label": content["labels"][rows].tolist()}
        part = Dataset.from_dict(columns, features=features)
        part.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    data = {"dataset_name": str(tmp_path / "mnist"), "image_column": "image"}
    prepared = prepare(recipe(data))
    assert prepared.trainer.model.config.label2id == {"above": 0, "below": 1}
    assert [len(prepared.sets[split]) for split in ("train", "validation", "test")] == [36, 4, 20]
    first = prepared.sets["test"][0]
    assert np.array_equal(first["input_features"], content["images"][40])
    assert first["labels"] == content["labels"][40]


def test_a_split_whose_classes_are_secret_is_held_out_of_training(tmp_path, caplog):
    rows = texts(60)
    features = Features({"text": Value("string"), "label": ClassLabel(names=["odd", "even"])})
    folder = tmp_path / "glue"
    folder.mkdir()
    Dataset.from_list(rows, features=features).to_parquet(folder / "train.parquet")
    secret = [{"text": row["text"], "label": -1} for row in rows[:9]]
    Dataset.from_list(secret, features=features).to_parquet(folder / "test.parquet")
    prepared = prepare(recipe({"dataset_name": str(folder)}))
    assert f"the test split of {folder} has no labels" in caplog.text
    assert "target that also stands" not in prepared.plan()  # all classes do
    assert prepared.reports["train"].held_out == len(prepared.sets["validation"]) + len(
        prepared.sets["test"]
    )
    named = {split: str(folder / f"{split}.parquet") for split in ("train", "test")}
    with pytest.raises(ValueError, match=r"data\.test_file=.*test\.parquet: no row of it has a"):
        prepare(recipe({f"{key}_file": file for key, file in named.items()}, OTHER_FOLDER))


def test_a_split_of_one_class_has_its_labels(tmp_path):
    rows = [{"text": row["text"], "label": int(row["label"] == "odd")} for row in texts(60)]
    folder = tmp_path / "zeros"
    folder.mkdir()
    Dataset.from_list(rows).to_parquet(folder / "train.parquet")
    zeros = [{"text": f"0 {n}", "label": 0} for n in range(9)]
    Dataset.from_list(zeros).to_parquet(folder / "test.parquet")
    prepared = prepare(recipe({"dataset_name": str(folder)}))
    assert prepared.sets["test"]["labels"][:] == [0] * 9


def test_rows_of_rare_classes_are_all_trained_on():
    rows = texts() + [{"text": f"x x {n}", "label": f"rare {n}"} for n in range(30)]
    rows += [{"text": f"x x {n}", "label": "odd"} for n in range(30)]  # of the same texts
    Path("rare.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = prepare(recipe({"train_file": "rare.jsonl"}))
    assert len(prepared.trainer.model.config.id2label) == 32
    sizes = {split: len(rows) for split, rows in prepared.sets.items()}
    assert {split: report.pairs for split, report in prepared.reports.items()} == sizes
    assert sum(sizes.values()) == len(rows)
    assert prepared.reports["train"].held_out == sizes["validation"] + sizes["test"] > 0
    for split in ("validation", "test"):
        assert not any(text.startswith("x x") for text in prepared.sets[split]["source"])


def test_white_space_and_unicode_forms_make_no_classes():
    names = {"even": ["caf\u00e9", " cafe\u0301", "caf\u00e9\t"], "odd": ["thé", "thé "]}
    rows = [
        {"text": row["text"], "label": names[row["label"]][n % len(names[row["label"]])]}
        for n, row in enumerate(texts())
    ]
    Path("spaces.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = prepare(recipe({"train_file": "spaces.jsonl"}))
    assert prepared.trainer.model.config.id2label == {0: "caf\u00e9", 1: "thé"}
    assert set(prepared.task.read_file("spaces.jsonl")[0]["target"]) == {"caf\u00e9", "thé"}


def test_other_columns_of_a_parquet_file_do_not_matter(tmp_path):
    rows = texts()
    table = pa.table(
        {
            "text": [row["text"] for row in rows],
            "label": [row["label"] for row in rows],
            "meta": pa.array([[("a", "b")]] * len(rows), pa.map_(pa.string(), pa.string())),
        }
    )
    pq.write_table(table, "map.parquet")
    assert len(prepare(recipe({"train_file": "map.parquet"})).sets["train"]) > 150
    Path("bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"bad\.parquet: not valid Parquet"):
        prepare(recipe({"train_file": "bad.parquet"}, OTHER_FOLDER))


def test_a_folder_may_have_brackets_in_its_name(tmp_path):
    features = Features({"text": Value("string"), "label": ClassLabel(names=["even", "odd"])})
    folder = tmp_path / "b [1]"
    folder.mkdir()
    Dataset.from_list(texts(), features=features).to_parquet(folder / "x.parquet")
    prepared = prepare(recipe({"train_file": str(folder / "x.parquet")}))
    assert prepared.trainer.model.config.id2label == {0: "even", 1: "odd"}


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet"])
def test_classes_may_be_numbers_in_every_kind_of_file(kind):
    rows = [{"text": row["text"], "label": 3 + (row["label"] == "odd")} for row in texts(60)]
    name = f"numbers.{kind}"
    if kind == "jsonl":
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        Dataset.from_list(rows).to_parquet(name)
    else:
        comma = "," if kind == "csv" else "\t"
        lines = [f"{row['text']}{comma}{row['label']}\n" for row in rows]
        Path(name).write_text(f"text{comma}label\n" + "".join(lines))
    prepared = prepare(recipe({"train_file": name}))
    assert prepared.trainer.model.config.id2label == {0: "3", 1: "4"}
    for row in prepared.sets["test"]:
        assert {"text": row["source"], "label": int(row["target"])} in rows


def test_a_parquet_file_of_texts_with_numbered_classes(tmp_path):
    rows = texts(60)
    features = Features({"text": Value("string"), "label": ClassLabel(names=["odd", "even"])})
    folder = tmp_path / "texts"
    folder.mkdir()
    Dataset.from_list(rows, features=features).to_parquet(folder / "train.parquet")
    prepared = prepare(recipe({"dataset_name": str(folder)}))
    assert prepared.trainer.model.config.id2label == {0: "even", 1: "odd"}
    for row in prepared.sets["test"]:
        assert {"text": row["source"], "label": row["target"]} in rows


def test_the_images_move_and_lose_nothing_but_what_leaves():
    image = np.zeros((1, 5, 4), np.uint8)
    image[0, 2, 1] = 255
    seen = set()
    batch = ImageCollator(1)([{"input_features": image[0], "labels": 3}])
    assert batch["input_features"][0, 2, 1] == 1  # it moves in the training step alone
    assert batch["labels"].tolist() == [3]
    torch.manual_seed(0)
    for _ in range(200):
        features = moved(batch["input_features"], 1)
        assert features.shape == (1, 5, 4)
        assert features.sum() == 1
        seen.add(tuple(features[0].nonzero()[0].tolist()))
    assert seen == {(2 + down, 1 + right) for down in (-1, 0, 1) for right in (-1, 0, 1)}


def test_training_alone_moves_images():
    np.savez("digits.npz", **images(40))
    trainer = prepare(recipe(IMAGES, "data.image_shift=2")).trainer
    seen = []
    trainer.model.register_forward_pre_hook(
        lambda _, inputs, named: seen.append(named["input_features"]), with_kwargs=True
    )
    rows = {np.asarray(row["input_features"]).tobytes() for row in trainer.train_dataset}
    trainer.train()
    fed = [(image * 255).round().byte().numpy().tobytes() for image in seen[0]]
    assert len(set(fed) - rows) > len(fed) // 2
    seen.clear()
    trainer.score(trainer.eval_dataset, "eval")
    pixels = np.stack([np.asarray(row["input_features"]) for row in trainer.eval_dataset])
    assert sorted(image.sum().item() for batch in seen for image in batch) == pytest.approx(
        sorted((pixels / 255).sum((1, 2)))
    )


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"labels": np.zeros(3)}, "no 'images' (data.image_column); it has labels"),
        ({"images": np.zeros((3, 2, 2))}, "no 'labels' (data.label_column); it has images"),
        (
            {"images": np.zeros((3, 2, 2)), "labels": np.zeros(3)},
            "pixels are whole numbers from 0 to 255, not float64",
        ),
        (
            {"images": np.full((3, 2, 2), 256), "labels": np.zeros(3)},
            "pixels are whole numbers from 0 to 255, not int64 from 256 to 256",
        ),
        (
            {"images": np.zeros((3, 2, 2, 3), int), "labels": np.zeros(3)},
            "grey and of one size (rows, columns): (2, 2, 3)",
        ),
        ({"images": np.zeros((3, 2, 2), int), "labels": np.zeros(2)}, "3 images and 2 labels"),
        ({"images": np.zeros((0, 2, 2), int), "labels": np.zeros(0)}, "grey and of one size"),
    ],
)
def test_wrong_arrays_are_refused_by_name(content, told):
    np.savez("odd.npz", **content)
    with pytest.raises(ValueError, match=r"odd\.npz") as error:
        read_images("odd.npz", "images", "labels")
    assert told in str(error.value)


def test_files_that_hold_no_images_are_refused_by_name(tmp_path):
    Path("text.npz").write_text("no archive")
    Path("empty.npz").write_bytes(b"")
    np.savez("pickled.npz", images=np.array([{"a": 1}]), labels=np.zeros(1))
    for name in ("text.npz", "empty.npz", "pickled.npz"):
        with pytest.raises(ValueError, match=rf"{name} is no \.npz file of arrays"):
            read_images(name, "images", "labels")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.npz: no such file"):
        read_images("nowhere.npz", "images", "labels")
    Path("images.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match=r"come from an \.npz or a \.parquet file"):
        read_images("images.csv", "images", "labels")


def test_given_splits_stay_as_they_are():
    np.savez("train.npz", **images(30))
    np.savez("test.npz", **{name: array[:7] for name, array in images(30).items()})
    splits, report = load_images({"train": "train.npz", "test": "test.npz"}, "images", "labels", 20)
    assert [len(splits[split]) for split in splits] == [20, 3, 7]
    assert report["train"].held_out == 3
    assert report["train"].over_max_train_samples == 7
    np.savez("few.npz", **images(4))
    with pytest.raises(ValueError, match="4 images are too few to hold out a test split"):
        load_images({"train": "few.npz"}, "images", "labels")


def test_a_class_that_training_never_showed_is_refused_by_name():
    write_texts()
    Path("test.jsonl").write_text(json.dumps({"text": "1 2 3", "label": "prime"}) + "\n")
    data = {"train_file": "texts.jsonl", "test_file": "test.jsonl"}
    with pytest.raises(ValueError, match=r"'prime' of a held-out row is none .*\(even, odd\)"):
        prepare(recipe(data))


def test_long_texts_are_left_out_of_training_and_cut_elsewhere():
    write_texts()
    files = ("train_file", "validation_file", "test_file")
    recipe(dict.fromkeys(files, "texts.jsonl"))
    prepared = prepare(load_recipe("tiny.yaml", ["data.max_source_length=6"]))
    long = sum(len(row["text"].split()) == 7 for row in texts())
    assert prepared.reports["train"].source_too_long == long > 0
    assert prepared.reports["test"].truncated_sources == long
    assert max(map(len, prepared.sets["train"]["input_ids"])) == 6
    eos = prepared.trainer.processing_class.eos_token_id
    assert all(ids[-1] == eos and len(ids) <= 6 for ids in prepared.sets["test"]["input_ids"])
    with pytest.raises(ValueError, match="no row is left: all are above max_source_length=3"):
        prepare(load_recipe("tiny.yaml", ["data.max_source_length=3", "training.output_dir=x"]))


def test_classes_are_numbered_as_people_count():
    assert sorted(["10", "b", "9", "a", "2"], key=natural_order) == ["2", "9", "10", "a", "b"]


def test_class_scores_are_those_of_the_definitions():
    predictions, labels = [0, 0, 1, 2, 2, 2], [0, 1, 1, 2, 0, 3]
    scores = class_scores(predictions, labels)
    assert scores["accuracy"] == 3 / 6
    f1 = []
    for name in range(4):
        hits = sum(p == q == name for p, q in zip(predictions, labels, strict=True))
        precision = hits / predictions.count(name) if name in predictions else 0
        recall = hits / labels.count(name) if name in labels else 0
        f1.append(2 * precision * recall / (precision + recall) if hits else 0)
    assert scores["macro_f1"] == pytest.approx(sum(f1) / 4)
    with pytest.raises(ValueError, match="no rows"):
        class_scores([], [])
    with pytest.raises(ValueError, match="zip"):
        class_scores([1], [])


def test_what_would_stop_training_later_is_refused_before(tmp_path):
    np.savez("digits.npz", **images(40))
    wide = {"images": np.zeros((8, 6, 5), np.uint8), "labels": np.zeros(8, int)}
    np.savez("wide.npz", **wide)
    with pytest.raises(ValueError, match=r"the test split: images have \(6, 5\) .* on \(6, 4\)"):
        prepare(recipe({**IMAGES, "test_file": "wide.npz"}))
    learned = ("model.position_embedding_type=learned", "model.max_position_embeddings=4")
    with pytest.raises(ValueError, match="images of 6 rows are above the learned positions"):
        prepare(recipe(IMAGES, *learned))
    enough = (*learned[:1], "model.max_position_embeddings=6", "training.output_dir=enough")
    assert prepare(recipe(IMAGES, *enough)).trainer.model is not None
    Path("one.jsonl").write_text('{"text": "a b", "label": "x"}\n' * 3)
    files = dict.fromkeys(("train_file", "validation_file", "test_file"), "one.jsonl")
    with pytest.raises(ValueError, match="all training rows are of the class 'x'"):
        prepare(recipe(files, "training.output_dir=one"))


@pytest.mark.parametrize("label", [None, float("nan"), -1, 0.5, [1, 0], b"a", ""])
def test_what_is_no_class_is_refused_by_its_row(label):
    with pytest.raises(ValueError, match=r"row 3: .* is no class"):
        class_name(label, "row 3")


def test_pictures_of_16_bits_are_not_clipped():
    deep = Picture.fromarray(np.full((2, 2), 40_000, np.uint16))
    with pytest.raises(ValueError, match="row 1: a picture of mode I;16 has more than 8 bits"):
        grey_pixels(deep, "row 1")


def test_a_parquet_file_names_its_classes_as_its_data_set_does():
    features = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])})
    rows = [{"text": row["text"], "label": int(row["label"] == "odd")} for row in texts(60)]
    rows[5]["label"] = None
    rows[6]["label"] = -1  # as where classes are secret
    Dataset.from_list(rows, features=features).to_parquet("named.parquet")
    prepared = prepare(recipe({"train_file": "named.parquet"}))
    assert prepared.trainer.model.config.id2label == {0: "neg", 1: "pos"}
    assert prepared.reports["train"].empty_side == 2
    content = images(20)
    pictures = [Picture.fromarray(image) for image in content["images"]]
    labels = ClassLabel(names=["above", "below"])
    columns = {"image": pictures, "label": content["labels"].tolist()}
    named = Features({"image": Image(), "label": labels})
    Dataset.from_dict(columns, features=named).to_parquet("pictures.parquet")
    read = read_images("pictures.parquet", "image", "label")
    assert read["target"][:3] == labels.int2str(content["labels"][:3].tolist())


@pytest.mark.parametrize("task", ["classification", "language_model"])
def test_b50_a_second_launch_encodes_nothing_again(task, tmp_path):
    write_texts()
    model = {"d_model": 8, "dropout": 0.0}
    model |= {"encoder_layers": 1} if task == "classification" else {"decoder_layers": 1}
    document = {"task": task, "threads": 1, "model": model, "training": TRAINING}
    document["training"] = {"max_steps": 1, "disable_tqdm": True}
    document |= {"tokenizer": {"kind": "word", "vocab_size": 60}}
    document["data"] = {"train_file": "texts.jsonl"}
    Path("tiny.yaml").write_text(yaml.safe_dump(document))
    kept = []
    for run in ("first", "second"):
        prepare(load_recipe("tiny.yaml", [f"training.output_dir={run}"]))
        kept.append(sorted(path.name for path in (tmp_path / "cache").rglob("*.arrow")))
    assert kept[0] == kept[1] != []


def test_options_of_translation_mean_nothing_to_a_classifier():
    np.savez("digits.npz", **images(40))
    run_recipe(recipe(IMAGES, "training.num_train_epochs=1"))
    with pytest.raises(ValueError, match="num_beams=3 means nothing to task=classification"):
        score_model("outputs/tiny", num_beams=3)
    with pytest.raises(ValueError, match="which does not translate"):
        load_translator(["outputs/tiny"])
