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
from tests.running import ROOT

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
    """Run directory whose files a test writes."""

    def __init__(self, folder, steps=8):
        self.path = folder
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.yaml").write_text(f"name: x\ntrain:\n  steps: {steps}\n")
        self.metrics = folder / "metrics.jsonl"

    def log(self, *records, mode="a"):
        with self.metrics.open(mode) as f:
            f.write("".join(json.dumps(r) + "\n" for r in records))

    def write(self, name, value, age_s=0.0):
        path = self.path / name
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        os.utime(path, (NOW - age_s,) * 2)  # times of access and modification

    def write_lease(self, age_s=1.0, **holder):
        self.write("lease.json", {"host": "n7", "pid": 4711, "job": "12", **holder}, age_s)

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
    result = run.read_status()
    assert (result.state, result.text) == ("running", "process 4711 on n7, Slurm job 12")
    assert result.remaining_s == pytest.approx(4.0 * 5)
    assert status.make_cells(result) == {
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
    "files, state, expected_text",
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
        ({"failure.json": {"sentence": "the loss is nan", "exit_code": 76}}, "diverged", "is nan"),
        ({"failure.json": {"sentence": "by a signal", "exit_code": 75}}, "stopped", "by a signal"),
        ({"failure.json": {"sentence": "no disk", "exit_code": [1]}}, "failed", "no disk"),
        ({"failure.json": ""}, "failed", "damaged"),
    ],
)
def test_state_of_an_ended_run(run, files, state, expected_text):
    for name, value in files.items():
        run.write(name, value)
    result = run.read_status()
    assert result.state == state and expected_text in result.text
    run.write_lease(age_s=-20)  # continued on a host whose clock is ahead
    assert run.read_status().state == "running"


def test_run_without_process_is_stopped(run):
    run.log(training_record(1, 1.0), training_record(2, 2.0))
    run.write_lease(age_s=3600)
    assert run.read_status().state == "stopped" and run.read_status().remaining_s is None
    assert "killed: process 4711 on n7, Slurm job 12" in run.read_status().text
    # A process of this host is looked up, however old or new the last touch is.
    ended_process = subprocess.Popen([sys.executable, "-c", ""])
    ended_process.wait()
    live_lease = Lease(run.path / "lease.json").record
    run.write_lease(age_s=1, **{**live_lease, "pid": ended_process.pid})
    assert run.read_status().state == "stopped"
    run.write_lease(age_s=1, **live_lease)
    assert run.read_status().state == "running"
    # A process that is suspended: `Lease.acquire` refuses its directory as well.
    run.write_lease(age_s=3600, **live_lease)
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
    result = run.read_status()
    assert (result.step, result.steps, result.remaining_s) == (None, None, None)
    damaged = training_record(
        3, "x", lr=None, tokens_per_s=[1], valid={"metrics": 3}, validation="y"
    )
    run.log({"step": 2, "probe": [1]}, damaged | {"loss": float("nan")}, damaged, mode="w")
    run.log(damaged | {"loss": 10**400}, {"step": 1, "probe": {"num_iters": {"mean": [1.0, None]}}})
    shown = status.make_cells(run.read_status())
    assert shown["update"] == "3" and shown["loss"] == "3.250"
    assert shown["tokens/s"] == shown["validation"] == shown["ℓ*"] == ""


def test_time_left_ignores_a_slow_stretch(run):
    """The time of the first record includes startup; during another, the machine was suspended."""
    run.write("config.yaml", "train:\n  steps: 100\n")
    run.write_lease()
    seconds = {10: 500.0, 20: 510.0, 30: 520.0, 40: 9000.0, 50: 9010.0}
    run.log(training_record(10, 500.0))
    assert run.read_status().remaining_s is None
    run.log(*(training_record(step, second) for step, second in list(seconds.items())[1:]))
    assert run.read_status().remaining_s == pytest.approx(50.0)


def test_synthetic_run_shows_its_score(run):
    run.write_lease()
    run.log(
        {"step": 2, "loss": 0.5, "lr": 1e-3, "tokens_per_s": 10.0, "seconds": 6.0},
        {"step": 4, "valid": {"metrics": {"token_accuracy": 0.875}}},
        {"step": 4, "loss": 0.4, "lr": 1e-3, "tokens_per_s": 10.0, "seconds": 12.0},
    )
    result = run.read_status()
    assert result.validation == "token_accuracy 0.875" and result.remaining_s == pytest.approx(12.0)


# The command.


@pytest.fixture
def two_runs(tmp_path):
    runs = FakeRun(tmp_path / "runs/a"), FakeRun(tmp_path / "runs/b")
    for run in runs:
        run.log(training_record(1, 1.0), training_record(8, 8.0))
        run.write("result.json", RESULT)
    return runs


