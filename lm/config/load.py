"""Loading of configurations: a YAML file, dotted overrides and sweeps, validated as `Config`."""

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
from lm.config.schema import INVISIBLE_CHARACTERS, Config, Run, check_state_noise, check_updates
from lm.config.yaml_text import load_tree, parse

MAX_POINTS = 10_000  # of a sweep
SWEEP_WIDE_KEYS = {"name", "out_dir", "sweep"}  # keys that all points of a sweep share
# A text in place of a section sets this key of it: `model: mamba` is `model: {name: mamba}`.
SHORTHAND_KEYS = {"model": "name", "init_from": "path"}
# Functions below take the class of the configuration as `schema`: Config, or the configuration of
# synthetic runs (synthetic/config.py).
AnyRun = TypeVar("AnyRun", bound=Run, default=Config)


def set_key(tree: dict, dotted: str, value: Any) -> None:
    """Put a value under a dotted key of a nested mapping."""
    if dotted in SHORTHAND_KEYS and isinstance(value, str):  # keep the other keys of the section
        dotted = f"{dotted}.{SHORTHAND_KEYS[dotted]}"
    *parents, last = current_key(dotted).split(".")
    section = tree
    for key in parents:
        if isinstance(section.get(key), str) and key in SHORTHAND_KEYS:
            section[key] = {SHORTHAND_KEYS[key]: section[key]}
        if section.get(key) is None:
            section[key] = {}
        section = section[key]
        if not isinstance(section, dict):
            raise ConfigError(f"override `{dotted}`: `{key}` is a value, not a section")
    section[last] = value


def get_key(tree: dict, dotted: str) -> Any:
    """Return the value under a dotted key of a nested mapping, or None."""
    value: Any = tree
    for key in current_key(dotted).split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


class Variant(dict[str, Any]):
    """Named group of dotted keys that a sweep sets together."""

    def __init__(self, name: str, keys: dict[str, Any]):
        super().__init__(keys)
        self.name = name


def set_point(tree: dict, point: dict[str, Any]) -> None:
    """Put the values of a sweep point into a tree.

    A mapping sets keys of its section and leaves the others. A variant sets its dotted keys.
    """
    for key, value in copy.deepcopy(point).items():  # later values must not change the point
        if isinstance(value, Variant):
            set_point(tree, value)
        # The keys of optim.lr_factors are patterns that contain dots, not dotted keys.
        elif isinstance(value, dict) and key != "optim.lr_factors":
            for name, section_value in value.items():
                set_key(tree, f"{key}.{name}", section_value)
        else:
            set_key(tree, key, value)


def set_overrides(tree: dict, overrides: Iterable[str], schema: type[Run] = Config) -> None:
    """Put `key=value` overrides into a tree, each parsed by `parse_override`."""
    for text in overrides:
        set_key(tree, *parse_override(text, schema))


def parse_override(text: str, schema: type[Run] = Config) -> tuple[str, Any]:
    """Parse an override: `optim.lr=1e-3` → ("optim.lr", 0.001). The value is YAML.

    Raises:
        ConfigError: If the text is not key=value, the key is unknown or removed, or the value is
            not valid YAML.
    """
    written_key, equals_sign, value = text.partition("=")
    if not equals_sign or not written_key:
        raise ConfigError(f"override `{text}` must have the form key=value, such as optim.lr=1e-3")
    key = current_key(written_key)
    if key != written_key and key not in REMOVED:
        note_renamed(written_key, key)
    if key in REMOVED:
        raise ConfigError(f"override `{text}`: the key `{key}` was removed: {replacement(key)}")
    if not is_key(key, schema) and not key.startswith("engine.deepspeed."):
        raise ConfigError(f"unknown key `{key}`{nearest(key, schema)}")
    return key, parse(value, f"override `{text}`: the value")


