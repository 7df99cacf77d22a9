"""DeepSpeed: initialise, micro-step, accumulation, schedule, clip; only this file imports it."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as torch_dist

from lm.common.errors import (
    ConfigError,
    Diverged,
    DivergedOnOneRank,
    MachineError,
    TrainingError,
    UserError,
)
from lm.common.files import without_wildcards
from lm.common.heap import keep_freed_memory
from lm.common.ranks import Ranks, check_address, read_launcher_ranks
from lm.config.schema import Config
from lm.model.batch import IGNORED
from lm.model.state import Adversary
from lm.runs.checkpoint import read_state
from lm.runs.clock import UpdateTimes
from lm.training.deepspeed_json import bucket_size, deepspeed_config
from lm.training.optim import lr_factor, optimizer

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

    from lm.model.batch import FixedPointReport


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _import_deepspeed():
    """DeepSpeed, without the chatter and the compilation that a CPU would bring."""
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    warnings.filterwarnings("ignore", module="deepspeed")
    # DeepSpeed calls collectives that torch has given other names.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    import deepspeed
    import deepspeed.ops
    from deepspeed.utils import logger

    logger.setLevel("WARNING")
    if not torch.cuda.is_available():
        # It would be compiled for 90 s at start, and nothing is lost without it on one host. On a
        # GPU this dictionary is not touched: its first use looks for every compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def deepspeed_version() -> str:
    """DeepSpeed's version; importing it is the test."""
    return _import_deepspeed().__version__


def read_zero(path: Path) -> dict:
    """A file of a verified checkpoint that DeepSpeed has filled: `read_state`, with the classes of
    DeepSpeed that there are in it.

    Raises:
        CheckpointError: it holds something else.
    """
    _import_deepspeed()
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    classes = (LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address)
    return read_state(path, classes)


def consolidate_zero(folder: Path, tag: str) -> dict[str, torch.Tensor]:
    """The fp32 weights of a ZeRO checkpoint (stages 1 to 3) under the model's own names.

    Raises:
        CheckpointError: a file of it holds what `read_zero` does not read.
    """
    _import_deepspeed()
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    for file in (Path(folder) / tag).glob("*.pt"):
        read_zero(file)  # DeepSpeed would run whatever is in it

    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        without_wildcards(Path(folder) / tag) as path,
    ):
        return get_fp32_state_dict_from_zero_checkpoint(str(path.parent), tag=path.name)


def start(cfg: Config) -> Ranks:
    """Join the process group; alone when no launcher has set RANK. Also fixes seed, threads and, on
    a CPU, what becomes of freed memory."""
    on_gpu = torch.cuda.is_available()
    read_launcher_ranks()  # refused before anything is set
    if "RANK" not in os.environ:  # DeepSpeed looks for mpi4py otherwise
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = str(_free_port())
    check_address()
    rank, world, local_rank = read_launcher_ranks()
    if cfg.train.threads:
        torch.set_num_threads(cfg.train.threads)
    if not on_gpu:
        keep_freed_memory()
    deepspeed = _import_deepspeed()
    if on_gpu:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    backend = "nccl" if on_gpu else "gloo"
    if world == 1:
        _meet_nobody(backend, _limit_of_collectives(cfg))
    try:
        deepspeed.init_distributed(
            backend,
            timeout=_limit_of_collectives(cfg),
            auto_mpi_discovery=False,
            verbose=False,
        )
    except torch_dist.DistError as e:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise MachineError(f"the ranks did not meet at {place}: {str(e).splitlines()[0]}") from e
    torch.manual_seed(cfg.seed)
    days = timedelta(days=7)
    objects = torch_dist.new_group(backend="gloo", timeout=days) if world > 1 else None
    return Ranks(rank, world, device, objects)


def _meet_nobody(backend: str, timeout: timedelta) -> None:
    """Make the process group of a single process, which DeepSpeed then uses.

    torch's own rendezvous would listen on every interface of the host, and gloo on the one that
    the host's name resolves to.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    store = torch_dist.HashStore()
    torch_dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def _limit_of_collectives(cfg: Config) -> timedelta:
    """A tenth longer than the watchdog's, which leaves stacks behind, and does not watch all."""
    return timedelta(seconds=1.1 * cfg.engine.timeout_s)


def _limit_collectives(timeout: timedelta, but) -> None:
    """Have every process group give up after so long, DeepSpeed's own among them, which it makes
    with torch's default; but for the one whose waits may last."""
    if not torch_dist.is_initialized():
        return
    for group in list(torch_dist.distributed_c10d._world.pg_map):
        if group is not but:
            torch_dist.distributed_c10d._set_pg_timeout(timeout, group)


