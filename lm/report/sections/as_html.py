"""A report as one HTML page with nothing outside it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from itertools import groupby

from lm.common import page
from lm.report.sections.blocks import (
    Block,
    Chart,
    Folded,
    Notes,
    Picture,
    Preformatted,
    Section,
    Words,
    in_numbers,
)
from lm.report.sections.draw import AXES, drawings

STYLE = """
nav { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; }
.switch { margin: 0; font-size: .9em; }
.switch label { margin-right: .8rem; cursor: pointer; }
figure:has([value=tokens]:checked) .panel.update { display: none; }
figure:not(:has([value=tokens]:checked)) .panel.tokens { display: none; }
figure h3 { margin: .3rem 0; overflow-wrap: anywhere; }
li, .traced, summary { overflow-wrap: anywhere; }
.traced { opacity: .75; font-size: .9em; }
summary { cursor: pointer; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
"""


def as_html(title: str, sections: Sequence[Section], made: str) -> str:
    """The page.

    Args:
        made: one sentence about when, and by what, it was made.
    """
    links = "".join(
        f"<a href='#{page.anchor(section.title)}'>{html.escape(section.title)}</a>"
        for section in sections
    )
    parts = [f"<p class='traced'>{page.inline(made)}</p>", f"<nav>{links}</nav>"]
    for section in sections:
        parts += [page.heading(section.title), *_blocks(section.blocks)]
    return page.page(title, parts, STYLE)


def _blocks(blocks: Sequence[Block]) -> list[str]:
    """Pictures that follow one another stand side by side where there is room."""
    parts = []
    for are_pictures, run in groupby(blocks, key=lambda block: isinstance(block, Picture)):
        shown = [_block(block) for block in run]
        parts += [f"<div class='charts'>{''.join(shown)}</div>"] if are_pictures else shown
    return parts


def _block(block: Block) -> str:
    return _picture(block) if isinstance(block, Picture) else _words(block)


def _picture(block: Picture) -> str:
    axes = block.axes if isinstance(block, Chart) else ("update",)
    panels = [
        f"<div class='panel {axis}'>{drawn[drawn.index('<svg') :]}</div>"
        for axis, drawn in zip(axes, drawings(block), strict=True)
    ]
    switch = _switch(block.title, axes) if len(axes) > 1 else ""
    table = page.table(in_numbers(block).rows)
    title = html.escape(block.title)
    return (
        f"<figure><h3>{title}</h3>{switch}"
        f"<div role='img' aria-label='{title}'>{''.join(panels)}</div>"
        f"<figcaption>{page.inline(block.traced)}</figcaption>"
        f"<details><summary>in numbers</summary>{table}</details></figure>"
    )


def _switch(title: str, axes: Sequence[str]) -> str:
    """Buttons that choose what runs to the right; the first of them is pressed."""
    name = f"axis-{page.anchor(title)}"
    buttons = [
        f"<label><input type='radio' name='{html.escape(name)}' value='{axis}'"
        f"{' checked' if axis == axes[0] else ''}> {AXES[axis]}</label>"
        for axis in axes
    ]
    return f"<p class='switch'>over {''.join(buttons)}</p>"


def _words(block: Words) -> str:
    if isinstance(block, Notes):
        return page.bullets(block.lines)
    if isinstance(block, Preformatted):
        return page.preformatted(block.text)
    if isinstance(block, Folded):
        title = html.escape(block.title)
        return f"<details><summary>{title}</summary>{page.preformatted(block.text)}</details>"
    title = f"<h3>{html.escape(block.title)}</h3>" if block.title else ""
    traced = f"<p class='traced'>From {page.inline(block.traced)}.</p>" if block.traced else ""
    return title + page.table(block.rows, block.words) + traced
