"""The CPU kernel `cell` against an independent loop: values, states, and gradients by name."""

import ctypes
import math
import os

import pytest
import torch
import torch.nn.functional as F

from lm.kernels import Unsupported
from lm.kernels.cell_arguments import CellArguments, Layout, Options, Readout
from lm.kernels.cpu import cpu_cell
from lm.model.solver import FAILED
from tests import oracle_cell
from tests.kernels import assert_close, poisoned_memory, skip_if_missing

M_PERTURB = -6  # option of glibc's mallopt
NOT_DIFFERENTIATED = ("keep", "y0", "h0")


@pytest.fixture(autouse=True)
def poison_memory():
    skip_if_missing(cpu_cell)
    with poisoned_memory():
        yield


def make_options(rank=1, **others):
    defaults = dict(
        rank=rank,
        scale=2.0,
        act="silu",
        sequential=True,
        eps=1e-6,
        contractive=None,
        bc_norm=True,
        groups=1,
        norm="layer",
        norm_eps=1e-5,
    )
    return Options(**{**defaults, **others})


def place_columns(order, rank, d, bc):
    """Return {part: its first column} in this order, and the number of columns; "pad" is unused."""
    widths = {"vectors": rank * d, "gates": rank, "B": bc, "C": bc, "pad": 3}
    firsts, column = {}, 0
    for name in order:
        firsts[name] = column
        column += widths[name]
    firsts.pop("pad", None)
    return firsts, column


def make_problem(
    b=2,
    length=6,
    d=19,
    n=3,
    heads=None,
    order=("vectors", "gates", "B", "C"),
    reading=None,
    without=(),
    y_scale=1.0,
    seed=0,
    **option_values,
):
    """Return layout, options and tensors (fp64) of an FP-Mamba-1 layer, or FP-Mamba-2 with heads.

    reading: number of parts that read y, the first ones of `order`; None: all.
    """
    options = make_options(states=n, **option_values)
    r, groups = options.rank, options.groups
    firsts, columns = place_columns(order, r, d, groups * n)
    k = place_columns(order[:reading], r, d, groups * n)[1]
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = dict(
        raw=draw(b, length, columns),
        weight_y=y_scale * draw(k, d) / d**0.5,
        x=draw(b, length, d),
        dt=F.softplus(draw(b, length, heads or d)),
        A=-0.1 - n * draw(heads).abs() if heads else -0.1 - n * draw(d, n).abs(),
        keep=(draw(b, length) < 0.8).double(),
        gate=torch.sigmoid(draw(b, length, d)),
        D=1 + 0.3 * draw(d),
        norm_weight=1 + 0.3 * draw(d),
        norm_bias=0.2 * draw(d),
        y0=draw(b, d),
        h0=draw(b, heads, d // heads, n) if heads else draw(b, d, n),
    )
    return Layout(**firsts), options, {k: None if k in without else v for k, v in tensors.items()}


def make_rnn_problem(
    b=2, length=6, d=19, order=("vectors", "gates"), reading=None, **option_values
):
    option_values["norm"] = "none"
    layout, options, tensors = make_problem(b, length, d, 1, None, order, reading, **option_values)
    dt = torch.sigmoid(tensors["dt"])
    tensors = {k: tensors[k] for k in ("raw", "weight_y", "x", "keep", "y0")}
    h0 = None if tensors["y0"] is None else tensors["y0"].flip(-1)
    return layout, options, {**tensors, "dt": dt, "A": 1 - dt, "h0": h0}


def solve(compute, layout, options, **tensors):
    """Call a kernel or an oracle."""
    if "keys" in tensors:
        tensors["readout"] = Readout(*(tensors.pop(name) for name in Readout._fields))
    return compute(CellArguments(layout, options, **tensors))


def cast(tensors, dtype):
    return {k: None if v is None else v.to(dtype) for k, v in tensors.items()}


def make_cotangent(y):
    wave = torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device=y.device)
    return wave.reshape(y.shape).sin() + 0.3


def evaluate(compute, problem, dtype=torch.float64, fails=False, **others):
    """Return {"y", "state", "grad raw", …} of a kernel or an oracle.

    The search for the root must fail in a token if and only if `fails`.
    """
    layout, options, tensors = problem
    tensors = {k: None if v is None else v.to(dtype, copy=True) for k, v in tensors.items()}
    names = [k for k, v in tensors.items() if v is not None and k not in NOT_DIFFERENTIATED]
    names = [k for k in names if tensors[k].numel()]
    for name in names:
        tensors[name].requires_grad_()
    y, h, outcome = solve(compute, layout, options, **tensors, **others)
    assert (outcome & FAILED).any() == fails
    grads = torch.autograd.grad(y, [tensors[k] for k in names], make_cotangent(y).to(dtype))
    return {
        "y": y.detach(),
        "state": h.detach(),
        **{f"grad {name}": g for name, g in zip(names, grads)},
    }


