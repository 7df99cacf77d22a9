"""One fixed-point layer as a PyTorch module, for models outside this package.

Shapes: b batch, l length.
"""

from typing import Any

import torch
from torch import nn

from lm.model.batch import read_attention_mask
from lm.model.blocks import build_block
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import Tokens
from lm.model.stack import initialize
from lm.model.state import Sequences, SolveOptions


class FixedPointLayer(nn.Module):
    """A fixed-point layer that takes the place of an attention or Mamba layer.

    Like Mamba's layer, it has no norm and no residual connection: the caller adds both. The output
    of a token depends on this token and the tokens before it.
    """

    def __init__(self, d_model: int, **fields: Any) -> None:
        """Create and initialize the layer.

        Args:
            d_model: Width of input and output.
            fields: Fields of FPRNNConfig: block, mixer, d_state, expand, schedule, tol, …

        Raises:
            ValueError: If FPRNNConfig has no such field, or a value is invalid.
        """
        super().__init__()
        unknown = sorted(fields.keys() - FPRNNConfig.__signature__.parameters.keys())
        if unknown:
            raise ValueError(f"FixedPointLayer does not know the field {', '.join(unknown)}")
        # The initial output projection is scaled by 1 / √n_layer: by default as in a single layer.
        self.config = FPRNNConfig(d_model=d_model, **{"n_layer": 1, **fields})
        self.block = build_block(self.config)
        with torch.no_grad():
            self.apply(lambda module: initialize(module, self.config))

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Map a batch of sequences to one of the same shape.

        Args:
            x: Inputs, shape (b,l,d_model).
            attention_mask: 0 at padding on either side, shape (b,l); None: there is no padding.

        Returns:
            The outputs, shape (b,l,d_model). Outputs at padding have no meaning.

        Raises:
            ValueError: If x or the mask has another shape.
            NonFiniteError: If the layer computes NaN or infinity.
        """
        if x.dim() != 3 or x.shape[-1] != self.config.d_model or 0 in x.shape:
            raise ValueError(
                f"x has shape {tuple(x.shape)}: it must be (batch, length, {self.config.d_model})"
            )
        mask = read_attention_mask(attention_mask, *x.shape[:2])
        tokens = Tokens(hidden=x, input_ids=None, mask=mask, starts=None).move_padding_right()
        seqs = Sequences(mask=tokens.mask, options=SolveOptions(self.config))
        output = self.block(tokens.hidden, seqs)[0]
        return tokens.restore_padding(output)
