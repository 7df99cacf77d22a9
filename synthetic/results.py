"""What a result says: its rows, how they were made, their errors, bars, and the table of a run."""

from __future__ import annotations

import itertools

import numpy as np

from lm.metrics import failures

# How the tokens of a sequence are given to the model: `read` of a row.
AT_ONCE, TOKEN_BY_TOKEN, IN_SEGMENTS = "at once", "token by token", "in segments"
UNKNOWN = "unknown"  # said of what was not recorded when a result was written


def solver_text(solver: dict | str, limit: bool = True) -> str:
    """`solver` of a row in words: "token exact, sequential", or "token iterate, parallel, paper,
    tol 0.1, at most 1000 iterations"; without the limit not the iterations. Results of before
    tokens were solved exactly name no token: they are all of iterated ones."""
    if isinstance(solver, str):
        return solver
    parts = [f"token {solver['token']}"] if "token" in solver else []
    parts.append(solver["schedule"])
    if solver["tol"] is not None:
        parts += [solver["stopping"], f"tol {solver['tol']:g}"]
    if limit and solver["max_iters"] is not None:
        parts.append(f"at most {solver['max_iters']} iterations")
    return ", ".join(parts)


def how(row: dict) -> tuple[str, str]:
    """How a row of a result was made: `read`, and `solver` in words. Results of before these were
    recorded called all that was not read token by token `parallel`, at once or in segments and
    whatever solved it."""
    old = {"sequential": TOKEN_BY_TOKEN}.get(row.get("schedule"), UNKNOWN)
    return row.get("read", old), solver_text(row.get("solver", UNKNOWN))


def solved_by(rows: list[dict]) -> str:
    """What solved the rows, a line for each way of reading where there are several."""
    ways = list(dict.fromkeys(how(row) for row in rows))
    if len(ways) == 1:
        return f"read {ways[0][0]}; solver: {ways[0][1]}"
    return "\n".join(f"{read}: {solver}" for read, solver in ways)


def in_training(rows: list[dict]) -> str:
    """How many of the rows' samples training has too: "0", "3 of 36" or "unknown"."""
    found = [row.get("in_training") for row in rows]
    if any(each is None or each["count"] is None for each in found):
        return UNKNOWN
    count, of = (sum(each[k] for each in found) for k in ("count", "of"))
    return f"{count} of {of}" if count else "0"


def distinct(rows: list[dict]) -> int | None:
    """How many of a seed's samples are different ones, of the rows of one length; the least of
    several seeds. None where it was not recorded."""
    found = [row.get("distinct") for row in rows]
    return None if None in found else min(found)


def iterations(row: dict) -> list[float] | None:
    """ℓ* of each layer, None where it was not measured: for a model without a solver, and in
    results of before it was probed, whose `num_iters` were those of whatever schedule solved the
    model."""
    return row["num_iters"]["mean"] if "probed" in row else None


def failed(rows: list[dict]) -> float | None:
    """The share of tokens that were not solved, mean over rows of the worst layer's; None without a
    solver, or of results of before it was recorded."""
    shares = [max(row["failed"]) for row in rows if "failed" in row]
    return float(np.mean(shares)) if shares else None


def failure_notes(rows: list[dict]) -> list[str]:
    """A warning for each layer that left too many tokens unsolved, and what to do; of the row where
    it left the most."""
    worst: dict[int, dict] = {}
    for row in rows:
        for layer in failures(row.get("failed", []), row.get("solver", UNKNOWN)):
            if layer not in worst or row["failed"][layer] > worst[layer]["failed"][layer]:
                worst[layer] = row
    return [
        f"warning: at length {row['length']} {failures(row['failed'], row['solver'])[layer]}"
        for layer, row in sorted(worst.items())
    ]


def mean_of(rows: list[dict], metric: str) -> float:
    """Mean over rows (the seeds of one length) of a metric."""
    return float(np.mean([row["metrics"][metric] for row in rows if metric in row["metrics"]]))


def error(rows: list[dict], metric: str) -> float:
    """The standard error of `mean_of`, of rows of different samples; NaN where it is not known."""
    errors = [row.get("stderr", {}).get(metric, np.nan) for row in rows]
    return float(np.sqrt(np.sum(np.square(errors))) / len(errors))


