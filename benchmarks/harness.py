"""Shapes, options, timing, tables and JSON output that the benchmarks share."""

import argparse
import functools
import json
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
MIN_REPEATS = 2  # of a slow function


class Shape(NamedTuple):
    """Sizes of a model and a batch."""

    layers: int
    d_model: int
    length: int  # tokens per sequence
    batch: int  # sequences
    rank: int  # number of reflections of the mixer (householder)
    vocab: int  # number of token ids
    dtype: str = "fp32"  # bf16: matrix products in bf16 by autocast, as in lm/training/engine.py
    d_state: int = 16

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def describe(self) -> str:
        return (
            f"{self.layers} layers, d_model {self.d_model}, d_state {self.d_state},"
            f" rank {self.rank}, batch {self.batch} × {self.length} tokens,"
            f" vocabulary {self.vocab}, {self.dtype}"
        )


SHAPES = {
    "small": Shape(layers=2, d_model=128, length=256, batch=8, rank=1, vocab=256),
    "words": Shape(layers=1, d_model=128, length=16, batch=128, rank=1, vocab=64),
    "160m": Shape(layers=12, d_model=768, length=2048, batch=16, rank=2, vocab=50264, dtype="bf16"),
}


SIZE_OPTIONS = ("layers", "d_model", "length", "batch", "rank", "vocab")  # fields of Shape


def make_parser(doc: str, repeats: int = 15, shape: str = "small") -> argparse.ArgumentParser:
    """Make a parser with the options that all benchmarks have.

    Args:
        doc: Description of the benchmark.
        repeats: Default of --repeats.
        shape: Default of --shape.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default=shape, help=f"A or A,B of {', '.join(SHAPES)}")
    for name in SIZE_OPTIONS:
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, help="replaces the value of the shape")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="replaces the value of the shape")
    parser.add_argument(
        "--threads",
        type=parse_numbers,
        default=[1],
        help="numbers of CPU threads; 1,2 measures with one thread, then with two",
    )
    parser.add_argument("--repeats", type=int, default=repeats, help="calls of each function")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: processor seconds, for one thread on a busy machine",
    )
    parser.add_argument("--rows", default="", help="A|B: only rows whose name contains A or B")
    parser.add_argument("--json", help="file to write the numbers to")
    return parser


def parse_numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the options and seed the random generators.

    The process keeps freed memory, as in training.

    Returns:
        The options. `shapes` are Shapes, `shape` is the current one, and `device` is a
        torch.device; `threads` is [0] on a GPU. Further fields: `raw_options` has the options as
        parsed, `read_clock` returns seconds, and `machine` describes the machine.
    """
    args = parser.parse_args()
    keep_freed_memory()
    args.raw_options = {
        name: value for name, value in vars(args).items() if value not in (None, "")
    }
    replaced_sizes = {
        name: getattr(args, name) for name in (*SIZE_OPTIONS, "dtype") if getattr(args, name)
    }
    unknown = [name for name in args.shape.split(",") if name not in SHAPES]
    if unknown:
        parser.error(f"--shape: unknown shape {unknown[0]}; known are {', '.join(SHAPES)}")
    args.shapes = [SHAPES[name]._replace(**replaced_sizes) for name in args.shape.split(",")]
    args.shape = args.shapes[0]
    available = "cuda" if torch.cuda.is_available() else "cpu"
    args.device = torch.device(available if args.device == "auto" else args.device)
    args.threads = [0] if args.device.type == "cuda" else args.threads  # 0: PyTorch's number
    if args.clock == "cpu" and args.threads != [1]:
        parser.error("--clock cpu sums over threads: use it with --threads 1 on a CPU")
    args.read_clock = time.process_time if args.clock == "cpu" else time.perf_counter
    args.machine = describe_machine(args)  # before the benchmark: a commit may follow while it runs
    torch.manual_seed(0)
    return args


def autocast(args: argparse.Namespace, **options: Any) -> torch.autocast:
    """Return torch.autocast for the dtype of the shape, with more options of torch.autocast."""
    is_bf16 = args.shape.dtype == "bf16"
    return torch.autocast(args.device.type, torch.bfloat16, enabled=is_bf16, **options)


# Timing


def synchronize(args: argparse.Namespace) -> None:
    if args.device.type == "cuda":
        torch.cuda.synchronize()


