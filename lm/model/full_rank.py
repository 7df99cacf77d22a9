"""A token's own equation if I − Q has full rank: the unknown is y itself. Q is known (cell.py).

    y = f(y) = norm(gate ⊙ (history + gain ⊙ (Q x + M y))),  M = I − Q   (cell.py: EquationTerms)

An equation may have several solutions. Every precision and every schedule must find the same one:

1. Damped Picard from zero, the paper's iteration, chooses the solution that it reaches to within
   ROOT_TOL in at most MAX_PICARD_STEPS iterations. Neither number depends on the precision.
2. fp64 needs a smaller residual: more iterations, and then Newton, polish the solution.
3. If Picard does not come that near, bisection in fp64 solves the token. Given g, the factor
   1/√(mean square + eps) of the norm, the equation is linear in y; so g is the only unknown.

Steps 2 and 3 factorize matrices. If these are too large, Anderson acceleration replaces them; it
usually finds a solution. The same steps compute the gradient.

Shape suffixes: b batch, l length, d channels (d_inner); n tokens, whatever their shape.
"""

import math
from typing import Any, NamedTuple

import torch

from .cell import MAX_GAIN, MAX_PICARD_STEPS, MIN_INVERSE_NORM, EquationTerms
from .solver import BISECTED, FAILED, Damping, Rule, token_residual

# Indices (n,) of n tokens in each dimension. A mask would make the host wait for the GPU to count
# the tokens.
Indices = tuple[torch.Tensor, ...]

# Relative residual at which Picard has chosen a solution, in every precision. If it depended on the
# precision, fp64 would bisect tokens that fp32 iterates, and find another solution.
ROOT_TOL = 2e-6
INNER_TOL = {torch.float32: ROOT_TOL, torch.float64: 1e-12}  # relative residual of a solution
BISECTIONS, MAX_NEWTON_STEPS = 30, 10
# Largest d for bisection and Newton: each of their steps factorizes a (d,d) matrix per token.
MAX_DENSE_WIDTH = 256
MAX_MATRIX_ELEMENTS = 1 << 22  # of all matrices that are factorized at once
# Larger matrices are solved one by one on a CPU: with several threads torch 2.13 solves batches of
# 150 rows and more wrongly, raises, or hangs (pytorch issue 142815).
MAX_BATCHED_ROWS = 128
ANDERSON_MEMORY = 8  # differences of residuals that Anderson acceleration combines
ANDERSON_PERIOD = 20  # iterations with acceleration, before as many without it
MAX_ACCELERATED_ITERS = 120
# Largest norm of the next iterate of Anderson acceleration, relative to the last value f(y). It
# rules out steps to infinity.
MAX_STEP_RATIO = 1e6


