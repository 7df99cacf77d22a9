"""Charts, heat maps and stacks of a report as SVG in the page's colours."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from textwrap import fill

from markupsafe import Markup

from lm.common import page
from lm.report.sections.blocks import Chart, Curve, HeatMap, Stack

# Told apart on a light and on a dark ground, also by colour-blind readers.
PALETTE = ("#2a7fd4", "#e0702a", "#17a673", "#c46fb0", "#d9a514", "#4bb6e8", "#9a7d6a")
DASHES = ("-", "--", ":", "-.")  # when a colour comes again
MARKERS = "osD^vPX*<>"  # of several curves each has its own, for those who see no colours
MARKED = 8  # points of a long curve that have one
LABEL = 44  # characters of a label in a figure
AXES = {"update": "update", "tokens": "training tokens", "token": "token"}
SIZE = (5.6, 3.4)  # inches
LINE = 32  # letters of an axis' name on one line
MANY = 1e5  # is written 100k
SPAN = 5  # times the least value: more is drawn on a logarithmic scale
ROW = 0.2  # inches that a row of the legend takes


def drawings(block: Chart | HeatMap | Stack) -> list[Markup]:
    """The SVG pictures of a block, a chart's in the order of its axes. Needs matplotlib."""
    with _settings():
        if isinstance(block, Chart):
            return [page.svg(_chart(block, axis)) for axis in block.axes]
        drawn = _heat_map(block) if isinstance(block, HeatMap) else _stack(block)
        return [page.svg(drawn)]


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    import matplotlib

    smaller = {"path.simplify": True, "path.simplify_threshold": 0.5, "font.size": 10.5}
    with page.ink(), matplotlib.rc_context(smaller), warnings.catch_warnings():
        # The reader's browser writes the letters, with fonts of its own.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield


def _panel(ylabel: str, xlabel: str, rows_of_legend: int):
    import matplotlib.pyplot as plt

    size = (SIZE[0], SIZE[1] + ROW * rows_of_legend)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    axes.set(xlabel=xlabel, ylabel=fill(ylabel, LINE))
    axes.grid(alpha=0.25, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _chart(chart: Chart, axis: str):
    from matplotlib.ticker import EngFormatter, MaxNLocator

    named = [curve for curve in chart.curves if curve.style != "faint"] or chart.curves
    columns = 2 if all(len(curve.label) < 26 for curve in named) else 1
    rows = math.ceil((len(named) + len(chart.levels)) / columns)
    figure, axes = _panel(chart.unit, AXES[axis], rows)
    handles = {}
    for curve in chart.curves:
        (line,) = axes.plot(*_points(curve, axis), **_style(curve, len(named) > 1))
        if curve in named:
            handles[_label(curve.label)] = line
    for i, (name, level) in enumerate(chart.levels.items()):
        style = DASHES[1 + i % (len(DASHES) - 1)]
        handles[_label(name)] = axes.axhline(level, color="gray", ls=style, lw=1.4)
    _scale(axes, chart)
    if chart.ticks:
        for label in axes.set_xticks(
            chart.curves[0].steps, chart.ticks, rotation=90, family="monospace"
        ):
            label.label1.set_parse_math(False)  # a $ is a $
    elif axis != "tokens":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    else:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=columns,
        fontsize="small",
        frameon=False,
    )
    return figure


def _scale(axes, chart: Chart) -> None:
    """Logarithmic where the values span enough of it for a few labels; thousands as k."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, StrMethodFormatter

    values = [v for curve in chart.curves for v in curve.values if v is not None]
    positive = [v for v in values if v > 0]
    if chart.logarithmic and positive and max(positive) > SPAN * min(positive):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif max(positive, default=0) >= MANY:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))


def _points(curve: Curve, axis: str) -> tuple[list[float], list[float]]:
    """What is drawn: a gap where a number is not known."""
    pairs = zip(curve.across(axis), curve.values, strict=True)
    known = [(at, math.nan if value is None else value) for at, value in pairs if at is not None]
    return [at for at, _ in known], [value for _, value in known]


def _style(curve: Curve, has_others: bool) -> dict:
    turn, color = divmod(curve.run, len(PALETTE))
    style = {"color": PALETTE[color], "ls": DASHES[turn % len(DASHES)], "lw": 1.4}
    if curve.style == "faint":
        style |= {"lw": 0.7, "alpha": 0.35}
        return style
    if curve.style == "dashed":
        style["ls"] = "--"
    few = curve.style != "line" or len(curve.steps) < 30
    if few or has_others:
        every = 1 if few else max(1, len(curve.steps) // MARKED)
        first = curve.run * every // len(MARKERS) % every  # markers of two curves lie apart
        style |= {"marker": MARKERS[curve.run % len(MARKERS)], "ms": 3.6}
        style["markevery"] = (first, every)
    return style


def _label(text: str) -> str:
    """As matplotlib takes it: no mathematics between dollars, nothing hidden by an underscore."""
    if len(text) > LABEL:
        half = LABEL // 2
        text = f"{text[:half]}…{text[-half:]}"
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _edges(steps: Sequence[int]) -> list[float]:
    """Borders between two or more updates, for one more than there are."""
    between = [(a + b) / 2 for a, b in pairwise(steps)]
    first = steps[0] - (between[0] - steps[0])
    return [first, *between, steps[-1] + (steps[-1] - between[-1])]


def _heat_map(heat_map: HeatMap):
    figure, axes = _panel("layer", AXES[heat_map.axis], 0)
    height = len(heat_map.layers)
    values = [[math.nan if v is None else v for v in row] for row in heat_map.values]
    rows = [i - 0.5 for i in range(height + 1)]
    mesh = axes.pcolormesh(
        _edges(heat_map.steps), rows, values, cmap="viridis", shading="flat", rasterized=True
    )
    shown = range(0, height, max(1, height // 12))
    axes.set_yticks(list(shown), [str(heat_map.layers[i]) for i in shown])
    axes.grid(False)
    figure.colorbar(mesh, ax=axes, label=heat_map.unit)
    return figure


def _stack(stack: Stack):
    names = list(stack.parts)
    figure, axes = _panel(stack.unit, "update", math.ceil(len(names) / 3))
    colors = [PALETTE[i % len(PALETTE)] for i in range(len(names))]
    areas = axes.stackplot(stack.steps, list(stack.parts.values()), colors=colors, alpha=0.85, lw=0)
    axes.set_ylim(bottom=0)
    labels = [_label(name) for name in names]
    figure.legend(
        areas, labels, loc="outside lower center", ncols=3, fontsize="small", frameon=False
    )
    return figure
