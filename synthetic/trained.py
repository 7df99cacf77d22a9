"""Finished runs as figures need them: values over lengths, seeds together, what solved them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from lm.runs.metrics import FAILED_SHARE
from synthetic.config import Config
from synthetic.results import (
    TOKEN_BY_TOKEN,
    UNKNOWN,
    curriculum_note,
    distinct_samples,
    error_of_mean,
    failed_share,
    failure_notes,
    in_training,
    iterations_of_layers,
    plus_minus,
    solver_text,
    way_of,
)


@dataclass
class Trained:
    """A finished run of a sweep."""

    run_dir: Path
    cfg: Config  # as the sweep has it today
    seed: int  # the run's own
    point: dict[str, Any]  # dotted key → value, mappings flattened
    model: str  # what the sweep says about it, readably, without the task and the seed
    panel: str  # the task, where the sweep goes over several
    result: dict
    records: list[dict]  # of metrics.jsonl
    under_limits: dict[int, dict] = field(default_factory=dict)  # ℓmax in evaluation → eval JSON

    @property
    def headline(self) -> str:
        return self.result["headline"]

    @property
    def label(self) -> str:
        return ", ".join(filter(None, (self.panel, self.model)))

    @property
    def rows(self) -> list[dict]:
        """The rows of its result that were not read token by token."""
        return [row for row in self.result["eval"] if way_of(row).read != TOKEN_BY_TOKEN]

    @property
    def rows_by_reading(self) -> dict[str, list[dict]]:
        """All rows of its result by how the tokens were read."""
        rows: dict[str, list[dict]] = {}
        for row in self.result["eval"]:
            rows.setdefault(way_of(row).read, []).append(row)
        return rows


@dataclass(frozen=True)
class Spread:
    """One number of several training seeds.

    Attributes:
        values: of each seed. error: with one seed the standard error over its test samples (NaN
        where that is not known), with several their standard deviation.
    """

    values: tuple[float, ...]
    error: float

    @property
    def mean(self) -> float:
        return mean(self.values)

    def __str__(self) -> str:
        digits = 1 if self.mean >= 10 else 4  # iterations, or an accuracy
        return f"{self.mean:.{digits}f}{plus_minus(self.error, min(3, digits))}"


def spread_of(seeds: list[tuple[float, float]]) -> Spread:
    """(value, standard error) of each seed → what they are together."""
    values = tuple(value for value, _ in seeds)
    return Spread(values, seeds[0][1] if len(values) == 1 else stdev(values))


def by_seed(runs: Iterable[Trained]) -> dict[str, list[Trained]]:
    """Runs that differ in nothing but the seed, by their label."""
    groups: dict[str, list[Trained]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return groups


def seed_count(spreads: Iterable[Spread]) -> int | str:
    """The number of seeds of what is drawn: 3, or "1–3" where some of it has fewer."""
    counts = [len(spread.values) for spread in spreads]
    least = min(counts, default=0)
    most = max(counts, default=0)
    return most if least == most else f"{least}–{most}"


def with_seed_count(label: str, spreads: Iterable[Spread]) -> str:
    """A label with the number of seeds, for a legend."""
    return f"{label} (n = {seed_count(spreads)})".strip()


def over_lengths(rows: list[dict], metric: str) -> dict[int, float]:
    """Rows of a result's `eval` → per length the mean over seeds (of ℓ*, over layers as well)."""
    values: dict[int, list[float]] = {}
    for row in rows:
        if metric == "num_iters":
            layers = iterations_of_layers(row)
            value = None if layers is None else mean(layers)
        else:
            value = row["metrics"].get(metric)
        if value is not None:
            values.setdefault(row["length"], []).append(value)
    return {length: mean(of_seeds) for length, of_seeds in sorted(values.items())}


def errors_over_lengths(rows: list[dict], metric: str) -> dict[int, float]:
    """Per length the standard error of `over_lengths`; NaN where it is not known."""
    return {
        length: error_of_mean([row for row in rows if row["length"] == length], metric)
        for length in sorted({row["length"] for row in rows})
    }


