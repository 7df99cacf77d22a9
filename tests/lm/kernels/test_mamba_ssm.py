"""mamba-ssm behind our signatures, by a stand-in for the package that computes plainly."""

import importlib
import re
import sys
import types

import pytest
import torch

pytest.importorskip("triton")

from lm import kernels
from lm.kernels import Unsupported
from lm.kernels.triton import build as triton_build
from lm.model.scan import selective_scan_plain, ssd_decays, ssd_scan
from tests.kernels import assert_close
from tests.oracles import scan_inputs, sequential_scan

PACKAGE = "mamba_ssm"
NAMES = ("", ".ops", ".ops.triton", ".ops.selective_scan_interface", ".ops.triton.ssd_combined")


def selective_scan_fn(u, delta, A, B, C, return_last_state=False):
    """Channels before time; the gradient of the last state is lost, as in the real one."""
    (b, d, length), n = u.shape, A.shape[1]
    assert return_last_state and delta.shape == u.shape and A.shape == (d, n)
    assert B.shape == C.shape == (b, n, length)
    y, h = sequential_scan(*(t.transpose(1, 2) for t in (u, delta)), A, *(t.mT for t in (B, C)))
    return y.transpose(1, 2), torch.zeros_like(h) * h + h.detach()


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, initial_states=None, seq_idx=None, return_final_states=False
):
    """One sequence index after another; the first carries on the initial state if it is 0."""
    assert return_final_states and chunk_size >= 16
    assert seq_idx is None or (seq_idx.dtype == torch.int32 and seq_idx.shape == x.shape[:2])
    keep = None
    if seq_idx is not None:
        before = torch.cat([torch.zeros_like(seq_idx[:, :1]), seq_idx[:, :-1]], 1)
        keep = (seq_idx == before).to(x.dtype)
    return ssd_scan(x, dt, A, B, C, initial_states, keep, decays=ssd_decays(dt, A, keep))


@pytest.fixture
def stand_in(monkeypatch):
    """The package; adapters are imported anew while it is there."""
    modules = {name: types.ModuleType(PACKAGE + name) for name in NAMES}
    modules[NAMES[3]].selective_scan_fn = selective_scan_fn
    modules[NAMES[4]].mamba_chunk_scan_combined = mamba_chunk_scan_combined
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, PACKAGE + name, module)
    adapters = ("lm.kernels.mamba_ssm.scan", "lm.kernels.mamba_ssm.ssd")
    for name in adapters:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield modules
    for name in adapters:
        sys.modules.pop(name, None)


def adapter(name):
    return importlib.import_module(f"lm.kernels.mamba_ssm.{name}")


def results(scan, tensors, keep=None, state=True):
    """{"y", "final state", "grad x", …}; state: the gradient is also that of the final state."""
    tensors = {k: v.clone().requires_grad_() for k, v in tensors.items()}
    y, h = scan(**tensors, keep=keep)
    weights = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
    loss = (y * weights).sum() + ((h * h).sum() / 2 if state else 0)
    grads = torch.autograd.grad(loss, list(tensors.values()))
    named = {f"grad {name}": grad for name, grad in zip(tensors, grads)}
    return {"y": y.detach(), "final state": h.detach(), **named}


def test_the_selective_scan(stand_in):
    tensors = scan_inputs(2, 9, 5, 3, torch.float32)
    h0, scan = tensors.pop("h0"), adapter("scan").selective_scan
    expected = results(selective_scan_plain, tensors, state=False)
    assert_close(results(scan, tensors, state=False), expected, 1e-5)
    with pytest.raises(Unsupported, match="no state before it and no resets"):
        scan(**tensors, h0=h0)
    with pytest.raises(Unsupported, match="no state before it and no resets"):
        scan(**tensors, keep=torch.ones(2, 9))
    with pytest.raises(RuntimeError, match="no gradient of its final state"):
        results(scan, tensors)
    with pytest.raises(Unsupported, match=r"torch\.float64"):
        scan(**{k: v.double() for k, v in tensors.items()})
    with pytest.raises(Unsupported, match="n = 257"):
        scan(**{k: v for k, v in scan_inputs(1, 2, 1, 257, torch.float32).items() if k != "h0"})


