"""Average the weights of a run's last, or best, checkpoints into a new model."""

import argparse
import sys
from pathlib import Path

from modeling_tinytfm.experiment import save_average


def main() -> int:
    """Parses the command line and averages; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="a folder that train.py made, with its checkpoints")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--last", type=int, metavar="K", help="the K newest checkpoints")
    which.add_argument("--best", type=int, metavar="K", help="the K that validated best")
    parser.add_argument("--output", required=True, help="folder of the new model; must not exist")
    options = parser.parse_args()
    try:
        folders = save_average(
            Path(options.run), Path(options.output), last=options.last, best=options.best
        )
    except (ValueError, OSError) as error:
        print(f"average_checkpoints.py: {error}", file=sys.stderr)
        return 2
    print(f"average of {', '.join(folder.name for folder in folders)} -> {options.output}")
    print(f"next: python scripts/translate.py {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
