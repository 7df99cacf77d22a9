"""What was found: the best of each grid, means over seeds, differences from the reference."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from lm.common.console import say
from lm.common.errors import ConfigError, TrainingError
from lm.report.compare.runs import Measured, has_diverged, label, measured
from lm.report.compare.settings import Comparison, Training, points, training, updates_for
from lm.report.cost import flops_of as flops_of_model
from lm.report.memory import on_the_meta_device, sizes
from lm.training.build import vocabulary


class AllDiverged(TrainingError):
    """A model without a result at any point of the grid."""


class Cost(NamedTuple):
    """What a model is, before it trains."""

    parameters: int
    without_embedding: int
    flops_per_token: float  # of training, at one evaluation of a layer's map a token
    flops_per_evaluation: float  # of a token, beyond the first one


def cost(c: Comparison, model: str) -> Cost:
    """Raises ConfigError where such a model cannot be built."""
    cfg = tuning(c, model)[0].cfg
    try:
        vocab_size = vocabulary(cfg)
        built = on_the_meta_device(cfg, vocab_size)
    except ConfigError as e:
        raise ConfigError(f"comparison {c.name}, model {model}: {e}") from None
    of = sizes(built, vocab_size, cfg.train.precision, cfg.optim)
    at_one = at_two = next(iter(flops_of_model(cfg, built, of).values()))
    if cfg.model.has_fixed_point:
        at_two = built.flops_per_token(2, length=cfg.data.seq_len)
    return Cost(of.parameters, of.parameters - of.embedding, at_one, at_two - at_one)


def flops_of(of: Cost, run: Measured, tokens: float) -> float:
    """FLOPs of training on so many tokens, at the evaluations that were measured."""
    return tokens * (of.flops_per_token + of.flops_per_evaluation * max(0.0, run.evaluations - 1))


def score(run: Measured) -> float:
    """What is compared, lower is better: bits per byte, nats a token where bytes are not known."""
    return run.loss if run.bits_per_byte is None else run.bits_per_byte


def tuning(c: Comparison, model: str) -> list[Training]:
    """A training for each point of the grid, with the first seed."""
    return [training(c, model, "tokens", point, c.seeds[0]) for point in points(c)]


def best_point(c: Comparison, model: str) -> tuple[tuple[str, Any], ...]:
    """The point of the grid with the lowest validation loss.

    Raises:
        AllDiverged: all of them. TrainingError: one is not trained yet.
    """
    reached = []
    for one in tuning(c, model):
        found = measured(one)
        if found is not None:
            reached.append((found.loss if math.isfinite(found.loss) else math.inf, one.point))
        elif not has_diverged(one):
            raise TrainingError(f"{label(one)} is not trained yet")
    if not reached:
        raise AllDiverged(f"{model}: every point of the grid diverged: lower values are needed")
    return min(reached, key=lambda found: found[0])[1]


def edges(c: Comparison, model: str) -> list[str]:
    """Keys whose best value is the least or most of those tried: beyond it may be a better one."""
    chosen = dict(best_point(c, model))
    return [
        key
        for key, values in c.tune.items()
        if len(values) > 1
        and all(isinstance(value, int | float) for value in values)
        and chosen[key] in (min(values), max(values))
    ]


def seeded(c: Comparison, model: str) -> list[Training]:
    """The trainings at equal tokens, at the model's best point, of all seeds."""
    point = best_point(c, model)
    return [training(c, model, "tokens", point, seed) for seed in c.seeds]


def at_budget(c: Comparison, model: str, budget: str, costs: dict[str, Cost]) -> list[Training]:
    """The trainings of all seeds that take what the reference's take at equal tokens, once those of
    `seeded` are done; the reference's own are those."""
    if budget == "tokens" or model == c.reference:
        return seeded(c, model)
    total = _mean_spent(c, c.reference, budget, costs)
    own = seeded(c, model)
    each = _mean_spent(c, model, budget, costs) / own[0].cfg.train.steps
    steps = updates_for(total, each)
    return [training(c, model, budget, one.point, one.seed, steps) for one in own]


def _mean_spent(c: Comparison, model: str, budget: str, costs: dict[str, Cost]) -> float:
    """FLOPs or seconds of a model's trainings at equal tokens."""
    runs = [found for one in seeded(c, model) if (found := measured(one)) is not None]
    if not runs:
        raise TrainingError(f"{model}: no training at equal tokens is left to measure it by")
    if budget == "flops":
        return statistics.mean(flops_of(costs[model], run, run.tokens) for run in runs)
    kind = {"processor": "processor_seconds", "time": "seconds"}[budget]
    return statistics.mean(getattr(run, kind) for run in runs)


