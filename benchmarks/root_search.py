"""Count the evaluations of φ by Picard's search and by the certified search.

A token's equation is s = φ(s), with one unknown per reflection (docs/fixed-point.md).

python -m benchmarks.root_search [--fuzz 1000000 --run RUN ... --sequences 128 --length 64]

The equations are random, from untrained layers of the 160M model (d_inner 1,536), and from the
synthetic runs of --run. A GPU kernel waits for the slowest sequence of its launch, so the rows also
show the mean over tokens of the slowest of 16, 64 and 128 sequences, for each of these numbers that
divides --sequences. With two reflections the certified search evaluates F of
lm/model/certified_root.py, which counts as an evaluation of φ.
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

FLOOR = 1e-5  # epsilon of the norm inside φ
GROUP_SIZES = (16, 64, 128)  # sequences of a launch
CONVERGED = 0  # outcome of a search without a flag of lm/model/solver.py


def draw_equations(n: int, seed: int) -> list[Tensor]:
    """Draw equations of one reflection, whose terms span six decades.

    The vector in the norm is c + m s; c, m and w are the lengths of c, m and the norm's weight.

    Returns:
        The six tensors of `lm.kernels.cpu.roots.find_roots`, r = 1, fp32.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low, high):
        return low + (high - low) * torch.rand(n, generator=generator, dtype=torch.float64)

    def log_uniform(low, high):
        return 10 ** uniform(low, high)

    def random_alignment():
        """Return |cos| of the angle between two vectors, of which 30 % are nearly orthogonal."""
        return torch.where(uniform(0, 1) < 0.3, log_uniform(-4, 0), uniform(0, 1))

    c, m, w = log_uniform(-3, 3), log_uniform(-3, 3), log_uniform(-1, 2)
    # Cosine of the angle between c and m: any, near 1, near −1, or 0.
    cosines = torch.stack([uniform(-1, 1), 1 - log_uniform(-8, 0), log_uniform(-8, 0) - 1, 0 * c])
    cosine = cosines.gather(0, uniform(0, 4).long().unsqueeze(0))[0]
    alpha = w * c * random_alignment() * uniform(-1, 1).sign()
    # Two of three β are positive, because these equations have several solutions more often.
    beta = w * m * random_alignment() * uniform(-1, 2).sign()
    delta = torch.where(uniform(0, 1) < 0.4, 0.0, uniform(-1, 1) * log_uniform(-3, 1))
    tensors = alpha, beta, delta, c.square() + FLOOR, cosine * c * m, m.square()
    shapes = (n, 1), (n, 1, 1), (n, 1), (n,), (n, 1), (n, 1, 1)
    return [t.float().view(shape) for t, shape in zip(tensors, shapes)]


def draw_pair_equations(n: int, seed: int) -> list[Tensor]:
    """Draw equations of two reflections from random vectors whose lengths span six decades.

    Returns:
        As in `draw_equations`, with r = 2.
    """
    generator, r, d = torch.Generator().manual_seed(seed), 2, 8

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def log_uniform(low, high, *shape):
        exponents = torch.rand(*shape, generator=generator, dtype=torch.float64)
        return 10 ** (low + (high - low) * exponents)

    c = normal(n, d) * log_uniform(-3, 3, n, 1)
    m = normal(n, r, d) * log_uniform(-2, 2, n, 1, 1)
    u = normal(n, r, d) * log_uniform(-1, 1, n, 1, 1)
    delta = normal(n, r) * log_uniform(-3, 1, n, 1)
    delta *= torch.rand(n, 1, generator=generator) < 0.5
    alpha = (u @ c.unsqueeze(-1)).squeeze(-1)
    gamma0 = c.square().mean(1) + FLOOR
    gamma1 = (m @ c.unsqueeze(-1)).squeeze(-1) / d
    tensors = alpha, u @ m.transpose(1, 2), delta, gamma0, gamma1, m @ m.transpose(1, 2) / d
    return [t.float() for t in tensors]


