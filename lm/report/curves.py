"""Figures of the report, drawn from the records of its runs."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lm.report.blocks import Block, Curve, Figure, Notes, format_value
from lm.report.read import Files


class Spec(NamedTuple):
    """A figure of what the records hold under nested keys.

    Attributes:
        name: File name, one of `lm.runs.written.FIGURES`.
        title: Heading.
        unit: Unit of the values.
        keys: Nested keys of the records.
        per: Curves: one for each `run`, or for each `layer` or `name` of a run in its own panel.
        leaf: Nested keys below a name.
        is_log: Whether the y axis may be logarithmic.
        is_stacked: Whether the curves are parts of a whole.
        scale: Divisor of the values.
    """

    name: str
    title: str
    unit: str
    keys: tuple[str, ...]
    per: str = "run"
    leaf: tuple[str, ...] = ()
    is_log: bool = False
    is_stacked: bool = False
    scale: float = 1.0


SHARE = "share of the tokens"
SPECS = {
    "Loss": [
        Spec("bits_per_byte", "Bits per byte", "bits", ("validation", "bits_per_byte")),
        Spec(
            "sources",
            "Validation loss of each source",
            "nats per token",
            ("validation", "sources"),
            "name",
            leaf=("loss",),
        ),
        Spec("epochs", "Epochs of each source", "epochs", ("data_epochs",), "name"),
        Spec("shares", "Share of each source", "of the sequences", ("data_share",), "name"),
    ],
    "Fixed point": [
        Spec(
            "iterations",
            "ℓ* of each layer",
            "ℓ* in iterations",
            ("probe", "num_iters", "mean"),
            "layer",
        ),
        Spec("evaluations", "Evaluations a token", "evaluations", ("evaluations",), "layer"),
        Spec("failed", "Tokens whose solve failed", SHARE, ("failed",), "layer"),
        Spec("bisected", "Tokens that were bisected", SHARE, ("bisected",), "layer"),
        Spec("limited", "Tokens whose gradient may be limited", SHARE, ("limited",), "layer"),
        Spec("residual", "Residual", "largest of a token", ("residual",), "layer", is_log=True),
        Spec("adjoint", "Adjoint", "norm over incoming norm", ("adjoint",), "layer", is_log=True),
    ],
    "Optimization": [
        Spec("lr", "Learning rate", "learning rate", ("lr",)),
        Spec("grad_norm", "Gradient norm", "before clipping", ("grad_norm",), is_log=True),
    ],
    "Speed and memory": [
        Spec("tokens_per_s", "Throughput", "tokens per second", ("tokens_per_s",)),
        Spec("mfu", "MFU", "share of the peak", ("mfu",)),
        Spec("imbalance", "Waiting for the slowest rank", "share of the time", ("imbalance",)),
        Spec("breakdown", "Time of an update", "seconds", ("breakdown",), "name", is_stacked=True),
        Spec("memory", "Memory", "GiB, max over ranks", ("peak_memory_bytes",), scale=2.0**30),
    ],
}


def number(value: object) -> float | int | None:
    """Return a finite number as it is, and None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) <= sys.float_info.max else None


def nested(record: object, *keys: str) -> Any:
    """Return the value under nested keys of a record, or None."""
    for key in keys:
        record = record.get(key) if isinstance(record, dict) else None
    return record


def having(files: Files, *keys: str) -> list[dict]:
    """Return the records of a run that have a value under nested keys."""
    return [record for record in files.records if nested(record, *keys) is not None]


def column(files: Files, *keys: str) -> pd.Series:
    """Return the numbers under nested keys by update, NaN for a value that is no finite number."""
    records = having(files, *keys)
    values = [number(nested(record, *keys)) for record in records]
    steps = pd.Index([record["step"] for record in records], name="update")
    return pd.Series(values, steps, dtype=float)


def last(files: Files, *keys: str) -> float | None:
    """Return the last finite number under nested keys, or None."""
    values = column(files, *keys).dropna()
    return None if values.empty else float(values.iloc[-1])


def layer_columns(files: Files, *keys: str) -> dict[str, pd.Series]:
    """Return the numbers of each layer by update.

    The records of a hybrid name their layers under `layers`; others count them from 0. A record
    without one number for each layer is left out.
    """
    rows = {}
    for record in having(files, *keys):
        values = nested(record, *keys)
        layers = (record["probe"] if keys[0] == "probe" else record).get("layers")
        if layers is None and isinstance(values, list):
            layers = list(range(len(values)))
        if isinstance(values, list) and isinstance(layers, list) and len(values) == len(layers):
            rows[record["step"]] = dict(zip(map(str, layers), map(number, values)))
    frame = pd.DataFrame.from_dict(rows, orient="index", dtype=float).rename_axis("update")
    names = sorted((name for name in frame if name.isdigit()), key=int)
    return {f"layer {name}": frame[name] for name in names}


