"""The exact token on this CPU: a layer's whole solve, forward and backward, in evaluations of f.

python -m benchmarks.exact_token [--threads 1 --json FILE]

`f` is one evaluation of the layer's map on all tokens at once, block.step without a gradient: a
product, mixer, scan and norm. All three are timed in turn, in one run, so that the ratios hold on a
busy machine too. Decoding: one token of every sequence, from the state before it.
"""

import math

import torch

from benchmarks import contenders
from benchmarks.harness import (
    SHAPES,
    Shape,
    ceilings,
    ms,
    parse,
    parser,
    ratio,
    shortest,
    show,
    thread_counts,
    title,
    write_json,
)
from lm.kernels.cpu import cell as cpu_cell

CASES = {
    "D 128, 8 × 256": SHAPES["small"],
    "D 128, 128 × 16": SHAPES["words"],
    "D 768, 8 × 256": Shape(1, 768, 256, 8, 1, 256),
    "D 128, decoding 1": Shape(1, 128, 1, 1, 1, 256),
    "D 128, decoding 32": Shape(1, 128, 1, 32, 1, 256),
    "D 768, decoding 1": Shape(1, 768, 1, 1, 1, 256),
    "D 768, decoding 32": Shape(1, 768, 1, 32, 1, 256),
}


def arguments(block, shape, decoding):
    """What `cpu_cell.cell` takes, of a layer as it is initialised."""
    c, d, n = block.config, 2 * shape.d_model, shape.d_state
    u = torch.randn(shape.batch, shape.length, shape.d_model)
    with torch.no_grad():
        s = block.prepare(u)
    r = shape.rank
    columns = r * d + r + 2 * n
    layout = cpu_cell.Layout(0, r * d, r * d + r, r * d + r + n)
    options = cpu_cell.Options(
        rank=r,
        scale=2.0,
        act=c.mixer_act,
        sequential=True,
        eps=c.eps,
        contractive=None,
        bc_norm=True,
        groups=1,
        norm="layer",
        norm_eps=c.out_norm_epsilon,
        adjoint_clip=math.inf,
    )
    tokens = shape.batch, shape.length
    tensors = dict(
        raw=0.5 * torch.randn(*tokens, columns),
        weight_y=torch.randn(columns, d) / d**0.5,
        x=s.x,
        dt=s.time[0],
        A=s.time[1],
        keep=None,
        gate=torch.rand(*tokens, d),
        D=torch.ones(d),
        norm_weight=torch.ones(d),
        norm_bias=torch.zeros(d),
        y0=torch.randn(shape.batch, d) if decoding else None,
        h0=torch.randn(shape.batch, n, d).mT if decoding else None,
    )
    return (layout, options), tensors, s


def functions(shape, decoding):
    """{"f", "forward", "kept", "both"}: f; the solve; it and what its gradient needs; both ways."""
    block = contenders.blocks(contenders.ours(shape._replace(layers=1), glu_in_loop=True))[0]
    first, tensors, s = arguments(block, shape, decoding)
    y = torch.randn_like(s.x)
    names = ("raw", "weight_y", "x", "dt", "A", "gate", "D", "norm_weight", "norm_bias")
    learnt = {k: v.detach().requires_grad_() if k in names else v for k, v in tensors.items()}

    def evaluate():
        with torch.no_grad():
            return block.step(s, y)

    def forward():
        with torch.no_grad():
            return cpu_cell.cell(*first, *tensors.values(), None)

    def kept():
        return cpu_cell.cell(*first, *learnt.values(), None)[0]

    def both():
        return torch.autograd.grad(kept(), [learnt[k] for k in names], y)

    found = dict(f=evaluate, forward=forward)
    return found if decoding else {**found, "kept": kept, "both": both}


def main() -> None:
    p = parser(__doc__, repeats=25)
    a = parse(p)
    rows = []
    for count, threads in thread_counts(a):
        cells = []
        for name, shape in CASES.items():
            if not any(part in name for part in a.rows.split("|")):
                continue
            decoding = shape.length == 1
            inner = max(1, 2048 // shape.tokens // (4 if shape.d_model == 128 else 32))
            took, _ = shortest(functions(shape, decoding), a, inner)
            backward = None if decoding else took["both"] - took["kept"]
            rows.append(dict(took, case=name, threads=count, backward=backward))
            cells.append(
                {
                    "": name,
                    "f, ms": ms(took["f"]),
                    "forward, ms": ms(took["forward"]),
                    "forward, in f": ratio(took["forward"], took["f"]),
                    "backward, ms": "–" if decoding else ms(backward),
                    "backward, in forwards": "–" if decoding else ratio(backward, took["forward"]),
                    "kept, in forwards": "–" if decoding else ratio(took["kept"], took["forward"]),
                }
            )
        show(title(a, ceilings(a), threads), cells)
    write_json(a, rows)


if __name__ == "__main__":
    main()
