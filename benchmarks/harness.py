"""Shapes, options, timing, tables and JSON output that the benchmarks share."""

import argparse
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from lm.common.heap import keep_freed_memory

ROOT = Path(__file__).parents[1]


class Shape(NamedTuple):
    """Sizes of a model and a batch."""

    layers: int
    d_model: int
    length: int
    batch: int
    rank: int  # number of reflections of the mixer
    vocab: int
    dtype: str = "fp32"  # bf16: matrix products in bf16 by autocast, as in lm/training/engine.py
    d_state: int = 16

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def describe(self) -> str:
        return (
            f"{self.layers} layers, D {self.d_model}, N {self.d_state}, householder {self.rank},"
            f" batch {self.batch} × {self.length} tokens, vocabulary {self.vocab}, {self.dtype}"
        )


SHAPES = {
    "small": Shape(2, 128, 256, 8, 1, 256),
    "words": Shape(1, 128, 16, 128, 1, 64),
    "160m": Shape(12, 768, 2048, 16, 2, 50264, "bf16"),
}


def make_parser(doc: str, repeats: int = 15, shape: str = "small") -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have.

    Args:
        doc: Description of the benchmark.
        repeats: Default of --repeats.
        shape: Default of --shape.
    """
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--shape", default=shape, help=f"{', '.join(SHAPES)}, or several as A,B")
    for name in ("layers", "d-model", "length", "batch", "rank", "vocab"):
        p.add_argument(f"--{name}", type=int, help="replaces the value of the shape")
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    p.add_argument("--dtype", choices=("fp32", "bf16"), help="replaces the value of the shape")
    p.add_argument(
        "--threads", type=parse_numbers, default=[1], help="on a CPU; 1,2 measures with each"
    )
    p.add_argument("--repeats", type=int, default=repeats)
    p.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: processor seconds, for one thread on a busy machine",
    )
    p.add_argument("--rows", default="", help="A|B: only rows whose name contains A or B")
    p.add_argument("--json", help="file to write the numbers to")
    return p


def parse_numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse_options(p: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the options and seed the random generators.

    The process keeps freed memory, as in training.

    Returns:
        The options, with `shapes` as Shapes, `shape` as the first of them, `device` as a
        torch.device, `now` as the clock, and `machine` as a description of the machine.
    """
    a = p.parse_args()
    keep_freed_memory()
    a.arguments = {name: value for name, value in vars(a).items() if value not in (None, "")}
    replaced = {
        name: getattr(a, name) for name in (*Shape._fields[:6], "dtype") if getattr(a, name)
    }
    unknown = [name for name in a.shape.split(",") if name not in SHAPES]
    if unknown:
        p.error(f"--shape: unknown shape {unknown[0]}; known are {', '.join(SHAPES)}")
    a.shapes = [SHAPES[name]._replace(**replaced) for name in a.shape.split(",")]
    a.shape = a.shapes[0]
    default = "cuda" if torch.cuda.is_available() else "cpu"
    a.device = torch.device(default if a.device == "auto" else a.device)
    a.threads = [0] if a.device.type == "cuda" else a.threads
    if a.clock == "cpu" and a.threads != [1]:
        p.error("--clock cpu sums over threads: use it with --threads 1 on a CPU")
    a.now = time.process_time if a.clock == "cpu" else time.perf_counter
    a.machine = describe_machine(a)  # before measuring: commits may follow
    torch.manual_seed(0)
    return a


def autocast(a: argparse.Namespace, **options: Any) -> torch.autocast:
    """Return torch.autocast for the dtype of the shape, with more options of torch.autocast."""
    is_bf16 = a.shape.dtype == "bf16"
    return torch.autocast(a.device.type, torch.bfloat16, enabled=is_bf16, **options)


# Timing


def synchronize(a: argparse.Namespace) -> None:
    if a.device.type == "cuda":
        torch.cuda.synchronize()


def time_call(function: Callable[[], Any], a: argparse.Namespace, inner: int = 1) -> float:
    """Return the seconds of a call, as the mean of `inner` calls in a row."""
    synchronize(a)
    start = a.now()
    for _ in range(inner):
        function()
    synchronize(a)
    return (a.now() - start) / inner


