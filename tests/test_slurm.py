"""Slurm scripts on a private Slurm with two nodes on this host, with real runs over gloo."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.running import ENV, ROOT, fprnn
from tests.slurm import Slurm, find_missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(find_missing()), reason=find_missing() or "Slurm is here"),
]

# No GPUs and few cores. Options of sbatch override those in the script.
SMALL = ("--gres=none", "--time=10", "--cpus-per-task=1", "--chdir", ROOT)
LONG = ("data.val_tokens=2000", "checkpoint.every=20", "log.every=1", "log.probe_every=5")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with Slurm(tmp_path_factory.mktemp("slurm") / "s") as cluster:
        cluster.env = {
            **{k: v for k, v in cluster.env.items() if not k.startswith(("SLURM_JOB", "MASTER"))},
            **ENV,
            "PATH": f"{Path(sys.executable).parent}:{cluster.env['PATH']}",
            "SLURM_CONF": cluster.env["SLURM_CONF"],
            "MASTER_ADDR": "127.0.0.1",  # n0 has no DNS name
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        yield cluster


def submit(slurm, script, log, options, *arguments, **environment) -> str:
    """Submit a script, and return the job's id."""
    command = ["sbatch", "--parsable", *SMALL, f"--output={log}", *options]
    script = ROOT / "launch" / script
    return slurm.call(*command, script, *arguments, **environment).strip()


def submit_run(slurm, tmp_path, steps, *options, nodes=1) -> tuple[str, Path, Path]:
    """Submit a training of the tiny config; return the job's id, run directory and log."""
    log = tmp_path / "out"
    options = (f"--nodes={nodes}", "--ntasks-per-node=1", *options)
    overrides = (f"out_dir={tmp_path / 'runs'}", f"train.steps={steps}", *LONG)
    job = submit(slurm, "slurm.sbatch", log, options, "configs/tiny/lm.yaml", *overrides)
    return job, tmp_path / "runs/tiny", log


def read_steps(run_dir) -> list[int]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines[:-1]]


def wait_for_step(run_dir, step, log, seconds=120):
    deadline = time.monotonic() + seconds
    while max(read_steps(run_dir), default=0) < step:
        assert time.monotonic() < deadline, read_log(log)[-3000:]
        time.sleep(0.1)


def read_status(config, *overrides) -> list[dict]:
    result = fprnn("status", config, "--json", *overrides)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def read_log(path) -> str:
    return path.read_text() if path.exists() else ""


def test_preempted_job_is_requeued_and_finishes(slurm, tmp_path):
    """After USR1, as at the time limit, both ranks save and exit with 75; the job resumes."""
    job, run_dir, log = submit_run(slurm, tmp_path, 400, nodes=2)
    wait_for_step(run_dir, 30, log)
    slurm.call("scancel", "--signal=USR1", job)
    fields = slurm.wait(job, "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
    output = log.read_text()
    assert fields["JobState"] == "COMPLETED" and fields["Restarts"] == "1", output
    assert fields["NodeList"] == "n[0-1]"
    assert "(2 processes)" in output and output.count("exit status 75: queued again") == 1
    stop_update = int(output.partition("stopped by a signal after update ")[2].partition(",")[0])
    assert 30 <= stop_update < 400 and f"at update {stop_update}" in output.partition("resumed")[2]
    assert json.loads((run_dir / "result.json").read_text())["updates"] == 400


def test_killed_rank_fails_the_job(slurm, tmp_path):
    """After a kill on the second node the job fails, is not requeued, and leaves no process."""
    job, run_dir, log = submit_run(slurm, tmp_path, 100000, nodes=2)
    wait_for_step(run_dir, 5, log)
    command = ["pgrep", "-f", f"^python .*{tmp_path}"]
    pids = subprocess.run(command, capture_output=True, text=True).stdout.split()
    pid_by_rank = {read_rank(pid): pid for pid in map(int, pids)}
    assert sorted(pid_by_rank) == ["0", "1"]
    os.kill(pid_by_rank["1"], signal.SIGKILL)
    fields = slurm.wait(job, "FAILED", "COMPLETED", seconds=150)
    assert fields["JobState"] == "FAILED" and fields["Restarts"] == "0", read_log(log)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pid_by_rank.values())


