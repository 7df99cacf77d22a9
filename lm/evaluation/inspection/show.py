"""An inspection on a command line: coloured text with a legend in the terminal, and the page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lm.common.console import say
from lm.common.files import check_replaceable
from lm.evaluation.inspection.page import (
    MADE_BY,
    Colouring,
    Inspection,
    colourings,
    explain_mark,
    layer_rows,
    list_facts,
)
from lm.runs.written import PAGE

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# From little to much; text is readable on each.
STYLES = (
    "",
    "black on #fff3c4",
    "black on #ffe08a",
    "black on #fdba4d",
    "black on #f97316",
    "white on #b91c1c",
)


def default_page(place: Path | str) -> Path:
    """Return the page's path where none is given: in the folder that was loaded, if it is one."""
    folder = Path(place)
    return folder / PAGE if folder.is_dir() else Path(PAGE)


def check_page(path: Path, made_by: str = MADE_BY) -> None:
    """Refuse a path where the page cannot be written.

    Args:
        path: The page.
        made_by: Comment that marks an earlier page of the command, which may be replaced.

    Raises:
        OutputError: It cannot be written, or another file is there.
    """
    check_replaceable(path, made_by)


def show(found: Inspection, out: Path) -> None:
    """Print an inspection, and write its page."""
    found.to_html(out)
    for part in parts(found, say.console):
        say(part)
    say(f"page: {out}")


def parts(found: Inspection, console: Console) -> list[RenderableType]:
    """Return the parts to print; colours only on a terminal that has them."""
    from rich.table import Table
    from rich.text import Text

    colouring = colourings(found)[0]
    out: list[RenderableType] = [_coloured_text(found, colouring)]
    if console.is_terminal and not console.no_color:
        out.append(_legend(colouring))
    if found.layers is None:
        out.append("note: no layer of this model is solved for a fixed point: there is no ℓ*")
    else:
        head, *body = layer_rows(found.layers, found.tokens)
        table = Table(*head)
        for row in body:
            table.add_row(*(Text(cell) for cell in row))
        out.append(table)
        if note := explain_mark(found.layers):
            out.append(note)
    out.append("\n".join(f"{name}: {value}" for name, value in list_facts(found)))
    return out


def _coloured_text(found: Inspection, colouring: Colouring):
    from rich.text import Text

    text = Text()
    for t, token in enumerate(found.tokens):
        style = _style(colouring, colouring.values[t])
        text.append(token.shown, f"dim {style}" if t == 0 and found.has_start else style)
        if found.answers is not None:
            answer = found.answers[t]
            mark = {True: "✓", False: "✗", None: ""}[answer.is_right]
            text.append(f"={answer.predicted}{mark}", "red" if mark == "✗" else "dim")
            text.append(" ")
        elif token.ends_line:
            text.append("\n")
    return text


def _style(colouring: Colouring, value: float | None) -> str:
    if value is None:
        return ""
    share = (value - colouring.low) / (colouring.high - colouring.low)
    return STYLES[min(len(STYLES) - 1, max(0, int(share * len(STYLES))))]


def _legend(colouring: Colouring):
    from rich.text import Text

    text = Text(f"{colouring.name}: ")
    width = (colouring.high - colouring.low) / len(STYLES)
    for i, style in enumerate(STYLES):
        low = colouring.low + i * width
        text.append(f" {low:.{colouring.digits}f}–{low + width:.{colouring.digits}f} ", style)
    return text
