"""Bad inputs, drawn at random, for both command lines; each must end as docs/cluster.md says, with
a sentence and without a traceback. FPRNN_FUZZ: how many, 30 if unset.
"""

import contextlib
import io
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
STATUSES = {0, 1, 2, 65, 71, 75, 76, 77, 78}
TINY = ROOT / "configs/tiny/lm.yaml"
TEXT = ROOT / "tests/data/tiny.jsonl"
TRAINED = [TINY, f"data.path={TEXT}", "train.steps=1"]  # the least that is a training
# For a key of a YAML, an argument, an option.
VALUES = [
    *("-1", "0", "1", "3", "1e23", "1e400", "-1e-300", "1e-300", "0.5", "nan", "inf", "1_000"),
    *("9" * 20, "9" * 5000, "0x10", "0b_", "65537", "1000000", "true", "null", "on", "'on'"),
    *("", "''", "[]", "{}", "[1, 2]", "[[]]", "{a: 1}", "{1: {2: 3}}", "[[[[[", "[" * 5000),
    *("'\\e[31mred'", '"\\e]0;title\\a"', "\x1b[2J", '"\\0"', "é\u202e", "\udcff", "a" * 300),
    *("..", "../x", "/dev/null", "/dev/full", "/proc/self/mem", "~nobody", "no/such/place", "text"),
    *("2026-13-45", "*anchor", "!!python/object:os", "<<: 1", "module:Class", "os:getcwd", "a: b"),
    *("auto", "window:0", "window:1000000", "parallel", "fp32", "householder", "mamba"),
]
# In the place of a file, or of a part of it.
JUNK = [
    *(b"", b"{", b"[]", b"{}", b"null", b"0", b'"a"', b'{"a": 1}', b"\xff\xfe\x00", b"\x00" * 64),
    *(b"[" * 5000, b'{"a":' * 5000, b"\x1b]0;title\x07", b"9" * 5000, b"1e999", b"NaN", b"a: [b"),
]


class Places(NamedTuple):
    """What the cases are about; copied before it is damaged."""

    run: Path
    export: Path
    synthetic: Path


Case = tuple[str, list]  # the module of a command line, its arguments


def overrides(rng: random.Random, places: Places, folder: Path) -> Case:
    """A training whose keys have values that they should not have."""
    of_synthetic = [places.synthetic / "config.yaml", "train.steps=1"]
    module, schema, config = rng.choice(
        [("lm", Config, TRAINED), ("synthetic", SyntheticConfig, of_synthetic)]
    )
    drawn = [key for key in all_keys(schema) if key != "resume"]
    pairs = [f"{rng.choice(drawn)}={rng.choice(VALUES)}" for _ in range(rng.choice((1, 1, 2)))]
    return module, ["train", "--config", *config, f"out_dir={folder}", *pairs]


def commands(places: Places, folder: Path) -> dict[str, list[Case]]:
    """Commands that work, by the place that they read."""
    run, export, synthetic = places
    page, scores = folder / "x.html", folder / "x.json"
    going_on = [f"out_dir={folder}", "resume=auto"]
    both = [("lm", ["report", "--out", folder / "out", run]), ("lm", ["status", run])]
    return {
        "run": [
            *both,
            ("lm", ["inspect", "--out", page, run, "a b"]),
            ("lm", ["export", run, folder / "hf"]),
            ("lm", ["train", "--config", *TRAINED, "train.steps=9", *going_on]),
            ("lm", ["train", "--config", *TRAINED, f"out_dir={folder}/a", f"init_from={run}"]),
            ("lm", ["sweep", run / "config.yaml"]),
            ("lm", ["plan", run / "config.yaml", "--gpus", "1"]),
        ],
        "export": [
            ("lm", ["generate", export, "--max-new-tokens", "1", "--prompt", "a"]),
            ("lm", ["generate", export, "--prompt", "a", "--temperature", "1", "--top-k", "1"]),
            ("lm", ["inspect", "--out", page, export, "a b"]),
            ("lm", ["report", "--out", folder / "out", export]),
            ("lm", ["eval", export, "--out", scores, "--tasks", "catbabi_mini", "--limit", "1"]),
        ],
        "synthetic": [
            ("synthetic", ["inspect", "--out", page, synthetic, "--length", "3"]),
            ("synthetic", ["eval", "--out", scores, synthetic, "eval.lengths=3"]),
            ("synthetic", ["train", "--config", synthetic / "config.yaml", *going_on]),
            ("synthetic", ["report", "fig1", f"out_dir={folder}"]),
            ("lm", ["report", "--out", folder / "out", synthetic]),
            ("lm", ["status", synthetic]),
        ],
    }


