"""Translate lines with a trained model, or several together: lines in, lines out, in that order."""

if __name__ == "__main__":
    import environment

    environment.prepare()  # before torch is loaded

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice, repeat, zip_longest
from typing import Any, TextIO

from transformers.utils import logging

from modeling_tinytfm import translation
from modeling_tinytfm.loading import load_translator

CHUNK = 10_000  # lines read before any are written: more would only need more memory
HELP = {
    "models": "a folder of train.py or export.py, or a name on the Hub; several average "
    "their probabilities",
    "form": "log-probability / length^alpha or / ((5 + length) / 6)^alpha (default: the model's)",
    "alignments": "write a last column such as 0-1 1-0: source and target position of each target "
    "token but </s>, as the last decoder layer's cross-attention has it",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and translates; returns the exit status."""
    options = parse(argv)
    logging.disable_progress_bar()  # the one of loading weights
    try:
        with ExitStack() as files:
            at_terminal = options.input is None and sys.stdin.isatty()
            rows = sources(
                prompted() if at_terminal else opened(options.input, files), options, files
            )
            target: TextIO = sys.stdout
            if options.output is not None:
                target = files.enter_context(translation.whole_file(options.output))
            else:
                sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
            model, tokenizer = load_translator(options.models)
            first = 1
            while chunk := list(islice(rows, 1 if at_terminal else CHUNK)):
                for row in translated(model, tokenizer, chunk, first, options):
                    target.write(row + "\n")
                target.flush()
                first += len(chunk)
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"translate.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of a command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("models", metavar="MODEL", nargs="+", help=HELP["models"])
    add("--input", help="file of source lines, UTF-8 (default: standard input)")
    add("--output", help="file of outputs, replaced (default: standard output)")
    add("--num-beams", type=int, help="width of the search (default: the model's)")
    add("--length-penalty", type=float, help="alpha: > 0 favours length (default: the model's)")
    add("--length-penalty-form", choices=("length", "gnmt"), help=HELP["form"])
    add("--n-best", type=int, help="write N rows of line, rank, score and text")
    add("--scores", action="store_true", help="write score, tab, text")
    add("--alignments", action="store_const", const="token", help=HELP["alignments"])
    of_words = add("--word-alignments", action="store_const", const="word", dest="alignments")
    of_words.help = "the same of words between spaces"
    prefixes = parser.add_mutually_exclusive_group()
    prefixes.add_argument("--prefix", metavar="TEXT", help="what every output begins with")
    prefixes.add_argument("--prefix-file", metavar="FILE", help="the same, line by line")
    add("--max-new-tokens", type=int, help="longest output (default: the model's)")
    add("--batch-tokens", type=int, help=f"of a batch (default: {translation.BATCH_TOKENS})")
    return parser.parse_args(argv)


def opened(name: str | None, files: ExitStack) -> Iterator[str]:
    """The lines of a file, which `files` closes, or of standard input."""
    if name is None:
        return translation.read_lines(sys.stdin.buffer, "standard input")
    return translation.read_lines(files.enter_context(open(name, "rb")), name)


def sources(
    lines: Iterator[str], options: argparse.Namespace, files: ExitStack
) -> Iterator[tuple[str, str]]:
    """Each line with what its output begins with."""
    if options.prefix_file is None:
        yield from zip(lines, repeat(options.prefix or ""))
        return
    for line, prefix in zip_longest(lines, opened(options.prefix_file, files)):
        if line is None or prefix is None:
            number = "more" if line is None else "fewer"
            raise ValueError(f"{options.prefix_file} has {number} lines than the input")
        yield line, prefix


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
    model: Any,
    tokenizer: Any,
    chunk: list[tuple[str, str]],
    first: int,
    options: argparse.Namespace,
) -> Iterator[str]:
    """Output rows: one for each line, or with `--n-best` so many."""
    names = ("num_beams", "length_penalty", "length_penalty_form", "max_new_tokens", "batch_tokens")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    lines, prefixes = zip(*chunk, strict=True)
    if any(prefixes):
        given["prefixes"] = prefixes
    given |= {"alignments": options.alignments, "first_line": first}
    with_scores = options.scores or options.n_best is not None
    n_best = 1 if options.n_best is None else options.n_best
    hypotheses = translation.translate_n_best(
        model, tokenizer, lines, n_best, with_scores=with_scores, **given
    )
    for number, best in enumerate(hypotheses, first):
        for rank, hypothesis in enumerate(best, 1):
            row = translation.row(hypothesis, with_scores, options.alignments is not None)
            yield row if options.n_best is None else f"{number}\t{rank}\t{row}"


if __name__ == "__main__":
    sys.exit(main())
