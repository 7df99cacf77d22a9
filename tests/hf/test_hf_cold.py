"""What a HuggingFace user's first call may be, each in a process that has computed nothing yet."""

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


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("reentrant", [True, False])
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
