"""Estimated memory of a rank, by the formulas of docs/scale.md.

Weights, gradients and moments are fp32. DeepSpeed's memory was measured with version 0.19. The
activations of a layer are a constant per kind of layer, times tokens and d_inner.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lm.common.cards import GIB, Card
from lm.config.model import Model
from lm.config.schema import Config
from lm.model.fields import FIELDS_BY_KIND, Layer, parse_layers
from lm.model.modeling_fprnn import LOSS_CHUNK_TOKENS
from lm.training.build import build_model, expand_stack
from lm.training.deepspeed_json import bucket_size, deepspeed_config

MAX_GATHERED_PARAMETERS = 1_000_000_000  # default of ZeRO-3's stage3_max_live_parameters
# Bytes of the CUDA context, workspaces of cuBLAS and channels of NCCL: assumed, not measured.
RUNTIME_BYTES = 1.5 * GIB
USABLE_SHARE = 0.95  # of a GPU's memory: assumed, because the allocator fragments memory

# Floats (4 bytes) that a layer saves for its backward, per token and channel of d_inner. In bf16 a
# layer needs BF16_FACTOR of this memory: products are half as large, scans are not.
SAVED = {
    "mamba": 12.0,
    "mamba2": 21.0,
    "mamba3": 22.9,
    "attention": 4.5,
    "mlp": 5.5,
    "lstm": 12.0,
    "gated_deltanet": 32.0,
    "deltaproduct": 40.0,
    "gated_deltaproduct": 48.0,
    "kda": 40.0,
    "rwkv7": 40.0,
    "slstm": 40.0,
    "m2rnn": 25.8,
}
SAVED_PER_STATE = {"mamba3": 0.71, "m2rnn": 2.18}  # in addition, times d_state
# The same for fixed-point layers, by solver and gradient:
SAVED_SEQUENTIAL = 14.0  # tokens solved exactly, one after the other: `auto` on a CPU
SAVED_ONE_STEP = 20.0  # one-step gradient
SAVED_WINDOWS = 32.0  # exact gradient of a solve in windows: `auto` on a GPU
SAVED_WINDOWS_FULL_RANK = 54.0  # the same with a mixer of full rank
SAVED_PER_REFLECTION = 13.0  # in windows, in addition for each reflection after the first
SAVED_CHECKPOINTED = 2.0  # any layer with gradient checkpointing
BF16_FACTOR = 0.75
# Share of a layer's saved memory that its backward needs in addition. In windows it is 1.
WORKING_SHARE = 0.25
LOGIT_BYTES = 12.0  # bytes per logit, with the loss and its backward


class ParameterCounts(NamedTuple):
    """Numbers of parameters of a model, of its embedding, and of its largest tensor."""

    total: int
    embedding: int
    largest_tensor: int


class Memory(NamedTuple):
    """Bytes of memory of a rank, by part."""

    weights: float
    master: float  # DeepSpeed's second copy of the weights (ZeRO 1 to 3), in fp32 like the first
    gradients: float
    optimizer: float
    buffers: float  # DeepSpeed's gradients in transfer, and gathered weights of ZeRO-3
    runtime: float  # CUDA and NCCL
    activations: float  # tensors that all layers save for the backward
    working: float  # solve, backward and recomputation of a single layer
    loss: float  # logits and loss

    @property
    def total(self) -> float:
        """Peak memory, reached in the backward of either a layer or the loss."""
        return sum(self) - min(self.working, self.loss)


def build_meta_model(cfg: Config, vocab_size: int) -> torch.nn.Module:
    """Return the model on the meta device, without memory for its weights."""
    with torch.device("meta"):
        return build_model(cfg, vocab_size)


def count_parameters(model: torch.nn.Module) -> ParameterCounts:
    """Return the parameter counts of a model, which may be on the meta device."""
    return ParameterCounts(
        total=sum(p.numel() for p in model.parameters()),
        embedding=model.get_input_embeddings().weight.numel(),
        largest_tensor=max(p.numel() for p in model.parameters()),
    )


def count_saved_floats(cfg: Config, on_gpu: bool) -> list[float]:
    """Return for each layer the floats that it saves for its backward.

    They are per token and per channel of the model's d_inner (expand · d_model), also for a layer
    with another `expand`.

    Args:
        cfg: The configuration.
        on_gpu: True if the run trains on a GPU.
    """
    model, solver = expand_stack(cfg.model), cfg.solver.resolve_auto()
    layers = [Layer(model.block, {})] * model.n_layer
    if model.layers is not None:
        layers = parse_layers(model.layers, model.n_layer)
    return [_count_saved(layer, model, solver, on_gpu) for layer in layers]


def _count_saved(layer: Layer, model: Model, solver: dict, on_gpu: bool) -> float:
    layer_config = model.model_copy(update=layer.options)
    saved = SAVED.get(layer.kind) or _count_saved_by_fixed_point(layer_config, solver, on_gpu)
    saved += SAVED_PER_STATE.get(layer.kind, 0.0) * layer_config.d_state
    # A layer without `expand` was measured in a model with expand 2.
    fields = FIELDS_BY_KIND[layer.kind]
    expand = layer_config.expand if "expand" in fields else 2.0
    if layer_config.state_centroids and "state_centroids" in fields:
        # The vector that is read (of size d_inner in a fixed-point layer), and the weights α.
        d_inner = expand * model.d_model
        vector_sizes = {
            "lstm": 2 * model.d_model,
            "slstm": model.d_model,
            "m2rnn": d_inner * layer_config.d_state,
        }
        saved += (vector_sizes.get(layer.kind, d_inner) + layer_config.state_centroids) / d_inner
    return saved * expand / model.expand


def _count_saved_by_fixed_point(config: Model, solver: dict, on_gpu: bool) -> float:
    if solver["gradient"] == "one_step":
        return SAVED_ONE_STEP
    has_low_rank = config.mixer in ("householder", "dplr")
    sequential_schedules = ("sequential",) if on_gpu else ("sequential", "auto")
    is_sequential = solver["token"] == "exact" and solver["schedule"] in sequential_schedules
    if has_low_rank and is_sequential:
        return SAVED_SEQUENTIAL + config.mixer_rank - 1
    if has_low_rank:
        return SAVED_WINDOWS + SAVED_PER_REFLECTION * (config.mixer_rank - 1)
    return SAVED_WINDOWS_FULL_RANK


def estimate_memory(
    cfg: Config, world_size: int, card: Card, counts: ParameterCounts, vocab_size: int, stage: int
) -> Memory:
    """Return the memory of each rank of a run.

    Args:
        cfg: The configuration.
        world_size: Number of ranks.
        card: Kind of GPU, or the CPU.
        counts: Parameter counts of the model.
        vocab_size: Size of the vocabulary.
        stage: Stage of ZeRO.
    """
    zero = deepspeed_config(cfg, world_size, card.on_gpu)["zero_optimization"]
    # 1. Bytes that do not depend on the batch; weights and AdamW's two moments are fp32.
    weights = 4.0 * counts.total
    shard = weights / world_size
    moments = 2 * weights
    constant = {
        "weights": shard if stage == 3 else weights,
        "master": shard if stage else 0.0,
        "gradients": shard if stage >= 2 else weights,
        "optimizer": moments / world_size if stage else moments,
        "buffers": _estimate_buffers(zero, stage, world_size, counts),
        "runtime": RUNTIME_BYTES if card.on_gpu else 0.0,
    }
    # 2. Activations of a micro-batch, in floats per token and channel of d_inner.
    tokens = cfg.train.micro_batch_size * cfg.data.seq_len
    is_bf16 = cfg.train.precision == "bf16"
    precision_factor = BF16_FACTOR if is_bf16 else 1.0
    layers = count_saved_floats(cfg, card.on_gpu)
    largest_layer = max(layers) * precision_factor
    saved = sum(layers) * precision_factor
    needs_all_again = max(layers) >= SAVED_WINDOWS  # a solve in windows, or as large a layer
    working = largest_layer * (1.0 if needs_all_again else WORKING_SHARE)
    if cfg.model.gradient_checkpointing:
        saved = SAVED_CHECKPOINTED * len(layers)
        working += largest_layer  # which is recomputed
    bytes_per_float = 4.0 * cfg.model.expand * cfg.model.d_model * tokens  # of all channels
    embedding_and_norm = 2 * 4.0 * cfg.model.d_model * tokens  # two fp32 tensors
    bf16_weights = weights if is_bf16 else 0.0  # two copies of the weights in bf16
    # 3. Logits of a chunk, because the loss is computed in chunks.
    chunk_tokens = min(tokens, LOSS_CHUNK_TOKENS)
    return Memory(
        **constant,
        activations=saved * bytes_per_float + embedding_and_norm + bf16_weights,
        working=working * bytes_per_float,
        loss=LOGIT_BYTES * chunk_tokens * vocab_size,
    )


def _estimate_buffers(zero: dict, stage: int, ranks: int, counts: ParameterCounts) -> float:
    """Return the bytes of DeepSpeed's communication buffers on a rank.

    With `overlap_comm`, ZeRO-1 and 2 fill a second buffer while the first is sent.
    """
    if stage == 0:
        return 0.0
    bucket_floats = zero.get("reduce_bucket_size", bucket_size(counts.total, counts.largest_tensor))
    if stage < 3:
        return 4.0 * bucket_floats * (2 if zero["overlap_comm"] else 1)
    max_gathered = zero.get("stage3_max_live_parameters", MAX_GATHERED_PARAMETERS)
    gathered_floats = min(counts.total, max_gathered) if ranks > 1 else 0
    return 4.0 * (bucket_floats + gathered_floats)


def get_memory_limit(card: Card, world_size: int) -> float:
    """Return the bytes that a rank may use. On a CPU, all ranks share the memory."""
    return USABLE_SHARE * card.memory if card.on_gpu else card.memory / world_size


def estimate_checkpoint_bytes(counts: ParameterCounts, stage: int) -> float:
    """Return the bytes of a checkpoint, over all ranks.

    It contains AdamW's two moments and the weights, twice under ZeRO-1 and 2, all in fp32.
    """
    weight_copies = 2 if stage in (1, 2) else 1
    return 4.0 * counts.total * (weight_copies + 2)
