"""Train, measure and save a model from a recipe: see --help."""

if __name__ == "__main__":
    import environment

    environment.prepare()  # before torch is loaded

import argparse
import atexit
import os
import re
import sys
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from transformers.utils import logging

from modeling_tinytfm.recipe_docs import help_text
from modeling_tinytfm.recipes import load_recipe

DEFAULT_RECIPE = Path(__file__).parent.parent / "configs" / "reverse.yaml"
OWN_DATA = re.compile(r"data\.((train|validation|test)_\w*file|dataset_name)=")
RECIPES_FOR_OWN_DATA = {"classification": "classes", "language_model": "language_model"}


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and runs the recipe; returns the exit status."""
    logging.disable_progress_bar()  # one for each checkpoint that is written
    if hasattr(sys.stdout, "reconfigure"):  # its code page may lack the first row's letters
        sys.stdout.reconfigure(errors="backslashreplace")
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # accelerate's business
    # The one tells that it goes by the numbers of checkpoints, the other what is refused below.
    for name in ("trainer_utils", "generation.configuration_utils"):
        logging.get_logger(f"transformers.{name}").setLevel(logging.ERROR)
    try:
        recipe = load_recipe(*parse(sys.argv[1:] if argv is None else argv))
    except (ValueError, OSError) as error:
        return report(error, 2)
    # Only now, because it takes seconds: a typo is reported at once.
    from modeling_tinytfm.experiment import Experiment, prepare
    from modeling_tinytfm.machine import PREPARATION_ERRORS
    from modeling_tinytfm.training import NonFiniteLossError

    try:
        experiment = prepare(recipe, say=partial(print, flush=True))
    except PREPARATION_ERRORS as error:
        return report(error, 2)
    except KeyboardInterrupt:
        return report("stopped before training began", 130)
    if not isinstance(experiment, Experiment):  # its folder holds the finished run
        return 0
    try:
        experiment.run()
    except (NonFiniteLossError, OSError, MemoryError) as error:
        return report(error, 1)
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # below the progress bar
        return report(f"stopped; {experiment.how_to_go_on()}", 130)
    return 0


def parse(argv: Sequence[str]) -> tuple[str | Path, list[str]]:
    """The recipe's file and the overrides of a command line.

    Raises:
        ValueError: With what to write instead.
    """
    wants_help = {"-h", "--help"} & set(argv)
    parser = argparse.ArgumentParser(
        description="Train, measure and save a model from a recipe.",
        epilog=help_text() if wants_help else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", nargs="?", help="a YAML file (default: configs/reverse.yaml)")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="replaces what the recipe says"
    )
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        key, _, value = unknown[0].lstrip("-").partition("=")
        raise ValueError(f"{unknown[0]}: keys have no dashes, write {key}={value or 'VALUE'}")
    first = arguments.recipe
    if first is None:
        return DEFAULT_RECIPE, []
    if "=" not in first or Path(first).exists():
        return first, arguments.overrides
    overrides = [first, *arguments.overrides]
    if own := [text for text in overrides if OWN_DATA.match(text)]:
        # The recipe that is meant where none is named makes its own data.
        task = dict(text.partition("=")[::2] for text in overrides).get("task", "seq2seq")
        recipe = RECIPES_FOR_OWN_DATA.get(task, "pairs")
        raise ValueError(
            f"{own[0]} needs a recipe before it: train.py configs/{recipe}.yaml {own[0]}"
        )
    return DEFAULT_RECIPE, overrides


def report(error: Exception | str, status: int) -> int:
    """Prints one line, whatever the number of processes; returns the exit status."""
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first or isinstance(error, MemoryError):  # which may be that of one alone
        print(f"train.py: {' '.join(str(error).split())}", file=sys.stderr)
    if not is_first:
        time.sleep(5)  # the launcher ends all when one has ended: the line has to be out by then
    return status


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized():
        # Taking the group of processes apart may crash, or never end, in torch 2.13.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
