"""Figures of a report, drawn with matplotlib."""

from __future__ import annotations

import base64
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from lm.report.read import RunFiles
from lm.report.summary import format_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

# Color-blind readers can distinguish these colors.
PALETTE = ("#2a7fd4", "#e0702a", "#17a673", "#c46fb0", "#d9a514", "#4bb6e8", "#9a7d6a")
PANEL_INCHES = (6.4, 3.8)  # width and height
MAX_LEGEND_ENTRIES = 8  # if there are more curves, only every n-th curve has an entry
MAX_LABEL_LENGTH = 44  # characters
MIN_LOG_RATIO = 5  # max / min of the values above which an axis is logarithmic
MIN_VALUES_WITHOUT_MARKERS = 30  # a curve with fewer values has a marker at each value
DPI = 130


class Spec(NamedTuple):
    """Description of a figure.

    `curve_per` is "run" for one curve per run; or "layer" or "name" for one curve per layer, or per
    name in the mapping under `keys`, and one panel per run.
    """

    name: str  # file name, one of `lm.runs.owned_files.FIGURES`
    title: str
    unit: str  # of the values
    keys: tuple[str, ...]  # nested keys of the values in the records
    curve_per: Literal["run", "layer", "name"] = "run"
    inner_keys: tuple[str, ...] = ()  # as in RunFiles.named_series
    can_be_log: bool = False  # True: a logarithmic y axis if max / min exceeds MIN_LOG_RATIO
    is_noisy: bool = False  # True: draw a running mean over the values
    is_stacked: bool = False  # True: stack the curves, as parts of a whole
    divisor: float = 1.0  # number by which the values are divided


class Figure(NamedTuple):
    """Data of a figure."""

    spec: Spec
    panels: dict[str, dict[str, pd.Series]]  # panel title → curve label → values by update or token
    baselines: dict[str, float]  # name → value of horizontal lines
    source: str  # file and keys of the numbers


NATS = "nats per token"
SHARE = "share of the tokens"
MEAN_ITERS = ("probe", "num_iters", "mean")
SOURCE_LOSSES = ("validation", "sources")  # keys of a mapping: source → {"loss": …}
LOG: dict = {"can_be_log": True}
# Figures by section of the page.
SPECS = {
    "Loss": [
        Spec("loss", "Training loss", NATS, ("loss",), is_noisy=True),
        Spec("validation_loss", "Validation loss", NATS, ("validation", "loss")),
        Spec("bits_per_byte", "Bits per byte", "bits", ("validation", "bits_per_byte")),
        Spec("sources", "Validation loss of each source", NATS, SOURCE_LOSSES, "name", ("loss",)),
        Spec("epochs", "Epochs of each source", "epochs", ("data_epochs",), "name"),
        Spec("shares", "Share of each source", "of the data", ("data_share",), "name"),
    ],
    "Fixed point": [
        Spec("iterations", "ℓ* of each layer", "ℓ* in iterations", MEAN_ITERS, "layer"),
        Spec("evaluations", "Evaluations per token", "evaluations", ("evaluations",), "layer"),
        Spec("failed", "Tokens whose solve failed", SHARE, ("failed",), "layer"),
        Spec("bisected", "Tokens that were bisected", SHARE, ("bisected",), "layer"),
        Spec("limited", "Tokens whose gradient may be limited", SHARE, ("limited",), "layer"),
        Spec(
            "residual",
            "Residual",
            "mean over sequences of max over tokens",
            ("residual",),
            "layer",
            **LOG,
        ),
        Spec("adjoint", "Adjoint", "norm / incoming norm", ("adjoint",), "layer", **LOG),
    ],
    "Optimization": [
        Spec("lr", "Learning rate", "learning rate", ("lr",)),
        Spec("grad_norm", "Gradient norm", "before clipping", ("grad_norm",), is_noisy=True, **LOG),
    ],
    "Speed and memory": [
        Spec("tokens_per_s", "Throughput", "tokens per second", ("tokens_per_s",), is_noisy=True),
        Spec("mfu", "MFU", "share of the peak", ("mfu",)),
        Spec("imbalance", "Waiting for the slowest rank", "share of the time", ("imbalance",)),
        Spec("breakdown", "Time of an update", "seconds", ("breakdown",), "name", is_stacked=True),
        Spec("memory", "Memory", "GiB, max over ranks", ("peak_memory_bytes",), divisor=2.0**30),
    ],
}


