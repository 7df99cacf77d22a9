"""Contents of a report before they are HTML or Markdown: sections of tables, figures and notes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import pandas as pd

NO_VALUE = "–"


@dataclass(frozen=True)
class Table:
    """Rows of plain text below a head.

    Attributes:
        rows: Cells; the first row is the head.
        source: File and keys of the numbers.
        title: Heading; "" for none.
        has_words: Whether most cells hold words, which are set flush left.
    """

    kind: ClassVar[str] = "table"
    rows: list[list[str]]
    source: str = ""
    title: str = ""
    has_words: bool = False


@dataclass(frozen=True)
class Notes:
    """Sentences, shown as a list; `backticks` mark code."""

    kind: ClassVar[str] = "notes"
    lines: list[str]


@dataclass(frozen=True)
class Text:
    """A preformatted text; with a title it is folded."""

    kind: ClassVar[str] = "text"
    text: str
    title: str = ""


@dataclass(frozen=True)
class Curve:
    """One line of a figure.

    Attributes:
        label: Name in the legend.
        values: Numbers by update or by training tokens; NaN where a record holds no finite number.
        color: Index of the color.
        style: line, faint or points.
    """

    label: str
    values: pd.Series
    color: int = 0
    style: str = "line"


@dataclass(frozen=True)
class Figure:
    """Panels of curves with one y axis.

    Attributes:
        name: Name of the files that the figure is saved in.
        title: Heading.
        unit: Unit of the values.
        source: File and keys of the numbers.
        panels: Curves by the title of their panel.
        levels: Values of horizontal lines by their names.
        is_log: Whether the y axis is logarithmic if the values span enough.
        is_stacked: Whether the curves are parts of a whole.
    """

    kind: ClassVar[str] = "figure"
    name: str
    title: str
    unit: str
    source: str
    panels: dict[str, list[Curve]]
    levels: dict[str, float] = field(default_factory=dict)
    is_log: bool = False
    is_stacked: bool = False

    @property
    def curves(self) -> list[Curve]:
        """The curves of all panels."""
        return [curve for curves in self.panels.values() for curve in curves]


Block = Table | Notes | Text | Figure


@dataclass(frozen=True)
class Section:
    """A heading and its blocks."""

    title: str
    blocks: list[Block]


def format_value(value: object) -> str:
    """Return a value as text: numbers with six significant digits, None as NO_VALUE."""
    if value is None:
        return NO_VALUE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:,.0f}" if abs(value) >= 1e6 else f"{value:,.6g}"
    return str(value)


def summarize_curves(figure: Figure) -> Table:
    """Return the first, lowest, highest and last value of every curve of a figure."""
    rows = [["curve", "points", "first", "min", "max", "last"]]
    for panel, curves in figure.panels.items():
        for curve in curves:
            values = curve.values.dropna().tolist()
            ends = [values[0], min(values), max(values), values[-1]] if values else [None] * 4
            name = f"{panel}: {curve.label}" if len(figure.panels) > 1 else curve.label
            rows.append([name, str(len(values)), *map(format_value, ends)])
    for name, level in figure.levels.items():
        rows.append([name, NO_VALUE, *[format_value(level)] * 4])
    return Table(rows, figure.source)
