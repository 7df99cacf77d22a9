"""Selective scan: the step-by-step loop against the chunked scan, forward and backward, one run.

python benchmarks/scan.py [--length 256 --batch 8 --channels 256 --states 16 --threads 2]
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from lm.model.scan import chunk_decays
from lm.model.scan import selective_scan_plain as selective_scan
from tests.oracles import sequential_scan


def seconds(fn, repeats):
    fn()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        fn()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main():
    p = argparse.ArgumentParser(description=__doc__)
    for name, default in [
        ("length", 256), ("batch", 8), ("channels", 256), ("states", 16), ("threads", 2),
        ("repeats", 7),
    ]:  # fmt: skip
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--json", help="also write the numbers here")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    b, length, d, n = a.batch, a.length, a.channels, a.states
    x, dt = torch.randn(b, length, d), torch.rand(b, length, d)
    A, B, C = -torch.rand(d, n) - 0.1, torch.randn(b, length, n), torch.randn(b, length, n)
    inputs = [t.requires_grad_() for t in (x, dt, A, B, C)]
    with torch.no_grad():
        decays = chunk_decays(dt, A)
        error = (selective_scan(*inputs)[0] - sequential_scan(*inputs)[0]).abs().max().item()

    def forward(fn, **kwargs):
        with torch.no_grad():
            fn(*inputs, **kwargs)

    def both(fn):
        torch.autograd.grad(fn(*inputs)[0].sum(), inputs)

    rows = {
        "loop over time, forward": seconds(lambda: forward(sequential_scan), a.repeats),
        "chunked, forward": seconds(lambda: forward(selective_scan), a.repeats),
        "chunked, shared decays": seconds(
            lambda: forward(selective_scan, decays=decays), a.repeats
        ),
        "loop over time, with backward": seconds(lambda: both(sequential_scan), a.repeats),
        "chunked, with backward": seconds(lambda: both(selective_scan), a.repeats),
    }
    print(f"b {b}, l {length}, d {d}, n {n}, {a.threads} threads; largest difference {error:.1e}")
    base = {"forward": rows["loop over time, forward"]}
    base["backward"] = rows["loop over time, with backward"]
    for name, s in rows.items():
        reference = base["backward" if "backward" in name else "forward"]
        print(f"{name:<32} {s * 1e3:8.1f} ms   {reference / s:5.1f}× the loop")
    if a.json:
        Path(a.json).write_text(json.dumps({"arguments": vars(a), "seconds": rows}, indent=1))


if __name__ == "__main__":
    main()
