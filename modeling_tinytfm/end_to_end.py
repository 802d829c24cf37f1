"""Whole jobs beside peers: training on pairs of texts, translating lines, pronouncing words.

See `benchmarking` for how they take turns. Everybody gets the same token ids.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from torch import Tensor, nn
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

from .benchmarking import MARIAN, OURS, Size, Timing, compared, in_turns, installed
from .conversion import to_marian
from .data import encode_pairs
from .exporting import export_model
from .loading import load_model, load_translator
from .metrics import compute_metrics
from .tokenization import train_tokenizer
from .training import TinyTFMTrainer
from .translation import BATCH_TOKENS, translate

JOEYNMT, PHONETISAURUS = "JoeyNMT", "Phonetisaurus"
SMOOTHING = 0.1
WARM_UP = 3  # updates at the beginning of a turn that do not count
EXPORTED = f"{OURS}, exported int8"
CTRANSLATE2 = "CTranslate2 int8"
CHUNK = 32  # lines that MarianMT gets at a time, as they come


class _Metered:
    """Counts real target tokens, and the time that they take, data and optimizer included."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.starts: list[float] = []
        self.tokens: list[int] = []

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any) -> Tensor:
        """A step, whose beginning is noted."""
        self.starts.append(time.perf_counter())
        self.tokens.append(int((inputs["labels"] != -100).sum()))
        return super().training_step(model, inputs, *args)  # type: ignore[misc]

    def seconds_a_token(self) -> float:
        """From the first step that counts to the beginning of the last one."""
        return (self.starts[-1] - self.starts[WARM_UP]) / sum(self.tokens[WARM_UP:-1])


class _MeteredTinyTFM(_Metered, TinyTFMTrainer):
    pass


class _MeteredSeq2Seq(_Metered, Seq2SeqTrainer):
    pass


def encoded(sources: Sequence[str], targets: Sequence[str], vocab_size: int) -> tuple[Any, Dataset]:
    """A joint BPE vocabulary of two texts, and the token ids of their lines."""
    tokenizer = train_tokenizer([*sources, *targets], vocab_size=vocab_size, show_progress=False)
    rows = Dataset.from_dict({"source": list(sources), "target": list(targets)})
    limits: dict[str, Any] = {"max_source_length": 256, "max_target_length": 256}
    return tokenizer, encode_pairs(rows, tokenizer, drop_too_long=True, **limits)[0]


def training_speed(
    tokenizer: Any,
    rows: Dataset,
    size: Size,
    *,
    max_tokens: int,
    updates: int,
    rounds: int,
    bf16: Sequence[bool] = (False, True),
    use_cpu: bool = True,
    joeynmt: bool = False,
) -> list[Timing]:
    """Seconds a real target token, end to end: whole Trainers in turns, each from the start.

    TinyTFM has batches of a token budget; MarianMT has the stock Seq2SeqTrainer and collator in
    float32, with as many pairs a batch as TinyTFM has on average; JoeyNMT its own training, with
    half the budget for each side. Smoothing is 0.1 and the optimizer AdamW for all.

    Args:
        tokenizer: Of the pairs.
        rows: Their token ids.
        size: Of the model.
        max_tokens: TinyTFM's budget, source and target, padding included.
        updates: Of each turn, above 4.
        rounds: Turns of each.
        bf16: TinyTFM's precisions.
        use_cpu: Whether a GPU is left alone.
        joeynmt: Whether JoeyNMT takes part.
    """
    model = size.model()
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:

        def arguments(**changes: Any) -> Seq2SeqTrainingArguments:
            return Seq2SeqTrainingArguments(
                folder,
                max_steps=updates,
                label_smoothing_factor=SMOOTHING,
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                report_to=[],
                use_cpu=use_cpu,
                **changes,
            )

        def run(trainer: Any) -> float:
            trainer.train()
            return trainer.seconds_a_token()

        common: dict[str, Any] = {"train_dataset": rows, "data_collator": collator}
        for _ in range(rounds):
            turn: dict[str, float] = {}
            for precise in bf16:
                settings = arguments(bf16=precise)
                ours = _MeteredTinyTFM(size.model(), settings, max_tokens=max_tokens, **common)
                turn[f"{OURS}, {'bf16' if precise else 'fp32'}"] = run(ours)
            pairs = ours.get_total_train_batch_size(settings)
            turn[MARIAN] = run(
                _MeteredSeq2Seq(
                    to_marian(size.model()), arguments(per_device_train_batch_size=pairs), **common
                )
            )
            if joeynmt:
                turn[JOEYNMT] = _joeynmt_speed(
                    rows, size, max_tokens // 2, updates, Path(folder), use_cpu
                )
            for name, seconds in turn.items():
                times.setdefault(name, []).append(seconds)
    return compared(times)


