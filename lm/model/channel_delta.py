"""Delta rules with a decay of every channel: KDA (Kimi Team 2025) and RWKV-7 (Peng et al. 2025).

A head keeps a matrix S (v×k) and multiplies it, at every token, by a diagonal matrix plus one of
rank one, before it writes:

    S_t = S_{t−1} (diag(w_t) + a_t b_tᵀ) + v_t k_tᵀ,          o_t = S_t q_t.

KDA ("Kimi Linear", arXiv 2510.26692) is Gated DeltaNet with an α for each channel:

    S_t = S_{t−1} diag(α_t) (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ.

RWKV-7 (arXiv 2503.14456) takes off along one key, κ̂, and writes along another, k̃:

    S_t = S_{t−1} (diag(w_t) − κ̂_t (a_t ⊙ κ̂_t)ᵀ) + v_t k̃_tᵀ.

Both in plain PyTorch, token by token. KDA's parameters have the names, shapes and meaning of
flash-linear-attention's layer, RWKV-7's the meaning; what ends a layer is called `out_proj`, as in
all.

Shape suffixes: b batch, l length, h heads, k key and v value dimension of a head; d d_model.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .delta import DeltaState, GatedDeltaNet, unit
from .fields import heads_of
from .layers import GroupNorm, without_autocast
from .plain import PlainLayer
from .state import Sequences, last, shift


def channel_delta_rule(
    q: torch.Tensor,
    w: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    S: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence at the top of this file, one token after the other.

    Args:
        q, w, a, b, k: (b,l,h,k). v: (b,l,h,v). A token with w = 1, a = 0 and k = 0 leaves the state
            as it is. S: (b,h,v,k) initial state, zero if None.
        starts: (b,l) bool, True at tokens that start from an empty state; None: there are none.
    Returns:
        o (b,l,h,v) and the final state (b,h,v,k), in the inputs' dtype.
    """
    batch, length, heads, _ = q.shape
    if starts is not None:  # nothing of what was before is kept
        goes_on = ~starts[:, :, None, None]
        w, a = w * goes_on, a * goes_on

    def by_time(t: torch.Tensor, *shape: int) -> tuple[torch.Tensor, ...]:
        return t.transpose(0, 1).reshape(length, batch * heads, *shape).unbind(0)

    rows = (by_time(t, 1, t.shape[-1]) for t in (w, b, k))
    columns = (by_time(t, t.shape[-1], 1) for t in (a, v, q))
    if S is None:
        S = q.new_zeros(batch, heads, v.shape[-1], k.shape[-1])
    S = S.to(q.dtype).flatten(0, 1)
    o = []
    for w_t, b_t, k_t, a_t, v_t, q_t in zip(*rows, *columns):
        moved = torch.baddbmm(S * w_t, torch.bmm(S, a_t), b_t)
        S = torch.baddbmm(moved, v_t, k_t)
        o.append(torch.bmm(S, q_t))
    outputs = torch.stack(o).view(length, batch, heads, -1).transpose(0, 1)
    return outputs, S.view(batch, heads, *S.shape[1:])


class KDA(GatedDeltaNet):
    """Kimi Delta Attention: S ← S diag(α_t) (I − β k kᵀ) + β v kᵀ, α_t of every channel through a
    map of low rank; out_proj(RMSNorm(S q / √d_k) ⊙ σ(z)), z through such a map, too."""

    kind = "kda"

    def _add_decay(self, config: Any) -> None:
        d, low = config.d_model, config.d_inner // self.heads
        self.f_proj = nn.Sequential(nn.Linear(d, low, bias=False), nn.Linear(low, d, bias=False))
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(d))

    def _output_gate(self, config: Any) -> nn.Module:
        d, d_v = config.d_model, config.d_inner
        low = d_v // self.heads
        return nn.Sequential(nn.Linear(d, low, bias=False), nn.Linear(low, d_v))

    def run(self, u: torch.Tensor, seqs: Sequences) -> tuple[torch.Tensor, DeltaState | None]:
        h = self.heads
        # 1. Project, convolve; q and k of unit length, in fp32 or wider.
        projected, tails = self._convolved(u, seqs)
        wide = torch.promote_types(u.dtype, torch.float32)
        q, k, v = (t.to(wide).unflatten(-1, (h, -1)) for t in projected)
        q = unit(q) * (self.config.d_model // h) ** -0.5
        k = unit(k)
        # 2. β (b,l,h,1) and log α (b,l,h,k), zero at padding, which leaves the state as it is.
        beta = seqs.masked(self.b_proj(u).to(wide).sigmoid()).unsqueeze(-1)
        if self.negative:
            beta = 2 * beta
        dt = F.softplus(self.f_proj(u).to(wide) + self.dt_bias.to(wide)).unflatten(-1, (h, -1))
        log_alpha = seqs.masked((-self.A_log.to(wide).exp()[:, None] * dt).flatten(-2))
        alpha = log_alpha.exp().unflatten(-1, (h, -1))
        # 3. The recurrence, the gated norm of each head.
        z = self.g_proj(u)
        with without_autocast(u):
            state, starts = seqs.before("S"), seqs.starts
            o, S = channel_delta_rule(q, alpha, -beta * alpha * k, k, k, beta * v, state, starts)
            o = self.o_norm(o).to(wide).flatten(-2) * z.to(wide).sigmoid()
        end = DeltaState(S.detach().clone(), tails) if seqs.return_state else None
        return self.out_proj(o.to(z.dtype)), end

    def flops_per_token(self, length: int) -> int:
        c, h = self.config, self.heads
        low = c.d_inner // h
        convolved = 2 * c.d_model + c.d_inner
        gates = 3 * low * c.d_model + low * c.d_inner + h * c.d_model
        matrices = c.d_model * (convolved + c.d_inner) + gates
        recurrence = 9 * c.d_inner * c.d_model // h
        return 2 * matrices + 2 * convolved * c.d_conv + recurrence


def low_rank_of(d_model: int, factor: float) -> int:
    """Width of RWKV-7's low-rank maps: factor · √d, to a multiple of 32, at least 32."""
    return max(32, round(factor * math.sqrt(d_model) / 32) * 32)


class LowRankMap(nn.Module):
    """x W_downᵀ → act → W_upᵀ + bias."""

    def __init__(self, d: int, rank: int, act: Any, bias: bool = True) -> None:
        super().__init__()
        self.down = nn.Linear(d, rank, bias=False)
        self.up = nn.Linear(rank, d, bias=bias)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.act(self.down(x)))