def name_columns(files: Files, keys: Sequence[str], leaf: Sequence[str]) -> dict[str, pd.Series]:
    """Return the numbers of each name of a mapping by update, without names of only zeros."""
    found = [nested(record, *keys) for record in having(files, *keys)]
    names = dict.fromkeys(name for value in found if isinstance(value, dict) for name in value)
    columns = {name: column(files, *keys, name, *leaf) for name in names}
    return {name: values for name, values in columns.items() if values.fillna(0).any()}


def by_tokens(runs: Sequence[Files], files: Files, values: pd.Series) -> pd.Series:
    """Return a series over training tokens if several runs are compared, else as it is.

    The tokens of a record between two training records are interpolated.
    """
    if len(runs) == 1 or any(last(other, "tokens") is None for other in runs):
        return values
    tokens = column(files, "tokens").dropna()
    places = np.interp(values.index, [0, *tokens.index], [0, *tokens], right=math.nan)
    series = pd.Series(values.to_numpy(), pd.Index(places, name="training tokens"))
    return series[series.index.notna()]


def loss_curves(runs: Sequence[Files]) -> dict[str, list[Curve]]:
    """Return the training losses with their running means, and the validation losses."""
    training, validation = [], []
    for i, files in enumerate(runs):
        losses = by_tokens(runs, files, column(files, "loss"))
        span = len(losses) // 20
        name = files.label if len(runs) > 1 else "training"
        if span > 1:
            training.append(Curve(f"{name}, each record", losses, i, "faint"))
            losses = losses.rolling(span, min_periods=1).mean()
            name = f"{name}, mean of {span}"
        training.append(Curve(name, losses, i))
        name = files.label if len(runs) > 1 else "validation"
        losses = by_tokens(runs, files, column(files, "validation", "loss"))
        validation.append(Curve(name, losses, i, "points"))
    return {"training": training, "validation": validation}


def baselines(files: Files) -> dict[str, float]:
    """Return the losses of the n-gram models in nats per token, by name."""
    found = [record["baselines"] for record in having(files, "baselines")]
    perplexities = found[-1] if found and isinstance(found[-1], dict) else {}
    return {name: math.log(p) for name, p in perplexities.items() if (number(p) or 0) > 0}


def loss_figure(runs: Sequence[Files]) -> list[Block]:
    """Return the figure of training and validation losses."""
    levels = [baselines(files) for files in runs]
    shared = levels[0] if all(losses == levels[0] for losses in levels) else {}
    source = "metrics.jsonl: `loss`, `validation.loss`"
    panels = loss_curves(runs)
    blocks = finish(Figure("loss", "Loss", "nats per token", source, panels, shared), 0)
    return blocks or [Notes(["No training step is recorded yet."])]


def figures(runs: Sequence[Files], section: str) -> list[Block]:
    """Return the figures of a section; those without records are left out."""
    blocks: list[Block] = []
    for spec in SPECS[section]:
        panels: dict[str, list[Curve]] = {}
        damaged = 0
        for i, files in enumerate(runs):
            if spec.per == "run":
                values = column(files, *spec.keys) / spec.scale
                if section == "Loss":
                    values = by_tokens(runs, files, values)
                panels.setdefault("", []).append(Curve(files.label, values, i))
                continue
            if spec.per == "layer":
                columns = layer_columns(files, *spec.keys)
                points = max(map(len, columns.values()), default=0)
                damaged += len(having(files, *spec.keys)) - points
            else:
                columns = name_columns(files, spec.keys, spec.leaf)
            curves = [Curve(name, values, n) for n, (name, values) in enumerate(columns.items())]
            panels[files.label if len(runs) > 1 else ""] = curves
        source = f"metrics.jsonl: `{'.'.join(spec.keys)}`"
        figure = Figure(spec.name, spec.title, spec.unit, source, panels)
        figure = replace(figure, is_log=spec.is_log, is_stacked=spec.is_stacked)
        blocks += finish(figure, damaged)
    return blocks


def finish(figure: Figure, damaged: int) -> list[Block]:
    """Return a figure without empty curves; a sentence if all its values are the same.

    Args:
        figure: The figure.
        damaged: Number of records that are left out.
    """
    panels = {
        title: [curve for curve in curves if len(curve.values)]
        for title, curves in figure.panels.items()
    }
    panels = {title: curves for title, curves in panels.items() if curves}
    if not panels:
        return []
    values = pd.concat([curve.values for curves in panels.values() for curve in curves])
    source = figure.source
    if wrong := int(values.isna().sum()):
        source += f"; {wrong} values are no finite numbers and are left out"
    if damaged:
        source += f"; {damaged} damaged records are left out"
    if values.nunique() > 1 or figure.levels:
        return [replace(figure, panels=panels, source=source)]
    value = format_value(float(values.iloc[0]))
    return [Notes([f"{figure.title} ({figure.unit}): {value} throughout. From {source}."])]
