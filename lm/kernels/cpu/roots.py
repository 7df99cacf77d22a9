"""The `roots` kernel for the CPU: solves the small equations of many tokens.

lm/model uses it if cpu_cell.py cannot solve the whole layer: for a user's mixer, for windows, and
for the parallel schedule.

Shape suffixes: n tokens, r rank.
"""

import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lm.kernels.cell_arguments import check_rank
from lm.kernels.checks import roots_deviation
from lm.kernels.cpu import build as cpu_build
from lm.kernels.cpu.build import check, get_address, load_functions

_pack = struct.Struct("4qd9q").pack  # `struct Roots` of roots.cpp


class Roots(NamedTuple):
    """Solutions of tokens' equations, with the outcome of each search."""

    s: Tensor  # (n,r)
    outcome: Tensor  # (n,) uint8: 0, FAILED or BISECTED


def _self_check(dtype):
    return roots_deviation(find_roots, dtype)


usable = functools.partial(cpu_build.usable, _self_check)


def find_roots(
    alpha: Tensor,
    beta: Tensor,
    delta: Tensor,
    gamma0: Tensor,
    gamma1: Tensor,
    gamma2: Tensor,
    floor: float,
) -> Roots:
    """Solve s = (α + Β s) / √(γ₀ + 2 γ₁·s + sᵀ Γ₂ s) + δ for every token.

    If an equation has several solutions, damped Picard from zero selects one of them. The result
    does not depend on the other tokens or on the number of threads.

    Args:
        alpha: α, (n,r).
        beta: Β, (n,r,r).
        delta: δ, (n,r).
        gamma0: γ₀, (n,).
        gamma1: γ₁, (n,r).
        gamma2: Γ₂, (n,r,r).
        floor: Lower bound of the expression under the square root.

    Raises:
        TypeError: If a tensor is not on the CPU.
        ValueError: If a shape is wrong.
        Unsupported: If dtypes differ or are neither fp32 nor fp64, or if r is above 8.
    """
    equations = alpha, beta, delta, gamma0, gamma1, gamma2
    return _search(equations, floor, without_certified_search=False, evaluations=None)


def count_evaluations(
    equations: Sequence[Tensor], floor: float, without_certified_search: bool
) -> tuple:
    """Find the roots as `find_roots` does and count how often φ is evaluated for each token.

    Args:
        equations: The six tensors of `find_roots`.
        floor: As in `find_roots`.
        without_certified_search: Leave out the certified searches for ranks 1 and 2.

    Returns:
        The Roots, and the number of evaluations of every token, (n,) int32.
    """
    alpha = equations[0]
    evaluations = alpha.new_empty(len(alpha), dtype=torch.int32)
    return _search(equations, floor, without_certified_search, evaluations), evaluations


def _search(equations, floor, without_certified_search, evaluations):
    """Find the roots; count the evaluations of φ in `evaluations` unless it is None."""
    alpha, beta, delta, gamma0, gamma1, gamma2 = equations
    n, r = alpha.shape
    check_rank(r)
    check(
        alpha.dtype,
        ("alpha", alpha, (n, r)),
        ("beta", beta, (n, r, r)),
        ("delta", delta, (n, r)),
        ("gamma0", gamma0, (n,)),
        ("gamma1", gamma1, (n, r)),
        ("gamma2", gamma2, (n, r, r)),
    )
    inputs = [t.contiguous() for t in (alpha, beta, delta, gamma0, gamma1, gamma2)]
    roots = Roots(torch.empty_like(inputs[0]), alpha.new_empty(n, dtype=torch.uint8))
    addresses = [get_address(t) for t in (*inputs, *roots, evaluations)]
    sizes = n, r, torch.get_num_threads(), without_certified_search
    load_functions()["roots"][alpha.dtype](_pack(*sizes, floor, *addresses))
    return roots
