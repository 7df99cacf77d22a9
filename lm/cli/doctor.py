"""What works on this machine, what is missing, and the command that mends it.

Nothing heavy is imported here: what may crash or hang is tried in a process of its own, within a
time limit.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from lm.common.errors import EXTRAS, install_command
from lm.common.files import OutputError, check_folder
from lm.common.secrets import CREDENTIALS, mask_credentials

TIMEOUT_S = 60.0  # of a trial; an import from a cold network disk is slow
COMPILATION_S = 300.0  # of the CPU kernels at first use, as lm/kernels/cpu/build.py waits for it
HUB_TIMEOUT_S = 3.0
GIB = 2**30
INSTALL_TORCH = "pip install torch, the build for this machine's driver (nvidia-smi names its CUDA)"
INSTALL_GCC = "apt-get install -y g++ (or load the cluster's module, or conda install gxx)"
# mamba-ssm is compiled against the torch that is there, which an isolated build would not see.
INSTALL_MAMBA = (
    "MAMBA_KEEP_CUDA_BUILD=TRUE pip install --no-build-isolation 'causal-conv1d>=1.5'"
    " 'mamba-ssm>=2.2' (after torch; with the nvcc of torch.version.cuda)"
)
# Packages of the extra `train` without which only something that a config may ask for is missing.
OPTIONAL = ("sentencepiece", "matplotlib", "wandb", "tensorboard", "datasets", "pyarrow")


class Finding(NamedTuple):
    """One thing that was looked at."""

    name: str
    state: str  # "ok"; "note": training does without it; "bad": it does not
    text: str
    cure: str = ""  # the command that mends it


def examine(out_dir: str | Path = "runs", timeout: float = TIMEOUT_S) -> list[Finding]:
    """Look at everything, at once.

    Args:
        out_dir: where runs are to be written. timeout: seconds for a trial.
    """
    looks = [
        lambda: [python()],
        lambda: _torch_and_what_needs_it(timeout),
        lambda: [deepspeed(timeout)],
        packages,
        lambda: [hub()],
        lambda: [disk(out_dir), memory()],
    ]
    with ThreadPoolExecutor(len(looks)) as pool:
        return [finding for part in pool.map(lambda look: look(), looks) for finding in part]


def _torch_and_what_needs_it(timeout: float) -> list[Finding]:
    findings = torch_and_gpus(timeout)
    if findings[0].state == "bad":
        return findings
    has_gpu = any(finding.name == "GPU" and finding.state == "ok" for finding in findings)
    looks = (lambda: kernels(timeout), lambda: ranks(timeout, has_gpu))
    with ThreadPoolExecutor(len(looks)) as pool:
        return [*findings, *pool.map(lambda look: look(), looks)]


def tried(name: str, timeout: float) -> tuple[dict, str]:
    """Run the function `_try_NAME` of this file in a process → (what it returns, why it failed)."""
    code = f"import json; from lm.cli import doctor; print(json.dumps(doctor._try_{name}()))"
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return {}, f"no answer within {timeout:.0f} s"
    if done.returncode < 0:
        return {}, f"it crashed ({signal.Signals(-done.returncode).name})"
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {}, lines[-1].strip()[:300] if lines else f"exit status {done.returncode}"
    return json.loads(done.stdout.splitlines()[-1]), ""


def python() -> Finding:
    """The versions that pyproject.toml allows."""
    version = sys.version_info[:3]
    text = f"{'.'.join(map(str, version))} ({sys.executable})"
    if (3, 11) <= version[:2] < (3, 13):
        return Finding("python", "ok", text)
    return Finding("python", "bad", text, "use Python 3.11 or 3.12")


def torch_and_gpus(timeout: float) -> list[Finding]:
    """Whether torch works, and sees the GPUs that the machine has."""
    facts, why = tried("torch", timeout)
    if why:
        return [Finding("torch", "bad", f"it does not work: {why}", INSTALL_TORCH)]
    torch = Finding("torch", "ok", facts["version"])
    if facts["devices"]:
        return [torch, Finding("GPU", "ok", f"CUDA {facts['cuda']}: {'; '.join(facts['devices'])}")]
    listed = _said("nvidia-smi", "-L")
    if listed.startswith("GPU"):
        text = f"the machine has {len(listed.splitlines())}, torch {facts['version']} sees none"
        return [torch, Finding("GPU", "bad", text, INSTALL_TORCH)]
    return [torch, Finding("GPU", "note", f"none: training runs on {facts['threads']} CPU threads")]


def _try_torch() -> dict:
    import torch

    devices = []
    if torch.cuda.is_available():
        torch.ones(8, device="cuda").sum().item()  # a driver that is too old fails only here
        cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        no_bf16 = "" if torch.cuda.is_bf16_supported() else ", no bf16: train.precision fp32"
        devices = [f"{d.name}, {d.total_memory / GIB:.0f} GiB{no_bf16}" for d in cards]
    facts = {"version": torch.__version__, "cuda": torch.version.cuda, "devices": devices}
    return {**facts, "threads": torch.get_num_threads()}


def kernels(timeout: float) -> Finding:
    """Which faster backends work, by trying them."""
    facts, why = tried("kernels", max(timeout, COMPILATION_S))
    if why:
        return Finding("kernels", "bad", f"trying them failed: {why}", "FPRNN_KERNELS=plain")
    if not facts["slow"]:
        return Finding("kernels", "ok", facts["words"])
    text = f"{' and '.join(facts['slow'])} in plain PyTorch, which is slower: {facts['words']}"
    cure = "pip install 'triton>=3.6'" if facts["device"] == "cuda" else INSTALL_GCC
    return Finding("kernels", "note", text, cure)


def _try_kernels() -> dict:
    import torch

    from lm import kernels

    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = kernels.available(device)  # first, because it checks all kernels side by side
    like = torch.empty(1, device=device)
    needed = {"cuda": ("selective_scan", "ssd_scan", "cell"), "cpu": ("selective_scan", "cell")}
    slow = [name for name in needed[device] if kernels.find(name, like) is None]
    return {"device": device, "slow": slow, "words": words}


def ranks(timeout: float, has_gpu: bool) -> Finding:
    """Check that processes of this machine can sum a tensor, by every backend that training uses.

    Args:
        timeout: Seconds for the trial of one backend.
        has_gpu: Whether NCCL is tried as well as gloo.
    """
    _, why = tried("gloo", timeout)
    if why:
        cure = "GLOO_SOCKET_IFNAME=lo (on one machine; else its network, see `ip link`)"
        return Finding(
            "ranks", "bad", f"two processes do not reach each other by gloo: {why}", cure
        )
    text = "two processes reach each other by gloo"
    if has_gpu:
        facts, why = tried("nccl", timeout)
        if why:
            cure = "NCCL_DEBUG=INFO says more; NCCL_SOCKET_IFNAME or NCCL_P2P_DISABLE=1 may help"
            return Finding("ranks", "bad", f"{text}, but NCCL fails: {why}", cure)
        text += f"; NCCL works {'on one GPU' if facts['processes'] == 1 else 'between two GPUs'}"
    return Finding("ranks", "ok", text)


def _try_gloo() -> dict:
    return _try_backend("gloo", 2)


def _try_nccl() -> dict:
    """Try NCCL on two GPUs, or on the only one, because DeepSpeed starts NCCL there as well."""
    import torch

    return _try_backend("nccl", min(2, torch.cuda.device_count()))


def _try_backend(backend: str, processes: int) -> dict:
    """Sum a tensor over so many new processes."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        torch.multiprocessing.spawn(_sum_of_ones, (backend, store, processes), nprocs=processes)
    return {"processes": processes}


