"""Resuming on other numbers of ranks and ZeRO stages: same data and same losses."""

import json
import shutil

import pytest

from lm.runs.checkpoint import list_checkpoints
from tests.lm.training.test_recovery import TINY
from tests.running import fprnn, run

# The tiny run has 8 updates. Its state noise and adversarial noise must not depend on the ranks.
SETTINGS = (
    "checkpoint.every=2",
    "checkpoint.keep=9",
    "train.global_batch_size=4",
    "train.grad_accum_steps=null",
    "log.every=1",
    "solver.state_noise=0.2",
    "train.adversarial_noise=0.1",
)


def trace(records):
    return {r["step"]: (r["loss"], r["lr"], r["tokens"]) for r in records}


def assert_close(records, reference, after):
    """Check that the records are of all updates after `after`, and agree with a `trace`."""
    actual = trace(records)
    assert sorted(actual) == list(range(after + 1, 9))
    for step, (loss, lr, tokens) in actual.items():
        expected_loss, expected_lr, expected_tokens = reference[step]
        assert loss == pytest.approx(expected_loss, rel=1e-5), step
        assert lr == pytest.approx(expected_lr, rel=1e-12) and tokens == expected_tokens, step


def resume_run(tmp_path, name, source, step, *overrides, processes=0):
    """Train a run `name` from the checkpoint `step` of the run `source`, with another layout."""
    checkpoint = tmp_path / "runs" / source / f"checkpoints/step-{step:06d}"
    overrides = (*SETTINGS, f"name={name}", f"resume={checkpoint}", *overrides)
    records, process = run(tmp_path / "runs", *overrides, processes=processes, name=name)
    assert "distributed again" in process.stdout
    assert "Warning" not in process.stdout + process.stderr
    return records


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Folder and trace of an uninterrupted run on one rank under ZeRO-1, micro-batches of two."""
    folder = tmp_path_factory.mktemp("elastic")
    records, _ = run(folder / "runs", *SETTINGS)
    return folder, trace(records)


def test_resume_on_2_1_2_ranks_and_stages_1_3_0(reference, tmp_path):
    """Two ranks under ZeRO-1, one under ZeRO-3, then two under ZeRO-0 with micro-batches of one.

    Each run resumes the previous run's checkpoint.
    """
    reference_folder, expected = reference
    first, _ = run(tmp_path / "runs", *SETTINGS, processes=2)
    assert_close(first, expected, after=0)
    two_ranks, one_rank = (
        json.loads((folder / "runs/tiny/result.json").read_text())["validation"]
        for folder in (tmp_path, reference_folder)
    )
    assert two_ranks["bytes"] == one_rank["bytes"] > one_rank["tokens"]
    assert two_ranks["bits_per_byte"] == pytest.approx(one_rank["bits_per_byte"], rel=1e-5)
    second = resume_run(tmp_path, "second", "tiny", 2, "engine.zero_stage=3")
    assert_close(second, expected, after=2)
    overrides = ("engine.zero_stage=0", "train.micro_batch_size=1")
    third = resume_run(tmp_path, "third", "second", 4, *overrides, processes=2)
    assert_close(third, expected, after=4)
    checkpoints = list_checkpoints(tmp_path / "runs/third/checkpoints")
    assert [path.name for path in checkpoints] == ["step-000006", "step-000008"]


@pytest.mark.parametrize("stage", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2))])
def test_resume_under_another_stage_on_one_rank(reference, tmp_path, stage):
    folder, expected = reference
    checkpoint = folder / "runs/tiny/checkpoints/step-000004"
    settings = (*SETTINGS, f"resume={checkpoint}", f"engine.zero_stage={stage}")
    records, process = run(tmp_path, *settings)
    note = "was written by 1 rank under ZeRO-1: weights and optimizer are distributed again"
    assert note in " ".join(process.stdout.split())
    assert_close(records, expected, after=4)


@pytest.mark.slow
@pytest.mark.parametrize("stage, new_stage", [(0, 3), (2, 1), (3, 2), (0, 1), (2, 0)])
def test_resume_from_any_stage_to_any_on_two_ranks(reference, tmp_path, stage, new_stage):
    _, expected = reference
    run(tmp_path / "runs", *SETTINGS, f"engine.zero_stage={stage}", processes=2)
    override = f"engine.zero_stage={new_stage}"
    records = resume_run(tmp_path, "second", "tiny", 2, override, processes=2)
    assert_close(records, expected, after=2)


def test_noise_of_an_lstm_does_not_depend_on_micro_batches(tmp_path):
    lstm = (*SETTINGS, "model.layers=lstm mamba")
    expected = trace(run(tmp_path / "two", *lstm)[0])
    assert_close(run(tmp_path / "one", *lstm, "train.micro_batch_size=1")[0], expected, after=0)
    noiseless = (*lstm, "solver.state_noise=0", "train.adversarial_noise=0")
    assert run(tmp_path / "noiseless", *noiseless)[0][0]["loss"] != expected[1][0]


def test_resume_with_another_batch_size_is_refused(reference, tmp_path):
    folder, _ = reference
    checkpoint = folder / "runs/tiny/checkpoints/step-000004"
    settings = (f"out_dir={tmp_path}", f"resume={checkpoint}", "train.grad_accum_steps=1")
    process = fprnn(*TINY, *settings)
    assert "was trained with 4 sequences per update, this run has 2" in process.stderr


def test_resume_with_fewer_updates_than_made_is_refused(reference, tmp_path):
    folder, _ = reference
    shutil.copytree(folder / "runs", tmp_path / "runs")
    result = (tmp_path / "runs/tiny/result.json").read_text()
    settings = (f"out_dir={tmp_path / 'runs'}", *SETTINGS, "resume=auto", "train.steps=4")
    process = fprnn(*TINY, *settings)
    assert process.returncode == 1 and "has 8 updates, and train.steps is only 4" in process.stderr
    assert (tmp_path / "runs/tiny/result.json").read_text() == result
