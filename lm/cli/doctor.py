"""What is installed and works on this machine, what is missing, and the command that mends it.

Nothing heavy is imported here: what may crash or hang is tried out in a process of its own
(lm/cli/probes.py), within a time limit.
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lm.common.errors import EXTRAS
from lm.common.files import OutputError, check_folder

TIMEOUT_S = 60.0  # of a probe; an import from a cold network disk is slow
HUB_TIMEOUT_S = 3.0
GIB = 2**30
INSTALL_TORCH = "pip install torch, the build for this machine's driver (nvidia-smi names its CUDA)"
# Packages of the extra `train` without which only something that a config may ask for is missing.
OPTIONAL = ("sentencepiece", "matplotlib", "wandb", "tensorboard", "datasets", "pyarrow")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: str  # "ok"; "note": training does without it; "bad": it does not
    text: str
    cure: str = ""  # the command that mends it


def examine(out_dir: str | Path = "runs", timeout: float = TIMEOUT_S) -> list[Finding]:
    """Look at everything, at once.

    Args:
        out_dir: where runs are to be written. timeout: seconds for a probe.
    """
    looks: list[Callable[[], list[Finding]]] = [
        lambda: [python()],
        lambda: _torch_and_what_needs_it(timeout),
        lambda: [deepspeed(timeout)],
        packages,
        compilers,
        lambda: [hub()],
        lambda: [disk("out_dir", out_dir), disk("cache", _hub_cache())],
        lambda: [memory(), shared_memory()],
        lambda: [slurm(timeout)],
    ]
    with ThreadPoolExecutor(len(looks)) as pool:
        return [finding for found in pool.map(lambda look: look(), looks) for finding in found]


def run_probe(arguments: list[str], timeout: float) -> tuple[dict, str]:
    """Run `python -m lm.cli.probes ARGUMENTS` → (what it found, why it failed or "")."""
    command = [sys.executable, "-m", "lm.cli.probes", *arguments]
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


def _torch_and_what_needs_it(timeout: float) -> list[Finding]:
    if importlib.util.find_spec("torch") is None:
        return [Finding("torch", "bad", "not installed", INSTALL_TORCH)]
    facts, why = run_probe(["torch"], timeout)
    if why:
        return [Finding("torch", "bad", f"it does not work: {why}", INSTALL_TORCH)]
    found = [Finding("torch", "ok", facts["version"]), gpu(facts)]
    with ThreadPoolExecutor(3) as pool:
        tried = [pool.submit(kernels, facts, timeout), pool.submit(group, "gloo", 2, timeout)]
        if facts["devices"]:
            count = min(2, len(facts["devices"]))
            tried.append(pool.submit(group, "nccl", count, timeout))
        return [*found, *(t.result() for t in tried)]


def gpu(facts: dict) -> Finding:
    """The GPUs that torch sees; bad where the machine has some that it does not see."""
    if facts["devices"]:
        bf16 = "" if facts["bf16"] else "; no bf16: train.precision fp32"
        text = f"CUDA {facts['cuda']}: {'; '.join(facts['devices'])}{bf16}"
        return Finding("GPU", "ok", text)
    listed = _said("nvidia-smi", "-L")
    if listed.startswith("GPU"):
        text = f"the machine has {len(listed.splitlines())}, torch {facts['version']} sees none"
        return Finding("GPU", "bad", text, INSTALL_TORCH)
    return Finding("GPU", "note", f"none: training runs on {facts['threads']} CPU thread(s)")


def kernels(facts: dict, timeout: float) -> Finding:
    """Which faster backends work, by trying them."""
    found, why = run_probe(["kernels"], timeout)
    if why:
        return Finding("kernels", "bad", f"trying them failed: {why}", "FPRNN_KERNELS=plain")
    on_gpu = found["device"] == "cuda"
    needed = ("selective_scan", "ssd_scan", "step") if on_gpu else ("selective_scan", "cell")
    slow = [name for name in needed if found["found"][name] is None]
    if not slow:
        return Finding("kernels", "ok", found["words"])
    text = f"{' and '.join(slow)} in plain PyTorch, which is slower: {found['words']}"
    return Finding(
        "kernels", "note", text, "pip install 'triton>=3.6'" if on_gpu else _install_gcc()
    )


def deepspeed(timeout: float) -> Finding:
    """Whether the engine can be imported."""
    cure = "pip install 'fprnn[train]'"
    if importlib.util.find_spec("deepspeed") is None:
        return Finding("deepspeed", "bad", "not installed", cure)
    facts, why = run_probe(["deepspeed"], timeout)
    if why:
        return Finding("deepspeed", "bad", f"it does not work: {why}", cure)
    can = ", ".join(facts["operations"]) or "none"
    text = f"{facts['version']}; of its own operations, which no run of ours needs, it could"
    return Finding("deepspeed", "ok", f"{text} compile: {can}")


def group(backend: str, world_size: int, timeout: float) -> Finding:
    """Whether processes of this machine can sum a tensor."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(world_size) as pool:
        name = str(Path(folder) / "store")
        ranks = [
            pool.submit(run_probe, ["group", backend, str(r), str(world_size), name], timeout)
            for r in range(world_size)
        ]
        whys = [why for r in ranks if (why := r.result()[1])]
    if not whys:
        return Finding(backend, "ok", f"{world_size} process(es) of this machine reach each other")
    cures = {
        "gloo": "export GLOO_SOCKET_IFNAME=lo (on one machine; else its network, see `ip link`)",
        "nccl": "NCCL_DEBUG=INFO fprnn doctor; NCCL_SOCKET_IFNAME, NCCL_P2P_DISABLE=1 may help",
    }
    return Finding(backend, "bad", f"processes do not reach each other: {whys[0]}", cures[backend])


