"""Estimated memory of a rank, by the formulas of docs/scale.md.

Weights, gradients and moments are fp32. DeepSpeed's memory was measured with version 0.19. The
activations of a layer are a constant for each kind of layer.
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

MAX_GATHERED = 1_000_000_000  # default of ZeRO-3's stage3_max_live_parameters
# CUDA context, workspaces of cuBLAS and channels of NCCL: assumed, not measured.
RUNTIME = 1.5 * GIB
USABLE = 0.95  # share of a GPU's memory; the allocator fragments the rest: assumed

# Floats (4 bytes) that a layer saves for its backward, per token and channel of d_inner. In bf16 a
# layer needs IN_BF16 of this memory: products are half as large, scans are not.
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
# The same for fixed-point layers, by solver and gradient.
SAVED_SEQUENTIAL = 14.0  # tokens solved exactly, one after the other: `auto` on a CPU
SAVED_ONE_STEP = 20.0  # one-step gradient
SAVED_WINDOWS = 32.0  # exact gradient of a solve in windows: `auto` on a GPU
SAVED_WINDOWS_FULL_RANK = 54.0  # the same with a mixer of full rank
SAVED_REFLECTION = 13.0  # in windows, in addition for each reflection after the first
SAVED_CHECKPOINTED = 2.0  # with gradient checkpointing
IN_BF16 = 0.75
WORKING = 0.25  # share of the saved memory that the backward of a layer needs again; 1 in windows
LOGIT = 12.0  # bytes per logit, including those of the loss and its backward


class Sizes(NamedTuple):
    """Parameter counts of a model.

    Attributes:
        parameters: All parameters.
        embedding: Parameters of the embedding.
        largest: Parameters of the largest tensor.
    """

    parameters: int
    embedding: int
    largest: int = 0


class Memory(NamedTuple):
    """Memory of a rank by part, in bytes."""

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


def count_parameters(model: torch.nn.Module) -> Sizes:
    """Return the parameter counts of a model, which may be on the meta device."""
    return Sizes(
        parameters=sum(p.numel() for p in model.parameters()),
        embedding=model.get_input_embeddings().weight.numel(),
        largest=max(p.numel() for p in model.parameters()),
    )


def count_saved_floats(cfg: Config, on_gpu: bool) -> list[float]:
    """Return for each layer the floats that it saves for its backward.

    They are per token and per channel of the model's `expand`, also for a layer with another
    `expand`.

    Args:
        cfg: The configuration.
        on_gpu: True if the run trains on a GPU.
    """
    m, solver = expand_stack(cfg.model), cfg.solver.settled()
    layers = [Layer(m.block, {})] * m.n_layer
    if m.layers is not None:
        layers = parse_layers(m.layers, m.n_layer)
    return [_count_saved(layer, m, solver, on_gpu) for layer in layers]


def _count_saved(layer: Layer, m: Model, solver: dict, on_gpu: bool) -> float:
    """Return the floats that a layer of a model `m` saves."""
    config = m.model_copy(update=layer.options)
    saved = SAVED.get(layer.kind) or _count_saved_by_fixed_point(config, solver, on_gpu)
    saved += SAVED_PER_STATE.get(layer.kind, 0.0) * config.d_state
    # A layer without `expand` was measured in a model with expand 2.
    expand = config.expand if "expand" in FIELDS_BY_KIND[layer.kind] else 2.0
    return saved * expand / m.expand


def _count_saved_by_fixed_point(m: Model, solver: dict, on_gpu: bool) -> float:
    """Return the floats that a fixed-point layer with the configuration `m` saves."""
    if solver["gradient"] == "one_step":
        return SAVED_ONE_STEP
    has_low_rank = m.mixer in ("householder", "dplr")
    sequential = ("sequential",) if on_gpu else ("sequential", "auto")
    if has_low_rank and solver["token"] == "exact" and solver["schedule"] in sequential:
        saved = SAVED_SEQUENTIAL + m.mixer_rank - 1
        if m.state_centroids:
            saved += 1 + m.state_centroids / (m.expand * m.d_model)  # the vector read, and α
        return saved
    if has_low_rank:
        return SAVED_WINDOWS + SAVED_REFLECTION * (m.mixer_rank - 1)
    return SAVED_WINDOWS_FULL_RANK


def estimate_memory(
    cfg: Config, world_size: int, card: Card, sizes: Sizes, vocab_size: int, stage: int
) -> Memory:
    """Return the memory of each rank of a run.

    Args:
        cfg: The configuration.
        world_size: Number of ranks.
        card: Kind of GPU.
        sizes: Parameter counts of the model.
        vocab_size: Size of the vocabulary.
        stage: Stage of ZeRO.
    """
    zero = deepspeed_config(cfg, world_size, card.on_gpu)["zero_optimization"]
    weights = 4.0 * sizes.parameters
    shard, moments = weights / world_size, 2 * weights
    # 1. Memory that does not depend on the batch.
    constant = {
        "weights": shard if stage == 3 else weights,
        "master": shard if stage else 0.0,
        "gradients": shard if stage >= 2 else weights,
        "optimizer": moments / world_size if stage else moments,
        "buffers": _estimate_buffers(zero, stage, world_size, sizes),
        "runtime": RUNTIME if card.on_gpu else 0.0,
    }
    # 2. Activations of a micro-batch.
    tokens = cfg.train.micro_batch_size * cfg.data.seq_len
    is_bf16 = cfg.train.precision == "bf16"
    layers = count_saved_floats(cfg, card.on_gpu)
    float_bytes = 4.0 * cfg.model.expand * cfg.model.d_model * tokens  # one float per channel
    largest = max(layers) * (IN_BF16 if is_bf16 else 1.0)
    saved = sum(layers) * (IN_BF16 if is_bf16 else 1.0)
    working = largest * (1.0 if max(layers) >= SAVED_WINDOWS else WORKING)
    if cfg.model.gradient_checkpointing:
        saved, working = SAVED_CHECKPOINTED * len(layers), working + largest
    embedding_and_norm = 8.0 * cfg.model.d_model * tokens
    bf16_weights = weights if is_bf16 else 0.0  # two copies of the weights in bf16
    # 3. Logits of a chunk, because the loss is computed in chunks.
    chunk_tokens = min(tokens, LOSS_CHUNK_TOKENS)
    return Memory(
        **constant,
        activations=saved * float_bytes + embedding_and_norm + bf16_weights,
        working=working * float_bytes,
        loss=LOGIT * chunk_tokens * vocab_size,
    )


def _estimate_buffers(zero: dict, stage: int, ranks: int, sizes: Sizes) -> float:
    """Return the bytes of DeepSpeed's communication buffers on a rank.

    With `overlap_comm`, ZeRO-1 and 2 fill a second buffer while the first is sent.
    """
    if stage == 0:
        return 0.0
    size = zero.get("reduce_bucket_size", bucket_size(sizes.parameters, sizes.largest))
    if stage < 3:
        return size * 4.0 * (2 if zero["overlap_comm"] else 1)
    max_gathered = zero.get("stage3_max_live_parameters", MAX_GATHERED)
    gathered = 4.0 * min(sizes.parameters, max_gathered) if ranks > 1 else 0.0
    return size * 4.0 + gathered


def memory_limit(card: Card, world_size: int) -> float:
    """Return the bytes that a rank may use. On a CPU, all ranks share the memory."""
    return USABLE * card.memory if card.on_gpu else card.memory / world_size


def estimate_checkpoint_bytes(sizes: Sizes, stage: int) -> float:
    """Return the bytes of a checkpoint, over all ranks.

    It contains AdamW's two moments and the weights, twice under ZeRO-1 and 2, all in fp32.
    """
    weight_copies = 1 + (stage in (1, 2))
    return 4.0 * sizes.parameters * (weight_copies + 2)
