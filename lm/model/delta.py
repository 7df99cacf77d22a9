"""Gated DeltaNet (Yang et al. 2024), and DeltaProduct with and without a gate (Siems et al. 2025).

Their parameters have the names, shapes and meaning of flash-linear-attention's layers; but what
ends a layer is called `out_proj`, as in all.

Shape suffixes: b batch, l length, n steps a token, h heads, k key and v value dimension of a head.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .delta_chunks import gated_delta_rule
from .layers import RMSNorm, ShortConv, without_autocast
from .plain import PlainLayer
from .sizes import heads_of, negative_eigenvalues
from .state import Sequences, last

FLOOR = 1e-6  # added to ‖x‖² where x is divided by its norm


class DeltaState(NamedTuple):
    """What a delta layer leaves behind after a row's last token that is no padding."""

    S: torch.Tensor  # (b,h,v,k)
    conv: tuple[torch.Tensor, ...]  # (b,d_conv−1,·) the last inputs of the convolutions: q, k, v

    def select(self, rows: torch.Tensor) -> "DeltaState":
        """The state of these rows (k,) of the batch."""
        return DeltaState(self.S[rows], tuple(t[rows] for t in self.conv))


def unit(x: torch.Tensor) -> torch.Tensor:
    """x / ‖x‖₂ over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + FLOOR)


class GatedDeltaProduct(PlainLayer):
    """S ← α_t S, then n times S ← S (I − β k kᵀ) + β v kᵀ, each with a k, v and β of its own;
    out_proj(RMSNorm(S q / √d_k) ⊙ silu(z)). See delta_rule.py."""

    kind = "gated_deltaproduct"
    gated = True  # whether there is an α; without it α = 1

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        d, d_v = config.d_model, config.d_inner
        self.heads = heads_of(config)
        self.steps = self.steps_of(config)
        self.negative = negative_eigenvalues(config, self.kind)
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, self.steps * d, bias=False)
        self.v_proj = nn.Linear(d, self.steps * d_v, bias=False)
        self.b_proj = nn.Linear(d, self.steps * self.heads, bias=False)
        if self.gated:
            self.a_proj = nn.Linear(d, self.heads, bias=False)
            self.A_log = nn.Parameter(torch.empty(self.heads))
            self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.q_conv1d = ShortConv(d, config.d_conv, bias=False)
        self.k_conv1d = ShortConv(self.steps * d, config.d_conv, bias=False)
        self.v_conv1d = ShortConv(self.steps * d_v, config.d_conv, bias=False)
        self.g_proj = nn.Linear(d, d_v, bias=False)
        self.o_norm = RMSNorm(d_v // self.heads, config.norm_epsilon)
        self.out_proj = nn.Linear(d_v, d, bias=False)

    @staticmethod
    def steps_of(config: Any) -> int:
        """n, the steps a token."""
        return config.n_householder

    def state_shapes(self) -> list[tuple[int, ...]]:
        c, h, n = self.config, self.heads, self.steps
        widths = (c.d_model, n * c.d_model, n * c.d_inner)
        return [(h, c.d_inner // h, c.d_model // h), *((c.d_conv - 1, width) for width in widths)]

    def run(self, u: torch.Tensor, seqs: Sequences) -> tuple[torch.Tensor, DeltaState | None]:
        h, n = self.heads, self.steps
        # 1. Project, convolve. q (b,l,h,k), k (b,l,n,h,k), v (b,l,n,h,v)
        (q, k, v), tails = self._convolved(u, seqs)
        # 2. In fp32 or wider: q, k of unit length; β (b,l,n,h) and log α (b,l,h), zero at padding,
        #    which leaves the state as it is.
        wide = torch.promote_types(v.dtype, torch.float32)
        q, k, v = (t.to(wide) for t in (q, k, v))
        q = unit(q.unflatten(-1, (h, -1))) * (self.config.d_model // h) ** -0.5
        k, v = unit(k.unflatten(-1, (n, h, -1))), v.unflatten(-1, (n, h, -1))
        beta = seqs.masked(self.b_proj(u).to(wide).sigmoid()).unflatten(-1, (n, h))
        if self.negative:
            beta = 2 * beta
        log_alpha = torch.zeros_like(beta[:, :, 0])
        if self.gated:
            dt = F.softplus(self.a_proj(u).to(wide) + self.dt_bias.to(wide))
            log_alpha = seqs.masked(-self.A_log.to(wide).exp() * dt)
        # 3. The recurrence, the gated norm of each head.
        z = self.g_proj(u)
        with without_autocast(u):
            o, S = gated_delta_rule(q, k, v, beta, log_alpha, seqs.before("S"), seqs.starts)
            o = self.o_norm(o).to(wide).flatten(-2) * F.silu(z.to(wide))
        end = DeltaState(S.detach().clone(), tails) if seqs.return_state else None
        return self.out_proj(o.to(z.dtype)), end

    def _convolved(self, u, seqs):
        """silu(convolution) of what q_proj, k_proj, v_proj make of u, and the convolutions' last
        inputs, () unless asked for."""
        segments = None if seqs.starts is None else seqs.starts.cumsum(1)
        projections = self.q_proj, self.k_proj, self.v_proj
        convolutions = self.q_conv1d, self.k_conv1d, self.v_conv1d
        made, tails = [], []
        for index, (proj, conv1d) in enumerate(zip(projections, convolutions)):
            x, before = seqs.masked(proj(u)), seqs.before("conv", index)
            made.append(conv1d(x, segments, before))
            if seqs.return_state:
                tails.append(last(x, self.config.d_conv - 1, before, seqs))
        return made, tuple(tails)

    def flops_per_token(self, length: int) -> int:
        c, h, n = self.config, self.heads, self.steps
        convolved = c.d_model + n * (c.d_model + c.d_inner)
        matrices = c.d_model * (convolved + (n + self.gated) * h + 2 * c.d_inner)
        # Of d_inner × d_model/h numbers: a step's S k and what it adds; the gate, and S q.
        recurrence = (4 * n + 2 + self.gated) * c.d_inner * c.d_model // h
        return 2 * matrices + 2 * convolved * c.d_conv + recurrence


class GatedDeltaNet(GatedDeltaProduct):
    """Gated DeltaProduct of one step a token."""

    kind = "gated_deltanet"

    @staticmethod
    def steps_of(config: Any) -> int:
        return 1


class DeltaProduct(GatedDeltaProduct):
    """Gated DeltaProduct without the gate."""

    kind = "deltaproduct"
    gated = False
