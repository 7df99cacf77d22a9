"""A layer of the stack (norm, block, residual stream), and the initialization of all layers."""

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
from .layers import Centroids, Orthogonal, RMSNorm, ShortConv, WNLinear
from .mixers import Kronecker, Monarch, Reflections
from .state import Sequences

# Kinds of layers (fields.FIELDS_BY_KIND) that are not fixed-point blocks.
BASELINES = {
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

CENTROID_SHARPNESS = 16  # initial keys of centroids: vectors · CENTROID_SHARPNESS / d


class SelfCheckpointingLayer(GradientCheckpointingLayer):
    """A layer that passes only a part of its work to `_gradient_checkpointing_func`.

    The base class would checkpoint all of `forward`, so that the backward would repeat iterations.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Skip the base class's method, which wraps `forward`.
        super(GradientCheckpointingLayer, cls).__init_subclass__(**kwargs)


class FPRNNLayer(SelfCheckpointingLayer):
    """One layer: residual += hidden; hidden = block(norm(residual)); the residual is fp32."""

    def __init__(self, config: Any, layer: Any) -> None:
        """Create a layer.

        Args:
            config: Configuration of the model.
            layer: The fields.Layer.
        """
        super().__init__()
        self.norm = RMSNorm(config.d_model, config.norm_epsilon)
        self.kind = layer.kind
        layer_config = config.layer_config(layer)
        if layer.kind in BASELINES:
            self.block = BASELINES[layer.kind](layer_config)
        else:
            self.block = build_block(layer_config)

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        seqs: Sequences = Sequences(),  # noqa: B008
        count_iterations: bool = False,
    ) -> tuple[Any, ...]:
        """Apply the layer.

        Args:
            hidden: Output of the layer before, (b,l,d_model).
            residual: Residual stream before that layer's output, or None in the first layer.
            seqs: Properties of the batch's tokens.
            count_iterations: Whether a fixed-point block measures ℓ*.

        Returns:
            The block's output, the residual stream, FixedPointStats or None, and with
            `seqs.return_state` the block's state.
        """
        residual = hidden if residual is None else residual + hidden
        residual = residual.to(torch.promote_types(residual.dtype, torch.float32))
        is_checkpointed = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        checkpoint = self._gradient_checkpointing_func if is_checkpointed else None
        hidden, *results = self.block(self.norm(residual), seqs, checkpoint, count_iterations)
        return hidden, residual, *results


def initialize(module: nn.Module, config: Any) -> None:
    """Initialize a module as Mamba does (docs/model.md, 'Initialisation').

    It only calls `init.*`, which does not change parameters that a checkpoint has loaded.

    Args:
        module: Any module of the model.
        config: Configuration of the model.
    """
    if isinstance(module, nn.Embedding):
        init.normal_(module.weight, std=config.embedding_init_std)
    elif isinstance(module, nn.Linear | nn.Conv1d):
        has_weight_norm = isinstance(module, WNLinear)
        weight = module.direction if has_weight_norm else module.weight
        init.kaiming_uniform_(weight, a=math.sqrt(5))
        if module.bias is not None:
            init.zeros_(module.bias)
        if has_weight_norm:
            init.copy_(module.gain, torch.linalg.vector_norm(weight, dim=1, keepdim=True))
    elif isinstance(module, RMSNorm | nn.LayerNorm | nn.GroupNorm):
        init.ones_(module.weight)
        if not isinstance(module, RMSNorm):
            init.zeros_(module.bias)
    elif isinstance(module, Orthogonal):
        init.zeros_(module.weight)
        init.orthogonal_(module.base)
    elif isinstance(module, Centroids):
        # About as long as the output of a fixed-point block's norm, √d_inner.
        init.normal_(module.vectors)
        # The largest weight belongs to the centroid at the smallest distance from the state.
        scale = CENTROID_SHARPNESS / module.vectors.shape[-1]
        init.copy_(module.keys, scale * module.vectors)
        init.copy_(module.key_bias, -scale / 2 * module.vectors.square().sum(-1))
    elif isinstance(module, LSTM):
        _initialize_lstm(module.lstm)
    elif isinstance(module, FixedPointBlock | PlainLayer):
        _initialize_block(module, module.config)


def _initialize_block(module, cfg):
    """Initialize the parameters that a block holds itself, and its out_proj and gates."""
    init.kaiming_uniform_(module.out_proj.weight, a=math.sqrt(5))
    init.copy_(module.out_proj.weight, module.out_proj.weight / math.sqrt(cfg.n_layer))
    if isinstance(module, FixedPointBlock):
        init.copy_(module.out_proj.weight, module.out_proj.weight * cfg.out_proj_init_scale)
        _initialize_gates(module.mixer, cfg.mixer_gate_init_bias)
        if cfg.short_conv_identity_init:
            _add_identity(module)
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
    elif isinstance(module, M2RNN) or (isinstance(module, GatedDeltaProduct) and module.has_gate):
        A = torch.empty(module.heads, device=module.A_log.device).uniform_(0, 16).clamp_min(1e-3)
        init.copy_(module.A_log, A.log())
        dt_bias = module.dt_bias
        if isinstance(module, M2RNN):  # the transition starts as the identity
            identity = torch.eye(cfg.headdim, device=module.state_proj.device)
            init.copy_(module.state_proj, identity.expand_as(module.state_proj))
    elif isinstance(module, RWKV7):
        return _initialize_rwkv7(module)
    elif isinstance(module, SLSTM):
        return _initialize_slstm(module)
    else:
        return
    if hasattr(module, "D"):
        init.ones_(module.D)
    low, high = math.log(1e-3), math.log(1e-1)  # the step sizes dt are log-uniform
    u = torch.rand(dt_bias.shape, device=dt_bias.device)
    dt = torch.exp(low + u * (high - low)).clamp_min(1e-4)
    init.copy_(dt_bias, dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt


def _initialize_rwkv7(layer):
    """Initialize as flash-linear-attention does in its first layer, except out_proj and g_norm."""
    d, head_dim = layer.config.d_model, layer.config.d_model // layer.heads
    channel = torch.arange(d, dtype=torch.float32, device=layer.k_k.device)
    linear = channel / max(1, d - 1) - 0.5  # from −0.5 to 0.5 over the channels
    middle = (head_dim - 1) / 2
    zigzag = (channel % head_dim - middle) / max(1, middle)  # from −1 to 1 over each head
    zigzag = zigzag * zigzag.abs()
    powers = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
    for name, power in powers.items():
        init.copy_(getattr(layer, f"x_{name}"), 1 - (channel / d) ** power)
    init.copy_(layer.k_k, 0.71 - 0.1 * linear)
    init.constant_(layer.k_a, 1.02)
    init.constant_(layer.r_k, -0.04)
    decay = 6 * channel / max(1, d - 1) - 6 + 0.5 + 2.5 * zigzag
    init.copy_(layer.w_lora.up.bias, decay)
    init.copy_(layer.a_lora.up.bias, -0.19 + 0.3 * zigzag + 0.4 * linear)
    for low_rank in (layer.w_lora, layer.a_lora, layer.g_lora):
        init.zeros_(low_rank.down.weight)
        init.orthogonal_(low_rank.up.weight, gain=0.1)
    init.orthogonal_(layer.r_proj.weight)
    init.orthogonal_(layer.k_proj.weight, gain=0.1)
    init.orthogonal_(layer.v_proj.weight)


def _initialize_slstm(layer):
    """Initialize as the authors do: recurrent weights are zero, and forget gates start open."""
    bound = layer.gates.shape[-1] ** -0.5
    init.uniform_(layer.gates, -bound, bound)
    init.zeros_(layer.recurrent)
    bias = torch.zeros_like(layer.gate_bias)
    # The order of the gates is i, f, z, o.
    bias[1] = torch.linspace(3, 6, bias[1].numel(), device=bias.device).view_as(bias[1])
    init.copy_(layer.gate_bias, bias)


def _initialize_lstm(lstm):
    """Initialize matrices as PyTorch does; forget gates start open (Jozefowicz et al. 2015)."""
    width = lstm.hidden_size
    for weight in (lstm.weight_ih_l0, lstm.weight_hh_l0):
        init.uniform_(weight, -(width**-0.5), width**-0.5)
    bias = torch.zeros_like(lstm.bias_ih_l0)
    bias[width : 2 * width] = 1  # the order of the gates is i, f, g, o
    init.copy_(lstm.bias_ih_l0, bias)
    init.zeros_(lstm.bias_hh_l0)


def _add_identity(block):
    """Add 2 to the newest tap of a block's short convolutions, because silu(2x) ≈ x for small x."""
    for module in block.modules():
        if isinstance(module, ShortConv):
            newest_tap = torch.zeros_like(module.weight)
            newest_tap[..., -1] = 2
            init.copy_(module.weight, module.weight + newest_tap)


def _initialize_gates(mixer, value):
    """Set the biases of the mixer's gates, which start near σ(value)."""
    for module in mixer.modules():
        if isinstance(module, Reflections):
            init.constant_(module.alpha_proj.bias, value)
        elif isinstance(module, Kronecker | Monarch):
            init.constant_(module.gate_proj.bias, value)


def register_model_types(model: Any) -> None:
    """Add the classes of a model and of its base model to transformers' lists of model names.

    The Trainer shifts labels under label smoothing only for listed models, and pipelines warn about
    unlisted ones.
    """
    # Not imported at the top: the Auto classes may be importing the file that imports this one.
    from transformers.models.auto import modeling_auto

    model_type, name = model.config.model_type, type(model).__name__
    task_names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if name.endswith("ForSequenceClassification"):
        task_names = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    task_names.setdefault(model_type, name)
    modeling_auto.MODEL_MAPPING_NAMES.setdefault(model_type, type(model.base_model).__name__)


def initialize_once(model: Any, module: Any) -> None:
    """Initialize a module if it, or a child, has weights that no checkpoint has loaded.

    Transformers looks only at the parameters that a module holds itself. It would therefore not
    initialize a block whose missing parameters all belong to its children.

    Args:
        model: The PreTrainedModel.
        module: One of its modules.
    """
    if getattr(module, "_is_hf_initialized", False):
        return
    if all(getattr(p, "_is_hf_initialized", False) for p in module.parameters()):
        return
    model._init_weights(module)
    module._is_hf_initialized = True
