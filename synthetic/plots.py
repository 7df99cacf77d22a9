"""The kinds of figures of the reports: curves over length, scatter, bars, time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lm.common.errors import UserError
from lm.runs.metrics import OTHER_SOLUTION_MARK, OTHER_SOLUTION_NOTE
from synthetic.numbers import (
    Trained,
    at_end,
    headlines,
    notes,
    over_seeds,
    seed_count,
    while_training,
    with_error,
)
from synthetic.results import TOKEN_BY_TOKEN

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe & Ito's palette (without its yellow, too pale for lines), safe for colour-blind readers.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX*"
SOLVED = 0.9  # of the headline metric: a length counts as solved
WIDE = 100  # as `wide` of `curves`
MAX_COLUMNS = 4  # panels in a row
NOT_LEARNED = {"ls": ":", "mfc": "none", "alpha": 0.6}  # style of ℓ* of such a model
ERRORS = (
    "n: training seeds. Of several: their mean, dots each of them, shade or bar ± their standard"
    " deviation; of one: bar ± standard error over test samples"
)


class ReportError(UserError, RuntimeError):
    """A report that cannot be made; the message says what is missing."""


@dataclass
class Drawing:
    """A figure, its numbers, and the text below it."""

    figure: Figure
    numbers: pd.DataFrame  # for the CSV
    summary: list[dict]  # for the printed table: a line a model
    notes: list[str]

    def __post_init__(self) -> None:
        width = int(17 * self.figure.get_figwidth())
        text = [line for note in self.notes for line in wrap(note, width)]
        self.figure.supxlabel("\n".join(text), x=0.01, ha="left", fontsize="x-small")


def words(metric: str) -> str:
    """Return a metric's name for an axis."""
    return "ℓ* (iterations)" if metric == "num_iters" else metric.replace("_", " ")


def nearest(lengths: Iterable[int], target: int) -> int:
    """Return the evaluated length nearest to the target, the shorter one of two."""
    return min(lengths, key=lambda length: (abs(length - target), length))


def longest_solved(values: pd.Series) -> int:
    """Return the longest length (the index) up to which the values never fall below SOLVED."""
    solved = values.sort_index().ge(SOLVED).cummin()
    return int(solved[solved].index.max()) if solved.any() else 0


