"""The solvers' rules, one sequence and one token at a time: when each stops and how it damps.

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


class Width:
    """The width of `auto`: four times as wide when as many tokens as it spans were frozen within
    max(6, half the width) iterations, a fourth when twice as many went by without or with that."""

    def __init__(self, width, adapt):
        self.now, self.adapt, self.iters, self.count = width, adapt, 0, 0

    def see(self, newly):
        if not self.adapt:
            return
        self.iters, self.count = self.iters + 1, self.count + newly
        limit = max(6, self.now // 2)
        spanned, slow = self.count >= self.now, self.iters >= 2 * limit
        if slow:
            self.now = max(1, self.now // 4)
        elif spanned and self.iters <= limit:
            self.now = min(4**10, 4 * self.now)
        if spanned or slow:
            self.iters = self.count = 0


def causal(f, y, rule, width, adapt=False):
    """One sequence, frozen token by token: each when its residual and those before it are below
    tol, or when it has had all its iterations, or when its step has shrunk away.

    Returns:
        the iterate; and how many evaluations each token had.
    """
    length, frozen, iters = len(y), 0, [0] * len(y)
    damping, window = Damping(rule), Width(width, adapt)
    while frozen < length:
        g, first, end = f(y), frozen, min(frozen + window.now, length)
        residuals = {t: residual_of(y[t], g[t]) for t in range(first, end)}
        for t in residuals:
            iters[t] += 1
        given_up = damping.step < rule.min_stepsize
        while frozen < end and (
            residuals[frozen] < rule.tol
            or iters[frozen] >= rule.max_iters
            or (given_up and frozen == first)
        ):
            frozen += 1
        for t in range(frozen, end):
            y[t] = torch.lerp(y[t], g[t], damping.step)
        damping.see(residuals[first])
        if frozen > first:  # the next token is damped afresh
            damping.start()
        window.see(frozen - first)
    return y, iters
