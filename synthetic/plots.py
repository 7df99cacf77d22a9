"""Figures of the reports: curves over length or size, scatter plots, bars, training times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from lm.common.errors import UserError
from lm.runs.metrics import OTHER_SOLUTION_MARK, OTHER_SOLUTION_NOTE
from synthetic.labels import label_model_kind
from synthetic.result_tables import (
    FinishedRun,
    average_seeds,
    build_final_table,
    build_headline_table,
    build_training_table,
    describe_figure,
    format_mean,
    format_seed_count,
)
from synthetic.results import TOKEN_BY_TOKEN

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe & Ito's palette (without its yellow, too pale for lines), safe for colour-blind readers.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX*"  # matplotlib's letters
SOLVED = 0.9  # a length counts as solved if the headline metric is at least this
MAX_COLUMNS = 4  # panels per row
# Line style for ℓ* of a model that has not learned its task.
NOT_LEARNED_STYLE = {"ls": ":", "mfc": "none", "alpha": 0.6}
ERROR_NOTE = (
    "n: training seeds. If there are several: mean, a dot for each, shade or error bar ± standard"
    " deviation. If there is one: error bar ± standard error over test samples"
)


class ReportError(UserError, RuntimeError):
    """Error for a report that cannot be drawn; its message names the missing part."""


@dataclass
class Drawing:
    """A figure, its table of measurements, and the notes below it."""

    figure: Figure
    table: pd.DataFrame  # for the CSV
    summary: list[dict]  # for the printed table, one line per model
    notes: list[str]

    def __post_init__(self) -> None:
        width = int(17 * self.figure.get_figwidth())  # 17 characters of this font per inch
        text = [line for note in self.notes for line in wrap(note, width)]
        self.figure.supxlabel("\n".join(text), x=0.01, ha="left", fontsize="x-small")


def format_metric(metric: str) -> str:
    """Return a metric as text for axes and tables."""
    return "ℓ* (iterations)" if metric == "num_iters" else metric.replace("_", " ")


def find_nearest(lengths: Iterable[int], target: int) -> int:
    """Return the evaluated length nearest to the target; of two equally near ones the shorter."""
    return min(lengths, key=lambda length: (abs(length - target), length))


def find_longest_solved(values: pd.Series) -> int:
    """Return the longest length (the index) up to which no value is below SOLVED, or 0."""
    is_solved_so_far = values.sort_index().ge(SOLVED).cummin()
    return int(is_solved_so_far[is_solved_so_far].index.max()) if is_solved_so_far.any() else 0


def draw_curves(
    runs: list[FinishedRun], title: str, metric: str | None = None, log_ratio: float = 100
) -> Drawing:
    """Draw a metric over the test length.

    There is a panel for each task and a colour for each model; curves are dashed if the model read
    token by token. For `num_iters`, the figure marks two kinds of curves: of models that have not
    learned their task, because solving the task may need another number of iterations, and of
    probes that converged to another solution than the model's.

    Args:
        runs: Finished runs.
        title: Title of the figure.
        metric: Metric to draw (`num_iters` is ℓ*); None: the headline metric of each task.
        log_ratio: The length axis is logarithmic if longest / shortest length is above this.

    Raises:
        ReportError: If no run has this metric.
    """
    # 1. Select the runs and the lines of the table.
    table = build_final_table(runs)
    lines = table[table["metric"] == metric] if metric else build_headline_table(runs)
    metric = metric or runs[0].headline
    if lines.empty:
        raise ReportError(f"no finished run has {format_metric(metric)}: nothing to draw")
    runs = [run for run in runs if str(run.run_dir) in set(lines["run"])]
    styles = choose_styles(runs)
    unlearned_labels = set()
    if metric == "num_iters":
        labels = {run.label for run in runs}
        unlearned_labels = {label for label in labels if not has_learned(runs, label)}

    # 2. Draw a panel for each task.
    figure, axes = create_figure(list(lines["panel"].unique()), title, sharey=True)
    summary_lines = []
    for ax, (_, panel) in zip(axes, lines.groupby("panel", sort=False)):
        for (label, model, reading), curve in panel.groupby(["label", "model", "read"], sort=False):
            means = average_seeds(curve)
            has_several_readings = lines.loc[lines["label"] == label, "read"].nunique() > 1
            name = f"{model}, {reading}" if has_several_readings else model
            if label in unlearned_labels:
                name += ", not learned"
            if metric == "num_iters" and curve["elsewhere"].any():  # ℓ* of another solution
                name += f" {OTHER_SOLUTION_MARK}"
            style = {**styles[model], "markevery": max(1, len(means) // 12)}  # about 12 markers
            style |= {"ls": "--"} if reading == TOKEN_BY_TOKEN else {}
            style |= NOT_LEARNED_STYLE if label in unlearned_labels else {}
            draw_curve(ax, means, style, f"{name} (n = {format_seed_count(means['n'])})".strip())
            trained_to = next(run.trained_to for run in runs if run.label == label)
            summary_lengths = find_nearest(means.index, trained_to), means.index.max()
            summary_lines.append(curve[curve["length"].isin(summary_lengths)])
        _finish_panel(ax, panel, runs, log_ratio)
    # The panels share the axis. Scaled accuracy is below 0 if worse than guessing.
    if lines["metric"].str.endswith("accuracy").all():
        axes[0].set_ylim(1.05 * min(0.0, lines["value"].min()), 1.02)
    else:
        axes[0].set_ylim(bottom=0)
    add_legend(figure, axes)

    # 3. Collect the notes.
    notes = [*describe_figure(lines, runs), ERROR_NOTE]
    if unlearned_labels:
        notes.append(
            f"Not learned (dots, hollow markers): {format_metric(runs[0].headline)} below {SOLVED}"
            " at the training length. Their ℓ* belongs to a map that does not solve the task."
        )
    if metric == "num_iters" and lines["elsewhere"].any():
        notes.append(OTHER_SOLUTION_NOTE)
    summary_table = pd.concat(summary_lines)
    summary = build_summary(summary_table.assign(column=summary_table["length"]), runs)
    table_of_drawn_runs = table[table["run"].isin(summary_table["run"])]
    return Drawing(figure, table_of_drawn_runs, summary, notes)


def build_summary(table: pd.DataFrame, runs: list[FinishedRun]) -> list[dict]:
    """Build the printed table: a line for each model and way of reading.

    Args:
        table: Lines of the figure. Their field `column` is the column of the printed table to which
            they belong: a test length, or a name.
        runs: All runs of the figure.
    """
    has_several_readings = table["read"].nunique() > 1
    summary = []
    for (label, reading), lines in table.groupby(["label", "read"], sort=False):
        means = average_seeds(lines, ("column",))
        row = {"run": label, "n": format_seed_count(means["n"])}
        row |= {"read": reading} if has_several_readings else {}
        for column, mean in means.iterrows():
            name = column if isinstance(column, str) else f"at {column}"
            row[name] = format_mean(mean["value"], mean["error"])
        # The label of a scatter plot is the model, whose runs have several tasks.
        seconds = [
            run.result["training_seconds"] for run in runs if label in (run.label, run.model)
        ]
        row["training s"] = f"{sum(seconds) / len(seconds):.4g}"
        summary.append(row)
    return summary


def _finish_panel(ax: Axes, lines: pd.DataFrame, runs: list[FinishedRun], log_ratio: float) -> None:
    """Draw the training lengths, and set the scales and labels of the axes."""
    for length in {run.trained_to for run in runs if run.panel == lines["panel"].iloc[0]}:
        ax.axvline(length, color="gray", ls=":", lw=1.3, label="training length")
    if lines["length"].max() > log_ratio * lines["length"].min():
        ax.set_xscale("log", base=2)
    metric = lines["metric"].iloc[0]
    ax.set(xlabel="test length", ylabel=format_metric(metric))
    ax.grid(alpha=0.3)


def has_learned(runs: list[FinishedRun], label: str) -> bool:
    """Return True if a model solves its task at the longest training length."""
    seed_runs = [run for run in runs if run.label == label]
    lines = _select_metric(build_final_table(seed_runs), seed_runs[0].headline)
    values = average_seeds(lines)["value"]  # by length
    return bool(values[find_nearest(values.index, seed_runs[0].trained_to)] >= SOLVED)


def _select_metric(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return the lines of a metric, except those that were read token by token."""
    return table[(table["metric"] == metric) & (table["read"] != TOKEN_BY_TOKEN)]


