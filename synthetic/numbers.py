"""Finished runs of a sweep, and all that was measured on them as one tidy table (pandas)."""

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
    curriculum_note,
    error_of_mean,
    failed_share,
    in_training,
    layers_with_other_solution,
    plus_minus,
    solver_text,
)

LAST_COLUMNS = ("length", "metric", "value", "stderr")  # of the table


@dataclass
class Trained:
    """A finished run of a sweep."""

    run_dir: Path
    cfg: Config  # as the sweep has it today
    seed: int  # the run's own
    point: dict[str, Any]  # dotted key → value, mappings flattened
    model: str  # the sweep point in words, without the task and the seed
    panel: str  # the task, if the sweep has several
    result: dict
    records: list[dict]  # of metrics.jsonl

    @property
    def headline(self) -> str:
        return self.result["headline"]

    @property
    def trained_to(self) -> int:
        return self.cfg.train.lengths[1]

    @property
    def label(self) -> str:
        return ", ".join(filter(None, (self.panel, self.model)))


def lines(run: Trained, rows: Iterable[dict], **columns: Any) -> list[dict]:
    """Return a line for each metric of each row of an evaluation.

    Args:
        run: The run that was evaluated.
        rows: Rows of a result's `eval`.
        columns: Further columns, the same in every line.
    """
    about: dict[str, Any] = {
        "run": str(run.run_dir),
        "label": run.label,
        "panel": run.panel,
        "model": run.model,
        "task": run.cfg.task.name,
        **run.point,
        "seed": run.seed,
        **columns,
    }
    return [about | line for row in rows for line in _lines_of_row(row)]


def _lines_of_row(row: dict) -> list[dict]:
    metrics = dict(row["metrics"])
    if "num_iters" in row:
        metrics["num_iters"] = float(np.mean(row["num_iters"]["mean"]))
    about = {
        "read": row["read"],
        "solver": solver_text(row["solver"]),
        "in_training": in_training([row]),
        "failed": failed_share([row]),
        "elsewhere": any(layers_with_other_solution([row])),
        "test_seed": row.get("seed"),
        "length": row["length"],
    }
    return [
        {**about, "metric": metric, "value": value, "stderr": row["stderr"].get(metric, np.nan)}
        for metric, value in metrics.items()
    ]


def write_csv(numbers: pd.DataFrame, path: Path) -> None:
    """Write the table; the numbers come last."""
    columns = [name for name in numbers if name not in LAST_COLUMNS]
    numbers.to_csv(path, columns=[*columns, *LAST_COLUMNS], index=False)


def at_end(runs: Iterable[Trained]) -> pd.DataFrame:
    """Return the table of the runs' final evaluations."""
    return pd.DataFrame([line for run in runs for line in lines(run, run.result["eval"])])


def headlines(runs: Sequence[Trained]) -> pd.DataFrame:
    """Return the lines of each task's headline metric."""
    numbers = at_end(runs)
    metric_of = {run.panel: run.headline for run in runs}
    return numbers[numbers["metric"] == numbers["panel"].map(metric_of)]


def while_training(runs: Iterable[Trained]) -> pd.DataFrame:
    """Return the table of the evaluations over lengths while the runs trained; the last one is of
    the finished model, if it has all these lengths."""
    made: list[dict] = []
    for run in runs:
        last_lengths: set[int] = set()
        for record in run.records:
            measured = record.get("over_lengths", {})
            rows = [{"length": int(length), **row} for length, row in measured.items()]
            made += lines(run, rows, step=record["step"], seconds=record.get("seconds"))
            last_lengths = {row["length"] for row in rows} or last_lengths
        final = [row for row in run.result["eval"] if row["length"] in last_lengths]
        final = [row for row in final if row["read"] != TOKEN_BY_TOKEN]
        if last_lengths == {row["length"] for row in final}:
            step, seconds = run.result["updates"], run.result["training_seconds"]
            made += lines(run, final, step=step, seconds=seconds)
    return pd.DataFrame(made)


def over_seeds(numbers: pd.DataFrame, by: Sequence[str] = ("length",)) -> pd.DataFrame:
    """Return means over seeds, first over those of the test data, then over those of training.

    Args:
        numbers: Lines with the same metric.
        by: Columns that tell the means apart.

    Returns:
        A frame with `by` as sorted index: n (training seeds), value, error (the standard deviation
        over seeds; of a single one the standard error over test samples), values and seeds.
    """
    of_run = numbers.groupby([*by, "run", "seed"]).agg(
        value=("value", "mean"), stderr=("stderr", error_of_mean)
    )
    means = (
        of_run.reset_index(["run", "seed"])
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
    means["error"] = means["error"].fillna(means["stderr"])  # of a single seed there is no spread
    return means


def seed_count(counts: Iterable[int]) -> str:
    """Return "3", or "1–3" if some of a drawing has fewer seeds."""
    counts = list(counts)
    return "–".join(map(str, dict.fromkeys((min(counts), max(counts)))))


def with_error(value: float, error: float) -> str:
    """Return a mean with its error, as tables show it."""
    digits = 1 if value > 1 else 4  # iterations or a length, or an accuracy
    return f"{value:.{digits}f}{plus_minus(error, min(3, digits))}"


def notes(drawn: pd.DataFrame, runs: Iterable[Trained]) -> list[str]:
    """Return the sentences below a figure: solvers, unsolved tokens, test samples that training
    has too, and curricula that ended early.

    Args:
        drawn: The lines that the figure shows.
        runs: All runs of the figure.
    """
    found = []
    models_by_solver = drawn.groupby("solver", sort=False)["model"].unique()
    for name, models in models_by_solver.items():
        models_in_words = f" ({'; '.join(models)})" if len(models_by_solver) > 1 else ""
        found.append(f"Solver in evaluation: {name}{models_in_words}")
    failed = (
        drawn.dropna(subset="failed").groupby("model", sort=False)["failed"].agg(["mean", "max"])
    )
    unsolved = failed.loc[failed["max"] > FAILED_SHARE, "mean"]
    if len(unsolved):
        shares = "; ".join(f"{model or 'all'}: {share:.2%}" for model, share in unsolved.items())
        found.append(
            f"Tokens whose equation was not solved, more than {FAILED_SHARE:.1%}: {shares}"
        )
    if (drawn["in_training"] == UNKNOWN).any():
        found.append("For some, it is unknown if training has the test samples too")
    shared = drawn[~drawn["in_training"].isin(("0", UNKNOWN))]
    if len(shared):
        lengths = ", ".join(map(str, sorted(shared["length"].unique())))
        found.append(f"Test samples that training may have too, at length: {lengths}")
    for run in runs:
        if note := curriculum_note(run.result, run.cfg):
            found.append(f"{run.label or 'the model'}, seed {run.seed}: {note}")
    return found
