"""A layer of the stack: norm, block, the residual stream; and how all are initialised."""

import math
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from .baseline_layers import LSTM, SLSTM, Attention, GatedMLP, PlainLayer
from .blocks import FPMamba1, FPMamba2, build_block
from .delta import KDA, RWKV7, DeltaProduct, GatedDeltaNet, GatedDeltaProduct
from .diagonal import M2RNN, Mamba, Mamba2, Mamba3
from .fixed_point import FixedPointBlock
from .layers import Orthogonal, RMSNorm, WNLinear
from .mixers import Kronecker, Monarch, Reflections
from .state import Sequences

# What a layer of a pattern may be (fields.KINDS) beside a fixed-point block.
PLAIN = {
    "mamba": Mamba,
    "mamba2": Mamba2,
    "mamba3": Mamba3,
    "gated_deltanet": GatedDeltaNet,
    "gated_deltaproduct": GatedDeltaProduct,
    "deltaproduct": DeltaProduct,
    "kda": KDA,
    "rwkv7": RWKV7,
    "slstm": SLSTM,
    "m2rnn": M2RNN,
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
        """config: the model's. layer: a fields.Layer."""
        super().__init__()
        self.norm = RMSNorm(config.d_model, config.norm_epsilon)
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
        residual = residual.to(torch.promote_types(residual.dtype, torch.float32))
        checkpointed = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        checkpoint = self._gradient_checkpointing_func if checkpointed else None
        # What the block returns after its output: its stats, or None, and its state if asked.
        hidden, *rest = self.block(self.norm(residual), seqs, checkpoint, count_iterations)
        return hidden, residual, *rest


def initialise(module: nn.Module, config: Any) -> None:
    """Mamba's initialisation (docs/model.md, 'Initialisation'). Only `init.*` calls: they leave
    alone what a checkpoint has loaded. config: the model's."""
    if isinstance(module, nn.Embedding):
        init.normal_(module.weight, std=config.embedding_init_std)
    elif isinstance(module, nn.Linear | nn.Conv1d):
        normed = isinstance(module, WNLinear)
        weight = module.direction if normed else module.weight
        init.kaiming_uniform_(weight, a=math.sqrt(5))
        if module.bias is not None:
            init.zeros_(module.bias)
        if normed:
            init.copy_(module.gain, torch.linalg.vector_norm(weight, dim=1, keepdim=True))
    elif isinstance(module, RMSNorm | nn.LayerNorm | nn.GroupNorm):
        init.ones_(module.weight)
        if not isinstance(module, RMSNorm):
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
        init.copy_(module.out_proj.weight, module.out_proj.weight * cfg.out_proj_init_scale)
        _start_gates(module.mixer, cfg.mixer_gate_init_bias)
        if module.centroids is not None:
            init.normal_(module.centroids.vectors)  # as long as what the block's norm makes
            init.constant_(module.centroids.log_sharpness, math.log(16))
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
    elif isinstance(module, Mamba3):
        init.ones_(module.B_bias)
        init.ones_(module.C_bias)
        dt_bias = module.dt_bias
    elif isinstance(module, M2RNN) or (isinstance(module, GatedDeltaProduct) and module.gated):
        A = torch.empty(module.heads, device=module.A_log.device).uniform_(0, 16).clamp_min(1e-3)
        init.copy_(module.A_log, A.log())
        dt_bias = module.dt_bias
        if isinstance(module, M2RNN):  # a state that is not moved yet
            identity = torch.eye(cfg.headdim, device=module.state_proj.device)
            init.copy_(module.state_proj, identity.expand_as(module.state_proj))
    elif isinstance(module, RWKV7):
        return _initialise_rwkv7(module)
    elif isinstance(module, SLSTM):
        return _initialise_slstm(module)
    else:
        return
    if hasattr(module, "D"):
        init.ones_(module.D)
    low, high = math.log(1e-3), math.log(1e-1)
    u = torch.rand(dt_bias.shape, device=dt_bias.device)
    dt = torch.exp(low + u * (high - low)).clamp_min(1e-4)
    init.copy_(dt_bias, dt + torch.log(-torch.expm1(-dt)))  # softplus⁻¹


def _initialise_rwkv7(layer):
    """As flash-linear-attention does in the first of many layers, but for out_proj and g_norm."""
    d, e = layer.config.d_model, layer.config.d_model // layer.heads
    at = torch.arange(d, dtype=torch.float32, device=layer.k_k.device)
    linear = at / max(1, d - 1) - 0.5
    zigzag = (at % e - (e - 1) / 2) / max(1, (e - 1) / 2)
    zigzag = zigzag * zigzag.abs()
    powers = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
    for name, power in powers.items():
        init.copy_(getattr(layer, f"x_{name}"), 1 - (at / d) ** power)
    init.copy_(layer.k_k, 0.71 - 0.1 * linear)
    init.constant_(layer.k_a, 1.02)
    init.constant_(layer.r_k, -0.04)
    decay = 6 * at / max(1, d - 1) - 6 + 0.5 + 2.5 * zigzag
    init.copy_(layer.w_lora.up.bias, decay)
    init.copy_(layer.a_lora.up.bias, -0.19 + 0.3 * zigzag + 0.4 * linear)
    for low_rank in (layer.w_lora, layer.a_lora, layer.g_lora):
        init.zeros_(low_rank.down.weight)
        init.orthogonal_(low_rank.up.weight, gain=0.1)
    init.orthogonal_(layer.r_proj.weight)
    init.orthogonal_(layer.k_proj.weight, gain=0.1)
    init.orthogonal_(layer.v_proj.weight)


def _initialise_slstm(layer):
    """As the authors do: nothing is read of the output before, and forget gates start open."""
    bound = layer.gates.shape[-1] ** -0.5
    init.uniform_(layer.gates, -bound, bound)
    init.zeros_(layer.recurrent)
    bias = torch.zeros_like(layer.gate_bias)
    bias[1] = torch.linspace(3, 6, bias[1].numel(), device=bias.device).view_as(bias[1])
    init.copy_(layer.gate_bias, bias)


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


def let_be_known(model: Any) -> None:
    """Enter a model's class, and its base model's, in transformers' lists of names: under label
    smoothing the Trainer shifts labels only for models in it, and pipelines warn of others.
    """
    # Not at the top: the Auto classes may be importing the file that imports this one.
    from transformers.models.auto import modeling_auto

    kind, name = model.config.model_type, type(model).__name__
    names_of_task = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if name.endswith("ForSequenceClassification"):
        names_of_task = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    names_of_task.setdefault(kind, name)
    modeling_auto.MODEL_MAPPING_NAMES.setdefault(kind, type(model.base_model).__name__)


def initialise_once(model: Any, module: Any) -> None:
    """Have a PreTrainedModel initialise a module if it, or a child, has weights that no checkpoint
    has loaded. transformers looks at a module's own parameters alone, where the code is not its
    own: a layer that has none, or all of them loaded, would not initialise its children's.
    """
    if getattr(module, "_is_hf_initialized", False):
        return
    if all(getattr(p, "_is_hf_initialized", False) for p in module.parameters()):
        return
    model._init_weights(module)
    module._is_hf_initialized = True
