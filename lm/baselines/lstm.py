"""The LSTM language model: torch.nn.LSTM layers in pre-norm residual blocks.

This file and those it imports travel with an exported checkpoint.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from .causal_lm import BaselineConfig, BaselineForCausalLM, BaselineModel, BaselinePreTrainedModel


class LSTMConfig(BaselineConfig):
    """d_model is the width of the residual stream and of the LSTM's state."""

    model_type = "fprnn_lstm"


class LSTMLayer(GradientCheckpointingLayer):
    """x + LSTM(norm(x))."""

    def __init__(self, config: LSTMConfig):
        super().__init__()
        self.norm = nn.RMSNorm(config.d_model, config.norm_epsilon)
        self.lstm = nn.LSTM(config.d_model, config.d_model, batch_first=True)

    def forward(
        self,
        x: Tensor,
        state: tuple[Tensor, ...] | None = None,
        lengths: Tensor | None = None,
        return_state: bool = False,
    ) -> Any:
        """x: (b,l,d) → (b,l,d), and with `return_state` the state after each row's first `lengths`
        tokens (None: all): (h, c) of (b,d) each, as `state` is. See BaselineModel."""
        normed = self.norm(x)
        if state is None and not return_state:
            return x + self.lstm(normed)[0]
        zero = normed.new_zeros(len(x), x.shape[-1])
        start = [zero if s is None else s.to(normed.dtype) for s in state or (None, None)]
        packed = normed
        if lengths is not None:  # h and c stop after a row's last token; packing wants one at least
            packed = pack_padded_sequence(
                normed, lengths.clamp_min(1).cpu(), batch_first=True, enforce_sorted=False
            )
        y, end = self.lstm(packed, tuple(s.unsqueeze(0) for s in start))
        end = tuple(e.detach().squeeze(0) for e in end)
        if lengths is not None:
            y, _ = pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])
            some = (lengths > 0).unsqueeze(-1)
            end = tuple(torch.where(some, e, s.to(e.dtype)) for e, s in zip(end, start))
        return (x + y, end) if return_state else x + y


class LSTMPreTrainedModel(BaselinePreTrainedModel):
    config_class = LSTMConfig
    _no_split_modules = ["LSTMLayer"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, nn.LSTM):
            h = module.hidden_size
            for weight in (module.weight_ih_l0, module.weight_hh_l0):
                init.uniform_(weight, -(h**-0.5), h**-0.5)
            # Gates come as i, f, g, o; a forget gate that starts open (Jozefowicz et al. 2015).
            open_gate = torch.zeros_like(module.bias_ih_l0)
            open_gate[h : 2 * h] = 1
            init.copy_(module.bias_ih_l0, open_gate)
            init.zeros_(module.bias_hh_l0)


class LSTMModel(LSTMPreTrainedModel, BaselineModel):
    layer_class = LSTMLayer
    carries_state = True


class LSTMForCausalLM(LSTMPreTrainedModel, BaselineForCausalLM):
    model_class = LSTMModel


__all__ = ["LSTMConfig", "LSTMForCausalLM", "LSTMModel"]
