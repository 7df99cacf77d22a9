"""docs/config.md from the schema: `python -m tests.config_page` writes keys, types and defaults.

Every section of the schema has a table in the page, under a heading with its dotted name. Keys,
types and defaults are the schema's. What a key of the model and its solver means is said in
lm/model/fields.py; of the others it is written in the page alone, by hand, and kept. A default that
says the same in other words (4e-3 for 0.004) stays as it is written.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

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
WRITTEN_SHORT = "/InitFrom"  # the section that a text may stand for
# The page's words for types of JSON, where they differ.
KINDS = {"array": "list", "null": "`null`", "object": "mapping", "string": "text"}


def sections(section: Section, prefix: str = "") -> dict[str, Section]:
    """Dotted name → section, of the schema's sections that are always there; "" is the top."""
    found = {prefix: section}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            found |= sections(value, f"{prefix}.{name}" if prefix else name)
    return found


def kinds(schema: dict[str, Any]) -> list[str]:
    """Return what a field takes, from its JSON schema."""
    if "anyOf" in schema:
        return [kind for part in schema["anyOf"] for kind in kinds(part)]
    if "enum" in schema or "const" in schema:
        return [f"`{choice}`" for choice in schema.get("enum", [schema.get("const")])]
    if "prefixItems" in schema:
        items = schema["prefixItems"]
        return [f"{len(items)} {kinds(items[0])[0].replace('number', 'numbers')}"]
    if "$ref" in schema:
        return ["text", "mapping"] if schema["$ref"].endswith(WRITTEN_SHORT) else ["mapping"]
    kind = schema.get("type", "object")
    return [KINDS.get(kind, kind) + number_range(schema)]


def number_range(schema: dict[str, Any]) -> str:
    """Return the range of a number, such as " > 0" or " in [0, 1)", after a space."""
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    is_open, is_open_above = "exclusiveMinimum" in schema, "exclusiveMaximum" in schema
    if low is None and high is None:
        return ""
    if high is None or (low is not None and high > SANE):
        return f" {'>' if is_open else '≥'} {low:g}"
    if low is None:
        return f" {'<' if is_open_above else '≤'} {high:g}"
    return f" in {'(' if is_open else '['}{low:g}, {high:,}{')' if is_open_above else ']'}"


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
    properties = type(section).model_json_schema()["properties"]
    table_of = TABLES.get(type(section), {})
    of_the_model = meanings(table_of)
    lines = []
    for name in names:
        written, meaning = rows.get(name, (None, MISSING))
        meaning = of_the_model.get(name, meaning)
        value = default(dumped[name], written)
        words = table_of[name].describe() if name in table_of else ""
        words = words or ", ".join(dict.fromkeys(kinds(properties[name])))
        lines.append(f"| `{name}` | {words} | `{value}` | {meaning} |")
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
