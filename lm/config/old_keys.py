"""Keys that have moved: the solver's have left `model:` for a section of their own, `solver:`.

The old ones are read with a note that names the new ones: in a YAML, in the config.yaml that a run
has saved, in overrides and in sweeps.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from lm.common.errors import ConfigError

MOVED = (
    "schedule",
    "stopping",
    "tol",
    "eval_tol",
    "max_iters",
    "eval_max_iters",
    "quantile",
    "stepsize",
    "stepsize_decay",
    "patience",
    "gradient",
    "n_backwards",
    "jacobian_reg",
)
AGREEMENT = "model.agreement_reg"  # gone: of an explicit recurrence all widths find one solution
NEW = {f"model.{name}": f"solver.{name}" for name in MOVED}

Pairs = Iterable[tuple[str, Any]]
_said: set[str] = set()


def is_old(key: str) -> bool:
    """Whether a dotted key was one before the solver had its section."""
    return key in NEW or key == AGREEMENT


def moved_tree(tree: dict, where: str) -> dict:
    """A whole YAML with its old keys under their new names; the tree given is left as it is.

    Raises:
        ConfigError: as `moved`.
    """
    if not isinstance(tree.get("solver") or {}, dict):
        return tree  # which the schema will refuse
    sections = [(key, tree[key]) for key in ("model", "solver") if key in tree]
    pairs = dict(moved(sections, where))
    fields = {key.partition(".")[2]: value for key, value in pairs.items() if "." in key}
    if "model" not in tree or pairs["model"] == tree["model"]:
        return tree
    if not fields:  # an agreement_reg of 0 alone
        return {**tree, "model": pairs["model"]}
    solver = {**(tree.get("solver") or {}), **fields}
    paper = solver.get("stopping") == "paper"  # which is of token: iterate
    if "token" not in solver and not paper and _limits_iterations(tree):
        solver = {"token": "iterate", "stopping": "causal", **solver}
    elif "token" not in solver and not paper and pairs["model"].get("name", "fprnn") == "fprnn":
        _note(where, "it was iterated, and is now solved with solver.token: exact, the default")
    # Beside the model, where the schema has it.
    now = {}
    for key, value in tree.items():
        if key != "solver":
            now[key] = pairs.get(key, value)
        if key == "model":
            now["solver"] = solver
    return now


def _limits_iterations(tree: dict) -> bool:
    """Whether a synthetic run has an ℓmax of its own, which has no meaning for an exact token."""
    sections = [tree.get(name) for name in ("train", "eval")]
    limits = [section.get("max_iters") for section in sections if isinstance(section, dict)]
    return any(limit not in (None, "config") for limit in limits)


def moved(pairs: Pairs, where: str) -> list[tuple[str, Any]]:
    """Keys and values that belong together (a file, the overrides of a command, a sweep point) with
    the old keys under their new names.

    Args:
        pairs: dotted keys and values; a value of `model` may be a mapping. where: what they are,
            for notes and errors.
    Raises:
        ConfigError: a key is given under both names, or an agreement_reg above 0.
    """
    pairs = list(_split(pairs))
    under: dict[str, str] = {}  # new name → the name it was given under
    for key in _names(pairs):
        if under.setdefault(NEW.get(key, key), key) != key:
            new = NEW.get(key, key)
            old = next(name for name, its in NEW.items() if its == new)
            raise ConfigError(
                f"{where}: `{old}` and `{new}` are one key under its old and its new name: keep"
                f" `{new}`"
            )
    now, renamed = [], []
    for key, value in pairs:
        if key == AGREEMENT:
            _refuse_agreement(value, where)
            continue
        if key in NEW:
            value, word = _value_now(key, value)
            renamed.append(f"{key} → {NEW[key]}{word}")
        now.append((NEW.get(key, key), value))
    if renamed:
        _note(where, f"the solver has a section of its own: {', '.join(renamed)}")
    return now


def _split(pairs: Pairs) -> Pairs:
    """The pairs, the old keys of a `model` that is a mapping each by itself after it."""
    for key, value in pairs:
        if key != "model" or not isinstance(value, dict):
            yield key, value
            continue
        old = {name: v for name, v in value.items() if is_old(f"model.{name}")}
        yield key, {name: v for name, v in value.items() if name not in old}
        yield from ((f"model.{name}", v) for name, v in old.items())


def _names(pairs: Pairs) -> Iterable[str]:
    """The dotted keys, also those in a `solver` that is a mapping."""
    for key, value in pairs:
        yield key
        if key == "solver" and isinstance(value, dict):
            yield from (f"solver.{name}" for name in value)


def _value_now(key: str, value: Any) -> tuple[Any, str]:
    """What an old value is called now, and a word on it where it is another."""
    if key == "model.schedule" and isinstance(value, str):
        new = "auto" if value == "mixed" or value.startswith("mixed:") else value
        new = "sequential" if value == "exact" else new
        if new != value:
            return new, f" ({value} → {new})"
    return value, ""


def _refuse_agreement(value: Any, where: str) -> None:
    if isinstance(value, bool) or value != 0:
        raise ConfigError(
            f"{where}: `{AGREEMENT}` is {value!r}, and there is no such penalty any more: with"
            " `solver.token: exact` all schedules find one solution; leave it out"
        )


def _note(where: str, text: str) -> None:
    """Say it once a process, on the first rank; where several files ask for it, of the first."""
    if text not in _said and os.environ.get("RANK", "0") == "0":
        _said.add(text)
        print(f"note: {where}: {text}", file=sys.stderr)
