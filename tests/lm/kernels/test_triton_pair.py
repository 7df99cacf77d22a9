"""The certified root of two reflections in Triton, interpreted, against Picard's."""

import math

import pytest
import torch

from benchmarks.root_search import FLOOR, random_pairs
from lm.kernels.cpu import roots as cpu_roots
from lm.kernels.triton import roots as triton_roots
from lm.kernels.triton.build import INTERPRETED
from lm.model.certified_root import SOLVED
from lm.model.solver import BISECTED
from tests.kernels import quicken_interpreter, skip_where_missing

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from lm.kernels.triton import pair  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
# Some pieces of some tokens divide by zero.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

quicken_interpreter()


@pytest.fixture(autouse=True)
def skip_without_triton():
    skip_where_missing(triton_roots)


@triton.jit
def _pair_kernel(
    alpha, beta, delta, gamma0, gamma1, gamma2,  # in (n,2), (n,2,2), (n,2), (n,), (n,2), (n,2,2)
    root_out, attracts_out, proven_out,  # out (n,2) of fp64, (n,) and (n,) of uint8
    floor, tolerance, live, TOKENS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.arange(0, 2)
    at = token[:, None] * 2 + row[None, :]
    at_all = at[:, :, None] * 2 + row[None, None, :]
    zeros = tl.zeros([TOKENS], tl.float64)
    equation = (
        tl.load(alpha + at).to(tl.float64),
        tl.load(beta + at_all).to(tl.float64),
        tl.load(delta + at).to(tl.float64),
        tl.load(gamma0 + token).to(tl.float64),
        tl.load(gamma1 + at).to(tl.float64),
        tl.load(gamma2 + at_all).to(tl.float64),
        zeros + floor,
    )
    root, attracts, is_proven = pair.find_pair(equation, token < live, zeros + tolerance)
    tl.store(root_out + at, root)
    tl.store(attracts_out + token, attracts.to(tl.uint8))
    tl.store(proven_out + token, is_proven.to(tl.uint8))


def find(equations, live=None):
    """Return the roots of n tokens, n a multiple of 16, if they attract, and if they are proven."""
    n = len(equations[0])
    equations = [t.to(DEVICE) for t in equations]
    root = torch.full((n, 2), torch.nan, dtype=torch.float64, device=DEVICE)
    attracts, is_proven = torch.full((2, n), 7, dtype=torch.uint8, device=DEVICE)
    tolerance = SOLVED * torch.finfo(torch.float32).eps
    live = n if live is None else live
    tokens = math.gcd(n, 4096 if INTERPRETED else 16)  # of a program
    _pair_kernel[(n // tokens,)](
        *equations, root, attracts, is_proven, FLOOR, tolerance, live, TOKENS=tokens, num_warps=2
    )
    return root.cpu(), attracts.cpu() == 1, is_proven.cpu() == 1


def test_a_proven_root_is_the_one_that_picard_finds():
    """About 16 of these tokens have three roots on Picard's side."""
    skip_where_missing(cpu_roots)
    equations = random_pairs(8192, seed=0)
    equations[0][::9] = 0  # α
    root, attracts, is_proven = find(equations)
    in_fp64 = [t.double() for t in equations]
    picard, _ = cpu_roots.count_evaluations(in_fp64, FLOOR, True)
    assert 6000 < is_proven.sum() < 8000 and not root[~is_proven].any()
    assert (is_proven & ~attracts).sum() > 100
    assert (picard.outcome[is_proven & ~attracts] == BISECTED).all()
    both = is_proven & (picard.outcome == 0)
    largest = picard.s[both].abs().amax(1, keepdim=True)
    off = (root[both] - picard.s[both]).abs() / largest.clamp_min(1e-30)
    assert off.max() < 1e-3 and off.median() < 1e-7


def test_a_token_does_not_depend_on_the_others():
    equations = random_pairs(16, seed=1)
    expected = find(equations)
    assert expected[2].sum() > 8
    others = torch.arange(16) != 3
    for i in range(len(equations)):
        damaged = [t.clone() for t in equations]
        damaged[i][3] = torch.nan
        result = find(damaged)
        assert not result[2][3]
        assert all(torch.equal(a[others], b[others]) for a, b in zip(result, expected))


def test_tokens_beyond_the_last_are_not_proven():
    equations = random_pairs(16, seed=1)
    _, _, is_proven = find(equations, live=8)
    assert is_proven[:8].any() and not is_proven[8:].any()
