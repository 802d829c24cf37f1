"""Translate lines with a trained model: lines in, lines out, in the same order."""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Any, TextIO

# Threads that spin while they wait take the cores from whatever else runs on this machine, and a
# busy machine then trains 20 times slower. OpenMP reads this when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from modeling_tinytfm.experiment import load_model, use_threads
from modeling_tinytfm.translation import BATCH_TOKENS, translate_n_best

CHUNK = 10_000  # lines read before any are written: more would only need more memory


def main() -> int:
    """Parses the command line and translates; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder that train.py made, or a name on the Hub")
    parser.add_argument("--input", help="file of source lines, UTF-8 (default: standard input)")
    parser.add_argument("--output", help="file of outputs, replaced (default: standard output)")
    parser.add_argument("--num-beams", type=int, help="width of the search (default: the model's)")
    parser.add_argument("--n-best", type=int, default=1, help="outputs for each line (default: 1)")
    parser.add_argument("--scores", action="store_true", help="write scores before the outputs")
    parser.add_argument("--max-new-tokens", type=int, help="longest output (default: the model's)")
    parser.add_argument(
        "--batch-tokens",
        type=int,
        default=BATCH_TOKENS,
        help=f"source tokens of a batch, padding included (default: {BATCH_TOKENS})",
    )
    options = parser.parse_args()
    use_threads(None)
    try:
        for name in ("num_beams", "n_best", "max_new_tokens", "batch_tokens"):
            value = getattr(options, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value} is not at least 1")
        model, tokenizer = load_model(options.model)
        with ExitStack() as files:
            source: TextIO = sys.stdin
            target: TextIO = sys.stdout
            if options.input is not None:
                source = files.enter_context(
                    open(options.input, encoding="utf-8-sig", newline="\n")
                )
            else:
                sys.stdin.reconfigure(encoding="utf-8-sig", newline="\n")  # type: ignore[union-attr]
            if options.output is not None:
                target = files.enter_context(
                    open(options.output, "w", encoding="utf-8", newline="\n")
                )
            else:
                sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
            at_terminal = options.input is None and sys.stdin.isatty()
            lines = prompted() if at_terminal else (line_text(line) for line in source)
            first = 1
            while chunk := list(islice(lines, 1 if at_terminal else CHUNK)):
                for row in translated(model, tokenizer, chunk, first, options):
                    target.write(row + "\n")
                target.flush()
                first += len(chunk)
    except (ValueError, OSError) as error:
        print(f"translate.py: {error}", file=sys.stderr)
        return 2
    return 0


def prompted() -> Iterator[str]:
    """Lines that a person types, until the end of input."""
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return


def line_text(line: str) -> str:
    """A line without its end, LF or CRLF."""
    return line.removesuffix("\n").removesuffix("\r")


def translated(
    model: Any, tokenizer: Any, lines: list[str], first: int, options: argparse.Namespace
) -> Iterable[str]:
    """Output rows: one for each line, or `n_best` of line number, rank, score and text."""
    generation = {
        name: value
        for name, value in vars(options).items()
        if name in ("num_beams", "max_new_tokens") and value is not None
    }
    hypotheses = translate_n_best(
        model,
        tokenizer,
        lines,
        options.n_best,
        with_scores=options.scores or options.n_best > 1,
        batch_tokens=options.batch_tokens,
        **generation,
    )
    for number, best in enumerate(hypotheses, first):
        for rank, (text, score) in enumerate(best, 1):
            # Whatever a model writes, a row stays a row.
            text = " ".join(text.splitlines()) if options.n_best == 1 else " ".join(text.split())
            if options.n_best > 1:
                yield f"{number}\t{rank}\t{score:.6f}\t{text}"
            else:
                yield f"{score:.6f}\t{text}" if options.scores else text


if __name__ == "__main__":
    sys.exit(main())
