"""Some of the bad inputs of tests/fuzz.py, in this process (`python -m tests.fuzz` has all)."""

import contextlib
import io
import shutil
import traceback

import pytest

import lm.cli.main
import synthetic.cli
from synthetic import config
from synthetic.train import train
from tests.fuzz import KINDS, Places, attempt, overrides, wrong
from tests.running import ROOT

MAINS = {"lm": lm.cli.main.main, "synthetic": synthetic.cli.main}
SMALL = ("model.d_model=8", "train.steps=2", "train.batch_size=2", "train.length=3", "bars=[]")
SMALL += ("train.curriculum=null", "train.adversary=0", "eval.lengths=3", "eval.examples=2")


@pytest.fixture(scope="module")
def places(tiny_run, small_export, tmp_path_factory):
    out = f"out_dir={tmp_path_factory.mktemp('synthetic')}"
    cfg = config.load(ROOT / "configs/synthetic/small/s3.yaml", [*SMALL, out])
    train(cfg)
    run = tmp_path_factory.mktemp("run") / "tiny"
    shutil.copytree(tiny_run, run, ignore=shutil.ignore_patterns("hf"))
    return Places(run, small_export, cfg.run_dir)


def called(module, args, where):
    """As tests.fuzz.started does, but for trainings of `lm`, which are checked and not made."""
    if (module, args[0]) == ("lm", "train"):
        args = [*args, "--dry-run"]
    out, errors = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(where),
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


def test_bad_inputs_end_in_sentences(places):
    ends = [attempt(number, places, called) for number in range(48)]
    assert not [how for _, _, how in ends if how]
    refused = sum(status != 0 for _, status, _ in ends)
    assert refused > len(ends) / 3, ends  # or they are no bad inputs


def test_what_is_wrong_is_found(places):
    assert "a traceback" in wrong(1, "", "Traceback (most recent call last):\n  x\nKeyError: 1")
    assert wrong(-11, "", "") == "status -11" and "nothing is said" in wrong(1, "", " \n")
    assert "control characters" in wrong(78, "", "error: \x1b[2J\n")
    assert wrong(78, "", "error: no\n") == wrong(0, "", "") == ""

    def ends(module, args, where):
        return 1, "", "Traceback (most recent call last)"

    case, status, how = attempt(KINDS.index(overrides), places, ends)
    assert case.startswith("overrides: ") and status == 1 and how.startswith("a traceback")
