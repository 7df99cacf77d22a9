"""What the benchmarks share: shapes, options, timing by turns, tables, JSON."""

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


# Timing


def synchronize(a: argparse.Namespace) -> None:
    if a.device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(function: Callable[[], Any], a: argparse.Namespace, inner: int = 1) -> float:
    """Measure one call; the mean of `inner` calls in a row."""
    synchronize(a)
    began = a.now()
    for _ in range(inner):
        function()
    synchronize(a)
    return (a.now() - began) / inner


def shortest(
    functions: dict[Any, Callable[[], Any]],
    a: argparse.Namespace,
    inner: int = 1,
    most: float = 20.0,
) -> tuple[dict[Any, float | None], dict[Any, Any]]:
    """Call the functions that --rows names in turn a.repeats times. The first call warms up.

    Args:
        functions: By name.
        a: The options.
        inner: Calls in a row of which one time is the mean.
        most: Seconds after which a function sits out the remaining repeats, after two of them.

    Returns:
        The shortest time and the first result of each; None for both if it ran out of memory.
    """
    parts = a.rows.split("|")
    functions = {n: f for n, f in functions.items() if any(part in str(n) for part in parts)}
    times: dict[Any, list[float]] = {}
    results, spent = dict.fromkeys(functions), dict.fromkeys(functions, 0.0)
    for name, function in functions.items():
        began = a.now()
        try:
            results[name] = function()
            synchronize(a)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            continue
        taken = a.now() - began
        times[name] = [taken] if taken > most else []
        spent[name] = math.inf if taken > most else 0.0
    for repeat in range(a.repeats):
        for name, taken in times.items():
            if spent[name] < most or (repeat < 2 and spent[name] < math.inf):
                taken.append(seconds_of(functions[name], a, inner))
                spent[name] += taken[-1] * inner
    return {name: min(times[name]) if name in times else None for name in functions}, results


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


def title(a: argparse.Namespace, threads: int) -> str:
    """Return what was measured, where, and at which commit."""
    m = a.machine
    where = f"{threads} threads" if threads else device_name(a.device)
    clock = ", processor seconds" if a.clock == "cpu" else ""
    return (
        f"{a.shape.words()}; {where}{clock}\n{m['device']}, load {m['load']}, torch {m['torch']},"
        f" commit {m['commit']}"
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


def run(
    a: argparse.Namespace,
    measure: Callable[[argparse.Namespace], list[dict[str, Any]]],
    table: Callable[[list[dict[str, Any]]], list[dict[str, str]]],
) -> None:
    """Measure every shape with each number of threads; print a table of each, and write --json.

    Args:
        a: The options. While `measure` runs, a.shape is the shape.
        measure: Returns the rows.
        table: Formats rows for `show`.
    """
    rows: list[dict[str, Any]] = []
    for count in a.threads:
        if count:
            torch.set_num_threads(count)
        for shape in a.shapes:
            a.shape = shape
            found = measure(a)
            show(title(a, count), table(found))
            rows += [dict(row, shape=shape._asdict(), threads=count) for row in found]
    if a.json:
        record = {"machine": a.machine, "arguments": a.arguments, "rows": rows}
        Path(a.json).parent.mkdir(parents=True, exist_ok=True)
        Path(a.json).write_text(json.dumps(record, indent=1, default=str) + "\n")
