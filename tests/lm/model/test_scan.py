"""The chunked scan against the step-by-step recurrence: outputs, states, every gradient by name."""

import pytest
import torch

from lm.model import scan
from lm.model.scan import causal_conv, linear_scan, ssd_decays
from lm.model.scan import selective_scan_plain as selective_scan
from lm.model.scan import ssd_scan_plain as ssd_scan
from tests.oracles import scan_inputs, sequential_scan, sequential_ssd

NAMES = ["x", "dt", "A", "B", "C", "h0"]


def draw_inputs(*size_and_dtype):
    return {k: v.requires_grad_() for k, v in scan_inputs(*size_and_dtype).items()}


def assert_close(name, ours, theirs, tol):
    scale = theirs.abs().max().clamp_min(1e-3)
    error = ((ours.double() - theirs).abs().max() / scale).item()
    assert error < tol, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("length", [1, 2, 3, 7, 16, 17, 63, 100])
@pytest.mark.parametrize("n", [1, 5, 16])
@pytest.mark.parametrize("with_keep", [False, True], ids=["plain", "resets"])
def test_equals_the_recurrence_in_value_state_and_every_gradient(length, n, with_keep):
    t = draw_inputs(2, length, 6, n)
    keep = None
    if with_keep:
        keep = (torch.rand(2, length, generator=torch.Generator().manual_seed(1)) > 0.3).double()
    results = []
    for fn in (selective_scan, sequential_scan):
        y, h = fn(*t.values(), keep)
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
        loss = (y * weights).sum() + (h * h).sum()
        results.append((y, h, torch.autograd.grad(loss, list(t.values()))))
    assert_close("y", results[0][0], results[1][0], 1e-12)
    assert_close("final state", results[0][1], results[1][1], 1e-12)
    for name, ours, theirs in zip(NAMES, results[0][2], results[1][2]):
        assert_close(f"grad {name}", ours, theirs, 1e-11)


@pytest.mark.parametrize("dtype,tol", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_low_precision_inputs_are_computed_in_fp32(dtype, tol):
    t = draw_inputs(2, 50, 8, 4)
    low = {k: v.detach().to(dtype).requires_grad_() for k, v in t.items()}
    exact = {k: v.detach().double().requires_grad_() for k, v in low.items()}
    y, _ = selective_scan(*low.values())
    assert y.dtype == torch.float32
    y_exact, _ = sequential_scan(*exact.values())
    assert_close("y", y, y_exact, 2e-5)
    ours = torch.autograd.grad(y.sum(), list(low.values()))
    theirs = torch.autograd.grad(y_exact.sum(), list(exact.values()))
    for name, a, b in zip(NAMES, ours, theirs):
        assert_close(f"grad {name}", a, b, tol)


def test_autocast_does_not_reach_inside():
    t = draw_inputs(1, 20, 4, 3, torch.float32)
    y, _ = selective_scan(*t.values())
    with torch.autocast("cpu", torch.bfloat16):
        y_autocast, _ = selective_scan(*t.values())
        (grad,) = torch.autograd.grad(y_autocast.sum(), [t["x"]])
    assert torch.equal(y, y_autocast)
    assert torch.equal(grad, torch.autograd.grad(y.sum(), [t["x"]])[0])


def test_small_memory_limit_gives_the_same_numbers(monkeypatch):
    t = draw_inputs(2, 33, 7, 3)
    whole = torch.autograd.grad(selective_scan(*t.values())[0].square().sum(), list(t.values()))
    channel_bytes = 4 * (2 * 33 * 3) * 8  # four tensors (b,l,n) of 8 bytes
    monkeypatch.setattr(scan, "MAX_TEMPORARY_BYTES", 2 * channel_bytes)  # two channels per slice
    sliced = torch.autograd.grad(selective_scan(*t.values())[0].square().sum(), list(t.values()))
    for name, a, b in zip(NAMES, sliced, whole):
        assert_close(f"grad {name}", a, b, 1e-13)


def test_nothing_of_size_bldn_is_kept_for_the_backward():
    b, length, d, n = 2, 256, 8, 16
    saved_sizes = []

    def pack(t):
        saved_sizes.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        selective_scan(*draw_inputs(b, length, d, n).values())
    assert max(saved_sizes, default=0) < b * length * d * n / 4


def test_does_not_loop_over_every_time_step(monkeypatch):
    calls = []
    original = torch.addcmul
    monkeypatch.setattr(torch, "addcmul", lambda *a: calls.append(1) or original(*a))
    selective_scan(*draw_inputs(1, 1024, 2, 2).values())
    assert len(calls) == 3 * 32  # two passes over the 32 steps of a chunk, one over the chunks


def test_large_decays_neither_overflow_nor_lose_gradients():
    t = draw_inputs(1, 40, 3, 2)
    with torch.no_grad():
        t["dt"] *= 200
    y, h = selective_scan(*t.values())
    grads = torch.autograd.grad(y.sum() + h.sum(), list(t.values()))
    assert all(torch.isfinite(g).all() for g in (y, h, *grads))


@pytest.mark.parametrize("length", [1, 2, 5, 20])
def test_causal_conv_with_one_segment_equals_the_plain_convolution(length):
    torch.manual_seed(0)
    x, w, bias = torch.randn(2, length, 3), torch.randn(3, 1, 4), torch.randn(3)
    segments = torch.zeros(2, length, dtype=torch.long)
    torch.testing.assert_close(causal_conv(x, w, bias, segments), causal_conv(x, w, bias))


def test_causal_conv_does_not_cross_documents():
    torch.manual_seed(0)
    x, w, bias = torch.randn(1, 9, 3), torch.randn(3, 1, 4), torch.randn(3)
    segments = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])
    separate = torch.cat([causal_conv(x[:, :4], w, bias), causal_conv(x[:, 4:], w, bias)], 1)
    torch.testing.assert_close(causal_conv(x, w, bias, segments), separate)