def make_figures(runs: Sequence[RunFiles], section: str) -> tuple[list[Figure], list[str]]:
    """Return the figures of a section, and a sentence for each quantity that is constant.

    A quantity without records has neither.
    """
    figures, sentences = [], []
    for spec in SPECS[section]:
        panels = _collect_panels(runs, spec, over_tokens=section == "Loss")
        curves = [curve for panel in panels.values() for curve in panel.values()]
        if not curves:
            continue
        values = pd.concat(curves)
        baselines = _find_shared_baselines(runs) if spec.name == "validation_loss" else {}
        source = f"metrics.jsonl: `{'.'.join(spec.keys)}`"
        if nan_count := int(values.isna().sum()):
            source += f"; values left out because they are not finite: {nan_count}"
        if values.nunique() > 1 or baselines:
            figures.append(Figure(spec, panels, baselines, source))
        else:
            value = format_value(float(values.iloc[0]))
            sentences.append(f"{spec.title} ({spec.unit}): {value}, constant. From {source}.")
    return figures, sentences


def _collect_panels(
    runs: Sequence[RunFiles], spec: Spec, over_tokens: bool
) -> dict[str, dict[str, pd.Series]]:
    """Return the curves that have values, by panel title and curve label."""
    panels: dict[str, dict[str, pd.Series]] = {}
    for run in runs:
        if spec.curve_per == "run":
            values = run.number_series(*spec.keys) / spec.divisor
            curves = {run.label: _index_by_tokens(runs, run, values) if over_tokens else values}
        elif spec.curve_per == "layer":
            curves = run.layer_series(*spec.keys)
        else:
            curves = run.named_series(spec.keys, spec.inner_keys)
        title = "" if spec.curve_per == "run" or len(runs) == 1 else run.label
        panel = panels.setdefault(title, {})
        panel |= {label: values for label, values in curves.items() if len(values)}
    return {title: panel for title, panel in panels.items() if panel}


def _index_by_tokens(runs: Sequence[RunFiles], run: RunFiles, values: pd.Series) -> pd.Series:
    """Replace the index of a series, updates, by training tokens if several runs are compared.

    The tokens at an update between two training records are interpolated. Values after the last
    training record are left out.
    """
    if len(runs) == 1 or any(other.last_number("tokens") is None for other in runs):
        return values
    tokens = run.number_series("tokens").dropna()
    token_index = np.interp(values.index, [0, *tokens.index], [0, *tokens], right=math.nan)
    series = pd.Series(values.to_numpy(), pd.Index(token_index, name="training tokens"))
    return series[series.index.notna()]


def _find_shared_baselines(runs: Sequence[RunFiles]) -> dict[str, float]:
    """Return the losses of the n-gram models, in nats per token, {} if they differ between runs."""
    perplexities = runs[0].baselines
    if any(run.baselines != perplexities for run in runs):
        return {}
    return {name: math.log(perplexity) for name, perplexity in perplexities.items()}


def draw(figure: Figure) -> Drawing:
    """Draw a figure, with at most two panels per row."""
    from matplotlib.figure import Figure as Drawing

    columns = min(2, len(figure.panels))
    rows = math.ceil(len(figure.panels) / columns)
    width, height = PANEL_INCHES
    drawing = Drawing(figsize=(width * columns, height * rows), layout="constrained")
    all_axes = list(drawing.subplots(rows, columns, squeeze=False).flat)
    for (title, curves), axes in zip(figure.panels.items(), all_axes, strict=False):
        axes.set(title=_escape(title), ylabel=figure.spec.unit)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        _draw_panel(axes, figure, curves)
    for axes in all_axes[len(figure.panels) :]:
        axes.set_axis_off()
    return drawing


