"""A report as one HTML page with nothing outside it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from itertools import groupby

from lm import page
from lm.reports.blocks import (
    Block,
    Folded,
    Notes,
    Picture,
    Preformatted,
    Section,
    Words,
    in_numbers,
)
from lm.reports.draw import drawings

STYLE = """
nav { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; }
.charts { display: grid; gap: 0 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.charts figure { min-width: 0; margin: .8rem 0; }
.charts figure.wide { grid-column: 1 / -1; }
.panels { display: grid; gap: 0 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.charts svg { min-width: 0; width: 100%; max-width: 38rem; }
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
    panels = [drawn[drawn.index("<svg") :] for drawn in drawings(block)]
    kind = " class='wide'" if len(panels) > 1 else ""
    table = page.table(in_numbers(block).rows)
    title = html.escape(block.title)
    return (
        f"<figure{kind}><h3>{title}</h3>"
        f"<div class='panels' role='img' aria-label='{title}'>{''.join(panels)}</div>"
        f"<figcaption>{page.inline(block.traced)}</figcaption>"
        f"<details><summary>in numbers</summary>{table}</details></figure>"
    )


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
