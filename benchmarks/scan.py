"""Selective scan on a CPU: a loop over time, the plain chunked scan and the compiled one, one run.

python benchmarks/scan.py [--threads 1 2 --repeats 15 --json FILE]

Times are the shortest of the repeats, taken in turn: other jobs on the machine only add to them.
"""

import argparse
import functools
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from lm.kernels import cpu
from lm.model.scan import chunk_decays
from lm.model.scan import selective_scan_plain as selective_scan
from tests.oracles import scan_inputs, sequential_scan

SIZES = [(8, 256, 256, 16), (128, 16, 128, 16)]  # b, l, d, n
LOOP = "loop over time"


def shortest(functions, repeats):
    """{name: seconds}, the functions called in turn."""
    times = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, fn in functions.items():
            began = time.perf_counter()
            fn()
            if repeat:  # the first warms up
                times[name].append(time.perf_counter() - began)
    return {name: min(seconds) for name, seconds in times.items()}


def versions(size):
    """{part: {name: function}}, and {name: largest difference from the loop}, relative to y."""
    tensors = scan_inputs(*size, torch.float32)
    del tensors["h0"]
    inputs = [t.requires_grad_() for t in tensors.values()]
    with torch.no_grad():
        decays = chunk_decays(*inputs[1:3])
    shared = "plain, shared decays"
    scans = {LOOP: sequential_scan, "plain": selective_scan}
    scans[shared] = lambda *a: selective_scan(*a, decays=decays)
    works, reason = cpu.usable()
    if works:
        scans["compiled"] = cpu.selective_scan
    else:
        print(f"without the compiled scan: {reason}")

    def forward(scan):
        with torch.no_grad():
            return scan(*inputs)[0]

    def both(scan):
        torch.autograd.grad(scan(*inputs)[0].sum(), inputs)

    y = forward(sequential_scan)
    errors = {
        name: ((forward(scan) - y).abs().max() / y.abs().max()).item()
        for name, scan in scans.items()
    }
    parts = {
        part: {name: functools.partial(run, scan) for name, scan in scans.items()}
        for part, run in (("forward", forward), ("with backward", both))
    }
    del parts["with backward"][shared]  # the backward makes its own decays
    return parts, errors


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--threads", type=int, nargs="+", default=[1])
    p.add_argument("--repeats", type=int, default=15)
    p.add_argument("--json", help="also write the numbers here")
    a = p.parse_args()
    rows = []
    for threads in a.threads:
        torch.set_num_threads(threads)
        for size in SIZES:
            parts, errors = versions(size)
            largest = max(errors.values())
            print(f"(b, l, d, n) = {size}, {threads} thread(s); largest difference {largest:.1e}")
            for part, functions in parts.items():
                found = shortest(functions, a.repeats)
                for name, seconds in found.items():
                    loop, plain = (found[base] / seconds for base in (LOOP, "plain"))
                    print(
                        f"  {part + ', ' + name:<32} {seconds * 1e3:9.3f} ms  {loop:6.1f}× the loop"
                        f"  {plain:6.1f}× plain"
                    )
                    rows.append(
                        dict(size=size, threads=threads, part=part, name=name, seconds=seconds)
                        | dict(times_loop=loop, times_plain=plain, error=errors[name])
                    )
    if a.json:
        Path(a.json).write_text(json.dumps({"arguments": vars(a), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
