"""Layers Mamba, Mamba-2, Mamba-3 and M²RNN.

The first three use the scans of scan.py. Parameters of Mamba and Mamba-2 have the names, shapes and
meaning of transformers' MambaMixer and Mamba2Mixer, those of Mamba-3 the names and meaning of its
authors' `Mamba3`. M²RNN is a non-linear recurrence with a matrix as state, computed token by token
in plain PyTorch; its parameters have the meaning of the authors' `M2RNN`.

Shape suffixes: b batch, l length, d channels (d_inner), n d_state, h heads, p channels of a head,
g groups, k d_conv, r rank of Mamba's Δ or rotated pairs of Mamba-3.

Source: Mamba, Gu & Dao 2023; Mamba-2, Dao & Gu 2024; Mamba-3, Lahoti et al. 2026; M²RNN, Mishra et
al. 2026, arXiv 2603.14360.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .baseline_layers import PlainLayer
from .layers import (
    Centroids,
    RMSNorm,
    ShortConv,
    StepSize,
    build_centroids,
    convolve,
    is_hooked,
    without_autocast,
)
from .scan import selective_scan, ssd_scan, try_kernel
from .state import Sequences, last_valid_tokens

SCAN_FLOPS = 9  # per entry of the state and token, as in Mamba's own count


class ScanState(NamedTuple):
    """State of the layer after the last real token of each row."""

    h: torch.Tensor  # state of the recurrence: Mamba (b,d,n), Mamba-2 (b,h,p,n), M²RNN (b,h,n,p)
    conv: torch.Tensor  # (b,k−1,·), last inputs of the convolution


class ScanLayer(PlainLayer):
    """Base class of Mamba, Mamba-2 and M²RNN: decay rates, and the state after the last token."""

    def _rates(self, dtype):
        """Return A < 0, (d,n) or (h,)."""
        return -torch.exp(self.A_log.to(dtype))

    def _end_state(self, h, tail):
        """Return the state after the last token, or None if no state is needed."""
        return None if tail is None else ScanState(h.detach().clone(), tail)


def document_keep(seqs: Sequences, dtype: torch.dtype) -> torch.Tensor | None:
    """Return 0 at the first token of a packed document, otherwise 1, (b,l); None if not packed."""
    return None if seqs.starts is None else 1 - seqs.starts.to(dtype)


class Mamba(ScanLayer):
    """Mamba: h_t = exp(Δ_t A) h_{t−1} + Δ_t x_t B_tᵀ;  out_proj((h_t C_t + D x_t) ⊙ silu(z_t))."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        d, n = config.d_inner, config.d_state
        self.in_proj = nn.Linear(config.d_model, 2 * d, bias=False)
        self.conv1d = ShortConv(d, config.d_conv)
        self.x_proj = nn.Linear(d, config.dt_rank + 2 * n, bias=False)
        self.dt_proj = StepSize(config.dt_rank, d)
        self.A_log = nn.Parameter(torch.empty(d, n))
        self.D = nn.Parameter(torch.empty(d))
        self.out_proj = nn.Linear(d, config.d_model, bias=False)

    def state_shapes(self) -> list[tuple[int, ...]]:
        c = self.config
        return [(c.d_inner, c.d_state), (c.d_conv - 1, c.d_inner)]

    def run(self, u: torch.Tensor, seqs: Sequences) -> tuple[torch.Tensor, ScanState | None]:
        cfg = self.config
        # 1. Project and convolve. x, z: (b,l,d)
        x, z = self.in_proj(u).chunk(2, dim=-1)
        x, tail = convolve(self.conv1d, seqs.zero_padding(x), seqs, cfg.d_conv)
        # 2. Compute the low-rank part of Δ (b,l,r), B and C (b,l,n).
        low_rank, B, C = self.x_proj(x).split([cfg.dt_rank, cfg.d_state, cfg.d_state], dim=-1)
        # 3. Run the recurrence in one kernel, if a kernel supports these sequences.
        fused = self._run_fused(x, low_rank, B, C, z, seqs)
        if fused is not None:
            gated, h = fused
            return self.out_proj(gated), self._end_state(h, tail)
        # 4. Otherwise compute Δ (b,l,d), which is zero at padding, so that padding keeps the state;
        #    then the scan in fp32 or wider, the skip connection and the gate.
        dt = seqs.zero_padding(F.softplus(self.dt_proj(low_rank)))
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        with without_autocast(x):
            A, keep = self._rates(wide.dtype), document_keep(seqs, wide.dtype)
            o, h = selective_scan(wide, dt, A, B, C, seqs.get_state("h"), keep)
            o = o + self.D.to(wide.dtype) * wide
        return self.out_proj(o.to(z.dtype) * F.silu(z)), self._end_state(h, tail)

    def _run_fused(self, x, low_rank, B, C, z, seqs):
        """Return the gated output (b,l,d) and the final state by the kernel `mamba_scan`, or None.

        The kernel supports no padding, documents or initial state. It reads the parameters of
        dt_proj, so dt_proj must not be wrapped or hooked.
        """
        is_plain = seqs.mask is None and seqs.starts is None and seqs.state is None
        if not is_plain or type(self.dt_proj) is not StepSize or is_hooked(self.dt_proj):
            return None
        wide = torch.promote_types(x.dtype, torch.float32)
        weight, bias = self.dt_proj.weight, self.dt_proj.bias.to(wide)
        with without_autocast(x):
            A, D = self._rates(wide), self.D.to(wide)
            return try_kernel(
                "mamba_scan", "mamba_scan", x, x, low_rank, weight, bias, A, B, C, D, z
            )

    def flops_per_token(self, length: int) -> int:
        c, d = self.config, self.config.d_inner
        matrices = 3 * c.d_model * d + d * (c.dt_rank + 2 * c.d_state) + c.dt_rank * d
        return 2 * matrices + 2 * d * c.d_conv + SCAN_FLOPS * d * c.d_state


