"""The documentation: its files, commands and keys exist, its commands run, and the site builds."""

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

from lm.cli import main as lm_cli
from lm.cli.arguments import parse
from lm.config import load as config
from lm.export.model_card import PAPER_URL
from synthetic import cli as synthetic_cli
from synthetic import config as synthetic_config
from tests import config_page
from tests.running import ENV, FORKS
from tests.test_layers import ROOT, list_repository_files, relative

DOCS = ROOT / "docs"

# Files and commands that pages and sources name.

SUFFIXES = (".md", ".py", ".yaml", ".sh", ".sbatch", ".cpp", ".toml", "Makefile")
FOLDERS = ("benchmarks", "configs", "docs", "fprnn", "launch", "lm", "synthetic", "tests")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PAGE = re.compile(r"[\w./-]*[\w-]+\.md\b")
FILE = re.compile(
    rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./-]*\.(?:py|ya?ml|sh|sbatch|json|png|cpp)\b"
)
PLACEHOLDER = re.compile(r"(?:^|/)(?:NAME|SCALE)\b")  # in a path that the reader completes


def find_named_files(path: Path, text: str) -> set[str]:
    """Return the files that a text names: link targets, pages, and paths in our folders."""
    names = set(PAGE.findall(text)) | set(FILE.findall(text))
    if path.suffix == ".md":
        targets = (target.partition("#")[0] for target in LINK.findall(text))
        names |= {target for target in targets if target and "://" not in target}
    names = {name for name in names if not name.startswith("//")}  # the end of a URL
    return {name for name in names if not PLACEHOLDER.search(name)}


def file_exists(name: str, path: Path) -> bool:
    """Return True if a named file exists, relative to the text's folder, the root, or docs/."""
    folders = [path.parent, ROOT, *([DOCS] if "/" not in name else [])]
    candidates = [(folder / name).resolve() for folder in folders]
    return any(file.exists() and file.is_relative_to(ROOT) for file in candidates)


def test_every_named_file_exists():
    text = "[x](docs/a.md#b), `lm/no.py`, ../z/q.md, [h](https://e.org/w.md); b.md's, a/lm/x.py"
    assert find_named_files(Path("x.md"), text) == {"docs/a.md", "lm/no.py", "../z/q.md", "b.md"}
    assert file_exists("model.md", ROOT / "lm/model/blocks.py")
    assert not file_exists("math.md", ROOT / "lm/model/blocks.py")
    missing = []
    for file in list_repository_files():
        if not file.is_file() or not file.name.endswith(SUFFIXES) or file == Path(__file__):
            continue
        names = find_named_files(file, file.read_text(encoding="utf-8"))
        missing += [f"{relative(file)}: {name}" for name in names if not file_exists(name, file)]
    assert sorted(missing) == []


def find_commands() -> list[tuple[str, list[str]]]:
    """Return the command lines of all pages, in blocks and in sentences, as (page, words)."""
    commands = []
    for page in (p for p in list_repository_files() if p.suffix == ".md" and p.is_file()):
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        blocks = re.findall(r"```\w*\n(.*?)```", text, re.S)
        lines = [line for block in blocks for line in block.splitlines()]
        prose = re.sub(r"```.*?```", "", text, flags=re.S)
        lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
        for line in lines:
            if re.match(r"(fprnn|python -m) .", line):
                words = shlex.split(line, comments=True)
                redirections = (i for i, word in enumerate(words) if word in ("<", ">"))
                commands.append((relative(page), words[: next(redirections, None)]))
    return commands


def split_program(words: list[str]) -> tuple[str, list[str]]:
    """Return the module that a command runs, and its arguments."""
    return ("fprnn", words[1:]) if words[0] == "fprnn" else (words[2], words[3:])


def test_every_command_of_the_pages_is_valid():
    parsers = {
        "fprnn": lm_cli.make_parser((synthetic_cli.add_synthetic, synthetic_cli.add_demo)),
        "lm": lm_cli.make_parser(),
        "synthetic": synthetic_cli.make_parser(),
    }
    programs, invalid = set(), []
    for page, words in find_commands():
        program, args = split_program(words)
        programs.add(program)
        depth = 2 if args[:1] == ["synthetic"] else 1
        is_mention = len(args) <= depth
        if program not in parsers or is_mention or "--help" in args:
            continue
        try:
            parsed = parse(parsers[program], ["0" if word == "N" else word for word in args])
        except SystemExit:
            invalid.append(f"{page}: {shlex.join(words)}")
            continue
        path = getattr(parsed, "config", None)
        is_training = args[0] == "train" or args[:2] == ["synthetic", "train"]
        if is_training and (ROOT / path).is_file():  # check that the overrides name existing keys
            is_synthetic = "synthetic" in (program, args[0])
            load = synthetic_config.load if is_synthetic else config.load
            load(ROOT / path, parsed.override, parsed.job_index)
    assert invalid == []
    assert {"fprnn", "tests.golden", "benchmarks.training_step"} <= programs


