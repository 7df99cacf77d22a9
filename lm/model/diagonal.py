"""Mamba (Gu & Dao 2023) and Mamba-2 (Dao & Gu 2024) as layers, on the scans of scan.py.

Their parameters have the names, shapes and meaning of transformers' MambaMixer and Mamba2Mixer.

Shape suffixes: b batch, l length, d channels (d_inner), n d_state, h heads, g groups, k d_conv.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .layers import RMSNorm, ShortConv, StepSize, without_autocast
from .plain import PlainLayer
from .scan import selective_scan, ssd_scan
from .state import Sequences, last


class ScanState(NamedTuple):
    """What a diagonal layer leaves behind after a row's last token that is no padding."""

    h: torch.Tensor  # the scan's state: Mamba (b,d,n), Mamba-2 (b,h,p,n)
    conv: torch.Tensor  # (b,k−1,·) the last inputs of the convolution

    def select(self, rows: torch.Tensor) -> "ScanState":
        """The state of these rows (k,) of the batch."""
        return ScanState(self.h[rows], self.conv[rows])


class DiagonalLayer(PlainLayer):
    """The steps that Mamba and Mamba-2 share."""

    def _convolved(self, x, seqs):
        """silu(convolution) of x (b,l,·), and the convolution's last inputs if asked for."""
        x = seqs.masked(x)
        before = seqs.before("conv")
        tail = None
        if seqs.return_state:
            tail = last(x, self.config.d_conv - 1, before, seqs)
        segments = None if seqs.starts is None else seqs.starts.cumsum(1)
        return self.conv1d(x, segments, before), tail

    def _rates(self, dtype):
        """A, (d,n) or (h,)."""
        return -torch.exp(self.A_log.to(dtype))

    def _end(self, h, tail):
        return None if tail is None else ScanState(h.detach().clone(), tail)


def keep_of(seqs: Sequences, dtype: torch.dtype) -> torch.Tensor | None:
    """(b,l) 0 at the first token of a packed document, else 1; None without documents."""
    return None if seqs.starts is None else 1 - seqs.starts.to(dtype)


class Mamba(DiagonalLayer):
    """h_t = exp(Δ_t A) h_{t−1} + Δ_t x_t B_tᵀ;  out_proj((h_t C_t + D x_t) ⊙ silu(z_t))."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        d, n = config.d_inner, config.d_state
        self.in_proj = nn.Linear(config.d_model, 2 * d, bias=config.bias)
        self.conv1d = ShortConv(d, config.d_conv)
        self.x_proj = nn.Linear(d, config.dt_rank + 2 * n, bias=False)
        self.dt_proj = StepSize(config.dt_rank, d)
        self.A_log = nn.Parameter(torch.empty(d, n))
        self.D = nn.Parameter(torch.empty(d))
        self.out_proj = nn.Linear(d, config.d_model, bias=config.bias)

    def state_shapes(self) -> list[tuple[int, ...]]:
        c = self.config
        return [(c.d_inner, c.d_state), (c.d_conv - 1, c.d_inner)]

    def run(self, u: torch.Tensor, seqs: Sequences) -> tuple[torch.Tensor, ScanState | None]:
        cfg = self.config
        # 1. Project, convolve. x, z: (b,l,d)
        x, z = self.in_proj(u).chunk(2, dim=-1)
        x, tail = self._convolved(x, seqs)
        # 2. What the recurrence reads: Δ (b,l,d), zero at padding, which leaves the state as it is;
        #    B and C (b,l,n).
        delta, B, C = self.x_proj(x).split([cfg.dt_rank, cfg.d_state, cfg.d_state], dim=-1)
        dt = seqs.masked(F.softplus(self.dt_proj(delta)))
        # 3. The recurrence, in fp32 or wider.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        with without_autocast(x):
            A, keep = self._rates(wide.dtype), keep_of(seqs, wide.dtype)
            o, h = selective_scan(wide, dt, A, B, C, seqs.before("h"), keep)
            o = o + self.D.to(wide.dtype) * wide
        return self.out_proj(o.to(z.dtype) * F.silu(z)), self._end(h, tail)

    def flops_per_token(self, length: int) -> int:
        c, d = self.config, self.config.d_inner
        matrices = 3 * c.d_model * d + d * (c.dt_rank + 2 * c.d_state) + c.dt_rank * d
        return 2 * matrices + 2 * d * c.d_conv + 9 * d * c.d_state  # 9: Mamba's count


class Mamba2(DiagonalLayer):
    """S_t = exp(Δ_t A) S_{t−1} + Δ_t x_t B_tᵀ per head;  out_proj(RMSNorm((S_t C_t + D x_t) ⊙
    silu(z_t)))."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        d, bc = config.d_inner, 2 * config.ngroups * config.d_state
        self.heads = d // config.headdim
        self.in_proj = nn.Linear(config.d_model, 2 * d + bc + self.heads, bias=config.bias)
        self.conv1d = ShortConv(d + bc, config.d_conv)
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.D = nn.Parameter(torch.empty(self.heads))
        self.norm = RMSNorm(d, config.norm_epsilon)
        self.out_proj = nn.Linear(d, config.d_model, bias=config.bias)

    def state_shapes(self) -> list[tuple[int, ...]]:
        c = self.config
        width = c.d_inner + 2 * c.ngroups * c.d_state
        return [(self.heads, c.headdim, c.d_state), (c.d_conv - 1, width)]

    def run(self, u: torch.Tensor, seqs: Sequences) -> tuple[torch.Tensor, ScanState | None]:
        cfg, d = self.config, self.config.d_inner
        bc = cfg.ngroups * cfg.d_state
        # 1. Project, convolve. z, x: (b,l,d)
        z, xbc, delta = self.in_proj(u).split([d, d + 2 * bc, self.heads], dim=-1)
        xbc, tail = self._convolved(xbc, seqs)
        x, B, C = xbc.split([d, bc, bc], dim=-1)
        # 2. What the recurrence reads, in fp32 or wider: Δ (b,l,h), zero at padding;
        #    B, C (b,l,g,n).
        wide = torch.promote_types(x.dtype, torch.float32)
        dt = seqs.masked(F.softplus(delta.to(wide) + self.dt_bias.to(wide)))
        B, C = (t.to(wide).unflatten(-1, (cfg.ngroups, cfg.d_state)) for t in (B, C))
        heads = x.to(wide).unflatten(-1, (self.heads, cfg.headdim))
        # 3. The recurrence.
        with without_autocast(x):
            keep = keep_of(seqs, wide)
            o, h = ssd_scan(heads, dt, self._rates(wide), B, C, seqs.before("h"), keep)
            o = (o + self.D.to(wide).unsqueeze(-1) * heads).flatten(-2)
            # 4. The gated norm.
            o = self.norm(o * F.silu(z.to(wide)))
        return self.out_proj(o.to(z.dtype)), self._end(h, tail)

    def flops_per_token(self, length: int) -> int:
        c, d = self.config, self.config.d_inner
        bc = 2 * c.ngroups * c.d_state
        matrices = c.d_model * (2 * d + bc + self.heads) + d * c.d_model
        return 2 * matrices + 2 * (d + bc) * c.d_conv + 9 * d * c.d_state
