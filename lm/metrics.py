"""Loss, throughput, MFU, ℓ* per layer; writers: JSONL always, wandb and TensorBoard when asked."""

from __future__ import annotations

import json
import netrc
import os
import time
import uuid
from pathlib import Path

import torch

# Dense bf16 peak in FLOP/s, from the makers' data sheets, by a part of the device's name.
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "L40": 181e12, "V100": 125e12}


def peak_flops() -> float | None:
    """Peak of the current GPU, None when it is not known (or on a CPU)."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def fixed_point_metrics(stats: list, gather=lambda t: t) -> dict:
    """ℓ* per layer over the sequences of several micro-batches (and ranks).

    Args:
        stats: FixedPointStats with tensors of shape (n_layer,b). gather: concatenates over ranks.
    Returns:
        {"num_iters": {mean, median, max}, "work", "hit_max", "not_converged", "residual",
        "tokens_not_converged"}, each a list with one number a layer: ℓ*, evaluations per token, the
        share of sequences that ran into ℓmax, the share that did not reach tol, the mean residual
        of what was returned, the share of tokens that did not reach tol. {} for a model without a
        solver.
    """
    if not stats:
        return {}

    def over_all(name):
        return gather(torch.cat([getattr(s, name) for s in stats], -1).double())

    def rounded(t):
        return [round(v, 6) for v in t.tolist()]

    iters = over_all("num_iters")

    return {
        "num_iters": {
            "mean": rounded(iters.mean(-1)),
            "median": rounded(iters.median(-1).values),
            "max": rounded(iters.amax(-1)),
        },
        "work": rounded(over_all("work").mean(-1)),
        "hit_max": rounded(over_all("hit_max").mean(-1)),
        "not_converged": rounded(1 - over_all("converged").mean(-1)),
        "tokens_not_converged": rounded(over_all("unconverged").mean(-1)),
        "residual": rounded(over_all("residual").mean(-1)),
    }


class Throughput:
    """Tokens per second between two readings, and MFU where the peak is known."""

    def __init__(self, flops_per_token, world_size: int):
        self.flops_per_token = flops_per_token  # evaluations per token → FLOPs, or None
        self.peak = peak_flops()
        self.world_size = world_size
        self.restart()

    def restart(self) -> None:
        self.since, self.tokens = time.perf_counter(), 0

    def read(self, work: float) -> dict:
        seconds = time.perf_counter() - self.since
        rate = self.tokens / seconds if seconds > 0 else 0.0
        values = {"tokens_per_s": round(rate, 1)}
        if self.peak and self.flops_per_token:
            flops = rate * self.flops_per_token(work)
            values["mfu"] = round(flops / (self.peak * self.world_size), 4)
        self.restart()
        return values


def _flat(record: dict, prefix: str = "") -> dict[str, float]:
    """Nested records → flat names with numbers, for wandb and TensorBoard."""
    flat = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}/"))
        elif isinstance(value, list):
            flat.update({f"{prefix}{key}/layer{i}": v for i, v in enumerate(value)})
        elif isinstance(value, int | float):
            flat[prefix + key] = value
    return flat


def read_metrics(run_dir: Path) -> list[dict]:
    """The records of `metrics.jsonl`; a last line cut short by a kill is dropped."""
    path = Path(run_dir) / "metrics.jsonl"
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def _has_wandb_key() -> bool:
    """A key in the environment, or in the netrc that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


class Writer:
    """Appends records to `metrics.jsonl` and to whatever else `log:` asks for (main rank only).

    Args:
        resumed_at: records of later steps, written before a kill, are dropped.
    """

    def __init__(self, cfg, run_dir: Path, resumed_at: int = 0):
        run_dir = Path(run_dir)
        kept = [r for r in read_metrics(run_dir) if r["step"] <= resumed_at] if resumed_at else []
        tmp = run_dir / "metrics.jsonl.tmp"
        tmp.write_text("".join(json.dumps(r) + "\n" for r in kept))
        os.replace(tmp, run_dir / "metrics.jsonl")
        self.file = (run_dir / "metrics.jsonl").open("a")
        self.wandb = self.tensorboard = None
        if cfg.log.wandb:
            import wandb

            offline = not _has_wandb_key()
            run_id = run_dir / "wandb_id"  # a resumed run goes on in the same place
            if not run_id.exists():
                run_id.write_text(uuid.uuid4().hex[:12])
            self.wandb = wandb.init(
                id=run_id.read_text(),
                resume="allow",
                project=cfg.log.wandb_project, name=cfg.name, dir=str(run_dir),
                config=cfg.model_dump(mode="json"),
                mode=os.environ.get("WANDB_MODE") or ("offline" if offline else "online"),
            )  # fmt: skip
        if cfg.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            purge = resumed_at + 1 if resumed_at else None
            self.tensorboard = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)

    def write(self, record: dict) -> None:
        """record: {"step": n, …} with numbers, lists of one number a layer, or nested mappings."""
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        flat = _flat({k: v for k, v in record.items() if k != "step"})
        if self.wandb:
            self.wandb.log(flat, step=record["step"])
        if self.tensorboard:
            for name, value in flat.items():
                self.tensorboard.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self.file.close()
        if self.wandb:
            self.wandb.finish()
        if self.tensorboard:
            self.tensorboard.close()
