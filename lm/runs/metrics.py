"""Metrics of training: speed, memory, statistics of the solver, ℓ*; reading metrics.jsonl.

ℓ* of a layer is the number of iterations that the paper's procedure would need on its input.
MFU (model FLOPs utilization) is the share of the device's peak FLOP/s that the model uses.
"""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lm.common.cards import find_local_card
from lm.common.console import say
from lm.common.files import CONTROL, parse_json, printable

# Function that concatenates a tensor of all ranks along the last dimension.
Gather = Callable[[torch.Tensor], torch.Tensor]

# Keys of a record with shares of tokens, by the status of their solve (lm/model/solver.py).
SHARES = ("failed", "bisected", "limited")
# {key of a record: field of FixedPointReport}, if they differ: records keep their first keys.
REPORT_FIELDS = {"limited": "grad_limited", "elsewhere": "other_solution"}
FAILED_SHARE = 0.001  # warn if more of a layer's tokens were not solved
ILL_SHARE = 0.01  # warn if more of a layer's tokens were bisected, or have a limited gradient


class Problem(NamedTuple):
    """A reason for a warning about a layer."""

    max_share: float  # largest share of tokens without a warning
    description: str
    consequence: str


# {key of a share in a record: its problem}
PROBLEMS = {
    "failed": Problem(
        FAILED_SHARE,
        "the token's equation was not solved",
        "so the layer's output there is not a solution",
    ),
    "bisected": Problem(
        ILL_SHARE,
        "the token's equation has a solution that its iteration does not reach",
        "so it was bisected, and a small change of the input may lead to another solution",
    ),
    "limited": Problem(
        ILL_SHARE,
        "the token's equation is nearly singular",
        "so the gradient may be shortened there",
    ),
}
REMEDIES = (
    "train with model.contractive: 0.9, or begin near the identity (model.mixer_gate_init_bias: -3)"
)
OTHER_SOLUTION_SHARE = 0.01  # mark a layer's ℓ* above this share of tokens with another solution
OTHER_SOLUTION_MARK = "†"
OTHER_SOLUTION_NOTE = (
    f"{OTHER_SOLUTION_MARK} marks an ℓ* that does not describe this model: ℓ* counts the iterations"
    " of the paper's procedure, which converges to a different solution than the model for more"
    f" than {OTHER_SOLUTION_SHARE:.0%} of the tokens"
)


def peak_flops() -> float | None:
    """Return the dense bf16 peak in FLOP/s of this machine's GPU; None if it is unknown."""
    card = find_local_card()
    return card.peak["bf16"] if card and card.peak else None


def fixed_point_metrics(
    stats: list, gather: Gather = lambda t: t, rows: torch.Tensor | None = None
) -> dict:
    """Average the reports of the solver over micro-batches and ranks, per layer.

    Args:
        stats: FixedPointReport of each micro-batch, whose tensors have shape (n_layer, batch).
        gather: Concatenates tensors over ranks.
        rows: True for sequences that count, bool, shape (sequences of all micro-batches,); None:
            all count.

    Returns:
        {} for a model without a solver. Otherwise lists with one number per layer:
        "evaluations": evaluations of the block's map per token.
        "failed", "bisected", "limited": shares of tokens whose solve failed, whose solution was
            found by bisection, and whose gradient may be limited.
        "residual": mean over sequences of the largest residual of a token.
        "num_iters", only after a `probe`: {"mean", "median", "max"} of ℓ*, and "elsewhere", the
            share of tokens where the paper's procedure ends in another solution.
        "layers", only for a hybrid: indices of the layers with a solver.
        "adjoint", only after a backward pass through time: norm of the adjoint relative to the
            incoming gradient, maximum over the sequences of the last micro-batch and over ranks.
    """
    if not stats:
        return {}
    is_counted = None
    if rows is not None:
        is_counted = gather(rows.to(stats[0].failed.device, torch.float64)) > 0

    def gather_field(key):  # shape (n_layer, sequences that count)
        field = REPORT_FIELDS.get(key, key)
        values = gather(torch.cat([getattr(report, field) for report in stats], -1).double())
        return values if is_counted is None else values[:, is_counted]

    measured: dict[str, list[float] | dict[str, list[float]]] = {
        key: _round_layers(gather_field(key).mean(-1))
        for key in ("evaluations", *SHARES, "residual")
    }
    if stats[0].layers is not None:
        measured["layers"] = stats[0].layers
    if stats[0].num_iters is not None:
        iterations = gather_field("num_iters")
        measured["num_iters"] = {
            "mean": _round_layers(iterations.mean(-1)),
            "median": _round_layers(iterations.median(-1).values),
            "max": _round_layers(iterations.amax(-1)),
            "elsewhere": _round_layers(gather_field("elsewhere").mean(-1)),
        }
    if stats[-1].adjoint_norm is not None:
        norms = gather(torch.stack([n.double() for n in stats[-1].adjoint_norm])).amax(-1)
        if norms.any():  # all 0 without a backward pass through time
            measured["adjoint"] = _round_layers(norms)
    return measured