def packages() -> list[Finding]:
    """What of the extras is missing."""
    missing = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    needed = [n for n in missing if EXTRAS[n] == "train" and n not in OPTIONAL]
    state = "bad" if needed else "note" if missing else "ok"
    extras = ",".join(sorted({EXTRAS[n] for n in missing}, reverse=True))
    text = f"not installed: {', '.join(missing)}" if missing else "all of the extras train and eval"
    found = [Finding("packages", state, text, f"pip install 'fprnn[{extras}]'" if missing else "")]
    absent = [n for n in ("causal_conv1d", "mamba_ssm") if importlib.util.find_spec(n) is None]
    if not absent:
        return [*found, Finding("mamba-ssm", "ok", "and causal-conv1d are installed")]
    names = {"causal_conv1d": "'causal-conv1d>=1.5'", "mamba_ssm": "'mamba-ssm>=2.2'"}
    text = f"not installed: {', '.join(absent)}; the baseline mamba is slower on a GPU without"
    # They are compiled against the torch that is there, which an isolated build would not see.
    cure = "MAMBA_KEEP_CUDA_BUILD=TRUE pip install --no-build-isolation " + " ".join(
        names[n] for n in absent
    )
    cure += " (after torch; with the nvcc of torch.version.cuda)"
    return [*found, Finding("mamba-ssm", "note", text, cure)]


def compilers() -> list[Finding]:
    """g++, which compiles the CPU's kernels, and nvcc, which compiles mamba-ssm."""
    gcc, nvcc = _said("g++", "--version"), _said("nvcc", "--version")
    found = [
        Finding("g++", "ok", gcc.splitlines()[0])
        if gcc
        else Finding(
            "g++", "note", "not found: the CPU's kernels are not compiled", _install_gcc()
        ),
        Finding("nvcc", "ok", nvcc.splitlines()[-1])
        if nvcc
        else Finding("nvcc", "note", "not found: mamba-ssm cannot be compiled (Triton needs none)"),
    ]
    return found


