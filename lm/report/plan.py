"""Estimated costs of a run before it starts: parameters, FLOPs, hours, and memory per GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lm.common.cards import GIB, SEQUENCE_S, TOKEN_S, Card, detect_gpu_name, find_card
from lm.common.errors import ConfigError
from lm.config.schema import Config
from lm.kernels.cell_arguments import fits_a_gpu
from lm.model.fields import AUTO_WINDOW
from lm.report import estimate
from lm.report.estimate import Sizes, build_meta_model, count_parameters
from lm.training import init_from
from lm.training.build import model_vocab_size, replace_custom_mixers
from lm.training.deepspeed_json import deepspeed_config
from lm.training.optim import describe_optimizer as described_optimizer

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedModel

SMALLER = (
    "a smaller train.micro_batch_size with more train.grad_accum_steps,"
    " model.gradient_checkpointing=true, a higher ZeRO stage, or more GPUs"
)
UTILISATION = 0.25  # share of the GPU's peak FLOP/s in matrix products: assumed
EVALUATIONS = 10.0  # evaluations per token and layer of an iterative solve: assumed


@dataclass(frozen=True)
class Hardware:
    """Hardware that a run is planned for.

    Attributes:
        world_size: Number of GPUs.
        card: Kind of GPU.
        utilisation: Share of the GPU's peak FLOP/s that matrix products reach.
    """

    world_size: int
    card: Card
    utilisation: float = UTILISATION


def parse_hardware(
    world_size: int, gpu: str | None = None, utilisation: float | None = None
) -> Hardware:
    """Return the hardware that the options of `fprnn plan` describe.

    Args:
        world_size: Number of GPUs.
        gpu: Name or description of the GPU; None: the GPU of this machine.
        utilisation: Share of the peak FLOP/s; None: UTILISATION.

    Raises:
        ConfigError: If the GPU is unknown, or the utilisation is above 1.
    """
    if utilisation is not None and utilisation > 1:
        raise ConfigError(
            f"--utilisation is {utilisation:g}: it must be a share of the GPU's peak, above 0 and"
            " at most 1"
        )
    return Hardware(world_size, find_card(gpu or detect_gpu_name()), utilisation or UTILISATION)


# Work.


@dataclass(frozen=True)
class Layers:
    """Fixed-point layers of a model, by solver.

    Attributes:
        kernel: Layers whose tokens a GPU kernel solves one after the other.
        loop: Layers whose tokens PyTorch or the CPU kernel solves one after the other.
        iterated: Layers that are solved iteratively, in windows or by the paper's iteration.
    """

    kernel: list
    loop: list
    iterated: list

    @property
    def evaluations(self) -> float | None:
        """Evaluations per token, mean over layers; None for a model without fixed-point layers."""
        sequential = len(self.kernel) + len(self.loop)
        count = sequential + len(self.iterated)
        return (sequential + len(self.iterated) * EVALUATIONS) / count if count else None


def fits_kernel(block: Any) -> bool:
    """Return whether a GPU kernel can solve the tokens of a layer one after the other."""
    rank = 0 if block.centroids is not None else block.kernel_rank()
    return rank > 0 and fits_a_gpu(rank, block.config.d_inner)


def classify_layers(cfg: Config, model: PreTrainedModel, on_gpu: bool) -> Layers:
    """Return the fixed-point layers of a model by solver.

    On a GPU, the schedule `auto` is sequential if the kernel supports the layer
    (`choose_window_width` in lm/model/strategies.py).

    Args:
        cfg: The configuration.
        model: The model, possibly on the meta device.
        on_gpu: True if the run trains on a GPU.
    """
    blocks, solver = model.fixed_point_blocks(), cfg.solver.resolve_auto()
    sequential = []
    if solver["token"] != "exact":
        return Layers([], [], blocks)
    if solver["schedule"] == "sequential":
        sequential = blocks
    elif solver["schedule"] == "auto":
        sequential = [b for b in blocks if (fits_kernel(b) if on_gpu else b.mixer.has_low_rank)]
    kernel = [b for b in sequential if on_gpu and fits_kernel(b)]
    loop = [b for b in sequential if b not in kernel]
    return Layers(kernel, loop, [b for b in blocks if b not in sequential])


def resolve_schedule(cfg: Config, layers: Layers) -> Config:
    """Return the configuration with `auto` replaced by the schedule that needs the most memory."""
    solver = cfg.solver.resolve_auto()
    if not cfg.model.has_fixed_point or (solver["token"], solver["schedule"]) != ("exact", "auto"):
        return cfg
    copy = cfg.model_copy(deep=True)
    copy.solver.schedule = f"window:{AUTO_WINDOW}" if layers.iterated else "sequential"
    return copy


def estimate_hours(cfg: Config, hardware: Hardware, layers: Layers, flops: float) -> dict | None:
    """Return the hours of a run by part, or None if no measured rate applies.

    Args:
        cfg: The configuration.
        hardware: The hardware.
        layers: Fixed-point layers of the model.
        flops: FLOPs of the run with one evaluation per token.
    """
    if hardware.card.peak is None or layers.loop or layers.iterated:
        return None
    passes = cfg.train.steps + cfg.adversarial_updates
    peak = hardware.world_size * hardware.card.peak[cfg.train.precision]
    # Latency, not arithmetic, determines the time of the sequential kernel.
    tokens = passes * cfg.train.accumulation(hardware.world_size) * cfg.data.seq_len
    seconds_per_token = TOKEN_S + SEQUENCE_S * cfg.train.micro_batch_size
    return {
        "matrix products": flops / (peak * hardware.utilisation) / 3600,
        "sequential kernel": tokens * len(layers.kernel) * seconds_per_token / 3600,
    }


def plan(cfg: Config, hardware: Hardware | int) -> dict:
    """Return the estimated costs of a run.

    It builds the model on the meta device and downloads nothing.

    Args:
        cfg: The configuration.
        hardware: The hardware, or the number of GPUs of the default kind.

    Raises:
        ConfigError: As in `build_model`, `model_vocab_size` and `deepspeed_config`.
    """
    if isinstance(hardware, int):
        hardware = parse_hardware(hardware)
    cfg, custom_mixers = replace_custom_mixers(cfg)
    vocab_size = model_vocab_size(cfg)
    model = build_meta_model(cfg, vocab_size)
    layers = classify_layers(cfg, model, hardware.card.on_gpu)
    resolved_cfg = resolve_schedule(cfg, layers)
    sizes = count_parameters(model)
    tokens_per_step = cfg.tokens_per_step(hardware.world_size)
    # An update with an adversarial pass reads its tokens twice.
    tokens_read = (cfg.train.steps + cfg.adversarial_updates) * tokens_per_step
    length, evaluations = cfg.data.seq_len, layers.evaluations
    flops_per_token = model.flops_per_token(evaluations or 1, length=length)
    flops_of_one_evaluation = model.flops_per_token(1, length=length) * tokens_read
    return {
        "hardware": hardware,
        "vocab_size": vocab_size,
        "custom_mixers": custom_mixers,
        "init_from": init_from.check(cfg, model),
        "optimizer": described_optimizer(model, cfg.optim),
        "parameters": sizes.parameters,
        "parameters_without_embedding": sizes.parameters - sizes.embedding,
        "sequences_per_step": cfg.train.sequences(hardware.world_size),
        "tokens_per_step": tokens_per_step,
        "tokens": cfg.train.steps * tokens_per_step,
        "layers": layers,
        "evaluations": evaluations,
        "flops_per_token": flops_per_token,
        "flops": flops_per_token * tokens_read,
        "hours": estimate_hours(cfg, hardware, layers, flops_of_one_evaluation),
        **_plan_memory(resolved_cfg, hardware, sizes, vocab_size),
    }


def _plan_memory(cfg: Config, hardware: Hardware, sizes: Sizes, vocab_size: int) -> dict:
    """Return the part of a plan on the memory of a GPU and the size of a checkpoint."""
    ranks, card = hardware.world_size, hardware.card
    stage = deepspeed_config(cfg, ranks)["zero_optimization"]["stage"]
    stages = {
        s: estimate.estimate_memory(cfg, ranks, card, sizes, vocab_size, stage=s) for s in range(4)
    }
    memory, limit = stages[stage], estimate.memory_limit(card, ranks)
    return {
        "zero_stage": stage,
        "memory": memory,
        "limit": limit,
        "fits": memory.total <= limit,
        "stages": stages,
        "checkpoint_bytes": estimate.estimate_checkpoint_bytes(sizes, stage),
    }


# The table.


def describe(p: dict, cfg: Config) -> Table:
    """Return a plan as a table.

    Args:
        p: The plan.
        cfg: The configuration.
    """
    from rich.table import Table

    table = Table(title=f"Plan of {cfg.name}", show_header=False, title_justify="left")
    for part in (_model_rows(p, cfg), _work_rows(p, cfg), _memory_rows(p)):
        for row in part:
            table.add_row(*row)
        table.add_section()
    return table


def _model_rows(p: dict, cfg: Config) -> list[tuple[str, str]]:
    """Return the rows of the model and its data."""
    from lm.data.sources.mixture import source_shares

    hardware = p["hardware"]
    ranks = f"{hardware.world_size} × {hardware.card.name}"
    shares = {} if cfg.data.mixture is None else source_shares(cfg.data)
    mixer_note = "is not imported by plan, which counts a householder mixer instead"
    return [
        ("parameters", f"{p['parameters'] / 1e6:,.1f} M"),
        ("… without embedding", f"{p['parameters_without_embedding'] / 1e6:,.1f} M"),
        ("vocabulary", f"{p['vocab_size']:,}"),
        *(("mixer", f"{name} {mixer_note}") for name in p["custom_mixers"]),
        *(("init from", line) for line in p["init_from"]),
        ("ranks (GPUs)", ranks),
        ("sequences per update", f"{p['sequences_per_step']:,} of {cfg.data.seq_len:,} tokens"),
        ("tokens per update", f"{p['tokens_per_step']:,}"),
        ("tokens trained on", f"{_format_count(p['tokens'])} in {cfg.train.steps:,} updates"),
        *((f"source {name}", f"{share:.2%} of the sequences") for name, share in shares.items()),
        *(("optimizer", line) for line in p["optimizer"]),
    ]


def _format_count(count: float) -> str:
    """Return a number of tokens as text: in billions from 1e8 on, such as 2.517 B."""
    return f"{count / 1e9:,.3f} B" if count >= 1e8 else f"{count:,.0f}"


def _work_rows(p: dict, cfg: Config) -> list[tuple[str, str]]:
    """Return the rows of FLOPs, hours and the checkpoint."""
    evaluations = "" if p["evaluations"] is None else f", evaluations = {p['evaluations']:g}"
    flops = f"{p['flops_per_token'] / 1e9:,.3f} G  ({p['flops']:.2e} in all)"
    rows = [(f"FLOPs per token{evaluations}", flops), *_hour_rows(p, cfg)]
    return [*rows, ("checkpoint", f"{p['checkpoint_bytes'] / GIB:,.2f} GiB")]


def _hour_rows(p: dict, cfg: Config) -> list[tuple[str, str]]:
    """Return the rows of the hours: the sum, and each part with its origin."""
    hardware, parts = p["hardware"], p["hours"]
    if parts is None:
        reason = "for a CPU"
        if hardware.card.on_gpu:
            count = len(p["layers"].loop) + len(p["layers"].iterated)
            reason = f"because no measured kernel solves {count} of the layers"
        return [("hours", f"unknown {reason}: train a few updates, which logs tokens/s")]
    peak = hardware.card.peak[cfg.train.precision] / 1e12
    origins = {
        "matrix products": f"at {hardware.utilisation:.0%} of {peak:g} TFLOP/s (--utilisation)",
        "sequential kernel": "measured with untrained weights on an H100",
    }
    passes = ""
    if cfg.train.adversarial_noise:
        at_least = "at least " * cfg.can_end_stage_early
        passes = f", with two passes in {at_least}{cfg.adversarial_updates:,} updates"
    rows = [("hours", f"{sum(parts.values()):,.2f}{passes}")]
    for name, part in parts.items():
        if part:
            rows.append((f"… {name}", f"{part:,.2f} {origins[name]}"))
    return rows


MEMORY_PARTS = {
    "weights": "weights",
    "master": "DeepSpeed's copy of the weights",
    "gradients": "gradients",
    "optimizer": "optimizer's moments",
    "buffers": "DeepSpeed's buffers",
    "runtime": "CUDA, NCCL (assumed)",
    "activations": "activations",
    "working": "solve and backward of a layer",
    "loss": "logits and loss",
}


def _memory_rows(p: dict) -> list[tuple[str, str]]:
    """Return the rows of memory by part and by ZeRO stage, and advice if the run does not fit."""
    memory, card = p["memory"], p["hardware"].card
    smaller = "working" if memory.working < memory.loss else "loss"
    rows = []
    for name, label in MEMORY_PARTS.items():
        if size := getattr(memory, name):
            note = " (not part of the peak)" if name == smaller else ""
            rows.append((f"memory: {label}", f"{_format_bytes(size)}{note}"))
    for stage, stage_memory in p["stages"].items():
        margin = p["limit"] - stage_memory.total
        verdict = "fits" if margin >= 0 else f"{_format_bytes(-margin)} too much"
        verdict += ", as configured" if stage == p["zero_stage"] else ""
        row = f"{_format_bytes(stage_memory.total)} (estimate): {verdict}"
        rows.append((f"memory per GPU, ZeRO-{stage}", row))
    limit = f"{_format_bytes(p['limit'])} per rank"
    if card.on_gpu:
        limit = f"{_format_bytes(p['limit'])} of {_format_bytes(card.memory)} ({card.name})"
    rows.append(("memory limit", limit))
    if not p["fits"]:
        rows.append(("to make it fit", SMALLER))
    return rows


def _format_bytes(count: float) -> str:
    """Return bytes as text in GiB, or in MiB below 0.1 GiB."""
    return f"{count / GIB:,.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:,.2f} MiB"