def _sum_of_ones(rank: int, backend: str, store: str, count: int) -> None:
    import torch
    import torch.distributed as dist

    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=count)
    ones = torch.ones(4, device=f"cuda:{rank}" if backend == "nccl" else "cpu")
    dist.all_reduce(ones)
    if ones.tolist() != [float(count)] * 4:
        raise RuntimeError(f"by {backend} the sum of {count} ones was {ones.tolist()}")
    dist.destroy_process_group()


def deepspeed(timeout: float) -> Finding:
    """Whether the engine can be imported."""
    facts, why = tried("deepspeed", timeout)
    if why:
        text = f"it does not work: {why}"
        return Finding("deepspeed", "bad", text, install_command("deepspeed"))
    return Finding("deepspeed", "ok", facts["version"])


def _try_deepspeed() -> dict:
    from lm.training import engine

    return {"version": engine.deepspeed_version()}


def packages() -> list[Finding]:
    """What of the extras is missing, and of what makes the kernels."""
    missing = [name for name, of in EXTRAS.items() if of != "serve" and not _installed(name)]
    needed = [n for n in missing if EXTRAS[n] == "train" and n not in OPTIONAL]
    findings = [Finding("packages", "ok", "all of the extras train and eval")]
    if missing:
        text, cure = f"not installed: {', '.join(missing)}", install_command(*missing)
        findings = [Finding("packages", "bad" if needed else "note", text, cure)]
    if not (_installed("causal_conv1d") and _installed("mamba_ssm")):
        text = "not installed: Mamba's own layers are slower on a GPU without"
        findings.append(Finding("mamba-ssm", "note", text, INSTALL_MAMBA))
    if not shutil.which("g++") and not shutil.which("clang++"):
        text = "not found: the CPU's kernels are not compiled"
        findings.append(Finding("g++", "note", text, INSTALL_GCC))
    return findings


