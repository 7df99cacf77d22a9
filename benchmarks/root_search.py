"""Evaluations of φ by Picard's search and by the certified search, for one or two reflections.

python -m benchmarks.root_search [--fuzz 1000000 --run RUN ... --sequences 128 --length 64]

The equations are random, from untrained layers of the 160M model (d_inner 1,536), and from the
synthetic runs of --run. A launch waits for its slowest sequence, so the rows also have the mean
over tokens of the slowest of 16, 64 and 128 sequences. For two reflections, an evaluation of F
counts as an evaluation of φ.
"""

import argparse
import functools
import os
from collections.abc import Callable

import torch
from torch import Tensor

FLOOR = 1e-5
GROUPS = (16, 64, 128)


def random_equations(n: int, seed: int) -> list[Tensor]:
    """Draw equations whose terms span six decades, with all kinds of angles between c and m.

    Returns:
        The six tensors of `lm.kernels.cpu.roots.find_roots`, r = 1, fp32.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low, high):
        return low + (high - low) * torch.rand(n, generator=generator, dtype=torch.float64)

    def decades(low, high):
        return 10 ** uniform(low, high)

    def share():
        return torch.where(uniform(0, 1) < 0.3, decades(-4, 0), uniform(0, 1))

    c, m, w = decades(-3, 3), decades(-3, 3), decades(-1, 2)
    angles = torch.stack([uniform(-1, 1), 1 - decades(-8, 0), decades(-8, 0) - 1, 0 * c])
    angle = angles.gather(0, uniform(0, 4).long().unsqueeze(0))[0]
    alpha = w * c * share() * uniform(-1, 1).sign()
    beta = w * m * share() * uniform(-1, 2).sign()
    delta = torch.where(uniform(0, 1) < 0.4, 0.0, uniform(-1, 1) * decades(-3, 1))
    numbers = alpha, beta, delta, c.square() + FLOOR, angle * c * m, m.square()
    shapes = (n, 1), (n, 1, 1), (n, 1), (n,), (n, 1), (n, 1, 1)
    return [t.float().view(shape) for t, shape in zip(numbers, shapes)]


def random_pairs(n: int, seed: int) -> list[Tensor]:
    """Draw equations of two reflections from random vectors whose lengths span six decades.

    Returns:
        As in `random_equations`, with r = 2.
    """
    generator, r, d = torch.Generator().manual_seed(seed), 2, 8

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def decades(low, high, *shape):
        exponents = torch.rand(*shape, generator=generator, dtype=torch.float64)
        return 10 ** (low + (high - low) * exponents)

    c = normal(n, d) * decades(-3, 3, n, 1)
    m = normal(n, r, d) * decades(-2, 2, n, 1, 1)
    u = normal(n, r, d) * decades(-1, 1, n, 1, 1)
    delta = normal(n, r) * decades(-3, 1, n, 1)
    delta *= torch.rand(n, 1, generator=generator) < 0.5
    alpha = (u @ c.unsqueeze(-1)).squeeze(-1)
    gamma0 = c.square().mean(1) + FLOOR
    gamma1 = (m @ c.unsqueeze(-1)).squeeze(-1) / d
    numbers = alpha, u @ m.transpose(1, 2), delta, gamma0, gamma1, m @ m.transpose(1, 2) / d
    return [t.float() for t in numbers]


def record_equations(run: Callable[[], object]) -> list[Tensor]:
    """Record the equations that a function solves in plain PyTorch.

    Args:
        run: Function that calls a model or a layer whose mixers have the same rank.

    Returns:
        As in `random_equations`, with n = calls · sequences, in order of the calls.
    """
    from lm.model import cell

    calls, search = [], cell.find_root

    def record(coefficients):
        calls.append([t.float() for t in coefficients[:-1]])
        return search(coefficients)

    kernels = os.environ.get("FPRNN_KERNELS")
    os.environ["FPRNN_KERNELS"] = "plain"  # the other backends do not call `find_root`
    cell.find_root = record
    try:
        with torch.no_grad():
            run()
    finally:
        cell.find_root = search
        os.environ["FPRNN_KERNELS"] = kernels or "auto"
    return [torch.cat(parts) for parts in zip(*calls)]


def average_slowest(counts: Tensor, sequences: int, size: int) -> float:
    """Return the evaluations of the slowest of `size` sequences, averaged over calls and groups."""
    groups = counts.view(-1, sequences).split(size, 1)
    return torch.stack([group.amax(1).double().mean() for group in groups]).mean().item()


def report(name: str, equations: list[Tensor], sequences: int | None) -> None:
    """Print a row for each search, and the number of roots that differ."""
    from lm.kernels.cpu.roots import count_evaluations
    from lm.model.cell import Coefficients

    results = []
    for label, by_picard in (("picard", True), ("certified", False)):
        solution, counts = count_evaluations(equations, FLOOR, by_picard)
        results.append(solution)
        row = f"{name:22} {label:9} mean {counts.double().mean():6.2f}"
        for size in GROUPS if sequences else ():
            row += f"  slowest of {size} {average_slowest(counts, sequences, size):6.1f}"
        print(f"{row}  bisected {(solution.outcome == 2).double().mean():.4%}")
    picard, certified = results
    coefficients = Coefficients(*(t.double() for t in equations), FLOOR)
    s = picard.s.double()
    size = coefficients.size(s, coefficients.phi(s)[1])
    differs = (picard.s - certified.s).abs().amax(1) > 1e-3 * size
    by_picard, by_bisection = ((differs & (picard.outcome == kind)).sum() for kind in (0, 2))
    print(
        f"{name:22} roots that differ: {by_picard} found by Picard iteration,"
        f" {by_bisection} found by bisection"
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--fuzz", type=int, default=1_000_000)
    p.add_argument("--run", nargs="*", default=[])
    p.add_argument("--sequences", type=int, default=128)
    p.add_argument("--length", type=int, default=64)
    args = p.parse_args()
    torch.set_num_threads(1)
    from lm.model.configuration_fprnn import FPRNNConfig
    from lm.model.modeling_fprnn import FPRNNForCausalLM
    from synthetic.build import load_run
    from synthetic.evaluate import as_tensors

    report("random", random_equations(args.fuzz, 0), None)
    report("random, two", random_pairs(args.fuzz, 0), None)
    for rank, name in (1, "untrained"), (2, "untrained, two"):
        torch.manual_seed(0)
        config = FPRNNConfig(d_model=768, n_layer=1, vocab_size=1000, d_state=16, mixer_rank=rank)
        model = FPRNNForCausalLM(config).eval()
        ids = torch.randint(0, 1000, (args.sequences, 36))
        equations = record_equations(functools.partial(model, input_ids=ids))
        report(name, equations, args.sequences)
    for run in args.run:
        _, task, model, _ = load_run(run)
        size = (args.length, args.length)
        ids, *_ = as_tensors(task.batch(0, "test", args.length, args.sequences, size), "cpu")
        report(
            run.rstrip("/").rsplit("/", 1)[-1],
            record_equations(functools.partial(model, input_ids=ids)),
            args.sequences,
        )


if __name__ == "__main__":
    main()
