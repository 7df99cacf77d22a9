"""A token's own equation where I − Q has full rank: y itself is searched for, Q_t held fixed.

    y = f(y) = norm(gate ⊙ (history + gain ⊙ (Q x + M y))),  M = I − Q   (cell.py: Token)

1. Damped Picard from zero, as the paper's iteration goes. 2. Where it has not converged, bisection:
with g the inverse of the norm's root the equation is linear in y, and one number is unknown. This
factorises matrices; where they are too large, Anderson's acceleration of the iteration takes its
place, which is likely to find a solution. The gradient is found by the same two steps.

Shape suffixes: b batch, l length, d channels (d_inner); n tokens, whatever their shape.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .cell import LEAST_INVERSE, MOST_GAIN, Token
from .solver import BISECTED, FAILED, Damping, Rule, token_residual

Map = Callable[[torch.Tensor], torch.Tensor]

INNER_TOL = {torch.float32: 2e-6, torch.float64: 1e-12}  # relative residual of a solution
MOST_PICARD = 60
# Bisection factorises a matrix (d,d) of every token left some 40 times.
MOST_DENSE, BISECTIONS, MOST_NEWTON = 256, 30, 10
ELEMENTS_AT_ONCE = 1 << 22  # of these matrices
MEMORY, TURN, MOST_ACCELERATED = 8, 20, 120  # Anderson's; iterations between two changes; in all
MOST_LEAP = 1e6  # of its next iterate, in lengths of the last value: it does not follow to infinity


class FullRank(NamedTuple):
    """The equations of tokens (b,l), or n of them."""

    token: Token
    raw: torch.Tensor  # (…,m) what the mixer reads
    mixer: Any  # Mixer
    weights: Any  # MixerWeights

    def mix(self, y: torch.Tensor) -> torch.Tensor:
        """x̃ = Q x + M y. y: (…,d) → (…,d)"""
        return self.mixer.mix(self.raw, self.token.x, y, self.weights)

    def value(self, y: torch.Tensor) -> torch.Tensor:
        """f(y). y: (…,d) → (…,d)"""
        return self.token.value(self.mix(y))

    def take(self, which: torch.Tensor) -> "FullRank":
        """The equations of n of the tokens. which: (b,l) bool."""
        x, history, gain, gate, norm = self.token
        gate = None if gate is None else gate[which]
        token = Token(x[which], history[which], gain[which], gate, norm)
        return self._replace(token=token, raw=self.raw[which])

    def before_norm(self) -> tuple[torch.Tensor, torch.Tensor]:
        """c (n,d) and A (n,d,d) in fp64: f(y) = norm(c + A y)."""
        token = self.token
        c = token.history + token.gain * self.mix(torch.zeros_like(token.x))
        Q = self.mixer.dense(self.raw, self.weights)
        A = token.gain.unsqueeze(-1) * (_eye(Q) - Q)
        if token.gate is not None:
            c, A = c * token.gate, A * token.gate.unsqueeze(-1)
        return c.double(), A.double()


def solve_by_iterating(
    equations: FullRank,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The solution, with its gradient.

    Returns: y (b,l,d), x̃ = Q x + M y (b,l,d), and the outcome (b,l) as of `cell.find_root`.
    """
    with torch.no_grad():

        def values(which):
            return (equations if which is None else equations.take(which)).value

        start = torch.zeros_like(equations.token.x)
        y, outcome = _search(values, start, lambda which: _bisected(equations.take(which)))
    if torch.is_grad_enabled():
        y = _with_gradient(equations, y, outcome)
    return y, equations.mix(y), outcome


