"""An inspection on a command line: tokens, layers and sums in the terminal, and the page."""

from __future__ import annotations

from pathlib import Path

from lm.common.console import say
from lm.common.files import check_replaceable
from lm.evaluation.inspection.page import MADE_BY, Inspection, explain_mark, layer_rows, list_facts
from lm.runs.written import PAGE


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
    """Print the tokens, the table of the layers and the sums, and write the page."""
    from rich.table import Table
    from rich.text import Text

    found.to_html(out)
    say(Text("".join(_shown_tokens(found))))
    if found.layers is None:
        say("note: no layer of this model is solved for a fixed point: there is no ℓ*")
    else:
        rows = layer_rows(found.layers, found.tokens)
        table = Table(*rows[0])
        for row in rows[1:]:
            table.add_row(*(Text(cell) for cell in row))
        say(table)
        if note := explain_mark(rows):
            say(note)
    say("\n".join(f"{name}: {value}" for name, value in list_facts(found)))
    say(f"page: {out}")


def _shown_tokens(found: Inspection) -> list[str]:
    """Return the tokens as text; of a synthetic task with the model's answers."""
    if found.answers is None:
        return [token.shown + "\n" * token.ends_line for token in found.tokens]
    marks = {True: "✓", False: "✗", None: ""}
    pairs = zip(found.tokens, found.answers, strict=True)
    return [f"{token.shown}={answer.predicted}{marks[answer.is_right]} " for token, answer in pairs]
