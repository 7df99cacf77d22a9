"""docs/config.md from the schema: `python -m tests.config_page` writes keys, types and defaults.

Every section of the schema has a table in the page, under a heading with its dotted name. Keys,
types and defaults are the schema's. What a key of the model and its solver means is said in
lm/model/fields.py; of the others it is written in the page alone, by hand, and kept. A default that
says the same in other words (4e-3 for 0.004) stays as it is written.
"""

from __future__ import annotations

import json
import re
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as at
import yaml
from pydantic.fields import FieldInfo

from lm.config.model import Model, Section, Solver
from lm.config.schema import Config
from lm.config.yaml_text import Loader
from lm.model.fields import ARCHITECTURE, SOLVER, Field

PAGE = Path(__file__).parents[1] / "docs/config.md"
HEAD = "| key | type | default | meaning |"
RULE = "| --- | --- | --- | --- |"
ROW = re.compile(r"\| `(\w+)` \| (.+?) \| `(.*?)` \| (.+) \|$")
HEADING = re.compile(r"## (?:`([\w.]+)`|Top level)$")
MISSING = "NOT YET SAID"
TABLES: dict[type, dict[str, Field]] = {Model: ARCHITECTURE, Solver: SOLVER}
SANE = 1000  # an upper limit above is there to catch slips, and is not shown
WRITTEN_SHORT = ("InitFrom",)  # sections that a text alone stands for


def sections(section: Section, prefix: str = "") -> dict[str, Section]:
    """Dotted name → section, of the schema's sections that are always there; "" is the top."""
    found = {prefix: section}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            found |= sections(value, f"{prefix}.{name}" if prefix else name)
    return found


def kind(field: FieldInfo) -> str:
    """What a field takes, as the page says it."""
    return ", ".join(dict.fromkeys(_kinds(field.annotation, list(field.metadata))))


def _kinds(annotation: Any, metadata: list) -> list[str]:
    origin, parts = get_origin(annotation), get_args(annotation)
    bounds = [b for m in metadata for b in getattr(m, "metadata", [m])]
    if origin is Annotated:
        return _kinds(parts[0], [*bounds, *parts[1:]])
    if origin in (Union, types.UnionType):
        return [found for part in parts for found in _kinds(part, bounds)]
    if origin is Literal:
        return [f"`{choice}`" for choice in parts]
    if annotation is type(None):
        return ["`null`"]
    names = {bool: "boolean", int: "integer", float: "number", str: "text"}
    if annotation in names:
        return [names[annotation] + (_range(bounds) if annotation in (int, float) else "")]
    if origin is tuple and Ellipsis not in parts:
        return [f"{len(parts)} {_kinds(parts[0], [])[0].replace('number', 'numbers')}"]
    if getattr(annotation, "__name__", "") in WRITTEN_SHORT:
        return ["text", "mapping"]
    return ["list" if origin in (list, tuple) else "mapping"]


def _range(bounds: list) -> str:
    """ " > 0", " in [0, 1)", …"""
    lower = next((b for b in bounds if isinstance(b, at.Gt | at.Ge)), None)
    upper = next((b for b in bounds if isinstance(b, at.Lt | at.Le)), None)
    low = None if lower is None else getattr(lower, "gt", getattr(lower, "ge", None))
    high = None if upper is None else getattr(upper, "lt", getattr(upper, "le", None))
    if lower is None and upper is None:
        return ""
    if upper is None or (lower is not None and high > SANE):
        return f" {'>' if isinstance(lower, at.Gt) else '≥'} {low:g}"
    if lower is None:
        return f" {'<' if isinstance(upper, at.Lt) else '≤'} {high:g}"
    opening = "(" if isinstance(lower, at.Gt) else "["
    closing = ")" if isinstance(upper, at.Lt) else "]"
    return f" in {opening}{low:g}, {high:,}{closing}"


def default(value: Any, written: str | None) -> str:
    """A default as the page has it already where that says the same, else as YAML in one line."""
    if written is not None and yaml.load(written, Loader) == value:
        return written
    return json.dumps(value) if not isinstance(value, str) else value


def meanings(table_of: dict[str, Field]) -> dict[str, str]:
    """What the fields of a model and its solver mean, with links for the pages they name."""
    return {
        name: re.sub(r"docs/([\w-]+\.md)(#[\w-]+)?", r"[\1](\1\2)", field.meaning)
        for name, field in table_of.items()
    }


def table(section: Section, rows: dict[str, tuple[str, str]], order: list[str]) -> list[str]:
    """The rows of a section's table.

    Args:
        rows: key → (default, meaning) of the page. order: of its keys there; new ones follow.
    """
    fields = type(section).model_fields
    leaves = [name for name in fields if not isinstance(getattr(section, name), Section)]
    names = [name for name in order if name in leaves]
    names += [name for name in leaves if name not in names]
    dumped = section.model_dump(mode="json")
    table_of = TABLES.get(type(section), {})
    of_the_model = meanings(table_of)
    lines = []
    for name in names:
        written, meaning = rows.get(name, (None, MISSING))
        meaning = of_the_model.get(name, meaning)
        value = default(dumped[name], written)
        words = table_of[name].words() if name in table_of else ""
        lines.append(f"| `{name}` | {words or kind(fields[name])} | `{value}` | {meaning} |")
    return lines


def page(text: str) -> str:
    """The page with the tables of the schema as it is.

    Raises:
        ValueError: a section of the schema has no heading and table there.
    """
    known, out, section, lines = sections(Config()), [], None, text.splitlines()
    done, i = set(), 0
    while i < len(lines):
        if lines[i].startswith("## "):
            heading = HEADING.match(lines[i])
            section = (heading[1] or "") if heading else None
        out.append(lines[i])
        i += 1
        if out[-1] != RULE or out[-2] != HEAD or section not in known:
            continue
        rows = {}
        while i < len(lines) and (row := ROW.match(lines[i])):
            rows[row[1]] = (row[3], row[4])
            i += 1
        out += table(known[section], rows, list(rows))
        done.add(section)
    if missing := sorted(known.keys() - done):
        raise ValueError(f"{PAGE.name} has no heading `## `NAME`` with a table for {missing}")
    return "\n".join(out) + "\n"


def main() -> None:
    """Write the page, and name the keys whose meaning nobody has written yet."""
    text = page(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(text, encoding="utf-8")
    for line in text.splitlines():
        if MISSING in line:
            print(f"{PAGE.name}: the meaning is to be written: {line}")


if __name__ == "__main__":
    main()
