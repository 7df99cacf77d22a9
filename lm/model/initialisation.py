"""Mamba's initialisation of a model's modules (docs/model.md, 'Initialisation')."""

import math

import torch
from torch import nn
from transformers import initialization as init

from .blocks import FPMamba1, FPMamba2
from .delta import GatedDeltaProduct
from .diagonal import Mamba, Mamba2
from .fixed_point import FixedPointBlock
from .layers import Orthogonal, RMSNorm, WNLinear
from .lstm import LSTM
from .mixers import Kronecker, Monarch, Reflections
from .plain import PlainLayer


def initialise(module: nn.Module) -> None:
    """Mamba's initialisation (docs/model.md, 'Initialisation'). Only `init.*` calls: they leave
    alone what a checkpoint has loaded."""
    if isinstance(module, nn.Embedding):
        init.normal_(module.weight, std=0.02)
    elif isinstance(module, nn.Linear | nn.Conv1d):
        normed = isinstance(module, WNLinear)
        weight = module.direction if normed else module.weight
        init.kaiming_uniform_(weight, a=math.sqrt(5))
        if module.bias is not None:
            init.zeros_(module.bias)
        if normed:
            init.copy_(module.gain, torch.linalg.vector_norm(weight, dim=1, keepdim=True))
    elif isinstance(module, RMSNorm | nn.LayerNorm):
        init.ones_(module.weight)
        if isinstance(module, nn.LayerNorm):
            init.zeros_(module.bias)
    elif isinstance(module, Orthogonal):
        init.zeros_(module.weight)
        init.orthogonal_(module.base)
    elif isinstance(module, LSTM):
        _initialise_lstm(module.lstm)
    elif isinstance(module, FixedPointBlock | PlainLayer):
        _initialise_block(module, module.config)


def _initialise_block(module, cfg):
    init.kaiming_uniform_(module.out_proj.weight, a=math.sqrt(5))
    init.copy_(module.out_proj.weight, module.out_proj.weight / math.sqrt(cfg.n_layer))
    if isinstance(module, FixedPointBlock):
        _start_gates(module.mixer, cfg.mixer_gate_start)
    if isinstance(module, FPMamba1 | Mamba):
        n = torch.arange(1, cfg.d_state + 1, dtype=torch.float32, device=module.A_log.device)
        init.copy_(module.A_log, n.log().expand(cfg.d_inner, -1))
        bound = cfg.dt_rank**-0.5
        init.uniform_(module.dt_proj.weight, -bound, bound)
        dt_bias = module.dt_proj.bias
    elif isinstance(module, FPMamba2 | Mamba2):
        A = torch.empty(module.heads, device=module.A_log.device).uniform_(1, 16)
        init.copy_(module.A_log, A.log())
        dt_bias = module.dt_bias
    elif isinstance(module, GatedDeltaProduct) and module.gated:
        A = torch.empty(module.heads, device=module.A_log.device).uniform_(0, 16).clamp_min(1e-3)
        init.copy_(module.A_log, A.log())
        dt_bias = module.dt_bias
    else:
        return
    if hasattr(module, "D"):
        init.ones_(module.D)
    low, high = math.log(1e-3), math.log(1e-1)
    u = torch.rand(dt_bias.shape, device=dt_bias.device)
    dt = torch.exp(low + u * (high - low)).clamp_min(1e-4)
    init.copy_(dt_bias, dt + torch.log(-torch.expm1(-dt)))  # softplus⁻¹


def _initialise_lstm(lstm):
    """PyTorch's for the matrices; forget gates start open (Jozefowicz et al. 2015)."""
    width = lstm.hidden_size
    for weight in (lstm.weight_ih_l0, lstm.weight_hh_l0):
        init.uniform_(weight, -(width**-0.5), width**-0.5)
    bias = torch.zeros_like(lstm.bias_ih_l0)
    bias[width : 2 * width] = 1  # gates come as i, f, g, o
    init.copy_(lstm.bias_ih_l0, bias)
    init.zeros_(lstm.bias_hh_l0)


def _start_gates(mixer, value):
    """Have the mixer's gates be near σ(value) at first."""
    for part in mixer.modules():
        if isinstance(part, Reflections):
            init.constant_(part.alpha_proj.bias, value)
        elif isinstance(part, Kronecker | Monarch):
            init.constant_(part.gate_proj.bias, value)
