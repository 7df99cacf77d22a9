"""First calls of a HuggingFace user, each in a new process."""

import json

import pytest

from tests.hf import cold_run
from tests.running import PLAIN_FORKS


def trained(tokenizer, **asked):
    """Return losses and generated tokens of a user's process; see tests/hf/cold_run.py."""
    words = json.dumps({"tokenizer": str(tokenizer), **asked})
    done = PLAIN_FORKS.run("tests.hf.cold_run", [words], timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def check(tokenizer, loop, lora, ways):
    """Check that each way of training gives the losses and tokens of plain training."""
    plain = cold_run.run(tokenizer=str(tokenizer), loop=loop, lora=lora)
    assert len(plain["losses"]) == 2 and plain["losses"][0] != plain["losses"][1]
    for way in ways:
        found = trained(tokenizer, loop=loop, lora=lora, **way)
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-5), way
        assert found["tokens"] == plain["tokens"], way


def test_first_step_through_checkpoints_runs(byte_tokenizer):
    check(byte_tokenizer, "steps", False, [{"checkpoint": True}])


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("loop", ["steps", "trainer", "sft"])
def test_every_way_to_train_runs(loop, lora, byte_tokenizer):
    if loop == "sft":
        pytest.importorskip("trl", exc_type=ImportError)
    ways = [
        {"checkpoint": True},
        {"compile": "aot_eager"},
        {"checkpoint": True, "compile": "aot_eager"},
        {"checkpoint": True, "compile": "inductor"},
    ]
    check(byte_tokenizer, loop, lora, ways)
