"""Train, measure and save a model from a recipe: see --help."""

import argparse
import os
import sys
from pathlib import Path

# Threads that spin while they wait take the cores from whatever else runs on this machine, and a
# busy machine then trains 20 times slower. OpenMP reads this when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from modeling_tinytfm.recipes import describe_keys, load_recipe

DEFAULT_RECIPE = Path(__file__).parent.parent / "configs" / "reverse.yaml"


def main() -> int:
    """Parses the command line and runs the recipe; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Train, measure and save a model from a recipe.",
        epilog=keys_table(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", nargs="?", help="a YAML file (default: configs/reverse.yaml)")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="replaces what the recipe says"
    )
    arguments = parser.parse_args()
    overrides = list(arguments.overrides)
    recipe_file = arguments.recipe or DEFAULT_RECIPE
    if arguments.recipe is not None and "=" in arguments.recipe:
        overrides.insert(0, arguments.recipe)
        recipe_file = DEFAULT_RECIPE
    try:
        recipe = load_recipe(recipe_file, overrides)
        # Only now, because it takes seconds: a typo is reported at once.
        from transformers.utils import logging

        from modeling_tinytfm.experiment import Experiment, prepare
        from modeling_tinytfm.training import NonFiniteLossError

        logging.set_verbosity_warning()
        experiment = prepare(recipe, say=print)
    except (ValueError, OSError, ImportError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    if not isinstance(experiment, Experiment):
        return 0
    try:
        experiment.run()
    except NonFiniteLossError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    return 0


def keys_table() -> str:
    """What may stand in a recipe, a line each."""
    rows = [f"  {key.key} ({key.type}; {key.default})\n      {key.text}" for key in describe_keys()]
    return "\n".join(["keys of a recipe (type; default):", *rows])


if __name__ == "__main__":
    sys.exit(main())
