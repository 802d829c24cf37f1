"""See a trained model at work on one sentence: writes one page that needs no network.

A name that ends in .json saves the numbers alone.
"""

if __name__ == "__main__":
    import environment

    environment.prepare()  # before torch is loaded

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers.utils import logging

from modeling_tinytfm.loading import load_model
from modeling_tinytfm.seeing import DETAILS, look


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, looks, and writes the page; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder that train.py made, or a name on the Hub")
    parser.add_argument("text", help="the source")
    parser.add_argument(
        "--target", help="what the model is made to write (default: what it writes)"
    )
    parser.add_argument("-o", "--output", default="page.html", help="replaced (default: page.html)")
    parser.add_argument("--beams", type=int, help="width of the search (default: the model's)")
    parser.add_argument(
        "--detail", choices=DETAILS, default="full", help="attention: weights alone, at once"
    )
    parser.add_argument(
        "--layers", type=int, nargs="+", metavar="N", help="from 1 (default: all; for long texts)"
    )
    options = parser.parse_args(argv)
    logging.disable_progress_bar()  # the one of loading weights
    output = Path(options.output)
    try:
        model, tokenizer = load_model(options.model)
        trace = look(
            model,
            tokenizer,
            options.text,
            options.target,
            num_beams=options.beams,
            detail=options.detail,
            layers=options.layers,
        )
        (trace.save_json if output.suffix == ".json" else trace.save_html)(output)
    except (ValueError, OSError) as error:
        print(f"see.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"{trace.header['source_text']} -> {trace.header['target_text']}")
    if options.detail == "full":
        for view, reason in trace.header["missing"].items():
            print(f"not shown: {view}: {reason}")
    print(f"{output} ({output.stat().st_size / 1e6:.1f} MB): open it in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main())
