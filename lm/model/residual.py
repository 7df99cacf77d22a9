"""One layer of the stack: norm, block, and the residual stream around them."""

from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import Attention
from .blocks import build_block
from .delta import DeltaProduct, GatedDeltaNet, GatedDeltaProduct
from .diagonal import Mamba, Mamba2
from .layers import residual_norm
from .lstm import LSTM
from .plain import GatedMLP
from .state import Sequences

# What a layer of a pattern may be (patterns.py) beside a fixed-point block.
PLAIN = {
    "mamba": Mamba,
    "mamba2": Mamba2,
    "gated_deltanet": GatedDeltaNet,
    "gated_deltaproduct": GatedDeltaProduct,
    "deltaproduct": DeltaProduct,
    "attention": Attention,
    "mlp": GatedMLP,
    "lstm": LSTM,
}


class SolvesOnceLayer(GradientCheckpointingLayer):
    """A layer that hands `_gradient_checkpointing_func` a part of its work itself. The base class
    would checkpoint all of `forward`, and the backward solve a second time."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super(GradientCheckpointingLayer, cls).__init_subclass__(**kwargs)


class FPRNNLayer(SolvesOnceLayer):
    """residual += hidden; hidden = block(norm(residual))."""

    def __init__(self, config: Any, layer: Any) -> None:
        """config: the model's. layer: a patterns.Layer."""
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm = residual_norm(config)
        self.kind = layer.kind
        own = config.of_layer(layer)
        if layer.kind in PLAIN:
            self.block = PLAIN[layer.kind](own)
        else:
            self.block = build_block(own)

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        seqs: Sequences = Sequences(),  # noqa: B008
        count_iterations: bool = False,
    ) -> tuple[Any, ...]:
        residual = hidden if residual is None else residual + hidden
        if self.residual_in_fp32:
            residual = residual.to(torch.promote_types(residual.dtype, torch.float32))
        checkpointed = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        checkpoint = self._gradient_checkpointing_func if checkpointed else None
        # What the block returns after its output: its stats, or None, and its state if asked.
        hidden, *rest = self.block(self.norm(residual), seqs, checkpoint, count_iterations)
        return hidden, residual, *rest
