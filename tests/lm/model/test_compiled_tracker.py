"""A trained state tracker under torch.compile: its loss and gradients, and what is counted."""

import pytest
import torch

from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from tests.tracker import loss_and_gradient, tracker, words


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("schedule", ["auto", "window:16"])
def test_loss_and_gradients_are_those_of_the_plain_model(schedule):
    model, (ids, answers) = tracker(schedule=schedule), words(4, 64)
    loss, grads = loss_and_gradient(model, ids, answers)
    compiled = torch.compile(model, backend="eager", fullgraph=schedule == "auto")
    found, theirs = loss_and_gradient(compiled, ids, answers)
    assert found == pytest.approx(loss, rel=1e-4) and loss < 0.01
    for name, grad in theirs.items():
        ours = grads[name.removeprefix("_orig_mod.")]
        torch.testing.assert_close(grad, ours, rtol=1e-3, atol=1e-4 * ours.abs().max().item())


def test_what_is_bisected_or_limited_is_counted_alike():
    torch.manual_seed(0)
    model = FPRNNForCausalLM(FPRNNConfig(vocab_size=64, d_model=32, n_layer=1, mixer_rank=4))
    ids = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(0))
    plain = model(ids).fixed_point
    assert plain.bisected.any() and plain.limited.any()
    there = torch.compile(model, backend="eager", fullgraph=True)(ids).fixed_point
    for name in ("failed", "bisected", "limited"):
        torch.testing.assert_close(getattr(there, name), getattr(plain, name))
