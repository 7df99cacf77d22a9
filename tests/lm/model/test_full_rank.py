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


class GivenMatrix:
    """A mixer whose rows are the matrix I − Q: raw (…,d²)."""

    def mix(self, raw, x, y, weights):
        M = raw.unflatten(-1, (x.shape[-1], -1))
        return x + (M @ (y - x).unsqueeze(-1)).squeeze(-1)

    def flops_per_token(self):
        return 0

    def dense(self, raw, weights):
        M = raw.unflatten(-1, (D, D))
        return torch.eye(D, dtype=M.dtype) - M


def solve(token, M):
    """Solve tokens with I − Q = M (b,l,d,d)."""
    return solve_by_iterating(FullRank(token, M.flatten(-2), GivenMatrix(), None))


KINDS = pytest.mark.parametrize("kind", ["layer", "rms", "none"])


TWO_THREADS = """
import torch
from lm.model.full_rank import _solve
torch.set_num_threads(2)
torch.manual_seed(0)
for dtype in (torch.float32, torch.float64):
    matrix = torch.randn(7, 160, 160, dtype=dtype) / 160**0.5 + 5 * torch.eye(160, dtype=dtype)
    right = torch.ones(7, 160, 1, dtype=dtype)
    off = (matrix @ _solve(matrix, right) - right).abs().max()
    assert off < 100 * torch.finfo(dtype).eps, off
"""


def test_wide_systems_are_solved_in_two_threads():
    """With two threads torch's batched LU is wrong or hangs from 150 rows, so use a process."""
    subprocess.run([sys.executable, "-c", TWO_THREADS], check=True, timeout=60)


