"""What a HuggingFace user's first call may be, each in a process that has computed nothing yet."""

import json
import subprocess
import sys

import pytest

from tests.running import ENV, ROOT

BEGIN = """
import warnings
warnings.simplefilter("ignore")
import torch
from tests.hf.models import build, ids
"""


def cold(code, limit=120, **env):
    """What Python code prints in a fresh process → the last line of it."""
    command = [sys.executable, "-c", BEGIN + code]
    done = subprocess.run(
        command, cwd=ROOT, env=ENV | env, capture_output=True, text=True, timeout=limit
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "backend, reentrant",
    [
        ("cpu", True),
        *(
            pytest.param(*way, marks=pytest.mark.slow)
            for way in (("cpu", False), ("triton", True), ("triton", False))
        ),
    ],
)
def test_the_first_backward_is_one_through_checkpoints(backend, reentrant):
    said = cold(
        f"""
model = build("fp_mamba1").train()
model.gradient_checkpointing_enable({{"use_reentrant": {reentrant}}})
model.enable_input_require_grads()
model(ids(), labels=ids()).loss.backward()
checkpointed = [p.grad.clone() for p in model.parameters()]
model.gradient_checkpointing_disable()
model.zero_grad()
model(ids(), labels=ids()).loss.backward()
for one, other in zip(checkpointed, model.parameters()):
    torch.testing.assert_close(one, other.grad, rtol=1e-4, atol=1e-6)
print("the same")
""",
        FPRNN_KERNELS=backend,
    )
    assert said == "the same"


def trained(tokenizer, **asked):
    """Losses and generated tokens of a user's process; see tests/hf/cold_run.py."""
    command = [sys.executable, "-m", "tests.hf.cold_run"]
    command += [json.dumps({"tokenizer": str(tokenizer), **asked})]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def check(tokenizer, loop, lora, ways):
    """Each way gives the losses and tokens of plain training."""
    plain = trained(tokenizer, loop=loop, lora=lora)
    assert len(plain["losses"]) == 2 and plain["losses"][0] != plain["losses"][1]
    for way in ways:
        found = trained(tokenizer, loop=loop, lora=lora, **way)
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-5), way
        assert found["tokens"] == plain["tokens"], way


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("loop", ["steps", "trainer", "sft"])
def test_every_way_to_train(loop, lora, byte_tokenizer):
    if loop == "sft":
        pytest.importorskip("trl", exc_type=ImportError)
    ways = [
        {"checkpoint": True},
        {"compile": "aot_eager"},
        {"checkpoint": True, "compile": "aot_eager"},
        {"checkpoint": True, "compile": "inductor"},
    ]
    check(byte_tokenizer, loop, lora, ways)
