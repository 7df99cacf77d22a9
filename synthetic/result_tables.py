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
    average_failed_share,
    combine_stderrs,
    describe_unfinished_curriculum,
    flag_other_solutions,
    format_error,
    format_overlap,
    format_solver,
)

LAST_COLUMNS = ("length", "metric", "value", "stderr")  # of the CSV


@dataclass
class FinishedRun:
    """A finished run of a sweep."""

    run_dir: Path
    cfg: Config  # of the sweep now; the run may have been trained with another config
    seed: int  # that the run was trained with
    point: dict[str, Any]  # values that the sweep sets, by dotted key
    model: str  # label of the sweep point, without the task and the seed
    panel: str  # label of the task, if the sweep has several tasks
    result: dict  # content of result.json
    records: list[dict]  # lines of metrics.jsonl

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


def build_metric_lines(run: FinishedRun, rows: Iterable[dict], **columns: Any) -> list[dict]:
    """Build a line of a table for each metric of each row of an evaluation.

    Args:
        run: The run that was evaluated.
        rows: Rows of a result's `eval`.
        columns: Further columns, with the same value in every line.
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
    return [run_columns | line for row in rows for line in _build_row_lines(row)]


def _build_row_lines(row: dict) -> list[dict]:
    """Build a line for each metric of a row."""
    metrics = dict(row["metrics"])
    if "num_iters" in row:
        metrics["num_iters"] = float(np.mean(row["num_iters"]["mean"]))
    row_columns = {
        "read": row["read"],
        "solver": format_solver(row["solver"]),
        "in_training": format_overlap([row]),
        "failed": average_failed_share([row]),
        "elsewhere": any(flag_other_solutions([row])),
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


def build_final_table(runs: Iterable[FinishedRun]) -> pd.DataFrame:
    """Build the table of the runs' final evaluations."""
    return pd.DataFrame(
        [line for run in runs for line in build_metric_lines(run, run.result["eval"])]
    )


def build_headline_table(runs: Sequence[FinishedRun]) -> pd.DataFrame:
    """Build the table of the final evaluations, only with each task's headline metric."""
    table = build_final_table(runs)
    metric_by_panel = {run.panel: run.headline for run in runs}
    return table[table["metric"] == table["panel"].map(metric_by_panel)]


def build_training_table(runs: Iterable[FinishedRun]) -> pd.DataFrame:
    """Build the table of the evaluations over lengths during training (`eval.during`).

    The last lines of a run are of the finished model, if its result has the same lengths.
    """
    lines: list[dict] = []
    for run in runs:
        last_lengths: set[int] = set()
        for record in run.records:
            row_by_length = record.get("over_lengths", {})
            rows = [{"length": int(length), **row} for length, row in row_by_length.items()]
            lines += build_metric_lines(
                run, rows, step=record["step"], seconds=record.get("seconds")
            )
            last_lengths = {row["length"] for row in rows} or last_lengths  # keep if empty
        final_rows = [row for row in run.result["eval"] if row["length"] in last_lengths]
        final_rows = [row for row in final_rows if row["read"] != TOKEN_BY_TOKEN]
        if last_lengths == {row["length"] for row in final_rows}:
            step, seconds = run.result["updates"], run.result["training_seconds"]
            lines += build_metric_lines(run, final_rows, step=step, seconds=seconds)
    return pd.DataFrame(lines)


def average_seeds(table: pd.DataFrame, by: Sequence[str] = ("length",)) -> pd.DataFrame:
    """Average over the seeds of the test data, then over the training seeds.

    Args:
        table: Lines with the same metric.
        by: Columns that distinguish the means.

    Returns:
        A table with `by` as sorted index and the columns
            n: number of training seeds;
            value: mean over the training seeds;
            error: standard deviation over seeds; for one seed, standard error over test samples;
            values, seeds: lists with the value and the number of each seed.
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
    means["error"] = means["error"].fillna(means["stderr"])  # one seed has no standard deviation
    return means


def format_seed_count(counts: Iterable[int]) -> str:
    """Return "3", or "1–3" if the points of a drawing have different numbers of seeds."""
    counts = list(counts)
    return "–".join(map(str, dict.fromkeys((min(counts), max(counts)))))


def format_mean(value: float, error: float) -> str:
    """Return a mean with its error, as tables show it."""
    digits = 1 if value > 1 else 4  # above 1: iterations or a length; otherwise an accuracy
    return f"{value:.{digits}f}{format_error(error, min(3, digits))}"


def describe_figure(lines: pd.DataFrame, runs: Iterable[FinishedRun]) -> list[str]:
    """Return the notes of a figure.

    They name the solvers, and warn of unsolved tokens, of test samples that are in the training
    data, and of curricula that ended early.

    Args:
        lines: Lines of the table that the figure shows.
        runs: All runs of the figure.
    """
    notes = []
    models_by_solver = lines.groupby("solver", sort=False)["model"].unique()
    for solver, models in models_by_solver.items():
        models_text = f" ({'; '.join(models)})" if len(models_by_solver) > 1 else ""
        notes.append(f"Solver in evaluation: {solver}{models_text}")
    failed = (
        lines.dropna(subset="failed").groupby("model", sort=False)["failed"].agg(["mean", "max"])
    )
    unsolved = failed.loc[failed["max"] > FAILED_SHARE, "mean"]  # model → mean share of tokens
    if len(unsolved):
        shares = "; ".join(f"{model or 'all'}: {share:.2%}" for model, share in unsolved.items())
        notes.append(
            f"Tokens whose equation was not solved, more than {FAILED_SHARE:.1%}: {shares}"
        )
    if (lines["in_training"] == UNKNOWN).any():
        notes.append("For some lengths, it is unknown whether training contains the test samples")
    overlapping = lines[~lines["in_training"].isin(("0", UNKNOWN))]
    if len(overlapping):
        lengths = ", ".join(map(str, sorted(overlapping["length"].unique())))
        notes.append(f"Training may contain the test samples of length: {lengths}")
    for run in runs:
        if note := describe_unfinished_curriculum(run.result, run.cfg):
            notes.append(f"{run.label or 'the model'}, seed {run.seed}: {note}")
    return notes
