"""An inspection on a command line: tokens, layers and sums in the terminal, and the page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lm.common.console import say
from lm.common.files import check_replaceable
from lm.evaluation.inspection.page import MADE_BY, explain_mark, layer_rows, list_facts
from lm.evaluation.inspection.result import Inspection
from lm.runs.written import PAGE

if TYPE_CHECKING:
    from rich.console import RenderableType


def choose_page(place: Path | str, out: str | None) -> Path:
    """Return the page's path: `out`, else a file in the folder that was loaded, if it is one.

    Raises:
        OutputError: It cannot be written, or a file that is no such page is there.
    """
    folder = Path(place)
    default = folder / PAGE if folder.is_dir() else Path(PAGE)
    page = default if out is None else Path(out)
    check_replaceable(page, MADE_BY)
    return page


def show(found: Inspection, out: Path) -> None:
    """Print an inspection, and write its page."""
    found.to_html(out)
    for part in parts(found):
        say(part)
    say(f"page: {out}")


def parts(found: Inspection) -> list[RenderableType]:
    """Return the parts to print: the tokens, the table of the layers, the sums."""
    from rich.table import Table
    from rich.text import Text

    out: list[RenderableType] = [Text("".join(_shown_tokens(found)))]
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


def _shown_tokens(found: Inspection) -> list[str]:
    """Return the tokens as text; of a synthetic task with the model's answers."""
    if found.answers is None:
        return [token.shown + "\n" * token.ends_line for token in found.tokens]
    marks = {True: "✓", False: "✗", None: ""}
    pairs = zip(found.tokens, found.answers, strict=True)
    return [f"{token.shown}={answer.predicted}{marks[answer.is_right]} " for token, answer in pairs]
