"""Update docs/config.md from the schema: `python -m tests.config_page`.

Every section of the schema has a table in the page, under a heading with its dotted name. Keys,
types and defaults come from the schema. Meanings of the keys of `model` and `solver` come from
lm/model/fields.py; other meanings are written by hand in the page and kept. A default in the page
stays as written if it has the same value (4e-3 for 0.004).
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
MISSING_MEANING = "NOT YET WRITTEN"
MODEL_FIELDS: dict[type, dict[str, Field]] = {Model: ARCHITECTURE, Solver: SOLVER}
MAX_SHOWN_LIMIT = 1000  # higher upper limits only catch typing errors, and the page omits them
TEXT_OR_SECTION = "/InitFrom"  # the section that may be given as a text
# Types of JSON schema → names in the page, if they differ.
TYPE_NAMES = {"array": "list", "null": "`null`", "object": "mapping", "string": "text"}


def collect_sections(section: Section, prefix: str = "") -> dict[str, Section]:
    """Return {dotted name: section} for a section and all sections in it; the top level is ""."""
    sections = {prefix: section}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            sections |= collect_sections(value, f"{prefix}.{name}" if prefix else name)
    return sections


def describe_types(schema: dict[str, Any]) -> list[str]:
    """Return the types and choices of a field as text, from its JSON schema."""
    if "anyOf" in schema:
        return [text for option in schema["anyOf"] for text in describe_types(option)]
    if "enum" in schema or "const" in schema:
        return [f"`{choice}`" for choice in schema.get("enum", [schema.get("const")])]
    if "prefixItems" in schema:
        items = schema["prefixItems"]
        return [f"{len(items)} {describe_types(items[0])[0].replace('number', 'numbers')}"]
    if "$ref" in schema:
        return ["text", "mapping"] if schema["$ref"].endswith(TEXT_OR_SECTION) else ["mapping"]
    name = schema.get("type", "object")
    return [TYPE_NAMES.get(name, name) + describe_range(schema)]


def describe_range(schema: dict[str, Any]) -> str:
    """Return the range of a number, such as " > 0" or " in [0, 1)", after a space."""
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    is_low_excluded, is_high_excluded = "exclusiveMinimum" in schema, "exclusiveMaximum" in schema
    if low is None and high is None:
        return ""
    if high is None or (low is not None and high > MAX_SHOWN_LIMIT):
        return f" {'>' if is_low_excluded else '≥'} {low:g}"
    if low is None:
        return f" {'<' if is_high_excluded else '≤'} {high:g}"
    left, right = "(" if is_low_excluded else "[", ")" if is_high_excluded else "]"
    return f" in {left}{low:g}, {high:,}{right}"


def format_default(value: Any, written: str | None) -> str:
    """Return a default as the page writes it, if that has the same value, else as YAML."""
    if written is not None and yaml.load(written, Loader) == value:
        return written
    return json.dumps(value) if not isinstance(value, str) else value


def format_meanings(fields: dict[str, Field]) -> dict[str, str]:
    """Return {field: meaning}, with links to the pages that it names."""
    return {
        name: re.sub(r"docs/([\w-]+\.md)(#[\w-]+)?", r"[\1](\1\2)", field.meaning)
        for name, field in fields.items()
    }


def build_table(section: Section, old_rows: dict[str, tuple[str, str]]) -> list[str]:
    """Build the rows of a section's table.

    Args:
        section: The section with its defaults.
        old_rows: key → (default, meaning) in the page. Its order is kept; new keys follow.
    """
    fields = type(section).model_fields
    keys = [name for name in fields if not isinstance(getattr(section, name), Section)]
    names = [name for name in old_rows if name in keys]
    names += [name for name in keys if name not in names]
    dumped = section.model_dump(mode="json")
    properties = type(section).model_json_schema()["properties"]
    model_fields = MODEL_FIELDS.get(type(section), {})
    model_meanings = format_meanings(model_fields)
    lines = []
    for name in names:
        written_default, meaning = old_rows.get(name, (None, MISSING_MEANING))
        meaning = model_meanings.get(name, meaning)
        value = format_default(dumped[name], written_default)
        type_text = model_fields[name].describe() if name in model_fields else ""
        type_text = type_text or ", ".join(dict.fromkeys(describe_types(properties[name])))
        lines.append(f"| `{name}` | {type_text} | `{value}` | {meaning} |")
    return lines


def update_page(text: str) -> str:
    """Return the page with the tables of the present schema.

    Raises:
        ValueError: If a section of the schema has no heading with a table.
    """
    sections = collect_sections(Config())
    lines, out = text.splitlines(), []
    section_name, updated_names = None, set()
    i = 0
    while i < len(lines):
        if lines[i].startswith("## "):
            heading = HEADING.match(lines[i])
            section_name = (heading[1] or "") if heading else None
        out.append(lines[i])
        i += 1
        is_table_head = out[-1] == RULE and out[-2] == HEAD
        if not is_table_head or section_name not in sections:
            continue
        old_rows = {}
        while i < len(lines) and (row := ROW.match(lines[i])):
            old_rows[row[1]] = (row[3], row[4])
            i += 1
        out += build_table(sections[section_name], old_rows)
        updated_names.add(section_name)
    if missing := sorted(sections.keys() - updated_names):
        raise ValueError(f"{PAGE.name} has no heading `## `NAME`` with a table for {missing}")
    return "\n".join(out) + "\n"


def main() -> None:
    """Write the page, and print the rows without a meaning."""
    text = update_page(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(text, encoding="utf-8")
    for line in text.splitlines():
        if MISSING_MEANING in line:
            print(f"{PAGE.name}: write the meaning of this key: {line}")


if __name__ == "__main__":
    main()