def arguments(rng: random.Random, places: Places, folder: Path) -> Case:
    """A command one of whose words is what it should not be."""
    cases = [case for of_place in commands(places, folder).values() for case in of_place]
    module, (command, *words) = rng.choice(cases)
    # No training: its config is what `overrides` and `texts` are about.
    while command == "train":
        module, (command, *words) = rng.choice(cases)
    at = rng.choice([i for i, word in enumerate(words) if not str(word).startswith("--")])
    value = rng.choice([*VALUES, *places, folder])
    if str(value).startswith("-"):
        value = f"./{value}"
    return module, [command, *words[:at], value, *words[at + 1 :]]


def damaged(rng: random.Random, places: Places, folder: Path) -> Case:
    """A command on a folder one of whose files is damaged."""
    which = rng.choice(places._fields)
    copy = Path(shutil.copytree(getattr(places, which), folder / getattr(places, which).name))
    files = sorted(f for f in copy.rglob("*") if f.is_file() and f.suffix not in (".py", ".md"))
    damage(rng, rng.choice(files))
    if rng.random() < 0.5:  # whoever changes a file may have meant it
        for sums in copy.rglob("SHA256SUMS"):
            sums.unlink()
    return rng.choice(commands(places._replace(**{which: copy}), folder)[which])


def texts(rng: random.Random, places: Places, folder: Path) -> Case:
    """A training whose YAML or whose data is damaged."""
    config, text = folder / "config.yaml", folder / "text.jsonl"
    shutil.copy(TINY, config)
    shutil.copy(TEXT, text)
    damage(rng, rng.choice((config, text)))
    given = [f"data.path={text}", f"out_dir={folder}", "train.steps=1", "model.n_layer=1"]
    return "lm", ["train", "--config", config, *given]


def damage(rng: random.Random, file: Path) -> None:
    """Replace a file, cut it, or put something into it."""
    raw = file.read_bytes()
    at = rng.randrange(len(raw) + 1)
    junk = rng.choice(JUNK)
    numbers = list(re.finditer(rb"-?\d+(\.\d+)?(e[-+]?\d+)?", raw)) if b"\0" not in raw else []
    ways = [junk, raw[:at], raw[:at] + junk + raw[at:], raw[:at] + junk + raw[at + len(junk) :]]
    if numbers:  # text: what looks right, with a number that is something else
        number = rng.choice(numbers)
        ways += [raw[: number.start()] + junk + raw[number.end() :]] * 4
    file.write_bytes(rng.choice(ways))


KINDS = (overrides, overrides, arguments, damaged, damaged, texts)


def wrong(status: int, said: str, errors: str) -> str:
    """What a command's end should not have been; "" where it was right."""
    if "Traceback (most recent call last)" in errors + said:
        return "a traceback"
    if status not in STATUSES:
        return f"status {status}"
    if status and not errors.strip():
        return f"status {status}, and nothing is said"
    if CONTROL.search(errors.replace("\r", "")):
        return "control characters on the terminal"
    return ""


MAINS = {"lm": lm.cli.main.main, "synthetic": synthetic.cli.main}
SMALL = (
    "model.d_model=8",
    "train.steps=2",
    "train.batch_size=2",
    "train.length=3",
    "thresholds=[]",
)
SMALL += ("train.curriculum=null", "train.adversarial_noise=0", "eval.lengths=3", "eval.examples=2")


@pytest.fixture(scope="module")
def places(tiny_run, small_export, tmp_path_factory):
    out = f"out_dir={tmp_path_factory.mktemp('synthetic')}"
    cfg = config.load(ROOT / "configs/synthetic/small/s3.yaml", [*SMALL, out])
    train(cfg)
    run = tmp_path_factory.mktemp("run") / "tiny"
    shutil.copytree(tiny_run, run, ignore=shutil.ignore_patterns("hf"))
    return Places(run, small_export, cfg.run_dir)


def called(module: str, args: list, folder: Path) -> tuple[int, str, str]:
    """Status, output and errors of a command; trainings of `lm` are checked and not made."""
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
        except SystemExit as e:  # of argparse
            status = e.code
        except Exception:
            status = 1
            errors.write(traceback.format_exc())
    return status, out.getvalue(), errors.getvalue()


def test_random_bad_inputs_give_one_line_errors(places, tmp_path):
    refused, failures = 0, []
    for number in range(COUNT):
        folder = tmp_path / str(number)
        (folder / "here").mkdir(parents=True)
        kind = KINDS[number % len(KINDS)]
        module, args = kind(random.Random(number), places, folder)
        status, said, errors = called(module, args, folder / "here")
        refused += status != 0
        if how := wrong(status, said, errors):
            shown = " ".join(repr(str(arg))[1:-1][:90] for arg in args)
            failures.append(f"{kind.__name__}: {module} {shown}: {how}\n{errors[-1500:]}")
        shutil.rmtree(folder)
    assert not failures
    assert refused > COUNT / 3  # or they are no bad inputs
