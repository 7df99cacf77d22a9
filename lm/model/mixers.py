"""The channel mixers Q of the fixed-point iteration (paper App. C.3).

mixer_base.py defines P, raw = P Wᵀ + bias, and M(P; v) = Q v. The block, not the mixer, computes
raw: it joins W with its other projections, and computes the part that depends only on x once per
solve. k is a factor on I − Q: with `eigen_range: signed` k is 2, and Q has eigenvalues in [−1, 1]
(Grazzi et al. 2024); with `positive` k is 1, and Q has eigenvalues in [0, 1].

Shape suffixes: d channels (d_inner), p width of P, r rank. Any number of leading dimensions is
allowed, so that a mixer can apply one Q to many vectors v.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .cell import LowRank
from .layers import Orthogonal, WNLinear, affine_map
from .mixer_base import Mixer, MixerWeights, ReflectionOptions, build_named_mixer, mixer, norm_bound

ACTIVATIONS = {"silu": F.silu, "relu": F.relu, "identity": lambda x: x}
POWER_STEPS = {"kronecker": 16, "selective_dense": 32}  # power iterations, as in the paper's code


def nrm(v: torch.Tensor, eps: float) -> torch.Tensor:
    """Return v / max(‖v‖₂, eps), with the norm over the last dimension."""
    return v / torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp_min(eps)


def compose_reflections(a: torch.Tensor, u: torch.Tensor, sequential: bool) -> LowRank:
    """Return I − Q = Uᵀ T U of r reflections.

    Args:
        a: Factors k a_i of the reflections I − k a_i u_i u_iᵀ, (…,r).
        u: Unit vectors u_i, the rows of U, (…,r,d).
        sequential: Whether Q is the product of the reflections (householder). Otherwise I − Q is
            the sum of k a_i u_i u_iᵀ (dplr).
    """
    T = torch.diag_embed(a)
    if sequential and a.shape[-1] > 1:
        # The compact WY form: each reflection applies to the result of the ones before it.
        gram_below = torch.tril(u @ u.transpose(-1, -2), -1)
        T = torch.linalg.solve_triangular(
            a.unsqueeze(-1) * gram_below, T, upper=False, unitriangular=True
        )
    return LowRank(u, T)


def largest_divisor(d: int) -> int:
    """Return the largest divisor of d that is at most √d."""
    return next(m for m in range(math.isqrt(d), 0, -1) if d % m == 0)


def gram_from_triangle(entries: torch.Tensor, m: int) -> torch.Tensor:
    """Return S = T Tᵀ (…,m,m), where the entries (…,m(m+1)/2) fill the upper triangle T by rows."""
    rows, cols = torch.triu_indices(m, m, device=entries.device)
    flat = entries.new_zeros(*entries.shape[:-1], m * m)
    T = flat.index_copy(-1, rows * m + cols, entries).unflatten(-1, (m, m))
    return T @ T.transpose(-1, -2)


def largest_eigenvalue(S: torch.Tensor, steps: int) -> torch.Tensor:
    """Estimate the spectral radius ρ(S) by power iteration from the vector of ones.

    As in the paper's code the estimate is x_{k−1}ᵀ S x_k of the last two iterates, and the gradient
    goes through the iteration.

    Args:
        S: Matrices with real eigenvalues of at least 0, (…,m,m).
        steps: Number of iterations.

    Returns:
        The estimate, (…,1,1).
    """
    x = S.new_full((*S.shape[:-1], 1), S.shape[-1] ** -0.5)
    for _ in range(steps):
        previous, x = x, S @ x
        x = x / torch.linalg.vector_norm(x, dim=-2, keepdim=True).clamp_min(1e-12)
    return previous.transpose(-1, -2) @ (S @ x)


def largest_stretch(S: torch.Tensor, steps: int, eps: float) -> torch.Tensor:
    """Estimate ρ(S) − eps by power iteration, so that S / (estimate + eps) has spectral radius 1.

    As in the paper's code the iteration starts from the vector of ones and divides each iterate by
    its norm + eps. The estimate is the last norm ‖S x‖; the gradient goes through the iteration.

    Args:
        S: Matrices with real eigenvalues of at least 0, (…,m,m).
        steps: Number of iterations.
        eps: Added to the norms.

    Returns:
        The estimate, (…,1,1).
    """
    x = S.new_full((*S.shape[:-1], 1), S.shape[-1] ** -0.5)
    for _ in range(steps):
        x = S @ x
        stretch = torch.linalg.vector_norm(x, dim=-2, keepdim=True)
        x = x / (stretch + eps)
    return stretch


def _scale(config):
    """Return k, the eigenvalue of I − Q for a gate of 1."""
    return 2.0 if config.eigen_range == "signed" else 1.0


def _stack_maps(layers, like):
    """Return the MixerWeights of linear layers that all read P; raw is their outputs in order."""
    maps = [affine_map(layer, like) for layer in layers]
    biases = [matrix.new_zeros(len(matrix)) if bias is None else bias for matrix, bias in maps]
    return MixerWeights(torch.cat([matrix for matrix, _ in maps]), torch.cat(biases))


@mixer("householder", "dplr")
class Reflections(Mixer):
    """Householder products and DPLR, with r unit vectors u_i and gates a_i ∈ (0,1).

    `householder` computes v ← v − k a_i u_i (u_iᵀ v) for i = 1…r in order, so Q is a product of r
    generalised Householder reflections. `dplr` computes v − k Σ_i a_i u_i (u_iᵀ v): Q is diagonal
    plus low-rank.

    Args:
        d_inner: Number of channels d.
        d_arg: Width p of P.
        rank: Number r of reflections.
        proj_rank: Rank q of the map to the vectors, p → q → r·d; None for a full map p → r·d.
        act: Activation of the vectors, a key of ACTIVATIONS.
        eps: Floor of the norms by which the vectors are divided.
        scale: Factor k.
        sequential: True for householder, False for dplr.
    """

    def __init__(
        self,
        d_inner: int,
        d_arg: int,
        rank: int,
        proj_rank: int | None,
        act: str,
        eps: float,
        scale: float,
        sequential: bool,
    ) -> None:
        super().__init__()
        self.d_inner, self.rank, self.eps, self.sequential = d_inner, rank, eps, sequential
        self.act_name, self.act, self.scale = act, ACTIVATIONS[act], scale
        if proj_rank is None:
            self.u_down, self.u_proj = None, WNLinear(d_arg, rank * d_inner)
        else:
            self.u_down = WNLinear(d_arg, proj_rank)
            self.u_proj = WNLinear(proj_rank, rank * d_inner)
        self.alpha_proj = WNLinear(d_arg, rank, bias=True)
        self.out_features = rank + (proj_rank or rank * d_inner)
        self.has_low_rank = True

    @classmethod
    def from_config(cls, config: Any, d_inner: int, d_arg: int) -> "Reflections":
        return cls(
            d_inner,
            d_arg,
            config.mixer_rank,
            config.mixer_proj_rank,
            config.mixer_act,
            config.eps,
            _scale(config),
            sequential=config.mixer == "householder",
        )

    def weights(self, like: torch.Tensor) -> MixerWeights:
        if self.u_down is None:
            return _stack_maps([self.u_proj, self.alpha_proj], like)
        weights = _stack_maps([self.u_down, self.alpha_proj], like)
        return weights._replace(extra=affine_map(self.u_proj, like))

    def merge_extra(self, weights: MixerWeights) -> MixerWeights:
        """Return the weights with the two layers p → q → r·d multiplied into one, p → r·d."""
        if not weights.extra:
            return weights
        matrix, bias, (up, up_bias) = weights
        q = len(matrix) - self.rank  # the last `rank` rows are those of the gates
        vector_map, vector_bias = up @ matrix[:q], up @ bias[:q]
        if up_bias is not None:
            vector_bias = vector_bias + up_bias
        return MixerWeights(torch.cat([vector_map, matrix[q:]]), torch.cat([vector_bias, bias[q:]]))

    def _second_layer(self, u, weights):
        """Return the vectors (…,r·d) of u (…,q), in u's dtype."""
        up, bias = weights.extra
        bias = None if bias is None else bias.to(up.dtype)
        return F.linear(u.to(up.dtype), up, bias).to(u.dtype)

    def vectors(
        self, raw: torch.Tensor, weights: MixerWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors k a_i, (…,r), and the unit vectors u_i, (…,r,d)."""
        u, a = raw[..., : -self.rank], raw[..., -self.rank :]
        if weights.extra:  # two layers that are not merged
            u = self._second_layer(u, weights)
        u = nrm(self.act(u.unflatten(-1, (self.rank, self.d_inner))), self.eps)
        return self.scale * torch.sigmoid(a), u

    def gates(self, raw: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(raw[..., -self.rank :])

    def low_rank(self, raw: torch.Tensor, weights: MixerWeights) -> LowRank:
        return compose_reflections(*self.vectors(raw, weights), self.sequential)

    def kernel_options(self) -> ReflectionOptions:
        return ReflectionOptions(self.rank, self.scale, self.act_name, self.sequential, self.eps)

    def forward(self, raw: torch.Tensor, v: torch.Tensor, weights: MixerWeights) -> torch.Tensor:
        a, u = self.vectors(raw, weights)
        if self.sequential:
            for i in range(self.rank):
                u_i = u[..., i, :]
                v = v - a[..., i : i + 1] * (u_i * v).sum(-1, keepdim=True) * u_i
            return v
        coefficients = a * (u * v.unsqueeze(-2)).sum(-1)
        return v - (coefficients.unsqueeze(-1) * u).sum(-2)

    def bound(self, raw: torch.Tensor, weights: MixerWeights) -> torch.Tensor:
        """Return Σ k a_i ≥ ‖I − Q‖, (…,1).

        For dplr this is the sum of the norms of the terms. For householder ‖I − Q‖ ≤ Σ ‖I − Q_i‖,
        because a product of the factors Q_i has norm ≤ 1.
        """
        return self.scale * torch.sigmoid(raw[..., -self.rank :]).sum(-1, keepdim=True)

    def flops_per_token(self) -> int:
        """Return the FLOPs of M(P; v): normalise (≈4rd), reflect (4rd), second layer."""
        second_layer = 2 * self.u_proj.in_features * self.u_proj.out_features if self.u_down else 0
        return 8 * self.rank * self.d_inner + second_layer


@mixer("kronecker")
class Kronecker(Mixer):
    """Kronecker product: with v reshaped to X (m₁,m₂), M(P; v) = X − k K₁ᵀ X K₂ᵀ.

    m₁ is the largest divisor of d that is at most √d, and m₂ = d / m₁. Each factor K (m,m) is
    diag(gates) S. S is T Tᵀ with normalised rows, where the factor's part of act(raw) fills the
    upper triangle T by rows. With norm "spectral", S is also divided by its largest eigenvalue.
    """

    def __init__(
        self, d_inner: int, d_arg: int, act: str, eps: float, scale: float, norm: str
    ) -> None:
        super().__init__()
        self.d_inner, self.m1 = d_inner, largest_divisor(d_inner)
        self.m2 = d_inner // self.m1
        self.act, self.eps, self.scale, self.norm = ACTIVATIONS[act], eps, scale, norm
        self.triangles = [m * (m + 1) // 2 for m in (self.m1, self.m2)]  # entries of each T
        self.uv_proj = WNLinear(d_arg, sum(self.triangles))
        self.gate_proj = WNLinear(d_arg, self.m1 + self.m2, bias=True)
        self.out_features = sum(self.triangles) + self.m1 + self.m2

    @classmethod
    def from_config(cls, config: Any, d_inner: int, d_arg: int) -> "Kronecker":
        norm = config.kronecker_norm
        return cls(d_inner, d_arg, config.mixer_act, config.eps, _scale(config), norm)

    def weights(self, like: torch.Tensor) -> MixerWeights:
        return _stack_maps([self.uv_proj, self.gate_proj], like)

    def _factor(self, gate, triangle, m):
        """Return K (…,m,m) for gate (…,m) and triangle (…,m(m+1)/2)."""
        S = nrm(gram_from_triangle(triangle, m), self.eps)
        if self.norm == "spectral":
            S = S / (largest_eigenvalue(S, POWER_STEPS["kronecker"]) + self.eps)
        return gate.unsqueeze(-1) * S

    def forward(self, raw: torch.Tensor, v: torch.Tensor, weights: MixerWeights) -> torch.Tensor:
        t1, t2, g1, g2 = raw.split([*self.triangles, self.m1, self.m2], dim=-1)
        K1 = self._factor(torch.sigmoid(g1), self.act(t1), self.m1)
        K2 = self._factor(torch.sigmoid(g2), self.act(t2), self.m2)
        X = v.unflatten(-1, (self.m1, self.m2))
        return (X - self.scale * K1.transpose(-1, -2) @ X @ K2.transpose(-1, -2)).flatten(-2)

    def gates(self, raw: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(raw[..., -(self.m1 + self.m2) :])

    def flops_per_token(self) -> int:
        """Return the FLOPs of M(P; v): two products T Tᵀ, then K₁ᵀ X K₂ᵀ."""
        m1, m2 = self.m1, self.m2
        return 2 * (m1**3 + m2**3) + 2 * (m1 * m1 * m2 + m1 * m2 * m2)


@mixer("monarch")
class Monarch(Mixer):
    """Block-diagonal matrix with d/r blocks of size r, each I − k a S with its own gate a.

    S = T Tᵀ / (largest column norm of T Tᵀ + eps), where the block's part of act(raw) fills the
    upper triangle T by rows.
    """

    def __init__(
        self, d_inner: int, d_arg: int, block_size: int, act: str, eps: float, scale: float
    ) -> None:
        super().__init__()
        self.d_inner, self.block_size, self.num_blocks = d_inner, block_size, d_inner // block_size
        self.act, self.eps, self.scale = ACTIVATIONS[act], eps, scale
        self.triangle = block_size * (block_size + 1) // 2  # entries of T
        self.uv_proj = WNLinear(d_arg, self.num_blocks * self.triangle)
        self.gate_proj = WNLinear(d_arg, self.num_blocks, bias=True)
        self.out_features = self.num_blocks * (self.triangle + 1)

    @classmethod
    def from_config(cls, config: Any, d_inner: int, d_arg: int) -> "Monarch":
        block_size = config.mixer_rank
        return cls(d_inner, d_arg, block_size, config.mixer_act, config.eps, _scale(config))

    def weights(self, like: torch.Tensor) -> MixerWeights:
        return _stack_maps([self.uv_proj, self.gate_proj], like)

    def _identity_minus_q(self, raw):
        """Return I − Q of every block, (…,d/r,r,r)."""
        triangles, gate = raw[..., : -self.num_blocks], raw[..., -self.num_blocks :]
        triangles = self.act(triangles).unflatten(-1, (self.num_blocks, self.triangle))
        S = gram_from_triangle(triangles, self.block_size)
        max_norm = torch.linalg.vector_norm(S, dim=-2).amax(-1)[..., None, None]
        a = self.scale * torch.sigmoid(gate)[..., None, None]
        return a * (S / (max_norm + self.eps))

    def forward(self, raw: torch.Tensor, v: torch.Tensor, weights: MixerWeights) -> torch.Tensor:
        X = v.unflatten(-1, (self.num_blocks, self.block_size))
        return (X - (self._identity_minus_q(raw) @ X.unsqueeze(-1)).squeeze(-1)).flatten(-2)

    def gates(self, raw: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(raw[..., -self.num_blocks :])

    def bound(self, raw: torch.Tensor, weights: MixerWeights) -> torch.Tensor:
        """Return the largest bound over the blocks, (…,1)."""
        return norm_bound(self._identity_minus_q(raw)).amax(-1, keepdim=True)

    def flops_per_token(self) -> int:
        return self.num_blocks * (2 * self.block_size**3 + 4 * self.block_size**2)


@mixer("nonselective")
class NonSelective(Mixer):
    """Orthogonal Q that does not depend on the token: M(P; v) = v Qᵀ."""

    def __init__(self, d_inner: int, d_arg: int) -> None:
        super().__init__()
        self.d_inner, self.d_arg = d_inner, d_arg
        self.q_proj = Orthogonal(d_inner)

    def weights(self, like: torch.Tensor) -> MixerWeights:
        Q = self.q_proj()
        return MixerWeights(Q.new_zeros(0, self.d_arg), Q.new_zeros(0), (Q,))

    def forward(self, raw: torch.Tensor, v: torch.Tensor, weights: MixerWeights) -> torch.Tensor:
        return F.linear(v, weights.extra[0].to(v.dtype))

    def bound(self, raw: torch.Tensor, weights: MixerWeights) -> torch.Tensor:
        """Return a bound of shape (1,): all tokens have the same matrix."""
        return super().bound(raw.new_zeros(0), weights)


@mixer("selective_dense")
class SelectiveDense(Mixer):
    """Full matrix per token: Q = T Tᵀ / ρ(T Tᵀ), where act(raw) fills T; O(d³) per token."""

    def __init__(self, d_inner: int, d_arg: int, act: str, eps: float) -> None:
        super().__init__()
        self.d_inner, self.act, self.eps = d_inner, ACTIVATIONS[act], eps
        self.out_features = d_inner * (d_inner + 1) // 2
        self.uv_proj = WNLinear(d_arg, self.out_features)

    @classmethod
    def from_config(cls, config: Any, d_inner: int, d_arg: int) -> "SelectiveDense":
        return cls(d_inner, d_arg, config.mixer_act, config.eps)

    def weights(self, like: torch.Tensor) -> MixerWeights:
        return _stack_maps([self.uv_proj], like)

    def forward(self, raw: torch.Tensor, v: torch.Tensor, weights: MixerWeights) -> torch.Tensor:
        S = gram_from_triangle(self.act(raw), self.d_inner)
        S = S / (largest_stretch(S, POWER_STEPS["selective_dense"], self.eps) + self.eps)
        return (S @ v.unsqueeze(-1)).squeeze(-1)

    def flops_per_token(self) -> int:
        return 2 * self.d_inner**3 + (2 + 2 * POWER_STEPS["selective_dense"]) * self.d_inner**2


@mixer("mixture")
class Mixture(Mixer):
    """Product of r mixers: householder with one reflection and kronecker, alternating."""

    def __init__(self, parts: Sequence[Mixer]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.d_inner = parts[0].d_inner
        self.out_features = sum(part.out_features for part in parts)

    @classmethod
    def from_config(cls, config: Any, d_inner: int, d_arg: int) -> "Mixture":
        names = itertools.islice(itertools.cycle(["householder", "kronecker"]), config.mixer_rank)
        return cls(
            [build_named_mixer(n, config, d_inner, d_arg, mixer=n, mixer_rank=1) for n in names]
        )

    def weights(self, like: torch.Tensor) -> MixerWeights:
        part_weights = tuple(part.weights(like) for part in self.parts)
        matrix = torch.cat([weights.matrix for weights in part_weights])
        bias = torch.cat([weights.bias for weights in part_weights])
        return MixerWeights(matrix, bias, extra=part_weights)

    def forward(self, raw: torch.Tensor, v: torch.Tensor, weights: MixerWeights) -> torch.Tensor:
        raws = raw.split([part.out_features for part in self.parts], dim=-1)
        for part, part_raw, part_weights in zip(self.parts, raws, weights.extra):
            v = part(part_raw, v, part_weights)
        return v

    def gates(self, raw: torch.Tensor) -> torch.Tensor:
        raws = raw.split([part.out_features for part in self.parts], dim=-1)
        return torch.cat([part.gates(raw) for part, raw in zip(self.parts, raws)], -1)

    def flops_per_token(self) -> int:
        return sum(part.flops_per_token() for part in self.parts)


class Contractive(Mixer):
    """Wrapper that scales any mixer so that ‖I − Q'‖ ≤ κ < 1, the condition of the paper's Thm 3.1.

    Q' = I − shrink · (I − Q) with shrink = κ / max(κ, β), where β ≥ ‖I − Q‖ is the mixer's `bound`.
    """

    def __init__(self, mixer: Mixer, kappa: float) -> None:
        super().__init__()
        self.mixer, self.kappa = mixer, kappa
        self.d_inner, self.out_features = mixer.d_inner, mixer.out_features
        self.has_low_rank = mixer.has_low_rank

    def weights(self, like: torch.Tensor) -> MixerWeights:
        return self.mixer.weights(like)

    def merge_extra(self, weights: MixerWeights) -> MixerWeights:
        return self.mixer.merge_extra(weights)

    def mix(
        self, raw: torch.Tensor, x: torch.Tensor, y: torch.Tensor, weights: MixerWeights
    ) -> torch.Tensor:
        mixed = self.mixer.mix(raw, x, y, weights)
        return x - self._compute_shrink(raw, weights) * (x - mixed)

    def low_rank(self, raw: torch.Tensor, weights: MixerWeights) -> LowRank | None:
        low_rank = self.mixer.low_rank(raw, weights)
        if low_rank is None:
            return None
        return LowRank(low_rank.U, low_rank.T * self._compute_shrink(raw, weights).unsqueeze(-1))

    def kernel_options(self) -> ReflectionOptions | None:
        options = self.mixer.kernel_options()
        return None if options is None else options._replace(kappa=self.kappa)

    def gates(self, raw: torch.Tensor) -> torch.Tensor | None:
        """Return the gates of the wrapped mixer, before the scaling."""
        return self.mixer.gates(raw)

    def forward(self, raw: torch.Tensor, v: torch.Tensor, weights: MixerWeights) -> torch.Tensor:
        mixed = self.mixer(raw, v, weights)
        return v - self._compute_shrink(raw, weights) * (v - mixed)

    def _compute_shrink(self, raw, weights):
        """Return the factor on I − Q, (…,1)."""
        return self.kappa / self.mixer.bound(raw, weights).clamp_min(self.kappa)

    def flops_per_token(self) -> int:
        return self.mixer.flops_per_token() + 3 * self.d_inner


def build_mixer(config: Any, d_inner: int, d_arg: int) -> Mixer:
    """Build the mixer that `config.mixer` names.

    Args:
        config: FPRNNConfig of the layer.
        d_inner: Number of channels d.
        d_arg: Width p of P.

    Raises:
        ValueError: If the name is unknown, or the mixer cannot have these sizes. FPRNNConfig has
            checked the sizes of built-in mixers.
    """
    module = build_named_mixer(config.mixer, config, d_inner, d_arg)
    return module if config.contractive is None else Contractive(module, config.contractive)
