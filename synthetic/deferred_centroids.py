"""Centroids (`model.state_centroids`) that a model gets only when its curriculum is over."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class DeferredCentroids:
    """Centroids of all layers of a model, which can be detached and attached.

    A layer with detached centroids reads its state itself, and the state dict of the model does not
    contain them. An optimizer that was made before holds their parameters all the time.

    Args:
        model: A model with all its centroids attached. The constructor detaches them.
    """

    def __init__(self, model: nn.Module) -> None:
        blocks = {layer: part.block for layer, part in enumerate(model.backbone.layers)}
        self._blocks = {
            layer: block
            for layer, block in blocks.items()
            if getattr(block, "centroids", None) is not None
        }
        self.modules = {layer: block.centroids for layer, block in self._blocks.items()}
        self.set_attached(False)

    def set_attached(self, is_attached: bool) -> None:
        """Attach all centroids to their layers, or detach them."""
        self.is_attached = is_attached
        for layer, block in self._blocks.items():
            block.centroids = self.modules[layer] if is_attached else None

    @property
    def are_missing(self) -> bool:
        """True if there are centroids and they are detached."""
        return bool(self.modules) and not self.is_attached

    def match(self, names: Iterable[str]) -> None:
        """Attach the centroids if the names of a state dict contain theirs, else detach them."""
        self.set_attached(any(".centroids." in name for name in names))
