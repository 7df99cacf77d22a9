"""Random bad inputs for both command lines, `lm` and `synthetic`.

Each command must end with a message, without a traceback, and with an exit status of
docs/cluster.md. The environment variable FPRNN_FUZZ sets the number of inputs (default: 30).
"""

import contextlib
import io
import itertools
import os
import random
import re
import shutil
import traceback
from pathlib import Path
from typing import NamedTuple

import pytest

import lm.cli.main
import synthetic.cli
from lm.common.files import CONTROL
from lm.config.messages import all_keys
from lm.config.schema import Config
from synthetic import config
from synthetic.config import Config as SyntheticConfig
from synthetic.train import train
from tests.running import ROOT

COUNT = int(os.environ.get("FPRNN_FUZZ", "30"))
EXIT_STATUSES = {0, 1, 2, 65, 71, 75, 76, 77, 78}
TINY = ROOT / "configs/tiny/lm.yaml"
TEXT = ROOT / "tests/data/tiny.jsonl"
TINY_RUN = [TINY, f"data.path={TEXT}", "train.steps=1"]
# Invalid or unusual values of keys, arguments and options, one kind per line.
VALUES = [
    *("-1", "0", "1", "3", "1e23", "1e400", "-1e-300", "1e-300", "0.5", "nan", "inf", "1_000"),
    *("9" * 20, "9" * 5000, "0x10", "0b_", "65537", "1000000", "true", "null", "on", "'on'"),
    *("", "''", "[]", "{}", "[1, 2]", "[[]]", "{a: 1}", "{1: {2: 3}}", "[[[[[", "[" * 5000),
    *("'\\e[31mred'", '"\\e]0;title\\a"', "\x1b[2J", '"\\0"', "é\u202e", "\udcff", "a" * 300),
    *("..", "../x", "/dev/null", "/dev/full", "/proc/self/mem", "~nobody", "no/such/place", "text"),
    *("2026-13-45", "*anchor", "!!python/object:os", "<<: 1", "module:Class", "os:getcwd", "a: b"),
    *("auto", "window:0", "window:1000000", "parallel", "fp32", "householder", "mamba"),
]
# Bytes that replace a file or a part of it.
JUNK = [
    *(b"", b"{", b"[]", b"{}", b"null", b"0", b'"a"', b'{"a": 1}', b"\xff\xfe\x00", b"\x00" * 64),
    *(b"[" * 5000, b'{"a":' * 5000, b"\x1b]0;title\x07", b"9" * 5000, b"1e999", b"NaN", b"a: [b"),
]


class Folders(NamedTuple):
    """Intact folders that the commands read."""

    run: Path
    export: Path
    synthetic: Path


Command = tuple[str, list]  # name of the command line, and arguments


def make_bad_overrides(rng: random.Random, folders: Folders, out: Path) -> Command:
    """Return a training with bad values of keys."""
    synthetic_run = [folders.synthetic / "config.yaml", "train.steps=1"]
    module, schema, run = rng.choice(
        [("lm", Config, TINY_RUN), ("synthetic", SyntheticConfig, synthetic_run)]
    )
    keys = [key for key in all_keys(schema) if key != "resume"]
    pairs = [f"{rng.choice(keys)}={rng.choice(VALUES)}" for _ in range(rng.choice((1, 1, 2)))]
    return module, ["train", "--config", *run, f"out_dir={out}", *pairs]


def list_commands(folders: Folders, out: Path) -> dict[str, list[Command]]:
    """Return valid commands by the folder that they read; they write only into `out`."""
    run, export, synthetic = folders
    page, scores = out / "x.html", out / "x.json"
    resume = [f"out_dir={out}", "resume=auto"]
    return {
        "run": [
            ("lm", ["report", "--out", out / "out", run]),
            ("lm", ["status", run]),
            ("lm", ["inspect", "--out", page, run, "a b"]),
            ("lm", ["export", run, out / "hf"]),
            ("lm", ["train", "--config", *TINY_RUN, "train.steps=9", *resume]),
            ("lm", ["train", "--config", *TINY_RUN, f"out_dir={out}/a", f"init_from={run}"]),
            ("lm", ["sweep", run / "config.yaml"]),
            ("lm", ["plan", run / "config.yaml", "--gpus", "1"]),
        ],
        "export": [
            ("lm", ["generate", export, "--max-new-tokens", "1", "--prompt", "a"]),
            ("lm", ["generate", export, "--prompt", "a", "--temperature", "1", "--top-k", "1"]),
            ("lm", ["inspect", "--out", page, export, "a b"]),
            ("lm", ["report", "--out", out / "out", export]),
            ("lm", ["eval", export, "--out", scores, "--tasks", "catbabi_mini", "--limit", "1"]),
        ],
        "synthetic": [
            ("synthetic", ["inspect", "--out", page, synthetic, "--length", "3"]),
            ("synthetic", ["eval", "--out", scores, synthetic, "eval.lengths=3"]),
            ("synthetic", ["train", "--config", synthetic / "config.yaml", *resume]),
            ("synthetic", ["report", "fig1", f"out_dir={out}"]),
            ("lm", ["report", "--out", out / "out", synthetic]),
            ("lm", ["status", synthetic]),
        ],
    }


