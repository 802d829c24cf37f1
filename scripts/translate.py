"""Translate lines with a trained model: lines in, lines out, in the same order."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any, TextIO

# Threads that spin while they wait take the cores from whatever else runs on this machine, and a
# busy machine then works 20 times slower. OpenMP reads this when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from transformers.utils import logging

from modeling_tinytfm.loading import load_model
from modeling_tinytfm.translation import BATCH_TOKENS, read_lines, translate_n_best, whole_file

CHUNK = 10_000  # lines read before any are written: more would only need more memory


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and translates; returns the exit status."""
    options = parse(argv)
    logging.disable_progress_bar()  # the one of loading weights
    try:
        with ExitStack() as files:
            at_terminal = options.input is None and sys.stdin.isatty()
            if at_terminal:
                lines = prompted()
            elif options.input is None:
                lines = read_lines(sys.stdin.buffer, "standard input")
            else:
                lines = read_lines(files.enter_context(open(options.input, "rb")), options.input)
            target: TextIO = sys.stdout
            if options.output is not None:
                target = files.enter_context(whole_file(options.output))
            else:
                sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
            model, tokenizer = load_model(options.model)
            first = 1
            while chunk := list(islice(lines, 1 if at_terminal else CHUNK)):
                for row in translated(model, tokenizer, chunk, first, options):
                    target.write(row + "\n")
                target.flush()
                first += len(chunk)
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"translate.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of a command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder that train.py made, or a name on the Hub")
    parser.add_argument("--input", help="file of source lines, UTF-8 (default: standard input)")
    parser.add_argument("--output", help="file of outputs, replaced (default: standard output)")
    parser.add_argument("--num-beams", type=int, help="width of the search (default: the model's)")
    parser.add_argument("--n-best", type=int, help="write N rows of line, rank, score and text")
    parser.add_argument("--scores", action="store_true", help="write score, tab, text")
    parser.add_argument("--max-new-tokens", type=int, help="longest output (default: the model's)")
    parser.add_argument("--batch-tokens", type=int, help=f"of a batch (default: {BATCH_TOKENS})")
    return parser.parse_args(argv)


def prompted() -> Iterator[str]:
    """Lines that a person types, until the end of input."""
    # input() would write its prompt into a redirected standard output.
    prompts = sys.stdout if sys.stdout.isatty() else sys.stderr
    while True:
        try:
            print("> ", end="", file=prompts, flush=True)
            yield input()
        except EOFError:
            print(file=prompts)
            return


def translated(
    model: Any, tokenizer: Any, lines: list[str], first: int, options: argparse.Namespace
) -> Iterator[str]:
    """Output rows: one for each line, or with `--n-best` so many."""
    names = ("batch_tokens", "num_beams", "max_new_tokens")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    with_scores = options.scores or options.n_best is not None
    n_best = 1 if options.n_best is None else options.n_best
    hypotheses = translate_n_best(model, tokenizer, lines, n_best, with_scores=with_scores, **given)
    for number, best in enumerate(hypotheses, first):
        for rank, (text, score) in enumerate(best, 1):
            # Whatever a model writes, a row stays a row, and a column a column.
            text = " ".join(text.splitlines())
            if with_scores:
                text = f"{score:.6f}\t{text.replace(chr(9), ' ')}"
            yield text if options.n_best is None else f"{number}\t{rank}\t{text}"


if __name__ == "__main__":
    sys.exit(main())
