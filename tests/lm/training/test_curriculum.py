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
WAITING = {"until": 10_000, "min_answer_prob": 0.9, "weights": {"a": 0, "b": 1, "c": 1}}
ENDING = {"until": 20_000, "weights": {"a": 1}}
AFTER = {"until": 30_000, "min_answer_prob": 0.5, "weights": {"a": 1, "b": 2}}


def curriculum_and_batches():
    data = Data(source="builtin", mixture=MIXTURE, curriculum=[WAITING, ENDING, AFTER])
    batches = make_loader(stages=[(s.until * 3, s.weights) for s in data.curriculum])
    return Curriculum(data, batches), batches


def test_stage_ends_when_its_answers_are_learned(capsys):
    curriculum, batches = curriculum_and_batches()
    take(batches, 5)
    for step in (CHECK_INTERVAL - 1, CHECK_INTERVAL + 1):
        assert curriculum.sources_to_check(step) == []
    assert curriculum.sources_to_check(CHECK_INTERVAL) == ["b"], "only its traces"
    record = curriculum.end_if_learned(CHECK_INTERVAL, 0.89)
    assert record == {"curriculum": {"stage": 0, "answers": 0.89, "ended": False}}
    assert curriculum.stage.min_answer_prob == 0.9 and not capsys.readouterr().out
    record = curriculum.end_if_learned(2 * CHECK_INTERVAL, 0.9)
    assert record == {"curriculum": {"stage": 0, "answers": 0.9, "ended": True}}
    assert batches.stage == 1 and curriculum.stage.until == ENDING["until"]
    assert "stage 0 of the curriculum ends (answers 0.90)" in capsys.readouterr().out
    assert curriculum.sources_to_check(3 * CHECK_INTERVAL) == [], (
        "this stage does not wait for answers"
    )
    batches.end_stage()
    assert curriculum.sources_to_check(4 * CHECK_INTERVAL) == ["a", "b"]
    assert not curriculum.end_if_learned(4 * CHECK_INTERVAL, math.nan)["curriculum"]["ended"]
    curriculum.end_if_learned(AFTER["until"] - CHECK_INTERVAL + 1, 0.2)
    message = capsys.readouterr().out
    assert (
        f"ends unlearned after update {AFTER['until']} (answers 0.20, min_answer_prob: 0.5)"
        in message
    )
    curriculum.end_if_learned(4 * CHECK_INTERVAL, 0.7)
    assert batches.stage == 3 and curriculum.stage is None
    assert curriculum.sources_to_check(5 * CHECK_INTERVAL) == []


def test_without_stages_no_answers_are_measured():
    plain = Curriculum(Data(), single_source_loader(range(50), 4, 3))
    assert plain.stage is None and plain.sources_to_check(CHECK_INTERVAL) == []
    none = Curriculum(Data(source="builtin", mixture=MIXTURE), make_loader())
    assert none.stage is None and none.sources_to_check(CHECK_INTERVAL) == []


UNLEARNED = f"data.curriculum={json.dumps([WAITING | {'min_answer_prob': 0.999}])}"
SETTINGS = (
    "data.source=builtin",
    "data.path=null",
    f"data.mixture={json.dumps(MIXTURE)}",
    f"data.curriculum={json.dumps([WAITING | {'min_answer_prob': 1.0e-9}])}",
    "data.val_tokens=300",
)


def test_rollback_restores_the_stage_of_the_checkpoint(tmp_path):
    """Update 4 ends the stage and 5 is NaN: after the rollback to 3 the stage is current again."""
    fault = "check_interval=4,nan_at=9"
    process = run_with_fault(fault, *TINY, f"out_dir={tmp_path}", *SETTINGS, "checkpoint.every=3")
    assert process.returncode == 0, process.stderr
    message = " ".join(process.stdout.split())
    end = "update 4 stage 0 of the curriculum ends"
    before, after = message.split("back to the checkpoint of update 3")
    assert end in before and end in after


def test_nan_is_detected_before_answers_are_measured(tmp_path):
    fault = "check_interval=2,weight_nan_at=4"
    process = run_with_fault(
        fault, *TINY, f"out_dir={tmp_path}", *SETTINGS[:3], UNLEARNED, "checkpoint.every=3"
    )
    assert process.returncode == 0, process.stderr
    message = " ".join(process.stdout.split())
    assert (
        "note: update 4: NaN or infinity in the weights: back to the checkpoint of update 3"
        in message
    )


@pytest.mark.slow
def test_resume_after_ended_stage_is_identical(tmp_path):
    """The adversary starts after the stage; two ranks train alike."""
    steps, end = CHECK_INTERVAL + 6, CHECK_INTERVAL
    settings = [
        *SETTINGS,
        "train.global_batch_size=4",
        "train.grad_accum_steps=null",
        "train.adversarial_noise=0.5",
        f"train.steps={steps}",
        f"checkpoint.every={end}",
    ]
    uninterrupted, process = run(tmp_path / "uninterrupted", *settings)
    assert f"update {end:>6}  stage 0 of the curriculum ends" in process.stdout
    records = {r["step"]: r for r in uninterrupted}
    targets = {step: r["data_share"]["a"] for step, r in records.items()}
    assert targets[end] == 0 < targets[steps]
    metrics = (tmp_path / "uninterrupted/tiny/metrics.jsonl").read_text().splitlines()
    checks = [json.loads(line) for line in metrics if '"curriculum"' in line]
    assert [(r["step"], r["curriculum"]["stage"]) for r in checks] == [(end, 0)]
    assert 0 < checks[0]["curriculum"]["answers"] < 1
    checkpoint = tmp_path / f"uninterrupted/tiny/checkpoints/step-{end:06}"
    repeated, _ = run(tmp_path / "again", *settings, f"resume={checkpoint}")
    expected = trace(uninterrupted)
    assert trace(repeated) == {step: expected[step] for step in range(end + 1, steps + 1)}
    on_two, _ = run(tmp_path / "two", *settings, processes=2)
    shares = {r["step"]: r["data_share"] for r in on_two}
    assert shares == {step: r["data_share"] for step, r in records.items()}
