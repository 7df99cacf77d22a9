"""One whole solve of one layer, from u to y*, no gradient: the paper's rule and ours.

python -m benchmarks.solve [--shape small --threads 1,2 --json FILE]

The input is a batch of embeddings of random tokens, the weights are seeded and never trained; tol
0.1, as in training, where something is iterated. `evaluations` is what was computed of the layer's
map per token, `bound` the least time that the machine needs for as many (harness.py). `from exact`
is the largest difference from the solution token by token, relative to its largest entry.
"""

import functools
from typing import NamedTuple

import torch

from benchmarks import contenders, paper
from benchmarks.harness import (
    autocast,
    iteration_seconds,
    ms,
    parse,
    parser,
    ratio,
    share,
    shortest,
    show,
    title,
    wanted,
    with_each_thread_count,
)

PAPER_ROW = "paper's procedure"


class Solved(NamedTuple):
    """What one solve came to, by whatever procedure."""

    y: torch.Tensor
    evaluations: float  # a token
    failed: float  # the share of tokens, or of the paper's sequences, that were not solved
    residual: float  # the mean over the batch


def ways(a):
    """{name: options of contenders.running}; of the paper's own procedure {"paper": its scan}."""
    width = max(1, a.shape.length // 16)
    exact = contenders.EXACT_FIELDS
    rows = {
        PAPER_ROW: {"paper": contenders.chunked_scan},
        "paper's procedure, our kernels": contenders.PAPER_FIELDS,
        "exact": exact,
        "exact, plain": exact | {"schedule": "sequential", "kernel": "plain"},
        f"exact, window {width}": exact | {"schedule": f"window:{width}"},
        "exact, parallel": exact | {"schedule": "parallel"},
    }
    if a.device.type == "cuda":
        rows[f"{PAPER_ROW}, our scan"] = {"paper": contenders.fastest_scan}
    return rows


def solver(a):
    """A function (options) → Solved of one layer, the same input each time."""
    s = a.shape
    model = contenders.ours(s._replace(layers=1)).to(a.device).train()  # the rule of training
    layer = model.backbone.layers[0]
    ids = torch.randint(s.vocab, (s.batch, s.length)).to(a.device)
    with torch.no_grad():
        u = layer.norm(model.backbone.embeddings(ids))

    def solve_by_the_paper(scan):
        block = contenders.paper_block(layer.block, scan)
        with torch.no_grad(), autocast(a):
            found = block.solve(block.inputs(u), paper.training_rule())
        failed, residual = (t.double().mean().item() for t in (found.failed_b, found.residual_b))
        return Solved(found.y_bld, found.iterations, failed, residual)

    def solve(options):
        if "paper" in options:
            return solve_by_the_paper(options["paper"])
        with contenders.running(model, **options), torch.no_grad(), autocast(a):
            solution = layer.block._solve(layer.block.prepare(u))
        stats = (solution.stats.evaluations, solution.stats.failed, solution.stats.residual)
        return Solved(solution.y, *(value.double().mean().item() for value in stats))

    return solve


def measure(a, limits):
    solve = solver(a)
    functions = {name: functools.partial(solve, options) for name, options in ways(a).items()}
    seconds, solutions = shortest(wanted(a, functions), a)
    y, rows = solve(contenders.EXACT_FIELDS).y, []
    for name, solution in solutions.items():
        row = dict(name=name, seconds=seconds[name])
        if solution is not None:
            row |= {key: getattr(solution, key) for key in ("evaluations", "failed", "residual")}
            row["exact"] = ((solution.y - y).abs().max() / y.abs().max()).item()
            row["bound"] = row["evaluations"] * iteration_seconds(a.shape, a.shape.tokens, limits)
        rows.append(row)
    return rows


def table(rows):
    """What `show` prints."""
    base = {row["name"]: row["seconds"] for row in rows}
    return [
        {
            "": row["name"],
            "ms": ms(row["seconds"]),
            "evaluations": f"{row['evaluations']:.1f}",
            "ms an evaluation": ms(row["seconds"] / row["evaluations"]),
            "residual": f"{row['residual']:.3f}",
            "from exact": f"{row['exact']:.2f}",
            "vs paper's": ratio(base.get(PAPER_ROW), row["seconds"]),
            "of bound": share(row["bound"], row["seconds"]),
        }
        for row in rows
        if row["seconds"] is not None
    ]


def shown(a, limits, threads):
    """Measures, prints the table, and returns the rows."""
    rows = measure(a, limits)
    show(title(a, limits, threads), table(rows))
    return rows


def main() -> None:
    a = parse(parser(__doc__, repeats=10))
    with_each_thread_count(a, shown)


if __name__ == "__main__":
    main()
