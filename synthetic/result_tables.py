"""Finished runs of a sweep, and all their measurements as one tidy table (pandas)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lm.runs.metrics import FAILED_SHARE
from synthetic.config import Config
from synthetic.results import (
    TOKEN_BY_TOKEN,
    UNKNOWN,
    combine_stderrs,
    curriculum_note,
    has_other_solution,
    mean_failed_share,
    overlap_text,
    plus_minus,
    solver_text,
)

LAST_COLUMNS = ("length", "metric", "value", "stderr")  # of the CSV


@dataclass
class FinishedRun:
    """A finished run of a sweep."""

    run_dir: Path
    cfg: Config  # from the sweep as it is now
    seed: int  # that the run was trained with
    point: dict[str, Any]  # dotted key → value, mappings flattened
    model: str  # label of the sweep point, without the task and the seed
    panel: str  # label of the task, if the sweep has several
    result: dict
    records: list[dict]  # of metrics.jsonl

    @property
    def headline(self) -> str:
        """Headline metric of the task."""
        return self.result["headline"]

    @property
    def trained_to(self) -> int:
        """Longest training length of the config."""
        return self.cfg.train.lengths[1]

    @property
    def label(self) -> str:
        """Label of the task and the model."""
        return ", ".join(filter(None, (self.panel, self.model)))


def metric_lines(run: FinishedRun, rows: Iterable[dict], **columns: Any) -> list[dict]:
    """Return a line for each metric of each row of an evaluation.

    Args:
        run: The run that was evaluated.
        rows: Rows of a result's `eval`.
        columns: Further columns, the same in every line.
    """
    run_columns: dict[str, Any] = {
        "run": str(run.run_dir),
        "label": run.label,
        "panel": run.panel,
        "model": run.model,
        "task": run.cfg.task.name,
        **run.point,
        "seed": run.seed,
        **columns,
    }
    return [run_columns | line for row in rows for line in _row_lines(row)]


def _row_lines(row: dict) -> list[dict]:
    """Return a line for each metric of one row."""
    metrics = dict(row["metrics"])
    if "num_iters" in row:
        metrics["num_iters"] = float(np.mean(row["num_iters"]["mean"]))
    row_columns = {
        "read": row["read"],
        "solver": solver_text(row["solver"]),
        "in_training": overlap_text([row]),
        "failed": mean_failed_share([row]),
        "elsewhere": any(has_other_solution([row])),
        "test_seed": row.get("seed"),
        "length": row["length"],
    }
    return [
        {
            **row_columns,
            "metric": metric,
            "value": value,
            "stderr": row["stderr"].get(metric, np.nan),
        }
        for metric, value in metrics.items()
    ]


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """Write a table of measurements, with LAST_COLUMNS at the end."""
    columns = [name for name in table if name not in LAST_COLUMNS]
    table.to_csv(path, columns=[*columns, *LAST_COLUMNS], index=False)


def final_table(runs: Iterable[FinishedRun]) -> pd.DataFrame:
    """Return the table of the runs' final evaluations."""
    return pd.DataFrame([line for run in runs for line in metric_lines(run, run.result["eval"])])


def headline_table(runs: Sequence[FinishedRun]) -> pd.DataFrame:
    """Return the final evaluations of each task's headline metric."""
    table = final_table(runs)
    metric_by_panel = {run.panel: run.headline for run in runs}
    return table[table["metric"] == table["panel"].map(metric_by_panel)]


def training_table(runs: Iterable[FinishedRun]) -> pd.DataFrame:
    """Return the table of the evaluations over lengths during training.

    The last line of a run evaluates the finished model, if its result has the same lengths.
    """
    lines: list[dict] = []
    for run in runs:
        last_lengths: set[int] = set()
        for record in run.records:
            measured = record.get("over_lengths", {})
            rows = [{"length": int(length), **row} for length, row in measured.items()]
            lines += metric_lines(run, rows, step=record["step"], seconds=record.get("seconds"))
            last_lengths = {row["length"] for row in rows} or last_lengths
        final_rows = [row for row in run.result["eval"] if row["length"] in last_lengths]
        final_rows = [row for row in final_rows if row["read"] != TOKEN_BY_TOKEN]
        if last_lengths == {row["length"] for row in final_rows}:
            step, seconds = run.result["updates"], run.result["training_seconds"]
            lines += metric_lines(run, final_rows, step=step, seconds=seconds)
    return pd.DataFrame(lines)


def average_seeds(table: pd.DataFrame, by: Sequence[str] = ("length",)) -> pd.DataFrame:
    """Average over the seeds of the test data, then over the training seeds.

    Args:
        table: Lines with the same metric.
        by: Columns that distinguish the means.

    Returns:
        A frame with `by` as sorted index: n (training seeds), value, error (the standard deviation
        over seeds; for a single seed the standard error over test samples), values and seeds.
    """
    run_means = table.groupby([*by, "run", "seed"]).agg(
        value=("value", "mean"), stderr=("stderr", combine_stderrs)
    )
    means = (
        run_means.reset_index(["run", "seed"])
        .groupby(level=list(by))
        .agg(
            n=("value", "size"),
            value=("value", "mean"),
            error=("value", "std"),
            stderr=("stderr", "first"),
            values=("value", list),
            seeds=("seed", list),
        )
    )
    means["error"] = means["error"].fillna(means["stderr"])  # a single seed has no deviation
    return means


def seed_count(counts: Iterable[int]) -> str:
    """Return "3", or "1–3" if the points of a drawing have different numbers of seeds."""
    counts = list(counts)
    return "–".join(map(str, dict.fromkeys((min(counts), max(counts)))))


def format_mean(value: float, error: float) -> str:
    """Return a mean with its error, as tables show it."""
    digits = 1 if value > 1 else 4  # an iteration count or a length, or an accuracy
    return f"{value:.{digits}f}{plus_minus(error, min(3, digits))}"


def figure_notes(lines: pd.DataFrame, runs: Iterable[FinishedRun]) -> list[str]:
    """Return the notes of a figure.

    They name the solvers, unsolved tokens, test samples that training contains too, and curricula
    that ended early.

    Args:
        lines: Lines of the table that the figure shows.
        runs: All runs of the figure.
    """
    notes = []
    models_by_solver = lines.groupby("solver", sort=False)["model"].unique()
    for name, models in models_by_solver.items():
        models_text = f" ({'; '.join(models)})" if len(models_by_solver) > 1 else ""
        notes.append(f"Solver in evaluation: {name}{models_text}")
    failed = (
        lines.dropna(subset="failed").groupby("model", sort=False)["failed"].agg(["mean", "max"])
    )
    unsolved = failed.loc[failed["max"] > FAILED_SHARE, "mean"]
    if len(unsolved):
        shares = "; ".join(f"{model or 'all'}: {share:.2%}" for model, share in unsolved.items())
        notes.append(
            f"Tokens whose equation was not solved, more than {FAILED_SHARE:.1%}: {shares}"
        )
    if (lines["in_training"] == UNKNOWN).any():
        notes.append("For some lengths, it is unknown whether training contains the test samples")
    shared = lines[~lines["in_training"].isin(("0", UNKNOWN))]
    if len(shared):
        lengths = ", ".join(map(str, sorted(shared["length"].unique())))
        notes.append(f"Training may contain the test samples of length: {lengths}")
    for run in runs:
        if note := curriculum_note(run.result, run.cfg):
            notes.append(f"{run.label or 'the model'}, seed {run.seed}: {note}")
    return notes
