"""The LSTM language model: torch.nn.LSTM layers in pre-norm residual blocks.

This file and those it imports travel with an exported checkpoint.
"""

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from .causal_lm import BaselineConfig, BaselineForCausalLM


class LSTMConfig(BaselineConfig):
    """d_model is the width of the residual stream and of the LSTM's state."""

    model_type = "fprnn_lstm"


class LSTMLayer(GradientCheckpointingLayer):
    """x + LSTM(norm(x))."""

    def __init__(self, config):
        super().__init__()
        self.norm = nn.RMSNorm(config.d_model, config.norm_epsilon)
        self.lstm = nn.LSTM(config.d_model, config.d_model, batch_first=True)

    def forward(self, x):
        return x + self.lstm(self.norm(x))[0]


class LSTMForCausalLM(BaselineForCausalLM):
    config_class = LSTMConfig
    layer_class = LSTMLayer
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


__all__ = ["LSTMConfig", "LSTMForCausalLM"]
