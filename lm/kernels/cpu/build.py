"""Compilation of the CPU kernels into a shared library, and calls with ctypes.

The library is compiled at first use. Each of its functions takes one
struct of sizes, real numbers and addresses of 8 bytes each. Callers pack the struct into bytes,
because ctypes would take microseconds to convert that many arguments one by one.
"""

import ctypes
import functools
import hashlib
import math
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lm.kernels import Unsupported
from lm.kernels.cache import find_or_make, print_note
from lm.kernels.checks import find_fault

HERE = Path(__file__).parent
SOURCES = ("scan.cpp", "cell_forward.cpp", "cell_backward.cpp", "roots.cpp")
HEADERS = tuple(sorted(path.name for path in HERE.glob("*.h")))
# Without -ffast-math; vector.h has the reason.
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
# For AMD's Zen, g++ would split some multiply-adds but not others. The rounding of a sequence's
# sums would then depend on the number of sequences that are computed together.
GCC_FLAGS = ("--param=avoid-fma-max-bits=0",)
FUNCTIONS = ("scan", "scan_backward", "cell", "cell_backward", "roots")
C_TYPES = {torch.float32: "float", torch.float64: "double"}


def usable(self_check: Callable[[torch.dtype], float]) -> tuple[bool, str]:
    """Check whether kernels run here; the result is cached.

    Args:
        self_check: Function of a dtype that returns a `lm.kernels.checks.deviation` from plain
            PyTorch.

    Returns:
        True and "" if the kernels run, otherwise False and a sentence with the reason.
    """
    fault = _find_fault(self_check)
    return not fault, fault


@functools.cache
def _find_fault(self_check):
    try:
        load_functions()
    except RuntimeError as error:
        return str(error)
    faults = (
        find_fault(functools.partial(self_check, dtype), "cpu", "the CPU kernels")
        for dtype in C_TYPES
    )
    return next(filter(None, faults), "")


@functools.cache
def load_functions() -> dict:
    """Load the library, which is compiled if necessary.

    Returns:
        {name: {dtype: function}} for the names of FUNCTIONS.

    Raises:
        RuntimeError: If the library cannot be built or loaded.
    """
    try:
        library = ctypes.CDLL(str(build()))
        functions = {}
        for name in FUNCTIONS:
            functions[name] = {
                dtype: getattr(library, f"{name}_{c_type}") for dtype, c_type in C_TYPES.items()
            }
            for function in functions[name].values():
                function.argtypes, function.restype = [ctypes.c_char_p], None
    except (OSError, subprocess.SubprocessError, RuntimeError, AttributeError) as error:
        raise RuntimeError(f"the CPU kernels cannot be built: {error}") from error
    return functions


def build() -> Path:
    """Return the shared library for these sources, this compiler and this CPU.

    The library is compiled unless the cache contains it.

    Raises:
        RuntimeError: If there is no compiler, or if the compilation fails.
        OSError: If the cache cannot be written, or if other users can write into it.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("there is neither g++ nor clang++ on PATH")
    command = [compiler, "--version"]
    version = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    flags: Sequence[str] = (*FLAGS, *GCC_FLAGS)
    # macOS has clang under the name g++, without OpenMP: the kernels then use one thread.
    if "clang" in version:
        flags = tuple(flag for flag in FLAGS if flag != "-fopenmp")
    texts = [(HERE / name).read_text(encoding="utf-8") for name in (*SOURCES, *HEADERS)]
    key = hashlib.sha256()
    for part in (*texts, *flags, version, _describe_cpu()):
        key.update(part.encode() + b"\0")
    compile_sources = functools.partial(_compile, [compiler, *flags])
    return find_or_make(f"cpu-{key.hexdigest()[:24]}", ".so", compile_sources)


def _compile(compiler, library):
    """Compile the sources into a shared library.

    Args:
        compiler: Command of the compiler and its flags.
        library: Path of the library.
    """
    print_note(
        f"compiling the CPU kernels into {library.parent.parent}: up to 2 minutes, only the first"
        " time"
    )
    objects = [str(library.with_name(f"{source}.o")) for source in SOURCES]
    _run_all(
        [*compiler, "-c", str(HERE / source), "-o", output]
        for source, output in zip(SOURCES, objects)
    )
    _run_all([[*compiler, *objects, "-o", str(library)]])


def _run_all(commands):
    """Run commands in parallel, and wait for all.

    Raises:
        RuntimeError: If a command fails. The message contains its last output.
    """
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **pipes) for command in commands]
    try:
        for process in running:
            _, errors = process.communicate(timeout=300)
            if process.returncode:
                command = " ".join(process.args)
                raise RuntimeError(f"{command} failed: {errors.strip()[-500:]}")
    finally:
        for process in running:
            process.kill()  # after a failure, the other commands may still run
            process.wait()
            process.stderr.close()


def _describe_cpu() -> str:
    """Return the properties of the CPU that -march=native depends on, for the library's name."""
    # Machines with different CPUs may share a home directory.
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    keys = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(keys)}))


def check(dtype: torch.dtype, *arguments: tuple[str, torch.Tensor | None, Sequence[int]]) -> None:
    """Check that a kernel can read its tensors.

    Args:
        dtype: The dtype that all tensors must have.
        arguments: (name, tensor or None, expected shape).

    Raises:
        ValueError: If a shape is wrong.
        TypeError: If a tensor is not on the CPU.
        Unsupported: If dtypes differ, or are neither float32 nor float64.
    """
    for name, t, shape in arguments:
        if t is None:
            continue
        if t.shape != shape:
            raise ValueError(f"{name} is {tuple(t.shape)}, but {tuple(shape)} is expected")
        if not t.is_cpu:
            raise TypeError(f"{name} is on {t.device}: all must be on the CPU")
        if t.dtype is not dtype or dtype not in C_TYPES:
            raise Unsupported(
                f"{name} is {t.dtype}, the first input {dtype}: all must be float32 or all float64"
            )


def get_address(t: torch.Tensor | None) -> int:
    """Return the address of a tensor's data, or 0 (a null pointer) for None."""
    return 0 if t is None else t.data_ptr()


@functools.cache
def choose_checkpoint_interval(length: int) -> int:
    """Return the number of steps between two checkpoints: the power of two at or above √length."""
    return 1 << math.ceil(math.log2(max(1.0, length**0.5)))


def space_tokens_evenly(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return a tensor (b,l,k) whose tokens are contiguous and evenly spaced.

    A slice of a wider tensor is such a tensor. Other tensors are copied.

    Returns:
        The tensor or its copy, and the number of entries between the starts of two tokens.
    """
    if not t.is_contiguous():
        (b, length, k), (stride_b, stride_l, stride_k) = t.shape, t.stride()
        if stride_k == 1 or k == 1:
            if b == 1 or stride_b == length * stride_l:
                return t, stride_l
            if length == 1:
                return t, stride_b
        t = t.contiguous()
    return t, t.shape[2]
