"""Compare the kernels of this device with plain PyTorch: scan, root search, solve of a layer.

python -m benchmarks.kernels [--shape small --rank 1 --threads 1,2 --json FILE]

Column `vs plain` is the speed relative to plain PyTorch. Column `in f` is the time of a solve in
units of one evaluation of the paper's map f on all tokens.
"""

import functools

import torch

from benchmarks import contenders
from benchmarks.harness import (
    Shape,
    format_ms,
    format_ratio,
    make_parser,
    parse_options,
    run,
    time_in_turns,
)
from benchmarks.root_search import FLOOR, draw_pair_equations
from lm.model.cell import Coefficients, find_root
from lm.model.scan import selective_scan
from tests.oracles import scan_inputs

BACKENDS = ("plain", "auto")  # values of FPRNN_KERNELS; auto: kernels of this device


def make_scan_functions(shape: Shape, device: torch.device) -> dict:
    """Return {row name: function} of the selective scan."""
    d_inner = 2 * shape.d_model
    tensors = scan_inputs(shape.batch, shape.length, d_inner, shape.d_state, torch.float32)
    x, dt, A, B, C = (tensors[name].to(device) for name in ("x", "dt", "A", "B", "C"))
    # A is transposed in memory, as in the model.
    inputs = [t.requires_grad_() for t in (x, dt, A.t().contiguous().t(), B, C)]

    def forward():
        with torch.no_grad():
            return selective_scan(*inputs)[0]

    def forward_and_backward():
        return torch.autograd.grad(selective_scan(*inputs)[0].sum(), inputs)

    return {"scan, forward": forward, "scan, with backward": forward_and_backward}


def make_root_functions(shape: Shape, device: torch.device) -> dict:
    """Return {row name: function} that finds roots of random equations of two reflections."""
    equations = [t.to(device) for t in draw_pair_equations(shape.tokens, seed=0)]
    return {"roots": functools.partial(find_root, Coefficients(*equations, FLOOR))}


def make_solve_functions(shape: Shape, device: torch.device) -> dict:
    """Return {row name: function} of an evaluation of f and the exact solve of a layer."""
    model = contenders.make_fpmamba(shape._replace(layers=1), glu_in_loop=True).to(device).train()
    block = model.backbone.layers[0].block
    u = torch.randn(shape.batch, shape.length, shape.d_model, device=device)
    y = torch.randn(shape.batch, shape.length, 2 * shape.d_model, device=device)

    def evaluate_f():
        with torch.no_grad():
            return block.step(block.prepare(u), y)

    def forward():
        with torch.no_grad(), model.solving(**contenders.EXACT_FIELDS):
            return block(u)[0]

    def forward_and_backward():
        with model.solving(**contenders.EXACT_FIELDS):
            block(u)[0].sum().backward()

    return {
        "f": evaluate_f,
        "solve, forward": forward,
        "solve, with backward": forward_and_backward,
    }


def measure(args) -> list[dict]:
    """Return a row for each part and backend; times are in seconds, None if not measured."""
    functions = {}
    for make_functions in (make_scan_functions, make_root_functions, make_solve_functions):
        for part, function in make_functions(args.shape, args.device).items():
            for backend in BACKENDS:
                functions[part, backend] = contenders.use_kernels(backend)(function)
    seconds, _ = time_in_turns(functions, args)
    rows = []
    for (part, backend), part_seconds in seconds.items():
        f_seconds = seconds.get(("f", backend)) if part.startswith("solve") else None
        plain_seconds = seconds.get((part, "plain"))
        row = {"part": part, "backend": backend, "seconds": part_seconds}
        rows.append(row | {"plain": plain_seconds, "f": f_seconds})
    return rows


def format_rows(rows: list[dict]) -> list[dict[str, str]]:
    return [
        {
            "": f"{row['part']}, {row['backend']}",
            "ms": format_ms(row["seconds"]),
            "vs plain": format_ratio(row["plain"], row["seconds"]),
            "in f": format_ratio(row["seconds"], row["f"]),
        }
        for row in rows
    ]


if __name__ == "__main__":
    run(parse_options(make_parser(__doc__)), measure, format_rows)
