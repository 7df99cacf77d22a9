"""The fixed-point layers: FP-Mamba-1, FP-Mamba-2 and FP-RNN.

Each defines its input projections and output (once per solve), and its recurrence and norm (once
per iteration). `run_kernel` calls the kernel that runs the whole exact solve; its arguments are
explained in lm/kernels.

Shape suffixes: b batch, l length, d channels (d_inner), n d_state, h heads, g groups.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cell import Norm, TokenEquation
from .fixed_point import BlockFlops, FixedPointBlock, choose_weight_like
from .layers import Projection, RMSNorm, ShortConv, StepSize, WNLinear, affine_map, convolve
from .mixer_base import ReflectionOptions
from .mixers import nrm
from .scan import linear_scan, selective_scan, ssd_scan, try_kernel
from .state import Sequences, cached, last_valid_tokens, shift
from .strategies import SolveInputs, Solver


def normalize_groups(v: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    """Divide each group of channels of v (b,l,g·n) by its norm; the result has the same shape."""
    return nrm(v.unflatten(-1, (groups, -1)), eps).flatten(-2)


def apply_skip_and_gate(
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
    """LayerNorm at the end of an FP-Mamba-1 iteration. A call returns its parameters as a Norm."""

    def forward(self) -> Norm:  # type: ignore[override]
        return Norm("layer", self.weight, self.bias, self.eps)


class EndRMSNorm(RMSNorm):
    """RMSNorm at the end of an FP-Mamba-2 iteration. A call returns its parameters as a Norm."""

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
    """Parameters of FP-Mamba's recurrence in one evaluation of f."""

    dt: torch.Tensor  # (b,l,d) or (b,l,h) step sizes
    B: torch.Tensor  # (b,l,g·n)
    C: torch.Tensor  # (b,l,g·n)


class InputProjections(NamedTuple):
    """Projections of FP-Mamba's input."""

    x: torch.Tensor  # (b,l,d) after the convolution
    z: torch.Tensor  # (b,l,d) output gate, before silu
    bc_x: torch.Tensor  # (b,l,2·g·n) B and C, without the contribution of sh(y)
    delta: torch.Tensor  # (b,l,·) step sizes, the argument of `_compute_dt`
    conv_tail: torch.Tensor | None  # (b,d_conv−1,·) last inputs of the convolution


