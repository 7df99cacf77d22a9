"""`fprnn doctor`: check that training works on this machine, and print how to fix problems.

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

TIMEOUT_S = 60.0  # of a check, which imports packages, possibly from a slow network disk
# Time limit of the check that compiles the CPU kernels, the same as in lm/kernels/cpu/build.py.
COMPILATION_TIMEOUT_S = 300.0
INSTALL_TORCH = "pip install torch, the build for this machine's driver (nvidia-smi names its CUDA)"
INSTALL_GCC = "apt-get install -y g++ (or load the cluster's module, or conda install gxx)"
# Name of each check → fix to print if it crashes, hangs or fails. `_check_NAME` runs the check.
FIXES = {
    "torch": INSTALL_TORCH,
    "kernels": "set FPRNN_KERNELS=plain, which disables the compiled kernels",
    "gloo": "set GLOO_SOCKET_IFNAME=lo (on several machines, an interface that `ip link` lists)",
    "nccl": "NCCL_DEBUG=INFO prints details; NCCL_SOCKET_IFNAME or NCCL_P2P_DISABLE=1 may help",
    "deepspeed": install_command("deepspeed"),
}


class Finding(NamedTuple):
    """Result of a check."""

    name: str
    state: str  # "ok"; "note" for a problem with which training still works; or "bad"
    text: str  # explanation in a sentence
    fix: str = ""  # command or environment variable that may solve the problem


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "doctor",
        help="check that training works on this machine, and print how to fix problems",
        description="Check PyTorch, the GPUs, the compiled kernels, communication between processes"
        " (gloo and NCCL) and DeepSpeed on this machine. It takes seconds, or minutes if the CPU"
        " kernels must be compiled, and uses no network. The exit status is 0 if training works,"
        " and 1 if a problem must be fixed first.",
    )
    command.set_defaults(run_command=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    findings = run_checks()
    print(format_findings(findings))
    return 0 if can_train(findings) else 1


def run_checks() -> list[Finding]:
    """Run all checks in parallel. If torch fails, return only its finding."""
    timeouts = dict.fromkeys(FIXES, TIMEOUT_S) | {"kernels": COMPILATION_TIMEOUT_S}
    with ThreadPoolExecutor(len(timeouts)) as pool:
        findings = list(pool.map(run_check, timeouts.keys(), timeouts.values()))
    torch_finding = findings[0]  # the first check in FIXES
    return [torch_finding] if torch_finding.state == "bad" else findings


def run_check(name: str, timeout: float) -> Finding:
    """Run the function `_check_NAME` of this file in a new process."""
    code = f"import json; from lm.cli import doctor; print(json.dumps(doctor._check_{name}()))"
    command = [sys.executable, "-c", code]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return Finding(name, "bad", f"no answer within {timeout:.0f} s", FIXES[name])
    if process.returncode == 0:
        return Finding(name, *json.loads(process.stdout.splitlines()[-1]))
    lines = [line for line in process.stderr.splitlines() if line.strip()]
    reason = lines[-1].strip()[:300] if lines else f"exit status {process.returncode}"
    if process.returncode < 0:
        reason = f"it crashed ({signal.Signals(-process.returncode).name})"
    return Finding(name, "bad", f"it does not work: {reason}", FIXES[name])


# Each check returns the fields `state`, `text` and, for a problem, `fix` of its Finding.


def _check_torch() -> tuple[str, ...]:
    """Check that torch works and sees the GPUs of the machine."""
    import torch

    if torch.cuda.is_available():
        torch.ones(8, device="cuda").sum().item()  # only this fails if the driver is too old
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        bf16_note = "" if torch.cuda.is_bf16_supported() else ", no bf16: train.precision fp32"
        gpu_texts = [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB{bf16_note}" for gpu in gpus]
        return "ok", f"{torch.__version__}, CUDA {torch.version.cuda}: {'; '.join(gpu_texts)}"
    if gpu_count := _count_gpus():
        text = f"nvidia-smi lists {gpu_count} GPU(s), but torch {torch.__version__} sees none"
        return "bad", text, INSTALL_TORCH
    count = torch.get_num_threads()
    threads = "1 CPU thread" if count == 1 else f"{count} CPU threads"
    return "ok", f"{torch.__version__}; no GPU: training runs on {threads}"


def _count_gpus() -> int:
    """Return the number of GPUs that `nvidia-smi -L` lists, 0 if it does not work."""
    try:
        process = subprocess.run(("nvidia-smi", "-L"), capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU") for line in process.stdout.splitlines())


def _check_kernels() -> tuple[str, ...]:
    """Check which compiled kernels work on this machine."""
    import torch

    from lm import kernels

    device = "cuda" if torch.cuda.is_available() else "cpu"
    backends = kernels.describe_backends(device)  # first, because it checks all kernels in parallel
    tensor_on_device = torch.empty(1, device=device)
    expected = {"cuda": ("selective_scan", "ssd_scan", "cell"), "cpu": ("selective_scan", "cell")}
    missing = [name for name in expected[device] if kernels.find(name, tensor_on_device) is None]
    if not missing:
        return "ok", backends
    fix = "pip install 'triton>=3.6'" if device == "cuda" else INSTALL_GCC
    return "note", f"{' and '.join(missing)} in plain PyTorch, which is slower: {backends}", fix


def _check_gloo() -> tuple[str, ...]:
    _test_all_reduce("gloo", 2)
    return "ok", "two processes can communicate"


def _check_nccl() -> tuple[str, ...]:
    """Check NCCL on two GPUs, or on a single one, where DeepSpeed starts NCCL as well."""
    import torch

    gpu_count = min(2, torch.cuda.device_count())
    if gpu_count:
        _test_all_reduce("nccl", gpu_count)
    texts = ("not needed without a GPU", "works on one GPU", "works between two GPUs")
    return "ok", texts[gpu_count]


def _test_all_reduce(backend: str, process_count: int) -> None:
    """Sum a tensor over new processes, and check the sum."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        args = (backend, str(Path(folder) / "store"), process_count)
        torch.multiprocessing.spawn(_sum_ones, args, nprocs=process_count)


def _sum_ones(rank: int, backend: str, store: str, process_count: int) -> None:
    """Sum a tensor of ones over all processes; raise an error if the sum is wrong."""
    import torch
    import torch.distributed as dist

    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=process_count
    )
    sums = torch.ones(4, device=f"cuda:{rank}" if backend == "nccl" else "cpu")
    dist.all_reduce(sums)
    if sums.tolist() != [float(process_count)] * 4:
        raise RuntimeError(f"{backend} computed {sums.tolist()} as the sum of {process_count} ones")
    dist.destroy_process_group()


def _check_deepspeed() -> tuple[str, ...]:
    from lm.training.deepspeed_api import deepspeed_version

    return "ok", deepspeed_version()


def format_findings(findings: list[Finding]) -> str:
    """Return the findings as text, each with its fix in the line below, and a conclusion."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        start = f"{finding.state:4}  {finding.name:<{width}}  "
        lines.append(start + finding.text)
        if finding.fix:
            lines.append(" " * len(start) + f"→ {finding.fix}")
    bad = [finding.name for finding in findings if finding.state == "bad"]
    conclusion = "Training works here. Fixing lines marked `note` is optional."
    if bad:
        conclusion = f"Training does not work here: fix {', '.join(bad)} (→)."
    return "\n".join([*lines, "", conclusion])


def can_train(findings: list[Finding]) -> bool:
    """Return whether everything that training needs works."""
    return all(finding.state != "bad" for finding in findings)
