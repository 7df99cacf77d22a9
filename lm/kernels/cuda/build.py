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
from pathlib import Path
from typing import Any

import torch

from lm.kernels import Unsupported
from lm.kernels.cache import find_or_make
from lm.kernels.cuda.interface import PACKED, STATES, TEAM_SEQUENCES, Partition

HERE = Path(__file__).parent
SOURCE = "kernels.cu"
HEADERS = ("fabric.h", "team.h", "token_equation.h", "cell_forward.h", "cell_backward.h")
# The algebra of a token's reflections and the search for its root are shared with the CPU kernels.
CPU_HEADERS = ("cell_map.h", "cell_root.h", "cell_pair.h", "cell_equation.h")
STANDARD_HEADERS = ("algorithm", "cmath", "cstdint", "limits")  # replaced by standard.h
# Functions without an annotation, such as those of CPU_HEADERS, are compiled for the GPU.
FLAGS = ("--std=c++17", "--device-as-default-execution-space")
WARPS = 8  # of a crew
# Crews per block. Two crews halve the number of launches for large batches, but leave 128 registers
# per thread, so that up to 1,748 bytes spill. Two crews were not timed on a GPU.
MAX_CREWS = 2
MAX_CHANNELS = 48  # of a block: with more, the state does not fit into the registers
# Time in which blocks exchange words, in units of the work on one channel of eight sequences. It is
# an estimate: 2.5 µs on an H100, where 48 channels are estimated at 2 µs.
EXCHANGE_WORK = 60
MAX_REFLECTIONS = 4  # with five, W_y of d_inner 1,536 fits into the shared memory of no known GPU
MIN_BLOCKS = 3  # of a group: a block multiplies at most 16 of the small rows (team.h)


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
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = bytes(_check(nvrtc.nvrtcGetProgramLogSize(program), nvrtc))
        nvrtc.nvrtcGetProgramLog(program, log)
        text = log.rstrip(b"\0").decode()
        if int(status):
            raise RuntimeError(f"NVRTC: {status!s}: {text[-2000:]}")
        cubin = bytes(_check(nvrtc.nvrtcGetCUBINSize(program), nvrtc))
        _check(nvrtc.nvrtcGetCUBIN(program, cubin), nvrtc)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return cubin, text


def _read_sources():
    """Return {file name: text} of the source and all headers."""
    texts = {name: (HERE / name).read_bytes() for name in (SOURCE, *HEADERS, "standard.h")}
    texts |= {name: (HERE.parent / "cpu" / name).read_bytes() for name in CPU_HEADERS}
    return texts | dict.fromkeys(STANDARD_HEADERS, b'#include "standard.h"\n')


