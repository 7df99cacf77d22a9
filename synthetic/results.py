"""What a result says: its rows, how they were made, their errors, bars, and the table of a run."""

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

# How the tokens of a sequence are given to the model: `read` of a row.
AT_ONCE, TOKEN_BY_TOKEN, IN_SEGMENTS = "at once", "token by token", "in segments"
UNKNOWN = "unknown"  # if training may have the test samples too


def solver_text(solver: dict | str) -> str:
    """Describe the `solver` of a row, for example "token iterate, parallel, paper, tol 0.1, at most
    1000 iterations"."""
    if isinstance(solver, str):
        return solver
    parts = [f"token {solver['token']}", solver["schedule"]]
    if solver["tol"] is not None:
        parts += [solver["stopping"], f"tol {solver['tol']:g}"]
    if solver["max_iters"] is not None:
        parts.append(f"at most {solver['max_iters']} iterations")
    return ", ".join(parts)


def curriculum_note(result: dict, cfg: Config) -> str:
    """Describe how far the curriculum came, if it ended below the full training length; else "".

    Args:
        result: Of the run. Results written before `trained_length` was recorded give "".
        cfg: Of the run.
    """
    full_length = cfg.train.lengths[1]
    length = result.get("trained_length", full_length)
    if length == full_length:
        return ""
    return f"its curriculum ended at length {length}: it was never trained at {full_length}"


def solved_by(rows: list[dict]) -> str:
    """Describe what solved the rows, with a line for each way of reading if there are several."""
    ways = list(dict.fromkeys((row["read"], solver_text(row["solver"])) for row in rows))
    if len(ways) == 1:
        return "read {}; solver: {}".format(*ways[0])
    return "\n".join(f"{read}: {solver}" for read, solver in ways)


def in_training(rows: list[dict]) -> str:
    """Describe how many of the rows' samples training has too: "0", "3 of 36" or "unknown"."""
    shares = [row["in_training"] for row in rows]
    if any(share["count"] is None for share in shares):
        return UNKNOWN
    count = sum(share["count"] for share in shares)
    return f"{count} of {sum(share['of'] for share in shares)}" if count else "0"


def layers_with_other_solution(rows: list[dict]) -> list[bool]:
    """Return for each layer if ℓ* in one of the rows belongs to another solution than the model's;
    [] for a model without a solver."""
    probes = [find_other_solutions(row["num_iters"]) for row in rows if "num_iters" in row]
    return [any(of_layer) for of_layer in zip(*probes)]


def failed_share(rows: list[dict]) -> float | None:
    """Return the share of tokens that were not solved in the worst layer, mean over rows; None for
    a model without a solver."""
    shares = [max(row["failed"]) for row in rows if "failed" in row]
    return float(np.mean(shares)) if shares else None


def failure_notes(rows: list[dict]) -> list[str]:
    """Return a warning for each layer that left too many tokens unsolved, from its worst row."""
    worst: dict[int, tuple[list[float], str]] = {}  # by place: its shares, and the warning
    for row in rows:
        for place, sentence in find_failures(row, row["solver"]).items():
            shares = [row[name][place] for name in SHARES if name in row]
            if place not in worst or shares > worst[place][0]:
                worst[place] = shares, f"warning: at length {row['length']} {sentence}"
    return [sentence for _, (_, sentence) in sorted(worst.items())]


def error_of_mean(stderrs: Sequence[float]) -> float:
    """Return the standard error of a mean from the standard errors of its independent terms."""
    return float(np.sqrt(np.square(np.asarray(stderrs)).sum()) / len(stderrs))


def plus_minus(stderr: float, digits: int = 3) -> str:
    """Return " ±0.012", to follow a value; "" if the error is unknown."""
    return "" if np.isnan(stderr) else f" ±{stderr:.{digits}f}"


