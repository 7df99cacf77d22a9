"""Costs of a run before it starts: parameters, tokens, FLOPs, hours, memory per GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lm.common.cards import GIB, SEQUENCE_S, TOKEN_S, Card, detect_gpu_name, find_card
from lm.common.errors import ConfigError
from lm.config.schema import Config
from lm.kernels.cell_arguments import fits_a_gpu
from lm.model.fields import AUTO_WINDOW
from lm.report import estimate
from lm.report.estimate import Sizes, on_the_meta_device, sizes
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
UTILISATION = 0.25  # share of the card's peak in matrix products: an assumption
EVALUATIONS = 10.0  # of a token and layer where a solve iterates: an assumption


@dataclass(frozen=True)
class Hardware:
    """Hardware that a run is planned for.

    Attributes:
        world_size: Number of GPUs.
        card: Their kind.
        utilisation: Share of the card's peak that matrix products reach.
    """

    world_size: int
    card: Card
    utilisation: float = UTILISATION


def parse_hardware(
    world_size: int, gpu: str | None = None, utilisation: float | None = None
) -> Hardware:
    """Return what the options of `fprnn plan` mean; None is the default.

    Raises:
        ConfigError: If the card is unknown, or the utilisation is above 1.
    """
    if utilisation is not None and utilisation > 1:
        raise ConfigError(
            f"--utilisation is {utilisation:g}: it is the share of the card's peak that is reached,"
            " above 0 and at most 1"
        )
    return Hardware(world_size, find_card(gpu or detect_gpu_name()), utilisation or UTILISATION)


# Work.


@dataclass(frozen=True)
class Layers:
    """Fixed-point layers of a model by how they are solved.

    Attributes:
        kernel: Solved token by token by a GPU's kernel.
        loop: Solved token by token in PyTorch or by the CPU's kernel.
        iterated: Iterated, in windows or by the paper's procedure.
    """

    kernel: list
    loop: list
    iterated: list

    @property
    def evaluations(self) -> float | None:
        """Evaluations of a token, mean over layers; None for a model without such layers."""
        by_token = len(self.kernel) + len(self.loop)
        count = by_token + len(self.iterated)
        return (by_token + len(self.iterated) * EVALUATIONS) / count if count else None


def fits_kernel(block: Any) -> bool:
    """Return whether a GPU's kernel solves the tokens of a layer one by one."""
    rank = 0 if block.centroids is not None else block.kernel_rank()
    return rank > 0 and fits_a_gpu(rank, block.config.d_inner)


def layers_of(cfg: Config, model: PreTrainedModel, on_gpu: bool) -> Layers:
    """Return the layers of a model, which may lie on the meta device.

    `auto` on a GPU is token by token if its kernel fits (`window_width` in lm/model/strategies.py).
    """
    blocks, solver = model.fixed_point_blocks(), cfg.solver.settled()
    by_token = []
    if solver["token"] != "exact":
        return Layers([], [], blocks)
    if solver["schedule"] == "sequential":
        by_token = blocks
    elif solver["schedule"] == "auto":
        by_token = [b for b in blocks if (fits_kernel(b) if on_gpu else b.mixer.has_low_rank)]
    kernel = [b for b in by_token if on_gpu and fits_kernel(b)]
    loop = [b for b in by_token if b not in kernel]
    return Layers(kernel, loop, [b for b in blocks if b not in by_token])


def settled_schedule(cfg: Config, layers: Layers) -> Config:
    """Return the configuration with the schedule that `auto` means: that of the most memory."""
    solver = cfg.solver.settled()
    if not cfg.model.has_fixed_point or (solver["token"], solver["schedule"]) != ("exact", "auto"):
        return cfg
    copy = cfg.model_copy(deep=True)
    copy.solver.schedule = f"window:{AUTO_WINDOW}" if layers.iterated else "sequential"
    return copy


