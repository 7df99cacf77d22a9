"""The documentation: built offline, true to the schema and the code, its commands typed."""

import ast
import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from lm.export import measured
from lm.export.model_card import PAPER
from tests import config_page
from tests.test_house import ROOT

DOCS = ROOT / "docs"
NEWCOMERS = ("start.md", "look-inside.md", "reproduce.md", "cluster-run.md")
BLOCK = re.compile(r"(?:<!-- not typed: (.+?) -->\n)?```(bash|python)\n(.*?)```", re.S)
# Why a block may be left out when a page is typed.
REASONS = re.compile(
    r"(makes the environment, )?needs a (network|cluster|run on a cluster|token)|needs the trained"
    r"|trains (a second|three)|typed by tests/"
)
# What is added to a page's command so that it takes seconds.
TINY_RUN = (
    "train.steps=4 model.d_model=16 model.d_state=4 tokenizer.vocab_size=300 data.source=jsonl"
    " data.path=tests/data/tiny.jsonl data.seq_len=16 data.val_fraction=0.2 train.threads=1"
)
TINY_SYNTHETIC = (
    "train.steps=2 train.batch_size=4 eval.examples=4 eval.lengths=16 model.d_model=8"
    " model.d_state=2 bars=[]"
)
TINY = {
    "fprnn train": TINY_RUN,
    "fprnn synthetic train": TINY_SYNTHETIC,
}


def blocks(page: str) -> list[tuple[str | None, str, str]]:
    """(why it is not typed or None, language, text) of each block of a page."""
    return BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))


def lines(text: str) -> list[str]:
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.mark.parametrize("page", NEWCOMERS)
def test_every_block_is_typed_or_says_why_not(page):
    found = blocks(page)
    assert [why for why, _, _ in found if why and not REASONS.match(why)] == []
    typed = [text for why, language, text in found if not why and language == "bash"]
    assert typed, "nothing of the page is typed"
    for line in (line for text in typed for line in lines(text)):
        assert line.startswith(("fprnn ", "python -m ")), line
    for why, language, text in found:
        if language == "python":
            ast.parse(text)
            assert not why
    head = (DOCS / page).read_text(encoding="utf-8").partition("\n## ")[0]
    assert re.search(r"\bTook\b.+(second|minute)s?\b.+\bon\b", head, re.S), (
        "how long it took, where"
    )


def typed(command: str) -> list[str]:
    """A line of a page as a command at a tiny scale."""
    added = next((more for start, more in TINY.items() if command.startswith(start)), "")
    words = [*shlex.split(command, comments=True), *added.split()]
    if words[0] == "fprnn":
        return [sys.executable, "-m", "fprnn", *words[1:]]
    return [sys.executable, *words[1:]]


