"""What a result says: its rows, how they were made, their errors, bars, and the table of a run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lm.runs.metrics import ELSEWHERE, ELSEWHERE_NOTE, SHARES, failures, is_elsewhere
from synthetic.config import Bar, Config

if TYPE_CHECKING:
    from rich.table import Table

# How the tokens of a sequence are given to the model: `read` of a row.
AT_ONCE, TOKEN_BY_TOKEN, IN_SEGMENTS = "at once", "token by token", "in segments"
UNKNOWN = "unknown"  # said of what was not recorded when a result was written


def solver_text(solver: dict | str, limit: bool = True) -> str:
    """`solver` of a row in words: "token exact, sequential", or "token iterate, parallel, paper,
    tol 0.1, at most 1000 iterations".

    Results of before tokens were solved exactly name no token; theirs were all iterated.

    Args: limit: say the largest number of iterations, too.
    """
    if isinstance(solver, str):
        return solver
    parts = [f"token {solver['token']}"] if "token" in solver else []
    parts.append(solver["schedule"])
    if solver["tol"] is not None:
        parts += [solver["stopping"], f"tol {solver['tol']:g}"]
    if limit and solver["max_iters"] is not None:
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


class Way(NamedTuple):
    """How a row of a result was made."""

    read: str  # AT_ONCE, TOKEN_BY_TOKEN, IN_SEGMENTS or UNKNOWN
    solver: str  # in words


def way_of(row: dict) -> Way:
    """How a row of a result was made.

    Old results recorded neither `read` nor `solver`, only a `schedule`: "sequential" where they
    read token by token, else "parallel", which says nothing of either.
    """
    read_by_old_row = TOKEN_BY_TOKEN if row.get("schedule") == "sequential" else UNKNOWN
    return Way(row.get("read", read_by_old_row), solver_text(row.get("solver", UNKNOWN)))


def solved_by(rows: list[dict]) -> str:
    """What solved the rows, a line for each way of reading where there are several."""
    ways = list(dict.fromkeys(way_of(row) for row in rows))
    if len(ways) == 1:
        return f"read {ways[0].read}; solver: {ways[0].solver}"
    return "\n".join(f"{way.read}: {way.solver}" for way in ways)


def in_training(rows: list[dict]) -> str:
    """How many of the rows' samples training has too: "0", "3 of 36" or "unknown"."""
    shares = [row.get("in_training") for row in rows]
    known = [share for share in shares if share is not None and share["count"] is not None]
    if len(known) < len(shares):
        return UNKNOWN
    count = sum(share["count"] for share in known)
    samples = sum(share["of"] for share in known)
    return f"{count} of {samples}" if count else "0"


def distinct_samples(rows: list[dict]) -> int | None:
    """How many of a seed's samples are different ones, of the rows of one length; the least of
    several seeds. None where it was not recorded."""
    counts = [row["distinct"] for row in rows if row.get("distinct") is not None]
    return min(counts) if len(counts) == len(rows) else None


def iterations_of_layers(row: dict) -> list[float] | None:
    """ℓ* of each layer, None where it was not measured: for a model without a solver, and in
    results of before there was a probe. What those call `num_iters` is how many iterations their
    own schedule took."""
    return row["num_iters"]["mean"] if "probed" in row else None


def elsewhere_of_layers(rows: list[dict]) -> list[bool]:
    """Of each layer whether in one of the rows ℓ* belongs to another solution than the model's; []
    where it was not measured."""
    probes = [is_elsewhere(row["num_iters"]) for row in rows if "probed" in row]
    return [any(of_layer) for of_layer in zip(*probes)]


def failed_share(rows: list[dict]) -> float | None:
    """The share of tokens that were not solved, mean over rows of the worst layer's; None without a
    solver, or of results of before it was recorded."""
    shares = [max(row["failed"]) for row in rows if "failed" in row]
    return float(np.mean(shares)) if shares else None


def failure_notes(rows: list[dict]) -> list[str]:
    """A warning for each layer that left too many tokens unsolved, and what to do; of the row where
    it left the most."""
    worst: dict[int, tuple[list[float], str]] = {}  # by place: its shares, and what is said
    for row in rows:
        said = failures(row, row.get("solver", UNKNOWN))
        for place, sentence in said.items():
            shares = [row[name][place] for name in SHARES if name in row]
            if place not in worst or shares > worst[place][0]:
                worst[place] = shares, f"warning: at length {row['length']} {sentence}"
    return [sentence for _, (_, sentence) in sorted(worst.items())]


def mean_of(rows: list[dict], metric: str) -> float:
    """Mean over rows (the seeds of one length) of a metric."""
    return float(np.mean([row["metrics"][metric] for row in rows if metric in row["metrics"]]))


