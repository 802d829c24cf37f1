"""Make a Marian model (a folder, or a name on the Hub) one of ours, ready to be fine-tuned."""

import argparse
import shlex
import sys
from collections.abc import Sequence

from transformers.utils import logging

from modeling_tinytfm.importing import import_marian


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and imports; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a Marian folder, or a name on the Hub")
    parser.add_argument("--output", required=True, help="the new folder; must not exist")
    options = parser.parse_args(argv)
    logging.disable_progress_bar()  # those of loading and writing weights
    try:
        tokenizer = import_marian(options.model, options.output)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"import_model.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"{options.model} -> {options.output}: {tokenizer}")
    output = shlex.quote(options.output)
    print(
        "next: accelerate launch scripts/train.py configs/finetune.yaml data.train_file=pairs.tsv "
        f"model.from_pretrained={output}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
