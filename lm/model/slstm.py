"""sLSTM (Beck et al. 2024, "xLSTM: Extended Long Short-Term Memory", arXiv 2405.04517).

Shape suffixes: b batch, l length, d channels (d_model), h heads, e channels of a head.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .fields import heads_of
from .layers import GroupNorm, ShortConv, without_autocast
from .plain import PlainLayer
from .state import Sequences, last

EMPTY = -1e30  # the logarithm of a sum of nothing; finite, so that no difference is NaN


class SLSTMState(NamedTuple):
    """What the layer leaves behind after a row's last token that is no padding."""

    cell: torch.Tensor  # (b,4,d) y, c, n, m
    conv: tuple[torch.Tensor, ...]  # one, (b,d_conv−1,d): the last inputs of the convolution

    def select(self, rows: torch.Tensor) -> "SLSTMState":
        """The state of these rows (k,) of the batch."""
        return SLSTMState(self.cell[rows], tuple(t[rows] for t in self.conv))


class SLSTM(PlainLayer):
    """The cell of sLSTM, its gates' inputs through a short convolution, its heads normalised:

        ĩ, f̃ = W silu(conv(u)) + R y_{t−1} + b;    z̃, õ = W u + R y_{t−1} + b,
        m_t = max(log σ(f̃) + m_{t−1}, ĩ);    i = exp(ĩ − m_t);    f = exp(log σ(f̃) + m_{t−1} − m_t),
        c_t = f c_{t−1} + i tanh(z̃);    n_t = f n_{t−1} + i;    y_t = σ(õ) c_t / n_t,

    out_proj(GroupNorm(y_t)). All W and R are a block for each head; the forget gate is a sigmoid,
    of the two that the paper has. m only keeps the exponentials finite.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        d = config.d_model
        self.heads = heads_of(config)
        e = d // self.heads
        self.conv1d = ShortConv(d, config.d_conv)
        self.gates = nn.Parameter(torch.empty(4, self.heads, e, e))  # W of i, f, z, o
        self.recurrent = nn.Parameter(torch.empty(4, self.heads, e, e))  # R
        self.gate_bias = nn.Parameter(torch.empty(4, self.heads, e))
        self.group_norm = GroupNorm(self.heads, d)
        self.out_proj = nn.Linear(d, d, bias=False)

    def state_shapes(self) -> list[tuple[int, ...]]:
        d = self.config.d_model
        return [(4, d), (self.config.d_conv - 1, d)]

    def run(self, u: torch.Tensor, seqs: Sequences) -> tuple[torch.Tensor, SLSTMState | None]:
        h, wide = self.heads, torch.promote_types(u.dtype, torch.float32)
        # 1. What the gates read of the tokens, (l,4,h,b,e).
        u = seqs.masked(u)
        segments = None if seqs.starts is None else seqs.starts.cumsum(1)
        before = seqs.before("conv", 0)
        convolved = self.conv1d(u, segments, before)
        read = torch.stack([convolved, convolved, u, u]).unflatten(-1, (h, -1))  # (4,b,l,h,e)
        with without_autocast(u):
            weight, recurrent = self.gates.to(wide), self.recurrent.to(wide)
            inputs = torch.einsum("gblhe,ghoe->lghbo", read.to(wide), weight)
            inputs = inputs + self.gate_bias.to(wide)[:, :, None]
            # 2. Token by token. y, c, n, m: (h,b,e)
            cell = seqs.before("cell")
            if cell is None:
                cell = _empty(u, wide)
            state = [t.unflatten(-1, (h, -1)).transpose(0, 1) for t in cell.to(wide).unbind(1)]
            fresh = [t.unflatten(-1, (h, -1)).transpose(0, 1) for t in _empty(u, wide).unbind(1)]
            outputs = []
            for t in range(u.shape[1]):
                if seqs.starts is not None:
                    begins = seqs.starts[:, t, None]
                    state = [torch.where(begins, new, old) for new, old in zip(fresh, state)]
                new = _step(inputs[t], recurrent, *state)
                if seqs.mask is not None:
                    real = seqs.mask[:, t, None]
                    new = [torch.where(real, a, b) for a, b in zip(new, state)]
                state = list(new)
                outputs.append(state[0])
            y = torch.stack(outputs).permute(2, 0, 1, 3).flatten(-2)  # (b,l,d)
            # 3. Each head is normalised.
            y = self.group_norm(y)
        end = None
        if seqs.return_state:
            rows = torch.stack([t.detach().transpose(0, 1).flatten(1) for t in state], 1)
            end = SLSTMState(rows.clone(), (last(u, self.config.d_conv - 1, before, seqs),))
        return self.out_proj(y.to(u.dtype)), end

    def flops_per_token(self, length: int) -> int:
        c = self.config
        return 16 * c.d_model**2 // self.heads + 2 * c.d_model * (c.d_conv + c.d_model)


def _empty(u, dtype):
    """The state before any token, (b,4,d)."""
    state = u.new_zeros(len(u), 4, u.shape[-1], dtype=dtype)
    state[:, 3] = EMPTY
    return state


def _step(inputs, recurrent, y, c, n, m):
    """y, c, n, m (h,b,e) after a token. inputs: (4,h,b,e). recurrent: (4,h,e,e)."""
    i, f, z, o = inputs + torch.einsum("hbe,ghoe->ghbo", y, recurrent)
    kept = F.logsigmoid(f) + m
    new_m = torch.maximum(kept, i)
    i = torch.exp(i - new_m)
    f = torch.exp(kept - new_m)
    c = f * c + i * torch.tanh(z)
    n = f * n + i
    return torch.sigmoid(o) * c / n, c, n, new_m
