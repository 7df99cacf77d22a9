"""What layers without a fixed point share, and the gated MLP.

Shape suffixes: b batch, l length.
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import nn

from .sizes import width_of_mlp
from .state import Sequences


class NoState(NamedTuple):
    """What a layer that looks at one token alone leaves behind."""

    def select(self, rows):
        return self


class PlainLayer(nn.Module):
    """A layer that is computed, not solved. A subclass defines the methods that raise
    NotImplementedError here, `state_shapes` where it has a state, and ends in `out_proj`.

    forward: as FixedPointBlock's, with None in the place of its FixedPointStats.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config

    def state_shapes(self):
        """Of the tensors of its state, without b; −1: any number."""
        return []

    def run(self, u, seqs):
        """u (b,l,d_model) → output (b,l,d_model), and the state after the last token, None unless
        `seqs.return_state`."""
        raise NotImplementedError

    def flops_per_token(self, length):
        """Forward FLOPs per token of sequences of `length` tokens (a multiply-add counts two)."""
        raise NotImplementedError

    def forward(self, u, seqs=Sequences(), checkpoint=None, count_iterations=False):  # noqa: B008
        out, end = self.run(u, seqs) if checkpoint is None else checkpoint(self.run, u, seqs)
        return (out, None, end) if seqs.return_state else (out, None)


class GatedMLP(PlainLayer):
    """out_proj(silu(gate) ⊙ up), gate and up from one in_proj (SwiGLU: Shazeer 2020)."""

    def __init__(self, config):
        super().__init__(config)
        width = width_of_mlp(config)
        self.in_proj = nn.Linear(config.d_model, 2 * width, bias=False)
        self.out_proj = nn.Linear(width, config.d_model, bias=False)

    def run(self, u, seqs):
        gate, up = self.in_proj(u).chunk(2, dim=-1)
        return self.out_proj(F.silu(gate) * up), NoState() if seqs.return_state else None

    def flops_per_token(self, length):
        return 6 * self.config.d_model * width_of_mlp(self.config)
