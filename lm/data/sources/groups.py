"""Finite groups by name, as multiplication tables, for the word problem and traces."""

from __future__ import annotations

import functools
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
        name: Name of the group, such as S5.
        table: Products, shape (order, order), int32: table[i, j] is the element i·j.
        identity: Index of the identity.
    """

    def __init__(self, name: str, table: np.ndarray):
        self.name = name
        self.table = table
        elements = np.arange(len(table))
        # The row of the identity maps every element to itself.
        self.identity = int(np.flatnonzero((table == elements).all(1))[0])

    @property
    def order(self) -> int:
        """Number of elements."""
        return len(self.table)

    @lru_cache(maxsize=8)  # noqa: B019 (`get_group` caches as many groups)
    def simplest_first(self) -> np.ndarray:
        """Return the elements, shape (order,), sorted by order, then by number of conjugates.

        For S5: the identity, 10 transpositions, 15 pairs of transpositions, 20 cycles of three, …
        """
        elements = np.arange(self.order)
        element_orders = np.ones(self.order, dtype=np.int64)  # smallest k > 0 with g^k = identity
        powers = elements
        while (is_unfinished := powers != self.identity).any():
            element_orders += is_unfinished
            powers = np.where(is_unfinished, self.table[powers, elements], powers)
        commuting_counts = (self.table == self.table.T).sum(1)
        conjugate_counts = self.order // commuting_counts  # orbit–stabilizer theorem
        return np.lexsort((conjugate_counts, element_orders))

    def products(self, x: np.ndarray) -> np.ndarray:
        """Return the running products x_1 · x_2 ⋯ x_t of elements x, shape (batch, length)."""
        products = np.empty_like(x)
        product = np.full(len(x), self.identity, dtype=x.dtype)
        for t in range(x.shape[1]):
            product = self.table[product, x[:, t]]
            products[:, t] = product
        return products


def permutations(n: int, even: bool = False) -> np.ndarray:
    """Return the (even) permutations of 0…n−1 in lexicographic order, shape (count, n)."""
    p = np.array(list(itertools.permutations(range(n))), dtype=np.int8)
    if not even or n == 1:  # the permutation of one number is even
        return p
    inversion_counts = sum((p[:, [i]] > p[:, i + 1 :]).sum(1) for i in range(n - 1))
    return p[inversion_counts % 2 == 0]


def symmetries(n: int) -> np.ndarray:
    """Return the symmetries of a regular n-gon, n > 2, as permutations of its corners.

    They are in lexicographic order, shape (2n, n).
    """
    corners = np.arange(n)
    rotations = (corners + corners[:, None]) % n
    elements = np.concatenate([rotations, rotations[:, ::-1]]).astype(np.int8)
    return elements[np.lexsort(elements.T[::-1])]


def _permutation_group(name: str, p: np.ndarray) -> Group:
    """Make a group of permutations p, shape (count, n), in lexicographic order.

    The product p·q is first p, then q: (p·q)[i] = q[p[i]].
    """
    n = p.shape[1]
    # The code of a permutation reads it as a number in base n, so that the codes are ascending.
    place_values = n ** np.arange(n - 1, -1, -1, dtype=np.int64)
    codes = p @ place_values
    table = np.empty((len(p), len(p)), dtype=np.int32)
    for i, first in enumerate(p):
        table[i] = np.searchsorted(codes, p[:, first] @ place_values)
    return Group(name, table)


def _product(a: Group, b: Group) -> Group:
    """Return the direct product, in which (i, j) has the index i · |b| + j."""
    table = a.table[:, None, :, None] * b.order + b.table[None, :, None, :]
    order = a.order * b.order
    return Group(f"{a.name}_x_{b.name}", table.reshape(order, order).astype(np.int32))


def _order(name: str) -> int:
    """Return the number of elements; above MAX_ORDER it may be a lower bound."""
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
            index_in_s_n = 2 if kind == "A" and n > 1 else 1
            order *= math.factorial(min(n, 9)) // index_in_s_n  # 9! / 2 is above MAX_ORDER
    return order


def _part_permutations(part: str) -> np.ndarray:
    """Return the permutations of S_n, A_n or D_n, shape (count, n)."""
    n = int(part[1:])
    return symmetries(n) if part[0] == "D" else permutations(n, even=part[0] == "A")


@lru_cache(maxsize=8)
def get_group(name: str) -> Group:
    """Return the group of a name such as S5, A5, D4, Z60 or A4_x_Z5.

    Raises:
        DataError: If there is no such group, or its table would be too large.
    """
    order = _order(name)
    if order > MAX_ORDER:
        raise DataError(f"group `{name}` has more than {MAX_ORDER} elements, too many to tabulate")
    factors = []
    for part in name.split("_x_"):
        n = int(part[1:])
        if part[0] == "Z":
            numbers = np.arange(n, dtype=np.int32)
            factors.append(Group(part, (numbers[:, None] + numbers) % n))
        else:
            factors.append(_permutation_group(part, _part_permutations(part)))
    return functools.reduce(_product, factors)


def element_names(name: str) -> list[str]:
    """Return the names of a group's elements, in their order.

    A permutation is named by the images of 1, 2, 3, …, such as 213; a number modulo n by its
    digits; an element of a product by both parts, such as 213,4.
    """
    names = [""]
    for part in name.split("_x_"):
        n = int(part[1:])
        if part[0] == "Z":
            part_names = [str(i) for i in range(n)]
        else:
            part_names = ["".join(map(str, p)) for p in _part_permutations(part) + 1]
        names = [f"{left},{right}" if left else right for left in names for right in part_names]
    return names