def build(
    tree: dict,
    origin: str = "config",
    schema: type[AnyRun] = Config,  # type: ignore[assignment]
    trained: bool = False,
) -> AnyRun:
    """Build a configuration from a tree, and validate it.

    Args:
        tree: The YAML as a mapping.
        origin: File of the YAML, for messages.
        schema: Class of the configuration.
        trained: As in `drop_removed`.

    Raises:
        ConfigError: If keys are unknown, mistyped or out of range. The message names all of them.
    """
    tree = drop_removed(rename_keys(tree, origin), origin, trained)
    try:
        return schema.model_validate(tree)
    except ValidationError as e:
        raise explain(e, tree, origin, schema) from None


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    job_index: int | None = None,
    schema: type[AnyRun] = Config,  # type: ignore[assignment]
) -> AnyRun:
    """Load a configuration: defaults, then the YAML, then the sweep point, then overrides.

    Args:
        path: The YAML file.
        overrides: Texts of the form key=value.
        job_index: Index of the sweep point; None if the run is no point of a sweep.
        schema: Class of the configuration.

    Raises:
        ConfigError: If the file, a key, a value or the index is invalid.
    """
    tree = load_tree(path)
    _refuse_other_schema(tree, str(path), schema)
    if job_index is None:
        set_overrides(tree, overrides, schema)
        return build(tree, str(path), schema)
    points = sweep_points(tree, str(path), schema)
    if not 0 <= job_index < len(points):
        raise ConfigError(
            f"{path}: --job-index {job_index} is outside the sweep: 0 to {len(points) - 1}"
        )
    return _build_point(tree, points[job_index], job_index, overrides, str(path), schema)


def load_sweep(
    path: str | Path,
    overrides: Sequence[str] = (),
    schema: type[AnyRun] = Config,  # type: ignore[assignment]
) -> tuple[list[dict[str, Any]], list[AnyRun]]:
    """Load all points of a sweep: the points, and the configuration of each as from `load`.

    Args:
        path: The YAML file.
        overrides: Texts of the form key=value, applied to every point.
        schema: Class of the configurations.

    Raises:
        ConfigError: If there is no sweep, or the file, a key or a value is invalid.
    """
    tree = load_tree(path)
    points = sweep_points(tree, str(path), schema)
    configs = [
        _build_point(tree, point, index, overrides, str(path), schema)
        for index, point in enumerate(points)
    ]
    return points, configs


def _build_point(
    tree: dict,
    point: dict[str, Any],
    index: int,
    overrides: Sequence[str],
    origin: str,
    schema: type[AnyRun],
) -> AnyRun:
    """Build the configuration of a sweep point, which has its own directory.

    Args:
        tree: The YAML as a mapping; it stays as it is.
        point: The point, one of `sweep_points`.
        index: Its index in the sweep.
        overrides: Texts of the form key=value.
        origin: File of the YAML, for messages.
        schema: Class of the configuration.
    """
    tree = copy.deepcopy(tree)
    tree["sweep"] = {}
    set_point(tree, point)
    axes = [key for key, value in point.items() if not isinstance(value, dict)]
    values = [get_key(tree, key) for key in axes]
    set_overrides(tree, overrides, schema)
    for key, value in zip(axes, values):
        if get_key(tree, key) != value:  # the point's name would contain a wrong value
            raise ConfigError(
                f"{origin}: an override changes `{key}`, which is an axis of the sweep: change the"
                " file, or pass sweep={} and the values of one run"
            )
    if tree["sweep"]:
        raise ConfigError(
            f"{origin}: an override sets `sweep`, but a run is a point of the file's own sweep:"
            " change the file, or pass sweep={} and the values of one run"
        )
    # Set after the overrides: with an override of `name`, each point still has its own directory.
    tree["name"] = point_name(tree.get("name", "run"), index, point)
    return build(tree, origin, schema)


def refuse_sweep(cfg: Run, origin: str | Path) -> None:
    """Raise a ConfigError if a config is a sweep, which stands for several runs."""
    if empty_keys := [key for key, values in cfg.sweep.items() if not values]:
        raise ConfigError(f"{origin}: sweep.{empty_keys[0]} must be a non-empty list")
    if cfg.sweep:
        last = math.prod(len(values) for values in cfg.sweep.values()) - 1
        raise ConfigError(
            f"{origin} is a sweep: choose a point with --job-index 0 to {last}; or pass"
            " sweep={} to use the config without its sweep"
        )


def _refuse_other_schema(tree: dict, origin: str, schema: type[Run]) -> None:
    """Raise ConfigError if a synthetic task is read as a language model, or the reverse."""
    if schema is Config and "task" in tree:
        raise ConfigError(
            f"{origin} configures a task of the validation suite, because it has a `task:` section:"
            f" train it with `fprnn synthetic train --config {origin}`, or all points of a sweep"
            f" with `fprnn synthetic report NAME --config {origin} --run`"
        )
    if schema is not Config and "data" in tree:
        raise ConfigError(
            f"{origin} configures a language model, because it has a `data:` section: train it with"
            f" `fprnn train --config {origin}`, or all points of a sweep with `fprnn sweep {origin}"
            " --run`"
        )


