"""Where an inspection goes on a command line: the terminal, and a page of its own."""

from __future__ import annotations

from pathlib import Path

from lm.common.console import say
from lm.common.files import check_replaceable
from lm.evaluation.inspection.page import MADE_BY, Inspection
from lm.runs.written import PAGE


def default_page(place: Path | str) -> Path:
    """Where the page goes if nothing is said: beside what was loaded, if that is a folder."""
    folder = Path(place)
    return folder / PAGE if folder.is_dir() else Path(PAGE)


def check_page(path: Path, made_by: str = MADE_BY) -> None:
    """Find out whether a page can be written, before there is one.

    Args: made_by: the comment by which an earlier page of the command is known.
    Raises:
        OutputError: it cannot, or another file is there.
    """
    check_replaceable(path, made_by)


def show(found: Inspection, out: Path) -> None:
    """Print an inspection, and write its page."""
    from lm.evaluation.inspection import terminal

    found.to_html(out)
    for part in terminal.parts(found, say.console):
        say(part)
    say(f"page: {out}")
