"""Random kills and resumes on one and two ranks, compared with an uninterrupted run."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lm.runs.checkpoint import checkpoint_step, find_newest_checkpoint
from lm.training.reshard import consolidate_weights
from tests.running import ENV, ROOT, command, run

KILLS = int(os.environ.get("FPRNN_KILLS", "100"))
# One and two ranks sum in different orders. A contractive model with small steps keeps this
# rounding small over some hundred updates; untrained layers, or a model that overfits its few
# documents, would amplify it. A wrong micro-batch would change a loss by more than 0.01. The
# schedule does not depend on the number of updates.
SETTINGS = (
    "train.global_batch_size=4",
    "train.grad_accum_steps=null",
    "checkpoint.every=5",
    "log.every=1",
    "log.probe_every=0",
    "eval.every=100000",
    "optim.schedule=constant",
    "optim.warmup=5",
    "optim.lr=3e-5",
    "optim.min_lr=1e-6",
    "model.contractive=0.3",
)


def kill_after(seconds, out, processes, settings) -> bool:
    """Start or resume the run, and kill it `seconds` after its next update; False if it ended."""
    env = ENV | {"DS_ACCELERATOR": "cpu", "PATH": f"{Path(sys.executable).parent}:{ENV['PATH']}"}
    process = subprocess.Popen(
        command(out, *settings, "resume=auto", processes=processes if processes > 1 else 0),
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    metrics = out / "tiny/metrics.jsonl"
    old_time = metrics.stat().st_mtime_ns if metrics.exists() else 0
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.stat().st_mtime_ns == old_time:
        if process.poll() is not None:
            output = process.communicate()[0]
            assert process.returncode == 0, output
            return False
        if time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"no update in 120 s: {process.communicate()[0][-3000:]}")
        time.sleep(0.02)
    time.sleep(seconds)
    pgrep = subprocess.run(["pgrep", "-f", f"out_dir={out}"], capture_output=True, text=True)
    for pid in map(int, pgrep.stdout.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()
    return True


@pytest.mark.slow
def test_resume_after_random_kills_is_identical(tmp_path):
    """The run is killed KILLS times, on one rank, two ranks, one rank, and so on."""
    rng = random.Random(0)
    out = tmp_path / "runs"
    endless = (*SETTINGS, "train.steps=1000000")
    resume_steps = [0]
    for kill in range(KILLS):
        processes = (1, 2, 1)[kill % 3]
        assert kill_after(rng.uniform(0, 1.5), out, processes, endless)
        path = find_newest_checkpoint(out / "tiny/checkpoints")
        resume_steps.append(checkpoint_step(path) if path else 0)
        assert resume_steps[-1] >= resume_steps[-2]
    final = (*SETTINGS, f"train.steps={resume_steps[-1] + 5}")
    resumed, _ = run(out, *final, "resume=auto")
    whole, _ = run(tmp_path / "whole", *final)
    assert [(r["step"], r["tokens"]) for r in resumed] == [(r["step"], r["tokens"]) for r in whole]
    differences = [abs(a["loss"] - b["loss"]) for a, b in zip(resumed, whole)]
    assert max(differences) < 1e-4
    actual, expected = (
        consolidate_weights(find_newest_checkpoint(folder / "tiny/checkpoints"))
        for folder in (out, tmp_path / "whole")
    )
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0)
    print(f"score: {KILLS} kills, {resume_steps[-1]} updates, losses within {max(differences):.1e}")
