"""What our HTML pages share: templates, of which page.html is the shell, and figures as SVG."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Drawn in this colour, lines and letters of a figure take the page's (`svg` replaces it).
_INK = "#0a0b0c"


def render(template: Path, **values: object) -> str:
    """Return a page: a template in HTML, which may extend page.html, or in Markdown.

    In HTML, texts among the values are escaped; only `Markup` is HTML.
    """
    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=template.suffix == ".html",
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "anchor": anchor,
        "inline": inline,
        "escape_markdown": escape_markdown,
        "fence": fence,
    }
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "allow_nan": False}
    return environment.get_template(template.name).render(values)


def anchor(text: str) -> str:
    """Return the id of a heading with this text."""
    return "-".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


def inline(text: str) -> Markup:
    """Return plain text as HTML; `backticks` mark code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def escape_markdown(text: str) -> str:
    """Return plain text on one line of Markdown; `backticks` still mark code."""
    parts = re.split(r"(`[^`]+`)", " ".join(text.split()))
    plain = [re.sub(r"([\\`*_|<>\[\]])", r"\\\1", part) for part in parts[::2]]
    parts[::2] = plain
    return "".join(parts)


def fence(text: str) -> str:
    """Return a text between fences of Markdown that are longer than any fence in it."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}\n{text.rstrip()}\n{marks}"


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


def svg(drawn: Figure) -> Markup:
    """A matplotlib figure as SVG for a page, the same every time; the figure is closed. Lines and
    letters have the page's colour."""
    import matplotlib.pyplot as plt

    text = io.StringIO()
    drawn.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    plt.close(drawn)
    drawing = _without_idle_ids(text.getvalue()).replace(_INK, "currentColor")
    return Markup(drawing[drawing.index("<svg") :])


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
