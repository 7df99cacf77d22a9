"""The exponential moving average of the weights that a run trains (docs/recipes.md)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from lm.runs.checkpoint import read_state

FILE = "ema.pt"  # of a checkpoint


class Average:
    """E ← β E + (1 − β) θ after every update, in fp32 on every rank; E begins as θ.

    Args:
        model: whose weights are whole on this rank, in fp32. decay: β.
    """

    def __init__(self, model: torch.nn.Module, decay: float):
        self.model, self.decay = model, decay
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """As the weights are now."""
        self.weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        for name, p in self.model.named_parameters():
            self.weights[name].lerp_(p, 1 - self.decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the model has the averages for weights; afterwards its own, to the last bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, p in self.model.named_parameters():
            own = p.clone()
            p.copy_(self.weights[name])
            self.weights[name].copy_(own)

    def files(self) -> dict[str, object]:
        """What a checkpoint holds of it."""
        return {FILE: {"decay": self.decay, "weights": self.weights}}

    @torch.no_grad()
    def load(self, path: Path, say: Callable[[str], None]) -> None:
        """Go on as a verified checkpoint, whose weights the model has, or begin where it has no
        average."""
        self.begin()
        if (path / FILE).is_file():
            for name, saved in read_state(path / FILE)["weights"].items():
                self.weights[name].copy_(saved)
        else:
            say(f"note: {path} has no average of the weights (train.ema): it begins there")
