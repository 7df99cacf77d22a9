"""The log of a run: metrics.jsonl, and wandb and TensorBoard where they are asked for."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TextIO, TypeVar

from lm.common.console import say
from lm.common.files import write_text, writing
from lm.config.schema import Run
from lm.runs.metrics import (
    OTHER_SOLUTION_MARK,
    SHARES,
    find_other_solutions,
    format_marked_iterations,
    iter_metrics,
)
from lm.runs.run_dir import RunDir

# Where wandb and TensorBoard show a record's key; one that is not here is of the training.
GROUPS = {
    "solver": ("adjoint", "evaluations", "probe", *SHARES, "residual"),
    "time": ("breakdown", "checkpoint", "imbalance", "mfu", "seconds", "spent", "tokens_per_s"),
    "validation": ("baselines", "over_lengths"),
    "data": ("curriculum", "data_epochs", "data_share"),
}
NAMES = {key: f"{group}/{key}" for group, keys in GROUPS.items() for key in keys}
NAMES |= {"valid": "validation", "validation": "validation"}
MOST_LAYERS = 6  # whose numbers are shown one by one


def describe_record(record: dict, num_iters: dict | None = None) -> str:
    """A training record as one line: what a person watches.

    Args:
        num_iters: ℓ* of the layers, as the record of the last probe has it.
    """
    parts = [f"loss {record['loss']:.3f}"]
    if "perplexity" in record:
        parts.append(f"perplexity {record['perplexity']:,.1f}")
    if "accuracy" in record:
        parts.append(f"acc {record['accuracy']:.3f}")
    parts.append(f"lr {record['lr']:.1e}")
    parts.append(f"|g| {record['grad_norm']:.2f}")
    if num_iters:
        parts.append(f"ℓ* {format_iterations(num_iters)}")
    if "evaluations" in record:
        parts.append(f"evaluations {format_layers(record['evaluations'])}")
        for name in SHARES:
            if share := max(record.get(name, [0.0])):
                parts.append(f"{name} {share:.2%}")
    parts.append(f"{record['tokens_per_s']:,.0f} tokens/s")
    if "mfu" in record:
        parts.append(f"MFU {record['mfu']:.1%}")
    return "  ".join(parts)


def format_layers(values: list[float]) -> str:
    """A number of each layer, such as "8.6 4.1"; of many layers "5.2 (2.1 to 9.8)", their mean and
    range."""
    if len(values) <= MOST_LAYERS:
        return " ".join(f"{v:.1f}" for v in values)
    return f"{sum(values) / len(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def format_iterations(num_iters: dict) -> str:
    """ℓ* of the layers as `format_layers` has it, marked where it is of another solution."""
    if len(num_iters["mean"]) <= MOST_LAYERS:
        return " ".join(format_marked_iterations(num_iters))
    return format_layers(num_iters["mean"]) + OTHER_SOLUTION_MARK * any(
        find_other_solutions(num_iters)
    )


def probe_iterations(record: dict) -> dict | None:
    """ℓ* of the layers, of a record that has a probe; else None."""
    return record["probe"]["num_iters"] if "probe" in record else None


def iterations_suffix(record: dict) -> str:
    """ℓ* of each layer, of a record that has a probe."""
    num_iters = probe_iterations(record)
    return "" if num_iters is None else f"  ℓ* {format_iterations(num_iters)}"


def flatten_record(record: dict) -> dict[str, float]:
    """Return the numbers of a record under the names that wandb and TensorBoard have them by.

    Such as train/loss, validation/perplexity, time/tokens_per_s, solver/residual/layer0 and
    solver/probe/num_iters/mean/layer0. Values that are no numbers are left out.
    """
    numbers: dict[str, float] = {}

    def put(name: str, value: Any, layers: list[int] | None) -> None:
        if isinstance(value, dict):
            for key, below in value.items():
                if key != "layers":
                    put(f"{name}/{key}", below, value.get("layers", layers))
        elif isinstance(value, list):
            for layer, number in zip(layers or range(len(value)), value):
                put(f"{name}/layer{layer}", number, None)
        elif isinstance(value, int | float):
            numbers[name] = value

    for key, value in record.items():
        if key not in ("step", "layers"):
            put(NAMES.get(key, f"train/{key}"), value, record.get("layers"))
    return numbers


Result = TypeVar("Result")
OUR_STEP = "global_step"  # wandb's own step may not go back, as a resumed run and a rollback do


class Wandb:
    """Weights & Biases; a resumed run continues in the same place. wandb finds its login and mode.

    What wandb has cannot be deleted: after a rollback the records that the run has left stay, and
    those of the same updates that come after them are drawn over the same step.
    """

    def __init__(self, cfg: Run, run: RunDir, resumed_at: int):
        import wandb

        if not run.wandb_id.exists():
            write_text(run.wandb_id, uuid.uuid4().hex[:12])
        self.run = wandb.init(
            id=run.wandb_id.read_text(),
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", "fprnn"),
            name=cfg.name,
            dir=str(run),
            config=cfg.model_dump(mode="json"),
        )
        self.run.define_metric(OUR_STEP)
        self.run.define_metric("*", step_metric=OUR_STEP)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self.run.log({**numbers, OUR_STEP: step})

    def keep_until(self, step: int) -> None: ...

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    """Event files in the run directory, without what a resumed run will write again."""

    def __init__(self, cfg: Run, run: RunDir, resumed_at: int):
        self.folder = str(run.tensorboard)
        self._open(resumed_at + 1 if resumed_at else None)

    def _open(self, purge_step: int | None) -> None:
        """Open the next event file. purge_step: TensorBoard drops this and all later steps."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(self.folder, purge_step=purge_step)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def keep_until(self, step: int) -> None:
        self.writer.close()
        self._open(step + 1)

    def close(self) -> None:
        self.writer.close()