def _options(partition, capability):
    """Return the compiler's options."""
    macros = {
        "D_INNER": partition.d,
        "CHANNELS": partition.channels,
        "WARPS": partition.warps,
        "CREWS": partition.crews,
        "REFLECTIONS": partition.reflections,
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
    """Return the compiled kernels, from the cache if possible."""
    from cuda.bindings import nvrtc

    version = ".".join(map(str, _check(nvrtc.nvrtcVersion(), nvrtc)))
    key = hashlib.sha256()
    options = _options(partition, capability)
    for part in (version, *options, *map(repr, _read_sources().items())):
        key.update(part.encode() + b"\0")

    def compile_to(path):
        path.write_bytes(compile_cubin(partition, capability)[0])

    return find_or_make(f"cuda-{key.hexdigest()[:24]}", ".cubin", compile_to).read_bytes()


def count_shared_bytes(d: int, channels: int, crews: int, reflections: int) -> int:
    """Return the shared memory of a block in bytes, as team.h computes it."""
    r, pairs, small_rows = reflections, math.comb(reflections + 1, 2), reflections + 2 * STATES
    forward = (r * channels + math.ceil(small_rows / (d // channels))) * (d + 8)
    backward = channels * (r * d + 8 + small_rows)
    # Words of three sums each (FORWARD_SUM_WORDS, BACKWARD_SUM_WORDS and LATE_SUM_WORDS).
    sums = (2 + 6 * r + 3 * pairs, 3 + 2 * r + STATES, 1 + STATES)
    forward_words, backward_words, late_words = (math.ceil(count / 3) for count in sums)
    floats = {  # of a sequence, by the fields of CrewMemory
        "parts": WARPS * (r * channels + 5),
        "small": small_rows + 2,
        "unit_sums": channels // 8 * 3 * max(forward_words, backward_words),
        "totals": 2 * 3 * max(forward_words, backward_words + late_words),
        "record": 5 + 9 * r + r * r + pairs,
        "scalars": 2 + 5 * r + pairs,
        "vector": r * channels // 2,
    }
    crew = _round_up(4 * TEAM_SEQUENCES * sum(floats.values()) + 4, 8)  # 4: has_timed_out
    weight = _round_up(2 * max(forward, backward), 16)
    return weight + crews * crew + 4 * channels * STATES


def _round_up(size, unit):
    return math.ceil(size / unit) * unit


def choose_partition(
    d: int, b: int, multiprocessors: int, shared_bytes: int, reflections: int = 1
) -> Partition | None:
    """Choose a partition.

    The number of channels of a block does not depend on b, so that the results of a sequence do
    not depend on the batch. It maximizes the sequences of a launch per time of a token, which is
    estimated as EXCHANGE_WORK + channels · reflections · crews.

    Args:
        d: Channels.
        b: Sequences.
        multiprocessors: Multiprocessors of the GPU. Each can hold one block.
        shared_bytes: Largest shared memory of a block.
        reflections: Reflections of the layer.

    Returns:
        The partition, or None if W_y does not fit into the shared memory of the GPU.
    """
    speeds = {}
    channel_counts = range(16, min(MAX_CHANNELS, d // MIN_BLOCKS) + 1, 16)
    for channels, crews in itertools.product(channel_counts, range(1, MAX_CREWS + 1)):
        fits = count_shared_bytes(d, channels, crews, reflections) <= shared_bytes
        max_groups = 0 if d % channels else multiprocessors // (d // channels)
        if fits and max_groups:
            work = EXCHANGE_WORK + channels * reflections * crews
            speeds[channels, crews] = max_groups * crews / work
    if not speeds:
        return None
    channels, max_crews = max(speeds, key=lambda pair: speeds[pair])
    max_groups = multiprocessors // (d // channels)
    crews = 1 if b <= max_groups * TEAM_SEQUENCES else max_crews
    groups = min(max_groups, math.ceil(b / crews))
    return Partition(d, channels, WARPS, crews, groups, reflections)


class GpuKernels:
    """Kernels of a partition on one GPU; `lm.kernels.cuda.interface.Kernels` has the methods."""

    def __init__(self, partition: Partition, device: torch.device) -> None:
        from cuda.bindings import driver

        self.partition, self.driver, self.device = partition, driver, device
        capability = torch.cuda.get_device_capability(device)
        module = _check(driver.cuModuleLoadData(_load_cubin(partition, capability)), driver)
        self.mail_words, *shared, self.items, self.record_size = self._read_sizes(module)
        self.shared_bytes = dict(zip((False, True), shared))  # by `is_backward`, as `functions`
        self.threads = partition.crews * partition.warps * 32
        self.functions = {}
        for is_backward, name in ((False, b"cell_forward_kernel"), (True, b"cell_backward_kernel")):
            function = _check(driver.cuModuleGetFunction(module, name), driver)
            self._reserve_shared_memory(function, self.shared_bytes[is_backward])
            self.functions[is_backward] = function
        self._module = module  # unloaded only with the process

    def _read_sizes(self, module):
        """Return the numbers that `sizes_kernel` of kernels.cu writes."""
        function = _check(self.driver.cuModuleGetFunction(module, b"sizes_kernel"), self.driver)
        sizes = torch.zeros(5, dtype=torch.int32, device=self.device)
        parameter = (ctypes.c_void_p * 1)(sizes.data_ptr())
        stream = torch.cuda.current_stream(self.device).cuda_stream
        addresses = (ctypes.c_void_p * 1)(ctypes.addressof(parameter))
        _check(
            self.driver.cuLaunchKernel(
                *(function, 1, 1, 1, 1, 1, 1, 0, stream), ctypes.addressof(addresses), 0
            ),
            self.driver,
        )
        return sizes.tolist()

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
        # The driver uses this thread's CUDA context, which torch's operations on `like` have set.
        with torch.cuda.device(like.device):
            stream = torch.cuda.current_stream(like.device).cuda_stream
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
    # The device is explicit because the caller may have changed torch's default device.
    return torch.zeros(1, dtype=torch.uint8, device="cpu").pin_memory()


@functools.cache
def _load(partition, device):
    with torch.cuda.device(device):
        return GpuKernels(partition, device)


def load_kernels(d: int, b: int, reflections: int, device: torch.device) -> GpuKernels:
    """Return the kernels for a layer, compiled if necessary.

    Args:
        d: Channels.
        b: Sequences.
        reflections: Reflections of the layer.
        device: The GPU.

    Raises:
        Unsupported: If W_y does not fit into the GPU's shared memory, or a CUDA graph is recorded.
    """
    if torch.cuda.is_current_stream_capturing():
        raise Unsupported("a CUDA graph is being recorded")
    properties = torch.cuda.get_device_properties(device)
    gpu = properties.multi_processor_count, properties.shared_memory_per_block_optin
    partition = choose_partition(d, max(1, b), *gpu, reflections)
    if partition is None:
        raise Unsupported(
            f"W_y of d_inner {d} and {reflections} reflections does not fit into the shared memory"
            " of this GPU"
        )
    return _load(partition, device)