def collect(c: Comparison, costs: dict[str, Cost]) -> dict:
    """Everything that is known so far, as it is written to compare.json.

    Raises:
        TrainingError: some validation texts have a known number of bytes, and some do not.
    """
    models = {model: _of_model(c, model, costs) for model in c.models}
    rows = [row for entry in models.values() for runs in entry["budgets"].values() for row in runs]
    units = {
        "nats per token" if row["bits_per_byte"] is None else "bits per byte"
        for row in rows
        if row["state"] == "done"
    }
    if len(units) > 1:
        raise TrainingError(
            f"comparison {c.name}: some models' scores are bits per byte, others' nats a token, for"
            " their validation text's bytes are not known: give all the same data and tokenizer"
        )
    return {
        "comparison": c.model_dump(mode="json"),
        "unit": units.pop() if units else "bits per byte",
        "models": models,
    }


def _of_model(c: Comparison, model: str, costs: dict[str, Cost]) -> dict:
    tuned = []
    for one in tuning(c, model):
        found = measured(one)
        state = "diverged" if has_diverged(one) else "not trained yet"
        loss = state if found is None else found.loss
        tuned.append({"point": dict(one.point), "validation_loss": loss})
    entry = {**costs[model]._asdict(), "tuned": tuned, "budgets": {}}
    try:
        entry["best"] = dict(best_point(c, model))
        entry["at_the_edge"] = edges(c, model)
    except TrainingError as e:
        say(f"note: {e}")
        return entry
    for budget in c.equal:
        try:
            trainings = at_budget(c, model, budget, costs)
        except TrainingError as e:
            say(f"note: {e}")
            continue
        entry["budgets"][budget] = [_row(one, costs[model]) for one in trainings]
    return entry


def _row(one: Training, of: Cost) -> dict:
    found = measured(one)
    if found is None:
        state = "diverged" if has_diverged(one) else "not trained yet"
        return {"seed": one.seed, "state": state}
    curve = [{**at, "flops": flops_of(of, found, at["tokens"])} for at in found.curve]
    return {
        "seed": one.seed,
        "state": "done",
        "run": one.cfg.name,
        "score": score(found),
        "flops": flops_of(of, found, found.tokens),
        **found._replace(curve=curve)._asdict(),
    }


def summary(found: dict, budget: str) -> list[dict]:
    """A row for each model: mean and standard deviation of the score over seeds, and of the
    difference from the reference with the same seed; n of them. None where there is nothing."""
    reference = found["comparison"]["reference"]
    base = _scores(found, reference, budget)
    rows = []
    for model, entry in found["models"].items():
        own = _scores(found, model, budget)
        done = [row for row in entry["budgets"].get(budget, []) if row["state"] == "done"]
        differences = [own[seed] - base[seed] for seed in own if seed in base]
        rows.append(
            {
                "model": model,
                "parameters": entry["parameters"],
                "best": entry.get("best"),
                "n": len(own),
                "pairs": len(differences),
                "diverged": sum(
                    row["state"] == "diverged" for row in entry["budgets"].get(budget, [])
                ),
                "mean": _mean(own.values()),
                "deviation": _deviation(own.values()),
                "difference": _mean(differences),
                "difference_deviation": _deviation(differences),
                "tokens": _mean(row["tokens"] for row in done),
                "flops": _mean(row["flops"] for row in done),
                "processor_seconds": _mean(row["processor_seconds"] for row in done),
                "seconds": _mean(row["seconds"] for row in done),
            }
        )
    return rows


def _scores(found: dict, model: str, budget: str) -> dict[int, float]:
    """By seed, of the trainings that are done."""
    rows = found["models"][model]["budgets"].get(budget, [])
    return {row["seed"]: row["score"] for row in rows if row["state"] == "done"}


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return statistics.mean(values) if values else None


def _deviation(values: Iterable[float]) -> float | None:
    """The standard deviation of one training, None of fewer than two."""
    values = list(values)
    return statistics.stdev(values) if len(values) > 1 else None


def check_parameters(c: Comparison, costs: dict[str, Cost]) -> None:
    """Raises ConfigError where a model is not of the reference's size."""
    of = costs[c.reference].parameters
    far = {
        model: one.parameters / of - 1
        for model, one in costs.items()
        if abs(one.parameters / of - 1) > c.parameters_within
    }
    if far:
        listed = ", ".join(
            f"{model} {costs[model].parameters:,} ({d:+.1%})" for model, d in far.items()
        )
        raise ConfigError(
            f"comparison {c.name}: parameters must be within {c.parameters_within:.0%} of"
            f" {c.reference}'s {of:,}: {listed}; change d_model, n_layer or expand, or"
            " parameters_within"
        )
