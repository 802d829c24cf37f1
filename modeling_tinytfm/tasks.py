"""What a recipe's `task` decides: its rows, its vocabulary, its model and what is predicted.

`experiment` runs every task alike: rows -> vocabulary -> token ids -> model -> training -> scores
-> predictions. A task answers the questions in between; its Trainer knows how to score its model.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset, DatasetDict
from transformers import TrainingArguments

from .configuration_tinytfm import TinyTFMConfig
from .data import PairSource, Report, SplitReport
from .reading import load_splits
from .recipes import Recipe
from .settings import DataSettings
from .training import TinyTFMTrainer

SPLITS = ("train", "validation", "test")


class Task(ABC):
    """One kind of learning.

    Args:
        recipe: What to run.

    Attributes:
        trainer_class: Trains and scores the model.
        rows: What a row is called in messages, in the plural.
    """

    trainer_class: ClassVar[type[TinyTFMTrainer]] = TinyTFMTrainer
    rows: ClassVar[str]

    def __init__(self, recipe: Recipe):
        self.recipe = recipe

    def adopt(self, config: TinyTFMConfig) -> None:  # noqa: B027 - most tasks need nothing
        """Takes from a trained model what would otherwise follow from the training rows."""

    @abstractmethod
    def read(self) -> tuple[DatasetDict, Report]:
        """The rows of all splits as a person wrote them, and what became of each split's lines.

        Raises:
            ValueError: If they cannot be read as what the task needs.
            OSError: If a file is missing.
            ImportError: If a package is missing that reads them.
        """

    @abstractmethod
    def read_file(self, path: str | Path) -> tuple[Dataset, SplitReport]:
        """The rows of one file, to be scored, and what became of its lines; raises as `read`."""

    @abstractmethod
    def lines(self, rows: Dataset) -> Iterable[str] | None:
        """The texts from which a vocabulary is learned; None if the task has none."""

    def finish_tokenizer(self, tokenizer: Any) -> None:  # noqa: B027 - most change nothing
        """Changes what a new tokenizer puts around a text, where the task wants something else."""

    @abstractmethod
    def encode(
        self, rows: Dataset, tokenizer: Any, *, training: bool, report: SplitReport | None = None
    ) -> tuple[Dataset, SplitReport]:
        """What the model is fed, beside what a report of its predictions needs.

        Args:
            rows: As `read` gave them.
            tokenizer: The task's, or None.
            training: Whether rows that are too long are left out; otherwise they are cut.
            report: What is known of the split so far.

        Raises:
            ValueError: If no row is left.
        """

    def feed(self, rows: Dataset, tokenizer: Any, arguments: TrainingArguments) -> Any:
        """What training reads: the encoded rows, unless they change while it runs.

        Args:
            rows: As `encode` gave them for training.
            tokenizer: The task's, or None.
            arguments: The Trainer's.
        """
        return rows

    @abstractmethod
    def model(self, tokenizer: Any, train: Dataset) -> Any:
        """A new model of the recipe's size.

        Args:
            tokenizer: The task's, or None.
            train: Encoded training rows.

        Raises:
            ValueError: If the recipe's sizes do not fit together, or its settings of generate().
        """

    def plan(self, model: Any) -> list[tuple[str, str]]:
        """Further lines of the plan: a name and a text each."""
        return []

    @abstractmethod
    def example(self, row: dict[str, Any]) -> str:
        """A row as `read` gave it, in one line: a wrong column is seen at once."""

    @abstractmethod
    def collator(self, tokenizer: Any, model: Any) -> Any:
        """Makes a batch of tensors from encoded rows."""

    @abstractmethod
    def predict(self, trainer: TinyTFMTrainer, rows: Dataset) -> list[Any]:
        """Predictions for encoded rows, on this process alone, where scoring made none."""

    @abstractmethod
    def records(self, rows: Dataset, predictions: list[Any]) -> Iterator[dict[str, Any]]:
        """A JSON object for each row: what was given, predicted and right."""

    @abstractmethod
    def describe(self, record: dict[str, Any]) -> str:
        """A record in one line for a person."""

    @abstractmethod
    def next_step(self, folder: Path) -> str:
        """What to type next, once the model is in its folder."""


class Column:
    """The texts of some columns, in batches, without holding them."""

    def __init__(self, rows: Dataset, *names: str):
        self.rows, self.names = rows.select_columns(list(names)), names

    def __len__(self) -> int:
        return len(self.names) * len(self.rows)

    def __iter__(self) -> Iterator[str]:
        for batch in self.rows.iter(batch_size=10_000):
            for name in self.names:
                yield from batch[name]


def files_of(data: DataSettings) -> dict[str, PairSource]:
    """Each split's file, (source file, target file) or data set, as far as the recipe names any.

    Raises:
        ValueError: See `reading.load_splits`.
        OSError: See there.
    """
    files: dict[str, Any] = {}
    if data.dataset_name is not None:
        files.update(
            load_splits(data.dataset_name, data.dataset_config_name, streaming=data.streaming)
        )
    for split in SPLITS:
        one = getattr(data, f"{split}_file")
        source = getattr(data, f"{split}_source_file")
        if one is not None:
            files[split] = one
        elif source is not None:
            files[split] = (source, getattr(data, f"{split}_target_file"))
    return files


def longest_output(model: Any) -> int:
    """Tokens that generate() makes at most, the start token aside."""
    config = model.generation_config
    return config.max_new_tokens or config.max_length - 1


def check_generation(model: Any) -> None:
    """Refuses settings of generate() with which the model could not be saved.

    Saving checks the same, which would be after hours of training.

    Raises:
        ValueError: If they do not go together.
    """
    try:
        model.generation_config.validate(strict=True)
    except ValueError as error:
        raise ValueError(f"generation: {error}") from None
