"""Compare finished runs: what a setting changed, and how much of that is chance.

Runs that differ in their seeds alone are one group: its mean, and their range. Groups are named
after the settings in which they differ.
"""

import argparse
import sys
from collections.abc import Sequence

from modeling_tinytfm.comparing import MEASURES, compare_runs, describe_groups, draw_comparison


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, compares, and draws; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a folder that train.py made")
    parser.add_argument(
        "--measure", choices=MEASURES, default="loss", help="of validation (default: loss)"
    )
    parser.add_argument("-o", "--output", help="also draw the curves into this .png, replaced")
    options = parser.parse_args(argv)
    try:
        groups = compare_runs(options.runs, options.measure)
        print(describe_groups(groups, options.measure))
        if options.output is not None:
            draw_comparison(groups, options.measure, options.output)
    except (ValueError, OSError) as error:
        print(f"compare_runs.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
