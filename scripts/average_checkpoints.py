"""Average the weights of a run's last, or best, checkpoints into a new model."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers.utils import logging

from modeling_tinytfm.checkpoints import save_average


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and averages; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="a folder that train.py made, with its checkpoints")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--last", type=int, metavar="K", help="the K newest checkpoints")
    which.add_argument("--best", type=int, metavar="K", help="the K that validated best")
    parser.add_argument("--output", required=True, help="folder of the new model; must not exist")
    options = parser.parse_args(argv)
    logging.disable_progress_bar()  # those of loading and writing weights
    try:
        folders = save_average(
            Path(options.run), Path(options.output), last=options.last, best=options.best
        )
    except (ValueError, OSError) as error:
        print(f"average_checkpoints.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"average of {', '.join(folder.name for folder in folders)} -> {options.output}")
    print(f"next: python scripts/evaluate_model.py {shlex.quote(options.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