def error_of_mean(rows: list[dict], metric: str) -> float:
    """The standard error of `mean_of`, of rows of different samples; NaN where it is not known."""
    errors = [row.get("stderr", {}).get(metric, np.nan) for row in rows]
    return float(np.sqrt(np.sum(np.square(errors))) / len(errors))


def error_over_seeds(values: Sequence[float], stderrs: Sequence[float]) -> float:
    """Return the error of the mean of one number over training seeds.

    Args:
        values: The number of each seed.
        stderrs: Its standard error over test samples, NaN if unknown.

    Returns:
        The standard deviation over several seeds; the standard error of a single one.
    """
    return float(np.std(values, ddof=1)) if len(values) > 1 else float(stderrs[0])


def plus_minus(stderr: float, digits: int = 3) -> str:
    """ " ±0.012" to stand behind a value; "" where the error is not known."""
    return "" if np.isnan(stderr) else f" ±{stderr:.{digits}f}"


def at_length(
    results: list[dict], length: int | None, metric: str, token_by_token: bool = False
) -> float | None:
    """Mean over seeds of a metric at a length (None: the only one), as the model reads token by
    token or otherwise; None where it was not measured."""
    values = [
        row["metrics"][metric]
        for row in results
        if metric in row["metrics"]
        and length in (None, row["length"])
        and (way_of(row).read == TOKEN_BY_TOKEN) == token_by_token
    ]
    return sum(values) / len(values) if values else None


def passes(bars: Iterable[Bar], results: list[dict]) -> list[dict]:
    """Each bar of the config with the value reached and whether it passed."""
    judged = []
    for bar in bars:
        value = at_length(results, bar.length, bar.metric)
        passed = value is not None and value >= bar.least
        judged.append({**bar.model_dump(), "value": value, "passed": passed})
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
    """Return a run's result as a rich table: a line for each length and way of reading, with
    metrics ± standard error, ℓ*, the cost of solving, and the samples that training may have too;
    the solvers and warnings stand below."""
    rows = result["eval"]
    metrics = list(rows[0]["metrics"])
    groups: dict[tuple[int, Way], list[dict]] = {}  # the seeds of each length and way
    for row in sorted(rows, key=lambda row: row["length"]):
        groups.setdefault((row["length"], way_of(row)), []).append(row)
    several_ways = len({way for _, way in groups}) > 1
    lines = []
    for (length, way), seeds in groups.items():
        line: dict[str, Any] = {"length": length}
        if several_ways:
            line["read"] = way.read
        for metric in metrics:
            error = plus_minus(error_of_mean(seeds, metric))
            line[metric.replace("_", " ")] = f"{mean_of(seeds, metric):.4f}{error}"
        if any("failed" in row for row in rows):
            line |= _solving_cells(seeds)
        count = distinct_samples(seeds)
        line["distinct samples"] = UNKNOWN if count is None else f"{count:,}"
        line["in training"] = in_training(seeds)
        lines.append(line)
    if len(lines) == 1 and len(metrics) > 4:  # CatbAbI has a metric for each bAbI task
        lines = [{"metric": name, "value": value} for name, value in lines[0].items()]
    notes = [ELSEWHERE_NOTE] if any(elsewhere_of_layers(rows)) else []
    return table(lines, title, "\n".join([solved_by(rows), *failure_notes(rows), *notes]))


def _solving_cells(rows: list[dict]) -> dict[str, str]:
    """Return ℓ* and evaluations a token of each layer, and the share of tokens that were not solved
    in the worst of them, of rows of one length."""

    def mean_of_layers(of_rows: list[list[float] | None]) -> str:
        known = [layers for layers in of_rows if layers is not None]
        return " ".join(f"{mean:.1f}" for mean in np.mean(known, 0)) if known else UNKNOWN

    share = failed_share(rows)
    marks = [ELSEWHERE * elsewhere for elsewhere in elsewhere_of_layers(rows)]
    iterations = mean_of_layers([iterations_of_layers(row) for row in rows]).split(" ")
    pairs = itertools.zip_longest(iterations, marks, fillvalue="")
    return {
        "ℓ* per layer": " ".join(count + mark for count, mark in pairs),
        "evaluations": mean_of_layers([row.get("evaluations") for row in rows]),
        "failed": UNKNOWN if share is None else f"{share:.2%}",
    }


def verdict(result: dict) -> str:
    """The pass/fail lines of a recipe; '' for a config without bars."""
    lines = []
    for bar in result["bars"]:
        at = f" at length {bar['length']}" if bar["length"] else ""
        value = "not measured" if bar["value"] is None else f"{bar['value']:.4f}"
        word = "PASS" if bar["passed"] else "FAIL"
        lines.append(f"{word}  {bar['metric']}{at}: {value} (bar {bar['least']:g})")
    return "\n".join(lines)
