"""The fixed-point blocks: `prepare` (once per solve), `step` (once per iteration), `finish`.

Shape suffixes: b batch, l length, d channels (d_inner), n d_state.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .mixers import MixerWeights, WNLinear, build_mixer, nrm
from .scan import causal_conv, chunk_decays, selective_scan
from .solver import NonFiniteError, Rule, relative_residual, solve


class Sequences(NamedTuple):
    """What is known of the tokens besides their embedding; a None means 'nothing special'."""

    mask: torch.Tensor | None = None  # (b,l) bool, False at padding: a step there changes no state
    starts: torch.Tensor | None = None  # (b,l) bool, True at the first token of a packed document


def shift(y, seqs):
    """sh(y)[t] = y[t−1], zero at t = 0 and at the first token of every packed document."""
    y = F.pad(y[:, :-1], (0, 0, 1, 0))
    return y if seqs.starts is None else y.masked_fill(seqs.starts.unsqueeze(-1), 0)


class Static(NamedTuple):
    """Everything of one solve that depends on x alone (math.md, 'once per solve')."""

    x: torch.Tensor  # (b,l,d)
    z: torch.Tensor  # (b,l,d) output gate
    dt: torch.Tensor  # (b,l,d), 0 at padding
    A: torch.Tensor  # (d,n)
    raw: torch.Tensor  # (b,l,m+2n): the x part of the mixer's map and of B, C
    weight_y: torch.Tensor  # (m+2n or 2n, d): sh(y) → the y part of the same
    weight_z: torch.Tensor | None  # (d,d)
    mixer: MixerWeights
    seqs: Sequences
    keep: torch.Tensor | None  # (b,l) 0 where a document starts
    decays: torch.Tensor | None  # exp(dt A) in the scan's layout, when it may be kept


class FPMamba1(nn.Module):
    """FP-Mamba-1 (paper Eq. 12–13): Mamba made dense by iterating mixer and selective scan.

    forward: u (b,l,d_model) → output (b,l,d_model) and FixedPointStats.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        d, n = config.d_inner, config.d_state
        self.in_proj = nn.Linear(config.d_model, 2 * d, bias=False)
        if config.use_short_conv:
            self.conv1d = nn.Conv1d(d, d, config.d_conv, groups=d, padding=config.d_conv - 1)
        self.x_proj = nn.Linear(d, config.dt_rank + 2 * n, bias=False)
        self.dt_proj = nn.Linear(config.dt_rank, d)
        self.A_log = nn.Parameter(torch.empty(d, n))
        self.D = nn.Parameter(torch.empty(d))
        self.bc_y_proj = WNLinear(d, 2 * n)
        if not config.glu_in_loop:
            self.z_y_proj = WNLinear(d, d)
        self.mixer_width = 2 * d if config.mixer_h_dep and not config.symm_mixer else d
        self.mixer = build_mixer(config, d, self.mixer_width)
        self.out_norm = nn.LayerNorm(d, eps=config.out_norm_epsilon)
        self.out_proj = nn.Linear(d, config.d_model, bias=False)
        self.gradient_checkpointing = False  # set by gradient_checkpointing_enable()

    def prepare(self, u, seqs=Sequences()):  # noqa: B008 (a NamedTuple is immutable)
        """All that depends on x alone. u: (b,l,d_model) → Static."""
        cfg, d = self.config, self.config.d_inner
        x, z = self.in_proj(u).chunk(2, dim=-1)
        if seqs.mask is not None:
            x = x * seqs.mask.unsqueeze(-1)
        if cfg.use_short_conv:
            segments = None if seqs.starts is None else seqs.starts.cumsum(1)
            x = F.silu(causal_conv(x, self.conv1d.weight, self.conv1d.bias, segments))
        delta, bc_x = self.x_proj(x).split([cfg.dt_rank, 2 * cfg.d_state], dim=-1)
        acc = torch.promote_types(u.dtype, torch.float32)
        dt = F.softplus(F.linear(delta, self.dt_proj.weight).to(acc) + self.dt_proj.bias.to(acc))
        if seqs.mask is not None:
            dt = dt * seqs.mask.unsqueeze(-1)
        A = -torch.exp(self.A_log.to(acc))

        weights, weight_bc = self.mixer.weights(), self.bc_y_proj.matrix()
        first_x = weights.first[:, :d]
        raw = torch.cat([F.linear(x, first_x, weights.bias).to(acc), bc_x.to(acc)], dim=-1)
        if not cfg.mixer_h_dep:
            weight_y = weight_bc
        else:
            first_y = weights.first if cfg.symm_mixer else weights.first[:, d:]
            weight_y = torch.cat([first_y, weight_bc])

        keep = None if seqs.starts is None else 1 - seqs.starts.to(acc)
        with torch.no_grad():
            decays = chunk_decays(dt, A, keep)
        weight_z = None if cfg.glu_in_loop else self.z_y_proj.matrix()
        x = x.to(acc)
        return Static(x, z, dt, A, raw, weight_y, weight_z, weights, seqs, keep, decays)

    def step(self, s, y):
        """One iteration f(y): mix channels, then scan over time, then norm. y: (b,l,d)."""
        cfg, m = self.config, self.mixer.out_features
        from_y = F.linear(shift(y, s.seqs).to(s.weight_y.dtype), s.weight_y).to(y.dtype)
        with torch.autocast(y.device.type, enabled=False):
            if not cfg.mixer_h_dep:
                from_y = F.pad(from_y, (m, 0))
            raw_mixer, B, C = (s.raw + from_y).split([m, cfg.d_state, cfg.d_state], dim=-1)
            x = self.mixer(raw_mixer, s.x - y, s.mixer) + y  # Q x + (I − Q) y
            if cfg.bc_norm:
                B, C = nrm(B, cfg.eps), nrm(C, cfg.eps)
            o, _ = selective_scan(x, s.dt, s.A, B, C, keep=s.keep, decays=s.decays)
            o = o + self.D.to(o.dtype) * x
            if cfg.glu_in_loop:
                o = o * F.silu(s.z.to(o.dtype))
            norm = self.out_norm
            o = F.layer_norm(
                o, norm.normalized_shape, norm.weight.to(o.dtype), norm.bias.to(o.dtype), norm.eps
            )
            return o if s.seqs.mask is None else o * s.seqs.mask.unsqueeze(-1)

    def finish(self, s, y):
        """The output gate and projection. y: (b,l,d) → (b,l,d_model)."""
        if s.weight_z is not None:
            z_y = F.linear(shift(y, s.seqs).to(s.weight_z.dtype), s.weight_z)
            y = F.silu(s.z + z_y) * y
        return self.out_proj(y.to(self.out_proj.weight.dtype))

    def rule(self):
        """The solver's rule for the mode the block is in: the paper evaluates stricter than it
        trains (App. B.4)."""
        c = self.config
        max_iters, quantile = (
            (c.max_iters, c.quantile) if self.training else (c.eval_max_iters, 1.0)
        )
        return Rule(c.tol, max_iters, quantile, c.stepsize, c.stepsize_decay, c.patience)

    def _gradient_steps(self, s, y_star):
        """`n_backwards` undamped steps from the detached y*, then `finish` (App. B.2).

        Returns the output and f(y*).
        """
        first = y = self.step(s, y_star)
        for _ in range(self.config.n_backwards - 1):
            y = self.step(s, y)
        return self.finish(s, y), first

    def forward(self, u, seqs=Sequences()):  # noqa: B008
        checkpointed = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        with torch.set_grad_enabled(torch.is_grad_enabled() and not checkpointed):
            s = self.prepare(u, seqs)
        y_star, stats = solve(
            lambda y: self.step(s, y),
            torch.zeros_like(s.x),
            self.rule(),
            self.config.schedule,
            self.config.stopping,
        )
        if checkpointed:  # the backward computes these steps again, never the solve
            del s
            out, first = self._gradient_checkpointing_func(
                lambda u, y: self._gradient_steps(self.prepare(u, seqs), y), u, y_star
            )
        else:
            out, first = self._gradient_steps(s, y_star)
        with torch.no_grad():  # the residual of what the solve returned, for free
            stats = stats._replace(residual=relative_residual(y_star, first))
        return out, stats

    def flops_per_token(self):
        """Forward FLOPs per token (a multiply-add counts two).

        Returns (once, per_iteration): what runs once per solve, and what each step costs.
        """
        c, d, n, m = self.config, self.config.d_inner, self.config.d_state, self.mixer.out_features
        once = 2 * (
            self.in_proj.weight.numel() + self.x_proj.weight.numel() + self.dt_proj.weight.numel()
            + self.out_proj.weight.numel() + m * d + (0 if c.glu_in_loop else d * d)
            + (d * c.d_conv if c.use_short_conv else 0)
        )  # fmt: skip
        scan = 7 * d * n  # u Bᵀ, decay, add; C: as mamba counts it, the exponential apart
        projection = 2 * d * (2 * n + (m if c.mixer_h_dep else 0))
        return once, projection + self.mixer.flops_per_token() + scan + 12 * d


BLOCKS = {"fp_mamba1": FPMamba1}
__all__ = ["BLOCKS", "FPMamba1", "NonFiniteError", "Sequences", "WNLinear", "shift"]