@KINDS
def test_iterating_equals_the_low_rank_solution(kind):
    token, _ = token_of(kind)
    low_rank = low_rank_of(2, size=0.15)
    pairs = zip(solve(token, matrix_of(low_rank)), solve_low_rank(token, low_rank))
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("way", ["picard", "anderson", "bisection"])
@KINDS
def test_each_method_finds_a_solution_and_its_gradient(kind, way, monkeypatch):
    monkeypatch.setattr(full_rank, "MAX_PICARD_STEPS", 300 if way == "picard" else 0)
    monkeypatch.setattr(full_rank, "MAX_DENSE_WIDTH", D if way == "bisection" else 0)
    _, tensors = token_of(kind, b=1, length=2)
    names = ["x", "history", "gain", "gate"] + (["weight"] if kind != "none" else [])
    names += ["bias"] if kind == "layer" else []
    low_rank = low_rank_of(2, 1, 2, size=0.15)

    def by_matrix(U, T, *values):
        token = make(kind, **{**tensors, **dict(zip(names, values))})
        y, mixed, outcome = solve(token, matrix_of(LowRank(U, T)))
        assert (outcome == (BISECTED if way == "bisection" else 0)).all()
        return y, mixed

    inputs = [*low_rank, *(tensors[name] for name in names)]
    inputs = [t.clone().requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(
        by_matrix, inputs, eps=1e-6, atol=1e-6, rtol=1e-5, check_undefined_grad=False
    )


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_bisection_is_accurate_without_newton(kind, monkeypatch):
    """Newton could hide a bisection in the wrong direction."""
    monkeypatch.setattr(full_rank, "MAX_PICARD_STEPS", 0)
    monkeypatch.setattr(full_rank, "MAX_NEWTON_STEPS", 0)
    monkeypatch.setattr(full_rank, "BISECTIONS", 80)
    token, _ = token_of(kind)
    y, _, outcome = solve(token, matrix_of(low_rank_of(2, size=0.3)))
    assert (outcome == BISECTED).all() and torch.isfinite(y).all()


def test_anderson_solves_an_expanding_map_in_d_steps():
    rates = torch.tensor([3.0, -2.0, 0.5, 1.5], dtype=torch.float64)
    right, y, history = (
        torch.ones(1, 4, dtype=torch.float64),
        torch.zeros(1, 4).double(),
        Anderson(),
    )
    for _ in range(6):
        y = history.next(y, right + rates * y)
    torch.testing.assert_close(y, right / (1 - rates), rtol=1e-8, atol=0)


def linear(rates):
    """Solve y_t = history_t + rates_t y_t; return history (1,l,d), y and the status."""
    M = torch.tensor(rates, dtype=torch.float64)[None, :, None, None] * torch.eye(D).double()
    history = normal(1, 4, D, seed=50)[:, : len(rates)].clone().requires_grad_()
    one = torch.ones(1, len(rates), D, dtype=torch.float64)
    y, _, outcome = solve(EquationTerms(0 * one, history, one, None, Norm("none")), M)
    expected = history / (1 - torch.tensor(rates, dtype=torch.float64)[:, None])
    solved = outcome & FAILED == 0
    torch.testing.assert_close(y[solved], expected[solved], rtol=1e-10, atol=0)
    return history, y, outcome


def test_adjoint_of_a_full_rank_equation_is_limited(monkeypatch):
    monkeypatch.setattr(full_rank, "MAX_GAIN", 2.0)
    history, y, outcome = linear([0.8, 0.3])
    assert not (outcome & FAILED).any()
    (grad,) = torch.autograd.grad(y.sum(), history)
    expected = torch.tensor([2.0, 1 / 0.7], dtype=torch.float64)[:, None].expand_as(grad)
    torch.testing.assert_close(grad, expected, rtol=1e-10, atol=0)


def test_iterated_token_does_not_depend_on_others():
    _, alone, _ = linear([0.3])
    _, beside, outcome = linear([0.3, 0.9, -0.9])
    assert not (outcome & FAILED).any() and torch.equal(beside[:, :1], alone)


@pytest.mark.parametrize("most_dense", [0, D])
@pytest.mark.parametrize("rate", [1.1, -1.1, -1.6])
def test_expanding_equations_are_solved(rate, most_dense, monkeypatch):
    monkeypatch.setattr(full_rank, "MAX_DENSE_WIDTH", most_dense)
    *_, outcome = linear([rate])
    assert not (outcome & FAILED).any()


@pytest.mark.parametrize("most_dense", [0, D])
def test_unsolved_token_is_counted_and_has_one_step_gradient(most_dense, monkeypatch):
    monkeypatch.setattr(full_rank, "MAX_DENSE_WIDTH", most_dense)
    history, y, outcome = linear([1.0, 0.5])
    assert outcome.tolist() == [[FAILED, 0]]
    (grad,) = torch.autograd.grad(y.sum(), history)
    torch.testing.assert_close(grad[0, :, 0], torch.tensor([1.0, 2.0]).double())


def test_unsolved_wide_equation_is_counted(monkeypatch):
    """y → norm(R y) with a rotation R does not converge in a few damped iterations."""
    monkeypatch.setattr(full_rank, "MAX_PICARD_STEPS", 30)
    token, _ = token_of("rms", gate=False)
    one = torch.arange(token.x.shape[1]) == 2
    turn = torch.linalg.qr(normal(D, D, seed=9))[0]
    M = torch.where(one[:, None, None], 4 * turn, torch.zeros_like(turn)).expand(2, -1, D, D)
    first = (1e-3 * token.history).requires_grad_()
    token = token._replace(history=first, gain=torch.ones_like(token.x), x=0 * token.x)
    y, _, outcome = solve(token, M)
    assert (outcome[:, one] == BISECTED).all() and not outcome[:, ~one].any()
    torch.testing.assert_close(token.value((M @ y.unsqueeze(-1)).squeeze(-1)), y)
    monkeypatch.setattr(full_rank, "MAX_DENSE_WIDTH", D - 1)
    monkeypatch.setattr(full_rank, "MAX_ACCELERATED_ITERS", 0)
    y, _, outcome = solve(token, M)
    assert (outcome[:, one] == FAILED).all() and not outcome[:, ~one].any()
    (grad,) = torch.autograd.grad(y.sum(), first)
    assert torch.isfinite(grad).all()


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
    model, ids = untrained(mixer, rank, glu_in_loop=glu_in_loop), torch.randint(64, (2, 16))
    narrow = model(ids).logits
    whole = model.double()(ids)
    steps, cache = [], None
    for t in range(ids.shape[1]):
        step = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        steps.append(step.logits)
    assert whole.fixed_point.failed.max() == 0
    size = whole.logits.abs().max()
    assert (torch.cat(steps, 1) - whole.logits).abs().max() < 1e-6 * size
    assert (narrow - whole.logits).abs().max() < 1e-2 * size


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
    fields = {} if mixer in ("nonselective", "selective_dense") else {"mixer_gate_init_bias": 0.0}
    model, ids = untrained(mixer, rank, **fields), torch.randint(64, (64, 1))
    narrow, wide = model(ids).logits, model.double()(ids).logits
    off = (narrow - wide).norm(dim=-1) / wide.norm(dim=-1)
    assert (off > 0.05).sum() == 0
