"""Throughput, MFU, what solving cost, ℓ* by a probe; reading the log of a run."""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lm.common.files import CONTROL, parse_json, printable

# Dense bf16 peak in FLOP/s, from the makers' data sheets, by a part of the device's name.
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "L40": 181e12, "V100": 125e12}

Gather = Callable[[torch.Tensor], torch.Tensor]  # concatenates over ranks, along the last dimension

# What a solve counts of its tokens (lm/model/solver.py), in records.
SHARES = ("failed", "bisected", "limited")
# Key of a record → field of FixedPointReport, where they differ: records keep their first keys.
STATISTICS = {"limited": "grad_limited", "elsewhere": "other_solution"}
FAILED_SHARE = 0.001  # of a layer's tokens: more that were not solved are warned about
ILL_SHARE = 0.01  # likewise of those that were bisected, or whose gradient may be limited
# What a solve counts → largest share without a warning, the problem, its consequence.
PROBLEMS = {
    "failed": (
        FAILED_SHARE,
        "the token's equation was not solved",
        "so what the layer gave there is not its solution",
    ),
    "bisected": (
        ILL_SHARE,
        "the token's equation has a solution that its iteration does not come to",
        "so it was bisected, and a small change of the input may lead to another",
    ),
    "limited": (
        ILL_SHARE,
        "the token's equation is nearly singular",
        "so the gradient may be shortened there",
    ),
}
CURES = (
    "train with model.contractive: 0.9, or begin near the identity (model.mixer_gate_init_bias: -3)"
)
OTHER_SOLUTION_SHARE = (
    0.01  # above it ℓ* of a layer is marked: it does not belong to the layer's answer
)
OTHER_SOLUTION_MARK = "†"
OTHER_SOLUTION_NOTE = (
    f"{OTHER_SOLUTION_MARK} the paper's procedure, whose iterations ℓ* counts, ends in another"
    f" solution than the model's at more than {OTHER_SOLUTION_SHARE:.0%} of the tokens: this ℓ*"
    " does not belong to the model's answers"
)


