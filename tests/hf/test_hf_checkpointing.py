"""Tests of gradient checkpointing through transformers: same gradients, a single solve."""

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from lm.model import strategies
from tests.hf.models import BASELINES, BLOCKS, build, exact, ids

every_model = pytest.mark.parametrize("name", [*BLOCKS, *BASELINES])


@every_model
@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": True}, {"use_reentrant": False}])
def test_checkpointing_gives_the_same_gradients_twice(name, kwargs):
    plain, model = exact(name).train(), exact(name).train()
    assert not model.is_gradient_checkpointing
    model.gradient_checkpointing_enable(kwargs)
    assert model.is_gradient_checkpointing
    for _ in range(2):
        for each in (plain, model):
            each(ids(), labels=ids()).loss.backward()
    for (key, a), b in zip(plain.named_parameters(), model.parameters()):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-7, atol=1e-9, msg=key)


@every_model
def test_each_layer_is_checkpointed_and_called_once(name):
    model = build(name).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layer = next(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))
    calls, handed, run = [], [], []
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    checkpoint = layer._gradient_checkpointing_func

    def watched(function, *args):
        handed.append(1)
        return checkpoint(lambda *a: (run.append(1), function(*a))[1], *args)

    layer._gradient_checkpointing_func = watched
    model(ids(), labels=ids()).loss.backward()
    assert len(calls) == len(handed) == 1 and len(run) == 2


@pytest.mark.parametrize("name", BLOCKS)
def test_the_backward_never_iterates(name, monkeypatch):
    solves, solve = [], strategies.solve_windows
    monkeypatch.setattr(
        strategies, "solve_windows", lambda *a, **k: (solves.append(1), solve(*a, **k))[1]
    )
    model = exact(name).train()
    model.gradient_checkpointing_enable()
    with model.solving(schedule="parallel"):
        loss = model(ids(), labels=ids()).loss
        before = len(solves)
        loss.backward()
        assert before == len(solves) == 1
        model.eval()(ids(), labels=ids()).loss.backward()  # checkpointing is for training only


@every_model
def test_checkpointing_with_frozen_weights_trains_adapters(name):
    """Reentrant checkpointing needs an input with a gradient, as when adapters train."""
    model = exact(name).train()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.base_model.norm_f.weight.requires_grad_(True) if name in BLOCKS else None
    first = next(p for n, p in model.named_parameters() if "layers.0" in n and p.dim() == 2)
    first.requires_grad_(True)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    model(ids(), labels=ids()).loss.backward()
    assert first.grad.abs().sum() > 0
    model.disable_input_require_grads()
