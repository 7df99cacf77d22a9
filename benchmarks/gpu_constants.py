"""What benchmarks.gpu_model and `fprnn plan` assume of a GPU, measured on this one; whole layers
beside what is predicted of them, with the assumptions and with what was measured.

python -m benchmarks.gpu_constants [--batches 16,64 --length 512 --json FILE]

On a CPU (`--device cpu`, tiny sizes: kernels are interpreted) it only shows that it runs.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.contenders import EXACT_FIELDS, PAPER_FIELDS
from benchmarks.harness import numbers, ratio, show
from benchmarks.root_search import FLOOR, record_equations, slowest
from lm.kernels import BackendError, available
from lm.kernels.cpu.roots import count_evaluations
from lm.kernels.triton import launches, scan
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM

ROOT = Path(__file__).parents[1]
EVALUATIONS = 10  # of the paper's procedure, as gpu_model has it
COUNTED = 12  # tokens whose evaluations are counted
NODES = (2, 512, 4096)  # of a CUDA graph
EXACT = "exact, token by token: what auto is"
LAYERS = {
    f"paper's, {EVALUATIONS} evaluations": {
        **PAPER_FIELDS,
        "tol": 1e-12,
        "max_iters": EVALUATIONS,
    },
    EXACT: {**EXACT_FIELDS, "schedule": "sequential"},
    "Mamba, our scan": {"layers": "mamba"},
}
KERNELS = {"Mamba, our scan": "triton"}  # FPRNN_KERNELS of a layer on a GPU; the others: auto
if find_spec("mamba_ssm"):
    LAYERS["Mamba, mamba-ssm"] = {"layers": "mamba"}
    KERNELS["Mamba, mamba-ssm"] = "mamba_ssm"


class Clock:
    """Times functions on a device."""

    def __init__(self, device: str, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, function: Callable[[], object], inner: int = 1) -> float:
        """Of one call: the median over repeats of `inner` calls in a row, after two to warm up."""
        found = []
        for _ in range(self.repeats + 2):
            self.wait()
            start = time.perf_counter()
            for _ in range(inner):
                function()
            self.wait()
            found.append((time.perf_counter() - start) / inner)
        return statistics.median(found[2:])


def ceilings(clock: Clock, tokens: int, d: int) -> dict[str, float]:
    """What gpu_model.Rates holds but for a token's time."""
    x = torch.randn(tokens, d, device=clock.device)
    small = torch.randn(16, device=clock.device)
    row, rate = torch.ones(1, 1, 16, device=clock.device), -torch.ones(16, 16, device=clock.device)
    found = {"bytes_s": 2 * x.numel() * 4 / clock.seconds(x.clone, 5)}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        rows, matrix = x.to(dtype), torch.randn(d, d, device=clock.device).to(dtype)
        took = clock.seconds(lambda rows=rows, matrix=matrix: rows @ matrix, 5)
        found[name] = 2 * tokens * d * d / took
    found["operation_s"] = clock.seconds(lambda: small + small, 200)
    found["launch_s"] = clock.seconds(lambda: scan.selective_scan(row, row, rate, row, row), 50)
    return found


def widths(clock: Clock, tokens: int, d: int) -> dict[str, float]:
    """Seconds of a product in bf16 with as many columns as a layer's rows have, and with the next
    multiple of 8."""
    x = torch.randn(tokens, d, device=clock.device, dtype=torch.bfloat16)
    wide = d + 33  # one reflection, its gate, B and C of 16
    found = {}
    for columns in (wide, wide + -wide % 8):
        matrix = torch.randn(columns, d, device=clock.device, dtype=torch.bfloat16)
        found[str(columns)] = clock.seconds(lambda matrix=matrix: F.linear(x, matrix), 5)
    return found


def nodes(clock: Clock) -> dict[str, float]:
    """Seconds of a node of CUDA graphs of so many, each next to nothing; none without a GPU."""
    if clock.device != "cuda":
        return {}
    x, found = torch.zeros(16, device="cuda"), {}
    x.add_(1.0)
    for count in NODES:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                x.add_(1.0)
        found[str(count)] = clock.seconds(graph.replay, 10) / count
    return found


