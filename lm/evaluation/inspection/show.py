"""Terminal output of an inspection, and the path of its page."""

from __future__ import annotations

from pathlib import Path

from lm.common.console import say
from lm.common.files import check_replaceable
from lm.evaluation.inspection.page import (
    MADE_BY,
    Inspection,
    explain_mark,
    list_facts,
    make_layer_rows,
)
from lm.runs.owned_files import INSPECT_PAGE


def choose_page(place: Path | str, out: str | None) -> Path:
    """Return the path of the page: `out`, or by default a file in the model's folder.

    Args:
        place: Folder of the model, or its name on the hub.
        out: Path that the user chose, or None for the default.

    Raises:
        OutputError: If the page cannot be written, or another file has this path.
    """
    folder = Path(place)
    default = folder / INSPECT_PAGE if folder.is_dir() else Path(INSPECT_PAGE)
    page = default if out is None else Path(out)
    check_replaceable(page, MADE_BY)
    return page


def show(inspection: Inspection, out: Path) -> None:
    """Print tokens, a table of the layers, and facts about the model; write the page."""
    from rich.table import Table
    from rich.text import Text

    inspection.to_html(out)
    say(Text("".join(_format_tokens(inspection))))
    if inspection.layers is None:
        say("note: this model has no fixed-point layer, and therefore no ℓ*")
    else:
        titles, *rows = make_layer_rows(inspection.layers, inspection.tokens)
        table = Table(*titles)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        say(table)
        if note := explain_mark(rows):
            say(note)
    say("\n".join(f"{name}: {value}" for name, value in list_facts(inspection)))
    say(f"page: {out}")


def _format_tokens(inspection: Inspection) -> list[str]:
    """Return each token as text: for a synthetic task, as TOKEN=ANSWER, with ✓ or ✗."""
    if inspection.answers is None:
        return [token.label + ("\n" if token.ends_line else "") for token in inspection.tokens]
    marks = {True: "✓", False: "✗", None: ""}
    pairs = zip(inspection.tokens, inspection.answers, strict=True)
    return [f"{token.label}={answer.predicted}{marks[answer.is_right]} " for token, answer in pairs]
