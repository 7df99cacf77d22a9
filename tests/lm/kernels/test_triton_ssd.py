"""Triton's SSD scan against the plain one and a loop: values, states, each gradient by name.

Without a GPU the kernels run in Triton's interpreter (tests/conftest.py sets it).
"""

import inspect

import pytest
import torch

pytest.importorskip("triton")

from lm.kernels import Unsupported
from lm.kernels.triton import ssd as triton_ssd
from lm.kernels.triton.build import INTERPRETED
from lm.model.scan import ssd_scan as plain_scan
from tests.kernels import assert_close, compile_for_gpus, poisoned_memory, skip_where_missing
from tests.oracles import sequential_ssd

DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def poisoned():
    """What torch.empty returns is full of NaN throughout this file."""
    skip_where_missing(triton_ssd)
    with poisoned_memory():
        yield


def inputs(b, length, h, p, g, n, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def r(*shape):
        return torch.randn(*shape, generator=generator)

    tensors = {
        "x": r(b, length, h, p),
        "dt": torch.nn.functional.softplus(r(b, length, h)),
        "A": -torch.exp(r(h)),
        "B": r(b, length, g, n),
        "C": r(b, length, g, n),
        "h0": r(b, h, p, n),
    }
    return {k: v.to(DEVICE, dtype) for k, v in tensors.items()}


def resets(b, length, every=7):
    """Several in a chunk; row 0 has one at t = 0."""
    keep = torch.ones(b, length, device=DEVICE)
    for row in range(b):
        keep[row, row::every] = 0
    return keep


def results(scan, tensors, keep=None):
    """{"y", "final state", "grad x", …} of a scan."""
    tensors = {k: v.clone().requires_grad_() for k, v in tensors.items()}
    y, S = scan(**tensors, keep=keep)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).reshape(y.shape)
    loss = (y * weights).sum() + (S * S).sum() / 2
    grads = torch.autograd.grad(loss, list(tensors.values()))
    named = {f"grad {name}": grad for name, grad in zip(tensors, grads)}
    return {"y": y.detach(), "final state": S.detach(), **named}


def exact(tensors, keep=None, scan=plain_scan):
    """`results` in fp64 of the same, already rounded inputs."""
    return results(scan, {k: v.double() for k, v in tensors.items()}, keep)


@pytest.mark.parametrize(
    "b, length, h, p, g, n",
    [
        (3, 1, 2, 1, 1, 1), (2, 7, 4, 64, 2, 16), (2, 17, 2, 5, 1, 64), (2, 32, 2, 64, 2, 1),
        (1, 33, 4, 20, 2, 8), (1, 70, 2, 33, 1, 16), (1, 40, 1, 128, 1, 128),
    ],
)  # fmt: skip
def test_equals_the_plain_scan_in_value_state_and_every_gradient(b, length, h, p, g, n):
    tensors, keep = inputs(b, length, h, p, g, n), resets(b, length)
    expected = exact(tensors, keep)
    assert_close(results(triton_ssd.ssd_scan, tensors, keep), expected, 2e-5)
    if length < 64:
        assert_close(exact(tensors, keep, sequential_ssd), expected, 1e-12)


@pytest.mark.parametrize("length", [9, 40])
@pytest.mark.parametrize("with_keep", [False, True], ids=["plain", "resets"])
@pytest.mark.parametrize("with_h0", [False, True], ids=["zero", "h0"])
def test_whatever_is_left_out(with_h0, with_keep, length):
    tensors = inputs(1, length, 2, 20, 2, 16)
    if not with_h0:
        del tensors["h0"]
    keep = resets(1, length) if with_keep else None
    ours = results(triton_ssd.ssd_scan, tensors, keep)
    assert all(v.dtype == torch.float32 for v in ours.values())
    assert_close(ours, exact(tensors, keep), 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [9, 40])
