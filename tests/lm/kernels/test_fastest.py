"""The choice by measurement, with times that are given; and the file that keeps them."""

import json
import types

import pytest
import torch

from lm import kernels
from lm.kernels import fastest
from lm.kernels.cpu import build as cpu_build
from lm.kernels.cpu import scan as cpu

FOUND = [("triton", cpu), ("mamba_ssm", cpu_build)]  # any modules: their files are in the key


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The file, in a cache directory of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fprnn/kernels/fastest.json"


class Timer:
    """Milliseconds by module; an exception is raised."""

    def __init__(self, *times):
        self.times, self.calls = dict(zip((module for _, module in FOUND), times)), []

    def __call__(self, operation, module):
        self.calls.append(operation)
        if isinstance(self.times[module], Exception):
            raise self.times[module]
        return self.times[module]


def names(found):
    return [backend for backend, _ in found]


def test_the_faster_comes_first_and_is_measured_once(cache):
    timer = Timer(2.0, 1.0)
    for _ in range(3):
        assert names(fastest.first("ssd_scan", FOUND, timer)) == ["mamba_ssm", "triton"]
    assert len(timer.calls) == 2
    ((key, times),) = json.loads(cache.read_text()).items()
    assert times == {"triton": 2.0, "mamba_ssm": 1.0}
    assert torch.__version__ in key and "ssd_scan" in key
    assert names(fastest.first("selective_scan", FOUND, Timer(1.0, 2.0))) == ["triton", "mamba_ssm"]
    assert len(json.loads(cache.read_text())) == 2  # the first is still there
    assert [p.name for p in cache.parent.iterdir()] == [cache.name]


@pytest.mark.parametrize("what", ["gpu", "torch", "version", "kernel"])
def test_another_gpu_or_version_is_measured_anew(what, monkeypatch, tmp_path):
    fastest.first("ssd_scan", FOUND, Timer(2.0, 1.0))
    found = FOUND
    if what == "gpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another")
    elif what == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9")
    elif what == "version":
        monkeypatch.setattr(fastest.importlib.metadata, "version", lambda name: "9.9")
    else:
        changed = tmp_path / "cpu.py"
        changed.write_text("another")
        module = types.ModuleType("changed")
        module.__file__ = str(changed)
        found = [("triton", module), FOUND[1]]
    again = Timer(1.0, 2.0)
    again.times[found[0][1]] = 1.0
    assert names(fastest.first("ssd_scan", found, again)) == ["triton", "mamba_ssm"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "\x00", '{"KEY": 3}', '{"KEY": {"triton": 1.0}}',
             '{"KEY": {"triton": "1", "mamba_ssm": NaN}}'],
)  # fmt: skip
def test_a_damaged_file_only_means_measuring_again(text, cache):
    cache.parent.mkdir(parents=True)
    cache.write_text(text.replace('"KEY"', json.dumps(fastest._key("ssd_scan", FOUND))))
    assert names(fastest.first("ssd_scan", FOUND, Timer(2.0, 1.0))) == ["mamba_ssm", "triton"]
    assert names(fastest.first("ssd_scan", FOUND, Timer(1.0, 2.0))) == ["mamba_ssm", "triton"]


def test_a_file_that_cannot_be_written_only_means_measuring_again(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    timer = Timer(2.0, 1.0)
    for _ in range(2):
        assert names(fastest.first("ssd_scan", FOUND, timer)) == ["mamba_ssm", "triton"]
    assert len(timer.calls) == 4


def test_one_that_fails_comes_last_and_is_not_recorded(cache):
    failing = Timer(RuntimeError("out of memory"), 5.0)
    assert names(fastest.first("ssd_scan", FOUND, failing)) == ["mamba_ssm", "triton"]
    assert not cache.exists()
    both = Timer(RuntimeError(), RuntimeError())
    assert names(fastest.first("ssd_scan", FOUND, both)) == names(FOUND)


@pytest.mark.parametrize("operation", ["selective_scan", "ssd_scan"])
def test_the_inputs_are_those_of_the_scans_and_draw_no_random_numbers(operation):
    from lm.model import scan

    state = torch.get_rng_state()
    given = fastest.inputs(operation, 2, 5, 6, 3, 2, 4, 3)
    assert torch.equal(state, torch.get_rng_state())
    y, _ = getattr(scan, operation)(*given)
    assert y.shape == given[0].shape and y.isfinite().all() and y.abs().max() > 1e-3


def test_the_dispatcher_asks_for_the_order_unless_a_name_decides(monkeypatch):
    modules = dict(FOUND)
    monkeypatch.setattr(kernels, "_candidates", lambda *_: list(modules.items()))
    monkeypatch.setattr(fastest, "first", lambda operation, found: found[::-1])
    find = kernels._find.__wrapped__
    asked = ("ssd_scan", "cuda", torch.float32, False)
    assert find(*asked, "auto") == (cpu_build, cpu)
    assert find(*asked, "triton") == (cpu, cpu_build)


@pytest.mark.gpu
@pytest.mark.parametrize("operation", ["selective_scan", "ssd_scan"])
def test_a_real_measurement(operation):
    module = pytest.importorskip(f"lm.kernels.{kernels.MODULES['triton'][operation]}")
    assert 0 < fastest.milliseconds(operation, module) < 1000
