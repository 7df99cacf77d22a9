"""What the benchmarks share: shapes, options, timing by turns, ceilings, formulas, tables, JSON."""

import argparse
import functools
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from lm.common.heap import keep_freed_memory

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

ROOT = Path(__file__).parents[1]


class Shape(NamedTuple):
    """A model and a batch."""

    layers: int
    d_model: int
    length: int
    batch: int
    rank: int  # reflections of the mixer
    vocab: int
    dtype: str = "fp32"  # bf16: products in bf16 by autocast, as lm/train does
    d_state: int = 16

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def words(self) -> str:
        return (
            f"{self.layers} layers, D {self.d_model}, N {self.d_state}, householder {self.rank},"
            f" batch {self.batch} × {self.length} tokens, vocabulary {self.vocab}, {self.dtype}"
        )


SHAPES = {
    "small": Shape(2, 128, 256, 8, 1, 256),
    "words": Shape(1, 128, 16, 128, 1, 64),
    "160m": Shape(12, 768, 2048, 16, 2, 50264, "bf16"),
}


def parser(doc: str, repeats: int = 15, shape: str = "small") -> argparse.ArgumentParser:
    """The options that every script has; see `parse`. shape: the default of --shape."""
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--shape", default=shape, help=f"of {', '.join(SHAPES)}; or several: A,B")
    for name in ("layers", "d-model", "length", "batch", "rank", "vocab"):
        p.add_argument(f"--{name}", type=int, help="instead of the shape's")
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    p.add_argument("--dtype", choices=("fp32", "bf16"), help="instead of the shape's")
    p.add_argument("--threads", type=numbers, default=[1], help="1,2: once with each (CPU)")
    p.add_argument("--repeats", type=int, default=repeats)
    p.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: processor seconds, for one thread beside other jobs",
    )
    p.add_argument("--rows", default="", help="only those with one of these in the name: A|B")
    p.add_argument("--json", help="also write the numbers here")
    return p


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(p: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, `shapes` as Shapes, `shape` the first of them, and `device` as a torch.device;
    seeds the generators. Freed memory stays with the process, as in a training."""
    a = p.parse_args()
    keep_freed_memory()
    a.arguments = {name: value for name, value in vars(a).items() if value not in (None, "")}
    named = {name: getattr(a, name) for name in (*Shape._fields[:6], "dtype") if getattr(a, name)}
    unknown = [name for name in a.shape.split(",") if name not in SHAPES]
    if unknown:
        p.error(f"--shape: no {unknown[0]}; there are {', '.join(SHAPES)}")
    a.shapes = [SHAPES[name]._replace(**named) for name in a.shape.split(",")]
    a.shape = a.shapes[0]
    found = "cuda" if torch.cuda.is_available() else "cpu"
    a.device = torch.device(found if a.device == "auto" else a.device)
    a.threads = [0] if a.device.type == "cuda" else a.threads
    if a.clock == "cpu" and a.threads != [1]:
        p.error("--clock cpu counts all threads together: it is for --threads 1 on a CPU")
    a.now = time.process_time if a.clock == "cpu" else time.perf_counter
    a.machine = machine(a)  # now: others may commit while it runs
    torch.manual_seed(0)
    return a


def autocast(a: argparse.Namespace, **options: Any) -> torch.autocast:
    """Products in the shape's dtype: in bf16, or as they are. options: of torch.autocast."""
    narrow = a.shape.dtype == "bf16"
    return torch.autocast(a.device.type, torch.bfloat16, enabled=narrow, **options)


def thread_counts(a: argparse.Namespace) -> Iterator[tuple[int, str]]:
    """Set the number of threads, and say what it is, for each that was asked for."""
    for count in a.threads:
        if count:
            torch.set_num_threads(count)
        yield count, f"{count} thread{'s' * (count > 1)}" if count else device_name(a.device)


def wanted(a: argparse.Namespace, functions: dict[str, Any]) -> dict[str, Any]:
    """Those that --rows names; all without it."""
    parts = [part for part in a.rows.split("|") if part]
    return {n: f for n, f in functions.items() if not parts or any(part in n for part in parts)}


# Timing


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(fn: Callable[[], Any], a: argparse.Namespace, inner: int = 1) -> float:
    """Seconds of one call; of the mean of `inner` calls in a row."""
    device = a.device
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        synchronize(device)
        start.record()
        for _ in range(inner):
            fn()
        end.record()
        synchronize(device)
        return start.elapsed_time(end) / 1e3 / inner
    began = a.now()
    for _ in range(inner):
        fn()
    return (a.now() - began) / inner


def shortest(
    functions: dict[str, Callable[[], Any]],
    a: argparse.Namespace,
    inner: int = 1,
    most: float = 20.0,
) -> tuple[dict[str, float | None], dict[str, Any]]:
    """Call the functions in turn a.repeats times; one that has taken `most` seconds sits out the
    rest, after two. The first call of each warms up; one that takes so long is not called again.

    Returns:
        {name: seconds of the shortest}, and {name: what the first call returned}. One that ran out
        of memory has None for both.
    """
    times, results, spent = {}, {}, dict.fromkeys(functions, 0.0)
    for name, fn in functions.items():
        try:
            synchronize(a.device)
            began = a.now()
            results[name] = fn()
            synchronize(a.device)
            times[name] = []
            if a.now() - began > most:
                times[name], spent[name] = [a.now() - began], math.inf
            continue
        except torch.cuda.OutOfMemoryError:
            pass
        torch.cuda.empty_cache()  # here: the traceback held what the call had made
    for repeat in range(a.repeats):
        for name, taken in times.items():
            if spent[name] < most or (repeat < 2 and spent[name] < math.inf):
                taken.append(seconds_of(functions[name], a, inner))
                spent[name] += taken[-1] * inner
    found = {name: min(times[name]) if name in times else None for name in functions}
    return found, {name: results.get(name) for name in functions}


# What the machine can do


class Ceilings(NamedTuple):
    """Measured: bytes/s of a copy as large as the iterate, FLOP/s of a large matrix product in the
    dtype, FLOP/s of fp32 outside products (CPU: of an fp32 product), exponentials/s in fp32 (CPU:
    torch's fastest, which is exp2)."""

    bytes: float
    gemm: float
    vector: float
    exps: float

    def words(self) -> str:
        return (
            f"copy {self.bytes / 1e9:.1f} GB/s, products {self.gemm / 1e9:,.0f} GFLOP/s, other"
            f" {self.vector / 1e9:,.0f} GFLOP/s, {self.exps / 1e9:.2f} G exp/s"
        )


if triton is not None:

    @triton.jit
    def _chain_kernel(x, ROUNDS: tl.constexpr, EXP: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(x + at)
        for _ in range(ROUNDS):
            if EXP:
                v = tl.exp(-v)  # settles at 0.567
            else:
                v = v * 0.5 + 0.25
        tl.store(x + at, v)


def _chain(a, exp, rounds=1024, block=1024):
    """Operations per second of chains of exponentials or of multiply-adds (each counts two)."""
    x = torch.ones(block * 8192, device=a.device)
    run = functools.partial(
        _chain_kernel[(8192,)], x, ROUNDS=rounds, EXP=exp, BLOCK=block, num_warps=4
    )
    run()
    best = min(seconds_of(run, a) for _ in range(5))
    return x.numel() * rounds * (1 if exp else 2) / best


@torch.no_grad()
def ceilings(a: argparse.Namespace) -> Ceilings:
    """Measure `Ceilings` with the present number of threads."""
    device, cuda = a.device, a.device.type == "cuda"

    def best(fn, inner):
        fn()
        return min(seconds_of(fn, a, inner) for _ in range(15))

    x = torch.zeros(a.shape.tokens * 2 * a.shape.d_model, device=device)
    y = torch.empty_like(x)
    copy = 2 * x.nbytes / best(lambda: y.copy_(x), 10)

    def product(dtype, n):
        p = torch.ones(n, n, device=device, dtype=dtype)
        out = torch.empty_like(p)
        return 2 * n**3 / best(lambda: torch.mm(p, p, out=out), 3)

    size, narrow = (8192 if cuda else 1024), a.shape.dtype == "bf16"
    gemm = product(torch.bfloat16 if narrow else torch.float32, size)
    if cuda and triton is not None:
        return Ceilings(copy, gemm, _chain(a, False), _chain(a, True))
    vector = product(torch.float32, size) if narrow or cuda else gemm
    small, out = torch.linspace(-9, 0, 2**17, device=device), torch.empty(2**17, device=device)
    exps = small.numel() / min(
        best(lambda exp=exp: exp(small, out=out), 20) for exp in (torch.exp, torch.exp2)
    )
    return Ceilings(copy, gemm, vector, exps)


# What the work is, by formula


class Cost(NamedTuple):
    """Bytes that must cross memory, FLOPs of products, other FLOPs, exponentials."""

    bytes: float = 0.0
    gemm: float = 0.0
    vector: float = 0.0
    exps: float = 0.0

    def seconds(self, limits: Ceilings) -> float:
        """The least time: whichever of the four takes longest."""
        return max(amount / most for amount, most in zip(self, limits))


def scan_cost(tokens: int, d: int, n: int) -> Cost:
    """The selective scan: reads x̃, Δ, B, C, writes o; h = exp(Δ A) h + Δ x̃ B, o = h C."""
    return Cost(4 * tokens * (3 * d + 2 * n), 0, 7 * tokens * d * n, tokens * d * n)


def iteration_costs(shape: Shape, tokens: int) -> dict[str, Cost]:
    """One iteration f(y) of FP-Mamba-1 on so many tokens, part by part, each reading what it needs
    and writing what it makes once. Products are in the dtype, all that is kept in fp32.
    """
    d, n, r = 2 * shape.d_model, shape.d_state, shape.rank
    m, s = r * d + r, 2 if shape.dtype == "bf16" else 4  # mixer's columns, bytes of a weight
    k = m + 2 * n  # columns of the map of sh(y)
    return {
        # y and the x part of k columns in, their sum with sh(y)'s part out, the weights once.
        "projection": Cost(tokens * (4 * d + 8 * k) + s * d * k, 2 * tokens * d * k),
        # The mixer's columns, x, y in, x̃ out; silu, norm and reflect: 11 per entry of u.
        "mix": Cost(tokens * (4 * m + 12 * d), 0, 11 * tokens * r * d, tokens * m),
        # B and C in, unit vectors out.
        "normalise": Cost(tokens * 8 * 2 * n, 0, 7 * tokens * n),
        "scan": scan_cost(tokens, d, n),
        # o, x̃ and y in, f(y) and one number a token out; skip, norm, two maxima.
        "finish and residual": Cost(tokens * (16 * d + 4), 0, 12 * tokens * d),
    }


def iteration_seconds(shape: Shape, tokens: int, limits: Ceilings) -> float:
    """The least time of one iteration: that of its parts, one after the other."""
    return sum(cost.seconds(limits) for cost in iteration_costs(shape, tokens).values())


# What comes out


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit measured, with + where files differ from it; None outside a checkout."""

    def git(*arguments):
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + "+" * bool(git("status", "--porcelain", "lm"))
    except (OSError, subprocess.CalledProcessError):
        return None


def machine(a: argparse.Namespace) -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "device": device_name(a.device),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def title(a: argparse.Namespace, limits: Ceilings, threads: str) -> str:
    m = a.machine
    clock = ", processor seconds" if a.clock == "cpu" else ""
    return (
        f"{a.shape.words()}; {threads}{clock}\n{m['device']}, load {m['load']}, torch {m['torch']},"
        f" commit {m['commit']}; {limits.words()}"
    )


def show(heading: str, rows: list[dict[str, str]]) -> None:
    """Print rows, dicts of text, as a Markdown table under a heading."""
    table = Table(box=box.MARKDOWN)
    for i, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    print(heading, flush=True)
    Console(width=160).print(table)


def ms(seconds: float | None) -> str:
    return "out of memory" if seconds is None else f"{seconds * 1e3:,.{2 if seconds < 1 else 0}f}"


def ratio(base: float | None, seconds: float | None) -> str:
    return "–" if not base or not seconds else f"{base / seconds:.2f}×"


def share(bound: float, seconds: float | None) -> str:
    return "–" if seconds is None else f"{bound / seconds:.0%}"


def with_each_thread_count(
    a: argparse.Namespace,
    shown: Callable[[argparse.Namespace, Ceilings, str], list[dict[str, Any]]],
) -> None:
    """Measure with each number of threads that was asked for; --json gets the rows of all.

    Args:
        shown: of (a, ceilings with so many threads, their number in words), as `title` takes them;
            measures, prints its tables, and returns its rows.
    """
    rows: list[dict[str, Any]] = []
    found = {}
    for count, threads in thread_counts(a):
        limits = ceilings(a)
        found[count] = limits._asdict()
        rows += [dict(row, threads=count) for row in shown(a, limits, threads)]
    write_json(a, rows, ceilings=found)


def write_json(a: argparse.Namespace, rows: list[dict[str, Any]], **more: Any) -> None:
    """--json: the machine, the arguments, the rows."""
    if a.json:
        record = {"machine": a.machine, "arguments": a.arguments, **more, "rows": rows}
        Path(a.json).parent.mkdir(parents=True, exist_ok=True)
        Path(a.json).write_text(json.dumps(record, indent=1, default=str) + "\n")
