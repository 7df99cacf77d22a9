"""Tests of gradient checkpointing through transformers: same gradients, a single solve."""

from functools import partial

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from lm.model import strategies
from tests.hf.models import BLOCKS, build, build_fp64, every_model, few_models, make_ids


@every_model
@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": True}, {"use_reentrant": False}])
def test_checkpointing_gives_the_same_gradients_twice(name, kwargs):
    plain, model = build_fp64(name).train(), build_fp64(name).train()
    assert not model.is_gradient_checkpointing
    model.gradient_checkpointing_enable(kwargs)
    assert model.is_gradient_checkpointing
    for _ in range(2):
        for either_model in (plain, model):
            either_model(make_ids(), labels=make_ids()).loss.backward()
    for (key, a), b in zip(plain.named_parameters(), model.parameters()):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-7, atol=1e-9, msg=key)


@few_models
def test_each_layer_is_checkpointed_and_called_once(name):
    model = build(name).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layer = next(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))
    events = []
    layer.register_forward_pre_hook(lambda *_: events.append("layer"))
    checkpoint = layer._gradient_checkpointing_func

    def record(event, function, *args):
        events.append(event)
        return function(*args)

    layer._gradient_checkpointing_func = lambda function, *args: record(
        "checkpoint", checkpoint, partial(record, "forward", function), *args
    )
    model(make_ids(), labels=make_ids()).loss.backward()
    # The second forward is the recomputation in the backward.
    assert events == ["layer", "checkpoint", "forward", "forward"]


@pytest.mark.parametrize("name", BLOCKS)
def test_the_backward_never_iterates(name, monkeypatch):
    solve_count, solve = 0, strategies.solve_windows

    def count_solve(*args, **kwargs):
        nonlocal solve_count
        solve_count += 1
        return solve(*args, **kwargs)

    monkeypatch.setattr(strategies, "solve_windows", count_solve)
    model = build_fp64(name).train()
    model.gradient_checkpointing_enable()
    with model.solving(schedule="parallel"):
        loss = model(make_ids(), labels=make_ids()).loss
        assert solve_count == 1
        loss.backward()
        assert solve_count == 1
        # In evaluation mode there is no checkpointing, and the backward works as well.
        model.eval()(make_ids(), labels=make_ids()).loss.backward()


@every_model
def test_checkpointing_with_frozen_weights_trains_adapters(name):
    """Reentrant checkpointing needs an input with a gradient, as when adapters train."""
    model = build_fp64(name).train()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if name in BLOCKS:
        model.base_model.norm_f.weight.requires_grad_(True)
    first = next(p for n, p in model.named_parameters() if "layers.0" in n and p.dim() == 2)
    first.requires_grad_(True)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    model(make_ids(), labels=make_ids()).loss.backward()
    assert first.grad.abs().sum() > 0
    model.disable_input_require_grads()
