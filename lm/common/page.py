"""What our HTML pages are made of: a page with nothing outside it, tables that sort, figures."""

from __future__ import annotations

import contextlib
import html
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Drawn in this colour, lines and letters of a figure take the page's (`svg` replaces it).
_INK = "#0a0b0c"

STYLE = """
:root { color-scheme: light dark; --line: #8884; --faint: #8881; --link: #2563eb; }
@media (prefers-color-scheme: dark) { :root { --link: #7aa2ff; } }
* { box-sizing: border-box; }
body { font: 15px/1.55 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.25rem; margin-top: 2.2rem; } h3 { font-size: 1rem; }
a { color: var(--link); }
.scroll, figure { overflow-x: auto; background:  /* a shadow at the side that goes on */
  linear-gradient(to right, Canvas 30%, transparent) left / 3rem 100% no-repeat local,
  linear-gradient(to left, Canvas 30%, transparent) right / 3rem 100% no-repeat local,
  linear-gradient(to right, #8889, transparent) left / 1rem 100% no-repeat scroll,
  linear-gradient(to left, #8889, transparent) right / 1rem 100% no-repeat scroll; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--line);
  vertical-align: top; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
table.words th, table.words td { text-align: left; }
@media (max-width: 40rem) {
  th, td { padding: .3rem .4rem; }
  th, table.words td { white-space: normal; }
}
table.sortable th { cursor: pointer; }
table.sortable th[aria-sort=ascending]::after { content: " ↑"; }
table.sortable th[aria-sort=descending]::after { content: " ↓"; }
figure { margin: 1rem 0; }
figure svg { max-width: 100%; height: auto; min-width: 34rem; }
.charts { display: grid; gap: 0 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.charts figure { min-width: 0; margin: .8rem 0; }
.charts svg { min-width: 0; width: 100%; max-width: 38rem; }
figcaption { opacity: .75; font-size: .9em; }
pre { overflow-x: auto; background: var(--faint); padding: .8rem; }
code { background: var(--faint); padding: .1em .25em; }
"""

# A click on a column's head sorts by it: as numbers where every cell starts with one.
SORTING = """
function number(text) {
  const plain = text.replace(/,/g, "").replace(/−/g, "-");
  return parseFloat(plain);
}
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const rows = [...table.tBodies[0].rows];
    const text = row => row.cells[column].textContent.trim();
    const shown = rows.filter(row => text(row) !== "–");
    const numeric = shown.every(row => !Number.isNaN(number(text(row))));
    const upward = head.getAttribute("aria-sort") !== "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", upward ? "ascending" : "descending");
    rows.sort((a, b) => {
      const left = text(a), right = text(b);
      if (left === "–" || right === "–") return (left === "–") - (right === "–");
      const order = numeric ? number(left) - number(right) : left.localeCompare(right);
      return upward ? order : -order;
    });
    table.tBodies[0].append(...rows);
  }));
}
"""


def page(title: str, parts: Sequence[str], style: str = "", script: str = "") -> str:
    """A whole page.

    Args:
        title: plain text, the page's name and first heading.
        parts: HTML, in order. style, script: of this page alone, after what all pages share.
    """
    name = html.escape(title)
    return "\n".join(
        [
            "<!doctype html>",
            f"<html lang='en'><head><meta charset='utf-8'><title>{name}</title>",
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<style>{STYLE}{style}</style></head><body>",
            f"<h1>{name}</h1>",
            *parts,
            f"<script>{SORTING}{script}</script></body></html>",
        ]
    )


def heading(text: str, level: int = 2) -> str:
    """A heading with an anchor of its words."""
    return f"<h{level} id='{html.escape(anchor(text))}'>{html.escape(text)}</h{level}>"


def anchor(text: str) -> str:
    """What a link to the heading of this text ends with, after #."""
    return "-".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


def table(rows: Sequence[Sequence[str]], words: bool = False) -> str:
    """Rows of plain text, the first being the head, as a table that sorts; "–" is no value.

    Args:
        words: most cells hold words, and begin at the left; else numbers, which end at the right.
    """
    head, *body = ([html.escape(cell) for cell in row] for row in rows)
    lines = [f"<thead><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr></thead><tbody>"]
    lines += [f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in body]
    kind = "sortable words" if words else "sortable"
    shown = f"<table class='{kind}'>{''.join(lines)}</tbody></table>"
    return f"<div class='scroll' tabindex='0'>{shown}</div>"


def inline(text: str) -> str:
    """Plain text as HTML; what stands between `backticks` is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def bullets(lines: Sequence[str]) -> str:
    """Lines of plain text, with `code` in it, as a list."""
    return f"<ul>{''.join(f'<li>{inline(line)}</li>' for line in lines)}</ul>"


def preformatted(text: str) -> str:
    """Plain text as it stands."""
    return f"<pre>{html.escape(text)}</pre>"


def figure(drawing: str) -> str:
    """What `svg` gave."""
    return f"<figure>{drawing[drawing.index('<svg') :]}</figure>"


def figures(drawings: Sequence[str]) -> str:
    """Several of them, side by side where there is room."""
    return f"<div class='charts'>{''.join(map(figure, drawings))}</div>"


@contextlib.contextmanager
def ink() -> Iterator[None]:
    """In which a figure is made and drawn: matplotlib without a window, its lines and letters in
    the page's colour. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    settings = {
        "text.color": _INK,
        "axes.edgecolor": _INK,
        "axes.labelcolor": _INK,
        "axes.titlecolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "legend.framealpha": 0,
        "axes.formatter.useoffset": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "fprnn",
    }
    with matplotlib.rc_context(settings):
        yield


def svg(drawn: Figure) -> str:
    """A matplotlib figure as SVG text, the same every time; the figure is closed.

    Inside a page lines and letters have the page's colour; alone, black.
    """
    import matplotlib.pyplot as plt

    text = io.StringIO()
    drawn.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    plt.close(drawn)
    return _without_idle_ids(text.getvalue()).replace(_INK, "currentColor")


def save_pdf(drawn: Figure, path: Path) -> None:
    """A matplotlib figure as a paper prints it: with its letters as letters (TrueType, which every
    publisher takes), and the same bytes every time."""
    import matplotlib

    with matplotlib.rc_context({"pdf.fonttype": 42}):
        drawn.savefig(path, metadata={"CreationDate": None})


def _without_idle_ids(text: str) -> str:
    """Without the names that nothing in the drawing refers to: those of a second figure in the page
    are the same. What is left is named by its content."""
    used = set(re.findall(r"#([\w-]+)", text))
    return re.sub(r' id="([\w.-]+)"', lambda m: m[0] if m[1] in used else "", text)
