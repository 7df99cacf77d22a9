"""Columns of a run's records: numbers by update, by tokens, by layer."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

Records = Sequence[dict]


class Layers(NamedTuple):
    """A number for each layer at each update.

    Args:
        numbers: of the layers in their model, ascending.
        values: a row for each layer, a number for each update; None where a record has none.
        left_out: how many records hold something else than one number a layer.
    """

    steps: list[int]
    numbers: list[int]
    values: list[list[float | None]]
    left_out: int


def number(value: object) -> float | int | None:
    """A finite number as it is; None of anything else, also of a whole number beyond any float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) <= sys.float_info.max else None


def within(record: dict, *keys: str) -> Any:
    """What lies under nested keys of a record; None where nothing does."""
    for key in keys:
        if not isinstance(record, dict) or key not in record:
            return None
        record = record[key]
    return record


def having(records: Records, *keys: str) -> list[dict]:
    """The records with something under nested keys."""
    return [record for record in records if within(record, *keys) is not None]


def column(records: Records, *keys: str) -> tuple[list[int], list[float | None]]:
    """(updates, numbers) of the records with these keys; a number is None where a record holds
    something that is no finite number."""
    found = having(records, *keys)
    return [r["step"] for r in found], [number(within(r, *keys)) for r in found]


def last(records: Records, *keys: str) -> float | int | None:
    """The last finite number under nested keys."""
    _, values = column(records, *keys)
    return next((value for value in reversed(values) if value is not None), None)


def running_mean(values: list[float | None], span: int) -> list[float | None]:
    """The mean of each number and of up to `span` before it; of None nothing is known."""
    sums = [0.0, *accumulate(0.0 if value is None else value for value in values)]
    counts = [0, *accumulate(value is not None for value in values)]
    means: list[float | None] = []
    for i, value in enumerate(values):
        first = max(0, i - span)
        count = counts[i + 1] - counts[first]
        means.append(None if value is None else (sums[i + 1] - sums[first]) / count)
    return means


def smoothing_span(count: int) -> int:
    """Over how many records before it a mean of so many is taken."""
    return max(1, count // 20)


def tokens_at(records: Records, steps: Sequence[int]) -> list[float | None]:
    """Tokens seen until each update: of the training record of that update, between two records in
    proportion; None after the last one."""
    known: dict[int, float] = {0: 0}
    for record in having(records, "loss"):
        tokens = number(record.get("tokens"))
        if tokens is not None:
            known[record["step"]] = tokens
    at = sorted(known)
    return [_between(known, at, step) for step in steps]


def _between(known: dict[int, float], at: list[int], step: int) -> float | None:
    if step in known:
        return known[step]
    after = bisect_left(at, step)
    if after == len(at):
        return None
    first, second = at[after - 1], at[after]
    share = (step - first) / (second - first)
    return known[first] + share * (known[second] - known[first])


def layers(records: Records, *keys: str) -> Layers:
    """A list with one number a layer, by update. The numbers of the layers stand under `layers`
    beside the solver's other figures (of a hybrid); without it they count from 0.

    Records whose list is no list of numbers, or is of another length, are left out.
    """
    recorded = having(records, *keys)
    found = [(r["step"], of) for r in recorded if (of := _of_layers(r, keys))]
    numbers = sorted({layer for _, of in found for layer in of})
    values = [[of.get(layer) for _, of in found] for layer in numbers]
    return Layers([step for step, _ in found], numbers, values, len(recorded) - len(found))


def _of_layers(record: dict, keys: tuple[str, ...]) -> dict[int, float | None] | None:
    values = within(record, *keys)
    if not isinstance(values, list) or not values:
        return None
    beside = record["probe"] if keys[0] == "probe" else record
    numbers = beside.get("layers", list(range(len(values))))
    whole = isinstance(numbers, list) and len(numbers) == len(values)
    if not whole or not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        return None
    return {layer: number(value) for layer, value in zip(numbers, values, strict=True)}


def over_layers(of: Layers, join: Callable[[list[float]], float]) -> list[float | None]:
    """One number for each update out of those of its layers: their mean, say, or their most."""
    joined = []
    for values in zip(*of.values, strict=True):
        known = [value for value in values if value is not None]
        joined.append(join(known) if known else None)
    return joined
