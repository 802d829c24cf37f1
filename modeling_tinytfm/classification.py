"""Task classification: the class of a text, or of a grey image that is read row by row.

An image enters as continuous features: its rows are the positions, and a row's pixels, divided by
255, are the features of a position.
"""

import glob
import logging
import os
import shlex
import unicodedata
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from datasets import (
    Array2D,
    ClassLabel,
    Dataset,
    DatasetDict,
    Features,
    List,
    Value,
    concatenate_datasets,
)
from torch import Tensor
from transformers import BatchEncoding, DataCollatorWithPadding

from .configuration_tinytfm import TinyTFMConfig
from .data import PairSource, Report, SplitReport, cache_key, load_pairs, text_key, what_it_does
from .metrics import class_scores
from .modeling_tinytfm import TinyTFMForSequenceClassification
from .reading import one_line
from .reports import shortened
from .tasks import Column, Task, files_of
from .tokenization import SPECIAL_TOKENS
from .training import TinyTFMTrainer, smoothed_loss
from .translation import budget_batches, progress_bar

logger = logging.getLogger(__name__)

HELD_OUT_IMAGES = 0.1  # share of the images for each split that no file is given for


class ClassificationTrainer(TinyTFMTrainer):
    """Scores a classifier: loss and accuracy by the row, F1 by the class."""

    def lengths(self, dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
        """Positions of each row, and zeros: there is no target side."""
        lengths = lengths_of(dataset)
        return lengths, np.zeros_like(lengths)

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """A step, on images that are moved first.

        They move here, and not as the batch is made, since batches are made ahead: by random
        numbers that a run which is resumed could not draw again.
        """
        if shift := getattr(self.data_collator, "shift", 0):
            inputs = {**inputs, "input_features": moved(inputs["input_features"], shift)}
        return super().training_step(model, inputs, num_items_in_batch)

    def smoothed(self, model: Any, inputs: dict[str, Any], num_items: Any) -> tuple[Tensor, Any]:
        """The smoothed loss over the classes, and the model's outputs."""
        labels_B = inputs.pop("labels")
        outputs = model(**inputs)
        loss = smoothed_loss(outputs.logits[:, None], labels_B[:, None], self.smoothing, num_items)
        return loss, outputs

    @torch.inference_mode()
    def score(self, dataset: Dataset, prefix: str) -> tuple[dict[str, float], list[Any] | None]:
        """Scores encoded rows, sharing them out among the processes.

        Returns:
            The figures, and of each row, in the order of the set, the class and its probability.
        """
        mine = range(self.args.process_index, len(dataset), self.args.world_size)
        own = dataset.select(mine) if self.args.world_size > 1 else dataset
        fed = own.select_columns([name for name in own.column_names if name in FED_COLUMNS])
        collator: Any = self.data_collator
        results: list[tuple[int, float, int, float]] = [(0, 0.0, 0, 0.0)] * len(own)
        was_training = self.model.training
        self.model.eval()
        with progress_bar("Scoring", len(own), self._show_progress()) as progress:
            for batch in budget_batches(lengths_of(own).tolist(), self.eval_batch_tokens):
                inputs = collator([fed[row] for row in batch]).to(self.args.device)
                labels_B = inputs.pop("labels")
                with self.accelerator.autocast():
                    logits_BC = self.model(**inputs).logits.float()
                losses_B = F.cross_entropy(logits_BC, labels_B, reduction="none")
                chances_B, classes_B = logits_BC.softmax(-1).max(-1)
                columns = (classes_B, chances_B, labels_B, losses_B)
                rows = zip(*(column.tolist() for column in columns), strict=True)
                for row, result in zip(batch, rows, strict=True):
                    results[row] = result
                progress.update(len(batch))
        self.model.train(was_training)
        if self.args.world_size > 1:
            numbered = gather_object(list(zip(mine, results, strict=True)))
            results = [result for _, result in sorted(numbered)]
        classes, chances, labels, losses = zip(*results, strict=True)
        figures = {"loss": float(np.mean(losses)), **class_scores(classes, labels)}
        metrics = {f"{prefix}_{name}": value for name, value in figures.items()}
        return metrics, list(zip(classes, chances, strict=True))


# What a batch is made of; other columns describe predictions.
FED_COLUMNS = ("input_ids", "attention_mask", "input_features", "labels")


def lengths_of(dataset: Dataset) -> np.ndarray:
    """Positions of each encoded row, [rows]."""
    if "input_features" in dataset.column_names:
        return np.full(len(dataset), dataset.features["input_features"].shape[0])
    return np.array([len(ids) for ids in dataset["input_ids"][:]])


class Classification(Task):
    """Texts, or images, and their classes."""

    trainer_class = ClassificationTrainer
    rows = "examples"

    def read(self) -> tuple[DatasetDict, Report]:
        """Columns `source` (a text) or `image`, and `target` (the name of the class)."""
        data = self.recipe.data
        files = files_of(data)
        if data.image_column is not None:
            return load_images(files, data.image_column, data.label_column, data.max_train_samples)
        named = {split: with_class_names(file, data.label_column) for split, file in files.items()}
        for split in [split for split in named if split != "train"]:
            if _has_no_labels(named[split], data.label_column):
                if data.dataset_name is None:
                    raise ValueError(f"data.{split}_file={files[split]}: no row of it has a label")
                logger.warning(
                    "the %s split of %s has no labels: a part of the training rows is held out in "
                    "its place",
                    split,
                    data.dataset_name,
                )
                del named[split]
        splits, reports = load_pairs(
            named,
            source_column=data.text_column,
            target_column=data.label_column,
            group_column=data.group_column,
            max_train_samples=data.max_train_samples,
            count_targets=False,
        )
        splits = DatasetDict({split: _stripped(rows) for split, rows in splits.items()})
        if data.group_column is None:
            _keep_rare_classes(splits, reports, [split for split in splits if split not in named])
        return splits, reports

    def read_file(self, path: str | Path) -> tuple[Dataset, SplitReport]:
        """The rows of one file, with the recipe's columns."""
        data = self.recipe.data
        if data.image_column is not None:
            images = read_images(path, data.image_column, data.label_column)
            return images, SplitReport(pairs=len(images))
        splits, reports = load_pairs(
            {"test": with_class_names(path, data.label_column)},
            source_column=data.text_column,
            target_column=data.label_column,
        )
        return _stripped(splits["test"]), reports["test"]

    def lines(self, rows: Dataset) -> Iterable[str] | None:
        """The texts; images need no vocabulary."""
        return None if "image" in rows.column_names else Column(rows, "source")

    def encode(
        self, rows: Dataset, tokenizer: Any, *, training: bool, report: SplitReport | None = None
    ) -> tuple[Dataset, SplitReport]:
        """Token ids or pixels, and numbers of classes; outside training beside texts and names."""
        report = report or SplitReport(pairs=len(rows))
        if training:
            self.classes = sorted(set(rows["target"][:]), key=natural_order)
        numbers = {name: number for number, name in enumerate(self.classes)}
        targets = rows["target"][:]
        if unknown := sorted(set(targets) - numbers.keys()):
            known = shortened(", ".join(self.classes))
            raise ValueError(
                f"data.label_column={self.recipe.data.label_column}: the class {unknown[0]!r} of a "
                f"held-out row is none of those in training ({known}); "
                "give more rows of it, or held-out files without it"
            )
        if len(self.classes) < 2:
            raise ValueError(
                f"data.label_column={self.recipe.data.label_column}: all training rows are of the "
                f"class {self.classes[0]!r}: there is nothing to tell apart"
            )
        labels = [numbers[name] for name in targets]
        if "image" in rows.column_names:
            encoded = rows.select_columns("image").rename_column("image", "input_features")
            encoded = encoded.add_column("labels", labels)
            return (encoded if training else encoded.add_column("target", targets)), report
        limit = self.recipe.data.max_source_length
        encoded = rows.map(
            _encode_texts,
            batched=True,
            input_columns="source",
            fn_kwargs={"tokenizer": tokenizer, "limit": limit},
            features=Features(
                {**rows.features, "input_ids": List(Value("int32")), "too_long": Value("bool")}
            ),
            num_proc=self.recipe.data.num_proc,
            new_fingerprint=cache_key("texts", rows._fingerprint, what_it_does(tokenizer), limit),
            desc="Encoding texts",
        )
        too_long = np.array(encoded["too_long"][:])
        encoded = encoded.remove_columns("too_long").add_column("labels", labels)
        if not training:
            return encoded, replace(report, truncated_sources=int(too_long.sum()))
        if too_long.all():
            raise ValueError(f"no row is left: all are above max_source_length={limit} tokens")
        kept = encoded.select(np.flatnonzero(~too_long)).select_columns(["input_ids", "labels"])
        return kept, replace(report, pairs=len(kept), source_too_long=int(too_long.sum()))

    def adopt(self, config: Any) -> None:
        """The classes of a trained model."""
        self.classes = [config.id2label[number] for number in range(config.num_labels)]

    def model(self, tokenizer: Any, train: Dataset) -> TinyTFMForSequenceClassification:
        """A new encoder that names the classes."""
        sizes = dict(self.recipe.model)
        if tokenizer is None:
            height, sizes["input_feature_size"] = train.features["input_features"].shape
            sizes["vocab_size"] = len(SPECIAL_TOKENS)  # none is read
        else:
            sizes["vocab_size"] = len(tokenizer)
        config = TinyTFMConfig(
            **sizes,
            is_encoder_decoder=False,
            problem_type="single_label_classification",
            id2label=dict(enumerate(self.classes)),
            label2id={name: number for number, name in enumerate(self.classes)},
        )
        limit = config.max_position_embeddings
        if tokenizer is None and config.position_embedding_type == "learned" and height > limit:
            raise ValueError(
                f"images of {height} rows are above the learned positions, "
                f"model.max_position_embeddings={limit}"
            )
        return TinyTFMForSequenceClassification(config)

    def plan(self, model: Any) -> list[tuple[str, str]]:
        """The classes."""
        return [("classes", f"{len(self.classes)}: {shortened(', '.join(self.classes))}")]

    def example(self, row: dict[str, Any]) -> str:
        """The text, or the size of the image, and its class."""
        if "image" in row:
            return f"{len(row['image'])} rows of {len(row['image'][0])} pixels  ->  {row['target']}"
        return f"{shortened(row['source'])}  ->  {row['target']}"

    def collator(self, tokenizer: Any, model: Any) -> Any:
        """Pads token ids, or scales pixels."""
        if tokenizer is None:
            return ImageCollator(self.recipe.data.image_shift)
        return DataCollatorWithPadding(tokenizer)

    def predict(self, trainer: TinyTFMTrainer, rows: Dataset) -> list[Any]:
        """Never needed: scoring predicts."""
        return trainer.score(rows, "test")[1] or []

    def records(self, rows: Dataset, predictions: list[Any]) -> Iterator[dict[str, Any]]:
        """`source` (a text, or the number of an image), `prediction`, `probability`, `label`."""
        texts = rows["source"][:] if "source" in rows.column_names else range(len(rows))
        for text, label, (number, chance) in zip(
            texts, rows["target"][:], predictions, strict=True
        ):
            yield {
                "source": text,
                "prediction": self.classes[number],
                "probability": round(chance, 6),
                "label": label,
            }

    def describe(self, record: dict[str, Any]) -> str:
        """`source  ->  prediction (probability)`, and the label where it is another."""
        line = f"{shortened(str(record['source']))}  ->  {record['prediction']}"
        line += f" ({record['probability']:.0%})"
        if record["prediction"] != record["label"]:
            line += f"  (label: {record['label']})"
        return line

    def next_step(self, folder: Path) -> str:
        """How to score it on other data."""
        return f"python scripts/evaluate_model.py {shlex.quote(str(folder))} --file FILE"


def with_class_names(rows: PairSource, column: str) -> PairSource:
    """A data set, or a Parquet file of one, with classes' names where it has numbers for them.

    A row without a class (null, or -1 as in test sets whose classes are secret) has an empty name.
    """
    if str(rows).lower().endswith(".parquet") and Path(str(rows)).is_file():
        if not _names_classes(str(rows), column):
            return rows
        rows = Dataset.from_parquet(glob.escape(str(rows)))
    if not isinstance(rows, Dataset) or not isinstance(rows.features.get(column), ClassLabel):
        return rows
    names = rows.features[column].names
    return rows.map(
        lambda labels: {
            column: ["" if label is None or label < 0 else names[label] for label in labels]
        },
        batched=True,
        input_columns=column,
        features=Features({**rows.features, column: Value("string")}),
        new_fingerprint=cache_key("names", rows._fingerprint, column, names),
        desc="Naming classes",
    )


def _names_classes(path: str, column: str) -> bool:
    """Whether a Parquet file of a data set has names for the numbers of a column.

    Raises:
        ValueError: If it is no Parquet file.
    """
    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not valid Parquet: {one_line(error)}") from None
    if column not in schema.names or b"huggingface" not in (schema.metadata or {}):
        return False
    return isinstance(Features.from_arrow_schema(schema).get(column), ClassLabel)


def _has_no_labels(rows: PairSource, column: str) -> bool:
    """Whether a data set keeps its classes secret, as test sets of competitions do."""
    return (
        isinstance(rows, Dataset)
        and len(rows) > 0
        and column in rows.column_names
        and all(label in (None, "") for label in rows[column][:])
    )


def _stripped(rows: Dataset) -> Dataset:
    """The same rows, whose names of classes have no white space around them, in NFC."""
    return rows.map(
        lambda names: {"target": [unicodedata.normalize("NFC", name.strip()) for name in names]},
        batched=True,
        input_columns="target",
        features=rows.features,
        new_fingerprint=cache_key("stripped", rows._fingerprint),
        desc="Reading classes",
    )


def _keep_rare_classes(splits: DatasetDict, reports: Report, held_out: Sequence[str]) -> None:
    """Gives rows back to training whose class, or text, would stand in a held-out split alone.

    With a row goes every other one of its text, which may be of another class.
    """
    known = set(splits["train"]["target"][:])
    for split in held_out:
        rows = splits[split]
        texts = [text_key(text) for text in rows["source"][:]]
        classes = rows["target"][:]
        rare = {text for text, name in zip(texts, classes, strict=True) if name not in known}
        back = [number for number, text in enumerate(texts) if text in rare]
        if not back:
            continue
        stay = [number for number, text in enumerate(texts) if text not in rare]
        returned = rows.select(back).select_columns(splits["train"].column_names)
        splits["train"] = concatenate_datasets([splits["train"], returned])
        splits[split] = rows.select(stay)
        known.update(returned["target"][:])
        train, report = reports["train"], reports[split]
        reports["train"] = replace(
            train, pairs=train.pairs + len(back), held_out=train.held_out - len(back)
        )
        reports[split] = replace(report, pairs=report.pairs - len(back))


def natural_order(name: str) -> tuple[int, int, str]:
    """Sorts names of classes: numbers by value, before all others."""
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)


