"""The profile of models for people: a table in the terminal, and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lm.common.files import writing
from synthetic.numbers import Trained, at_end, over_seeds, write_csv
from synthetic.plots import Drawing, words
from synthetic.results import plus_minus
from synthetic.validate import FILES


def judge(runs: Sequence[Trained]) -> pd.DataFrame:
    """Return a line for each model and each bar of its recipes: value, error, passed."""
    numbers = at_end(runs)
    found = []
    for label, of_model in numbers.groupby("label", sort=False):
        run = next(run for run in runs if run.label == label)
        for bar in run.cfg.thresholds:
            means = over_seeds(of_model[of_model["metric"] == bar.metric])
            mean = means.loc[bar.length or means.index[0]]
            metric = f"{words(bar.metric)} at {mean.name:,}"
            if mean.name != run.trained_to:
                metric += f", trained to {run.trained_to}"
            found.append(
                {
                    "ability": run.panel,
                    "task": run.cfg.task.name,
                    "metric": metric,
                    "bar": bar.min,
                    "model": run.model,
                    "value": mean["value"],
                    "error": mean["error"],
                    "passed": mean["value"] >= bar.min,
                }
            )
    return pd.DataFrame(found)


def summarize(runs: Sequence[Trained]) -> list[dict[str, Any]]:
    """Return the table of a profile: a line for each bar, a column for each model; then the
    parameters and the seconds of training of each model."""
    lines: dict[tuple, dict[str, Any]] = {}
    for row in judge(runs).to_dict("records"):
        about = {name: row[name] for name in ("ability", "task", "metric", "bar")}
        line = lines.setdefault(tuple(about.values()), about)
        mark = "✓" if row["passed"] else "·"
        line[row["model"]] = f"{row['value']:.3f}{plus_minus(row['error'])} {mark}"
    parameters: dict[str, Any] = {"ability": "parameters"}
    seconds: dict[str, Any] = {"ability": "training of all seeds, seconds"}
    for run in runs:
        size, spent = run.result["parameters"], run.result["training_seconds"]
        parameters[run.model] = max(size, parameters.get(run.model, 0))
        seconds[run.model] = round(spent + seconds.get(run.model, 0), 1)
    return [*lines.values(), parameters, seconds]


def describe(runs: Sequence[Trained], drawing: Drawing) -> list[str]:
    """Return the sentences below a profile."""
    found = ["✓ reaches the bar", *drawing.notes]
    noises = {run.model: run.cfg.solver.state_noise for run in runs}
    for model, noise in noises.items():
        if noise:
            found.append(f"{model}: trained with noise of {noise:g} on its states")
    return found


def write(drawing: Drawing, folder: Path) -> list[Path]:
    """Write all numbers (validate.csv) and the figure.

    Args:
        drawing: Curves of the profile's runs.
        folder: Of the files.

    Returns:
        The files.

    Raises:
        OutputError: If they cannot be written.
    """
    numbers, lengths = paths = [folder / name for name in FILES]
    with writing(folder):
        write_csv(drawing.numbers, numbers)
        drawing.figure.savefig(lengths, dpi=130)
    return paths
