"""Finite groups by name, as multiplication tables: of the suite's words and of traces."""

from __future__ import annotations

import itertools
import math
import re
from functools import lru_cache

import numpy as np

from lm.data.sources.errors import DataError

MAX_ORDER = 5040  # S7; its table has 25 million entries


class Group:
    """A finite group as its multiplication table.

    Attributes:
        name; table (n,n) int32: table[i, j] is the element i·j; identity: its index.
    """

    def __init__(self, name: str, table: np.ndarray):
        self.name = name
        self.table = table
        elements = np.arange(len(table))
        self.identity = int(np.flatnonzero((table == elements).all(1))[0])  # its row changes none

    @property
    def order(self) -> int:
        """The number of elements."""
        return len(self.table)

    @lru_cache(maxsize=8)  # noqa: B019 (as many as `group` keeps)
    def simplest_first(self) -> np.ndarray:
        """The elements (n,): those of low order first, of these those with few conjugates. Of S5:
        the identity, its 10 transpositions, the 15 pairs of them, the 20 cycles of three, …"""
        orders = np.ones(self.order, dtype=np.int64)
        power = np.arange(self.order)
        while (going := power != self.identity).any():
            orders += going
            power = np.where(going, self.table[power, np.arange(self.order)], power)
        commuting = (self.table == self.table.T).sum(1)
        return np.lexsort((self.order // commuting, orders))

    def products(self, x: np.ndarray) -> np.ndarray:
        """x (b,l) elements → (b,l): x_1 · x_2 ⋯ x_t at every t."""
        y = np.empty_like(x)
        state = np.full(len(x), self.identity, dtype=x.dtype)
        for t in range(x.shape[1]):
            state = self.table[state, x[:, t]]
            y[:, t] = state
        return y


def permutations(n: int, even: bool = False) -> np.ndarray:
    """The permutations of 0…n−1 in lexicographic order, or the even ones → (count,n)."""
    p = np.array(list(itertools.permutations(range(n))), dtype=np.int8)
    if not even:
        return p
    inversions = sum((p[:, [i]] > p[:, i + 1 :]).sum(1) for i in range(n - 1))
    return p[inversions % 2 == 0] if n > 1 else p


def symmetries(n: int) -> np.ndarray:
    """What the symmetries of a regular n-gon, n > 2, do to its corners, in lexicographic order →
    (2n,n)."""
    corners = np.arange(n)
    turned = (corners + corners[:, None]) % n
    both = np.concatenate([turned, turned[:, ::-1]]).astype(np.int8)
    return both[np.lexsort(both.T[::-1])]


def _of_permutations(name: str, p: np.ndarray) -> Group:
    """p·q is 'first p, then q': (p·q)[i] = q[p[i]]."""
    n = p.shape[1]
    weights = n ** np.arange(n - 1, -1, -1, dtype=np.int64)
    codes = p @ weights  # ascending, since p is in lexicographic order
    table = np.empty((len(p), len(p)), dtype=np.int32)
    for i, first in enumerate(p):
        table[i] = np.searchsorted(codes, p[:, first] @ weights)
    return Group(name, table)


def _product(a: Group, b: Group) -> Group:
    """The direct product; (i, j) is numbered i · |b| + j."""
    table = a.table[:, None, :, None] * b.order + b.table[None, :, None, :]
    order = a.order * b.order
    return Group(f"{a.name}_x_{b.name}", table.reshape(order, order).astype(np.int32))


def _order(name: str) -> int:
    """The number of elements; beyond MAX_ORDER at least that many."""
    order = 1
    for part in name.split("_x_"):
        if not re.fullmatch(r"[SAZ][1-9][0-9]{0,5}|D[3-9]", part):
            raise DataError(
                f"unknown group `{name}`: groups are S<n> (all permutations of n), A<n> (the even"
                " ones), D<n> (the symmetries of a polygon of 3 to 9 corners), Z<n> (addition"
                " modulo n) and their products, as in S5, A5, D4, Z60, A4_x_Z5"
            )
        kind, n = part[0], int(part[1:])
        if kind == "Z":
            order *= n
        elif kind == "D":
            order *= 2 * n
        else:
            halves = 2 if kind == "A" and n > 1 else 1
            order *= math.factorial(min(n, 9)) // halves  # 9! is beyond MAX_ORDER
    return order


def _permutations_of(part: str) -> np.ndarray:
    """Of S_n, A_n or D_n."""
    n = int(part[1:])
    return symmetries(n) if part[0] == "D" else permutations(n, even=part[0] == "A")


@lru_cache(maxsize=8)
def group(name: str) -> Group:
    """The group of a name: S5, A5, D4, Z60, A4_x_Z5.

    Raises:
        DataError: no such group, or one whose table would be too large.
    """
    order = _order(name)
    if order > MAX_ORDER:
        raise DataError(f"group `{name}` has more than {MAX_ORDER} elements, too many to tabulate")
    parts = []
    for part in name.split("_x_"):
        n = int(part[1:])
        if part[0] == "Z":
            numbers = np.arange(n, dtype=np.int32)
            parts.append(Group(part, (numbers[:, None] + numbers) % n))
        else:
            parts.append(_of_permutations(part, _permutations_of(part)))
    whole = parts[0]
    for factor in parts[1:]:
        whole = _product(whole, factor)
    return whole


def element_names(name: str) -> list[str]:
    """What the elements of a group of this name are called, in their order. A permutation: where
    1, 2, 3, … go, as in 213; a number modulo n: itself; of a product both, as in 213,4."""
    names = [""]
    for part in name.split("_x_"):
        n = int(part[1:])
        if part[0] == "Z":
            own = [str(i) for i in range(n)]
        else:
            ordered = _permutations_of(part) + 1
            own = ["".join(map(str, p)) for p in ordered]
        names = [f"{left},{right}" if left else right for left in names for right in own]
    return names
