"""What a recipe may say in its own sections, as typed and documented fields."""

import dataclasses
from typing import Any, Literal, NamedTuple


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

# Computed from the loss and the logits; best models may be chosen by them.
LOSS_METRICS: dict[str, MetricDescription] = {
    "loss": MetricDescription("unsmoothed cross-entropy in nats, per token or per row", False),
    "perplexity": MetricDescription("exp(loss)", False),
    "token_accuracy": MetricDescription("share of target tokens predicted, teacher-forced", True),
    "bits_per_character": MetricDescription(
        "cross-entropy of a text in bits, by its characters: comparable between vocabularies "
        "that leave no part of the text unknown",
        False,
    ),
    "accuracy": MetricDescription("share of rows whose class is predicted, 0..1", True),
    "macro_f1": MetricDescription("mean over the classes of their F1 scores, 0..1", True),
}
# Those that a task reports at every evaluation.
TASK_FIGURES: dict[str, tuple[str, ...]] = {
    "seq2seq": ("loss", "perplexity", "token_accuracy"),
    "classification": ("loss", "accuracy", "macro_f1"),
    "language_model": ("loss", "perplexity", "token_accuracy", "bits_per_character"),
}
TEXT_METRICS = ("bleu", "chrf", "exact_match")  # measured by task seq2seq if a recipe names none
NAME_PLACEHOLDER = "<recipe name>"


