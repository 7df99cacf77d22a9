"""Hooks of mkdocs: pages that lie outside docs/, and links that hold on GitHub and on the site.

A page links to any file of the repository by its relative path, as GitHub wants it. On the site a
page outside docs/ has a name of its own (PAGES), and any other file that is linked to is copied
below files/.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
# Page of the site → where it lies in the repository.
OUTSIDE = {
    "benchmarks": "benchmarks/README.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "overview": "README.md",
}
PAGES = {f"{name}.md": place for name, place in OUTSIDE.items()}
LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s#]+)([^)]*)\)")  # label, target, anchor
FENCE = re.compile(r"(^```.*?^```$)", re.M | re.S)


def source(page: str) -> Path:
    """Where a page of the site lies."""
    return ROOT / PAGES.get(page, f"docs/{page}")


def target(link: str, page: str) -> str:
    """A link as the site has it.

    Args:
        link: relative, as the page's source has it. page: of the site, such as data.md.
    """
    if "://" in link or link.startswith(("#", "/", "mailto:")):
        return link
    path = Path(os.path.normpath(source(page).parent / link))
    if not path.is_relative_to(ROOT):
        return link
    inside = path.relative_to(ROOT).as_posix()
    of_pages = {place: name for name, place in PAGES.items()}
    if inside.startswith("docs/"):
        return inside.removeprefix("docs/")
    return of_pages.get(inside, f"files/{inside}")


def rewritten(text: str, page: str) -> str:
    """The Markdown of a page with its links as the site has them; code stays as it is. The site has
    no page for a folder: of a link to one its label is left."""

    def link(found: re.Match) -> str:
        label, place, anchor = found.groups()
        to = target(place, page)
        if to.startswith("files/") and (ROOT / to.removeprefix("files/")).is_dir():
            return f"`{label}`"
        return f"[{label}]({to}{anchor})"

    parts = FENCE.split(text)
    for i in range(0, len(parts), 2):
        parts[i] = LINK.sub(link, parts[i])
    return "".join(parts)


def linked_files() -> set[str]:
    """What pages link to outside docs/ that is no page, by its path in the repository."""
    pages = [path.name for path in (ROOT / "docs").glob("*.md")] + list(PAGES)
    found = set()
    for page in pages:
        text = rewritten(source(page).read_text(encoding="utf-8"), page)
        targets = (link for _, link, _ in LINK.findall(text))
        found |= {link.removeprefix("files/") for link in targets if link.startswith("files/")}
    return {path for path in found if (ROOT / path).is_file()}


def on_files(files, config):
    """Add the pages and the files that lie outside docs/."""
    for page, place in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / place)))
    for path in sorted(linked_files()):
        files.append(File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown, page, config, files):
    return rewritten(markdown, page.file.src_uri)
