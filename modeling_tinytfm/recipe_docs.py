"""The keys of a recipe, explained: the text of `train.py --help` and README's table.

Both are made of `recipes.describe_keys`. When a key has changed,

    python -m modeling_tinytfm.recipe_docs README.md

puts the new table between README's two marks.
"""

import json
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from .recipe_keys import KeyDescription
from .recipes import describe_keys

BEGIN, END = "<!-- keys of a recipe -->", "<!-- end of the keys -->"
MOST_CHOICES = 15
EXAMPLES = """\
examples:
  train.py                                               learn to reverse digits, in minutes
  train.py configs/pairs.yaml data.train_file=pairs.tsv  learn from your own pairs
  train.py configs/pairs.yaml data.train_file=pairs.tsv model.d_model=128 training.max_steps=4000 \\
    training.warmup_steps=800 training.eval_steps=400 training.save_steps=400
  train.py configs/pairs.yaml data.train_file=pairs.tsv training.resume_from_checkpoint=true
  accelerate launch --config_file configs/accelerate/ddp.yaml --num_processes 8 \\
    scripts/train.py configs/pairs.yaml data.train_file=pairs.tsv
"""
HOW_TO_WRITE = """\
A recipe is a YAML file of sections with keys; each may be given on the command line, too, as
section.key=value without dashes or spaces. Values are YAML: true, 1e-3, [bleu, chrf], null (which
takes a key back to its default, or means what the key's line says); in quotes where the shell would
change them.

The order: data -> tokenizer (its vocabulary) -> model -> training -> generation and evaluation.
"""


def help_text() -> str:
    """Examples, how to write a recipe, and all its keys: two lines each."""
    lines = [EXAMPLES, HOW_TO_WRITE]
    for section, rows in by_section():
        lines.append(f"{section}:" if section else "outside of sections:")
        for row in rows:
            lines.append(f"  {row.key} ({shown_type(row)}; {shown_default(row)})")
            lines.append(f"      {row.text}")
        lines.append("")
    return "\n".join(lines)


def markdown() -> str:
    """A folded table for each section."""
    parts = []
    for section, rows in by_section():
        title = f"<code>{section}</code>" if section else "outside of sections"
        parts.append(f"<details><summary>{title}</summary>\n")
        parts.append("| key | takes | default | meaning |\n|---|---|---|---|")
        for row in rows:
            cells = (f"`{row.key}`", shown_type(row), shown_default(row), row.text)
            parts.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
        parts.append("\n</details>\n")
    return "\n".join(parts)


def by_section() -> Iterator[tuple[str, list[KeyDescription]]]:
    """The keys in their sections; those outside of any come first, under ""."""
    for section, rows in groupby(describe_keys(), lambda row: row.key.rpartition(".")[0]):
        yield section, list(rows)


def shown_type(row: KeyDescription) -> str:
    """What a key takes; of very many choices, the first ones."""
    choices = row.type.split(" | ")
    if len(choices) <= MOST_CHOICES:
        return row.type
    return f"{' | '.join(choices[:3])} | {len(choices) - 3} more"


def shown_default(row: KeyDescription) -> str:
    """A default as a recipe writes it."""
    if row.key.endswith(".*"):
        return "see there"
    return row.default if isinstance(row.default, str) else json.dumps(row.default)


def refresh(readme: Path) -> None:
    """Puts the table between the two marks of a README.

    Raises:
        ValueError: If it has not both marks, once each and in order.
    """
    before, begin, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in after:
        raise ValueError(f"{readme} has no table between {BEGIN} and {END}")
    readme.write_text(f"{before}{BEGIN}\n{markdown()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    refresh(Path(sys.argv[1]))
