"""First calls of a HuggingFace user, each in a new process."""

import json

import pytest

from tests.hf import cold_run
from tests.running import PLAIN_FORKS


def train_in_new_process(tokenizer, **options):
    """Return losses and generated tokens of a user's process; see tests/hf/cold_run.py."""
    argument = json.dumps({"tokenizer": str(tokenizer), **options})
    process = PLAIN_FORKS.run("tests.hf.cold_run", [argument], timeout=300)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-3000:]
    return json.loads(process.stdout.strip().splitlines()[-1])


def check_ways(tokenizer, loop, lora, ways):
    """Check that each way of training (options of cold_run) equals plain training."""
    plain = cold_run.run(tokenizer=str(tokenizer), loop=loop, lora=lora)
    assert len(plain["losses"]) == 2 and plain["losses"][0] != plain["losses"][1]
    for way in ways:
        result = train_in_new_process(tokenizer, loop=loop, lora=lora, **way)
        assert result["losses"] == pytest.approx(plain["losses"], rel=1e-5), way
        assert result["tokens"] == plain["tokens"], way


def test_first_step_through_checkpoints_runs(byte_tokenizer):
    check_ways(byte_tokenizer, "steps", lora=False, ways=[{"checkpoint": True}])


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
    check_ways(byte_tokenizer, loop, lora, ways)
