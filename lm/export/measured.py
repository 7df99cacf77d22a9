"""Scores of `fprnn eval` in the model card of an export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lm.common.files import read_mapping, write_text
from lm.runs.written import CARD

# Between these lines of a card `add_measured` writes.
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
NOTHING_MEASURED = "Nothing yet: `fprnn eval` writes its scores here."


def known(describe: Callable[[dict], list[str]], results: dict) -> list[str]:
    """What is to be said of a file's content; nothing where it is not what we write."""
    try:
        return describe(results)
    except (LookupError, TypeError, AttributeError, ValueError):
        return []


def add_measured(folder: Path | str) -> None:
    """Write the scores in an export's eval/results.json into its card, if the card has the marks.

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
    lines = known(_evaluations, results) if results else []
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
