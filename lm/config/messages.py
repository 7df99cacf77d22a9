"""What is wrong with a configuration: which key, what it holds, and what would be right."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as at
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from lm.common.errors import ConfigError


def all_keys(schema: type[BaseModel], prefix: str = "") -> list[str]:
    """The dotted keys of a schema, sections and what is in them."""
    keys = []
    for name, field in schema.model_fields.items():
        keys.append(prefix + name)
        if below := subsection(field):
            keys += all_keys(below, f"{prefix}{name}.")
    return keys


def is_key(key: str, schema: type[BaseModel]) -> bool:
    """Whether a schema has a dotted key, there or in a section that a mapping has by name."""
    return key in all_keys(schema) or key in _keys_of_entry(key, schema)


def _keys_of_entry(key: str, schema: type[BaseModel]) -> list[str]:
    """Where a dotted key goes through a mapping of names to sections (`data.mixture.web.path`): the
    keys of the section of that name, and the section itself; else none."""
    walked = ""
    names = key.split(".")
    for i, name in enumerate(names[:-1]):
        field = schema.model_fields.get(name)
        if field is None:
            return []
        walked += f"{name}."
        if (entry := mapped_section(field)) is not None:
            place = walked + names[i + 1]
            return [place, *all_keys(entry, f"{place}.")]
        below = subsection(field)
        if below is None:
            return []
        schema = below
    return []


def nearest(key: str, schema: type[BaseModel]) -> str:
    """'; did you mean `x.y`?' for a mistyped dotted key, or what is known in its place."""
    keys = all_keys(schema) + _keys_of_entry(key, schema)
    parent, _, last = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == parent}
    by_leaf: dict[str, str] = {}
    for k in sorted(keys, key=lambda k: k.count(".")):  # the outermost of a name
        by_leaf.setdefault(k.rpartition(".")[2], k)
    close = [by_leaf[last]] if last in by_leaf else []  # the right key in the wrong section
    close = close or [siblings[k] for k in difflib.get_close_matches(last, siblings, 1, 0.6)]
    close = close or [by_leaf[k] for k in difflib.get_close_matches(last, by_leaf, 1, 0.7)]
    known: Iterable[str] = siblings
    if not close and not siblings:
        close = difflib.get_close_matches(key, keys, 1, 0.6)
        known = schema.model_fields
    return f"; did you mean `{close[0]}`?" if close else f"; known there: {', '.join(known)}"


def explain(error: ValidationError, tree: Any, where: str, schema: type[BaseModel]) -> ConfigError:
    """pydantic's findings about `tree` as one error, with a sentence for each key."""
    sentences: dict[str, str] = {}
    for found in error.errors():
        key, field, path = _place(schema, found["loc"])
        if key not in sentences:  # each member of a union reports on its own
            sentences[key] = _sentence(found, key, field, _value(tree, path, found), schema)
    return ConfigError(f"{where}: " + "; ".join(sentences.values()))


def _sentence(
    found: ErrorDetails, key: str, field: FieldInfo | None, value: Any, schema: type[BaseModel]
) -> str:
    if found["type"] == "extra_forbidden":
        without_places = re.sub(r"\[\d+\]", "", key)
        return f"unknown key `{key}`{nearest(without_places, schema)}"
    if found["type"] == "value_error":
        message = found["msg"].removeprefix("Value error, ")
        return f"`{key}`: {message}" if key else message
    if field is None:  # the whole tree: a key that is no text
        return f"{found['msg'][0].lower()}{found['msg'][1:]}"
    if value is _MISSING:
        return f"`{key}` is missing: it must be {_wanted(field)}"
    return f"`{key}` is {_shown(value)}: it must be {_wanted(field)}{_meant(value, field)}"


_MISSING = object()


def _place(
    schema: type[BaseModel], loc: Iterable[str | int]
) -> tuple[str, FieldInfo | None, list[str | int]]:
    """The field an error is about: dotted key, field, and the way to its value in the tree.

    pydantic goes on below the field, to places in a list and members of a union.
    """
    key = ""
    field: FieldInfo | None = None
    path: list[str | int] = []
    section: type[BaseModel] | None = schema
    entry: type[BaseModel] | None = None
    for part in loc:
        if section is None and entry is None:
            break
        if isinstance(part, int):  # a section of a list
            key += f"[{part}]"
        elif entry is not None:  # the name of a section of a mapping
            key, section, entry = f"{key}.{part}", entry, None
        elif section is not None:
            key = f"{key}.{part}" if key else part
            field = section.model_fields.get(part)
            section = None if field is None else subsection(field)
            entry = None if field is None else mapped_section(field)
        path.append(part)
    return key, field, path