def assert_equals_the_loop(problem, tol=1e-9, tol32=3e-4):
    expected = evaluate(oracle_cell.solve_cell, problem)
    assert_close(evaluate(cpu_cell.cell, problem), expected, tol)
    if tol32:
        assert_close(evaluate(cpu_cell.cell, problem, torch.float32), expected, tol32)


@pytest.mark.parametrize("n", [1, 16, 33])
@pytest.mark.parametrize("d", [1, 8, 19, 64])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_values_and_gradients_equal_the_loop(length, d, n):
    tol32 = None if d == 1 else 3e-4  # LayerNorm of a single channel is 0 up to rounding
    assert_equals_the_loop(make_problem(2, length, d, n), tol32=tol32)


@pytest.mark.parametrize("sequential", [True, False], ids=["householder", "dplr"])
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 8])
def test_all_ranks_equal_the_loop(rank, sequential):
    scale = 1.0 if not sequential and rank > 2 else 2.0
    assert_equals_the_loop(make_problem(rank=rank, sequential=sequential, scale=scale))


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
        dict(eps=3.5, rank=2),  # some vectors are shorter, some longer
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
    ],
    ids=str,
)
def test_all_options_equal_the_loop(others):
    assert_equals_the_loop(make_problem(**others))


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
def test_mamba2_equals_the_loop(sizes, rank):
    assert_equals_the_loop(make_problem(norm="rms", rank=rank, without=("norm_bias",), **sizes))


@pytest.mark.parametrize(
    "others",
    [
        dict(),
        dict(rank=3, scale=0.5),
        dict(rank=2, sequential=False, scale=0.5),
        dict(reading=0),
        dict(without=("y0", "keep"), d=64, length=20),
        dict(contractive=0.5, rank=2),
    ],
    ids=str,
)
def test_rnn_equals_the_loop(others):
    assert_equals_the_loop(make_rnn_problem(**{"scale": 1.0, **others}))


# Centroids


def make_centroid_problem(k, without=(), **others):
    """Return a problem with the tensors of k centroids, through which the layer reads y."""
    layout, options, tensors = make_problem(without=without, **others)
    b, length, d = tensors["x"].shape
    generator = torch.Generator().manual_seed(k)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    readout = dict(keys=draw(k, d) / d**0.5, key_bias=draw(k), values=draw(k, d))
    noise = None if "noise" in without else 0.3 * draw(b, length, d)
    return layout, options, {**tensors, **readout, "noise": noise}


@pytest.mark.parametrize(
    "others",
    [
        dict(k=1),
        dict(k=5),
        dict(k=33, rank=2, length=9),
        dict(k=16, d=64),
        dict(k=7, without=("noise",)),
        dict(k=7, without=("keep", "y0", "h0"), b=3),
        dict(k=9),
        dict(k=9, d=24, heads=4, groups=2, norm="rms", without=("norm_bias",)),
    ],
    ids=str,
)
def test_centroids_equal_the_loop(others):
    problem = make_centroid_problem(**others)
    expected = evaluate(oracle_cell.solve_cell, problem)
    assert_close(evaluate(cpu_cell.cell, problem), expected, 1e-9)
    assert_close(evaluate(cpu_cell.cell, problem, torch.float32), expected, 3e-4)


def test_centroids_token_by_token_are_bit_identical():
    layout, options, tensors = make_centroid_problem(k=21, b=3, length=9, d=83)
    y, h, _ = solve(cpu_cell.cell, layout, options, **tensors)
    calls = [slice(t, t + 1) for t in range(9)]
    y_of_calls, state = solve_in_calls(layout, options, tensors, calls)
    assert torch.equal(y_of_calls, y) and torch.equal(state, h)


def test_default_device_of_torch_changes_nothing():
    problem = make_problem()
    expected = evaluate(cpu_cell.cell, problem)
    with torch.device("meta"):
        actual = evaluate(cpu_cell.cell, problem)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def solve_in_calls(layout, options, tensors, calls):
    """Solve a layer in several calls, each for a slice of tokens; return y and the last state."""
    y_before, state, ys = tensors["y0"], tensors["h0"], []
    for tokens in calls:
        part = slice_tensors({**tensors, "y0": y_before, "h0": state}, tokens=tokens)
        y, state, _ = solve(cpu_cell.cell, layout, options, **part)
        y_before = y[:, -1]
        ys.append(y)
    return torch.cat(ys, 1), state


