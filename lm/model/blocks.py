"""The fixed-point blocks: `prepare` (once per solve), `step` (once per iteration), `finish`.

What one iteration does besides products and the scan stands first, the exact solve of a layer last.
A kernel's solve is a function of tensors only: `lm.kernels.cell_arguments` has the equations and
explains the arguments.

Shape suffixes: b batch, l length, d channels (d_inner), n d_state, h heads, g groups.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cell import Norm, Own
from .fixed_point import FixedPointBlock, Prepared
from .layers import Projection, RMSNorm, ShortConv, StepSize, WNLinear, affine_map
from .mixers import nrm
from .scan import faster, linear_scan, selective_scan, ssd_scan
from .state import Sequences, once, shift


def normalise(v: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    """nrm(v) (b,l,k) of each of the groups that the last dimension is cut into. v: (b,l,k)."""
    return nrm(v.unflatten(-1, (groups, -1)), eps).flatten(-2)


def combine(
    o: torch.Tensor, x: torch.Tensor, D: torch.Tensor, z: torch.Tensor | None
) -> torch.Tensor:
    """Return (o + D ⊙ x) ⊙ silu(z) (b,l,d) in o's dtype, which a norm then ends an iteration with.

    Args:
        o: Output of the scan, (b,l,d).
        x: Mixed input, (b,l,d).
        D: Skip weights, (d,).
        z: Gate, (b,l,d), or None.
    """
    w = o + D.to(o.dtype) * x
    return w if z is None else w * F.silu(z.to(o.dtype))


class EndLayerNorm(nn.LayerNorm):
    """LayerNorm at the end of an FP-Mamba-1 iteration; a call returns the Norm."""

    def forward(self) -> Norm:  # type: ignore[override]
        return Norm("layer", self.weight, self.bias, self.eps)


class EndRMSNorm(RMSNorm):
    """RMSNorm at the end of an FP-Mamba-2 iteration; a call returns the Norm."""

    def forward(self) -> Norm:  # type: ignore[override]
        return Norm("rms", self.weight, None, self.eps)


class MambaTime(NamedTuple):
    """What FP-Mamba's recurrence needs that depends on x alone."""

    dt: torch.Tensor | None  # (b,l,d) or (b,l,h) step sizes; None: they read sh(y)
    A: torch.Tensor  # (d,n) or (h,) rates
    keep: torch.Tensor | None  # (b,l) 0 at the first token of a packed document, else 1

    def cut(self, start: int, end: int) -> "MambaTime":
        """Of the tokens start ≤ t < end."""
        dt, keep = (None if t is None else t[:, start:end] for t in (self.dt, self.keep))
        return MambaTime(dt, self.A, keep)


class MambaParts(NamedTuple):
    """What FP-Mamba's recurrence reads in one evaluation."""

    dt: torch.Tensor  # (b,l,d) or (b,l,h)
    B: torch.Tensor  # (b,l,groups·n)
    C: torch.Tensor  # (b,l,groups·n)


