"""Figures of a report, drawn by matplotlib."""

from __future__ import annotations

import io
import math
import warnings
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.common.page import save_pdf
from lm.report.blocks import Curve, Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

# Distinguishable by color-blind readers.
PALETTE = ("#2a7fd4", "#e0702a", "#17a673", "#c46fb0", "#d9a514", "#4bb6e8", "#9a7d6a")
DASHES = ("-", "--", ":", "-.")  # one after the other when the colors repeat
PANEL = (6.4, 3.8)  # inches
MAX_LEGEND = 12  # curves; a panel with more has a color bar of the layers
MAX_LABEL = 44  # characters
LOG_SPAN = 5  # ratio of the highest and the lowest value from which an axis is logarithmic
DPI = 130
STYLES: dict[str, dict[str, Any]] = {
    "line": {"lw": 1.5},
    "faint": {"lw": 0.7, "alpha": 0.4},
    "points": {"marker": "o", "ms": 3.5, "lw": 1.3},
}


def draw(figure: Figure) -> Drawing:
    """Return a figure drawn with at most two panels in a row."""
    from matplotlib.figure import Figure as Drawing

    columns = min(2, len(figure.panels))
    rows = math.ceil(len(figure.panels) / columns)
    drawing = Drawing(figsize=(PANEL[0] * columns, PANEL[1] * rows), layout="constrained")
    grid = drawing.subplots(rows, columns, squeeze=False).flat
    for (title, curves), axes in zip(figure.panels.items(), grid, strict=False):
        axes.set(title=_escape(title), ylabel=figure.unit, xlabel=curves[0].values.index.name)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        _draw_panel(axes, figure, curves)
    for axes in grid:
        axes.set_axis_off()
    return drawing


def _draw_panel(axes: Axes, figure: Figure, curves: list[Curve]) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.ticker import EngFormatter

    if figure.is_stacked:
        parts = [curve.values for curve in curves]
        labels = [_escape(curve.label) for curve in curves]
        axes.stackplot(parts[0].index, parts, labels=labels, colors=PALETTE, alpha=0.85, lw=0)
    else:
        for curve in curves:
            axes.plot(
                curve.values.index,
                curve.values,
                label=_escape(curve.label),
                **_style(curve, curves),
            )
    for (name, level), dashes in zip(figure.levels.items(), cycle(DASHES[1:])):
        axes.axhline(level, color="gray", ls=dashes, lw=1.2, label=_escape(name))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    positive = [value for curve in curves for value in curve.values if value > 0]
    if figure.is_log and positive and max(positive) > LOG_SPAN * min(positive):
        axes.set_yscale("log")
    elif max(positive, default=0) >= 1e5:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    if len(curves) > MAX_LEGEND:
        scale = ScalarMappable(Normalize(0, len(curves) - 1), "viridis")
        axes.figure.colorbar(scale, ax=axes, label=f"{curves[0].label} to {curves[-1].label}")
    else:
        axes.legend(fontsize="small", framealpha=0.6)


def _style(curve: Curve, curves: list[Curve]) -> dict[str, Any]:
    """Return matplotlib's options of a line."""
    style = dict(STYLES["points" if len(curve.values) < 2 else curve.style])
    if len(curves) > MAX_LEGEND:
        import matplotlib

        return style | {"color": matplotlib.colormaps["viridis"](curve.color / (len(curves) - 1))}
    turn, index = divmod(curve.color, len(PALETTE))
    return {"ls": DASHES[turn % len(DASHES)]} | style | {"color": PALETTE[index]}


def _escape(label: str) -> str:
    """Return a label that matplotlib shows as it is: not as mathematics, and not hidden."""
    if len(label) > MAX_LABEL:
        label = f"{label[: MAX_LABEL // 2]}…{label[-MAX_LABEL // 2 :]}"
    label = label.replace("$", r"\$")
    return f" {label}" if label.startswith("_") else label


def to_png(drawing: Drawing) -> bytes:
    """Return a drawing as PNG."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        drawing.savefig(file, format="png", dpi=DPI)
    return file.getvalue()


def save(drawing: Drawing, png: bytes, folder: Path, name: str) -> None:
    """Save a drawing as PNG and PDF."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.png").write_bytes(png)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        save_pdf(drawing, folder / f"{name}.pdf")
