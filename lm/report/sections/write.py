"""The page and the Markdown of runs, put together and written."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import lm
from lm.common.errors import require
from lm.common.files import OutputError, check_replaceable, write_text
from lm.report.sections import evidence, learning, overview, settings, solver, speed
from lm.report.sections.as_html import as_html
from lm.report.sections.as_markdown import as_markdown
from lm.report.sections.blocks import Block, Chart, HeatMap, Notes, Section, Stack, Table, still
from lm.report.sections.latex import LATEX_HEAD, document
from lm.report.sections.read import Files, printable

MADE_BY = "by fprnn"  # an earlier page or Markdown is known by these words
PAGE, MARKDOWN, LATEX = "report.html", "report.markdown", "report.tex"


def places(out: Path | str) -> dict[str, Path]:
    """Where a report goes: into a folder, or to the page that is named, with the Markdown and the
    tables for LaTeX beside it.

    Raises:
        OutputError: a file of another kind is named.
    """
    out = Path(out)
    if out.suffix == ".html":
        beside = {"Markdown": out.with_suffix(".markdown"), "LaTeX": out.with_suffix(".tex")}
        return {"page": out, **beside}
    if out.is_file() or out.suffix in (".md", ".markdown", ".htm", ".pdf", ".json", ".txt"):
        raise OutputError(f"{out} is no place for a report: name a folder, or a file ending .html")
    return {"page": out / PAGE, "Markdown": out / MARKDOWN, "LaTeX": out / LATEX}


def write(runs: Sequence[Files], out: Path | str) -> dict[str, Path]:
    """Draw the report of these runs and write it → the paths of page, Markdown and LaTeX.

    Raises:
        MissingPackageError: without matplotlib. OutputError: it cannot be written, or another file
            is in its place.
    """
    require("matplotlib", "fprnn report")
    paths = places(out)
    for kind, path in paths.items():
        check_replaceable(path, LATEX_HEAD if kind == "LaTeX" else MADE_BY)
    names = ", ".join(files.label for files in runs)
    title = f"Report of {names}" if len(runs) < 4 else f"Report of {len(runs)} runs"
    of = [_worth_drawing(section) for section in sections(runs)]
    made = f"Made {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC {MADE_BY} {lm.__version__}."
    page = as_html(title, of, made)
    text = as_markdown(title, of, made)
    write_text(paths["page"], printable(page))
    write_text(paths["Markdown"], printable(text))
    write_text(paths["LaTeX"], printable(document(_tables_of_numbers(of))))
    return paths


def _worth_drawing(section: Section) -> Section:
    """A section whose pictures all show something; what the others would have shown is said in
    words: sentences at its end, and tables."""
    blocks: list[Block] = []
    said = []
    for block in section.blocks:
        words = still(block) if isinstance(block, Chart | HeatMap | Stack) else None
        if isinstance(words, str):
            said.append(words)
        else:
            blocks.append(words or block)
    return Section(section.title, [*blocks, *([Notes(said)] if said else [])])


def _tables_of_numbers(sections: Sequence[Section]) -> list[tuple[str, list[list[str]]]]:
    """(title, rows) of the tables that a paper may print: results, scores, checkpoints."""
    return [
        (block.title or section.title, block.rows)
        for section in sections
        for block in section.blocks
        if isinstance(block, Table) and not block.words
    ]


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
