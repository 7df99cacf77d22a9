"""Tests of tokens' equations with full-rank I − Q: solution, gradient, status."""

import subprocess
import sys

import pytest
import torch

from lm.model import full_rank
from lm.model.cell import EquationTerms, LowRank, Norm, solve_low_rank
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.full_rank import Anderson, FullRank, solve_by_iterating
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.solver import BISECTED, FAILED
from tests.lm.model.test_cell import D, low_rank_of, make, matrix_of, normal, token_of


class MatrixOfRaw:
    """Mixer whose argument `raw` (…,d²) is the matrix I − Q."""

    def mix(self, raw, x, y, weights):
        M = raw.unflatten(-1, (x.shape[-1], -1))
        return x + (M @ (y - x).unsqueeze(-1)).squeeze(-1)

    def flops_per_token(self):
        return 0

    def dense(self, raw, weights):
        M = raw.unflatten(-1, (D, D))
        return torch.eye(D, dtype=M.dtype) - M


def solve(terms, M):
    """Solve tokens with I − Q = M (b,l,d,d); return y, x̃ and the status."""
    return solve_by_iterating(FullRank(terms, M.flatten(-2), MatrixOfRaw(), None))


KINDS = pytest.mark.parametrize("kind", ["layer", "rms", "none"])  # of the norm

TWO_THREADS = """
import torch
from lm.model.full_rank import _solve
torch.set_num_threads(2)
torch.manual_seed(0)
for dtype in (torch.float32, torch.float64):
    matrix = torch.randn(7, 160, 160, dtype=dtype) / 160**0.5 + 5 * torch.eye(160, dtype=dtype)
    right = torch.ones(7, 160, 1, dtype=dtype)
    error = (matrix @ _solve(matrix, right) - right).abs().max()
    assert error < 100 * torch.finfo(dtype).eps, error
"""


def test_wide_systems_are_solved_in_two_threads():
    """With two threads torch's batched LU is wrong or hangs from 150 rows, so use a process."""
    subprocess.run([sys.executable, "-c", TWO_THREADS], check=True, timeout=60)


@KINDS
def test_iterating_equals_the_low_rank_solution(kind):
    terms, _ = token_of(kind)
    low_rank = low_rank_of(2, size=0.15)
    pairs = zip(solve(terms, matrix_of(low_rank)), solve_low_rank(terms, low_rank))
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("method", ["picard", "anderson", "bisection"])
@KINDS
def test_each_method_finds_a_solution_and_its_gradient(kind, method, monkeypatch):
    monkeypatch.setattr(full_rank, "MAX_PICARD_STEPS", 300 if method == "picard" else 0)
    monkeypatch.setattr(full_rank, "MAX_DENSE_WIDTH", D if method == "bisection" else 0)
    _, tensors = token_of(kind, b=1, length=2)
    names = ["x", "history", "gain", "gate"] + (["weight"] if kind != "none" else [])
    names += ["bias"] if kind == "layer" else []
    low_rank = low_rank_of(2, b=1, length=2, size=0.15)

    def solve_by_method(U, T, *values):
        terms = make(kind, **{**tensors, **dict(zip(names, values))})
        y, mixed, status = solve(terms, matrix_of(LowRank(U, T)))
        assert (status == (BISECTED if method == "bisection" else 0)).all()
        return y, mixed

    inputs = [*low_rank, *(tensors[name] for name in names)]
    inputs = [t.clone().requires_grad_() for t in inputs]
    tolerances = dict(eps=1e-6, atol=1e-6, rtol=1e-5)
    assert torch.autograd.gradcheck(
        solve_by_method, inputs, **tolerances, check_undefined_grad=False, fast_mode=True
    )


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_bisection_is_accurate_without_newton(kind, monkeypatch):
    """Newton could hide a bisection in the wrong direction."""
    monkeypatch.setattr(full_rank, "MAX_PICARD_STEPS", 0)
    monkeypatch.setattr(full_rank, "MAX_NEWTON_STEPS", 0)
    monkeypatch.setattr(full_rank, "BISECTIONS", 80)
    terms, _ = token_of(kind)
    y, _, status = solve(terms, matrix_of(low_rank_of(2, size=0.3)))
    assert (status == BISECTED).all() and torch.isfinite(y).all()  # FAILED if y were no solution


def test_anderson_solves_an_expanding_map_in_d_steps():
    """y ← 1 + rates · y with d = 4: d + 1 steps in exact arithmetic, and one more for rounding."""
    rates = torch.tensor([3.0, -2.0, 0.5, 1.5], dtype=torch.float64)
    y, anderson = torch.zeros(1, 4, dtype=torch.float64), Anderson()
    for _ in range(6):
        y = anderson.next(y, 1 + rates * y)
    torch.testing.assert_close(y, 1 / (1 - rates).unsqueeze(0), rtol=1e-8, atol=0)


def solve_linear(rates):
    """Solve and check y_t = history_t + rates_t y_t; return history (1,l,d), y and the status."""
    M = torch.tensor(rates, dtype=torch.float64)[None, :, None, None] * torch.eye(D).double()
    history = normal(1, 4, D, seed=50)[:, : len(rates)].clone().requires_grad_()
    one = torch.ones(1, len(rates), D, dtype=torch.float64)
    terms = EquationTerms(x=0 * one, history=history, gain=one, gate=None, norm=Norm("none"))
    y, _, status = solve(terms, M)
    expected = history / (1 - torch.tensor(rates, dtype=torch.float64)[:, None])
    is_solved = status & FAILED == 0
    torch.testing.assert_close(y[is_solved], expected[is_solved], rtol=1e-10, atol=0)
    return history, y, status


