"""Curves of several runs out of their records: one a run, and one a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lm.report.sections.blocks import LINES, Block, Chart, Curve, HeatMap, Notes
from lm.report.sections.read import Files
from lm.report.sections.series import Layers, column, layers, over_layers, tokens_at

BOTH = ("update", "tokens")


def curve(
    run: int, files: Files, keys: Sequence[str], label: str = "", style: str = "line"
) -> Curve:
    """What lies under nested keys of a run's records, over updates and tokens."""
    steps, values = column(files.records, *keys)
    return of_values(run, files, label or files.label, steps, values, style)


def of_values(
    run: int,
    files: Files,
    label: str,
    steps: list[int],
    values: list[float | None],
    style: str = "line",
) -> Curve:
    """A curve of numbers that are known."""
    return Curve(label, run, steps, values, tokens_at(files.records, steps), style)


def per_run(
    runs: Sequence[Files],
    title: str,
    unit: str,
    keys: Sequence[str],
    *,
    axes: tuple[str, ...] = ("update",),
    logarithmic: bool = False,
    needs: str = "",
) -> list[Block]:
    """One chart with a curve of each run that has such records; a note on those that have none.

    Args:
        keys: nested, of the records. needs: without what there is nothing to record, for the note.
    """
    drawn = [curve(i, files, keys) for i, files in enumerate(runs)]
    found = [of for of in drawn if of.steps]
    path = ".".join(keys)
    blocks: list[Block] = []
    if found:
        traced = traced_to(path, axes) + unknown(found)
        blocks.append(Chart(title, unit, traced, found, axes, logarithmic=logarithmic))
    return blocks + without(runs, [of.run for of in found], f"{title} (`{path}`){needs}")


def traced_to(keys: str, axes: Sequence[str] = ("update",), file: str = "metrics.jsonl") -> str:
    """Which keys a figure is drawn from."""
    over = " and ".join({"update": "`step`", "tokens": "`tokens`"}[axis] for axis in axes)
    return f"{file}: `{keys}` over {over}"


def unknown(drawn: Sequence[Curve], records: int = 0) -> str:
    """A sentence on what cannot be drawn: numbers that are not finite, and so many records that
    hold no numbers at all; "" where there is nothing to say."""
    count = sum(value is None for of in drawn for value in of.values)
    text = f"; {count} of the values are no finite numbers and are left out" if count else ""
    return text + (f"; {records} damaged record(s) left out" if records else "")


def without(runs: Sequence[Files], having: Sequence[int], what: str) -> list[Block]:
    """A note that names the runs of which nothing was recorded; of all of them, a short one."""
    missing = [files.label for i, files in enumerate(runs) if i not in having]
    if not missing:
        return []
    if len(missing) == len(runs):
        return [Notes([f"Not recorded: {what}."])]
    return [Notes([f"Not recorded in {', '.join(missing)}: {what}."])]


def per_layer(
    runs: Sequence[Files], title: str, unit: str, keys: Sequence[str], *, logarithmic: bool = False
) -> list[Block]:
    """Of each run a line for each of its layers, or a heat map of many."""
    path = ".".join(keys)
    blocks: list[Block] = []
    for files in runs:
        of = layers(files.records, *keys)
        if not of.steps:
            continue
        name = title if len(runs) == 1 else f"{files.label}: {title}"
        drawn = [
            Curve(f"layer {layer}", n, of.steps, values)
            for n, (layer, values) in enumerate(zip(of.numbers, of.values, strict=True))
        ]
        traced = traced_to(path) + unknown(drawn, of.left_out)
        if len(drawn) > LINES:
            blocks.append(HeatMap(name, unit, traced, of.steps, of.numbers, of.values))
        else:
            blocks.append(Chart(name, unit, traced, drawn, logarithmic=logarithmic))
    return blocks


def joined(
    runs: Sequence[Files],
    title: str,
    unit: str,
    keys: Sequence[str],
    join: Callable[[list], float],
    *,
    logarithmic: bool = False,
) -> list[Block]:
    """One chart with a curve of each run: its layers joined to one number, their mean or most."""
    drawn, left_out = [], 0
    for i, files in enumerate(runs):
        of: Layers = layers(files.records, *keys)
        left_out += of.left_out
        if of.steps:
            drawn.append(Curve(files.label, i, of.steps, over_layers(of, join)))
    if not drawn:
        return []
    traced = traced_to(".".join(keys)) + unknown(drawn, left_out)
    return [Chart(title, unit, traced, drawn, logarithmic=logarithmic)]


def mean(values: Sequence[float]) -> float:
    """Of at least one number."""
    return sum(values) / len(values)