def stop() -> None:
    """Leave the process group."""
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()


NO_TARGET = f"every label of its sequences is {IGNORED}, which is no target"
Batch = dict[str, torch.Tensor]  # of a micro-batch: input_ids, labels (b,l)


class Update(NamedTuple):
    """What one update found.

    Args:
        loss: mean over all ranks and micro-batches. norm: of the gradient, before clipping.
        stats: the FixedPointReport of each micro-batch of this rank; none of a baseline.
        stopping: some rank was asked to stop.
    """

    loss: float
    norm: float
    stats: list
    stopping: bool


def _slice(address) -> slice:
    """Of DeepSpeed's fragment_address."""
    return slice(address.start, address.start + address.numel)


@contextlib.contextmanager
def _own_keys_named(cfg: Config) -> Iterator[None]:
    """Within the block what DeepSpeed says of keys that it does not take is a ConfigError, where a
    configuration has keys of DeepSpeed's own."""
    try:
        yield
    except (RuntimeError, UserError):  # of devices and ranks; a sentence already
        raise
    except Exception as e:
        if not cfg.engine.deepspeed:
            raise
        said = " ".join(line.strip() for line in str(e).splitlines()[:3])
        raise ConfigError(
            f"DeepSpeed does not start with what engine.deepspeed says: {type(e).__name__}: {said}"
        ) from e


class _Files:
    """Stands in for DeepSpeed's checkpoint engine: keeps what is to be written, and runs nothing of
    what it reads."""

    def __init__(self):
        self.files: dict[str, object] = {}

    def load(self, path: str, map_location=None) -> dict:
        return read_zero(Path(path))

    def save(self, state_dict, path: str) -> None:
        self.files[Path(path).name] = state_dict

    def is_data_parallel_writer(self, rank: int) -> bool:
        return rank == 0

    def preserves_storage_sharing(self) -> bool:
        return False  # else DeepSpeed copies what we copy anyhow

    def is_decoupled(self) -> bool:
        return False

    def makedirs(self, *_, **__) -> None: ...
    def create(self, _) -> None: ...
    def commit(self, _) -> None: ...


