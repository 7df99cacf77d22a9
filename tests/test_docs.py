"""What the pages and the sources say of files and commands: every file that they name is there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from lm.cli import main as lm_cli
from lm.cli.arguments import parse
from lm.config import load as config
from synthetic import cli as synthetic_cli
from synthetic import config as synthetic_config
from synthetic import demo
from tests.test_house import ROOT, relative, repository_files

TEXT = (".md", ".py", ".yaml", ".sh", ".sbatch", ".cpp", ".toml", "Makefile")
FOLDERS = ("benchmarks", "configs", "docs", "fprnn", "launch", "lm", "synthetic", "tests")
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


def commands() -> list[tuple[str, list[str]]]:
    """The command lines of the pages, in blocks and in sentences, as (page, words)."""
    found = []
    for page in (p for p in repository_files() if p.suffix == ".md"):
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        prose = re.sub(r"```.*?```", "", text, flags=re.S)
        lines = [line for block in re.findall(r"```\w*\n(.*?)```", text, re.S)
                 for line in block.splitlines()]  # fmt: skip
        lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
        for line in lines:
            if re.match(r"(fprnn|python -m) .", line):
                found.append((relative(page), shlex.split(line, comments=True)))
    return found


def program(words: list[str]) -> tuple[str, list[str]]:
    """A command's program, named as a module, and its arguments."""
    return ("fprnn", words[1:]) if words[0] == "fprnn" else (words[2], words[3:])


def test_every_command_of_the_pages_is_understood():
    parsers = {
        "fprnn": lm_cli.parser((synthetic_cli.add, demo.add)),
        "lm": lm_cli.parser(),
        "synthetic": synthetic_cli.parser(),
    }
    seen, problems = set(), []
    for page, words in commands():
        name, args = program(words)
        seen.add(name)
        depth = 2 if args[:1] in (["synthetic"], ["tokenizer"]) else 1
        named_only = len(args) <= depth
        if name not in parsers or named_only or "--help" in args:
            continue
        try:
            parsed = parse(parsers[name], ["0" if word == "N" else word for word in args])
        except SystemExit:
            problems.append(f"{page}: {shlex.join(words)}")
            continue
        path = getattr(parsed, "config", None)
        trains = args[0] == "train" or args[:2] == ["synthetic", "train"]
        if trains and (ROOT / path).is_file():  # overrides are keys that there are
            of_suite = "synthetic" in (name, args[0])
            load = synthetic_config.load if of_suite else config.load
            load(ROOT / path, parsed.override, parsed.job_index)
    assert problems == []
    assert {"fprnn", "tests.golden", "benchmarks.training_step"} <= seen


def test_every_option_of_a_benchmark_in_the_pages_is_one_it_has():
    """`--help` of each script, all of them in one process."""
    wanted = {}
    for _, words in commands():
        name, args = program(words)
        if name.startswith("benchmarks."):
            options = {word for word in args if word.startswith("--")}
            wanted.setdefault(name, set()).update(options)
    code = (
        "import runpy, sys\n"
        "for name in sys.argv[1:]:\n"
        "    print('#', name)\n"
        "    sys.argv = [name, '--help']\n"
        "    try:\n"
        "        runpy.run_module(name, run_name='__main__')\n"
        "    except SystemExit:\n"
        "        pass\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *wanted], cwd=ROOT, capture_output=True, text=True, check=True
    )
    helps = dict(part.split("\n", 1) for part in result.stdout.split("# ")[1:])
    for name, options in wanted.items():
        assert not {option for option in options if option not in helps[name]}, name
