"""Exact tokens in blocks: unsolved tokens, the sum of the adjoint, noise on sh(y)."""

import pytest
import torch
import torch.nn.functional as F

from lm.model import strategies
from lm.model.blocks import build_block
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.layers import Projection, join_projections
from lm.model.solver import FAILED, adjoint_gradient
from lm.model.stack import initialize
from lm.model.state import Sequences

SCHEDULES = ("sequential", "window:4", "parallel")


def block_of(**kwargs):
    torch.manual_seed(0)
    sizes = dict(vocab_size=30, d_model=8, n_layer=1, d_state=4, headdim=4, tol=1e-9, eval_tol=1e-9)
    block = build_block(FPRNNConfig(**{**sizes, "max_iters": 99, **kwargs}))
    with torch.no_grad():
        block.apply(lambda module: initialize(module, block.config))
    return block.double().eval()


def normal(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("schedule", SCHEDULES)
@torch.no_grad()
def test_unsolved_tokens_are_counted_without_padding(schedule, monkeypatch):
    """The solve marks a token and all padding as failed."""
    monkeypatch.setenv("FPRNN_KERNELS", "plain")
    block, u = block_of(schedule=schedule), normal(2, 10, 8)
    solve = strategies.solve_low_rank
    unsolvable_x = block.prepare(u).x[0, 3]

    def solve_all_but_one(terms, low_rank):
        y, mixed, status = solve(terms, low_rank)
        is_missed = (terms.x == unsolvable_x).all(-1) | (terms.x == 0).all(-1)
        return y, mixed, status | FAILED * is_missed

    monkeypatch.setattr(strategies, "solve_low_rank", solve_all_but_one)
    _, stats = block(u)
    assert stats.failed.tolist() == [0.1, 0.0]
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0, 9] = False
    _, stats = block(u, Sequences(mask))
    assert stats.failed.tolist() == pytest.approx([1 / 9, 0.0])  # padding is not counted


def compute_adjoint_of_shift(rate, v):
    """Return c's gradient and the norm by `adjoint_gradient` of F(y)_t = c_t + rate y_{t−1}."""
    c, adjoint_norm = torch.zeros_like(v, requires_grad=True), v.new_zeros(len(v))

    def make_F(c):
        return lambda y: c + rate * F.pad(y[:, :-1], (0, 0, 1, 0))

    y_star = torch.zeros_like(v)
    y = adjoint_gradient(make_F(c), make_F(c.detach()), y_star, adjoint_norm, 1e-13, v.dtype)
    (grad,) = torch.autograd.grad(y, c, v)
    return grad[0, :, 0].tolist(), adjoint_norm.item()


def make_cotangent(length, size):
    """Return v (1,length,2), which is zero except for `size` at the last token."""
    v = torch.zeros(1, length, 2, dtype=torch.float64)
    v[0, -1, 0] = size
    return v


def test_the_adjoint_reaches_the_first_token():
    grad, norm = compute_adjoint_of_shift(2.0, make_cotangent(6, 10.0))
    assert grad == [10.0 * 2**k for k in (5, 4, 3, 2, 1, 0)]
    assert norm == 2.0**5


class _Counted(torch.autograd.Function):
    """The identity, with a count of its backwards."""

    @staticmethod
    def forward(ctx, y, counted):
        ctx.counted = counted
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.counted.append(grad.dtype)
        return grad, None


@pytest.mark.parametrize("tol, max_terms", [(1e-2, 10), (1e-7, 24)])
def test_the_adjoint_ends_at_its_tolerance_or_at_rounding(tol, max_terms):
    """Under bf16 the change never falls below rounding, so the sum would have L = 256 terms.

    The backward multiplies in the forward's dtype, although it runs outside of its autocast.
    """
    torch.manual_seed(0)
    weight, v = torch.randn(8, 8) / 6, torch.randn(2, 256, 8)
    product_dtypes, terms = [], []

    def F_of(y, c):
        product = F.pad(y[:, :-1], (0, 0, 1, 0)) @ weight
        product_dtypes.append(product.dtype)
        return _Counted.apply(c + product.float(), terms)

    def compute_gradient(autocast, tol):
        c = torch.zeros_like(v, requires_grad=True)
        product_dtype = torch.bfloat16 if autocast else torch.float32
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = adjoint_gradient(
                lambda y: F_of(y, c),
                lambda y: F_of(y, c.detach()),
                y_star=torch.zeros_like(v),
                adjoint_norm=None,
                tol=tol,
                product_dtype=product_dtype,
            )
        return torch.autograd.grad(y, c, v)[0]

    exact = compute_gradient(False, 0.0)
    product_dtypes.clear()
    terms.clear()
    error = (compute_gradient(True, tol) - exact).norm() / exact.norm()
    assert error < 1e-2
    assert product_dtypes == [torch.bfloat16] * 2  # in the forward and in the backward
    assert 1 < len(terms) <= max_terms


def test_noise_changes_only_projections_that_read_y():
    x, y, noise = normal(2, 5, 3), normal(2, 5, 4, seed=2), normal(2, 5, 4, seed=3)
    projections = join_projections(
        [
            Projection("x_only", x, None),
            Projection("first", 2 * x, normal(3, 4, seed=4)),
            Projection("second", 3 * x, normal(3, 4, seed=5)),
        ],
        y.shape[-1],
        y.dtype,
    )
    rows, expected = projections.add_noise(noise).rows(y), projections.rows(y + noise)
    for name in ("x_only", "first", "second"):
        torch.testing.assert_close(rows[name], expected[name], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rows["x_only"], x, rtol=0, atol=0)
    assert projections.add_noise(None) is projections


@pytest.mark.parametrize("kernels", ["auto", "plain"])
@torch.no_grad()
def test_noise_is_the_same_under_every_schedule(kernels, monkeypatch):
    monkeypatch.setenv("FPRNN_KERNELS", kernels)
    u, outputs = normal(2, 10, 8), {}
    for schedule in SCHEDULES:
        quiet, noisy = (block_of(schedule=schedule, state_noise=s) for s in (0.0, 0.3))
        assert torch.equal(noisy(u)[0], quiet(u)[0])
        torch.manual_seed(3)
        outputs[schedule] = noisy.train()(u)[0]
        assert (outputs[schedule] - quiet(u)[0]).abs().max() > 1e-3
    for output in outputs.values():
        torch.testing.assert_close(output, outputs["sequential"], rtol=1e-7, atol=1e-8)


HIGH_TOL = dict(tol=0.1, eval_tol=0.1, contractive=0.8)


@pytest.mark.parametrize("schedule", ["window:5", "parallel"])
@torch.no_grad()
def test_later_tokens_do_not_change_where_a_token_stops(schedule):
    """At a high tolerance, a converged token keeps its iterate."""
    block, u = block_of(schedule=schedule, **HIGH_TOL), normal(3, 12, 8)
    other = torch.cat([u[:, :-4], 9 * normal(3, 4, 8, seed=6)], 1)
    ours, theirs = block(u)[0], block(other)[0]
    torch.testing.assert_close(ours[:, :-4], theirs[:, :-4], rtol=1e-11, atol=1e-12)


@torch.no_grad()
def test_segments_of_window_length_equal_the_whole():
    """A segment reads both the iterate and the map at it from the previous token."""
    block, u = block_of(schedule="window:4", **HIGH_TOL), normal(2, 12, 8)
    whole, stats = block(u)
    assert (stats.residual > 1e-4).all()  # the iterate and the map at it differ
    state, outputs = None, []
    for segment in u.split(4, 1):
        out, _, state = block(segment, Sequences(state=state, return_state=True))
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-10, atol=1e-12)
