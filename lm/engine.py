"""DeepSpeed: initialise, micro-step, accumulation, schedule, clip; only this file imports it."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
import signal
import socket
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist

from lm.config import Config, ConfigError, Optim
from lm.errors import UserError

MOST_RANKS = 1_000_000


class TrainingError(UserError, RuntimeError):
    """Training cannot go on; the message says at which step and what is left."""


class Preempted(TrainingError):
    """A signal has stopped the run, which is saved."""

    exit_code = 75  # EX_TEMPFAIL: the launch scripts queue such a run again


@dataclass(frozen=True)
class Ranks:
    """This process among its peers."""

    rank: int
    world_size: int
    device: torch.device
    objects: Any = None  # a gloo group that may wait for days, for what rank 0 does alone

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        torch_dist.barrier()

    def first(self, fn, *args):
        """Rank 0 calls fn; every rank gets its result, or raises its error."""
        box: list[Any] = [None, None]
        if self.is_main:
            try:
                box[0] = fn(*args)
            except Exception as e:
                box[1] = e
                if self.world_size > 1:
                    box[1] = _sendable(e)
        if self.world_size > 1:
            torch_dist.broadcast_object_list(box, src=0, group=self.objects)
        if box[1] is not None:
            raise box[1]
        return box[0]

    def sum(self, *values: float) -> list[float]:
        """Element-wise sum over ranks, in fp64."""
        t = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch_dist.all_reduce(t)
        return t.tolist()

    def gather(self, t: torch.Tensor) -> torch.Tensor:
        """Tensors of equal shape from all ranks, concatenated along the last dimension."""
        parts = [torch.empty_like(t) for _ in range(self.world_size)]
        torch_dist.all_gather(parts, t.contiguous())
        return torch.cat(parts, dim=-1)


def _sendable(error: Exception) -> Exception:
    """The error, or a plain one that says the same where it cannot be pickled."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(repr(error))


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _import_deepspeed():
    """DeepSpeed, without the chatter and the compilation that a CPU would bring."""
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    warnings.filterwarnings("ignore", module="deepspeed")
    import deepspeed
    import deepspeed.ops
    from deepspeed.utils import logger

    logger.setLevel("WARNING")
    # It would be compiled for 90 s at start, and nothing is lost without it on one host.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def deepspeed_facts() -> dict:
    """DeepSpeed's version, and which operations of its own it could compile here."""
    deepspeed = _import_deepspeed()
    possible = deepspeed.ops.__compatible_ops__
    return {
        "version": deepspeed.__version__,
        "operations": sorted(name for name, works in possible.items() if works),
    }


def consolidate_zero(folder: Path, tag: str) -> dict[str, torch.Tensor]:
    """The fp32 weights of a ZeRO checkpoint (stages 1 to 3) under the model's own names."""
    _import_deepspeed()
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=tag)


def launched() -> tuple[int, int, int]:
    """(rank, number of ranks, rank on this host) as a launcher has put them into RANK, WORLD_SIZE
    and LOCAL_RANK of the environment; (0, 1, 0) where it has not.

    Raises:
        ConfigError: one of them is no such number, RANK is there without WORLD_SIZE, or Slurm has
            started several tasks without telling them their RANK: each would be a run of its own,
            all in one run directory.
    """
    if "RANK" not in os.environ and (tasks := os.environ.get("SLURM_STEP_NUM_TASKS", "1")) != "1":
        raise ConfigError(
            f"srun has started {tasks} tasks (SLURM_STEP_NUM_TASKS) but no RANK is set: submit"
            " launch/slurm.sbatch, which tells each task its rank, or start one task, srun -n 1"
        )
    if "RANK" in os.environ and "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            "the environment has RANK but no WORLD_SIZE: a launcher sets both; unset RANK to start"
            " one process"
        )
    world = _from_environment("WORLD_SIZE", 1, 1, MOST_RANKS)
    rank = _from_environment("RANK", 0, 0, world - 1)
    return rank, world, _from_environment("LOCAL_RANK", 0, 0, MOST_RANKS - 1)


