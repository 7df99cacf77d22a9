"""Models of one size against each other: tuned alike, at equal tokens, FLOPs and processor time."""

from __future__ import annotations

from pathlib import Path

import torch

from lm.common.console import say
from lm.common.errors import ConfigError, require
from lm.report.compare import page, results, runs, settings


def compare(
    path: str | Path,
    overrides: list[str] | tuple[str, ...] = (),
    jobs: int = 1,
    gpus: int | None = None,
    report: bool = False,
) -> dict[str, Path]:
    """Train what is left of a comparison, and write its tables, curves and page.

    Args:
        jobs: trainings at once. gpus: of each, under DeepSpeed's launcher; None: one process each.
        report: train nothing, and write what is there.
    Returns:
        what was written, by name.
    Raises:
        ConfigError: bad YAML, or models that are not of one size. TrainingError: a training failed
            (one that only diverges is a result). Stopped: by a signal; the same call continues.
    """
    require("matplotlib", "fprnn compare")
    c = settings.load(path, overrides)
    on_gpu = gpus or torch.cuda.is_available()
    if "processor" in c.equal and on_gpu and not report:
        raise ConfigError("equal: processor is time of a CPU: on GPUs take `time`, or `flops`")
    costs = {model: results.cost(c, model) for model in c.models}
    results.check_parameters(c, costs)
    if not report:
        train(c, costs, jobs, gpus)
    found = results.collect(c, costs)
    return page.write(found, Path(c.out_dir) / c.name)


def train(
    c: settings.Comparison, costs: dict[str, results.Cost], jobs: int, gpus: int | None
) -> None:
    """The trainings in their order: the grids; all seeds at what was best; the other budgets."""
    grids = [one for model in c.models for one in results.tuning(c, model)]
    say(f"tuning   {len(c.models)} models, {len(grids)} trainings")
    runs.run_all(grids, jobs, gpus)
    models = [model for model in c.models if _learns(c, model)]
    seeds = [one for model in models for one in results.seeded(c, model)]
    say(f"seeds    {len(seeds)} trainings, {len(models)} of them from the grids")
    runs.run_all(seeds, jobs, gpus)
    for budget in c.equal:
        if budget == "tokens":
            continue
        for model in models:
            say(f"budget   {model} at equal {budget}")
            runs.run_all(results.at_budget(c, model, budget, costs), jobs, gpus)


def _learns(c: settings.Comparison, model: str) -> bool:
    """Whether some point of a model's grid gave a result; without the reference's there is no
    comparison."""
    try:
        results.best_point(c, model)
    except results.AllDiverged as e:
        if model == c.reference:
            raise
        say(f"note: {e}")
        return False
    return True