def ssd_inputs(b, length, heads, p, groups, n, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)

    def r(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    tensors = {
        "x": r(b, length, heads, p),
        "dt": torch.nn.functional.softplus(r(b, length, heads)),
        "A": -torch.exp(r(heads)),
        "B": r(b, length, groups, n),
        "C": r(b, length, groups, n),
        "h0": r(b, heads, p, n),
    }
    return {k: v.to(dtype).requires_grad_() for k, v in tensors.items()}


@pytest.mark.parametrize("length,chunk", [(1, 4), (4, 4), (12, 4), (13, 4), (13, 64), (30, 7)])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("state", [False, True], ids=["zero_state", "initial_state"])
@pytest.mark.parametrize("with_keep", [False, True], ids=["plain", "resets"])
def test_ssd_equals_the_recurrence(length, chunk, groups, state, with_keep):
    t = ssd_inputs(2, length, 4, 3, groups, 5)
    names = list(t) if state else list(t)[:-1]
    h0 = t["h0"] if state else None
    keep = None
    if with_keep:
        keep = (torch.rand(2, length, generator=torch.Generator().manual_seed(1)) > 0.3).double()
    arguments = [t[k] for k in ("x", "dt", "A", "B", "C")]
    results = []
    for fn, extra in ((ssd_scan, {"chunk": chunk}), (sequential_ssd, {})):
        y, S = fn(*arguments, h0, keep, **extra)
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
        loss = (y * weights).sum() + (S * S).sum()
        results.append((y, S, torch.autograd.grad(loss, [t[k] for k in names])))
    assert_close("y", results[0][0], results[1][0], 1e-12)
    assert_close("final state", results[0][1], results[1][1], 1e-12)
    for name, ours, theirs in zip(names, results[0][2], results[1][2]):
        assert_close(f"grad {name}", ours, theirs, 1e-11)


def test_a_short_sequence_is_a_chunk_of_its_own_length():
    """Words of three tokens, padded to 64, cost as much as words of 64."""
    t = ssd_inputs(1, 3, 2, 3, 1, 4)
    assert ssd_decays(t["dt"], t["A"])[0].shape == (1, 1, 2, 3, 3)


def test_ssd_with_large_rates():
    t = ssd_inputs(1, 70, 2, 3, 1, 4)
    arguments = [t[k] for k in ("x", "dt", "A", "B", "C")]
    with torch.no_grad():
        t["dt"] *= 300
    y, S = ssd_scan(*arguments)
    grads = torch.autograd.grad(y.sum() + S.sum(), arguments)
    assert all(torch.isfinite(v).all() for v in (y, S, *grads))


@pytest.mark.parametrize("length", [1, 2, 5, 16, 17, 50])
def test_linear_scan_equals_the_recurrence(length):
    g = torch.Generator().manual_seed(0)
    a, u = (torch.randn(2, length, 3, generator=g, dtype=torch.float64) for _ in range(2))
    h0 = torch.randn(2, 3, generator=g, dtype=torch.float64)
    a = torch.sigmoid(a)
    a[0, length // 2] = 0  # a document starts
    tensors = [t.requires_grad_() for t in (a, u, h0)]
    h, expected = h0, []
    for t in range(length):
        h = a[:, t] * h + u[:, t]
        expected.append(h)
    expected = torch.stack(expected, 1)
    ours = linear_scan(*tensors)
    assert_close("h", ours, expected, 1e-13)
    weights = torch.linspace(-1, 1, ours.numel(), dtype=ours.dtype).reshape(ours.shape)
    pairs = [torch.autograd.grad((y * weights).sum(), tensors) for y in (ours, expected)]
    for name, x, y in zip(["a", "u", "h0"], *pairs):
        assert_close(f"grad {name}", x, y, 1e-12)
    assert torch.autograd.gradcheck(linear_scan, tuple(tensors))
