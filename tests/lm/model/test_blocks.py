"""FP-Mamba-1: every toggle solved, masked, reset and differentiated at the fixed point."""

import itertools

import pytest
import torch

from lm.model.blocks import FPMamba1, Sequences, shift
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM

TOGGLES = {
    "default": {},
    "gate_inside": dict(glu_in_loop=True),
    "short_conv": dict(use_short_conv=True),
    "no_bc_norm": dict(bc_norm=False),
    "symm_mixer": dict(symm_mixer=True),
    "no_h_dep": dict(mixer_h_dep=False),
    "two_backwards": dict(n_backwards=2),
    "expand1_dt_rank3": dict(expand=1, dt_rank=3),
    "householder3_lowrank": dict(mixer_rank=3, mixer_proj_rank=4),
    "dplr": dict(mixer="dplr", mixer_rank=2),
    "kronecker": dict(mixer="kronecker"),
    "everything": dict(glu_in_loop=True, use_short_conv=True, symm_mixer=True, mixer="dplr"),
}


def block(dtype=torch.float64, **kwargs):
    """A block with a contractive mixer, so that tight tolerances are reached."""
    torch.manual_seed(0)
    config = FPRNNConfig(**{"vocab_size": 8, "d_model": 8, "n_layer": 1, "d_state": 4, **kwargs})
    model = FPRNNForCausalLM(config).backbone.layers[0].block.to(dtype)
    assert isinstance(model, FPMamba1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("alpha_proj.bias", "gate_proj.bias")):
                p.fill_(-3.0)  # gates nearly shut: Q near 0.1, a strong contraction
            if name == "bc_y_proj.gain":
                p.mul_(0.3)
    return model


def tight(model, tol=1e-11):
    model.config.tol, model.config.eval_max_iters = tol, 3000
    return model.eval()


