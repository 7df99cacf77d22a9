"""Hooks of mkdocs: pages outside docs/, and links that work on GitHub and on the site.

A page links to any file of the repository by its relative path, as on GitHub. On the site, pages
outside docs/ have names of their own (PAGES), and every other linked file is copied below files/.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
# Name of the page on the site → file in the repository.
OUTSIDE = {
    "benchmarks": "benchmarks/README.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "overview": "README.md",
}
PAGES = {f"{name}.md": path for name, path in OUTSIDE.items()}
PAGE_OF_FILE = {path: page for page, path in PAGES.items()}
LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s#]+)([^)]*)\)")  # label, target, anchor
FENCE = re.compile(r"(^```.*?^```$)", re.M | re.S)


def source_path(page: str) -> Path:
    """Return the file of a page of the site."""
    return ROOT / PAGES.get(page, f"docs/{page}")


def site_link(link: str, page: str) -> str:
    """Return a link as the site needs it.

    Args:
        link: Target as written in the page, relative to its file.
        page: Page of the site, such as data.md.
    """
    if "://" in link or link.startswith(("#", "/", "mailto:")):
        return link
    path = Path(os.path.normpath(source_path(page).parent / link))
    if not path.is_relative_to(ROOT):
        return link
    name = path.relative_to(ROOT).as_posix()
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return PAGE_OF_FILE.get(name, f"files/{name}")


def rewrite_links(text: str, page: str) -> str:
    """Rewrite the links of a page for the site, except in code blocks.

    A link to a folder becomes plain code, because the site has no page for folders.
    """

    def rewrite(match: re.Match) -> str:
        label, link, anchor = match.groups()
        target = site_link(link, page)
        if target.startswith("files/") and (ROOT / target.removeprefix("files/")).is_dir():
            return f"`{label}`"
        return f"[{label}]({target}{anchor})"

    parts = FENCE.split(text)
    for i in range(0, len(parts), 2):
        parts[i] = LINK.sub(rewrite, parts[i])
    return "".join(parts)


def linked_files() -> set[str]:
    """Return the files that pages link to and that are not pages, as paths in the repository."""
    pages = [path.name for path in (ROOT / "docs").glob("*.md")] + list(PAGES)
    files = set()
    for page in pages:
        text = rewrite_links(source_path(page).read_text(encoding="utf-8"), page)
        targets = (link for _, link, _ in LINK.findall(text))
        files |= {link.removeprefix("files/") for link in targets if link.startswith("files/")}
    return {path for path in files if (ROOT / path).is_file()}


def on_files(files, config):
    """Add the pages and files outside docs/ to the site."""
    for page, path in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    for path in sorted(linked_files()):
        files.append(File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrite the links of a page before mkdocs renders it."""
    return rewrite_links(markdown, page.file.src_uri)