def record_equations(run: Callable[[], object]) -> list[Tensor]:
    """Record the equations that a function solves in plain PyTorch.

    Args:
        run: Function that calls a model or a layer whose mixers have the same rank.

    Returns:
        As in `draw_equations`, with n = calls · sequences, in order of the calls.
    """
    from benchmarks.contenders import use_kernels
    from lm.model import cell

    calls, find_root = [], cell.find_root

    def record(coefficients):
        calls.append([t.float() for t in coefficients[:-1]])
        return find_root(coefficients)

    cell.find_root = record
    try:
        with torch.no_grad(), use_kernels("plain"):  # other backends do not call `find_root`
            run()
    finally:
        cell.find_root = find_root
    return [torch.cat(tensors) for tensors in zip(*calls)]


def average_slowest(counts: Tensor, sequences: int, group_size: int) -> float:
    """Return the evaluations of a group's slowest sequence, averaged over calls and groups.

    `counts` (calls · sequences,) are evaluations. A launch computes `group_size` sequences.
    """
    groups = counts.view(-1, sequences).split(group_size, 1)
    return torch.stack([group.amax(1).double().mean() for group in groups]).mean().item()


def print_comparison(name: str, equations: list[Tensor], sequences: int | None) -> None:
    """Print a row for each search, and the number of roots that differ.

    `sequences` is the number per call if the equations come from a model, else None.
    """
    from lm.kernels.cpu.roots import BISECTED, count_evaluations
    from lm.model.cell import Coefficients

    group_sizes = [size for size in GROUP_SIZES if sequences and sequences % size == 0]
    solutions = []
    for label, without_certified_search in (("picard", True), ("certified", False)):
        solution, counts = count_evaluations(equations, FLOOR, without_certified_search)
        solutions.append(solution)
        row = f"{name:22} {label:9} mean {counts.double().mean():6.2f}"
        for group_size in group_sizes:
            slowest = average_slowest(counts, sequences, group_size)
            row += f"  slowest of {group_size} {slowest:6.1f}"
        print(f"{row}  bisected {(solution.outcome == BISECTED).double().mean():.4%}")
    picard, certified = solutions
    coefficients = Coefficients(*(t.double() for t in equations), FLOOR)
    s = picard.s.double()
    _, parts = coefficients.phi(s)
    magnitude = coefficients.size(s, parts)  # of the terms of φ(s) − s
    differs = (picard.s - certified.s).abs().amax(1) > 1e-3 * magnitude
    differing_outcomes = picard.outcome[differs]
    differing_converged = (differing_outcomes == CONVERGED).sum()
    differing_bisected = (differing_outcomes == BISECTED).sum()
    differing_other = len(differing_outcomes) - differing_converged - differing_bisected
    print(
        f"{name:22} roots that differ: {differing_converged} found by Picard iteration,"
        f" {differing_bisected} found by bisection, {differing_other} where Picard found none"
    )


def main() -> None:
    formatter = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--fuzz", type=int, default=1_000_000, help="number of random equations")
    parser.add_argument("--run", nargs="*", default=[], help="runs of the synthetic suite")
    parser.add_argument("--sequences", type=int, default=128, help="sequences of a layer or run")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence of a run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    from lm.model.configuration_fprnn import FPRNNConfig
    from lm.model.modeling_fprnn import FPRNNForCausalLM
    from synthetic.build import load_run
    from synthetic.evaluate import move_to_device

    print_comparison("random", draw_equations(args.fuzz, 0), None)
    print_comparison("random, two", draw_pair_equations(args.fuzz, 0), None)
    for rank, name in ((1, "untrained"), (2, "untrained, two")):
        torch.manual_seed(0)
        config = FPRNNConfig(d_model=768, n_layer=1, vocab_size=1000, d_state=16, mixer_rank=rank)
        model = FPRNNForCausalLM(config).eval()
        ids = torch.randint(0, 1000, (args.sequences, 36))  # (sequences, length)
        equations = record_equations(functools.partial(model, input_ids=ids))
        print_comparison(name, equations, args.sequences)
    for run in args.run:
        _, task, model, _ = load_run(run)
        lengths = (args.length, args.length)
        ids, *_ = move_to_device(task.batch(0, "test", args.length, args.sequences, lengths), "cpu")
        print_comparison(
            Path(run).name,
            record_equations(functools.partial(model, input_ids=ids)),
            args.sequences,
        )


if __name__ == "__main__":
    main()
