"""launch/deepspeed.sh with the real DeepSpeed on CPUs; tests/test_launch.py uses fakes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.running import ENV, ROOT, read_losses

pytestmark = pytest.mark.slow
LONG = ("train.steps=100000", "data.val_tokens=2000", "checkpoint.every=1000", "log.every=1")


def start(tmp_path, *hosts, **environment):
    base = {k: v for k, v in ENV.items() if not k.startswith(("MASTER_", "SLURM"))}
    base |= {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    base["PATH"] = f"{Path(sys.executable).parent}:{ENV['PATH']}"
    arguments = ("configs/tiny/lm.yaml", *hosts, f"out_dir={tmp_path / 'runs'}", *LONG)
    return subprocess.Popen(
        ["bash", ROOT / "launch/deepspeed.sh", *arguments],
        cwd=ROOT,
        env=base | environment,
        text=True,
        stdout=(tmp_path / "out").open("w"),
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        start_new_session=True,
    )


def wait_for_updates(tmp_path, process, seconds=120):
    metrics = tmp_path / "runs/tiny/metrics.jsonl"
    deadline = time.monotonic() + seconds
    while not metrics.exists() or metrics.read_text().count("\n") < 5:
        assert process.poll() is None and time.monotonic() < deadline, output(tmp_path)
        time.sleep(0.2)


def output(tmp_path) -> str:
    return (tmp_path / "out").read_text()[-5000:]


def check_clean_stop(tmp_path, process):
    """Check that it exits with 75, has saved the last update, and leaves no process."""
    assert process.wait(60) == 75, output(tmp_path)
    assert "stopped by a signal after update" in output(tmp_path)
    last = read_losses(tmp_path / "runs/tiny")[-1]["step"]
    assert f"step-{last:06d}" in os.listdir(tmp_path / "runs/tiny/checkpoints")
    command = ["pgrep", "-f", str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True).stdout == ""


@pytest.mark.parametrize(
    "name, send", [("TERM", os.kill), ("USR1", os.kill), ("INT", os.killpg), ("TERM", os.killpg)]
)
def test_signal_saves_and_exits_with_75(tmp_path, name, send):
    process = start(tmp_path, "2")
    wait_for_updates(tmp_path, process)
    send(process.pid, getattr(signal, f"SIG{name}"))
    check_clean_stop(tmp_path, process)


@pytest.mark.skipif(shutil.which("pdsh") is None, reason="needs pdsh")
def test_hostfile_starts_a_process_per_host(tmp_path):
    """Both hosts are this one: a fake `ssh` runs the command here."""
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    # Options with and without a value, then the host, then the command.
    ssh.write_text(
        "#!/bin/bash\nwhile [[ $1 = -* ]]; do case $1 in -[lo]) shift 2 ;; *) shift ;; esac; done\n"
        'shift\necho "$*" >> "$(dirname "$0")/log"\nexec setsid --wait bash -c "$*"\n'
    )
    ssh.chmod(0o755)
    hosts = tmp_path / "hosts"
    hosts.write_text("worker-1 slots=1\nworker-2 slots=1\n")
    path = f"{ssh.parent}:{Path(sys.executable).parent}:{ENV['PATH']}"
    process = start(tmp_path, "--hostfile", str(hosts), PATH=path)
    wait_for_updates(tmp_path, process)
    assert "(2 processes)" in output(tmp_path)
    process.terminate()
    check_clean_stop(tmp_path, process)