def spreads_over_lengths(rows_of_seeds: list[list[dict]], metric: str) -> dict[int, Spread]:
    """The rows of each of several seeds → a metric at each length."""
    seeds: dict[int, list[tuple[float, float]]] = {}
    for rows in rows_of_seeds:
        stderr = errors_over_lengths(rows, metric)
        for length, value in over_lengths(rows, metric).items():
            seeds.setdefault(length, []).append((value, stderr[length]))
    return {length: spread_of(seeds[length]) for length in sorted(seeds)}


def csv_lines(run: Trained, rows: list[dict], **columns: Any) -> list[dict]:
    """Rows of an evaluation, all made in the same way → lines of the CSV, one a metric and length.

    Args: columns: further ones, the same in every line.
    """
    metrics = list(dict.fromkeys(metric for row in rows for metric in row["metrics"]))
    if "num_iters" not in metrics and any(iterations_of_layers(row) for row in rows):
        metrics.append("num_iters")
    way = way_of(rows[0])
    lines = []
    for metric in metrics:
        stderr = errors_over_lengths(rows, metric)
        for length, value in over_lengths(rows, metric).items():
            same_length = [row for row in rows if row["length"] == length]
            lines.append(
                {
                    "run": str(run.run_dir),
                    "label": run.label,
                    **run.point,
                    "seed": run.seed,
                    **columns,
                    "read": way.read,
                    "solver": way.solver,
                    "in_training": in_training(same_length),
                    "distinct": distinct_samples(same_length),
                    "length": length,
                    "metric": metric,
                    "value": value,
                    "stderr": stderr[length],
                }
            )
    return lines


def notes(shown: list[tuple[str, list[dict]]], any_limit: bool = False) -> list[str]:
    """What stands below a figure: what solved whom, and at which lengths training has the test
    samples too.

    Args:
        shown: (label, its rows). any_limit: ℓmax in evaluation is one of the figure's axes.
    """
    labels_by_solver: dict[str, list[str]] = {}
    shares: dict[int, set[str]] = {}  # length → `in_training` of its rows
    for label, rows in shown:
        for row in rows:
            solver = solver_text(row.get("solver", UNKNOWN), limit=not any_limit)
            labels_by_solver.setdefault(solver, []).append(label)
            shares.setdefault(row["length"], set()).add(in_training([row]))
    lines = []
    for solver, labels in labels_by_solver.items():
        of = "" if len(labels_by_solver) == 1 else f" ({'; '.join(dict.fromkeys(labels))})"
        lines.append(f"Solver in evaluation: {solver}{of}")
    unsolved = [
        f"{label or 'all'}: {share:.2%}"
        for label, share in {
            label: failed_share(rows) for label, rows in shown if failure_notes(rows)
        }.items()
    ]
    if unsolved:
        lines.append(
            f"Tokens whose equation was not solved, more than {FAILED_SHARE:.1%}:"
            f" {'; '.join(unsolved)}"
        )
    if any(UNKNOWN in of_length for of_length in shares.values()):
        lines.append("Whether training has the test samples too is unknown of some")
    in_both = [
        f"{length} ({max(of_length - {'0', UNKNOWN}, key=_share)})"
        for length, of_length in sorted(shares.items())
        if of_length - {"0", UNKNOWN}
    ]
    if in_both:
        lines.append(
            f"Test samples that training has too, at length (at most): {', '.join(in_both)}"
        )
    return lines


def curriculum_notes(runs: Iterable[Trained]) -> list[str]:
    """Name the runs whose curriculum ended below the full training length."""
    found = ((run, curriculum_note(run.result, run.cfg)) for run in runs)
    return [f"{run.label or 'the model'}, seed {run.seed}: {note}" for run, note in found if note]


def _share(text: str) -> float:
    """Of "3 of 36"."""
    count, samples = map(int, text.split(" of "))
    return count / samples
