"""Error messages about configurations: the key, its value, and a valid one."""

from __future__ import annotations

import difflib
import re
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from lm.common.errors import ConfigError


def subsection(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section in a field, an optional field or a list; otherwise None."""
    types = (field.annotation, *get_args(field.annotation))
    return next((t for t in types if isinstance(t, type) and issubclass(t, BaseModel)), None)


def _mapped_section(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section of the values of a mapping or an optional mapping; otherwise None."""
    mappings = [k for k in (field.annotation, *get_args(field.annotation)) if get_origin(k) is dict]
    value = get_args(mappings[0])[1] if mappings else None
    return value if isinstance(value, type) and issubclass(value, BaseModel) else None


def all_keys(schema: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the dotted keys of a schema, including sections; `*` is any name in a mapping."""
    keys = []
    for name, field in schema.model_fields.items():
        keys.append(prefix + name)
        if section := subsection(field):
            keys += all_keys(section, f"{prefix}{name}.")
        if section := _mapped_section(field):
            keys += [f"{prefix}{name}.*", *all_keys(section, f"{prefix}{name}.*.")]
    return keys


def _keys_with_names(key: str, schema: type[BaseModel]) -> list[str]:
    """Return all keys of a schema, where the parts of a dotted key replace each `*`."""
    names = dict(enumerate(key.split(".")))
    paths = [known_key.split(".") for known_key in all_keys(schema)]
    return [".".join(names.get(i, "*") if n == "*" else n for i, n in enumerate(p)) for p in paths]


def is_key(key: str, schema: type[BaseModel]) -> bool:
    """Return whether a schema has a dotted key, also in the sections of a mapping."""
    return key in _keys_with_names(key, schema)


def nearest(key: str, schema: type[BaseModel]) -> str:
    """Return '; did you mean `x.y`?' for an unknown dotted key, or the list of its siblings."""
    keys = _keys_with_names(key, schema)
    parent, _, last = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == parent}
    outermost_last = sorted(keys, key=lambda k: k.count("."))[::-1]
    by_leaf = {k.rpartition(".")[2]: k for k in outermost_last}
    for candidates, cutoff in ((by_leaf, 1.0), (siblings, 0.6), (by_leaf, 0.7)):
        if matches := difflib.get_close_matches(last, candidates, 1, cutoff):
            return f"; did you mean `{candidates[matches[0]]}`?"
    return f"; the keys there are {', '.join(siblings or schema.model_fields)}"


def explain(error: ValidationError, tree: Any, where: str, schema: type[BaseModel]) -> ConfigError:
    """Convert a ValidationError of pydantic into one ConfigError, with a sentence for each key.

    Args:
        error: The error.
        tree: The YAML that was validated.
        where: Its file.
        schema: Class of the configuration.
    """
    problems: dict[str, tuple[Any, list[ErrorDetails]]] = {}
    for details in error.errors():  # each member of a union reports its own error
        key, value = _locate(tree, details)
        problems.setdefault(key, (value, []))[1].append(details)
    sentences = [_sentence(key, *problem, schema) for key, problem in problems.items()]
    return ConfigError(f"{where}: " + "; ".join(sentences))


def _locate(tree: Any, details: ErrorDetails) -> tuple[str, Any]:
    """Return the dotted key of an error and its value in the YAML."""
    key = ""
    for part in details["loc"]:
        try:
            tree = tree[part]
        except (KeyError, IndexError, TypeError):  # a missing key, or pydantic's name of a type
            if details["type"] != "missing" or part != details["loc"][-1]:
                break
        key += f"[{part}]" if isinstance(part, int) else f".{part}"
    return key.removeprefix("."), tree


def _sentence(key: str, value: Any, errors: list[ErrorDetails], schema: type[BaseModel]) -> str:
    """Return a sentence about the errors of a key."""
    kind, message = errors[0]["type"], errors[0]["msg"]
    if kind == "extra_forbidden":
        without_indices = re.sub(r"\[\d+\]", "", key)
        return f"unknown key `{key}`{nearest(without_indices, schema)}"
    if kind == "missing":
        return f"`{key}` is missing"
    if kind in ("value_error", "invalid_key"):
        message = message.removeprefix("Value error, ")
        return f"`{key}`: {message}" if key else message
    messages = [re.sub(r", (unable|got) .*", "", error["msg"]) for error in errors]
    requirement = " or ".join(dict.fromkeys(re.sub(r"^\w+ should", "it must", m) for m in messages))
    text = repr(value) if isinstance(value, str | list | dict) else str(value)  # str for dates
    text = "null" if value is None else text[:80]
    # A hint for a misspelt choice, or a misspelt name before a colon.
    choices = [str(e.get("ctx", {}).get(n)) for e in errors for n in ("expected", "pattern")]
    name, colon, rest = value.partition(":") if isinstance(value, str) else ("", "", "")
    matches = difflib.get_close_matches(name, re.findall(r"\w+", " ".join(choices)), 1, 0.5)
    hint = f"; did you mean `{matches[0]}{colon}{rest}`?" if matches and matches[0] != name else ""
    return f"`{key}` is {text}: {requirement}{hint}"
