"""M²RNN, a non-linear recurrence of a matrix (Mishra et al. 2026, arXiv 2603.14360).

In plain PyTorch, token by token. Its parameters have the meaning of the authors' `M2RNN`.

Shape suffixes: b batch, l length, d channels (d_inner), n d_state, h heads, p channels of a head,
g groups of heads that share keys and queries.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .diagonal import DiagonalLayer, ScanState
from .layers import RMSNorm, ShortConv, without_autocast
from .state import Sequences


class M2RNN(DiagonalLayer):
    """Every head keeps a matrix H (n×p),

        H_t = f_t H_{t−1} + (1 − f_t) tanh(H_{t−1} W + k_t v_tᵀ),    o_t = H_tᵀ q_t + D ⊙ v_t,

    out_proj(RMSNorm(o ⊙ silu(z))). q, k and v pass a short convolution and silu; the forget gate of
    a head is f = exp(−exp(A_log) · softplus(· + dt_bias)).
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        d, bc = config.d_inner, config.ngroups * config.d_state
        self.heads = d // config.headdim
        self.widths = [d, d + 2 * bc, self.heads]  # z; v, k, q; the forget gate
        self.in_proj = nn.Linear(config.d_model, sum(self.widths), bias=False)
        self.conv1d = ShortConv(d + 2 * bc, config.d_conv)
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.state_proj = nn.Parameter(torch.empty(self.heads, config.headdim, config.headdim))  # W
        self.D = nn.Parameter(torch.empty(d))
        self.norm = RMSNorm(d, config.norm_epsilon)
        self.out_proj = nn.Linear(d, config.d_model, bias=False)

    def state_shapes(self) -> list[tuple[int, ...]]:
        c = self.config
        width = c.d_inner + 2 * c.ngroups * c.d_state
        return [(self.heads, c.d_state, c.headdim), (c.d_conv - 1, width)]

    def run(self, u: torch.Tensor, seqs: Sequences) -> tuple[torch.Tensor, ScanState | None]:
        cfg, d = self.config, self.config.d_inner
        bc = cfg.ngroups * cfg.d_state
        wide = torch.promote_types(u.dtype, torch.float32)
        # 1. Project, convolve. z, v: (b,l,d)
        z, vkq, gate = self.in_proj(u).split(self.widths, dim=-1)
        vkq, tail = self._convolved(vkq, seqs)
        v, k, q = vkq.to(wide).split([d, bc, bc], dim=-1)
        # 2. What the recurrence reads: k and q (b,l,h,n), v (b,l,h,p); log f (b,l,h), zero at
        #    padding, which leaves the state as it is.
        k, q = (
            t.unflatten(-1, (cfg.ngroups, -1)).repeat_interleave(self.heads // cfg.ngroups, 2)
            for t in (k, q)
        )
        dt = F.softplus(gate.to(wide) + self.dt_bias.to(wide))
        forget = seqs.masked(self._rates(wide) * dt).exp()
        with without_autocast(u):
            # 3. The recurrence, the residual, the gated norm.
            heads = v.unflatten(-1, (self.heads, -1))
            W = self.state_proj.to(wide)
            o, h = m2rnn(q, k, heads, forget, W, seqs.before("h"), seqs.starts)
            o = o.flatten(-2) + self.D.to(wide) * v
            o = self.norm(o * F.silu(z.to(wide)))
        return self.out_proj(o.to(z.dtype)), self._end(h, tail)

    def flops_per_token(self, length: int) -> int:
        c, d = self.config, self.config.d_inner
        convolved = d + 2 * c.ngroups * c.d_state
        matrices = c.d_model * (sum(self.widths) + d)
        recurrence = d * c.d_state * (2 * c.headdim + 9)  # H W; its other operations
        return 2 * matrices + 2 * convolved * c.d_conv + recurrence


def m2rnn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    forget: torch.Tensor,
    W: torch.Tensor,
    H: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """H_t = f_t H_{t−1} + (1 − f_t) tanh(H_{t−1} W + k_t v_tᵀ), one token after the other.

    Args:
        q, k: (b,l,h,n). v: (b,l,h,p). forget: (b,l,h) f. W: (h,p,p). H: (b,h,n,p) initial state,
            zero if None.
        starts: (b,l) bool, True at tokens that start from an empty state; None: there are none.
    Returns:
        H_tᵀ q_t (b,l,h,p) and the final state (b,h,n,p).
    """
    if H is None:
        H = q.new_zeros(len(q), *k.shape[2:], v.shape[-1])
    H = H.to(q.dtype)
    outputs = []
    for t in range(q.shape[1]):
        if starts is not None:
            H = H * ~starts[:, t, None, None, None]
        written = k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        f = forget[:, t, :, None, None]
        H = f * H + (1 - f) * torch.tanh(H @ W + written)
        outputs.append((q[:, t].unsqueeze(-2) @ H).squeeze(-2))
    return torch.stack(outputs, 1), H