def hub() -> Finding:
    """Whether the hub answers, within seconds."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return Finding("hub", "note", "not asked: HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE")
    address = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    shown = mask_credentials(address)
    try:
        # urllib takes credentials for a part of the host; without them any answer will do.
        request = urllib.request.Request(CREDENTIALS.sub("", address), method="HEAD")
        urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        pass  # an answer all the same
    except (OSError, ValueError) as e:
        why = mask_credentials(str(getattr(e, "reason", e)))
        text = f"{shown} does not answer ({why}): fineweb and tokenizers of the hub need it"
        cure = "take data.path and a tokenizer's folder from a disk; HF_ENDPOINT=… names a mirror"
        return Finding("hub", "note", text, cure)
    return Finding("hub", "ok", f"{shown} answers")


def disk(folder: str | Path) -> Finding:
    """Whether runs can be written there, and how much is free."""
    folder = Path(folder)
    cure = "name another folder: out_dir=… (fprnn doctor --out-dir …)"
    try:
        check_folder(folder)
        there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
        free = shutil.disk_usage(there).free / GIB
    except (OutputError, OSError) as e:
        return Finding("out_dir", "bad", str(e), cure)
    text = f"{folder}: {free:.0f} GiB free"
    if free < 1:
        return Finding("out_dir", "bad", text, cure)
    if free < 20:
        text += "; a 160M run keeps 3 checkpoints of about 2 GiB, and its tokenised data"
        return Finding("out_dir", "note", text)
    return Finding("out_dir", "ok", text)


def memory() -> Finding:
    """RAM that can still be had, and /dev/shm, through which NCCL and ranks exchange data."""
    lines = [line.split() for line in _text("/proc/meminfo").splitlines()]
    kib = {line[0].rstrip(":"): int(line[1]) for line in lines if len(line) > 1}
    total, free = (kib.get(key, 0) / 2**20 for key in ("MemTotal", "MemAvailable"))
    limit = _text("/sys/fs/cgroup/memory.max").strip()
    text = f"{free:.0f} of {total:.0f} GiB free" if total else "not known"
    if limit.isdigit() and total and int(limit) / GIB < total:
        text += f"; this container may have {int(limit) / GIB:.0f} GiB"
    if total and free < 2:
        return Finding("memory", "bad", text, "end other processes, or ask for more (--mem=…)")
    shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else GIB
    if shared < GIB:
        text += f"; /dev/shm has only {shared / 2**20:.0f} MiB: NCCL on several GPUs may fail"
        return Finding("memory", "note", text, "docker run --shm-size=8g …")
    return Finding("memory", "ok", text)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _said(*command: str) -> str:
    """What a program prints; "" where there is none, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def report(findings: list[Finding]) -> str:
    """The findings for a person: a line each, what mends it below, a verdict last."""
    width = max(len(f.name) for f in findings)
    marks = {"ok": "ok  ", "note": "note", "bad": "BAD "}
    lines = []
    for f in findings:
        lines.append(f"{marks[f.state]}  {f.name:<{width}}  {f.text}")
        if f.cure:
            lines.append(f"{'':{width + 8}}→ {f.cure}")
    bad = [f.name for f in findings if f.state == "bad"]
    if bad:
        return "\n".join([*lines, f"\nTraining does not work here: mend {', '.join(bad)} (→)."])
    return "\n".join([*lines, "\nTraining works here. `note`: optional."])


def works(findings: list[Finding]) -> bool:
    """Whether everything that training needs is there."""
    return all(f.state != "bad" for f in findings)
