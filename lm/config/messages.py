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
    """Return S of a field of type dict[str, S] or its optional; None if S is no section."""
    types = (field.annotation, *get_args(field.annotation))
    mappings = [t for t in types if get_origin(t) is dict]
    value_type = get_args(mappings[0])[1] if mappings else None
    is_section = isinstance(value_type, type) and issubclass(value_type, BaseModel)
    return value_type if is_section else None


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
    """Return all keys of a schema, with each `*` replaced by the name at its place in a dotted key.

    With key `data.mixture.web.path`, `data.mixture.*.weight` gives `data.mixture.web.weight`.
    """
    keys = []
    for known_key in all_keys(schema):
        parts = known_key.split(".")
        names = key.split(".") + ["*"] * len(parts)  # so that `zip` keeps every part
        keys.append(".".join(n if part == "*" else part for part, n in zip(parts, names)))
    return keys


def is_key(key: str, schema: type[BaseModel]) -> bool:
    """Return whether a schema has a dotted key, also in the sections of a mapping."""
    return key in _keys_with_names(key, schema)


def nearest(key: str, schema: type[BaseModel]) -> str:
    """Return '; did you mean `x.y`?' for an unknown dotted key, or the list of keys next to it."""
    keys = _keys_with_names(key, schema)
    section, _, name = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == section}
    # The last of several keys with the same name remains: the outermost.
    innermost_first = sorted(keys, key=lambda k: k.count("."))[::-1]
    key_by_name = {k.rpartition(".")[2]: k for k in innermost_first}
    # The same name anywhere; a similar name in this section; a similar name anywhere.
    for candidates, cutoff in ((key_by_name, 1.0), (siblings, 0.6), (key_by_name, 0.7)):
        if matches := difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff):
            return f"; did you mean `{candidates[matches[0]]}`?"
    return f"; the keys there are {', '.join(siblings or schema.model_fields)}"


def explain(error: ValidationError, tree: Any, origin: str, schema: type[BaseModel]) -> ConfigError:
    """Convert a ValidationError of pydantic into one ConfigError, with a sentence for each key.

    Args:
        error: Error of pydantic.
        tree: The YAML that was validated.
        origin: File of the YAML.
        schema: Class of the configuration.
    """
    problems: dict[str, tuple[Any, list[ErrorDetails]]] = {}
    for details in error.errors():  # each member of a union reports its own error
        key, value = _locate(tree, details)
        problems.setdefault(key, (value, []))[1].append(details)
    sentences = [_sentence(key, *problem, schema) for key, problem in problems.items()]
    return ConfigError(f"{origin}: " + "; ".join(sentences))


def _locate(tree: Any, details: ErrorDetails) -> tuple[str, Any]:
    """Return the dotted key of an error and its value in the YAML."""
    key = ""
    for part in details["loc"]:
        try:
            tree = tree[part]
        except (KeyError, IndexError, TypeError):
            is_missing_key = details["type"] == "missing" and part == details["loc"][-1]
            if not is_missing_key:  # pydantic's name of a type, which is not in the YAML
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
    # "Input should be greater than 0" becomes "it must be greater than 0".
    messages = [re.sub(r", (unable|got) .*", "", error["msg"]) for error in errors]
    requirement = " or ".join(dict.fromkeys(re.sub(r"^\w+ should", "it must", m) for m in messages))
    # repr() quotes texts; str() writes other values, such as dates, as the YAML does.
    text = repr(value) if isinstance(value, str | list | dict) else str(value)
    text = "null" if value is None else text[:80]
    # Suggest the choice that a misspelt value, or its part before a colon, is similar to.
    contexts = [error.get("ctx", {}) for error in errors]
    expected = " ".join(str(ctx.get(name)) for ctx in contexts for name in ("expected", "pattern"))
    choice, colon, rest = value.partition(":") if isinstance(value, str) else ("", "", "")
    matches = difflib.get_close_matches(choice, re.findall(r"\w+", expected), n=1, cutoff=0.5)
    is_other = bool(matches) and matches[0] != choice
    hint = f"; did you mean `{matches[0]}{colon}{rest}`?" if is_other else ""
    return f"`{key}` is {text}: {requirement}{hint}"
