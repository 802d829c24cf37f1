"""Finished runs side by side: what a setting changed, and how much of that is chance."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from .metrics import METRICS
from .recipes import RECIPE_FILE, Recipe, load_recipe
from .settings import LOSS_METRICS

SEEDS = ("training.seed", "training.data_seed")  # runs that differ in nothing else are one group
MEASURES = (*LOSS_METRICS, *METRICS)


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seeds alone.

    Attributes:
        label: The settings in which this group differs from others.
        runs: For each run, what was measured in validation, by update.
    """

    label: str
    runs: list[dict[int, float]]

    def steps(self) -> list[int]:
        """The updates at which all runs were measured, in order."""
        return sorted(set.intersection(*map(set, self.runs)))

    def at(self, step: int) -> tuple[float, float, float]:
        """Mean, lowest and highest value of the runs after so many updates."""
        values = [run[step] for run in self.runs]
        return fmean(values), min(values), max(values)


def compare_runs(folders: Iterable[str | Path], measure: str = "loss") -> list[Group]:
    """Groups runs by their recipes.

    Args:
        folders: Runs of train.py.
        measure: What validation measured: `loss`, `perplexity`, `token_accuracy` or the name of a
            text metric.

    Returns:
        The groups, in the order of their first runs.

    Raises:
        ValueError: If there is no such measure, a run did not measure it, two folders hold runs of
            the same seed, or the runs of a group have no update in common.
        OSError: If a folder holds no run that was trained to its end.
    """
    if measure not in MEASURES:
        raise ValueError(f"{measure!r} is none of {', '.join(MEASURES)}")
    runs = [(Path(folder), *_read(Path(folder), measure)) for folder in folders]
    first = runs[0][1]
    differing = [
        key
        for key in dict.fromkeys(key for _, recipe, _ in runs for key in first.differences(recipe))
        if key not in SEEDS
    ]
    groups: dict[str, dict[Any, dict[int, float]]] = {}
    for folder, recipe, values in runs:
        label = ", ".join(f"{key}={_shown(recipe.value(key))}" for key in differing)
        members = groups.setdefault(label or "one recipe", {})
        seed = tuple(recipe.value(key) for key in SEEDS)
        if seed in members:
            raise ValueError(f"{folder} holds a run that another folder holds, too, seed included")
        members[seed] = values
    found = [Group(label, list(members.values())) for label, members in groups.items()]
    for group in found:
        if not group.steps():
            raise ValueError(f"the runs of {group.label} were never measured at the same update")
    return found


def _read(folder: Path, measure: str) -> tuple[Recipe, dict[int, float]]:
    """A run's recipe, and what was measured at each update."""
    if not (folder / TRAINER_STATE_NAME).is_file() or not (folder / RECIPE_FILE).is_file():
        raise FileNotFoundError(
            f"{folder} holds no run that was trained to its end ({RECIPE_FILE} and "
            f"{TRAINER_STATE_NAME}): name folders that train.py made"
        )
    state = json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    values = {
        entry["step"]: entry[f"eval_{measure}"]
        for entry in state["log_history"]
        if f"eval_{measure}" in entry
    }
    if not values:
        raise ValueError(f"{folder} did not measure {measure} in validation")
    return load_recipe(folder / RECIPE_FILE), values


def _shown(value: Any) -> str:
    """A value as a recipe has it."""
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value


def describe_groups(groups: Sequence[Group], measure: str) -> str:
    """A line for each group: its last value, with the range of its seeds."""
    lines = []
    for group in groups:
        step = group.steps()[-1]
        mean, low, high = group.at(step)
        spread = f" [{low:.4g}, {high:.4g}]" if len(group.runs) > 1 else ""
        count = f"{len(group.runs)} {'run' if len(group.runs) == 1 else 'runs'}"
        lines.append(f"{group.label}: {measure} {mean:.4g}{spread} after {step:,} updates, {count}")
    return "\n".join(lines)


def draw_comparison(groups: Sequence[Group], measure: str, path: str | Path) -> None:
    """Draws the mean of each group over updates, and the range of its seeds as a band."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 5), layout="constrained")
    axis = figure.subplots()
    for number, group in enumerate(groups):
        steps = group.steps()
        mean, low, high = zip(*map(group.at, steps), strict=True)
        axis.plot(steps, mean, marker=".", color=f"C{number}", label=group.label)
        axis.fill_between(steps, low, high, color=f"C{number}", alpha=0.2, linewidth=0)
    axis.set_xlabel("updates")
    axis.set_ylabel(f"validation {measure}" + (" in nats" if measure == "loss" else ""))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)
    figure.legend(loc="outside upper center")  # nothing is hidden behind it
    figure.savefig(path, dpi=120)