class RWKV7State(NamedTuple):
    """What the layer leaves behind after a row's last token that is no padding."""

    S: torch.Tensor  # (b,h,e,e)
    u: torch.Tensor  # (b,d) its input

    def select(self, rows: torch.Tensor) -> "RWKV7State":
        """The state of these rows (k,) of the batch."""
        return RWKV7State(self.S[rows], self.u[rows])


class RWKV7(PlainLayer):
    """RWKV-7's time mixing. Every map reads its own mixture of a token and the one before,

        r, k, v = W x_r, W x_k, W x_v;    w = exp(−e^(−½) σ(map_w(x_w)));    a = σ(map_a(x_a));
        κ̂ = unit(k ⊙ k_k);    k̃ = k ⊙ (1 + (a − 1) ⊙ k_a);
        S ← S (diag(w) − κ̂ (a ⊙ κ̂)ᵀ) + v k̃ᵀ;
        out_proj((GroupNorm(S r) + (r · (r_k ⊙ k̃)) v) ⊙ map_g(x_g)),

    as in the first layer of RWKV-7: there is no value residual between layers. The decay w is above
    0.545, so that an eigenvalue, w − a along a channel, can be as low as −0.45.
    """

    mixes = "rwkvag"  # x_r, x_w, …: of r, the decay w, k, v, a, and the gate g

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        d = config.d_model
        self.heads = heads_of(config)
        for name in self.mixes:
            setattr(self, f"x_{name}", nn.Parameter(torch.empty(d)))
        self.k_k = nn.Parameter(torch.empty(d))
        self.k_a = nn.Parameter(torch.empty(d))
        self.r_k = nn.Parameter(torch.empty(self.heads, d // self.heads))
        self.r_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, d, bias=False)
        self.v_proj = nn.Linear(d, d, bias=False)
        self.w_lora = LowRankMap(d, low_rank_of(d, 2.5), torch.tanh)
        self.a_lora = LowRankMap(d, low_rank_of(d, 2.5), nn.Identity())
        self.g_lora = LowRankMap(d, low_rank_of(d, 5.0), torch.sigmoid, bias=False)
        # eps as in theirs, 1e-5 times the head's width
        self.g_norm = GroupNorm(self.heads, d, eps=1e-5 * (d // self.heads))
        self.out_proj = nn.Linear(d, d, bias=False)

    def state_shapes(self) -> list[tuple[int, ...]]:
        e = self.config.d_model // self.heads
        return [(self.heads, e, e), (self.config.d_model,)]

    def run(self, u: torch.Tensor, seqs: Sequences) -> tuple[torch.Tensor, RWKV7State | None]:
        h, wide = self.heads, torch.promote_types(u.dtype, torch.float32)
        # 1. What each map reads: u + (u of the token before − u) ⊙ x_·.
        u = seqs.masked(u)
        change = shift(u, seqs, "u") - u
        x = {name: u + change * getattr(self, f"x_{name}").to(u.dtype) for name in self.mixes}
        # 2. Reads, writes and decays, (b,l,h,e), in fp32 or wider; padding leaves the state as it
        #    is.
        r, k, v = self.r_proj(x["r"]), seqs.masked(self.k_proj(x["k"])), self.v_proj(x["v"])
        log_w = seqs.masked(-math.exp(-0.5) * self.w_lora(x["w"]).to(wide).sigmoid())
        a = self.a_lora(x["a"]).to(wide).sigmoid()
        gate = self.g_lora(x["g"])
        r, k, v, log_w, a = (t.to(wide).unflatten(-1, (h, -1)) for t in (r, k, v, log_w, a))
        read = unit(k * self.k_k.to(wide).view(h, -1))
        k = k * (1 + (a - 1) * self.k_a.to(wide).view(h, -1))
        # 3. The recurrence; each head normalised, what the token itself says added, the gate.
        with without_autocast(u):
            o, S = channel_delta_rule(
                r, log_w.exp(), -read, a * read, k, v, seqs.before("S"), seqs.starts
            )
            own = (r * k * self.r_k.to(wide)).sum(-1, keepdim=True) * v
            o = (self.g_norm(o.flatten(-2)) + own.flatten(-2)) * gate.to(wide)
        end = None
        if seqs.return_state:
            before = seqs.before("u")
            before = None if before is None else before.unsqueeze(1)
            end = RWKV7State(S.detach().clone(), last(u, 1, before, seqs).squeeze(1))
        return self.out_proj(o.to(gate.dtype)), end

    def flops_per_token(self, length: int) -> int:
        d, h = self.config.d_model, self.heads
        ranks = 2 * low_rank_of(d, 2.5) + low_rank_of(d, 5.0)
        return 2 * (4 * d * d + 2 * d * ranks) + 9 * d * d // h
