"""Score a trained model on a split of its recipe, or on a file of pairs."""

if __name__ == "__main__":
    import environment

    environment.prepare()  # before torch is loaded

import argparse
import sys
from collections.abc import Sequence

from transformers.utils import logging

from modeling_tinytfm.reports import describe_scores, write_json
from modeling_tinytfm.scoring import score_model


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and scores; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder that train.py made (--file: any model)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--split", choices=("validation", "test"), default="test", help="default: test"
    )
    where.add_argument(
        "--file",
        help="rows as .tsv, .csv, .jsonl, plain or .gz, or .parquet; texts also .txt, images .npz",
    )
    parser.add_argument("--metrics", nargs="+", help="default: the recipe's")
    parser.add_argument("--num-beams", type=int, help="width of the search (default: the model's)")
    parser.add_argument("--json", help="also write the scores, unrounded, into this file")
    options = parser.parse_args(argv)
    logging.disable_progress_bar()  # the one of loading weights
    try:
        scores = score_model(
            options.model,
            split=options.split,
            file=options.file,
            metrics=options.metrics,
            num_beams=options.num_beams,
        )
        print(describe_scores(scores, "file" if options.file is not None else options.split))
        for name, value in scores.items():
            if name.endswith(("_signature", "_samples")):
                print(f"{name}: {value}")
        if options.json is not None:
            write_json(scores, options.json)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, ImportError) as error:
        print(f"evaluate_model.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
