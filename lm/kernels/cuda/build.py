"""Compilation of the persistent kernels by NVRTC, their cache, and their cooperative launch.

torch's CUDA wheels depend on NVRTC and on the package cuda-bindings, so no compiler has to be
installed. A kernel is compiled for one width and one partition (2 to 3 s) and kept in the user's
cache.
"""

import ctypes
import functools
import hashlib
import itertools
import math
import tempfile
from pathlib import Path
from typing import Any

import torch

from lm.kernels import Unsupported
from lm.kernels.cpu.build import compute_checksum, open_cache_folder
from lm.kernels.cuda.interface import PACKED, SMALL_ROWS, STATES, TEAM_SEQUENCES, Partition

HERE = Path(__file__).parent
SOURCE = "kernels.cu"
HEADERS = ("fabric.h", "team.h", "cell_forward.h", "cell_backward.h", "standard.h")
# The search for the root of a token's equation is the same source as on the CPU.
CPU_HEADERS = ("cell_root.h", "cell_pair.h", "cell_equation.h")
STANDARD_HEADERS = ("algorithm", "cmath", "cstdint", "limits")  # replaced by standard.h
# Functions without an annotation, such as those of CPU_HEADERS, are compiled for the GPU.
FLAGS = ("--std=c++17", "--device-as-default-execution-space")
WARPS = 8  # of a crew
MAX_CREWS = 2  # of a block: a third one would leave 85 registers per thread
MIN_BLOCKS = 3  # of a group: a block multiplies at most 16 of the 33 small rows (team.h)
# Shared memory of a crew (CrewMemory in team.h): a constant part, and a part per channel.
CREW_BYTES, CREW_BYTES_PER_CHANNEL = 4_700, 356


