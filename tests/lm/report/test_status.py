"""`fprnn status`: states of runs, remaining time, and results of sweeps."""

import json
import os
import subprocess
import sys
import time

import pytest

from lm.cli.main import main
from lm.common.console import say
from lm.common.errors import BAD_CONFIG
from lm.report import status
from lm.runs.lease import Lease, LeaseError
from lm.runs.run_dir import RunDir
from lm.runs.status import Status, run_status

NOW = 1_700_000_000.0
RESULT = {
    "updates": 8,
    "training_seconds": 4000.0,
    "validation": {"loss": 2.5, "perplexity": 12.18, "bits_per_byte": 1.25},
}


def training_record(step, seconds, **other):
    numbers = {"loss": 3.25, "lr": 1e-3, "tokens_per_s": 1234.5, "spent": {"seconds": seconds}}
    return {"step": step, **numbers, **other}


class FakeRun:
    """A run directory whose files a test writes."""

    def __init__(self, folder, steps=8):
        self.path = folder
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.yaml").write_text(f"name: x\ntrain:\n  steps: {steps}\n")
        self.metrics = folder / "metrics.jsonl"

    def log(self, *records, mode="a"):
        with self.metrics.open(mode) as f:
            f.write("".join(json.dumps(r) + "\n" for r in records))

    def write(self, name, value, ago=0.0):
        path = self.path / name
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        os.utime(path, (NOW - ago,) * 2)

    def write_lease(self, ago=1.0, **holder):
        self.write("lease.json", {"host": "n7", "pid": 4711, "job": "12", **holder}, ago)

    def read_status(self):
        return run_status(RunDir(self.path), NOW)


@pytest.fixture
def run(tmp_path):
    return FakeRun(tmp_path / "a")


def test_running_run_shows_its_last_records(run):
    run.write_lease()
    probe = {"probe": {"num_iters": {"mean": [3.25, 7.5]}}}
    run.log(training_record(1, 100.0), training_record(2, 104.0), {"step": 2, **probe})
    run.log({"step": 2, "validation": {"loss": 4.0653, "bits_per_byte": 2.3441}})
    run.log(training_record(3, 108.0), {"step": 3, "checkpoint": {"bytes": 3}})
    for path in (run.metrics, run.path / "config.yaml"):
        os.utime(path, (NOW - 30,) * 2)
    seen = run.read_status()
    assert (seen.state, seen.text) == ("running", "process 4711 on n7, Slurm job 12")
    assert seen.remaining_s == pytest.approx(4.0 * 5)
    assert status.make_cells(seen) == {
        "run": str(run.path),
        "state": "running",
        "update": "3 / 8",
        "loss": "3.250",
        "validation": "4.065 (2.344 bits/byte)",
        "tokens/s": "1,234",
        "ℓ*": "3.2 7.5",
        "time left": "20 s",
        "last record": "30 s ago",
    }


