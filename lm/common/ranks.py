"""Ranks (processes) of a run: their numbers, work of rank 0 for all ranks, and shared errors."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as torch_dist

from lm.common.errors import HANG, ConfigError, MachineError

MAX_RANKS = 1_000_000  # larger numbers are typing errors
# Patterns of the messages of gloo, NCCL and torch's store if another process is silent, or gone.
TIMEOUT = r"time(d |-)?out"
GONE = r"connection (was )?(closed|reset|refused)|broken pipe|remote (process|worker)"
LOST_CONNECTION = f"{GONE}|{TIMEOUT}"
Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """One process of a run and its peers. A single process needs no process group.

    Attributes:
        rank: Number of this process, from 0 to world_size − 1.
        world_size: Number of processes.
        device: Device of the collectives on tensors.
        object_group: gloo group with a timeout of days, in which the ranks wait for work of rank 0.
            None: the default group.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    object_group: Any = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            torch_dist.barrier()

    def run_on_main(self, fn: Callable[..., Result], *args: Any) -> Result:
        """Call a function on rank 0; return its result, or raise its error, on every rank."""
        result: Any = None
        error: Any = None
        if self.is_main:
            try:
                result = fn(*args)
            except Exception as e:
                error = e if self.world_size == 1 else _make_picklable(e)
        if self.world_size > 1:
            shared: list[Any] = [result, error]
            torch_dist.broadcast_object_list(shared, src=0, group=self.object_group)
            result, error = shared
        if error is not None:
            error.is_reported_by_main = not self.is_main  # then this rank does not print it
            raise error
        return result

    def run_on_all(self, fn: Callable[..., object], *args: Any) -> None:
        """Call a function on every rank; if some ranks fail, raise the first one's error on all."""
        error: Exception | None = None
        try:
            fn(*args)
        except Exception as e:
            error = e
        self.raise_first_error(error)

    def raise_first_error(self, error: Exception | None) -> None:
        """Raise the error of the lowest rank that has one, on all ranks.

        Args:
            error: Error of this rank, or None.
        """
        errors: list[Exception | None] = [error]
        if self.world_size > 1:
            errors = [None] * self.world_size
            local_error = None if error is None else _make_picklable(error)
            torch_dist.all_gather_object(errors, local_error, group=self.object_group)
        for rank_error in errors:
            if rank_error is not None:
                raise rank_error

    def sum(self, *values: float) -> list[float]:
        """Return the element-wise sum over ranks, in fp64."""
        if self.world_size == 1:
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch_dist.all_reduce(total)
        return total.tolist()

    def gather(self, t: torch.Tensor) -> torch.Tensor:
        """Return tensors of equal shape from all ranks, concatenated along the last dimension."""
        if self.world_size == 1:
            return t
        parts = [torch.empty_like(t) for _ in range(self.world_size)]
        torch_dist.all_gather(parts, t.contiguous())
        return torch.cat(parts, dim=-1)


def as_lost_peer_error(error: BaseException) -> MachineError | None:
    """Convert a collective's error to a MachineError if its cause is another rank.

    Returns:
        An error with exit status 71 if the other rank is gone, 77 if it does not answer; None if
        the error has another cause.
    """
    text = str(error)
    is_collective = isinstance(error, torch_dist.DistError) or (
        isinstance(error, RuntimeError) and re.search("gloo|nccl", text, re.I)
    )
    if not is_collective or not re.search(LOST_CONNECTION, text, re.I):
        return None
    first_line = text.strip().partition("\n")[0]
    # Without a prefix such as `[/gloo/pair.cc:575]`, and torch's guess at the reason.
    cause = re.sub(r"^\[\S*\]\s*", "", first_line).partition(". This is typically")[0]
    has_timed_out = re.search(TIMEOUT, text, re.I)
    state = "does not answer" if has_timed_out else "is gone: it was killed, or its host is down"
    lost = MachineError(
        f"another rank {state} ({cause}); see the last lines that it printed; resume=auto continues"
        " from the last checkpoint"
    )
    if has_timed_out:
        lost.exit_status = HANG
    return lost


def _make_picklable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with the same text if it cannot be pickled."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(repr(error))


class LauncherRanks(NamedTuple):
    """Numbers that a launcher sets in the environment of a process."""

    rank: int
    world_size: int
    local_rank: int  # rank among the processes of this host


def read_launcher_ranks() -> LauncherRanks:
    """Read RANK, WORLD_SIZE and LOCAL_RANK from the environment.

    Returns:
        The numbers; (0, 1, 0) without a launcher.

    Raises:
        ConfigError: If a value is not a valid number, if RANK is set without WORLD_SIZE, or if
            Slurm started several tasks without RANK: each task would be a run of its own, all in
            one run directory.
    """
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" not in os.environ and tasks != "1":
        raise ConfigError(
            f"srun has started {tasks} tasks (SLURM_STEP_NUM_TASKS) but no RANK is set: submit"
            " launch/slurm.sbatch, which sets the rank of each task, or start one task, srun -n 1"
        )
    if "RANK" in os.environ and "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            "the environment has RANK but no WORLD_SIZE: a launcher sets both; unset RANK to start"
            " one process"
        )
    world_size = _read_number("WORLD_SIZE", default=1, minimum=1, maximum=MAX_RANKS)
    rank = _read_number("RANK", default=0, minimum=0, maximum=world_size - 1)
    local_rank = _read_number("LOCAL_RANK", default=0, minimum=0, maximum=MAX_RANKS - 1)
    return LauncherRanks(rank, world_size, local_rank)


def check_address() -> None:
    """Check that a launcher has set MASTER_ADDR and MASTER_PORT, at which the ranks meet.

    Raises:
        ConfigError: If a variable is missing or invalid.
    """
    if not os.environ.get("MASTER_ADDR"):
        raise ConfigError(
            "the environment has RANK but no MASTER_ADDR: a launcher sets both; unset RANK to start"
            " one process"
        )
    _read_number(
        "MASTER_PORT", default=0, minimum=1, maximum=65_535
    )  # 0 is refused: it must be set


def _read_number(name: str, default: int, minimum: int, maximum: int) -> int:
    """Read a whole number from the environment.

    Raises:
        ConfigError: If it is not a number from minimum to maximum.
    """
    text = os.environ.get(name, str(default))
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or not minimum <= value <= maximum:
        raise ConfigError(
            f"{name} is {text!r} in the environment: it must be a whole number from {minimum} to"
            f" {maximum}, as a launcher sets it; without a launcher unset it"
        )
    return value