def _draw_panel(axes: Axes, figure: Figure, curves: dict[str, pd.Series]) -> None:
    from matplotlib.ticker import EngFormatter

    colors = _choose_colors(len(curves))
    legend_step = math.ceil(len(curves) / MAX_LEGEND_ENTRIES)
    # matplotlib leaves the label "_" out of the legend.
    labels = [_escape(name) if i % legend_step == 0 else "_" for i, name in enumerate(curves)]
    if figure.spec.is_stacked:
        table = pd.concat(curves, axis=1).fillna(0)
        axes.stackplot(table.index, table.T, labels=labels, colors=colors, alpha=0.85, lw=0)
    else:
        for values, label, color in zip(curves.values(), labels, colors, strict=True):
            _draw_curve(axes, values, label, color, figure.spec.is_noisy)
    # A run has at most two baselines, so two line styles suffice.
    for (name, loss), line_style in zip(figure.baselines.items(), ("--", ":"), strict=False):
        axes.axhline(loss, color="gray", ls=line_style, lw=1.2, label=_escape(name))
    axes.set_xlabel(next(iter(curves.values())).index.name)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    positive_values = [value for values in curves.values() for value in values if value > 0]
    ratio = max(positive_values) / min(positive_values) if positive_values else 1.0
    if figure.spec.can_be_log and ratio > MIN_LOG_RATIO:
        axes.set_yscale("log")
    elif max(positive_values, default=0) >= 1e5:  # labels such as 200k
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.legend(fontsize="small", framealpha=0.6)


def _draw_curve(axes: Axes, values: pd.Series, label: str, color: Any, is_noisy: bool) -> None:
    """Draw a curve; if it is noisy, draw the values faintly and their running mean."""
    style: dict[str, Any] = {"color": color}
    if len(values) < MIN_VALUES_WITHOUT_MARKERS:
        style |= {"marker": "o", "ms": 3.5}
    mean_count = len(values) // 20  # the mean is over 5 % of the curve
    if is_noisy and mean_count > 1:
        axes.plot(values.index, values, lw=0.7, alpha=0.4, **style)
        values = values.rolling(mean_count, min_periods=1).mean()
        label = f"{label}, mean of {mean_count}"
    axes.plot(values.index, values, lw=1.5, label=label, **style)


def _choose_colors(count: int) -> Sequence:
    """Return a color for each curve: from dark to light if there are many, such as layers."""
    if count <= len(PALETTE):
        return PALETTE[:count]
    import matplotlib

    return list(matplotlib.colormaps["viridis"](np.linspace(0, 0.95, count)))


def _escape(label: str) -> str:
    """Return a label, shortened, that matplotlib shows as it is.

    matplotlib reads text between `$` as mathematics, and hides labels that start with `_`.
    """
    if len(label) > MAX_LABEL_LENGTH:
        half = MAX_LABEL_LENGTH // 2
        label = f"{label[:half]}…{label[-half:]}"
    label = label.replace("$", r"\$")
    return f" {label}" if label.startswith("_") else label


def save(figure: Figure, folder: Path) -> str:
    """Draw a figure, save it as PNG and as PDF, and return the PNG in base64.

    The PDF embeds TrueType fonts, which publishers require, and has no date.
    """
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    png = folder / f"{figure.spec.name}.png"
    drawing = draw(figure)
    with warnings.catch_warnings(), matplotlib.rc_context({"pdf.fonttype": 42}):
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        drawing.savefig(png, dpi=DPI)
        drawing.savefig(png.with_suffix(".pdf"), metadata={"CreationDate": None})
    return base64.b64encode(png.read_bytes()).decode()