def test_one_table_for_runs_in_all_states(two_runs, capsys):
    a, b = two_runs
    (b.path / "result.json").unlink()
    assert main(["status", str(a.path), str(b.path), f"{b.path}/"]) == 0
    head, *rows, counts, remark_a, remark_b = capsys.readouterr().out.splitlines()
    assert counts.strip() == "1 done, 1 stopped"
    assert remark_a.startswith(f"{a.path} done: 8 updates")
    assert head.split()[:3] == ["run", "state", "update"] and head.endswith("last record")
    assert [row.split()[:2] for row in rows] == [["a", "done"], ["b", "stopped"]]
    assert remark_b.startswith(f"{b.path} stopped: not finished, and no process is running")


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_override_without_a_sweep_is_refused(capsys, option):
    assert main(["status", "seed=1", *option]) == BAD_CONFIG
    assert "`seed=1` sets a key of a sweep, but no sweep is named" in capsys.readouterr().err


def test_run_directory_may_have_the_name_of_a_section(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    FakeRun(tmp_path / "data").log(training_record(8, 40.0))
    assert main(["status", "data"]) == 0
    assert "data" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["status"], ["plan"], ["train", "--config"], ["sweep"]])
def test_sweep_of_the_suite_is_refused_with_its_command(capsys, command):
    path = ROOT / "configs/synthetic/small/fig1.yaml"
    assert main([*command, str(path)]) == BAD_CONFIG
    assert f"fprnn synthetic report NAME --config {path}" in " ".join(
        capsys.readouterr().err.split()
    )


def test_missing_run_is_refused(tmp_path, capsys):
    assert main(["status", str(tmp_path / "runs/late")]) == BAD_CONFIG
    assert "no such folder; give a run directory" in capsys.readouterr().err
    FakeRun(tmp_path / "runs/late")
    assert main(["status", str(tmp_path / "runs")]) == BAD_CONFIG
    assert f"it contains runs, such as {tmp_path}/runs/late" in capsys.readouterr().err


def test_shortened_paths_omit_the_common_folder():
    assert status.shorten_paths(["/r/x/a", "/r/y/a", "/r/y/b"]) == {
        "/r/x/a": "x/a",
        "/r/y/a": "y/a",
        "/r/y/b": "y/b",
    }
    assert status.shorten_paths(["/r/x/a"]) == {"/r/x/a": "a"}


def test_ages_are_not_negative(run):
    run.log(training_record(1, 1.0))
    os.utime(run.metrics, (time.time() + 5,) * 2)  # another host's clock is ahead
    assert run_status(RunDir(run.path), time.time()).idle_s == 0


def test_ranges_have_the_form_of_sbatch():
    assert status.format_ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def write_finished_point(folder, label, bits, **other):
    """Write a finished point of a sweep with a result of these bits per byte."""
    run = FakeRun(folder)
    run.log(training_record(8, 40.0))
    validation = RESULT["validation"] | {"bits_per_byte": bits}
    run.write(
        "result.json", RESULT | {"parameters": 1200, "tokens": 96} | {"validation": validation}
    )
    counts = {"mean": [2.0, 4.0]} if label == "fp" else None
    return Status(str(folder), "done", index=0, label=label, num_iters=counts, **other)


def test_seeds_of_a_point_share_a_row(tmp_path):
    statuses = [
        write_finished_point(tmp_path / "0", "fp", 2.0),
        write_finished_point(tmp_path / "1", "fp", 3.0),
        write_finished_point(tmp_path / "2", "mamba", 1.5),
        Status(str(tmp_path / "3"), "running", index=3, label="mamba"),
        Status(str(tmp_path / "4"), "missing", index=4, label="other"),
    ]
    _, *rows = status.format_results(statuses).splitlines()
    assert [row.split()[1:] for row in rows] == [
        ["fp", "2", "2", "1,200", "96", "2.5", "0.707107", "40", "3"],
        ["mamba", "1", "2", "1,200", "96", "1.5", "–", "40", "–"],
    ]


def test_sweep_over_seeds_is_one_row(tmp_path):
    statuses = [write_finished_point(tmp_path / str(bits), "", bits) for bits in (2.0, 3.0)]
    _, row = status.format_results(statuses).splitlines()
    assert row.split()[1:7] == ["all", "seeds", "2", "2", "1,200", "96"]


def test_array_indices_are_listed_for_each_sweep():
    statuses = [
        Status(f"runs/{sweep}/{index}", "missing", "gone", index=index)
        for sweep, indices in {"a": (0, 1), "b": (1,)}.items()
        for index in indices
    ]
    assert status.list_remarks(statuses) == [
        "runs/a 000 missing: gone",
        "runs/a 001 missing: gone",
        "runs/b 001 missing: gone",
        "runs/a: not finished and not running: --array=0-1 (some may be queued)",
        "runs/b: not finished and not running: --array=1 (some may be queued)",
    ]
