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
    check_replaceable_with_record,
    read_json,
    write_json,
    write_text,
)
from lm.config.load import load
from lm.runs.checkpoint import MANIFEST, list_checkpoints
from lm.runs.owned_files import FIGURES
from lm.runs.run_dir import RunDir, RunDirError
from lm.training.resume import check_fingerprint

MADE_BY = "by fprnn"  # text in every page, by which the command recognizes its own pages
FIGURES_FOLDER = "figures"


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
    from lm.report.read import read_all, replace_surrogates
    from lm.report.summary import describe_state, summarize

    runs = read_all(run_dirs)
    folder = Path(run_dirs[0] if out is None else out)
    page, summary_file = _check_folder(folder)
    summaries = [summarize(run) for run in runs]
    names = ", ".join(run.label for run in runs)
    text = render(
        Path(__file__).with_name("report.html"),
        title=f"Report of {names}" if len(runs) < 4 else f"Report of {len(runs)} runs",
        creation_note=f"Made {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC {MADE_BY} {lm.__version__}.",
        sections=_make_sections(runs, summaries, folder / FIGURES_FOLDER),
    )
    write_text(page, replace_surrogates(text))
    summary_by_run = {summary["run"]: summary for summary in summaries}
    write_json(summary_file, summary_by_run if len(runs) > 1 else summaries[0])
    lines = [describe_state(run) for run in runs]
    lines += [f"note: {run.directory}: {remark}" for run in runs for remark in run.remarks]
    lines += [f"note: {line}" for run in runs if (line := _find_mismatch(run.directory))]
    lines += [f"page: {page}", f"figures: {folder / FIGURES_FOLDER}", f"summary: {summary_file}"]
    return lines


def _check_folder(folder: Path) -> tuple[Path, Path]:
    """Return the paths of the page and the summary, after checking that they can be written.

    Raises:
        OutputError: If they cannot be written, or would replace other files.
    """
    if folder.is_file() or folder.suffix in (".html", ".htm", ".md", ".pdf", ".json", ".txt"):
        raise OutputError(f"{folder} is not a folder: a report needs a folder")
    figures_folder = folder / FIGURES_FOLDER
    check_folder(figures_folder)
    page, summary_file = folder / "report.html", folder / "summary.json"
    figures = [figures_folder / f"{name}.{kind}" for name in FIGURES for kind in ("png", "pdf")]
    # Existing files may be replaced only if the page contains MADE_BY.
    existing_figures = [path for path in figures if path.exists()]
    check_replaceable_with_record(page, MADE_BY, summary_file, *existing_figures)
    return page, summary_file


def _make_sections(runs: Sequence, summaries: Sequence[dict], folder: Path) -> list[dict[str, Any]]:
    """Return the sections of the page in their order, and save their figures in a folder.

    report.html reads the keys of a section: "title", "lines", "figures", "tables" and "texts".
    """
    from lm.report import summary
    from lm.report.figures import SPECS, make_figures, save

    # 1. Results.
    states = [summary.describe_state(run) for run in runs]
    remarks = [f"{run.label}: {remark}" for run in runs for remark in run.remarks]
    results = summary.make_result_table(runs, summaries)
    sections: list[dict[str, Any]] = []
    sections.append({"title": "Results", "lines": [*states, *remarks], "tables": [results]})
    # 2. Sections with figures. Some have tables and notes as well.
    layers, notes = summary.make_layer_tables(runs)
    for run in runs:
        if run.has_fixed_point is False:
            notes.append(f"{run.label} has no fixed-point layer, and therefore no ℓ*.")
    section_tables = {"Fixed point": layers, "Optimization": summary.make_event_tables(runs)}
    for title in SPECS:
        figures, lines = make_figures(runs, title)
        if title == "Fixed point":
            lines += notes
        images = [(figure, save(figure, folder)) for figure in figures]
        tables = section_tables.get(title, [])
        sections.append({"title": title, "lines": lines, "figures": images, "tables": tables})
    # 3. Scores, configuration and files.
    sections.append({"title": "Evaluations", "tables": summary.make_score_tables(runs)})
    sections.append({"title": "Configuration", "tables": summary.make_config_tables(runs)})
    texts = {f"{name} of {run.label}": text for run in runs for name, text in run.texts.items()}
    directories = [f"{run.label}: {run.directory}" for run in runs]
    sections.append({"title": "Files", "lines": directories, "texts": texts})
    # Leave out sections without content.
    return [s for s in sections if any(s.get(key) for key in ("lines", "figures", "tables"))]


def _find_mismatch(run_dir: RunDir) -> str | None:
    """Return a sentence if a run's files no longer match its newest checkpoint, otherwise None."""
    try:
        for path in list_checkpoints(run_dir.checkpoints)[-1:]:  # the newest, if there is one
            check_fingerprint(path, read_json(path / MANIFEST), run_dir, load(run_dir.config))
    except RunDirError as e:
        return str(e)
    except UserError:
        pass  # a file is damaged; the remarks name it
    return None