def test_control_characters_in_names_are_escaped(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(say.console, "width", 300)  # a narrow table would fold the name
    folder = tmp_path / "x\x1b[31mred:smile:"
    folder.mkdir()
    (folder / "config.yaml").write_text("train: {steps: 4}")
    assert main(["status", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and shown.count(r"x\x1b[31mred:smile:") == 2


@pytest.mark.parametrize(
    "files, state, words",
    [
        ({}, "stopped", "no process is running"),
        ({"result.json": RESULT}, "done", "8 updates, trained 67 min"),
        (
            {"result.json": {"updates": 8, "solved_at": None, "training_seconds": 300}},
            "done",
            "trained 5 min",
        ),
        # A synthetic run that has solved its task early.
        ({"result.json": {"updates": 5, "solved_at": 5}}, "done", "5 updates"),
        ({"result.json": {"updates": 5, "solved_at": None}}, "stopped", "not finished"),
        ({"result.json": RESULT | {"updates": 5}}, "stopped", "not finished"),
        ({"result.json": "{"}, "failed", "result.json is damaged"),
        ({"result.json": {"updates": 8, "validation": 7}}, "failed", "result.json is damaged"),
        ({"result.json": RESULT | {"updates": "8"}}, "failed", "result.json is damaged"),
        ({"failure.json": {"sentence": "the loss is nan", "exit_code": 76}}, "failed", "is nan"),
        ({"failure.json": {"sentence": "by a signal", "exit_code": 75}}, "stopped", "by a signal"),
        ({"failure.json": ""}, "failed", "damaged"),
    ],
)
def test_state_of_an_ended_run(run, files, state, words):
    for name, value in files.items():
        run.write(name, value)
    seen = run.read_status()
    assert seen.state == state and words in seen.text
    run.write_lease(ago=-20)  # taken up again, by a host whose clock is ahead
    assert run.read_status().state == "running"


def test_run_without_process_is_stopped(run):
    run.log(training_record(1, 1.0), training_record(2, 2.0))
    run.write_lease(ago=3600)
    assert run.read_status().state == "stopped" and run.read_status().remaining_s is None
    assert "killed: process 4711 on n7, Slurm job 12" in run.read_status().text
    # A process of this host is looked up, however old or new the last touch is.
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = Lease(run.path / "lease.json").record
    run.write_lease(ago=1, **{**here, "pid": gone.pid})
    assert run.read_status().state == "stopped"
    run.write_lease(ago=1, **here)
    assert run.read_status().state == "running"
    run.write_lease(ago=3600, **here)  # suspended: `Lease.acquire` refuses its directory, too
    assert run.read_status().state == "running"
    assert run.read_status().text.endswith("which has not responded for 60 min")
    with pytest.raises(LeaseError, match=f"in use by process {os.getpid()}"):
        Lease(run.path / "lease.json").acquire()


@pytest.mark.parametrize(
    "text", ["", "\0\0\n", "[1]\nnull\n", '{"step": -1}\n', "[" * 10_000 + "\n"]
)
def test_damaged_logs_give_no_numbers(run, text):
    run.write("metrics.jsonl", text)
    run.write("config.yaml", "[")
    seen = run.read_status()
    assert (seen.step, seen.steps, seen.remaining_s) == (None, None, None)
    broken = training_record(
        3, "x", lr=None, tokens_per_s=[1], valid={"metrics": 3}, validation="y"
    )
    run.log({"step": 2, "probe": [1]}, broken | {"loss": float("nan")}, broken, mode="w")
    run.log(broken | {"loss": 10**400}, {"step": 1, "probe": {"num_iters": {"mean": [1.0, None]}}})
    shown = status.make_cells(run.read_status())
    assert shown["update"] == "3" and shown["loss"] == "3.250"
    assert shown["tokens/s"] == shown["validation"] == shown["ℓ*"] == ""


def test_time_left_ignores_a_slow_stretch(run):
    """The first record has the start-up in it, one of the others a machine that was suspended."""
    run.write("config.yaml", "train:\n  steps: 100\n")
    run.write_lease()
    seconds = {10: 500.0, 20: 510.0, 30: 520.0, 40: 9000.0, 50: 9010.0}
    run.log(training_record(10, 500.0))
    assert run.read_status().remaining_s is None
    run.log(*(training_record(step, at) for step, at in list(seconds.items())[1:]))
    assert run.read_status().remaining_s == pytest.approx(50.0)


def test_synthetic_run_shows_its_score(run):
    run.write_lease()
    run.log(
        {"step": 2, "loss": 0.5, "lr": 1e-3, "tokens_per_s": 10.0, "seconds": 6.0},
        {"step": 4, "valid": {"metrics": {"token_accuracy": 0.875}}},
        {"step": 4, "loss": 0.4, "lr": 1e-3, "tokens_per_s": 10.0, "seconds": 12.0},
    )
    seen = run.read_status()
    assert seen.validation == "token_accuracy 0.875" and seen.remaining_s == pytest.approx(12.0)


# The command.


@pytest.fixture
def two(tmp_path):
    runs = FakeRun(tmp_path / "of/a"), FakeRun(tmp_path / "of/b")
    for one in runs:
        one.log(training_record(1, 1.0), training_record(8, 8.0))
        one.write("result.json", RESULT)
    return runs


def test_one_table_for_runs_in_all_states(two, capsys):
    a, b = two
    (b.path / "result.json").unlink()
    assert main(["status", str(a.path), str(b.path), f"{b.path}/"]) == 0
    head, *rows, counts, of_a, why = capsys.readouterr().out.splitlines()
    assert counts.strip() == "1 done, 1 stopped" and of_a.startswith(f"{a.path} done: 8 updates")
    assert head.split()[:3] == ["run", "state", "update"] and head.endswith("last record")
    assert [row.split()[:2] for row in rows] == [["a", "done"], ["b", "stopped"]]
    assert why.startswith(f"{b.path} stopped: not finished, and no process is running")


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_override_without_a_sweep_is_refused(capsys, option):
    assert main(["status", "seed=1", *option]) == BAD_CONFIG
    assert "`seed=1` sets a key of a sweep, but no sweep is named" in capsys.readouterr().err


def test_missing_run_is_refused(tmp_path, capsys):
    assert main(["status", str(tmp_path / "of/late")]) == BAD_CONFIG
    assert "no such folder; give a run directory" in capsys.readouterr().err
    FakeRun(tmp_path / "of/late")
    assert main(["status", str(tmp_path / "of")]) == BAD_CONFIG
    assert f"it contains runs, such as {tmp_path}/of/late" in capsys.readouterr().err


def test_short_names_omit_the_common_folder():
    assert status.short_names(["/r/x/a", "/r/y/a", "/r/y/b"]) == {
        "/r/x/a": "x/a",
        "/r/y/a": "y/a",
        "/r/y/b": "y/b",
    }
    assert status.short_names(["/r/x/a"]) == {"/r/x/a": "a"}


def test_ages_are_not_negative(run):
    run.log(training_record(1, 1.0))
    os.utime(run.metrics, (time.time() + 5,) * 2)  # another host's clock is ahead
    assert run_status(RunDir(run.path), time.time()).idle_s == 0


def test_ranges_have_the_form_of_sbatch():
    assert status.format_ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def finished(folder, label, bits, **other):
    """A finished point of a sweep, whose result has these bits per byte."""
    run = FakeRun(folder)
    run.log(training_record(8, 40.0))
    validation = RESULT["validation"] | {"bits_per_byte": bits}
    run.write(
        "result.json", RESULT | {"parameters": 1200, "tokens": 96} | {"validation": validation}
    )
    counts = {"mean": [2.0, 4.0]} if label == "fp" else None
    return Status(str(folder), "done", label=label, num_iters=counts, **other)


def test_seeds_of_a_point_share_a_row(tmp_path):
    seen = [
        finished(tmp_path / "0", "fp", 2.0),
        finished(tmp_path / "1", "fp", 3.0),
        finished(tmp_path / "2", "mamba", 1.5),
        Status(str(tmp_path / "3"), "running", label="mamba"),
        Status(str(tmp_path / "4"), "missing", label="other"),
    ]
    _, *rows = status.format_results(seen).splitlines()
    assert [row.split()[1:] for row in rows] == [
        ["fp", "2", "2", "1,200", "96", "2.5", "0.707107", "40", "3"],
        ["mamba", "1", "2", "1,200", "96", "1.5", "–", "40", "–"],
    ]
