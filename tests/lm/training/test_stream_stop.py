"""A stop signal while a run waits for its hub."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from lm.common.errors import PREEMPTED
from tests.lm.data.loopback import Hub, serving
from tests.lm.data.test_hub_traffic import make_corpus
from tests.running import ENV, ROOT, command, read_losses

STREAM = (
    "data.source=fineweb",
    "data.path=null",
    "data.cache_dir=null",
    "data.shuffle_buffer=8",
    "data.streams=2",
    "data.seq_len=256",
    "data.val_tokens=500",
    "tokenizer.train_bytes=20000",
    "log.every=1",
    "checkpoint.every=1000",
    "eval.every=1000",
    "train.steps=60",
    "train.grad_accum_steps=3",
)


def start(out_dir, environment, *overrides):
    # A fresh interpreter, because the hub's address is read once.
    environment = {**ENV, **environment, "HF_HUB_OFFLINE": "0", "HF_HOME": str(out_dir / "home")}
    return subprocess.Popen(
        command(out_dir, *STREAM, *overrides),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(process) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "trouble"), [(0, "silent"), (1, 503)])
def test_signal_during_hub_wait_saves_within_seconds(tmp_path, workers, trouble):
    """The run repeats the interrupted update when it continues."""
    with serving(make_corpus(2, 8, 70)) as hub:
        finished(start(tmp_path / "whole", hub))
        (tmp_path / "stopped").mkdir()
        process = start(tmp_path / "stopped", hub, f"data.workers={workers}")
        metrics = tmp_path / "stopped" / "tiny" / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text().count("\n") < 10:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        if trouble == "silent":
            Hub.is_silent = True
        else:
            Hub.faults += [("parquet", trouble)] * 10_000
        count = -1
        while count != (count := metrics.read_text().count("\n")):  # until the run waits
            time.sleep(2)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        began = time.time()
        output, _ = process.communicate(timeout=300)
        (manifest,) = (tmp_path / "stopped" / "tiny").glob("checkpoints/step-*/manifest.json")
        assert manifest.stat().st_mtime - began < 5  # the exit of the interpreter takes longer
        assert process.returncode == PREEMPTED and "checkpoint saved: continue" in output, output
        Hub.is_silent, Hub.faults = False, []
        assert "resumed" in finished(start(tmp_path / "stopped", hub, "resume=auto"))
    traces = [
        [(record["step"], record["loss"]) for record in read_losses(tmp_path / name / "tiny")]
        for name in ("whole", "stopped")
    ]
    assert traces[0] == traces[1] and len(traces[0]) == 60
