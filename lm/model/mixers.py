"""The channel mixers Q_t = I − M_t of the fixed-point iteration (paper App. C.3).

A mixer reads P (the mixer argument) through one linear map, `raw = P Wᵀ + b`, and applies M(P; v).
The block evaluates the map itself, fused with its other projections and split into the part that
depends on x alone (once per solve) and the part that depends on the iterate.

Shape suffixes: b batch, l length, d channels (d_inner), r rank.
"""

import math
from typing import NamedTuple

import torch
from torch import nn

ACTIVATIONS = {"silu": nn.functional.silu, "relu": nn.functional.relu, "identity": lambda x: x}


def nrm(v, eps):
    """v / max(‖v‖₂, eps) over the last dimension."""
    return v / torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp_min(eps)


class WNLinear(nn.Module):
    """A linear map with weight normalisation per output row: W = gain · weight / ‖weight‖
    (Salimans & Kingma 2016). `weight`: (out,in), `gain`: (out,1), `bias`: (out,) or None."""

    def __init__(self, in_features, out_features, bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.gain = nn.Parameter(torch.empty(out_features, 1))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def matrix(self):
        """W, (out,in)."""
        norm = torch.linalg.vector_norm(self.weight, dim=1, keepdim=True)
        return self.gain * (self.weight / norm)


class MixerWeights(NamedTuple):
    """A mixer's linear map, materialised once per solve."""

    first: torch.Tensor  # (m, p): P → the m first-layer outputs
    bias: torch.Tensor  # (m,)
    second: torch.Tensor | None  # (r·d, q): the low-rank second layer of the vectors, if any


def largest_divisor(d):
    """The largest divisor of d not above √d."""
    return next(m for m in range(math.isqrt(d), 0, -1) if d % m == 0)


class Reflections(nn.Module):
    """Householder products and DPLR: r unit vectors u_i and gates a_i ∈ (0,1) per token.

    householder: v ← v − 2 a_i u_i (u_iᵀ v) for i = 1…r in order (so Q is a product of r generalised
    Householder reflections); dplr: v − 2 Σ_i a_i u_i (u_iᵀ v), all from the same v.

    Args:
        d_inner: d. d_arg: width of P. rank: r. proj_rank: q, the vectors go through p → q → r·d.
        sequential: True for householder, False for dplr.
    """

    def __init__(self, d_inner, d_arg, rank, proj_rank, act, eps, sequential):
        super().__init__()
        self.d_inner, self.rank, self.eps, self.sequential = d_inner, rank, eps, sequential
        self.act = ACTIVATIONS[act]
        if proj_rank is None:
            self.u_down, self.u_proj = None, WNLinear(d_arg, rank * d_inner)
        else:
            self.u_down = WNLinear(d_arg, proj_rank)
            self.u_proj = WNLinear(proj_rank, rank * d_inner)
        self.alpha_proj = WNLinear(d_arg, rank, bias=True)
        self.out_features = rank + (proj_rank or rank * d_inner)

    def weights(self):
        low_rank = self.u_down is not None
        first = (self.u_down if low_rank else self.u_proj).matrix()
        bias = torch.cat([self.alpha_proj.bias, self.alpha_proj.bias.new_zeros(first.shape[0])])
        return MixerWeights(
            torch.cat([self.alpha_proj.matrix(), first]),
            bias,
            self.u_proj.matrix() if low_rank else None,
        )

    def forward(self, raw, v, weights):
        """M(P; v). raw: (b,l,m) = P Wᵀ + bias, v: (b,l,d) → (b,l,d)."""
        a, u = raw[..., : self.rank], raw[..., self.rank :]
        if weights.second is not None:
            u = nn.functional.linear(u, weights.second.to(u.dtype))
        a = 2 * torch.sigmoid(a)
        u = nrm(self.act(u.unflatten(-1, (self.rank, self.d_inner))), self.eps)
        if self.sequential:
            for i in range(self.rank):
                u_i = u[..., i, :]
                v = v - a[..., i : i + 1] * (u_i * v).sum(-1, keepdim=True) * u_i
            return v
        coefficients = a * (u * v.unsqueeze(-2)).sum(-1)
        return v - (coefficients.unsqueeze(-1) * u).sum(-2)

    def flops_per_token(self):
        """FLOPs of one M(P; v) given P Wᵀ: normalise (≈4rd), reflect (4rd), second layer."""
        low_rank = 2 * self.u_proj.weight.numel() if self.u_down is not None else 0
        return 8 * self.rank * self.d_inner + low_rank


class Kronecker(nn.Module):
    """With v reshaped to X (m₁,m₂): M(P; v) = X − 2 K₁ᵀ X K₂ᵀ.

    m₁ is the largest divisor of d not above √d. act(P Wᵀ) fills two upper triangles T row by row;
    S = T Tᵀ with its rows normalised; K = diag(σ(P W_gᵀ + b_g)) S.
    """

    def __init__(self, d_inner, d_arg, act, eps):
        super().__init__()
        self.m1 = largest_divisor(d_inner)
        self.m2 = d_inner // self.m1
        self.act, self.eps = ACTIVATIONS[act], eps
        self.triangles = [m * (m + 1) // 2 for m in (self.m1, self.m2)]
        self.uv_proj = WNLinear(d_arg, sum(self.triangles))
        self.gate_proj = WNLinear(d_arg, self.m1 + self.m2, bias=True)
        self.out_features = sum(self.triangles) + self.m1 + self.m2

    def weights(self):
        bias = self.gate_proj.bias
        return MixerWeights(
            torch.cat([self.gate_proj.matrix(), self.uv_proj.matrix()]),
            torch.cat([bias, bias.new_zeros(sum(self.triangles))]),
            None,
        )

    def _factor(self, gate, triangle, m):
        """K = diag(gate) · rows-normalised T Tᵀ. gate: (b,l,m), triangle: (b,l,m(m+1)/2)."""
        rows, cols = torch.triu_indices(m, m, device=triangle.device)
        flat = triangle.new_zeros(*triangle.shape[:-1], m * m)
        T = flat.index_copy(-1, rows * m + cols, triangle).unflatten(-1, (m, m))
        return gate.unsqueeze(-1) * nrm(T @ T.transpose(-1, -2), self.eps)

    def forward(self, raw, v, weights):
        """M(P; v). raw: (b,l,m), v: (b,l,d) → (b,l,d)."""
        g1, g2, t1, t2 = raw.split([self.m1, self.m2, *self.triangles], dim=-1)
        K1 = self._factor(torch.sigmoid(g1), self.act(t1), self.m1)
        K2 = self._factor(torch.sigmoid(g2), self.act(t2), self.m2)
        X = v.unflatten(-1, (self.m1, self.m2))
        return (X - 2 * K1.transpose(-1, -2) @ X @ K2.transpose(-1, -2)).flatten(-2)

    def flops_per_token(self):
        """FLOPs of one M(P; v) once P Wᵀ is known: two products T Tᵀ, then K₁ᵀ X K₂ᵀ."""
        m1, m2 = self.m1, self.m2
        return 2 * (m1**3 + m2**3) + 2 * (m1 * m1 * m2 + m1 * m2 * m2)


def build_mixer(config, d_inner, d_arg):
    """The mixer named by `config.mixer`.

    Raises:
        ValueError: an unknown name.
    """
    if config.mixer in ("householder", "dplr"):
        return Reflections(
            d_inner, d_arg, config.mixer_rank, config.mixer_proj_rank, config.mixer_act,
            config.eps, sequential=config.mixer == "householder",
        )  # fmt: skip
    if config.mixer == "kronecker":
        return Kronecker(d_inner, d_arg, config.mixer_act, config.eps)
    raise ValueError(f"unknown mixer `{config.mixer}`: householder, dplr and kronecker are built")