def sweep_points(
    tree: dict, origin: str = "config", schema: type[Run] = Config
) -> list[dict[str, Any]]:
    """Return the points of a sweep, each a mapping {dotted key: value}.

    The points are all combinations of the values in `sweep:`; the last key varies fastest. A dotted
    key has a list of values. Any other name has a mapping of variants, each with dotted keys that
    are set together: `size: {small: {model.d_model: 64}, large: {model.d_model: 256}}`.

    Args:
        tree: The YAML as a mapping.
        origin: File of the YAML, for messages.
        schema: Class of the configuration.

    Raises:
        ConfigError: If there is no sweep, it belongs to another schema, a list is empty, a key is
            unknown, or a point is invalid.
    """
    sweep = tree.get("sweep") or {}
    if not isinstance(sweep, dict) or not sweep:
        raise ConfigError(f"{origin} has no `sweep:` section (a mapping of dotted key to list)")
    _refuse_other_schema(tree, origin, schema)
    values_by_key = {
        str(key): _read_sweep_values(str(key), values, origin, schema)
        for key, values in sweep.items()
    }
    if (count := math.prod(map(len, values_by_key.values()))) > MAX_POINTS:
        raise ConfigError(
            f"{origin}: its sweep has {count:,} points; a sweep may have at most {MAX_POINTS:,}"
        )
    combinations = itertools.product(*values_by_key.values())
    points = [dict(zip(values_by_key, combination)) for combination in combinations]
    for point in points:  # find an invalid value now, not in task 37 of a job array
        candidate = copy.deepcopy(tree)
        set_point(candidate, point)
        cfg = build(candidate, origin, schema)
        check_updates(cfg)
        check_state_noise(cfg)
    return points


def _refuse_sweep_wide_key(key: str, sweep_key: str, origin: str) -> None:
    """Raise a ConfigError for a key that all points of a sweep share."""
    if key.partition(".")[0] in SWEEP_WIDE_KEYS:
        raise ConfigError(
            f"{origin}: {sweep_key} is a sweep over `{key}`, which all points share: leave it"
            " out; each point has its own directory below out_dir/name already"
        )


def _read_sweep_values(key: str, values: Any, origin: str, schema: type[Run]) -> list[Any]:
    """Return the values of a key in `sweep:`, or for any other name its variants."""
    _refuse_sweep_wide_key(key, f"sweep.{key}", origin)
    is_known_key = is_key(current_key(key), schema)
    if isinstance(values, dict) and values and not is_known_key:  # variants
        invalid = [name for name, keys in values.items() if not isinstance(keys, dict)]
        if invalid:
            raise ConfigError(
                f"{origin}: sweep.{key}.{invalid[0]} must be a mapping of dotted keys"
            )
        for name, keys in values.items():
            for dotted in keys:
                _refuse_sweep_wide_key(str(dotted), f"sweep.{key}.{name}", origin)
        return [Variant(str(name), keys) for name, keys in values.items()]
    if not is_known_key:
        raise ConfigError(f"{origin}: sweep over unknown key `{key}`{nearest(key, schema)}")
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{origin}: sweep.{key} must be a non-empty list")
    return values


def point_name(name: str, index: int, point: dict[str, Any]) -> str:
    """Return the directory name of a sweep point, such as `name/003-lr=0.001-mixer_rank=4`."""
    return f"{name}/{index:03d}-{point_label(point)}"


def point_label(point: dict[str, Any]) -> str:
    """Return a label such as `lr=0.001-mixer_rank=4`; a variant is labelled by its name."""
    parts = []
    for key, value in copy.deepcopy(point).items():  # later values must not change the point
        if isinstance(value, Variant):
            parts.append(value.name)
            continue
        text = "+".join(map(str, value.values())) if isinstance(value, dict) else value
        parts.append(f"{key.rpartition('.')[2]}={text}")
    return INVISIBLE_CHARACTERS.sub("_", "-".join(parts).replace("/", "_").replace(" ", ""))