class FPMamba(FixedPointBlock):
    """Common parts of FP-Mamba-1 and 2.

    B, C and the step size depend on x, or on x and sh(y) (paper, Table 1).
    """

    groups = 1  # of B and C

    def _project_input(self, u: torch.Tensor, seqs: Sequences) -> InputProjections:
        raise NotImplementedError

    def _compute_dt(self, delta: torch.Tensor, seqs: Sequences) -> torch.Tensor:
        """Return the step sizes, zero at padding."""
        raise NotImplementedError

    def _get_skip_weights(self) -> torch.Tensor:
        """Return D, (d,)."""
        raise NotImplementedError

    def _add_y_projections(self, bc_width, dt_width):
        """Create the maps of sh(y) that the fields `…_h_dep` enable. bc_width: channels of B."""
        cfg, d = self.config, self.config.d_inner
        if cfg.b_h_dep or cfg.c_h_dep:
            self.bc_y_proj = WNLinear(d, bc_width * (cfg.b_h_dep + cfg.c_h_dep))
        if cfg.dt_h_dep:
            self.dt_y_proj = WNLinear(d, dt_width)
        if cfg.gate_h_dep and not cfg.glu_in_loop:
            self.z_y_proj = WNLinear(d, d)

    def prepare(
        self,
        u: torch.Tensor,
        seqs: Sequences = Sequences(),  # noqa: B008
        solver: Solver | None = None,
    ) -> SolveInputs:
        solver = solver or self.choose_solver(u, seqs)
        # 1. Project the input.
        x, z, bc_x, delta, conv_tail = self._project_input(u, seqs)
        # 2. Compute the recurrence's constants.
        dtype = torch.promote_types(x.dtype, torch.float32)
        A = cached(seqs.cache, ("A", dtype), lambda: self._compute_decay_rates(dtype))
        keep = None if seqs.starts is None else 1 - seqs.starts.to(dtype)
        dt = None if self.config.dt_h_dep else self._compute_dt(delta, seqs)
        # 3. Join all projections that may read sh(y): mixer, B, C, step size.
        wide_x = x.to(dtype).contiguous()
        others = self._make_projections(choose_weight_like(x, wide_x, solver), bc_x, delta, seqs)
        projections, mixer = self._join_projections(x, wide_x, seqs, solver, *others)
        recurrence = MambaConstants(dt, A, keep)
        return SolveInputs(wide_x, z, projections, mixer, seqs, recurrence, conv_tail)

    def _convolve_input(self, x, seqs):
        """Return silu(conv(x)), x (b,l,·), and its last inputs; without `conv1d` x and None."""
        x = seqs.zero_padding(x)
        if not self.config.use_short_conv:
            return x, None
        return convolve(self.conv1d, x, seqs, self.config.d_conv, 0)

    def _make_projections(self, like, bc_x, delta, seqs):
        """Return the Projections to B, to C, and to the step size if it reads sh(y).

        like: As for `affine_map`.
        """
        cfg = self.config

        def get_map(name):
            make_map = functools.partial(affine_map, getattr(self, name), like)
            return cached(seqs.cache, (name, like.dtype), make_map)

        B, C = bc_x.chunk(2, dim=-1)
        projections = {"B": Projection("B", B, None), "C": Projection("C", C, None)}
        y_names = [name for name, reads_y in (("B", cfg.b_h_dep), ("C", cfg.c_h_dep)) if reads_y]
        if y_names:  # one layer, bc_y_proj, maps sh(y) to all of them
            weight_y, bias = get_map("bc_y_proj")
            from_x = bc_x if len(y_names) == 2 else projections[y_names[0]].from_x
            from_x = from_x if bias is None else from_x + bias
            x_parts, y_parts = from_x.chunk(len(y_names), -1), weight_y.chunk(len(y_names))
            for name, x_part, y_part in zip(y_names, x_parts, y_parts):
                projections[name] = Projection(name, x_part, y_part)
        if cfg.dt_h_dep:
            weight_y, bias = get_map("dt_y_proj")
            from_x = delta if bias is None else delta + bias
            projections["delta"] = Projection("delta", from_x, weight_y)
        return projections.values()

    def _compute_decay_rates(self, dtype):
        """Return A, (d,n) or (h,)."""
        A = -torch.exp(self.A_log.to(dtype))
        return A.t().contiguous().t() if A.dim() == 2 else A  # strides that the CPU's scan reads

    def select_parameters(
        self, inputs: SolveInputs, rows: dict[str, torch.Tensor]
    ) -> MambaParameters:
        cfg, dt, dtype = self.config, inputs.recurrence.dt, inputs.x.dtype
        B, C = rows["B"].to(dtype), rows["C"].to(dtype)
        if cfg.bc_norm:
            B, C = (normalize_groups(v, self.groups, cfg.eps) for v in (B, C))
        if dt is None:
            dt = self._compute_dt(rows["delta"].to(dtype), inputs.seqs)
        return MambaParameters(dt, B, C)

    def mean_decay(self, inputs: SolveInputs, params: MambaParameters) -> torch.Tensor:
        """Return the mean of exp(Δ_t A) over the state, (b,l)."""
        _, A, keep = inputs.recurrence
        dt = params.dt.unsqueeze(-1) if A.dim() == 2 else params.dt
        decay = torch.exp(dt * A).flatten(2).mean(-1)
        return decay if keep is None else decay * keep

    def scale_noise(self, noise: torch.Tensor | None) -> torch.Tensor | None:
        return None if noise is None else noise * self.out_norm().weight

    def normalize(self, inputs: SolveInputs, o: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return norm((o + D x̃) ⊙ silu(z)), without silu(z) unless the gate is in the loop."""
        norm, z = self.out_norm(), inputs.z if self.gate_in_loop else None
        return norm(apply_skip_and_gate(o, x, self._get_skip_weights(), z))

    def token_equation(self, inputs: SolveInputs, params: MambaParameters) -> TokenEquation:
        B, C = params.B, params.C
        if self.groups > 1:
            B, C = (v.unflatten(-1, (self.groups, -1)) for v in (B, C))
        bc = (B * C).sum(-1, keepdim=self.groups == 1)  # (b,l,g)
        z = inputs.z if self.gate_in_loop else None
        return TokenEquation(params.dt, bc, self._get_skip_weights(), z, self.out_norm())

    def run_kernel(
        self, inputs: SolveInputs, mixer_options: ReflectionOptions
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        if inputs.recurrence.dt is None:
            return None
        cfg, x, norm = self.config, inputs.x, self.out_norm()
        bc_starts = [inputs.projections.columns[name].start for name in ("B", "C")]
        options = *mixer_options, cfg.bc_norm, self.groups, norm.kind, norm.eps, cfg.d_state
        weights = inputs.recurrence.A, self._get_skip_weights(), norm.weight, norm.bias
        A, D, weight, bias = (None if t is None else t.to(x.dtype) for t in weights)
        arguments = kernel_arguments(inputs, mixer_options.rank, bc_starts, options) | {
            "dt": inputs.recurrence.dt,
            "A": A,
            "gate": F.silu(inputs.z.to(x.dtype)) if self.gate_in_loop else None,
            "D": D,
            "norm_weight": weight,
            "norm_bias": bias,
            "h0": inputs.seqs.get_state("h"),
            "readout": inputs.projections.readout(x.dtype),
        }
        return try_kernel("cell", "cell", x, arguments)


def kernel_arguments(
    inputs: SolveInputs, rank: int, bc_starts: list[int], options: tuple[Any, ...]
) -> dict[str, Any]:
    """Return the arguments of lm/kernels/cell_arguments.py that FP-Mamba and FP-RNN share.

    Args:
        inputs: Inputs of the solve.
        rank: Number of reflections of the mixer.
        bc_starts: First columns of B and of C in the projections.
        options: Values of the fields of cell_arguments.Options.
    """
    x, projections, y = inputs.x, inputs.projections, inputs.seqs.get_state("y")
    vectors_start = projections.columns["mixer"].start  # r vectors of d columns, then r gates
    return {
        "layout": (vectors_start, vectors_start + rank * x.shape[-1], *bc_starts),
        "options": options,
        "raw": projections.raw,
        "weight_y": projections.weight_y.to(projections.raw.dtype),
        "x": x,
        "keep": inputs.recurrence.keep,
        "y0": None if y is None else y.to(x.dtype),
        "adjoint": inputs.seqs.adjoint_norm,
    }


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
        x, conv_tail = self._convolve_input(x, seqs)
        delta, bc_x = self.x_proj(x).split([cfg.dt_rank, 2 * cfg.d_state], dim=-1)
        return InputProjections(x, z, bc_x, delta, conv_tail)

    def _compute_dt(self, delta, seqs):
        """Return Δ = softplus(δ W_dtᵀ + b_dt) (b,l,d), zero at padding. delta: (b,l,dt_rank)."""
        return seqs.zero_padding(F.softplus(self.dt_proj(delta)))

    def run_recurrence(
        self, inputs: SolveInputs, params: MambaParameters, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run h_t = exp(Δ_t A) h_{t−1} + (Δ_t x̃_t) B_tᵀ, o_t = h_t C_t."""
        _, A, keep = inputs.recurrence
        return selective_scan(x, params.dt, A, params.B, params.C, inputs.seqs.get_state("h"), keep)

    def _get_skip_weights(self):
        return self.D

    def flops_per_token(self) -> BlockFlops:
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
        self.heads, self.groups = d // config.headdim, config.ngroups
        self.gate_in_loop = True  # Mamba-2's norm is gated; `glu_in_loop` only drops the outer gate
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
        xbc, conv_tail = self._convolve_input(xbc, seqs)
        x, bc_x = xbc.split([d, bc], dim=-1)
        return InputProjections(x, z, bc_x, delta, conv_tail)

    def _compute_dt(self, delta, seqs):
        """Return Δ = softplus(δ + bias) (b,l,h), zero at padding. delta: (b,l,h)."""
        dtype = torch.promote_types(delta.dtype, torch.float32)
        return seqs.zero_padding(F.softplus(delta.to(dtype) + self.dt_bias.to(dtype)))

    def run_recurrence(
        self, inputs: SolveInputs, params: MambaParameters, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run S_t = exp(Δ_t A) S_{t−1} + Δ_t x̃_t B_tᵀ per head, o_t = S_t C_t."""
        cfg, (_, A, keep) = self.config, inputs.recurrence
        B, C = (v.unflatten(-1, (self.groups, cfg.d_state)) for v in (params.B, params.C))
        x_heads = x.unflatten(-1, (self.heads, cfg.headdim))
        o, h = ssd_scan(x_heads, params.dt, A, B, C, inputs.seqs.get_state("h"), keep)
        return o.flatten(-2), h

    def _get_skip_weights(self):
        return self.D.repeat_interleave(self.config.headdim)

    def flops_per_token(self) -> BlockFlops:
        c, d = self.config, self.config.d_inner
        bc = 2 * c.ngroups * c.d_state
        per_solve = 2 * (d + bc) * c.d_conv if c.use_short_conv else 0
        return self._count_flops(per_solve, 9 * d * c.d_state)  # the same scan as FPMamba1's


class VectorConstants(NamedTuple):
    """Terms of FP-RNN's recurrence and output that depend on the layer's input only."""

    decay: torch.Tensor  # (b,l,d) λ
    complement: torch.Tensor  # (b,l,d) 1 − λ
    x: torch.Tensor  # (b,l,d) input of c in the output
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
        x, x_b, x_mixer, x_lambda, conv_tail = x0, x0, x0, x0, None
        if self.config.use_short_conv:
            x, conv_tail = convolve(self.conv1d_x, x0, seqs, self.config.d_conv, 0)
            # All four convolutions read x0, so one copy of its last tokens is enough.
            without_tail = seqs._replace(return_state=False)
            x_b, x_mixer, x_lambda = (
                convolve(conv1d, x0, without_tail, self.config.d_conv, 0)[0]
                for conv1d in (self.conv1d_b, self.conv1d_mixer, self.conv1d_lambda)
            )
        # 2. Compute the recurrence's constants: λ and 1 − λ (b,l,d).
        dtype = torch.promote_types(u.dtype, torch.float32)
        keep = None if seqs.starts is None else 1 - seqs.starts.to(dtype)
        gate = self.lambda_proj(x_lambda).to(dtype)
        decay, complement = torch.sigmoid(gate), torch.sigmoid(-gate)
        if seqs.mask is not None:  # the state passes padding unchanged
            decay = decay.masked_fill(~seqs.mask.unsqueeze(-1), 1.0)
            complement = seqs.zero_padding(complement)
            x = seqs.zero_padding(x)  # conv1d_x made padding silu(bias), and conv1d_c reads it
        if seqs.starts is not None:
            decay = decay.masked_fill(seqs.starts.unsqueeze(-1), 0.0)
        # 3. Project the mixer's input; the mixer mixes b ⊙ x.
        bx = F.silu(self.b_proj(x_b)).to(dtype) * x.to(dtype)
        projections, mixer = self._join_projections(x_mixer, bx, seqs, solver)
        recurrence = VectorConstants(decay, complement, x, keep)
        return SolveInputs(bx, z, projections, mixer, seqs, recurrence, conv_tail)

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
        return TokenEquation(dt=params.complement, bc=None, D=None, z=None, norm=Norm("none"))

    def run_kernel(
        self, inputs: SolveInputs, mixer_options: ReflectionOptions
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        # FP-RNN has no B and C: the kernel ignores bc_starts, bc_norm, norm_eps and d_state.
        bc_norm, groups, norm, norm_eps, d_state = True, 1, "none", 0.0, 0
        options = *mixer_options, bc_norm, groups, norm, norm_eps, d_state
        h = inputs.seqs.get_state("h")
        arguments = kernel_arguments(inputs, mixer_options.rank, [0, 0], options) | {
            "dt": inputs.recurrence.complement,
            "A": inputs.recurrence.decay,
            "h0": None if h is None else h.to(inputs.x.dtype),
        }
        return try_kernel("cell", "cell", inputs.x, arguments)

    def _make_conv_state(self, inputs, y):
        if inputs.conv_tail is None:
            return ()
        x, seqs = inputs.recurrence.x, inputs.seqs
        x_and_h = torch.cat([x, y.to(x.dtype)], -1)
        earlier_inputs = seqs.get_state("conv", 1)
        tail = last_valid_tokens(x_and_h, self.config.d_conv - 1, earlier_inputs, seqs)
        return inputs.conv_tail, tail

    def gate_and_project(self, inputs: SolveInputs, y: torch.Tensor) -> torch.Tensor:
        """Return W_out RMSNorm(silu(z) ⊙ c ⊙ h) with c = silu(W_c silu(conv[x, h])); h is y.

        Without convolutions c = silu(W_c [x, sh(h)]).
        """
        x, seqs = inputs.recurrence.x, inputs.seqs
        if self.config.use_short_conv:
            x_and_h = torch.cat([x, y.to(x.dtype)], -1)
            without_tail = seqs._replace(return_state=False)  # `_make_conv_state` makes it
            x_and_h, _ = convolve(self.conv1d_c, x_and_h, without_tail, self.config.d_conv, 1)
        else:
            x_and_h = torch.cat([x, shift(y, seqs, "f_y").to(x.dtype)], -1)
        c = F.silu(self.c_proj(x_and_h))
        gated = self.out_norm(F.silu(inputs.z) * c * y)
        return self.out_proj(gated.to(inputs.z.dtype))

    def flops_per_token(self) -> BlockFlops:
        c, d = self.config, self.config.d_inner
        per_solve = 2 * (2 * d * d + 2 * d * d)  # lambda_proj and b_proj (d,d), c_proj (d,2d)
        if c.use_short_conv:
            per_solve += 2 * (4 * d + 2 * d) * c.d_conv  # 4 convolutions of d channels, one of 2d
        return self._count_flops(per_solve, scan=4 * d)


BLOCKS = {"fp_mamba1": FPMamba1, "fp_mamba2": FPMamba2, "fp_rnn": FPRNN}


def build_block(config: Any) -> FixedPointBlock:
    """Return the block that `config.block` names; FPRNNConfig has checked the fields."""
    return BLOCKS[config.block](config)
