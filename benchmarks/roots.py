"""The search for the roots of tokens' own equations: plain PyTorch, and the kernels there are.

python -m benchmarks.roots [--shape small --rank 4 --json FILE]

The equations are those of random reflections and vectors, of d = 2 D channels: as many at once as a
batch has sequences (token by token), and as it has tokens (a window over all of them).
"""

import torch

from benchmarks import contenders
from benchmarks.harness import (
    ms,
    parse,
    parser,
    ratio,
    shortest,
    show,
    title,
    with_each_thread_count,
)
from lm import kernels
from lm.model.cell import Coefficients, find_root


def equations(n, shape, device):
    """Coefficients of n tokens whose reflections have gates of 1/2 to 2."""
    d, r = 2 * shape.d_model, shape.rank
    generator = torch.Generator().manual_seed(n)
    c, U, m = (torch.randn(n, k, d, generator=generator) for k in (1, r, r))
    U = U / U.norm(dim=-1, keepdim=True)
    m = U * (0.5 + 1.5 * torch.rand(n, r, 1, generator=generator)) + 0.1 * m
    c, m = (t - t.mean(-1, keepdim=True) for t in (c, m))
    made = Coefficients(
        alpha=(U @ c.mT).squeeze(-1),
        beta=U @ m.mT,
        delta=torch.zeros(n, r),
        gamma0=c.square().mean((-2, -1)) + 1e-5,
        gamma1=(m @ c.mT).squeeze(-1) / d,
        gamma2=m @ m.mT / d,
        floor=1e-5,
    )
    return Coefficients(*(t.to(device) for t in made[:-1]), made.floor)


def searches(a):
    """Names of the searches that can run here, plain first."""
    like = torch.zeros(1, device=a.device)
    found = ["plain"]
    for backend in kernels.MODULES:
        if "roots" in kernels.MODULES[backend]:
            with contenders.kernels(backend):
                try:
                    module = kernels.find("roots", like)
                except kernels.BackendError as why:
                    print(f"without {backend}: {why}")
                    continue
            own = kernels.MODULES[backend]["roots"]  # on another device another one is found
            found += [backend] if module and module.__name__.endswith(own) else []
    return found


def measure(a):
    """A row for every number of tokens and every search."""
    rows = []
    for n in (a.shape.batch, a.shape.tokens):
        coefficients = equations(n, a.shape, a.device)

        def search(backend, coefficients=coefficients):
            with contenders.kernels(backend):
                return find_root(coefficients)

        functions = {name: (lambda name=name: search(name)) for name in searches(a)}
        seconds, results = shortest(functions, a)
        plain = results["plain"][0]
        for name, taken in seconds.items():
            s, solved = results[name]
            rows.append(
                {
                    "tokens": n,
                    "name": name,
                    "seconds": taken,
                    "times_plain": seconds["plain"] / taken,
                    "error": ((s - plain).abs().max() / plain.abs().max()).item(),
                    "solved": solved.double().mean().item(),
                }
            )
    return rows


def table(rows):
    """What `show` prints."""
    return [
        {
            "": f"{row['tokens']:,} tokens, {row['name']}",
            "ms": ms(row["seconds"]),
            "vs plain": ratio(row["times_plain"], 1),
            "off plain": f"{row['error']:.0e}",
            "solved": f"{row['solved']:.1%}",
        }
        for row in rows
    ]


def shown(a, limits, threads):
    """Measures, prints the table, and returns the rows."""
    rows = measure(a)
    show(title(a, limits, threads), table(rows))
    return rows


def main() -> None:
    a = parse(parser(__doc__))
    with_each_thread_count(a, shown)


if __name__ == "__main__":
    main()