Tracker = Wandb | TensorBoard
# By the key of `log:` that asks for them.
TRACKERS: dict[str, Callable[..., Tracker]] = {"wandb": Wandb, "tensorboard": TensorBoard}


class Writer:
    """Appends records to `metrics.jsonl` and to whatever else `log:` asks for (main rank only).

    A tracker that fails, at its start or later, is told of once and left out from then on: what it
    would have shown is in metrics.jsonl.

    Args:
        resumed_at: records of later steps, written before a kill, are dropped.
    """

    def __init__(self, cfg: Run, run: RunDir, resumed_at: int = 0):
        self.run = run
        self.path = run.metrics
        self.file = self._kept_until(resumed_at)
        self.trackers: dict[str, Tracker] = {}
        for name, tracker in TRACKERS.items():
            if getattr(cfg.log, name):
                made = self._tried(name, partial(tracker, cfg, run, resumed_at))
                if made is not None:
                    self.trackers[name] = made

    def keep_until(self, step: int) -> None:
        """Drop the records of later steps, all at 0, and continue from there."""
        with writing(self.path):
            self.file.close()
        self.file = self._kept_until(step)
        for name, tracker in list(self.trackers.items()):
            self._tried(name, partial(tracker.keep_until, step))

    def _kept_until(self, step: int) -> TextIO:
        """metrics.jsonl without the records of later steps, open to go on."""
        unread = 0

        def lines() -> Iterator[str]:
            nonlocal unread
            for record in iter_metrics(self.run.path) if step else ():
                if record is None:
                    unread += 1
                elif record["step"] <= step:
                    yield json.dumps(record) + "\n"

        write_text(self.path, lines())
        if unread:
            say(
                f"note: {self.path}: {unread} line{'s' * (unread > 1)} hold{'s' * (unread == 1)} no"
                " record (cut short by a kill, or damaged): dropped"
            )
        with writing(self.path):
            return self.path.open("a", encoding="utf-8")

    def write(self, record: dict) -> None:
        """record: {"step": n, …} with numbers, lists of one number a layer, or nested mappings."""
        with writing(self.path):
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
        numbers = flatten_record(record) if self.trackers else {}
        for name, tracker in list(self.trackers.items()):
            self._tried(name, partial(tracker.log, record["step"], numbers))

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a full disk, and said when it was written
            self.file.close()
        for name, tracker in list(self.trackers.items()):
            self._tried(name, tracker.close)

    def _tried(self, name: str, do: Callable[[], Result]) -> Result | None:
        """What a tracker returns; None where it fails, and it is left out from then on."""
        try:
            return do()
        except Exception as e:
            self.trackers.pop(name, None)
            say(
                f"warning: log.{name} has failed ({type(e).__name__}: {e}): training goes on"
                f" without it, {self.path} has every record"
            )
            return None
