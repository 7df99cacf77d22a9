"""What a report is made of, before it is HTML or Markdown: sections of tables, charts, notes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

NO_VALUE = "–"  # in a cell: nothing is known
LINES = 6  # layers of which each has a line; of more there is a heat map


@dataclass(frozen=True)
class Table:
    """Rows of plain text, the first being the head.

    Args:
        traced: which file and which keys the numbers are of.
        words: most cells hold words rather than numbers.
    """

    rows: list[list[str]]
    traced: str = ""
    title: str = ""
    words: bool = False


@dataclass(frozen=True)
class Curve:
    """One line of a chart.

    Args:
        run: the number of its run, which chooses its colour.
        steps: update of each point. values: None where a record has no finite number.
        tokens: seen until each point, None where that is not known.
        style: line, faint, dashed or points.
    """

    label: str
    run: int
    steps: list[int]
    values: list[float | None]
    tokens: list[float | None] = field(default_factory=list)
    style: str = "line"

    def across(self, axis: str) -> Sequence[float | None]:
        """Where the points are on an axis: update or tokens."""
        return self.tokens if axis == "tokens" else self.steps


@dataclass(frozen=True)
class Chart:
    """Curves in one picture for each axis.

    Args:
        unit: of the values. traced: the keys of metrics.jsonl that they are of.
        axes: what runs to the right: update, tokens, or token (the steps are places in a text).
        levels: horizontal lines, each with its name. ticks: names of the steps.
    """

    title: str
    unit: str
    traced: str
    curves: list[Curve]
    axes: tuple[str, ...] = ("update",)
    levels: dict[str, float] = field(default_factory=dict)
    logarithmic: bool = False  # where its values span enough
    ticks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class HeatMap:
    """One colour for each layer and update.

    Args:
        values: a row for each layer, a number for each update; None where there is none.
    """

    title: str
    unit: str
    traced: str
    steps: list[int]
    layers: list[int]
    values: list[list[float | None]]
    axis: str = "update"


@dataclass(frozen=True)
class Stack:
    """Parts of a whole over updates, one upon another.

    Args:
        parts: name → a number for each update.
    """

    title: str
    unit: str
    traced: str
    steps: list[int]
    parts: dict[str, list[float]]


@dataclass(frozen=True)
class Notes:
    """Sentences, of which each says one thing."""

    lines: list[str]


@dataclass(frozen=True)
class Folded:
    """A long text that is opened by who wants to read it."""

    title: str
    text: str


@dataclass(frozen=True)
class Preformatted:
    """A text as it stands."""

    text: str


Picture = Chart | HeatMap | Stack
Words = Table | Notes | Folded | Preformatted
Block = Picture | Words


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: list[Block]


def shown(value: object) -> str:
    """A value as a reader sees it: numbers with six digits that count, None as NO_VALUE."""
    if value is None:
        return NO_VALUE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return _decimal(value)
    return str(value)


def _decimal(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1e6:
        return f"{value:,.0f}"
    return f"{value:,.6g}"


def with_error(value: float, error: float | None, sign: str = "") -> str:
    """A value and its standard error or deviation, whose size decides the digits of both (the rule
    of the Particle Data Group: two digits of an error that begins with 100 to 354, else one).

    Args:
        sign: "+" to write it before a positive value, too.
    """
    if error is None or not math.isfinite(error) or error <= 0:
        return f"{value:{sign}.4f}"
    exponent = math.floor(math.log10(error))
    digits = (1 if error / 10**exponent < 3.545 else 0) - exponent
    shown_digits = max(0, digits)
    return (
        f"{round(value, digits):{sign},.{shown_digits}f} ± {round(error, digits):,.{shown_digits}f}"
    )


def byte_unit(most: float) -> tuple[int, str]:
    """(bytes, name) of the unit in which a number of bytes is read: KiB, MiB, GiB or TiB."""
    names = ("KiB", "MiB", "GiB", "TiB")
    power = 0
    while power < len(names) - 1 and most >= 1024 ** (power + 2):
        power += 1
    return 1024 ** (power + 1), names[power]


def in_bytes(count: float | None) -> str:
    """1.18 GiB."""
    if count is None:
        return NO_VALUE
    size, name = byte_unit(count)
    return f"{count / size:,.3g} {name}" if count < 1000 * size else f"{count / size:,.0f} {name}"


def _rows_of(picture: Picture) -> dict[str, Sequence[float | None]]:
    """The values that a picture shows, by the name of their curve, layer or part."""
    if isinstance(picture, Chart):
        return {curve.label: curve.values for curve in picture.curves}
    if isinstance(picture, HeatMap):
        names = [f"layer {layer}" for layer in picture.layers]
        return dict(zip(names, picture.values, strict=True))
    return dict(picture.parts)


def still(picture: Picture) -> Table | str | None:
    """What is said in place of a picture in which nothing moves: a sentence where all its values
    are the same, else a table with one value for each curve; None of a picture to be drawn."""
    known = {
        name: sorted({v for v in values if v is not None})
        for name, values in _rows_of(picture).items()
    }
    if any(len(values) > 1 for values in known.values()):
        return None
    levels = picture.levels if isinstance(picture, Chart) else {}
    different = {value for values in known.values() for value in values}
    if len(different) < 2 and not levels:
        value = f"{shown(different.pop())} throughout" if different else "no finite number"
        return f"{picture.title} ({picture.unit}): {value}. From {picture.traced}."
    if isinstance(picture, Stack):
        return replace(numbers_of_parts(picture), title=picture.title)
    rows = [[name, shown(values[0]) if values else NO_VALUE] for name, values in known.items()]
    rows += [[name, shown(level)] for name, level in levels.items()]
    return Table([["curve", picture.unit], *rows], picture.traced, picture.title)


def in_numbers(picture: Picture) -> Table:
    """What a picture shows, as a table."""
    if isinstance(picture, Chart):
        return numbers(picture)
    if isinstance(picture, HeatMap):
        return numbers_of_layers(picture)
    return numbers_of_parts(picture)


def numbers(chart: Chart) -> Table:
    """The curves of a chart in numbers: how each begins and ends, its least and its most."""
    head = ["curve", "points", "updates", "first", "least", "most", "last"]
    rows = [_ends(curve) for curve in chart.curves]
    for name, level in chart.levels.items():
        rows.append([name, NO_VALUE, NO_VALUE, *[shown(level)] * 4])
    return Table([head, *rows], chart.traced)


def _ends(curve: Curve) -> list[str]:
    found = [(s, v) for s, v in zip(curve.steps, curve.values, strict=True) if v is not None]
    if not found:
        return [curve.label, "0", *[NO_VALUE] * 5]
    values = [value for _, value in found]
    span = f"{found[0][0]:,} to {found[-1][0]:,}"
    ends = [values[0], min(values), max(values), values[-1]]
    return [curve.label, shown(len(found)), span, *map(shown, ends)]


def numbers_of_layers(heat_map: HeatMap) -> Table:
    """A heat map in numbers: of each layer the first, least, most and last."""
    curves = [
        Curve(f"layer {layer}", 0, heat_map.steps, values)
        for layer, values in zip(heat_map.layers, heat_map.values, strict=True)
    ]
    return numbers(Chart(heat_map.title, heat_map.unit, heat_map.traced, curves))


def numbers_of_parts(stack: Stack) -> Table:
    """A stack in numbers: of each part its mean over records, and its share of the whole."""
    means = {name: sum(values) / len(values) for name, values in stack.parts.items()}
    whole = sum(means.values())
    rows = [["part", f"mean {stack.unit}", "share", "last"]]
    for name, mean in means.items():
        share = f"{mean / whole:.1%}" if whole else NO_VALUE
        rows.append([name, shown(mean), share, shown(stack.parts[name][-1])])
    rows.append(["all", shown(whole), NO_VALUE, shown(sum(v[-1] for v in stack.parts.values()))])
    return Table(rows, stack.traced)
