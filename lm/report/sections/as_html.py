"""A report as one HTML page with nothing outside it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from lm.common import page
from lm.report.sections.blocks import Block, Chart, Picture, Section, in_numbers
from lm.report.sections.draw import AXES, drawings


def as_html(title: str, sections: Sequence[Section], made: str) -> str:
    """The page.

    Args:
        made: one sentence about when, and by what, it was made.
    """
    shown = [{"title": s.title, "groups": _groups(s.blocks)} for s in sections]
    template = Path(__file__).with_name("report.html")
    return page.render(template, title=title, sections=shown, made=made, names=AXES)


def _groups(blocks: Sequence[Block]) -> list[tuple[bool, list[tuple[str, object]]]]:
    """Whether blocks are pictures, and these, by kind: pictures that follow one another stand side
    by side where there is room."""
    groups = groupby(blocks, key=lambda block: isinstance(block, Picture))
    return [(are_pictures, [_shown(block) for block in group]) for are_pictures, group in groups]


def _shown(block: Block) -> tuple[str, object]:
    kind = type(block).__name__
    if not isinstance(block, Picture):
        return kind, block
    axes = block.axes if isinstance(block, Chart) else ("update",)
    panels = dict(zip(axes, drawings(block), strict=True))
    rows = in_numbers(block).rows
    return kind, {"title": block.title, "traced": block.traced, "panels": panels, "rows": rows}