def plus_minus(stderr: float, digits: int = 3) -> str:
    """ " ±0.012" to stand behind a value; "" where the error is not known."""
    return "" if np.isnan(stderr) else f" ±{stderr:.{digits}f}"


def at_length(
    results: list, length: int | None, metric: str, sequential: bool = False
) -> float | None:
    """Mean over seeds of a metric at a length (None: the only one)."""
    found = [
        r["metrics"][metric]
        for r in results
        if metric in r["metrics"]
        and length in (None, r["length"])
        and (how(r)[0] == TOKEN_BY_TOKEN) == sequential
    ]
    return sum(found) / len(found) if found else None


def solved_length(results: list, metric: str, least: float = 0.9) -> int:
    """The longest evaluated length up to which the metric never falls below `least`; 0 if none."""
    best = 0
    for length in sorted({r["length"] for r in results}):
        value = at_length(results, length, metric)
        if value is None or value < least:
            break
        best = length
    return best


def passes(bars: list, results: list) -> list[dict]:
    """Each bar of the config with the value reached and whether it passed."""
    found = []
    for bar in bars:
        value = at_length(results, bar.length, bar.metric)
        ok = value is not None and value >= bar.least
        found.append({**bar.model_dump(), "value": value, "passed": ok})
    return found


SOLVING = ("ℓ* per layer", "evaluations", "failed")  # columns of a model with a solver


def _solving_cells(rows: list[dict]) -> list[str]:
    """SOLVING of rows of one length: ℓ* and evaluations a token of each layer, and the share of
    tokens that were not solved in the worst of them."""

    def layers(found):
        known = [each for each in found if each is not None]
        return " ".join(f"{v:.1f}" for v in np.mean(known, 0)) if known else UNKNOWN

    share = failed(rows)
    return [
        layers([iterations(row) for row in rows]),
        layers([row.get("evaluations") for row in rows]),
        UNKNOWN if share is None else f"{share:.2%}",
    ]


def summary(result: dict, title: str):
    """A run's result as a rich table: per length, metrics ± standard error, ℓ*, what solving cost
    and left, and how many of the samples training has too. What solved it stands below."""
    from rich.table import Table

    rows = result["eval"]
    names = list(rows[0]["metrics"])
    solves = any("failed" in row for row in rows)
    stream = len(rows) == 1 and len(names) > 4  # CatbAbI: a row a task
    caption = "\n".join([solved_by(rows), *failure_notes(rows)])
    table = Table(title=title, caption=caption, caption_justify="left")
    if stream:
        for head in ("metric", "value", "standard error"):
            table.add_column(head, justify="right")
        for name in names:
            stderr = plus_minus(error(rows, name), 4).strip() or UNKNOWN
            table.add_row(name, f"{rows[0]['metrics'][name]:.4f}", stderr)
        for name, cell in zip(SOLVING, _solving_cells(rows)):
            if solves:
                table.add_row(name, cell)
        table.add_row("questions in training", in_training(rows))
        return table
    table.add_column("length", justify="right")
    ways = list(dict.fromkeys(how(row) for row in rows))
    if len(ways) > 1:
        table.add_column("read")
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for name in SOLVING if solves else ():
        table.add_column(name, justify="right")
    table.add_column("distinct samples", justify="right")
    table.add_column("in training", justify="right")
    for length, way in itertools.product(sorted({r["length"] for r in rows}), ways):
        same = [r for r in rows if (r["length"], how(r)) == (length, way)]
        cells = [f"{mean_of(same, name):.4f}{plus_minus(error(same, name))}" for name in names]
        cells += _solving_cells(same) if solves else []
        count = distinct(same)
        cells += [UNKNOWN if count is None else f"{count:,}", in_training(same)]
        table.add_row(str(length), *way[: len(ways) > 1], *cells)
    return table


def verdict(result: dict) -> str:
    """The pass/fail lines of a recipe; '' for a config without bars."""
    lines = []
    for bar in result["bars"]:
        at = f" at length {bar['length']}" if bar["length"] else ""
        value = "not measured" if bar["value"] is None else f"{bar['value']:.4f}"
        word = "PASS" if bar["passed"] else "FAIL"
        lines.append(f"{word}  {bar['metric']}{at}: {value} (bar {bar['least']:g})")
    return "\n".join(lines)
