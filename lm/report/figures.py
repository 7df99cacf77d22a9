"""Figures of a report, drawn with matplotlib."""

from __future__ import annotations

import base64
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from lm.report.read import Files
from lm.report.summary import format_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

# Distinguishable by color-blind readers.
PALETTE = ("#2a7fd4", "#e0702a", "#17a673", "#c46fb0", "#d9a514", "#4bb6e8", "#9a7d6a")
PANEL = (6.4, 3.8)  # inches
MAX_LEGEND = 8  # entries; if there are more curves, some have no entry
MAX_LABEL = 44  # characters
LOG_SPAN = 5  # an axis is logarithmic if max / min of the values exceeds this
MIN_LINE = 30  # curves with fewer values also have a marker at each value
DPI = 130


class Spec(NamedTuple):
    """Description of a figure.

    Attributes:
        name: File name, one of `lm.runs.owned_files.FIGURES`.
        title: Heading.
        unit: Unit of the values.
        keys: Nested keys of the values in the records.
        per: `run` for one curve per run; `layer` or `name` for one curve per layer or name, and
            one panel per run.
        leaf: Nested keys below a name.
        is_log: True for a logarithmic y axis if the values span more than LOG_SPAN.
        is_noisy: True to draw a running mean over the values.
        is_stacked: True to stack the curves, as parts of a whole.
        scale: Divisor of the values.
    """

    name: str
    title: str
    unit: str
    keys: tuple[str, ...]
    per: str = "run"
    leaf: tuple[str, ...] = ()
    is_log: bool = False
    is_noisy: bool = False
    is_stacked: bool = False
    scale: float = 1.0


class Figure(NamedTuple):
    """Data of a figure.

    Attributes:
        spec: Description of the figure.
        panels: Panel title → curve label → numbers by update or by training tokens.
        levels: Name → value of horizontal lines.
        source: File and keys of the numbers.
    """

    spec: Spec
    panels: dict[str, dict[str, pd.Series]]
    levels: dict[str, float]
    source: str


NATS = "nats per token"
SHARE = "share of the tokens"
NUM_ITERS = ("probe", "num_iters", "mean")
SPECS = {
    "Loss": [
        Spec("loss", "Training loss", NATS, ("loss",), is_noisy=True),
        Spec("validation_loss", "Validation loss", NATS, ("validation", "loss")),
        Spec("bits_per_byte", "Bits per byte", "bits", ("validation", "bits_per_byte")),
        Spec(
            "sources",
            "Validation loss of each source",
            NATS,
            ("validation", "sources"),
            "name",
            leaf=("loss",),
        ),
        Spec("epochs", "Epochs of each source", "epochs", ("data_epochs",), "name"),
        Spec("shares", "Share of each source", "of the data", ("data_share",), "name"),
    ],
    "Fixed point": [
        Spec("iterations", "ℓ* of each layer", "ℓ* in iterations", NUM_ITERS, "layer"),
        Spec("evaluations", "Evaluations per token", "evaluations", ("evaluations",), "layer"),
        Spec("failed", "Tokens whose solve failed", SHARE, ("failed",), "layer"),
        Spec("bisected", "Tokens that were bisected", SHARE, ("bisected",), "layer"),
        Spec("limited", "Tokens whose gradient may be limited", SHARE, ("limited",), "layer"),
        Spec("residual", "Residual", "maximum over tokens", ("residual",), "layer", is_log=True),
        Spec("adjoint", "Adjoint", "norm over incoming norm", ("adjoint",), "layer", is_log=True),
    ],
    "Optimization": [
        Spec("lr", "Learning rate", "learning rate", ("lr",)),
        Spec(
            "grad_norm",
            "Gradient norm",
            "before clipping",
            ("grad_norm",),
            is_log=True,
            is_noisy=True,
        ),
    ],
    "Speed and memory": [
        Spec("tokens_per_s", "Throughput", "tokens per second", ("tokens_per_s",), is_noisy=True),
        Spec("mfu", "MFU", "share of the peak", ("mfu",)),
        Spec("imbalance", "Waiting for the slowest rank", "share of the time", ("imbalance",)),
        Spec("breakdown", "Time of an update", "seconds", ("breakdown",), "name", is_stacked=True),
        Spec("memory", "Memory", "GiB, max over ranks", ("peak_memory_bytes",), scale=2.0**30),
    ],
}


def make_figures(runs: Sequence[Files], section: str) -> tuple[list[Figure], list[str]]:
    """Return the figures of a section, and a sentence for each quantity that is constant.

    Figures without records are left out.
    """
    figures, lines = [], []
    for spec in SPECS[section]:
        panels = _panels(runs, spec, over_tokens=section == "Loss")
        curves = [curve for panel in panels.values() for curve in panel.values()]
        if not curves:
            continue
        values = pd.concat(curves)
        levels = _baselines(runs) if spec.name == "validation_loss" else {}
        source = f"metrics.jsonl: `{'.'.join(spec.keys)}`"
        if nan_count := int(values.isna().sum()):
            source += f"; {nan_count} values that are not finite are left out"
        if values.nunique() > 1 or levels:
            figures.append(Figure(spec, panels, levels, source))
        else:
            value = format_value(float(values.iloc[0]))
            lines.append(f"{spec.title} ({spec.unit}): {value}, constant. From {source}.")
    return figures, lines


