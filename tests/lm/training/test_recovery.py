"""Recovery of a run: rollback after NaN, the end of a hang, exit statuses."""

import json
import shutil
import signal
import time

import pytest
import torch

from lm.common.errors import BAD_CONFIG, BAD_DATA, DIVERGED, FAILED, HANG, PREEMPTED
from lm.model.checksums import sha256
from lm.runs.checkpoint import MANIFEST, CheckpointError, list_checkpoints, verify
from lm.runs.metrics import read_metrics
from tests.running import FORKS, fprnn, read_losses, run

TINY = ("train", "--config", "configs/tiny/lm.yaml")


def run_with_fault(fault, *args, timeout=120):
    """Run a command with a fault of tests/faults.py; return its CompletedProcess."""
    return FORKS.run("tests.faults", [fault, *args], timeout)


def trace(records):
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in records}


STAGES = [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 3))]


@pytest.mark.parametrize("stage", STAGES)
def test_nan_rolls_back_and_continues_with_next_data(tmp_path, tiny_run, stage):
    """Update 6 is NaN: the run rolls back to 4, and updates 5 to 8 get the data of 7 to 10.

    The same losses follow from a checkpoint of 4 whose position in the data is two updates further.
    """
    settings = (f"engine.zero_stage={stage}", "log.every=1", "train.max_rollbacks=1")
    broken = tmp_path / "broken"
    # An update has two forward passes; pass 11 is the first of update 6.
    done = run_with_fault("nan_at=11", *TINY, f"out_dir={broken}", *settings)
    assert done.returncode == 0, done.stderr
    message = " ".join(done.stdout.split())
    assert "note: update 6: the loss is nan: back to the checkpoint of update 4" in message
    assert "(rollback 1 of 1)" in message
    records = read_metrics(broken / "tiny")
    (rollback,) = [r["rollback"] for r in records if "rollback" in r]
    assert rollback == {"number": 1, "from": 6, "why": "the loss is nan"}

    if stage == 1:  # the stage of the tiny run
        shutil.copytree(tiny_run, tmp_path / "whole/tiny", ignore=shutil.ignore_patterns("hf"))
    else:
        run(tmp_path / "whole", *settings)
    checkpoint = tmp_path / "whole/tiny/checkpoints/step-000004"
    skip_data(checkpoint, micro_batches=4)
    expected, _ = run(tmp_path / "ahead", *settings, f"resume={checkpoint}")
    actual = trace(read_losses(broken / "tiny"))
    assert sorted(actual) == list(range(1, 9))
    after_rollback = {step: values for step, values in actual.items() if step > 4}
    assert after_rollback == trace(expected)


def skip_data(checkpoint, micro_batches):
    """Move the checkpoint's position in the data."""

    def move(state):
        state["loader"]["next_global_micro_batch"] += micro_batches

    rewrite_file(checkpoint / "loader-rank0000.pt", move)


def rewrite_file(path, change):
    """Change the state in a file of a checkpoint, and the checksum in the manifest."""
    checkpoint, state = path.parent, torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest["files"][path.name] = [path.stat().st_size, sha256(path)]
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


def test_nan_without_checkpoint_or_rollbacks_left_stops(tmp_path):
    # Pass 3 is the first of update 2, and the first checkpoint is of update 4.
    done = run_with_fault("nan_at=3", *TINY, f"out_dir={tmp_path}")
    assert done.returncode == DIVERGED
    assert "stopped at update 2: the loss is nan; no checkpoint" in done.stderr
    failure = json.loads((tmp_path / "tiny/failure.json").read_text())
    assert failure["exit_code"] == DIVERGED
    assert failure["sentence"].startswith("stopped at update 2")
    # The same command continues and deletes failure.json.
    run(tmp_path, "resume=auto")
    assert not (tmp_path / "tiny/failure.json").exists()
    settings = (f"out_dir={tmp_path}", "name=other", "train.max_rollbacks=0")
    done = run_with_fault("nan_at=3", *TINY, *settings)
    assert "0 of 0 rollbacks (train.max_rollbacks) made" in done.stderr


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "fault, tensor_name", [("weight", "the weights"), ("moment", "exp_avg_sq")]
)
def test_nan_in_a_weight_or_a_moment_is_not_saved(tmp_path, fault, tensor_name, stage):
    """The run rolls back to update 2 before it saves the NaN of update 4."""
    settings = (f"out_dir={tmp_path}", "checkpoint.every=2", f"engine.zero_stage={stage}")
    done = run_with_fault(f"{fault}_nan_at=4", *TINY, *settings)
    assert done.returncode == 0, done.stderr
    message = " ".join(done.stdout.split())
    note = f"note: update 4: NaN or infinity in {tensor_name}: back to the checkpoint of update 2"
    assert note in message and "(rollback 1 of 2)" in message
    assert sorted(trace(read_losses(tmp_path / "tiny"))) == list(range(1, 9))


