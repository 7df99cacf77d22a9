"""What layers without a fixed point share, and the gated MLP.

Shape suffixes: b batch, l length.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .sizes import width_of_mlp
from .state import Sequences


class NoState(NamedTuple):
    """What a layer that looks at one token alone leaves behind."""

    def select(self, rows: torch.Tensor) -> "NoState":
        return self


class PlainLayer(nn.Module):
    """A layer that is computed, not solved. A subclass defines the methods that raise
    NotImplementedError here, `state_shapes` where it has a state, and ends in `out_proj`.

    forward: as FixedPointBlock's, with None in the place of its FixedPointStats.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def state_shapes(self) -> list[tuple[int, ...]]:
        """Of the tensors of its state, without b; −1: any number."""
        return []

    def run(self, u: torch.Tensor, seqs: Sequences) -> tuple[torch.Tensor, Any]:
        """u (b,l,d_model) → output (b,l,d_model), and the state after the last token, None unless
        `seqs.return_state`."""
        raise NotImplementedError

    def flops_per_token(self, length: int) -> int:
        """Forward FLOPs per token of sequences of `length` tokens (a multiply-add counts two)."""
        raise NotImplementedError

    def forward(
        self,
        u: torch.Tensor,
        seqs: Sequences = Sequences(),  # noqa: B008
        checkpoint: Callable[..., Any] | None = None,
        count_iterations: bool = False,
    ) -> tuple[Any, ...]:
        out, end = self.run(u, seqs) if checkpoint is None else checkpoint(self.run, u, seqs)
        return (out, None, end) if seqs.return_state else (out, None)


class GatedMLP(PlainLayer):
    """out_proj(silu(gate) ⊙ up), gate and up from one in_proj (SwiGLU: Shazeer 2020)."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width = width_of_mlp(config)
        self.in_proj = nn.Linear(config.d_model, 2 * width, bias=False)
        self.out_proj = nn.Linear(width, config.d_model, bias=False)

    def run(self, u: torch.Tensor, seqs: Sequences) -> tuple[torch.Tensor, NoState | None]:
        gate, up = self.in_proj(u).chunk(2, dim=-1)
        return self.out_proj(F.silu(gate) * up), NoState() if seqs.return_state else None

    def flops_per_token(self, length: int) -> int:
        return 6 * self.config.d_model * width_of_mlp(self.config)