def test_low_precision(length, dtype):
    """Products of rounded inputs are exact or in TF32; only the gradients are rounded again (by
    Triton's interpreter towards zero)."""
    tensors, keep = inputs(1, length, 4, 20, 2, 16, dtype), resets(1, length)
    ours, theirs = results(triton_ssd.ssd_scan, tensors, keep), exact(tensors, keep)
    values = ("y", "final state")
    assert all(ours[k].dtype == torch.float32 for k in values)
    assert all(ours[f"grad {k}"].dtype == dtype for k in tensors)
    tol = 2e-5 if DEVICE == "cpu" else 5e-3
    assert_close({k: ours[k] for k in values}, {k: theirs[k] for k in values}, tol)
    assert_close(ours, theirs, 1e-2)


def test_a_mixture_of_dtypes_keeps_each():
    tensors = inputs(1, 20, 4, 20, 2, 16, torch.bfloat16)
    tensors |= {k: tensors[k].float() for k in ("dt", "A", "h0")}
    ours = results(triton_ssd.ssd_scan, tensors, resets(1, 20).bool())
    assert {k: ours[f"grad {k}"].dtype for k in tensors} == {k: v.dtype for k, v in tensors.items()}
    assert_close(ours, exact(tensors, resets(1, 20)), 1e-2)


def test_more_than_one_chunk_in_two_precisions():
    """bf16 makes longer chunks than fp32: both cross several borders here."""
    tensors, keep = inputs(1, 140, 1, 20, 1, 8, torch.bfloat16), resets(1, 140, every=50)
    assert_close(results(triton_ssd.ssd_scan, tensors, keep), exact(tensors, keep), 1e-2)
    single = {k: v.float() for k, v in tensors.items()}  # what makes up grad A nearly cancels
    assert_close(results(triton_ssd.ssd_scan, single, keep), exact(tensors, keep), 1e-4)


@pytest.mark.parametrize("length", [9, 40])
def test_views_are_read_where_they_are(length, monkeypatch):
    """Slices of one projection, as a block makes them; every copy would be noticed."""
    tensors = inputs(2, length, 4, 20, 2, 16)
    expected = results(triton_ssd.ssd_scan, tensors, resets(2, length))
    wide = torch.cat([tensors[k].flatten(2) for k in ("x", "B", "C", "dt")], -1)
    x, B, C, dt = wide.split([80, 32, 32, 4], -1)
    views = dict(x=x.unflatten(2, (4, 20)), B=B.unflatten(2, (2, 16)), C=C.unflatten(2, (2, 16)))
    views |= dict(dt=dt)
    keep = torch.stack([resets(2, length), torch.full((2, length), torch.nan, device=DEVICE)], -1)
    seen = []
    run = triton_ssd._run
    monkeypatch.setattr(
        triton_ssd, "_run", lambda *args: (seen.append(args[-1]["x"].data_ptr()), run(*args))
    )
    y, S = triton_ssd.ssd_scan(**views, A=tensors["A"], h0=tensors["h0"], keep=keep[..., 0])
    assert set(seen) == {wide.data_ptr()}
    assert torch.equal(y, expected["y"]) and torch.equal(S, expected["final state"])


def test_any_strides():
    def spread(v):
        return torch.stack([v, torch.full_like(v, torch.nan)], -1)[..., 0]

    def scan(keep, **tensors):
        spreads = {k: spread(v) for k, v in tensors.items()}
        y, S = triton_ssd.ssd_scan(**spreads, keep=spread(keep))
        return spread(y), spread(S)  # and so the gradients that come back

    tensors, keep = inputs(1, 40, 2, 20, 1, 8), resets(1, 40)
    assert_close(results(scan, tensors, keep), results(triton_ssd.ssd_scan, tensors, keep), 1e-6)


@pytest.mark.parametrize("length", [9, 40])
@pytest.mark.parametrize("of", ["y", "final state", "both"])
def test_gradients_without_strides_and_of_one_output_only(of, length):
    tensors = inputs(2, length, 2, 20, 1, 8)

    def grads(scan, dtype):
        leaves = [v.to(dtype).requires_grad_() for v in tensors.values()]
        y, S = scan(*leaves)
        loss = {"y": y.sum(), "final state": S.sum(), "both": y.sum() + S.sum()}[of]
        found = torch.autograd.grad(loss, leaves, materialize_grads=True)
        return dict(zip(tensors, found))

    ours, theirs = grads(triton_ssd.ssd_scan, torch.float32), grads(plain_scan, torch.float64)
    assert_close(ours, theirs, 2e-5)


