"""The persistent CUDA kernels on a CPU: compiled by g++, each thread a fibre.

tests/lm/kernels/emulation/fabric_cpu.h has the scheduler.
"""

import ctypes
import functools
import hashlib
import subprocess
import tempfile
from pathlib import Path

import torch

from lm.kernels import cuda as kernels_folder
from lm.kernels.cuda.interface import PACKED, Partition

SOURCES = Path(kernels_folder.__file__).parent
EMULATION = Path(__file__).parent / "lm/kernels/emulation"
# Tensor cores do not fuse a product and a sum as a CPU would.
FLAGS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-Wno-unknown-pragmas")
REASON_BYTES = 300


@functools.cache
def compile_library(d, channels, warps, crews, reflections, sources=SOURCES):
    """Compile the emulated kernels of a partition."""
    folders = sources, SOURCES.parent / "cpu", EMULATION
    macros = {"D_INNER": d, "CHANNELS": channels, "WARPS": warps, "CREWS": crews}
    macros["REFLECTIONS"] = reflections
    options = [*FLAGS, *(f"-DFPRNN_{name}={value}" for name, value in macros.items())]
    texts = [path.read_bytes() for folder in folders for path in sorted(folder.glob("*.[hc]*"))]
    key = hashlib.sha256(repr((options, texts)).encode()).hexdigest()[:24]
    path = Path(tempfile.gettempdir()) / f"fprnn-emulated-{key}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder) / "cell.so"
            source = EMULATION / "emulated.cpp"
            options += [f"-I{folder}" for folder in folders]
            subprocess.run(["g++", *options, str(source), "-o", str(built)], check=True)
            built.replace(path)  # in one step, because other test processes may load it
    return ctypes.CDLL(str(path))


class EmulatedKernels:
    """Kernels of a partition that run on the CPU, in an order that a seed determines.

    If no thread can continue, a launch raises RuntimeError, or with `waits_time_out` the waits for
    words end as after a timeout.
    """

    waits_time_out = False

    def __init__(self, partition: Partition, seed: int = 0, sources: Path = SOURCES) -> None:
        self.partition, self.seed = partition, seed
        self.library = compile_library(*partition[:4], partition.reflections, sources)
        sizes = (ctypes.c_int * 5)()
        self.library.get_sizes(sizes)
        self.mail_words, *shared_bytes, self.items, self.record_size = sizes
        self.shared_bytes = max(shared_bytes)
        self.alarm_tensor = torch.zeros(1, dtype=torch.uint8)
        assert self.library.cell_bytes() == PACKED.size

    def alarm(self, like):
        return self.alarm_tensor

    def run(self, is_backward, cell, like):
        reason = ctypes.create_string_buffer(REASON_BYTES)
        seed = ctypes.c_uint64(self.seed)
        groups = self.partition.groups
        self.library.set_timeouts(int(self.waits_time_out))
        if self.library.run(cell, groups, int(is_backward), seed, reason, REASON_BYTES):
            raise RuntimeError(reason.value.decode())