def hours(cfg: Config, at: Hardware, layers: Layers, flops: float) -> dict | None:
    """Return the hours of a run by part, or None where no rate was measured.

    Args:
        cfg: The configuration.
        at: The hardware.
        layers: Fixed-point layers.
        flops: FLOPs of the run with one evaluation.
    """
    if at.card.peak is None or layers.loop or layers.iterated:
        return None
    passes = cfg.train.steps + cfg.updates_against
    peak = at.world_size * at.card.peak[cfg.train.precision]
    # One token after the other waits for launches, whatever its arithmetic.
    tokens = passes * cfg.train.accumulation(at.world_size) * cfg.data.seq_len
    by_token = TOKEN_S + SEQUENCE_S * cfg.train.micro_batch_size
    return {
        "matrix products": flops / (peak * at.utilisation) / 3600,
        "token after token": tokens * len(layers.kernel) * by_token / 3600,
    }


def plan(cfg: Config, at: Hardware | int) -> dict:
    """Return the costs of a run, by the formulas of `lm.report.estimate`.

    Builds the model on the meta device and downloads nothing.

    Args:
        cfg: The configuration.
        at: The hardware; a number means GPUs of the default card.

    Raises:
        ConfigError: As `build_model`, `model_vocab_size` and `deepspeed_config`.
    """
    if isinstance(at, int):
        at = parse_hardware(at)
    cfg, own_mixers = replace_custom_mixers(cfg)
    vocab_size = model_vocab_size(cfg)
    model = on_the_meta_device(cfg, vocab_size)
    layers = layers_of(cfg, model, at.card.on_gpu)
    solved = settled_schedule(cfg, layers)
    counted = sizes(model)
    tokens = cfg.train.steps * cfg.tokens_per_step(at.world_size)
    # An update against the adversary is a second pass.
    trained = (cfg.train.steps + cfg.updates_against) * cfg.tokens_per_step(at.world_size)
    length, evaluations = cfg.data.seq_len, layers.evaluations
    flops_per_token = model.flops_per_token(evaluations or 1, length=length)
    once = model.flops_per_token(1, length=length) * trained
    return {
        "at": at,
        "vocab_size": vocab_size,
        "own_mixers": own_mixers,
        "init_from": init_from.check(cfg, model),
        "optimizer": described_optimizer(model, cfg.optim),
        "parameters": counted.parameters,
        "parameters_without_embedding": counted.parameters - counted.embedding,
        "sequences_per_step": cfg.train.sequences(at.world_size),
        "tokens_per_step": cfg.tokens_per_step(at.world_size),
        "tokens": tokens,
        "layers": layers,
        "evaluations": evaluations,
        "flops_per_token": flops_per_token,
        "flops": flops_per_token * trained,
        "hours": hours(cfg, at, layers, once),
        **_planned_memory(solved, at, counted, vocab_size),
    }


def _planned_memory(cfg: Config, at: Hardware, counted: Sizes, vocab_size: int) -> dict:
    """Return the bytes on a GPU and on the disk."""
    stage = deepspeed_config(cfg, at.world_size)["zero_optimization"]["stage"]
    known = at.world_size, at.card, counted, vocab_size
    stages = {s: estimate.memory(cfg, *known, stage=s) for s in range(4)}
    needed, limit = stages[stage], estimate.limit(at.card, at.world_size)
    return {
        "zero_stage": stage,
        "memory": needed,
        "limit": limit,
        "fits": needed.total <= limit,
        "stages": stages,
        "checkpoint_bytes": estimate.checkpoint_bytes(counted, stage),
    }


# The table.


def describe(p: dict, cfg: Config) -> Table:
    """Return the plan as a rich table that fits on a screen.

    Args:
        p: The plan.
        cfg: The configuration.
    """
    from rich.table import Table

    table = Table(title=f"Plan of {cfg.name}", show_header=False, title_justify="left")
    for part in (_what(p, cfg), _work(p, cfg), _memory(p)):
        for row in part:
            table.add_row(*row)
        table.add_section()
    return table


def _what(p: dict, cfg: Config) -> list[tuple[str, str]]:
    """Return the rows of the model and its data."""
    from lm.data.sources.mixture import shares

    at = p["at"]
    ranks = f"{at.world_size} × {at.card.name}"
    mixed = {} if cfg.data.mixture is None else shares(cfg.data)
    mixer_note = "is not imported by a plan: counted as a householder"
    return [
        ("parameters", f"{p['parameters'] / 1e6:,.1f} M"),
        ("… without embedding", f"{p['parameters_without_embedding'] / 1e6:,.1f} M"),
        ("vocabulary", f"{p['vocab_size']:,}"),
        *(("mixer", f"{name} {mixer_note}") for name in p["own_mixers"]),
        *(("init from", line) for line in p["init_from"]),
        ("ranks (GPUs)", ranks),
        ("sequences per update", f"{p['sequences_per_step']:,} of {cfg.data.seq_len:,} tokens"),
        ("tokens per update", f"{p['tokens_per_step']:,}"),
        ("tokens trained on", f"{_amount(p['tokens'])} in {cfg.train.steps:,} updates"),
        *((f"source {name}", f"{share:.2%} of the sequences") for name, share in mixed.items()),
        *(("optimizer", line) for line in p["optimizer"]),
    ]


