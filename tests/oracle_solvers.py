"""Reference of the paper's solver, one sequence at a time: stopping rule and damping.

It shares no code with lm. `rule` is any object with the fields of lm.model.solver.Rule. An iterate
is a list of tokens, which are tensors (d,).
"""

import math

import torch


def measure_residual(y, g):
    """Return ‖y − g‖∞ / (‖g‖∞ + 1e-8) of a token."""
    return float((y - g).abs().max() / (g.abs().max() + 1e-8))


class Damping:
    """Step size of a sequence.

    It is multiplied by `stepsize_decay` after `patience` iterations without a new lowest residual.
    """

    def __init__(self, rule):
        self.rule = rule
        self.start()

    def start(self):
        self.step, self.lowest, self.stalled = self.rule.stepsize, math.inf, 0

    def update(self, residual):
        """Adapt the step size to the residual of an iteration."""
        if residual < self.lowest:
            self.lowest, self.stalled = residual, 0
        else:
            self.stalled += 1
        if self.stalled >= self.rule.patience:
            self.step, self.stalled = self.step * self.rule.stepsize_decay, 0


def compute_quantile(values, q):
    """Return a quantile, with linear interpolation between the two nearest values."""
    values = sorted(values)
    position = q * (len(values) - 1)
    low = math.floor(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (position - low) * (values[high] - values[low])


def solve_batch(f, sequences, rule):
    """Run the paper's solver (App. B.4), which stops for the whole batch at once.

    Args:
        f: f[i] maps the iterate of sequence i to the next one.
        sequences: Initial iterates; changed in place.
        rule: Stopping rule and step sizes.

    Returns:
        The last iterates, and for every iteration (residuals, lowest residuals, step sizes), each
        a list over sequences.
    """
    damping, trace = [Damping(rule) for _ in sequences], []
    while True:
        residuals = []
        for i, y in enumerate(sequences):
            g = f[i](y)
            residuals.append(max(measure_residual(a, b) for a, b in zip(y, g)))
            sequences[i] = [torch.lerp(a, b, damping[i].step) for a, b in zip(y, g)]
            damping[i].update(residuals[i])
        lowest, steps = [d.lowest for d in damping], [d.step for d in damping]
        trace.append((residuals, lowest, steps))
        is_converged = compute_quantile(lowest, rule.quantile) < rule.tol
        if is_converged or max(steps) < rule.min_stepsize or len(trace) >= rule.max_iters:
            return sequences, trace
