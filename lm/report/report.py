"""The report of runs: an HTML page, the same as Markdown, figures and summary.json."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lm
from lm.common.errors import UserError, require
from lm.common.files import (
    OutputError,
    check_folder,
    check_replaceable,
    read_json,
    write_json,
    write_text,
)
from lm.config.load import load
from lm.report.read import encodable, read_all
from lm.runs.checkpoint import MANIFEST, listed
from lm.runs.run_dir import RunDir, RunDirError
from lm.training.resume import check_made_of

MADE_BY = "by fprnn"  # an earlier page of ours contains these words
FOLDER = "figures"


def report(run_dirs: Sequence[Path], out: Path | str | None = None) -> list:
    """Write the report of runs in whatever state they are, and return what to print.

    Args:
        run_dirs: Run directories.
        out: A folder for the page, the Markdown, the figures and summary.json, or FILE.html for the
            page only. None: the directory of the one run.

    Returns:
        Tables for rich, and sentences.

    Raises:
        RunDirError: If one of them holds no run, or is given twice.
        OutputError: If the report cannot be written there, or no place is named.
        MissingPackageError: If matplotlib is not installed.
    """
    if out is None and len(run_dirs) > 1:
        raise OutputError(
            f"the report of {len(run_dirs)} runs has no place in one of them: name it by"
            " --out FOLDER or --out FILE.html"
        )
    for package in ("matplotlib", "pandas"):
        require(package, "fprnn report")
    from lm.report.blocks import Table
    from lm.report.contents import sections
    from lm.report.summary import (
        describe_state,
        layer_tables,
        result_table,
        score_table,
        summarize,
    )

    place = Path(run_dirs[0] if out is None else out)
    runs = read_all(run_dirs)
    _check_place(place, is_run=out is None)
    summaries = [summarize(files) for files in runs]
    names = ", ".join(files.label for files in runs)
    made = f"Made {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC {MADE_BY} {lm.__version__}."
    title = f"Report of {names}" if len(runs) < 4 else f"Report of {len(runs)} runs"
    contents = {"title": title, "made": made, "sections": sections(runs, summaries)}
    paths = write(place, contents, summaries)
    printed: list = [describe_state(files) for files in runs]
    results = result_table(summaries).rows
    printed.append(_rich_table(results if len(runs) == 1 else list(zip(*results, strict=True))))
    details = layer_tables(summaries) if len(runs) == 1 else []
    for block in (*details, *score_table(runs)):
        printed += [_rich_table(block.rows, block.title)] if isinstance(block, Table) else []
    printed += [f"note: {files.run}: {remark}" for files in runs for remark in files.remarks]
    printed += [f"note: {line}" for files in runs if (line := _find_change(files.run))]
    return [*printed, *(f"{name}: {path}" for name, path in paths.items())]


def _check_place(place: Path, is_run: bool) -> None:
    """Check that a report can be written, and replaces no file of somebody else.

    Raises:
        OutputError: If it cannot.
    """
    if place.suffix == ".html":
        check_replaceable(place, MADE_BY)
        return
    if place.is_file() or place.suffix in (".md", ".markdown", ".htm", ".pdf", ".json", ".txt"):
        raise OutputError(
            f"{place} is no place for a report: name a folder, or a file ending .html"
        )
    check_folder(place / FOLDER)
    for name in ("report.html", "report.markdown"):
        check_replaceable(place / name, MADE_BY)
    is_new = not is_run and not (place / "report.html").exists()
    if is_new and ((place / FOLDER).exists() or (place / "summary.json").exists()):
        raise OutputError(
            f"{place} has {FOLDER} or a summary.json, and no report.html of an earlier report:"
            " name another folder by --out"
        )


def write(place: Path, contents: dict[str, Any], summaries: list[dict]) -> dict[str, Path]:
    """Draw and write a report.

    Args:
        place: A folder, or FILE.html.
        contents: Title, date and sections.
        summaries: Numbers of each run.

    Returns:
        The written paths by their names.
    """
    from lm.common.page import render
    from lm.report import draw
    from lm.report.blocks import Figure, summarize_curves

    is_folder = place.suffix != ".html"
    images = {}
    for figure in (b for s in contents["sections"] for b in s.blocks if isinstance(b, Figure)):
        drawing = draw.draw(figure)
        png = draw.to_png(drawing)
        images[figure.name] = base64.b64encode(png).decode()
        if is_folder:
            draw.save(drawing, png, place / FOLDER, figure.name)
    values = {**contents, "images": images, "numbers": summarize_curves, "folder": FOLDER}
    templates = Path(__file__).parent
    page = place / "report.html" if is_folder else place
    write_text(page, encodable(render(templates / "report.html", **values)))
    if not is_folder:
        return {"page": page}
    markdown, summary = place / "report.markdown", place / "summary.json"
    write_text(markdown, encodable(render(templates / "report.markdown", **values)))
    by_run = {numbers["run"]: numbers for numbers in summaries}
    write_json(summary, by_run if len(summaries) > 1 else summaries[0])
    return {"page": page, "Markdown": markdown, "figures": place / FOLDER, "summary": summary}


def _find_change(run: RunDir) -> str | None:
    """Return a sentence if the run does not match its newest checkpoint any more."""
    try:
        for path in listed(run.checkpoints)[-1:]:
            check_made_of(path, read_json(path / MANIFEST), run, load(run.config))
    except RunDirError as e:
        return str(e)
    except UserError:
        pass  # a damaged file, which the remarks name
    return None


def _rich_table(rows: Sequence[Sequence[str]], title: str = "") -> Any:
    """Return a table for the terminal."""
    from rich.table import Table

    table = Table(*rows[0], title=title or None, title_justify="left")
    for row in rows[1:]:
        table.add_row(*row)
    return table
