"""`fprnn doctor`: what works on this machine, what does not, and the command that mends it.

Every check runs in a process of its own, within a time limit, because an import may crash or hang.
Nothing heavy is imported here.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from lm.common.errors import install_command

TIMEOUT_S = 60.0  # an import from a cold network disk is slow
COMPILATION_S = 300.0  # of the CPU kernels at first use, as lm/kernels/cpu/build.py waits for it
INSTALL_TORCH = "pip install torch, the build for this machine's driver (nvidia-smi names its CUDA)"
INSTALL_GCC = "apt-get install -y g++ (or load the cluster's module, or conda install gxx)"
# Cures of checks that crash, hang or fail; each is a function `_try_NAME` of this file.
CURES = {
    "torch": INSTALL_TORCH,
    "kernels": "FPRNN_KERNELS=plain",
    "gloo": "GLOO_SOCKET_IFNAME=lo (on one machine; else its network, see `ip link`)",
    "nccl": "NCCL_DEBUG=INFO says more; NCCL_SOCKET_IFNAME or NCCL_P2P_DISABLE=1 may help",
    "deepspeed": install_command("deepspeed"),
}


class Finding(NamedTuple):
    """The outcome of a check.

    Attributes:
        name: Name of the check.
        state: `ok`; `note`: training works without it; `bad`: training does not work.
        text: A sentence.
        cure: The command that mends it.
    """

    name: str
    state: str
    text: str
    cure: str = ""


def examine(timeout: float = TIMEOUT_S) -> list[Finding]:
    """Run all checks at once; without torch only the check of torch counts.

    Args:
        timeout: Seconds for a check; compiling the kernels may take longer.
    """
    limits = dict.fromkeys(CURES, timeout) | {"kernels": max(timeout, COMPILATION_S)}
    with ThreadPoolExecutor(len(limits)) as pool:
        findings = list(pool.map(check, limits, limits.values()))
    return findings[:1] if findings[0].state == "bad" else findings


def check(name: str, timeout: float) -> Finding:
    """Run the function `_try_NAME` of this file in a process of its own."""
    code = f"import json; from lm.cli import doctor; print(json.dumps(doctor._try_{name}()))"
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return Finding(name, "bad", f"no answer within {timeout:.0f} s", CURES[name])
    if not done.returncode:
        return Finding(name, *json.loads(done.stdout.splitlines()[-1]))
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    why = lines[-1].strip()[:300] if lines else f"exit status {done.returncode}"
    if done.returncode < 0:
        why = f"it crashed ({signal.Signals(-done.returncode).name})"
    return Finding(name, "bad", f"it does not work: {why}", CURES[name])


def _try_torch() -> tuple[str, ...]:
    """Check that torch works, and sees the GPUs that the machine has."""
    import torch

    if torch.cuda.is_available():
        torch.ones(8, device="cuda").sum().item()  # a driver that is too old fails only here
        cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        no_bf16 = "" if torch.cuda.is_bf16_supported() else ", no bf16: train.precision fp32"
        devices = [f"{d.name}, {d.total_memory / 2**30:.0f} GiB{no_bf16}" for d in cards]
        return "ok", f"{torch.__version__}, CUDA {torch.version.cuda}: {'; '.join(devices)}"
    if cards_listed := _count_cards():
        text = f"the machine has {cards_listed} GPUs, torch {torch.__version__} sees none"
        return "bad", text, INSTALL_TORCH
    threads = torch.get_num_threads()
    return "ok", f"{torch.__version__}; no GPU: training runs on {threads} CPU threads"


def _count_cards() -> int:
    """Return how many GPUs `nvidia-smi -L` lists."""
    try:
        done = subprocess.run(("nvidia-smi", "-L"), capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU") for line in done.stdout.splitlines())


def _try_kernels() -> tuple[str, ...]:
    """Try which faster backends work."""
    import torch

    from lm import kernels

    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = kernels.describe_backends(device)  # first, because it checks all kernels side by side
    like = torch.empty(1, device=device)
    needed = {"cuda": ("selective_scan", "ssd_scan", "cell"), "cpu": ("selective_scan", "cell")}
    slow = [name for name in needed[device] if kernels.find(name, like) is None]
    if not slow:
        return "ok", words
    cure = "pip install 'triton>=3.6'" if device == "cuda" else INSTALL_GCC
    return "note", f"{' and '.join(slow)} in plain PyTorch, which is slower: {words}", cure


def _try_gloo() -> tuple[str, ...]:
    _sum_over_processes("gloo", 2)
    return "ok", "two processes reach each other"


def _try_nccl() -> tuple[str, ...]:
    """Try NCCL on two GPUs, or on the only one, because DeepSpeed starts NCCL there as well."""
    import torch

    count = min(2, torch.cuda.device_count())
    if count:
        _sum_over_processes("nccl", count)
    return "ok", ("not needed without a GPU", "works on one GPU", "works between two GPUs")[count]


def _sum_over_processes(backend: str, count: int) -> None:
    """Sum a tensor over so many new processes."""
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
        raise RuntimeError(f"by {backend} the sum of {count} ones was {ones.tolist()}")
    dist.destroy_process_group()


def _try_deepspeed() -> tuple[str, ...]:
    from lm.training import engine

    return "ok", engine.deepspeed_version()


def report(findings: list[Finding]) -> str:
    """Return the findings for a person: a line each, the cure below it, a verdict last."""
    width = max(len(f.name) for f in findings)
    lines = []
    for f in findings:
        lines.append(f"{f.state:4}  {f.name:<{width}}  {f.text}")
        if f.cure:
            lines.append(f"{'':{width + 8}}→ {f.cure}")
    bad = [f.name for f in findings if f.state == "bad"]
    if bad:
        return "\n".join([*lines, f"\nTraining does not work here: mend {', '.join(bad)} (→)."])
    return "\n".join([*lines, "\nTraining works here. `note`: optional."])


def works(findings: list[Finding]) -> bool:
    """Return whether everything that training needs is there."""
    return all(f.state != "bad" for f in findings)