def damage_optimizer(checkpoint, value, key):
    """Set all fp32 weights of the optimizer, or the first number of a moment, to a value."""

    def damage(saved):
        state = saved["optimizer_state_dict"]
        if key == "weights":
            state["single_partition_of_fp32_groups"][0].view(-1)[:] = value
        else:
            state["base_optimizer_state"]["state"][0][key].view(-1)[0] = value

    rewrite_file(checkpoint / "zero_pp_rank_0_mp_rank_00_optim_states.pt", damage)


SETTINGS = ("checkpoint.every=2", "checkpoint.keep=4")


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory):
    """Folder of a run like one that was killed after update 6, with checkpoints of 2, 4 and 6."""
    out = tmp_path_factory.mktemp("killed_run")
    run(out, *SETTINGS)
    shutil.rmtree(out / "tiny/checkpoints/step-000008")
    (out / "tiny/result.json").unlink()
    return out


@pytest.mark.parametrize(
    "value, key, is_resumed_by_path",
    [(1e30, "weights", False), (float("nan"), "exp_avg", True)],
    ids=["overflow", "NaN"],
)
def test_second_failure_rolls_back_one_checkpoint_further(
    killed_run, tmp_path, value, key, is_resumed_by_path
):
    """Finite weights that overflow in every pass, or a moment that is NaN."""
    out = shutil.copytree(killed_run, tmp_path / "out")
    newest = out / "tiny/checkpoints/step-000006"
    damage_optimizer(newest, value, key)
    _, done = run(out, *SETTINGS, f"resume={newest if is_resumed_by_path else 'auto'}")
    message = " ".join(done.stdout.split())
    assert "back to the checkpoint of update 6" in message
    assert "back to the checkpoint of update 4, then on with the next data (rollback 2" in message
    assert sorted(trace(read_losses(out / "tiny"))) == list(range(1, 9))
    assert not find_damaged(out / "tiny/checkpoints")


def find_damaged(folder):
    """Return the checkpoints that are not complete."""
    damaged = []
    for path in list_checkpoints(folder):
        try:
            verify(path)
        except CheckpointError:
            damaged.append(path)
    return damaged


@pytest.mark.slow
def test_hanging_run_ends_and_writes_stacks(tmp_path):
    done = run_with_fault("sleep_at=3", *TINY, f"out_dir={tmp_path}", "engine.timeout_s=3")
    assert done.returncode == HANG
    assert "error: rank 0 has stood still" in done.stderr
    stacks = (tmp_path / "tiny/stacks/rank0000.txt").read_text()
    assert "in update" in stacks and "faults.py" in stacks
    # The lease belongs to a dead process: the next run takes it over.
    _, done = run(tmp_path, "resume=auto")
    assert "was left by process" in done.stdout


def test_second_run_in_the_same_directory_is_refused(tmp_path):
    long_run = ("train.steps=4000", "eval.every=4000", "checkpoint.every=4000")
    first = FORKS.start("lm", [*TINY, f"out_dir={tmp_path}", *long_run])
    try:
        metrics = tmp_path / "tiny/metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 3)
        for overwrite in ((), ("--overwrite",)):
            done = fprnn(*TINY, f"out_dir={tmp_path}", *long_run, "resume=auto", *overwrite)
            assert done.returncode == FAILED
            assert f"is in use by process {first.pid} on" in done.stderr
        first.send_signal(signal.SIGINT)  # Ctrl-C saves and stops, too
        output = "".join(first.communicate(timeout=60))
        assert first.returncode == PREEMPTED and "stopped by a signal after update" in output
        assert metrics.exists() and not (tmp_path / "tiny/lease.json").exists()
    finally:
        first.kill()


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_exit_status_tells_wrong_data_config_and_folder_apart(tmp_path):
    assert fprnn(*TINY, f"out_dir={tmp_path}", "data.path=nowhere").returncode == BAD_DATA
    assert fprnn(*TINY, f"out_dir={tmp_path}", "train.steps=x").returncode == BAD_CONFIG
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/thesis.txt").touch()  # the folder belongs to something else
    assert fprnn(*TINY, f"out_dir={tmp_path}").returncode == FAILED