def draw_scatter(runs: list[FinishedRun], title: str, metric_by_task: dict[str, str]) -> Drawing:
    """Draw a point for each model: a metric of one task on each axis.

    Both are measured at twice the training length.

    Args:
        runs: Finished runs.
        title: Title of the figure.
        metric_by_task: Task name → metric, for two tasks; the first is on the horizontal axis.

    Raises:
        ReportError: If no model has finished runs of both tasks.
    """
    table = build_final_table(runs)
    task_lines = []
    for task, metric in metric_by_task.items():
        lines = _select_metric(table[table["task"] == task], metric)
        trained_to = [run.trained_to for run in runs if run.cfg.task.name == task]
        if trained_to:
            length = find_nearest(lines["length"], 2 * trained_to[0])
            task_lines.append(lines[lines["length"] == length])
    lines = pd.concat(task_lines)
    means = average_seeds(lines, ("model", "task"))
    lengths = lines.groupby("task")["length"].first()  # task → its length in the figure
    figure, (ax,) = create_figure([""], title)
    points_by_family: dict[str, list] = {}  # model.name → (x, y) of its sizes
    for model, style in choose_styles(runs).items():
        task_means = means.loc[model]
        n = format_seed_count(task_means["n"])
        if len(task_means) == len(metric_by_task):
            x, y = (task_means.loc[task] for task in metric_by_task)
            _draw_point(ax, x, y, {**style, "label": f"{model} (n = {n})"})
            family = next(run.cfg.model.name for run in runs if run.model == model)
            points_by_family.setdefault(family, []).append((x["value"], y["value"]))
    if not points_by_family:
        raise ReportError(
            f"no model has finished both {' and '.join(metric_by_task)} yet: a point needs runs of"
            " both tasks"
        )
    for points in points_by_family.values():
        ax.plot(*zip(*points), color="gray", lw=1, alpha=0.5, zorder=1)
    labels = [
        f"{task.replace('_', ' ')}:\n{format_metric(metric)} at length {lengths[task]}"
        for task, metric in metric_by_task.items()
    ]
    ax.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel=labels[0], ylabel=labels[1])
    ax.grid(alpha=0.3)
    add_legend(figure, [ax])
    columns = [f"{line.task.replace('_', ' ')} at {line.length}" for line in lines.itertuples()]
    summary = build_summary(lines.assign(column=columns, label=lines["model"]), runs)
    return Drawing(figure, table, summary, [*describe_figure(lines, runs), ERROR_NOTE])


