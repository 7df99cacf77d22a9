"""Estimated costs of a run before it starts: parameters, FLOPs, hours, and memory per GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lm.common.cards import (
    DEFAULT_CARD,
    GIB,
    SEQUENCE_S,
    TOKEN_S,
    Card,
    find_card,
    find_local_card,
)
from lm.common.errors import ConfigError
from lm.config.schema import Config
from lm.kernels.cell_arguments import fits_a_gpu
from lm.model.fields import AUTO_WINDOW
from lm.report import estimate
from lm.report.estimate import ParameterCounts, build_meta_model, count_parameters
from lm.training import init_from
from lm.training.build import model_vocab_size, replace_custom_mixers
from lm.training.deepspeed_json import deepspeed_config
from lm.training.optim import describe_optimizer

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedModel

HOW_TO_FIT = (
    "a smaller train.micro_batch_size with more train.grad_accum_steps,"
    " model.gradient_checkpointing=true, a higher ZeRO stage, or more GPUs"
)
DEFAULT_UTILISATION = 0.25  # share of the GPU's peak FLOP/s in matrix products: assumed
ITERATIVE_EVALUATIONS = 10.0  # evaluations per token and layer of an iterative solve: assumed


@dataclass(frozen=True)
class Hardware:
    """Hardware that a run is planned for."""

    world_size: int  # number of GPUs
    card: Card  # kind of GPU, or the CPU
    utilisation: float = DEFAULT_UTILISATION  # share of the peak FLOP/s in matrix products


def parse_hardware(
    world_size: int, gpu: str | None = None, utilisation: float | None = None
) -> Hardware:
    """Return the hardware that the options of `fprnn plan` describe.

    Args:
        world_size: Number of GPUs.
        gpu: Name or description of the GPU; None: the GPU of this machine.
        utilisation: Share of the GPU's peak FLOP/s that matrix products reach; None: the default.

    Raises:
        ConfigError: If the GPU is unknown, or the utilisation is above 1.
    """
    if utilisation is not None and utilisation > 1:
        raise ConfigError(
            f"--utilisation is {utilisation:g}: it must be a share of the GPU's peak, above 0 and"
            " at most 1"
        )
    local_card = None if gpu else find_local_card()
    card = local_card or find_card(gpu or DEFAULT_CARD)
    return Hardware(world_size, card, utilisation or DEFAULT_UTILISATION)


# Kinds of layers that read tokens one after another, other than fixed-point layers.
TOKEN_BY_TOKEN = ("kda", "lstm", "m2rnn", "rwkv7", "slstm")


@dataclass(frozen=True)
class LayersBySolver:
    """Fixed-point layers of a model by the solver that a run would use, and other slow layers."""

    kernel: list  # a GPU kernel solves their tokens one after the other
    loop: list  # PyTorch or the CPU kernel solves their tokens one after the other
    iterated: list  # solved iteratively, in windows or by the paper's iteration
    unmeasured: list  # kinds of the layers in TOKEN_BY_TOKEN

    @property
    def evaluations(self) -> float | None:
        """Evaluations per token, mean over layers; None for a model without fixed-point layers."""
        sequential_count = len(self.kernel) + len(self.loop)  # one evaluation per token
        layer_count = sequential_count + len(self.iterated)
        evaluations = sequential_count + len(self.iterated) * ITERATIVE_EVALUATIONS
        return evaluations / layer_count if layer_count else None


def fits_kernel(block: Any) -> bool:
    """Return whether a GPU kernel can solve the tokens of a layer one after the other."""
    if block.centroids is not None:  # no GPU kernel has state centroids
        return False
    rank = block.kernel_rank()  # 0 if no kernel supports the layer
    return rank > 0 and fits_a_gpu(rank, block.config.d_inner)


def classify_layers(cfg: Config, model: PreTrainedModel, on_gpu: bool) -> LayersBySolver:
    """Return the fixed-point layers of a model by solver, and the other slow layers.

    On a GPU, the schedule `auto` is sequential if the kernel supports the layer
    (`choose_window_width` in lm/model/strategies.py).

    Args:
        cfg: The configuration.
        model: The model, possibly on the meta device.
        on_gpu: True if the run trains on a GPU.
    """
    unmeasured = [layer.kind for layer in model.config.layer_list() if layer.kind in TOKEN_BY_TOKEN]
    blocks, solver = model.fixed_point_blocks(), cfg.solver.resolve_auto()
    if solver["token"] != "exact":
        return LayersBySolver([], [], blocks, unmeasured)
    sequential = []
    if solver["schedule"] == "sequential":
        sequential = blocks
    elif solver["schedule"] == "auto":
        sequential = [b for b in blocks if (fits_kernel(b) if on_gpu else b.mixer.has_low_rank)]
    kernel = [b for b in sequential if on_gpu and fits_kernel(b)]
    loop = [b for b in sequential if b not in kernel]
    iterated = [b for b in blocks if b not in sequential]
    return LayersBySolver(kernel, loop, iterated, unmeasured)


def resolve_schedule(cfg: Config, layers: LayersBySolver) -> Config:
    """Replace `auto` by the schedule that it selects.

    If layers have different schedules, it is the schedule that needs the most memory.
    """
    solver = cfg.solver.resolve_auto()
    is_auto = solver["token"] == "exact" and solver["schedule"] == "auto"
    if not (cfg.model.has_fixed_point and is_auto):
        return cfg
    copy = cfg.model_copy(deep=True)
    copy.solver.schedule = f"window:{AUTO_WINDOW}" if layers.iterated else "sequential"
    return copy


def estimate_hours(
    cfg: Config, hardware: Hardware, layers: LayersBySolver, flops: float
) -> dict[str, float] | None:
    """Return the hours of a run by part, or None if the speed of a part is not known.

    Args:
        cfg: The configuration.
        hardware: The hardware.
        layers: Layers of the model by solver.
        flops: FLOPs of the run with one evaluation per token.
    """
    if hardware.card.peak is None or layers.loop or layers.iterated or layers.unmeasured:
        return None
    peak_flops_per_s = hardware.world_size * hardware.card.peak[cfg.train.precision]
    # The kernel solves the tokens of a micro-batch's sequences in parallel, one position after
    # another. Its time is mostly latency, and therefore depends little on the micro-batch.
    update_passes = cfg.train.steps + cfg.adversarial_updates
    micro_batches = update_passes * cfg.train.accumulation(hardware.world_size)
    positions = micro_batches * cfg.data.seq_len
    seconds_per_position = TOKEN_S + SEQUENCE_S * cfg.train.micro_batch_size
    return {
        "matrix products": flops / (peak_flops_per_s * hardware.utilisation) / 3600,
        "sequential kernel": positions * len(layers.kernel) * seconds_per_position / 3600,
    }


def plan(cfg: Config, hardware: Hardware | int) -> dict:
    """Estimate the costs of a run. Build its model on the meta device, and download nothing.

    Args:
        cfg: The configuration.
        hardware: The hardware, or the number of GPUs of this machine's kind.

    Returns:
        The costs by name. "tokens" and "flops" are of the whole run, "hours" are by part (None if
        unknown), "memory" and "memory_by_stage" are bytes of a rank (`estimate.Memory`), "limit"
        is the memory limit in bytes, and "fits" is True if "memory" does not exceed it.

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
    counts = count_parameters(model)
    tokens_per_step = cfg.tokens_per_step(hardware.world_size)
    # An update with an adversarial pass reads its tokens twice.
    tokens_read = (cfg.train.steps + cfg.adversarial_updates) * tokens_per_step
    length, evaluations = cfg.data.seq_len, layers.evaluations
    flops_per_token = model.flops_per_token(evaluations or 1, length=length)
    flops_of_one_evaluation = model.flops_per_token(1, length=length) * tokens_read
    hours_by_part = estimate_hours(cfg, hardware, layers, flops_of_one_evaluation)
    return {
        "hardware": hardware,
        "vocab_size": vocab_size,
        "custom_mixers": custom_mixers,
        "init_from": init_from.check(cfg, model),
        "optimizer": describe_optimizer(model, cfg.optim),
        "parameters": counts.total,
        "parameters_without_embedding": counts.total - counts.embedding,
        "sequences_per_step": cfg.train.sequences(hardware.world_size),
        "tokens_per_step": tokens_per_step,
        "tokens": cfg.train.steps * tokens_per_step,
        "layers": layers,
        "evaluations": evaluations,
        "flops_per_token": flops_per_token,
        "flops": flops_per_token * tokens_read,
        "hours": hours_by_part,
        **_plan_memory(resolved_cfg, hardware, counts, vocab_size),
    }