def _panels(runs: Sequence[Files], spec: Spec, over_tokens: bool) -> dict[str, dict]:
    """Return the curves that have values, by panel."""
    panels: dict[str, dict[str, pd.Series]] = {}
    for files in runs:
        if spec.per == "run":
            values = files.column(*spec.keys) / spec.scale
            curves = {files.label: _by_tokens(runs, files, values) if over_tokens else values}
        else:
            is_layer = spec.per == "layer"
            curves = files.layers(*spec.keys) if is_layer else files.names(spec.keys, spec.leaf)
        panel = panels.setdefault("" if spec.per == "run" or len(runs) == 1 else files.label, {})
        panel |= {name: values for name, values in curves.items() if len(values)}
    return {title: panel for title, panel in panels.items() if panel}


def _by_tokens(runs: Sequence[Files], files: Files, values: pd.Series) -> pd.Series:
    """Return a series over training tokens if several runs are compared, otherwise unchanged.

    The tokens of a record between two training records are interpolated.
    """
    if len(runs) == 1 or any(other.last("tokens") is None for other in runs):
        return values
    tokens = files.column("tokens").dropna()
    places = np.interp(values.index, [0, *tokens.index], [0, *tokens], right=math.nan)
    series = pd.Series(values.to_numpy(), pd.Index(places, name="training tokens"))
    return series[series.index.notna()]


def _baselines(runs: Sequence[Files]) -> dict[str, float]:
    """Return the losses of the n-gram models, in nats per token, if all runs have the same."""
    first = runs[0].baselines
    is_shared = all(files.baselines == first for files in runs)
    return {name: math.log(perplexity) for name, perplexity in first.items()} if is_shared else {}


def draw(figure: Figure) -> Drawing:
    """Draw a figure, with at most two panels per row."""
    from matplotlib.figure import Figure as Drawing

    columns = min(2, len(figure.panels))
    rows = math.ceil(len(figure.panels) / columns)
    drawing = Drawing(figsize=(PANEL[0] * columns, PANEL[1] * rows), layout="constrained")
    grid = drawing.subplots(rows, columns, squeeze=False).flat
    for (title, curves), axes in zip(figure.panels.items(), grid, strict=False):
        axes.set(title=_escape(title), ylabel=figure.spec.unit)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        _draw_panel(axes, figure, curves)
    for axes in grid:
        axes.set_axis_off()
    return drawing


def _draw_panel(axes: Axes, figure: Figure, curves: dict[str, pd.Series]) -> None:
    from matplotlib.ticker import EngFormatter

    colors = _colors(len(curves))
    every = math.ceil(len(curves) / MAX_LEGEND)
    labels = [_escape(name) if i % every == 0 else "_" for i, name in enumerate(curves)]
    if figure.spec.is_stacked:
        parts = pd.concat(curves, axis=1).fillna(0)
        axes.stackplot(parts.index, parts.T, labels=labels, colors=colors, alpha=0.85, lw=0)
    else:
        for values, label, color in zip(curves.values(), labels, colors, strict=True):
            _draw_curve(axes, values, label, color, figure.spec.is_noisy)
    for (name, level), dashes in zip(figure.levels.items(), ("--", ":"), strict=False):
        axes.axhline(level, color="gray", ls=dashes, lw=1.2, label=_escape(name))
    axes.set_xlabel(next(iter(curves.values())).index.name)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    positive = [value for values in curves.values() for value in values if value > 0]
    if figure.spec.is_log and positive and max(positive) > LOG_SPAN * min(positive):
        axes.set_yscale("log")
    elif max(positive, default=0) >= 1e5:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.legend(fontsize="small", framealpha=0.6)


def _draw_curve(axes: Axes, values: pd.Series, label: str, color: Any, is_noisy: bool) -> None:
    """Draw a curve; if it is noisy, draw the values faintly and their running mean."""
    style: dict[str, Any] = {"color": color}
    if len(values) < MIN_LINE:
        style |= {"marker": "o", "ms": 3.5}
    span = len(values) // 20
    if is_noisy and span > 1:
        axes.plot(values.index, values, lw=0.7, alpha=0.4, **style)
        values = values.rolling(span, min_periods=1).mean()
        label = f"{label}, mean of {span}"
    axes.plot(values.index, values, lw=1.5, label=label, **style)


def _colors(count: int) -> Sequence:
    """Return a color for each curve: from dark to light if there are many, such as layers."""
    if count <= len(PALETTE):
        return PALETTE[:count]
    import matplotlib

    return list(matplotlib.colormaps["viridis"](np.linspace(0, 0.95, count)))


def _escape(label: str) -> str:
    """Return a shortened label that matplotlib neither reads as mathematics nor hides."""
    if len(label) > MAX_LABEL:
        label = f"{label[: MAX_LABEL // 2]}…{label[-MAX_LABEL // 2 :]}"
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
