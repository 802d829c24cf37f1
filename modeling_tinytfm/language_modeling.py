"""Task language_model: the next token of a text, by a decoder alone.

A text is `<s> tokens </s>`. One that is longer than the limit is cut into blocks that share one
token: the last of a block is the first of the next, where it is given and not predicted. So every
token of every text is predicted exactly once.
"""

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset, DatasetDict, Features, List, Value
from tokenizers import processors
from torch import Tensor
from transformers import DataCollatorForSeq2Seq

from .configuration_tinytfm import TinyTFMConfig
from .data import (
    PairSource,
    Report,
    SplitReport,
    cache_key,
    load_pairs,
    token_lengths,
    what_it_does,
)
from .metrics import perplexity
from .modeling_tinytfm import TinyTFMForCausalLM
from .reports import shortened
from .tasks import Column, Task, check_generation, files_of, longest_output
from .training import TinyTFMTrainer, smoothed_loss
from .translation import TokenScores, budget_batches, progress_bar

CONTINUATION = 64  # tokens that a new model writes unless the recipe says otherwise


class LanguageModelTrainer(TinyTFMTrainer):
    """Scores a language model by the token and by the character."""

    def lengths(self, dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of each block, and zeros: there is no target side."""
        lengths, _ = token_lengths(dataset)
        return lengths, np.zeros_like(lengths)

    def smoothed(self, model: Any, inputs: dict[str, Any], num_items: Any) -> tuple[Tensor, Any]:
        """The smoothed loss of each next token, and the model's outputs."""
        labels_BL = inputs.pop("labels")
        outputs = model(**inputs)
        next_BL = labels_BL[:, 1:]
        return smoothed_loss(outputs.logits[:, :-1], next_BL, self.smoothing, num_items), outputs

    @torch.inference_mode()
    def score(self, dataset: Dataset, prefix: str) -> tuple[dict[str, float], None]:
        """Scores encoded blocks, sharing them out among the processes; generates nothing."""
        mine = range(self.args.process_index, len(dataset), self.args.world_size)
        own = dataset.select(mine) if self.args.world_size > 1 else dataset
        collator: Any = self.data_collator
        blocks = own.select_columns(["input_ids", "labels"])
        total = TokenScores()
        was_training = self.model.training
        self.model.eval()
        with progress_bar("Scoring", len(own), self._show_progress()) as progress:
            for batch in budget_batches(token_lengths(own)[0].tolist(), self.eval_batch_tokens):
                inputs = collator([blocks[row] for row in batch]).to(self.args.device)
                next_BL = inputs.pop("labels")[:, 1:]
                with self.accelerator.autocast():
                    logits_BLV = self.model(**inputs, use_cache=False).logits[:, :-1].float()
                loss = torch.nn.functional.cross_entropy(
                    logits_BLV.flatten(0, 1), next_BL.flatten(), reduction="sum"
                )
                correct = (logits_BLV.argmax(-1) == next_BL).sum()
                total += TokenScores(loss.item(), int(correct), int((next_BL != -100).sum()))
                progress.update(len(batch))
        self.model.train(was_training)
        if self.args.world_size > 1:
            total = sum(gather_object([total]), TokenScores())
        loss_per_token = total.loss / max(total.tokens, 1)
        characters = sum(dataset["characters"][:])
        figures = {
            "loss": loss_per_token,
            "perplexity": perplexity(loss_per_token),
            "token_accuracy": total.correct / max(total.tokens, 1),
            "bits_per_character": total.loss / math.log(2) / max(characters, 1),
        }
        return {f"{prefix}_{name}": value for name, value in figures.items()}, None


class LanguageModel(Task):
    """Texts, a line or a row each."""

    trainer_class = LanguageModelTrainer
    rows = "texts"

    def read(self) -> tuple[DatasetDict, Report]:
        """Column `source`: the texts."""
        data = self.recipe.data
        return load_texts(
            files_of(data), data.text_column, data.group_column, data.max_train_samples
        )

    def read_file(self, path: str | Path) -> tuple[Dataset, SplitReport]:
        """The texts of one file."""
        texts, reports = load_texts({"test": path}, self.recipe.data.text_column)
        return texts["test"], reports["test"]

    def lines(self, rows: Dataset) -> Iterable[str]:
        """All texts."""
        return Column(rows, "source")

    def finish_tokenizer(self, tokenizer: Any) -> None:
        """A text begins with `<s>` and stays open, to be continued."""
        bos = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokenizer.bos_token_id)],
        )

    def encode(
        self, rows: Dataset, tokenizer: Any, *, training: bool, report: SplitReport | None = None
    ) -> tuple[Dataset, SplitReport]:
        """Blocks of token ids; labels are the same, but the first, which nothing predicts.

        Outside training each block has the texts of its halves, and the first of a text its number
        of characters.
        """
        data = self.recipe.data
        tokens = {"input_ids": List(Value("int32")), "labels": List(Value("int32"))}
        text = Value("string")
        told = {"characters": Value("int64"), "prompt": text, "reference": text}
        blocks = rows.map(
            _encode_blocks,
            batched=True,
            remove_columns=rows.column_names,
            fn_kwargs={
                "tokenizer": tokenizer,
                "limit": data.max_source_length,
                "with_texts": not training,
            },
            features=Features(tokens if training else {**tokens, **told}),
            num_proc=data.num_proc,
            new_fingerprint=cache_key(
                "blocks",
                rows._fingerprint,
                what_it_does(tokenizer),
                data.max_source_length,
                training,
            ),
            desc="Encoding texts",
        )
        return blocks, replace(report or SplitReport(pairs=len(rows)), blocks=len(blocks))

    def model(self, tokenizer: Any, train: Dataset) -> TinyTFMForCausalLM:
        """A new decoder, which knows how to continue a text."""
        config = TinyTFMConfig(
            vocab_size=len(tokenizer),
            is_encoder_decoder=False,
            is_decoder=True,
            **self.recipe.model,
        )
        model = TinyTFMForCausalLM(config)
        generation = dict(self.recipe.generation)
        if not {"max_length", "max_new_tokens"} & set(generation):
            generation["max_new_tokens"] = CONTINUATION
        model.generation_config.update(**generation)
        check_generation(model)
        return model

    def plan(self, model: Any) -> list[tuple[str, str]]:
        """How long continuations may become."""
        return [("outputs", f"up to {longest_output(model)} further tokens")]

    def example(self, row: dict[str, Any]) -> str:
        """The text."""
        return shortened(row["source"])

    def collator(self, tokenizer: Any, model: Any) -> DataCollatorForSeq2Seq:
        """Pads token ids and labels."""
        return DataCollatorForSeq2Seq(tokenizer)

    def predict(self, trainer: TinyTFMTrainer, rows: Dataset) -> list[str]:
        """Continuations of the first half of each block."""
        model, tokenizer = trainer.model, trainer.processing_class
        prompts = [ids[: half(ids)] for ids in rows["input_ids"][:]]
        texts = [""] * len(prompts)
        longest = longest_output(model)
        positions = math.inf
        if model.config.position_embedding_type == "learned":
            positions = model.config.max_position_embeddings
        with progress_bar("Continuing", len(prompts), trainer._show_progress()) as progress:
            lengths = [len(ids) + longest for ids in prompts]
            for batch in budget_batches(lengths, trainer.eval_batch_tokens):
                width = max(len(prompts[row]) for row in batch)
                inputs = tokenizer.pad(
                    {"input_ids": [prompts[row] for row in batch]},
                    padding_side="left",
                    return_tensors="pt",
                ).to(model.device)
                sequences = model.generate(
                    **inputs, max_new_tokens=int(min(longest, positions - width))
                )
                for row, ids in zip(batch, sequences[:, width:], strict=True):
                    texts[row] = tokenizer.decode(ids, skip_special_tokens=True)
                progress.update(len(batch))
        return texts

    def records(self, rows: Dataset, predictions: list[str]) -> Iterator[dict[str, Any]]:
        """`prompt`, `prediction` and `reference`, the text's own continuation."""
        texts = zip(rows["prompt"][:], rows["reference"][:], predictions, strict=True)
        for prompt, reference, prediction in texts:
            yield {"prompt": prompt, "prediction": prediction, "reference": reference}

    def describe(self, record: dict[str, Any]) -> str:
        """`prompt  ->  prediction`."""
        return f"{shortened(record['prompt'])}  ->  {shortened(record['prediction'])}"

    def next_step(self, folder: Path) -> str:
        """How to score it on other data."""
        return f"python scripts/evaluate_model.py {shlex.quote(str(folder))} --file FILE"