class Mamba2(ScanLayer):
    """Mamba-2: S_t = exp(Δ_t A) S_{t−1} + Δ_t x_t B_tᵀ per head.

    The output is out_proj(RMSNorm((S_t C_t + D x_t) ⊙ silu(z_t))).
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        d, bc = config.d_inner, 2 * config.ngroups * config.d_state
        self.heads = d // config.headdim
        self.in_proj = nn.Linear(config.d_model, 2 * d + bc + self.heads, bias=False)
        self.conv1d = ShortConv(d + bc, config.d_conv)
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.D = nn.Parameter(torch.empty(self.heads))
        self.norm = RMSNorm(d, config.norm_epsilon)
        self.out_proj = nn.Linear(d, config.d_model, bias=False)

    def state_shapes(self) -> list[tuple[int, ...]]:
        c = self.config
        width = c.d_inner + 2 * c.ngroups * c.d_state
        return [(self.heads, c.headdim, c.d_state), (c.d_conv - 1, width)]

    def run(self, u: torch.Tensor, seqs: Sequences) -> tuple[torch.Tensor, ScanState | None]:
        cfg, d = self.config, self.config.d_inner
        bc = cfg.ngroups * cfg.d_state
        # 1. Project and convolve. z, x: (b,l,d)
        z, xbc, delta = self.in_proj(u).split([d, d + 2 * bc, self.heads], dim=-1)
        xbc, tail = convolve(self.conv1d, seqs.zero_padding(xbc), seqs, cfg.d_conv)
        x, B, C = xbc.split([d, bc, bc], dim=-1)
        # 2. Split into heads x (b,l,h,p) and groups B and C (b,l,g,n).
        B, C = (t.unflatten(-1, (cfg.ngroups, cfg.d_state)) for t in (B, C))
        x = x.unflatten(-1, (self.heads, cfg.headdim))
        # 3. Run the gated recurrence in fp32 or wider; then normalise.
        with without_autocast(x):
            o, h = self._recurrence(x, delta, B, C, z.unflatten(-1, (self.heads, -1)), seqs)
            o = self.norm(o.flatten(-2))
        return self.out_proj(o.to(z.dtype)), self._end_state(h, tail)

    def _recurrence(self, x, delta, B, C, z, seqs):
        """Return (S_t C_t + D x_t) ⊙ silu(z_t), (b,l,h,p), and the final state (b,h,p,n)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        bias, A, D = self.dt_bias.to(wide), self._rates(wide), self.D.to(wide)
        before, keep = seqs.get_state("h"), document_keep(seqs, wide)
        # 1. Use one kernel for everything, if there is one. It does not support padding.
        if seqs.mask is None:
            args = x, delta, bias, A, B, C, D, z, before, keep
            fused = try_kernel("mamba2_scan", "mamba2_scan", x, *args)
            if fused is not None:
                return fused
        # 2. Otherwise compute Δ (b,l,h), zero at padding, the scan, the skip connection and the
        #    gate.
        dt = seqs.zero_padding(F.softplus(delta.to(wide) + bias))
        x, B, C = (t.to(wide) for t in (x, B, C))
        o, h = ssd_scan(x, dt, A, B, C, before, keep)
        return (o + D.unsqueeze(-1) * x) * F.silu(z.to(wide)), h

    def flops_per_token(self, length: int) -> int:
        c, d = self.config, self.config.d_inner
        bc = 2 * c.ngroups * c.d_state
        matrices = c.d_model * (2 * d + bc + self.heads) + d * c.d_model
        return 2 * matrices + 2 * (d + bc) * c.d_conv + SCAN_FLOPS * d * c.d_state


