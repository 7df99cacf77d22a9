"""Output of `validate`: the table of abilities, its notes, a CSV and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lm.common.files import writing
from synthetic.plots import Drawing, format_metric
from synthetic.result_tables import FinishedRun, average_seeds, build_final_table, write_csv
from synthetic.results import format_error
from synthetic.validate import OUTPUT_FILES


def judge_abilities(runs: Sequence[FinishedRun]) -> pd.DataFrame:
    """Return a line per model, ability and threshold: value (mean over seeds), error, passed."""
    table = build_final_table(runs)
    judged = []
    for label, model_table in table.groupby("label", sort=False):  # label: ability and model
        run = next(run for run in runs if run.label == label)
        for threshold in run.cfg.thresholds:
            means = average_seeds(model_table[model_table["metric"] == threshold.metric])
            length = threshold.length
            assert length is not None  # every recipe sets it
            mean = means.loc[length]
            metric = f"{format_metric(threshold.metric)} at {length:,}"
            if length != run.trained_to:
                metric += f", trained to {run.trained_to}"
            judged.append(
                {
                    "ability": run.panel,
                    "task": run.cfg.task.name,
                    "metric": metric,
                    "threshold": threshold.min,
                    "model": run.model,
                    "value": mean["value"],
                    "error": mean["error"],
                    "passed": mean["value"] >= threshold.min,
                }
            )
    return pd.DataFrame(judged)


def summarize_abilities(runs: Sequence[FinishedRun]) -> list[dict[str, Any]]:
    """Return the table of abilities: a line for each threshold, a column for each model.

    The last two lines are the parameters and the seconds of training of each model.
    """
    lines: dict[tuple, dict[str, Any]] = {}
    for row in judge_abilities(runs).to_dict("records"):
        threshold = {name: row[name] for name in ("ability", "task", "metric", "threshold")}
        line = lines.setdefault(tuple(threshold.values()), threshold)
        mark = "✓" if row["passed"] else "·"
        line[row["model"]] = f"{row['value']:.3f}{format_error(row['error'])} {mark}"
    parameters: dict[str, Any] = {"ability": "parameters"}
    seconds: dict[str, Any] = {"ability": "training of all seeds, seconds"}
    for run in runs:
        size, run_seconds = run.result["parameters"], run.result["training_seconds"]
        parameters[run.model] = max(size, parameters.get(run.model, 0))
        seconds[run.model] = round(run_seconds + seconds.get(run.model, 0), 1)
    return [*lines.values(), parameters, seconds]


def describe_runs(runs: Sequence[FinishedRun], drawing: Drawing) -> list[str]:
    """Return the notes below the table."""
    notes = ["✓ reaches the threshold", *drawing.notes]
    noise_by_model = {run.model: run.cfg.solver.state_noise for run in runs}
    for model, noise in noise_by_model.items():
        if noise:
            notes.append(f"{model}: trained with noise of {noise:g} on its states")
    return notes


def write_files(drawing: Drawing, folder: Path) -> list[Path]:
    """Write all measurements (validate.csv) and the figure (lengths.png).

    Args:
        drawing: Curves of the runs.
        folder: Folder of the files.

    Returns:
        The paths of the files.

    Raises:
        OutputError: If they cannot be written.
    """
    csv_path, figure_path = paths = [folder / name for name in OUTPUT_FILES]
    with writing(folder):
        write_csv(drawing.table, csv_path)
        drawing.figure.savefig(figure_path, dpi=130)
    return paths
