"""Report of runs: an HTML page, figures as PNG and PDF, and summary.json."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lm
from lm.common.errors import UserError, require
from lm.common.files import (
    OutputError,
    check_folder,
    check_together,
    read_json,
    write_json,
    write_text,
)
from lm.config.load import load
from lm.runs.checkpoint import MANIFEST, list_checkpoints
from lm.runs.owned_files import FIGURES
from lm.runs.run_dir import RunDir, RunDirError
from lm.training.resume import check_fingerprint

MADE_BY = "by fprnn"  # marks pages that the command may replace
FOLDER = "figures"


def report(run_dirs: Sequence[Path], out: Path | str | None = None) -> list[str]:
    """Write the report of runs, which may still train, and return the lines to print.

    Args:
        run_dirs: Run directories.
        out: Folder for the page, the figures and summary.json; None: the run directory, if there
            is a single run.

    Raises:
        RunDirError: If a directory is no run, or is given twice.
        OutputError: If the report cannot be written, or there are several runs and no `out`.
        MissingPackageError: If matplotlib or pandas is not installed.
    """
    if out is None and len(run_dirs) > 1:
        raise OutputError(f"a report of {len(run_dirs)} runs needs a folder: name it with --out")
    for package in ("matplotlib", "pandas"):
        require(package, "fprnn report")
    from lm.common.page import render
    from lm.report.read import encodable, read_all
    from lm.report.summary import describe_state, summarize

    runs = read_all(run_dirs)
    place = Path(run_dirs[0] if out is None else out)
    page, summary = _check_place(place)
    summaries = [summarize(files) for files in runs]
    names = ", ".join(files.label for files in runs)
    text = render(
        Path(__file__).with_name("report.html"),
        title=f"Report of {names}" if len(runs) < 4 else f"Report of {len(runs)} runs",
        made=f"Made {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC {MADE_BY} {lm.__version__}.",
        sections=_sections(runs, summaries, place / FOLDER),
    )
    write_text(page, encodable(text))
    by_run = {numbers["run"]: numbers for numbers in summaries}
    write_json(summary, by_run if len(runs) > 1 else summaries[0])
    lines = [describe_state(files) for files in runs]
    lines += [f"note: {files.run}: {remark}" for files in runs for remark in files.remarks]
    lines += [f"note: {line}" for files in runs if (line := _find_change(files.run))]
    return [*lines, f"page: {page}", f"figures: {place / FOLDER}", f"summary: {summary}"]


def _check_place(place: Path) -> tuple[Path, Path]:
    """Return the paths of the page and the summary, after checking that they can be written.

    Raises:
        OutputError: If they cannot be written, or would replace other files.
    """
    if place.is_file() or place.suffix in (".html", ".htm", ".md", ".pdf", ".json", ".txt"):
        raise OutputError(f"{place} is not a folder: a report needs a folder")
    check_folder(place / FOLDER)
    page, summary = place / "report.html", place / "summary.json"
    figures = [place / FOLDER / f"{name}.{kind}" for name in FIGURES for kind in ("png", "pdf")]
    check_together(page, MADE_BY, summary, *(path for path in figures if path.exists()))
    return page, summary


def _sections(runs: Sequence, summaries: Sequence[dict], folder: Path) -> list[dict[str, Any]]:
    """Return the sections of the page in order, and save their figures in a folder."""
    from lm.report import summary
    from lm.report.figures import SPECS, make_figures, save

    states = [summary.describe_state(files) for files in runs]
    remarks = [f"{files.label}: {remark}" for files in runs for remark in files.remarks]
    results = summary.result_table(runs, summaries)
    sections: list[dict[str, Any]] = []
    sections.append({"title": "Results", "lines": [*states, *remarks], "tables": [results]})
    layers, lines = summary.layer_tables(runs)
    lines += [
        f"{f.label} has no fixed-point layer, and therefore no ℓ*."
        for f in runs
        if f.solves is False
    ]
    section_tables = {"Fixed point": layers, "Optimization": summary.event_tables(runs)}
    for title in SPECS:
        figures, constants = make_figures(runs, title)
        notes = constants + lines * (title == "Fixed point")
        images = [(figure, save(figure, folder)) for figure in figures]
        tables = section_tables.get(title, [])
        sections.append({"title": title, "lines": notes, "figures": images, "tables": tables})
    scores, settings = summary.score_tables(runs), summary.config_tables(runs)
    sections.append({"title": "Evaluations", "tables": scores})
    sections.append({"title": "Configuration", "tables": settings})
    texts = {f"{name} of {f.label}": text for f in runs for name, text in f.texts.items()}
    directories = [f"{files.label}: {files.run}" for files in runs]
    sections.append({"title": "Files", "lines": directories, "texts": texts})
    return [s for s in sections if any(s.get(key) for key in ("lines", "figures", "tables"))]


def _find_change(run: RunDir) -> str | None:
    """Return a sentence if the run no longer matches its newest checkpoint, otherwise None."""
    try:
        for path in list_checkpoints(run.checkpoints)[-1:]:
            check_fingerprint(path, read_json(path / MANIFEST), run, load(run.config))
    except RunDirError as e:
        return str(e)
    except UserError:
        pass  # a damaged file, which the remarks name
    return None