class TrapezoidState(NamedTuple):
    """State of the layer after the last real token of each row."""

    h: torch.Tensor  # (b,h,p,n)
    x: torch.Tensor  # (b,d), value of the last token, which the next token writes again
    k: torch.Tensor  # (b,h,n), key of the last token
    angle: torch.Tensor  # (b,h,r), rotation angle of the last token


class Mamba3(PlainLayer):
    """Mamba-3 with one input and one output ("SISO").

    It has three novelties. With the exponential-trapezoidal rule a token also writes the value of
    the previous token:

        h_t = e^(Δ_t A_t) (h_{t−1} + (1 − λ_t) Δ_t x_{t−1} k_{t−1}ᵀ) + λ_t Δ_t x_t k_tᵀ.

    Rotations R_t by the angles Σ_{s≤t} Δ_s π tanh(θ_s) replace a complex state, and biases on B and
    C replace the convolution:

        k_t = R_t (RMSNorm(B_t) + b_B);    q_t = R_t (RMSNorm(C_t) + b_C),
        out_proj((h_t q_t + D x_t) ⊙ silu(z_t)).

    Each head has its own Δ = softplus(· + dt_bias), A = −softplus(·) ≤ −10⁻⁴ and λ = σ(·). θ has
    d_state / 4 entries, one for each rotated pair: half of the channels rotate, the authors'
    default.

    Source: arXiv 2603.15569.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        d, n = config.d_inner, config.d_state
        self.heads = d // config.headdim
        self.angles = rotated_pairs(n)
        # z, x, B, C, Δ, A, λ, θ
        self.widths = [d, d, config.ngroups * n, config.ngroups * n, *[self.heads] * 3, self.angles]
        self.in_proj = nn.Linear(config.d_model, sum(self.widths), bias=False)
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.B_norm = RMSNorm(n, 1e-5)
        self.C_norm = RMSNorm(n, 1e-5)
        self.B_bias = nn.Parameter(torch.empty(self.heads, n))
        self.C_bias = nn.Parameter(torch.empty(self.heads, n))
        self.D = nn.Parameter(torch.empty(self.heads))
        self.out_proj = nn.Linear(d, config.d_model, bias=False)

    def state_shapes(self) -> list[tuple[int, ...]]:
        c, h = self.config, self.heads
        return [(h, c.headdim, c.d_state), (c.d_inner,), (h, c.d_state), (h, self.angles)]

    def run(self, u: torch.Tensor, seqs: Sequences) -> tuple[torch.Tensor, TrapezoidState | None]:
        wide = torch.promote_types(u.dtype, torch.float32)
        # 1. Project. Padding writes nothing (x = 0) and keeps the state (Δ = 0).
        z, x, B, C, dt, rate, trapezoid, theta = self.in_proj(u).split(self.widths, dim=-1)
        x = seqs.zero_padding(x).to(wide)
        dt = seqs.zero_padding(F.softplus(dt.to(wide) + self.dt_bias.to(wide)))  # (b,l,h)
        rate = F.softplus(rate.to(wide)).clamp_min(1e-4)  # −A
        previous_weight = (1 - trapezoid.to(wide).sigmoid()) * dt  # (1 − λ) Δ
        with without_autocast(u):
            # 2. Compute and rotate keys and queries (b,l,h,n).
            turn = dt.unsqueeze(-1) * math.pi * theta.to(wide).tanh().unsqueeze(-2)  # (b,l,h,r)
            angle = turn.cumsum(1)
            before = seqs.get_state("angle")
            if before is not None:
                angle = angle + before.to(wide).unsqueeze(1)
            key = rotate_pairs(self._head_vectors(B, self.B_norm, self.B_bias), angle)
            query = rotate_pairs(self._head_vectors(C, self.C_norm, self.C_bias), angle)
            # 3. Run the scan. It writes each token once, with the sum of two weights: its own, and
            #    the weight that the next token has for it. The token's own output must not contain
            #    the second, so it is subtracted. (At the end of a document the second weight enters
            #    a state that no token reads.)
            next_weight = F.pad(previous_weight[:, 1:], (0, 0, 0, 1))
            weight = dt - previous_weight + next_weight
            #    `ssd_scan` multiplies its inputs by its step sizes, here −Δ A, so they are divided
            #    by −Δ A first. It is 0 at padding, and the gradient divides by its square.
            decay = (dt * rate).clamp_min(1e-16)
            heads = x.unflatten(-1, (self.heads, -1))
            rates = -torch.ones_like(self.D, dtype=wide)
            inputs = heads * (weight / decay).unsqueeze(-1)
            h = self._initial_state(previous_weight[:, 0], seqs)
            o, h = ssd_scan(inputs, decay, rates, key, query, h, document_keep(seqs, wide))
            skip = self.D.to(wide) - next_weight * (key * query).sum(-1)
            o = (o + skip.unsqueeze(-1) * heads).flatten(-2)
            o = o * F.silu(z.to(wide))
        return self.out_proj(o.to(z.dtype)), self._end_state(h, x, key, angle, seqs)

    def _head_vectors(self, projected, norm, bias):
        """Return B or C (b,l,g n) normalised, with the bias of each head, (b,l,h,n)."""
        groups = norm(projected.unflatten(-1, (self.config.ngroups, -1))).to(bias.dtype)
        return groups.repeat_interleave(self.heads // self.config.ngroups, 2) + bias

    def _initial_state(self, weight, seqs):
        """Return the state (b,h,p,n) before the first token plus what this token writes again.

        weight: Weight of the last token's value, (b,h).
        """
        h, x, key = (seqs.get_state(name) for name in ("h", "x", "k"))
        if h is None:
            return None
        x = x.unflatten(-1, (self.heads, -1)).to(weight.dtype)
        return h + weight[..., None, None] * x.unsqueeze(-1) * key.unsqueeze(-2)

    def _end_state(self, h, x, key, angle, seqs):
        """Return the TrapezoidState after the last token, or None unless `seqs.return_state`."""
        if not seqs.return_state:
            return None
        before = [seqs.get_state(name) for name in ("x", "k", "angle")]
        last_x, last_key, last_angle = (
            last_valid_tokens(t, 1, None if old is None else old.unsqueeze(1), seqs).squeeze(1)
            for t, old in zip((x, key, angle), before)
        )
        last_angle = last_angle.remainder(2 * math.pi)
        return TrapezoidState(h.detach().clone(), last_x, last_key, last_angle)

    def flops_per_token(self, length: int) -> int:
        c = self.config
        matrices = c.d_model * (sum(self.widths) + c.d_inner)
        return 2 * matrices + SCAN_FLOPS * c.d_inner * c.d_state


def rotated_pairs(d_state: int) -> int:
    """Return the number of channel pairs of Mamba-3's state that rotate: half of its channels."""
    return d_state // 4