def compile_cubin(
    partition: Partition, capability: tuple[int, int], *more_options: str
) -> tuple[bytes, str]:
    """Compile the kernels of a partition for GPUs of a compute capability.

    Args:
        partition: The partition.
        capability: Compute capability, for example (9, 0).
        more_options: Further options of NVRTC.

    Returns:
        The compiled kernels, and the compiler's log.

    Raises:
        RuntimeError: If NVRTC refuses the source; the message has its log.
    """
    from cuda.bindings import nvrtc

    texts = _read_sources()
    source = texts.pop(SOURCE)
    names, contents = [name.encode() for name in texts], list(texts.values())
    program = _check(
        nvrtc.nvrtcCreateProgram(source, SOURCE.encode(), len(texts), contents, names), nvrtc
    )
    options = [option.encode() for option in (*_options(partition, capability), *more_options)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = bytes(_check(nvrtc.nvrtcGetProgramLogSize(program), nvrtc))
    nvrtc.nvrtcGetProgramLog(program, log)
    text = log.rstrip(b"\0").decode()
    if int(status):
        raise RuntimeError(f"NVRTC: {status!s}: {text[-2000:]}")
    cubin = bytes(_check(nvrtc.nvrtcGetCUBINSize(program), nvrtc))
    _check(nvrtc.nvrtcGetCUBIN(program, cubin), nvrtc)
    return cubin, text


def _read_sources():
    """Return {file name: text} of the source and all headers."""
    texts = {name: (HERE / name).read_bytes() for name in (SOURCE, *HEADERS)}
    texts |= {name: (HERE.parent / "cpu" / name).read_bytes() for name in CPU_HEADERS}
    return texts | dict.fromkeys(STANDARD_HEADERS, b'#include "standard.h"\n')


def _options(partition, capability):
    """Return the compiler's options."""
    macros = {
        "D_INNER": partition.d,
        "CHANNELS": partition.channels,
        "WARPS": partition.warps,
        "CREWS": partition.crews,
    }
    defines = (f"-DFPRNN_{name}={value}" for name, value in macros.items())
    return [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", *FLAGS, *defines]


def _check(result, module):
    """Return the value of a call of cuda-bindings, or raise RuntimeError."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"{module.__name__.rpartition('.')[2]}: {status!s}")
    return values[0] if len(values) == 1 else values


def _load_cubin(partition, capability):
    """Return the compiled kernels, from the cache if they are there and undamaged."""
    key = hashlib.sha256()
    for part in (*_options(partition, capability), *map(repr, _read_sources().items())):
        key.update(part.encode() + b"\0")
    folder, name = open_cache_folder(), f"cuda-{key.hexdigest()[:24]}"
    for path in sorted(folder.glob(f"{name}-*.cubin")):
        if path.stem == f"{name}-{compute_checksum(path)}":
            return path.read_bytes()
        path.unlink(missing_ok=True)
    cubin, _ = compile_cubin(partition, capability)
    # Other processes may compile the same kernels: each moves its result in one step.
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        path = Path(temporary) / "cell.cubin"
        path.write_bytes(cubin)
        path.replace(folder / f"{name}-{compute_checksum(path)}.cubin")
    return cubin


def estimate_shared_bytes(d: int, channels: int, crews: int) -> int:
    """Return an upper bound of the shared memory of a block, in bytes."""
    # As FORWARD_WEIGHT_BYTES, BACKWARD_WEIGHT_BYTES and REST_BYTES in team.h.
    small_rows_per_block = math.ceil(SMALL_ROWS / (d // channels))
    stride = d + 8
    entries = channels * stride + max(small_rows_per_block * stride, SMALL_ROWS * channels)
    crew_bytes = CREW_BYTES + CREW_BYTES_PER_CHANNEL * channels
    return 2 * entries + 16 + crews * crew_bytes + channels * STATES * 4


def choose_partition(d: int, b: int, multiprocessors: int, shared_bytes: int) -> Partition | None:
    """Choose the partition with the fewest launches, and among those the least work per block.

    Args:
        d: Channels.
        b: Sequences.
        multiprocessors: Multiprocessors of the GPU. Each can hold one block.
        shared_bytes: Largest shared memory of a block.

    Returns:
        The partition, or None if W_y does not fit into the shared memory of the GPU.
    """
    candidates = []
    channel_counts = range(16, d // MIN_BLOCKS + 1, 16)
    for channels, crews in itertools.product(channel_counts, range(1, MAX_CREWS + 1)):
        max_groups = multiprocessors // (d // channels)
        if d % channels or not max_groups:
            continue
        if estimate_shared_bytes(d, channels, crews) > shared_bytes:
            continue
        groups = min(max_groups, math.ceil(b / crews))
        capacity = groups * crews * TEAM_SEQUENCES
        launches = math.ceil(b / capacity)
        team_sequences = math.ceil(min(b, capacity) / (groups * crews))
        block_work = channels * crews * team_sequences
        partition = Partition(d, channels, WARPS, crews, groups)
        candidates.append(((launches, block_work, crews, channels), partition))
    return min(candidates)[1] if candidates else None


class GpuKernels:
    """Kernels of a partition on one GPU; `lm.kernels.cuda.interface.Kernels` has the methods."""

    def __init__(self, partition: Partition, device: torch.device) -> None:
        from cuda.bindings import driver

        self.partition, self.driver = partition, driver
        capability = torch.cuda.get_device_capability(device)
        module = _check(driver.cuModuleLoadData(_load_cubin(partition, capability)), driver)
        self.mail_words, *shared, self.items = self._read_sizes(module)
        self.shared_bytes = dict(zip((False, True), shared))  # by `is_backward`, as `functions`
        self.threads = partition.crews * partition.warps * 32
        self.functions = {}
        for is_backward, name in ((False, b"cell_forward_kernel"), (True, b"cell_backward_kernel")):
            function = _check(driver.cuModuleGetFunction(module, name), driver)
            self._reserve_shared_memory(function, self.shared_bytes[is_backward])
            self.functions[is_backward] = function
        self._module = module  # unloaded only with the process

    def _read_sizes(self, module):
        """Return the constants SIZES of kernels.cu."""
        sizes = (ctypes.c_int * 4)()
        address, size = _check(self.driver.cuModuleGetGlobal(module, b"SIZES"), self.driver)
        assert size == ctypes.sizeof(sizes)
        _check(self.driver.cuMemcpyDtoH(ctypes.addressof(sizes), address, size), self.driver)
        return tuple(sizes)

    def _reserve_shared_memory(self, function, shared_bytes):
        """Permit a kernel its shared memory, and check that one block fits a multiprocessor."""
        attribute = self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(self.driver.cuFuncSetAttribute(function, attribute, shared_bytes), self.driver)
        resident = self.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            function, self.threads, shared_bytes
        )
        if _check(resident, self.driver) < 1:
            raise Unsupported("a block of the persistent kernels does not fit a multiprocessor")

    def alarm(self, like: torch.Tensor) -> torch.Tensor:
        """Return the device's tensor (1,) that a kernel sets to 1 if a wait took too long."""
        return _make_alarm(like.device)

    def run(self, is_backward: bool, cell: bytes, like: torch.Tensor) -> None:
        """Launch a pass on the current stream."""
        buffer = ctypes.create_string_buffer(cell, PACKED.size)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        with torch.cuda.device(like.device):
            stream = torch.cuda.current_stream().cuda_stream
            _check(
                self.driver.cuLaunchCooperativeKernel(
                    *(self.functions[is_backward], self.partition.blocks, 1, 1),
                    *(self.threads, 1, 1, self.shared_bytes[is_backward], stream),
                    ctypes.addressof(parameters),
                ),
                self.driver,
            )


@functools.cache
def _make_alarm(device) -> Any:
    """Return a pinned tensor: a kernel can write it, and the host can read it without waiting."""
    return torch.zeros(1, dtype=torch.int32).pin_memory()


@functools.cache
def _load(partition, device):
    with torch.cuda.device(device):
        return GpuKernels(partition, device)


def load_kernels(d: int, b: int, device: torch.device) -> GpuKernels:
    """Return the kernels for a layer, compiled if necessary.

    Args:
        d: Channels.
        b: Sequences.
        device: The GPU.

    Raises:
        Unsupported: If W_y does not fit into the GPU's shared memory, or a CUDA graph is recorded.
    """
    if torch.cuda.is_current_stream_capturing():
        raise Unsupported("a CUDA graph is being recorded")
    properties = torch.cuda.get_device_properties(device)
    partition = choose_partition(
        d, max(1, b), properties.multi_processor_count, properties.shared_memory_per_block_optin
    )
    if partition is None:
        raise Unsupported(f"W_y of d_inner {d} does not fit into the shared memory of this GPU")
    return _load(partition, device)