def _encode_texts(texts: list[str], tokenizer: Any, limit: int | None) -> dict[str, list[Any]]:
    rows = tokenizer(texts, verbose=False)["input_ids"]
    too_long = [limit is not None and len(ids) > limit for ids in rows]
    rows = [
        ids[: limit - 1] + ids[-1:] if limit is not None and cut else ids
        for ids, cut in zip(rows, too_long, strict=True)
    ]
    return {"input_ids": rows, "too_long": too_long}


@dataclass(frozen=True)
class ImageCollator:
    """Makes a batch of images: `input_features` [B, rows, columns] from 0 to 1, and `labels` [B].

    Args:
        shift: By how many pixels `ClassificationTrainer` moves them in training.
    """

    shift: int = 0

    def __call__(self, rows: list[dict[str, Any]]) -> BatchEncoding:
        """Stacks the rows."""
        images_BLF = torch.from_numpy(np.stack([np.asarray(row["input_features"]) for row in rows]))
        labels_B = torch.tensor([int(row["labels"]) for row in rows])
        return BatchEncoding({"input_features": images_BLF.float() / 255, "labels": labels_B})


def moved(images_BLF: Tensor, shift: int) -> Tensor:
    """Each image moved by up to `shift` pixels in either direction, drawn at random.

    What comes into view is black.
    """
    height, width = images_BLF.shape[1:]
    padded = F.pad(images_BLF, [shift] * 4)
    offsets = torch.randint(2 * shift + 1, (len(images_BLF), 2)).tolist()
    windows = [
        image[down : down + height, right : right + width]
        for image, (down, right) in zip(padded, offsets, strict=True)
    ]
    return torch.stack(windows)