def hub() -> Finding:
    """Whether the hub answers, within seconds."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return Finding("hub", "note", "not asked: HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE")
    address = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    why = ""
    try:
        request = urllib.request.Request(address, method="HEAD")
        urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        pass  # an answer all the same
    except (OSError, ValueError) as e:
        why = str(getattr(e, "reason", e))
    if not why:
        return Finding("hub", "ok", f"{address} answers")
    text = f"{address} does not answer ({why}): data.source fineweb and tokenizers of the hub need"
    cure = "take data.path and a tokenizer's folder from a disk; HF_ENDPOINT=… names a mirror"
    return Finding("hub", "note", f"{text} it", cure)


def disk(name: str, folder: str | Path) -> Finding:
    """Whether files can be written there, and how much is free."""
    folder = Path(folder)
    try:
        check_folder(folder)
        there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
        free = shutil.disk_usage(there).free / GIB
    except (OutputError, OSError) as e:
        cure = "HF_HOME=…" if name == "cache" else "out_dir=… (fprnn doctor --out-dir …)"
        return Finding(name, "bad", str(e), f"name a folder that can be written: {cure}")
    text = f"{folder}: {free:.0f} GiB free"
    if free < 1:
        return Finding(name, "bad", text, "free some space, or name another disk")
    if free < 20:
        text += "; a 160M run keeps 3 checkpoints of about 2 GiB, and its tokenised data"
        return Finding(name, "note", text)
    return Finding(name, "ok", text)


def memory() -> Finding:
    """RAM that can still be had, of the machine or of the container."""
    lines = _text("/proc/meminfo").splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if len(line.split()) > 1}
    total, free = (kib.get(key, 0) / 2**20 for key in ("MemTotal", "MemAvailable"))
    limit = _text("/sys/fs/cgroup/memory.max").strip()
    text = f"{free:.0f} of {total:.0f} GiB free" if total else "not known"
    if limit.isdigit() and total and int(limit) / GIB < total:
        text += f"; this container may have {int(limit) / GIB:.0f} GiB"
    if total and free < 2:
        return Finding("memory", "bad", text, "end other processes, or ask for more (--mem=…)")
    return Finding("memory", "ok", text)


def shared_memory() -> Finding:
    """/dev/shm, through which NCCL and the ranks of one machine exchange data."""
    try:
        size = shutil.disk_usage("/dev/shm").total / GIB
    except OSError as e:
        return Finding("shared memory", "note", f"/dev/shm: {e.strerror}")
    if size >= 1:
        return Finding("shared memory", "ok", f"/dev/shm has {size:.0f} GiB")
    text = f"/dev/shm has only {size * 1024:.0f} MiB: NCCL on several GPUs may fail"
    return Finding("shared memory", "note", text, "docker run --shm-size=8g …")


def slurm(timeout: float) -> Finding:
    """Whether this is a cluster of Slurm, and whether it answers."""
    if shutil.which("sbatch") is None:
        return Finding("slurm", "note", "no sbatch here: launch/deepspeed.sh starts runs")
    said = _said("sinfo", "--noheader", "--format=%D nodes in %P", timeout=min(timeout, 10))
    if not said:
        return Finding("slurm", "note", "sbatch is here, but sinfo does not answer", "sinfo")
    inside = os.environ.get("SLURM_JOB_ID")
    text = "; ".join(said.split("\n")) + (f"; inside job {inside}" if inside else "")
    return Finding("slurm", "ok", text)


def _install_gcc() -> str:
    return "apt-get install -y g++ (or load the cluster's module, or conda install gxx)"


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or home)


def _said(*command: str, timeout: float = 10) -> str:
    """What a program prints; "" where there is none, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
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
        lines.append(f"\nTraining does not work here: mend {', '.join(bad)} (→).")
    else:
        lines.append("\nTraining works here. A note is about what it does without.")
    return "\n".join(lines)


def works(findings: list[Finding]) -> bool:
    """Whether everything that training needs is there."""
    return all(f.state != "bad" for f in findings)
