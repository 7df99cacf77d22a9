"""A run goes on on other numbers of ranks, under other ZeRO stages: same data, same losses."""

import json
import shutil

import pytest

from lm.runs.checkpoint import list_checkpoints
from tests.running import ENV, fprnn, run

# With noise on the states, which must not depend on the ranks either.
EVERY = ("checkpoint.every=2", "checkpoint.keep=9", "train.global_batch_size=4",
         "train.grad_accum_steps=null", "log.every=1", "solver.state_noise=0.2",
         "train.adversarial_noise=0.1")  # fmt: skip


def trace(records):
    return {r["step"]: (r["loss"], r["lr"], r["tokens"]) for r in records}


def close(records, reference, after):
    """Every update after `after` is there, and is what the reference says."""
    found = trace(records)
    assert sorted(found) == list(range(after + 1, 9))
    for step, (loss, lr, tokens) in found.items():
        assert loss == pytest.approx(reference[step][0], rel=1e-5), step
        assert (lr, tokens) == (pytest.approx(reference[step][1], rel=1e-12), reference[step][2])


def going_on(tmp_path, name, from_step, of, *overrides, processes=0):
    checkpoint = tmp_path / "runs" / of / f"checkpoints/step-{from_step:06d}"
    overrides = (*EVERY, f"name={name}", f"resume={checkpoint}", *overrides)
    records, done = run(tmp_path / "runs", *overrides, processes=processes, name=name)
    assert "distributed again" in done.stdout
    assert "Warning" not in done.stdout + done.stderr
    return records


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Undisturbed, on one rank under ZeRO-1, with micro-batches of two."""
    out = tmp_path_factory.mktemp("elastic")
    records, _ = run(out / "runs", *EVERY)
    return out, trace(records)


def test_2_1_2_ranks_and_stages_1_3_0(reference, tmp_path):
    """Two ranks under ZeRO-1, then one under ZeRO-3, then two under ZeRO-0 with micro-batches of
    one: each from the checkpoint of the one before."""
    out, expected = reference
    first, _ = run(tmp_path / "runs", *EVERY, processes=2)
    close(first, expected, 0)
    of_two, of_one = (
        json.loads((folder / "runs/tiny/result.json").read_text())["validation"]
        for folder in (tmp_path, out)
    )
    assert of_two["bytes"] == of_one["bytes"] > of_one["tokens"]
    assert of_two["bits_per_byte"] == pytest.approx(of_one["bits_per_byte"], rel=1e-5)
    second = going_on(tmp_path, "second", 2, "tiny", "engine.zero_stage=3")
    close(second, expected, 2)
    third = going_on(
        tmp_path, "third", 4, "second", "engine.zero_stage=0", "train.micro_batch_size=1",
        processes=2,
    )  # fmt: skip
    close(third, expected, 4)
    assert [p.name for p in list_checkpoints(tmp_path / "runs/third/checkpoints")] == [
        "step-000006", "step-000008",
    ]  # fmt: skip


@pytest.mark.parametrize("stage", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2))])
def test_one_rank_goes_on_under_another_stage(reference, tmp_path, stage):
    out, expected = reference
    checkpoint = out / "runs/tiny/checkpoints/step-000004"
    records, done = run(tmp_path, *EVERY, f"resume={checkpoint}", f"engine.zero_stage={stage}")
    assert "was written by 1 ranks under ZeRO-1: weights and optimizer are distributed again" in (
        " ".join(done.stdout.split())
    )
    close(records, expected, 4)


@pytest.mark.slow
@pytest.mark.parametrize("before,after", [(0, 3), (2, 1), (3, 2), (0, 1), (2, 0)])
def test_two_ranks_from_any_stage_to_any(reference, tmp_path, before, after):
    _, expected = reference
    run(tmp_path / "runs", *EVERY, f"engine.zero_stage={before}", processes=2)
    records = going_on(tmp_path, "second", 2, "tiny", f"engine.zero_stage={after}", processes=2)
    close(records, expected, 2)


def test_a_batch_of_another_size_is_refused(reference, tmp_path):
    out, _ = reference
    checkpoint = out / "runs/tiny/checkpoints/step-000004"
    done = fprnn(
        "train", "--config", "configs/tiny/lm.yaml", f"out_dir={tmp_path}", f"resume={checkpoint}",
        "train.grad_accum_steps=1",
    )  # fmt: skip
    assert "was trained with 4 sequences per update, this run has 2" in done.stderr, ENV


def test_fewer_updates_than_were_made_are_refused(reference, tmp_path):
    out, _ = reference
    shutil.copytree(out / "runs", tmp_path / "runs")
    result = (tmp_path / "runs/tiny/result.json").read_text()
    done = fprnn(
        "train", "--config", "configs/tiny/lm.yaml", f"out_dir={tmp_path / 'runs'}", *EVERY,
        "resume=auto", "train.steps=4",
    )  # fmt: skip
    assert done.returncode == 1 and "has 8 updates, and train.steps is only 4" in done.stderr
    assert (tmp_path / "runs/tiny/result.json").read_text() == result