def half(ids: list[int]) -> int:
    """Tokens of a block that are given when the rest is predicted; at least one."""
    return max(1, len(ids) // 2)


def _encode_blocks(
    rows: dict[str, list[str]], tokenizer: Any, limit: int | None, with_texts: bool
) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {"input_ids": [], "labels": []}
    if with_texts:
        columns |= {"characters": [], "prompt": [], "reference": []}
    texts = rows["source"]
    for text, ids in zip(texts, tokenizer(texts, verbose=False)["input_ids"], strict=True):
        ids = [*ids, tokenizer.eos_token_id]
        step = len(ids) if limit is None else limit - 1
        for start in range(0, len(ids) - 1, step):
            block = ids[start : start + step + 1]
            columns["input_ids"].append(block)
            columns["labels"].append([-100, *block[1:]])
            if with_texts:
                columns["characters"].append(0 if start else len(text))
                parts = (block[: half(block)], block[half(block) :])
                for name, part in zip(("prompt", "reference"), parts, strict=True):
                    columns[name].append(tokenizer.decode(part, skip_special_tokens=True))
    return columns


def load_texts(
    files: Mapping[str, PairSource],
    column: str,
    group_column: str | None = None,
    max_train_samples: int | None = None,
) -> tuple[DatasetDict, Report]:
    """Reads texts and splits them as `data.load_pairs` does pairs.

    Args:
        files: Of "train", "validation" and "test": a .txt file with a text a line, a file with
            named columns, or a data set.
        column: Holds the texts, where there are columns.
        group_column: See `data.load_pairs`.
        max_train_samples: See there.

    Returns:
        The splits with their column `source`, and the report of each.

    Raises:
        ValueError: See `data.load_pairs`.
        OSError: See there.
    """
    # A text is read as a pair of itself: what pairs are checked for and split by holds for it, too.
    read = {
        split: (file, file) if str(file).lower().removesuffix(".gz").endswith(".txt") else file
        for split, file in files.items()
        if not isinstance(file, Dataset)
    }
    splits, report = load_pairs(
        {**files, **read},
        source_column=column,
        target_column=column,
        group_column=group_column,
        max_train_samples=max_train_samples,
        count_targets=False,
    )
    return splits.select_columns("source"), report
