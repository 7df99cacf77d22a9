"""The fixed-point layers: FP-Mamba-1, FP-Mamba-2 and FP-RNN.

Each defines its input projections and output (once per solve), and its recurrence and norm (once
per iteration). `run_kernel` calls the kernel that runs the whole exact solve; its arguments are
explained in lm/kernels.

Shape suffixes: b batch, l length, d channels (d_inner), n d_state, h heads, g groups.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cell import Norm, TokenEquation
from .fixed_point import FixedPointBlock
from .layers import Projection, RMSNorm, ShortConv, StepSize, WNLinear, affine_map
from .mixer_base import ReflectionOptions
from .mixers import nrm
from .scan import faster, linear_scan, selective_scan, ssd_scan
from .state import Sequences, cached, shift
from .strategies import SolveInputs, Solver


def normalize_groups(v: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    """Divide each group of channels of v (b,l,g·n) by its norm; the result has the same shape."""
    return nrm(v.unflatten(-1, (groups, -1)), eps).flatten(-2)


def combine(
    o: torch.Tensor, x: torch.Tensor, D: torch.Tensor, z: torch.Tensor | None
) -> torch.Tensor:
    """Return (o + D ⊙ x) ⊙ silu(z) (b,l,d) in o's dtype, before the norm that ends an iteration.

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


class MambaConstants(NamedTuple):
    """Terms of FP-Mamba's recurrence that depend on the layer's input only."""

    dt: torch.Tensor | None  # (b,l,d) or (b,l,h) step sizes; None: they read sh(y)
    A: torch.Tensor  # (d,n) or (h,) decay rates, negative
    keep: torch.Tensor | None  # (b,l) 0 at the first token of a packed document, otherwise 1

    def cut(self, start: int, end: int) -> "MambaConstants":
        """Return the constants of tokens start ≤ t < end."""
        dt, keep = (None if t is None else t[:, start:end] for t in (self.dt, self.keep))
        return MambaConstants(dt, self.A, keep)


class MambaParameters(NamedTuple):
    """Parameters of FP-Mamba's recurrence in one evaluation."""

    dt: torch.Tensor  # (b,l,d) or (b,l,h)
    B: torch.Tensor  # (b,l,g·n)
    C: torch.Tensor  # (b,l,g·n)


