"""Exact tokens in models: one solution under every schedule, independence, statistics."""

import functools

import pytest
import torch

from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.solver import FAILED, token_residual
from lm.model.state import Sequences
from lm.model.strategies import choose_solver
from tests.marks import slow

EOS = 0
SCHEDULES = ("parallel", "window:1", "window:4", "window:7", "sequential", "auto")
# Untrained models with the gate outside and no bound are chaotic in time.
MODELS = {
    "fp_mamba1": {},
    "fp_mamba1-householder4": dict(mixer_rank=4),
    "fp_mamba1-conv-gate_inside": dict(use_short_conv=True, glu_in_loop=True, mixer_rank=2),
    "fp_mamba1-dplr3": dict(mixer="dplr", mixer_rank=3, contractive=0.9),
    "fp_mamba1-dt-lowrank": dict(dt_h_dep=True, gate_h_dep=False, mixer_rank=2, mixer_proj_rank=3),
    "fp_mamba1-kronecker": dict(mixer="kronecker", contractive=0.5),
    "fp_mamba1-symm-monarch": dict(
        symm_mixer=True, mixer="monarch", mixer_rank=4, contractive=0.5, c_h_dep=False
    ),
    "fp_mamba2": dict(block="fp_mamba2", ngroups=2, mixer_rank=2),
    "fp_mamba2-nothing": dict(
        block="fp_mamba2", mixer_h_dep=False, b_h_dep=False, c_h_dep=False, bc_norm=False
    ),
    "fp_mamba2-mixture": dict(block="fp_mamba2", mixer="mixture", mixer_rank=2, contractive=0.5),
    "fp_rnn": dict(block="fp_rnn", mixer_rank=2),
    "fp_rnn-conv-nonselective": dict(block="fp_rnn", use_short_conv=True, mixer="nonselective"),
}
# No residual reaches this tolerance, so windows run all iterations.
EXACT = dict(tol=1e-30, eval_tol=1e-30, max_iters=99, eval_max_iters=99)
BLOCKS = ("fp_mamba1", "fp_mamba2", "fp_rnn")
SLOW_SCHEDULES = ("window:7",)  # window:4 tests the same
# These take seconds each.
SLOW_MODELS = (
    "fp_mamba1-kronecker",
    "fp_mamba1-dt-lowrank",
    "fp_mamba1-symm-monarch",
    "fp_mamba2-mixture",
)
every_model = pytest.mark.parametrize(
    "name", [slow(name) if name in SLOW_MODELS else name for name in MODELS]
)


def model_of(name, schedule="sequential", dtype=torch.float64, **kwargs):
    torch.manual_seed(0)
    sizes = dict(vocab_size=30, d_model=8, n_layer=2, d_state=4, headdim=4, eos_token_id=EOS)
    fields = {**sizes, **EXACT, **MODELS[name], "schedule": schedule, **kwargs}
    return FPRNNForCausalLM(FPRNNConfig(**fields)).to(dtype).eval()


def ids(b=2, length=12, seed=0):
    return torch.randint(1, 30, (b, length), generator=torch.Generator().manual_seed(seed))


def run(model, tokens=None, **kwargs):
    with torch.no_grad():
        return model(tokens, **kwargs)


def max_distance(a, b):
    return (a - b).abs().max().item()


def assert_close(a, b, tol=1e-9):
    assert max_distance(a, b) < tol * (1 + b.abs().max().item())


def every_model_with(*cases, quick):
    """Return (name, *case) of every model and case.

    Cases outside `quick` are slow; for BLOCKS only cases with SLOW_SCHEDULES are.
    """
    return [
        (name, *case)
        if case in quick or (name in BLOCKS and case[0] not in SLOW_SCHEDULES)
        else slow(name, *case)
        for name in MODELS
        for case in cases
    ]


# One solution.


@pytest.mark.parametrize(
    "name, schedule, kernels",
    every_model_with(
        *((schedule, "plain") for schedule in SCHEDULES),
        ("sequential", "auto"),
        ("auto", "auto"),
        quick=[("auto", "auto")],
    ),
)
def test_every_schedule_has_one_solution(name, schedule, kernels, monkeypatch):
    tokens, expected = solve_token_by_token(name)
    monkeypatch.setenv("FPRNN_KERNELS", kernels)
    out = run(model_of(name, schedule), tokens, return_state=True)
    assert_close(out.logits, expected.logits, 1e-8)
    for ours, theirs in zip(out.state.layers, expected.state.layers):
        assert_close(ours.y, theirs.y, 1e-8)
        assert_close(ours.h, theirs.h, 1e-8)


@functools.cache
def solve_token_by_token(name):
    """Return tokens, and a model's output for them in plain PyTorch."""
    tokens = ids(length=12)
    tokens[0, 6] = tokens[1, 9] = EOS
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FPRNN_KERNELS", "plain")
        expected = run(model_of(name), tokens, return_state=True)
    assert (expected.fixed_point.failed == 0).all()
    assert (expected.fixed_point.evaluations == 1).all()
    return tokens, expected


def gradients_of(model, tokens, **fields):
    return gradients_and_norms(model, tokens, **fields)[0]


def gradients_and_norms(model, tokens, **fields):
    """Return gradients by parameter name, and the adjoints' norms, one tensor per layer."""
    model.zero_grad()
    with model.solving(**fields):
        out = model.train()(tokens, labels=tokens)
    out.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return gradients, out.fixed_point.adjoint_norm