def _draw_point(ax: Axes, x: pd.Series, y: pd.Series, style: dict) -> None:
    """Draw a model's means with their errors, and a dot for each seed that has both tasks."""
    style = {**style, "ls": "none", "ms": 8, "zorder": 3}
    ax.errorbar(x["value"], y["value"], y["error"], x["error"], capsize=2, elinewidth=1, **style)
    if max(x["n"], y["n"]) > 1:
        horizontal, vertical = (dict(zip(axis["seeds"], axis["values"])) for axis in (x, y))
        for seed in horizontal.keys() & vertical.keys():
            ax.plot(horizontal[seed], vertical[seed], ".", color=style["color"], alpha=0.6)


def draw_bars(
    runs: list[FinishedRun], title: str, metric: str | None = None, lengths: str = "double"
) -> Drawing:
    """Draw a bar for each model.

    Args:
        runs: Finished runs.
        title: Title of the figure.
        metric: Metric to draw; None: the headline metric.
        lengths: Evaluated lengths that a bar shows. "double": twice the training length; "beyond":
            mean over the training length and all longer lengths.

    Raises:
        ReportError: If a run has no such metric.
    """
    metric = metric or runs[0].headline
    table = build_final_table(runs)
    metric_table = _select_metric(table, metric)
    runs_with_metric = set(metric_table["run"])
    for run in runs:
        if str(run.run_dir) not in runs_with_metric:
            raise ReportError(
                f"{run.run_dir} has no {format_metric(metric)} in its result: nothing to draw"
            )
    evaluated = sorted(metric_table["length"].unique())
    selected, description = _select_lengths(evaluated, runs[0].trained_to, lengths)
    lines = metric_table[metric_table["length"].isin(selected)]
    means = average_seeds(lines, ("label",))
    column = f"{format_metric(metric)}, {description}"
    kinds = {run.label: (run.cfg.model.name, run.cfg.model.mixer) for run in runs}
    color_by_kind = dict(zip(dict.fromkeys(kinds.values()), PALETTE * len(kinds)))
    figure, (ax,) = create_figure([""], title, width=5.2, height=1.9 + 0.34 * len(kinds))
    for y, (label, kind) in enumerate(kinds.items()):
        mean = means.loc[label]
        ax.barh(
            y, mean["value"], xerr=mean["error"], color=color_by_kind[kind], height=0.7, capsize=2
        )
        if mean["n"] > 1:
            ax.plot(mean["values"], [y] * mean["n"], "o", mfc="w", mec="k", ms=3)
        ax.text(1.03, y, f"{mean['value']:.3f}", va="center", fontsize="small")
    ax.set_yticks(range(len(kinds)), [f"{label} (n = {means.loc[label, 'n']})" for label in kinds])
    ax.invert_yaxis()
    ax.set(xlim=(1.05 * min(0, means["value"].min()), 1.15), xlabel=column)
    ax.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    ax.grid(axis="x", alpha=0.3)
    ax.set_axisbelow(True)
    if not metric.startswith("scaled"):  # a scaled accuracy is 0 at chance
        ax.axvline(runs[0].result["chance"], color="gray", ls=":", lw=1.3, label="chance")
        add_legend(figure, [ax])
    summary = build_summary(lines.assign(column=column), runs)
    return Drawing(figure, table, summary, [*describe_figure(lines, runs), ERROR_NOTE])