def test_every_option_of_a_benchmark_in_the_pages_exists():
    """Read `--help` of each script."""
    options: dict[str, set[str]] = {}
    for _, words in find_commands():
        name, args = split_program(words)
        if name.startswith("benchmarks."):
            options.setdefault(name, set()).update(w for w in args if w.startswith("--"))
    for name, named_options in options.items():
        result = FORKS.run(name, ["--help"], timeout=120)
        assert result.returncode == 0, result.stderr
        assert {option for option in named_options if option not in result.stdout} == set(), name


def test_the_functions_named_in_the_architecture_exist():
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    names = re.findall(r"`([\w/]+\.py):(\w+)`", text)
    assert len(names) > 25
    missing = []
    for file, name in names:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        functions = (ast.FunctionDef, ast.ClassDef)
        defined = {node.name for node in tree.body if isinstance(node, functions)}
        for node in (node for node in tree.body if isinstance(node, ast.Assign)):
            defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if name not in defined:
            missing.append(f"{file}:{name}")
    assert missing == []


def test_the_citation_is_of_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0" and citation["license"] == "Apache-2.0"
    assert citation["preferred-citation"]["url"] == PAPER_URL
    assert f'version = "{citation["version"]}"' in (ROOT / "pyproject.toml").read_text()


# Pages for newcomers, whose commands are run.

NEWCOMERS = ("start.md", "inspect.md", "reproduce.md", "cluster-run.md")
BLOCK = re.compile(r"(?:<!-- not typed: (.+?) -->\n)?```(bash|python)\n(.*?)```", re.S)
# Accepted reasons for a block that is not run.
REASONS = re.compile(
    r"(makes the environment, )?needs a (network|cluster|run on a cluster|token)|needs the trained"
    r"|trains (a second|three)|typed by tests/"
)
# Overrides that make a page's command run in seconds.
TINY = {
    "fprnn train": (
        "train.steps=4 model.d_model=16 model.d_state=4 tokenizer.vocab_size=300 data.source=jsonl"
        " data.path=tests/data/tiny.jsonl data.seq_len=16 data.val_fraction=0.2 train.threads=1"
    ),
    "fprnn synthetic train": (
        "train.steps=2 train.batch_size=4 eval.examples=4 eval.lengths=16 model.d_model=8"
        " model.d_state=2 thresholds=[]"
    ),
}


def find_blocks(page: str) -> list[tuple[str, str, str]]:
    """Return (reason not to run it or "", language, text) of each block of a page."""
    return BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))


def split_commands(text: str) -> list[str]:
    """Return the commands of a block, each as one line."""
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.mark.parametrize("page", NEWCOMERS)
def test_every_block_can_be_run_or_has_a_reason(page):
    blocks = find_blocks(page)
    assert [reason for reason, _, _ in blocks if reason and not REASONS.match(reason)] == []
    bash = [text for reason, language, text in blocks if not reason and language == "bash"]
    assert bash, "no block of the page is run"
    for line in (line for text in bash for line in split_commands(text)):
        assert line.startswith(("fprnn ", "python -m ")), line
    for reason, language, text in blocks:
        if language == "python":
            ast.parse(text)
            assert not reason
    head = (DOCS / page).read_text(encoding="utf-8").partition("\n## ")[0]
    duration = re.search(r"\b[Tt]ook\b.+(second|minute)s?\b.+\bon\b", head, re.S)
    assert duration, "the page does not state how long it takes on which machine"


@pytest.fixture
def checkout(tmp_path):
    """A folder that looks like a checkout and may be written to."""
    for name in ("configs", "tests", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run_page(page: str, folder: Path) -> None:
    """Run the blocks of a page in their order, at a tiny scale; Python blocks share a session."""
    session = []
    for reason, language, text in find_blocks(page):
        commands = []
        if language == "python":
            session.append(text)
            commands.append([sys.executable, "-c", "\n".join(session)])
        for line in split_commands(text) if language == "bash" and not reason else ():
            overrides = next((more for start, more in TINY.items() if line.startswith(start)), "")
            words = [*shlex.split(line, comments=True), *overrides.split()]
            module = ["-m", "fprnn"] if words[0] == "fprnn" else []
            commands.append([sys.executable, *module, *words[1:]])
        for command in commands:
            result = subprocess.run(
                command, cwd=folder, env=ENV, capture_output=True, text=True, timeout=600
            )
            # `doctor` ends with 1 if this machine lacks something.
            accepted = (0, 1) if "doctor" in command else (0,)
            output = (result.stdout[-1500:], result.stderr[-2500:])
            assert result.returncode in accepted, (page, command, *output)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "pages", [("start.md", "inspect.md"), ("reproduce.md",), ("cluster-run.md",)]
)
def test_the_pages_run(pages, checkout):
    for page in pages:
        run_page(page, checkout)


