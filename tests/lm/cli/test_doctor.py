"""`fprnn doctor` reports missing packages, crashes and hangs in time, each with a fix."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from lm import kernels
from lm.cli import doctor
from tests.running import ENV, ROOT

CRASH = "import os\nos.abort()\n"
HANG = "import time\ntime.sleep(100)\n"
RAISE = "raise ImportError('libcudart.so.99: cannot open shared object file')\n"


def run_doctor(**environment):
    command = [sys.executable, "-m", "lm", "doctor"]
    return subprocess.run(
        command, env=ENV | environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_doctor_reports_within_a_minute_that_this_machine_can_train():
    start = time.monotonic()
    done = run_doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - start < 60
    assert "Training works here." in done.stdout and "bad " not in done.stdout
    for name in doctor.FIXES:
        assert f"  {name} " in done.stdout


def test_doctor_reports_a_machine_without_packages(tmp_path):
    """If no required package can be imported, the exit status is 1, without a traceback."""
    for package in ("torch", "deepspeed", "pydantic", "yaml", "rich", "transformers", "numpy"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(RAISE)
    done = run_doctor(PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert "bad   torch" in done.stdout and "libcudart.so.99: cannot open" in done.stdout
    assert "Training does not work here: fix torch" in done.stdout


@pytest.mark.parametrize(
    "package, source, expected_text",
    [
        ("torch", CRASH, "it crashed (SIGABRT)"),
        ("torch", HANG, "no answer within 2 s"),
        ("deepspeed", RAISE, "libcudart.so.99"),
    ],
)
def test_import_that_crashes_hangs_or_fails(tmp_path, monkeypatch, package, source, expected_text):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(source)
    start = time.monotonic()
    finding = doctor.run_check(package, 2.0 if source == HANG else 60.0)
    assert finding.state == "bad" and expected_text in finding.text
    assert "pip install" in finding.fix
    assert source != HANG or time.monotonic() - start < 20


@pytest.mark.parametrize(
    "gpu_count, nvidia_smi, state, expected_text",
    [
        (0, "exit 1", "ok", "runs on 2 CPU threads"),
        (0, "echo GPU 0; echo GPU 1", "bad", "nvidia-smi lists 2 GPU(s), but torch 2.13.0 sees"),
        (1, "exit 1", "ok", "CUDA 12.8: NVIDIA H100, 80 GiB"),
    ],
)
def test_torch_check_compares_gpus_with_nvidia_smi(
    tmp_path, monkeypatch, gpu_count, nvidia_smi, state, expected_text
):
    """`gpu_count` GPUs are visible to torch; `nvidia_smi` is the script that runs instead."""
    device = SimpleNamespace(name="NVIDIA H100", total_memory=80 * 2**30)
    for name, value in {
        "cuda.is_available": gpu_count > 0,
        "cuda.device_count": gpu_count,
        "cuda.get_device_properties": device,
        "cuda.is_bf16_supported": True,
        "ones": torch.zeros(8),
        "get_num_threads": 2,
    }.items():
        monkeypatch.setattr(f"torch.{name}", lambda *_, _value=value, **__: _value)
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{nvidia_smi}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found_state, text, *_ = doctor._check_torch()
    assert found_state == state and expected_text in text


def test_kernels_that_do_not_compile_are_named(monkeypatch):
    backends = "plain PyTorch (cpu: g++ is missing)"
    monkeypatch.setattr(kernels, "describe_backends", lambda *_: backends)
    monkeypatch.setattr(kernels, "find", lambda name, like: None if name == "cell" else name)
    state, text, fix = doctor._check_kernels()
    assert state == "note" and text.startswith("cell in plain") and "g++ is missing" in text
    assert "apt-get install" in fix
    monkeypatch.undo()
    monkeypatch.setenv("FPRNN_KERNELS", "nonsense")
    finding = doctor.run_check("kernels", 60)
    assert finding.state == "bad" and "FPRNN_KERNELS is `nonsense`" in finding.text


@pytest.mark.slow
def test_processes_that_cannot_communicate(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonsense0")
    finding = doctor.run_check("gloo", 60)
    assert finding.state == "bad" and "GLOO_SOCKET_IFNAME=lo" in finding.fix


@pytest.mark.parametrize(
    "gpu_count, checked_count, expected_text",
    [
        (0, 0, "not needed without a GPU"),
        (1, 1, "works on one GPU"),
        (2, 2, "works between two GPUs"),
        (8, 2, "works between two GPUs"),
    ],
)
def test_nccl_is_checked_on_at_most_two_gpus(monkeypatch, gpu_count, checked_count, expected_text):
    calls = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpu_count)
    monkeypatch.setattr(doctor, "_test_all_reduce", lambda *args: calls.append(args))
    assert doctor._check_nccl() == ("ok", expected_text)
    assert calls == ([("nccl", checked_count)] if checked_count else [])