@pytest.fixture
def checkout(tmp_path):
    """A folder that looks like a checkout and may be written to."""
    for name in ("configs", "tests", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def type_page(page: str, folder: Path) -> None:
    """Type the blocks of a page, in their order; the Python ones share one session."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    session = []
    for why, language, text in blocks(page):
        if language == "python":
            session.append(text)
            done = [[sys.executable, "-c", "\n".join(session)]]
        else:
            done = [] if why else [typed(line) for line in lines(text)]
        for command in done:
            result = subprocess.run(
                command, cwd=folder, env=env, capture_output=True, text=True, timeout=600
            )
            said = (result.stdout[-1500:], result.stderr[-2500:])
            verdicts = (
                (0, 1) if "doctor" in command else (0,)
            )  # 1: of this machine, not of the page
            assert result.returncode in verdicts, (page, command, *said)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_first_page_and_the_look_inside_are_typed(checkout):
    type_page("start.md", checkout)
    assert (checkout / "runs/first/hf" / measured.CARD).is_file()
    type_page("look-inside.md", checkout)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", ["reproduce.md", "cluster-run.md"])
def test_the_other_pages_are_typed(page, checkout):
    type_page(page, checkout)


# The page of keys.


def test_the_page_of_keys_is_what_the_schema_says():
    text = config_page.PAGE.read_text(encoding="utf-8")
    assert config_page.page(text) == text, "python -m tests.config_page writes it anew"
    assert config_page.MISSING not in text, "a key whose meaning nobody has written"


def test_a_page_that_is_behind_the_schema_is_brought_up_to_date():
    text = config_page.PAGE.read_text(encoding="utf-8")
    rows = text.splitlines()
    gone = next(row for row in rows if row.startswith("| `zero_stage`"))
    other = next(row for row in rows if row.startswith("| `timeout_s`"))
    spoilt = text.replace(gone + "\n", "").replace(other, other.replace("`1800`", "`17`"))
    spoilt = spoilt.replace(other.replace("`1800`", "`17`"), "| `d_stat` | text | `1` | Old. |")
    found = config_page.page(spoilt)
    assert "| `zero_stage` | `0`, `1`, `2`, `3` | `1` | NOT YET SAID |" in found
    assert "| `timeout_s` | integer > 0 | `1800` | NOT YET SAID |" in found
    assert "d_stat`" not in found
    assert config_page.page(text.replace("Width of the residual stream.", "Old.")) == text
    with pytest.raises(ValueError, match=r"no heading .* for \['engine'\]"):
        config_page.page(text.replace("## `engine`", "## DeepSpeed"))


# The page of the architecture.


def test_the_names_in_the_architecture_are_there():
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py):(\w+)`", text)
    assert len(named) > 30
    missing = []
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        definitions = (ast.FunctionDef, ast.ClassDef)
        there = {node.name for node in tree.body if isinstance(node, definitions)}
        for node in (node for node in tree.body if isinstance(node, ast.Assign)):
            there |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if name not in there:
            missing.append(f"{file}:{name}")
    assert missing == []


def test_the_citation_is_of_the_paper():
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert found["cff-version"] == "1.2.0" and found["license"] == "Apache-2.0"
    assert found["preferred-citation"]["url"] == PAPER
    assert f'version = "{found["version"]}"' in (ROOT / "pyproject.toml").read_text()


# The site.


class Loaded(HTMLParser):
    """What a page makes a browser fetch."""

    def __init__(self, text: str):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag == "link" and attrs.get("rel") in ("canonical", "prev", "next"):
            return
        self.found += [attrs[key] for key in ("src", "srcset") if attrs.get(key)]
        self.found += [attrs["href"]] if tag == "link" and attrs.get("href") else []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built in a process without a network."""
    pytest.importorskip("material", reason="the extra `docs` is not installed")
    out = tmp_path_factory.mktemp("site")
    offline = (
        "import socket, sys\n"
        "def refuse(*args, **kwargs):\n"
        "    raise OSError('network used')\n"
        "socket.getaddrinfo = socket.create_connection = socket.socket.connect = refuse\n"
        "from mkdocs.__main__ import cli\n"  # not -q: under it a warning is no error
        "cli(['build', '-d', sys.argv[1]])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", offline, str(out)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_site_is_built_strictly_and_fetches_nothing(site):
    pages = sorted(site.glob("*.html"))
    wanted = {path.stem for path in DOCS.glob("*.md")}
    wanted |= {"benchmarks", "changelog", "contributing", "overview"}
    assert {page.stem for page in pages} - {"404"} == wanted
    for page in pages:
        outside = [t for t in Loaded(page.read_text()).found if re.match(r"(https?:)?//", t)]
        assert outside == [], page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", style.read_text()), style.name


def test_links_lead_to_files_of_the_site(site):
    """Also those out of docs/, which a hook of ours makes (docs/site.py)."""
    missing = []
    for page in site.glob("*.html"):
        for link in re.findall(r'href="([^"#]+)', page.read_text()):
            if page.name != "404.html" and "://" not in link and not (site / link).exists():
                missing.append(f"{page.name}: {link}")
    assert missing == []
    assert (site / "files/benchmarks/results/compare_tiny.json").is_file()


def test_links_as_the_site_has_them():
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    from docs import site

    benchmarks, changelog = f"{'benchmarks'}.md", f"{'changelog'}.md"  # pages of the site alone
    text = "[a](../benchmarks/README.md#x) [b](data.md#y) [c](https://e.org/z)"
    expected = f"[a]({benchmarks}#x) [b](data.md#y) [c](https://e.org/z)"
    assert site.rewritten(text, "model.md") == expected
    assert site.rewritten("[r](results/)", benchmarks) == "`r`"
    assert site.rewritten("[c](docs/cluster.md)", changelog) == "[c](cluster.md)"
    to_a_file = site.rewritten("[c](../configs/lm/demo.yaml)", "data.md")
    assert to_a_file == "[c](files/configs/lm/demo.yaml)"
    code = "```\n[a](../benchmarks/README.md)\n```\n"
    assert site.rewritten(code, "model.md") == code
