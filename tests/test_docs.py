"""What the pages and the sources say of files and commands: every file that they name is there."""

import re
from pathlib import Path

from lm.model.configuration_fprnn import MIXED, SCHEDULES
from tests.test_house import ROOT, relative, repository_files

TEXT = (".md", ".py", ".yaml", ".sh", ".sbatch", ".cpp", ".toml", "Makefile")
FOLDERS = ("benchmarks", "configs", "docs", "launch", "lm", "synthetic", "tests")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PAGE = re.compile(r"[\w./-]*[\w-]+\.md\b")
# A path that begins with one of the repository's folders and ends like a file.
INSIDE = re.compile(
    rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./-]*\.(?:py|ya?ml|sh|sbatch|json|png|cpp)\b"
)
TEMPLATE = re.compile(r"(?:^|/)(?:NAME|SCALE)\b")  # of a path: to be filled in


def texts() -> list[tuple[Path, str]]:
    files = [p for p in repository_files() if p.is_file() and p.name.endswith(TEXT)]
    here = Path(__file__).resolve()
    return [(p, p.read_text(encoding="utf-8")) for p in files if p.resolve() != here]


def named(path: Path, text: str) -> set[str]:
    """The files that a text names: in links, any page, and paths in the repository's folders."""
    found = set(PAGE.findall(text)) | set(INSIDE.findall(text))
    if path.suffix == ".md":
        links = (target.partition("#")[0] for target in LINK.findall(text))
        found |= {link for link in links if link and "://" not in link}
    found = {name for name in found if not name.startswith("//")}  # the rest of an address
    return {name for name in found if not TEMPLATE.search(name)}


def is_there(name: str, path: Path) -> bool:
    """Whether a file of this name is beside the text that names it, or seen from the root; a page
    without a folder may also be in docs/, beside the other pages."""
    places = [path.parent, ROOT, *([ROOT / "docs"] if "/" not in name else [])]
    found = [(place / name).resolve() for place in places]
    return any(path.exists() and path.is_relative_to(ROOT) for path in found)


def test_the_reader_of_names_finds_them():
    text = "[x](docs/a.md#b), `lm/no.py`, ../z/q.md, [h](https://e.org/w.md); b.md's, a/lm/x.py"
    assert named(Path("x.md"), text) == {
        "docs/a.md", "lm/no.py", "../z/q.md", "b.md",
    }  # fmt: skip
    assert not is_there("math.md", ROOT / "lm/model/blocks.py")
    assert is_there("model.md", ROOT / "lm/model/blocks.py")
    assert is_there("../benchmarks/README.md", ROOT / "docs/fixed-point.md")


def test_every_file_that_is_named_is_there():
    missing = []
    for path, text in texts():
        for name in sorted(named(path, text)):
            if not is_there(name, path):
                missing.append(f"{relative(path)}: {name}")
    assert missing == []


def test_the_pages_have_the_widths_that_mixed_draws():
    widths = ["L" if share == 1 else f"L/{share}" for share in MIXED]
    listed = f"{', '.join(widths[:-1])} or {widths[-1]}"
    for page in ("config.md", "fixed-point.md"):
        lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
        row = next(line for line in lines if "`mixed`" in line and line.startswith("| `"))
        assert listed in row and "`auto`" in row, page
    assert listed in SCHEDULES["mixed"]


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def test_every_anchor_is_a_heading():
    for path, text in texts():
        for target in LINK.findall(text) if path.suffix == ".md" else ():
            name, mark, anchor = target.partition("#")
            if mark and "://" not in target:
                page = path.parent / name if name else path
                assert anchor in headings(page), f"{relative(path)}: {target}"
