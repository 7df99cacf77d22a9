"""Table and figure of the error control of several runs."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from synthetic.error_control import DELAYS, READABLE, ErrorControl
from synthetic.plots import Drawing, add_legend, create_figure, make_styles

FILES = ("errors.csv", "errors.png")  # written by `fprnn synthetic inspect --errors`
COLUMNS = ["run", "task", "quantity", "tokens", "value"]  # of the CSV
PANELS = {
    "accuracy": ("test length (tokens)", "accuracy of the last answer"),
    "ratio": ("test length (tokens)", "spread / separation"),
    "contraction": ("tokens after the perturbation", "distance / initial distance"),
}


def draw_error_control(runs: Sequence[ErrorControl]) -> Drawing:
    """Draw accuracy and ratio over the test length, and contraction, with a line for each run."""
    folders = [run.run_dir.resolve() for run in runs]
    common = os.path.commonpath([folder.parent for folder in folders])
    labels = [str(folder.relative_to(common)) for folder in folders]
    figure, axes = create_figure(list(PANELS), "Error control of the recurrent state")
    styles = make_styles(labels)
    for ax, (quantity, (xlabel, ylabel)) in zip(axes, PANELS.items()):
        for run, label in zip(runs, labels):
            curve = run.contraction if quantity == "contraction" else run.by_length[quantity]
            ax.plot(list(curve), list(curve.values()), label=label, **styles[label])
        ax.set_xscale("log", base=2)
        ax.set(xlabel=xlabel, ylabel=ylabel)
        ax.grid(alpha=0.3)
        if quantity == "accuracy":
            ax.set_ylim(0, 1.02)
        else:
            ax.set_yscale("log")
        if quantity == "contraction":
            ax.set_ylim(bottom=1e-4)
        else:
            for length in {run.trained_length for run in runs}:
                ax.axvline(length, color="gray", ls=":", lw=1.3, label="training length")
    add_legend(figure, axes)
    note = (
        "T: training length. Horizon: length at which the scaled accuracy of the last answer falls"
        f" below {READABLE}; none: the reference means do not identify the right answers"
    )
    summary = [_summarize_run(run, label) for run, label in zip(runs, labels)]
    lines = [line for run, label in zip(runs, labels) for line in _make_lines(run, label)]
    return Drawing(figure, pd.DataFrame(lines, columns=COLUMNS), summary, [note])


def _summarize_run(run: ErrorControl, label: str) -> dict[str, str]:
    """Return the line of the printed table."""
    length, longest = run.trained_length, max(run.by_length["ratio"])
    ratio = run.by_length["ratio"]
    measured, predicted = run.measured_horizon, run.predicted_horizon
    return {
        "run": label,
        "T": str(length),
        "accuracy at T": f"{run.by_length['accuracy'][length]:.3f}",
        "nearest mean at T": f"{run.by_length['nearest_accuracy'][length]:.3f}",
        f"ratio at T, 4T, {longest:,}": ", ".join(
            f"{ratio[n]:.2f}" for n in (length, 4 * length, longest)
        ),
        f"contraction after {', '.join(map(str, DELAYS))}": ", ".join(
            f"{value:.2f}" for value in run.contraction.values()
        ),
        "threshold": "none" if math.isnan(run.threshold) else f"{run.threshold:.2f}",
        "predicted horizon": _format_horizon(predicted, "unlimited"),
        "measured horizon": _format_horizon(measured, f"beyond {longest:,}"),
    }


def _format_horizon(horizon: float, infinite: str) -> str:
    """Return a horizon as text."""
    if math.isnan(horizon):
        return "none"
    return infinite if math.isinf(horizon) else f"{horizon:,.0f}"


def _make_lines(run: ErrorControl, label: str) -> list[tuple]:
    """Return the lines of the CSV; quantities without a place have no number of tokens."""
    curves = {**run.by_length, "contraction": run.contraction}
    single = ("trained_length", "threshold", "measured_horizon", "predicted_horizon")
    return [
        *(
            (label, run.task, name, n, v)
            for name, values in curves.items()
            for n, v in values.items()
        ),
        *((label, run.task, name, None, getattr(run, name)) for name in single),
    ]