def read_images(
    source: PairSource, image_column: str, label_column: str, name: str = ""
) -> Dataset:
    """Grey images and the names of their classes.

    Args:
        source: An .npz file with two arrays, a .parquet file with two columns, or a data set.
        image_column: Images [N, height, width] of whole numbers from 0 to 255; in a column also
            pictures as `datasets.Image` reads them, which are turned to grey.
        label_column: Their classes.
        name: What `source` is called in messages; its path if empty.

    Returns:
        Columns `image` (Array2D of uint8) and `target` (string).

    Raises:
        ValueError: If a name is missing, or its content is something else.
        OSError: If the file cannot be read.
    """
    if isinstance(source, tuple):
        raise ValueError(f"{source[0]}: images come from one .npz or .parquet file")
    columns: Any
    if isinstance(source, Dataset):
        where, columns = name or "the data set", source
    else:
        where, path = os.fspath(source), Path(source)
        if not path.exists():
            raise FileNotFoundError(f"{where}: no such file")
        if path.suffix == ".npz":
            columns = read_npz(path)
        elif path.suffix == ".parquet":
            columns = Dataset.from_parquet(glob.escape(where))
        else:
            raise ValueError(f"{where}: images come from an .npz or a .parquet file")
    from_table = isinstance(columns, Dataset)
    there = columns.column_names if from_table else list(columns)
    for key, column in (("image_column", image_column), ("label_column", label_column)):
        if column not in there:
            raise ValueError(f"{where}: no {column!r} (data.{key}); it has {', '.join(there)}")
    labelled: Any = with_class_names(columns, label_column) if from_table else columns
    pictures, labels = (
        list(rows[name][:] if from_table else np.atleast_1d(rows[name]))
        for rows, name in ((columns, image_column), (labelled, label_column))
    )
    names = [class_name(label, f"{where}, row {row}") for row, label in enumerate(labels, 1)]
    grey = [grey_pixels(x, f"{where}, row {row}") for row, x in enumerate(pictures, 1)]
    shapes = {image.shape for image in grey}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2 or 0 in next(iter(shapes)):
        found = " and ".join(sorted(map(str, shapes))[:3])
        raise ValueError(f"{where}: images must be grey and of one size (rows, columns): {found}")
    images = np.stack(grey)
    if not np.issubdtype(images.dtype, np.integer) or images.min() < 0 or images.max() > 255:
        raise ValueError(
            f"{where}: pixels are whole numbers from 0 to 255, not {images.dtype} from "
            f"{images.min()} to {images.max()}"
        )
    if len(images) != len(labels):
        raise ValueError(f"{where}: {len(images)} images and {len(labels)} labels")
    features = Features(
        {"image": Array2D(shape=images.shape[1:], dtype="uint8"), "target": Value("string")}
    )
    content = {"image": images.astype(np.uint8), "target": names}
    return Dataset.from_dict(content, features=features).with_format(
        "numpy", columns=["image"], output_all_columns=True
    )


