"""The certified root of two reflections in Triton, interpreted, against plain PyTorch."""

import math

import pytest
import torch

from lm.kernels.triton import roots as triton_roots
from lm.kernels.triton.build import INTERPRETED
from lm.model import cell
from lm.model.certified_root import SOLVED, find_certified_pairs
from tests.kernels import quicken_interpreter, skip_where_missing

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from lm.kernels.triton import pair  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
FLOOR = 1e-5
# Some pieces of some tokens divide by zero.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

quicken_interpreter()


@pytest.fixture(autouse=True)
def skip_without_triton():
    skip_where_missing(triton_roots)


def random_pairs(n, seed):
    """Draw the equations of n tokens with two reflections, in fp32, as a layer's: Γ2 = m mᵀ / d, ….

    Returns:
        α, B, δ, γ0, γ1 and Γ2.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": torch.float64}

    def decades(low, high, *shape):
        return 10 ** (low + (high - low) * torch.rand(n, *shape, **draw))

    d = 8
    c = torch.randn(n, d, **draw) * decades(-3, 3, 1)
    m = torch.randn(n, 2, d, **draw) * decades(-2, 2, 1, 1)
    U = torch.randn(n, 2, d, **draw) * decades(-1, 1, 1, 1)
    delta = torch.randn(n, 2, **draw) * decades(-3, 1, 1)
    delta = torch.where(torch.rand(n, 1, **draw) < 0.5, 0.0, delta)
    alpha, gamma1 = torch.einsum("nrd,nd->nr", U, c), torch.einsum("nrd,nd->nr", m, c) / d
    beta, gamma2 = U @ m.mT, m @ m.mT / d
    gamma0 = c.square().mean(1) + FLOOR
    return [t.float() for t in (alpha, beta, delta, gamma0, gamma1, gamma2)]


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


def test_it_is_the_plain_version():
    """About 16 of these tokens have three roots on Picard's side."""
    equations = random_pairs(8192, seed=0)
    equations[0][::9] = 0  # α
    root, attracts, is_proven = find(equations)
    expected, attracting, proven = find_certified_pairs(cell.Coefficients(*equations, FLOOR))
    # Rounding decides once in 60,000 tokens if two steps polish a root enough.
    both = is_proven & proven
    assert 6000 < both.sum() < 8000 and (is_proven != proven).sum() < 3
    assert torch.equal(attracts[both], attracting[both])
    assert (both & ~attracting).sum() > 100 and not root[~is_proven].any()
    largest = expected[both].abs().amax(1, keepdim=True).double()
    off = (root[both] - expected[both].double()).abs() / largest.clamp_min(1e-30)
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
