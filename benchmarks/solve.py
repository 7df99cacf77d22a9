"""One whole solve of one layer, from u to y*, no gradient: the paper's rule and ours.

python benchmarks/solve.py [--shape small --threads 1,2 --json FILE]

The input is a batch of embeddings of random tokens, the weights are seeded and never trained; tol
0.1, as in training. `ℓ*` is the iterations until a sequence had converged, `evaluations` what was
computed of f per token, `bound` the least time that the machine needs for as many (common.py).
`from exact` is the largest difference from y* solved to 1e-6 under `parallel`, relative to its
largest entry: at tol 0.1, and where there are several fixed points, schedules differ.
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


def schedules(a):
    """{name: options of contenders.running}."""
    length, cuda = a.shape.length, a.device.type == "cuda"
    rows = {
        PAPER_ROW: dict(stopping="paper", scan="plain"),
        "paper's rule, plain": dict(stopping="paper", kernel="plain"),
        "paper's rule": dict(stopping="paper"),
        "parallel, plain": dict(kernel="plain"),
        "parallel": {},
    }
    if cuda:
        rows[f"{PAPER_ROW}, our scan"] = dict(stopping="paper", scan="auto")
    for w in dict.fromkeys((max(1, length // 4), max(1, length // 16))):
        rows[f"window {w}"] = dict(schedule=f"window:{w}")
    return rows | {"auto": dict(schedule="auto")}


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

    def exact():
        model.config.tol, model.config.max_iters = 1e-6, 1000
        y = solve({}).y
        model.config.tol, model.config.max_iters = 0.1, 100
        return y

    return solve, exact


def measure(a, limits):
    solve, exact = solver(a)
    functions = {name: functools.partial(solve, o) for name, o in schedules(a).items()}
    seconds, solutions = shortest(wanted(a, functions), a)
    y, rows = exact(), []
    for name, solution in solutions.items():
        row = dict(name=name, seconds=seconds[name])
        if solution is not None:
            for key in ("num_iters", "work", "unconverged", "residual"):
                row[key] = getattr(solution.stats, key).double().mean().item()
            row["exact"] = ((solution.y - y).abs().max() / y.abs().max()).item()
            row["bound"] = row["work"] * iteration_seconds(a.shape, a.shape.tokens, limits)
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
                "": row["name"], "ms": ms(row["seconds"]), "ℓ*": f"{row['num_iters']:.1f}",
                "evaluations": f"{row['work']:.1f}",
                "ms an evaluation": ms(row["seconds"] / row["work"]),
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
