"""The CPU kernels' library: built at first use, kept in the user's cache, called by ctypes.

A function of the library takes one `struct` of sizes, addresses and numbers, all of eight bytes.
It is passed as packed bytes: ctypes takes microseconds to convert as many arguments one by one.
"""

import ctypes
import functools
import hashlib
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lm.kernels import Unsupported
from lm.kernels.checks import find_fault

HERE = Path(__file__).parent
SOURCES = ("scan.cpp", "cell_forward.cpp", "cell_backward.cpp", "roots.cpp")
HEADERS = (
    "vector.h",
    "cell_token.h",
    "cell_equation.h",
    "cell_gradient.h",
    "cell_pair.h",
    "cell_product.h",
    "cell_root.h",
)
# Not -ffast-math; vector.h says why.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
)
# For AMD's Zen g++ splits a multiply-add where it likes, so that a sum of one sequence would be
# rounded otherwise than that of eight.
FLAGS_OF_GCC = ("--param=avoid-fma-max-bits=0",)
FUNCTIONS = ("scan", "backward", "cell", "cell_backward", "roots")
DTYPES = {torch.float32: "float", torch.float64: "double"}


def usable(self_check: Callable[[torch.dtype], float]) -> tuple[bool, str]:
    """Check once whether kernels run here.

    Args:
        self_check: Returns the deviation from plain PyTorch for a dtype; see `lm.kernels.checks`.

    Returns:
        Whether they run, and a sentence that gives the reason if they do not.
    """
    fault = _find_fault(self_check)
    return not fault, fault


@functools.cache
def _find_fault(self_check):
    try:
        functions()
    except RuntimeError as wrong:
        return str(wrong)
    faults = (
        find_fault(functools.partial(self_check, dtype), "cpu", "the CPU kernels")
        for dtype in DTYPES
    )
    return next(filter(None, faults), "")


@functools.cache
def functions() -> dict:
    """{name: {dtype: function of one packed struct}}, built if need be.

    Raises:
        RuntimeError: they cannot be built or loaded here.
    """
    try:
        library = ctypes.CDLL(str(build()))
        found = {}
        for name in FUNCTIONS:
            found[name] = {d: getattr(library, f"{name}_{kind}") for d, kind in DTYPES.items()}
            for function in found[name].values():
                function.argtypes, function.restype = [ctypes.c_char_p], None
    except (OSError, subprocess.SubprocessError, RuntimeError, AttributeError) as wrong:
        raise RuntimeError(f"the CPU kernels cannot be built: {wrong}") from wrong
    return found


def build() -> Path:
    """Return the shared library for these sources, this compiler and this CPU.

    A library from the cache is used if its checksum, the last part of its name, is right: loading
    a damaged one would end the process by SIGSEGV or SIGBUS. Otherwise it is compiled.

    Raises:
        RuntimeError: If there is no compiler, or if it failed.
        OSError: If the cache cannot be written, or if other users can write into it.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("there is neither g++ nor clang++ on PATH")
    command = [compiler, "--version"]
    version = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    flags: Sequence[str] = (*FLAGS, *FLAGS_OF_GCC)
    if "clang" in version:  # macOS calls it g++, too; its OpenMP is a package apart: one thread
        flags = tuple(flag for flag in FLAGS if flag != "-fopenmp")
    texts = [(HERE / name).read_text(encoding="utf-8") for name in (*SOURCES, *HEADERS)]
    key = hashlib.sha256()
    for part in (*texts, *flags, version, _cpu()):
        key.update(part.encode() + b"\0")
    folder, name = open_cache_folder(), f"cpu-{key.hexdigest()[:24]}"
    for library in sorted(folder.glob(f"{name}-*.so")):
        if library.stem == f"{name}-{_checksum(library)}":
            return library
        _print_note(f"the compiled kernels {library} are damaged (wrong checksum) and are removed")
        library.unlink(missing_ok=True)
    return _compile([compiler, *flags], folder, name)


def open_cache_folder() -> Path:
    """Create the cache folder if necessary, and check that only this user can write into it.

    Raises:
        OSError: If the folder cannot be created, or if another user can write into it: a library
            from there would run with this user's rights.
        RuntimeError: If there is no home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "fprnn" / "kernels"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise OSError(
            f"other users can write into {folder}, and a library from there would run with your"
            f" rights: chown and chmod go-w {folder}, or set XDG_CACHE_HOME to a folder of yours"
        )
    return folder