class FPMamba(FixedPointBlock):
    """What FP-Mamba-1 and 2 share: B, C and the step size, each of x alone or of sh(y) as well
    (Table 1). A subclass also defines `_dt(delta, seqs)`."""

    groups = 1  # of B and C

    def _add_y_projections(self, n, dt):
        """The maps of sh(y) that there are to be: to B, to C (n wide each), to dt, to the gate."""
        cfg, d = self.config, self.config.d_inner
        if cfg.b_h_dep or cfg.c_h_dep:
            self.bc_y_proj = WNLinear(d, n * (cfg.b_h_dep + cfg.c_h_dep))
        if cfg.dt_h_dep:
            self.dt_y_proj = WNLinear(d, dt)
        if cfg.gate_h_dep and not cfg.glu_in_loop:
            self.z_y_proj = WNLinear(d, d)

    def _prepared(self, x, z, bc_x, delta, seqs, tail):
        """Prepared, from u's projections; delta: the step size before its bias and softplus."""
        cfg, acc = self.config, torch.promote_types(x.dtype, torch.float32)
        A = once(seqs.kept, ("A", acc), lambda: self._rates(acc))
        keep = None if seqs.starts is None else 1 - seqs.starts.to(acc)
        dt = None if cfg.dt_h_dep else self._dt(delta, seqs)
        B, C = bc_x.chunk(2, dim=-1)
        others = {"B": Projection("B", B, None), "C": Projection("C", C, None)}
        reading = [name for name, reads in (("B", cfg.b_h_dep), ("C", cfg.c_h_dep)) if reads]
        if reading:
            matrix, bias = once(seqs.kept, "bc_y_proj", lambda: affine_map(self.bc_y_proj, x))
            from_x = bc_x if len(reading) == 2 else others[reading[0]].from_x
            from_x = from_x if bias is None else from_x + bias
            split = from_x.chunk(len(reading), -1), matrix.chunk(len(reading))
            for name, x_part, of_y in zip(reading, *split):
                others[name] = Projection(name, x_part, of_y)
        if cfg.dt_h_dep:
            matrix, bias = once(seqs.kept, "dt_y_proj", lambda: affine_map(self.dt_y_proj, x))
            others["delta"] = Projection("delta", delta if bias is None else delta + bias, matrix)
        mixed = x.to(acc).contiguous()
        projections, weights = self._project(x, mixed, seqs, *others.values())
        time = MambaTime(dt, A, keep)
        return Prepared(mixed, z, projections, weights, seqs, time, tail)

    def _rates(self, dtype):
        """A, (d,n) or (h,)."""
        A = -torch.exp(self.A_log.to(dtype))
        return A.t().contiguous().t() if A.dim() == 2 else A  # as the CPU's scan reads it

    def parts_of(self, s: Prepared, rows: dict[str, torch.Tensor]) -> MambaParts:
        cfg, dt, wide = self.config, s.time.dt, s.x.dtype
        B, C = rows["B"].to(wide), rows["C"].to(wide)
        if cfg.bc_norm:
            B, C = (normalise(v, self.groups, cfg.eps) for v in (B, C))
        return MambaParts(self._dt(rows["delta"].to(wide), s.seqs) if dt is None else dt, B, C)

    def in_units_of_y(self, noise: torch.Tensor | None) -> torch.Tensor | None:
        return None if noise is None else noise * self.out_norm().weight

    def _gate(self, s):
        """silu(z), where the gate is in the loop."""
        return F.silu(s.z.to(s.x.dtype)) if self.gate_in_loop else None

    def norm_time(self, s: Prepared, o: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """norm((o + D x̃) ⊙ silu(z)), the gate where it is in the loop."""
        norm = self.out_norm()
        return norm(combine(o, x, self._D(), s.z if self.gate_in_loop else None))

    def own(self, s: Prepared, parts: MambaParts) -> Own:
        B, C = parts.B, parts.C
        if self.groups > 1:
            B, C = (m.unflatten(-1, (self.groups, -1)) for m in (B, C))
        bc = (B * C).sum(-1, keepdim=self.groups == 1)
        z = s.z if self.gate_in_loop else None
        return Own(parts.dt, bc, self._D(), z, self.out_norm())

    def compiled(
        self, s: Prepared, reflections: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        if s.time.dt is None:
            return None
        cfg, x, raw = self.config, s.x, s.projections.raw
        norm = self.out_norm()
        at = {name: columns.start for name, columns in s.projections.columns.items()}
        layout = at["mixer"], at["mixer"] + reflections[0] * x.shape[-1], at["B"], at["C"]
        options = *reflections, cfg.bc_norm, self.groups, norm.kind, norm.eps, cfg.d_state
        weights = s.time.A, self._D(), norm.weight, norm.bias
        A, D, weight, bias = (None if t is None else t.to(x.dtype) for t in weights)
        y, h = (s.seqs.before(name) for name in ("y", "h"))
        given: tuple[Any, ...] = (
            raw,
            s.projections.weight_y.to(raw.dtype),
            x,
            s.time.dt,
            A,
            s.time.keep,
            self._gate(s),
            D,
            weight,
            bias,
            None if y is None else y.to(x.dtype),
            h,
            s.seqs.adjoint_norm,
        )
        readout = s.projections.readout(x.dtype)
        given = given if readout is None else (*given, readout)  # not every backend has it
        return faster("cell", "cell", x, layout, options, *given)


class FPMamba1(FPMamba):
    """FP-Mamba-1 (paper Eq. 12–13): Mamba made dense by iterating mixer and selective scan."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        d, n = config.d_inner, config.d_state
        self.in_proj = nn.Linear(config.d_model, 2 * d, bias=False)
        if config.use_short_conv:
            self.conv1d = ShortConv(d, config.d_conv)
        self.x_proj = nn.Linear(d, config.dt_rank + 2 * n, bias=False)
        self.dt_proj = StepSize(config.dt_rank, d)
        self.A_log = nn.Parameter(torch.empty(d, n))
        self.D = nn.Parameter(torch.empty(d))
        self._add_y_projections(n, config.dt_rank)
        self.out_norm = EndLayerNorm(d, eps=config.out_norm_epsilon)
        self.gate_in_loop = config.glu_in_loop

    def prepare(self, u: torch.Tensor, seqs: Sequences = Sequences()) -> Prepared:  # noqa: B008
        cfg = self.config
        x, z = self.in_proj(u).chunk(2, dim=-1)
        x = seqs.masked(x)
        tail = self._tail(x, seqs)
        x = self._conv(x, seqs, getattr(self, "conv1d", None))
        delta, bc_x = self.x_proj(x).split([cfg.dt_rank, 2 * cfg.d_state], dim=-1)
        return self._prepared(x, z, bc_x, delta, seqs, tail)

    def _dt(self, delta, seqs):
        """Δ = softplus(δ W_dtᵀ + b_dt), zero at padding. delta: (b,l,dt_rank) → (b,l,d)."""
        return seqs.masked(F.softplus(self.dt_proj(delta)))

    def scan_time(
        self, s: Prepared, parts: MambaParts, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """h_t = exp(Δ_t A) h_{t−1} + (Δ_t x̃_t) B_tᵀ, o_t = h_t C_t."""
        dt, B, C = parts
        return selective_scan(x, dt, s.time.A, B, C, s.seqs.before("h"), s.time.keep)

    def decay(self, s: Prepared, parts: MambaParts) -> torch.Tensor:
        """exp(Δ_t A), over channels and their n numbers."""
        kept = torch.exp(parts.dt.unsqueeze(-1) * s.time.A).mean((-2, -1))
        return kept if s.time.keep is None else kept * s.time.keep

    def _D(self):
        """(d,)"""
        return self.D

    def flops_per_token(self) -> tuple[int, int]:
        c, d = self.config, self.config.d_inner
        once, to_dt = 2 * d * (c.dt_rank + 2 * c.d_state), 2 * c.dt_rank * d
        once += 2 * d * c.d_conv if c.use_short_conv else 0
        scan = 9 * d * c.d_state  # Mamba's own count (state-spaces/mamba, issue 110)
        return self._flops(once, scan + to_dt) if c.dt_h_dep else self._flops(once + to_dt, scan)


class FPMamba2(FPMamba):
    """FP-Mamba-2: heads with a scalar decay and a (headdim × n) state; B, C per group."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        d, bc = config.d_inner, 2 * config.ngroups * config.d_state
        self.heads, self.groups, self.gate_in_loop = d // config.headdim, config.ngroups, True
        self.in_proj = nn.Linear(config.d_model, 2 * d + bc + self.heads, bias=False)
        if config.use_short_conv:
            self.conv1d = ShortConv(d + bc, config.d_conv)
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.D = nn.Parameter(torch.empty(self.heads))
        self._add_y_projections(bc // 2, self.heads)
        self.out_norm = EndRMSNorm(d, config.out_norm_epsilon)

    def prepare(self, u: torch.Tensor, seqs: Sequences = Sequences()) -> Prepared:  # noqa: B008
        d, bc = self.config.d_inner, 2 * self.config.ngroups * self.config.d_state
        z, xbc, delta = self.in_proj(u).split([d, d + bc, self.heads], dim=-1)
        xbc = seqs.masked(xbc)
        tail = self._tail(xbc, seqs)
        xbc = self._conv(xbc, seqs, getattr(self, "conv1d", None))
        x, bc_x = xbc.split([d, bc], dim=-1)
        return self._prepared(x, z, bc_x, delta, seqs, tail)

    def _dt(self, delta, seqs):
        """dt = softplus(delta + bias), zero at padding. delta: (b,l,h) → the same."""
        acc = torch.promote_types(delta.dtype, torch.float32)
        return seqs.masked(F.softplus(delta.to(acc) + self.dt_bias.to(acc)))

    def scan_time(
        self, s: Prepared, parts: MambaParts, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """S_t = exp(Δ_t A) S_{t−1} + Δ_t x̃_t B_tᵀ per head, o_t = S_t C_t."""
        cfg, A, keep = self.config, s.time.A, s.time.keep
        B, C = (m.unflatten(-1, (self.groups, cfg.d_state)) for m in (parts.B, parts.C))
        heads = x.unflatten(-1, (self.heads, cfg.headdim))
        o, h = ssd_scan(heads, parts.dt, A, B, C, s.seqs.before("h"), keep)
        return o.flatten(-2), h

    def decay(self, s: Prepared, parts: MambaParts) -> torch.Tensor:
        """exp(Δ_t A), over heads."""
        kept = torch.exp(parts.dt * s.time.A).mean(-1)
        return kept if s.time.keep is None else kept * s.time.keep

    def _D(self):
        """(d,)"""
        return self.D.repeat_interleave(self.config.headdim)

    def flops_per_token(self) -> tuple[int, int]:
        c, d = self.config, self.config.d_inner
        bc = 2 * c.ngroups * c.d_state
        once = 2 * (d + bc) * c.d_conv if c.use_short_conv else 0
        return self._flops(once, 9 * d * c.d_state)  # as FPMamba1's


class VectorTime(NamedTuple):
    """What FP-RNN's recurrence needs that depends on x alone, and its x."""

    decay: torch.Tensor  # (b,l,d) λ, and
    fresh: torch.Tensor  # (b,l,d) 1 − λ
    x: torch.Tensor  # (b,l,d) what `finish` reads besides the states
    keep: torch.Tensor | None  # (b,l) 0 at the first token of a packed document, else 1

    def cut(self, start: int, end: int) -> "VectorTime":
        """Of the tokens start ≤ t < end."""
        return VectorTime(*(None if t is None else t[:, start:end] for t in self))


class FPRNN(FixedPointBlock):
    """FP-RNN, the didactic model: a vector state h_t = λ_t h_{t−1} + (1 − λ_t) x̃_t (Eq. 6)."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        d = config.d_inner
        self.in_proj = nn.Linear(config.d_model, 2 * d, bias=False)
        if config.use_short_conv:
            for name in ("x", "b", "mixer", "lambda"):
                self.add_module(f"conv1d_{name}", ShortConv(d, config.d_conv))
            self.conv1d_c = ShortConv(2 * d, config.d_conv)
        self.lambda_proj = nn.Linear(d, d)
        self.b_proj = nn.Linear(d, d, bias=False)
        self.c_proj = nn.Linear(2 * d, d, bias=False)
        self.out_norm = RMSNorm(d, config.out_norm_epsilon)

    def prepare(self, u: torch.Tensor, seqs: Sequences = Sequences()) -> Prepared:  # noqa: B008
        x0, z = self.in_proj(u).chunk(2, dim=-1)
        x0 = seqs.masked(x0)
        tail = self._tail(x0, seqs)  # the four convolutions read the same
        x, x_b, x_mixer, x_lambda = (
            self._conv(x0, seqs, getattr(self, f"conv1d_{name}", None))
            for name in ("x", "b", "mixer", "lambda")
        )
        acc = torch.promote_types(u.dtype, torch.float32)
        keep = None if seqs.starts is None else 1 - seqs.starts.to(acc)
        b = F.silu(self.b_proj(x_b)).to(acc)
        gate = self.lambda_proj(x_lambda).to(acc)
        decay, fresh = torch.sigmoid(gate), torch.sigmoid(-gate)  # λ and 1 − λ
        if seqs.mask is not None:  # the state passes padding unchanged
            decay = decay.masked_fill(~seqs.mask.unsqueeze(-1), 1.0)
            fresh = seqs.masked(fresh)
            x = seqs.masked(x)  # conv1d_x made it silu(bias) there, which conv1d_c would see
        if seqs.starts is not None:
            decay = decay.masked_fill(seqs.starts.unsqueeze(-1), 0.0)
        mixed = b * x.to(acc)
        projections, weights = self._project(x_mixer, mixed, seqs)
        time = VectorTime(decay, fresh, x, keep)
        return Prepared(mixed, z, projections, weights, seqs, time, tail)

    def parts_of(self, s: Prepared, rows: dict[str, torch.Tensor]) -> VectorTime:
        return s.time

    def scan_time(
        self, s: Prepared, parts: VectorTime, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """h_t = λ_t h_{t−1} + (1 − λ_t) x̃_t."""
        h = linear_scan(parts.decay, parts.fresh * x, s.seqs.before("h"))
        return h, h[:, -1]

    def decay(self, s: Prepared, parts: VectorTime) -> torch.Tensor:
        """λ_t, over channels."""
        return parts.decay.mean(-1)

    def norm_time(self, s: Prepared, o: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return o

    def own(self, s: Prepared, parts: VectorTime) -> Own:
        """Linear in h_t, as there is no norm: Q = I − a u uᵀ is known and, for one reflection,
        (I − w uᵀ) h_t = c with w = a (1 − λ) ⊙ u has the solution of Sherman & Morrison (1950)."""
        return Own(parts.fresh, None, None, None, Norm("none"))

    def compiled(
        self, s: Prepared, reflections: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        x, raw, at = s.x, s.projections.raw, s.projections.columns["mixer"].start
        # No norm; B and C, which the kernel does not read here, count as one normalised group.
        options = (*reflections, True, 1, "none", 0.0, 0)
        layout = at, at + reflections[0] * x.shape[-1], 0, 0
        before = (s.seqs.before(name) for name in ("y", "h"))
        y, h = (None if t is None else t.to(x.dtype) for t in before)
        weight_y = s.projections.weight_y.to(raw.dtype)
        given = raw, weight_y, x, s.time.decay, s.time.fresh, s.time.keep, y, h
        return faster("cell", "cell_rnn", x, layout, options, *given, s.seqs.adjoint_norm)

    def _tails(self, s, y):
        if s.tail is None:
            return ()
        both = torch.cat([s.time.x, y.to(s.time.x.dtype)], -1)
        return s.tail, self._tail(both, s.seqs, 1)

    def finish(self, s: Prepared, y: torch.Tensor) -> torch.Tensor:
        """c = silu(W_c silu(conv[x, h])); out = W_out RMSNorm(silu(z) ⊙ c ⊙ h)."""
        x = s.time.x
        if self.config.use_short_conv:
            both = self._conv(torch.cat([x, y.to(x.dtype)], -1), s.seqs, self.conv1d_c, 1)
        else:
            both = torch.cat([x, shift(y, s.seqs, "f_y").to(x.dtype)], -1)
        c = F.silu(self.c_proj(both))
        gated = self.out_norm(F.silu(s.z) * c * y)
        return self.out_proj(gated.to(s.z.dtype))

    def flops_per_token(self) -> tuple[int, int]:
        c, d = self.config, self.config.d_inner
        once = 2 * (2 * d * d + 2 * d * d)
        once += 12 * d * c.d_conv if c.use_short_conv else 0
        return self._flops(once, 4 * d)


BLOCKS = {"fp_mamba1": FPMamba1, "fp_mamba2": FPMamba2, "fp_rnn": FPRNN}


def build_block(config: Any) -> FixedPointBlock:
    """The block named by `config.block`; FPRNNConfig refuses what does not go together."""
    return BLOCKS[config.block](config)