def passes(bars: Iterable[Threshold], results: list[dict]) -> list[dict]:
    """Return each bar of the config with the value reached, mean over the seeds of the test data,
    and if it passed; rows that were read token by token do not count."""
    judged = []
    for bar in bars:
        values = [
            row["metrics"][bar.metric]
            for row in results
            if bar.metric in row["metrics"]
            and bar.length in (None, row["length"])
            and row["read"] != TOKEN_BY_TOKEN
        ]
        value = sum(values) / len(values) if values else None
        passed = value is not None and value >= bar.min
        judged.append(
            {
                "metric": bar.metric,
                "length": bar.length,
                "least": bar.min,  # the file keeps the key that earlier versions wrote
                "value": value,
                "passed": passed,
            }
        )
    return judged


LEFT = {"run", "ability", "task", "metric", "report", "paper", "shows", "read"}  # columns of words


def table(rows: list[dict], title: str, caption: str = "") -> Table:
    """Return dictionaries as a rich table; columns are in the order in which they first appear."""
    from rich.table import Table

    head, *body = in_words(rows)
    made = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for name in head:
        made.add_column(name, justify="left" if name in LEFT else "right")
    for cells in body:
        made.add_row(*cells)
    return made


def in_words(rows: list[dict]) -> list[list[str]]:
    """Return dictionaries as rows of text; the first row is the head."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return [columns, *([_cell(row.get(name)) for name in columns] for row in rows)]


def _cell(value: Any) -> str:
    return "–" if value is None else str(value)


def summary(result: dict, title: str) -> Table:
    """Return a run's result as a rich table.

    It has a line for each length and way of reading: the metrics with their standard errors, ℓ*,
    the cost of solving, and the samples that training may have too. Below it stand the solvers and
    warnings.
    """
    rows = result["eval"]
    metrics = list(rows[0]["metrics"])
    groups: dict[tuple[int, str], list[dict]] = {}  # the seeds of each length and way
    for row in sorted(rows, key=lambda row: row["length"]):
        groups.setdefault((row["length"], row["read"]), []).append(row)
    several_ways = len({read for _, read in groups}) > 1
    lines = []
    for (length, read), seeds in groups.items():
        line: dict[str, Any] = {"length": length}
        if several_ways:
            line["read"] = read
        for metric in metrics:
            scored = [row for row in seeds if metric in row["metrics"]]
            mean = np.mean([row["metrics"][metric] for row in scored])
            error = error_of_mean([row["stderr"][metric] for row in scored])
            line[metric.replace("_", " ")] = f"{mean:.4f}{plus_minus(error)}"
        if "failed" in seeds[0]:
            line |= _solving_cells(seeds)
        line["in training"] = in_training(seeds)
        lines.append(line)
    if len(lines) == 1 and len(metrics) > 4:  # CatbAbI has a metric for each bAbI task
        lines = [{"metric": name, "value": value} for name, value in lines[0].items()]
    notes = [OTHER_SOLUTION_NOTE] if any(layers_with_other_solution(rows)) else []
    return table(lines, title, "\n".join([solved_by(rows), *failure_notes(rows), *notes]))


def _solving_cells(rows: list[dict]) -> dict[str, str]:
    """Return ℓ* and evaluations a token of each layer, and the share of tokens that were not solved
    in the worst layer, of rows of one length."""
    iterations = np.mean([row["num_iters"]["mean"] for row in rows], 0)
    evaluations = np.mean([row["evaluations"] for row in rows], 0)
    marks = [OTHER_SOLUTION_MARK * elsewhere for elsewhere in layers_with_other_solution(rows)]
    return {
        "ℓ* per layer": " ".join(f"{mean:.1f}{mark}" for mean, mark in zip(iterations, marks)),
        "evaluations": " ".join(f"{mean:.1f}" for mean in evaluations),
        "failed": f"{failed_share(rows):.2%}",
    }


def verdict(result: dict) -> list[str]:
    """Return a line for each bar: passed or failed."""
    lines = []
    for bar in result["bars"]:
        at = f" at length {bar['length']}" if bar["length"] else ""
        value = "not measured" if bar["value"] is None else f"{bar['value']:.4f}"
        word = "PASS" if bar["passed"] else "FAIL"
        lines.append(f"{word}  {bar['metric']}{at}: {value} (bar {bar['least']:g})")
    return lines
