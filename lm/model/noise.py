"""Noise on sh(y) in training: what survives it has learnt to pull a state back."""

import contextlib
import math
from typing import Any

import torch


def gaussian(block: Any, u: torch.Tensor, sigma: float) -> torch.Tensor | None:
    """`state_noise` σ of a block: N(0, s²) with an s of every sequence's own from U[0, σ]; None for
    σ = 0. u: (b,l,d_model) → (b,l,d_inner), in units of the vector that the block's norm makes."""
    if not sigma:
        return None
    noise = torch.randn(*u.shape[:2], block.config.d_inner, device=u.device)
    return sigma * torch.rand(len(u), 1, 1, device=u.device) * noise


class Adversary:
    """State noise against the loss: a second pass over the same tokens has in every block, beside
    the first one's noise, a vector along the first loss's gradient there. (The step of Goodfellow
    et al. 2015, eq. 1, on the state in place of the input, by its 2-norm.)

        with adversary.first_pass():
            loss = ...
        loss.backward()
        with adversary.second_pass():
            worse = ...
        worse.backward()

    Args:
        model: in training mode, with fixed-point layers.
        size: the most that a token's vector is long, of √d_inner, the length of what the block's
            norm makes; every sequence draws its own from U[0, size].
    """

    def __init__(self, model: Any, size: float) -> None:
        self.model, self.size = model, size
        self.noise: dict[Any, torch.Tensor] = {}

    def first_pass(self) -> contextlib.AbstractContextManager[None]:
        """The context of the first pass: every block's noise is kept, with its gradient."""
        self.noise.clear()
        return self.model.passes(draw_noise=self._kept)

    def second_pass(self) -> contextlib.AbstractContextManager[None]:
        """The context of the second, after the backward of the first."""
        return self.model.passes(draw_noise=self._against)

    def _kept(self, block, u, sigma):
        noise = gaussian(block, u, sigma)
        if noise is None:
            noise = torch.zeros(*u.shape[:2], block.config.d_inner, device=u.device)
        self.noise[block] = noise.requires_grad_()
        return noise

    def _against(self, block, u, sigma):
        noise = self.noise[block]
        if noise.grad is None:
            raise RuntimeError("the second pass needs the backward of the first")
        length = torch.linalg.vector_norm(noise.grad, dim=-1, keepdim=True)
        worst = noise.grad / length.clamp_min(torch.finfo(length.dtype).tiny)
        size = self.size * math.sqrt(noise.shape[-1]) * torch.rand(len(u), 1, 1, device=u.device)
        return noise.detach() + size * worst
