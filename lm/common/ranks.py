"""This process among its peers: what one rank does for all, and what all find out together."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist

from lm.common.errors import HANG, ConfigError, MachineError

MOST_RANKS = 1_000_000
# How gloo, NCCL and torch's store say that the other end of a connection is not there any more.
LOST = (
    r"connection (was )?(closed|reset|refused)|broken pipe|remote (process|worker)|time(d |-)?out"
)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """This process among its peers; alone it needs no process group."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    objects: Any = None  # a gloo group that may wait for days, for what rank 0 does alone

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.world_size > 1:
            torch_dist.barrier()

    def first(self, fn: Callable[..., Result], *args: Any) -> Result:
        """Rank 0 calls fn; every rank gets its result, or raises its error."""
        box: list[Any] = [None, None]
        if self.is_main:
            try:
                box[0] = fn(*args)
            except Exception as e:
                box[1] = e
                if self.world_size > 1:
                    box[1] = _sendable(e)
        if self.world_size > 1:
            torch_dist.broadcast_object_list(box, src=0, group=self.objects)
        if box[1] is not None:
            box[1].is_reported_by_main = not self.is_main
            raise box[1]
        return box[0]

    def each(self, fn: Callable[..., object], *args: Any) -> None:
        """Every rank calls fn; where one fails, all raise the first one's error."""
        error: Exception | None = None
        try:
            fn(*args)
        except Exception as e:
            error = e
        self.raise_first_error(error)

    def raise_first_error(self, error: Exception | None) -> None:
        """Every rank says whether it has failed; where one has, all raise the first one's error."""
        errors: list[Exception | None] = [error]
        if self.world_size > 1:
            errors = [None] * self.world_size
            own = None if error is None else _sendable(error)
            torch_dist.all_gather_object(errors, own, group=self.objects)
        for found in errors:
            if found is not None:
                raise found

    def sum(self, *values: float) -> list[float]:
        """Element-wise sum over ranks, in fp64."""
        if self.world_size == 1:
            return [float(value) for value in values]
        t = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch_dist.all_reduce(t)
        return t.tolist()

    def gather(self, t: torch.Tensor) -> torch.Tensor:
        """Tensors of equal shape from all ranks, concatenated along the last dimension."""
        if self.world_size == 1:
            return t
        parts = [torch.empty_like(t) for _ in range(self.world_size)]
        torch_dist.all_gather(parts, t.contiguous())
        return torch.cat(parts, dim=-1)


def as_lost_peer_error(error: BaseException) -> MachineError | None:
    """What to say of an error that a collective raises where another rank is gone (status 71) or
    does not answer (77); None of any other error."""
    text = str(error)
    is_collective = isinstance(error, torch_dist.DistError) or (
        isinstance(error, RuntimeError) and re.search("gloo|nccl", text, re.I)
    )
    if not is_collective or not re.search(LOST, text, re.I):
        return None
    first = text.strip().partition("\n")[0]
    first = re.sub(r"^\[\S*\]\s*", "", first).partition(". This is typically")[0]
    silent = re.search(r"time(d |-)?out", text, re.I)
    what = "does not answer" if silent else "is gone: it was killed, or its host is down"
    lost = MachineError(
        f"another rank {what} ({first}); what it printed last may say more; resume=auto continues"
        " from the last checkpoint"
    )
    if silent:
        lost.exit_status = HANG
    return lost


def _sendable(error: Exception) -> Exception:
    """The error, or a plain one that says the same where it cannot be pickled."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(repr(error))


def read_launcher_ranks() -> tuple[int, int, int]:
    """(rank, number of ranks, rank on this host) as a launcher has put them into RANK, WORLD_SIZE
    and LOCAL_RANK of the environment; (0, 1, 0) where it has not.

    Raises:
        ConfigError: one of them is no such number, RANK is there without WORLD_SIZE, or Slurm has
            started several tasks without telling them their RANK: each would be a run of its own,
            all in one run directory.
    """
    if "RANK" not in os.environ and (tasks := os.environ.get("SLURM_STEP_NUM_TASKS", "1")) != "1":
        raise ConfigError(
            f"srun has started {tasks} tasks (SLURM_STEP_NUM_TASKS) but no RANK is set: submit"
            " launch/slurm.sbatch, which tells each task its rank, or start one task, srun -n 1"
        )
    if "RANK" in os.environ and "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            "the environment has RANK but no WORLD_SIZE: a launcher sets both; unset RANK to start"
            " one process"
        )
    world = _from_environment("WORLD_SIZE", 1, 1, MOST_RANKS)
    rank = _from_environment("RANK", 0, 0, world - 1)
    return rank, world, _from_environment("LOCAL_RANK", 0, 0, MOST_RANKS - 1)


def check_address() -> None:
    """Raises ConfigError where a launcher has not said where the ranks meet."""
    if not os.environ.get("MASTER_ADDR"):
        raise ConfigError(
            "the environment has RANK but no MASTER_ADDR: a launcher sets both; unset RANK to start"
            " one process"
        )
    _from_environment("MASTER_PORT", 0, 1, 65_535)


def _from_environment(name: str, default: int, least: int, most: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        raise ConfigError(
            f"{name} is {text!r} in the environment: it must be a whole number from {least} to"
            f" {most}, as a launcher sets it; without a launcher unset it"
        )
    return value
