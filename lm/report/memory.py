"""Bytes a rank needs at the worst moment of an update, part by part, and what would make them fit.

What DeepSpeed holds was read off runs of it (0.19; benchmarks/memory.py measures it again), what
the model holds is counted (lm/report/activations.py). N: parameters, w: ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from lm.common.cards import GIB, Card
from lm.config.schema import Config, Optim
from lm.report import activations
from lm.report.activations import Activations
from lm.training.build import build_model
from lm.training.deepspeed_json import deepspeed_config, highest_stage
from lm.training.optim import matrices

BUCKET = 500_000_000  # elements of DeepSpeed's gradient buffer, where nothing else is set
SMALL_BUCKET = 50_000_000
MOST_GATHERED = 1_000_000_000  # parameters that ZeRO-3 keeps whole (stage3_max_live_parameters)
# CUDA's context, the workspaces of cuBLAS and the channels of NCCL: assumed, not measured.
RUNTIME = 1.5 * GIB
USABLE = 0.95  # of a card's memory; the rest for what the allocator cannot hand out: assumed
# Modules whose parameters DeepSpeed sends in bf16 under autocast: exactly these classes.
SENT_LOW = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)


class Sizes(NamedTuple):
    """What the memory of a model is computed from."""

    parameters: int  # N
    largest: int  # parameters of the largest tensor
    head: int  # of the head's matrix
    embedding: int
    sent_low: int  # parameters whose gradients travel in bf16
    vocab_size: int
    by_muon: int = 0  # parameters that Muon steps, with one moment where AdamW has two
    largest_by_muon: int = 0  # of the largest matrix among them


class Memory(NamedTuple):
    """Bytes a rank, by part. Of the last four only the largest moment counts: `total`."""

    weights: float
    master: float  # DeepSpeed's second copy of the weights (ZeRO 1 to 3), in fp32 like the first
    gradients: float
    optimizer: float
    buffers: float  # of DeepSpeed: gradients on their way, under ZeRO-3 gathered weights
    runtime: float  # CUDA's and NCCL's own
    activations: float
    temporaries: float  # of a layer: the solve, or its backward
    loss: float  # logits and what the loss makes of them
    update: float  # the gradients' flat copy and AdamW's temporaries
    buffers_in_loss: bool = True  # ZeRO-2 has none yet when the loss goes back
    average: float = 0.0  # of the weights (train.ema)

    @property
    def moments(self) -> dict[str, float]:
        """Bytes at the worst moments, each by itself."""
        still = self.weights + self.master + self.gradients + self.optimizer + self.runtime
        still += self.average
        in_loss = self.buffers if self.buffers_in_loss else 0.0
        return {
            "a layer": still + self.buffers + self.activations + self.temporaries,
            "loss": still + in_loss + self.activations + self.loss,
            "update": still + self.update,
        }

    @property
    def total(self) -> float:
        return max(self.moments.values())


def sizes(
    model: torch.nn.Module, vocab_size: int, precision: str, optim: Optim | None = None
) -> Sizes:
    """Of a model, which may lie on the meta device.

    Args:
        optim: what steps it; None: AdamW.
    """
    each = [p.numel() for p in model.parameters()]
    low: dict[int, int] = {}
    if precision == "bf16":
        for module in model.modules():
            if module.__class__ in SENT_LOW:
                low |= {id(p): p.numel() for p in module.parameters(recurse=False)}
    head = model.get_output_embeddings().weight.numel()
    embedding = model.get_input_embeddings().weight.numel()
    muon = [0]
    if optim is not None and optim.name == "muon":
        names = matrices(model)
        muon = [p.numel() for name, p in model.named_parameters() if name in names]
    return Sizes(
        sum(each), max(each), head, embedding, sum(low.values()), vocab_size, sum(muon), max(muon)
    )


def buffers(cfg: Config, world_size: int, of: Sizes, on_gpu: bool) -> float:
    """Bytes of DeepSpeed's communication buffers."""
    zero = deepspeed_config(cfg, world_size)["zero_optimization"]
    if zero["stage"] == 0:
        return 0.0
    size = zero.get("reduce_bucket_size", BUCKET)
    own = cfg.engine.deepspeed if isinstance(cfg.engine.deepspeed, dict) else {}
    overlaps = own.get("zero_optimization", {}).get("overlap_comm", on_gpu)
    dtypes = 2 if of.sent_low else 1  # a buffer for each dtype that is sent
    if zero["stage"] < 3:
        return size * 4.0 * dtypes * (2 if overlaps else 1)
    gathered = zero.get("stage3_max_live_parameters", MOST_GATHERED)
    whole = 4.0 * min(of.parameters, gathered) if world_size > 1 else 0.0
    return size * (6.0 if of.sent_low else 4.0) + whole