def time_in_turns(
    functions: dict[Any, Callable[[], Any]],
    a: argparse.Namespace,
    inner: int = 1,
    max_seconds: float = 20.0,
) -> tuple[dict[Any, float | None], dict[Any, Any]]:
    """Time functions in turn, a.repeats times each, after one call to warm up.

    Taking turns spreads disturbances of the machine over all functions.

    Args:
        functions: Functions by name; those that --rows excludes are not called.
        a: The options.
        inner: Number of calls in a row, of which the mean is taken.
        max_seconds: A function is called no more after this time, but at least twice.

    Returns:
        The shortest time and the first result of each function, None if it ran out of memory.
    """
    parts = a.rows.split("|")
    functions = {n: f for n, f in functions.items() if any(part in str(n) for part in parts)}
    times: dict[Any, list[float]] = {}
    results, total = dict.fromkeys(functions), dict.fromkeys(functions, 0.0)
    for name, function in functions.items():
        start = a.now()
        try:
            results[name] = function()
            synchronize(a)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            continue
        seconds = a.now() - start
        times[name] = [seconds] if seconds > max_seconds else []
        total[name] = math.inf if seconds > max_seconds else 0.0
    for repeat in range(a.repeats):
        for name, measured in times.items():
            if total[name] < max_seconds or (repeat < 2 and total[name] < math.inf):
                measured.append(time_call(functions[name], a, inner))
                total[name] += measured[-1] * inner
    return {name: min(times[name]) if name in times else None for name in functions}, results


# Output


def find_device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def find_commit() -> str | None:
    """Return the commit, with + if files in lm differ from it; None outside a checkout."""

    def git(*arguments):
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + "+" * bool(git("status", "--porcelain", "lm"))
    except (OSError, subprocess.CalledProcessError):
        return None


def describe_machine(a: argparse.Namespace) -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "device": find_device_name(a.device),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "commit": find_commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def make_title(a: argparse.Namespace, threads: int) -> str:
    """Return a description of the measurement: shape, machine and commit."""
    m = a.machine
    device = f"{threads} threads" if threads else find_device_name(a.device)
    clock = ", processor seconds" if a.clock == "cpu" else ""
    return (
        f"{a.shape.describe()}; {device}{clock}\n{m['device']}, load {m['load']},"
        f" torch {m['torch']}, commit {m['commit']}"
    )


def print_table(heading: str, rows: list[dict[str, str]]) -> None:
    """Print rows as a Markdown table under a heading."""
    table = Table(box=box.MARKDOWN)
    for i, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    print(heading, flush=True)
    Console(width=160).print(table)


def format_ms(seconds: float | None) -> str:
    return "out of memory" if seconds is None else f"{seconds * 1e3:,.{2 if seconds < 1 else 0}f}"


def format_ratio(base: float | None, seconds: float | None) -> str:
    return "–" if not base or not seconds else f"{base / seconds:.2f}×"


def run(
    a: argparse.Namespace,
    measure: Callable[[argparse.Namespace], list[dict[str, Any]]],
    format_rows: Callable[[list[dict[str, Any]]], list[dict[str, str]]],
) -> None:
    """Measure each shape with each number of threads, print tables, and write the JSON file.

    Args:
        a: The options.
        measure: Function that measures a.shape and returns rows.
        format_rows: Function that formats rows for `print_table`.
    """
    rows: list[dict[str, Any]] = []
    for count in a.threads:
        if count:
            torch.set_num_threads(count)
        for shape in a.shapes:
            a.shape = shape
            measured = measure(a)
            print_table(make_title(a, count), format_rows(measured))
            rows += [dict(row, shape=shape._asdict(), threads=count) for row in measured]
    if a.json:
        record = {"machine": a.machine, "arguments": a.arguments, "rows": rows}
        Path(a.json).parent.mkdir(parents=True, exist_ok=True)
        Path(a.json).write_text(json.dumps(record, indent=1, default=str) + "\n")
