"""Write a trained model for another engine: CTranslate2, plain transformers (Marian) or ONNX."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import get_args

from transformers.utils import logging

from modeling_tinytfm.exporting import Engine, export_model


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and exports; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder that train.py made, or a name on the Hub")
    parser.add_argument("--to", required=True, choices=get_args(Engine), help="the engine")
    parser.add_argument("--output", required=True, help="the new folder; must not exist")
    parser.add_argument("--quantization", help="of CTranslate2: int8, float16, ... (float32)")
    options = parser.parse_args(argv)
    logging.disable_progress_bar()  # those of loading and writing weights
    try:
        export_model(options.model, options.to, options.output, quantization=options.quantization)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"export.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"{options.model} -> {options.output}")
    output = shlex.quote(options.output)
    if options.to == "ctranslate2":
        print(f"next: python scripts/translate.py {output}")
    elif options.to == "marian":
        print(f"next: AutoModelForSeq2SeqLM.from_pretrained({options.output!r})")
    else:
        print(f"next: {output}/README.md holds a greedy search in Python")
    return 0


if __name__ == "__main__":
    sys.exit(main())