def curves(
    runs: list[Trained], title: str, metric: str | None = None, wide: float = WIDE
) -> Drawing:
    """Draw a metric over the test length, with a panel for each task, a colour for each model, and
    dashes if the model read token by token.

    ℓ* of a model that has not learned its task is marked, because it does not tell how many
    iterations solving the task takes; so is ℓ* of another solution than the model's.

    Args:
        runs: Finished runs.
        title: Of the figure.
        metric: None: each task's headline; `num_iters` is ℓ*.
        wide: Times the shortest length, above which the axis of lengths is logarithmic.

    Raises:
        ReportError: If no run has this metric.
    """
    # 1. Select the runs and the lines.
    numbers = at_end(runs)
    drawn = numbers[numbers["metric"] == metric] if metric else headlines(runs)
    metric = metric or runs[0].headline
    if drawn.empty:
        raise ReportError(f"none of the runs found has {words(metric)}: nothing to draw")
    runs = [run for run in runs if str(run.run_dir) in set(drawn["run"])]
    styles = styles_of(runs)
    unlearned = set()
    if metric == "num_iters":
        labels = {run.label for run in runs}
        unlearned = {label for label in labels if not has_learned(runs, label)}

    # 2. Draw a panel for each task.
    figure, axes = new_figure(list(drawn["panel"].unique()), title, sharey=True)
    shown = []
    for ax, (_, of_panel) in zip(axes, drawn.groupby("panel", sort=False)):
        for (label, model, read), line in of_panel.groupby(["label", "model", "read"], sort=False):
            means = over_seeds(line)
            several_ways = drawn.loc[drawn["label"] == label, "read"].nunique() > 1
            is_marked = metric == "num_iters" and bool(line["elsewhere"].any())
            name = f"{model}, {read}" if several_ways else model
            name += ", not learned" * (label in unlearned) + f" {OTHER_SOLUTION_MARK}" * is_marked
            style = {**styles[model], "markevery": max(1, len(means) // 12)}
            style |= {"ls": "--"} if read == TOKEN_BY_TOKEN else {}
            style |= NOT_LEARNED if label in unlearned else {}
            draw_curve(ax, means, style, f"{name} (n = {seed_count(means['n'])})".strip())
            trained_to = next(run.trained_to for run in runs if run.label == label)
            places = nearest(means.index, trained_to), means.index.max()
            shown.append(line[line["length"].isin(places)])
        _finish_panel(ax, of_panel, runs, wide)
    add_legend(figure, axes)

    # 3. Collect the notes.
    remarks = [*notes(drawn, runs), ERRORS]
    if unlearned:
        remarks.append(
            f"Not learned (dots, hollow markers): {words(runs[0].headline)} below {SOLVED} at the"
            " training length. Such an ℓ* is of a map that does not solve the task."
        )
    if metric == "num_iters" and drawn["elsewhere"].any():
        remarks.append(OTHER_SOLUTION_NOTE)
    lines = pd.concat(shown)
    summary = summarize(lines.assign(place=lines["length"]), runs)
    return Drawing(figure, numbers[numbers["run"].isin(drawn["run"])], summary, remarks)


def summarize(shown: pd.DataFrame, runs: list[Trained]) -> list[dict]:
    """Return a line for each model and way of reading, with a column for each place.

    Args:
        shown: Lines with a further column `place`: a test length, or the name of a column.
        runs: All runs of the figure.
    """
    has_ways = shown["read"].nunique() > 1
    summary = []
    for (label, read), lines in shown.groupby(["label", "read"], sort=False):
        means = over_seeds(lines, ("place",))
        row = {"run": label, "n": seed_count(means["n"])}
        row |= {"read": read} if has_ways else {}
        for place, mean in means.iterrows():
            column = place if isinstance(place, str) else f"at {place}"
            row[column] = with_error(mean["value"], mean["error"])
        seconds = [
            run.result["training_seconds"] for run in runs if label in (run.label, run.model)
        ]
        row["training s"] = f"{sum(seconds) / len(seconds):.4g}"
        summary.append(row)
    return summary


def _finish_panel(ax: Axes, drawn: pd.DataFrame, runs: list[Trained], wide: float) -> None:
    """Draw the training lengths, and set the scales and labels of the axes."""
    for length in {run.trained_to for run in runs if run.panel == drawn["panel"].iloc[0]}:
        ax.axvline(length, color="gray", ls=":", lw=1.3, label="training length")
    if drawn["length"].max() > wide * drawn["length"].min():
        ax.set_xscale("log", base=2)
    metric = drawn["metric"].iloc[0]
    ax.set(xlabel="test length (tokens)", ylabel=words(metric))
    ax.grid(alpha=0.3)
    if metric.endswith("accuracy"):  # a scaled one may be below 0, the accuracy of guessing
        ax.set_ylim(1.05 * min(0.0, drawn["value"].min()), 1.02)
    else:
        ax.set_ylim(bottom=0)


def has_learned(runs: list[Trained], label: str) -> bool:
    """Return True if a model solves its task at the longest training length."""
    seeds = [run for run in runs if run.label == label]
    numbers = at_end(seeds)
    values = over_seeds(_at_once(numbers, seeds[0].headline))["value"]
    return bool(values[nearest(values.index, seeds[0].trained_to)] >= SOLVED)


def _at_once(numbers: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return the lines of a metric that were not read token by token."""
    return numbers[(numbers["metric"] == metric) & (numbers["read"] != TOKEN_BY_TOKEN)]


def scatter(runs: list[Trained], title: str, metric: dict[str, str]) -> Drawing:
    """Draw a point for each model: a metric of one task against a metric of another, both at twice
    the training length.

    Args:
        runs: Finished runs.
        title: Of the figure.
        metric: Task → its metric; the first one is horizontal.

    Raises:
        ReportError: If no model has finished both tasks.
    """
    numbers = at_end(runs)
    at_double = []
    for task, name in metric.items():
        of_task = _at_once(numbers[numbers["task"] == task], name)
        trained_to = [run.trained_to for run in runs if run.cfg.task.name == task]
        if trained_to:
            length = nearest(of_task["length"], 2 * trained_to[0])
            at_double.append(of_task[of_task["length"] == length])
    drawn = pd.concat(at_double)
    means = over_seeds(drawn, ("model", "task"))
    lengths = drawn.groupby("task")["length"].first()
    figure, (ax,) = new_figure([""], title)
    families: dict[str, list] = {}
    for model, style in styles_of(runs).items():
        of_model = means.loc[model]
        n = seed_count(of_model["n"])
        if len(of_model) == len(metric):
            x, y = (of_model.loc[task] for task in metric)
            _draw_point(ax, x, y, {**style, "label": f"{model} (n = {n})"})
            kind = next(run.cfg.model.name for run in runs if run.model == model)
            families.setdefault(kind, []).append((x["value"], y["value"]))
    if not families:
        raise ReportError(
            f"no model has finished both {' and '.join(metric)} yet: a point needs both of its runs"
        )
    for points in families.values():  # the same model at several sizes
        ax.plot(*zip(*points), color="gray", lw=1, alpha=0.5, zorder=1)
    labels = [
        f"{task.replace('_', ' ')}:\n{words(name)} at length {lengths[task]}"
        for task, name in metric.items()
    ]
    ax.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel=labels[0], ylabel=labels[1])
    ax.grid(alpha=0.3)
    add_legend(figure, [ax])
    places = [f"{line.task.replace('_', ' ')} at {line.length}" for line in drawn.itertuples()]
    summary = summarize(drawn.assign(place=places, label=drawn["model"]), runs)
    return Drawing(figure, numbers, summary, [*notes(drawn, runs), ERRORS])


def _draw_point(ax: Axes, x: pd.Series, y: pd.Series, style: dict) -> None:
    """Draw a model's mean on both axes with its errors, and a dot for each seed that has both."""
    style = {**style, "ls": "none", "ms": 8, "zorder": 3}
    ax.errorbar(x["value"], y["value"], y["error"], x["error"], capsize=2, elinewidth=1, **style)
    if max(x["n"], y["n"]) > 1:
        horizontal, vertical = (dict(zip(axis["seeds"], axis["values"])) for axis in (x, y))
        for seed in horizontal.keys() & vertical.keys():
            ax.plot(horizontal[seed], vertical[seed], ".", color=style["color"], alpha=0.6)


def bars(runs: list[Trained], title: str, metric: str | None = None, at: str = "double") -> Drawing:
    """Draw a bar for each model.

    Args:
        runs: Finished runs.
        title: Of the figure.
        metric: None: the task's headline.
        at: "double", the metric at twice the training length; "beyond", its mean over all lengths
            from the training length on; "whole", over the whole test set.

    Raises:
        ReportError: If a run has no such metric.
    """
    metric = metric or runs[0].headline
    numbers = at_end(runs)
    of_metric = _at_once(numbers, metric)
    for run in runs:
        if str(run.run_dir) not in set(of_metric["run"]):
            raise ReportError(
                f"{run.run_dir} has no {words(metric)} in its result: nothing to draw"
            )
    lengths, place = _lengths_of_bars(sorted(of_metric["length"].unique()), runs[0].trained_to, at)
    drawn = of_metric[of_metric["length"].isin(lengths)]
    means = over_seeds(drawn, ("label",))
    kinds = {run.label: (run.cfg.model.name, run.cfg.model.mixer) for run in runs}
    colors = dict(zip(dict.fromkeys(kinds.values()), PALETTE * len(kinds)))
    figure, (ax,) = new_figure([""], title, width=5.2, height=1.9 + 0.34 * len(kinds))
    for y, (label, kind) in enumerate(kinds.items()):
        mean = means.loc[label]
        ax.barh(y, mean["value"], xerr=mean["error"], color=colors[kind], height=0.7, capsize=2)
        if mean["n"] > 1:
            ax.plot(mean["values"], [y] * mean["n"], "o", mfc="w", mec="k", ms=3)
        ax.text(1.03, y, f"{mean['value']:.3f}", va="center", fontsize="small")
    ax.set_yticks(range(len(kinds)), [f"{label} (n = {means.loc[label, 'n']})" for label in kinds])
    ax.invert_yaxis()
    ax.set(xlim=(1.05 * min(0, means["value"].min()), 1.15), xlabel=f"{words(metric)}, {place}")
    ax.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    ax.grid(axis="x", alpha=0.3)
    ax.set_axisbelow(True)
    if not metric.startswith("scaled"):
        ax.axvline(runs[0].result["chance"], color="gray", ls=":", lw=1.3, label="chance")
        add_legend(figure, [ax])
    summary = summarize(drawn.assign(place=f"{words(metric)}, {place}"), runs)
    return Drawing(figure, numbers, summary, [*notes(drawn, runs), ERRORS])


def _lengths_of_bars(lengths: list[int], trained_to: int, at: str) -> tuple[list[int], str]:
    """Return the lengths that bars show, and their name; `at` as of `bars`."""
    if at == "double":
        length = nearest(lengths, 2 * trained_to)
        return [length], f"at length {length}"
    if at == "beyond":
        beyond = [length for length in lengths if length >= trained_to] or lengths
        return beyond, f"mean of lengths {beyond[0]} to {beyond[-1]}"
    return lengths, "on the test set"


def times(runs: list[Trained], title: str) -> Drawing:
    """Draw the longest solved length over the seconds of training, a step line for each run.

    Raises:
        ReportError: If no run was evaluated over lengths while it trained.
    """
    numbers = while_training(runs)
    if numbers.empty:
        raise ReportError(
            "the runs found were never evaluated over lengths while they trained: set eval.during"
        )
    drawn = numbers[numbers["metric"] == runs[0].headline]
    solved = [
        {
            **evaluation.iloc[0],
            "value": longest_solved(evaluation.groupby("length")["value"].mean()),
        }
        for _, evaluation in drawn.groupby(["run", "seconds"])
    ]
    of_evaluation = pd.DataFrame(solved).assign(length=None, metric="solved_length", stderr=np.nan)
    figure, (ax,) = new_figure([""], title)
    for model, style in styles_of(runs).items():
        of_model = of_evaluation[of_evaluation["model"] == model]
        stairs = [stair.sort_values("seconds") for _, stair in of_model.groupby("run")]
        label = f"{model} (n = {len(stairs)})"
        for stair in stairs:
            seconds, lengths = [0.0, *stair["seconds"]], [0, *stair["value"]]
            style = {**style, "drawstyle": "steps-post", "markevery": [-1], "ms": 6}
            ax.plot(seconds, lengths, label=label, **style)
    for length in {run.trained_to for run in runs}:
        ax.axhline(length, color="gray", ls=":", lw=1.3, label="training length")
    ax.set(xlabel="training time (s)", xlim=(0, None), ylim=(0, None))
    ax.set_ylabel(f"longest solved length (tokens)\n{words(runs[0].headline)} ≥ {SOLVED}")
    ax.grid(alpha=0.3)
    add_legend(figure, [ax])
    remarks = [*notes(drawn, runs), "n: training seeds, a line for each; its mark: the end"]
    longest = of_evaluation.loc[of_evaluation.groupby("run")["value"].idxmax()]
    summary = summarize(longest.assign(place="longest solved"), runs)
    numbers = pd.concat([drawn, of_evaluation]).astype({"length": "Int64"})
    return Drawing(figure, numbers, summary, remarks)


KINDS: dict[str, Callable[..., Drawing]] = {
    "curves": curves,
    "scatter": scatter,
    "bars": bars,
    "times": times,
}


def new_figure(
    panels: Sequence[str], title: str, width: float = 4.6, height: float = 3.8, **options: Any
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with panels, up to MAX_COLUMNS in a row.

    Args:
        panels: Their titles; the title of a single panel is not shown.
        title: Of the figure.
        width: Of a panel, in inches.
        height: Of a panel, in inches.
        options: Of matplotlib's `subplots`.
    """
    columns = min(MAX_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    size = (width * columns + 2.4, height * rows)  # with the legend on the right
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options).ravel()
    for ax, name in zip(axes, panels):
        ax.set_title(name if len(panels) > 1 else "")
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[len(panels) :]:
        ax.remove()
    figure.suptitle(title, x=0.01, ha="left")
    return figure, axes[: len(panels)]


def add_legend(figure: Figure, axes: Iterable[Axes]) -> None:
    """Put a legend with one entry a label on the right of the axes."""
    handles: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside right center",
        fontsize="small",
        handlelength=3,
    )


def styles_of(runs: list[Trained]) -> dict[str, dict]:
    """Return a line style for each model: by colours, or by a ramp if only ℓmax changes."""
    models = list(dict.fromkeys(run.model for run in runs))
    colors: list[Any] = [PALETTE[i % len(PALETTE)] for i in range(len(models))]
    if all("train.max_iters" in run.point for run in runs):
        ramp = matplotlib.colormaps["viridis"]
        colors = [ramp(0.88 * i / max(1, len(models) - 1)) for i in range(len(models))]
    return {
        model: {
            "color": color,
            "marker": MARKERS[i % len(MARKERS)],
            "ms": 4,
            "lw": 1.5,
            "ls": "-." if color in colors[:i] else "-",  # a colour comes again
        }
        for i, (model, color) in enumerate(zip(models, colors))
    }


def draw_curve(ax: Axes, means: pd.DataFrame, style: dict, label: str) -> None:
    """Draw means over lengths: with a band and dots where there are several seeds, else with bars.

    Args:
        means: As `numbers.over_seeds` returns them, by length.
    """
    ax.plot(means.index, means["value"], label=label, **style)
    color = style["color"]
    single = means[means["n"] == 1]
    if len(single):
        bars = {"fmt": "none", "ecolor": color, "capsize": 2, "lw": 1}
        ax.errorbar(single.index, single["value"], single["error"], **bars)
    low, high = means["value"] - means["error"], means["value"] + means["error"]
    if len(single) < len(means):
        has_several = means["n"] > 1
        ax.fill_between(means.index, low, high, where=has_several, color=color, alpha=0.15, lw=0)
    for length, values in means.loc[means["n"] > 1, "values"].items():
        ax.plot([length] * len(values), values, ".", color=color, ms=3, alpha=0.6, zorder=1)