def _amount(count: float) -> str:
    """Return a number of tokens such as 2.517 B; smaller numbers in full."""
    return f"{count / 1e9:,.3f} B" if count >= 1e8 else f"{count:,.0f}"


def _work(p: dict, cfg: Config) -> list[tuple[str, str]]:
    """Return the rows of FLOPs, hours and the checkpoint."""
    evaluations = "" if p["evaluations"] is None else f", evaluations = {p['evaluations']:g}"
    flops = f"{p['flops_per_token'] / 1e9:,.3f} G  ({p['flops']:.2e} in all)"
    rows = [(f"FLOPs per token{evaluations}", flops), *_hours(p, cfg)]
    return [*rows, ("checkpoint", f"{p['checkpoint_bytes'] / GIB:,.2f} GiB")]


def _hours(p: dict, cfg: Config) -> list[tuple[str, str]]:
    """Return the rows of the hours: their sum, and each part with its origin."""
    at, parts = p["at"], p["hours"]
    if parts is None:
        reason = "of a CPU"
        if at.card.on_gpu:
            slow = len(p["layers"].loop) + len(p["layers"].iterated)
            reason = f"of {slow} layers that no measured kernel solves"
        return [("hours", f"not known {reason}: a run of a few updates logs its tokens/s")]
    peak = at.card.peak[cfg.train.precision] / 1e12
    origins = {
        "matrix products": f"at {at.utilisation:.0%} of {peak:g} TFLOP/s (--utilisation)",
        "token after token": "by layers solved so, measured untrained on an H100",
    }
    passes = ""
    if cfg.train.adversarial_noise:
        least = "at least " * cfg.waits
        passes = f", two passes in {least}{cfg.updates_against:,} updates"
    rows = [("hours", f"{sum(parts.values()):,.2f}, the sum of these{passes}")]
    for name, part in parts.items():
        if part:
            rows.append((f"… {name}", f"{part:,.2f} {origins[name]}"))
    return rows


PARTS = {
    "weights": "weights",
    "master": "DeepSpeed's copy of them",
    "gradients": "gradients",
    "optimizer": "optimizer's moments",
    "buffers": "DeepSpeed's buffers",
    "runtime": "CUDA, NCCL (assumed)",
    "activations": "activations",
    "working": "a layer's solve, backward",
    "loss": "logits and loss",
}


def _memory(p: dict) -> list[tuple[str, str]]:
    """Return the rows of memory by part and by ZeRO stage, and what would make the run fit."""
    needed, at = p["memory"], p["at"]
    smaller = "working" if needed.working < needed.loss else "loss"
    rows = []
    for name, label in PARTS.items():
        if size := getattr(needed, name):
            note = " (not at the same time)" if name == smaller else ""
            rows.append((f"memory: {label}", f"{_size(size)}{note}"))
    for stage, of_stage in p["stages"].items():
        left = p["limit"] - of_stage.total
        verdict = "fits" if left >= 0 else f"{_size(-left)} too much"
        verdict += ", as configured" if stage == p["zero_stage"] else ""
        row = f"{_size(of_stage.total)} (estimate): {verdict}"
        rows.append((f"memory per GPU, ZeRO-{stage}", row))
    limit = f"{_size(p['limit'])} of {_size(at.card.memory)} ({at.card.name})"
    rows.append(("memory there is", limit if at.card.on_gpu else f"{_size(p['limit'])} a rank"))
    if not p["fits"]:
        rows.append(("to make it fit", SMALLER))
    return rows


def _size(count: float) -> str:
    """Return bytes in GiB, or in MiB if they are few."""
    return f"{count / GIB:,.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:,.2f} MiB"