def test_without_gradient_and_again_it_computes_the_same_bits():
    tensors, keep = inputs(1, 40, 4, 20, 2, 16), resets(1, 40)
    once, again = (results(triton_ssd.ssd_scan, tensors, keep) for _ in range(2))
    assert all(torch.equal(once[k], again[k]) for k in once)
    y, S = triton_ssd.ssd_scan(**tensors, keep=keep)
    assert not y.requires_grad
    assert torch.equal(y, once["y"]) and torch.equal(S, once["final state"])


def test_a_state_goes_back_in_and_two_halves_make_a_whole():
    tensors = inputs(2, 40, 2, 20, 1, 8)
    y, S = triton_ssd.ssd_scan(**tensors)
    A, state = tensors.pop("A"), tensors.pop("h0")
    halves = []
    for part in (slice(0, 13), slice(13, 40)):
        half, state = triton_ssd.ssd_scan(
            **{k: v[:, part] for k, v in tensors.items()}, A=A, h0=state
        )
        halves.append(half)
    assert_close({"y": torch.cat(halves, 1), "S": state}, {"y": y, "S": S}, 1e-5)


def test_a_reset_forgets_a_fast_decay_stays_finite_and_dt_zero_keeps():
    tensors = inputs(1, 40, 2, 20, 1, 8)
    keep = torch.ones(1, 40, device=DEVICE)
    keep[0, 22] = 0
    tensors["dt"][:, 30:] = 0
    tensors["A"][0] = -300.0  # e^(300·40) overflows: only differences may be exponentiated
    ours = results(triton_ssd.ssd_scan, tensors, keep)
    assert_close(ours, exact(tensors, keep), 1e-4)
    assert (ours["grad h0"][0, 0] == 0).all() and all(v.isfinite().all() for v in ours.values())
    y, S = triton_ssd.ssd_scan(**{**tensors, "h0": tensors["h0"] + 1}, keep=keep)
    assert torch.equal(y[:, 22:], ours["y"][:, 22:]) and torch.equal(S, ours["final state"])
    shorter = {k: v[:, :30] if k in ("x", "dt", "B", "C") else v for k, v in tensors.items()}
    _, before = triton_ssd.ssd_scan(**shorter, keep=keep[:, :30])
    assert_close({"S": before}, {"S": S}, 1e-6)


@pytest.mark.parametrize("b, length", [(0, 4), (2, 0)], ids=["no rows", "no steps"])
def test_nothing_to_do(b, length):
    tensors = inputs(b, length, 2, 5, 1, 3)
    found = results(triton_ssd.ssd_scan, tensors)
    assert found["y"].shape == (b, length, 2, 5)
    assert torch.equal(found["final state"], tensors["h0"])
    assert torch.equal(found["grad h0"], tensors["h0"])  # of ‖S‖²/2
    assert (found["grad A"] == 0).all()


def test_a_short_window_takes_one_launch_each_way(monkeypatch):
    launched, run = [], triton_ssd._run

    def noted(kernel, *args):
        launched.append(kernel.__name__)
        run(kernel, *args)

    monkeypatch.setattr(triton_ssd, "_run", noted)
    results(triton_ssd.ssd_scan, inputs(1, 16, 2, 4, 1, 4))
    assert launched == ["_output", "_backward"]


def test_what_does_not_fit_is_refused():
    t = inputs(2, 4, 4, 5, 2, 3)
    for name in t:
        with pytest.raises(Unsupported, match=rf"^{name} is torch.float64: .*float32"):
            triton_ssd.ssd_scan(**{**t, name: t[name].double()})
    with pytest.raises(ValueError, match=r"^C is \(2, 3, 2, 3\) where \(2, 4, 2, 3\)"):
        triton_ssd.ssd_scan(**{**t, "C": t["C"][:, 1:]})
    with pytest.raises(ValueError, match="a multiple of g"):
        triton_ssd.ssd_scan(**{**t, "B": t["B"].repeat(1, 1, 2, 1)[:, :, :3]})
    with pytest.raises(Unsupported, match=r"n = 129 states: at most 128"):
        triton_ssd.ssd_scan(**inputs(1, 2, 1, 1, 1, 129))
    with pytest.raises(TypeError, match=r"^dt is on meta"):
        triton_ssd.ssd_scan(**{**t, "dt": t["dt"].to("meta")})