def peak_flops() -> float | None:
    """Peak of the current GPU, None when it is not known (or on a CPU)."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def fixed_point_metrics(
    stats: list, gather: Gather = lambda t: t, rows: torch.Tensor | None = None
) -> dict:
    """What solving cost and left, per layer, over several micro-batches (and ranks).

    Args:
        stats: FixedPointReports with tensors of shape (n_layer,b). gather: concatenates over ranks.
        rows: (b,) bool, the sequences that count, of all micro-batches; None: all of them.
    Returns:
        {"evaluations", "failed", "bisected", "limited", "residual"}, each a list with one number a
        layer: evaluations a token of the block's map; the shares of tokens whose solve failed, of
        those whose solution bisection found, and of those where the gradient's limit may take
        effect; the mean over sequences of the largest residual of a token. Of stats that a `probe`
        gave also "num_iters" {mean, median, max} of ℓ* and {elsewhere}, the share of tokens where
        the paper's procedure ends in another solution, each such a list; of a hybrid "layers", the
        numbers of the layers that these are of. After a backward through time "adjoint": the norm
        of the adjoint in the last one relative to what came in, the largest over sequences (and
        ranks). {} for a model without a solver.
    """
    if not stats:
        return {}
    counted = None
    if rows is not None:
        counted = gather(rows.to(stats[0].failed.device, torch.float64)) > 0

    def over_all(name):
        name = STATISTICS.get(name, name)
        values = gather(torch.cat([getattr(s, name) for s in stats], -1).double())
        return values if counted is None else values[:, counted]

    measured: dict[str, list[float] | dict[str, list[float]]] = {
        name: _rounded(over_all(name).mean(-1)) for name in ("evaluations", *SHARES, "residual")
    }
    if stats[0].layers is not None:
        measured["layers"] = stats[0].layers
    if stats[0].num_iters is not None:
        iterations = over_all("num_iters")
        measured["num_iters"] = {
            "mean": _rounded(iterations.mean(-1)),
            "median": _rounded(iterations.median(-1).values),
            "max": _rounded(iterations.amax(-1)),
            "elsewhere": _rounded(over_all("elsewhere").mean(-1)),
        }
    if stats[-1].adjoint_norm is not None:
        norms = gather(torch.stack([n.double() for n in stats[-1].adjoint_norm])).amax(-1)
        if norms.any():  # else there was no backward through time
            measured["adjoint"] = _rounded(norms)
    return measured


def has_other_solution(num_iters: dict) -> list[bool]:
    """Of each layer whether its ℓ* belongs to another solution than the layer's. num_iters: of a
    record; one of before this was compared says nothing."""
    shares = num_iters.get("elsewhere") or [0.0] * len(num_iters["mean"])
    return [share > OTHER_SOLUTION_SHARE for share in shares]


def marked(num_iters: dict) -> list[str]:
    """Return the mean ℓ* of each layer as text, marked if it is of another solution."""
    return [
        f"{mean:.1f}{OTHER_SOLUTION_MARK * elsewhere}"
        for mean, elsewhere in zip(num_iters["mean"], has_other_solution(num_iters))
    ]


def peak_memory(device: torch.device) -> int:
    """Bytes, the most that this process has held so far: in tensors on its GPU; without one, of
    memory of any kind."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:  # getrusage also counts what was there before a process became this one
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:  # no Linux
        status = ""
    if found := re.search(r"^VmHWM:\s+(\d+) kB$", status, re.M):
        return int(found[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _rounded(t: torch.Tensor) -> list[float]:
    return [float(f"{v:.6g}") for v in t.tolist()]  # residuals are small, adjoints may be large


@torch.no_grad()
def probe(
    model: torch.nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> Any:
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
    """Says once for each layer that too many of its tokens were not solved, or are ill-conditioned.

    Args:
        say: takes a sentence. solver: what `model.solver()` gives.
    """

    def __init__(self, say: Callable[[str], None], solver: dict | str):
        self.say = say
        self.solver = solver
        self.said: set[int] = set()

    def look(self, measured: dict, where: str) -> None:
        """measured: what `fixed_point_metrics` gave, {} of a model without a solver. where: "update
        30", say."""
        for layer, sentence in failures(measured, self.solver).items():
            if layer not in self.said:
                self.say(f"warning: {where}: {sentence}")
                self.said.add(layer)


def failures(measured: dict, solver: dict | str) -> dict[int, str]:
    """Of each layer with too many tokens that were not solved, were bisected or have a limited
    gradient, the first of these and what to do, by its place in the lists.

    Iterated tokens are left out: their procedure may leave tokens unfinished by its own rule (the
    quantile, ℓmax), and the share stands in every record.

    Args:
        measured: what `fixed_point_metrics` gave. solver: what `model.solver()` gives.
    """
    if not isinstance(solver, dict) or solver.get("token") != "exact":
        return {}
    numbers = measured.get("layers")
    said: dict[int, str] = {}
    for name, (most, problem, consequence) in PROBLEMS.items():
        for place, share in enumerate(measured.get(name, [])):
            if share > most:
                layer = numbers[place] if numbers else place
                shares = f"{share:.2%} of the tokens of layer {layer} (more than {most:.1%})"
                said.setdefault(place, f"{problem} for {shares}, {consequence}: {CURES}")
    return said


def imbalance(seconds: float, gather: Gather) -> dict:
    """{"imbalance": the share of its time that a rank waits, on average, for the slowest one}; {}
    of one rank alone.

    Args:
        seconds: that this rank has worked itself, in forward passes.
        gather: concatenates over ranks.
    """
    over_ranks = gather(torch.tensor([seconds], dtype=torch.float64))
    if len(over_ranks) == 1:
        return {}
    slowest = over_ranks.max().clamp_min(1e-9)
    return {"imbalance": round(float(1 - over_ranks.mean() / slowest), 4)}


class Throughput:
    """What updates take: tokens per second between two readings, MFU where the peak is known, and
    the time of all updates of the run; what `skip` leaves out (validations, saves) is not in it.

    Attributes:
        spent: {"seconds", "processor_seconds"} of the updates that the weights have in them (not
            of those that a rollback or a kill has undone); the processor's are those of this
            rank's process, of all its threads, also of one that writes a checkpoint meanwhile.
    """

    def __init__(self, flops_per_token: Callable[[float], float] | None, world_size: int):
        self.flops_per_token = flops_per_token  # of evaluations per token
        self.peak = peak_flops()
        self.world_size = world_size
        self.spent = {"seconds": 0.0, "processor_seconds": 0.0}
        self.restart()

    def restart(self) -> None:
        self.tokens = self.passed = 0
        self.since = self.last = _clocks()

    def skip(self) -> None:
        """What has happened since the last update does not count."""
        now = _clocks()
        for name in now:
            self.since[name] += now[name] - self.last[name]
        self.last = now

    def count(self, tokens: int, passes: int = 1) -> None:
        """An update of so many tokens has ended, each passed through the model so often."""
        self.tokens += tokens
        self.passed += passes * tokens
        now = _clocks()
        for name in self.spent:
            self.spent[name] += now[name] - self.last[name]
        self.last = now

    def read(self, evaluations: float) -> dict:
        """Tokens per second since the last reading, MFU, and what all updates took.

        Args:
            evaluations: of a layer's map a token in the first pass, mean over layers; 0 for a
                baseline.
        """
        seconds = _clocks()["seconds"] - self.since["seconds"]
        rate = self.tokens / seconds if seconds > 0 else 0.0
        values: dict[str, float | dict[str, float]] = {}
        values["tokens_per_s"] = round(rate, 1)
        if self.peak and self.flops_per_token:
            passes = self.passed / max(1, self.tokens)
            flops = rate * passes * self.flops_per_token(evaluations)
            values["mfu"] = round(flops / (self.peak * self.world_size), 4)
        values["spent"] = {name: round(value, 3) for name, value in self.spent.items()}
        self.restart()
        return values


def _clocks() -> dict[str, float]:
    return {"seconds": time.perf_counter(), "processor_seconds": time.process_time()}


class Log(NamedTuple):
    """The records of a run's `metrics.jsonl`.

    Args:
        records: One mapping per update that was recorded, in the file's order.
        unread: Number of lines that hold no record: the last one, cut short by a kill, or damaged.
    """

    records: list[dict]
    unread: int


def read_metrics(run_dir: Path) -> list[dict]:
    """Return the records of `metrics.jsonl`."""
    return read_log(run_dir).records


def read_log(run_dir: Path) -> Log:
    """Read `metrics.jsonl`, and count the lines that hold no record."""
    parsed = list(iter_metrics(run_dir))
    records = [record for record in parsed if record is not None]
    return Log(records, len(parsed) - len(records))


def iter_metrics(run_dir: Path) -> Iterator[dict | None]:
    """Yield the record of every line of `metrics.jsonl`, None for a line that holds none."""
    path = Path(run_dir) / "metrics.jsonl"
    if path.is_file():
        with path.open("rb") as file:
            yield from map(parse_record, file)


def parse_record(line: bytes) -> dict | None:
    """Return the record that a line of `metrics.jsonl` holds; None if it holds none."""
    try:
        text = line.decode("utf-8")
        record = parse_json(text)
    except ValueError:  # also of bytes that are no UTF-8
        return None
    step = record.get("step") if isinstance(record, dict) else None
    if type(step) is not int or step < 0:
        return None
    needs_escapes = "\\" in text or CONTROL.search(text)  # almost no record: the test is fast
    return printable(record) if needs_escapes else record


def affine(
    flops_per_token: Callable[..., float] | None, length: int
) -> Callable[[float], float] | None:
    """Evaluations a token → FLOPs a token in sequences of that length, taken while the weights are
    whole; None for a model that cannot say."""
    if flops_per_token is None:
        return None
    at_zero, at_one = (flops_per_token(count, length=length) for count in (0, 1))
    return lambda evaluations: at_zero + evaluations * (at_one - at_zero)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