def find_other_solutions(num_iters: dict) -> list[bool]:
    """Return per layer whether its ℓ* belongs to another solution than the model's.

    Args:
        num_iters: As in a record; "elsewhere" is absent in records of version 0.1.
    """
    shares = num_iters.get("elsewhere") or [0.0] * len(num_iters["mean"])
    return [share > OTHER_SOLUTION_SHARE for share in shares]


def format_marked_iterations(num_iters: dict) -> list[str]:
    """Return the mean ℓ* of each layer as text, marked if it belongs to another solution."""
    return [
        f"{mean:.1f}{OTHER_SOLUTION_MARK if is_other else ''}"
        for mean, is_other in zip(num_iters["mean"], find_other_solutions(num_iters))
    ]


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process in bytes.

    Args:
        device: For a GPU, tensors on it count; for a CPU, all memory of the process.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:  # getrusage also counts memory from before an exec
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:  # no Linux
        status = ""
    if match := re.search(r"^VmHWM:\s+(\d+) kB$", status, re.M):
        return int(match[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _round_layers(values: torch.Tensor) -> list[float]:
    """Round to 6 significant digits: residuals are small, adjoints may be large."""
    return [float(f"{value:.6g}") for value in values.tolist()]


@torch.no_grad()
def probe(
    model: torch.nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> Any:
    """Run one forward pass that also counts ℓ*, and return its FixedPointReport.

    The pass makes the iterations of the paper's procedure on each layer's input, whatever solver
    the model has.

    Args:
        model: A fixed-point model, or DeepSpeed's engine around one. Its mode is restored.
        input_ids: Shape (batch, length).
        attention_mask: Shape (batch, length).
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
    """Return whether an action of every `every` updates is due after update `step`.

    It is never due if `every` is 0.
    """
    return every > 0 and step % every == 0


class FailureWatch:
    """Warns once per layer if too many of its tokens were not solved, or are ill-conditioned.

    Args:
        solver: As `model.solver()` returns it.
    """

    def __init__(self, solver: dict | str):
        self.solver = solver
        self.warned_layers: set[int] = set()

    def check(self, measured: dict, where: str) -> None:
        """Print a warning for each layer that needs one for the first time.

        Args:
            measured: As `fixed_point_metrics` returns it.
            where: Position in the training, such as "update 30".
        """
        for layer, sentence in find_failures(measured, self.solver).items():
            if layer not in self.warned_layers:
                say(f"warning: {where}: {sentence}")
                self.warned_layers.add(layer)


def find_failures(measured: dict, solver: dict | str) -> dict[int, str]:
    """Find the layers with too many failed, bisected or limited tokens.

    Solvers that iterate tokens are not checked: the paper's procedure may leave tokens unfinished
    by its own rule (the quantile, ℓmax).

    Args:
        measured: As `fixed_point_metrics` returns it.
        solver: As `model.solver()` returns it.

    Returns:
        {position of the layer in the record's lists: warning about its first problem}.
    """
    if not isinstance(solver, dict) or solver.get("token") != "exact":
        return {}
    layers = measured.get("layers")
    warnings: dict[int, str] = {}
    for key, problem in PROBLEMS.items():
        for position, share in enumerate(measured.get(key, [])):
            if share > problem.max_share and position not in warnings:
                layer = layers[position] if layers else position
                warnings[position] = (
                    f"{problem.description} for {share:.2%} of the tokens of layer {layer} (more"
                    f" than {problem.max_share:.1%}), {problem.consequence}: {REMEDIES}"
                )
    return warnings


def measure_imbalance(seconds: float, gather: Gather) -> dict:
    """Return {"imbalance": mean share of time that ranks wait for the slowest}; {} for one rank.

    Args:
        seconds: Time that this rank spent in forward passes.
        gather: Concatenates tensors over ranks.
    """
    rank_seconds = gather(torch.tensor([seconds], dtype=torch.float64))
    if len(rank_seconds) == 1:
        return {}
    slowest = rank_seconds.max().clamp_min(1e-9)
    return {"imbalance": round(float(1 - rank_seconds.mean() / slowest), 4)}


class Throughput:
    """Speed of updates: tokens per second, MFU, and the time of all updates of the run.

    `skip` excludes the time of validations and saves.

    Args:
        flops_per_token: FLOPs per token as a function of evaluations per token, or None.
        world_size: Number of ranks.

    Attributes:
        spent: {"seconds", "processor_seconds"} of all updates of the run, except updates that a
            rollback or a kill has undone. Processor seconds are summed over the threads of this
            rank, including the thread that writes a checkpoint.
    """

    def __init__(self, flops_per_token: Callable[[float], float] | None, world_size: int):
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops()
        self.world_size = world_size
        self.spent = {"seconds": 0.0, "processor_seconds": 0.0}
        self.restart()

    def restart(self) -> None:
        """Begin a new measurement of tokens per second and MFU."""
        self.tokens = 0
        self.token_passes = 0  # sum over tokens of their passes through the model
        self.start_clocks = self.last_clocks = _clocks()

    def skip(self) -> None:
        """Exclude the time since the last update."""
        clocks = _clocks()
        for name in clocks:
            self.start_clocks[name] += clocks[name] - self.last_clocks[name]
        self.last_clocks = clocks

    def count(self, tokens: int, passes: int = 1) -> None:
        """Count an update that has ended.

        Args:
            tokens: Tokens of all ranks.
            passes: Number of times that each token passed through the model.
        """
        self.tokens += tokens
        self.token_passes += passes * tokens
        clocks = _clocks()
        for name in self.spent:
            self.spent[name] += clocks[name] - self.last_clocks[name]
        self.last_clocks = clocks

    def read(self, evaluations: float) -> dict:
        """Return tokens per second and MFU since the last call, and the time of all updates.

        Args:
            evaluations: Evaluations of the map per token in the first pass, mean over layers; 0 for
                a baseline.
        """
        seconds = _clocks()["seconds"] - self.start_clocks["seconds"]
        rate = self.tokens / seconds if seconds > 0 else 0.0
        values: dict[str, float | dict[str, float]] = {}
        values["tokens_per_s"] = round(rate, 1)
        if self.peak_flops and self.flops_per_token:
            passes_per_token = self.token_passes / max(1, self.tokens)
            flops = rate * passes_per_token * self.flops_per_token(evaluations)
            values["mfu"] = round(flops / (self.peak_flops * self.world_size), 4)
        values["spent"] = {name: round(value, 3) for name, value in self.spent.items()}
        self.restart()
        return values


def _clocks() -> dict[str, float]:
    return {"seconds": time.perf_counter(), "processor_seconds": time.process_time()}


def read_metrics(run_dir: Path) -> list[dict]:
    """Return the records of `metrics.jsonl`."""
    return [record for record in iter_metrics(run_dir) if record is not None]


def iter_metrics(run_dir: Path) -> Iterator[dict | None]:
    """Yield the record of every line of `metrics.jsonl`; None for a line without a record."""
    path = Path(run_dir) / "metrics.jsonl"
    if path.is_file():
        with path.open("rb") as file:
            yield from map(parse_record, file)


def parse_record(line: bytes) -> dict | None:
    """Parse a line of `metrics.jsonl`; return None if it has no record."""
    try:
        text = line.decode("utf-8")
        record = parse_json(text)
    except ValueError:  # no JSON, or no UTF-8
        return None
    step = record.get("step") if isinstance(record, dict) else None
    if type(step) is not int or step < 0:
        return None
    # Control characters, also as an escape such as \u001b, are rare; this test is fast.
    may_have_controls = "\\" in text or CONTROL.search(text)
    return printable(record) if may_have_controls else record


def fit_flops(flops_per_token: Callable[..., float], length: int) -> Callable[[float], float]:
    """Return FLOPs per token as a function of evaluations per token, which is affine.

    Call it before ZeRO-3 partitions the weights.

    Args:
        flops_per_token: The model's method.
        length: Tokens of a sequence.
    """
    constant_flops = flops_per_token(0, length=length)
    evaluation_flops = flops_per_token(1, length=length) - constant_flops
    return lambda evaluations: constant_flops + evaluations * evaluation_flops


def mean(values: Sequence[float]) -> float:
    """Return the mean, 0.0 if there are no values."""
    return sum(values) / len(values) if values else 0.0