def rotate_pairs(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Rotate the channels 2i and 2i + 1 of x (b,l,h,n) by angle (b,l,h,r), for i < r."""
    pairs, rest = x.split([2 * angle.shape[-1], x.shape[-1] - 2 * angle.shape[-1]], dim=-1)
    first, second = pairs[..., 0::2], pairs[..., 1::2]
    cos, sin = angle.cos(), angle.sin()
    pairs = torch.stack([first * cos - second * sin, first * sin + second * cos], -1)
    return torch.cat([pairs.flatten(-2), rest], -1)


class M2RNN(ScanLayer):
    """M²RNN: a recurrence with a matrix H (n×p) per head.

        H_t = f_t H_{t−1} + (1 − f_t) tanh(H_{t−1} W + k_t v_tᵀ),    o_t = H_tᵀ q_t + D ⊙ v_t,

    and the output out_proj(RMSNorm(o ⊙ silu(z))). q, k and v pass a short convolution and silu. The
    forget gate of a head is f = exp(−exp(A_log) · softplus(· + dt_bias)).

    With centroids, token t reads r(H_{t−1}) instead of H_{t−1} (layers.Centroids), with all heads
    in one vector.
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
        self.centroids = build_centroids(config, d * config.d_state)

    def state_shapes(self) -> list[tuple[int, ...]]:
        c = self.config
        width = c.d_inner + 2 * c.ngroups * c.d_state
        return [(self.heads, c.d_state, c.headdim), (c.d_conv - 1, width)]

    def state_vector(self, state: ScanState) -> torch.Tensor:
        """Return the vectors (b,h·n·p) of a state that centroids read."""
        return state.h.flatten(1)

    def with_state_vector(self, state: ScanState, vector: torch.Tensor) -> ScanState:
        """Return a state with other vectors (b,h·n·p)."""
        return state._replace(h=vector.view_as(state.h))

    def run(self, u: torch.Tensor, seqs: Sequences) -> tuple[torch.Tensor, ScanState | None]:
        cfg, d = self.config, self.config.d_inner
        bc = cfg.ngroups * cfg.d_state
        wide = torch.promote_types(u.dtype, torch.float32)
        # 1. Project and convolve. z, v: (b,l,d)
        z, vkq, gate = self.in_proj(u).split(self.widths, dim=-1)
        vkq, tail = convolve(self.conv1d, seqs.zero_padding(vkq), seqs, cfg.d_conv)
        v, k, q = vkq.to(wide).split([d, bc, bc], dim=-1)
        # 2. Compute the inputs of the recurrence: k and q (b,l,h,n), v (b,l,h,p), and f (b,l,h).
        k, q = (
            t.unflatten(-1, (cfg.ngroups, -1)).repeat_interleave(self.heads // cfg.ngroups, 2)
            for t in (k, q)
        )
        dt = F.softplus(gate.to(wide) + self.dt_bias.to(wide))
        forget = (self._rates(wide) * dt).exp()  # f
        with without_autocast(u):
            # 3. Run the recurrence; add the skip connection; gate and normalise.
            heads = v.unflatten(-1, (self.heads, -1))
            W = self.state_proj.to(wide)
            o, h = m2rnn(q, k, heads, forget, W, seqs, self.centroids)
            o = o.flatten(-2) + self.D.to(wide) * v
            o = self.norm(o * F.silu(z.to(wide)))
        return self.out_proj(o.to(z.dtype)), self._end_state(h, tail)

    def flops_per_token(self, length: int) -> int:
        c, d = self.config, self.config.d_inner
        convolved = d + 2 * c.ngroups * c.d_state
        matrices = c.d_model * (sum(self.widths) + d)
        recurrence = d * c.d_state * (2 * c.headdim + SCAN_FLOPS)  # H W, and the rest
        recurrence += 4 * c.state_centroids * d * c.d_state  # scores, and the mean
        return 2 * matrices + 2 * convolved * c.d_conv + recurrence


def m2rnn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    forget: torch.Tensor,
    W: torch.Tensor,
    seqs: Sequences = Sequences(),  # noqa: B008
    centroids: Centroids | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute H_t = f_t H_{t−1} + (1 − f_t) tanh(H_{t−1} W + k_t v_tᵀ), token by token.

    Args:
        q: Queries, (b,l,h,n).
        k: Keys, (b,l,h,n).
        v: Values, (b,l,h,p).
        forget: Forget gates f, (b,l,h).
        W: Recurrent matrices, (h,p,p).
        seqs: Padding, which keeps the state, document starts and the state before the first token.
        centroids: Centroids through which a token reads H_{t−1}, or None.

    Returns:
        H_tᵀ q_t (b,l,h,p) and the final state (b,h,n,p).
    """
    H = seqs.get_state("h")
    H = q.new_zeros(len(q), *k.shape[2:], v.shape[-1]) if H is None else H.to(q.dtype)
    outputs = []
    # One `unbind` is faster than an index per token, whose gradient has the length of the sequence.
    tokens = zip(*(x.unbind(1) for x in (q, k, v, forget)))
    for t, (q_t, k_t, v_t, f_t) in enumerate(tokens):
        if seqs.starts is not None:
            H = H * ~seqs.starts[:, t, None, None, None]
        start = H if centroids is None else centroids(H.flatten(1), None).view_as(H)
        outer = k_t.unsqueeze(-1) * v_t.unsqueeze(-2)
        f = f_t[..., None, None]
        new = f * start + (1 - f) * torch.tanh(start @ W + outer)
        H = new if seqs.mask is None else torch.where(seqs.mask[:, t, None, None, None], new, H)
        outputs.append((q_t.unsqueeze(-2) @ H).squeeze(-2))
    return torch.stack(outputs, 1), H
