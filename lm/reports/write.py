"""The page and the Markdown of runs, put together and written."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import lm
from lm.errors import require
from lm.outputs import OutputError, check_file, write_text
from lm.reports import evidence, learning, overview, settings, solver, speed
from lm.reports.as_html import as_html
from lm.reports.as_markdown import as_markdown
from lm.reports.blocks import Section
from lm.reports.read import Files, printable

PAGE, MARKDOWN = "report.html", "report.markdown"


def places(out: Path | str) -> dict[str, Path]:
    """Where a report goes: into a folder, or to the page that is named and the Markdown beside
    it.

    Raises:
        OutputError: a file of another kind is named.
    """
    out = Path(out)
    if out.suffix == ".html":
        return {"page": out, "Markdown": out.with_suffix(".markdown")}
    if out.is_file() or out.suffix in (".md", ".markdown", ".htm", ".pdf", ".json", ".txt"):
        raise OutputError(f"{out} is no place for a report: name a folder, or a file ending .html")
    return {"page": out / PAGE, "Markdown": out / MARKDOWN}


def write(runs: Sequence[Files], out: Path | str) -> dict[str, Path]:
    """Draw the report of these runs and write it → the paths of page and Markdown.

    Raises:
        MissingPackageError: without matplotlib. OutputError: it cannot be written.
    """
    require("matplotlib", "fprnn report")
    paths = places(out)
    for path in paths.values():
        check_file(path)
    names = ", ".join(files.label for files in runs)
    title = f"Report of {names}" if len(runs) < 4 else f"Report of {len(runs)} runs"
    of = sections(runs)
    made = f"Made {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC by fprnn {lm.__version__}."
    page = as_html(title, of, made)
    text = as_markdown(title, of, made)
    write_text(paths["page"], printable(page))
    write_text(paths["Markdown"], printable(text))
    return paths


def sections(runs: Sequence[Files]) -> list[Section]:
    """What the report says, top to bottom."""
    return [
        overview.overview(runs),
        learning.loss(runs),
        solver.solver(runs),
        learning.optimisation(runs),
        speed.speed(runs),
        speed.memory(runs),
        evidence.evaluations(runs),
        evidence.samples(runs),
        settings.settings(runs),
        evidence.provenance(runs),
    ]
