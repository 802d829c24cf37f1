"""What a run tells: scores in a line, predictions in a file, curves in a picture."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .metrics import METRICS
from .settings import LOSS_METRICS
from .translation import whole_file


def shortened(text: str) -> str:
    """A text as it may stand in a line on a terminal."""
    text = re.sub("[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text)
    return text if len(text) <= 100 else f"{text[:99]}…"


def mean_training_loss(history: Sequence[dict[str, Any]]) -> float:
    """The mean of a run's logged losses over all updates up to the last of them."""
    total, step = 0.0, 0
    for entry in history:
        if "loss" in entry:
            total += entry["loss"] * (entry["step"] - step)
            step = entry["step"]
    return total / max(step, 1)


def write_json(content: dict[str, Any], path: str | Path) -> None:
    """Writes a JSON file whole or not at all."""
    with whole_file(path) as stream:
        stream.write(json.dumps(content, indent=2) + "\n")


def describe_scores(scores: dict[str, float], prefix: str) -> str:
    """The scores of a split in one line."""
    names = (*LOSS_METRICS, *METRICS)
    found = {name: scores[f"{prefix}_{name}"] for name in names if f"{prefix}_{name}" in scores}
    return f"{prefix}: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items())


def write_predictions(records: Iterable[dict[str, Any]], path: Path) -> None:
    """One JSON object a line."""
    with path.open("w", encoding="utf-8") as stream:
        for record in records:
            stream.write(json.dumps(record, ensure_ascii=False) + "\n")


def draw_curves(history: list[dict[str, Any]], path: Path, *, smoothed: bool = False) -> None:
    """Draws training and validation loss, and below them the validation metrics, over updates.

    Args:
        history: What the Trainer logged.
        path: The picture.
        smoothed: Whether the training loss has label smoothing, which the validation loss has not.
    """
    # Slow to import, and only needed once.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    def points(name: str) -> tuple[list[int], list[float]]:
        found = [(entry["step"], entry[name]) for entry in history if name in entry]
        return [step for step, _ in found], [value for _, value in found]

    shown = [name for name in LOSS_METRICS if name not in ("loss", "perplexity")]
    names = [name for name in (*shown, *METRICS) if points(f"eval_{name}")[0]]
    figure = Figure(figsize=(7, 2.5 * (1 + len(names))), layout="constrained")
    axes = figure.subplots(1 + len(names), 1, sharex=True, squeeze=False)[:, 0]
    training = "training, with label smoothing" if smoothed else "training"
    for label, name in ((training, "loss"), ("validation", "eval_loss")):
        axes[0].plot(*points(name), marker=".", label=label)
    axes[0].set_ylabel("loss in nats")
    axes[0].legend()
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis, name in zip(axes[1:], names, strict=True):
        axis.plot(*points(f"eval_{name}"), marker=".", color="C1")
        axis.set_ylabel(f"validation {name}")
    axes[-1].set_xlabel("updates")
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