def _value(tree: Any, path: list[str | int], found: ErrorDetails) -> Any:
    """What stands in the tree at that place, or _MISSING."""
    for part in path:
        if isinstance(tree, dict) and part not in tree and found["type"] == "missing":
            return _MISSING
        try:
            tree = tree[part]
        except (KeyError, IndexError, TypeError):  # `model: mamba`, which has become a section
            return found["input"]
    return tree


def _shown(value: Any) -> str:
    """A value as YAML has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    plain = isinstance(value, str | int | float | list | tuple | dict)
    text = repr(value) if plain else str(value)  # a date
    return text if len(text) <= 80 else text[:77] + "…"


def _meant(value: Any, field: FieldInfo) -> str:
    """A hint where a name is nearly right: a choice, or the word before a colon."""
    if not isinstance(value, str):
        return ""
    choices = [a for a in _choices(field.annotation) if isinstance(a, str)]
    close = difflib.get_close_matches(value, choices, 1, 0.5)
    if not close and field.description:
        word, colon, rest = value.partition(":")
        words = re.findall(r"[a-z_]+", field.description)
        candidates = difflib.get_close_matches(word, words, 1, 0.6)
        close = [c + colon + rest for c in candidates if _matches(c + colon + rest, field)]
    return f"; did you mean `{close[0]}`?" if close else ""


def _matches(text: str, field: FieldInfo) -> bool:
    patterns = [m.pattern for m in field.metadata if getattr(m, "pattern", None)]
    return all(re.search(pattern, text) for pattern in patterns)


def _choices(annotation: Any) -> list[Any]:
    """The choices of a Literal, also of one in a union."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return [choice for a in get_args(annotation) for choice in _choices(a)]
    return []


def subsection(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds (also an optional one, or a list of them), or None."""
    candidates = (field.annotation, *get_args(field.annotation))
    return next((a for a in candidates if _is_section(a)), None)


def mapped_section(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field maps names to (also an optional mapping), or None."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if get_origin(kind) is dict and _is_section(get_args(kind)[1]):
            return get_args(kind)[1]
    return None


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _wanted(field: FieldInfo) -> str:
    """What a field takes, in words: its description, or what its type and bounds say."""
    return field.description or _in_words(field.annotation, field.metadata)


def _in_words(annotation: Any, bounds: Iterable[Any] = ()) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    # `Field(ge=0)` in an Annotated holds its bounds once more inside.
    bounds = [b for bound in bounds for b in getattr(bound, "metadata", [bound])]
    if origin is Annotated:
        return _in_words(parts[0], [*bounds, *parts[1:]])
    if origin in (Union, types.UnionType):
        return " or ".join(_in_words(a, bounds) for a in parts)
    if origin is Literal:
        names = [str(choice) for choice in parts]
        return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    if annotation in (None, type(None)):
        return "null"
    if annotation is bool:
        return "true or false"
    if annotation is int:
        return f"a whole number{_range(bounds)}"
    if annotation is float:
        return f"a finite number{_range(bounds)}"
    if annotation is str:
        return "text that is not empty" if _least(bounds) else "text (a number goes in quotes)"
    if origin in (tuple, list):
        elements = [_in_words(a) for a in parts if a is not Ellipsis]
        size = f" of {len(elements)}" if origin is tuple and Ellipsis not in parts else ""
        size = " that is not empty" if _least(bounds) else size
        return f"a list{size}, each {' or '.join(dict.fromkeys(elements))}"
    if origin is dict:
        return f"a mapping of keys to {'lists' if get_origin(parts[1]) is list else 'values'}"
    if _is_section(annotation):
        return f"a section with keys of {', '.join(annotation.model_fields)}"
    return "any value"


def _least(bounds: list[Any]) -> int:
    """The least length asked for."""
    return max((b.min_length for b in bounds if isinstance(b, at.MinLen)), default=0)


def _range(bounds: list[Any]) -> str:
    """' above 0', ' of at least 0 and below 1', …"""
    words = {
        at.Gt: ("above", "gt"),
        at.Ge: ("of at least", "ge"),
        at.Lt: ("below", "lt"),
        at.Le: ("at most", "le"),
    }
    said = []
    for bound in bounds:
        if type(bound) in words:
            word, attribute = words[type(bound)]
            value = getattr(bound, attribute)
            said.append(f"{word} {value if isinstance(value, int) else format(value, 'g')}")
    return " " + " and ".join(said) if said else ""
