"""YAML → `Config`: unknown keys are errors, dotted overrides, sweeps."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from typing_extensions import TypeVar

from lm.common.errors import ConfigError
from lm.config.messages import explain, is_key, nearest
from lm.config.old_keys import (
    REMOVED,
    current_key,
    drop_removed,
    note_renamed,
    rename_keys,
    replacement,
)
from lm.config.schema import UNSEEN, Config, Run, check_updates
from lm.config.yaml_text import load_tree, parse

MOST_POINTS = 10_000  # of a sweep
OF_THE_WHOLE_SWEEP = {"name", "out_dir", "sweep"}
SHORT = {"model": "name", "init_from": "path"}  # sections that a text may stand for
# The functions below take the `schema` a YAML is read by: Config, or another tree of Sections
# (synthetic/config.py).
AnyRun = TypeVar("AnyRun", bound=Run, default=Config)


def set_key(tree: dict, dotted: str, value: Any) -> None:
    """Put a value under a dotted key of a nested mapping."""
    if dotted in SHORT and isinstance(value, str):  # the shorthand keeps what is beside it
        dotted = f"{dotted}.{SHORT[dotted]}"
    *parents, last = current_key(dotted).split(".")
    for key in parents:
        if isinstance(tree.get(key), str) and key in SHORT:
            tree[key] = {SHORT[key]: tree[key]}
        if tree.get(key) is None:
            tree[key] = {}
        tree = tree[key]
        if not isinstance(tree, dict):
            raise ConfigError(f"override `{dotted}`: `{key}` is a value, not a section")
    tree[last] = value


class Variant(dict[str, Any]):
    """Several dotted keys that a sweep sets together, under a name."""

    def __init__(self, name: str, keys: dict[str, Any]):
        super().__init__(keys)
        self.name = name


def set_point(tree: dict, point: dict[str, Any]) -> None:
    """Put a sweep point into a tree. A mapping goes over the section it names, key by key; a
    variant sets its own dotted keys."""
    for key, value in point.items():
        if isinstance(value, Variant):
            set_point(tree, value)
        # The keys of optim.lr_factors are patterns with dots, no keys of ours.
        elif isinstance(value, dict) and key != "optim.lr_factors":
            for below, v in value.items():
                set_key(tree, f"{key}.{below}", v)
        else:
            set_key(tree, key, value)


def set_overrides(tree: dict, overrides: Iterable[str], schema: type[Run] = Config) -> None:
    """Put `key=value` overrides into a tree.

    Raises:
        ConfigError: as `parse_override`.
    """
    for text in overrides:
        set_key(tree, *parse_override(text, schema))


def parse_override(text: str, schema: type[Run] = Config) -> tuple[str, Any]:
    """`optim.lr=1e-3` → ("optim.lr", 0.001); the value is YAML."""
    key, sep, value = text.partition("=")
    if not sep or not key:
        raise ConfigError(f"override `{text}` must read key=value, e.g. optim.lr=1e-3")
    if (new := current_key(key)) != key and new not in REMOVED:
        note_renamed(key, new)
    key = new
    if key in REMOVED:
        raise ConfigError(f"override `{text}`: the key `{key}` was removed: {replacement(key)}")
    if not is_key(key, schema) and not key.startswith("engine.deepspeed."):
        raise ConfigError(f"unknown key `{key}`{nearest(key, schema)}")
    return key, parse(value, f"override `{text}`: the value")


def build(
    tree: dict,
    where: str = "config",
    schema: type[AnyRun] = Config,  # type: ignore[assignment]
    trained: bool = False,
) -> AnyRun:
    """Return the configuration of a YAML.

    Args:
        tree: The YAML.
        where: Its place, for messages.
        schema: Class of the configuration.
        trained: As for `drop_removed`.

    Raises:
        ConfigError: If keys are unknown, mistyped or out of range; it names every one.
    """
    tree = drop_removed(rename_keys(tree, where), where, trained)
    try:
        return schema.model_validate(tree)
    except ValidationError as e:
        raise explain(e, tree, where, schema) from None


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    job_index: int | None = None,
    schema: type[AnyRun] = Config,  # type: ignore[assignment]
) -> AnyRun:
    """Defaults, then the YAML, then the sweep point `job_index`, then `key=value` overrides.

    Raises:
        ConfigError: bad file, key, value or index.
    """
    tree = load_tree(path)
    if job_index is not None:
        points = sweep_points(tree, str(path), schema)
        if not 0 <= job_index < len(points):
            raise ConfigError(
                f"{path}: --job-index {job_index} is outside the sweep: 0 to {len(points) - 1}"
            )
        set_point(tree, points[job_index])
    set_overrides(tree, overrides, schema)
    if job_index is not None:  # last, so that every point has its own directory under any name
        tree["name"] = point_name(tree.get("name", "run"), job_index, points[job_index])
        tree["sweep"] = {}  # of which it is one point
    return build(tree, str(path), schema)


def refuse_sweep(cfg: Run, where: str | Path) -> None:
    """Raises ConfigError for a config that stands for the many runs of a grid, not for one."""
    if empty := [key for key, values in cfg.sweep.items() if not values]:
        raise ConfigError(f"{where}: sweep.{empty[0]} must be a non-empty list")
    if cfg.sweep:
        last = math.prod(len(values) for values in cfg.sweep.values()) - 1
        raise ConfigError(
            f"{where} is a sweep: say which of its points to train, --job-index 0 to {last}; or"
            " sweep={} for the config without it"
        )


def sweep_points(
    tree: dict, where: str = "config", schema: type[Run] = Config
) -> list[dict[str, Any]]:
    """The grid of `sweep:` (the last key varies fastest), each point a {dotted key: value}.

    A dotted key has a list of values. Any other name (`models`) has named variants instead, each a
    mapping of dotted keys that are set together.

    Raises:
        ConfigError: no sweep, an empty list, or a key that does not exist.
    """
    sweep = tree.get("sweep") or {}
    if not isinstance(sweep, dict) or not sweep:
        raise ConfigError(f"{where} has no `sweep:` section (a mapping of dotted key to list)")
    sweep = {str(key): _axis(str(key), values, where, schema) for key, values in sweep.items()}
    if (count := math.prod(map(len, sweep.values()))) > MOST_POINTS:
        raise ConfigError(
            f"{where}: its sweep has {count:,} points: at most {MOST_POINTS:,} are trained as one"
            " sweep"
        )
    points = [dict(zip(sweep, combo)) for combo in itertools.product(*sweep.values())]
    for point in points:  # a bad value is found now, not by task 37 of the array
        candidate = copy.deepcopy(tree)
        set_point(candidate, point)
        check_updates(build(candidate, where, schema))
    return points


def _refuse_place(key: str, sweep_key: str, where: str) -> None:
    """Raise ConfigError for a key that says where a point lies, or what the points are."""
    if key.partition(".")[0] in OF_THE_WHOLE_SWEEP:
        raise ConfigError(
            f"{where}: {sweep_key} is a sweep over `{key}`, which all points share: each has its"
            " own directory below out_dir/name already"
        )


def _axis(key: str, values: Any, where: str, schema: type[Run]) -> list[Any]:
    """What a sweep goes over under one of its keys."""
    _refuse_place(key, f"sweep.{key}", where)
    if isinstance(values, dict) and values and not is_key(current_key(key), schema):
        unset = [name for name, keys in values.items() if not isinstance(keys, dict)]
        if unset:
            raise ConfigError(f"{where}: sweep.{key}.{unset[0]} must be a mapping of dotted keys")
        for name, keys in values.items():
            for dotted in keys:
                _refuse_place(str(dotted), f"sweep.{key}.{name}", where)
        return [Variant(str(name), keys) for name, keys in values.items()]
    if not is_key(current_key(key), schema):
        raise ConfigError(f"{where}: sweep over unknown key `{key}`{nearest(key, schema)}")
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{where}: sweep.{key} must be a non-empty list")
    return values


def point_name(name: str, index: int, point: dict[str, Any]) -> str:
    """Directory name of a sweep point: `name/003-lr=0.001-mixer_rank=4`."""
    return f"{name}/{index:03d}-{point_label(point)}"


def point_label(point: dict[str, Any]) -> str:
    """What a sweep point sets: `lr=0.001-mixer_rank=4`, of a variant its name."""
    parts = []
    for key, value in point.items():
        if isinstance(value, Variant):
            parts.append(value.name)
            continue
        text = "+".join(map(str, value.values())) if isinstance(value, dict) else value
        parts.append(f"{key.rpartition('.')[2]}={text}")
    return UNSEEN.sub("_", "-".join(parts).replace("/", "_").replace(" ", ""))