@pytest.mark.parametrize("with_keep", [False, True], ids=["plain", "resets"])
@pytest.mark.parametrize("with_h0", [False, True], ids=["zero", "h0"])
def test_the_chunked_scan(stand_in, with_h0, with_keep):
    r = torch.Generator().manual_seed(0)
    shapes = dict(x=(2, 9, 4, 3), B=(2, 9, 2, 5), C=(2, 9, 2, 5), dt=(2, 9, 4), h0=(2, 4, 3, 5))
    tensors = {k: torch.randn(*shape, generator=r) for k, shape in shapes.items()}
    tensors |= dict(dt=tensors["dt"].abs(), A=-torch.rand(4, generator=r))
    if not with_h0:
        del tensors["h0"]
    keep = torch.ones(2, 9) if with_keep else None
    if with_keep:
        keep[0, 0] = keep[:, 4] = keep[:, 5] = 0  # row 0 forgets its h0
    scan = adapter("ssd").ssd_scan
    assert_close(results(scan, tensors, keep), results(ssd_scan, tensors, keep), 1e-5)
    with pytest.raises(Unsupported, match=r"torch\.float64"):
        scan(**{k: v.double() for k, v in tensors.items()})


def test_what_does_not_fit_the_gpu_is_unsupported(stand_in):
    def out_of_resources(*args, **options):
        raise triton_build.OutOfResources(300, 200, "shared memory")

    stand_in[NAMES[4]].mamba_chunk_scan_combined = out_of_resources
    x = torch.ones(1, 2, 1, 1)
    with pytest.raises(Unsupported, match="does not fit this GPU"):
        adapter("ssd").ssd_scan(x, x[..., 0], -torch.ones(1), x, x)


@pytest.mark.parametrize("name", ["scan", "ssd"])
def test_the_function_is_probed_not_the_package(name, stand_in, monkeypatch):
    monkeypatch.setattr(triton_build, "INTERPRETED", True)  # on the CPU
    own, function = adapter(name), {"scan": NAMES[3], "ssd": NAMES[4]}[name]
    function = next(v for v in vars(stand_in[function]).values() if callable(v))
    assert own.usable() == (True, "")
    probe = triton_build._what_is_wrong.__wrapped__

    def missing(*args, **options):
        raise NotImplementedError("built without its kernels")

    monkeypatch.setattr(own, function.__name__, missing)
    why = "mamba-ssm's kernels fail: NotImplementedError: built without its kernels"
    assert probe(own._self_check, "mamba-ssm's kernels") == why

    def off(x, *args, **options):
        y, h = function(x, *args, **options)
        return y * 1.001, h

    monkeypatch.setattr(own, function.__name__, off)
    assert "something else than plain PyTorch" in probe(own._self_check, "mamba-ssm's kernels")


def test_products_in_tf32_are_allowed_where_those_of_pytorch_are(stand_in, monkeypatch):
    monkeypatch.setattr(triton_build, "INTERPRETED", True)
    own = adapter("ssd")

    def rounded(x, *args, **options):
        y, S = mamba_chunk_scan_combined(x, *args, **options)
        return y * 1.001, S

    monkeypatch.setattr(own, "mamba_chunk_scan_combined", rounded)
    probe = triton_build._what_is_wrong.__wrapped__
    assert probe(own._self_check, "") != ""
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert probe(own._self_check, "") == ""


def test_why_the_dispatcher_cannot_use_it(monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    load = kernels._load.__wrapped__
    for operation in ("selective_scan", "ssd_scan"):
        name = f"lm.kernels.{kernels.MODULES['mamba_ssm'][operation]}"
        monkeypatch.delitem(sys.modules, name, raising=False)
        module, why = load("mamba_ssm", operation)
        assert module is None and re.fullmatch(r"mamba_ssm[.\w]* is not installed", why)
