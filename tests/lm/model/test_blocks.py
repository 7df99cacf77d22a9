"""The blocks: every toggle solved, masked, reset and differentiated at the fixed point."""

import itertools

import pytest
import torch

from lm.model.blocks import BLOCKS, Sequences, build_block, shift
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.fixed_point import COARSE, FINE, FixedPointBlock
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.solver import token_residual
from tests import oracle_blocks
from tests.marks import slow

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
    "nonselective": dict(mixer="nonselective"),
    "monarch": dict(mixer="monarch", mixer_rank=4),
    "mixture": dict(mixer="mixture", mixer_rank=2),
    "mamba2": dict(block="fp_mamba2"),
    "mamba2_conv": dict(block="fp_mamba2", use_short_conv=True, ngroups=2),
    "mamba2_gate_inside": dict(block="fp_mamba2", glu_in_loop=True, bc_norm=False),
    "mamba2_symm_kronecker": dict(block="fp_mamba2", symm_mixer=True, mixer="kronecker"),
    "rnn": dict(block="fp_rnn"),
    "rnn_conv": dict(block="fp_rnn", use_short_conv=True, mixer_rank=2),
    "rnn_symm_dplr": dict(block="fp_rnn", symm_mixer=True, mixer="dplr"),
    "rnn_no_h_dep": dict(block="fp_rnn", mixer_h_dep=False),
    "everything": dict(glu_in_loop=True, use_short_conv=True, symm_mixer=True, mixer="dplr"),
}


