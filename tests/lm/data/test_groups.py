"""Tests of groups against the composition of permutations, and of names without a group."""

import itertools

import numpy as np
import pytest

from lm.data.sources.errors import DataError
from lm.data.sources.groups import get_group, permutations

NAMES = ["S2", "S3", "A3", "A4", "S4", "A5", "S5", "Z1", "Z7", "Z60", "A4_x_Z5", "S3_x_Z2_x_Z2"]


def compose(p, q):
    """Return the permutation that applies p first, then q."""
    return tuple(q[i] for i in p)


def sign(p):
    return (-1) ** sum(a > b for a, b in itertools.combinations(p, 2))


@pytest.mark.parametrize("name", NAMES)
def test_tables_satisfy_the_group_axioms(name):
    g = get_group(name)
    n, t = np.arange(g.order), g.table
    assert t.shape == (g.order, g.order) and t.min() == 0 and t.max() == g.order - 1
    assert (t[g.identity] == n).all() and (t[:, g.identity] == n).all()
    assert (np.sort(t, 0) == n[:, None]).all() and (np.sort(t, 1) == n).all()  # inverses exist
    a, b, c = np.random.default_rng(0).integers(0, g.order, (3, 5000))
    assert (t[t[a, b], c] == t[a, t[b, c]]).all()


def test_groups_have_the_known_orders():
    orders = {"S3": 6, "A4": 12, "S4": 24, "A5": 60, "S5": 120, "Z60": 60, "A4_x_Z5": 60, "D4": 8}
    orders |= {"S6": 720, "A1": 1, "A2": 1}
    assert {name: get_group(name).order for name in orders} == orders


@pytest.mark.parametrize("n, even", [(3, False), (4, False), (4, True), (5, True)])
def test_products_compose_permutations(n, even):
    elements = [p for p in itertools.permutations(range(n)) if not even or sign(p) == 1]
    assert [tuple(p) for p in permutations(n, even)] == elements
    table = get_group(f"{'A' if even else 'S'}{n}").table
    for i, p in enumerate(elements):
        for j, q in enumerate(elements):
            assert elements[table[i, j]] == compose(p, q)


def test_product_group_multiplies_componentwise():
    g, a, z = get_group("A4_x_Z5"), get_group("A4").table, get_group("Z5").table
    for i, j in np.random.default_rng(1).integers(0, 60, (200, 2)):
        assert g.table[i, j] == a[i // 5, j // 5] * 5 + z[i % 5, j % 5]


@pytest.mark.parametrize("name", ["B3", "S", "S0", "A5xZ5", "s3", "A5_x_", "Z-1", ""])
def test_unknown_group_is_refused(name):
    with pytest.raises(DataError, match=r"unknown group .* S5, A5, D4, Z60, A4_x_Z5"):
        get_group(name)


@pytest.mark.parametrize("name", ["S8", "A99999", "S5_x_S5", "Z6000"])
def test_group_with_too_many_elements_is_refused(name):
    with pytest.raises(DataError, match="more than 5040 elements"):
        get_group(name)