def time_call(
    function: Callable[[], Any], args: argparse.Namespace, calls: int = 1
) -> float | None:
    """Return the mean seconds of `calls` calls in a row; None if the GPU ran out of memory."""
    try:
        synchronize(args)
        start = args.read_clock()
        for _ in range(calls):
            function()
        synchronize(args)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None
    return (args.read_clock() - start) / calls


def time_in_turns(
    functions: dict[Any, Callable[[], Any]],
    args: argparse.Namespace,
    calls: int = 1,
    max_seconds: float = 20.0,
) -> tuple[dict[Any, float | None], dict[Any, Any]]:
    """Time functions in turn, args.repeats times each, after one call to warm up.

    Taking turns spreads disturbances of the machine over all functions.

    Args:
        functions: Functions by name; those that --rows excludes are not called.
        args: The options.
        calls: Number of calls in a row that are timed together; their mean is one repeat.
        max_seconds: After MIN_REPEATS repeats, a function whose repeats took this long in all is
            not timed again. If its warm-up call took longer, that call is the only measurement.

    Returns:
        {name: shortest time in seconds} and {name: result of the warm-up call}. Both are None if
        any call of the function ran out of GPU memory.
    """
    patterns = args.rows.split("|")
    functions = {n: f for n, f in functions.items() if any(part in str(n) for part in patterns)}
    results = dict.fromkeys(functions)
    times: dict[Any, list[float]] = {}  # functions that ran out of memory are missing

    def warm_up(name: Any) -> None:
        results[name] = functions[name]()

    for name in functions:
        seconds = time_call(functools.partial(warm_up, name), args)
        if seconds is not None:
            times[name] = [seconds] if seconds > max_seconds else []
    repeated_names = [name for name in times if not times[name]]
    for repeat in range(args.repeats):
        for name in repeated_names.copy():
            if repeat >= MIN_REPEATS and calls * sum(times[name]) >= max_seconds:
                continue
            seconds = time_call(functions[name], args, calls)
            if seconds is None:
                repeated_names.remove(name)
                del times[name]
                results[name] = None
            else:
                times[name].append(seconds)
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
    """Return the commit, followed by + if files in lm differ from it; None outside a checkout."""

    def git(*arguments):
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        is_changed = bool(git("status", "--porcelain", "lm"))
        return git("rev-parse", "--short", "HEAD") + ("+" if is_changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def describe_machine(args: argparse.Namespace) -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "device": find_device_name(args.device),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "commit": find_commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def make_title(args: argparse.Namespace, thread_count: int) -> str:
    """Return a description of the measurement: shape, machine and commit."""
    machine = args.machine
    threads = f"; {thread_count} threads" if thread_count else ""
    clock = ", processor seconds" if args.clock == "cpu" else ""
    return (
        f"{args.shape.describe()}{threads}{clock}\n{machine['device']}, load {machine['load']},"
        f" torch {machine['torch']}, commit {machine['commit']}"
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
    """Return seconds as milliseconds; None means that the call ran out of memory."""
    if seconds is None:
        return "out of memory"
    digits = 2 if seconds < 1 else 0
    return f"{seconds * 1e3:,.{digits}f}"


def format_ratio(numerator: float | None, denominator: float | None) -> str:
    """Return a quotient as text, or – if a number is missing."""
    return f"{numerator / denominator:.2f}×" if numerator and denominator else "–"


def run(
    args: argparse.Namespace,
    measure: Callable[[argparse.Namespace], list[dict[str, Any]]],
    format_rows: Callable[[list[dict[str, Any]]], list[dict[str, str]]],
) -> None:
    """Measure each shape with each number of threads, print tables, and write the JSON file.

    Args:
        args: The options.
        measure: Function that measures args.shape and returns rows.
        format_rows: Function that formats rows for `print_table`.
    """
    rows: list[dict[str, Any]] = []
    for thread_count in args.threads:
        if thread_count:
            torch.set_num_threads(thread_count)
        for shape in args.shapes:
            args.shape = shape
            shape_rows = measure(args)
            if args.rows and not shape_rows:
                raise SystemExit(f"--rows {args.rows}: no row has such a name")
            print_table(make_title(args, thread_count), format_rows(shape_rows))
            conditions = {"shape": shape._asdict(), "threads": thread_count}
            rows += [row | conditions for row in shape_rows]
    if args.json:
        record = {"machine": args.machine, "arguments": args.raw_options, "rows": rows}
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(record, indent=1, default=str) + "\n")
