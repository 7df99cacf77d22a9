"""Templates of our pages, which share page.html, and PDF figures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def save_pdf(drawn: Figure, path: Path) -> None:
    """Save a figure with letters as TrueType, which publishers take, and without a date."""
    import matplotlib

    with matplotlib.rc_context({"pdf.fonttype": 42}):
        drawn.savefig(path, metadata={"CreationDate": None})
