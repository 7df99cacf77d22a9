"""What `fprnn doctor` tries out, each in a process of its own.

`python -m lm.cli.probes NAME` prints what it found, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta


def torch() -> dict:
    """The version, the devices, and the memory of each in GiB."""
    import torch

    cuda = torch.cuda.is_available()
    count = torch.cuda.device_count() if cuda else 0
    devices = [torch.cuda.get_device_properties(i) for i in range(count)]
    if cuda:
        torch.ones(8, device="cuda").sum().item()  # a driver that is too old fails only here
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": [f"{d.name}, {d.total_memory / 2**30:.0f} GiB" for d in devices],
        "bf16": cuda and torch.cuda.is_bf16_supported(),
        "threads": torch.get_num_threads(),
    }


def kernels() -> dict:
    """What computes which operation here, compared with plain PyTorch before it is counted."""
    import torch

    from lm import kernels

    device = "cuda" if torch.cuda.is_available() else "cpu"
    like = torch.empty(1, device=device)
    found = {name: kernels.find(name, like) for name in kernels.OPERATIONS}
    return {
        "device": device,
        "found": {name: getattr(module, "__name__", None) for name, module in found.items()},
        "words": kernels.available(device),
    }


def deepspeed() -> dict:
    """The version, and the operations of its own that it could compile here."""
    from lm.training import engine

    return engine.deepspeed_facts()


def group(backend: str, rank: str, world_size: str, file: str) -> dict:
    """A sum over processes, as training makes it."""
    import torch
    import torch.distributed as dist

    if backend == "nccl":
        torch.cuda.set_device(int(rank))
    dist.init_process_group(
        backend,
        init_method=f"file://{file}",
        rank=int(rank),
        world_size=int(world_size),
        timeout=timedelta(seconds=20),
    )
    value = torch.ones(4, device="cuda" if backend == "nccl" else "cpu")
    dist.all_reduce(value)
    total = value.tolist()
    dist.destroy_process_group()
    if total != [float(world_size)] * 4:
        raise RuntimeError(f"the sum of {world_size} ones was {total}")
    return {}


if __name__ == "__main__":
    probe: dict[str, Callable[..., dict]] = {
        "torch": torch,
        "kernels": kernels,
        "deepspeed": deepspeed,
        "group": group,
    }
    print("\n" + json.dumps(probe[sys.argv[1]](*sys.argv[2:])))