def _search(map_of, y, by_matrices):
    """y = f(y), each token by itself.

    Args: map_of: which tokens (b,l), None for all → f of them. y: (b,l,d), the start. by_matrices:
    which → y (n,d), solved (n,).
    Returns: y (b,l,d), the outcome (b,l).
    """
    y, solved = _picard(map_of(None), y)
    left = ~solved
    outcome = left.to(torch.uint8) * FAILED
    if not left.any():
        return y, outcome
    if y.shape[-1] <= MOST_DENSE:
        at_once = max(1, ELEMENTS_AT_ONCE // y.shape[-1] ** 2)
        search, what = by_matrices, BISECTED
    else:
        at_once = left.numel()
        search, what = (lambda which: _accelerated(map_of(which), y[which])), 0
    for tokens in left.nonzero().split(at_once):
        which = torch.zeros_like(left).index_put_(tokens.unbind(1), left.new_ones(()))
        found, solved = search(which)
        y = y.index_put((which,), torch.where(solved.unsqueeze(-1), found.to(y.dtype), y[which]))
        outcome[which] = torch.where(solved, what, FAILED).to(torch.uint8)
    return y, outcome


def _picard(f, y):
    """The paper's damped iteration. → y, and which have converged."""
    damping = Damping(Rule(), y[..., 0])
    solved = torch.zeros_like(y[..., 0], dtype=torch.bool)
    for _ in range(MOST_PICARD):
        g = f(y)
        residual = token_residual(y, g)
        converged = residual < INNER_TOL[y.dtype]
        # One that has converged stays as it is then: it may not depend on its neighbours.
        y = torch.where((converged & ~solved).unsqueeze(-1), g, y)
        solved = solved | converged
        if solved.all():
            break
        damping.update(residual)
        y = torch.lerp(y, g, (damping.step * ~solved).unsqueeze(-1))
    return y, solved


def _accelerated(f, y):
    """TURN iterations with Anderson's acceleration, TURN of Picard, and so on. y: (n,d)."""
    damping, history = Damping(Rule(), y[..., 0]), Anderson()
    solved = torch.zeros_like(y[..., 0], dtype=torch.bool)
    for iteration in range(MOST_ACCELERATED):
        g = f(y)
        residual = token_residual(y, g)
        converged = residual < INNER_TOL[y.dtype]
        y = torch.where((converged & ~solved).unsqueeze(-1), g, y)
        solved = solved | converged
        if solved.all():
            break
        damping.update(residual)
        if iteration // TURN % 2:
            history, moved = Anderson(), torch.lerp(y, g, damping.step.unsqueeze(-1))
        else:
            moved = history.next(y, g)
        y = torch.where(solved.unsqueeze(-1), y, moved)
    return y, solved


class Anderson:
    """Anderson's acceleration of y ← g = f(y), of each of n tokens by itself: the next iterate is
    that combination of the last values whose residuals cancel best (Walker & Ni 2011)."""

    def __init__(self) -> None:
        self.residuals: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def next(self, y: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """The next iterate. y, g: (n,d) → (n,d)"""
        self.residuals = [*self.residuals, g - y][-MEMORY - 1 :]
        self.values = [*self.values, g][-MEMORY - 1 :]
        if len(self.values) == 1:
            return g
        changes = torch.stack(self.residuals, -1).diff(dim=-1)  # (n,d,k)
        gram = changes.mT @ changes
        scale = gram.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None].clamp_min(1e-30)
        gram = gram / scale + torch.finfo(g.dtype).eps * _eye(gram)
        right = changes.mT @ self.residuals[-1].unsqueeze(-1) / scale
        share = torch.linalg.solve_ex(gram, right)[0]
        moved = g - (torch.stack(self.values, -1).diff(dim=-1) @ share).squeeze(-1)
        leap, size = (torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (moved, g))
        return torch.where(leap <= MOST_LEAP * size, moved, g)  # NaN is not


def _bisected(equations):
    """A solution of n tokens: one always exists (see cell.py, `_last_resort`), polished by Newton.
    → y (n,d), solved (n,)"""
    c, A = equations.before_norm()
    norm = equations.token.norm
    if norm.kind == "none":
        y = torch.linalg.solve_ex(_eye(A) - A, c.unsqueeze(-1))[0].squeeze(-1)
    else:
        y = _polished(c, A, norm, _crossing(c, A, norm))
    residual = token_residual(y, norm(c + _times(A, y)))
    return y, residual < INNER_TOL[equations.token.x.dtype]


def _crossing(c, A, norm):
    """y (n,d) where g, the inverse of the norm's root, becomes what it is taken for."""
    weight = norm.weight.double()
    bias = torch.zeros_like(weight) if norm.bias is None else norm.bias.double()
    slope, right = weight.unsqueeze(-1) * norm.centred(A.mT).mT, weight * norm.centred(c)

    def at(g):
        rest = _eye(A) - g[:, None, None] * slope
        y = torch.linalg.solve_ex(rest, (g[:, None] * right + bias).unsqueeze(-1))[0].squeeze(-1)
        square = norm.centred(c + _times(A, y)).square().mean(-1) + norm.eps
        return y, ~(square.rsqrt() >= g)

    low = torch.full_like(c[:, 0], LEAST_INVERSE)
    high = torch.full_like(c[:, 0], norm.eps**-0.5)
    for _ in range(BISECTIONS):
        middle = (low * high).sqrt()
        _, above = at(middle)
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return at(low)[0]


def _polished(c, A, norm, y):
    """y (n,d) by Newton, as long as the residual shrinks."""
    residual = token_residual(y, norm(c + _times(A, y)))
    for _ in range(MOST_NEWTON):
        off = norm(c + _times(A, y)) - y
        step = torch.linalg.solve_ex(_eye(A) - _slope(c, A, norm, y), off.unsqueeze(-1))[0]
        moved = y + step.squeeze(-1)
        after = token_residual(moved, norm(c + _times(A, moved)))
        better = after < residual  # NaN is not
        if not better.any():
            break
        y = torch.where(better.unsqueeze(-1), moved, y)
        residual = torch.where(better, after, residual)
    return y


def _slope(c, A, norm, y):
    """∂f/∂y (n,d,d) at y."""
    if norm.kind == "none":
        return A
    v = norm.centred(c + _times(A, y))
    inverse = (v.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    unit, moved = v * inverse, norm.centred(A.mT).mT
    along = unit.unsqueeze(-1) * (unit.unsqueeze(-2) @ moved) / v.shape[-1]
    return (norm.weight.double() * inverse).unsqueeze(-1) * (moved - along)


def _times(matrix, vector):
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def _eye(like):
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def _with_gradient(equations, y, outcome):
    """y = f(y) with the gradient of the solution: that of f(y) by (I − ∂f/∂y)⁻ᵀ, at most MOST_GAIN
    times as long; where y is no solution, or this is not found, that of f(y) alone."""
    first = equations.value(y)
    if not first.requires_grad:
        return first

    def adjoint(v):
        def of(which):
            some = equations if which is None else equations.take(which)
            at, v_some = (t if which is None else t[which] for t in (y, v))
            with torch.enable_grad():
                y0 = at.detach().requires_grad_()
                f0 = some.value(y0)
            return lambda g: v_some + torch.autograd.grad(f0, y0, g, retain_graph=True)[0]

        def dense(which):
            some = equations.take(which)
            c, A = some.before_norm()
            slope = _slope(c, A, some.token.norm, y[which].double())
            right = v[which].double().unsqueeze(-1)
            g = torch.linalg.solve_ex(_eye(slope) - slope.mT, right)[0].squeeze(-1)
            return g, torch.isfinite(g).all(-1)

        with torch.no_grad():
            g, found = _search(of, v, dense)
            size, own = (torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (g, v))
            limited = g * (MOST_GAIN * own / size.clamp_min(1e-30)).clamp_max(1.0)
            sound = (found | outcome) & FAILED == 0
            return torch.where(sound.unsqueeze(-1), limited, v)

    first.register_hook(adjoint)
    return y + (first - first.detach())
