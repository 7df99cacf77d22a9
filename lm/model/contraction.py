"""How contractive an iteration is, ‖∂f/∂y‖₂, and what mixes, ‖I − Q_t‖₂, by power iteration."""

from collections.abc import Callable
from typing import Any

import torch


def spectral_norm(
    f: Callable[[torch.Tensor], torch.Tensor],
    y: torch.Tensor,
    iterations: int,
    per_token: bool = False,
    linear: bool = False,
) -> torch.Tensor:
    """‖∂f/∂y‖₂ at y by power iteration on JᵀJ: Jᵀ by reverse mode, J by a central difference (exact
    for a linear f).

    Args:
        f: (b,l,d) → (b,l,d). per_token: f acts on each token by itself.
    Returns:
        (b,), or (b,l) per token.
    """
    over = (-1,) if per_token else (-2, -1)
    generator = torch.Generator(y.device).manual_seed(0)
    v = torch.randn(y.shape, generator=generator, dtype=y.dtype, device=y.device)
    with torch.enable_grad():
        at = y.detach().requires_grad_()
        value = f(at)

    def norm(t):
        return torch.linalg.vector_norm(t, dim=over, keepdim=True)

    for _ in range(iterations):
        v = v / norm(v).clamp_min(1e-30)
        with torch.no_grad():
            if linear:
                Jv = f(v)
            else:
                h = 1e-3 * norm(y).clamp_min(1.0)
                Jv = (f(y + h * v) - f(y - h * v)) / (2 * h)
        sigma = norm(Jv)
        v = torch.autograd.grad(value, at, Jv, retain_graph=True)[0]
    return sigma.squeeze(over)


def mixing_norm(
    mixer: Any, raw: torch.Tensor, weights: Any, y: torch.Tensor, iterations: int
) -> torch.Tensor:
    """‖I − Q_t‖₂ of every token, (b,l). raw, weights: as the mixer takes them. y: (b,l,d), of which
    the shape and dtype are used."""

    def off_identity(v):
        return v - mixer(raw, v, weights)

    return spectral_norm(off_identity, torch.zeros_like(y), iterations, per_token=True, linear=True)
