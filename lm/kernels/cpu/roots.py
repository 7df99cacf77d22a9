"""The roots of tokens' own equations, compiled for this CPU.

For what `cpu_cell` has no code for: mixers of one's own, windows, the parallel schedule.

Shape suffixes: n tokens, r rank.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lm.kernels import Unsupported
from lm.kernels.checks import roots_deviation
from lm.kernels.cpu import build as cpu_build
from lm.kernels.cpu.build import address, check, functions

MOST_RANK = 8  # as in cell_root.h
BISECTED = 2  # as in lm/model/solver.py
_pack = struct.Struct("4qd9q").pack  # `struct Roots` of roots.cpp


class Roots(NamedTuple):
    """What was found."""

    s: Tensor  # (n,r)
    outcome: Tensor  # (n,) uint8: 0, or FAILED or BISECTED of lm/model/solver.py


def usable() -> tuple[bool, str]:
    """Return whether it runs here, and the reason if it does not; see `usable` of build.py."""
    return cpu_build.usable(_self_check)


def _self_check(dtype):
    return roots_deviation(find_roots, dtype)


def find_roots(
    alpha: Tensor,
    beta: Tensor,
    delta: Tensor,
    gamma0: Tensor,
    gamma1: Tensor,
    gamma2: Tensor,
    floor: float,
) -> Roots:
    """The solutions of s = (α + Β s) / √(γ₀ + 2 γ₁·s + sᵀ Γ₂ s) + δ that damped Picard from zero
    runs into. A token's result does not depend on the other tokens, nor on the number of threads.

    Args:
        alpha, delta, gamma1: (n,r). beta, gamma2: (n,r,r). gamma0: (n,). floor: the least that the
        root is taken of.
    Raises:
        TypeError, ValueError: devices, shapes. Unsupported: dtypes, rank.
    """
    return _search((alpha, beta, delta, gamma0, gamma1, gamma2), floor, False, None)


def count_evaluations(equations: Sequence[Tensor], floor: float, by_picard: bool) -> tuple:
    """Find the roots as `find_roots` does and count how often φ is evaluated for each token.

    Args:
        equations: The six tensors of `find_roots`.
        floor: As in `find_roots`.
        by_picard: Search as ranks above one do, without Newton's certified root.

    Returns:
        The Roots, and the evaluations of every token, shape (n,) int32.
    """
    evaluations = torch.empty(len(equations[0]), dtype=torch.int32)
    return _search(equations, floor, by_picard, evaluations), evaluations


def _search(equations, floor, by_picard, evaluations):
    alpha, beta, delta, gamma0, gamma1, gamma2 = equations
    n, r = alpha.shape
    if r > MOST_RANK:
        raise Unsupported(f"mixers of rank {r}: the CPU kernel solves up to {MOST_RANK}")
    check(
        alpha.dtype,
        ("alpha", alpha, (n, r)),
        ("beta", beta, (n, r, r)),
        ("delta", delta, (n, r)),
        ("gamma0", gamma0, (n,)),
        ("gamma1", gamma1, (n, r)),
        ("gamma2", gamma2, (n, r, r)),
    )
    given = [t.contiguous() for t in (alpha, beta, delta, gamma0, gamma1, gamma2)]
    found = Roots(torch.empty_like(given[0]), torch.empty(n, dtype=torch.uint8))
    addresses = [address(t) for t in (*given, *found, evaluations)]
    sizes = n, r, torch.get_num_threads(), by_picard
    functions()["roots"][alpha.dtype](_pack(*sizes, floor, *addresses))
    return found
