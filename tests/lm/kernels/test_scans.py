"""The selective scan of every backend: optional arguments, NaN, resets, dtypes, refusals."""

import importlib

import pytest
import torch

from lm.kernels import Unsupported
from lm.model.scan import selective_scan_plain
from tests.kernels import assert_close, poisoned_memory, skip_if_missing
from tests.oracles import scan_inputs


def evaluate(scan, tensors, keep=None):
    """{"y", "final state", "grad x", …} of a scan."""
    tensors = {k: v.detach().clone().requires_grad_() for k, v in tensors.items()}
    keep = keep.to(tensors["x"].dtype) if keep is not None else None
    y, h = scan(**tensors, keep=keep)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).reshape(y.shape)
    grads = torch.autograd.grad((y * weights).sum() + (h * h).sum() / 2, list(tensors.values()))
    named = {f"grad {name}": g for name, g in zip(tensors, grads)}
    return {"y": y.detach(), "final state": h.detach(), **named}


@pytest.fixture(params=["cpu", "triton"])
def scan(request, monkeypatch):
    """Return the scan of a backend; Triton's uses chunks of 16 steps for long inputs."""
    if request.param == "triton":
        pytest.importorskip("triton")
    module = importlib.import_module(f"lm.kernels.{request.param}.scan")
    skip_if_missing(module)
    if request.param == "triton":
        chunk_length = lambda b, length, d, n: 16 if length > 30 else length  # noqa: E731
        monkeypatch.setattr(module, "_chunk_length", chunk_length)
    with poisoned_memory():
        yield module.selective_scan


@pytest.fixture
def inputs(scan):
    """Return a function of batch, length, channels and states that makes the arguments."""
    device = "cpu"
    if (
        "triton" in scan.__module__
        and not importlib.import_module("lm.kernels.triton.build").INTERPRETED
    ):
        device = "cuda"
    return lambda *sizes: {k: v.to(device).float() for k, v in scan_inputs(*sizes).items()}


@pytest.mark.parametrize("name", ["x", "dt"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_stays_in_its_channel(name, bad, scan, inputs):
    t = inputs(2, 36, 20, 3)
    clean, clean_h = scan(**t)
    t[name][1, 7, 2] = bad
    y, h = scan(**t)
    reached = torch.zeros_like(y, dtype=torch.bool)
    reached[1, 7:, 2] = True
    assert torch.equal(~y.isfinite(), reached)
    assert torch.equal(y[~reached], clean[~reached])
    assert not h[1, 2].isfinite().any() and torch.equal(h[0], clean_h[0])


def test_reset_forgets_the_state_and_zero_dt_keeps_it(scan, inputs):
    t = inputs(1, 40, 20, 4)
    keep = torch.ones_like(t["x"][..., 0])
    keep[0, 20] = 0
    t["dt"][:, 33:] = 0
    y, h = scan(**t, keep=keep)
    t["h0"] = t["h0"] + 1
    other, other_h = scan(**t, keep=keep)
    assert torch.equal(y[:, 20:], other[:, 20:]) and torch.equal(h, other_h)
    assert not torch.equal(y[:, :20], other[:, :20])
    t = {k: v[:, :33] if k in ("x", "dt", "B", "C") else v for k, v in t.items()}
    assert torch.equal(scan(**t, keep=keep[:, :33])[1], h)


def test_scan_without_gradient_is_bit_identical(scan, inputs):
    t = inputs(2, 20, 20, 16)
    y, h = scan(**t)
    with_grad = scan(**t | {"x": t["x"].clone().requires_grad_()})
    assert not y.requires_grad and with_grad[0].requires_grad
    assert torch.equal(y, with_grad[0]) and torch.equal(h, with_grad[1])
    halves, state = [], t["h0"]
    for part in (slice(0, 13), slice(13, 20)):
        own = {k: t[k][:, part] for k in ("x", "dt", "B", "C")}
        half, state = scan(**own, A=t["A"], h0=state)
        halves.append(half)
    assert state.transpose(1, 2).is_contiguous()
    assert torch.equal(torch.cat(halves, 1), y) and torch.equal(state, h)


@pytest.mark.parametrize("b, length", [(0, 4), (2, 0)], ids=["no rows", "no steps"])
def test_empty_scan(b, length, scan, inputs):
    t = inputs(b, length, 5, 3)
    computed = evaluate(scan, t)
    assert computed["y"].shape == (b, length, 5) and torch.equal(computed["final state"], t["h0"])
    assert torch.equal(computed["grad h0"], t["h0"])  # of ‖h‖²/2
    assert not computed["grad A"].any()


def run_plain_scan(tensors, keep=None):
    """`evaluate` of the plain scan in fp64."""
    keep = None if keep is None else keep.double()
    return evaluate(selective_scan_plain, {k: v.double() for k, v in tensors.items()}, keep)


@pytest.mark.parametrize("length", [21, 34], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("with_keep", [False, True], ids=["plain", "resets"])
@pytest.mark.parametrize("with_h0", [False, True], ids=["zero", "h0"])
def test_optional_arguments_may_be_left_out(with_h0, with_keep, length, scan, inputs):
    t, keep = inputs(1, length, 20, 2), None
    if not with_h0:
        del t["h0"]
    if with_keep:
        keep = torch.ones_like(t["x"][..., 0])
        keep[0, 0] = 0
        keep[:, 4::5] = keep[:, 5::5] = 0
    assert_close(evaluate(scan, t, keep), run_plain_scan(t, keep), 2e-5)


def test_expanded_and_partial_gradients(scan, inputs):
    t = inputs(2, 18, 5, 3)
    for name, output in (("x", 0), ("dt", 1), ("h0", 0)):
        ours = t | {name: t[name].clone().requires_grad_()}
        theirs = {k: v.double() for k, v in t.items()}
        theirs[name].requires_grad_()
        scan(**ours)[output].sum().backward()
        selective_scan_plain(**theirs)[output].sum().backward()
        assert_close({name: ours[name].grad}, {name: theirs[name].grad}, 1e-5)


def test_wrong_shapes_are_refused(scan, inputs):
    t = inputs(2, 4, 5, 3)
    with pytest.raises(Unsupported, match=r"^dt is torch.float64"):
        scan(**{**t, "dt": t["dt"].double()})
    with pytest.raises(ValueError, match=r"C is \(2, 3, 3\), but \(2, 4, 3\)"):
        scan(**{**t, "C": t["C"][:, 1:]})
    with pytest.raises(ValueError, match=r"keep is \(2, 3\), but \(2, 4\)"):
        scan(**t, keep=t["x"][:, 1:, 0])
