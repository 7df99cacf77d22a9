"""How fast a run is, where the time of an update goes, and what memory and checkpoints take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lm.report.sections.blocks import (
    Block,
    Chart,
    Section,
    Stack,
    Table,
    byte_unit,
    in_bytes,
    shown,
)
from lm.report.sections.curves import per_run, traced_to, unknown, without
from lm.report.sections.read import Files
from lm.report.sections.series import having, number, within

PARTS = (
    "data",
    "forward",
    "solve",
    "backward",
    "optimizer",
    "other",
)  # as lm/runs/clock.py has them

NEEDS = ", which needs a GPU whose peak is known"


def speed(runs: Sequence[Files]) -> Section:
    """Throughput, MFU, waiting for other ranks, the parts of an update's time."""
    blocks = per_run(runs, "Throughput", "tokens per second", ("tokens_per_s",))
    blocks += per_run(runs, "MFU", "share of the peak", ("mfu",), needs=NEEDS)
    if any(having(files.records, "imbalance") for files in runs):
        title, unit = "Waiting for the slowest rank", "share of a rank's time"
        blocks += per_run(runs, title, unit, ("imbalance",))
    return Section("Speed", blocks + breakdown(runs))


def breakdown(runs: Sequence[Files]) -> list[Block]:
    """Of each run what its updates spend their time on."""
    stacks, drawn = [], []
    for i, files in enumerate(runs):
        steps, parts = parts_of(files.records)
        left_out = len(having(files.records, "breakdown")) - len(steps)
        if steps:
            of = f"{files.label}: " if len(runs) > 1 else ""
            traced = traced_to("breakdown") + unknown([], left_out)
            unit = "seconds an update"
            stacks.append(Stack(f"{of}Time of an update", unit, traced, steps, parts))
            drawn.append(i)
    return stacks + without(runs, drawn, "the parts of an update's time (`breakdown`)")


def parts_of(records: Sequence[dict]) -> tuple[list[int], dict[str, list[float]]]:
    """(updates, {part: seconds}) of the records with a breakdown; parts that are 0 throughout are
    left out, as are records in which a part is no finite number of seconds."""
    steps, rows = [], []
    for record in having(records, "breakdown"):
        of = record["breakdown"]
        whole = isinstance(of, dict) and all(number(v) is not None for v in of.values())
        if whole and of:
            steps.append(record["step"])
            rows.append(of)
    names = list(dict.fromkeys([*PARTS, *(name for of in rows for name in of)]))
    parts = {name: [of.get(name, 0.0) for of in rows] for name in names}
    return steps, {name: values for name, values in parts.items() if any(values)}


def memory(runs: Sequence[Files]) -> Section:
    """The most memory that a process held, and what checkpoints take."""
    blocks = per_run(runs, "Memory", "bytes", ("peak_memory_bytes",))
    blocks = [_in_one_unit(block) if isinstance(block, Chart) else block for block in blocks]
    return Section("Memory and checkpoints", blocks + checkpoints(runs))


def _in_one_unit(chart: Chart) -> Chart:
    """A chart of bytes in GiB, or what suits the largest of its values."""
    size, name = byte_unit(max((v for c in chart.curves for v in c.values if v), default=0))
    curves = [
        replace(curve, values=[None if v is None else v / size for v in curve.values])
        for curve in chart.curves
    ]
    return replace(chart, unit=f"{name}, most of any rank", curves=curves)


def checkpoints(runs: Sequence[Files]) -> list[Block]:
    """Of each run the saves: how many, what training waited for them, how large the last one is."""
    head = ["run", "saves", "last at update", "size of the last", "training waited s", "longest s"]
    rows, drawn = [], []
    for i, files in enumerate(runs):
        saves = [r["checkpoint"] for r in having(files.records, "checkpoint")]
        saves = [save for save in saves if isinstance(save, dict)]
        if not saves:
            continue
        waited = [v for save in saves if (v := number(save.get("blocked_s"))) is not None]
        took = [v for save in saves if (v := number(save.get("seconds"))) is not None]
        step, size = (number(within(saves[-1], key)) for key in ("step", "bytes"))
        times = map(shown, [sum(waited), max(took, default=None)])
        rows.append([files.label, shown(len(saves)), shown(step), in_bytes(size), *times])
        drawn.append(i)
    found: list[Block] = []
    if rows:
        found = [Table([head, *rows], "metrics.jsonl: `checkpoint`", "Checkpoints")]
    return found + without(runs, drawn, "checkpoints (`checkpoint`)")
