"""`fprnn status` of a sweep: every state of a run directory, also with damaged files."""

import json
import os
import shutil
import time

import pytest

from lm.cli.main import main
from lm.common.console import say
from lm.common.errors import BAD_CONFIG
from lm.runs import status
from tests.conftest import ROOT

PROBE = {"num_iters": {"mean": [3.25, 7.5], "median": [3, 7], "max": [9, 12]}}
RESULT = {
    "updates": 8,
    "training_seconds": 4000.0,
    "validation": {"loss": 2.5, "perplexity": 12.18, "tokens": 100},
    "probe": PROBE,
}


@pytest.fixture
def sweep(tmp_path):
    """A sweep of four points without run directories."""
    return Sweep(tmp_path)


class Sweep:
    def __init__(self, folder):
        self.config = folder / "sweep.yaml"
        shutil.copy(ROOT / "configs/tiny/lm.yaml", self.config)
        with self.config.open("a") as f:
            f.write(f"\nout_dir: {folder / 'runs'}\nsweep:\n  optim.lr: [1.0e-2, 2.0e-2]\n")
            f.write("  model.d_state: [4, 8]\n")
        self.folders = [
            folder / f"runs/tiny/{i:03d}-lr={lr}-d_state={d_state}"
            for i, (lr, d_state) in enumerate([(0.01, 4), (0.01, 8), (0.02, 4), (0.02, 8)])
        ]

    def write(self, index, seconds_ago=3600.0, steps=8, **files):
        """Make the run directory of a point.

        Args:
            seconds_ago: Age of the files; a lease has its own.
            files: {name with "_" for ".", such as result_json: text or JSON value}.
        """
        folder = self.folders[index]
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(f"name: x\ntrain:\n  steps: {steps}\n")
        for name, value in files.items():
            path = folder / name.replace("_", ".")
            path.write_text(value if isinstance(value, str) else json.dumps(value))
        for path in folder.iterdir():
            lease = files.get("lease_json") if path.name == "lease.json" else None
            age_s = lease.seconds_ago if isinstance(lease, Lease) else seconds_ago
            os.utime(path, (time.time() - age_s,) * 2)

    def points(self, *overrides):
        return status.sweep_status(self.config, overrides)

    def point(self, index):
        return self.points()[index]


class Lease(dict):
    """Content of a lease.json that was touched some seconds ago."""

    def __init__(self, seconds_ago):
        super().__init__({"host": "n7", "pid": 4711, "job": "12_3", "since": 1_700_000_000})
        self.seconds_ago = seconds_ago


def records(*values):
    return "".join(json.dumps(v) + "\n" for v in values)


def test_sweep_status_shows_every_state(sweep, capsys, monkeypatch):
    sweep.write(0, result_json=RESULT, metrics_jsonl=records({"step": 8, "loss": 2.4}))
    sweep.write(
        1,
        lease_json=Lease(4),
        metrics_jsonl=records({"step": 2, "loss": 3.0}, {"step": 3, "probe": PROBE}, {"step": 5}),
    )
    failure = {"sentence": "stopped at update 3: the loss is nan", "exit_code": 76, "step": 3}
    sweep.write(2, failure_json=failure | {"when": time.time()})
    done, running, diverged, absent = points = sweep.points()
    assert [point.state for point in points] == ["done", "running", "diverged", "missing"]
    assert done.text == "8 updates, trained 67 min"
    bits = {"validation": RESULT["validation"] | {"bits_per_byte": 1.25}}
    sweep.write(0, result_json=RESULT | bits)
    assert (done.step, done.steps, done.num_iters["mean"]) == (8, 8, [3.25, 7.5])
    assert (running.step, running.steps, running.num_iters["mean"]) == (5, 8, [3.25, 7.5])
    assert running.idle_s > 3000 and "process 4711 on n7, Slurm job 12_3" in running.text
    assert diverged.text == "stopped at update 3: the loss is nan"
    assert (absent.step, absent.steps, absent.idle_s, absent.text) == (None, None, None, "")

    monkeypatch.setattr(say.console, "width", 160)
    assert main(["status", str(sweep.config)]) == 0
    shown = capsys.readouterr().out
    for words in (
        "1 done, 1 running, 1 diverged, 1 missing",
        "3.2 7.5",
        "5 / 8",
        "60 min ago",
        "002 diverged: stopped at update 3: the loss is nan",
        "--array=3 (some",
    ):
        assert words in shown
    assert main(["status", str(sweep.config), "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert [p["state"] for p in read] == ["done", "running", "diverged", "missing"]
    assert read[0]["reached"]["validation"] == 1.25 and read[1]["reached"] is None
    assert read[1]["run_dir"] == str(sweep.folders[1])


@pytest.mark.parametrize("text", ["", "{", '{"pid": 1', "null", "[1]", "\0\0\0\0", "[" * 100_000])
@pytest.mark.parametrize("name", ["lease", "failure", "result", "config", "metrics"])
def test_truncated_files_raise_no_error(sweep, name, text):
    """A truncated or overwritten file raises no error and leads to no wrong state."""
    files = {"metrics_jsonl": records({"step": 3}), f"{name}_json": text}
    if name in ("config", "metrics"):
        del files[f"{name}_json"]
        files[{"config": "config_yaml", "metrics": "metrics_jsonl"}[name]] = text
    sweep.write(1, **files)
    point = sweep.point(1)
    expected = {"failure": "failed", "result": "failed"}.get(name, "stopped")
    assert point.state == expected
    assert point.step == (None if name == "metrics" else 3)
    if name in ("failure", "result"):
        assert f"{name}.json is damaged" in point.text
    assert sweep.point(0).state == "missing"


def test_lease_being_written_counts_as_running(sweep):
    sweep.write(1, seconds_ago=5, lease_json='{"host": "n')
    assert sweep.point(1).state == "running"


def test_clock_of_this_host_may_differ(sweep, monkeypatch):
    """The file system's clock dates the lease, so its age is taken from that clock."""
    sweep.write(1, lease_json=Lease(4))
    monkeypatch.setattr(time, "time", lambda: 1_000_000_000.0)
    assert sweep.point(1).state == "running"


def test_overrides_change_run_directories_and_steps(sweep, tmp_path, capsys):
    """Overrides given to sbatch: another name, another folder, more updates."""
    sweep.write(0, steps=20, result_json=RESULT | {"updates": 20})
    moved = tmp_path / "elsewhere/other/000-lr=0.01-d_state=4"
    moved.parent.mkdir(parents=True)
    sweep.folders[0].rename(moved)
    assert [p.state for p in sweep.points()] == ["missing"] * 4
    overrides = (f"out_dir={tmp_path / 'elsewhere'}", "name=other", "train.steps=20")
    first, *rest = sweep.points(*overrides)
    assert (first.state, first.run_dir, first.steps) == ("done", str(moved), 20)
    assert {p.state for p in rest} == {"missing"}
    assert main(["sweep", str(sweep.config), "name=other"]) == 0
    assert capsys.readouterr().out.startswith("other/000-lr=0.01-d_state=4\n")


def test_config_without_sweep_is_refused(capsys):
    assert main(["status", str(ROOT / "configs/tiny/lm.yaml")]) == BAD_CONFIG
    assert "has no `sweep:` section" in capsys.readouterr().err


def test_finished_run_is_done(tiny_run, sweep):
    shutil.copytree(tiny_run, sweep.folders[1])
    point = sweep.point(1)
    assert (point.state, point.step, point.steps) == ("done", 8, 8)
    assert len(point.num_iters["mean"]) == 2 and "8 updates" in point.text