def layer(fields: dict[str, Any], a: argparse.Namespace, batch: int) -> Callable[[], None]:
    """A training step of one layer, without an optimizer: forward and backward in bf16."""
    options = dict(vocab_size=64, d_model=a.d_model, n_layer=1, **fields)
    torch.manual_seed(0)
    block = FPRNNForCausalLM(FPRNNConfig(**options)).to(a.device).train().backbone.layers[0].block
    u = torch.randn(batch, a.length, a.d_model, device=a.device).bfloat16().requires_grad_()

    def both():
        with torch.autocast(a.device, torch.bfloat16):
            out = block(u)[0]
        out.float().square().mean().backward()
        block.zero_grad()
        u.grad = None

    return both


def evaluations(a: argparse.Namespace) -> dict[str, float]:
    """Count φ's evaluations of the exact layer: the mean of its tokens, and of the slowest sequence
    of each batch, for which a launch waits. On the CPU, for a few tokens."""
    options = dict(vocab_size=64, d_model=a.d_model, n_layer=1, **EXACT_FIELDS)
    torch.manual_seed(0)
    block = FPRNNForCausalLM(FPRNNConfig(**options)).eval().backbone.layers[0].block
    batch = max(a.batches)
    u = torch.randn(batch, min(a.length, COUNTED), a.d_model)
    _, counts = count_evaluations(record_equations(lambda: block(u)), FLOOR, by_picard=False)
    slowest_of = {f"slowest of {size}": slowest(counts, batch, size) for size in a.batches}
    return {"mean": counts.double().mean().item(), **slowest_of}


def of_kernels(run: Callable[[], None], device: str) -> dict[str, float]:
    """Mean seconds of a launch of each of our kernels within `run`, the most costly in all first;
    none without a GPU."""
    if device != "cuda":
        return {}
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    ours = [row for row in profile.key_averages() if row.key.endswith("_kernel")]
    ours.sort(key=lambda row: -row.self_device_time_total)
    return {row.key: row.self_device_time_total / row.count / 1e6 for row in ours}


def of_tokens(took: dict[int, float], rest: dict[int, float], length: int) -> dict[str, float]:
    """token_s and sequence_s of layers that took so long by batch, all but `rest` for their
    tokens: a line through the smallest batch and the largest."""
    first, last = min(took), max(took)
    a_token = {b: (took[b] - rest[b]) / length for b in (first, last)}
    slope = 0.0 if first == last else (a_token[last] - a_token[first]) / (last - first)
    return {"token_s": a_token[first] - slope * first, "sequence_s": slope}