def _joeynmt_speed(
    rows: Dataset, size: Size, tokens: int, updates: int, folder: Path, use_cpu: bool
) -> float:
    """Seconds a target token, as JoeyNMT logs them; its words are our token ids, as digits."""
    texts = {
        end: [" ".join(map(str, ids[:-1])) for ids in rows[name][:]]
        for end, name in (("src", "input_ids"), ("trg", "labels"))
    }
    vocabulary = sorted({word for end in texts.values() for line in end for word in line.split()})
    for end, lines in texts.items():
        (folder / f"train.{end}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "vocabulary").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    side = {
        "level": "word",
        "voc_file": str(folder / "vocabulary"),
        "lowercase": False,
        "max_length": 256,
    }
    stack = {
        "type": "transformer",
        "num_layers": size.layers,
        "num_heads": size.heads,
        "embeddings": {"embedding_dim": size.d_model, "scale": True, "dropout": 0.0},
        "hidden_size": size.d_model,
        "ff_size": size.ffn_dim,
        "dropout": size.dropout,
        "layer_norm": "post",
    }
    settings = {
        "name": "benchmark",
        "joeynmt_version": "2.3.0",
        "model_dir": str(folder / "joeynmt"),
        "use_cuda": torch.cuda.is_available() and not use_cpu,
        "fp16": False,
        "random_seed": 1,
        "data": {
            "train": str(folder / "train"),
            "dev": str(folder / "train"),  # it wants one
            "dataset_type": "plain",
            "src": {"lang": "src", **side},
            "trg": {"lang": "trg", **side},
        },
        "testing": {"beam_size": 1, "batch_size": 8, "batch_type": "sentence"},
        "training": {
            "optimizer": "adamw",
            "learning_rate": 1e-3,
            "learning_rate_min": 1e-9,
            "scheduling": "warmupinversesquareroot",
            "learning_rate_warmup": 100,
            "loss": "crossentropy",
            "label_smoothing": SMOOTHING,
            "normalization": "tokens",
            "batch_type": "token",
            "batch_size": tokens,
            "updates": updates,
            "epochs": 1000,
            "logging_freq": WARM_UP,
            "validation_freq": WARM_UP * 10**8,
            "overwrite": True,
            "shuffle": True,
        },
        "model": {
            "initializer": "xavier_uniform",
            "embed_initializer": "xavier_uniform",
            "tied_embeddings": True,
            "tied_softmax": True,
            "encoder": stack,
            "decoder": stack,
        },
    }
    file = folder / "joeynmt.yaml"
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        [sys.executable, "-m", "joeynmt", "train", str(file), "--skip-test"],
        env={**os.environ, **threads},
        capture_output=True,
        text=True,
    )
    speeds = re.findall(r"Tokens per Sec: *(\d+)", done.stdout + done.stderr)[1:]
    if not speeds:
        raise RuntimeError(f"JoeyNMT logged no speed: {(done.stdout + done.stderr)[-2000:]}")
    return len(speeds) / sum(map(float, speeds))


def translation_speed(
    folder: str | Path,
    lines: Sequence[str],
    num_beams: int,
    rounds: int,
    exported_only: bool = False,
) -> list[Timing]:
    """Seconds to translate lines, in text and out text, with a trained model.

    Contenders are `translate`; MarianMT.generate over the lines as they come, 32 at a time, padded
    by its tokenizer; and, where CTranslate2 is installed, `translate` on the model exported as int8
    and CTranslate2 itself on the same files, called with all lines at once.

    Args:
        folder: A trained model.
        lines: Source lines.
        num_beams: Width of the search.
        rounds: That count.
        exported_only: Whether just the exported model and CTranslate2 take part.

    Raises:
        RuntimeError: If outputs differ: more than one line in a hundred where the weights are the
            same, more than half of them where those of one are rounded to 8 bits.
    """
    model, tokenizer = load_model(folder)
    limit = max(len(ids) for ids in tokenizer(list(lines))["input_ids"]) + 50
    options: dict[str, Any] = {"num_beams": num_beams, "max_new_tokens": limit}

    def of_marian() -> list[str]:
        outputs: list[str] = []
        for start in range(0, len(lines), CHUNK):
            batch = tokenizer(list(lines[start : start + CHUNK]), padding=True, return_tensors="pt")
            batch.pop("token_type_ids", None)
            with torch.inference_mode():
                ids = marian.generate(**batch.to(marian.device), **options)
            outputs += tokenizer.batch_decode(ids, skip_special_tokens=True)
        return outputs

    with tempfile.TemporaryDirectory() as output:
        contenders: dict[str, Callable[[], list[str]]] = {}
        same_weights = []
        if not exported_only:
            marian = to_marian(model).eval()
            contenders[OURS] = lambda: translate(
                model, tokenizer, lines, show_progress=False, **options
            )
            contenders[MARIAN] = of_marian
            same_weights.append((OURS, MARIAN))
        if installed("ctranslate2"):
            contenders |= _exported(folder, Path(output) / "int8", lines, options)
            same_weights.append((EXPORTED, CTRANSLATE2))
        outputs = {name: run() for name, run in contenders.items()}
        for first, other in same_weights:
            agreement(outputs, first, other)
        if {OURS, EXPORTED} <= set(outputs):
            agreement(outputs, OURS, EXPORTED, tolerated=0.5)
        return in_turns(contenders, rounds)


