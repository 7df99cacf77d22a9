"""A report as Markdown: the numbers of the page, without its pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lm.report.sections.blocks import Block, Folded, Notes, Preformatted, Section, Table, in_numbers


def as_markdown(title: str, sections: Sequence[Section], made: str) -> str:
    """The text.

    Args:
        made: one sentence about when, and by what, it was made.
    """
    parts = [f"# {escaped(title)}", made]
    for section in sections:
        parts.append(f"## {escaped(section.title)}")
        parts += [text for block in section.blocks for text in _block(block)]
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> list[str]:
    if isinstance(block, Notes):
        return ["\n".join(f"- {inline(line)}" for line in block.lines)]
    if isinstance(block, Preformatted):
        return [_fenced(block.text)]
    if isinstance(block, Folded):
        return [f"### {escaped(block.title)}", _fenced(block.text)]
    if isinstance(block, Table):
        title = [f"### {escaped(block.title)}"] if block.title else []
        return [
            *title,
            table(block.rows),
            *([f"From {inline(block.traced)}."] if block.traced else []),
        ]
    of = in_numbers(block)
    return [
        f"### {escaped(block.title)}",
        table(of.rows),
        f"From {inline(of.traced)}; {escaped(block.unit)}.",
    ]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows, the first being the head; numbers to the right."""
    head, *body = ([escaped(cell) for cell in row] for row in rows)
    under = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, under, *body))


def escaped(text: str) -> str:
    """Plain text inside a line of Markdown: nothing in it is read as markup."""
    return _without_markup(_one_line(text))


def inline(text: str) -> str:
    """Plain text on one line; what stands between `backticks` is code."""
    parts = re.split(r"(`[^`]+`)", _one_line(text))
    return "".join(part if i % 2 else _without_markup(part) for i, part in enumerate(parts))


def _without_markup(text: str) -> str:
    for sign in "\\`*_|<>[]":
        text = text.replace(sign, f"\\{sign}")
    return text


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _fenced(text: str) -> str:
    """A text as it stands, between fences that are longer than any in it."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text.rstrip()}\n{fence}"
