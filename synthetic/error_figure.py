"""Table and figure of the error control of several runs."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import pandas as pd

from synthetic.error_control import READABLE, ErrorControl
from synthetic.plots import Drawing, add_legend, create_figure, make_styles

FILES = ("errors.csv", "errors.png")  # written by `fprnn synthetic inspect --errors`
COLUMNS = ["run", "task", "quantity", "tokens", "value"]  # of the CSV
SINGLE_VALUES = ["separation", "threshold", "predicted_horizon", "measured_horizon"]
LENGTH, DELAY = "test length (tokens)", "tokens after the perturbation"
PANELS = {  # quantity → labels of the axes, smallest value of the vertical axis
    "accuracy": (LENGTH, "accuracy of the last answer", 0),
    "ratio": (LENGTH, "spread / separation", None),
    "contraction": (DELAY, "distance / initial distance", 1e-4),
}
NOTE = (
    f"Horizon: first length with a scaled accuracy of the last answer below {READABLE}; none: the"
    " reference means do not identify the right answers, or the ratio is known at fewer than two"
    " lengths from T/2 to 2T. T: training length"
)


def draw_error_control(runs: Sequence[ErrorControl]) -> Drawing:
    """Draw accuracy and ratio over the length, and contraction, with a line for each run."""
    folders = [run.run_dir.resolve() for run in runs]
    common = os.path.commonpath([folder.parent for folder in folders])
    labels = [str(folder.relative_to(common)) for folder in folders]
    figure, axes = create_figure(list(PANELS), "Error control of the recurrent state")
    styles = make_styles(labels)
    lines: list[list] = []  # of the CSV
    for run, label in zip(runs, labels):
        curves = {**run.by_length, "contraction": run.contraction}
        for ax, quantity in zip(axes, PANELS):
            ax.plot(*zip(*curves[quantity].items()), label=label, **styles[label])
        lines += [[label, run.task, q, *point] for q in curves for point in curves[q].items()]
        lines += [[label, run.task, name, None, getattr(run, name)] for name in SINGLE_VALUES]
    for ax, (quantity, (xlabel, ylabel, bottom)) in zip(axes, PANELS.items()):
        ax.set(xlabel=xlabel, ylabel=ylabel, yscale="linear" if bottom == 0 else "log")
        ax.set_xscale("log", base=2)
        ax.set_ylim(bottom=bottom)
        ax.grid(alpha=0.3)
        for length in {run.trained_length for run in runs if quantity != "contraction"}:
            ax.axvline(length, color="gray", ls=":", lw=1.3, label="training length T")
    add_legend(figure, axes)
    summary = [_summarize_run(run, label) for run, label in zip(runs, labels)]
    return Drawing(figure, pd.DataFrame(lines, columns=COLUMNS), summary, [NOTE])


def _summarize_run(run: ErrorControl, label: str) -> dict[str, str]:
    """Return the line of the printed table."""
    length, longest = run.trained_length, max(run.by_length["ratio"])
    ratios = [run.by_length["ratio"][n] for n in (length, 4 * length, longest)]

    def show(values: Sequence[float], infinite: str = "unlimited") -> str:
        texts = ["none" if math.isnan(v) else f"{v:.3g}" for v in values]
        return " ".join(texts).replace("inf", infinite)

    return {
        "run": label,
        "accuracy": show([run.by_length["accuracy"][length]]),
        "nearest mean": show([run.by_length["nearest_accuracy"][length]]),
        f"ratio at T, 4T, {longest}": show(ratios),
        "contraction": " ".join(f"{value:.2f}" for value in run.contraction.values()),
        "threshold": show([run.threshold]),
        "predicted": show([run.predicted_horizon]),
        "measured": show([run.measured_horizon], f"beyond {longest}"),
    }
