"""The YAML of a comparison: models, what each is tuned over, and the trainings that follow."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, NonNegativeInt, ValidationError

from lm.common.errors import ConfigError
from lm.config import load as config
from lm.config.messages import explain, is_key, nearest
from lm.config.model import OpenFraction, Section
from lm.config.schema import Config, check_warmup
from lm.config.yaml_text import load_tree, parse

# What all models are given the same of. processor: of a CPU. time: by the clock, as on GPUs.
Budget = Literal["tokens", "flops", "processor", "time"]
OWN = ("name", "out_dir", "seed", "sweep", "resume")  # what a comparison sets of its trainings


class Comparison(Section):
    """What is compared. Every model is tuned over the same grid with the first seed, at equal
    tokens, and trained with all seeds at what was best for it."""

    name: str = Field(min_length=1)
    out_dir: str = Field("runs/compare", min_length=1)
    config: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it): what all trainings share
    models: dict[str, dict[str, Any]] = Field(min_length=2)  # of each its dotted keys
    reference: str  # the model that the others are measured against, and their budgets come from
    parameters_within: OpenFraction = 0.05  # of the reference's
    tune: dict[str, list[Any]] = Field({"optim.lr": [4e-3, 8e-3, 1.6e-2]}, min_length=1)
    seeds: tuple[NonNegativeInt, ...] = Field((0, 1), min_length=1)
    # tokens: the same updates for all; else as many as the reference's total pays for, the learning
    # rate's schedule stretched to them.
    equal: Annotated[tuple[Budget, ...], Field(min_length=1)] = ("tokens", "processor")


class Training(NamedTuple):
    """One run of a comparison."""

    model: str
    budget: str  # a Budget
    point: tuple[tuple[str, Any], ...]  # of the grid, key and value
    seed: int
    cfg: Config

    @property
    def run_dir(self) -> Path:
        return Path(self.cfg.run_dir)


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Comparison:
    """The comparison of a YAML, with `key=value` overrides of its own keys; below `config` they
    are those of the trainings (`config.train.steps=100`).

    Raises:
        ConfigError: bad file, key or value.
    """
    path = Path(path)
    tree = load_tree(path)
    for text in overrides:
        key, sep, value = text.partition("=")
        if not sep or not key:
            raise ConfigError(f"override `{text}` must read key=value, e.g. seeds=[0]")
        _set(tree, key, parse(value, f"override `{text}`: the value"))
    try:
        found = Comparison.model_validate(tree)
    except ValidationError as e:
        raise explain(e, tree, str(path), Comparison) from None
    _check(found, str(path))
    return found


def _set(tree: dict, key: str, value: Any) -> None:
    section, dot, below = key.partition(".")
    if dot and tree.get(section) is None:
        tree[section] = {}
    if dot and section == "config":
        config.set_key(tree["config"], below, value)
    elif dot and section in ("tune", "models"):
        tree[section][below] = value
    elif dot:
        raise ConfigError(f"unknown key `{key}`: below a dot there are config, models and tune")
    else:
        tree[key] = value


def _check(c: Comparison, where: str) -> None:
    if c.reference not in c.models:
        raise ConfigError(
            f"{where}: reference is `{c.reference}`, models are {', '.join(c.models)}"
        )
    for names, what in ((c.seeds, "seeds"), (c.equal, "equal")):
        if len(set(names)) < len(names):
            raise ConfigError(f"{where}: {what} has the same one twice: {list(names)}")
    if "tokens" not in c.equal:
        raise ConfigError(f"{where}: equal must have tokens: the grid is tuned at equal tokens")
    for key, values in c.tune.items():
        if not values:
            raise ConfigError(f"{where}: tune.{key} must be a non-empty list")
    for name in c.models:
        if "/" in name or name.startswith("."):
            raise ConfigError(f"{where}: models: `{name}` names a folder: no `/`, no dot before it")
    _check_keys(c, where)
    made = [training(c, *of) for of in itertools.product(c.models, ["tokens"], points(c), c.seeds)]
    if len({one.run_dir for one in made}) < len(made):
        raise ConfigError(f"{where}: tune has the same value twice, as 0.004 and 4e-3 are")
    for one in made:
        _check_alike(one, made[0], c, where)


def _check_keys(c: Comparison, where: str) -> None:
    for key in OWN:
        if key in c.config:
            raise ConfigError(f"{where}: config.{key} is the comparison's own to set: leave it out")
    for key in c.tune:
        if not key.startswith("optim."):
            raise ConfigError(
                f"{where}: tune.{key}: the grid is of optim.*, which costs nothing; what costs is"
                " another of the models"
            )
    for name, model in c.models.items():
        for key in model:
            if key in OWN:
                raise ConfigError(f"{where}: models.{name}.{key} is the comparison's own to set")
            if key in c.tune or key == "optim":
                raise ConfigError(f"{where}: models.{name}.{key} would be overridden by tune")


def _check_alike(one: Training, first: Training, c: Comparison, where: str) -> None:
    """Refuse other tokens than the first training's, and a schedule that cannot be stretched."""
    if _text_of(one.cfg) != _text_of(first.cfg):
        raise ConfigError(
            f"{where}: models.{one.model} has other data, tokenizer, train.steps or tokens an"
            f" update than {first.model}: these belong below config, the same for all"
        )
    optim = one.cfg.optim
    if len(c.equal) > 1 and max(optim.warmup, optim.decay_of_wsd) >= 1:
        raise ConfigError(
            f"{where}: optim.warmup and optim.decay must be fractions of the updates, below 1:"
            " budgets change how many these are"
        )