def _from_environment(name: str, default: int, least: int, most: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        raise ConfigError(
            f"{name} is {text!r} in the environment: it must be a whole number from {least} to"
            f" {most}, as a launcher sets it; without a launcher unset it"
        )
    return value


def start(cfg: Config) -> Ranks:
    """Join the process group; alone when no launcher has set RANK. Also fixes seed and threads."""
    on_gpu = torch.cuda.is_available()
    launched()  # refused before anything is set
    if "RANK" not in os.environ:  # DeepSpeed looks for mpi4py otherwise
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ["MASTER_PORT"] = str(_free_port())
    rank, world, local_rank = launched()
    if cfg.train.threads:
        torch.set_num_threads(cfg.train.threads)
    deepspeed = _import_deepspeed()
    if on_gpu:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    deepspeed.init_distributed(
        "nccl" if on_gpu else "gloo",
        timeout=timedelta(seconds=cfg.engine.timeout_s),
        auto_mpi_discovery=False,
        verbose=False,
    )
    torch.manual_seed(cfg.seed)
    days = timedelta(days=7)
    objects = torch_dist.new_group(backend="gloo", timeout=days) if world > 1 else None
    return Ranks(rank, world, device, objects)


def stop() -> None:
    """Leave the process group."""
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()


def lr_factor(optim: Optim, steps: int, update: int) -> float:
    """Learning rate of an update as a fraction of the peak.

    Linear warm-up to the peak at update W, then cosine (or linear) to min_lr at update `steps`.

    Args:
        update: 1 for the first.
    """
    warmup = optim.warmup * steps if optim.warmup < 1 else optim.warmup
    warmup = min(max(1, round(warmup)), steps)
    if update <= warmup:
        return update / warmup
    floor = optim.min_lr / optim.lr
    done = min(1.0, (update - warmup) / max(1, steps - warmup))
    if optim.schedule == "constant":
        return 1.0
    shape = 0.5 * (1 + math.cos(math.pi * done)) if optim.schedule == "cosine" else 1 - done
    return floor + (1 - floor) * shape


def decays(name: str) -> bool:
    """Whether weight decay acts on a parameter: not on A_log, D, biases, norms and the gains of
    weight normalisation."""
    *path, leaf = name.split(".")
    owner = path[-1] if path else ""
    kept = leaf in ("A_log", "D", "gain", "dt_bias") or leaf.startswith("bias")
    return not (kept or "norm" in owner)


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """AdamW groups: with and without decay."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if decays(n)], "weight_decay": weight_decay},
        {"params": [p for n, p in named if not decays(n)], "weight_decay": 0.0},
    ]


def _merge(base: dict, over: dict) -> dict:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def deepspeed_config(cfg: Config, world_size: int) -> dict:
    """The DeepSpeed JSON that our YAML means, with `engine.deepspeed` merged over it.

    Raises:
        ConfigError: engine.deepspeed names a file that is missing or is no JSON mapping, or holds
            what the config decides otherwise or DeepSpeed cannot take.
    """
    t = cfg.train
    config = {
        "train_micro_batch_size_per_gpu": t.micro_batch_size,
        "gradient_accumulation_steps": t.grad_accum_steps,
        "train_batch_size": t.micro_batch_size * t.grad_accum_steps * world_size,
        "gradient_clipping": cfg.optim.grad_clip,
        "zero_optimization": {
            "stage": cfg.engine.zero_stage,
            "overlap_comm": torch.cuda.is_available(),
            "contiguous_gradients": True,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    if t.precision == "bf16":  # fp32 weights; matrix products in bf16
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    over = cfg.engine.deepspeed
    if isinstance(over, str):
        try:
            over = json.loads(Path(over).read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:  # ValueError: no JSON, no UTF-8
            raise ConfigError(f"engine.deepspeed: cannot read {over} as JSON: {e}") from None
        if not isinstance(over, dict):
            raise ConfigError(
                f"engine.deepspeed: {cfg.engine.deepspeed} must hold a mapping of keys to values"
            )
    merged = _merge(config, over or {})
    for key in (
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "train_batch_size",
    ):
        if merged[key] != config[key]:
            raise ConfigError(
                f"engine.deepspeed sets {key} to {merged[key]!r}, the config means {config[key]}:"
                " set train.micro_batch_size and train.grad_accum_steps instead"
            )
    zero = merged["zero_optimization"]
    if not isinstance(zero, dict):
        raise ConfigError(
            f"engine.deepspeed sets zero_optimization to {zero!r}: it must be a mapping, as in"
            " {zero_optimization: {stage: 3}}"
        )
    if zero["stage"] not in (0, 1, 2, 3, "auto") or isinstance(zero["stage"], bool):
        raise ConfigError(
            f"engine.deepspeed sets the stage of zero_optimization to {zero['stage']!r}: it must be"
            " one of 0, 1, 2, 3"
        )
    if '"auto"' in json.dumps(merged):
        raise ConfigError(
            'engine.deepspeed holds "auto", which only the HuggingFace Trainer fills in: give'
            " numbers, or leave the key out"
        )
    return merged


def check_contraction(cfg: Config, config: dict) -> None:
    """Raises ConfigError where `log.contraction` has no blocks to look into.

    Args:
        config: what `deepspeed_config` has made of cfg.
    """
    if not cfg.log.contraction:
        return
    if cfg.model.name != "fprnn":
        raise ConfigError(
            f"log.contraction is for model.name fprnn: {cfg.model.name} has no fixed point"
        )
    if config["zero_optimization"]["stage"] == 3:
        raise ConfigError(
            "log.contraction looks inside the blocks, which ZeRO-3 has partitioned away: use"
            " zero_stage 0, 1 or 2 with it"
        )


class Engine:
    """A model under DeepSpeed: one `step` is one update, over grad_accum_steps micro-batches."""

    def __init__(self, cfg: Config, model: torch.nn.Module, ranks: Ranks):
        deepspeed = _import_deepspeed()
        self.cfg, self.ranks = cfg, ranks
        self.stop_asked = False  # on this rank, by a signal
        self.stopping = False  # agreed by all ranks, after the last update
        self.config = deepspeed_config(cfg, ranks.world_size)
        self.zero_stage = self.config["zero_optimization"]["stage"]
        self.losses_only = cfg.model.name == "fprnn"
        if cfg.model.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.zero_stage == 3 and cfg.model.name == "fprnn":
            # The number of iterations differs between ranks; a leaf is gathered once, whole.
            from deepspeed.utils import set_z3_leaf_modules

            from lm.model.blocks import BLOCKS

            set_z3_leaf_modules(model, [BLOCKS[cfg.model.block]])
        o = cfg.optim
        optimizer = torch.optim.AdamW(
            parameter_groups(model, o.weight_decay), lr=o.lr, betas=tuple(o.betas), eps=o.eps,
            fused=True if ranks.device.type == "cuda" else None,
        )  # fmt: skip
        self.deepspeed, self.optimizer, _, _ = deepspeed.initialize(
            model=model.to(ranks.device),
            optimizer=optimizer,
            lr_scheduler=lambda opt: torch.optim.lr_scheduler.LambdaLR(
                opt, lambda done: lr_factor(o, cfg.train.steps, done + 1)
            ),
            config=self.config,
        )

    def stop_on_signals(self) -> None:
        """From now on SIGTERM and SIGUSR1 ask for a stop after the current update (launchers send
        them before a kill, and may repeat them)."""
        numbers = (signal.SIGTERM, signal.SIGUSR1)

        def ask(*_):
            self.stop_asked = True
            for number in numbers:  # else a repeated one kills while Python takes itself down
                signal.signal(number, signal.SIG_IGN)

        for number in numbers:
            signal.signal(number, ask)

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        return self.deepspeed.optimizer.param_groups[0]["lr"]

    def forward(self, batch: dict[str, torch.Tensor]):
        """input_ids, labels (b,l), labels already shifted → the model's output, with its loss."""
        batch = {k: v.to(self.ranks.device, non_blocking=True) for k, v in batch.items()}
        extra = {"loss_only": True} if self.losses_only else {}
        return self.deepspeed(
            input_ids=batch["input_ids"],
            labels=batch["labels"],
            shift_labels=batch["labels"],
            **extra,
        )

    def step(self, batches) -> tuple[float, float, list]:
        """One update. batches: an iterable of grad_accum_steps micro-batches.

        Returns:
            mean loss over all ranks and micro-batches, the gradient norm before clipping, and the
            FixedPointStats of each micro-batch (empty for a baseline).
        Raises:
            TrainingError: the loss is NaN or infinite on some rank; no weight has moved.
        """
        self.deepspeed.train()
        total, stats = torch.zeros((), device=self.ranks.device), []
        count = self.cfg.train.grad_accum_steps
        for i, batch in enumerate(batches):
            output = self.forward(batch)
            total += output.loss.detach().float() / count
            if getattr(output, "fixed_point", None) is not None:
                stats.append(output.fixed_point)
            self.deepspeed.backward(output.loss)
            if i < count - 1:
                self.deepspeed.step()
        loss, asked = self.ranks.sum(total.item(), self.stop_asked)
        loss, self.stopping = loss / self.ranks.world_size, asked > 0
        if not math.isfinite(loss):
            raise TrainingError(f"the loss is {loss}")
        norm = self._norm_of_plain_gradients() if self.zero_stage == 0 else None
        self.deepspeed.step()
        if norm is None:
            norm = float(self.deepspeed.get_global_grad_norm())
        if not math.isfinite(norm):
            raise TrainingError(f"the gradient norm is {norm} (the loss was {loss:.4f})")
        return loss, norm, stats

    def close(self) -> None:
        """The last call on every rank: nothing that the peers sent each other is still under way.

        ZeRO-3 fetches parameters ahead; a process that ends with such a fetch pending may abort.
        """
        if self.zero_stage == 3:
            self.deepspeed.empty_partition_cache()
        self.ranks.barrier()

    def contraction(self, batch: dict[str, torch.Tensor]) -> dict[str, list[float]]:
        """Per layer, the mean over a micro-batch of ‖I − Q‖ and ‖∂f/∂y‖ (`log.contraction`)."""
        model = self.deepspeed.module
        mixing, lipschitz = model.backbone.contraction(batch["input_ids"].to(self.ranks.device))
        return {
            "mixing_norm": [round(v, 4) for v in mixing.float().mean(-1).tolist()],
            "lipschitz": [round(v, 4) for v in lipschitz.float().mean(-1).tolist()],
        }

    def _norm_of_plain_gradients(self) -> float:
        grads = [p.grad for p in self.deepspeed.module.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(grads).item()

    @torch.no_grad()
    def validate(self, batches: list[dict[str, torch.Tensor]], progress=None) -> dict[str, float]:
        """Mean loss and perplexity over all targets of all ranks' micro-batches."""
        self.deepspeed.eval()
        nll = count = 0.0
        for i, batch in enumerate(batches):
            output = self.forward(batch)
            targets = (batch["labels"] != -100).sum().item()
            if targets:
                nll += output.loss.item() * targets
                count += targets
            if progress:
                progress(i + 1, len(batches))
        nll, count = self.ranks.sum(nll, count)
        loss = nll / max(1.0, count)
        return {"loss": loss, "perplexity": math.exp(min(loss, 700)), "tokens": int(count)}
