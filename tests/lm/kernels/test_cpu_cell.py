"""The compiled exact token against an independent loop: values, states, each gradient by name."""

import math

import pytest
import torch
import torch.nn.functional as F

from lm.kernels import cpu_cell
from lm.kernels.cpu_cell import Layout, Options
from tests import oracle_cell
from tests.kernels import assert_close, poisoned_memory, skip_where_missing

NOT_DIFFERENTIATED = ("keep", "y0", "h0")


@pytest.fixture(autouse=True)
def poisoned():
    skip_where_missing(cpu_cell)
    with poisoned_memory():
        yield


def options_of(rank=1, **others):
    defaults = dict(
        rank=rank, scale=2.0, act="silu", sequential=True, eps=1e-6, contractive=None,
        bc_norm=True, groups=1, norm="layer", norm_eps=1e-5, adjoint_clip=math.inf,
    )  # fmt: skip
    return Options(**{**defaults, **others})


def columns_of(order, rank, d, bc):
    """{part: its first column} in this order, and how many there are; "pad" belongs to nobody."""
    widths = {"vectors": rank * d, "gates": rank, "B": bc, "C": bc, "pad": 3}
    firsts, column = {}, 0
    for name in order:
        firsts[name] = column
        column += widths[name]
    firsts.pop("pad", None)
    return firsts, column


def problem(
    b=2, length=6, d=19, n=3, heads=None, order=("vectors", "gates", "B", "C"), reading=None,
    without=(), y_scale=1.0, seed=0, **of_options,
):  # fmt: skip
    """(layout, options, tensors in fp64) of FP-Mamba-1, or 2 with heads. reading: the parts, the
    first of the order, that read y; all if None."""
    options = options_of(states=n, **of_options)
    r, groups = options.rank, options.groups
    firsts, columns = columns_of(order, r, d, groups * n)
    k = columns_of(order[:reading], r, d, groups * n)[1]
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = dict(
        raw=draw(b, length, columns), weight_y=y_scale * draw(k, d) / d**0.5, x=draw(b, length, d),
        dt=F.softplus(draw(b, length, heads or d)),
        A=-0.1 - n * draw(heads).abs() if heads else -0.1 - n * draw(d, n).abs(),
        keep=(draw(b, length) < 0.8).double(), gate=torch.sigmoid(draw(b, length, d)),
        D=1 + 0.3 * draw(d), norm_weight=1 + 0.3 * draw(d), norm_bias=0.2 * draw(d),
        y0=draw(b, d), h0=draw(b, heads, d // heads, n) if heads else draw(b, d, n),
    )  # fmt: skip
    return Layout(**firsts), options, {k: None if k in without else v for k, v in tensors.items()}


def rnn_problem(b=2, length=6, d=19, order=("vectors", "gates"), reading=None, **of_options):
    layout, options, tensors = problem(b, length, d, 1, None, order, reading, **of_options)
    fresh = torch.sigmoid(tensors["dt"])
    tensors = {k: tensors[k] for k in ("raw", "weight_y", "x", "keep", "y0")}
    h0 = None if tensors["y0"] is None else tensors["y0"].flip(-1)
    return layout, options, {**tensors, "decay": 1 - fresh, "fresh": fresh, "h0": h0}


def cast(tensors, dtype):
    return {k: None if v is None else v.to(dtype) for k, v in tensors.items()}


def cotangent(y):
    return torch.linspace(-1, 1, y.numel(), dtype=torch.float64).reshape(y.shape).sin() + 0.3


def results(compute, given, dtype=torch.float64, **others):
    """{"y", "state", "grad raw", …} of compute(layout, options, tensors…)."""
    layout, options, tensors = given
    tensors = {k: None if v is None else v.to(dtype, copy=True) for k, v in tensors.items()}
    wanted = [k for k, v in tensors.items() if v is not None and k not in NOT_DIFFERENTIATED]
    wanted = [k for k in wanted if tensors[k].numel()]
    for name in wanted:
        tensors[name].requires_grad_()
    y, h, failed = compute(layout, options, **tensors, **others)
    assert failed.dtype is torch.bool and not failed.any()
    grads = torch.autograd.grad(y, [tensors[k] for k in wanted], cotangent(y).to(dtype))
    return {
        "y": y.detach(), "state": h.detach(),
        **{f"grad {name}": g for name, g in zip(wanted, grads)},
    }  # fmt: skip


def assert_equals_the_loop(given, tol=1e-9, tol32=3e-4, rnn=False):
    ours = cpu_cell.cell_rnn if rnn else cpu_cell.cell
    theirs = oracle_cell.cell_rnn if rnn else oracle_cell.cell
    limit = torch.linalg.vector_norm(cotangent(given[2]["x"]), dim=-1).amax(-1)
    expected = results(theirs, given, limit=limit)
    assert_close(results(ours, given, adjoint=None), expected, tol)
    if tol32:
        assert_close(results(ours, given, torch.float32, adjoint=None), expected, tol32)


@pytest.mark.parametrize("n", [1, 16, 33])
@pytest.mark.parametrize("d", [1, 8, 19, 64])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_equals_the_loop_in_value_state_and_every_gradient(length, d, n):
    tol32 = None if d == 1 else 3e-4  # LayerNorm of one channel is 0: all is rounding
    assert_equals_the_loop(problem(2, length, d, n), tol32=tol32)


@pytest.mark.parametrize("sequential", [True, False], ids=["householder", "dplr"])
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 8])
def test_ranks(rank, sequential):
    scale = 1.0 if not sequential and rank > 2 else 2.0
    assert_equals_the_loop(problem(rank=rank, sequential=sequential, scale=scale))


