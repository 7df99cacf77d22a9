"""What is wrong with a configuration: which key, what it holds, and what would be right."""

from __future__ import annotations

import difflib
import re
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from lm.common.errors import ConfigError


def subsection(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds (also an optional one, or a list of them), or None."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def _mapped_section(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field maps names to (also an optional mapping), or None."""
    mappings = [k for k in (field.annotation, *get_args(field.annotation)) if get_origin(k) is dict]
    value = get_args(mappings[0])[1] if mappings else None
    return value if isinstance(value, type) and issubclass(value, BaseModel) else None


def all_keys(schema: type[BaseModel], prefix: str = "") -> list[str]:
    """The dotted keys of a schema, sections and what is in them; `*` is any name in a mapping."""
    keys = []
    for name, field in schema.model_fields.items():
        keys.append(prefix + name)
        if section := subsection(field):
            keys += all_keys(section, f"{prefix}{name}.")
        if section := _mapped_section(field):
            keys += [f"{prefix}{name}.*", *all_keys(section, f"{prefix}{name}.*.")]
    return keys


def _keys_around(key: str, schema: type[BaseModel]) -> list[str]:
    """All keys of a schema, with the names of a dotted key in the place of each `*`."""
    names = dict(enumerate(key.split(".")))
    paths = [known.split(".") for known in all_keys(schema)]
    return [".".join(names.get(i, "*") if n == "*" else n for i, n in enumerate(p)) for p in paths]


def is_key(key: str, schema: type[BaseModel]) -> bool:
    """Whether a schema has a dotted key, there or in a section that a mapping has by name."""
    return key in _keys_around(key, schema)


def nearest(key: str, schema: type[BaseModel]) -> str:
    """'; did you mean `x.y`?' for a mistyped dotted key, or what is known in its place."""
    keys = _keys_around(key, schema)
    parent, _, last = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == parent}
    outermost_last = sorted(keys, key=lambda k: k.count("."))[::-1]
    by_leaf = {k.rpartition(".")[2]: k for k in outermost_last}
    for known, cutoff in ((by_leaf, 1.0), (siblings, 0.6), (by_leaf, 0.7)):
        if close := difflib.get_close_matches(last, known, 1, cutoff):
            return f"; did you mean `{known[close[0]]}`?"
    return f"; known there: {', '.join(siblings or schema.model_fields)}"


def explain(error: ValidationError, tree: Any, where: str, schema: type[BaseModel]) -> ConfigError:
    """pydantic's findings about `tree` as one error, with a sentence for each key."""
    places: dict[str, tuple[Any, list[ErrorDetails]]] = {}
    for finding in error.errors():  # each member of a union reports on its own
        key, value = _place(tree, finding)
        places.setdefault(key, (value, []))[1].append(finding)
    sentences = [_sentence(key, *place, schema) for key, place in places.items()]
    return ConfigError(f"{where}: " + "; ".join(sentences))


def _place(tree: Any, finding: ErrorDetails) -> tuple[str, Any]:
    """The dotted key that a finding is about, and what stands there."""
    key = ""
    for part in finding["loc"]:
        try:
            tree = tree[part]
        except (KeyError, IndexError, TypeError):  # not there, or pydantic's name for a kind
            if finding["type"] != "missing" or part != finding["loc"][-1]:
                break
        key += f"[{part}]" if isinstance(part, int) else f".{part}"
    return key.removeprefix("."), tree


def _sentence(key: str, value: Any, findings: list[ErrorDetails], schema: type[BaseModel]) -> str:
    kind, message = findings[0]["type"], findings[0]["msg"]
    if kind == "extra_forbidden":
        without_places = re.sub(r"\[\d+\]", "", key)
        return f"unknown key `{key}`{nearest(without_places, schema)}"
    if kind == "missing":
        return f"`{key}` is missing"
    if kind in ("value_error", "invalid_key"):
        message = message.removeprefix("Value error, ")
        return f"`{key}`: {message}" if key else message
    messages = [re.sub(r", (unable|got) .*", "", f["msg"]) for f in findings]
    wanted = " or ".join(dict.fromkeys(re.sub(r"^\w+ should", "it must", m) for m in messages))
    shown = repr(value) if isinstance(value, str | list | dict) else str(value)  # a date
    shown = "null" if value is None else shown[:80]
    # A hint where a name is nearly right: a choice, or the word before a colon.
    choices = [str(f.get("ctx", {}).get(n)) for f in findings for n in ("expected", "pattern")]
    word, colon, rest = value.partition(":") if isinstance(value, str) else ("", "", "")
    close = difflib.get_close_matches(word, re.findall(r"\w+", " ".join(choices)), 1, 0.5)
    meant = f"; did you mean `{close[0]}{colon}{rest}`?" if close and close[0] != word else ""
    return f"`{key}` is {shown}: {wanted}{meant}"