def _text_of(cfg: Config) -> tuple:
    """What a training reads, and how much of it."""
    return cfg.data, cfg.tokenizer, cfg.train.steps, cfg.tokens_per_step()


def points(c: Comparison) -> list[tuple[tuple[str, Any], ...]]:
    """The grid; its last key varies fastest."""
    keyed = [[(key, value) for value in values] for key, values in c.tune.items()]
    return list(itertools.product(*keyed))


def training(
    c: Comparison,
    model: str,
    budget: str,
    point: Iterable[tuple[str, Any]],
    seed: int,
    steps: int | None = None,
) -> Training:
    """One run. Its directory says the model, the point, the seed, and the budget with its updates
    where that is not equal tokens.

    Args:
        steps: updates; None: what the config says.
    Raises:
        ConfigError: as `lm.config.load.build`; updates of different sizes.
    """
    tree = copy.deepcopy(c.config)
    where = f"comparison {c.name}, model {model}"
    for key, value in (*c.models[model].items(), *point):
        if not is_key(key, Config):
            raise ConfigError(f"{where}: unknown key `{key}`{nearest(key, Config)}")
        config.set_point(tree, {key: value})
    parts = [f"{key.rpartition('.')[2]}={value}" for key, value in point]
    if budget != "tokens":
        parts.append(f"equal-{budget}-{steps}")
    leaf = "-".join([*parts, f"seed={seed}"]).replace("/", "_").replace(" ", "")
    tree |= {
        "name": f"{c.name}/{model}/{leaf}",
        "out_dir": c.out_dir,
        "seed": seed,
        "resume": "auto",
    }
    if steps is not None:
        config.set_key(tree, "train.steps", steps)
    cfg = config.build(tree, where)
    check_warmup(cfg)
    return Training(model, budget, tuple(point), seed, cfg)


def updates_for(budget: float, cost_per_update: float) -> int:
    """How many updates a budget pays for, at least one. Both in the same unit.

    Raises:
        ConfigError: they are no positive numbers.
    """
    if not (math.isfinite(budget) and budget > 0 and math.isfinite(cost_per_update)):
        raise ConfigError(f"a budget of {budget:g} pays for no training")
    if cost_per_update <= 0:
        raise ConfigError(f"an update that costs {cost_per_update:g} was not measured")
    return max(1, round(budget / cost_per_update))