def memory(cfg: Config, world_size: int, card: Card, of: Sizes, held: Activations) -> Memory:
    """Of one rank of a run. The update is one that accumulates: in it the gradients of the
    micro-batch before are all there.

    Args: held: what `activations.count` has counted for this config.
    """
    stage = deepspeed_config(cfg, world_size)["zero_optimization"]["stage"]
    n, t = 4.0 * of.parameters, cfg.train
    share = n / world_size
    tokens = t.micro_batch_size * cfg.data.seq_len
    kept, temporary = held.held(t.micro_batch_size, cfg.data.seq_len)
    logits = activations.loss_bytes(cfg, tokens, of.vocab_size)
    logits = max(logits, logits / 3 + 4.0 * of.head)  # the gradient of the head, before it is added
    copy = 0.0 if stage == 0 else share
    unfused = 0.0 if card.on_gpu else 2 * (4.0 * of.largest if stage == 0 else share)
    moments = 2 * n - 4.0 * of.by_muon
    # Of Muon the gradient with its momentum, and what Newton and Schulz make of a matrix in bf16;
    # under ZeRO the momentum of all ranks, twice while it is put together.
    muon = (4.0 + 3 * 2.0) * of.largest_by_muon
    if stage and of.by_muon:
        muon += 4.0 * of.by_muon * (1 if world_size == 1 else 2)
    return Memory(
        weights=share if stage == 3 else n,
        master=0.0 if stage == 0 else share,
        gradients=share if stage >= 2 else n,
        optimizer=moments if stage == 0 else moments / world_size,
        buffers=buffers(cfg, world_size, of, card.on_gpu),
        runtime=RUNTIME if card.on_gpu else 0.0,
        activations=kept,
        temporaries=temporary,
        loss=logits,
        update=copy + max(unfused, muon),
        buffers_in_loss=stage != 2,
        average=0.0 if t.ema is None else n,
    )


Change = dict[str, int | bool]  # keys of the config, dots as `__`, and their new values


class Planner:
    """The memory of a run and of its variants; models are counted once each."""

    def __init__(self, cfg: Config, world_size: int, card: Card, of: Sizes):
        self.cfg, self.world_size, self.card, self.of = cfg, world_size, card, of
        self._counted: dict[bool, Activations] = {}  # by whether layers are computed again

    def memory(self, **changes: Any) -> Memory:
        """Of the run with these keys changed: `key=value` as on the command line, dots as `__`."""
        cfg = changed(self.cfg, changes)
        checkpointed = cfg.model.gradient_checkpointing
        if checkpointed not in self._counted:
            self._counted[checkpointed] = activations.count(cfg, self.card.on_gpu)
        return memory(cfg, self.world_size, self.card, self.of, self._counted[checkpointed])

    def fits(self, needed: Memory) -> bool:
        return needed.total <= self.limit

    @property
    def limit(self) -> float:
        """Bytes that a rank may have."""
        if self.card.on_gpu:
            return USABLE * self.card.memory
        return self.card.memory / self.world_size

    def smallest_change(self) -> tuple[Change, Memory] | None:
        """What makes the run fit with the fewest keys changed, the cheapest first among equals, and
        its memory; None: nothing here does. The global batch stays."""
        for change in self._changes():
            needed = self.memory(**change)
            if self.fits(needed):
                return change, needed
        return None

    def smaller_batches(self) -> list[Change]:
        """Smaller micro-batches with the same global batch, the largest first."""
        t = self.cfg.train
        found: list[Change] = []
        for part in range(2, t.micro_batch_size + 1):
            if t.micro_batch_size % part == 0:
                fewer: Change = {"train__micro_batch_size": t.micro_batch_size // part}
                if t.global_batch_size is None:  # else accumulation follows
                    fewer["train__grad_accum_steps"] = t.accumulation(self.world_size) * part
                found.append(fewer)
        return found

    def _changes(self) -> list[Change]:
        """Sets of changes, from the smallest. A kind's choices are from the cheapest on."""
        m = self.cfg.model
        zero = deepspeed_config(self.cfg, self.world_size)["zero_optimization"]
        stage = zero["stage"]
        own_json = isinstance(self.cfg.engine.deepspeed, str)
        bucket: list[Change] = [{}]
        stages: list[Change] = [{}]
        checkpointed: list[Change] = [{}]
        batches: list[Change] = [{}, *self.smaller_batches()]
        if stage and not own_json and zero.get("reduce_bucket_size", BUCKET) > SMALL_BUCKET:
            key = "engine__deepspeed__zero_optimization__reduce_bucket_size"
            bucket.append({key: SMALL_BUCKET})
        if self.world_size > 1 and not own_json:
            most = highest_stage(self.cfg)
            stages += [{"engine__zero_stage": s} for s in range(stage + 1, most + 1)]
        if not m.gradient_checkpointing:
            checkpointed.append({"model__gradient_checkpointing": True})
        # (how many kinds change, how far): the order that they are tried in.
        found = []
        choices = bucket, stages, batches, checkpointed  # from the cheapest kind on
        for places in itertools.product(*map(range, map(len, reversed(choices)))):
            places = places[::-1]
            kinds = sum(place > 0 for place in places)
            cost = sum(weight * place for weight, place in enumerate(places, 1))
            change: Change = {}
            for choice, place in zip(choices, places):
                change |= choice[place]
            found.append(((kinds, cost), change))
        found.sort(key=lambda pair: pair[0])
        return [change for (kinds, _), change in found if kinds]


def changed(cfg: Config, changes: Mapping[str, Any]) -> Config:
    """The config with keys changed, dots written as `__`."""
    from lm.config import load as config

    tree = cfg.model_dump(mode="json")
    for key, value in changes.items():
        config.set_key(tree, key.replace("__", "."), value)
    return config.build(tree)


def on_the_meta_device(cfg: Config, vocab_size: int) -> torch.nn.Module:
    """The whole model without its weights."""
    with torch.device("meta"):
        return build_model(cfg, vocab_size)