def test_adjoint_of_a_full_rank_equation_is_limited(monkeypatch):
    """The gains are 1 / (1 − 0.8) = 5, which is limited to 2, and 1 / (1 − 0.3)."""
    monkeypatch.setattr(full_rank, "MAX_GAIN", 2.0)
    history, y, status = solve_linear([0.8, 0.3])
    assert not (status & FAILED).any()
    (grad,) = torch.autograd.grad(y.sum(), history)
    expected = torch.tensor([2.0, 1 / 0.7], dtype=torch.float64)[:, None].expand_as(grad)
    torch.testing.assert_close(grad, expected, rtol=1e-10, atol=0)


def test_iterated_token_does_not_depend_on_others():
    _, alone, _ = solve_linear([0.3])
    _, with_others, status = solve_linear([0.3, 0.9, -0.9])
    assert not (status & FAILED).any() and torch.equal(with_others[:, :1], alone)


@pytest.mark.parametrize("max_dense_width", [0, D])
@pytest.mark.parametrize("rate", [1.1, -1.1, -1.6])
def test_expanding_equations_are_solved(rate, max_dense_width, monkeypatch):
    monkeypatch.setattr(full_rank, "MAX_DENSE_WIDTH", max_dense_width)
    *_, status = solve_linear([rate])
    assert not (status & FAILED).any()


@pytest.mark.parametrize("max_dense_width", [0, D])
def test_unsolved_token_is_counted_and_has_one_step_gradient(max_dense_width, monkeypatch):
    """y = history + y has no solution; y = history + y / 2 has the gradient 2."""
    monkeypatch.setattr(full_rank, "MAX_DENSE_WIDTH", max_dense_width)
    history, y, status = solve_linear([1.0, 0.5])
    assert status.tolist() == [[FAILED, 0]]
    (grad,) = torch.autograd.grad(y.sum(), history)
    torch.testing.assert_close(grad[0, :, 0], torch.tensor([1.0, 2.0]).double())


def test_unsolved_wide_equation_is_counted(monkeypatch):
    """y → norm(4 R y) with a rotation R, in token 2, does not converge in 30 damped iterations."""
    monkeypatch.setattr(full_rank, "MAX_PICARD_STEPS", 30)
    terms, _ = token_of("rms", gate=False)
    is_rotated = torch.arange(terms.x.shape[1]) == 2
    R = torch.linalg.qr(normal(D, D, seed=9))[0]
    M = torch.where(is_rotated[:, None, None], 4 * R, torch.zeros_like(R)).expand(2, -1, D, D)
    history = (1e-3 * terms.history).requires_grad_()
    terms = terms._replace(history=history, gain=torch.ones_like(terms.x), x=0 * terms.x)
    y, _, status = solve(terms, M)
    assert (status[:, is_rotated] == BISECTED).all() and not status[:, ~is_rotated].any()
    torch.testing.assert_close(terms.value((M @ y.unsqueeze(-1)).squeeze(-1)), y)
    # Without bisection and acceleration nothing solves it.
    monkeypatch.setattr(full_rank, "MAX_DENSE_WIDTH", D - 1)
    monkeypatch.setattr(full_rank, "MAX_ACCELERATED_ITERS", 0)
    y, _, status = solve(terms, M)
    assert (status[:, is_rotated] == FAILED).all() and not status[:, ~is_rotated].any()
    (grad,) = torch.autograd.grad(y.sum(), history)
    assert torch.isfinite(grad).all()


# (mixer, mixer_rank) of the mixers of full rank.
MIXERS = [("kronecker", 1), ("monarch", 8), ("nonselective", 1), ("mixture", 2)]
MIXERS += [("selective_dense", 1)]


@pytest.mark.parametrize(
    "glu_in_loop",
    [
        pytest.param(True, id="gate inside", marks=pytest.mark.slow),
        pytest.param(False, id="gate outside"),
    ],
)
@pytest.mark.parametrize("mixer,rank", MIXERS)
@torch.no_grad()
def test_untrained_layers_agree_in_steps_and_in_fp32(mixer, rank, glu_in_loop):
    """A whole pass solves windows, and a cached step solves single tokens."""
    model = untrained(mixer, rank, glu_in_loop=glu_in_loop)
    ids = torch.randint(64, (2, 4))
    fp32_logits = model(ids).logits
    whole = model.double()(ids)
    steps, cache = [], None
    for t in range(ids.shape[1]):
        step = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        steps.append(step.logits)
    assert whole.fixed_point.failed.max() == 0
    size = whole.logits.abs().max()
    assert (torch.cat(steps, 1) - whole.logits).abs().max() < 1e-6 * size
    assert (fp32_logits - whole.logits).abs().max() < 1e-2 * size


def untrained(mixer, rank, **fields):
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, d_model=8, n_layer=2, d_state=4, mixer=mixer, mixer_rank=rank)
    return FPRNNForCausalLM(FPRNNConfig(**sizes, **fields)).eval()


@pytest.mark.parametrize("mixer,rank", MIXERS)
@torch.no_grad()
def test_every_precision_finds_the_same_of_several_solutions(mixer, rank):
    """Single tokens, so that rounding cannot grow from token to token.

    With open gates an equation of an untrained layer has several solutions.
    """
    has_gates = mixer not in ("nonselective", "selective_dense")
    fields = {"mixer_gate_init_bias": 0.0} if has_gates else {}
    model, ids = untrained(mixer, rank, **fields), torch.randint(64, (64, 1))
    fp32_logits, fp64_logits = model(ids).logits, model.double()(ids).logits
    distances = (fp32_logits - fp64_logits).norm(dim=-1) / fp64_logits.norm(dim=-1)
    assert (distances <= 0.05).all()