def test_centroids_of_another_width_are_refused():
    layout, options, tensors = make_centroid_problem(k=5)
    tensors["values"] = tensors["values"][:, :-1]
    with pytest.raises(ValueError, match="values is"):
        solve(cpu_cell.cell, layout, options, **tensors)


# Selection of the root


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("D", [1.0, 1e4])
@pytest.mark.parametrize("rank, sequential", [(1, True), (2, True), (2, False), (4, False)])
def test_root_is_the_limit_of_picard(rank, sequential, D, norm):
    """Many of the 300 equations have several roots; at D = 1e4 the output is y only."""
    without = ("keep", "y0", "h0", "norm_bias")
    sizes = dict(b=300, length=1, d=16, n=2, rank=rank)
    others = dict(sequential=sequential, norm=norm, reading=0, without=without)
    layout, options, tensors = make_problem(**sizes, **others)
    tensors["D"] *= D
    y, _, outcome = solve(cpu_cell.cell, layout, options, **tensors)
    expected, _, is_slow = solve(oracle_cell.solve_cell, layout, options, **tensors)
    assert not (outcome & FAILED).any()
    error = (y - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert error[~is_slow].max() < 1e-8
    y32, _, outcome32 = solve(cpu_cell.cell, layout, options, **cast(tensors, torch.float32))
    has_roots = (outcome | outcome32) & FAILED == 0
    error = (y32 - y).abs().amax(-1) / y.abs().amax(-1)
    assert error[has_roots].median() < 1e-6
    assert (error[has_roots] > 1e-2).sum() <= 1  # near a fold, rounding selects the root


def test_gradient_is_limited_near_a_fold(monkeypatch):
    problem = make_problem(
        b=400, length=1, d=16, n=2, reading=0, without=("keep", "y0", "h0"), seed=3
    )
    monkeypatch.setattr(oracle_cell, "MAX_ITERS", 20000)
    expected = evaluate(oracle_cell.solve_cell, problem)
    computed = evaluate(cpu_cell.cell, problem)
    assert_close(computed, expected, 1e-6)  # Picard's root is less exact there
    monkeypatch.setattr(oracle_cell, "MAX_GAIN", math.inf)
    unlimited = evaluate(oracle_cell.solve_cell, problem)["grad x"]
    assert ((unlimited - expected["grad x"]).abs() > 1e-3).any()


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_bisection_finds_roots_that_picard_misses(norm):
    without = ("keep", "y0", "h0", "norm_bias")
    layout, options, tensors = make_problem(
        b=300, length=1, d=16, n=2, rank=4, norm=norm, reading=0, without=without
    )
    _, _, is_slow = solve(oracle_cell.solve_cell, layout, options, **tensors)
    _, _, outcome = solve(cpu_cell.cell, layout, options, **tensors)
    assert is_slow.any() and not (outcome & FAILED).any()


def with_newton_fallback(picard):
    """Wrap oracle_cell's `picard`: if it fails, find a root by Newton from many points."""

    def find_root(phi, start, tol, linear):
        root, failed = picard(phi, start, tol, linear)
        generator = torch.Generator().manual_seed(5)
        for _ in range(100 if failed.any() else 0):
            s = torch.randn(start.shape, generator=generator, dtype=start.dtype)
            for _ in range(20):
                M = torch.eye(s.shape[1]).to(s) - oracle_cell.find_slope(phi, s)
                s = s + torch.linalg.solve_ex(M, (phi(s) - s).unsqueeze(-1))[0].squeeze(-1)
            is_new = failed & ((phi(s) - s).abs().amax(-1) < 1e-12)
            root, failed = torch.where(is_new.unsqueeze(-1), s, root), failed & ~is_new
            if not failed.any():
                break
        return root, failed

    return find_root


def test_repelling_root_has_the_exact_gradient(monkeypatch):
    """The only root of a token repels Picard from all sides; bisection finds it."""
    without = ("keep", "gate", "y0", "h0")
    problem = make_problem(reading=0, without=without, rank=2)
    evaluate(oracle_cell.solve_cell, problem, fails=True)  # Picard finds no root
    monkeypatch.setattr(oracle_cell, "run_picard", with_newton_fallback(oracle_cell.run_picard))
    assert_close(evaluate(cpu_cell.cell, problem), evaluate(oracle_cell.solve_cell, problem), 1e-8)


@pytest.mark.parametrize("b, length", [(0, 3), (2, 0), (0, 0)])
def test_empty_batch_or_sequence(b, length):
    layout, options, tensors = make_problem(b=b, length=length)
    tensors["raw"].requires_grad_()
    tensors["weight_y"].requires_grad_()
    y, h, outcome = solve(cpu_cell.cell, layout, options, **tensors)
    assert y.shape == (b, length, 19)
    assert outcome.shape == (b, length) and outcome.dtype is torch.uint8
    assert torch.equal(h, tensors["h0"])
    y.sum().backward()
    assert not tensors["weight_y"].grad.any() and tensors["raw"].grad.shape == tensors["raw"].shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nan_gives_nan_and_a_failed_outcome(dtype):
    layout, options, tensors = make_problem(b=3, length=4, reading=0, without=("keep",))
    tensors["x"][1, 2, 5] = math.nan
    y, h, outcome = solve(cpu_cell.cell, layout, options, **cast(tensors, dtype))
    failed = outcome & FAILED != 0
    assert y[1, 2:].isnan().all() and h[1].isnan().any() and failed[1, 2:].all()
    assert not failed[[0, 2]].any() and not failed[1, :2].any() and y[[0, 2]].isfinite().all()


# Invariance of the results


def make_long_problem(dtype=torch.float32, **others):
    """Return a problem with several threads and checkpoints, whose d is no multiple of a vector."""
    layout, options, tensors = make_problem(b=11, length=70, d=83, n=16, **others)
    return layout, options, cast(tensors, dtype)


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("others", [dict(), dict(rank=3), dict(reading=3)], ids=str)
def test_batch_does_not_change_a_sequence(others, dtype):
    layout, options, tensors = make_long_problem(dtype, **others)
    whole = compute_with_gradients(layout, options, tensors)
    for rows in (slice(0, 1), slice(1, 3), slice(3, 10)):
        part = compute_with_gradients(layout, options, slice_tensors(tensors, rows=rows))
        assert_same(part, {k: v[rows] for k, v in whole.items()})


def slice_tensors(tensors, rows=slice(None), tokens=slice(None)):
    """Select sequences and tokens of the tensors."""
    shared = ("weight_y", "A", "D", "norm_weight", "norm_bias", "keys", "key_bias", "values")
    per_sequence = ("y0", "h0")
    return {
        k: v if v is None or k in shared else v[rows] if k in per_sequence else v[rows, tokens]
        for k, v in tensors.items()
    }


def compute_with_gradients(layout, options, tensors):
    """Return results and gradients whose loss treats every token alike, whatever the batch."""
    tensors = {k: None if v is None else v.clone() for k, v in tensors.items()}
    names = [k for k in ("raw", "x", "dt", "gate") if tensors.get(k) is not None]
    for name in names:
        tensors[name].requires_grad_()
    y, h, _ = solve(cpu_cell.cell, layout, options, **tensors)
    grads = torch.autograd.grad((y.sin() * 3).sum(), [tensors[k] for k in names])
    return {"y": y.detach(), "state": h, **dict(zip(names, grads))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "others", [dict(), dict(rank=2), dict(d=84, heads=4, groups=2, norm="rms")], ids=str
)
def test_token_by_token_is_bit_identical(others, dtype):
    without = ("norm_bias",) if "norm" in others else ()
    problem = make_problem(**{"b": 3, "length": 20, "d": 83, "n": 16, **others}, without=without)
    layout, options, tensors = problem[0], problem[1], cast(problem[2], dtype)
    y, h, outcome = solve(cpu_cell.cell, layout, options, **tensors)
    calls = [slice(0, 7), *(slice(t, t + 1) for t in range(7, 20))]
    y_of_calls, state = solve_in_calls(layout, options, tensors, calls)
    assert torch.equal(y_of_calls, y) and torch.equal(state, h)
    assert not (outcome & FAILED).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_thread_count_changes_nothing(dtype):
    results, old_threads = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(evaluate(cpu_cell.cell, make_long_problem(dtype), dtype))
    finally:
        torch.set_num_threads(old_threads)
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_forward_without_gradient_is_bit_identical():
    layout, options, tensors = make_long_problem()
    y, h, _ = solve(cpu_cell.cell, layout, options, **tensors)
    with_grad = compute_with_gradients(layout, options, tensors)
    assert not y.requires_grad
    assert torch.equal(y, with_grad["y"]) and torch.equal(h, with_grad["state"])
    with torch.no_grad():
        tensors["x"].requires_grad_()
        assert not solve(cpu_cell.cell, layout, options, **tensors)[0].requires_grad


@pytest.fixture
def fill_memory():
    """Function of a byte, not 255, with which glibc fills the memory that it gives out."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or "LD_PRELOAD" in os.environ:
        pytest.skip("another allocator than glibc's may be in use")
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]

    def fill(byte):
        libc.mallopt(M_PERTURB, ~byte & 255)  # it fills with the complement
        memory = libc.malloc(10**6)
        assert set(ctypes.string_at(memory, 10**6)) == {byte}
        libc.free(memory)

    yield fill
    libc.mallopt(M_PERTURB, 0)


def test_uninitialized_memory_changes_nothing(fill_memory):
    problems = [
        make_problem(d=19, rank=2),
        make_problem(d=24, heads=4, norm="rms", without=("norm_bias",)),
        make_centroid_problem(k=7),
    ]
    computed = []
    for byte in (1, 0x7F):  # floats of 2.4e-38 and 3.4e38
        fill_memory(byte)
        computed.append([evaluate(cpu_cell.cell, problem, torch.float32) for problem in problems])
    for first, second in zip(*computed):
        for name, value in first.items():
            assert value.isfinite().all() and torch.equal(value, second[name]), name


# Adjoint


def test_largest_adjoint_is_reported():
    layout, options, tensors = make_problem(b=3, length=8, without=("keep",), y_scale=2.0)
    adjoint = torch.full((3,), math.nan, dtype=torch.float64)
    computed = evaluate(cpu_cell.cell, (layout, options, tensors), adjoint=adjoint)
    assert (adjoint >= 1).all() and all(v.isfinite().all() for v in computed.values())
    tensors["x"].requires_grad_()
    adjoints = {}
    for scale in (0.0, 1.0, 1000.0):  # the adjoint is relative to the gradient of y
        y, _, _ = solve(cpu_cell.cell, layout, options, **tensors, adjoint=adjoint)
        y.backward(torch.full_like(y, scale))
        adjoints[scale] = adjoint.clone()
    assert torch.equal(adjoints[0.0], torch.zeros_like(adjoint))
    torch.testing.assert_close(adjoints[1000.0], adjoints[1.0])


# Refused arguments


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(options=dict(rank=9)), Unsupported, "rank 9"),
        (dict(options=dict(act="tanh")), ValueError, "tanh"),
        (dict(options=dict(norm="batch")), ValueError, "batch"),
        (dict(layout=dict(B=0)), ValueError, "overlap"),  # with the vectors
        (dict(layout=dict(C=24)), ValueError, "exceed"),  # raw has 26 columns
        (dict(tensors=dict(x=torch.zeros(2, 5, 19))), ValueError, "expected"),
        (dict(tensors=dict(D=torch.zeros(19))), Unsupported, "float32"),
        (dict(tensors=dict(h0=torch.zeros(2, 19, 4).double())), ValueError, "h0"),
    ],
    ids=["rank", "act", "norm", "overlap", "width", "length", "dtype", "state"],
)
def test_invalid_arguments_are_refused(change, error, words):
    layout, options, tensors = make_problem()
    layout = layout._replace(**change.get("layout", {}))
    options = options._replace(**change.get("options", {}))
    with pytest.raises(error, match=words):
        solve(cpu_cell.cell, layout, options, **{**tensors, **change.get("tensors", {})})


def test_half_precision_is_refused():
    layout, options, tensors = make_problem()
    with pytest.raises(Unsupported, match="bfloat16"):
        solve(cpu_cell.cell, layout, options, **cast(tensors, torch.bfloat16))


def test_any_strides():
    def spread(v):
        return None if v is None else torch.stack([v, torch.full_like(v, torch.nan)], -1)[..., 0]

    layout, options, tensors = make_problem(length=9)
    spaced = {k: spread(v) for k, v in tensors.items()}
    assert_same(
        evaluate(cpu_cell.cell, (layout, options, spaced)),
        evaluate(cpu_cell.cell, (layout, options, tensors)),
    )


def test_raw_may_be_a_slice():
    layout, options, tensors = make_problem(length=9)
    wide = torch.full((2, 9, tensors["raw"].shape[-1] + 5), torch.nan, dtype=torch.float64)
    wide[..., 2:-3] = tensors["raw"]
    expected = solve(cpu_cell.cell, layout, options, **tensors)[0]
    tensors["raw"] = wide[..., 2:-3]
    assert torch.equal(solve(cpu_cell.cell, layout, options, **tensors)[0], expected)