def block(dtype=torch.float64, **kwargs):
    """A block with a contractive mixer, so that tight tolerances are reached."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 8, "d_model": 8, "n_layer": 1, "d_state": 4, "headdim": 4}
    model = FPRNNForCausalLM(FPRNNConfig(**{**sizes, **kwargs})).backbone.layers[0].block.to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("alpha_proj.bias", "gate_proj.bias")):
                p.fill_(-3.0)  # gates nearly shut: Q near 0.1, a strong contraction
            if name == "bc_y_proj.gain":
                p.mul_(0.3)
        for name, tensor in model.named_buffers():
            if name.endswith("q_proj.base"):
                tensor.copy_(torch.eye(len(tensor)))
    return model


def tight(tol=1e-11, **kwargs):
    """Such a block in evaluation; the tolerance is of what is iterated."""
    return block(tol=tol, eval_tol=tol, eval_max_iters=3000, **kwargs).eval()


def u_of(*shape, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("schedule", ["sequential", "window:5", "parallel"])
@pytest.mark.parametrize("name", TOGGLES)
def test_the_output_is_a_fixed_point_of_the_papers_iteration(name, schedule):
    model = tight(**TOGGLES[name], schedule=schedule)
    u = u_of(2, 12, 8)
    with torch.no_grad():
        out, stats = model(u)
        s = model.prepare(u)
        y = model._solve(s).y
        assert token_residual(y, model.step(s, y)).max() < 1e-9
    assert out.shape == (2, 12, 8)
    assert (stats.failed == 0).all() and (stats.residual < 1e-10).all()
    assert (stats.evaluations == 1).all() == (schedule == "sequential")


@pytest.mark.parametrize("name", TOGGLES)
def test_left_padding_changes_nothing(name):
    model = tight(**TOGGLES[name])
    u, pads = u_of(1, 9, 8), u_of(1, 4, 8, seed=2)
    mask = torch.tensor([[False] * 4 + [True] * 9])
    with torch.no_grad():
        alone, _ = model(u)
        padded, _ = model(torch.cat([pads, u], 1), Sequences(mask=mask))
    torch.testing.assert_close(padded[:, 4:], alone, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", TOGGLES)
def test_a_packed_document_equals_itself_alone(name):
    model = tight(**TOGGLES[name])
    first, second = u_of(1, 7, 8), u_of(1, 6, 8, seed=2)
    starts = torch.zeros(1, 13, dtype=torch.bool)
    starts[0, 7] = True
    with torch.no_grad():
        packed, _ = model(torch.cat([first, second], 1), Sequences(starts=starts))
        alone, _ = model(second)
    torch.testing.assert_close(packed[:, 7:], alone, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", TOGGLES)
def test_causal_once_converged(name):
    model = tight(**TOGGLES[name])
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
    model = tight(1e-13, **TOGGLES[name], gradient="one_step")
    u = u_of(1, 5, 8).requires_grad_()
    with torch.no_grad():
        s = model.prepare(u)
        y_star = model._solve(s).y
    cotangent = u_of(1, 5, 8, seed=3)

    def scalar(value, parameter=None):
        original = None
        if parameter is not None:
            original = parameter.data
            parameter.data = value
        s, y = model.prepare(value if parameter is None else u), y_star
        for _ in range(model.config.n_backwards):
            y = model.step(s, y)
        out = model.finish(s, y)
        if parameter is not None:
            parameter.data = original
        return (out * cotangent).sum()

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


@pytest.mark.parametrize("stopping", ["paper", "causal"])
def test_what_depends_on_x_alone_is_computed_once(monkeypatch, stopping):
    rule = dict(eval_tol=1e-12, eval_max_iters=10)
    model = block(torch.float32, schedule="parallel", stopping=stopping, token="iterate", **rule)
    calls = {"prepare": 0, "_mixed": 0, "weights": 0}
    for owner, name in [(model, "prepare"), (model, "_mixed"), (model.mixer, "weights")]:
        original = getattr(owner, name)

        def counting(*args, name=name, original=original):
            calls[name] += 1
            return original(*args)

        monkeypatch.setattr(owner, name, counting)
    with torch.no_grad():
        _, stats = model.eval()(u_of(1, 6, 8).float())
    assert (stats.evaluations == 10).all()
    # The output's own step: the paper's solver does not return f(y), the windows' does.
    assert calls == {"prepare": 1, "_mixed": 10 + (stopping == "paper"), "weights": 1}


@pytest.mark.parametrize("fields", [dict(schedule="parallel"), dict(gradient="one_step")], ids=str)
def test_gradient_checkpointing_gives_the_same_gradients_and_solves_once(monkeypatch, fields):
    solves, original = [], FixedPointBlock._solve
    monkeypatch.setattr(FixedPointBlock, "_solve", lambda *a: solves.append(1) or original(*a))
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        config = FPRNNConfig(vocab_size=16, d_model=8, n_layer=2, d_state=4, **fields)
        model = FPRNNForCausalLM(config).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        solves.clear()
        ids = torch.arange(20).remainder(16).reshape(2, 10)
        output = model(ids, labels=ids)
        output.loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
        assert len(solves) == 2
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


def rule_of(block, training=False):
    return block.train(training).rule(block.config)


def test_training_rule_and_evaluation_rule_differ():
    model = block(max_iters=7, eval_max_iters=9)
    assert rule_of(model, training=True)[:3] == (COARSE, 7, 0.75)
    assert rule_of(model)[:3] == (FINE[torch.float64], 9, 1.0)
    assert rule_of(block(torch.float32)).tol == FINE[torch.float32]
    with torch.autocast("cpu", torch.bfloat16):  # its rounding is as large
        assert rule_of(model).tol == COARSE
    assert rule_of(block(eval_tol=0.03)).tol == 0.03
    assert rule_of(block(tol=1e-3), training=True).tol == 1e-3
    iterated = block(token="iterate", stopping="causal")
    assert rule_of(iterated, training=True).tol == 0.1 and rule_of(iterated).tol == COARSE
    paper = block(schedule="parallel", stopping="paper")  # as strict, but every sequence
    assert rule_of(paper)[:3] == (0.1, 1000, 1.0)


def test_shift():
    y = torch.arange(1.0, 7.0).reshape(1, 6, 1)
    assert shift(y, Sequences()).flatten().tolist() == [0, 1, 2, 3, 4, 5]
    starts = torch.tensor([[False, False, True, False, False, True]])
    assert shift(y, Sequences(starts=starts)).flatten().tolist() == [0, 1, 0, 3, 4, 0]


@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("eigen_range", ["signed", "positive"])
def test_fp_rnn_with_one_reflection_equals_the_exact_solve(conv, eigen_range):
    model = block(block="fp_rnn", use_short_conv=conv, eigen_range=eigen_range)
    torch.nn.init.constant_(model.mixer.alpha_proj.bias, 0.0)
    u, states = u_of(2, 20, 8), []
    finish = model.finish
    model.finish = lambda s, y: states.append(y) or finish(s, y)
    with torch.no_grad():
        _, stats = model.eval()(u)
        exact = oracle_blocks.fixed_point(model.state_dict(), model.config, u)
    assert (stats.failed == 0).all()
    torch.testing.assert_close(states[0], exact, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("gradient", ["implicit", "exact"])
def test_implicit_gradient_equals_finite_differences_of_the_whole_solve(gradient):
    """Also of the solve itself, unlike the one-step gradient: paper Eq. 16."""
    model = tight(1e-13, gradient=gradient, schedule="parallel")
    u, cotangent = u_of(1, 6, 8).requires_grad_(), u_of(1, 6, 8, seed=3)

    def scalar():
        return (model(u)[0] * cotangent).sum()

    scalar().backward()
    other = tight(1e-13, gradient="one_step", schedule="parallel")
    one_step = torch.autograd.grad((other(u)[0] * cotangent).sum(), [u])[0]
    for name, p in [("input", u), *model.named_parameters()]:
        direction = torch.randn(p.shape, generator=torch.Generator().manual_seed(4)).double()
        original = p.data
        with torch.no_grad():
            p.data = original + 1e-6 * direction
            plus = scalar()
            p.data = original - 1e-6 * direction
            minus = scalar()
            p.data = original
        numeric = ((plus - minus) / 2e-6).item()
        analytic = (p.grad * direction).sum().item()
        assert abs(numeric - analytic) < 1e-5 * (1 + abs(numeric)), name
    assert (u.grad - one_step).abs().max() > 1e-3


def test_unknown_gradients_and_blocks_are_a_sentence():
    for gradient in ("phantom:3", "implicit:3", "exact:2", "adjoint", "adjoint:-1"):
        with pytest.raises(ValueError, match=f"gradient is `{gradient}`"):
            FPRNNConfig(gradient=gradient)
    with pytest.raises(ValueError, match="block is 'mamba': it must be one of"):
        build_block(FPRNNConfig(block="mamba"))
    with pytest.raises(ValueError, match=r"headdim is 5: it must divide d_inner .* = 16, as 4"):
        build_block(FPRNNConfig(block="fp_mamba2", d_model=8, headdim=5))
    with pytest.raises(ValueError, match=r"ngroups is 3: it must divide the 4 heads .*, as 2"):
        build_block(FPRNNConfig(block="fp_mamba2", d_model=8, headdim=4, ngroups=3))
    with pytest.raises(ValueError, match="glu_in_loop is for"):
        build_block(FPRNNConfig(block="fp_rnn", d_model=8, glu_in_loop=True))


BOUNDED = {"contractive": 0.5}  # unbounded, a mixer of full rank may fail before it is trained
MIXER_SETTINGS = {
    "householder": {}, "dplr": {"mixer_rank": 2},
    "kronecker": BOUNDED, "monarch": {"mixer_rank": 4, **BOUNDED}, "nonselective": BOUNDED,
    "mixture": {"mixer_rank": 2, **BOUNDED}, "selective_dense": BOUNDED,
}  # fmt: skip


# Each mixer in one block, each block with householder, and these in bf16; others are the oracle's.
SECONDS = ("selective_dense", "kronecker", "monarch", "mixture")  # each takes; slow in bf16
TRAINED = [
    slow(name, mixer, bf16) if bf16 and mixer in SECONDS else (name, mixer, bf16)
    for i, mixer in enumerate(MIXER_SETTINGS)
    for j, name in enumerate(BLOCKS)
    for bf16 in (False, True)
    if mixer == "householder" or i % 3 == j
]


@pytest.mark.parametrize("name, mixer, bf16", TRAINED)
def test_every_block_with_every_mixer_trains(name, mixer, bf16):
    torch.manual_seed(0)
    config = FPRNNConfig(
        vocab_size=16, d_model=8, n_layer=1, d_state=4, headdim=4, block=name, mixer=mixer,
        max_iters=20, **MIXER_SETTINGS[mixer],
    )  # fmt: skip
    model = FPRNNForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    ids = torch.randint(16, (2, 6))
    losses = []
    for _ in range(8):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = model(ids, labels=ids)
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(output.loss.item())
        stats = output.fixed_point
        assert not stats.failed.any()
        assert (stats.evaluations >= 1).all()
    assert all(torch.isfinite(torch.tensor(losses))) and losses[-1] < losses[0]
