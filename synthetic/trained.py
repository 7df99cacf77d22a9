"""Finished runs as figures need them: values over lengths, seeds together, what solved them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev

from lm.metrics import FAILED_SHARE
from synthetic.config import Config
from synthetic.results import (
    TOKEN_BY_TOKEN,
    UNKNOWN,
    distinct,
    error,
    failed,
    failure_notes,
    how,
    in_training,
    iterations,
    plus_minus,
    solver_text,
)


@dataclass
class Trained:
    """A finished run of a sweep."""

    run_dir: Path
    cfg: Config  # as the sweep has it today
    seed: int  # the run's own
    point: dict  # dotted key → value, mappings flattened
    model: str  # what the sweep says about it, readably, without the task and the seed
    panel: str  # the task, where the sweep goes over several
    result: dict
    records: list[dict]  # of metrics.jsonl
    others: dict[int, dict] = field(default_factory=dict)  # ℓmax in evaluation → eval JSON

    @property
    def headline(self) -> str:
        return self.result["headline"]

    @property
    def label(self) -> str:
        return ", ".join(filter(None, (self.panel, self.model)))


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


def spread(found: list[tuple[float, float]]) -> Spread:
    """(value, standard error) of each seed → what they are together."""
    values = tuple(value for value, _ in found)
    return Spread(values, found[0][1] if len(values) == 1 else stdev(values))


def by_seed(runs: list[Trained]) -> dict[str, list[Trained]]:
    """Runs that differ in nothing but the seed, by their label."""
    groups: dict[str, list[Trained]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return groups


def number(found: Iterable[Spread]) -> int | str:
    """The number of seeds of what is drawn: 3, or "1–3" where some of it has fewer."""
    counts = [len(each.values) for each in found]
    least, most = min(counts, default=0), max(counts, default=0)
    return most if least == most else f"{least}–{most}"


def counted(label: str, found: Iterable[Spread]) -> str:
    """A label with the number of seeds, for a legend."""
    return f"{label} (n = {number(found)})".strip()


def over_lengths(rows: list[dict], metric: str) -> dict[int, float]:
    """Rows of a result's `eval` → per length the mean over seeds (of ℓ*, over layers as well)."""
    values: dict[int, list[float]] = {}
    for row in rows:
        if metric == "num_iters":
            layers = iterations(row)
            value = None if layers is None else mean(layers)
        else:
            value = row["metrics"].get(metric)
        if value is not None:
            values.setdefault(row["length"], []).append(value)
    return {length: mean(v) for length, v in sorted(values.items())}


def errors(rows: list[dict], metric: str) -> dict[int, float]:
    """Per length the standard error of `over_lengths`; NaN where it is not known."""
    lengths = sorted({row["length"] for row in rows})
    return {n: error([row for row in rows if row["length"] == n], metric) for n in lengths}


def spreads(several: list[list[dict]], metric: str) -> dict[int, Spread]:
    """The rows of each of several seeds → a metric at each length."""
    found: dict[int, list[tuple[float, float]]] = {}
    for rows in several:
        stderr = errors(rows, metric)
        for length, value in over_lengths(rows, metric).items():
            found.setdefault(length, []).append((value, stderr[length]))
    return {length: spread(found[length]) for length in sorted(found)}


def tidy(run: Trained, rows: list[dict], **columns) -> list[dict]:
    """Rows of an evaluation, all made in the same way → lines of the CSV."""
    metrics = dict.fromkeys(m for row in rows for m in row["metrics"])
    metrics |= {"num_iters": None} if any(iterations(row) for row in rows) else {}
    read, solver = how(rows[0])
    who = {
        "run": str(run.run_dir),
        "label": run.label,
        **run.point,
        "seed": run.seed,
        **columns,
        "read": read,
        "solver": solver,
    }
    found = []
    for metric in metrics:
        stderr = errors(rows, metric)
        for length, value in over_lengths(rows, metric).items():
            same = [row for row in rows if row["length"] == length]
            line = {"in_training": in_training(same), "distinct": distinct(same), "length": length}
            line |= {"metric": metric, "value": value}
            found.append({**who, **line, "stderr": stderr[length]})
    return found


def ways(run: Trained) -> dict[str, list[dict]]:
    """The rows of a result by how the tokens were read."""
    found: dict[str, list[dict]] = {}
    for row in run.result["eval"]:
        found.setdefault(how(row)[0], []).append(row)
    return found


def at_once(result: dict) -> list[dict]:
    """The rows that were not read token by token."""
    return [row for row in result["eval"] if how(row)[0] != TOKEN_BY_TOKEN]


def notes(shown: list[tuple[str, list[dict]]], any_limit: bool = False) -> list[str]:
    """What stands below a figure: what solved whom, and at which lengths training has the test
    samples too.

    Args:
        shown: (label, its rows). any_limit: ℓmax in evaluation is one of the figure's axes.
    """
    by_solver: dict[str, list[str]] = {}
    shares: dict[int, set[str]] = {}
    for label, rows in shown:
        for row in rows:
            solver = row.get("solver", UNKNOWN)
            by_solver.setdefault(solver_text(solver, limit=not any_limit), []).append(label)
            shares.setdefault(row["length"], set()).add(in_training([row]))
    lines = []
    for solver, labels in by_solver.items():
        who = "" if len(by_solver) == 1 else f" ({'; '.join(dict.fromkeys(labels))})"
        lines.append(f"Solver in evaluation: {solver}{who}")
    unsolved = {label: failed(rows) for label, rows in shown if failure_notes(rows)}
    if unsolved:
        each = "; ".join(f"{label or 'all'}: {share:.2%}" for label, share in unsolved.items())
        lines.append(f"Tokens whose equation was not solved, more than {FAILED_SHARE:.1%}: {each}")
    if any(UNKNOWN in each for each in shares.values()):
        lines.append("Whether training has the test samples too is unknown of some")
    also = [n for n, each in sorted(shares.items()) if each - {"0", UNKNOWN}]
    if also:
        each = ", ".join(f"{n} ({max(shares[n] - {'0', UNKNOWN}, key=_share)})" for n in also)
        lines.append(f"Test samples that training has too, at length (at most): {each}")
    return lines


def _share(text: str) -> float:
    """Of "3 of 36"."""
    count, of = map(int, text.split(" of "))
    return count / of