# The page of keys.


def test_the_page_of_keys_matches_the_schema():
    text = config_page.PAGE.read_text(encoding="utf-8")
    assert config_page.update_page(text) == text, "run `python -m tests.config_page`"
    assert config_page.MISSING_MEANING not in text, "a key has no meaning"


def test_the_page_of_keys_is_updated():
    text = config_page.PAGE.read_text(encoding="utf-8")
    row = next(row for row in text.splitlines() if row.startswith("| `zero_stage`"))
    updated = config_page.update_page(text.replace(row, "| `d_stat` | text | `1` | Old. |"))
    expected = f"| `zero_stage` | `0`, `1`, `2`, `3` | `1` | {config_page.MISSING_MEANING} |"
    assert expected in updated and "d_stat`" not in updated
    with pytest.raises(ValueError, match=r"no heading .* for \['engine'\]"):
        config_page.update_page(text.replace("## `engine`", "## DeepSpeed"))


# The site.


class RemoteReferences(HTMLParser):
    """References that make a browser load something when it opens a page."""

    def __init__(self, text: str):
        super().__init__()
        self.references = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag == "link" and attrs.get("rel") in ("canonical", "prev", "next"):
            return
        self.references += [attrs[key] for key in ("src", "srcset") if attrs.get(key)]
        self.references += [attrs["href"]] if tag == "link" and attrs.get("href") else []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built without a network; mkdocs checks links and anchors."""
    pytest.importorskip("material", reason="the extra `docs` is not installed")
    out = tmp_path_factory.mktemp("site")
    offline = (
        "import socket, sys\n"
        "def refuse(*args, **kwargs):\n"
        "    raise OSError('network used')\n"
        "socket.getaddrinfo = socket.create_connection = socket.socket.connect = refuse\n"
        "from mkdocs.__main__ import cli\n"  # without -q, which would hide warnings from `strict`
        "cli(['build', '-d', sys.argv[1]])\n"
    )
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-c", offline, str(out)]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return out


def test_the_site_has_every_page_and_loads_nothing_remote(site):
    pages = sorted(site.glob("*.html"))
    expected = {path.stem for path in DOCS.glob("*.md")}
    expected |= {"benchmarks", "changelog", "contributing", "overview"}
    assert {page.stem for page in pages} - {"404"} == expected
    for page in pages:
        references = RemoteReferences(page.read_text()).references
        assert [r for r in references if re.match(r"(https?:)?//", r)] == [], page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", style.read_text()), style.name


def test_every_link_of_the_site_works(site):
    """mkdocs does not check the links that our hook (docs/site.py) makes to other files."""
    broken = []
    for page in site.glob("*.html"):
        for link in re.findall(r'href="([^"#]+)', page.read_text()):
            if page.name != "404.html" and "://" not in link and not (site / link).exists():
                broken.append(f"{page.name}: {link}")
    assert broken == []
    assert (site / "files/benchmarks/results/compare_tiny.json").is_file()


@pytest.mark.parametrize(
    "page, markdown, expected",
    [
        ("model.md", "[a](../benchmarks/README.md#x)", "[a](BENCHMARKS#x)"),
        ("model.md", "[b](data.md#y) [c](https://e.org/z)", "[b](data.md#y) [c](https://e.org/z)"),
        ("BENCHMARKS", "[r](results/)", "`r`"),
        ("CHANGELOG", "[c](docs/cluster.md)", "[c](cluster.md)"),
        ("data.md", "[c](../configs/lm/demo.yaml)", "[c](files/configs/lm/demo.yaml)"),
        ("model.md", "```\n[a](../benchmarks/README.md)\n```\n", None),  # code stays
    ],
)
def test_links_are_rewritten_for_the_site(page, markdown, expected):
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    from docs import site

    def complete(text):
        # These two pages exist only on the site; named in full they would count as missing files.
        return text.replace("BENCHMARKS", "benchmarks" + ".md").replace(
            "CHANGELOG", "changelog" + ".md"
        )

    expected = markdown if expected is None else expected
    assert site.rewrite_links(markdown, complete(page)) == complete(expected)