def _plan_memory(cfg: Config, hardware: Hardware, counts: ParameterCounts, vocab_size: int) -> dict:
    """Return the entries of `plan` on the memory of a GPU and the size of a checkpoint."""
    ranks, card = hardware.world_size, hardware.card
    stage = deepspeed_config(cfg, ranks)["zero_optimization"]["stage"]
    memory_by_stage = {
        s: estimate.estimate_memory(cfg, ranks, card, counts, vocab_size, stage=s) for s in range(4)
    }
    limit = estimate.get_memory_limit(card, ranks)
    return {
        "zero_stage": stage,
        "memory": memory_by_stage[stage],
        "limit": limit,
        "fits": memory_by_stage[stage].total <= limit,
        "memory_by_stage": memory_by_stage,
        "checkpoint_bytes": estimate.estimate_checkpoint_bytes(counts, stage),
    }


def make_table(costs: dict, cfg: Config) -> Table:
    """Return the costs that `plan` returns as a table."""
    from rich.table import Table

    table = Table(title=f"Plan of {cfg.name}", show_header=False, title_justify="left")
    for rows in (_model_rows(costs, cfg), _work_rows(costs, cfg), _memory_rows(costs)):
        for row in rows:
            table.add_row(*row)
        table.add_section()
    return table


def _model_rows(costs: dict, cfg: Config) -> list[tuple[str, str]]:
    from lm.data.sources.mixture import source_shares

    hardware = costs["hardware"]
    ranks = f"{hardware.world_size} × {hardware.card.name}"
    shares = {} if cfg.data.mixture is None else source_shares(cfg.data)
    mixer_note = "is not imported by plan, which counts a householder mixer instead"
    return [
        ("parameters", f"{costs['parameters'] / 1e6:,.1f} M"),
        ("… without embedding", f"{costs['parameters_without_embedding'] / 1e6:,.1f} M"),
        ("vocabulary", f"{costs['vocab_size']:,}"),
        *(("mixer", f"{name} {mixer_note}") for name in costs["custom_mixers"]),
        *(("init from", line) for line in costs["init_from"]),
        ("ranks (GPUs)", ranks),
        ("sequences per update", f"{costs['sequences_per_step']:,} of {cfg.data.seq_len:,} tokens"),
        ("tokens per update", f"{costs['tokens_per_step']:,}"),
        ("tokens trained on", f"{_format_count(costs['tokens'])} in {cfg.train.steps:,} updates"),
        *((f"source {name}", f"{share:.2%} of the sequences") for name, share in shares.items()),
        *(("optimizer", line) for line in costs["optimizer"]),
    ]


