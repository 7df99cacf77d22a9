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

UPDATES = 60
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
    f"train.steps={UPDATES}",
    "train.grad_accum_steps=3",
)


def start(out_dir, hub_environment, *overrides):
    """Start a run in a new interpreter, because a process reads the address of its hub once."""
    environment = {**ENV, **hub_environment, "HF_HUB_OFFLINE": "0"}
    environment["HF_HOME"] = str(out_dir / "home")
    return subprocess.Popen(
        command(out_dir, *STREAM, *overrides),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_success(process) -> str:
    """Wait for the end of a run that must succeed; return its output."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def count_records(metrics):
    return metrics.read_text().count("\n") if metrics.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "trouble"), [(0, "silent"), (1, 503)])
def test_signal_during_hub_wait_saves_within_seconds(tmp_path, workers, trouble):
    """The hub stops answering, or answers with status 503, after 10 updates.

    The run is stopped while it waits, and repeats the interrupted update when it continues.
    """
    stopped = tmp_path / "stopped"
    # More text than a run buffers, so that it still reads from the hub after 10 updates.
    with serving(make_corpus(files=2, groups=8, rows=70)) as hub_environment:
        wait_for_success(start(tmp_path / "whole", hub_environment))
        stopped.mkdir()
        process = start(stopped, hub_environment, f"data.workers={workers}")
        metrics = stopped / "tiny/metrics.jsonl"
        while count_records(metrics) < 10:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        if trouble == "silent":
            Hub.is_silent = True
        else:
            Hub.faults += [("parquet", trouble)] * 10_000
        previous_count = -1
        while count_records(metrics) != previous_count:  # the run still has data
            previous_count = count_records(metrics)
            time.sleep(2)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        signal_time = time.time()
        output, _ = process.communicate(timeout=300)
        (manifest,) = stopped.glob("tiny/checkpoints/step-*/manifest.json")
        # Not the time of the exit, because the interpreter takes longer to end.
        assert manifest.stat().st_mtime - signal_time < 5
        assert process.returncode == PREEMPTED and "checkpoint saved: continue" in output, output
        Hub.is_silent, Hub.faults = False, []
        assert "resumed" in wait_for_success(start(stopped, hub_environment, "resume=auto"))
    whole_losses, stopped_losses = (
        [(record["step"], record["loss"]) for record in read_losses(folder / "tiny")]
        for folder in (tmp_path / "whole", stopped)
    )
    assert stopped_losses == whole_losses and len(whole_losses) == UPDATES
