"""What a comparison will take, before it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm.common.errors import ConfigError
from lm.report.compare.results import tuning
from lm.report.compare.settings import Comparison
from lm.report.plan import plan, where

if TYPE_CHECKING:
    from rich.table import Table


def expected(c: Comparison, gpus: int, gpu: str | None, utilisation: float | None) -> list[dict]:
    """Of each model how many trainings, the hours of one at equal tokens, and the GPU hours of all.
    At another budget a training takes, by definition, what the reference takes.

    Raises:
        ConfigError: no such card, or one whose peak is not known (a CPU).
    """
    planned = {}
    for model in c.models:
        cfg = tuning(c, model)[0].cfg
        planned[model] = plan(cfg, where(cfg, gpus, gpu, utilisation=utilisation))
        if planned[model]["hours"] is None:
            raise ConfigError(
                "how long this takes on a CPU is not known ahead: name a card (--gpu a100-80g)"
            )
    rows = []
    for model, of in planned.items():
        at_tokens = len(tuning(c, model)) + len(c.seeds) - 1
        budgets = 0 if model == c.reference else len(c.equal) - 1
        hours = of["hours"] * at_tokens
        hours += planned[c.reference]["hours"] * budgets * len(c.seeds)
        rows.append(
            {
                "model": model,
                "parameters": of["parameters"],
                "trainings": at_tokens + budgets * len(c.seeds),
                "hours_each": of["hours"],
                "gpu_hours": hours * gpus,
            }
        )
    return rows


def describe(c: Comparison, rows: list[dict], gpus: int, price: float | None) -> Table:
    """The table of `fprnn compare --plan`. price: of a GPU for an hour, in any currency."""
    from rich.table import Table

    total = sum(row["gpu_hours"] for row in rows)
    hours = f"{sum(row['trainings'] for row in rows)} trainings, {total:,.0f} GPU hours"
    hours += f", {total / gpus:,.0f} hours one after the other on {gpus}"
    if price is not None:
        hours += f"; at {price:g} a GPU hour {total * price:,.0f}"
    title = f"Plan of comparison {c.name}"
    table = Table(title=title, title_justify="left", caption=hours, caption_justify="left")
    for name in ("model", "parameters", "trainings", "hours each, at equal tokens", "GPU hours"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for row in rows:
        table.add_row(
            row["model"],
            f"{row['parameters']:,}",
            str(row["trainings"]),
            f"{row['hours_each']:.2f}",
            f"{row['gpu_hours']:,.1f}",
        )
    return table