def _format_count(count: float) -> str:
    """Return a number of tokens as text: 1e8 or more in billions, such as 2.517 B."""
    return f"{count / 1e9:,.3f} B" if count >= 1e8 else f"{count:,.0f}"


def _work_rows(costs: dict, cfg: Config) -> list[tuple[str, str]]:
    evaluations = costs["evaluations"]
    label = "FLOPs per token" + ("" if evaluations is None else f", evaluations = {evaluations:g}")
    flops = f"{costs['flops_per_token'] / 1e9:,.3f} G  ({costs['flops']:.2e} in all)"
    rows = [(label, flops), *_hour_rows(costs, cfg)]
    return [*rows, ("checkpoint", f"{costs['checkpoint_bytes'] / GIB:,.2f} GiB")]


def _hour_rows(costs: dict, cfg: Config) -> list[tuple[str, str]]:
    """Return the rows of the hours: the sum, and each part with its origin."""
    hardware, hours_by_part = costs["hardware"], costs["hours"]
    if hours_by_part is None:
        reason = "for a CPU"
        if hardware.card.on_gpu:
            layers = costs["layers"]
            slow_count = len([*layers.loop, *layers.iterated, *layers.unmeasured])
            reason = f"because no speed was measured for {slow_count} of the layers"
        return [("hours", f"unknown {reason}: train a few updates, which logs tokens/s")]
    peak_tflops = hardware.card.peak[cfg.train.precision] / 1e12
    share = f"{hardware.utilisation:.0%} of {peak_tflops:g} TFLOP/s"
    origins = {
        "matrix products": f"at {share} (--utilisation)",
        "sequential kernel": "measured with untrained weights on an H100",
    }
    passes = ""
    if cfg.train.adversarial_noise:
        at_least = "at least " if cfg.can_end_stage_early else ""
        passes = f", with two passes in {at_least}{cfg.adversarial_updates:,} updates"
    rows = [("hours", f"{sum(hours_by_part.values()):,.2f}{passes}")]
    for part, hours in hours_by_part.items():
        if hours:
            rows.append((f"… {part}", f"{hours:,.2f} {origins[part]}"))
    return rows


# Fields of `estimate.Memory` → labels in the table.
MEMORY_LABELS = {
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


def _memory_rows(costs: dict) -> list[tuple[str, str]]:
    """Return the rows of memory by part and by ZeRO stage, and advice if the run does not fit."""
    memory, card = costs["memory"], costs["hardware"].card
    # The backward of a layer and the loss do not happen at the same time.
    part_outside_peak = "working" if memory.working < memory.loss else "loss"
    rows = []
    for name, label in MEMORY_LABELS.items():
        if size := getattr(memory, name):
            note = " (not part of the peak)" if name == part_outside_peak else ""
            rows.append((f"memory: {label}", f"{_format_bytes(size)}{note}"))
    for stage, stage_memory in costs["memory_by_stage"].items():
        margin = costs["limit"] - stage_memory.total
        verdict = "fits" if margin >= 0 else f"{_format_bytes(-margin)} too much"
        verdict += ", as configured" if stage == costs["zero_stage"] else ""
        text = f"{_format_bytes(stage_memory.total)} (estimate): {verdict}"
        rows.append((f"memory per GPU, ZeRO-{stage}", text))
    limit = f"{_format_bytes(costs['limit'])} per rank"
    if card.on_gpu:
        limit = f"{_format_bytes(costs['limit'])} of {_format_bytes(card.memory)} ({card.name})"
    rows.append(("memory limit", limit))
    if not costs["fits"]:
        rows.append(("to make it fit", HOW_TO_FIT))
    return rows


def _format_bytes(count: float) -> str:
    """Return bytes as text in GiB, or in MiB below 0.1 GiB."""
    return f"{count / GIB:,.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:,.2f} MiB"
