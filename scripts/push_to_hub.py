"""Publish a model on the Hugging Face Hub: weights, configuration, code, tokenizer, card, scores.

Log in once by `hf auth login`, or set HF_TOKEN. Only files that a reader needs leave this machine:
no checkpoint, no pickle, no test data, no path.
"""

import argparse
import os
import sys
from collections.abc import Sequence

# A progress bar is for what takes longer than this many seconds; tqdm reads it when it is loaded.
os.environ.setdefault("TQDM_DELAY", "1")

from transformers.utils import logging

from modeling_tinytfm.loading import load_model
from modeling_tinytfm.publishing import check_space, push, push_space
from modeling_tinytfm.seeing import look


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and publishes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder that train.py made, or a checkpoint in it")
    parser.add_argument("repo_id", help="owner/name on the Hub, or a name of your own")
    parser.add_argument("--private", action="store_true", help="only you may read a new repository")
    parser.add_argument("--revision", help="a branch, made if it is not there (default: main)")
    parser.add_argument(
        "--license", help="of the weights, as the Hub calls it: mit, cc-by-4.0, ..."
    )
    parser.add_argument(
        "--language", nargs="+", default=[], help="codes, the source's first: --language en de"
    )
    parser.add_argument(
        "--new-card", action="store_true", help="replace a card that a person wrote or edited"
    )
    parser.add_argument("--message", help="what the commit says")
    parser.add_argument(
        "--space",
        metavar="TEXT",
        help="also a Space of that name: a page, the model at work on TEXT",
    )
    options = parser.parse_args(argv)
    logging.set_verbosity_error()
    try:
        # Looked at first: nothing is published if it cannot be.
        trace = None if options.space is None else look(*load_model(options.model), options.space)
        if trace is not None:
            check_space(options.repo_id, private=options.private or None)
        published = push(
            options.model,
            options.repo_id,
            private=options.private or None,
            revision=options.revision,
            license=options.license,
            languages=options.language,
            new_card=options.new_card,
            message=options.message,
            say=print,
        )
        if trace is not None:
            title = f"{options.space} → {trace.header['target_text']}"
            space = push_space(
                trace.html(),
                published.repo_id,
                title=title,
                private=options.private or None,
                message=options.message,
            )
            print(space)
        print(f"{published.url}\n\n{published.loading}")
    except (ValueError, OSError) as error:
        print(f"push_to_hub.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
