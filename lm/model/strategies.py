"""Solvers of a layer's equation, one class per strategy, each with its forward and its gradient.

    class             what `solve` computes                           gradients
    ExactSequential   each token's own equation, one after the other  exact (through time)
    ExactWindows      the same equations, a window of tokens at once  exact (adjoint)
    IteratedWindows   the paper's iteration, a window at once         one_step, implicit
    PaperIteration    the paper's iteration, all tokens at once       one_step, implicit

The paper's iteration is y ← f(y) with f = `FixedPointBlock.step`; a token's own equation is
explained in cell.py. The exact classes also accept one_step and implicit, which differentiate the
paper's iteration at the exact solution. The loops are functions of solver.py. sh(y) is y shifted by
one token (state.shift).

Shape suffixes: b batch, l length, d channels (d_inner), w tokens of a window, m columns of all
projections.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .cell import EquationTerms, solve_low_rank
from .fields import AUTO_WINDOW, parse_schedule
from .full_rank import FullRank, solve_by_iterating
from .layers import Projections, product_dtype, without_autocast
from .mixers import MixerWeights
from .scan import find_backend
from .solver import (
    FAILED,
    SHARES,
    FixedPointStats,
    MapValue,
    Rule,
    Solution,
    adjoint_gradient,
    implicit_gradient,
    make_stats,
    relative_residual,
    solve_paper,
    solve_sequential,
    solve_windows,
    token_residual,
)
from .state import Sequences, map_tensors, shift

# Upper limits of the tolerance with `stopping: causal`. TRAIN_TOL is for training. In evaluation
# with `eval_tol: auto`, EVAL_TOL is for `token: exact`, by the dtype of the matrix products, and
# TRAIN_TOL for products in bf16 and for `token: iterate`.
TRAIN_TOL = 0.01
EVAL_TOL = {torch.float32: 1e-5, torch.float64: 1e-9}


class SolveInputs(NamedTuple):
    """Everything a solve needs that depends on the layer's input only (docs/model.md, 'One solve').

    `FixedPointBlock.prepare` computes it once, and every iteration reads it.
    """

    x: torch.Tensor  # (b,l,d) input that the mixer mixes with the iterate
    z: torch.Tensor  # (b,l,d) output gate, before silu
    projections: Projections  # (b,l,m) of x to the mixer's rows, B, C, …; some also read sh(y)
    mixer: MixerWeights
    seqs: Sequences
    recurrence: Any  # constants of the block's recurrence
    conv_tail: torch.Tensor | None = None  # (b,d_conv−1,·) last inputs of the convolution

    def detach(self) -> "SolveInputs":
        """Return the same inputs without gradients."""
        return map_tensors(torch.Tensor.detach, self)

    def cut(self, start: int, end: int, state: Any) -> "SolveInputs":
        """Return the inputs of tokens start ≤ t < end, with the BlockState before them."""
        return SolveInputs(
            self.x[:, start:end],
            self.z[:, start:end],
            self.projections.cut(start, end),
            self.mixer,
            self.seqs.cut(start, end, state),
            self.recurrence.cut(start, end),
        )


def find_kernel(block: Any, like: torch.Tensor) -> Any:
    """Return the compiled kernel that can run the block's whole exact solve, or None.

    Args:
        block: The FixedPointBlock.
        like: A tensor with the device and dtype of the solve.
    """
    rank, kernel = block.kernel_rank(), find_backend("cell", like)
    if kernel is None or not rank:
        return None
    if block.centroids is not None and not kernel.CENTROIDS:
        return None
    return kernel if kernel.fits(rank, block.config.d_inner) else None


def choose_window_width(block: Any, settings: Any, length: int, like: torch.Tensor) -> int:
    """Return the number of tokens that are solved at once.

    Args:
        block: The FixedPointBlock.
        settings: Configuration with the solver's fields.
        length: Tokens per sequence.
        like: A tensor with the device and dtype of the solve.
    """
    width = parse_schedule(settings.schedule)
    if width is None:  # auto
        has_few_unknowns = settings.token == "exact" and block.mixer.has_low_rank  # r per token
        is_fast_by_token = like.device.type != "cuda" or find_kernel(block, like) is not None
        width = 1 if has_few_unknowns and is_fast_by_token else AUTO_WINDOW
    if width == 0:  # parallel
        return length
    return min(width, length)


def choose_solver(block: Any, settings: Any, length: int, like: torch.Tensor) -> "Solver":
    """Return the solver that the settings name.

    Args:
        block, settings, length, like: As in `choose_window_width`.
    """
    width = choose_window_width(block, settings, length, like)
    if settings.stopping == "paper":
        solver_class: type[Solver] = PaperIteration
    elif settings.token == "iterate":
        solver_class = IteratedWindows
    else:
        solver_class = ExactSequential if width == 1 else ExactWindows
    return solver_class(block, settings, length, width, like)


class PaperSteps(NamedTuple):
    """Result of the paper's iteration from a solution y*."""

    f_y_star: torch.Tensor  # (b,l,d) f(y*)
    y: torch.Tensor  # (b,l,d) after the last step, with the gradient
    h: torch.Tensor  # recurrence's state in the last step


