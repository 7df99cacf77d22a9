"""Records of training: loss, speed, memory and the work of the solver, for metrics.jsonl."""

from __future__ import annotations

import math

import torch

from lm.common.ranks import Ranks
from lm.config.schema import Config
from lm.runs.metrics import (
    FailureWatch,
    Throughput,
    fit_flops,
    fixed_point_metrics,
    mean,
    measure_imbalance,
    peak_memory,
)
from lm.training.engine import MAX_EXPONENT, Engine, Update


class Recorder:
    """Loss and cost of the updates since the last record, from which it makes the next record.

    Args:
        cfg: Configuration of the run.
        ranks: Ranks of the run.
        engine: Engine that makes the updates.
        model: Model of the engine.
    """

    def __init__(self, cfg: Config, ranks: Ranks, engine: Engine, model: torch.nn.Module):
        self.cfg, self.ranks, self.engine = cfg, ranks, engine
        self.tokens_per_step = cfg.tokens_per_step(ranks.world_size)
        flops = fit_flops(model.flops_per_token, cfg.data.seq_len)
        self.throughput = Throughput(flops, ranks.world_size)
        self.has_solver = cfg.model.has_fixed_point
        self.failure_watch = FailureWatch(model.solver() if self.has_solver else "none")
        self._reports: list = []  # FixedPointReports since the last record

    def count(self, update: Update, passes: int) -> None:
        """Count an update that has ended.

        Args:
            update: Result of the update.
            passes: Number of passes of each micro-batch through the model.
        """
        self._reports += update.reports
        self.throughput.count(self.tokens_per_step, passes=passes)
        self.engine.times.end_update()

    def make_record(self, step: int, update: Update, lr: float) -> dict:
        """Return the record of the updates since the last record. Every rank calls it.

        Args:
            step: Number of the last update.
            update: Result of the last update.
            lr: Learning rate of the last update.
        """
        solver = fixed_point_metrics(self._reports, self.ranks.gather)
        breakdown = self.engine.times.read()
        forward_s = breakdown["forward"] + breakdown.get("solve", 0.0)
        record = {
            "step": step,
            "loss": update.loss,
            "perplexity": math.exp(min(update.loss, MAX_EXPONENT)),
            "lr": lr,
            "grad_norm": update.grad_norm,
            "tokens": step * self.tokens_per_step,
            **self.throughput.read(mean(solver.get("evaluations", []))),
            **solver,
            **measure_imbalance(forward_s, self._gather_host),
            "breakdown": breakdown,
        }
        self._reports = []
        self.failure_watch.check(record, f"update {step}")
        return record

    def peak_memory(self) -> int:
        """Return the peak memory, the maximum over ranks, in bytes."""
        peak = torch.tensor([peak_memory(self.ranks.device)], dtype=torch.float64)
        return int(self._gather_host(peak).max())

    def _gather_host(self, t: torch.Tensor) -> torch.Tensor:
        return self.ranks.gather(t.to(self.ranks.device)).cpu()
