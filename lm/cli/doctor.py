"""`fprnn doctor`: what works on this machine, what is missing, and the command that mends it.

Nothing heavy is imported here: an import that may crash or hang is tried in a process of its own,
within a time limit.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from lm.common.errors import EXTRAS, install_command
from lm.common.secrets import CREDENTIALS, mask_credentials

TIMEOUT_S = 60.0  # of a trial; an import from a cold network disk is slow
COMPILATION_S = 300.0  # of the CPU kernels at first use, as lm/kernels/cpu/build.py waits for it
HUB_TIMEOUT_S = 3.0
INSTALL_TORCH = "pip install torch, the build for this machine's driver (nvidia-smi names its CUDA)"
INSTALL_GCC = "apt-get install -y g++ (or load the cluster's module, or conda install gxx)"
# Packages of the extra `train` without which only something that a config may ask for is missing.
OPTIONAL = ("matplotlib", "wandb", "tensorboard", "datasets", "pyarrow")


class Finding(NamedTuple):
    """One thing that was looked at."""

    name: str
    state: str  # "ok"; "note": training does without it; "bad": it does not
    text: str
    cure: str = ""  # the command that mends it


def examine(timeout: float = TIMEOUT_S) -> list[Finding]:
    """Look at everything, all at once.

    Args:
        timeout: Seconds for a trial.
    """
    looks: tuple[Callable[[], list[Finding]], ...] = (
        lambda: torch_and_gpus(timeout),
        lambda: [kernels(timeout)],
        lambda: [ranks(timeout)],
        lambda: [deepspeed(timeout)],
        lambda: [packages(), hub()],
    )
    with ThreadPoolExecutor(len(looks)) as pool:
        findings = [finding for part in pool.map(lambda look: look(), looks) for finding in part]
    if findings[0].state == "bad":  # nothing that needs torch can work
        findings = [f for f in findings if f.name not in ("kernels", "ranks")]
    return findings


def try_in_process(name: str, timeout: float) -> tuple[dict, str]:
    """Run the function `_try_NAME` of this file in a process of its own.

    Returns:
        What the function returns, and why it failed ("" if it did not).
    """
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


def torch_and_gpus(timeout: float) -> list[Finding]:
    """Check that torch works, and sees the GPUs that the machine has."""
    facts, why = try_in_process("torch", timeout)
    if why:
        return [Finding("torch", "bad", f"it does not work: {why}", INSTALL_TORCH)]
    torch = Finding("torch", "ok", facts["version"])
    if facts["devices"]:
        return [torch, Finding("GPU", "ok", f"CUDA {facts['cuda']}: {'; '.join(facts['devices'])}")]
    if cards := _count_cards():
        text = f"the machine has {cards}, torch {facts['version']} sees none"
        return [torch, Finding("GPU", "bad", text, INSTALL_TORCH)]
    return [torch, Finding("GPU", "note", f"none: training runs on {facts['threads']} CPU threads")]


def _count_cards() -> int:
    """Return how many GPUs `nvidia-smi -L` lists."""
    try:
        done = subprocess.run(("nvidia-smi", "-L"), capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU") for line in done.stdout.splitlines())


def _try_torch() -> dict:
    import torch

    devices = []
    if torch.cuda.is_available():
        torch.ones(8, device="cuda").sum().item()  # a driver that is too old fails only here
        cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        no_bf16 = "" if torch.cuda.is_bf16_supported() else ", no bf16: train.precision fp32"
        devices = [f"{d.name}, {d.total_memory / 2**30:.0f} GiB{no_bf16}" for d in cards]
    facts = {"version": torch.__version__, "cuda": torch.version.cuda, "devices": devices}
    return {**facts, "threads": torch.get_num_threads()}


def kernels(timeout: float) -> Finding:
    """Try which faster backends work."""
    facts, why = try_in_process("kernels", max(timeout, COMPILATION_S))
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


def ranks(timeout: float) -> Finding:
    """Check that processes of this machine can sum a tensor, by every backend that training uses.

    Args:
        timeout: Seconds for the trial of one backend.
    """
    _, why = try_in_process("gloo", timeout)
    if why:
        text = f"two processes do not reach each other by gloo: {why}"
        cure = "GLOO_SOCKET_IFNAME=lo (on one machine; else its network, see `ip link`)"
        return Finding("ranks", "bad", text, cure)
    text = "two processes reach each other by gloo"
    facts, why = try_in_process("nccl", timeout)
    if why:
        cure = "NCCL_DEBUG=INFO says more; NCCL_SOCKET_IFNAME or NCCL_P2P_DISABLE=1 may help"
        return Finding("ranks", "bad", f"{text}, but NCCL fails: {why}", cure)
    if facts["processes"]:
        text += f"; NCCL works {'on one GPU' if facts['processes'] == 1 else 'between two GPUs'}"
    return Finding("ranks", "ok", text)


def _try_gloo() -> dict:
    return _try_backend("gloo", 2)


def _try_nccl() -> dict:
    """Try NCCL on two GPUs, or on the only one, because DeepSpeed starts NCCL there as well."""
    import torch

    return _try_backend("nccl", min(2, torch.cuda.device_count()))


def _try_backend(backend: str, processes: int) -> dict:
    """Sum a tensor over so many new processes; none for 0."""
    import torch

    if processes:
        with tempfile.TemporaryDirectory() as folder:
            args = (backend, str(Path(folder) / "store"), processes)
            torch.multiprocessing.spawn(_sum_of_ones, args, nprocs=processes)
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
    """Check that the engine can be imported."""
    facts, why = try_in_process("deepspeed", timeout)
    if why:
        text = f"it does not work: {why}"
        return Finding("deepspeed", "bad", text, install_command("deepspeed"))
    return Finding("deepspeed", "ok", facts["version"])


def _try_deepspeed() -> dict:
    from lm.training import engine

    return {"version": engine.deepspeed_version()}


def packages() -> Finding:
    """Find out what of the extras is not installed."""
    missing = [
        name
        for name, extra in EXTRAS.items()
        if extra != "serve" and importlib.util.find_spec(name) is None
    ]
    if not missing:
        return Finding("packages", "ok", "all of the extras train and eval")
    is_needed = any(EXTRAS[name] == "train" and name not in OPTIONAL for name in missing)
    text, cure = f"not installed: {', '.join(missing)}", install_command(*missing)
    return Finding("packages", "bad" if is_needed else "note", text, cure)


def hub() -> Finding:
    """Find out whether the hub answers, within seconds."""
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


def report(findings: list[Finding]) -> str:
    """Write the findings for a person: a line each, what mends it below, a verdict last."""
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
    """Return whether everything that training needs is there."""
    return all(f.state != "bad" for f in findings)
