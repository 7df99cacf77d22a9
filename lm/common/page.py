"""Templates of our pages, which share page.html."""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape


def render(template: Path, **values: object) -> str:
    """Return a page: a template, which may extend page.html.

    Texts among the values are escaped; only `Markup` is HTML.
    """
    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inline"] = inline
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "allow_nan": False}
    return environment.get_template(template.name).render(values)


def inline(text: str) -> Markup:
    """Return plain text as HTML; `backticks` mark code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
