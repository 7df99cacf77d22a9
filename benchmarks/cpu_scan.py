"""Selective scan on the CPU: the compiled kernel against the plain chunked scan.

python benchmarks/cpu_scan.py [--threads 1 2 --repeats 15 --json out.json]

Times are the shortest of the repeats, in turn: other jobs on the machine only ever add to them.
A window is what the solver iterates: w tokens of every row, each row at its own offset.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from lm.kernels import cpu
from lm.model.scan import chunk_decays
from lm.model.scan import selective_scan_plain as selective_scan

SCANS = [(8, 256, 256, 16), (128, 16, 128, 16)]  # b, l, d, n
WINDOWS = [(64, 4, 128, 16)]  # r, w, d, n
LENGTH = 128  # of the sequences that the windows lie in


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


def tensors(b, length, d, n):
    x, dt = torch.randn(b, length, d), torch.rand(b, length, d)
    A, B, C = -torch.rand(d, n) - 0.1, torch.randn(b, length, n), torch.randn(b, length, n)
    return x, dt, A, B, C


def scans(size):
    """{what: {which: function}} and the largest difference of the results."""
    inputs = [t.requires_grad_() for t in tensors(*size)]
    with torch.no_grad():
        decays = chunk_decays(*inputs[1:3])
        error = (cpu.selective_scan(*inputs)[0] - selective_scan(*inputs)[0]).abs().max().item()

    def forward(fn, **kwargs):
        with torch.no_grad():
            fn(*inputs, **kwargs)

    def both(fn):
        torch.autograd.grad(fn(*inputs)[0].sum(), inputs)

    return {
        "forward": {
            "plain": lambda: forward(selective_scan),
            "plain, shared decays": lambda: forward(selective_scan, decays=decays),
            "kernel": lambda: forward(cpu.selective_scan),
        },
        "with backward": {
            "plain": lambda: both(selective_scan),
            "kernel": lambda: both(cpu.selective_scan),
        },
    }, error


def windows(size):
    """The same for windows. The plain version gathers dt, or has the windows' decays already."""
    r, w, d, n = size
    x, _, A, B, C = tensors(*size)
    dt, h0 = torch.rand(r, LENGTH, d), torch.randn(r, n, d).transpose(1, 2)
    rows, starts = torch.arange(r), torch.randint(0, LENGTH - w, (r,))
    A = A.t().contiguous().t()  # as a solve would keep it
    steps = starts[:, None] + torch.arange(w)

    def plain(decays=None):
        return selective_scan(x, dt[rows[:, None], steps], A, B, C, h0, decays=decays)[0]

    def kernel():
        return cpu.window_scan(x, dt, A, B, C, h0, rows, starts)

    decays = chunk_decays(dt[rows[:, None], steps], A)
    counts = torch.randint(0, w + 1, (r,))
    return {
        "forward": {
            "plain": plain,
            "plain, shared decays": lambda: plain(decays),
            "kernel": kernel,
        },
        "advance": {"kernel": lambda: cpu.window_advance(x, dt, A, B, h0, rows, starts, counts)},
    }, (kernel() - plain()).abs().max().item()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    p.add_argument("--repeats", type=int, default=15)
    p.add_argument("--json", help="also write the numbers here")
    a = p.parse_args()
    works, reason = cpu.usable()
    if not works:
        sys.exit(f"nothing to compare: {reason}")
    rows = []
    for threads in a.threads:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        cases = [("scan", size, *scans(size)) for size in SCANS]
        cases += [("window", size, *windows(size)) for size in WINDOWS]
        for kind, size, parts, error in cases:
            print(f"{kind} {size}, {threads} thread(s); largest difference {error:.1e}")
            for part, functions in parts.items():
                found = shortest(functions, a.repeats)
                for name, seconds in found.items():
                    ratio = found.get("plain", seconds) / seconds
                    print(f"  {part + ', ' + name:<32} {seconds * 1e3:9.3f} ms   {ratio:5.1f}×")
                    rows.append(
                        dict(kind=kind, size=size, threads=threads, part=part, name=name)
                        | dict(seconds=seconds, times_plain=ratio, error=error)
                    )
    if a.json:
        Path(a.json).write_text(json.dumps({"arguments": vars(a), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
