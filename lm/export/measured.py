"""What `fprnn eval` and `fprnn agree` found of an export, in its model card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lm.common.files import read_mapping, write_text
from lm.runs.metrics import ELSEWHERE_NOTE, is_elsewhere, marked
from lm.runs.written import CARD

# Between these lines of a card `add_measured` writes.
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
NOTHING_MEASURED = "Nothing yet: `fprnn eval` and `fprnn agree` write here what they find."


def known(describe: Callable[[dict], list[str]], results: dict) -> list[str]:
    """What is to be said of a file's content; nothing where it is not what we write."""
    try:
        return describe(results)
    except (LookupError, TypeError, AttributeError, ValueError):
        return []


def add_measured(folder: Path | str) -> None:
    """Put what `fprnn eval` and `fprnn agree` have left in an export's eval/ into its card; a card
    that has no place for it stays as it is.

    Raises:
        OutputError: it cannot be written.
    """
    folder = Path(folder)
    path = folder / CARD
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        return
    results = read_mapping(folder / "eval" / "results.json") or {}
    agreement = read_mapping(folder / "eval" / "agree.json") or {}
    lines = known(_evaluations, results) if results else []
    lines += known(_agreement, agreement) if agreement else []
    said = "\n".join(lines).strip() or NOTHING_MEASURED
    write_text(path, f"{before}{BEGIN}\n{said}\n{END}{after}")


def _evaluations(results: dict) -> list[str]:
    limit = results["limit"]
    of = f", the first {limit} documents of each task" if limit else ""
    lines = [
        f"lm-eval {results['versions']['lm_eval']}, on {results['device']}{of}:",
        "",
        "| task | documents | metric | value | standard error |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, task in results["tasks"].items():
        for metric, of in task["metrics"].items():
            value, error = (
                "" if number is None else f"{number:.4f}" for number in (of["value"], of["stderr"])
            )
            count = "" if task["samples"] is None else task["samples"]
            lines.append(f"| {name} | {count} | {metric} | {value or 'not finite'} | {error} |")
    return lines


def _agreement(results: dict) -> list[str]:
    lines = [
        "",
        f"Agreement of schedules (`fprnn agree`) on {results['sequences']} sequences of"
        f" {results['length']} tokens, with the tight solution, which goes token by token"
        f" (perplexity {results['tight']['perplexity']:.3f}):",
        "",
        "| schedule | tolerance | same most likely token | largest difference of a logit"
        " | perplexity | evaluations a token | tokens not solved |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in results["schedules"].items():
        tolerance = "" if row["tol"] is None else f"{row['tol']:g}"
        lines.append(
            f"| {name} | {tolerance} | {row['top1']:.2%} | {row['difference']:.1e} |"
            f" {row['perplexity']:.3f} | {row['evaluations']:.1f} | {row['failed']:.2%} |"
        )
    counted = {"mean": results["num_iters"], "elsewhere": results.get("elsewhere")}
    lines += ["", f"ℓ\\* of the layers there: {', '.join(marked(counted))}."]
    return [*lines, f"{ELSEWHERE_NOTE}."] if any(is_elsewhere(counted)) else lines
