"""Results of runs: descriptions of their rows, standard errors, thresholds, and a run's table.

A row is a result of `evaluate.measure`: one length, test seed and way of reading.
"""

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

# Values of a row's `read`: how the model reads the tokens.
AT_ONCE, TOKEN_BY_TOKEN, IN_SEGMENTS = "at once", "token by token", "in segments"
UNKNOWN = "unknown"  # `format_overlap` if the overlap with training is unknown


def format_solver(solver: dict | str) -> str:
    """Return the `solver` of a row as text.

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


def describe_unfinished_curriculum(result: dict, cfg: Config) -> str:
    """Return a note if the curriculum did not reach its end, otherwise "".

    Args:
        result: Result of the run. It may lack the keys that earlier versions did not write.
        cfg: Config of the run.
    """
    full_length = cfg.train.lengths[1]
    length = result.get("trained_length", full_length)
    if length != full_length:
        return f"its curriculum ended at length {length}: it was never trained at {full_length}"
    if (count := result.get("trained_elements")) is not None:
        return f"its curriculum ended with {count} elements: it was never trained with all"
    return ""


def format_solvers(rows: list[dict]) -> str:
    """Return the solvers of the rows as text, with a line for each way of reading."""
    pairs = list(dict.fromkeys((row["read"], format_solver(row["solver"])) for row in rows))
    if len(pairs) == 1:
        reading, solver = pairs[0]
        return f"read {reading}; solver: {solver}"
    return "\n".join(f"{reading}: {solver}" for reading, solver in pairs)


def format_overlap(rows: list[dict]) -> str:
    """Return how many test samples may also be in the training data.

    For example: "0", "3 of 36" or "unknown".
    """
    overlaps = [row["in_training"] for row in rows]
    if any(overlap["count"] is None for overlap in overlaps):
        return UNKNOWN
    count = sum(overlap["count"] for overlap in overlaps)
    total = sum(overlap["of"] for overlap in overlaps)
    return f"{count} of {total}" if count else "0"


def flag_other_solutions(rows: list[dict]) -> list[bool]:
    """Return per layer whether the paper's procedure converged to another solution in any row.

    Tables mark ℓ* of such a layer with † (OTHER_SOLUTION_MARK). The list is empty for a model
    without a solver.
    """
    flags_by_row = [find_other_solutions(row["num_iters"]) for row in rows if "num_iters" in row]
    return [any(flags_of_layer) for flags_of_layer in zip(*flags_by_row)]


def average_failed_share(rows: list[dict]) -> float | None:
    """Return the fraction of unsolved tokens in the worst layer, averaged over the rows.

    It is None for a model without a solver.
    """
    shares = [max(row["failed"]) for row in rows if "failed" in row]
    return float(np.mean(shares)) if shares else None


def describe_failures(rows: list[dict]) -> list[str]:
    """Return a warning for each layer that left too many tokens unsolved, from its worst row."""
    worst: dict[int, tuple[list[float], str]] = {}  # layer → shares of its worst row, warning
    for row in rows:
        for layer, sentence in find_failures(row, row["solver"]).items():
            shares = [row[name][layer] for name in SHARES if name in row]
            # Lists are compared from their first number on: the worst row has the most failed
            # tokens; among rows with equally many, it has the most bisected tokens, and so on.
            if layer not in worst or shares > worst[layer][0]:
                worst[layer] = shares, f"warning: at length {row['length']} {sentence}"
    return [sentence for _, (_, sentence) in sorted(worst.items())]


def combine_stderrs(stderrs: Sequence[float]) -> float:
    """Return the standard error of a mean from the standard errors of its independent terms."""
    return float(np.sqrt(np.square(np.asarray(stderrs)).sum()) / len(stderrs))


def format_error(stderr: float, digits: int = 3) -> str:
    """Return a standard error as " ±0.012", to append to a value; "" if it is unknown."""
    return "" if np.isnan(stderr) else f" ±{stderr:.{digits}f}"


def judge_thresholds(thresholds: Iterable[Threshold], rows: list[dict]) -> list[dict]:
    """Compare each threshold with the value reached.

    The value is the mean over the rows of its length, or of all lengths. Rows that were read token
    by token do not count.

    Returns:
        A dictionary for each threshold: metric, length, least, value (None if unknown), passed.
    """
    judged = []
    for threshold in thresholds:
        values = [
            row["metrics"][threshold.metric]
            for row in rows
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


def format_thresholds(result: dict) -> list[str]:
    """Return a line for each threshold of a result: passed or failed."""
    lines = []
    for entry in result["bars"]:  # the thresholds; key of earlier versions
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

    head, *body = format_rows(rows)
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for name in head:
        table.add_column(name, justify="left" if name in TEXT_COLUMNS else "right")
    for cells in body:
        table.add_row(*cells)
    return table


def format_rows(rows: list[dict]) -> list[list[str]]:
    """Return dictionaries as rows of text; the first row has the column names."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return [columns, *([_format_cell(row.get(name)) for name in columns] for row in rows)]


def _format_cell(value: Any) -> str:
    return "–" if value is None else str(value)


def build_summary_table(result: dict, title: str) -> Table:
    """Build the table of a run's result.

    It has a line for each length and way of reading: the metrics with their standard errors, ℓ*,
    the cost of solving, and the samples that training may contain. The caption lists the solvers
    and warnings.
    """
    rows = result["eval"]
    metrics = list(rows[0]["metrics"])
    groups: dict[tuple[int, str], list[dict]] = {}  # (length, way of reading) → a row per seed
    for row in sorted(rows, key=lambda row: row["length"]):
        groups.setdefault((row["length"], row["read"]), []).append(row)
    has_several_readings = len({reading for _, reading in groups}) > 1
    lines = []
    for (length, reading), seed_rows in groups.items():
        line: dict[str, Any] = {"length": length}
        if has_several_readings:
            line["read"] = reading
        for metric in metrics:
            rows_with_metric = [row for row in seed_rows if metric in row["metrics"]]
            mean = np.mean([row["metrics"][metric] for row in rows_with_metric])
            error = combine_stderrs([row["stderr"][metric] for row in rows_with_metric])
            line[metric.replace("_", " ")] = f"{mean:.4f}{format_error(error)}"
        if "num_iters" in seed_rows[0]:  # the model has a solver
            line |= _format_solving(seed_rows)
        line["in training"] = format_overlap(seed_rows)
        lines.append(line)
    if len(lines) == 1 and len(metrics) > 4:  # CatbAbI: a line for each bAbI task reads better
        lines = [{"metric": name, "value": value} for name, value in lines[0].items()]
    notes = [OTHER_SOLUTION_NOTE] if any(flag_other_solutions(rows)) else []
    caption = "\n".join([format_solvers(rows), *describe_failures(rows), *notes])
    return build_table(lines, title, caption)


def _format_solving(rows: list[dict]) -> dict[str, str]:
    """Return the cells about solving for rows of the same length, of a model with a solver.

    They are ℓ* and the evaluations per token of each layer, and the fraction of unsolved tokens in
    the worst layer.
    """
    iterations = np.mean([row["num_iters"]["mean"] for row in rows], 0)
    evaluations = np.mean([row["evaluations"] for row in rows], 0)
    marks = [OTHER_SOLUTION_MARK if is_other else "" for is_other in flag_other_solutions(rows)]
    return {
        "ℓ* per layer": " ".join(f"{mean:.1f}{mark}" for mean, mark in zip(iterations, marks)),
        "evaluations": " ".join(f"{mean:.1f}" for mean in evaluations),
        "failed": f"{average_failed_share(rows):.2%}",
    }