class Solver:
    """Base class of the strategies. A subclass defines `_solve`.

    Attributes:
        kernel: Compiled kernel of the whole solve, or None.
    """

    kernel: Any = None

    def __init__(
        self, block: Any, settings: Any, length: int, width: int, like: torch.Tensor
    ) -> None:
        """Create a solver; `choose_solver` explains the arguments."""
        self.block, self.settings = block, settings
        self.length, self.width = length, width

    @property
    def is_differentiable(self) -> bool:
        """True if the gradient goes through `solve` itself."""
        return False

    @property
    def rule(self) -> Rule:
        """Stopping rule in the block's mode: evaluation is stricter than training (App. B.4)."""
        c = self.settings
        is_exact = c.token == "exact"
        tol, max_iters, quantile = c.tol, c.max_iters, c.quantile
        if is_exact:
            tol = min(tol, TRAIN_TOL)
        if not self.block.training:
            max_iters, quantile = c.eval_max_iters, 1.0
            if c.eval_tol != "auto":
                tol = c.eval_tol
            elif c.stopping == "causal":
                dtype = product_dtype(self.block.out_proj.weight)
                tol = min(tol, EVAL_TOL.get(dtype, TRAIN_TOL) if is_exact else TRAIN_TOL)
        return Rule(tol, max_iters, quantile, c.stepsize, c.stepsize_decay)

    def describe(self) -> dict[str, Any]:
        """Return the settings in use, for reports.

        Returns:
            {"token", "schedule", "stopping", "tol", "max_iters", "gradient"}. tol is None
            for ExactSequential, and max_iters is None for both exact classes.
        """
        schedule = f"window:{self.width}"
        if self.width == 1:
            schedule = "sequential"
        has_one_window = self.width > 1 and self.width == self.length
        if self.settings.stopping == "paper" or has_one_window:
            schedule = "parallel"
        return {
            "token": self.settings.token,
            "schedule": schedule,
            "stopping": self.settings.stopping,
            "tol": self.rule.tol,
            "max_iters": self.rule.max_iters,
            "gradient": self.settings.gradient,
        }

    def solve(self, inputs: SolveInputs) -> Solution:
        """Solve for y; with a graph only if the solver `is_differentiable`."""
        has_graph = torch.is_grad_enabled() and self.is_differentiable
        with inputs.seqs.options.solve_context(), torch.set_grad_enabled(has_graph):
            return self._solve(inputs)

    def _solve(self, inputs):
        raise NotImplementedError

    def attach_gradient(
        self, inputs: SolveInputs, solution: Solution
    ) -> tuple[torch.Tensor, torch.Tensor, FixedPointStats]:
        """Give the solution the gradient that the settings name.

        The value stays `solution.f_y`, even if `n_backwards` takes further steps for the gradient.

        Args:
            inputs: Inputs of the solve, with the graph to the layer's parameters.
            solution: Solution without a graph.

        Returns:
            y (b,l,d), the recurrence's state after the last token, and the statistics.
        """
        y, h, stats = solution.f_y, solution.h, solution.stats
        if torch.is_grad_enabled():
            differentiable_y = self._differentiable_map(inputs, solution.y)
            zero = differentiable_y - differentiable_y.detach()  # 0 with the gradient
            y = y.detach() + zero  # type: ignore[union-attr]
        return y, h, stats  # type: ignore[return-value]

    def _differentiable_map(self, inputs, y_star):
        """Return f(y*) or F(y*) (b,l,d) with the gradient of the solution."""
        return self._take_paper_steps(inputs, y_star).y

    def _take_paper_steps(self, inputs, y_star):
        """Run the paper's iteration from y*, for the gradients one_step and implicit."""
        block, settings = self.block, self.settings
        f_y_star, h = block.step(inputs, y_star, with_state=True)
        y = f_y_star
        if settings.gradient == "implicit":
            y = implicit_gradient(lambda y: block.step(inputs, y), y_star, f_y_star, self.rule)
        else:
            for _ in range(settings.n_backwards - 1):
                y, h = block.step(inputs, y, with_state=True)
        return PaperSteps(f_y_star, y, h)

    def rescale_shares(self, stats: FixedPointStats, mask: torch.Tensor | None) -> FixedPointStats:
        """Turn shares of all tokens into shares of the tokens that are not padding.

        Args:
            stats: Statistics of the solve.
            mask: False at padding, (b,l), or None.
        """
        if mask is None or self.settings.stopping == "paper":
            return stats
        factor = mask.shape[1] / mask.sum(1).clamp_min(1)  # all tokens / tokens without padding
        return stats._replace(**{name: getattr(stats, name) * factor for name in SHARES})


