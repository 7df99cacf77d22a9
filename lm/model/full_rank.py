"""A token's own equation where I − Q has full rank: y itself is searched for, Q_t held fixed.

    y = f(y) = norm(gate ⊙ (history + gain ⊙ (Q x + M y))),  M = I − Q   (cell.py: Token)

An equation may have several solutions. Every precision and every schedule must take the same one:

1. Damped Picard from zero, the paper's iteration, chooses the solution: the one that it has come
   within ROOT_TOL of after at most MOST_PICARD iterations. Neither number depends on the precision.
2. A precision that needs a smaller residual (fp64) polishes: more iterations, then Newton.
3. A token for which Picard has not come that near is solved by bisection, in fp64: with g the
   inverse of the norm's root the equation is linear in y, and g is the only unknown.

2 and 3 factorise matrices. Where they are too large, Anderson's acceleration of the iteration takes
their place: it probably finds a solution. The gradient is found by the same steps.

Shape suffixes: b batch, l length, d channels (d_inner); n tokens, whatever their shape.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .cell import LEAST_INVERSE, MOST_GAIN, MOST_PICARD, Token
from .solver import BISECTED, FAILED, Damping, Rule, token_residual

Map = Callable[[torch.Tensor], torch.Tensor]
# Of n tokens, their indices (n,) in each dimension. They are no mask: to index by a mask a GPU's
# host waits for the number of tokens every time.
Places = tuple[torch.Tensor, ...]

# Relative residual at which Picard has chosen a solution, in every precision. A limit that depended
# on the precision would make fp64 bisect tokens that fp32 iterates, and find another solution.
ROOT_TOL = 2e-6
INNER_TOL = {torch.float32: ROOT_TOL, torch.float64: 1e-12}  # relative residual of a solution
# Bisection factorises a matrix (d,d) of every token left some 40 times.
MOST_DENSE, BISECTIONS, MOST_NEWTON = 256, 30, 10
ELEMENTS_AT_ONCE = 1 << 22  # of these matrices
# Larger matrices are solved one by one on a CPU: with several threads torch 2.13 solves batches of
# 150 rows and more wrongly, raises, or hangs (pytorch issue 142815).
MAX_BATCHED_ROWS = 128
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

    def take(self, which: Places) -> "FullRank":
        """Return the equations of the n tokens at these places."""
        x, history, gain, gate, norm = self.token
        gate = None if gate is None else gate[which]
        token = Token(x[which], history[which], gain[which], gate, norm)
        return self._replace(token=token, raw=self.raw[which])

    def with_matrices(self) -> "FullRank":
        """Return the same equations with Q as a matrix, where a product with it costs less than the
        mixer, which computes Q again every time."""
        d = self.token.x.shape[-1]
        if d > MOST_DENSE or self.mixer.flops_per_token() <= 2 * d**2:
            return self
        Q = self.mixer.dense(self.raw, self.weights)
        return self._replace(raw=Q.flatten(-2), mixer=Matrices(), weights=None)

    def before_norm(self) -> tuple[torch.Tensor, torch.Tensor]:
        """c (n,d) and A (n,d,d) in fp64: f(y) = norm(c + A y)."""
        token = self.token
        c = token.history + token.gain * self.mix(torch.zeros_like(token.x))
        Q = self.mixer.dense(self.raw, self.weights)
        A = token.gain.unsqueeze(-1) * (_eye(Q) - Q)
        if token.gate is not None:
            c, A = c * token.gate, A * token.gate.unsqueeze(-1)
        return c.double(), A.double()


class Matrices:
    """A mixer of given matrices: `raw` (…,d·d) is Q itself."""

    def dense(self, raw: torch.Tensor, weights: None) -> torch.Tensor:
        """Return Q, (…,d,d)."""
        d = math.isqrt(raw.shape[-1])
        return raw.unflatten(-1, (d, d))

    def mix(
        self, raw: torch.Tensor, x: torch.Tensor, y: torch.Tensor, weights: None
    ) -> torch.Tensor:
        """Return x̃ = Q x + (I − Q) y, (…,d)."""
        return _times(self.dense(raw, weights), x - y) + y


def solve_by_iterating(
    equations: FullRank,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The solution, with its gradient.

    Returns: y (b,l,d), x̃ = Q x + M y (b,l,d), and the outcome (b,l) as of `cell.find_root`.
    """
    with torch.no_grad():
        fixed = equations.with_matrices()

        def values(which):
            return (fixed if which is None else fixed.take(which)).value

        def by_matrices(which, start, near):
            return _by_matrices(fixed.take(which), start, near)

        y, outcome = _search(values, torch.zeros_like(equations.token.x), by_matrices)
    if torch.is_grad_enabled():
        y = _with_gradient(equations, y, outcome)
    return y, equations.mix(y), outcome