def setting(default: Any, text: str, *, minimum: float | None = None, is_path: bool = False) -> Any:
    """A documented dataclass field."""
    metadata = {"text": text, "minimum": minimum, "is_path": is_path}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class TokenizerSettings:
    """Section `tokenizer`: how the joint vocabulary is trained."""

    kind: Literal["bpe", "unigram", "word", "character", "regex"] = setting(
        "bpe",
        "sub-words (bpe, unigram), whole words, characters, or words cut out by a regular "
        "expression",
    )
    vocab_size: int = setting(8000, "entries at most, the four special tokens included", minimum=5)
    pattern: str | None = setting(
        None, "regular expression whose matches are the words (kind: regex only)"
    )
    normalization: Literal["nfc", "nfkc", "nfd", "nfkd", "none"] = setting(
        "nfc", "Unicode normal form of source and target"
    )
    lowercase: bool = setting(
        False, "lower-case source and target; metrics compare with the references as they stand"
    )
    min_frequency: int | None = setting(
        None,
        "occurrences that bring a merge (bpe; 2 if null) or a word (1 if null) into the vocabulary",
        minimum=1,
    )
    bpe_dropout: float = setting(
        0.0,
        "share of merges left out at random in training, anew each epoch (kind: bpe; task "
        "seq2seq); such a run cannot be repeated bit for bit",
        minimum=0,
    )


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Section `data`: where the pairs come from, and how they are cut and batched."""

    train_file: str | None = setting(
        None,
        "rows to train on: .tsv, .csv or .jsonl, plain or .gz, or .parquet; .txt for a language "
        "model, .npz for images",
        is_path=True,
    )
    validation_file: str | None = setting(
        None,
        "pairs to validate on; without it a part of the training pairs is held out",
        is_path=True,
    )
    test_file: str | None = setting(
        None, "pairs to test on; without it a part of the training pairs is held out", is_path=True
    )
    train_source_file: str | None = setting(
        None, "source lines of parallel text files, one sentence a line", is_path=True
    )
    train_target_file: str | None = setting(None, "their target lines", is_path=True)
    validation_source_file: str | None = setting(None, "source lines to validate on", is_path=True)
    validation_target_file: str | None = setting(None, "their target lines", is_path=True)
    test_source_file: str | None = setting(None, "source lines to test on", is_path=True)
    test_target_file: str | None = setting(None, "their target lines", is_path=True)
    dataset_name: str | None = setting(
        None, "a dataset of the Hub, or its local folder", is_path=True
    )
    dataset_config_name: str | None = setting(None, "that dataset's configuration")
    source_column: str = setting(
        "source", "column of the source text, or its language in a column translation"
    )
    target_column: str = setting("target", "column of the target text")
    group_column: str | None = setting(
        None, "rows with the same value here are never split between training and held-out rows"
    )
    text_column: str = setting("text", "column of the text (tasks classification, language_model)")
    label_column: str = setting("label", "column of the class (task classification)")
    image_column: str | None = setting(
        None,
        "column, or array of an .npz file, with grey images in place of texts, read row by row "
        "(task classification)",
    )
    image_shift: int = setting(
        0, "pixels by which training images are moved at random, in both directions", minimum=0
    )
    generator: Literal["reverse", "cmudict"] | None = setting(
        None, "pairs made on the spot: reversed digits, or words and their pronunciations"
    )
    seed: int = setting(
        0, "of the generated pairs; training.seed leaves them as they are", minimum=0
    )
    merge_references: bool = setting(
        False, "validation and test rows with the same source become one row with all references"
    )
    max_source_length: int | None = setting(
        512,
        "tokens, </s> included (null: no limit); longer training rows are dropped, others cut; "
        "a language model's texts are cut into blocks of so many, and none is dropped",
        minimum=2,
    )
    max_target_length: int | None = setting(
        512,
        "tokens, </s> included (null: no limit); longer training pairs are dropped, others cut",
        minimum=2,
    )
    max_train_samples: int | None = setting(
        None, "train on the first so many pairs; how many the generator reverse makes", minimum=1
    )
    max_tokens: int | None = setting(
        None,
        "tokens in a process's micro-batch, rows x (longest source + longest target), padding "
        "included; the alternative to training.per_device_train_batch_size",
        minimum=4,
    )
    num_proc: int | None = setting(None, "processes for preprocessing", minimum=1)
    streaming: bool = setting(
        False,
        "read training pairs while training, for data that do not fit (task seq2seq, needs "
        "training.max_steps); after its last row the stream begins again, shuffled anew",
    )
    streaming_sample: int = setting(
        1_000_000,
        "rows at the front of a stream that the vocabulary is trained on, and that validation and "
        "test sets are held out of where none are given",
        minimum=10,
    )
    streaming_buffer: int = setting(
        100_000,
        "rows of a stream that are shuffled and batched together, in each process and each of its "
        "loader's workers",
        minimum=1,
    )


@dataclasses.dataclass(frozen=True)
class TrainingSettings:
    """Section `training`: this project's own keys, and the Trainer's in `arguments`."""

    output_dir: str = setting(f"outputs/{NAME_PLACEHOLDER}", "folder of the run", is_path=True)
    lr_scheduler_type: str = setting(
        "linear", "noam (the paper's, Eq. 3, from d_model and warmup_steps) or one of the Trainer's"
    )
    cooldown_steps: int | None = setting(
        None,
        "last updates, over which the schedule's rate is multiplied by a factor that falls "
        "linearly to zero; for schedules that end high, such as inverse_sqrt, noam and constant",
        minimum=1,
    )
    average_last: int | None = setting(
        None, "average the last so many checkpoints, kept if it validates better", minimum=1
    )
    average_best: int | None = setting(
        None,
        "average the best so many of the checkpoints that are left, kept if it validates better",
        minimum=1,
    )
    early_stopping_patience: int | None = setting(
        None, "evaluations without improvement after which training stops", minimum=1
    )
    overwrite: bool = setting(False, "move an earlier run's folder aside and start anew")
    resume_from_checkpoint: bool | str = setting(
        False, "continue from the last complete checkpoint, or from this one", is_path=True
    )
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_noam(self) -> bool:
        """Whether the learning rate follows the paper's schedule."""
        return self.lr_scheduler_type == "noam"

    def describe_schedule(self) -> str:
        """The learning rate over the updates, in words."""
        if self.is_noam:
            parts = ["the paper's schedule (Eq. 3)"]
        else:
            peak = self.arguments.get("learning_rate", 5e-5)
            parts = [f"{self.lr_scheduler_type}, at most {peak:g}"]
        steps = self.arguments.get("warmup_steps", 0)
        if 0 < steps < 1:
            parts.append(f"warmup over {100 * steps:g} % of the updates")
        elif steps:
            parts.append(f"warmup over the first {steps:,.0f}")
        if self.cooldown_steps is not None:
            parts.append(f"to zero over the last {self.cooldown_steps:,}")
        return ", ".join(parts)

    def trainer_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `Seq2SeqTrainingArguments`, as far as the recipe decides them.

        The Noam schedule is not among the Trainer's: with it, `lr_scheduler_type` is left out.
        """
        arguments = {"output_dir": self.output_dir, **self.arguments}
        if self.average_last is not None and arguments.get("save_total_limit") == self.average_last:
            # The best checkpoint, where one is told, takes a place: none of the last may leave.
            arguments["save_total_limit"] += 1
        if not self.is_noam:
            arguments["lr_scheduler_type"] = self.lr_scheduler_type
        return arguments


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """Section `evaluation`: what is measured and shown."""

    metrics: list[str] | None = setting(  # noqa: RUF009 - it makes a field
        None,
        f"any of {', '.join(METRIC_DESCRIPTIONS)}; {', '.join(TEXT_METRICS)} if null "
        "(task seq2seq; the others report their figures in any case)",
    )
    num_sample_predictions: int = setting(5, "predictions shown at the end of the run", minimum=0)
