"""Throughput, MFU, what solving cost, ℓ* by a probe; writers: JSONL, wandb, TensorBoard."""

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

FAILED_SHARE = 0.001  # of a layer's tokens: more that were not solved are warned about


def peak_flops() -> float | None:
    """Peak of the current GPU, None when it is not known (or on a CPU)."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def fixed_point_metrics(stats: list, gather=lambda t: t, rows: torch.Tensor | None = None) -> dict:
    """What solving cost and left, per layer, over several micro-batches (and ranks).

    Args:
        stats: FixedPointReports with tensors of shape (n_layer,b). gather: concatenates over ranks.
        rows: (b,) bool, the sequences that count, of all micro-batches; None: all of them.
    Returns:
        {"evaluations", "failed", "residual"}, each a list with one number a layer: evaluations a
        token of the block's map, the share of tokens whose solve failed, and the mean over
        sequences of the largest residual of a token. Of stats that a `probe` gave also "num_iters"
        {mean, median, max} of ℓ*, each such a list. {} for a model without a solver.
    """
    if not stats:
        return {}
    counted = None
    if rows is not None:
        counted = gather(rows.to(stats[0].failed.device, torch.float64)) > 0

    def over_all(name):
        values = gather(torch.cat([getattr(s, name) for s in stats], -1).double())
        return values if counted is None else values[:, counted]

    measured = {
        name: _rounded(over_all(name).mean(-1)) for name in ("evaluations", "failed", "residual")
    }
    if stats[0].num_iters is not None:
        iterations = over_all("num_iters")
        measured["num_iters"] = {
            "mean": _rounded(iterations.mean(-1)),
            "median": _rounded(iterations.median(-1).values),
            "max": _rounded(iterations.amax(-1)),
        }
    return measured


def adjoint_metrics(model, gather=lambda t: t) -> dict:
    """{"adjoint": [a number a layer]}: the norm of the adjoint in the last backward relative to
    what came in, the largest over its sequences (and ranks); {} where there was none."""
    norms = model.adjoint_norms() if hasattr(model, "adjoint_norms") else []
    if not norms or any(norm is None for norm in norms):
        return {}
    return {"adjoint": _rounded(gather(torch.stack(norms).double()).amax(-1))}


def _rounded(t: torch.Tensor) -> list[float]:
    return [float(f"{v:.6g}") for v in t.tolist()]  # residuals are small, adjoints may be large


@torch.no_grad()
def probe(model, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None):
    """ℓ* of sequences: the FixedPointReport of one evaluation that also counts, for each layer, the
    iterations that the paper's procedure needs on its input, whatever schedule solves the model. It
    costs these iterations.

    Args:
        model: a fixed-point model, or what wraps one (DeepSpeed's engine); its mode stays.
        input_ids, attention_mask: (b,l).
    """
    was_training = model.training
    model.eval()
    try:
        output = model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            count_iterations=True,
            logits_to_keep=1,
            use_cache=False,
        )
    finally:
        model.train(was_training)
    return output.fixed_point


def is_due(step: int, every: int) -> bool:
    """Whether what is done every so many updates (0: never) is due after this one."""
    return every > 0 and step % every == 0


class FailureWatch:
    """Says once for each layer that too many of its tokens were not solved.

    Args:
        say: takes a sentence. solver: what `model.solver()` gives.
    """

    def __init__(self, say, solver: dict | str):
        self.say = say
        self.solver = solver
        self.said: set[int] = set()

    def look(self, failed: list[float], where: str) -> None:
        """failed: the share of each layer. where: "update 30", say."""
        for layer, sentence in failures(failed, self.solver).items():
            if layer not in self.said:
                self.say(f"warning: {where}: {sentence}")
                self.said.add(layer)


def failures(failed: list[float], solver: dict | str) -> dict[int, str]:
    """Of each layer above FAILED_SHARE what happened, and what to do.

    Iterated tokens are left out: their procedure may leave tokens unfinished by its own rule (the
    quantile, ℓmax), and the share stands in every record.

    Args:
        failed: the share of tokens of each layer. solver: what `model.solver()` gives.
    """
    if not isinstance(solver, dict) or solver.get("token") != "exact":
        return {}
    what = "the token's equation was not solved"
    cures = "model.contractive: 0.9 or model.glu_in_loop: false"
    if solver["max_iters"] is not None:  # tokens may also have been left by the way through time
        what += " (or not to the tolerance within the iterations allowed)"
        cures += "; or allow more iterations, or schedule: sequential"
    return {
        layer: (
            f"{what} for {share:.2%} of the tokens of layer {layer}"
            f" (more than {FAILED_SHARE:.1%}), so what the layer gave there is not its solution:"
            f" train with {cures}"
        )
        for layer, share in enumerate(failed)
        if share > FAILED_SHARE
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

    def read(self, evaluations: float) -> dict:
        """Tokens per second since the last reading, and MFU.

        Args:
            evaluations: of a layer's map a token, mean over layers; 0 for a baseline.
        """
        seconds = time.perf_counter() - self.since
        rate = self.tokens / seconds if seconds > 0 else 0.0
        values = {"tokens_per_s": round(rate, 1)}
        if self.peak and self.flops_per_token:
            flops = rate * self.flops_per_token(evaluations)
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