ELEMENTS = ("x", "B", "C", "v", "w", "dx", "ddt", "dt", "h0", "first")
SIZES = ("length", "heads", "chunks", "groups")
CONSTEXPRS = ("P", "N", "BP", "BN", "CHUNK", "PRECISION")


def compile_case(kernel, dtype, length, **constexprs):
    """A kernel as it is launched at p = n = 64. constexprs: further ones, of None pointers too."""
    x = torch.empty(1, length, 2, 64, dtype=getattr(torch, dtype))
    B = torch.empty(1, length, 1, 64, dtype=x.dtype)
    keep = x[:, :, 0, 0] if constexprs.pop("keep", True) else None
    shared = triton_ssd._shared(x, x[..., 0], x, B, B, keep, backward=kernel == "_backward")
    known = {"SIZE": 64 * 64, "BLOCK": 512} | {k: v for k, v in shared.items() if k in CONSTEXPRS}
    known |= {} if keep is not None else {"keep": None}
    known |= {k: 1 for k in SIZES if shared[k] == 1}  # as a launch would
    known |= constexprs
    short = {"bfloat16": "bf16", "float32": "fp32"}[dtype]
    signature = {}
    for name in inspect.signature(getattr(triton_ssd, kernel).fn).parameters:
        if name in known:
            signature[name] = "constexpr"
        elif name in SIZES or name[-2:] in ("_b", "_l", "_h", "_g"):
            signature[name] = "i32"
        else:
            signature[name] = f"*{short if name in ELEMENTS else 'fp32'}"
    return {
        "kernel": kernel,
        "signature": signature,
        "constexprs": {k: v for k, v in known.items() if k in signature},
        "options": {k: shared[k] for k in ("num_warps", "num_stages")},
    }


def test_every_kernel_compiles_for_gpus():
    absent = dict(states=None, grad_states=None, dh0=None)
    cases = [
        compile_case("_carry", "bfloat16", 2048, REVERSE=False),
        compile_case("_carry", "float32", 2048, REVERSE=True, first=None),
        compile_case("_states", "bfloat16", 2048, REVERSE=False),
        compile_case("_states", "float32", 2048, REVERSE=True),
        compile_case("_output", "bfloat16", 2048, final=None),
        compile_case("_output", "float32", 16),
        compile_case("_output", "bfloat16", 1, states=None, keep=False),
        compile_case("_backward", "bfloat16", 2048, dh0=None),
        compile_case("_backward", "float32", 16),
        compile_case("_backward", "bfloat16", 1, keep=False, **absent),
    ]
    kernels = {
        name
        for name, made in vars(triton_ssd).items()
        if hasattr(made, "arg_names")
        and made.fn.__module__ == triton_ssd.__name__
        and not _is_helper(made)
    }
    assert {case["kernel"] for case in cases} == kernels
    assert compile_for_gpus("lm.kernels.triton.ssd", cases) == {}


def _is_helper(kernel):
    """Helpers have no program of their own: others call them."""
    return kernel.__name__ in ("_place", "_tile", "_put", "_decays", "_between")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tol", [(torch.float32, 2e-4), (torch.bfloat16, 2e-2)], ids=str)
def test_at_a_real_shape(dtype, tol):
    tensors, keep = inputs(2, 2048, 24, 64, 1, 64, dtype), resets(2, 2048, every=300)
    tensors["dt"] *= 0.1  # so that states reach across chunks
    tensors["C"] /= 8
    assert_close(results(triton_ssd.ssd_scan, tensors, keep), exact(tensors, keep), tol)
