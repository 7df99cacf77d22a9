"""Rendering of HTML pages from Jinja templates, which all extend page.html."""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape


def render(template: Path, **values: object) -> str:
    """Render a template to HTML.

    Args:
        template: File of the template.
        values: Variables of the template. Strings are escaped; `Markup` is inserted as HTML.
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
    """Convert plain text to HTML; text in `backticks` becomes code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