def _compile(compiler: Sequence[str], folder: Path, name: str) -> Path:
    """Compile the sources into `folder`/`name`-CHECKSUM.so; compiler: the command and its flags."""
    _print_note(f"compiling the CPU kernels into {folder}: up to 2 minutes, only the first time")
    # Other processes may build the same: each in a folder of its own, then moved in one step.
    with tempfile.TemporaryDirectory(dir=folder) as own:
        made = Path(own) / f"{name}.so"
        objects = [str(Path(own) / f"{source}.o") for source in SOURCES]
        _run_all(
            [*compiler, "-c", str(HERE / source), "-o", to] for source, to in zip(SOURCES, objects)
        )
        _run_all([[*compiler, *objects, "-o", str(made)]])
        return made.replace(folder / f"{name}-{_checksum(made)}.so")


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:24]


def _print_note(text: str) -> None:
    """Print to stderr, where it is not mistaken for a command's output, on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {text}", file=sys.stderr, flush=True)


def _run_all(commands):
    """Run commands beside each other, and wait for all.

    Raises:
        RuntimeError: one failed; its words are in it.
    """
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **pipes) for command in commands]
    try:
        for process in running:
            _, said = process.communicate(timeout=300)
            if process.returncode:
                command = " ".join(process.args)
                raise RuntimeError(f"{command} failed: {said.strip()[-500:]}")
    finally:
        for process in running:
            process.kill()  # those that are left where one failed
            process.wait()
            process.stderr.close()


def _cpu() -> str:
    """What -march=native depends on. A home directory may be shared between unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def check(dtype: torch.dtype, *arguments: tuple[str, torch.Tensor | None, Sequence[int]]) -> None:
    """Refuse what a kernel for this dtype cannot read.

    Args:
        arguments: (name, tensor or None, the shape that it should have).
    Raises:
        ValueError: shapes do not fit. TypeError: not on the CPU. Unsupported: dtypes differ, or are
        not float32 or float64.
    """
    for name, t, shape in arguments:
        if t is None:
            continue
        if t.shape != shape:
            raise ValueError(f"{name} is {tuple(t.shape)} where {tuple(shape)} is expected")
        if not t.is_cpu:
            raise TypeError(f"{name} is on {t.device}: all must be on the CPU")
        if t.dtype is not dtype or dtype not in DTYPES:
            raise Unsupported(
                f"{name} is {t.dtype}, the first input {dtype}: all must be float32 or all float64"
            )


def address(t: torch.Tensor | None) -> int:
    """Where a tensor lies; 0, a null pointer, for None."""
    return 0 if t is None else t.data_ptr()


@functools.cache
def checkpoint_steps(length: int) -> int:
    """Return the steps between two checkpoints: the power of two at or above √length."""
    return 1 << math.ceil(math.log2(max(1.0, length**0.5)))


def token_step(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A tensor (b,l,k) and what lies between two of its tokens, in entries; a slice of a wider one
    is used as it is, a copy made only where tokens are not evenly spaced or not contiguous."""
    if not t.is_contiguous():
        (b, length, k), (over_b, over_l, over_k) = t.shape, t.stride()
        if over_k == 1 or k == 1:
            if b == 1 or over_b == length * over_l:
                return t, over_l
            if length == 1:
                return t, over_b
        t = t.contiguous()
    return t, t.shape[2]
