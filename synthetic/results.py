"""Results of runs: descriptions of their rows, errors, thresholds, and the table of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lm.runs.metrics import (
    OTHER_SOLUTION_MARK,
    OTHER_SOLUTION_NOTE,
    SHARES,
    find_failures,
    find_other_solutions,
)
from synthetic.config import Config, Threshold

if TYPE_CHECKING:
    from rich.table import Table

# How the model reads the tokens of a sequence: `read` of a row.
AT_ONCE, TOKEN_BY_TOKEN, IN_SEGMENTS = "at once", "token by token", "in segments"
UNKNOWN = "unknown"  # whether training contains the test samples as well


def solver_text(solver: dict | str) -> str:
    """Describe the `solver` of a row.

    For example: "token iterate, parallel, paper, tol 0.1, at most 1000 iterations".
    """
    if isinstance(solver, str):
        return solver
    parts = [f"token {solver['token']}", solver["schedule"]]
    if solver["tol"] is not None:
        parts += [solver["stopping"], f"tol {solver['tol']:g}"]
    if solver["max_iters"] is not None:
        parts.append(f"at most {solver['max_iters']} iterations")
    return ", ".join(parts)


def curriculum_note(result: dict, cfg: Config) -> str:
    """Return a note if the curriculum ended below the full training length, or "".

    Args:
        result: Result of the run. Results from before `trained_length` existed give "".
        cfg: Config of the run.
    """
    full_length = cfg.train.lengths[1]
    length = result.get("trained_length", full_length)
    if length == full_length:
        return ""
    return f"its curriculum ended at length {length}: it was never trained at {full_length}"


def solvers_text(rows: list[dict]) -> str:
    """Describe the solvers of the rows, with one line for each way of reading."""
    pairs = list(dict.fromkeys((row["read"], solver_text(row["solver"])) for row in rows))
    if len(pairs) == 1:
        return "read {}; solver: {}".format(*pairs[0])
    return "\n".join(f"{reading}: {solver}" for reading, solver in pairs)


def overlap_text(rows: list[dict]) -> str:
    """Describe how many of the rows' samples are in training too: "0", "3 of 36" or "unknown"."""
    shares = [row["in_training"] for row in rows]
    if any(share["count"] is None for share in shares):
        return UNKNOWN
    count = sum(share["count"] for share in shares)
    return f"{count} of {sum(share['of'] for share in shares)}" if count else "0"


def has_other_solution(rows: list[dict]) -> list[bool]:
    """Return for each layer whether ℓ* belongs to another solution than the model's in some row.

    The list is empty for a model without a solver.
    """
    probes = [find_other_solutions(row["num_iters"]) for row in rows if "num_iters" in row]
    return [any(rows_of_layer) for rows_of_layer in zip(*probes)]


def mean_failed_share(rows: list[dict]) -> float | None:
    """Return the fraction of unsolved tokens in the worst layer, averaged over the rows.

    It is None for a model without a solver.
    """
    shares = [max(row["failed"]) for row in rows if "failed" in row]
    return float(np.mean(shares)) if shares else None


def failure_notes(rows: list[dict]) -> list[str]:
    """Return a warning for each layer that left too many tokens unsolved, from its worst row."""
    worst: dict[int, tuple[list[float], str]] = {}  # layer → its shares and its warning
    for row in rows:
        for layer, sentence in find_failures(row, row["solver"]).items():
            shares = [row[name][layer] for name in SHARES if name in row]
            if layer not in worst or shares > worst[layer][0]:
                worst[layer] = shares, f"warning: at length {row['length']} {sentence}"
    return [sentence for _, (_, sentence) in sorted(worst.items())]


def combine_stderrs(stderrs: Sequence[float]) -> float:
    """Return the standard error of a mean from the standard errors of its independent terms."""
    return float(np.sqrt(np.square(np.asarray(stderrs)).sum()) / len(stderrs))


def plus_minus(stderr: float, digits: int = 3) -> str:
    """Return " ±0.012", to append to a value; "" if the error is unknown."""
    return "" if np.isnan(stderr) else f" ±{stderr:.{digits}f}"


