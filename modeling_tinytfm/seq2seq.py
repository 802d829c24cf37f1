"""Task seq2seq: target text from source text."""

import math
import shlex
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, concatenate_datasets
from transformers import DataCollatorForSeq2Seq, TrainingArguments

from .batching import PairBatchSampler
from .configuration_tinytfm import TinyTFMConfig
from .data import (
    Report,
    SplitReport,
    cmudict_pairs,
    encode_pairs,
    load_pairs,
    reverse_pairs,
    text_key,
    token_lengths,
)
from .decoding import EXTRA_TOKENS
from .encoding import PairEncoder
from .loading import load_start
from .modeling_tinytfm import TinyTFMForConditionalGeneration
from .recipe_checks import check_positions
from .recipes import Recipe
from .reports import shortened
from .resegmentation import ResegmentedPairs
from .search import OF_BEAMS, keep_penalty_form, without_beams
from .streaming import PairStream, Stream
from .tasks import SPLITS, Column, Task, check_generation, files_of, longest_output
from .training import TinyTFMTrainer, batch_options
from .translation import translate


class Seq2Seq(Task):
    """Pairs of texts; predictions are generated."""

    rows = "pairs"

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self.stream: Stream | None = None
        self.held_out: frozenset[int] = frozenset()

    def read(self) -> tuple[DatasetDict, Report]:
        """The pairs of all splits, from files, a data set or a generator."""
        data = self.recipe.data
        if data.generator == "reverse":
            sizes = (
                {} if data.max_train_samples is None else {"train_pairs": data.max_train_samples}
            )
            return reverse_pairs(seed=data.seed, **sizes)
        if data.generator == "cmudict":
            texts, reports = cmudict_pairs()
            if data.max_train_samples is not None:
                pairs = len(texts["train"])
                kept = min(pairs, data.max_train_samples)
                texts["train"] = texts["train"].select(range(kept))
                reports["train"] = SplitReport(pairs=kept, over_max_train_samples=pairs - kept)
            return texts, reports
        files = files_of(data)
        given = set(files)
        if data.streaming:
            columns = (data.source_column, data.target_column)
            self.stream = Stream.of(files["train"], columns, "train")
            files["train"] = self.stream.front(data.streaming_sample)
            for split in given - {"train"}:
                if isinstance(files[split], IterableDataset):
                    files[split] = Stream.of(files[split], columns, split).front(None)
        texts, reports = load_pairs(
            files,
            source_column=data.source_column,
            target_column=data.target_column,
            group_column=data.group_column,
            max_train_samples=data.max_train_samples,
            merge_references=data.merge_references,
        )
        if data.streaming:
            reports["train"] = replace(reports["train"], streamed=True)
            self.held_out = frozenset(
                text_key(source)
                for split in set(SPLITS) - given
                for source in texts[split]["source"]
            )
        return texts, reports

    def read_file(self, path: str | Path) -> tuple[Dataset, SplitReport]:
        """The pairs of one file, with the recipe's columns."""
        data = self.recipe.data
        texts, reports = load_pairs(
            {"test": path},
            source_column=data.source_column,
            target_column=data.target_column,
            merge_references=data.merge_references,
        )
        return texts["test"], reports["test"]

    def lines(self, rows: Dataset) -> Column:
        """All texts of both sides."""
        return Column(rows, "source", "target")

    def encode(
        self, rows: Dataset, tokenizer: Any, *, training: bool, report: SplitReport | None = None
    ) -> tuple[Dataset, SplitReport]:
        """Token ids of both sides; outside training beside the texts that they come from."""
        data = self.recipe.data
        encoded, report = encode_pairs(
            rows,
            tokenizer,
            max_source_length=data.max_source_length,
            max_target_length=data.max_target_length,
            drop_too_long=training,
            num_proc=data.num_proc,
            report=report,
            keep_texts=training and self.recipe.tokenizer.bpe_dropout > 0,
        )
        if training:
            return encoded, report
        texts = rows.select_columns(["source", "references"])
        return concatenate_datasets([encoded, texts], axis=1), report

    def feed(self, rows: Dataset, tokenizer: Any, arguments: TrainingArguments) -> Any:
        """The encoded pairs; what encodes them anew each epoch; or a stream of pairs."""
        data, dropout = self.recipe.data, self.recipe.tokenizer.bpe_dropout
        if self.stream is None and not dropout:
            return rows
        options = batch_options(arguments, data.max_tokens)
        if self.stream is None:
            PairBatchSampler(*token_lengths(rows), **options)  # refuses a pair above the budget
        encoder = PairEncoder(
            tokenizer,
            max_source_length=data.max_source_length,
            max_target_length=data.max_target_length,
            max_tokens=data.max_tokens,
            bpe_dropout=dropout,
        )
        if self.stream is None:
            is_watched = arguments.process_index == 0 and not arguments.disable_tqdm
            return ResegmentedPairs(rows, encoder, show_progress=None if is_watched else False)
        return PairStream(
            self.stream,
            encoder,
            rows,
            **options,
            buffer=data.streaming_buffer,
            held_out=self.held_out,
        )

    def model(self, tokenizer: Any, train: Dataset) -> TinyTFMForConditionalGeneration:
        """A new encoder-decoder, or the one to go on from, which knows how to generate."""
        settings = dict(self.recipe.model)
        start = settings.pop("from_pretrained", None)
        if start is None:
            config = TinyTFMConfig(vocab_size=len(tokenizer), **settings)
            if config.position_embedding_type == "sinusoidal":  # which have no end of their own
                longest_source = self.recipe.data.max_source_length or token_lengths(train)[0].max()
                config.max_position_embeddings = max(
                    config.max_position_embeddings, int(longest_source)
                )
            model = TinyTFMForConditionalGeneration(config)
        else:
            model = load_start(start, settings, len(tokenizer))
        config = model.config
        generation = dict(self.recipe.generation)
        penalty_form = generation.pop("length_penalty_form", None)
        if generation.get("num_beams") == 1:  # an override: what the recipe says for beams rests
            penalty_form = None
            for name in OF_BEAMS:
                generation.pop(name, None)
            if start is not None:
                model.generation_config = without_beams(model.generation_config)
        positions = math.inf
        if config.position_embedding_type == "learned":
            positions = config.max_position_embeddings
            check_positions(self.recipe, positions)  # of a trained model nobody knew them before
        if not {"max_length", "max_new_tokens"} & set(generation):
            # As far as training reached, and some more; transformers' own default is 20.
            _, target_lengths = token_lengths(train)
            generation["max_new_tokens"] = min(int(target_lengths.max()) + EXTRA_TOKENS, positions)
        model.generation_config.update(**generation)
        longest = longest_output(model)
        if longest > positions:
            raise ValueError(
                f"generation lets outputs grow to {longest} tokens, above the learned positions, "
                f"model.max_position_embeddings={positions}"
            )
        check_generation(model)
        if penalty_form is not None:
            keep_penalty_form(model, penalty_form)
        return model

    def plan(self, model: Any) -> list[tuple[str, str]]:
        """How long outputs may become, and what cannot be repeated."""
        lines = [("outputs", f"up to {longest_output(model)} tokens")]
        if self.recipe.tokenizer.lowercase:
            lines.append(
                ("lower case", "of outputs alone: references keep their capitals, and count them")
            )
        if self.recipe.tokenizer.bpe_dropout:
            lines.append(
                (
                    "BPE dropout",
                    f"{self.recipe.tokenizer.bpe_dropout}, drawn anew each epoch, by no seed: this "
                    "run cannot be repeated bit for bit, and its epochs differ by some updates",
                )
            )
        if self.stream is not None:
            lines.append(
                (
                    "stream",
                    f"{self.recipe.data.streaming_buffer:,} rows at a time are shuffled and "
                    "batched together; after the last row it begins again, shuffled anew. There "
                    "are no epochs of exact length; resuming reads it again up to where it "
                    "stopped, and need not be exact to the bit",
                )
            )
        return lines

    def example(self, row: dict[str, Any]) -> str:
        """`source  ->  target`."""
        return f"{shortened(row['source'])}  ->  {shortened(row['target'])}"

    def collator(self, tokenizer: Any, model: Any) -> DataCollatorForSeq2Seq:
        """Pads both sides. The model shifts the targets: workers cannot always be sent one."""
        return DataCollatorForSeq2Seq(tokenizer)

    def predict(self, trainer: TinyTFMTrainer, rows: Dataset) -> list[str]:
        """Generated targets."""
        return translate(
            trainer.model,
            trainer.processing_class,
            rows["source"][:],
            max_source_length=self.recipe.data.max_source_length,
            batch_tokens=trainer.eval_batch_tokens,
        )

    def records(self, rows: Dataset, predictions: list[str]) -> Iterator[dict[str, Any]]:
        """`source`, `prediction`, `references`."""
        for row, prediction in zip(rows, predictions, strict=True):
            yield {
                "source": row["source"],
                "prediction": prediction,
                "references": row["references"],
            }

    def describe(self, record: dict[str, Any]) -> str:
        """`source  ->  prediction`, and a reference where the prediction is none."""
        line = f"{shortened(record['source'])}  ->  {shortened(record['prediction'])}"
        prediction, *references = (
            unicodedata.normalize("NFC", text)  # as the metrics compare
            for text in (record["prediction"], *record["references"])
        )
        if prediction not in references:
            line += f"  (reference: {shortened(record['references'][0])})"
        return line

    def next_step(self, folder: Path) -> str:
        """How to translate with it."""
        return f"python scripts/translate.py {shlex.quote(str(folder))}"