def _exported(
    folder: str | Path, output: Path, lines: Sequence[str], options: dict[str, Any]
) -> dict[str, Callable[[], list[str]]]:
    """The model exported as int8, by `translate` and by CTranslate2 alone."""
    from .ctranslate2_model import PATIENCE, ctranslate2

    export_model(folder, "ctranslate2", output, quantization="int8")
    exported, tokenizer = load_translator([output])
    alone = ctranslate2.Translator(str(output), intra_threads=torch.get_num_threads())

    def direct() -> list[str]:
        rows = tokenizer(list(lines))["input_ids"]
        results = alone.translate_batch(
            [tokenizer.convert_ids_to_tokens(ids) for ids in rows],
            beam_size=options["num_beams"],
            patience=PATIENCE if options["num_beams"] > 1 else 1,  # as `translate`
            max_decoding_length=options["max_new_tokens"],
            max_batch_size=BATCH_TOKENS,
            batch_type="tokens",
            max_input_length=0,
        )
        outputs = [tokenizer.convert_tokens_to_ids(one.hypotheses[0]) for one in results]
        return tokenizer.batch_decode(outputs, skip_special_tokens=True)

    return {
        EXPORTED: lambda: translate(exported, tokenizer, lines, show_progress=False, **options),
        CTRANSLATE2: direct,
    }


def phonetisaurus(
    training: Iterable[tuple[str, str]], words: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Trains Phonetisaurus and has it pronounce words it has not seen.

    It aligns letters with phonemes by EM, counts n-grams of what was aligned, and searches the
    transducer made of them (Novak, Minematsu and Hirose 2016); with its own settings.

    Args:
        training: Words and their phonemes, with spaces between; a word may occur again.
        words: What to pronounce.
        references: All pronunciations of each.

    Returns:
        `wer` and `per`, and the `seconds` that training took.

    Raises:
        RuntimeError: If it fails.
    """

    def run(*arguments: str, text: str | None = None) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "phonetisaurus", *arguments],
            input=text,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"Phonetisaurus failed: {done.stderr[-2000:]}")
        return done.stdout

    with tempfile.TemporaryDirectory() as folder:
        lexicon, model = Path(folder) / "lexicon", Path(folder) / "model.fst"
        lines = (f"{word} {phonemes}\n" for word, phonemes in training)
        lexicon.write_text("".join(lines), encoding="utf-8")
        start = time.perf_counter()
        run("train", "--model", str(model), str(lexicon))
        seconds = time.perf_counter() - start
        spoken = run("predict", "--model", str(model), text="".join(f"{word}\n" for word in words))
    # It leaves out words that it cannot read.
    phonemes_of = dict(line.partition(" ")[::2] for line in spoken.splitlines())
    outputs = [phonemes_of.get(word, "") for word in words]
    return {**compute_metrics(("wer", "per"), outputs, references)[0], "seconds": seconds}


def agreement(
    outputs: dict[str, list[str]], first: str, other: str, tolerated: float = 0.01
) -> None:
    """Raises RuntimeError if a larger share of the lines of two contenders differs than tolerated.

    A few may always: sums in another order tip a close decision.
    """
    pairs = list(zip(outputs[first], outputs[other], strict=True))
    different = sum(a != b for a, b in pairs)
    if different > tolerated * len(pairs):
        raise RuntimeError(f"{different} of {len(pairs)} lines of {first} and {other} differ")