class Engine:
    """A model under DeepSpeed: one `step` is one update, over any number of micro-batches."""

    def __init__(
        self, cfg: Config, model: torch.nn.Module, ranks: Ranks, config: dict | None = None
    ):
        """config: DeepSpeed's JSON; None: it is made of cfg."""
        deepspeed = _import_deepspeed()
        self.cfg, self.ranks = cfg, ranks
        # A copy: an engine that is built again after a rollback begins with what was checked.
        self.config = copy.deepcopy(config) if config else deepspeed_config(cfg, ranks.world_size)
        zero = self.config["zero_optimization"]
        self.zero_stage = zero["stage"]
        counts = [p.numel() for p in model.parameters()]
        zero.setdefault("reduce_bucket_size", bucket_size(sum(counts), max(counts)))
        if cfg.model.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.zero_stage == 3:
            # The number of iterations differs between ranks; a leaf is gathered once, whole.
            from deepspeed.utils import set_z3_leaf_modules

            from lm.model.stack import FPRNNLayer

            blocks = (m.block for m in model.modules() if isinstance(m, FPRNNLayer))
            set_z3_leaf_modules(model, list(dict.fromkeys(map(type, blocks))))
        o = cfg.optim
        self.base_optimizer = optimizer(model, o, ranks.device.type == "cuda")
        # Each group's peak, asked now: a checkpoint that is loaded puts its own there.
        self.peaks = [group["lr"] for group in self.base_optimizer.param_groups]
        with _own_keys_named(cfg):
            self.deepspeed, _, _, self.scheduler = deepspeed.initialize(
                model=model.to(ranks.device),
                optimizer=self.base_optimizer,
                lr_scheduler=lambda opt: torch.optim.lr_scheduler.LambdaLR(
                    opt, lambda done: lr_factor(o, cfg.train.steps, done + 1)
                ),
                config=self.config,
            )
        kappa = cfg.train.adversarial_noise
        self._adversary = Adversary(self.deepspeed.module, kappa) if kappa else None
        self._solves = hasattr(model, "passes") and bool(model.fixed_point_blocks())
        self._noise_generators: list[torch.Generator] | None = None  # of this micro-batch
        self.times = UpdateTimes(ranks.device)
        _limit_collectives(_limit_of_collectives(cfg), ranks.objects)

    @property
    def lr(self) -> float:
        """Learning rate of the next update, before a parameter's own factor."""
        peak = self.cfg.optim.lr
        # Of a group without one, where there is such: the number is what it was to the last bit.
        of_group, group = max(
            zip(self.peaks, self.deepspeed.optimizer.param_groups),
            key=lambda pair: pair[0] == peak,
        )
        return group["lr"] * (peak / of_group)

    def forward(self, batch: Batch) -> ModelOutput:
        """input_ids, labels (b,l), labels already shifted → the model's output, with its loss."""
        batch = {k: v.to(self.ranks.device, non_blocking=True) for k, v in batch.items()}
        timed: contextlib.AbstractContextManager = contextlib.nullcontext()
        if self._solves:
            timed = self.deepspeed.module.passes(
                solve_context=self.times.solving, generators=self._noise_generators
            )
        with timed:
            return self.deepspeed(
                input_ids=batch["input_ids"],
                labels=batch["labels"],
                shift_labels=batch["labels"],
                loss_only=True,
            )

    def step(
        self,
        batches: list[Batch],
        stop: bool = False,
        alive: Callable[[], None] = lambda: None,
        against: bool = False,
    ) -> Update:
        """One update.

        Args:
            batches: its micro-batches, on every rank as many as `train.accumulation` says.
            stop: this rank was asked to stop. alive: called after each micro-batch.
            against: each micro-batch has a second pass, with `train.adversarial_noise`; each of the
                two gives half of the gradient.
        Raises:
            Diverged: the loss or its gradient is NaN or infinite on some rank: this engine is
                spoilt.
        """
        self.deepspeed.train()
        total, stats = torch.zeros((), device=self.ranks.device), []
        shares = self._shares(batches)
        adversary = self._adversary if against else None
        for i, (batch, share) in enumerate(zip(batches, shares)):
            is_last = i == len(batches) - 1
            self._noise_generators = self._make_noise_generators(i, len(batch["input_ids"]))
            with adversary.first_pass() if adversary else contextlib.nullcontext():
                loss, report = self._pass(batch, share)
            if report is not None:
                stats.append(report)
            total += loss.detach().float() / len(batches)
            if adversary is None:
                self._backward(loss, is_last)
            else:
                self._backward(loss / 2, False)
                self._backward(self._second_pass(adversary, batch, share, report is None), is_last)
            alive()
            if not is_last:
                with self.times.part("optimizer"):
                    self.deepspeed.step()
        loss, asked = self.ranks.sum(total.item(), stop)
        loss = loss / self.ranks.world_size
        if not math.isfinite(loss):
            raise Diverged(f"the loss is {loss}")
        with self.times.part("optimizer"):
            norm = self._norm_of_plain_gradients() if self.zero_stage == 0 else None
            self.deepspeed.step()
            if norm is None:
                norm = float(self.deepspeed.get_global_grad_norm())
        if not math.isfinite(norm):
            raise Diverged(f"the gradient norm is {norm} (the loss was {loss:.4f})")
        return Update(loss, norm, stats, asked > 0)

    def _make_noise_generators(self, number: int, size: int) -> list[torch.Generator] | None:
        """Make the generators of the state noise, one for each sequence of a micro-batch.

        They are seeded by (seed, update, index of the sequence in the global batch), so that a
        sequence meets the same noise on any number of ranks and in micro-batches of any size. With
        torch's own generator, which every rank seeds alike, all ranks would draw the same noise.

        Args:
            number: Micro-batches of this rank before this one, in this update.
            size: Sequences of the micro-batch.

        Returns:
            The generators; None for a model without fixed-point layers.
        """
        if not self._solves:
            return None
        first = (number * self.ranks.world_size + self.ranks.rank) * size
        update = self.deepspeed.global_steps
        generators = []
        for index in range(first, first + size):
            state = np.random.SeedSequence([self.cfg.seed, update, index]).generate_state(1, "u8")
            generators.append(torch.Generator(self.ranks.device).manual_seed(int(state[0] >> 1)))
        return generators

    def _pass(self, batch: Batch, share: float) -> tuple[torch.Tensor, FixedPointReport | None]:
        """Return the loss of a micro-batch times its share, and the report of its solves.

        Raises:
            Diverged, DivergedOnOneRank: as `_spoilt`.
        """
        try:
            with self.times.part("forward"):
                output = self.forward(batch)
                loss = output.loss * share
        except FloatingPointError as e:
            return self._spoilt(e), None
        return loss, getattr(output, "fixed_point", None)

    def _second_pass(
        self, adversary: Adversary, batch: Batch, share: float, spoilt: bool
    ) -> torch.Tensor:
        """Half of the loss against the adversary. spoilt: the first pass was, and has left no
        gradient to go along."""
        if spoilt:
            return self._spoilt(FloatingPointError("the first pass was spoilt"))
        with adversary.second_pass():
            loss, _ = self._pass(batch, share)
        return loss / 2

    def _spoilt(self, error: FloatingPointError) -> torch.Tensor:
        """A loss of NaN in the place of one that a forward pass has not come to. Its backward meets
        the other ranks as theirs do, and its sum tells them.

        Raises:
            Diverged: there are no others.
            DivergedOnOneRank: under ZeRO-3, whose forward already waits.
        """
        if self.ranks.world_size == 1:
            raise Diverged(str(error)) from None
        if self.zero_stage == 3:
            raise DivergedOnOneRank(f"rank {self.ranks.rank}: {error}") from None
        parameters = (p for p in self.deepspeed.module.parameters() if p.requires_grad)
        return sum(p.float().sum() for p in parameters) * float("nan")

    def _backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Adds to the gradient of an update.

        Args:
            is_last: of the update's passes: what the ranks have is then put together.
        Raises:
            Diverged: the gradient of a solve is NaN or infinite; of one rank among several
                DivergedOnOneRank.
        """
        self.deepspeed.set_gradient_accumulation_boundary(is_last)
        try:
            with self.times.part("backward"):
                self.deepspeed.backward(loss)
        except FloatingPointError as e:
            kind = Diverged if self.ranks.world_size == 1 else DivergedOnOneRank
            raise kind(f"rank {self.ranks.rank}: {e}") from None

    def _shares(self, batches: list[Batch]) -> list[float]:
        """Return the weight of each micro-batch's mean loss in the mean over all of them.

        It is 1, and less for a micro-batch with fewer targets (a corpus' last block), so that the
        loss does not depend on how an update is cut into micro-batches.

        Raises:
            TrainingError: No micro-batch of any rank has a target.
        """
        counts = [float((batch["labels"] != IGNORED).sum()) for batch in batches]
        (targets,) = self.ranks.sum(sum(counts))
        if not targets:
            raise TrainingError(f"an update has nothing to learn: {NO_TARGET}")
        mean = targets / (len(batches) * self.ranks.world_size)
        return [count / mean for count in counts]

    @contextlib.contextmanager
    def _in_place_of_its_files(self) -> Iterator[_Files]:
        """Within the block DeepSpeed writes and reads through `_Files`."""
        files = _Files()
        own, self.deepspeed.checkpoint_engine = self.deepspeed.checkpoint_engine, files
        try:
            yield files
        finally:
            self.deepspeed.checkpoint_engine = own

    def held(self) -> dict[str, list[torch.Tensor]]:
        """What of this rank goes into a checkpoint: "the weights", and the optimizer's moments by
        name."""
        groups = self.base_optimizer.param_groups
        stepped = [p for group in groups for p in group["params"]]  # under ZeRO flat, in fp32
        held = {"the weights": [*self.deepspeed.module.parameters(), *stepped]}
        for state in self.base_optimizer.state.values():
            for name, moment in state.items():
                if torch.is_tensor(moment):
                    held.setdefault(name, []).append(moment)
        return held

    def state_files(self, folder: Path, step: int) -> dict[str, object]:
        """What DeepSpeed would write of this rank into a checkpoint's folder, by file name. Every
        rank calls it."""
        # Else rank 0 writes a script there for which the others wait: a full disk would be an error
        # of rank 0 alone.
        self.deepspeed._copy_recovery_script = lambda _: None
        with self._in_place_of_its_files() as taken:
            self.deepspeed.save_checkpoint(
                str(folder), tag="any", client_state={"step": step}, save_latest=False
            )
        return taken.files

    def load(self, path: Path) -> None:
        """Weights, optimizer and schedule of a verified checkpoint of this `layout`.

        Raises:
            CheckpointError: a file of it holds what `read_zero` does not read.
            TrainingError: DeepSpeed could not load it.
        """
        with self._in_place_of_its_files(), without_wildcards(path) as link:
            loaded, _ = self.deepspeed.load_checkpoint(str(link.parent), tag=link.name)
        if loaded is None:
            raise TrainingError(f"DeepSpeed could not load {path}")

    def go_on(
        self, moments: dict[str, dict[str, torch.Tensor]], updates: int, adamw_steps: float
    ) -> None:
        """Go on after so many updates with moments that were gathered from other ranks or another
        ZeRO stage. The model had its weights before this engine was made.

        Args:
            moments: {"exp_avg", "exp_avg_sq": {parameter name: tensor of its shape}}.
            adamw_steps: that AdamW has made: updates, without those that were skipped.
        """
        on_gpu = self.ranks.device.type == "cuda"  # where AdamW is fused
        for flat, parts in self._optimizer_parts():
            steps = torch.tensor(adamw_steps, device=flat.device if on_gpu else "cpu")
            state = {"step": steps}
            for key, whole in moments.items():
                state[key] = torch.zeros_like(flat)
                for name, target, source in parts:
                    # Past the end of `whole` there is a partition's padding.
                    piece = whole[name].flatten()[source].to(flat)
                    state[key].view(-1)[target][: len(piece)] = piece
            self.base_optimizer.state[flat] = state
        self.deepspeed.global_steps = updates
        self.deepspeed.micro_steps = updates * self.config["gradient_accumulation_steps"]
        self.deepspeed.global_samples = updates * self.config["train_batch_size"]
        # `step` would warn: this process's optimizer has not stepped yet.
        scheduler = self.scheduler
        rates = [base * f(updates) for base, f in zip(scheduler.base_lrs, scheduler.lr_lambdas)]
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler.load_state_dict(
            scheduler.state_dict()
            | {"last_epoch": updates, "_step_count": updates + 1, "_last_lr": rates}
        )

    def _optimizer_parts(self) -> Iterator[tuple[torch.Tensor, list[tuple[str, slice, slice]]]]:
        """(a tensor that is stepped, [(parameter name, slice of that tensor, slice of the whole
        parameter)]) of this rank, as the ZeRO stage has laid them out."""
        names = {p: n for n, p in self.deepspeed.module.named_parameters()}
        optimizer = self.deepspeed.optimizer
        if self.zero_stage == 0:
            for p, name in names.items():
                yield p, [(name, slice(None), slice(None))]
        elif self.zero_stage < 3:
            groups = zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups)
            for flat, params in groups:
                mapped = [(names[p], p._hp_mapping) for p in params if p._hp_mapping is not None]
                yield (
                    flat,
                    [
                        (name, _slice(part.hp_fragment_address), _slice(part.lp_fragment_address))
                        for name, part in mapped
                    ],
                )
        else:
            parts: list[list[tuple[str, slice, slice]]]
            parts = [[] for _ in optimizer.fp32_partitioned_groups_flat]
            for p, name in names.items():
                group, start, count = optimizer.grad_position[optimizer.get_param_id(p)]
                first = self.ranks.rank * count
                own = slice(first, first + count)
                parts[group].append((name, slice(start, start + count), own))
            yield from zip(optimizer.fp32_partitioned_groups_flat, parts)

    def release(self) -> None:
        """Give up weights, gradients and optimizer: another engine takes this one's place."""
        self.deepspeed.destroy()
        self.deepspeed = self.base_optimizer = self.scheduler = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def close(self) -> None:
        """The last call on every rank: nothing that the peers sent each other is still under way.

        ZeRO-3 fetches parameters ahead; a process that ends with such a fetch pending may abort.
        """
        if self.zero_stage == 3:
            self.deepspeed.empty_partition_cache()
        self.ranks.barrier()

    def _norm_of_plain_gradients(self) -> float:
        grads = [p.grad for p in self.deepspeed.module.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(grads).item()

    @torch.no_grad()
    def validate(
        self, batches: list[Batch], progress: Callable[[int, int], None] | None = None
    ) -> dict[str, float]:
        """Return mean loss and perplexity over all targets of all ranks' micro-batches.

        Raises:
            TrainingError: There is no target.
        """
        self.deepspeed.eval()
        nll = count = 0.0
        for i, batch in enumerate(batches):
            output = self.forward(batch)
            targets = (batch["labels"] != IGNORED).sum().item()
            if targets:
                nll += output.loss.item() * targets
                count += targets
            if progress:
                progress(i + 1, len(batches))
        nll, count = self.ranks.sum(nll, count)
        if not count:
            raise TrainingError(f"a validation has nothing to measure: {NO_TARGET}")
        loss = nll / count
        return {"loss": loss, "perplexity": math.exp(min(loss, 700)), "tokens": int(count)}