def judge_thresholds(thresholds: Iterable[Threshold], results: list[dict]) -> list[dict]:
    """Compare each threshold with the value reached.

    The value is the mean over the seeds of the test data. Rows that were read token by token do not
    count.

    Returns:
        A dictionary for each threshold: metric, length, least, value (None if unknown), passed.
    """
    judged = []
    for threshold in thresholds:
        values = [
            row["metrics"][threshold.metric]
            for row in results
            if threshold.metric in row["metrics"]
            and threshold.length in (None, row["length"])
            and row["read"] != TOKEN_BY_TOKEN
        ]
        value = sum(values) / len(values) if values else None
        judged.append(
            {
                "metric": threshold.metric,
                "length": threshold.length,
                "least": threshold.min,  # the file keeps the key that earlier versions wrote
                "value": value,
                "passed": value is not None and value >= threshold.min,
            }
        )
    return judged


def threshold_lines(result: dict) -> list[str]:
    """Return a line for each threshold of a result: passed or failed."""
    lines = []
    for entry in result["bars"]:
        position = f" at length {entry['length']}" if entry["length"] else ""
        value = "not measured" if entry["value"] is None else f"{entry['value']:.4f}"
        outcome = "PASS" if entry["passed"] else "FAIL"
        lines.append(
            f"{outcome}  {entry['metric']}{position}: {value} (threshold {entry['least']:g})"
        )
    return lines


# Columns of text, which tables align on the left.
TEXT_COLUMNS = {"run", "ability", "task", "metric", "report", "paper", "shows", "read"}


def build_table(rows: list[dict], title: str, caption: str = "") -> Table:
    """Build a rich table from dictionaries; columns are in the order of their first appearance."""
    from rich.table import Table

    head, *body = to_text_rows(rows)
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for name in head:
        table.add_column(name, justify="left" if name in TEXT_COLUMNS else "right")
    for cells in body:
        table.add_row(*cells)
    return table


def to_text_rows(rows: list[dict]) -> list[list[str]]:
    """Return dictionaries as rows of text; the first row is the head."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return [columns, *([_cell(row.get(name)) for name in columns] for row in rows)]


def _cell(value: Any) -> str:
    return "–" if value is None else str(value)


def summary_table(result: dict, title: str) -> Table:
    """Build the table of a run's result.

    It has a line for each length and way of reading: the metrics with their standard errors, ℓ*,
    the cost of solving, and the samples that training may contain. The caption lists the solvers
    and warnings.
    """
    rows = result["eval"]
    metrics = list(rows[0]["metrics"])
    groups: dict[tuple[int, str], list[dict]] = {}  # the seeds of each length and way of reading
    for row in sorted(rows, key=lambda row: row["length"]):
        groups.setdefault((row["length"], row["read"]), []).append(row)
    has_several_readings = len({reading for _, reading in groups}) > 1
    lines = []
    for (length, reading), seeds in groups.items():
        line: dict[str, Any] = {"length": length}
        if has_several_readings:
            line["read"] = reading
        for metric in metrics:
            scored = [row for row in seeds if metric in row["metrics"]]
            mean = np.mean([row["metrics"][metric] for row in scored])
            error = combine_stderrs([row["stderr"][metric] for row in scored])
            line[metric.replace("_", " ")] = f"{mean:.4f}{plus_minus(error)}"
        if "failed" in seeds[0]:
            line |= _solving_cells(seeds)
        line["in training"] = overlap_text(seeds)
        lines.append(line)
    if len(lines) == 1 and len(metrics) > 4:  # CatbAbI has a metric for each bAbI task
        lines = [{"metric": name, "value": value} for name, value in lines[0].items()]
    notes = [OTHER_SOLUTION_NOTE] if any(has_other_solution(rows)) else []
    caption = "\n".join([solvers_text(rows), *failure_notes(rows), *notes])
    return build_table(lines, title, caption)


def _solving_cells(rows: list[dict]) -> dict[str, str]:
    """Return the cells about solving for rows of the same length.

    They are ℓ* and the evaluations per token of each layer, and the fraction of unsolved tokens in
    the worst layer.
    """
    iterations = np.mean([row["num_iters"]["mean"] for row in rows], 0)
    evaluations = np.mean([row["evaluations"] for row in rows], 0)
    marks = [OTHER_SOLUTION_MARK * is_other for is_other in has_other_solution(rows)]
    return {
        "ℓ* per layer": " ".join(f"{mean:.1f}{mark}" for mean, mark in zip(iterations, marks)),
        "evaluations": " ".join(f"{mean:.1f}" for mean in evaluations),
        "failed": f"{mean_failed_share(rows):.2%}",
    }
