"""The paper's rule, one sequence at a time: when it stops and how it damps.

Nothing here is shared with lm. rule: anything with the fields of lm.model.solver.Rule. An iterate
is a list of tokens, tensors (d,).
"""

import math

import torch


def residual_of(y, g):
    """‖y − g‖∞ / (‖g‖∞ + 1e-8) of one token."""
    return float((y - g).abs().max() / (g.abs().max() + 1e-8))


class Damping:
    """The step size of one sequence: multiplied by its decay after `patience` iterations in which
    the residual was never below the lowest so far."""

    def __init__(self, rule):
        self.rule = rule
        self.start()

    def start(self):
        self.step, self.lowest, self.waited = self.rule.stepsize, math.inf, 0

    def see(self, residual):
        if residual < self.lowest:
            self.lowest, self.waited = residual, 0
        else:
            self.waited += 1
        if self.waited >= self.rule.patience:
            self.step, self.waited = self.step * self.rule.stepsize_decay, 0


def quantile(values, q):
    """With linear interpolation between the two nearest."""
    values = sorted(values)
    place = q * (len(values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (place - below) * (values[above] - values[below])


def paper(f, sequences, rule):
    """The paper's solver, App. B.4: one end for the whole batch.

    Args:
        f: f[i] maps the i-th sequence's iterate to the next. sequences: the iterates to start from.
    Returns:
        the last iterates; and (residual, lowest, step) of every iteration, a list of each.
    """
    damping, trace = [Damping(rule) for _ in sequences], []
    while True:
        seen = []
        for i, y in enumerate(sequences):
            g = f[i](y)
            seen.append(max(residual_of(a, b) for a, b in zip(y, g)))
            sequences[i] = [torch.lerp(a, b, damping[i].step) for a, b in zip(y, g)]
            damping[i].see(seen[i])
        lowest, steps = [d.lowest for d in damping], [d.step for d in damping]
        trace.append((seen, lowest, steps))
        left = quantile(lowest, rule.quantile) >= rule.tol
        if not left or max(steps) < rule.min_stepsize or len(trace) >= rule.max_iters:
            return sequences, trace
