"""The report of runs: their page, and of a finished one figures and a summary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lm.common.console import say
from lm.common.errors import UserError, require
from lm.common.files import (
    DamagedError,
    OutputError,
    check_folder,
    check_kinds,
    read_json,
    write_json,
)
from lm.config.load import load
from lm.data.batches.text_bytes import in_bits
from lm.report import plots
from lm.report.sections.overview import state
from lm.report.sections.read import read_all
from lm.report.sections.series import having
from lm.report.sections.write import write
from lm.runs.checkpoint import MANIFEST, CheckpointError, listed, newest
from lm.runs.metrics import ELSEWHERE_NOTE, is_elsewhere, marked, read_metrics
from lm.runs.run_dir import RunDir, RunDirError
from lm.training.resume import check_made_of

if TYPE_CHECKING:
    from rich.table import Table

# What of it is put into words.
KINDS: dict = dict.fromkeys(("updates", "tokens", "validation.tokens", "validation.bytes"), int)
KINDS |= dict.fromkeys(("training_seconds", "tokens_per_s", "validation.loss"), float)
KINDS |= {"validation": dict, "validation.perplexity": float, "validation.bits_per_byte": float}
KINDS |= {"validation.sources": dict, "validation.sources.*": dict}
KINDS |= {"validation.sources.*.perplexity": float, "validation.sources.*.tokens": int}
KINDS |= {"baselines": dict, "baselines.*": float}
RESULT = ("updates", "tokens", "training_seconds", "tokens_per_s", "validation")  # at least


def report(run_dirs: Sequence[Path], out: Path | None = None) -> list:
    """Write the page of runs, whatever there is of them, and what is to be printed of it: tables
    for rich, and sentences.

    Args:
        out: a folder, or the page in it (FILE.html), for page and Markdown alone. None: of one run,
            into its directory; of a finished one also figures and `summary.json`.
    Raises:
        RunDirError: one of them holds no run, or is given twice. DamagedError, PlotError: as
            `summarise`. OutputError: nothing can be written there, or it is not said where.
    """
    if out is None and len(run_dirs) > 1:
        raise OutputError(
            f"the report of {len(run_dirs)} runs is of none of them: say where to write it with"
            " --out FOLDER or --out FILE.html"
        )
    require("matplotlib", "fprnn report")
    runs = read_all(run_dirs)
    printed: list = []
    if out is None:
        run = runs[0].run
        check_folder(run.figures)
        if run.is_finished:
            printed.append(table(summarise(run.path), f"Summary of {run}"))
        out = run.path
    paths = write(runs, out)
    if not printed:
        printed += [state(files) for files in runs]
    printed += [f"note: {files.run}: {remark}" for files in runs for remark in files.remarks]
    printed += [f"note: {line}" for files in runs if (line := _changed(files.run))]
    return [*printed, *(f"{name}: {path}" for name, path in paths.items())]


def summarise(run_dir: Path) -> dict:
    """Draw the figures, gather the numbers of a finished run and write `summary.json`.

    Raises:
        RunDirError: there is no such run, or it has not finished. DamagedError: a file of it is
            damaged.
        PlotError: its metrics are gone. OutputError: nothing can be written there.
    """
    run = RunDir(run_dir)
    if not run.holds_run:
        raise RunDirError(f"{run} holds no run (it has no config.yaml)")
    require("matplotlib", "fprnn report")
    check_folder(run.figures)
    summary = result(run.path)
    fixed_point = _fixed_point(run, read_metrics(run.path))
    if fixed_point:
        summary["fixed_point"] = fixed_point
    scores = run.scores
    if scores.exists():
        summary["evaluation"] = _evaluation(scores)
    paths = {
        "metrics": run.metrics,
        "checkpoint": _checkpoint(run),
        "HuggingFace export": run.export,
        "evaluation": scores,
        "sample": run.path / "sample.txt",
        "summary": run.summary,
    }
    for figure in plots.draw(run.path):
        paths[f"figure: {figure.name}"] = figure
    write_json(run.summary, summary)
    summary["paths"] = {k: str(p) for k, p in paths.items() if p is not None and p.exists()}
    return summary


def result(run_dir: Path) -> dict:
    """`result.json` of a finished run.

    Raises:
        RunDirError: the run has not finished. DamagedError: the file is damaged.
    """
    run = RunDir(run_dir)
    value = run.read_result(RESULT)
    check_kinds(run.result, value, KINDS)
    reached = value["validation"]
    if absent := [key for key in RESULT if value[key] is None]:
        raise DamagedError(f"{run.result} is damaged: `{absent[0]}` is null")
    if any(reached.get(key) is None for key in ("perplexity", "tokens")):
        raise DamagedError(
            f"{run.result} is damaged: its validation must hold perplexity and tokens"
        )
    return value


def _checkpoint(run: RunDir) -> Path | None:
    """The newest complete one: a report of what was reached can do without."""
    try:
        return newest(run.checkpoints)
    except CheckpointError as e:
        say(f"note: {e}")
        return None


def _changed(run: RunDir) -> str | None:
    """What of a run is not what its newest checkpoint is made of, in a sentence."""
    try:
        for path in listed(run.checkpoints)[-1:]:
            check_made_of(path, read_json(path / MANIFEST), run, load(run.config))
    except RunDirError as e:
        return str(e)
    except UserError:
        pass  # a damaged file, of which the remarks tell
    return None


def _fixed_point(run: RunDir, records: list[dict]) -> dict:
    """What the last probe measured, and under "training" what the last training record says; {} of
    a model without a solver, and of a run that was never probed (of before there were probes).

    Raises:
        DamagedError: the records are damaged.
    """
    probes = [r["probe"] for r in records if "probe" in r]
    if not probes:
        return {}
    trained = having(records, "loss")
    cost = ("evaluations", "failed", "residual")
    absent = [k for k in ("num_iters", *cost) if k not in probes[-1]]
    absent += [k for k in cost if not trained or k not in trained[-1]]
    if absent:
        raise DamagedError(
            f"{run.metrics} is damaged: its last record of the solver has no"
            f" {', '.join(dict.fromkeys(absent))}"
        )
    in_training = {k: trained[-1][k] for k in (*cost, "adjoint") if k in trained[-1]}
    return {**probes[-1], "training": in_training}


def _evaluation(path: Path) -> dict:
    """What `fprnn eval` found: {task: {"metrics": {name: {"value", …}}, …}}.

    Raises:
        DamagedError: the file holds something else.
    """
    tasks = read_json(path, ("tasks",))["tasks"]
    try:
        for task in tasks.values():
            for metric in task["metrics"].values():
                metric["value"]
    except (AttributeError, LookupError, TypeError):
        raise DamagedError(
            f"{path} is damaged: its tasks must hold metrics, and each metric its value"
        ) from None
    return tasks


def _add_layers(table, fixed: dict) -> None:
    """A row for each layer: ℓ*, and what solving cost and left in training and evaluation."""
    counts, training = fixed["num_iters"], fixed["training"]
    numbers = fixed.get("layers", range(len(counts["mean"])))
    for i, mean in enumerate(marked(counts)):
        table.add_row(
            f"ℓ* layer {numbers[i]}",
            f"mean {mean}, median {counts['median'][i]:.0f}, max {counts['max'][i]:.0f};"
            f" evaluations a token {training['evaluations'][i]:.1f} in training,"
            f" {fixed['evaluations'][i]:.1f} in evaluation; tokens not solved"
            f" {training['failed'][i]:.2%}, {fixed['failed'][i]:.2%}",
        )
    if any(is_elsewhere(counts)):
        table.add_row("", ELSEWHERE_NOTE)


def table(summary: dict, title: str) -> Table:
    """The summary as a rich table."""
    from rich.table import Table

    table = Table(title=title, show_header=False, title_justify="left")
    v, base = summary["validation"], summary.get("baselines", {})
    table.add_row("validation perplexity", f"{v['perplexity']:.2f} on {v['tokens']:,} tokens")
    if v.get("bits_per_byte") is not None:
        table.add_row(
            "  bits per byte", f"{v['bits_per_byte']:.4f} on {v['bytes']:,} bytes of text"
        )
    for name, of in v.get("sources", {}).items():
        table.add_row(f"  of source {name}", f"{of['perplexity']:.2f} on {of['tokens']:,} tokens")
    for name, perplexity in base.items():
        bits = v.get("bits_per_byte")
        bits = bits and bits / v["loss"] * math.log(perplexity)
        table.add_row(f"  {name} baseline, same tokens", f"{perplexity:.2f}{in_bits(bits)}")
    if base:
        best = min(base.values())
        verdict = "below" if v["perplexity"] < best else "NOT below"
        table.add_row("  against the better baseline", f"{verdict}: ×{v['perplexity'] / best:.2f}")
    fixed = summary.get("fixed_point")
    if fixed:
        _add_layers(table, fixed)
    table.add_row(
        "training",
        f"{summary['updates']:,} updates, {summary['tokens']:,} tokens in"
        f" {summary['training_seconds']:.0f} s: {summary['tokens_per_s']:,.0f} tokens/s",
    )
    for task, scores in summary.get("evaluation", {}).items():
        values = {k: m["value"] for k, m in scores["metrics"].items() if m["value"] is not None}
        shown = ", ".join(f"{k} {value:.3f}" for k, value in values.items())
        table.add_row(f"lm-eval {task}", shown)
    for name, path in summary["paths"].items():
        table.add_row(name, path)
    return table