def assert_alike(ours, theirs, tol=1e-8):
    for name, grad in theirs.items():
        scale = grad.abs().max().clamp_min(1e-6)
        assert ((ours[name] - grad).abs().max() / scale).item() < tol, name


def test_the_norm_of_the_adjoint_is_the_same_in_every_schedule():
    model, tokens = model_of("fp_mamba1", n_layer=1), ids()
    _, (expected,) = gradients_and_norms(model, tokens)
    assert expected.shape == (2,) and (expected > 0.5).all()
    for schedule in ("sequential", "parallel"):
        _, (norms,) = gradients_and_norms(model, tokens, schedule=schedule)
        torch.testing.assert_close(norms, expected, rtol=0.05, atol=0)


# Independence of other tokens.


@pytest.mark.parametrize(
    "name, dtype, kernels",
    every_model_with(
        (torch.float32, "auto"), (torch.float64, "plain"), quick=[(torch.float32, "auto")]
    ),
    ids=str,
)
def test_later_tokens_do_not_change_a_bit(name, kernels, dtype, monkeypatch):
    monkeypatch.setenv("FPRNN_KERNELS", kernels)
    model, tokens = model_of(name, dtype=dtype), ids()
    changed = torch.cat([tokens[:, :7], ids(seed=1)[:, 7:]], 1)
    one, other = run(model, tokens), run(model, changed)
    assert torch.equal(one.logits[:, :7], other.logits[:, :7])
    assert max_distance(one.logits[:, 7:], other.logits[:, 7:]) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["fp_mamba1", "fp_mamba1-conv-gate_inside", "fp_mamba2", "fp_rnn"])
def test_kernel_solves_a_row_alone_bit_for_bit_as_in_a_batch(name, dtype):
    block = model_of(name, dtype=dtype, n_layer=1).backbone.layers[0].block
    u = torch.randn(9, 16, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        inputs, solver = block.prepare(u), block.choose_solver(u)
        whole = solver.run_kernel(inputs)
        if whole is None:
            pytest.skip("no compiler")
        for row in (0, 5, 8):
            projections = inputs.projections._replace(raw=inputs.projections.raw[row : row + 1])
            constants = [
                t[row : row + 1] if torch.is_tensor(t) and t.dim() == 3 else t
                for t in inputs.recurrence
            ]
            alone = inputs._replace(
                x=inputs.x[row : row + 1],
                z=inputs.z[row : row + 1],
                recurrence=type(inputs.recurrence)(*constants),
                projections=projections,
            )
            y = solver.run_kernel(alone).y
            assert torch.equal(y, whole.y[row : row + 1])


@every_model
def test_a_sequence_alone_and_in_a_batch_are_the_same(name):
    model, tokens = model_of(name), ids(8)
    assert_close(run(model, tokens[5:6]).logits[0], run(model, tokens).logits[5], 1e-8)


# Statistics.


def draw_u():
    return torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def mark_documents_and_padding():
    mask, starts = torch.ones(3, 16, dtype=torch.bool), torch.zeros(3, 16, dtype=torch.bool)
    mask[0, 11:], starts[1, 6], starts[2, 12] = False, True, True
    return Sequences(mask, starts, return_state=True)


@pytest.mark.parametrize("tol", [0.1, 1e-4])
@pytest.mark.parametrize("schedule", ["parallel", "window:7"])
@pytest.mark.parametrize("name", ["fp_mamba1", "fp_mamba2", "fp_rnn"])
@torch.no_grad()
def test_stats_have_the_residual_of_the_returned_solution(name, schedule, tol):
    model = model_of(name, schedule, tol=tol, eval_tol=tol, contractive=0.5)
    block = model.backbone.layers[0].block
    solver = block.choose_solver(draw_u())
    inputs = block.prepare(draw_u(), mark_documents_and_padding())
    y, stats, f_y, h = solver.solve(inputs)
    expected_f_y, expected_h, status = solver.solve_all_tokens(inputs, y)
    assert not (status & FAILED).any() and (stats.failed == 0).all()
    residual = token_residual(y, expected_f_y).amax(1)
    torch.testing.assert_close(stats.residual, residual, rtol=1e-7, atol=1e-11)
    torch.testing.assert_close(f_y, expected_f_y, rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(h, expected_h, rtol=1e-8, atol=1e-11)
    assert (stats.residual < tol).all()


@torch.no_grad()
def test_k_iterations_solve_the_first_k_tokens():
    """So a window of w tokens needs w + 1 evaluations, whatever max_iters is."""
    block = model_of("fp_mamba1").backbone.layers[0].block
    with torch.no_grad():
        inputs = block.prepare(draw_u())
        exact, y = block.choose_solver(draw_u()).solve(inputs).y, torch.zeros_like(inputs.x)
        windows = choose_solver(block, FPRNNConfig(schedule="parallel"), 16, inputs.x)
        for k in range(1, 17):
            y = windows.solve_all_tokens(inputs, y)[0]
            assert_close(y[:, :k], exact[:, :k])
            assert k > 10 or max_distance(y[:, k + 1 :], exact[:, k + 1 :]) > 1e-6
    exact = run(model_of("fp_mamba1"), ids()).logits
    for schedule, count in (("parallel", 13), ("window:4", 5)):
        out = run(model_of("fp_mamba1", schedule, max_iters=3, eval_max_iters=3), ids())
        assert (out.fixed_point.evaluations == count).all()  # w + 1, because of EXACT
        assert_close(out.logits, exact)
