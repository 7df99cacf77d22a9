"""`fprnn doctor`: what is absent, crashes or hangs is found, in time, with what mends it."""

import http.server
import importlib.util
import socket
import subprocess
import sys
import threading
import time

import pytest

from lm.cli import doctor
from lm.common.errors import install_command
from tests.running import ENV, ROOT

CRASH = "import os\nos.abort()\n"
HANG = "import time\ntime.sleep(100)\n"
RAISE = "raise ImportError('libcudart.so.99: cannot open shared object file')\n"


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A function (package, source): what a probe's process imports in the package's stead."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'broken'}:{ROOT}")

    def put(package, source):
        folder = tmp_path / "broken" / package
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text(source)

    return put


@pytest.fixture
def without(monkeypatch):
    """A function that makes packages look as if they were not installed."""
    find = importlib.util.find_spec

    def hide(*packages):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda n, *a: None if n in packages else find(n, *a)
        )

    return hide


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A function (name → what it does) that leaves only these programs on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def put(**scripts):
        for name, text in scripts.items():
            path = folder / name.replace("_", "-")
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(0o755)

    return put


def run_doctor(*args, **environment):
    command = [sys.executable, "-m", "lm", "doctor", *args]
    return subprocess.run(
        command, env=ENV | environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_this_machine_trains():
    """Offline and in seconds."""
    began = time.monotonic()
    done = run_doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < 60
    assert "Training works here." in done.stdout and "BAD" not in done.stdout
    for name in ("torch", "kernels", "ranks", "deepspeed", "packages", "hub"):
        assert f"  {name} " in done.stdout


def test_a_machine_without_anything_has_a_report_all_the_same(tmp_path):
    """Not one package of ours can be imported: exit status 1, what to do, and no traceback."""
    for package in ("torch", "deepspeed", "pydantic", "yaml", "rich", "transformers", "numpy"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(RAISE)
    done = run_doctor(PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert "BAD   torch" in done.stdout and "libcudart.so.99: cannot open" in done.stdout
    assert "BAD   deepspeed" in done.stdout and install_command("deepspeed") in done.stdout
    assert "Training does not work here: mend torch, deepspeed" in done.stdout
    assert "  kernels " not in done.stdout


@pytest.mark.parametrize(
    "package, source, words",
    [
        ("torch", CRASH, "it crashed (SIGABRT)"),
        ("torch", HANG, "no answer within 2 s"),
        ("deepspeed", RAISE, "libcudart.so.99"),
    ],
)
def test_an_import_that_crashes_hangs_or_fails(broken, package, source, words):
    broken(package, source)
    began = time.monotonic()
    look = {"torch": doctor.torch_and_gpus, "deepspeed": lambda t: [doctor.deepspeed(t)]}
    (finding,) = look[package](2.0 if source == HANG else 60.0)
    assert finding.state == "bad" and words in finding.text and "pip install" in finding.cure
    assert source != HANG or time.monotonic() - began < 20


def test_packages_that_are_not_installed(without):
    without("deepspeed", "wandb", "lm_eval", "pydantic")
    extras = doctor.packages()
    assert extras.state == "bad" and extras.cure.endswith(f"'{ROOT}[train,eval]'")
    assert all(name in extras.text for name in ("deepspeed", "lm_eval", "pydantic", "wandb"))
    without("wandb")
    assert doctor.packages().state == "note", "training does without it"


@pytest.mark.parametrize("seen, listed, state, words", [
    ([], "", "note", "runs on 2 CPU threads"),
    ([], "echo GPU 0; echo GPU 1", "bad", "the machine has 2, torch 2.13.0 sees none"),
    (["NVIDIA H100, 80 GiB"], "exit 1", "ok", "CUDA 12.8: NVIDIA H100, 80 GiB"),
])  # fmt: skip
def test_gpus(programs, monkeypatch, seen, listed, state, words):
    facts = {"version": "2.13.0", "devices": seen, "cuda": "12.8", "threads": 2}
    monkeypatch.setattr(doctor, "try_in_process", lambda *_: (facts, ""))
    if listed:
        programs(nvidia_smi=listed)
    _, finding = doctor.torch_and_gpus(1)
    assert finding.state == state and words in finding.text


def test_kernels_that_do_not_compile_are_named(monkeypatch):
    facts = {"device": "cpu", "slow": ["cell"], "words": "plain PyTorch (cpu: g++ is missing)"}
    monkeypatch.setattr(doctor, "try_in_process", lambda *_: (facts, ""))
    finding = doctor.kernels(1)
    assert finding.state == "note" and "g++ is missing" in finding.text
    assert "apt-get install" in finding.cure
    monkeypatch.undo()
    monkeypatch.setenv("FPRNN_KERNELS", "nonsense")
    finding = doctor.kernels(60)
    assert finding.state == "bad" and "FPRNN_KERNELS is `nonsense`" in finding.text


@pytest.mark.slow
def test_processes_that_do_not_reach_each_other(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonsense0")
    finding = doctor.ranks(60)
    assert finding.state == "bad" and "GLOO_SOCKET_IFNAME=lo" in finding.cure


GLOO_WORKS = "two processes reach each other by gloo"


@pytest.mark.parametrize(
    "gpus, failing, state, text, cure",
    [
        (0, None, "ok", GLOO_WORKS, ""),
        (1, None, "ok", f"{GLOO_WORKS}; NCCL works on one GPU", ""),
        (2, None, "ok", f"{GLOO_WORKS}; NCCL works between two GPUs", ""),
        (1, "gloo", "bad", "two processes do not reach each other by gloo: it hangs", "GLOO"),
        (1, "nccl", "bad", f"{GLOO_WORKS}, but NCCL fails: it hangs", "NCCL_DEBUG"),
    ],
)
def test_each_backend_has_a_trial_and_a_limit_of_its_own(
    monkeypatch, gpus, failing, state, text, cure
):
    limits = {}

    def tried(name, timeout):
        limits[name] = timeout
        return {"processes": 2 if name == "gloo" else gpus}, "it hangs" if name == failing else ""

    monkeypatch.setattr(doctor, "try_in_process", tried)
    finding = doctor.ranks(7)
    assert finding[1:3] == (state, text) and finding.cure.startswith(cure)
    names = ["gloo"] if failing == "gloo" else ["gloo", "nccl"]
    assert limits == dict.fromkeys(names, 7)


class NotFound(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_error(404)

    def log_message(self, *_):
        pass


def test_the_hub(monkeypatch):
    """It answers; nobody listens; it never answers; it is not to be asked."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    server = http.server.HTTPServer(("127.0.0.1", 0), NotFound)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    assert doctor.hub() == doctor.Finding("hub", "ok", f"{address} answers")
    server.shutdown()
    server.server_close()
    assert doctor.hub().state == "note" and "refused" in doctor.hub().text

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(doctor, "HUB_TIMEOUT_S", 0.3)
        began = time.monotonic()
        assert "timed out" in doctor.hub().text and time.monotonic() - began < 3
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert doctor.hub().cure == "unset HF_HUB_OFFLINE"
