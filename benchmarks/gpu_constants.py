"""Time whole layers, each kernel, and a token of the exact recurrence on a GPU.

python -m benchmarks.gpu_constants [--batches 16,64 --length 512 --json FILE]

The last line has the constants TOKEN_S and SEQUENCE_S of lm/common/cards.py. On a CPU
(`--device cpu`, tiny sizes) it times the C++ kernels. Such a run only checks that the script works.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import EXACT_FIELDS, PAPER_FIELDS
from benchmarks.harness import format_ratio, parse_numbers, print_table
from lm.kernels import BackendError, describe_backends
from lm.kernels.triton import launches
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM

# Names of layers: the paper's procedure, the exact solve, and Mamba.
PAPER, EXACT, MAMBA = "paper's, 10 evaluations", "exact, token by token", "Mamba, our scan"
PERSISTENT = "exact, persistent kernels"
LAYERS = {  # layer name → fields of FPRNNConfig
    PAPER: {**PAPER_FIELDS, "tol": 1e-12, "max_iters": 10},
    EXACT: {**EXACT_FIELDS, "schedule": "sequential"},
    MAMBA: {"layers": "mamba"},
}
# Value of FPRNN_KERNELS for a layer on a GPU; auto for layers that are missing here.
KERNEL_CHOICES = {MAMBA: "triton"}
if find_spec("mamba_ssm"):
    LAYERS["Mamba, mamba-ssm"] = {"layers": "mamba"}
    KERNEL_CHOICES["Mamba, mamba-ssm"] = "mamba_ssm"


def make_layer_step(
    fields: dict[str, Any], args: argparse.Namespace, batch: int
) -> Callable[[], None]:
    """Return a function that makes a training step of a layer, in bf16, without an optimizer."""
    config = dict(vocab_size=64, d_model=args.d_model, n_layer=1, **fields)
    torch.manual_seed(0)
    block = FPRNNForCausalLM(FPRNNConfig(**config)).to(args.device).train().backbone.layers[0].block
    u = (
        torch.randn(batch, args.length, args.d_model, device=args.device)
        .bfloat16()
        .requires_grad_()
    )

    def step() -> None:
        with torch.autocast(args.device, torch.bfloat16):
            out = block(u)[0]
        out.float().square().mean().backward()
        block.zero_grad()
        u.grad = None
        if args.device == "cuda":
            torch.cuda.synchronize()

    return step


def measure_median(function: Callable[[], None], repeats: int) -> float:
    """Return the median time of a call, after two calls to warm up."""
    seconds = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def measure_kernels(step: Callable[[], None], device: str) -> dict[str, float]:
    """Return {kernel name: mean seconds per launch}, by decreasing total time; {} on a CPU."""
    if device != "cuda":
        return {}
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
    # The names of our kernels end in _kernel.
    rows = [row for row in profile.key_averages() if row.key.endswith("_kernel")]
    rows.sort(key=lambda row: -row.self_device_time_total)
    return {row.key: row.self_device_time_total / row.count / 1e6 for row in rows}


def fit_token_seconds(layers: dict[int, dict[str, float]], length: int) -> dict[str, float]:
    """Fit TOKEN_S + SEQUENCE_S · batch to the seconds per token of the exact recurrence.

    The line passes through the smallest and the largest batch. The seconds per token are the
    difference between an exact layer and a Mamba layer, which do the same work except the
    recurrence.

    Args:
        layers: {batch size: {layer name: seconds of a training step}}.
        length: Tokens of a sequence.

    Returns:
        {"token_s": TOKEN_S, "sequence_s": SEQUENCE_S}; empty if no batch has both layers.
    """
    token_seconds = {
        batch: (row[EXACT] - row[MAMBA]) / length
        for batch, row in layers.items()
        if EXACT in row and MAMBA in row
    }
    if not token_seconds:
        return {}
    smallest, largest = min(token_seconds), max(token_seconds)
    rise = token_seconds[largest] - token_seconds[smallest]
    slope = rise / (largest - smallest) if smallest < largest else 0.0
    return {"token_s": token_seconds[smallest] - slope * smallest, "sequence_s": slope}


def time_persistent_kernels(
    layers: dict[int, dict[str, float]],
    kernels: dict[int, dict[str, float]],
    args: argparse.Namespace,
) -> None:
    """Time the exact layer on the persistent kernels, and add the times to `layers` and `kernels`.

    Must run last: after an error in a kernel, the process cannot use the GPU any more.
    """
    os.environ["FPRNN_KERNELS"] = "cuda"
    # Triton must not be timed instead of these kernels.
    warnings.filterwarnings("error", ".*is computed in another backend than cuda", RuntimeWarning)
    for batch in args.batches:
        try:
            step = make_layer_step(LAYERS[EXACT], args, batch)
            layers[batch][PERSISTENT] = measure_median(step, args.repeats)
            kernels[batch] |= measure_kernels(step, args.device)
        except (BackendError, RuntimeWarning) as error:
            print(f"{batch} sequences, {PERSISTENT}: left out: {error}", flush=True)
        except RuntimeError as error:
            print(f"{batch} sequences, {PERSISTENT}: {error}", flush=True)
            return


def main() -> None:
    formatter = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batches", type=parse_numbers, default=[16, 64], help="default: 16,64")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--d-model", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    print(f"kernels: {describe_backends(args.device)}", flush=True)
    layers: dict[int, dict[str, float]] = {batch: {} for batch in args.batches}
    for batch, (name, fields) in itertools.product(args.batches, LAYERS.items()):
        if args.device == "cuda":
            os.environ["FPRNN_KERNELS"] = KERNEL_CHOICES.get(name, "auto")
        try:
            layers[batch][name] = measure_median(make_layer_step(fields, args, batch), args.repeats)
        except BackendError as error:
            print(f"{batch} sequences, {name}: left out: {error}", flush=True)
    os.environ.pop("FPRNN_KERNELS", None)
    kernels = {
        batch: measure_kernels(make_layer_step(LAYERS[EXACT], args, batch), args.device)
        for batch in args.batches
    }
    if args.device == "cuda":
        time_persistent_kernels(layers, kernels, args)
    schedules = launches._schedules.values()  # of launches, one for each shape and pass
    graph_count = sum(schedule.graph is not None for schedule in schedules)
    rates = fit_token_seconds(layers, args.length)  # seconds
    record = {
        "rates": rates,
        "kernels": kernels,
        "graphs": f"{graph_count} of {len(schedules)} recorded",
        "layers": layers,
    }
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    rows = [
        {
            "": f"{batch} × {args.length}: {name}",
            "ms": f"{seconds * 1e3:,.2f}",
            "speed relative to the paper's": format_ratio(row.get(PAPER), seconds),
        }
        for batch, row in layers.items()
        for name, seconds in row.items()
    ]
    print_table(
        f"\nA layer, forward and backward, d_model {args.d_model}, bf16, {args.device}", rows
    )
    for batch, row in kernels.items():
        times = ", ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in row.items())
        print(f"{batch} sequences, µs per launch: {times}")
    print(f"CUDA graphs: {record['graphs']}")
    constants = ", ".join(f"{name.upper()} = {seconds:.3g}" for name, seconds in rates.items())
    print(f"lm/common/cards.py: {constants}")
    if not all(math.isfinite(seconds) for row in layers.values() for seconds in row.values()):
        sys.exit("a layer's time is not finite")


if __name__ == "__main__":
    main()