class ExactSequential(Solver):
    """Token by token: each token's own equation, given the solution for the tokens before it.

    The exact gradient is backpropagation through time, and the implicit function theorem within a
    token. A compiled kernel, if there is one, runs the whole forward and backward.
    """

    def __init__(
        self, block: Any, settings: Any, length: int, width: int, like: torch.Tensor
    ) -> None:
        super().__init__(block, settings, length, width, like)
        self.kernel = find_kernel(block, like)

    @property
    def is_differentiable(self) -> bool:
        return self.settings.gradient == "exact"

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "tol": None, "max_iters": None}

    def _solve(self, inputs):
        solution = self.run_kernel(inputs)
        if solution is not None:
            return solution
        if not torch.is_grad_enabled():
            return solve_sequential(self.solve_token, inputs)
        return self._loop_with_hooks(inputs)

    def attach_gradient(
        self, inputs: SolveInputs, solution: Solution
    ) -> tuple[torch.Tensor, torch.Tensor, FixedPointStats]:
        if self.is_differentiable:  # the graph of `solve` has the gradient
            return solution.y, solution.h, solution.stats  # type: ignore[return-value]
        return super().attach_gradient(inputs, solution)

    def run_kernel(self, inputs: SolveInputs) -> Solution | None:
        """Run the whole solve in one kernel; return None if no kernel can."""
        mixer_options, mask = self.block.mixer.kernel_options(), inputs.seqs.mask
        if mixer_options is None or inputs.mixer.extra:
            return None
        if self.block.centroids is not None and self.kernel is None:
            return None
        # (b,l) True at tokens after padding: there the kernel reads the y of padding as sh(y)
        follows_padding = None
        if mask is not None:
            follows_padding = F.pad(mask[:, 1:] & ~mask[:, :-1], (1, 0))
            if mask.device.type == "cpu" and follows_padding.any():
                return None
        with without_autocast(inputs.x):
            result = self.block.run_kernel(inputs, mixer_options)
        if result is None:
            return None
        y, h, status = result
        if follows_padding is not None:  # on a GPU: reading the mask would make the host wait
            status = torch.where(follows_padding, status | FAILED, status)
        y = inputs.seqs.zero_padding(y)
        status = inputs.seqs.zero_status(status)
        residual = torch.zeros_like(y[..., 0])
        return Solution(y, make_stats(residual, status, evaluations=1.0), y, h)

    def solve_token(self, inputs: SolveInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Solve a single token.

        Args:
            inputs: Inputs of this token, with the state before it.

        Returns:
            y (b,1,d), the recurrence's state after the token, and its status (b,1).
        """
        block = self.block
        # 1. Project sh(y), which for a single token is the state's y. (`shift` reads only the shape
        #    of its first argument then.)
        rows = inputs.projections.rows(shift(inputs.x, inputs.seqs))
        with torch.autocast(inputs.x.device.type, enabled=False):
            # 2. Run the recurrence with zero input: its output is the history.
            params = block.select_parameters(inputs, rows)
            history, _ = block.run_recurrence(inputs, params, torch.zeros_like(inputs.x))
            # 3. Solve for y and the mixed input x̃.
            equation = block.token_equation(inputs, params)
            gain = equation.recurrence_gain(inputs.x.shape[-1])
            terms = equation.add_history(inputs.x, history, gain)
            y, mixed, status = solve_equations(block, inputs, rows, terms)
            # 4. Write x̃ into the state.
            _, h = block.run_recurrence(inputs, params, mixed)
        return inputs.seqs.zero_padding(y), h, inputs.seqs.zero_status(status)

    def _loop_with_hooks(self, inputs):
        """Run the loop; its backward writes `FixedPointStats.adjoint_norm`.

        The adjoint of a token is the gradient of its y through all later tokens. Its norm is
        divided by the largest norm of a token in the gradient from above, per sequence.
        """
        adjoint_norm = inputs.seqs.adjoint_norm  # (b,) or None
        incoming_norms = []  # one tensor (b,) per backward pass; `record_adjoint` reads the newest

        def start_backward(v):  # v: gradient of y from above, (b,l,d)
            v = inputs.seqs.zero_padding(v)
            incoming_norms.append(torch.linalg.vector_norm(v, dim=-1).amax(1))
            if adjoint_norm is not None:
                adjoint_norm.zero_()
            return v

        def record_adjoint(g):  # g: adjoint of a token, (b,1,d)
            norm = torch.linalg.vector_norm(g[:, 0], dim=-1)
            relative_norm = norm / incoming_norms[-1].clamp_min(1e-30)
            if adjoint_norm is not None:
                adjoint_norm.copy_(torch.maximum(adjoint_norm, relative_norm.detach()))

        def solve_token_with_hook(inputs):
            y, h, status = self.solve_token(inputs)
            if y.requires_grad:
                y.register_hook(record_adjoint)
            return y, h, status

        solution = solve_sequential(solve_token_with_hook, inputs)
        if solution.y.requires_grad:
            y = solution.y.view_as(solution.y)
            y.register_hook(start_backward)
            solution = solution._replace(y=y, f_y=y)
        return solution


class ExactWindows(Solver):
    """Window by window: the tokens' own equations, solved for all tokens of a window at once.

    An iteration solves every token given the previous iterate for the tokens before it. After k
    iterations the first k tokens of a window are exact.
    """

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "max_iters": None}

    def _solve(self, inputs):
        # `width` iterations are enough; one more shows that the last token has converged.
        rule = self.rule._replace(stepsize=1.0, max_iters=self.width + 1)
        return solve_windows(self._evaluate, inputs, rule, self.width)

    def _evaluate(self, window, y):
        F_y, h, status = self.solve_all_tokens(window, y)
        return MapValue(F_y, h, status, token_residual(y, F_y))

    def solve_all_tokens(
        self, inputs: SolveInputs, y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute F(y): every token's own equation, solved given y for the tokens before it.

        Args:
            inputs: Inputs of the tokens.
            y: Iterate, (b,l,d).

        Returns:
            F(y) (b,l,d), the state of the recurrence at y after the last token, and the status of
            each token (b,l).
        """
        block = self.block
        # 1. Run the recurrence at y: its output o (b,l,d).
        mixed, params, rows = block.mix_channels(inputs, y)
        with torch.autocast(mixed.device.type, enabled=False):
            o, h = block.run_recurrence(inputs, params, mixed)
            # 2. The history is o without gain ⊙ mixed, the part of the token's own mixed input.
            equation = block.token_equation(inputs, params)
            gain = equation.recurrence_gain(mixed.shape[-1])
            terms = equation.add_history(inputs.x, o - gain * mixed, gain)
            # 3. Solve all equations.
            F_y, _, status = solve_equations(block, inputs, rows, terms)
        return inputs.seqs.zero_padding(F_y), h, inputs.seqs.zero_status(status)

    def _differentiable_map(self, inputs, y_star):
        if self.settings.gradient != "exact":
            return super()._differentiable_map(inputs, y_star)
        detached_inputs = inputs.detach()
        return adjoint_gradient(
            lambda y: self.solve_all_tokens(inputs, y)[0],
            lambda y: self.solve_all_tokens(detached_inputs, y)[0],
            y_star,
            inputs.seqs.adjoint_norm,
            self.rule.tol,
            product_dtype(self.block.out_proj.weight),
        )


class IteratedWindows(Solver):
    """Window by window: the paper's iteration, until every token of the window has converged."""

    def _solve(self, inputs):
        return solve_windows(self._evaluate, inputs, self.rule, self.width)

    def _evaluate(self, window, y):
        f_y, h = self.block.step(window, y, with_state=True)
        status = torch.zeros_like(y[..., 0], dtype=torch.uint8)  # only the residual decides
        return MapValue(f_y, h, status, token_residual(y, f_y))


class PaperIteration(Solver):
    """All tokens at once: the paper's iteration and stopping rule (App. B.4).

    It returns y after the last gradient step, also in evaluation. The other classes return the
    value of the solve.
    """

    def _solve(self, inputs):
        return solve_paper(
            lambda y: self.block.step(inputs, y), torch.zeros_like(inputs.x), self.rule
        )

    def attach_gradient(
        self, inputs: SolveInputs, solution: Solution
    ) -> tuple[torch.Tensor, torch.Tensor, FixedPointStats]:
        steps = self._take_paper_steps(inputs, solution.y)
        residual = relative_residual(solution.y, steps.f_y_star.detach())
        return steps.y, steps.h, solution.stats._replace(residual=residual)


def solve_equations(
    block: Any, inputs: SolveInputs, rows: dict[str, torch.Tensor], terms: EquationTerms
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Solve the tokens' equations: r unknowns if I − Q has rank r, otherwise the vector y.

    Args:
        block: The FixedPointBlock.
        inputs: Inputs of the tokens.
        rows: Projections by name.
        terms: Terms of the equations.

    Returns:
        y (b,l,d), the mixed input x̃ (b,l,d), and the status of each token (b,l).
    """
    mixer_rows = rows["mixer"].to(terms.x.dtype)
    low_rank = block.mixer.low_rank(mixer_rows, inputs.mixer)
    if low_rank is not None:
        return solve_low_rank(terms, low_rank)
    return solve_by_iterating(FullRank(terms, mixer_rows, block.mixer, inputs.mixer))