@pytest.mark.parametrize(
    "others",
    [
        dict(norm="rms", without=("norm_bias",)),
        dict(norm="none", without=("norm_weight", "norm_bias")),
        dict(without=("norm_weight", "norm_bias")),
        dict(without=("norm_bias",)),
        dict(contractive=0.5),
        dict(contractive=0.9, rank=3),
        dict(contractive=0.9, rank=3, sequential=False),
        dict(bc_norm=False),
        dict(act="relu"),
        dict(act="identity", rank=2),
        dict(without=("gate",)),
        dict(without=("y0", "h0")),
        dict(without=("keep",)),
        dict(reading=0),
        dict(reading=0, without=("keep", "gate", "y0", "h0"), rank=2, seed=1),
        dict(order=("gates", "C", "B", "vectors"), reading=2),
        dict(order=("vectors", "gates", "C", "B"), reading=3, rank=2),
        dict(order=("B", "pad", "C", "vectors", "pad", "gates"), rank=2),
        dict(adjoint_clip=0.2),
        dict(adjoint_clip=0.05, rank=2, length=9, without=("keep",)),
    ],
    ids=str,
)
def test_toggles(others):
    assert_equals_the_loop(problem(**others))


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize(
    "sizes",
    [
        dict(d=24, heads=4, groups=1),
        dict(d=24, heads=4, groups=2),
        dict(d=64, heads=4, groups=4, n=16),
        dict(d=19, heads=19, groups=19, n=5),
        dict(d=64, heads=1, n=33),
    ],
    ids=str,
)
def test_mamba2(sizes, rank):
    assert_equals_the_loop(problem(norm="rms", rank=rank, without=("norm_bias",), **sizes))


@pytest.mark.parametrize(
    "others",
    [
        dict(),
        dict(rank=3, scale=0.5),
        dict(rank=2, sequential=False, scale=0.5),
        dict(reading=0),
        dict(without=("y0", "keep"), d=64, length=20),
        dict(contractive=0.5, rank=2),
        dict(adjoint_clip=0.1),
    ],
    ids=str,
)
def test_rnn(others):
    assert_equals_the_loop(rnn_problem(**{"scale": 1.0, **others}), rnn=True)