class FullRank(NamedTuple):
    """Equations of tokens (b,l), or of n tokens."""

    terms: EquationTerms
    raw: torch.Tensor  # (…,m), see mixer_base.py
    mixer: Any  # Mixer
    weights: Any  # MixerWeights

    def mix(self, y: torch.Tensor) -> torch.Tensor:
        """Return x̃ = Q x + M y for y (…,d)."""
        return self.mixer.mix(self.raw, self.terms.x, y, self.weights)

    def value(self, y: torch.Tensor) -> torch.Tensor:
        """Return f(y) for y (…,d)."""
        return self.terms.value(self.mix(y))

    def select(self, indices: Indices) -> "FullRank":
        """Return the equations of the n tokens with these indices."""
        x, history, gain, gate, norm = self.terms
        gate = None if gate is None else gate[indices]
        terms = EquationTerms(x[indices], history[indices], gain[indices], gate, norm)
        return self._replace(terms=terms, raw=self.raw[indices])

    def with_matrices(self) -> "FullRank":
        """Return the same equations with Q as a matrix, if products with it are cheaper."""
        d = self.terms.x.shape[-1]
        if d > MAX_DENSE_WIDTH or self.mixer.flops_per_token() <= 2 * d**2:
            return self
        Q = self.mixer.dense(self.raw, self.weights)
        return self._replace(raw=Q.flatten(-2), mixer=MatrixMixer(), weights=None)

    def linear_part(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return c (n,d) and A (n,d,d) in fp64 with f(y) = norm(c + A y)."""
        terms = self.terms
        c = terms.history + terms.gain * self.mix(torch.zeros_like(terms.x))
        Q = self.mixer.dense(self.raw, self.weights)
        A = terms.gain.unsqueeze(-1) * (_eye(Q) - Q)
        if terms.gate is not None:
            c, A = c * terms.gate, A * terms.gate.unsqueeze(-1)
        return c.double(), A.double()


class MatrixMixer:
    """A mixer whose argument `raw` (…,d·d) is the matrix Q."""

    def dense(self, raw: torch.Tensor, weights: None) -> torch.Tensor:
        """Return Q, (…,d,d)."""
        d = math.isqrt(raw.shape[-1])
        return raw.unflatten(-1, (d, d))

    def mix(
        self, raw: torch.Tensor, x: torch.Tensor, y: torch.Tensor, weights: None
    ) -> torch.Tensor:
        """Return x̃ = Q x + (I − Q) y, (…,d)."""
        return _times(self.dense(raw, weights), x - y) + y


def solve_by_iterating(equations: FullRank) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Solve the equations, with the gradient of the solution.

    Returns:
        y (b,l,d), the mixed input x̃ = Q x + M y (b,l,d), and the status (b,l) as in
        `cell.find_root`.
    """
    with torch.no_grad():
        fast_equations = equations.with_matrices()

        def make_map(indices):
            selected = fast_equations if indices is None else fast_equations.select(indices)
            return selected.value

        def solve_dense(indices, start, is_near):
            return _solve_dense(fast_equations.select(indices), start, is_near)

        y, status = _search(make_map, torch.zeros_like(equations.terms.x), solve_dense)
    if torch.is_grad_enabled():
        y = _attach_gradient(equations, y, status)
    return y, equations.mix(y), status


def _search(make_map, start, solve_dense):
    """Solve y = f(y) for each token by itself.

    Args:
        make_map: Function of Indices that returns f of these tokens, (n,d) → (n,d); of None it
            returns f of all tokens, (b,l,d) → (b,l,d).
        start: First iterate, (b,l,d).
        solve_dense: Function for small d, which factorizes matrices. Its arguments are Indices, the
            tokens' iterates (n,d), and whether these are within ROOT_TOL of a solution (n,). It
            returns y (n,d) and whether it is solved (n,).

    Returns:
        y (b,l,d) and the status (b,l).
    """
    y, is_near, is_solved = _run_picard(make_map, start)
    is_unsolved = ~is_solved
    status = is_unsolved.to(torch.uint8) * FAILED
    if not is_unsolved.any():
        return y, status
    d = y.shape[-1]
    is_dense = d <= MAX_DENSE_WIDTH
    max_tokens = max(1, MAX_MATRIX_ELEMENTS // d**2) if is_dense else is_unsolved.numel()
    for tokens in is_unsolved.nonzero().split(max_tokens):
        indices = tokens.unbind(1)
        if is_dense:
            root, is_root = solve_dense(indices, y[indices], is_near[indices])
            root_status = torch.where(is_near[indices], 0, BISECTED)
        else:
            root, is_root = _run_accelerated(make_map(indices), y[indices])
            root_status = torch.zeros_like(is_root)
        root = torch.where(is_root.unsqueeze(-1), root.to(y.dtype), y[indices])
        y = y.index_put(indices, root)
        status[indices] = torch.where(is_root, root_status, FAILED).to(torch.uint8)
    return y, status


def _run_picard(make_map, start):
    """Iterate from `start` (b,l,d) with the paper's damping.

    A token stops when it is solved (residual below INNER_TOL). After MAX_PICARD_STEPS iterations
    only tokens near a solution (residual below ROOT_TOL) continue, for at most as many iterations.

    Returns:
        y (b,l,d), whether it is near a solution (b,l), and whether it is solved (b,l).
    """
    shape = start.shape[:-1]
    iterate = start.flatten(0, -2)
    y = iterate.clone()
    all_near, all_solved = (torch.zeros_like(y[:, 0], dtype=torch.bool) for _ in range(2))
    # The variables below contain only the tokens that still iterate, at the flat indices `active`.
    active = torch.arange(len(y), device=y.device)
    is_near, is_solved = all_near.clone(), all_solved.clone()
    f, has_all_tokens, damping = make_map(None), True, Damping(Rule(), iterate[:, 0])
    for iteration in range(2 * MAX_PICARD_STEPS):
        # 1. Evaluate f.
        value = f(iterate.view(start.shape) if has_all_tokens else iterate).flatten(0, -2)
        residual = token_residual(iterate, value)
        if iteration < MAX_PICARD_STEPS:
            is_near = is_near | (residual < ROOT_TOL)
        # 2. Freeze solved tokens, so that their solution does not depend on other tokens.
        is_done = ~is_solved & (residual < INNER_TOL[iterate.dtype])
        iterate = torch.where(is_done.unsqueeze(-1), value, iterate)
        is_solved = is_solved | is_done
        # 3. Take a damped step with the others.
        is_moving = ~is_solved if iteration + 1 < MAX_PICARD_STEPS else is_near & ~is_solved
        damping.update(residual)
        iterate = torch.lerp(iterate, value, (damping.stepsize * is_moving).unsqueeze(-1))
        moving_count = int(is_moving.sum())
        if not moving_count:
            break
        # 4. When half of the tokens are frozen, store all and continue only with the others.
        if 2 * moving_count <= len(is_moving):
            y[active], all_near[active], all_solved[active] = iterate, is_near, is_solved
            moving = is_moving.nonzero().squeeze(1)
            active, iterate = active[moving], iterate[moving]
            is_near, is_solved = is_near[moving], is_solved[moving]
            damping.select(moving)
            f, has_all_tokens = make_map(torch.unravel_index(active, shape)), False
    y[active], all_near[active], all_solved[active] = iterate, is_near, is_solved
    return y.view(start.shape), all_near.view(shape), all_solved.view(shape)


def _run_accelerated(f, y):
    """Iterate from y (n,d), with Anderson acceleration and with damping in turn.

    Returns:
        y (n,d) and whether it is solved (n,).
    """
    damping, anderson = Damping(Rule(), y[..., 0]), Anderson()
    is_solved = torch.zeros_like(y[..., 0], dtype=torch.bool)
    for iteration in range(MAX_ACCELERATED_ITERS):
        value = f(y)
        residual = token_residual(y, value)
        has_converged = residual < INNER_TOL[y.dtype]
        y = torch.where((has_converged & ~is_solved).unsqueeze(-1), value, y)
        is_solved = is_solved | has_converged
        if is_solved.all():
            break
        damping.update(residual)
        if iteration // ANDERSON_PERIOD % 2:
            anderson, next_y = Anderson(), torch.lerp(y, value, damping.stepsize.unsqueeze(-1))
        else:
            next_y = anderson.next(y, value)
        y = torch.where(is_solved.unsqueeze(-1), y, next_y)
    return y, is_solved


class Anderson:
    """Anderson acceleration of y ← f(y), for each of n tokens by itself (Walker & Ni 2011).

    The next iterate is the combination of the last values f(y) whose residuals cancel best.
    """

    def __init__(self) -> None:
        self.residuals: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def next(self, y: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the next iterate (n,d) after y (n,d), given value = f(y)."""
        self.residuals = [*self.residuals, value - y][-ANDERSON_MEMORY - 1 :]
        self.values = [*self.values, value][-ANDERSON_MEMORY - 1 :]
        if len(self.values) == 1:
            return value
        changes = torch.stack(self.residuals, -1).diff(dim=-1)  # (n,d,k)
        gram = changes.mT @ changes
        scale = gram.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None].clamp_min(1e-30)
        gram = gram / scale + torch.finfo(value.dtype).eps * _eye(gram)
        right = changes.mT @ self.residuals[-1].unsqueeze(-1) / scale
        weights = _solve(gram, right)
        next_y = value - (torch.stack(self.values, -1).diff(dim=-1) @ weights).squeeze(-1)
        y_norm = torch.linalg.vector_norm(next_y, dim=-1, keepdim=True)
        max_norm = MAX_STEP_RATIO * torch.linalg.vector_norm(value, dim=-1, keepdim=True)
        return torch.where(y_norm <= max_norm, next_y, value)  # NaN: also `value`


def _solve_dense(equations, start, is_near):
    """Solve n tokens by Newton from `start` (n,d) if it is near a solution, else by bisection.

    A solution always exists (cell.py: `_bisect`).

    Returns:
        y (n,d) and whether it is solved (n,).
    """
    c, A = equations.linear_part()
    norm = equations.terms.norm
    if norm.kind == "none":
        y = _solve(_eye(A) - A, c.unsqueeze(-1)).squeeze(-1)
    else:
        y = start.double()
        if not is_near.all():
            y = torch.where(is_near.unsqueeze(-1), y, _bisect(c, A, norm))
        y = _polish(c, A, norm, y)
    residual = token_residual(y, norm(c + _times(A, y)))
    return y, residual < INNER_TOL[equations.terms.x.dtype]


def _bisect(c, A, norm):
    """Find y (n,d) by bisection on g, the factor 1/√(mean square + eps) of the norm."""
    weight = norm.weight.double()
    bias = torch.zeros_like(weight) if norm.bias is None else norm.bias.double()
    # Given g, the equation is y = g · (constant + linear · y) + bias.
    linear, constant = weight.unsqueeze(-1) * norm.center(A.mT).mT, weight * norm.center(c)

    def solve_linear(g):
        matrix = _eye(A) - g[:, None, None] * linear
        y = _solve(matrix, (g[:, None] * constant + bias).unsqueeze(-1)).squeeze(-1)
        actual_g = (norm.center(c + _times(A, y)).square().mean(-1) + norm.eps).rsqrt()
        is_too_large = ~(actual_g >= g)  # also if y is NaN
        return y, is_too_large

    low = torch.full_like(c[:, 0], MIN_INVERSE_NORM)
    high = torch.full_like(c[:, 0], norm.eps**-0.5)
    for _ in range(BISECTIONS):
        middle = (low * high).sqrt()
        _, is_too_large = solve_linear(middle)
        low = torch.where(is_too_large, low, middle)
        high = torch.where(is_too_large, middle, high)
    y, _ = solve_linear(low)
    return y


def _polish(c, A, norm, y):
    """Run Newton from y (n,d), as long as the residual shrinks."""
    residual = token_residual(y, norm(c + _times(A, y)))
    for _ in range(MAX_NEWTON_STEPS):
        error = norm(c + _times(A, y)) - y
        step = _solve(_eye(A) - _jacobian(c, A, norm, y), error.unsqueeze(-1))
        next_y = y + step.squeeze(-1)
        next_residual = token_residual(next_y, norm(c + _times(A, next_y)))
        is_better = next_residual < residual  # false for NaN
        if not is_better.any():
            break
        y = torch.where(is_better.unsqueeze(-1), next_y, y)
        residual = torch.where(is_better, next_residual, residual)
    return y


def _jacobian(c, A, norm, y):
    """Return ∂f/∂y (n,d,d) at y (n,d)."""
    if norm.kind == "none":
        return A
    v = norm.center(c + _times(A, y))
    g = (v.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    normalized, centered_A = v * g, norm.center(A.mT).mT
    along_v = normalized.unsqueeze(-1) * (normalized.unsqueeze(-2) @ centered_A) / v.shape[-1]
    return (norm.weight.double() * g).unsqueeze(-1) * (centered_A - along_v)


def _solve(matrix, right):
    """Return x (n,d,k) with matrix · x = right; a singular matrix gives NaN or infinity.

    matrix: One matrix per token, (n,d,d). right: Right-hand sides, (n,d,k).
    """
    if matrix.device.type == "cpu" and matrix.shape[-1] > MAX_BATCHED_ROWS:
        pairs = zip(matrix, right, strict=True)
        return torch.stack([torch.linalg.solve_ex(M, b)[0] for M, b in pairs])
    return torch.linalg.solve_ex(matrix, right)[0]


def _times(matrix, vector):
    """Return matrix · vector for (…,d,d) and (…,d)."""
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def _eye(like):
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def _attach_gradient(equations, y, status):
    """Return y = f(y) with the gradient of the solution.

    The backward pass multiplies the gradient v by (I − ∂f/∂y)⁻ᵀ: it solves g = v + (∂f/∂y)ᵀ g. The
    norm of g is limited to MAX_GAIN times the norm of v. If y is no solution, or g is not found,
    f(y) gets the gradient v unchanged.
    """
    value = equations.value(y)
    if not value.requires_grad:
        return value

    def solve_adjoint(v):
        def make_map(indices):
            selected = equations if indices is None else equations.select(indices)
            y0, v0 = (t if indices is None else t[indices] for t in (y, v))
            with torch.enable_grad():
                y0 = y0.detach().requires_grad_()
                f0 = selected.value(y0)
            return lambda g: v0 + torch.autograd.grad(f0, y0, g, retain_graph=True)[0]

        def solve_dense(indices, start, is_near):
            selected = equations.select(indices)
            c, A = selected.linear_part()
            jacobian = _jacobian(c, A, selected.terms.norm, y[indices].double())
            right = v[indices].double().unsqueeze(-1)
            g = _solve(_eye(jacobian) - jacobian.mT, right).squeeze(-1)
            return g, torch.isfinite(g).all(-1)

        with torch.no_grad():
            g, g_status = _search(make_map, v, solve_dense)
            g_norm, v_norm = (torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (g, v))
            limited = g * (MAX_GAIN * v_norm / g_norm.clamp_min(1e-30)).clamp_max(1.0)
            is_valid = (g_status | status) & FAILED == 0
            return torch.where(is_valid.unsqueeze(-1), limited, v)

    value.register_hook(solve_adjoint)
    return y + (value - value.detach())  # y, with the gradient of f(y)