class FPMamba(FixedPointBlock):
    """Common parts of FP-Mamba-1 and 2.

    B, C and the step size depend on x, or on x and sh(y) (Table 1). A subclass also defines
    `_project_input`, `_step_sizes` and `_skip_weights`.
    """

    groups = 1  # of B and C

    def _add_y_projections(self, n, dt):
        """Create the maps of sh(y) to B and C (n wide each), to the step size, and to the gate."""
        cfg, d = self.config, self.config.d_inner
        if cfg.b_h_dep or cfg.c_h_dep:
            self.bc_y_proj = WNLinear(d, n * (cfg.b_h_dep + cfg.c_h_dep))
        if cfg.dt_h_dep:
            self.dt_y_proj = WNLinear(d, dt)
        if cfg.gate_h_dep and not cfg.glu_in_loop:
            self.z_y_proj = WNLinear(d, d)

    def prepare(
        self,
        u: torch.Tensor,
        seqs: Sequences = Sequences(),  # noqa: B008
        solver: Solver | None = None,
    ) -> SolveInputs:
        solver = solver or self.choose_solver(u, seqs)
        # 1. Project: x, z (b,l,d), B and C (b,l,2·g·n), step sizes before bias and softplus.
        x, z, bc_x, delta, conv_tail = self._project_input(u, seqs)
        # 2. Compute the recurrence's constants.
        wide = torch.promote_types(x.dtype, torch.float32)
        A = cached(seqs.cache, ("A", wide), lambda: self._decay_rates(wide))
        keep = None if seqs.starts is None else 1 - seqs.starts.to(wide)
        dt = None if self.config.dt_h_dep else self._step_sizes(delta, seqs)
        # 3. Join all maps that may read sh(y): mixer, B, C, step size.
        maps = self._y_projections(x, bc_x, delta, seqs)
        mixed = x.to(wide).contiguous()
        projections, mixer = self._join_projections(x, mixed, seqs, solver, *maps)
        recurrence = MambaConstants(dt, A, keep)
        return SolveInputs(mixed, z, projections, mixer, seqs, recurrence, conv_tail)

    def _y_projections(self, x, bc_x, delta, seqs):
        """Return the Projections to B, to C, and to the step size if it reads sh(y)."""
        cfg = self.config
        B, C = bc_x.chunk(2, dim=-1)
        maps = {"B": Projection("B", B, None), "C": Projection("C", C, None)}
        names = [name for name, reads_y in (("B", cfg.b_h_dep), ("C", cfg.c_h_dep)) if reads_y]
        if names:
            matrix, bias = cached(seqs.cache, "bc_y_proj", lambda: affine_map(self.bc_y_proj, x))
            from_x = bc_x if len(names) == 2 else maps[names[0]].from_x
            from_x = from_x if bias is None else from_x + bias
            parts = from_x.chunk(len(names), -1), matrix.chunk(len(names))
            for name, x_part, weight_y in zip(names, *parts):
                maps[name] = Projection(name, x_part, weight_y)
        if cfg.dt_h_dep:
            matrix, bias = cached(seqs.cache, "dt_y_proj", lambda: affine_map(self.dt_y_proj, x))
            maps["delta"] = Projection("delta", delta if bias is None else delta + bias, matrix)
        return maps.values()

    def _project_input(self, u, seqs):
        """Return x, z, B and C, the step size before bias and softplus, and the conv's tail."""
        raise NotImplementedError

    def _step_sizes(self, delta, seqs):
        """Return softplus of the step sizes plus bias, zero at padding."""
        raise NotImplementedError

    def _skip_weights(self):
        """Return D, (d,)."""
        raise NotImplementedError

    def _decay_rates(self, dtype):
        """Return A, (d,n) or (h,)."""
        A = -torch.exp(self.A_log.to(dtype))
        return A.t().contiguous().t() if A.dim() == 2 else A  # strides that the CPU's scan reads

    def select_parameters(
        self, inputs: SolveInputs, rows: dict[str, torch.Tensor]
    ) -> MambaParameters:
        cfg, dt, wide = self.config, inputs.recurrence.dt, inputs.x.dtype
        B, C = rows["B"].to(wide), rows["C"].to(wide)
        if cfg.bc_norm:
            B, C = (normalize_groups(v, self.groups, cfg.eps) for v in (B, C))
        if dt is None:
            dt = self._step_sizes(rows["delta"].to(wide), inputs.seqs)
        return MambaParameters(dt, B, C)

    def scale_noise(self, noise: torch.Tensor | None) -> torch.Tensor | None:
        return None if noise is None else noise * self.out_norm().weight

    def normalize(self, inputs: SolveInputs, o: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return norm((o + D x̃) ⊙ silu(z)), without silu(z) unless the gate is inside the loop."""
        norm = self.out_norm()
        return norm(combine(o, x, self._skip_weights(), inputs.z if self.gate_in_loop else None))

    def token_equation(self, inputs: SolveInputs, params: MambaParameters) -> TokenEquation:
        B, C = params.B, params.C
        if self.groups > 1:
            B, C = (m.unflatten(-1, (self.groups, -1)) for m in (B, C))
        bc = (B * C).sum(-1, keepdim=self.groups == 1)
        z = inputs.z if self.gate_in_loop else None
        return TokenEquation(params.dt, bc, self._skip_weights(), z, self.out_norm())

    def run_kernel(
        self, inputs: SolveInputs, mixer_options: ReflectionOptions
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        dt, A, keep = inputs.recurrence
        if dt is None:
            return None
        cfg, x, seqs, raw = self.config, inputs.x, inputs.seqs, inputs.projections.raw
        norm = self.out_norm()
        start = {name: columns.start for name, columns in inputs.projections.columns.items()}
        gates = start["mixer"] + mixer_options.rank * x.shape[-1]
        layout = start["mixer"], gates, start["B"], start["C"]
        options = *mixer_options, cfg.bc_norm, self.groups, norm.kind, norm.eps, cfg.d_state
        weights = A, self._skip_weights(), norm.weight, norm.bias
        A, D, weight, bias = (None if t is None else t.to(x.dtype) for t in weights)
        gate = F.silu(inputs.z.to(x.dtype)) if self.gate_in_loop else None
        y, h = (seqs.get_state(name) for name in ("y", "h"))
        arguments = {
            "layout": layout,
            "options": options,
            "raw": raw,
            "weight_y": inputs.projections.weight_y.to(raw.dtype),
            "x": x,
            "dt": dt,
            "A": A,
            "keep": keep,
            "gate": gate,
            "D": D,
            "norm_weight": weight,
            "norm_bias": bias,
            "y0": None if y is None else y.to(x.dtype),
            "h0": h,
            "adjoint": seqs.adjoint_norm,
            "readout": inputs.projections.readout(x.dtype),
        }
        return faster("cell", "cell", x, arguments)


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

    def _project_input(self, u, seqs):
        cfg = self.config
        x, z = self.in_proj(u).chunk(2, dim=-1)
        x = seqs.zero_padding(x)
        conv_tail = self._make_conv_tail(x, seqs)
        x = self._convolve(x, seqs, getattr(self, "conv1d", None))
        delta, bc_x = self.x_proj(x).split([cfg.dt_rank, 2 * cfg.d_state], dim=-1)
        return x, z, bc_x, delta, conv_tail

    def _step_sizes(self, delta, seqs):
        """Return Δ = softplus(δ W_dtᵀ + b_dt) (b,l,d), zero at padding. delta: (b,l,dt_rank)."""
        return seqs.zero_padding(F.softplus(self.dt_proj(delta)))

    def run_recurrence(
        self, inputs: SolveInputs, params: MambaParameters, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run h_t = exp(Δ_t A) h_{t−1} + (Δ_t x̃_t) B_tᵀ, o_t = h_t C_t."""
        _, A, keep = inputs.recurrence
        return selective_scan(x, params.dt, A, params.B, params.C, inputs.seqs.get_state("h"), keep)

    def mean_decay(self, inputs: SolveInputs, params: MambaParameters) -> torch.Tensor:
        """Return the mean of exp(Δ_t A) over channels and their n states, (b,l)."""
        _, A, keep = inputs.recurrence
        decay = torch.exp(params.dt.unsqueeze(-1) * A).mean((-2, -1))
        return decay if keep is None else decay * keep

    def _skip_weights(self):
        return self.D

    def flops_per_token(self) -> tuple[int, int]:
        c, d = self.config, self.config.d_inner
        x_proj, dt_proj = 2 * d * (c.dt_rank + 2 * c.d_state), 2 * c.dt_rank * d
        per_solve = x_proj + (2 * d * c.d_conv if c.use_short_conv else 0)
        scan = 9 * d * c.d_state  # Mamba's own count (state-spaces/mamba, issue 110)
        if c.dt_h_dep:
            return self._count_flops(per_solve, scan + dt_proj)
        return self._count_flops(per_solve + dt_proj, scan)


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

    def _project_input(self, u, seqs):
        d, bc = self.config.d_inner, 2 * self.config.ngroups * self.config.d_state
        z, xbc, delta = self.in_proj(u).split([d, d + bc, self.heads], dim=-1)
        xbc = seqs.zero_padding(xbc)
        conv_tail = self._make_conv_tail(xbc, seqs)
        xbc = self._convolve(xbc, seqs, getattr(self, "conv1d", None))
        x, bc_x = xbc.split([d, bc], dim=-1)
        return x, z, bc_x, delta, conv_tail

    def _step_sizes(self, delta, seqs):
        """Return Δ = softplus(δ + bias) (b,l,h), zero at padding. delta: (b,l,h)."""
        acc = torch.promote_types(delta.dtype, torch.float32)
        return seqs.zero_padding(F.softplus(delta.to(acc) + self.dt_bias.to(acc)))

    def run_recurrence(
        self, inputs: SolveInputs, params: MambaParameters, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run S_t = exp(Δ_t A) S_{t−1} + Δ_t x̃_t B_tᵀ per head, o_t = S_t C_t."""
        cfg, (_, A, keep) = self.config, inputs.recurrence
        B, C = (m.unflatten(-1, (self.groups, cfg.d_state)) for m in (params.B, params.C))
        heads = x.unflatten(-1, (self.heads, cfg.headdim))
        o, h = ssd_scan(heads, params.dt, A, B, C, inputs.seqs.get_state("h"), keep)
        return o.flatten(-2), h

    def mean_decay(self, inputs: SolveInputs, params: MambaParameters) -> torch.Tensor:
        """Return the mean of exp(Δ_t A) over heads, (b,l)."""
        _, A, keep = inputs.recurrence
        decay = torch.exp(params.dt * A).mean(-1)
        return decay if keep is None else decay * keep

    def _skip_weights(self):
        return self.D.repeat_interleave(self.config.headdim)

    def flops_per_token(self) -> tuple[int, int]:
        c, d = self.config, self.config.d_inner
        bc = 2 * c.ngroups * c.d_state
        per_solve = 2 * (d + bc) * c.d_conv if c.use_short_conv else 0
        return self._count_flops(per_solve, 9 * d * c.d_state)  # the same scan as FPMamba1's


class VectorConstants(NamedTuple):
    """Terms of FP-RNN's recurrence, all of which depend on the layer's input only."""

    decay: torch.Tensor  # (b,l,d) λ
    complement: torch.Tensor  # (b,l,d) 1 − λ
    x: torch.Tensor  # (b,l,d) what `gate_and_project` reads besides the states
    keep: torch.Tensor | None  # (b,l) 0 at the first token of a packed document, otherwise 1

    def cut(self, start: int, end: int) -> "VectorConstants":
        """Return the constants of tokens start ≤ t < end."""
        return VectorConstants(*(None if t is None else t[:, start:end] for t in self))


class FPRNN(FixedPointBlock):
    """FP-RNN, the didactic model: a vector state h_t = λ_t h_{t−1} + (1 − λ_t) x̃_t (Eq. 6).

    It has no norm, so h is the iterate y.
    """

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

    def prepare(
        self,
        u: torch.Tensor,
        seqs: Sequences = Sequences(),  # noqa: B008
        solver: Solver | None = None,
    ) -> SolveInputs:
        solver = solver or self.choose_solver(u, seqs)
        # 1. Project: x, z (b,l,d).
        x0, z = self.in_proj(u).chunk(2, dim=-1)
        x0 = seqs.zero_padding(x0)
        conv_tail = self._make_conv_tail(x0, seqs)  # one for all four convolutions, which read x0
        x, x_b, x_mixer, x_lambda = (
            self._convolve(x0, seqs, getattr(self, f"conv1d_{name}", None))
            for name in ("x", "b", "mixer", "lambda")
        )
        # 2. Compute the recurrence's constants: λ and 1 − λ (b,l,d).
        wide = torch.promote_types(u.dtype, torch.float32)
        keep = None if seqs.starts is None else 1 - seqs.starts.to(wide)
        b = F.silu(self.b_proj(x_b)).to(wide)
        gate = self.lambda_proj(x_lambda).to(wide)
        decay, complement = torch.sigmoid(gate), torch.sigmoid(-gate)
        if seqs.mask is not None:  # the state passes padding unchanged
            decay = decay.masked_fill(~seqs.mask.unsqueeze(-1), 1.0)
            complement = seqs.zero_padding(complement)
            x = seqs.zero_padding(x)  # conv1d_x made it silu(bias), which conv1d_c would read
        if seqs.starts is not None:
            decay = decay.masked_fill(seqs.starts.unsqueeze(-1), 0.0)
        # 3. Compute the mixer's map.
        mixed = b * x.to(wide)
        projections, mixer = self._join_projections(x_mixer, mixed, seqs, solver)
        recurrence = VectorConstants(decay, complement, x, keep)
        return SolveInputs(mixed, z, projections, mixer, seqs, recurrence, conv_tail)

    def select_parameters(
        self, inputs: SolveInputs, rows: dict[str, torch.Tensor]
    ) -> VectorConstants:
        return inputs.recurrence

    def run_recurrence(
        self, inputs: SolveInputs, params: VectorConstants, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run h_t = λ_t h_{t−1} + (1 − λ_t) x̃_t."""
        h = linear_scan(params.decay, params.complement * x, inputs.seqs.get_state("h"))
        return h, h[:, -1]

    def mean_decay(self, inputs: SolveInputs, params: VectorConstants) -> torch.Tensor:
        """Return the mean of λ_t over channels, (b,l)."""
        return params.decay.mean(-1)

    def normalize(self, inputs: SolveInputs, o: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return o

    def token_equation(self, inputs: SolveInputs, params: VectorConstants) -> TokenEquation:
        """Return the tokens' own equations, which are linear in h_t because there is no norm.

        For one reflection Q = I − a u uᵀ, (I − w uᵀ) h_t = c with w = a (1 − λ) ⊙ u has the closed
        form of Sherman & Morrison (1950).
        """
        return TokenEquation(params.complement, None, None, None, Norm("none"))

    def run_kernel(
        self, inputs: SolveInputs, mixer_options: ReflectionOptions
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        x, raw = inputs.x, inputs.projections.raw
        start = inputs.projections.columns["mixer"].start
        # No norm; B and C, which this kernel does not read, count as one normalized group.
        options = (*mixer_options, True, 1, "none", 0.0, 0)
        layout = start, start + mixer_options.rank * x.shape[-1], 0, 0
        state = (inputs.seqs.get_state(name) for name in ("y", "h"))
        y, h = (None if t is None else t.to(x.dtype) for t in state)
        decay, complement, _, keep = inputs.recurrence
        arguments = {
            "layout": layout,
            "options": options,
            "raw": raw,
            "weight_y": inputs.projections.weight_y.to(raw.dtype),
            "x": x,
            "decay": decay,
            "fresh": complement,
            "keep": keep,
            "y0": y,
            "h0": h,
            "adjoint": inputs.seqs.adjoint_norm,
        }
        return faster("cell", "cell_rnn", x, arguments)

    def _make_conv_state(self, inputs, y):
        if inputs.conv_tail is None:
            return ()
        x = inputs.recurrence.x
        return inputs.conv_tail, self._make_conv_tail(
            torch.cat([x, y.to(x.dtype)], -1), inputs.seqs, 1
        )

    def gate_and_project(self, inputs: SolveInputs, y: torch.Tensor) -> torch.Tensor:
        """Return W_out RMSNorm(silu(z) ⊙ c ⊙ h) with c = silu(W_c silu(conv[x, h])); h is y."""
        x, seqs = inputs.recurrence.x, inputs.seqs
        if self.config.use_short_conv:
            x_and_h = self._convolve(torch.cat([x, y.to(x.dtype)], -1), seqs, self.conv1d_c, 1)
        else:
            x_and_h = torch.cat([x, shift(y, seqs, "f_y").to(x.dtype)], -1)
        c = F.silu(self.c_proj(x_and_h))
        gated = self.out_norm(F.silu(inputs.z) * c * y)
        return self.out_proj(gated.to(inputs.z.dtype))

    def flops_per_token(self) -> tuple[int, int]:
        c, d = self.config, self.config.d_inner
        per_solve = 2 * (2 * d * d + 2 * d * d)
        per_solve += 12 * d * c.d_conv if c.use_short_conv else 0
        return self._count_flops(per_solve, 4 * d)


BLOCKS = {"fp_mamba1": FPMamba1, "fp_mamba2": FPMamba2, "fp_rnn": FPRNN}


def build_block(config: Any) -> FixedPointBlock:
    """Return the block that `config.block` names; FPRNNConfig has checked the fields."""
    return BLOCKS[config.block](config)