def u_of(*shape, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("name", TOGGLES)
def test_the_output_is_a_fixed_point(name):
    model = tight(block(**TOGGLES[name]))
    u = u_of(2, 12, 8)
    with torch.no_grad():
        out, stats = model(u)
    assert out.shape == (2, 12, 8)
    assert stats.converged.all() and (stats.residual < 1e-10).all()


@pytest.mark.parametrize("name", TOGGLES)
def test_left_padding_changes_nothing(name):
    model = tight(block(**TOGGLES[name]))
    u, pads = u_of(1, 9, 8), u_of(1, 4, 8, seed=2)
    mask = torch.tensor([[False] * 4 + [True] * 9])
    with torch.no_grad():
        alone, _ = model(u)
        padded, _ = model(torch.cat([pads, u], 1), Sequences(mask=mask))
    torch.testing.assert_close(padded[:, 4:], alone, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", TOGGLES)
def test_a_packed_document_equals_itself_alone(name):
    model = tight(block(**TOGGLES[name]))
    first, second = u_of(1, 7, 8), u_of(1, 6, 8, seed=2)
    starts = torch.zeros(1, 13, dtype=torch.bool)
    starts[0, 7] = True
    with torch.no_grad():
        packed, _ = model(torch.cat([first, second], 1), Sequences(starts=starts))
        alone, _ = model(second)
    torch.testing.assert_close(packed[:, 7:], alone, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", TOGGLES)
def test_causal_once_converged(name):
    model = tight(block(**TOGGLES[name]))
    u = u_of(1, 10, 8)
    changed = u.clone()
    changed[:, 6:] += 1
    with torch.no_grad():
        a, _ = model(u)
        b, _ = model(changed)
    torch.testing.assert_close(a[:, :6], b[:, :6], rtol=1e-8, atol=1e-8)
    assert not torch.allclose(a[:, 6:], b[:, 6:])


@pytest.mark.parametrize("name", TOGGLES)
def test_one_step_gradient_is_that_of_the_step_at_the_fixed_point(name):
    """Against finite differences of finish(f^n(y*)) with y* held: paper App. B.2, by name."""
    model = tight(block(**TOGGLES[name]), 1e-6)
    u = u_of(1, 5, 8).requires_grad_()
    with torch.no_grad():
        s = model.prepare(u)
        y_star = torch.zeros_like(s.x)
        for _ in range(400):
            y_star = model.step(s, y_star)
    cotangent = u_of(1, 5, 8, seed=3)

    def scalar(value, parameter=None):
        original = None
        if parameter is not None:
            original = parameter.data
            parameter.data = value
        s = model.prepare(value if parameter is None else u)
        out, _ = model._gradient_steps(s, y_star)
        if parameter is not None:
            parameter.data = original
        return (out * cotangent).sum()

    model.config.tol, model.config.eval_max_iters = 1e-13, 5000
    out, _ = model(u)
    (out * cotangent).sum().backward()
    for parameter_name, p in [("input", None), *model.named_parameters()]:
        value = (u if p is None else p).detach()
        direction = torch.randn(value.shape, generator=torch.Generator().manual_seed(4)).double()
        with torch.no_grad():
            plus = scalar(value + 1e-6 * direction, p)
            minus = scalar(value - 1e-6 * direction, p)
        numeric = ((plus - minus) / 2e-6).item()
        analytic = ((u.grad if p is None else p.grad) * direction).sum().item()
        assert abs(numeric - analytic) < 1e-5 * (1 + abs(numeric)), parameter_name


def test_what_depends_on_x_alone_is_computed_once(monkeypatch):
    model = block(torch.float32)
    model.config.tol, model.config.eval_max_iters = 1e-12, 25
    calls = {"prepare": 0, "step": 0, "weights": 0}
    for owner, name in [(model, "prepare"), (model, "step"), (model.mixer, "weights")]:
        original = getattr(owner, name)

        def counting(*args, name=name, original=original):
            calls[name] += 1
            return original(*args)

        monkeypatch.setattr(owner, name, counting)
    with torch.no_grad():
        model.eval()(u_of(1, 6, 8).float())
    assert calls == {"prepare": 1, "step": 26, "weights": 1}


def test_gradient_checkpointing_gives_the_same_gradients_and_solves_once(monkeypatch):
    from lm.model import blocks

    solves, original = [], blocks.solve
    monkeypatch.setattr(blocks, "solve", lambda *a: solves.append(1) or original(*a))
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        config = FPRNNConfig(vocab_size=16, d_model=8, n_layer=2, d_state=4)
        model = FPRNNForCausalLM(config).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        solves.clear()
        ids = torch.arange(20).remainder(16).reshape(2, 10)
        output = model(ids, labels=ids)
        output.loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
        assert len(solves) == 2
        assert (output.fixed_point.residual > 0).all()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, msg=name)


@pytest.mark.parametrize("conv,glu", itertools.product([False, True], repeat=2))
def test_bf16_autocast_stays_near_fp32_and_keeps_the_iterate_wide(conv, glu):
    model = block(torch.float32, use_short_conv=conv, glu_in_loop=glu).eval()
    u = u_of(2, 16, 8).float()
    with torch.no_grad():
        exact, _ = model(u)
        with torch.autocast("cpu", torch.bfloat16):
            low, stats = model(u)
    assert low.dtype == torch.bfloat16 and stats.residual.dtype == torch.float32
    assert (low.float() - exact).abs().max() < 0.05 * exact.abs().max()


def test_training_rule_and_evaluation_rule_differ():
    model = block()
    model.config.max_iters, model.config.eval_max_iters = 7, 9
    assert model.train().rule()[:3] == (0.1, 7, 0.75)
    assert model.eval().rule()[:3] == (0.1, 9, 1.0)


def test_shift():
    y = torch.arange(1.0, 7.0).reshape(1, 6, 1)
    assert shift(y, Sequences()).flatten().tolist() == [0, 1, 2, 3, 4, 5]
    starts = torch.tensor([[False, False, True, False, False, True]])
    assert shift(y, Sequences(starts=starts)).flatten().tolist() == [0, 1, 0, 3, 4, 0]
