"""Joining and leaving the process group of a training run."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as torch_dist

from lm.common.errors import MachineError
from lm.common.heap import keep_freed_memory
from lm.common.ranks import Ranks, check_address, read_launcher_ranks
from lm.config.schema import Config
from lm.training.deepspeed_api import import_deepspeed


def find_free_port() -> int:
    """Return a TCP port of the loopback interface that no process uses."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def join_process_group(cfg: Config) -> Ranks:
    """Join the ranks that a launcher has started, or run as a single rank without a launcher.

    Also sets the seed and the number of threads, and makes a CPU process keep freed memory.

    Raises:
        ConfigError: If the launcher's environment variables are wrong.
        MachineError: If the ranks do not meet.
    """
    on_gpu = torch.cuda.is_available()
    read_launcher_ranks()  # refuse a wrong environment before anything is set
    if "RANK" not in os.environ:  # DeepSpeed would look for mpi4py
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = str(find_free_port())
    check_address()
    rank, world_size, local_rank = read_launcher_ranks()
    if cfg.train.threads:
        torch.set_num_threads(cfg.train.threads)
    if not on_gpu:
        keep_freed_memory()
    deepspeed = import_deepspeed()
    if on_gpu:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    backend = "nccl" if on_gpu else "gloo"
    if world_size == 1:
        _init_single_process_group(backend, _collective_timeout(cfg))
    try:
        deepspeed.init_distributed(
            backend, timeout=_collective_timeout(cfg), auto_mpi_discovery=False, verbose=False
        )
    except torch_dist.DistError as e:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise MachineError(f"the ranks did not meet at {address}: {str(e).splitlines()[0]}") from e
    torch.manual_seed(cfg.seed)
    # In this group ranks wait for the work of rank 0, such as tokenising, which may take days.
    object_group = None
    if world_size > 1:
        object_group = torch_dist.new_group(backend="gloo", timeout=timedelta(days=7))
    return Ranks(rank, world_size, device, object_group)


def leave_process_group() -> None:
    """Destroy the process group, if there is one."""
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()


def set_collective_timeouts(cfg: Config, ranks: Ranks) -> None:
    """Set the timeout of all process groups, except the one in which ranks wait for rank 0's work.

    DeepSpeed makes further groups with torch's default timeout.
    """
    if not torch_dist.is_initialized():
        return
    for group in list(torch_dist.distributed_c10d._world.pg_map):
        if group is not ranks.object_group:
            torch_dist.distributed_c10d._set_pg_timeout(_collective_timeout(cfg), group)


def _collective_timeout(cfg: Config) -> timedelta:
    """Return a timeout 10 % longer than the watchdog's, so that the watchdog writes the stacks."""
    return timedelta(seconds=1.1 * cfg.engine.timeout_s)


def _init_single_process_group(backend: str, timeout: timedelta) -> None:
    """Make the process group of a single process without opening it to the network.

    The default rendezvous of torch would listen on every interface of the host, and gloo on the
    interface that the host's name resolves to.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    store = torch_dist.HashStore()
    torch_dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