def _select_lengths(evaluated: list[int], trained_to: int, lengths: str) -> tuple[list[int], str]:
    """Return the lengths of a bar chart and their description; `lengths` as in `draw_bars`."""
    if lengths == "double":
        length = find_nearest(evaluated, 2 * trained_to)
        return [length], f"at length {length}"
    longer = [length for length in evaluated if length >= trained_to] or evaluated
    return longer, f"mean of lengths {longer[0]} to {longer[-1]}"


def draw_sizes(runs: list[FinishedRun], title: str) -> Drawing:
    """Draw the headline metric over the number of parameters, with a line for each kind of model.

    Models of the same kind differ in width or in the number of layers. A point is a mean over all
    evaluated lengths.
    """
    parameters = {run.label: run.result["parameters"] for run in runs}
    table = build_final_table(runs)
    table["parameters"] = table["label"].map(parameters)
    lines = _select_metric(table, runs[0].headline)
    means = average_seeds(lines, ("label",))
    kinds = {run.label: label_model_kind(run.cfg, run.point) for run in runs}
    metric = format_metric(runs[0].headline)
    figure, (ax,) = create_figure([""], title)
    for kind, style in make_styles(list(dict.fromkeys(kinds.values()))).items():
        labels = [label for label in kinds if kinds[label] == kind]
        labels.sort(key=lambda label: parameters[label])
        curve = means.loc[labels].set_axis([parameters[label] for label in labels])
        draw_curve(ax, curve, style, f"{kind} (n = {format_seed_count(curve['n'])})")
    chance = runs[0].result["chance"]  # a line at chance would leave little room for the curves
    ax.set(xlabel="parameters", ylabel=f"{metric} (chance: {chance:.2g})", xscale="log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.grid(alpha=0.3)
    add_legend(figure, [ax])
    summary = build_summary(lines.assign(column=metric), runs)
    for row in summary:
        row["parameters"] = f"{parameters[row['run']]:,}"
    return Drawing(figure, table, summary, [*describe_figure(lines, runs), ERROR_NOTE])


def draw_training_times(runs: list[FinishedRun], title: str) -> Drawing:
    """Draw the longest solved length over the seconds of training, with a line for each run.

    Raises:
        ReportError: If no run was evaluated over lengths while it trained.
    """
    table = build_training_table(runs)
    if table.empty:
        raise ReportError(
            "no finished run was evaluated over lengths during training: set eval.during"
        )
    lines = table[table["metric"] == runs[0].headline]
    longest_solved = [
        {
            **evaluation.iloc[0],
            "value": find_longest_solved(evaluation.groupby("length")["value"].mean()),
        }
        for _, evaluation in lines.groupby(["run", "seconds"])
    ]
    solved_table = pd.DataFrame(longest_solved).assign(
        length=None, metric="solved_length", stderr=np.nan
    )
    figure, (ax,) = create_figure([""], title)
    for model, style in choose_styles(runs).items():
        model_table = solved_table[solved_table["model"] == model]
        run_tables = [
            run_table.sort_values("seconds") for _, run_table in model_table.groupby("run")
        ]
        label = f"{model} (n = {len(run_tables)})"
        for run_table in run_tables:
            seconds, lengths = [0.0, *run_table["seconds"]], [0, *run_table["value"]]
            style = {**style, "drawstyle": "steps-post", "markevery": [-1], "ms": 6}
            ax.plot(seconds, lengths, label=label, **style)
    for length in {run.trained_to for run in runs}:
        ax.axhline(length, color="gray", ls=":", lw=1.3, label="training length")
    ax.set(xlabel="training time (s)", xlim=(0, None), ylim=(0, None))
    ax.set_ylabel(f"longest solved length\n{format_metric(runs[0].headline)} ≥ {SOLVED}")
    ax.grid(alpha=0.3)
    add_legend(figure, [ax])
    seeds_note = "n: training seeds, with a line for each; the marker is the end of training"
    best_of_run = solved_table.loc[solved_table.groupby("run")["value"].idxmax()]
    summary = build_summary(best_of_run.assign(column="longest solved"), runs)
    table = pd.concat([lines, solved_table]).astype({"length": "Int64"})
    return Drawing(figure, table, summary, [*describe_figure(lines, runs), seeds_note])


DRAW_FUNCTIONS: dict[str, Callable[..., Drawing]] = {
    "curves": draw_curves,
    "scatter": draw_scatter,
    "bars": draw_bars,
    "sizes": draw_sizes,
    "times": draw_training_times,
}


def create_figure(
    panels: Sequence[str], title: str, width: float = 4.6, height: float = 3.8, **options: Any
) -> tuple[Figure, Sequence[Axes]]:
    """Create a figure with panels, up to MAX_COLUMNS in a row.

    Args:
        panels: Titles of the panels; the title of a single panel is not shown.
        title: Title of the figure.
        width: Width of a panel, in inches.
        height: Height of a panel, in inches.
        options: Options of matplotlib's `subplots`.
    """
    columns = min(MAX_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
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
    """Add a legend with one entry per label, to the right of the axes."""
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


def choose_styles(runs: list[FinishedRun]) -> dict[str, dict]:
    """Choose a line style for each model: PALETTE colours, or a colour ramp over ℓmax."""
    models = list(dict.fromkeys(run.model for run in runs))
    colors: Sequence[Any] = PALETTE
    if all("train.max_iters" in run.point for run in runs):
        ramp = matplotlib.colormaps["viridis"]
        colors = [ramp(0.88 * i / max(1, len(models) - 1)) for i in range(len(models))]
    return make_styles(models, colors)


def make_styles(labels: Sequence[str], colors: Sequence[Any] = PALETTE) -> dict[str, dict]:
    """Make a line style for each label; colours repeat with another dash pattern."""
    colors = [colors[i % len(colors)] for i in range(len(labels))]
    return {
        label: {
            "color": color,
            "marker": MARKERS[i % len(MARKERS)],
            "ms": 4,
            "lw": 1.5,
            "ls": "-." if color in colors[:i] else "-",  # distinguishes repeated colours
        }
        for i, (label, color) in enumerate(zip(labels, colors))
    }


def draw_curve(ax: Axes, means: pd.DataFrame, style: dict, label: str) -> None:
    """Draw means, with a band and dots for several seeds, or error bars for one.

    Args:
        ax: Axes to draw on.
        means: Output of `result_tables.average_seeds`, by the value of the horizontal axis.
        style: Line style of matplotlib.
        label: Label in the legend.
    """
    ax.plot(means.index, means["value"], label=label, **style)
    color = style["color"]
    single_seed = means[means["n"] == 1]
    if len(single_seed):
        error_style = {"fmt": "none", "ecolor": color, "capsize": 2, "lw": 1}
        ax.errorbar(single_seed.index, single_seed["value"], single_seed["error"], **error_style)
    low, high = means["value"] - means["error"], means["value"] + means["error"]
    has_several_seeds = means["n"] > 1
    if has_several_seeds.any():
        ax.fill_between(
            means.index, low, high, where=has_several_seeds, color=color, alpha=0.15, lw=0
        )
    for x, values in means.loc[has_several_seeds, "values"].items():
        ax.plot([x] * len(values), values, ".", color=color, ms=3, alpha=0.6, zorder=1)
