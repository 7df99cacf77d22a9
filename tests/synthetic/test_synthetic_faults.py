"""The synthetic trainer under faults: signals, NaN, damaged checkpoints, a full disk."""

import json
import signal
import subprocess
import time

import pytest
import torch

from lm.common.errors import DIVERGED, FAILED, PREEMPTED
from lm.model.checksums import sha256
from lm.runs.checkpoint import MANIFEST, find_newest_checkpoint
from lm.runs.metrics import read_metrics
from lm.runs.run_dir import RunDirError
from synthetic.build import load_run
from tests.running import FORKS

SMALL = (
    "model={d_model: 8, n_layer: 1, d_state: 2, expand: 1}",
    "task={name: word_problem, group: Z3}",
    "train={steps: 40, batch_size: 4, length: 4, threads: 1}",
    "optim.warmup=0",
    "eval={every: 100, lengths: 4, examples: 8}",
    "checkpoint.every=10",
    "log={every: 1, probe_every: 0}",
    "thresholds=[]",
    "solver.state_noise=0",
    "train.adversarial_noise=0",
)


def make_command(out, *overrides, fault=None):
    """Return the module and the arguments of a run."""
    module = ["tests.faults", fault] if fault else ["synthetic"]
    args = ["train", "--config", "configs/synthetic/small/s3.yaml", f"out_dir={out}", "name=x"]
    return module[0], [*module[1:], *args, *SMALL, *overrides]


def start(out, *overrides, fault=None):
    return FORKS.start(*make_command(out, *overrides, fault=fault))


def run(out, *overrides, fault=None):
    """Run to the end, and return the exit status, stdout and stderr."""
    module, arguments = make_command(out, *overrides, fault=fault)
    result = FORKS.run(module, arguments, timeout=120)
    return result.returncode, result.stdout, result.stderr


def read_losses(run_dir):
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in read_metrics(run_dir) if "loss" in r}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Losses of a run without a fault."""
    out = tmp_path_factory.mktemp("whole")
    status, _, error = run(out)
    assert status == 0, error
    return read_losses(out / "x")


def wait_for_step(run_dir, step, process):
    deadline = time.monotonic() + 60
    while max(read_losses(run_dir), default=0) < step:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda n: n.name)
def test_sigint_and_sighup_save_and_stop(tmp_path, uninterrupted, number):
    process = start(tmp_path, "train.steps=4000", "optim.schedule=constant")
    wait_for_step(tmp_path / "x", 13, process)
    process.send_signal(number)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == PREEMPTED and "checkpoint saved: the same command" in error
    step = int(find_newest_checkpoint(tmp_path / "x/checkpoints").name.removeprefix("step-"))
    assert step >= 13 and max(read_losses(tmp_path / "x")) == step
    assert not (tmp_path / "x/lease.json").exists()


def test_resume_after_kill_gives_the_same_losses(tmp_path, uninterrupted):
    process = start(tmp_path)
    wait_for_step(tmp_path / "x", 25, process)
    process.kill()
    process.wait(60)
    status, output, _ = run(tmp_path)
    assert status == 0 and "resumed  at update" in output and "taken over" in output
    assert read_losses(tmp_path / "x") == uninterrupted


@pytest.mark.parametrize(
    "fault, message",
    [("synthetic_nan_at=16", "the loss is nan"), ("synthetic_nonfinite_at=16", "block 0 has made")],
)
def test_nan_rolls_back_and_continues_with_next_batches(tmp_path, fault, message):
    """Update 16 is NaN. Updates 11 to 40 then have the batches of 17 to 46."""
    status, output, error = run(tmp_path, "optim.schedule=constant", fault=fault)
    assert status == 0, error
    assert f"note: update 16: {message}" in output
    assert "back to the checkpoint of update 10" in " ".join(output.split())
    records = read_losses(tmp_path / "x")
    assert sorted(records) == list(range(1, 41))
    assert [r["rollback"]["from"] for r in read_metrics(tmp_path / "x") if "rollback" in r] == [16]


def test_too_many_nans_end_the_run(tmp_path):
    status, _, error = run(tmp_path, "train.max_rollbacks=0", fault="synthetic_nan_at=16")
    assert status == DIVERGED
    assert "stopped at update 16: the loss is nan" in error
    assert "(train.max_rollbacks) made" in error


def test_nan_in_optimizer_moments_is_not_saved(tmp_path):
    status, output, error = run(tmp_path, fault="synthetic_moment_nan_at=20")
    assert status == 0, error
    note = "note: update 20: NaN or infinity in exp_avg_sq: back to the checkpoint of update 10"
    assert note in " ".join(output.split())
    assert sorted(read_losses(tmp_path / "x")) == list(range(1, 41))


def change_checkpoint(checkpoint, change):
    """Change a saved state, and update its digest in the manifest."""
    path = checkpoint / "state.pt"
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest["files"][path.name] = [path.stat().st_size, sha256(path)]
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


def test_checkpoints_with_nan_or_overflow_are_skipped(tmp_path):
    """The newest checkpoint contains NaN, which old versions saved; the second overflows."""
    assert run(tmp_path, "train.steps=30", "checkpoint.keep=3")[0] == 0

    def nan(state):
        state["optimizer"]["state"][0]["exp_avg"].view(-1)[0] = float("nan")

    def overflow(state):
        for weight in state["model"].values():
            weight.mul_(1e30)

    folder = tmp_path / "x/checkpoints"
    change_checkpoint(folder / "step-000030", nan)
    change_checkpoint(folder / "step-000020", overflow)
    status, output, error = run(tmp_path, "train.steps=30", "checkpoint.keep=3")
    assert status == 0, error
    output = " ".join(output.split())
    assert "step-000030: NaN or infinity in exp_avg" in output and "resumed at update 20" in output
    assert "back to the checkpoint of update 20" in output
    assert "back to the checkpoint of update 10" in output
    assert sorted(read_losses(tmp_path / "x")) == list(range(1, 31))


def test_changed_config_is_refused(tmp_path):
    """The changed config fits the weights, but describes another model."""
    assert run(tmp_path, "train.steps=10")[0] == 0
    config = tmp_path / "x/config.yaml"
    text = config.read_text()
    # The noise may change in a resumed run.
    config.write_text(text.replace("state_noise: 0.0", "state_noise: 0.1"))
    assert config.read_text() != text and load_run(tmp_path / "x")
    config.write_text(text.replace("reset_at_eos: true", "reset_at_eos: false"))
    with pytest.raises(RunDirError, match=r"config\.yaml differs from .*\(model\.reset_at_eos was"):
        load_run(tmp_path / "x")


def test_full_disk_is_reported_in_one_sentence(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        status, _, error = run(disk, "model.d_model=64")
        assert status == FAILED and "Traceback" not in error
        assert "cannot be written" in error and error.count("\n") == 1
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