def class_name(label: Any, where: str) -> str:
    """The name of a class, which is a text or a whole number.

    Raises:
        ValueError: If it is none, or there is none.
    """
    if isinstance(label, str) and label:
        return label
    if isinstance(label, int | float | np.number) and label >= 0 and label == int(label):
        return str(int(label))
    raise ValueError(f"{where}: {label!r} is no class: a text, or a whole number from 0 on")


def grey_pixels(image: Any, where: str) -> np.ndarray:
    """An image as an array; a picture in colour is turned to grey.

    Raises:
        ValueError: If its pixels have no order, or more than 8 bits.
    """
    if hasattr(image, "convert"):
        if image.mode.startswith(("I", "F")):
            raise ValueError(
                f"{where}: a picture of mode {image.mode} has more than 8 bits a pixel"
            )
        return np.asarray(image.convert("L"))
    try:
        return np.asarray(image)
    except ValueError as error:
        raise ValueError(f"{where}: the rows of an image differ in length: {error}") from None


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file; objects, which would be pickles, are not read.

    Raises:
        ValueError: If it holds something else.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays}
    except (ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path} is no .npz file of arrays: {error}") from error


def load_images(
    files: Mapping[str, PairSource],
    image_column: str,
    label_column: str,
    max_train_samples: int | None = None,
) -> tuple[DatasetDict, Report]:
    """Reads images and splits them.

    Without a validation or a test file, the last tenth of the training images, by position, becomes
    the test set, and the tenth before it the validation set.

    Args:
        files: What `read_images` reads, of "train", "validation" and "test".
        image_column: See there.
        label_column: See there.
        max_train_samples: Training keeps the first so many images, after splitting.

    Raises:
        ValueError: See there; or if there are too few images to hold out others.
        OSError: See there.
    """
    splits = {
        split: read_images(file, image_column, label_column, f"the {split} split")
        for split, file in files.items()
    }
    train = splits["train"]
    size = train.features["image"].shape
    for split, rows in splits.items():
        if rows.features["image"].shape != size:
            raise ValueError(
                f"the {split} split: images have {rows.features['image'].shape} rows and columns "
                f"of pixels, those to train on {size}"
            )
    end, share = len(train), round(HELD_OUT_IMAGES * len(train))
    missing = [split for split in ("test", "validation") if split not in splits]
    if missing and not share:
        raise ValueError(f"{len(train)} images are too few to hold out a {missing[0]} split")
    for split in missing:
        splits[split] = train.select(range(end - share, end))
        end -= share
    kept = end if max_train_samples is None else min(end, max_train_samples)
    splits["train"] = train.select(range(kept))
    report = {split: SplitReport(pairs=len(rows)) for split, rows in splits.items()}
    report["train"] = replace(
        report["train"], held_out=len(train) - end, over_max_train_samples=end - kept
    )
    order = ("train", "validation", "test")
    return DatasetDict({split: splits[split] for split in order}), {
        split: report[split] for split in order
    }
