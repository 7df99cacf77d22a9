"""The fixed-point blocks: `prepare` (once per solve), `step` (once per iteration), `finish`.

Shape suffixes: b batch, l length, d channels (d_inner), n d_state, h heads, g groups.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .fixed_point import FixedPointBlock, Static
from .layers import RMSNorm, ShortConv, StepSize, WNLinear, affine_map
from .mixers import added, unknown
from .scan import (
    SSD_CHUNK,
    backend,
    chunk_decays,
    linear_scan,
    selective_scan,
    ssd_decays,
    ssd_scan,
)
from .solver import Solution, direct_stats, token_residual
from .state import BlockState, Sequences, shift
from .step import EndLayerNorm, EndRMSNorm, normalise


class FPMamba(FixedPointBlock):
    """What FP-Mamba-1 and 2 share: B, C and the step size, each of x alone or of sh(y) as well
    (Table 1). A subclass also defines `_dt(delta, seqs)` and `_decays(dt, A, keep)`."""

    def _add_y_projections(self, n, dt):
        """The maps of sh(y) that there are to be: to B, to C (n wide each), to dt, to the gate."""
        cfg, d = self.config, self.config.d_inner
        if cfg.b_h_dep or cfg.c_h_dep:
            self.bc_y_proj = WNLinear(d, n * (cfg.b_h_dep + cfg.c_h_dep))
        if cfg.dt_h_dep:
            self.dt_y_proj = WNLinear(d, dt)
        if not cfg.glu_in_loop:
            self.z_y_proj = WNLinear(d, d)

    def _static(self, x, z, bc_x, delta, seqs, tail):
        """Static, from u's projections; delta: the step size before its bias and softplus."""
        cfg, acc = self.config, torch.promote_types(x.dtype, torch.float32)
        A = -torch.exp(self.A_log.to(acc))
        A = A.t().contiguous().t() if A.dim() == 2 else A  # as the CPU's scan reads it
        keep = None if seqs.starts is None else 1 - seqs.starts.to(acc)
        dt = decays = None  # every step makes its own where they read sh(y)
        if not cfg.dt_h_dep:
            dt = self._dt(delta, seqs)
            with torch.autocast(x.device.type, enabled=False):
                decays = self._decays(dt, A, keep)
        B, C = bc_x.chunk(2, dim=-1)
        parts = {"B": (B, None), "C": (C, None)}
        reading = [name for name, reads in (("B", cfg.b_h_dep), ("C", cfg.c_h_dep)) if reads]
        if reading:
            matrix, bias = affine_map(self.bc_y_proj, x)
            x_parts = torch.cat([parts[name][0] for name in reading], -1)
            x_parts = x_parts if bias is None else x_parts + bias
            split = [t.chunk(len(reading), axis) for t, axis in ((x_parts, -1), (matrix, 0))]
            parts.update(zip(reading, zip(*split)))
        if cfg.dt_h_dep:
            matrix, bias = affine_map(self.dt_y_proj, x)
            parts["delta"] = (delta if bias is None else delta + bias, matrix)
        *raw, weights = self._projections(x, **parts)
        time = (dt, A, keep, decays)
        return Static(x.to(acc).contiguous(), z, *raw, weights, seqs, time, tail)

    def cut_time(self, time, take, mask):
        dt, A, keep, _ = time
        keep = None if keep is None else take(keep)
        if mask is not None:
            keep = None if keep is None else keep.masked_fill(~mask, 1)
        if dt is None:  # each step makes it, and masks it
            return None, A, keep, None
        dt = take(dt) if mask is None else take(dt) * mask.unsqueeze(-1)
        return dt, A, keep, self._decays(dt, A, keep)

    def _dt_of(self, s, delta):
        """The step size: that of `prepare`, or made of delta, which reads sh(y)."""
        return s.time[0] if delta is None else self._dt(added(*delta), s.seqs)

    def _normalised(self, *parts):
        """B and C, of (x part, y part or None) each: nrm'ed per group, unless bc_norm is off."""
        cfg = self.config
        if not cfg.bc_norm:
            return [added(*part) for part in parts]
        return [normalise(*part, self.groups, cfg.eps) for part in parts]


