"""Layers with delta rules: Gated DeltaNet, DeltaProduct, KDA and RWKV-7.

The parameters of the layers have the names, shapes and meaning of flash-linear-attention's layers
(RWKV-7 only the meaning), except that the last projection is called `out_proj` in all our layers.

**One decay per head.** Gated DeltaNet has a matrix S (v×k) per head as its state,

    S_t = α_t S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ,          o_t = S_t q_t.

DeltaProduct makes n such steps per token, each with its own k, v and β. The gate α_t applies once:

    S_{t,0} = α_t S_{t−1},
    S_{t,j} = S_{t,j−1} (I − β_tj k_tj k_tjᵀ) + β_tj v_tj k_tjᵀ,          S_t = S_{t,n}.

`delta_rule` computes both in chunks of c steps. Step i of a chunk adds u_i k_iᵀ to the decayed
state. Let S be the state before the chunk, g_ij the product of the gates of the steps j + 1 to i,
and g_i the product of the gates from the first step of the chunk to step i. Then

    u_i = β_i (v_i − g_i S k_i − Σ_{j<i} g_ij (k_iᵀ k_j) u_j).

This is a triangular system for all u of a chunk, and its solution is linear in S. The systems of
all chunks are solved at once; then a loop over the chunks computes S.

**One decay per channel.** KDA and RWKV-7 multiply S (v×k) by a diagonal matrix plus a matrix of
rank one before they write. `channel_delta_rule` computes this token by token in plain PyTorch:

    S_t = S_{t−1} (diag(w_t) + a_t b_tᵀ) + v_t k_tᵀ,          o_t = S_t q_t.

KDA is Gated DeltaNet with an α per channel:

    S_t = S_{t−1} diag(α_t) (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ.

RWKV-7 erases along one key, κ̂, and writes along another, k̃:

    S_t = S_{t−1} (diag(w_t) − κ̂_t (a_t ⊙ κ̂_t)ᵀ) + v_t k̃_tᵀ.

Shape suffixes: b batch, l length, d d_model, n steps per token, h heads, k key and v value
dimension of a head (e if they are equal); i chunks, c steps of a chunk, t tokens of a chunk.

Source: Gated DeltaNet and its chunked form, Yang et al. 2024; DeltaProduct, Siems et al. 2025; KDA,
Kimi Team 2025 ("Kimi Linear", arXiv 2510.26692); RWKV-7, Peng et al. 2025 (arXiv 2503.14456).
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .baseline_layers import PlainLayer
from .fields import has_negative_eigenvalues, resolve_n_heads
from .layers import GroupNorm, RMSNorm, ShortConv, convolve, without_autocast
from .scan import _chunked, ssd_decays
from .state import Sequences, last_valid_tokens, shift

CHUNK = 64  # largest number of steps in a chunk


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    log_alpha: torch.Tensor,
    S: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the recurrence of Gated DeltaNet and DeltaProduct in chunks.

    Args:
        q: Queries, (b,l,h,k).
        k: Keys, (b,l,n,h,k). With unit norm each step is a contraction.
        v: Values, (b,l,n,h,v).
        beta: β, (b,l,n,h). A token with β = 0 and log α = 0 keeps the state.
        log_alpha: log α ≤ 0, (b,l,h).
        S: Initial state, (b,h,v,k); None is zero.
        starts: True at tokens that start from an empty state, (b,l), or None.
        chunk: Largest number of steps in a chunk. A chunk contains whole tokens.

    Returns:
        o (b,l,h,v) and the final state (b,h,v,k), in fp32, or in fp64 if an input is fp64.
    """
    dtype = torch.float32
    for t in (q, k, v, beta):
        dtype = torch.promote_types(dtype, t.dtype)
    with torch.autocast(q.device.type, enabled=False):
        length, n = k.shape[1:3]
        chunk_tokens = max(1, min(chunk // n, length))
        # 1. Cut k, v, β, q into chunks: K (b,i,h,c,k), V (b,i,h,c,v), B (b,i,h,c,1), Q (b,i,h,t,k).
        K, V, B = (
            _chunked(t.to(dtype).flatten(1, 2), chunk_tokens * n).transpose(2, 3)
            for t in (k, v, beta.unsqueeze(-1))
        )
        Q = _chunked(q.to(dtype), chunk_tokens).transpose(2, 3)
        # 2. Products of the gates: g_ij between two steps (b,i,h,c,c), from a step to the end of
        #    its chunk, and g_i from the start of its chunk (b,i,h,c,1).
        between, to_end, from_start = _multiply_gates(
            log_alpha.to(dtype), starts, n, chunk_tokens * n
        )
        # 3. Solve for the update of each step as a function of the state, u = u_zero − W Sᵀ, where
        #    u_zero is the update for S = 0. `solve_triangular` reads `system` below the diagonal.
        system = (K @ K.transpose(-1, -2)) * between * B
        right = torch.cat([B * V, B * from_start * K], -1)
        solution = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        u_zero, W = solution.split([V.shape[-1], K.shape[-1]], -1)
        # 4. Loop over the chunks. S (b,h,v,k)
        chunk_decay, decayed_keys = from_start[:, :, :, -1:], K * to_end
        S = V.new_zeros(*V[:, 0, :, 0].shape, K.shape[-1]) if S is None else S.to(dtype)
        states, updates = [], []
        for i in range(K.shape[1]):
            states.append(S)
            u = u_zero[:, i] - W[:, i] @ S.transpose(-1, -2)
            updates.append(u)
            S = chunk_decay[:, i] * S + u.transpose(-1, -2) @ decayed_keys[:, i]
        # 5. Read the state after the last step of each token.
        last_steps = slice(n - 1, None, n)
        scores = (Q @ K.transpose(-1, -2)) * between[..., last_steps, :]
        o = scores @ torch.stack(updates, 1)
        o = o + (Q * from_start[..., last_steps, :]) @ torch.stack(states, 1).transpose(-1, -2)
        return o.transpose(2, 3).flatten(1, 2)[:, :length], S


def _multiply_gates(log_alpha, starts, n, chunk_steps):
    """Multiply the gates of n steps per token by `ssd_decays`. log_alpha (b,l,h), starts (b,l)."""
    batch, length, heads = log_alpha.shape
    log_gates = log_alpha.new_zeros(batch, length, n, heads)
    log_gates[:, :, 0] = log_alpha  # the gate applies before the first step of a token
    keep = None  # 0 at the first step of a document, otherwise 1
    if starts is not None:
        keep = log_alpha.new_ones(batch, length, n)
        keep[:, :, 0] = ~starts
        keep = keep.flatten(1, 2)
    rates = log_alpha.new_ones(heads)  # `ssd_decays` multiplies its first argument by them
    between, to_end, from_start = ssd_decays(log_gates.flatten(1, 2), rates, keep, chunk_steps)
    return between, *(t.transpose(2, 3).unsqueeze(-1) for t in (to_end, from_start))


class DeltaState(NamedTuple):
    """State of the layer after the last real token of each row."""

    S: torch.Tensor  # (b,h,v,k)
    conv: tuple[torch.Tensor, ...]  # last inputs of the convolutions of q, k, v, (b,d_conv−1,·)


NORM_EPS = 1e-6  # added to ‖x‖² before x is divided by its norm


def unit(x: torch.Tensor) -> torch.Tensor:
    """Return x / ‖x‖₂, with the norm over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


class GatedDeltaProduct(PlainLayer):
    """Gated DeltaProduct; its output is out_proj(RMSNorm(S q / √k) ⊙ silu(z)) with a gate z."""

    kind = "gated_deltaproduct"
    has_gate = True  # whether it has a gate α; otherwise α = 1

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        d, d_v = config.d_model, config.d_inner
        self.heads = resolve_n_heads(config)
        self.steps = self.get_steps(config)
        self.has_negative_eigenvalues = has_negative_eigenvalues(config, self.kind)
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, self.steps * d, bias=False)
        self.v_proj = nn.Linear(d, self.steps * d_v, bias=False)
        self.b_proj = nn.Linear(d, self.steps * self.heads, bias=False)
        if self.has_gate:
            self._add_decay(config)
        self.q_conv1d = ShortConv(d, config.d_conv, bias=False)
        self.k_conv1d = ShortConv(self.steps * d, config.d_conv, bias=False)
        self.v_conv1d = ShortConv(self.steps * d_v, config.d_conv, bias=False)
        self.g_proj = self._build_output_gate(config)
        self.o_norm = RMSNorm(d_v // self.heads, config.norm_epsilon)
        self.out_proj = nn.Linear(d_v, d, bias=False)

    def _add_decay(self, config: Any) -> None:
        """Create the parameters of α."""
        self.a_proj = nn.Linear(config.d_model, self.heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(self.heads))

    def _build_output_gate(self, config: Any) -> nn.Module:
        """Build the module that computes z."""
        return nn.Linear(config.d_model, config.d_inner, bias=False)

    @staticmethod
    def get_steps(config: Any) -> int:
        """Return n, the steps per token."""
        return config.n_householder

    def state_shapes(self) -> list[tuple[int, ...]]:
        c, h, n = self.config, self.heads, self.steps
        widths = (c.d_model, n * c.d_model, n * c.d_inner)
        return [(h, c.d_inner // h, c.d_model // h), *((c.d_conv - 1, width) for width in widths)]

    def run(self, u: torch.Tensor, seqs: Sequences) -> tuple[torch.Tensor, DeltaState | None]:
        h, n = self.heads, self.steps
        # 1. Project and convolve. q (b,l,h,k), k (b,l,n,h,k), v (b,l,n,h,v)
        (q, k, v), tails = self._convolve(u, seqs)
        # 2. In fp32 or wider: normalise q and k; compute β (b,l,n,h) and log α (b,l,h), which are
        #    zero at padding and keep the state.
        wide = torch.promote_types(v.dtype, torch.float32)
        q, k, v = (t.to(wide) for t in (q, k, v))
        q = unit(q.unflatten(-1, (h, -1))) * (self.config.d_model // h) ** -0.5
        k, v = unit(k.unflatten(-1, (n, h, -1))), v.unflatten(-1, (n, h, -1))
        beta = seqs.zero_padding(self.b_proj(u).to(wide).sigmoid()).unflatten(-1, (n, h))
        if self.has_negative_eigenvalues:
            beta = 2 * beta
        log_alpha = torch.zeros_like(beta[:, :, 0])
        if self.has_gate:
            dt = F.softplus(self.a_proj(u).to(wide) + self.dt_bias.to(wide))
            log_alpha = seqs.zero_padding(-self.A_log.to(wide).exp() * dt)
        # 3. Run the recurrence; normalise and gate each head.
        z = self.g_proj(u)
        with without_autocast(u):
            o, S = delta_rule(q, k, v, beta, log_alpha, seqs.get_state("S"), seqs.starts)
            o = self.o_norm(o).to(wide).flatten(-2) * F.silu(z.to(wide))
        end = DeltaState(S.detach().clone(), tails) if seqs.return_state else None
        return self.out_proj(o.to(z.dtype)), end

    def _convolve(self, u, seqs):
        """Return silu(conv(·)) of the projections q, k, v of u, and the convolutions' last inputs.

        Each of the last inputs is None unless `seqs.return_state`.
        """
        projections = self.q_proj, self.k_proj, self.v_proj
        convolutions = self.q_conv1d, self.k_conv1d, self.v_conv1d
        convolved = [
            convolve(conv1d, seqs.zero_padding(proj(u)), seqs, self.config.d_conv, index)
            for index, (proj, conv1d) in enumerate(zip(projections, convolutions))
        ]
        outputs, tails = zip(*convolved)
        return outputs, tails

    def flops_per_token(self, length: int) -> int:
        c, h, n = self.config, self.heads, self.steps
        convolved = c.d_model + n * (c.d_model + c.d_inner)  # channels of q, k and v
        matrices = c.d_model * (convolved + (n + self.has_gate) * h + 2 * c.d_inner)
        # S has d_inner × d_model/h entries. FLOPs per entry: 2 for S k and 2 for the update in each
        # step; 1 for the gate and 2 for S q in each token.
        recurrence = (4 * n + 2 + self.has_gate) * c.d_inner * c.d_model // h
        return 2 * matrices + 2 * convolved * c.d_conv + recurrence


class GatedDeltaNet(GatedDeltaProduct):
    """Gated DeltaNet: Gated DeltaProduct with one step per token."""

    kind = "gated_deltanet"

    @staticmethod
    def get_steps(config: Any) -> int:
        return 1


class DeltaProduct(GatedDeltaProduct):
    """DeltaProduct: Gated DeltaProduct without the gate."""

    kind = "deltaproduct"
    has_gate = False


CHANNEL_RULE_FLOPS = 9  # per entry of S: 1 for S diag(w), 2 each for S a, (S a) bᵀ, v kᵀ, S q


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
    """Compute S_t = S_{t−1} (diag(w_t) + a_t b_tᵀ) + v_t k_tᵀ and o_t = S_t q_t, token by token.

    A token with w = 1, a = 0 and k = 0 keeps the state.

    Args:
        q: Queries, (b,l,h,k).
        w: Decays, (b,l,h,k).
        a: Left vectors of the rank-one term, (b,l,h,k).
        b: Right vectors of the rank-one term, (b,l,h,k).
        k: Keys, (b,l,h,k).
        v: Values, (b,l,h,v).
        S: Initial state, (b,h,v,k); None is zero.
        starts: True at tokens that start from an empty state, (b,l), or None.

    Returns:
        o (b,l,h,v) and the final state (b,h,v,k), in the inputs' dtype.
    """
    batch, length, heads, _ = q.shape
    if starts is not None:  # w = a = 0 erases the state
        is_continued = ~starts[:, :, None, None]
        w, a = w * is_continued, a * is_continued

    def split_time(t: torch.Tensor, *shape: int) -> tuple[torch.Tensor, ...]:
        """Return the tensor of each token, (b·h, *shape)."""
        return t.transpose(0, 1).reshape(length, batch * heads, *shape).unbind(0)

    rows = (split_time(t, 1, t.shape[-1]) for t in (w, b, k))
    columns = (split_time(t, t.shape[-1], 1) for t in (a, v, q))
    if S is None:
        S = q.new_zeros(batch, heads, v.shape[-1], k.shape[-1])
    S = S.to(q.dtype).flatten(0, 1)
    outputs = []
    for w_t, b_t, k_t, a_t, v_t, q_t in zip(*rows, *columns):
        transformed = torch.baddbmm(S * w_t, torch.bmm(S, a_t), b_t)  # S (diag(w) + a bᵀ)
        S = torch.baddbmm(transformed, v_t, k_t)
        outputs.append(torch.bmm(S, q_t))
    o = torch.stack(outputs).view(length, batch, heads, -1).transpose(0, 1)
    return o, S.view(batch, heads, *S.shape[1:])


class KDA(GatedDeltaNet):
    """Kimi Delta Attention; its output is out_proj(RMSNorm(S q / √k) ⊙ σ(z)).

    Low-rank maps compute z, and α, which has one value per channel.
    """

    kind = "kda"

    def _add_decay(self, config: Any) -> None:
        d, rank = config.d_model, config.d_inner // self.heads
        self.f_proj = nn.Sequential(nn.Linear(d, rank, bias=False), nn.Linear(rank, d, bias=False))
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(d))

    def _build_output_gate(self, config: Any) -> nn.Module:
        d, d_v = config.d_model, config.d_inner
        rank = d_v // self.heads
        return nn.Sequential(nn.Linear(d, rank, bias=False), nn.Linear(rank, d_v))

    def run(self, u: torch.Tensor, seqs: Sequences) -> tuple[torch.Tensor, DeltaState | None]:
        h = self.heads
        # 1. Project and convolve; normalise q and k, in fp32 or wider.
        projected, tails = self._convolve(u, seqs)
        wide = torch.promote_types(u.dtype, torch.float32)
        q, k, v = (t.to(wide).unflatten(-1, (h, -1)) for t in projected)
        q = unit(q) * (self.config.d_model // h) ** -0.5
        k = unit(k)
        # 2. Compute β (b,l,h,1) and log α (b,l,h,k), which are zero at padding and keep the state.
        beta = seqs.zero_padding(self.b_proj(u).to(wide).sigmoid()).unsqueeze(-1)
        if self.has_negative_eigenvalues:
            beta = 2 * beta
        dt = F.softplus(self.f_proj(u).to(wide) + self.dt_bias.to(wide)).unflatten(-1, (h, -1))
        log_alpha = seqs.zero_padding((-self.A_log.to(wide).exp()[:, None] * dt).flatten(-2))
        alpha = log_alpha.exp().unflatten(-1, (h, -1))
        # 3. Run the recurrence; normalise and gate each head.
        z = self.g_proj(u)
        with without_autocast(u):
            state, starts = seqs.get_state("S"), seqs.starts
            o, S = channel_delta_rule(q, alpha, -beta * alpha * k, k, k, beta * v, state, starts)
            o = self.o_norm(o).to(wide).flatten(-2) * z.to(wide).sigmoid()
        end = DeltaState(S.detach().clone(), tails) if seqs.return_state else None
        return self.out_proj(o.to(z.dtype)), end

    def flops_per_token(self, length: int) -> int:
        c, h = self.config, self.heads
        rank = c.d_inner // h
        convolved = 2 * c.d_model + c.d_inner  # channels of q, k and v
        gates = 3 * rank * c.d_model + rank * c.d_inner + h * c.d_model
        matrices = c.d_model * (convolved + c.d_inner) + gates
        recurrence = CHANNEL_RULE_FLOPS * c.d_inner * c.d_model // h
        return 2 * matrices + 2 * convolved * c.d_conv + recurrence


WA_RANK_FACTOR, GATE_RANK_FACTOR = 2.5, 5.0  # `factor` for the maps of w and a, and of the gate


def rwkv7_rank(d_model: int, factor: float) -> int:
    """Return the rank of a map of RWKV-7: factor · √d, rounded to a multiple of 32, at least 32."""
    return max(32, round(factor * math.sqrt(d_model) / 32) * 32)


class LowRankMap(nn.Module):
    """Low-rank map act(x W_downᵀ) W_upᵀ + bias."""

    def __init__(self, d: int, rank: int, act: Any, bias: bool = True) -> None:
        super().__init__()
        self.down = nn.Linear(d, rank, bias=False)
        self.up = nn.Linear(rank, d, bias=bias)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.act(self.down(x)))


class RWKV7State(NamedTuple):
    """State of the layer after the last real token of each row."""

    S: torch.Tensor  # (b,h,e,e)
    u: torch.Tensor  # (b,d), input of the last token


class RWKV7(PlainLayer):
    """Time mixing of RWKV-7.

    Every map reads its own mixture of the inputs u_t and u_{t−1}, such as x_r. The vectors k_k, k_a
    and r_k are parameters.

        r, k, v = W x_r, W x_k, W x_v;    w = exp(−e^(−½) σ(map_w(x_w)));    a = σ(map_a(x_a));
        κ̂ = unit(k ⊙ k_k);    k̃ = k ⊙ (1 + (a − 1) ⊙ k_a);
        S ← S (diag(w) − κ̂ (a ⊙ κ̂)ᵀ) + v k̃ᵀ;
        out_proj((GroupNorm(S r) + (r · (r_k ⊙ k̃)) v) ⊙ map_g(x_g)).

    As in the first layer of RWKV-7, there is no value residual between layers. The decay w is above
    0.545 and a below 1, so an eigenvalue of the transition (w − a along a channel) can be −0.45.
    """

    mixtures = "rwkvag"  # x_r, x_w, …: inputs of r, of the decay w, of k, v, a and of the gate g

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        d = config.d_model
        self.heads = resolve_n_heads(config)
        for name in self.mixtures:
            setattr(self, f"x_{name}", nn.Parameter(torch.empty(d)))
        self.k_k = nn.Parameter(torch.empty(d))
        self.k_a = nn.Parameter(torch.empty(d))
        self.r_k = nn.Parameter(torch.empty(self.heads, d // self.heads))
        self.r_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, d, bias=False)
        self.v_proj = nn.Linear(d, d, bias=False)
        self.w_lora = LowRankMap(d, rwkv7_rank(d, WA_RANK_FACTOR), torch.tanh)
        self.a_lora = LowRankMap(d, rwkv7_rank(d, WA_RANK_FACTOR), nn.Identity())
        self.g_lora = LowRankMap(d, rwkv7_rank(d, GATE_RANK_FACTOR), torch.sigmoid, bias=False)
        # eps is 1e-5 times the width of a head, as in the authors' code.
        self.g_norm = GroupNorm(self.heads, d, eps=1e-5 * (d // self.heads))
        self.out_proj = nn.Linear(d, d, bias=False)

    def state_shapes(self) -> list[tuple[int, ...]]:
        e = self.config.d_model // self.heads
        return [(self.heads, e, e), (self.config.d_model,)]

    def run(self, u: torch.Tensor, seqs: Sequences) -> tuple[torch.Tensor, RWKV7State | None]:
        h, wide = self.heads, torch.promote_types(u.dtype, torch.float32)
        # 1. Mix each token with the previous one, for each map in its own way.
        u = seqs.zero_padding(u)
        change = shift(u, seqs, "u") - u
        x = {name: u + change * getattr(self, f"x_{name}").to(u.dtype) for name in self.mixtures}
        # 2. Compute reads, writes and decays, (b,l,h,e), in fp32 or wider; padding keeps the state.
        r, k, v = self.r_proj(x["r"]), seqs.zero_padding(self.k_proj(x["k"])), self.v_proj(x["v"])
        log_w = seqs.zero_padding(-math.exp(-0.5) * self.w_lora(x["w"]).to(wide).sigmoid())
        a = self.a_lora(x["a"]).to(wide).sigmoid()
        gate = self.g_lora(x["g"])
        r, k, v, log_w, a = (t.to(wide).unflatten(-1, (h, -1)) for t in (r, k, v, log_w, a))
        erased_key = unit(k * self.k_k.to(wide).view(h, -1))
        k = k * (1 + (a - 1) * self.k_a.to(wide).view(h, -1))
        # 3. Run the recurrence; normalise each head; add the token's own value; gate.
        with without_autocast(u):
            o, S = channel_delta_rule(
                r, log_w.exp(), -erased_key, a * erased_key, k, v, seqs.get_state("S"), seqs.starts
            )
            bonus = (r * k * self.r_k.to(wide)).sum(-1, keepdim=True) * v
            o = (self.g_norm(o.flatten(-2)) + bonus.flatten(-2)) * gate.to(wide)
        end = None
        if seqs.return_state:
            before = seqs.get_state("u")
            before = None if before is None else before.unsqueeze(1)
            end = RWKV7State(S.detach().clone(), last_valid_tokens(u, 1, before, seqs).squeeze(1))
        return self.out_proj(o.to(gate.dtype)), end

    def flops_per_token(self, length: int) -> int:
        d, h = self.config.d_model, self.heads
        ranks = 2 * rwkv7_rank(d, WA_RANK_FACTOR) + rwkv7_rank(d, GATE_RANK_FACTOR)
        return 2 * (4 * d * d + 2 * d * ranks) + CHANNEL_RULE_FLOPS * d * d // h
