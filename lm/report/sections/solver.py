"""What the fixed point took: ℓ* per layer, evaluations, tokens that failed, residuals, adjoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lm.report.sections.blocks import Block, Notes, Section
from lm.report.sections.curves import joined, mean, per_layer
from lm.report.sections.overview import elsewhere_notes
from lm.report.sections.read import Files
from lm.report.sections.series import having


class Work(NamedTuple):
    """A figure of what solving cost or left."""

    title: str
    unit: str
    keys: tuple[str, ...]  # of the records
    join: Callable[[list], float]  # of the layers, where several runs stand together
    is_logarithmic: bool  # where the values span enough


WORK = [
    Work("Evaluations a token", "evaluations of the layer's map", ("evaluations",), mean, False),
    Work("Tokens whose solve failed", "share of the tokens", ("failed",), max, False),
    Work("Tokens that were bisected", "share of the tokens", ("bisected",), max, False),
    Work("Tokens whose gradient may be limited", "share of the tokens", ("limited",), max, False),
    Work("Residual", "largest of a token, mean over sequences", ("residual",), max, True),
    Work("Adjoint", "norm against what came in", ("adjoint",), max, True),
]
ITERATIONS = ("probe", "num_iters", "mean")


def solver(runs: Sequence[Files]) -> Section:
    """ℓ* of each layer over training, and what solving cost and left."""
    blocks = _without(runs)
    solved = [files for files in runs if _is_solved(files)]
    if not solved:
        return Section("Fixed point", blocks)
    if len(runs) > 1:
        blocks += joined(runs, "ℓ*, mean over layers", "iterations", ITERATIONS, mean)
    blocks += per_layer(runs, "ℓ* of each layer", "iterations", ITERATIONS)
    blocks += elsewhere_notes(solved)
    for title, unit, keys, join, logarithmic in WORK:
        if len(runs) > 1:
            how = "mean over layers" if join is mean else "the layer with the most"
            blocks += joined(runs, f"{title}, {how}", unit, keys, join, logarithmic=logarithmic)
        else:
            blocks += per_layer(runs, title, unit, keys, logarithmic=logarithmic)
    return Section("Fixed point", blocks)


def _is_solved(files: Files) -> bool:
    return any(having(files.records, key) for key in ("probe", "evaluations"))


def _without(runs: Sequence[Files]) -> list[Block]:
    """Why a run has no such figures."""
    lines = []
    for files in runs:
        if _is_solved(files):
            continue
        kind = files.config.get("model.name")
        if files.solves is False:
            pattern = files.config.get("model.layers")
            what = f"model.name {kind}" + (f", model.layers {pattern}" if pattern else "")
            lines.append(f"{files.label} has no solver ({what}), and so no ℓ* and no work of it.")
        else:
            lines.append(f"{files.label}: no record of a solver yet (`probe`, `evaluations`).")
    return [Notes(lines)] if lines else []