class FPMamba1(FPMamba):
    """FP-Mamba-1 (paper Eq. 12–13): Mamba made dense by iterating mixer and selective scan."""

    groups = 1  # of B and C

    def __init__(self, config):
        super().__init__(config)
        d, n = config.d_inner, config.d_state
        self.in_proj = nn.Linear(config.d_model, 2 * d, bias=config.bias)
        if config.use_short_conv:
            self.conv1d = ShortConv(d, config.d_conv)
        self.x_proj = nn.Linear(d, config.dt_rank + 2 * n, bias=False)
        self.dt_proj = StepSize(config.dt_rank, d)
        self.A_log = nn.Parameter(torch.empty(d, n))
        self.D = nn.Parameter(torch.empty(d))
        self._add_y_projections(n, config.dt_rank)
        self.out_norm = EndLayerNorm(d, eps=config.out_norm_epsilon)

    def prepare(self, u, seqs=Sequences()):  # noqa: B008
        """All that depends on x alone. u: (b,l,d_model) → Static."""
        cfg = self.config
        x, z = self.in_proj(u).chunk(2, dim=-1)
        x = seqs.masked(x)
        tail = self._tail(x, seqs)
        x = self._conv(x, seqs, getattr(self, "conv1d", None))
        delta, bc_x = self.x_proj(x).split([cfg.dt_rank, 2 * cfg.d_state], dim=-1)
        return self._static(x, z, bc_x, delta, seqs, tail)

    def _decays(self, dt, A, keep):
        if backend("selective_scan", dt) is not None:  # it is faster without
            return None
        with torch.no_grad():  # the scan's backward makes its own
            return chunk_decays(dt, A, keep)

    def _dt(self, delta, seqs):
        """Δ = softplus(δ W_dtᵀ + b_dt), zero at padding. delta: (b,l,dt_rank) → (b,l,d)."""
        return seqs.masked(F.softplus(self.dt_proj(delta)))

    def scan_time(self, s, x, B, C, delta=None):
        """h_t = exp(Δ_t A) h_{t−1} + (Δ_t x̃_t) B_tᵀ, o_t = h_t C_t. delta: (b,l,dt_rank) where Δ
        reads sh(y)."""
        _, A, keep, decays = s.time
        B, C = self._normalised(B, C)
        dt = self._dt_of(s, delta)
        return selective_scan(x, dt, A, B, C, s.seqs.before("h"), keep, decays)

    def norm_time(self, s, o, x, y=None):
        """LayerNorm((o + D x̃) ⊙ silu(z)), the gate where it is in the loop."""
        z = s.z if self.config.glu_in_loop else None
        return self.out_norm(o, x, self.D, z, y)

    def flops_per_token(self):
        """Forward FLOPs per token (a multiply-add counts two).

        Returns (once, per_iteration): what runs once per solve, and what each step costs.
        """
        c, d = self.config, self.config.d_inner
        once, to_dt = 2 * d * (c.dt_rank + 2 * c.d_state), 2 * c.dt_rank * d
        once += 2 * d * c.d_conv if c.use_short_conv else 0
        scan = 7 * d * c.d_state  # as Mamba counts it
        return self._flops(once, scan + to_dt) if c.dt_h_dep else self._flops(once + to_dt, scan)


