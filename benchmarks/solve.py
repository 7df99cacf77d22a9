"""One whole solve of one layer, from u to y*, no gradient: the paper's rule and ours.

python benchmarks/solve.py [--shape small --threads 1,2 --json FILE]

The input is a batch of embeddings of random tokens, the weights are seeded and never trained; tol
0.1, as in training, where something is iterated. `evaluations` is what was computed of the layer's
map per token, `bound` the least time that the machine needs for as many (common.py). `from exact`
is the largest difference from the solution token by token, relative to its largest entry.
"""

import functools

import contenders
import torch
from common import (
    ceilings,
    iteration_seconds,
    ms,
    parse,
    parser,
    ratio,
    share,
    shortest,
    show,
    thread_counts,
    title,
    wanted,
    write_json,
)

PAPER_ROW = "paper's procedure"


def ways(a):
    """{name: options of contenders.running}."""
    width = max(1, a.shape.length // 16)
    exact, paper = contenders.EXACT, contenders.PAPER
    rows = {
        PAPER_ROW: paper | {"scan": "plain"},
        "paper's procedure, our kernels": paper,
        "exact": exact,
        "exact, plain": exact | {"schedule": "sequential", "kernel": "plain"},
        f"exact, window {width}": exact | {"schedule": f"window:{width}"},
        "exact, parallel": exact | {"schedule": "parallel"},
    }
    if a.device.type == "cuda":
        rows["paper's procedure, our scan"] = paper | {"scan": "auto"}
    return rows


def solver(a):
    """A function (options) → Solution of one layer, the same input each time."""
    s = a.shape
    model = contenders.ours(s._replace(layers=1)).to(a.device).train()  # the rule of training
    layer = model.backbone.layers[0]
    ids = torch.randint(s.vocab, (s.batch, s.length)).to(a.device)
    autocast = functools.partial(
        torch.autocast, a.device.type, torch.bfloat16, enabled=s.dtype == "bf16"
    )
    with torch.no_grad():
        u = layer.norm(model.backbone.embeddings(ids))

    def solve(options):
        with contenders.running(model, **options), torch.no_grad(), autocast():
            solution = layer.block._solve(layer.block.prepare(u))
            layer.block.inputs = None
        return solution

    return solve


def measure(a, limits):
    solve = solver(a)
    functions = {name: functools.partial(solve, options) for name, options in ways(a).items()}
    seconds, solutions = shortest(wanted(a, functions), a)
    y, rows = solve(contenders.EXACT).y, []
    for name, solution in solutions.items():
        row = dict(name=name, seconds=seconds[name])
        if solution is not None:
            for key in ("evaluations", "failed", "residual"):
                row[key] = getattr(solution.stats, key).double().mean().item()
            row["exact"] = ((solution.y - y).abs().max() / y.abs().max()).item()
            row["bound"] = row["evaluations"] * iteration_seconds(a.shape, a.shape.tokens, limits)
        rows.append(row)
    return rows


def main():
    a = parse(parser(__doc__, repeats=10))
    everything, measured = [], {}
    for count, threads in thread_counts(a):
        limits = ceilings(a)
        measured[count] = limits._asdict()
        rows = measure(a, limits)
        everything += [dict(row, threads=count) for row in rows]
        base = {row["name"]: row["seconds"] for row in rows}
        cells = [
            {
                "": row["name"], "ms": ms(row["seconds"]),
                "evaluations": f"{row['evaluations']:.1f}",
                "ms an evaluation": ms(row["seconds"] / row["evaluations"]),
                "residual": f"{row['residual']:.3f}", "from exact": f"{row['exact']:.2f}",
                "vs paper's": ratio(base.get(PAPER_ROW), row["seconds"]),
                "of bound": share(row["bound"], row["seconds"]),
            }
            for row in rows if row["seconds"] is not None
        ]  # fmt: skip
        show(title(a, limits, threads), cells)
    write_json(a, everything, ceilings=measured)


if __name__ == "__main__":
    main()
