"""Memory of a rank, by the formulas of docs/scale.md.

Weights, gradients and moments are fp32. The memory of DeepSpeed was read off runs of version 0.19;
the activations of a layer are one number for each kind of layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lm.common.cards import GIB, Card
from lm.config.model import Model
from lm.config.schema import Config
from lm.model.fields import KINDS, Layer, parse
from lm.model.modeling_fprnn import LOSS_CHUNK_TOKENS
from lm.training.build import build_model, expand_stack
from lm.training.deepspeed_json import bucket_size, deepspeed_config

MOST_GATHERED = 1_000_000_000  # parameters that ZeRO-3 keeps whole (stage3_max_live_parameters)
# CUDA's context, the workspaces of cuBLAS and the channels of NCCL: assumed, not measured.
RUNTIME = 1.5 * GIB
USABLE = 0.95  # of a card's memory; the rest for what the allocator cannot hand out: assumed

# Numbers of 4 bytes that a layer keeps for its backward, for each token and each of its d_inner
# channels. In bf16 about a quarter of it is saved: products are half as large, scans are not.
KEPT = {
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
KEPT_BY_STATE = {"mamba3": 0.71, "m2rnn": 2.18}  # more for each number of d_state
# Of a fixed-point layer, by how it is solved and differentiated.
KEPT_ONE_BY_ONE = 14.0  # each token exactly, one after the other: what a CPU does
KEPT_ONE_STEP = 20.0  # the gradient of one evaluation
KEPT_WINDOWS = 32.0  # the exact gradient of a solve in windows: what a GPU does
KEPT_WINDOWS_FULL_MATRIX = 54.0  # the same of a mixer that has no low rank
KEPT_REFLECTION = 13.0  # of windows, for each reflection beyond the first
KEPT_CHECKPOINTED = 2.0  # what is left where a layer is computed again
IN_BF16 = 0.75
WORKING = 0.25  # of what a layer keeps lives a second time in its backward; of windows all of it
LOGIT = 12.0  # bytes: its logit, and what loss and backward make of it


class Sizes(NamedTuple):
    """Numbers of parameters of a model.

    Attributes:
        parameters: All.
        embedding: In the embedding.
        largest: In the largest tensor.
    """

    parameters: int
    embedding: int
    largest: int = 0


class Memory(NamedTuple):
    """Bytes a rank, by part."""

    weights: float
    master: float  # DeepSpeed's second copy of the weights (ZeRO 1 to 3), in fp32 like the first
    gradients: float
    optimizer: float
    buffers: float  # of DeepSpeed: gradients on their way, under ZeRO-3 gathered weights
    runtime: float  # CUDA's and NCCL's own
    activations: float  # what all layers keep
    working: float  # of one layer: its solve, its backward, what checkpointing computes again
    loss: float  # logits and what the loss makes of them

    @property
    def total(self) -> float:
        """The worst moment: a layer's backward, or that of the loss."""
        return sum(self) - min(self.working, self.loss)


def on_the_meta_device(cfg: Config, vocab_size: int) -> torch.nn.Module:
    """The whole model without its weights."""
    with torch.device("meta"):
        return build_model(cfg, vocab_size)


def sizes(model: torch.nn.Module) -> Sizes:
    """Return the sizes of a model, which may lie on the meta device."""
    return Sizes(
        parameters=sum(p.numel() for p in model.parameters()),
        embedding=model.get_input_embeddings().weight.numel(),
        largest=max(p.numel() for p in model.parameters()),
    )


def kept_by_layers(cfg: Config, on_gpu: bool) -> list[float]:
    """Of each layer the numbers of 4 bytes that it keeps, for each token and channel of a layer of
    the model's `expand`; one with an `expand` of its own has more or fewer channels."""
    m, solver = expand_stack(cfg.model), cfg.solver.settled()
    layers = [Layer(m.block, {})] * m.n_layer
    if m.layers is not None:
        layers = parse(m.layers, m.n_layer)
    return [_kept_by(layer, m, solver, on_gpu) for layer in layers]


def _kept_by(layer: Layer, m: Model, solver: dict, on_gpu: bool) -> float:
    """Of one layer. m: the model's."""
    own = m.model_copy(update=layer.options)
    kept = KEPT.get(layer.kind) or _kept_by_solved(own, solver, on_gpu)
    kept += KEPT_BY_STATE.get(layer.kind, 0.0) * own.d_state
    expand = own.expand if "expand" in KINDS[layer.kind] else 2.0  # at which KEPT was measured
    return kept * expand / m.expand


