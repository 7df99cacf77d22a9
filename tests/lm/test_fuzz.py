"""Many bad inputs, drawn at random: each ends as docs/cluster.md says, none in a traceback."""

import contextlib
import io
import random
import shutil
from pathlib import Path

import pytest

from lm.cli import main
from lm.config import Config
from lm.config_messages import all_keys
from lm.outputs import CONTROL
from tests.running import ROOT

TINY = str(ROOT / "configs/tiny/lm.yaml")
VALUES = (
    "-1", "0", "1e23", "1e400", "-1e-300", "nan", "inf", "100000000000000000000", "true", "null",
    "[]", "{}", "[1, 2]", "{a: 1}", "''", "'\\e[31mred\\e[0m'", '"\\e]0;title\\a"', "\x1b[2J",
    "a" * 300, "../..", "/dev/null", "\udcff", "0x10", "2026-11-23", "*anchor",
    "!!python/object:os",
    "[[[[[", "'\\0'", "1_000", "é\u202e", "module:Class", "os:getcwd", "window:0", "auto", "65537",
)  # fmt: skip


def ended(*args: str) -> str:
    """What a command that was given these arguments says of them.

    Raises:
        Exception: what a person would see as a traceback.
    """
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            status = main([str(arg) for arg in args])
        except SystemExit as e:  # of argparse
            status = e.code
    said = error.getvalue()
    assert status in (0, 1, 2, 65, 71, 76, 78), (status, said)
    assert status == 0 or said, args
    assert not CONTROL.search(said) or status == 2, repr(said)
    return said


@pytest.mark.parametrize("part", range(4))
def test_values_of_a_configuration(part, tmp_path):
    rng = random.Random(part)
    keys = [key for key in all_keys(Config) if key not in ("data.source", "resume")]
    refused = 0
    for _ in range(60):
        pairs = [f"{rng.choice(keys)}={rng.choice(VALUES)}" for _ in range(rng.choice((1, 1, 2)))]
        given = (f"data.path={ROOT}/tests/data/tiny.jsonl", f"out_dir={tmp_path}")
        refused += bool(ended("train", "--config", TINY, "--dry-run", *given, *pairs))
    assert refused > 30


def test_arguments_of_commands(small_export, tmp_path):
    text = tmp_path / "text"
    text.write_text("a b c d e f g h " * 40)
    out = tmp_path / "out"
    commands = (
        ("generate", small_export, "--max-new-tokens", "1", "--prompt"),
        ("generate", small_export, "--max-new-tokens", "1", "--prompt", "a", "--temperature"),
        ("generate", small_export, "--max-new-tokens", "1", "--prompt", "a", "--top-k"),
        ("generate", small_export, "--max-new-tokens", "1", "--prompt", "a", "--schedule"),
        ("generate", small_export, "--max-new-tokens", "1", "--prompt", "a", "--tol"),
        ("inspect", small_export, "--out", out / "x.html", "--"),
        ("agree", small_export, "--out", out / "x.json", "--text"),
        ("report", "--out", out, "--"),
        ("plan", "--gpus"),
        ("sweep", "--"),
        ("watch", "--once", "--"),
        ("import-reference", "--config", TINY, "--"),
    )
    for command in commands:
        for value in ("", "\udcff", "-1", "nan", "1e-300", "1e300", "\x1b[2J", "a" * 300, "/dev"):
            ended(*command, value)


DAMAGE = (b"", b"{", b"[]", b"null", b"\xff\xfe\x00", b'{"a": 1}', b"[[[[" * 5000, b"\x00" * 64)


def test_damaged_files(small_export, tiny_run, tmp_path):
    rng = random.Random(0)
    for folder, command in ((small_export, "generate"), (tiny_run, "inspect")):
        for number in range(40):
            copy = Path(shutil.copytree(folder, tmp_path / f"{command}{number}"))
            files = [f for f in copy.rglob("*") if f.is_file() and f.suffix not in (".py", ".md")]
            victim = rng.choice(sorted(files))
            raw = victim.read_bytes()
            at = rng.randrange(max(1, len(raw)))
            damage = rng.choice((*DAMAGE, raw[:at], raw[:at] + b"\x1b\xff" + raw[at + 2 :]))
            victim.write_bytes(damage)
            if command == "generate":
                ended("generate", copy, "--max-new-tokens", "1", "--prompt", "a")
            else:
                ended("inspect", copy, "a b")
                ended("report", copy)
            shutil.rmtree(copy)
