"""Constants, struct and partition that the persistent kernels and their callers share."""

import struct
from typing import NamedTuple, Protocol

from torch import Tensor

# As in team.h.
STATES = 16  # n
TEAM_SEQUENCES = 8  # largest number of sequences of a team: SEQUENCES
WORD_BYTES = 16  # as in fabric.h
# Fields of Cell in team.h, in its order.
INTEGERS = (
    *("b", "first_sequence", "length", "columns", "team_sequences", "chunk"),
    *("vectors", "gates", "B", "C", "act", "sequential", "layer_norm", "bc_norm"),
)
NUMBERS = ("scale", "eps", "kappa", "norm_eps")
POINTERS = (
    *("raw", "weight", "x", "dt", "A", "keep", "gate", "D", "norm_weight", "norm_bias", "y0", "h0"),
    *("y", "state", "outcome", "rows", "records", "units", "checkpoints"),
    *("grad_y", "largest", "d_raw", "dx", "ddt", "d_gate", "dA", "dD", "d_weight", "d_bias", "H"),
    *("mail", "alarm"),
)
PACKED = struct.Struct(f"{len(INTEGERS)}q{len(NUMBERS)}d{len(POINTERS)}Q")


class Partition(NamedTuple):
    """Division of a layer among the blocks of a GPU; team.h explains the words."""

    d: int
    channels: int  # of a block
    warps: int  # of a crew
    crews: int  # of a block
    groups: int
    reflections: int = 1  # r of the layer

    @property
    def blocks(self) -> int:
        """Number of blocks of a launch."""
        return self.groups * (self.d // self.channels)

    @property
    def teams(self) -> int:
        """Number of teams of a launch."""
        return self.groups * self.crews


class Kernels(Protocol):
    """Compiled kernels of a partition: on a GPU, or the emulation of the tests."""

    partition: Partition
    mail_words: int  # of a team
    items: int  # units of a warp (ITEMS in team.h)
    record_size: int  # numbers of a token that the backward pass reads (RECORD_SIZE in team.h)

    def run(self, is_backward: bool, cell: bytes, like: Tensor) -> None:
        """Launch a pass.

        Args:
            is_backward: True for the backward pass, False for the forward pass.
            cell: The packed struct Cell.
            like: A tensor on the device.
        """

    def alarm(self, like: Tensor) -> Tensor:
        """Return the tensor (1,) that a kernel sets to 1 if a wait took too long."""
