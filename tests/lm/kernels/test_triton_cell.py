"""The exact token in Triton against an independent loop: values, states, each gradient by name."""

import math

import pytest
import torch

pytest.importorskip("triton")

from lm.kernels import Unsupported
from lm.kernels.triton import cell as triton_cell
from lm.kernels.triton import launches
from lm.kernels.triton.build import INTERPRETED
from lm.model.solver import FAILED, LIMITED
from tests import oracle_cell
from tests.kernels import assert_close, poisoned_memory, skip_where_missing
from tests.lm.kernels.test_cpu_cell import cast, cotangent, problem, results, rnn_problem

DEVICE = "cpu" if INTERPRETED else "cuda"
# Of the interpreter, where a search goes through a pole.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def poisoned():
    skip_where_missing(triton_cell)
    with poisoned_memory():
        yield


def on_gpu(given):
    layout, options, tensors = given
    return layout, options, {k: None if v is None else v.to(DEVICE) for k, v in tensors.items()}


def ours(given, rnn=False, dtype=torch.float32, **others):
    compute = triton_cell.cell_rnn if rnn else triton_cell.cell
    found = results(compute, on_gpu(given), dtype, **{"adjoint": None, **others})
    return {name: t.cpu() for name, t in found.items()}


def oracle(given, rnn=False):
    limit = torch.linalg.vector_norm(cotangent(given[2]["x"]), dim=-1).amax(-1)
    return results(oracle_cell.cell_rnn if rnn else oracle_cell.cell, given, limit=limit)


def assert_equals_the_loop(given, tol=3e-4, rnn=False):
    assert_close(ours(given, rnn), oracle(given, rnn), tol)


@pytest.mark.parametrize(
    "sizes",
    [
        dict(b=2, length=1, d=8, n=1),
        dict(b=1, length=9, d=19, n=16),
        dict(b=3, length=5, d=64, n=33),
        dict(b=17, length=3, d=20, n=5),
        dict(b=2, length=4, d=130, n=9),
    ],
    ids=str,
)
def test_equals_the_loop_in_value_state_and_every_gradient(sizes):
    assert_equals_the_loop(problem(**sizes))


@pytest.mark.parametrize("sequential", [True, False], ids=["householder", "dplr"])
@pytest.mark.parametrize("rank", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_ranks(rank, sequential):
    scale = 1.0 if not sequential and rank > 2 else 2.0
    given = problem(length=4, rank=rank, sequential=sequential, scale=scale)
    assert_equals_the_loop(given)


@pytest.mark.parametrize(
    "others",
    [
        dict(norm="rms", without=("norm_bias",)),
        dict(norm="none", without=("norm_weight", "norm_bias")),
        dict(without=("norm_weight", "norm_bias")),
        dict(contractive=0.9, rank=3),
        dict(contractive=0.9, rank=3, sequential=False),
        dict(bc_norm=False),
        dict(eps=3.5, rank=2),  # some vectors are shorter, some longer
        dict(act="relu"),
        dict(act="identity", rank=2, without=("gate",)),
        dict(without=("y0", "h0", "keep")),
        dict(reading=0),
        dict(order=("gates", "C", "B", "vectors"), reading=2),
        dict(order=("B", "pad", "C", "vectors", "pad", "gates"), rank=2),
        dict(adjoint_clip=0.05, rank=2, length=9, without=("keep",)),
    ],
    ids=str,
)
def test_toggles(others):
    assert_equals_the_loop(problem(**{"length": 4, **others}))


@pytest.mark.parametrize(
    "sizes",
    [
        dict(d=24, heads=4, groups=1),
        dict(d=24, heads=4, groups=2, rank=2),
        dict(d=64, heads=4, groups=4, n=16),
        dict(d=19, heads=19, groups=19, n=5),
        dict(d=64, heads=1, n=33, rank=4),
    ],
    ids=str,
)
def test_mamba2(sizes):
    assert_equals_the_loop(problem(length=4, norm="rms", without=("norm_bias",), **sizes))


@pytest.mark.parametrize(
    "others",
    [
        dict(),
        dict(rank=3, scale=0.5),
        dict(rank=2, sequential=False, scale=0.5),
        dict(without=("y0", "keep", "h0"), d=64, length=9),
        dict(contractive=0.5, rank=2),
        dict(adjoint_clip=0.1),
    ],
    ids=str,
)
def test_rnn(others):
    assert_equals_the_loop(rnn_problem(**{"scale": 1.0, "length": 4, **others}), rnn=True)
