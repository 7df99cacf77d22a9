"""An inspection for a terminal: coloured text with a legend, and a small table; plain on a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm.evaluation.inspection.result import Measured
from lm.evaluation.inspection.words import (
    NO_SOLVER,
    Colouring,
    colourings,
    facts,
    layer_rows,
    plain,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

# From little to much; what is written on each can be read on it.
STYLES = (
    "",
    "black on #fff3c4",
    "black on #ffe08a",
    "black on #fdba4d",
    "black on #f97316",
    "white on #b91c1c",
)
MOST = 8  # tokens in the table


def parts(measured: Measured, console: Console) -> list[RenderableType]:
    """What to print, one after another. console: where it goes; colours only where it has them."""
    way = colourings(measured)[0]
    coloured = console.is_terminal and not console.no_color
    out: list[RenderableType] = [_coloured(measured, way)]
    if coloured:
        out.append(_legend(way))
    out.append(_surprises(measured, way))
    if measured.layers is None:
        out.append(f"note: {NO_SOLVER}")
    else:
        out.append(_table(layer_rows(measured.layers, measured.tokens)))
    out.append("\n".join(f"{name}: {value}" for name, value in facts(measured)))
    return out


def _coloured(measured: Measured, way: Colouring):
    from rich.text import Text

    text = Text()
    for t, token in enumerate(measured.tokens):
        style = _style(way, way.values[t])
        if t == 0 and measured.has_start:
            style = f"dim {style}"
        text.append(token.shown, style)
        if measured.answers is not None:
            answer = measured.answers[t]
            mark = {True: "✓", False: "✗", None: ""}[answer.is_right]
            text.append(f"={answer.predicted}{mark}", "red" if mark == "✗" else "dim")
            text.append(" ")
        elif token.ends_line:
            text.append("\n")
    return text


def _style(way: Colouring, value: float | None) -> str:
    if value is None:
        return ""
    share = (value - way.low) / (way.high - way.low)
    return STYLES[min(len(STYLES) - 1, max(0, int(share * len(STYLES))))]


def _legend(way: Colouring):
    from rich.text import Text

    text = Text(f"{way.name}: ")
    width = (way.high - way.low) / len(STYLES)
    for i, style in enumerate(STYLES):
        low = way.low + i * width
        text.append(f" {low:.{way.digits}f}–{low + width:.{way.digits}f} ", style)
    return text


def _surprises(measured: Measured, way: Colouring):
    """The tokens of which the highest loss was made, and what was thought likelier."""
    from rich.text import Text

    known = [t for t, loss in enumerate(plain(measured.loss)) if loss is not None]
    known.sort(key=lambda t: -float(measured.loss[t]))
    what = "answer" if measured.answers is not None else "token"
    rows = [["at", "token", way.name, "loss, nats", "entropy, nats", f"likeliest {what}"]]
    for t in known[:MOST]:
        value, guess = way.values[t], measured.guesses[t][0]
        rows.append(
            [
                str(t),
                measured.tokens[t].shown,
                "–" if value is None else f"{value:.{way.digits}f}",
                f"{float(measured.loss[t]):.2f}",
                f"{float(measured.entropy[t]):.2f}",
                f"{guess.shown} {guess.probability:.1%}",
            ]
        )
    if measured.layers is None:  # the text is coloured by the loss, which has a column of its own
        rows = [[*row[:2], *row[3:]] for row in rows]
    return _table(rows, Text("tokens with the highest loss"))


def _table(rows: list[list[str]], title: Text | None = None):
    from rich.table import Table
    from rich.text import Text

    head, *body = rows
    table = Table(*head, title=title, title_justify="left")
    for row in body:
        table.add_row(*(Text(cell) for cell in row))
    return table
