"""Muon for matrices and AdamW for the rest, as one optimizer; also over flat ZeRO partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as torch_dist


class Piece(NamedTuple):
    """What a flat partition holds of one matrix."""

    shape: torch.Size  # of the matrix
    place: slice  # in the partition
    part: slice  # of the matrix, flattened


class MatricesAndRest(torch.optim.Optimizer):
    """Groups whose "method" is "muon" are stepped by torch.optim.Muon, the others by AdamW.

    ZeRO-1 and 2 put flat pieces in the place of matrices, of which no step can be made. There every
    rank goes on with the momentum of its piece, and gathers those of all ranks to make the step of
    each matrix that it holds some of (`laid_out`).

    Args:
        groups: of `optim.parameter_groups`. muon, adamw: arguments of torch's optimizers.
    """

    def __init__(self, groups: list[dict], muon: dict, adamw: dict):
        super().__init__(groups, {})
        self.muon_settings = muon
        self.parts = {
            "muon": torch.optim.Muon(self._of("muon"), **muon),
            "adamw": torch.optim.AdamW(self._of("adamw"), **adamw),
        }
        self.pieces: dict[torch.Tensor, list[Piece]] = {}
        self.world_size, self.rank = 1, 0

    def _of(self, method: str) -> list[dict]:
        return [group for group in self.param_groups if group["method"] == method]

    def laid_out(self, pieces: dict[torch.Tensor, list[Piece]], world_size: int, rank: int) -> None:
        """How this rank's flat tensors are made of matrices; every rank has as many, each as long
        as the others' of its number."""
        self.pieces, self.world_size, self.rank = pieces, world_size, rank

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One update. Every rank makes it alike."""
        flat = [g for g in self._of("muon") if g["params"][0].ndim == 1]
        for group in flat:
            for p in group["params"]:
                self._step_flat(p, group)
        for method, optimizer in self.parts.items():
            # A checkpoint that is loaded has put other groups there, ZeRO steps one at a time.
            optimizer.state = self.state
            optimizer.param_groups = self._of(method)
            if optimizer.param_groups and not (method == "muon" and flat):
                optimizer.step()

    def _step_flat(self, p: torch.Tensor, group: dict) -> None:
        """torch.optim.Muon's update, of the pieces in one flat tensor (n,)."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        momentum = state["momentum_buffer"]
        momentum.lerp_(p.grad, 1 - group["momentum"])
        direction = p.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        whole = self._of_all_ranks(direction)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        for piece in self.pieces[p]:
            start = self.rank * p.numel() + piece.place.start - piece.part.start
            matrix = whole[start : start + piece.shape.numel()].view(piece.shape)
            step = self._orthogonal(matrix).flatten()[piece.part]
            p[piece.place].add_(step, alpha=group["lr"])

    def _of_all_ranks(self, flat: torch.Tensor) -> torch.Tensor:
        """The partitions of all ranks, one after the other."""
        if self.world_size == 1:
            return flat
        parts = [torch.empty_like(flat) for _ in range(self.world_size)]
        torch_dist.all_gather(parts, flat.contiguous())
        return torch.cat(parts)

    def _orthogonal(self, matrix: torch.Tensor) -> torch.Tensor:
        """What torch.optim.Muon adds to a matrix for this gradient at a learning rate of 1, without
        momentum and decay: the orthogonalised gradient, scaled by the shape, with a minus."""
        step = torch.zeros_like(matrix)
        step.grad = matrix
        alone = self.muon_settings | {"lr": 1.0, "momentum": 0.0, "nesterov": False}
        torch.optim.Muon([step], **alone | {"weight_decay": 0.0}).step()
        return step
