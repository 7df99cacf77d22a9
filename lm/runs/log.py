"""The log of a run: metrics.jsonl, and optionally wandb and TensorBoard."""

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

# {group in wandb and TensorBoard: keys of a record}. Other keys are in the group "train".
GROUPS = {
    "solver": ("adjoint", "evaluations", "probe", *SHARES, "residual"),
    "time": ("breakdown", "checkpoint", "imbalance", "mfu", "seconds", "spent", "tokens_per_s"),
    "validation": ("baselines", "over_lengths"),
    "data": ("curriculum", "data_epochs", "data_share"),
}
# {key of a record: name in wandb and TensorBoard}; synthetic tasks log a validation as "valid".
TRACKER_NAMES = {key: f"{group}/{key}" for group, keys in GROUPS.items() for key in keys}
TRACKER_NAMES |= {"valid": "validation", "validation": "validation"}
MAX_LAYERS = 6  # for more layers, a line shows mean and range instead of all values


def describe_record(record: dict, num_iters: dict | None = None) -> str:
    """Format a training record as one line of the terminal.

    Args:
        record: The record.
        num_iters: ℓ* of each layer in the last probe.
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
    """Format one number per layer: "8.6 4.1", or as mean and range: "5.2 (2.1 to 9.8)"."""
    if len(values) <= MAX_LAYERS:
        return " ".join(f"{v:.1f}" for v in values)
    return f"{sum(values) / len(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def format_iterations(num_iters: dict) -> str:
    """Format ℓ* of the layers, marked if ℓ* belongs to another solution than the model's."""
    if len(num_iters["mean"]) <= MAX_LAYERS:
        return " ".join(format_marked_iterations(num_iters))
    mark = OTHER_SOLUTION_MARK if any(find_other_solutions(num_iters)) else ""
    return format_layers(num_iters["mean"]) + mark


def probe_iterations(record: dict) -> dict | None:
    """Return ℓ* of the layers if the record has a probe, or None."""
    return record["probe"]["num_iters"] if "probe" in record else None


def iterations_suffix(record: dict) -> str:
    """Format ℓ* of the layers for the end of a line; "" if the record has no probe."""
    num_iters = probe_iterations(record)
    return "" if num_iters is None else f"  ℓ* {format_iterations(num_iters)}"


def flatten_record(record: dict) -> dict[str, float]:
    """Return the numbers of a record by their names in wandb and TensorBoard.

    Examples are train/loss, validation/perplexity, time/tokens_per_s, solver/residual/layer0 and
    solver/probe/num_iters/mean/layer0. Other values are left out.
    """
    numbers: dict[str, float] = {}

    def add(name: str, value: Any, layers: list[int] | None) -> None:
        if isinstance(value, dict):
            for key, nested in value.items():
                if key != "layers":
                    add(f"{name}/{key}", nested, value.get("layers", layers))
        elif isinstance(value, list):
            for layer, number in zip(layers or range(len(value)), value):
                add(f"{name}/layer{layer}", number, None)
        elif isinstance(value, int | float):
            numbers[name] = value

    for key, value in record.items():
        if key not in ("step", "layers"):
            add(TRACKER_NAMES.get(key, f"train/{key}"), value, record.get("layers"))
    return numbers


Result = TypeVar("Result")
STEP_KEY = "global_step"  # wandb's own step must not decrease, as it does after a rollback


class Wandb:
    """Weights & Biases. A resumed run continues the same wandb run.

    Records in wandb cannot be deleted. After a rollback the old records stay, and wandb has two
    records of the same step.
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
        self.run.define_metric(STEP_KEY)
        self.run.define_metric("*", step_metric=STEP_KEY)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self.run.log({**numbers, STEP_KEY: step})

    def drop_records_after(self, step: int) -> None: ...

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    """Event files in the run directory. After a rollback, TensorBoard hides the old records."""

    def __init__(self, cfg: Run, run: RunDir, resumed_at: int):
        self.folder = str(run.tensorboard)
        self._open(resumed_at + 1 if resumed_at else None)  # a new run has no old records

    def _open(self, purge_step: int | None) -> None:
        """Open the next event file; TensorBoard hides records of `purge_step` and later steps."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(self.folder, purge_step=purge_step)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def drop_records_after(self, step: int) -> None:
        self.writer.close()
        self._open(step + 1)

    def close(self) -> None:
        self.writer.close()


Tracker = Wandb | TensorBoard
# {key of a config's section `log`: its tracker}
TRACKERS: dict[str, Callable[..., Tracker]] = {"wandb": Wandb, "tensorboard": TensorBoard}


class MetricsWriter:
    """Appends records to `metrics.jsonl` and to the trackers of the section `log`, on rank 0.

    A tracker that fails is dropped with one warning; metrics.jsonl has every record.

    Args:
        cfg: Configuration of the run.
        run: The run directory.
        resumed_at: Step of the checkpoint; records of later steps are dropped.
    """

    def __init__(self, cfg: Run, run: RunDir, resumed_at: int = 0):
        self.run = run
        self.path = run.metrics
        self.file = self._open(resumed_at)
        self.trackers: dict[str, Tracker] = {}
        for name, make_tracker in TRACKERS.items():
            if getattr(cfg.log, name):
                tracker = self._try(name, partial(make_tracker, cfg, run, resumed_at))
                if tracker is not None:
                    self.trackers[name] = tracker

    def drop_records_after(self, step: int) -> None:
        """Drop the records of later steps than `step`, or all if it is 0."""
        with writing(self.path):
            self.file.close()
        self.file = self._open(step)
        for name, tracker in list(self.trackers.items()):
            self._try(name, partial(tracker.drop_records_after, step))

    def _open(self, step: int) -> TextIO:
        """Drop the records after a step, or all if it is 0; open metrics.jsonl for appending."""
        unread_count = 0

        def iter_lines() -> Iterator[str]:
            nonlocal unread_count
            for record in iter_metrics(self.run.path) if step else ():
                if record is None:
                    unread_count += 1
                elif record["step"] <= step:
                    yield json.dumps(record) + "\n"

        write_text(self.path, iter_lines())
        if unread_count:
            lines = "1 line" if unread_count == 1 else f"{unread_count} lines"
            say(
                f"note: {self.path}: dropped {lines} without a record (cut short by a kill, or"
                " damaged)"
            )
        with writing(self.path):
            return self.path.open("a", encoding="utf-8")

    def write(self, record: dict) -> None:
        """Write a record to metrics.jsonl and to the trackers.

        Args:
            record: {"step": n, …} with numbers, lists of one number per layer, or nested mappings.
        """
        with writing(self.path):
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
        numbers = flatten_record(record) if self.trackers else {}
        for name, tracker in list(self.trackers.items()):
            self._try(name, partial(tracker.log, record["step"], numbers))

    def close(self) -> None:
        with contextlib.suppress(OSError):  # `write` has reported that the disk is full
            self.file.close()
        for name, tracker in list(self.trackers.items()):
            self._try(name, tracker.close)

    def _try(self, name: str, action: Callable[[], Result]) -> Result | None:
        """Call an action of a tracker; remove the tracker and return None if it fails."""
        try:
            return action()
        except Exception as e:
            self.trackers.pop(name, None)
            say(
                f"warning: log.{name} has failed ({type(e).__name__}: {e}): training continues"
                f" without it; {self.path} has every record"
            )
            return None