def predictions(a: argparse.Namespace, rates: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Seconds of whole layers by gpu_model, {batch: {layer: seconds}}, with these rates."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.json"
        options = ["--batches", ",".join(map(str, a.batches)), "--length", str(a.length)]
        options += ["--d-model", str(a.d_model), "--rates", json.dumps(rates)]
        command = [sys.executable, "-m", "benchmarks.gpu_model", *options, "--json", str(path)]
        env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
        batches = json.loads(path.read_text(encoding="utf-8"))["batches"]
    return {
        batch: {name: cost["seconds"][rates["name"]] for name, cost in found["layers"].items()}
        for batch, found in batches.items()
    }


ASSUMED = {"name": "assumed", "bytes_s": 1.4e12, "bf16": 200e12, "fp32": 17e12}  # an A100


def measure(a: argparse.Namespace) -> dict[str, Any]:
    """Time layers, kernels and the ceilings of the device."""
    clock = Clock(a.device, a.repeats)
    tokens, d = max(a.batches) * a.length, 2 * a.d_model
    took: dict[str, dict[str, float]] = {str(batch): {} for batch in a.batches}
    for batch, (name, fields) in itertools.product(a.batches, LAYERS.items()):
        if a.device == "cuda":
            os.environ["FPRNN_KERNELS"] = KERNELS.get(name, "auto")
        try:
            took[str(batch)][name] = clock.seconds(layer(fields, a, batch))
        except BackendError as error:
            print(f"{batch} sequences, {name}: left out: {error}", flush=True)
        else:
            print(f"{batch} sequences, {name}: {took[str(batch)][name] * 1e3:.2f} ms", flush=True)
    os.environ.pop("FPRNN_KERNELS", None)
    kernels = {str(b): of_kernels(layer(LAYERS[EXACT], a, b), a.device) for b in a.batches}
    graphs = [made.graph is not None for made in launches._schedules.values()]
    return {
        "rates": {"name": "measured", **ceilings(clock, tokens, d)},
        "columns": widths(clock, tokens, d),
        "nodes": nodes(clock),
        "kernels": kernels,
        "graphs": f"{sum(graphs)} of {len(graphs)} recorded",
        "layers": took,
    }


def predict(a: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """Add the time of a token, the predictions and φ's evaluations, all computed on the CPU."""
    rates, took = found["rates"], found["layers"]
    # The rest of a layer's time is the prediction with tokens that take no time.
    rest = predictions(a, {**rates, "token_s": 0.0, "sequence_s": 0.0})
    by_batch = {b: took[str(b)][EXACT] for b in a.batches}
    rates |= of_tokens(by_batch, {b: rest[str(b)][EXACT] for b in a.batches}, a.length)
    return {
        **found,
        "rates": rates,
        "assumed": predictions(a, ASSUMED),
        "predicted": predictions(a, rates),
        "evaluations": evaluations(a),
    }


def save(found: dict[str, Any], path: Path | None) -> None:
    """Write the numbers as JSON, if there is a path."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def milliseconds(seconds: float | None) -> str:
    """Return seconds as text in milliseconds; a dash if there is no prediction."""
    return "–" if seconds is None else f"{seconds * 1e3:,.2f}"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--batches", type=numbers, default=[16, 64], help="default: 16,64")
    p.add_argument("--length", type=int, default=512)
    p.add_argument("--d-model", type=int, default=768)
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--json", type=Path, help="also write the numbers here")
    a = p.parse_args()
    print(f"kernels: {available(a.device)}", flush=True)
    found = measure(a)
    save(found, a.json)  # a check whose time is over keeps the GPU's times
    found = predict(a, found)
    save(found, a.json)
    rates = found["rates"]
    rows = [
        {
            "": f"{batch} × {a.length}: {name}",
            "measured, ms": f"{seconds * 1e3:,.2f}",
            "predicted of an A100": milliseconds(found["assumed"][batch].get(name)),
            "with the rates below": milliseconds(found["predicted"][batch].get(name)),
            "as fast as the paper's": ratio(next(iter(of_batch.values())), seconds),
        }
        for batch, of_batch in found["layers"].items()
        for name, seconds in of_batch.items()
    ]
    show(f"\nA layer, forward and backward, d_model {a.d_model}, bf16, {a.device}", rows)
    for name, value in rates.items():
        print(f"{name}: {value if isinstance(value, str) else f'{value:.4g}'}")
    for batch, of_batch in found["kernels"].items():
        times = ", ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in of_batch.items())
        print(f"{batch} sequences, µs a launch: {times}")
    counts = ", ".join(f"{name} {count:.1f}" for name, count in found["evaluations"].items())
    print(f"evaluations of φ per token, untrained: {counts}")
    print(f"columns of a product, seconds: {found['columns']}")
    print(f"nodes of a graph, seconds: {found['nodes']}; graphs: {found['graphs']}")
    token_s, sequence_s = rates["token_s"], rates["sequence_s"]
    print(f"lm/common/cards.py: TOKEN_S, SEQUENCE_S = {token_s:.3g}, {sequence_s:.3g}")
    times = [seconds for of_batch in found["layers"].values() for seconds in of_batch.values()]
    if not all(map(math.isfinite, times)):
        sys.exit("a layer's time is not finite")


if __name__ == "__main__":
    main()
