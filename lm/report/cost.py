"""What a run takes besides memory: FLOPs, hours, bytes between GPUs, bytes of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from lm.common.cards import INFINIBAND, PCIE, Card
from lm.config.schema import Config
from lm.report.memory import Sizes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Evaluations that FLOPs are shown for; token by token, an exact one takes 1.
COUNTS = (1, 5, 10, 20)


class Link(NamedTuple):
    """The slowest link that a ring through all GPUs goes over."""

    name: str
    bytes_per_second: float  # that one GPU sends


def flops_of(cfg: Config, model: PreTrainedModel, of: Sizes) -> dict[str, float]:
    """FLOPs of a token in training, forward and backward, by what they depend on."""
    length = cfg.data.seq_len
    counts = COUNTS if model.solver() != "none" else COUNTS[:1]
    flops = {k: model.flops_per_token(k, length=length) for k in counts}
    if len(flops) == 1:
        return {"no layer is solved": flops[counts[0]]}
    return {f"evaluations = {k}": count for k, count in flops.items()}


def hours(flops: float, gpus: int, card: Card, precision: str, utilisation: float) -> float | None:
    """Of a run; None where the card's peak is not known."""
    if card.peak is None:
        return None
    return flops / (gpus * card.peak[precision] * utilisation) / 3600


def gradient_bytes(of: Sizes) -> float:
    """Bytes of all gradients as they are sent: bf16 of what `memory.SENT_LOW` says, else fp32."""
    return 4.0 * of.parameters - 2.0 * of.sent_low


def communication(of: Sizes, gpus: int, stage: int, grad_accum_steps: int) -> dict[str, float]:
    """Bytes that each GPU sends in an update, by collective, each as a ring does it.

    As DeepSpeed 0.19 does by default: ZeRO-1 and 2 sum buckets over all ranks although each needs
    its own part alone (use_multi_rank_bucket_allreduce); ZeRO-2 and 3 send the gradients of every
    micro-batch; ZeRO-3 gathers the weights for every forward and every backward.
    """
    part = (gpus - 1) / gpus
    gradients, weights = gradient_bytes(of), 4.0 * of.parameters
    if stage <= 1:
        sent = {"all-reduce of gradients": 2 * part * gradients}
    elif stage == 2:
        sent = {"all-reduce of gradients": 2 * part * gradients * grad_accum_steps}
    else:
        sent = {"reduce-scatter of gradients": part * gradients * grad_accum_steps}
        gathered = 2 * part * gradients * grad_accum_steps  # weights travel as gradients do
        return sent | {"all-gather of weights": gathered}
    return sent | ({"all-gather of weights": part * weights} if stage else {})


def link(card: Card, nodes: int) -> Link:
    """What the GPUs of so many hosts send over."""
    if nodes > 1:
        return Link("InfiniBand", INFINIBAND)
    return Link("NVLink", card.nvlink) if card.nvlink else Link("PCIe", PCIE)


def checkpoint_bytes(of: Sizes, stage: int, average: bool = False) -> float:
    """Bytes of a checkpoint over all ranks: weights and AdamW's two moments (Muon's one), in fp32;
    ZeRO-1 and 2 save the weights a second time, and there may be their average."""
    weights = 1 + (stage in (1, 2)) + average
    return 4.0 * (of.parameters * (weights + 2) - of.by_muon)
