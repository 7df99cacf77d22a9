"""The block all fixed-point blocks are: mixing, solving, gradients, gate and projection.

Shape suffixes: b batch, l length, d channels (d_inner), n d_state; r rank, w tokens of a window.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .cell import Own, solve_low_rank
from .fields import AUTO_WINDOW, parse_schedule
from .full_rank import FullRank, solve_by_iterating
from .layers import (
    Centroids,
    Projection,
    Projections,
    affine_map,
    collect_parameters,
    linear_by_eights,
    product_dtype,
    side_by_side,
    without_autocast,
)
from .mixers import Mixer, MixerWeights, build_mixer
from .scan import backend
from .solver import (
    FAILED,
    SHARES,
    Rule,
    Solution,
    adjoint_gradient,
    count_iterations_of,
    implicit_gradient,
    relative_residual,
    solve_paper,
    solve_sequential,
    solve_windows,
    stats_of,
    token_residual,
)
from .state import BlockState, Sequences, last, map_tensors, once, shift, state_shapes

# The relative residual at which a window has converged is at most COARSE where exact tokens are
# trained, where f is iterated token by token in evaluation, and under bf16, whose rounding is of
# that size. Exact tokens are evaluated to FINE (docs/fixed-point.md says what each leaves).
COARSE, FINE = 0.01, {torch.float32: 1e-5, torch.float64: 1e-9}
MATERIALISED = ("mixer", "bc_y_proj", "dt_y_proj", "z_y_proj")  # layers used as matrices


class Prepared(NamedTuple):
    """Everything of one solve that depends on x alone (docs/model.md, 'One solve')."""

    x: torch.Tensor  # (b,l,d) what the mixer mixes with the iterate
    z: torch.Tensor  # (b,l,d) output gate
    projections: Projections  # of the mixer's map and of what else reads sh(y) or may
    mixer: MixerWeights
    seqs: Sequences
    time: Any  # what the block's own recurrence needs
    tail: torch.Tensor | None = None  # (b,k−1,·) the convolution's last inputs, if asked for

    def detached(self) -> "Prepared":
        """Without gradients."""
        return map_tensors(torch.Tensor.detach, self)

    def cut(self, start: int, end: int, state: Any) -> "Prepared":
        """Of the tokens start ≤ t < end. state: the BlockState before the first of them."""
        return Prepared(
            self.x[:, start:end],
            self.z[:, start:end],
            self.projections.cut(start, end),
            self.mixer,
            self.seqs.cut(start, end, state),
            self.time.cut(start, end),
        )


class OverTime(NamedTuple):
    """What goes on in a layer while it reads a sequence."""

    state_norm: torch.Tensor  # (b,l) ‖h_t‖₂, the recurrence's state after the token
    gate: torch.Tensor | None  # (b,l) the mean of the mixer's gates a_t; None: it has none
    decay: torch.Tensor  # (b,l) the mean over the state of what is kept of h_{t−1}


class FixedPointBlock(nn.Module):
    """What the blocks share. A subclass defines the methods that raise NotImplementedError here.

    forward: u (b,l,d_model) → output (b,l,d_model), FixedPointStats and, with `seqs.return_state`,
    the BlockState after the last token. checkpoint: a function like torch.utils.checkpoint's, by
    which the backward computes again what the gradient goes through, never an iteration; None: it
    is stored. count_iterations: measure ℓ* as well.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        d = config.d_inner
        self.mixer_width = 2 * d if config.mixer_h_dep and not config.symm_mixer else d
        self.mixer = build_mixer(config, d, self.mixer_width)
        self.out_proj = nn.Linear(d, config.d_model, bias=False)
        self.centroids = None
        if config.state_centroids:
            self.centroids = Centroids(config.state_centroids, d)

    def prepare(self, u: torch.Tensor, seqs: Sequences = Sequences()) -> Prepared:  # noqa: B008
        """All that depends on x alone. u: (b,l,d_model) → Prepared."""
        raise NotImplementedError

    def parts_of(self, s: Prepared, rows: dict[str, torch.Tensor]) -> Any:
        """What the recurrence reads, of the rows of all projections (a dict)."""
        raise NotImplementedError

    def scan_time(
        self, s: Prepared, parts: Any, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The recurrence. x: (b,l,d) mixed → its output o (b,l,d) and final state."""
        raise NotImplementedError

    def in_units_of_y(self, noise: torch.Tensor | None) -> torch.Tensor | None:
        """Noise on what the block's norm makes, as noise on y: its weight is that of y."""
        return noise

    def norm_time(self, s: Prepared, o: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """From o and x̃ to the iterate (b,l,d)."""
        raise NotImplementedError

    def own(self, s: Prepared, parts: Any) -> Own:
        """What the tokens' own equations have besides their mixers and what is before them."""
        raise NotImplementedError

    def compiled(
        self, s: Prepared, reflections: tuple[Any, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """The whole solve by a kernel (`cell` in lm/kernels): y (b,l,d), h and the outcome (b,l);
        None: there is none. reflections: the mixer's."""
        raise NotImplementedError

    def state_shapes(self) -> list[tuple[int, ...]]:
        """Of the tensors of its BlockState, without b."""
        return state_shapes(self.config)

    def decay(self, s: Prepared, parts: Any) -> torch.Tensor:
        """The factor by which the recurrence keeps its state, the mean over the state's numbers
        (b,l)."""
        raise NotImplementedError

    def flops_per_token(self) -> tuple[int, int]:
        """Forward FLOPs per token (a multiply-add counts two): what runs once per solve, and what
        each evaluation costs."""
        raise NotImplementedError

    def _conv(self, x, seqs, conv, index=0):
        """silu(causal convolution), within documents; x itself when short convolutions are off.
        index: which of the state's convolution inputs come before x."""
        if not self.config.use_short_conv:
            return x
        segments = None if seqs.starts is None else seqs.starts.cumsum(1)
        tail = seqs.before("conv", index)
        return conv(x, segments, tail)

    def _of_parameters(self):
        """What a state.WeightCache is made of; None: of more than parameters."""
        layers = [self._modules[name] for name in MATERIALISED if name in self._modules]
        found = collect_parameters(layers, (Mixer, nn.ModuleList))
        rates = self._parameters.get("A_log")
        return found if found is None or rates is None else [*found, rates]

    def _of_y(self, name, y, kept):
        """One of the maps of sh(y), of y. kept: see state.WeightCache."""
        layer = getattr(self, name)
        if kept is None:
            return layer(y)
        return F.linear(y, *kept.get_or_make(name, lambda: affine_map(layer, y)))

    def _tail(self, x, seqs, index=0):
        """The last inputs of the convolution over x, None unless they will be needed."""
        if not (self.config.use_short_conv and seqs.return_state):
            return None
        return last(x, self.config.d_conv - 1, seqs.before("conv", index), seqs)

    def _tails(self, s, y):
        """`BlockState.conv`. y: the iterate that the output is computed from."""
        return () if s.tail is None else (s.tail,)

    def _end(self, s, y_star, y, h):
        """The BlockState after the last token, None unless asked for. It is detached: what is
        learnt from one segment stops at its border (truncated backpropagation)."""
        if not s.seqs.return_state:
            return None

        def at_the_end(y, name):
            before = s.seqs.before(name)
            return last(y, 1, None if before is None else before.unsqueeze(1), s.seqs).squeeze(1)

        last_y = at_the_end(y_star, "y")
        apart = y is not y_star or s.seqs.mask is not None or s.seqs.starts is not None
        f_y = at_the_end(y, "f_y") if apart else last_y
        return BlockState(last_y, f_y, h.detach().clone(), self._tails(s, y))

    def _project(self, x, like, seqs, *others):
        """The mixer's projection beside others. x: (b,l,d) what the mixer reads. like: (b,l,d) what
        it mixes. Returns Projections and the mixer's weights."""
        cfg, d = self.config, x.shape[-1]
        weights = once(seqs.kept, "mixer", lambda: self._mixer_weights(x, seqs))
        of_y = None
        if cfg.mixer_h_dep:
            of_y = weights.first if cfg.symm_mixer else weights.first[:, d:]
        from_x = linear_by_eights(x, weights.first[:, :d], weights.bias)
        dtype = from_x.dtype if self._reads_narrow(like, seqs) else like.dtype
        mixer = Projection("mixer", from_x, of_y)
        projections = side_by_side([mixer, *others], d, dtype, seqs.kept)
        projections = projections._replace(centroids=self.centroids)
        return projections.moved(self.in_units_of_y(seqs.noise)), weights

    def _mixer_weights(self, x, seqs):
        """The MixerWeights, as a compiled cell reads them where one is going to."""
        weights = self.mixer.weights(x)
        return self.mixer.merged(weights) if self._is_compiled(x, seqs) else weights

    def _is_compiled(self, x, seqs):
        """Whether one kernel is to compute the whole solve."""
        c = self.settings(seqs)
        by_token = c.token == "exact" and self.width(c, x.shape[1], x) == 1
        return by_token and self._has_kernel(x)

    def _reads_narrow(self, x, seqs):
        """Whether it reads rows and maps of y in the dtype of products."""
        return self._is_compiled(x, seqs) and backend("cell", x).NARROW

    # One evaluation.

    def _mixed(self, s, y):
        """x̃ = Q x + (I − Q) y (b,l,d), and what the recurrence reads."""
        rows = s.projections.rows(shift(y.to(s.projections.weight_y.dtype), s.seqs))
        with torch.autocast(y.device.type, enabled=False):
            x = self.mixer.mix(rows["mixer"], s.x, y, s.mixer)
            return x, self.parts_of(s, rows), rows

    def step(
        self, s: Prepared, y: torch.Tensor, with_state: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The paper's iteration f(y): mix channels, then time, then norm. y: (b,l,d) → (b,l,d), and
        with `with_state` the recurrence's final state."""
        x, parts, _ = self._mixed(s, y)
        with torch.autocast(x.device.type, enabled=False):
            o, h = self.scan_time(s, parts, x)
            g = s.seqs.masked(self.norm_time(s, o, x))
        return (g, h) if with_state else g

    def explicit(self, s: Prepared, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """F(y): every token's own equation solved, given what y says of the tokens before it.

        Returns:
            F(y) (b,l,d), the recurrence's state at y, and the outcome (b,l).
        """
        x, parts, rows = self._mixed(s, y)
        with torch.autocast(x.device.type, enabled=False):
            o, h = self.scan_time(s, parts, x)
            own = self.own(s, parts)
            gain = own.gain(x.shape[-1])
            g, _, outcome = self._solve_tokens(s, rows, own.token(s.x, o - gain * x, gain))
        return s.seqs.masked(g), h, self._outcome(s, outcome)

    def one_token(self, s: Prepared) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The token after a state. s: of one token → y (b,1,d), the state, the outcome (b,1)."""
        rows = s.projections.rows(shift(s.x, s.seqs))  # of one token sh(·) is the state's
        with torch.autocast(s.x.device.type, enabled=False):
            parts = self.parts_of(s, rows)
            history, _ = self.scan_time(s, parts, torch.zeros_like(s.x))
            own = self.own(s, parts)
            token = own.token(s.x, history, own.gain(s.x.shape[-1]))
            y, mixed, outcome = self._solve_tokens(s, rows, token)
            _, h = self.scan_time(s, parts, mixed)
        return s.seqs.masked(y), h, self._outcome(s, outcome)

    def _solve_tokens(self, s, rows, token):
        raw = rows["mixer"].to(token.x.dtype)
        low_rank = self.mixer.low_rank(raw, s.mixer)
        if low_rank is not None:
            return solve_low_rank(token, low_rank)
        return solve_by_iterating(FullRank(token, raw, self.mixer, s.mixer))

    def _outcome(self, s, outcome):
        """Without that of padding."""
        return outcome if s.seqs.mask is None else outcome * s.seqs.mask

    def finish(self, s: Prepared, y: torch.Tensor) -> torch.Tensor:
        """The output gate and projection. y: (b,l,d) → (b,l,d_model)."""
        y = y.to(s.z.dtype)
        if not self.config.glu_in_loop:
            y = F.silu(self._gate_outside(s, y)) * y
        return self.out_proj(y)

    def _gate_outside(self, s: Prepared, y: torch.Tensor) -> torch.Tensor:
        """z, and what it reads of sh(y)."""
        if not self.config.gate_h_dep:
            return s.z
        before = shift(y.to(s.z.dtype), s.seqs, "f_y")
        return s.z + self._of_y("z_y_proj", before, s.seqs.kept)

    # How it is solved.

    def settings(self, seqs: Sequences) -> Any:
        """The config whose solver fields hold."""
        return self.config if seqs.solving.settings is None else seqs.solving.settings

    def rule(self, settings: Any) -> Rule:
        """The solver's rule for the mode the block is in: evaluation is stricter than training (as
        in App. B.4). settings: the config whose solver fields hold."""
        c, exact = settings, settings.token == "exact"
        tol, max_iters, quantile = c.tol, c.max_iters, c.quantile
        if exact:
            tol = min(tol, COARSE)
        if not self.training:
            max_iters, quantile = c.eval_max_iters, 1.0
            if c.eval_tol != "auto":
                tol = c.eval_tol
            elif c.stopping == "causal":
                products = product_dtype(self.out_proj.weight)
                tol = min(tol, FINE.get(products, COARSE) if exact else COARSE)
        return Rule(tol, max_iters, quantile, c.stepsize, c.stepsize_decay)

    def width(self, settings: Any, length: int, like: torch.Tensor) -> int:
        """How many tokens are solved at once. settings: as in `rule`. like: a tensor on the device
        computed on."""
        width = parse_schedule(settings.schedule)
        if width is None:
            exact = settings.token == "exact" and self.mixer.has_low_rank
            by_token = exact and (like.device.type != "cuda" or self._has_kernel(like))
            width = 1 if by_token else AUTO_WINDOW
        return min(width or length, length)

    def _has_kernel(self, like):
        """Whether a kernel of `like`'s device computes the whole solve."""
        r, kernel = self.kernel_rank(), backend("cell", like)
        if kernel is None or not r:
            return False
        known = self.centroids is None or kernel.CENTROIDS
        return known and kernel.fits(r, self.config.d_inner)

    def kernel_rank(self) -> int:
        """The reflections of a token that a compiled cell knows how to solve; 0: it does not."""
        reflections, reads_y = self.mixer.reflections(), getattr(self.config, "dt_h_dep", False)
        return 0 if reflections is None or reads_y else reflections[0]

    def solver(self, settings: Any, length: int | None = None) -> dict[str, Any]:
        """How a solve in this mode goes, for labels.

        Args: settings: as in `rule`. length: of the sequences.
        Returns: {"token", "schedule", "stopping", "tol", "max_iters", "gradient"}; tol is None
        where nothing is iterated, and max_iters with token exact: every token is solved.
        """
        rule, c = self.rule(settings), settings
        width = self.width(settings, length or 2**62, self.out_proj.weight)
        whole = width == (length or 2**62) and (width > 1 or c.stopping == "paper")
        schedule = "parallel" if whole else "sequential" if width == 1 else f"window:{width}"
        exact = c.token == "exact"
        once = exact and width == 1
        return {
            "token": c.token,
            "schedule": schedule,
            "stopping": c.stopping,
            "tol": None if once else rule.tol,
            "max_iters": None if exact else rule.max_iters,
            "gradient": c.gradient,
        }

    def _solve(self, s):
        """The Solution; differentiable where gradients are on and it is token by token."""
        with s.seqs.solving.around():
            return self._solution(s)

    def _solution(self, s):
        c = self.settings(s.seqs)
        width = self.width(c, s.x.shape[1], s.x)
        if c.token == "exact" and width == 1:
            return self._solve_compiled(s) or self._solve_sequential(s)
        rule = self.rule(c)
        if c.stopping == "paper":
            return solve_paper(lambda y: self.step(s, y), torch.zeros_like(s.x), rule)
        if c.token == "iterate":
            return solve_windows(self._iterated, s, rule, width)
        # After k iterations the first k tokens are exact; one more shows that the last is.
        rule = rule._replace(stepsize=1.0, max_iters=width + 1)
        return solve_windows(self._solved, s, rule, width)

    def _solved(self, s, y):
        g, h, outcome = self.explicit(s, y)
        return g, h, outcome, token_residual(y, g)

    def _iterated(self, s, y):
        g, h = self.step(s, y, True)
        return g, h, torch.zeros_like(y[..., 0], dtype=torch.uint8), token_residual(y, g)

    def _solve_compiled(self, s):
        reflections, mask = self.mixer.reflections(), s.seqs.mask
        if reflections is None or s.mixer.extra:
            return None
        if self.centroids is not None and not self._has_kernel(s.x):
            return None
        after_padding = None  # the kernel passes y on unmasked: no token may follow padding
        if mask is not None:
            after_padding = F.pad(mask[:, 1:] & ~mask[:, :-1], (1, 0))
            if mask.device.type == "cpu" and after_padding.any():
                return None
        with without_autocast(s.x):
            found = self.compiled(s, reflections)
        if found is None:
            return None
        y, h, outcome = found
        if after_padding is not None:  # elsewhere that is not waited for: the model never has it
            outcome = torch.where(after_padding, outcome | FAILED, outcome)
        y = s.seqs.masked(y)
        stats = stats_of(torch.zeros_like(y[..., 0]), self._outcome(s, outcome), 1.0)
        return Solution(y, stats, y, h)

    def _solve_sequential(self, s):
        if not torch.is_grad_enabled():
            return solve_sequential(self.one_token, s)
        adjoint_norm = s.seqs.adjoint_norm
        longest = []

        def remember(v):
            v = s.seqs.masked(v)
            longest.append(torch.linalg.vector_norm(v, dim=-1).amax(1, keepdim=True))
            if adjoint_norm is not None:
                adjoint_norm.zero_()
            return v

        def watch(g):
            norms = torch.linalg.vector_norm(g[:, 0], dim=-1) / longest[-1][:, 0].clamp_min(1e-30)
            if adjoint_norm is not None:
                adjoint_norm.copy_(torch.maximum(adjoint_norm, norms.detach()))

        def one_token(now):
            y, h, outcome = self.one_token(now)
            if y.requires_grad:
                y.register_hook(watch)
            return y, h, outcome

        solution = solve_sequential(one_token, s)
        if solution.y.requires_grad:
            y = solution.y.view_as(solution.y)
            y.register_hook(remember)
            solution = solution._replace(y=y, f_y=y)
        return solution

    def _attach(self, s, solution):
        """From the detached solution to y (b,l,d) with the gradient that `gradient` names, the
        recurrence's final state there, and the FixedPointStats.

        Under `causal` stopping the value is the map at y*, as without gradients, whatever steps
        shape the gradient; under the paper's rule it is what the last of them gives, in both modes.
        """
        c, y_star = self.settings(s.seqs), solution.y
        if c.gradient == "exact":
            constants = s.detached()
            y = adjoint_gradient(
                lambda y: self.explicit(s, y)[0],
                lambda y: self.explicit(constants, y)[0],
                y_star,
                s.seqs.adjoint_norm,
                self.rule(c).tol,
                product_dtype(self.out_proj.weight),
            )
            return solution.f_y.detach() + (y - y.detach()), solution.h, solution.stats
        first, h = self.step(s, y_star, True)
        y, h_end = first, h
        if c.gradient == "implicit":
            y = implicit_gradient(lambda y: self.step(s, y), y_star, first, self.rule(c))
        else:
            for _ in range(c.n_backwards - 1):
                y, h_end = self.step(s, y, True)
        if c.stopping == "paper":  # the residual of what the solve returned
            residual = relative_residual(y_star, first.detach())
            return y, h_end, solution.stats._replace(residual=residual)
        return solution.f_y.detach() + (y - y.detach()), solution.h, solution.stats

    def _through_time(self, u, c):
        """Whether the solve itself is what the gradient goes through."""
        exact = torch.is_grad_enabled() and c.token == "exact" and c.gradient == "exact"
        return exact and self.width(c, u.shape[1], u) == 1

    def forward(
        self,
        u: torch.Tensor,
        seqs: Sequences = Sequences(),  # noqa: B008
        checkpoint: Callable[..., Any] | None = None,
        count_iterations: bool = False,
    ) -> tuple[Any, ...]:
        """See the class."""
        c = self.settings(seqs)
        if self.training:
            how = seqs.solving
            noise = how.draw_noise(self, u, c.state_noise, how.generators)
            seqs = seqs._replace(noise=noise)
        if torch.is_grad_enabled():
            dtype = torch.promote_types(u.dtype, torch.float32)
            seqs = seqs._replace(adjoint_norm=u.new_zeros(len(u), dtype=dtype))
        if seqs.kept is not None:
            seqs = seqs._replace(kept=seqs.kept.valid_for(self._of_parameters()))
        if self._through_time(u, c):

            def solve(u):
                s = self.prepare(u, seqs)
                solution = self._solve(s)
                return self._finished(s, solution, solution.y, solution.h, solution.stats)

            out, stats, end = solve(u) if checkpoint is None else checkpoint(solve, u)
        else:
            out, stats, end = self._solved_apart(u, seqs, checkpoint)
        stats = stats._replace(adjoint_norm=seqs.adjoint_norm)
        if count_iterations:
            stats = self._with_iterations(u, seqs, stats)
        else:  # this count used the run's tolerance; ℓ* is defined at 0.1
            stats = stats._replace(
                num_iters=None, converged=None, token_iters=None, other_solution=None
            )
        return (out, stats, end) if seqs.return_state else (out, stats)

    def _solved_apart(self, u, seqs, checkpoint):
        """Solve without gradients, then attach them."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and checkpoint is None):
            s = self.prepare(u, seqs)
        with torch.no_grad():
            solution = self._solve(s)
        if not torch.is_grad_enabled() and self.settings(seqs).stopping == "causal":
            return self._finished(s, solution, solution.f_y, solution.h, solution.stats)

        def attach(u, y):
            s = self.prepare(u, seqs)
            return self._finished(s, solution, *self._attach(s, solution))

        if checkpoint is not None:
            del s
            return checkpoint(attach, u, solution.y)
        return self._finished(s, solution, *self._attach(s, solution))

    def _finished(self, s, solution, y, h, stats):
        """The output, FixedPointStats and the state after the last token."""
        mask = s.seqs.mask
        c = self.settings(s.seqs)
        if mask is not None and c.stopping == "causal":
            share = mask.shape[1] / mask.sum(1).clamp_min(1)  # of the tokens that are no padding
            shares = {name: getattr(stats, name) * share for name in SHARES}
            stats = stats._replace(**shares)
        return self.finish(s, y), stats, self._end(s, solution.y, y, h)

    # What is measured.

    @torch.no_grad()
    def _with_iterations(self, u, seqs, stats):
        """The stats with ℓ*: what the paper's procedure needs for this input."""
        s = self.prepare(u, seqs)
        y = self._solve(s).y
        return count_iterations_of(
            lambda y: self.step(s, y), y, self.config.block, stats, seqs.mask
        )

    @torch.no_grad()
    def over_time(self, u: torch.Tensor, seqs: Sequences = Sequences()) -> OverTime:  # noqa: B008
        """OverTime at the solution that the mode and the settings give, one token after the other.
        u: (b,l,d_model)."""
        s = self.prepare(u, seqs)
        y = self._solve(s).y
        raw = s.projections.rows(shift(y, s.seqs))["mixer"]
        gates = self.mixer.gates(raw)
        state, norms, decays = s.seqs.state, [], []
        for t in range(y.shape[1]):
            window, at = s.cut(t, t + 1, state), y[:, t : t + 1]
            x, parts, _ = self._mixed(window, at)
            with torch.autocast(x.device.type, enabled=False):
                _, h = self.scan_time(window, parts, x)
                decays.append(self.decay(window, parts))
            norms.append(torch.linalg.vector_norm(h.flatten(1), dim=-1, keepdim=True))
            state = BlockState(y[:, t], None, h, ())
        gate = None if gates is None else gates.mean(-1)
        return OverTime(torch.cat(norms, 1), gate, torch.cat(decays, 1))

    def _flops(self, once, scan):
        """(once, per evaluation) from what the subclass counts on top of mixer, gate and the maps
        of sh(y)."""
        c, d, m = self.config, self.config.d_inner, self.mixer.out_features

        def product(name):
            layer = getattr(self, name, None)
            return 0 if layer is None else 2 * layer.in_features * layer.out_features

        once += product("in_proj") + product("out_proj") + product("z_y_proj") + 2 * m * d
        per_step = (2 * d * m if c.mixer_h_dep else 0) + self.mixer.flops_per_token()
        per_step += product("bc_y_proj") + product("dt_y_proj") + 4 * c.state_centroids * d
        return once, per_step + scan + 12 * d
