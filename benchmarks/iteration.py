"""One iteration f(y) of one layer, part by part: plain, our kernels, and the paper's procedure.

python -m benchmarks.iteration [--shape small --threads 1,2 --json FILE]
python -m benchmarks.iteration --shape 160m            # on a GPU

`bound` is the least time that the machine needs for the part, from bytes, FLOPs and exponentials by
formula (harness.py); `of bound` the share of it that our kernels reach. On a CPU what one part
writes may still be in the cache when the next reads it, as it is for a copy of the same size.
"""

import functools

import torch

from benchmarks import contenders, paper
from benchmarks.harness import (
    autocast,
    iteration_costs,
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
from lm.model.scan import selective_scan
from lm.model.state import shift

WHOLE = "iteration"
GRADIENT = "prepare and iteration, with backward"


def problem(a):
    """A layer's block, and a random input u (b,l,d_model) and iterate y (b,l,d) for it."""
    s = a.shape
    block = contenders.blocks(contenders.ours(s._replace(layers=1)))[0].to(a.device)
    u = torch.randn(s.batch, s.length, s.d_model, device=a.device).requires_grad_()
    y = torch.randn(s.batch, s.length, 2 * s.d_model, device=a.device)
    return block, u, y


def parts(block, s, y, in_dtype):
    """{part: function}, each on what those before it have made."""
    with torch.no_grad(), in_dtype():
        x, parts, rows = block._mixed(s, y)
        dt, B, C = parts
        A, keep, decays = s.time.A, s.time.keep, s.time.decays
        o, _ = selective_scan(x, dt, A, B, C, None, keep, decays)
    return {
        "projection": lambda: s.projections.rows(shift(y, s.seqs)),
        "mix": lambda: block.mixer.mix(rows["mixer"], s.x, y, s.mixer),
        "normalise": lambda: block.parts_of(s, rows),
        "scan": lambda: selective_scan(x, dt, A, B, C, None, keep, decays),
        "finish and residual": lambda: block.norm_time(s, o, x, y),
        WHOLE: lambda: block.step_residual(s, y),
    }


def functions(a):
    """{(part, version): function}, and the function of one iteration by the paper's procedure."""
    block, u, y = problem(a)
    in_dtype = functools.partial(autocast, a, cache_enabled=False)

    def no_gradient(kernel, fn):
        with contenders.kernels(kernel), torch.no_grad(), in_dtype():
            return fn()

    def with_gradient(kernel):
        """What a training step differentiates of a layer, but for the gate and projection."""
        with contenders.kernels(kernel), in_dtype():
            block.step(block.prepare(u), y).sum().backward()
        block.zero_grad()

    def paper_iteration():
        """The paper's iteration: f, the residual, the damped update."""
        f = by_the_paper.evaluate(inputs, y)
        return paper.relative_residual(y, f), 0.99 * f + 0.01 * y

    by_the_paper = contenders.paper_block(block)
    with torch.no_grad(), in_dtype():
        inputs = by_the_paper.inputs(u)
    found = {}
    for version in ("plain", "auto"):
        with contenders.kernels(version), in_dtype():
            with torch.no_grad():
                s = block.prepare(u)
            for part, fn in parts(block, s, y, in_dtype).items():
                found[part, version] = functools.partial(no_gradient, version, fn)
            found[GRADIENT, version] = functools.partial(with_gradient, version)
    return found, functools.partial(no_gradient, "plain", paper_iteration)


def measure(a, limits, inner):
    found, paper_iteration = functions(a)
    names = {f"{part}, {version}": fn for (part, version), fn in found.items()}
    seconds, _ = shortest(wanted(a, names), a, inner)
    by_paper = shortest({"paper": paper_iteration}, a)[0]["paper"]
    costs = iteration_costs(a.shape, a.shape.tokens)
    bounds = {part: cost.seconds(limits) for part, cost in costs.items()}
    bounds[WHOLE] = iteration_seconds(a.shape, a.shape.tokens, limits)
    rows = []
    for part in dict.fromkeys(part for part, _ in found):
        plain, kernels = (seconds.get(f"{part}, {v}") for v in ("plain", "auto"))
        row = dict(part=part, plain=plain, kernels=kernels, bound=bounds.get(part))
        row["paper"] = by_paper if part == WHOLE else None
        row["cost"] = costs[part]._asdict() if part in costs else None
        rows.append(row)
    return rows


def table(rows):
    """What `show` prints."""
    return [
        {
            "": row["part"],
            "plain, ms": ms(row["plain"]),
            "kernels, ms": ms(row["kernels"]),
            "vs plain": ratio(row["plain"], row["kernels"]),
            "paper's, ms": ms(row["paper"]) if row["paper"] else "–",
            "vs paper's": ratio(row["paper"], row["kernels"]),
            "bound, ms": ms(row["bound"]) if row["bound"] else "–",
            "of bound": share(row["bound"], row["kernels"]) if row["bound"] else "–",
        }
        for row in rows
    ]


def shown(a, limits, threads):
    """Measures, prints the table, and returns the rows."""
    rows = measure(a, limits, a.inner)
    show(title(a, limits, threads), table(rows))
    return rows


def main() -> None:
    p = parser(__doc__, repeats=25)
    p.add_argument("--inner", type=int, default=5, help="calls in a row that one time is of")
    a = parse(p)
    with_each_thread_count(a, shown)


if __name__ == "__main__":
    main()
