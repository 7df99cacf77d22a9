"""The selective scan: a loop over time, plain, our fastest kernel, and peers that are present.

python -m benchmarks.scan [--shape small --threads 1,2 --json FILE]

`decays shared` is the plain scan given the decays, as the iterations of one solve share them.
`bound` is the least time that the machine needs (harness.py), for the forward alone.
"""

import functools

import torch

from benchmarks import contenders
from benchmarks.harness import (
    ms,
    parse,
    parser,
    ratio,
    scan_cost,
    share,
    shortest,
    show,
    title,
    wanted,
    with_each_thread_count,
)
from lm import kernels
from lm.model.scan import chunk_decays, selective_scan_plain
from tests.oracles import scan_inputs, sequential_scan

LOOP, PLAIN, SHARED = "loop over time", "plain", "plain, decays shared"
PARTS = "forward", "with backward"


def mamba_ssm_scan():
    """mamba-ssm's own function under our signature, None where it cannot run."""
    try:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
    except ImportError:
        return None

    def scan(x, dt, A, B, C):
        x, dt, B, C = (t.transpose(1, 2) for t in (x, dt, B, C))
        return (selective_scan_fn(x, dt, A, B, C).transpose(1, 2),)

    return scan


def transformers_scan():
    """The scan of transformers' Mamba without mamba-ssm, None where it is no function."""
    from transformers.models.mamba import modeling_mamba

    slow = getattr(modeling_mamba, "mamba_selective_scan", None)
    if slow is None or contenders.present("mamba_ssm"):
        return None

    def scan(x, dt, A, B, C):
        return (
            slow(
                *(t.transpose(1, 2) for t in (x, dt)), A, *(t.transpose(1, 2) for t in (B, C))
            ).transpose(1, 2),
        )

    return scan


def versions(a):
    """{(part, name): function}, and {name: largest difference from the loop}, relative to y."""
    s = a.shape
    size = s.batch, s.length, 2 * s.d_model, s.d_state
    tensors = scan_inputs(*size, torch.float32)
    del tensors["h0"]
    inputs = [t.to(a.device).requires_grad_() for t in tensors.values()]
    x, dt, A, B, C = inputs
    like_the_model = A.detach().t().contiguous().t().requires_grad_()
    with torch.no_grad():
        decays = chunk_decays(dt, A)
    scans = {LOOP: sequential_scan, PLAIN: selective_scan_plain}
    if decays is not None:
        scans[SHARED] = lambda *args: selective_scan_plain(*args, decays=decays)
    for backend in kernels.MODULES:
        with contenders.kernels(backend):
            try:
                found = kernels.find("selective_scan", x)
            except kernels.BackendError as why:
                print(f"without {backend}: {why}")
                continue
        scans[f"kernel {backend}"] = found.selective_scan
    for name, scan in ("mamba-ssm's", mamba_ssm_scan()), ("transformers'", transformers_scan()):
        if scan is not None and (a.device.type == "cuda" or name != "mamba-ssm's"):
            scans[name] = scan
    if a.device.type == "cuda":  # these hold (b,l,d,n), and for the backward many of them
        room = torch.cuda.mem_get_info()[0] / (4 * s.tokens * 2 * s.d_model * s.d_state)
        for name in ("transformers'", LOOP):
            if room < 8 and scans.pop(name, None):
                print(f"without {name}: it does not fit into the memory")

    def forward(scan, A=A):
        with torch.no_grad():
            return scan(x, dt, A, B, C)[0]

    def both(scan):
        ours = x, dt, like_the_model, B, C
        torch.autograd.grad(scan(*ours)[0].sum(), ours)

    y = forward(selective_scan_plain)
    errors = {
        name: ((forward(scan) - y).abs().max() / y.abs().max()).item()
        for name, scan in scans.items()
    }
    functions = {
        (part, name): functools.partial(run, scan)
        for part, run in zip(PARTS, (functools.partial(forward, A=like_the_model), both))
        for name, scan in scans.items()
    }
    functions.pop((PARTS[1], SHARED), None)  # the backward makes its own decays
    return functions, errors


def measure(a, limits):
    """Rows for every part and scan that --rows leaves."""
    functions, errors = versions(a)
    named = {", ".join(key): fn for key, fn in functions.items()}
    seconds, _ = shortest(wanted(a, named), a)
    s = a.shape
    bound = scan_cost(s.tokens, 2 * s.d_model, s.d_state).seconds(limits)
    rows = []
    for part, name in functions:
        taken = seconds.get(f"{part}, {name}")
        if taken is not None:
            row = dict(part=part, name=name, seconds=taken, error=errors[name])
            row |= {
                f"times_{base}": seconds.get(f"{part}, {key}", taken) / taken
                for base, key in (("loop", LOOP), ("plain", PLAIN))
            }
            rows.append(row | dict(bound=bound if part == PARTS[0] else None))
    return rows


def table(rows):
    """What `show` prints."""
    return [
        {
            "": f"{row['part']}, {row['name']}",
            "ms": ms(row["seconds"]),
            "vs loop": ratio(row["times_loop"], 1),
            "vs plain": ratio(row["times_plain"], 1),
            "of bound": share(row["bound"], row["seconds"]) if row["bound"] else "–",
            "error": f"{row['error']:.0e}",
        }
        for row in rows
    ]


def shown(a, limits, threads):
    """Measures, prints the table, and returns the rows."""
    rows = measure(a, limits)
    show(title(a, limits, threads), table(rows))
    return rows


def main() -> None:
    a = parse(parser(__doc__))
    with_each_thread_count(a, shown)


if __name__ == "__main__":
    main()
