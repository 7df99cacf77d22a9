"""Helpers of the Triton kernels: reasons why they cannot run, and refused arguments."""

import inspect
import re

import pytest
import torch

pytest.importorskip("triton")

import triton

from lm.kernels import Unsupported
from lm.kernels.checks import deviation
from lm.kernels.triton import build as triton_build
from lm.kernels.triton.build import INTERPRETED, check, launch, make_dense

FILES = ("triton_cell", "roots", "scan")


@pytest.mark.parametrize("name", [pytest.param("roots", marks=pytest.mark.slow), "scan"])
def test_self_check_ignores_the_callers_modes(name):
    module = pytest.importorskip(f"lm.kernels.triton.{name}")
    probe = triton_build._find_fault.__wrapped__
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    saved = []
    watched = torch.autograd.graph.saved_tensors_hooks(saved.append, saved.append)
    with watched, torch.device("meta"):  # the hooks of a checkpoint
        assert probe(module._self_check, "the Triton kernels") == "" and not saved
    with torch.inference_mode(), torch.device("meta"):
        assert probe(module._self_check, "the Triton kernels") == ""
    assert module.usable() == (True, "")


def test_reasons_why_kernels_cannot_run(monkeypatch):
    monkeypatch.setattr(triton_build, "INTERPRETED", True)
    answer = triton_build.usable(lambda: float("nan"))
    assert answer == (
        False,
        "the Triton kernels differ from plain PyTorch by nan times the allowed difference",
    )
    assert "by 2.0e+00 times" in triton_build.usable(lambda: 2.0)[1]
    answer = triton_build.usable(lambda: 1 / 0, "mamba-ssm's kernels")
    assert answer == (False, "mamba-ssm's kernels fail: ZeroDivisionError: division by zero")
    monkeypatch.setattr(triton_build, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert triton_build.usable(lambda: 0.0) == (False, "there is no CUDA device")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    why = "the GPU has compute capability 7.5, the Triton kernels need 8.0"
    assert triton_build.usable(lambda: 0) == (False, why)


def test_self_check_runs_once():
    calls = []

    def self_check():
        calls.append(torch.empty(1).device.type)
        return 0.0

    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    assert triton_build.usable(self_check) == triton_build.usable(self_check) == (True, "")
    assert calls == ["cpu" if INTERPRETED else "cuda"]


def test_deviation_is_relative_and_preserves_nan():
    ours, theirs = [torch.tensor([100.0, 1.0]), torch.tensor(1.0)], [torch.tensor([100.0, 2.0])]
    theirs.append(torch.tensor(1.0))
    assert deviation(ours, theirs, 0.1) == pytest.approx(0.1)
    ours[1] = torch.tensor(torch.nan)
    assert not deviation(ours, theirs, 0.1) < 1e9


def test_wrong_tensors_are_refused():
    device = "cpu" if INTERPRETED else "cuda"
    t = torch.zeros(2, 3, device=device)
    check(x=(t, (2, 3)), h0=(None, (7,)))
    with pytest.raises(Unsupported, match=r"^x is torch.float64: Triton reads float32"):
        check(x=(t.double(), (2, 3)))
    with pytest.raises(ValueError, match=r"^B is \(2, 3\), but \(3, 2\) is expected"):
        check(B=(t, (3, 2)))
    with pytest.raises(TypeError, match=r"^B is on meta"):
        check(x=(t, (2, 3)), B=(t.to("meta"), (2, 3)))


def test_impossible_launches_are_unsupported():
    def kernel(*args):
        raise triton.runtime.errors.OutOfResources(300, 200, "shared memory")

    x = torch.zeros(1)
    launch({(0, 3): None}, (0, 3), x)  # nothing to do
    with pytest.raises(Unsupported, match=r"\(1, 65536\) programs"):
        launch({}, (1, 65536), x)
    with pytest.raises(Unsupported, match="does not fit this GPU: out of resource: shared memory"):
        launch(type("K", (dict,), {"__name__": "k"})({(1,): kernel}), (1,), x)


def test_rows_are_copied_only_if_necessary():
    t = torch.zeros(2, 5, 20)
    for part in (t, t[..., 4:9], t[:, :, :1], None):
        assert make_dense(part) is part
    assert make_dense(t[..., ::2]).is_contiguous()


@pytest.mark.parametrize("name", FILES)
def test_files_use_the_shared_helpers(name):
    source = inspect.getsource(pytest.importorskip(f"lm.kernels.triton.{name}"))
    assert not re.search(r"is_available|get_device_capability|os\.environ|functools\.cache", source)