def _kept_by_solved(m: Model, solver: dict, on_gpu: bool) -> float:
    """Of a fixed-point layer. m: with the layer's own options."""
    if solver["gradient"] == "one_step":
        return KEPT_ONE_STEP
    has_low_rank = m.mixer in ("householder", "dplr")
    one_by_one = ("sequential",) if on_gpu else ("sequential", "auto")
    if has_low_rank and solver["token"] == "exact" and solver["schedule"] in one_by_one:
        kept = KEPT_ONE_BY_ONE + m.mixer_rank - 1
        if m.state_centroids:
            kept += 1 + m.state_centroids / (m.expand * m.d_model)  # what is read, and α
        return kept
    if has_low_rank:
        return KEPT_WINDOWS + KEPT_REFLECTION * (m.mixer_rank - 1)
    return KEPT_WINDOWS_FULL_MATRIX


def memory(
    cfg: Config, world_size: int, card: Card, of: Sizes, vocab_size: int, stage: int
) -> Memory:
    """Return the memory of one rank of a run.

    Args:
        cfg: The configuration.
        world_size: Number of ranks.
        card: Their kind.
        of: Sizes of the model.
        vocab_size: Number of tokens.
        stage: Stage of ZeRO.
    """
    zero = deepspeed_config(cfg, world_size, card.on_gpu)["zero_optimization"]
    whole = 4.0 * of.parameters
    share, moments = whole / world_size, 2 * whole
    # 1. What every update holds.
    held = {
        "weights": share if stage == 3 else whole,
        "master": share if stage else 0.0,
        "gradients": share if stage >= 2 else whole,
        "optimizer": moments / world_size if stage else moments,
        "buffers": _buffers(zero, stage, world_size, of),
        "runtime": RUNTIME if card.on_gpu else 0.0,
    }
    # 2. What a micro-batch holds.
    tokens = cfg.train.micro_batch_size * cfg.data.seq_len
    is_bf16 = cfg.train.precision == "bf16"
    layers = kept_by_layers(cfg, card.on_gpu)
    channel = 4.0 * cfg.model.expand * cfg.model.d_model * tokens  # bytes of a number a channel
    largest = max(layers) * (IN_BF16 if is_bf16 else 1.0)
    kept = sum(layers) * (IN_BF16 if is_bf16 else 1.0)
    working = largest * (1.0 if max(layers) >= KEPT_WINDOWS else WORKING)
    if cfg.model.gradient_checkpointing:
        kept, working = KEPT_CHECKPOINTED * len(layers), working + largest
    around = 8.0 * cfg.model.d_model * tokens  # embedding and last norm
    casts = whole if is_bf16 else 0.0  # two copies of the weights in bf16
    # 3. Logits: of a chunk, where the loss goes by chunks.
    logits = min(tokens, LOSS_CHUNK_TOKENS)
    return Memory(
        **held,
        activations=kept * channel + around + casts,
        working=working * channel,
        loss=LOGIT * logits * vocab_size,
    )


def _buffers(zero: dict, stage: int, ranks: int, of: Sizes) -> float:
    """Return the bytes of DeepSpeed's communication buffers on a rank.

    Under ZeRO-1 and 2 with `overlap_comm`, DeepSpeed fills a second one while it sends the first.
    """
    if stage == 0:
        return 0.0
    size = zero.get("reduce_bucket_size", bucket_size(of.parameters, of.largest))
    if stage < 3:
        return size * 4.0 * (2 if zero["overlap_comm"] else 1)
    gathered = zero.get("stage3_max_live_parameters", MOST_GATHERED)
    whole = 4.0 * min(of.parameters, gathered) if ranks > 1 else 0.0
    return size * 4.0 + whole


def limit(card: Card, world_size: int) -> float:
    """Return the bytes that a rank may use; all ranks share a CPU's memory."""
    return USABLE * card.memory if card.on_gpu else card.memory / world_size


def checkpoint_bytes(of: Sizes, stage: int) -> float:
    """Return the bytes of a checkpoint over all ranks, in fp32.

    It holds the weights, under ZeRO-1 and 2 twice, and AdamW's two moments.
    """
    weights = 1 + (stage in (1, 2))
    return 4.0 * of.parameters * (weights + 2)