def read_rank(pid: int) -> str:
    values = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(v.split("=", 1) for v in values if "=" in v)["RANK"]


def test_run_continues_after_the_time_limit(slurm, tmp_path):
    """Slurm sends USR1, up to a minute earlier than requested; the requeued run continues."""
    job, _, log = submit_run(slurm, tmp_path, 100000, "--time=2", "--signal=USR1@10")
    deadline = time.monotonic() + 200
    while "resumed" not in read_log(log):
        assert time.monotonic() < deadline, read_log(log)
        time.sleep(1)
    output = read_log(log)
    slurm.call("scancel", job)
    assert "exit status 75: queued again" in output and "TIME LIMIT" not in output
    stop_update = int(output.partition("stopped by a signal after update ")[2].partition(",")[0])
    assert f"at update {stop_update}" in output.partition("resumed")[2]
    assert slurm.wait(job, "CANCELLED")["Restarts"] == "1"


def test_array_status_is_correct_at_every_stage(slurm, tmp_path):
    """Of three points, two at a time, one gets USR1, one is requeued (TERM), and one fails."""
    out, config = tmp_path / "runs", tmp_path / "sweep.yaml"
    shutil.copy(ROOT / "configs/tiny/lm.yaml", config)
    with config.open("a") as f:
        f.write("\nsweep:\n  optim.lr: [1.0e-2, 2.0e-2, 1.0e+30]\n")
    overrides = (f"out_dir={out}", "train.steps=300", *LONG)
    points = read_status(config, *overrides)
    assert [p["state"] for p in points] == ["missing"] * 3

    options = ("--array=0-2%2", "--nodes=1", "--ntasks-per-node=1")
    log = tmp_path / "out-%a"
    job = submit(slurm, "slurm_array.sbatch", log, options, config, *overrides)
    folders = [Path(p["run_dir"]) for p in points]
    logs = [tmp_path / f"out-{i}" for i in range(3)]
    for i in (0, 1):
        wait_for_step(folders[i], 10, logs[i])
    points = read_status(config, *overrides)
    assert [p["state"] for p in points] == ["running", "running", "missing"]
    assert all(10 <= p["step"] < p["steps"] == 300 for p in points[:2])
    assert all(len(p["num_iters"]) == 2 and p["idle_s"] < 30 for p in points[:2])
    slurm.call("scancel", "--signal=USR1", f"{job}_0")
    slurm.call("scontrol", "requeue", f"{job}_1")
    ends = [slurm.wait(f"{job}_{i}", "COMPLETED", "FAILED", "CANCELLED") for i in range(3)]
    output = [log.read_text() for log in logs]
    assert [e["JobState"] for e in ends] == ["COMPLETED", "COMPLETED", "FAILED"], output
    assert [e["Restarts"] for e in ends] == ["1", "1", "0"]
    for text in output[:2]:
        assert "stopped by a signal after update" in text and "resumed" in text
    assert "queued again" in output[0] and "queued again" not in output[1] + output[2]
    points = read_status(config, *overrides)
    assert [p["state"] for p in points][:2] == ["done", "done"]
    assert [p["step"] for p in points[:2]] == [300, 300]
    assert points[2]["state"] == "diverged"


def test_cancelled_job_saves_and_is_not_requeued(slurm, tmp_path):
    job, run_dir, log = submit_run(slurm, tmp_path, 100000)
    wait_for_step(run_dir, 3, log)
    slurm.call("scancel", job)
    slurm.wait(job, "CANCELLED")
    deadline = time.monotonic() + 30
    while slurm.states() != ["idle", "idle"]:  # it is still completing
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert "stopped by a signal after update" in log.read_text()
    assert slurm.job(job)["JobState"] == "CANCELLED"
    assert os.listdir(run_dir / "checkpoints")