def _search(map_of, start, by_matrices):
    """Solve y = f(y), each token by itself.

    Args:
        map_of: Function of Places, None for all tokens, that returns f of these tokens.
        start: First iterate, (b,l,d).
        by_matrices: Function of Places, their iterates (n,d) and whether Picard has chosen their
            solution (n,); it returns y (n,d) and whether it is solved (n,).
    Returns:
        y (b,l,d) and the outcome (b,l).
    """
    y, near, solved = _picard(map_of, start)
    left = ~solved
    outcome = left.to(torch.uint8) * FAILED
    if not left.any():
        return y, outcome
    has_matrices = y.shape[-1] <= MOST_DENSE
    at_once = max(1, ELEMENTS_AT_ONCE // y.shape[-1] ** 2) if has_matrices else left.numel()
    for tokens in left.nonzero().split(at_once):
        which = tokens.unbind(1)
        if has_matrices:
            root, solved = by_matrices(which, y[which], near[which])
            method = torch.where(near[which], 0, BISECTED)
        else:
            root, solved = _accelerated(map_of(which), y[which])
            method = torch.zeros_like(solved)
        y = y.index_put(which, torch.where(solved.unsqueeze(-1), root.to(y.dtype), y[which]))
        outcome[which] = torch.where(solved, method, FAILED).to(torch.uint8)
    return y, outcome


def _picard(map_of, start):
    """Iterate from `start` (b,l,d) with the paper's damping.

    Tokens leave the iteration when they are solved, or when they have not come within ROOT_TOL of a
    solution after MOST_PICARD iterations. The rest may iterate as often again, down to INNER_TOL.

    Returns:
        y (b,l,d), whether it has come within ROOT_TOL (b,l), whether it is solved (b,l).
    """
    shape = start.shape[:-1]
    iterate = start.flatten(0, -2)
    y = iterate.clone()
    near, solved = (torch.zeros_like(y[:, 0], dtype=torch.bool) for _ in range(2))
    # The names below stand for these tokens of the flattened ones.
    searched = torch.arange(len(y), device=y.device)
    is_near, is_solved = near.clone(), solved.clone()
    f, is_whole, damping = map_of(None), True, Damping(Rule(), iterate[:, 0])
    for iteration in range(2 * MOST_PICARD):
        value = f(iterate.view(start.shape) if is_whole else iterate).flatten(0, -2)
        residual = token_residual(iterate, value)
        if iteration < MOST_PICARD:
            is_near = is_near | (residual < ROOT_TOL)
        # A solved token keeps its value: it may not depend on its neighbours.
        done = ~is_solved & (residual < INNER_TOL[iterate.dtype])
        iterate = torch.where(done.unsqueeze(-1), value, iterate)
        is_solved = is_solved | done
        moving = ~is_solved if iteration + 1 < MOST_PICARD else is_near & ~is_solved
        damping.update(residual)
        iterate = torch.lerp(iterate, value, (damping.step * moving).unsqueeze(-1))
        count = int(moving.sum())
        if not count:
            break
        if 2 * count <= len(moving):  # write the tokens down that stand, and go on with the others
            y[searched], near[searched], solved[searched] = iterate, is_near, is_solved
            left = moving.nonzero().squeeze(1)
            searched, iterate, is_near, is_solved = (
                t[left] for t in (searched, iterate, is_near, is_solved)
            )
            damping.take(left)
            f, is_whole = map_of(torch.unravel_index(searched, shape)), False
    y[searched], near[searched], solved[searched] = iterate, is_near, is_solved
    return y.view(start.shape), near.view(shape), solved.view(shape)


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
        share = _solve(gram, right)
        moved = g - (torch.stack(self.values, -1).diff(dim=-1) @ share).squeeze(-1)
        leap, size = (torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (moved, g))
        return torch.where(leap <= MOST_LEAP * size, moved, g)  # NaN is not


def _by_matrices(equations, start, near):
    """Solve n tokens by Newton from `start` (n,d) where that is `near` (n,) a solution, else by
    bisection: a solution always exists (cell.py, `_last_resort`).

    Returns:
        y (n,d) and whether it is solved (n,).
    """
    c, A = equations.before_norm()
    norm = equations.token.norm
    if norm.kind == "none":
        y = _solve(_eye(A) - A, c.unsqueeze(-1)).squeeze(-1)
    else:
        y = start.double()
        if not near.all():
            y = torch.where(near.unsqueeze(-1), y, _crossing(c, A, norm))
        y = _polished(c, A, norm, y)
    residual = token_residual(y, norm(c + _times(A, y)))
    return y, residual < INNER_TOL[equations.token.x.dtype]


def _crossing(c, A, norm):
    """y (n,d) where g, the inverse of the norm's root, becomes what it is taken for."""
    weight = norm.weight.double()
    bias = torch.zeros_like(weight) if norm.bias is None else norm.bias.double()
    slope, right = weight.unsqueeze(-1) * norm.centred(A.mT).mT, weight * norm.centred(c)

    def at(g):
        rest = _eye(A) - g[:, None, None] * slope
        y = _solve(rest, (g[:, None] * right + bias).unsqueeze(-1)).squeeze(-1)
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
        step = _solve(_eye(A) - _slope(c, A, norm, y), off.unsqueeze(-1))
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


def _solve(matrix, right):
    """Return x (n,d,k) with matrix · x = right; a singular matrix gives NaN or infinity.

    Args:
        matrix: One matrix per token, (n,d,d).
        right: Right-hand sides, (n,d,k).
    """
    if matrix.device.type == "cpu" and matrix.shape[-1] > MAX_BATCHED_ROWS:
        pairs = zip(matrix, right, strict=True)
        return torch.stack([torch.linalg.solve_ex(M, b)[0] for M, b in pairs])
    return torch.linalg.solve_ex(matrix, right)[0]


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

        def dense(which, start, near):
            some = equations.take(which)
            c, A = some.before_norm()
            slope = _slope(c, A, some.token.norm, y[which].double())
            right = v[which].double().unsqueeze(-1)
            g = _solve(_eye(slope) - slope.mT, right).squeeze(-1)
            return g, torch.isfinite(g).all(-1)

        with torch.no_grad():
            g, found = _search(of, v, dense)
            size, own = (torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (g, v))
            limited = g * (MOST_GAIN * own / size.clamp_min(1e-30)).clamp_max(1.0)
            sound = (found | outcome) & FAILED == 0
            return torch.where(sound.unsqueeze(-1), limited, v)

    first.register_hook(adjoint)
    return y + (first - first.detach())
