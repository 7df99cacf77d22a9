"""`fprnn doctor`: check that training works on this machine, and print how to fix what does not.

Every check runs in its own process with a time limit, because an import may crash or hang.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from lm.common.errors import install_command

TIMEOUT_S = 60.0  # of a check: an import from a cold network disk is slow
# Compiling the CPU kernels at first use; lm/kernels/cpu/build.py has the same limit.
COMPILATION_TIMEOUT_S = 300.0
INSTALL_TORCH = "pip install torch, the build for this machine's driver (nvidia-smi names its CUDA)"
INSTALL_GCC = "apt-get install -y g++ (or load the cluster's module, or conda install gxx)"
# Check → the fix to print if it crashes, hangs or fails. The function `_check_NAME` runs the check.
FIXES = {
    "torch": INSTALL_TORCH,
    "kernels": "FPRNN_KERNELS=plain",
    "gloo": "GLOO_SOCKET_IFNAME=lo (on one machine; otherwise an interface that `ip link` lists)",
    "nccl": "NCCL_DEBUG=INFO prints details; NCCL_SOCKET_IFNAME or NCCL_P2P_DISABLE=1 may help",
    "deepspeed": install_command("deepspeed"),
}


class Finding(NamedTuple):
    """Result of a check.

    Attributes:
        name: Name of the check.
        state: `ok`; `note` if training works without it; `bad` if training does not work.
        text: Explanation in a sentence.
        fix: A command that solves the problem, or "".
    """

    name: str
    state: str
    text: str
    fix: str = ""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "doctor",
        help="check that training works on this machine, and print how to fix what does not",
        description="Check everything that training needs on this machine, in seconds and without"
        " a network. The exit status is 0 if training works, and 1 if something must be fixed"
        " first.",
    )
    command.set_defaults(run_command=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    findings = run_checks()
    print(format_findings(findings))
    return 0 if can_train(findings) else 1


def run_checks(timeout: float = TIMEOUT_S) -> list[Finding]:
    """Run all checks in parallel. If torch fails, return only its finding.

    Args:
        timeout: Time limit of a check in seconds; compiling the kernels may take longer.
    """
    limits = dict.fromkeys(FIXES, timeout) | {"kernels": max(timeout, COMPILATION_TIMEOUT_S)}
    with ThreadPoolExecutor(len(limits)) as pool:
        findings = list(pool.map(run_check, limits, limits.values()))
    return findings[:1] if findings[0].state == "bad" else findings


def run_check(name: str, timeout: float) -> Finding:
    """Run the function `_check_NAME` of this file in a new process."""
    code = f"import json; from lm.cli import doctor; print(json.dumps(doctor._check_{name}()))"
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return Finding(name, "bad", f"no answer within {timeout:.0f} s", FIXES[name])
    if not done.returncode:
        return Finding(name, *json.loads(done.stdout.splitlines()[-1]))
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    reason = lines[-1].strip()[:300] if lines else f"exit status {done.returncode}"
    if done.returncode < 0:
        reason = f"it crashed ({signal.Signals(-done.returncode).name})"
    return Finding(name, "bad", f"it does not work: {reason}", FIXES[name])


def _check_torch() -> tuple[str, ...]:
    """Check that torch works and sees all GPUs of the machine."""
    import torch

    if torch.cuda.is_available():
        torch.ones(8, device="cuda").sum().item()  # only this fails if the driver is too old
        cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        no_bf16 = "" if torch.cuda.is_bf16_supported() else ", no bf16: train.precision fp32"
        devices = [f"{d.name}, {d.total_memory / 2**30:.0f} GiB{no_bf16}" for d in cards]
        return "ok", f"{torch.__version__}, CUDA {torch.version.cuda}: {'; '.join(devices)}"
    if gpu_count := _count_gpus():
        text = f"the machine has {gpu_count} GPUs, but torch {torch.__version__} sees none"
        return "bad", text, INSTALL_TORCH
    threads = torch.get_num_threads()
    return "ok", f"{torch.__version__}; no GPU: training runs on {threads} CPU threads"


def _count_gpus() -> int:
    """Return the number of GPUs that `nvidia-smi -L` lists."""
    try:
        done = subprocess.run(("nvidia-smi", "-L"), capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU") for line in done.stdout.splitlines())


def _check_kernels() -> tuple[str, ...]:
    """Check which of the faster kernels work."""
    import torch

    from lm import kernels

    device = "cuda" if torch.cuda.is_available() else "cpu"
    backends = kernels.describe_backends(device)  # first, because it checks all kernels in parallel
    like = torch.empty(1, device=device)
    needed = {"cuda": ("selective_scan", "ssd_scan", "cell"), "cpu": ("selective_scan", "cell")}
    slow = [name for name in needed[device] if kernels.find(name, like) is None]
    if not slow:
        return "ok", backends
    fix = "pip install 'triton>=3.6'" if device == "cuda" else INSTALL_GCC
    return "note", f"{' and '.join(slow)} in plain PyTorch, which is slower: {backends}", fix


def _check_gloo() -> tuple[str, ...]:
    _sum_over_processes("gloo", 2)
    return "ok", "two processes can communicate"


def _check_nccl() -> tuple[str, ...]:
    """Check NCCL on two GPUs, or on a single one, where DeepSpeed starts NCCL as well."""
    import torch

    count = min(2, torch.cuda.device_count())
    if count:
        _sum_over_processes("nccl", count)
    return "ok", ("not needed without a GPU", "works on one GPU", "works between two GPUs")[count]


def _sum_over_processes(backend: str, count: int) -> None:
    """Sum a tensor over `count` new processes."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        args = (backend, str(Path(folder) / "store"), count)
        torch.multiprocessing.spawn(_sum_of_ones, args, nprocs=count)


def _sum_of_ones(rank: int, backend: str, store: str, count: int) -> None:
    import torch
    import torch.distributed as dist

    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=count)
    ones = torch.ones(4, device=f"cuda:{rank}" if backend == "nccl" else "cpu")
    dist.all_reduce(ones)
    if ones.tolist() != [float(count)] * 4:
        raise RuntimeError(f"{backend} computed {ones.tolist()} as the sum of {count} ones")
    dist.destroy_process_group()


def _check_deepspeed() -> tuple[str, ...]:
    from lm.training.deepspeed_api import deepspeed_version

    return "ok", deepspeed_version()


def format_findings(findings: list[Finding]) -> str:
    """Return the findings as text: each with its fix in the line below, and a verdict."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:4}  {finding.name:<{width}}  {finding.text}")
        if finding.fix:
            lines.append(f"{'':{width + 8}}→ {finding.fix}")
    bad = [finding.name for finding in findings if finding.state == "bad"]
    if bad:
        return "\n".join([*lines, f"\nTraining does not work here: fix {', '.join(bad)} (→)."])
    return "\n".join([*lines, "\nTraining works here. Lines marked `note` are optional."])


def can_train(findings: list[Finding]) -> bool:
    """Return whether everything that training needs works."""
    return all(f.state != "bad" for f in findings)
