"""Gated DeltaNet (Yang et al. 2024) and DeltaProduct (Siems et al. 2025) language models.

Names and shapes of the weights are those of flash-linear-attention's layers with head_dim =
d_model / n_heads and expand_v = expand, so a state dict goes from one to the other. This file and
those it imports travel with an exported checkpoint.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from .causal_lm import BaselineConfig, BaselineForCausalLM, BaselineModel, BaselinePreTrainedModel
from .delta_rule import run


class DeltaNetConfig(BaselineConfig):
    """Sizes of a (gated) DeltaNet or DeltaProduct.

    Args:
        n_heads: divides d_model; keys have d_model / n_heads dimensions, values `expand` times as
        many. n_householder: steps a token. forget_gate: α_t; without it α_t = 1.
        allow_neg_eigval: β in (0, 2), not (0, 1). d_conv: width of the convolutions on q, k, v.
        d_ff: width inside the SwiGLU. backend: "auto" (the kernels of flash-linear-attention for
        half precision on a GPU, where they are installed) or "plain".
    """

    model_type = "fprnn_deltanet"

    def __init__(
        self,
        n_heads: int = 12,
        expand: int = 2,
        d_conv: int = 4,
        d_ff: int = 2048,
        n_householder: int = 1,
        forget_gate: bool = True,
        allow_neg_eigval: bool = False,
        backend: str = "auto",
        **kwargs: Any,
    ):
        self.n_heads = n_heads
        self.expand = expand
        self.d_conv = d_conv
        self.d_ff = d_ff
        self.n_householder = n_householder
        self.forget_gate = forget_gate
        self.allow_neg_eigval = allow_neg_eigval
        self.backend = backend
        super().__init__(**kwargs)


class GatedRMSNorm(nn.Module):
    """RMSNorm(x) ⊙ silu(z), in fp32 or better."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        y = F.rms_norm(x.to(dtype), self.weight.shape, self.weight.to(dtype), self.eps)
        return y * F.silu(z.to(dtype))


def short_conv(dim: int, width: int) -> nn.Conv1d:
    """A depthwise convolution over time, without bias."""
    return nn.Conv1d(dim, dim, width, groups=dim, padding=width - 1, bias=False)


def unit(x: Tensor) -> Tensor:
    """x / ‖x‖₂ over the last dimension, in fp32 or better."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class DeltaNet(nn.Module):
    """The token mixer: (b,l,d_model) → the same, causal. See `delta_rule` for the recurrence."""

    def __init__(self, config: DeltaNetConfig):
        super().__init__()
        self.config = config
        d, heads, n = config.d_model, config.n_heads, config.n_householder
        d_v = config.expand * d
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, n * d, bias=False)
        self.v_proj = nn.Linear(d, n * d_v, bias=False)
        self.b_proj = nn.Linear(d, n * heads, bias=False)
        if config.forget_gate:
            self.a_proj = nn.Linear(d, heads, bias=False)
            self.A_log = nn.Parameter(torch.empty(heads))
            self.dt_bias = nn.Parameter(torch.empty(heads))
        self.q_conv1d = short_conv(d, config.d_conv)
        self.k_conv1d = short_conv(n * d, config.d_conv)
        self.v_conv1d = short_conv(n * d_v, config.d_conv)
        self.g_proj = nn.Linear(d, d_v, bias=False)
        self.o_norm = GatedRMSNorm(d_v // heads, config.norm_epsilon)
        self.o_proj = nn.Linear(d_v, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads, n = self.config.n_heads, self.config.n_householder

        def conv(proj, conv1d):
            y = conv1d(proj(x).transpose(1, 2))[..., : x.shape[1]]
            return F.silu(y).transpose(1, 2)

        q = conv(self.q_proj, self.q_conv1d).unflatten(-1, (heads, -1))
        k = conv(self.k_proj, self.k_conv1d).unflatten(-1, (n, heads, -1))
        v = conv(self.v_proj, self.v_conv1d).unflatten(-1, (n, heads, -1))
        dtype = v.dtype  # half precision under autocast; the kernels run in it
        q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
        beta = self.b_proj(x).to(q.dtype).sigmoid().unflatten(-1, (n, heads))
        if self.config.allow_neg_eigval:
            beta = 2 * beta
        log_alpha = None
        if self.config.forget_gate:
            dt = F.softplus(self.a_proj(x).to(q.dtype) + self.dt_bias)
            log_alpha = -self.A_log.to(q.dtype).exp() * dt
        o = run(q, k, v, beta, log_alpha, dtype, self.config.backend)
        o = self.o_norm(o, self.g_proj(x).unflatten(-1, (heads, -1)))
        return self.o_proj(o.flatten(-2).to(dtype))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) ⊙ up(x))."""

    def __init__(self, config: DeltaNetConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DeltaNetLayer(GradientCheckpointingLayer):
    """x += DeltaNet(norm(x)); x += SwiGLU(norm(x))."""

    def __init__(self, config: DeltaNetConfig):
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.d_model, config.norm_epsilon)
        self.attn = DeltaNet(config)
        self.mlp_norm = nn.RMSNorm(config.d_model, config.norm_epsilon)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class DeltaNetPreTrainedModel(BaselinePreTrainedModel):
    config_class = DeltaNetConfig
    residual_outputs = ("o_proj", "down_proj")
    _no_split_modules = ["DeltaNetLayer"]  # noqa: RUF012

    def __init__(self, config: DeltaNetConfig):
        super().__init__(config)
        gates = ["A_log", "dt_bias"] if config.forget_gate else []
        self._keep_in_fp32_modules_strict = gates

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, nn.Conv1d):
            init.kaiming_uniform_(module.weight, a=math.sqrt(5))
        elif isinstance(module, GatedRMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, DeltaNet) and module.config.forget_gate:
            A = torch.empty_like(module.A_log).uniform_(0, 16).clamp_min(1e-3)
            init.copy_(module.A_log, A.log())
            low, high = math.log(1e-3), math.log(1e-1)
            dt = torch.exp(low + torch.rand_like(module.dt_bias) * (high - low))
            init.copy_(module.dt_bias, dt + torch.log(-torch.expm1(-dt)))  # softplus⁻¹


class DeltaNetModel(DeltaNetPreTrainedModel, BaselineModel):
    layer_class = DeltaNetLayer


class DeltaNetForCausalLM(DeltaNetPreTrainedModel, BaselineForCausalLM):
    model_class = DeltaNetModel


__all__ = ["DeltaNetConfig", "DeltaNetForCausalLM", "DeltaNetModel"]