def make_bad_argument(rng: random.Random, folders: Folders, out: Path) -> Command:
    """Return a command with one bad argument. It is no training: other functions vary its keys."""
    commands = list(itertools.chain(*list_commands(folders, out).values()))
    module, (command, *words) = rng.choice(commands)
    while command == "train":
        module, (command, *words) = rng.choice(commands)
    i = rng.choice([i for i, word in enumerate(words) if not str(word).startswith("--")])
    value = rng.choice([*VALUES, *folders, out])
    if str(value).startswith("-"):
        value = f"./{value}"
    return module, [command, *words[:i], value, *words[i + 1 :]]


def damage_folder(rng: random.Random, folders: Folders, out: Path) -> Command:
    """Return a command that reads a folder with one damaged file."""
    name = rng.choice(folders._fields)
    copy = Path(shutil.copytree(getattr(folders, name), out / getattr(folders, name).name))
    files = sorted(f for f in copy.rglob("*") if f.is_file() and f.suffix not in (".py", ".md"))
    damage(rng, rng.choice(files))
    if rng.random() < 0.5:  # as if a user had changed the file on purpose
        for sums in copy.rglob("SHA256SUMS"):
            sums.unlink()
    return rng.choice(list_commands(folders._replace(**{name: copy}), out)[name])


def damage_training_inputs(rng: random.Random, folders: Folders, out: Path) -> Command:
    """Return a training with a damaged YAML or damaged data."""
    config, text = out / "config.yaml", out / "text.jsonl"
    shutil.copy(TINY, config)
    shutil.copy(TEXT, text)
    damage(rng, rng.choice((config, text)))
    overrides = [f"data.path={text}", f"out_dir={out}", "train.steps=1", "model.n_layer=1"]
    return "lm", ["train", "--config", config, *overrides]


def damage(rng: random.Random, file: Path) -> None:
    """Replace a file, cut it, insert bytes into it, or replace bytes or a number in it."""
    raw = file.read_bytes()
    i = rng.randrange(len(raw) + 1)
    junk = rng.choice(JUNK)
    numbers = list(re.finditer(rb"-?\d+(\.\d+)?(e[-+]?\d+)?", raw)) if b"\0" not in raw else []
    inserted, overwritten = raw[:i] + junk + raw[i:], raw[:i] + junk + raw[i + len(junk) :]
    results = [junk, raw[:i], inserted, overwritten]
    if numbers:  # four times as likely: the rest of the text stays valid
        number = rng.choice(numbers)
        results += [raw[: number.start()] + junk + raw[number.end() :]] * 4
    file.write_bytes(rng.choice(results))


# The test uses them in turn; those with the most possible inputs are listed twice.
MAKERS = [make_bad_overrides] * 2 + [make_bad_argument]
MAKERS += [damage_folder] * 2 + [damage_training_inputs]


def find_fault(status: int, output: str, errors: str) -> str:
    """Return the fault in the way in which a command ended, or ""."""
    if "Traceback (most recent call last)" in errors + output:
        return "a traceback"
    if status not in EXIT_STATUSES:
        return f"status {status}"
    if status and not errors.strip():
        return f"status {status} without a message"
    if CONTROL.search(errors.replace("\r", "")):
        return "control characters on the terminal"
    return ""


MAINS = {"lm": lm.cli.main.main, "synthetic": synthetic.cli.main}
SHORT_TRAINING = (
    "model.d_model=8 train.steps=2 train.batch_size=2 train.length=3 train.curriculum=null"
    " train.adversarial_noise=0 eval.lengths=3 eval.examples=2 thresholds=[]"
)


@pytest.fixture(scope="module")
def folders(tiny_run, small_export, tmp_path_factory):
    out = f"out_dir={tmp_path_factory.mktemp('synthetic')}"
    cfg = config.load(ROOT / "configs/synthetic/small/s3.yaml", [*SHORT_TRAINING.split(), out])
    train(cfg)
    run = tmp_path_factory.mktemp("run") / "tiny"
    shutil.copytree(tiny_run, run, ignore=shutil.ignore_patterns("hf"))
    return Folders(run, small_export, cfg.run_dir)


def run_command(module: str, args: list, folder: Path) -> tuple[int, str, str]:
    """Return status, stdout and stderr of a command; a training of `lm` is only a dry run."""
    if (module, args[0]) == ("lm", "train"):
        args = [*args, "--dry-run"]
    out, errors = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            status = MAINS[module]([str(arg) for arg in args])
        except SystemExit as e:  # raised by argparse
            status = e.code
        except Exception:
            status = 1
            errors.write(traceback.format_exc())
    return status, out.getvalue(), errors.getvalue()


def test_random_bad_inputs_give_one_line_errors(folders, tmp_path):
    refused_count, failures = 0, []
    for seed in range(COUNT):
        out = tmp_path / str(seed)
        (out / "cwd").mkdir(parents=True)
        make_command = MAKERS[seed % len(MAKERS)]
        module, args = make_command(random.Random(seed), folders, out)
        status, output, errors = run_command(module, args, out / "cwd")
        refused_count += status != 0
        if fault := find_fault(status, output, errors):
            command = " ".join(repr(str(arg))[1:-1][:90] for arg in args)
            failures.append(
                f"{make_command.__name__}: {module} {command}: {fault}\n{errors[-1500:]}"
            )
        shutil.rmtree(out)
    assert not failures
    assert refused_count > COUNT / 3  # otherwise the inputs are not bad enough
