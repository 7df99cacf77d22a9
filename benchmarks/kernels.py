"""The kernels of this device against plain PyTorch: scan, roots, and a layer's whole exact solve.

python -m benchmarks.kernels [--shape small --rank 1 --threads 1,2 --json FILE]

The rows of `solve` also show the time in evaluations of the paper's map f, on all tokens at once.
"""

import functools

import torch

from benchmarks import contenders
from benchmarks.harness import Shape, ms, parse, parser, ratio, run, shortest
from benchmarks.root_search import FLOOR, random_pairs
from lm.model.cell import Coefficients, find_root
from lm.model.scan import selective_scan
from tests.oracles import scan_inputs

BACKENDS = ("plain", "auto")


def scan_functions(shape: Shape, device: torch.device) -> dict:
    """{part: function} of the selective scan."""
    size = shape.batch, shape.length, 2 * shape.d_model, shape.d_state
    tensors = scan_inputs(*size, torch.float32)
    del tensors["h0"]
    x, dt, A, B, C = (t.to(device) for t in tensors.values())
    inputs = [t.requires_grad_() for t in (x, dt, A.t().contiguous().t(), B, C)]

    def forward():
        with torch.no_grad():
            return selective_scan(*inputs)[0]

    def both():
        return torch.autograd.grad(selective_scan(*inputs)[0].sum(), inputs)

    return {"scan, forward": forward, "scan, with backward": both}


def root_functions(shape: Shape, device: torch.device) -> dict:
    """{part: function} of the search for the roots of random equations of two reflections."""
    equations = [t.to(device) for t in random_pairs(shape.tokens, 0)]
    return {"roots": functools.partial(find_root, Coefficients(*equations, FLOOR))}


def solve_functions(shape: Shape, device: torch.device) -> dict:
    """Return functions by name: a layer's whole exact solve, and an evaluation of f."""
    model = contenders.ours(shape._replace(layers=1), glu_in_loop=True).to(device).train()
    (block,) = contenders.blocks(model)
    u = torch.randn(shape.batch, shape.length, shape.d_model, device=device)
    y = torch.randn(shape.batch, shape.length, 2 * shape.d_model, device=device)

    def evaluate():
        with torch.no_grad():
            return block.step(block.prepare(u), y)

    def forward():
        with torch.no_grad(), model.solving(**contenders.EXACT_FIELDS):
            return block(u)[0]

    def both():
        with model.solving(**contenders.EXACT_FIELDS):
            block(u)[0].sum().backward()

    return {"f": evaluate, "solve, forward": forward, "solve, with backward": both}


def measure(a) -> list[dict]:
    """Measure every part with every backend."""
    functions = {}
    for make in (scan_functions, root_functions, solve_functions):
        for part, function in make(a.shape, a.device).items():
            for backend in BACKENDS:
                functions[part, backend] = functools.partial(under, backend, function)
    seconds, _ = shortest(functions, a)
    return [
        dict(part=part, backend=backend, seconds=taken, plain=seconds.get((part, "plain")))
        | dict(f=seconds.get(("f", backend)) if part.startswith("solve") else None)
        for (part, backend), taken in seconds.items()
    ]


def under(backend, function):
    with contenders.kernels(backend):
        return function()


def table(rows: list[dict]) -> list[dict[str, str]]:
    """Format rows for `show`."""
    return [
        {
            "": f"{row['part']}, {row['backend']}",
            "ms": ms(row["seconds"]),
            "vs plain": ratio(row["plain"], row["seconds"]),
            "in f": ratio(row["seconds"], row["f"]),
        }
        for row in rows
    ]


if __name__ == "__main__":
    run(parse(parser(__doc__)), measure, table)
