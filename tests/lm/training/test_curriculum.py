"""Stages of `data.curriculum`: when answers are measured, and resuming after a stage."""

from __future__ import annotations

import json
import math

import pytest

from lm.config.data import Data
from lm.data.batches.loader import single_source_loader
from lm.training.curriculum import CHECK_INTERVAL, Curriculum
from tests.lm.data.test_mixture import make_loader, take
from tests.lm.training.test_elastic import trace
from tests.lm.training.test_recovery import TINY, run_with_fault
from tests.running import run

MIXTURE = {
    "a": {"source": "traces", "weight": 1, "traces": {"documents": 400}},
    "b": {"source": "traces", "weight": 1, "traces": {"documents": 400, "group": "Z2"}},
    "c": {"source": "jsonl", "path": "tests/data/tiny.jsonl", "weight": 1},
}
# A stage that waits for the answers of b, one that waits for none, one that waits for a and b.
STAGE_0 = {"until": 10_000, "min_answer_prob": 0.9, "weights": {"a": 0, "b": 1, "c": 1}}
STAGE_1 = {"until": 20_000, "weights": {"a": 1}}
STAGE_2 = {"until": 30_000, "min_answer_prob": 0.5, "weights": {"a": 1, "b": 2}}


def make_curriculum_and_batches():
    data = Data(source="builtin", mixture=MIXTURE, curriculum=[STAGE_0, STAGE_1, STAGE_2])
    size = 3  # sequences per update
    batches = make_loader(size, stages=[(s.until * size, s.weights) for s in data.curriculum])
    return Curriculum(data, batches), batches


def test_stage_ends_when_its_answers_are_learned(capsys):
    curriculum, batches = make_curriculum_and_batches()
    take(batches, 5)
    for step in (CHECK_INTERVAL - 1, CHECK_INTERVAL + 1):
        assert curriculum.sources_to_check(step) == []
    assert curriculum.sources_to_check(CHECK_INTERVAL) == ["b"], "a has weight 0, c no answers"
    record = curriculum.end_if_learned(CHECK_INTERVAL, 0.89)
    assert record == {"curriculum": {"stage": 0, "answers": 0.89, "ended": False}}
    assert curriculum.stage.min_answer_prob == 0.9 and not capsys.readouterr().out
    record = curriculum.end_if_learned(2 * CHECK_INTERVAL, 0.9)
    assert record == {"curriculum": {"stage": 0, "answers": 0.9, "ended": True}}
    assert batches.stage == 1 and curriculum.stage.until == STAGE_1["until"]
    assert "stage 0 of the curriculum ends (answers 0.90)" in capsys.readouterr().out
    assert curriculum.sources_to_check(3 * CHECK_INTERVAL) == [], "stage 1 does not wait"
    batches.end_stage()
    assert curriculum.sources_to_check(4 * CHECK_INTERVAL) == ["a", "b"]
    assert not curriculum.end_if_learned(4 * CHECK_INTERVAL, math.nan)["curriculum"]["ended"]
    until = STAGE_2["until"]
    curriculum.end_if_learned(until - CHECK_INTERVAL - 1, 0.2)
    assert not capsys.readouterr().out
    curriculum.end_if_learned(until - CHECK_INTERVAL, 0.2)  # at `until`, the stage is over
    message = capsys.readouterr().out
    assert f"unlearned after update {until} (answers 0.20, min_answer_prob: 0.5)" in message
    curriculum.end_if_learned(4 * CHECK_INTERVAL, 0.7)
    assert batches.stage == 3 and curriculum.stage is None
    assert curriculum.sources_to_check(5 * CHECK_INTERVAL) == []


def test_without_stages_no_answers_are_measured():
    single_source = Curriculum(Data(), single_source_loader(range(50), 4, 3))
    mixture = Curriculum(Data(source="builtin", mixture=MIXTURE), make_loader())
    for curriculum in (single_source, mixture):
        assert curriculum.stage is None and curriculum.sources_to_check(CHECK_INTERVAL) == []


def stage_with(min_answer_prob):
    return f"data.curriculum={json.dumps([STAGE_0 | {'min_answer_prob': min_answer_prob}])}"


DATA = (
    "data.source=builtin",
    "data.path=null",
    f"data.mixture={json.dumps(MIXTURE)}",
    "data.val_tokens=300",
)
LEARNED_AT_ONCE, NEVER_LEARNED = stage_with(1.0e-9), stage_with(0.999)


def test_rollback_restores_the_stage_of_the_checkpoint(tmp_path):
    """Update 4 ends the stage and 5 is NaN: after the rollback to 3 the stage is current again."""
    fault = "check_interval=4,nan_at=9"  # forward pass 9 is the first of update 5
    settings = (*DATA, LEARNED_AT_ONCE, "checkpoint.every=3")
    process = run_with_fault(fault, *TINY, f"out_dir={tmp_path}", *settings)
    assert process.returncode == 0, process.stderr
    message = " ".join(process.stdout.split())
    end_of_stage = "update 4 stage 0 of the curriculum ends"
    before_rollback, after_rollback = message.split("back to the checkpoint of update 3")
    assert end_of_stage in before_rollback and end_of_stage in after_rollback


def test_nan_is_detected_before_answers_are_measured(tmp_path):
    fault = "check_interval=2,weight_nan_at=4"
    settings = (*DATA, NEVER_LEARNED, "checkpoint.every=3")
    process = run_with_fault(fault, *TINY, f"out_dir={tmp_path}", *settings)
    assert process.returncode == 0, process.stderr
    note = "note: update 4: NaN or infinity in the weights: back to the checkpoint of update 3"
    assert note in " ".join(process.stdout.split())


@pytest.mark.slow
def test_resume_after_ended_stage_is_identical(tmp_path):
    """The adversary starts after the stage; two ranks train alike."""
    steps, end = CHECK_INTERVAL + 6, CHECK_INTERVAL
    settings = [
        *DATA,
        LEARNED_AT_ONCE,
        "train.global_batch_size=4",
        "train.grad_accum_steps=null",
        "train.adversarial_noise=0.5",
        f"train.steps={steps}",
        f"checkpoint.every={end}",
    ]
    uninterrupted, process = run(tmp_path / "uninterrupted", *settings)
    assert f"update {end:>6}  stage 0 of the curriculum ends" in process.stdout
    shares = {r["step"]: r["data_share"] for r in uninterrupted}
    assert shares[end]["a"] == 0 < shares[steps]["a"]
    metrics = (tmp_path / "uninterrupted/tiny/metrics.jsonl").read_text().splitlines()
    checks = [json.loads(line) for line in metrics if '"curriculum"' in line]
    assert [(r["step"], r["curriculum"]["stage"]) for r in checks] == [(end, 0)]
    assert 0 < checks[0]["curriculum"]["answers"] < 1
    checkpoint = tmp_path / f"uninterrupted/tiny/checkpoints/step-{end:06}"
    repeated, _ = run(tmp_path / "again", *settings, f"resume={checkpoint}")
    expected = trace(uninterrupted)
    assert trace(repeated) == {step: expected[step] for step in range(end + 1, steps + 1)}
    on_two_ranks, _ = run(tmp_path / "two", *settings, processes=2)
    assert {r["step"]: r["data_share"] for r in on_two_ranks} == shares
