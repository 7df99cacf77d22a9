"""The log of a run: metrics.jsonl, and wandb and TensorBoard where they are asked for."""

from __future__ import annotations

import contextlib
import json
import netrc
import os
import uuid

from lm.metrics import read_metrics
from lm.outputs import write_text, writing
from lm.run_dir import RunDir


def describe(record: dict) -> str:
    """A training record as one line: what a person watches."""
    parts = [f"loss {record['loss']:.3f}"]
    if "accuracy" in record:
        parts.append(f"acc {record['accuracy']:.3f}")
    parts.append(f"lr {record['lr']:.1e}")
    parts.append(f"|g| {record['grad_norm']:.2f}")
    if "evaluations" in record:
        parts.append("evaluations " + " ".join(f"{v:.1f}" for v in record["evaluations"]))
        if failed := max(record["failed"]):
            parts.append(f"failed {failed:.2%}")
    if "mfu" in record:
        parts.append(f"MFU {record['mfu']:.1%}")
    parts.append(f"{record['tokens_per_s']:,.0f} tok/s")
    return "  ".join(parts)


def iterations(record: dict) -> str:
    """ℓ* of each layer, of a record that has a probe."""
    if "probe" not in record:
        return ""
    return "  ℓ* " + " ".join(f"{v:.1f}" for v in record["probe"]["num_iters"]["mean"])


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

    def __init__(self, cfg, run: RunDir, resumed_at: int = 0):
        self.run = run
        self.path = run.metrics
        self.keep_until(resumed_at)
        self.wandb = self.tensorboard = None
        if cfg.log.wandb:
            import wandb

            offline = not _has_wandb_key()
            run_id = run.wandb_id  # a resumed run goes on in the same place
            if not run_id.exists():
                write_text(run_id, uuid.uuid4().hex[:12])
            self.wandb = wandb.init(
                id=run_id.read_text(),
                resume="allow",
                project=cfg.log.wandb_project, name=cfg.name, dir=str(run),
                config=cfg.model_dump(mode="json"),
                mode=os.environ.get("WANDB_MODE") or ("offline" if offline else "online"),
            )  # fmt: skip
        if cfg.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            purge = resumed_at + 1 if resumed_at else None
            self.tensorboard = SummaryWriter(str(run.tensorboard), purge_step=purge)

    def keep_until(self, step: int) -> None:
        """Drop the records of later steps from metrics.jsonl, and go on from there; all at 0."""
        kept = [r for r in read_metrics(self.run.path) if r["step"] <= step] if step else []
        write_text(self.path, "".join(json.dumps(r) + "\n" for r in kept))
        self.file = self.path.open("a", encoding="utf-8")

    def write(self, record: dict) -> None:
        """record: {"step": n, …} with numbers, lists of one number a layer, or nested mappings."""
        with writing(self.path):
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
        flat = _flat({k: v for k, v in record.items() if k != "step"})
        if self.wandb:
            self.wandb.log(flat, step=record["step"])
        if self.tensorboard:
            for name, value in flat.items():
                self.tensorboard.add_scalar(name, value, record["step"])

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a full disk, and said when it was written
            self.file.close()
        if self.wandb:
            self.wandb.finish()
        if self.tensorboard:
            self.tensorboard.close()
