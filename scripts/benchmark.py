"""Measure TinyTFM beside its peers: the same work, in turns, in one run.

  train-step  a training step on one padded batch: MarianMT, nn.Transformer
  train       training on a file of pairs, end to end: MarianMT, JoeyNMT
  generate    generate(), greedy and beam search: MarianMT
  translate   lines through a trained model: MarianMT, CTranslate2
  pronounce   words of CMUdict, errors and time of training: Phonetisaurus
  memory      peak memory of a training step: MarianMT
  scaling     time and memory as length, batch, vocabulary or depth grow
  import      importing the package: transformers' own classes

A ratio above 1 means that TinyTFM is faster, or needs less. Ratios are medians over the rounds,
with their quartiles.
"""

if __name__ == "__main__":
    import environment

    environment.prepare()  # before torch is loaded

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from modeling_tinytfm import benchmarking, end_to_end
from modeling_tinytfm.benchmarking import MARIAN, OURS, SIZES, Size
from modeling_tinytfm.machine import cpu_multiplies_bf16, use_threads
from modeling_tinytfm.translation import read_lines

Rows = list[dict[str, Any]]
QUICK = Size(32, 1, 64, 2, 100, 4, 8)
IMPORTS = {
    OURS: "import modeling_tinytfm",
    "transformers": "from transformers import AutoModelForSeq2SeqLM, MarianMTModel",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, measures and prints; returns the exit status."""
    options = parse(argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    threads = use_threads(options.threads or None)
    try:
        if options.device != "cpu" and options.work not in ON_ANY_DEVICE:
            raise ValueError(f"--device {options.device} means nothing to {options.work}")
        rows = WORKS[options.work](options)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        print(f"benchmark.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    for row in rows:
        print(described(row))
    if options.json:
        facts = {
            "work": options.work,
            "device": device_name(options.device),
            "threads": threads,
            "preloaded": os.environ.get("LD_PRELOAD"),
            "rounds": options.rounds,
            "clock": "CPU time" if options.cpu_time else "time",
            "versions": {
                "Python": platform.python_version(),
                **{name: version(name) for name in ("torch", "transformers")},
            },
            "rows": rows,
        }
        Path(options.json).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of a command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--json", help="also write all figures, unrounded, into this file")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--threads", type=int, help="of the CPU (default: all cores)")
    parser.add_argument(
        "--cpu-time", action="store_true", help="time of the process, for a machine others use, too"
    )
    parser.add_argument("--rounds", type=int, default=9, help="that count (default: 9)")
    parser.add_argument("--size", nargs="+", choices=SIZES, help="default: those of README")
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=("fp32", "bf16"),
        help="train-step, train: default: fp32, and bf16 where the processor has it",
    )
    parser.add_argument("--compile", action="store_true", help="TinyTFM under torch.compile, too")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--pairs", nargs=2, metavar=("SOURCE", "TARGET"), help="train: two files")
    parser.add_argument("--updates", type=int, default=40, help="train: of a turn (default: 40)")
    parser.add_argument("--model", help="translate, pronounce: a folder that train.py made")
    parser.add_argument("--lines", help="translate: a file of source lines, plain or .gz")
    parser.add_argument("--num-beams", type=int, default=4, help="translate (default: 4)")
    parser.add_argument(
        "--exported", action="store_true", help="translate: CTranslate2 alone as the only peer"
    )
    parser.add_argument("--picture", help="scaling: draw the curves into this .png, replaced")
    return parser.parse_args(argv)


def sizes(options: argparse.Namespace, *default: str) -> list[Size]:
    """The sizes to measure."""
    return [QUICK] if options.quick else [SIZES[name] for name in options.size or default]


def precisions(options: argparse.Namespace) -> list[str]:
    """What to compute in."""
    if options.precision:
        return list(options.precision)
    imitated = options.device == "cpu" and cpu_multiplies_bf16() is False
    if imitated and not options.quick:
        print(
            "without bf16, which this processor only imitates: --precision bf16 measures it",
            file=sys.stderr,
        )
        return ["fp32"]
    return ["fp32", "bf16"]


def in_turns(options: argparse.Namespace, contenders: dict[str, Any]) -> list[Any]:
    """See `benchmarking.in_turns`; by the clock that was asked for."""
    wait = benchmarking.waiter(options.device)
    clock = time.process_time if options.cpu_time else time.perf_counter
    return benchmarking.in_turns(contenders, options.rounds, wait, clock)


def train_step(options: argparse.Namespace) -> Rows:
    """A training step, and what all contenders have in common."""
    rows: Rows = []
    wanted = precisions(options)
    for size in sizes(options, "d128", "d64", "d256", "base"):
        for precision in wanted:
            bf16 = precision == "bf16"
            steps = benchmarking.training_steps(size, options.device, bf16, options.compile)
            facts: dict[str, Any] = {"size": str(size), "precision": precision}
            share = benchmarking.common_share(steps[OURS])
            for timing in in_turns(options, dict(steps)):
                speed = benchmarking.throughput(size, steps[OURS].batch, timing.seconds, bf16)
                rows.append({**facts, **asdict(timing), "common_share": share, **speed})
    return rows


def train(options: argparse.Namespace) -> Rows:
    """Training on a file of pairs."""
    if options.pairs is None:
        raise ValueError("train: name two files, line by line, with --pairs SOURCE TARGET")
    size, max_tokens = replace(SIZES["d128"], rows=0, length=0), 8192
    if options.quick:
        size, max_tokens = replace(QUICK, rows=0, length=0), 256
    has_joeynmt = optional("joeynmt", "joeynmt==2.3.0 importlib-metadata")
    sources, targets = (lines_of(path) for path in options.pairs)
    tokenizer, rows = end_to_end.encoded(sources, targets, size.vocab_size)
    size = replace(size, vocab_size=len(tokenizer))
    timings = end_to_end.training_speed(
        tokenizer,
        rows,
        size,
        max_tokens=max_tokens,
        updates=options.updates,
        rounds=options.rounds,
        bf16=[precision == "bf16" for precision in precisions(options)],
        use_cpu=options.device == "cpu",
        joeynmt=has_joeynmt,
    )
    facts = {"size": f"{str(size).rpartition(',')[0]}, {len(rows):,} pairs"}
    return [
        {**facts, **asdict(timing), "target_tokens_per_second": 1 / timing.seconds}
        for timing in timings
    ]


def generate(options: argparse.Namespace) -> Rows:
    """Generation by greedy search and with 4 beams."""
    rows: Rows = []
    for size in sizes(options, "d256"):
        size = size if options.size or options.quick else replace(size, rows=16)
        for num_beams in (1, 4):
            contenders = benchmarking.generators(
                size, num_beams, size.length, options.device, options.compile
            )
            facts = {"size": str(size), "num_beams": num_beams}
            rows += benchmarking.as_rows(in_turns(options, contenders), **facts)
    return rows


def translate(options: argparse.Namespace) -> Rows:
    """Lines through a trained model."""
    if options.model is None or options.lines is None:
        raise ValueError("translate: name a folder with --model, and source lines with --lines")
    lines = lines_of(options.lines)
    here = optional("ctranslate2", "'modeling-tinytfm[ctranslate2]'")
    if options.exported and not here:
        raise ValueError("translate: --exported needs ctranslate2")
    timings = end_to_end.translation_speed(
        options.model, lines, options.num_beams, options.rounds, exported_only=options.exported
    )
    return benchmarking.as_rows(timings, size=f"{len(lines):,} lines", num_beams=options.num_beams)


def pronounce(options: argparse.Namespace) -> Rows:
    """Errors on the test words of configs/cmudict_g2p.yaml, and what training took."""
    from modeling_tinytfm.data import cmudict_pairs
    from modeling_tinytfm.recipes import RECIPE_FILE, load_recipe
    from modeling_tinytfm.run_folder import RUN_FILE, finished_scores

    rows: Rows = []
    if options.model is not None:
        folder = Path(options.model)
        scores = finished_scores(folder)
        if scores is None or load_recipe(folder / RECIPE_FILE).data.generator != "cmudict":
            raise ValueError(f"--model {options.model} is no finished run of cmudict_g2p.yaml")
        run = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        seconds = run.get("training_seconds") or scores["train_runtime"]
        errors = {"wer": scores["test_wer"], "per": scores["test_per"]}
        rows.append({"name": OURS, **errors, "seconds": seconds})
    splits, _ = cmudict_pairs()
    train, test = splits["train"], splits["test"]
    if options.quick:
        train, test = train.select(range(500)), test.select(range(50))
    if optional("phonetisaurus", "phonetisaurus==0.3.0"):
        pairs = zip(train["source"][:], train["target"][:], strict=True)
        of_peer = end_to_end.phonetisaurus(pairs, test["source"][:], test["references"][:])
        rows.append({"name": end_to_end.PHONETISAURUS, **of_peer})
    return [{"size": f"{len(test):,} words", **row} for row in rows]


def memory(options: argparse.Namespace) -> Rows:
    """Peak memory: model, optimizer, batch and two steps, above what importing takes."""
    rows: Rows = []
    # 8,192 tokens, source and target
    for size in [QUICK] if options.quick else [replace(SIZES["base"], rows=128, length=32)]:
        peaks = {}
        for name in (OURS, MARIAN):
            if options.device == "cpu":
                peaks[name] = benchmarking.alone(benchmarking.peak_memory, name, size)
            else:
                peaks[name] = benchmarking.peak_memory(name, size, True, options.device)
        for name, peak in peaks.items():
            facts = {"size": str(size), "name": name, "mebibytes": peak / 2**20}
            rows.append({**facts, "ratio": peak / peaks[OURS]})
    return rows


def scaling(options: argparse.Namespace) -> Rows:
    """Time and memory of a step as something grows, and of cached steps of generation."""
    base = QUICK if options.quick else Size(128, 2, 256, 4, 2000, 4, 64)
    doublings = [1, 2, 4] if options.quick else [1, 2, 4, 8, 16]
    grown = {
        "source and target length": [replace(base, length=base.length * n) for n in doublings],
        "batch size": [replace(base, rows=base.rows * n) for n in doublings],
        "vocabulary": [replace(base, vocab_size=base.vocab_size * n) for n in doublings],
        "layers": [replace(base, layers=n) for n in doublings[:4]],
    }
    fields = ("length", "rows", "vocab_size", "layers")
    curves = [
        benchmarking.curve(
            what, [(getattr(size, field), size) for size in variants], options.rounds
        )
        for (what, variants), field in zip(grown.items(), fields, strict=True)
    ]
    if options.picture:
        benchmarking.draw_growth(curves, options.picture)
    rows: Rows = [
        {
            "size": str(base),
            "name": one.what,
            **asdict(one),
            "time_exponent": one.exponents()[0],
            "memory_exponent": one.exponents()[1],
        }
        for one in curves
    ]
    short, long = (5, 20) if options.quick else (100, 1000)
    step = benchmarking.cached_step_ratio(base, short, long, rounds=min(3, options.rounds))
    name = f"a cached step of {long:,} / of {short}"
    return [*rows, {"size": str(base), **asdict(step), "name": name}]


def imports(options: argparse.Namespace) -> Rows:
    """Starting Python and importing, in processes of their own."""

    def run(code: str) -> Any:
        return lambda: subprocess.run([sys.executable, "-c", code], check=True)

    contenders = {name: run(code) for name, code in IMPORTS.items()}
    return benchmarking.as_rows(benchmarking.in_turns(contenders, options.rounds), size="import")


WORKS = {
    "train-step": train_step,
    "train": train,
    "generate": generate,
    "translate": translate,
    "pronounce": pronounce,
    "memory": memory,
    "scaling": scaling,
    "import": imports,
}
ON_ANY_DEVICE = ("train-step", "train", "generate", "memory")


def optional(package: str, requirement: str) -> bool:
    """Whether a peer is installed; one line if not."""
    here = benchmarking.installed(package)
    if not here:
        print(f"without {package}: pip install {requirement}", file=sys.stderr)
    return here


def lines_of(path: str) -> list[str]:
    """The lines of a text file, plain or .gz."""
    import gzip

    with gzip.open(path) if path.lower().endswith(".gz") else open(path, "rb") as stream:
        return list(read_lines(stream, path))


def device_name(device: str) -> str:
    """What the work ran on."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine()


def described(row: dict[str, Any]) -> str:
    """A row as a line."""
    parts = [row["size"], *(row[key] for key in ("precision",) if key in row)]
    if "num_beams" in row:
        parts.append(f"beam {row['num_beams']}")
    line = f"{', '.join(parts)}: {row['name']}"
    if "wer" in row:
        errors = f"WER {100 * row['wer']:.2f} %, PER {100 * row['per']:.2f} %"
        return f"{line} {errors}, trained in {row['seconds']:,.0f} s"
    if "mebibytes" in row:
        return f"{line} {row['mebibytes']:,.0f} MiB, ratio {row['ratio']:.2f}"
    if "time_exponent" in row:
        k, m = row["time_exponent"], row["memory_exponent"]
        return f"{line} n: time grows as n^{k:.2f}, memory as n^{m:.2f}"
    line += f" {1e3 * row['seconds']:,.4g} ms, ratio {row['ratio']:.2f}"
    line += f" [{row['low']:.2f}, {row['high']:.2f}]"
    if "common_share" in row:
        line += f", {row['common_share']:.0%} common, MFU {row['mfu']:.0%}"
    if "target_tokens_per_second" in row:
        line += f", {row['target_tokens_per_second']:,.0f} target tokens a second"
    return line


if __name__ == "__main__":
    sys.exit(main())