class FPMamba2(FPMamba):
    """FP-Mamba-2: heads with a scalar decay and a (headdim × n) state; B, C per group."""

    def __init__(self, config):
        super().__init__(config)
        d, bc = config.d_inner, 2 * config.ngroups * config.d_state
        self.heads, self.groups, self.gate_in_loop = d // config.headdim, config.ngroups, True
        self.in_proj = nn.Linear(config.d_model, 2 * d + bc + self.heads, bias=config.bias)
        if config.use_short_conv:
            self.conv1d = ShortConv(d + bc, config.d_conv)
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.D = nn.Parameter(torch.empty(self.heads))
        self._add_y_projections(bc // 2, self.heads)
        self.out_norm = EndRMSNorm(d, config.out_norm_epsilon)

    def prepare(self, u, seqs=Sequences()):  # noqa: B008
        """All that depends on x alone. u: (b,l,d_model) → Static."""
        d, bc = self.config.d_inner, 2 * self.config.ngroups * self.config.d_state
        z, xbc, delta = self.in_proj(u).split([d, d + bc, self.heads], dim=-1)
        xbc = seqs.masked(xbc)
        tail = self._tail(xbc, seqs)
        xbc = self._conv(xbc, seqs, getattr(self, "conv1d", None))
        x, bc_x = xbc.split([d, bc], dim=-1)
        return self._static(x, z, bc_x, delta, seqs, tail)

    def _decays(self, dt, A, keep):
        if backend("ssd_scan", dt) is not None:
            return None
        return ssd_decays(dt, A, keep, min(SSD_CHUNK, dt.shape[1]))

    def _dt(self, delta, seqs):
        """dt = softplus(delta + bias), zero at padding. delta: (b,l,h) → the same."""
        acc = torch.promote_types(delta.dtype, torch.float32)
        return seqs.masked(F.softplus(delta.to(acc) + self.dt_bias.to(acc)))

    def scan_time(self, s, x, B, C, delta=None):
        """S_t = exp(Δ_t A) S_{t−1} + Δ_t x̃_t B_tᵀ per head, o_t = S_t C_t. delta: (b,l,h) where Δ
        reads sh(y)."""
        cfg, (_, A, keep, decays) = self.config, s.time
        B, C = (m.unflatten(-1, (self.groups, cfg.d_state)) for m in self._normalised(B, C))
        dt, heads = self._dt_of(s, delta), x.unflatten(-1, (self.heads, cfg.headdim))
        o, h = ssd_scan(heads, dt, A, B, C, s.seqs.before("h"), keep, decays)
        return o.flatten(-2), h

    def norm_time(self, s, o, x, y=None):
        """RMSNorm((o + D x̃) ⊙ silu(z)), one D per head."""
        D = self.D.repeat_interleave(self.config.headdim)
        return self.out_norm(o, x, D, s.z, y)

    def flops_per_token(self):
        """See FPMamba1.flops_per_token."""
        c, d = self.config, self.config.d_inner
        bc = 2 * c.ngroups * c.d_state
        once = 2 * (d + bc) * c.d_conv if c.use_short_conv else 0
        return self._flops(once, 7 * d * c.d_state)


class FPRNN(FixedPointBlock):
    """FP-RNN, the didactic model: a vector state h_t = λ_t h_{t−1} + (1 − λ_t) x̃_t (Eq. 6)."""

    def __init__(self, config):
        super().__init__(config)
        d = config.d_inner
        self.in_proj = nn.Linear(config.d_model, 2 * d, bias=config.bias)
        if config.use_short_conv:
            for name in ("x", "b", "mixer", "lambda"):
                self.add_module(f"conv1d_{name}", ShortConv(d, config.d_conv))
            self.conv1d_c = ShortConv(2 * d, config.d_conv)
        self.lambda_proj = nn.Linear(d, d)
        self.b_proj = nn.Linear(d, d, bias=False)
        self.c_proj = nn.Linear(2 * d, d, bias=False)
        self.out_norm = RMSNorm(d, config.out_norm_epsilon)

    def prepare(self, u, seqs=Sequences()):  # noqa: B008
        """All that depends on x alone. u: (b,l,d_model) → Static."""
        x0, z = self.in_proj(u).chunk(2, dim=-1)
        x0 = seqs.masked(x0)
        tail = self._tail(x0, seqs)  # the four convolutions read the same
        x, x_b, x_mixer, x_lambda = (
            self._conv(x0, seqs, getattr(self, f"conv1d_{name}", None))
            for name in ("x", "b", "mixer", "lambda")
        )
        acc = torch.promote_types(u.dtype, torch.float32)
        b = F.silu(self.b_proj(x_b)).to(acc)
        gate = self.lambda_proj(x_lambda).to(acc)
        decay, fresh = torch.sigmoid(gate), torch.sigmoid(-gate)  # λ and 1 − λ
        if seqs.mask is not None:  # the state passes padding unchanged
            decay = decay.masked_fill(~seqs.mask.unsqueeze(-1), 1.0)
            fresh = seqs.masked(fresh)
            x = seqs.masked(x)  # conv1d_x made it silu(bias) there, which conv1d_c would see
        if seqs.starts is not None:
            decay = decay.masked_fill(seqs.starts.unsqueeze(-1), 0.0)
        *raw, weights = self._projections(x_mixer)
        time = (decay, fresh, x)
        return Static(b * x.to(acc), z, *raw, weights, seqs, time, tail)

    def cut_time(self, time, take, mask):
        decay, fresh = map(take, time[:2])
        if mask is not None:
            mask = mask.unsqueeze(-1)
            decay, fresh = decay.masked_fill(~mask, 1.0), fresh * mask
        return decay, fresh, None

    def scan_time(self, s, x):
        """h_t = λ_t h_{t−1} + (1 − λ_t) x̃_t."""
        decay, fresh, _ = s.time
        h = linear_scan(decay, fresh * x, s.seqs.before("h"))
        return h, h[:, -1]

    def norm_time(self, s, o, x, y=None):
        return o if y is None else (o, token_residual(y, o))

    @torch.no_grad()
    def solve_exact(self, s):
        """The fixed point with one reflection, token by token and without iterating.

        Given h_{t−1}, Q = I − a u uᵀ is known and the equation linear in h_t:
        (I − w uᵀ) h_t = c, w = a (1 − λ) ⊙ u, c = λ h_{t−1} + (1 − λ) ⊙ Q (b ⊙ x); hence
        h_t = c + w (uᵀ c) / (1 − uᵀ w) (Sherman & Morrison 1950).
        """
        y = torch.zeros_like(s.x)
        before, h = (s.seqs.before(name) for name in ("y", "h"))
        before, h = (torch.zeros_like(y[:, 0]) if v is None else v.to(y.dtype) for v in (before, h))
        for t in range(y.shape[1]):
            state = BlockState(before, before, h, ())
            now = self.cut(s, lambda v: v[:, t : t + 1], None, state)  # noqa: B023
            raw = added(*self._parts(now, y[:, :1])["mixer"])[:, 0]
            with torch.autocast(y.device.type, enabled=False):
                a, u = self.mixer.vectors(raw, s.mixer)
                u = u[:, 0]
                decay, fresh, _ = (None if v is None else v[:, 0] for v in now.time)
                x = now.x[:, 0]
                c = decay * h + fresh * (x - a * (u * x).sum(-1, keepdim=True) * u)
                w = a * fresh * u
                c_u, w_u = (c * u).sum(-1, keepdim=True), (w * u).sum(-1, keepdim=True)
                h = c + w * c_u / (1 - w_u)
                before = y[:, t] = now.seqs.masked(h.unsqueeze(1))[:, 0]
        f_y, h = self.step(s, y, True)
        return Solution(y, direct_stats(y, f_y, self.rule()), f_y, h)

    def _tails(self, s, y):
        if s.tail is None:
            return ()
        both = torch.cat([s.time[2], y.to(s.time[2].dtype)], -1)
        return s.tail, self._tail(both, s.seqs, 1)

    def finish(self, s, y):
        """c = silu(W_c silu(conv[x, h])); out = W_out RMSNorm(silu(z) ⊙ c ⊙ h)."""
        x = s.time[2]
        if self.config.use_short_conv:
            both = self._conv(torch.cat([x, y.to(x.dtype)], -1), s.seqs, self.conv1d_c, 1)
        else:
            both = torch.cat([x, shift(y, s.seqs, "f_y").to(x.dtype)], -1)
        c = F.silu(self.c_proj(both))
        gated = self.out_norm(F.silu(s.z) * c * y)
        return self.out_proj(gated.to(s.z.dtype))

    def flops_per_token(self):
        """See FPMamba1.flops_per_token."""
        c, d = self.config, self.config.d_inner
        once = 2 * (2 * d * d + 2 * d * d)
        once += 12 * d * c.d_conv if c.use_short_conv else 0
        return self._flops(once, 4 * d)


BLOCKS = {"fp_mamba1": FPMamba1, "fp_mamba2": FPMamba2, "fp_rnn": FPRNN}


def build_block(config):
    """The block named by `config.block`.

    Raises:
        ValueError: an unknown name (FPRNNConfig refuses sizes that do not go together).
    """
    if config.block not in BLOCKS:
        raise ValueError(unknown("block", config.block, BLOCKS))
    return BLOCKS[config.block](config)
