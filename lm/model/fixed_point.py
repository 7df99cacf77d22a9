"""The block all fixed-point blocks are: mixing, solving, gradients, gate and projection.

Shape suffixes: b batch, l length, d channels (d_inner), n d_state; r sequences and w tokens of a
window.
"""

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .configuration_fprnn import parse_schedule
from .gradient import implicit_gradient
from .mixers import MixerWeights, added, build_mixer
from .solver import (
    AUTO_START,
    Rule,
    relative_residual,
    solve_causal,
    solve_paper,
    spectral_norm,
)
from .state import BlockState, Sequences, last, shift

EVAL_TOL = 0.01  # tighter changes few tokens, looser more (docs/fixed-point.md)

# Tokens that are evaluated in the time that starting an iteration takes (`Iteration.spare`).
SPARE = {"cpu": 256, "cuda": 8192}


class Static(NamedTuple):
    """Everything of one solve that depends on x alone (docs/model.md, 'One solve')."""

    x: torch.Tensor  # (b,l,d) what the mixer mixes with the iterate
    z: torch.Tensor  # (b,l,d) output gate
    raw: torch.Tensor  # (b,l,·): the x part of the mixer's map and of what else reads sh(y) or may
    widths: dict[str, int]  # what raw holds, in order; those that read sh(y) come first
    weight_y: torch.Tensor  # (k,d): sh(y) → the y part of raw's first k columns
    mixer: MixerWeights
    seqs: Sequences
    time: tuple  # what the block's own recurrence needs
    tail: torch.Tensor | None = None  # (b,k−1,·) the convolution's last inputs, if asked for


class FixedPointBlock(nn.Module):
    """What the blocks share: mixing, solving, gradients, gate and projection.

    A subclass defines `prepare(u, seqs) → Static`; `scan_time(s, x, **parts) → (o, h)`: its
    recurrence, from the mixed x (b,l,d) and the parts that it gave `_projections`, each as (its x
    part, its y part or None), to the output and the final state; `norm_time(s, o, x)`: from there
    to the iterate, and given y as well, its `token_residual`; and `cut_time(time, take, mask)`:
    Static.time of other tokens, each (b,l,·) in it through `take`, where mask is False a step is
    the identity (None: nowhere).

    forward: u (b,l,d_model) → output (b,l,d_model), FixedPointStats and, with `seqs.return_state`,
    the BlockState after the last token. checkpoint: a function like torch.utils.checkpoint's, by
    which the backward computes the gradient steps again, never the solve; None: it stores them.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        d = config.d_inner
        self.mixer_width = 2 * d if config.mixer_h_dep and not config.symm_mixer else d
        self.mixer = build_mixer(config, d, self.mixer_width)
        self.out_proj = nn.Linear(d, config.d_model, bias=config.bias)
        self.gate_in_loop = config.glu_in_loop  # a step reads z

    def _conv(self, x, seqs, conv, index=0):
        """silu(causal convolution), within documents; x itself when short convolutions are off.
        index: which of the state's convolution inputs come before x."""
        if not self.config.use_short_conv:
            return x
        segments = None if seqs.starts is None else seqs.starts.cumsum(1)
        tail = seqs.before("conv", index)
        return conv(x, segments, tail)

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

        f_y = at_the_end(y, "f_y")
        return BlockState(at_the_end(y_star, "y"), f_y, h.detach().clone(), self._tails(s, y))

    def _projections(self, x, **parts):
        """What a step projects from x and sh(y): the mixer's map and `parts`.

        Args:
            x: (b,l,d). parts: name → (its x part (b,l,k), its map of sh(y) (k,d) or None).
        Returns:
            raw, widths, weight_y as in Static, and the mixer's weights.
        """
        cfg, weights, d = self.config, self.mixer.weights(x), x.shape[-1]
        acc = torch.promote_types(x.dtype, torch.float32)
        first_y = None
        if cfg.mixer_h_dep:
            first_y = weights.first if cfg.symm_mixer else weights.first[:, d:]
        parts = {"mixer": (F.linear(x, weights.first[:, :d], weights.bias), first_y), **parts}
        uneven = -sum(len(weight) for _, weight in parts.values() if weight is not None) % 16
        if uneven:  # rows that begin at multiples of 16 are faster to make and to read
            parts["pad"] = x.new_zeros(*x.shape[:2], uneven), weights.first.new_zeros(uneven, d)
        # Those that read sh(y) first: one product serves them all.
        parts = dict(sorted(parts.items(), key=lambda part: part[1][1] is None))
        raw = torch.cat([part.to(acc) if x.is_cpu else part for part, _ in parts.values()], -1)
        widths = {name: part.shape[-1] for name, (part, _) in parts.items()}
        maps = [weight for _, weight in parts.values() if weight is not None]
        return raw, widths, torch.cat(maps) if maps else x.new_zeros(0, d), weights

    def _parts(self, s, y):
        """The projections of x and of sh(y) (or None), by name: {"mixer": two (b,l,m), …}."""
        widths, k = list(s.widths.values()), s.weight_y.shape[0]
        from_x = s.raw.split(widths, -1)
        from_y = [None] * len(widths)
        if k:
            read = F.linear(shift(y.to(s.weight_y.dtype), s.seqs), s.weight_y)
            read = read.to(y.dtype) if read.is_cpu else read  # its kernels are of one dtype
            those = list(itertools.takewhile(lambda end: end <= k, itertools.accumulate(widths)))
            from_y[: len(those)] = read.split(widths[: len(those)], -1)
        return dict(zip(s.widths, zip(from_x, from_y)))

    def _mix(self, s, y):
        """x̃ = Q x + (I − Q) y (b,l,d), and the parts for `scan_time`."""
        parts = self._parts(s, y)
        parts.pop("pad", None)
        with torch.autocast(y.device.type, enabled=False):
            return self.mixer.mix(*parts.pop("mixer"), s.x, y, s.mixer), parts

    def step(self, s, y, with_state=False):
        """One iteration f(y): mix channels, then time, then norm. y: (b,l,d) → (b,l,d), and with
        `with_state` the recurrence's final state."""
        x, parts = self._mix(s, y)
        with torch.autocast(x.device.type, enabled=False):
            o, h = self.scan_time(s, x, **parts)
            g = s.seqs.masked(self.norm_time(s, o, x))
        return (g, h) if with_state else g

    def step_residual(self, s, y):
        """f(y), its `token_residual` (b,l), and what `_mix` gave; no gradient."""
        x, parts = self._mix(s, y)
        with torch.autocast(x.device.type, enabled=False):
            o, _ = self.scan_time(s, x, **parts)
            g, residual = self.norm_time(s, o, x, y)
        return s.seqs.masked(g), s.seqs.masked(residual.unsqueeze(-1)).squeeze(-1), (x, parts)

    def cut(self, s, take, mask, state):
        """Static of other tokens: each (b,l,·) in it through `take`; where mask is False a step is
        the identity (None: nowhere). state: the BlockState before the first of them."""

        def cut(flags, missing=None):
            if flags is None:
                return missing
            return take(flags) if mask is None else mask & take(flags)

        seqs = Sequences(cut(s.seqs.mask, mask), cut(s.seqs.starts), state)
        return s._replace(
            x=take(s.x), z=take(s.z) if self.gate_in_loop else None, raw=take(s.raw), seqs=seqs,
            time=self.cut_time(s.time, take, mask), tail=None,
        )  # fmt: skip

    def finish(self, s, y):
        """The output gate and projection. y: (b,l,d) → (b,l,d_model)."""
        if not self.config.glu_in_loop:
            y = F.silu(s.z + self.z_y_proj(shift(y, s.seqs, "f_y").to(s.z.dtype))) * y
        return self.out_proj(y.to(s.z.dtype))

    def rule(self):
        """The solver's rule for the mode the block is in: evaluation is stricter than training (as
        in App. B.4)."""
        c = self.config
        tol, max_iters, quantile = c.tol, c.max_iters, c.quantile
        if not self.training:
            tol, max_iters, quantile = c.eval_tol, c.eval_max_iters, 1.0
            if tol == "auto":
                tol = c.tol if c.stopping == "paper" else min(c.tol, EVAL_TOL)
        return Rule(tol, max_iters, quantile, c.stepsize, c.stepsize_decay, c.patience)

    def schedule(self):
        """The schedule of the mode the block is in, by name: `mixed` is training's alone."""
        c = self.config
        mixed_evaluated = c.schedule_kind.kind == "mixed" and not self.training
        return "auto" if mixed_evaluated else c.schedule

    def solver(self, length=None):
        """How a solve in this mode goes, for labels.

        Args: length: of the sequences; one token is solved in the same way by every schedule.
        Returns: {"schedule", "stopping", "tol", "max_iters"}.
        """
        rule, stopping, schedule = self.rule(), self.config.stopping, self.schedule()
        if length == 1 and stopping == "causal" and schedule != "exact":
            schedule = "sequential"
        return {
            "schedule": schedule, "stopping": stopping, "tol": rule.tol,
            "max_iters": rule.max_iters,
        }  # fmt: skip

    def _solve(self, s):
        """The Solution, by the schedule and the stopping rule of the config."""
        rule, schedule = self.rule(), parse_schedule(self.schedule())
        if self.config.stopping == "paper":
            f = Windows(self, s)
            return solve_paper(lambda y: f.step(s, y)[:2], torch.zeros_like(s.x), rule)
        if schedule.kind == "exact":
            return self.solve_exact(s)
        if schedule.kind == "auto":
            return solve_causal(Windows(self, s), rule, AUTO_START, adapt=True)
        widths = schedule.of(s.x.shape[1])
        # A fixed width draws nothing: a seed gives the same samples under every schedule.
        pick = torch.randint(len(widths), ()) if len(widths) > 1 else 0
        return solve_causal(Windows(self, s), rule, widths[pick])

    def _gradient_steps(self, s, y_star):
        """From the detached y* to the output, with the gradient that `config.gradient` names.

        Under `causal` stopping the value is f(y*), as without gradients, whatever steps shape the
        gradient; under the paper's rule it is what the last of them gives, in either mode.

        Returns the output, f(y*), the `_penalty`, and `_end`.
        """
        cfg, (kind, k) = self.config, self.config.gradient_kind
        first, h = self.step(s, y_star, True)
        y, h_end = first, h
        if kind == "implicit":
            y = implicit_gradient(lambda y: self.step(s, y), y_star, first, self.rule())
        elif kind == "phantom":  # k damped steps (Geng et al. 2021)
            damping = cfg.stepsize
            y = damping * first + (1 - damping) * y_star
            for _ in range(k - 1):
                g, h_end = self.step(s, y, True)
                y = damping * g + (1 - damping) * y
        else:
            for _ in range(cfg.n_backwards - 1):
                y, h_end = self.step(s, y, True)
        if cfg.stopping == "causal":
            y, h_end = first.detach() + (y - y.detach()), h
        end = self._end(s, y_star, y, h_end)
        return self.finish(s, y), first, self._penalty(s, y_star, first), end

    def _regularised(self):
        """Whether `_penalty` adds anything to the loss: in training, with gradients or without."""
        return self.training and bool(self.config.jacobian_reg or self.config.agreement_reg)

    def _penalty(self, s, y_star, first):
        """What the regularisers add to the loss, (b,): an estimate of ‖∂f/∂y‖_F² / (l d) at y* by a
        finite difference (Bai et al. 2021), and the distance to what another width finds."""
        cfg, penalty = self.config, y_star.new_zeros(y_star.shape[0])
        if not self._regularised():
            return penalty
        if cfg.jacobian_reg:
            sigma = 1e-2
            moved = self.step(s, y_star + sigma * torch.randn_like(y_star))
            jacobian = ((moved - first) / sigma).square().mean((1, 2))
            penalty = penalty + cfg.jacobian_reg * jacobian
        if cfg.agreement_reg:
            widths = parse_schedule("mixed").of(y_star.shape[1])
            width = widths[torch.randint(len(widths), ())]
            other = solve_causal(Windows(self, s), self.rule(), width).y
            distance = (self.step(s, other) - first).square().mean((1, 2))
            penalty = penalty + cfg.agreement_reg * distance
        return penalty

    def forward(self, u, seqs=Sequences(), checkpoint=None):  # noqa: B008 (it is immutable)
        with torch.set_grad_enabled(torch.is_grad_enabled() and checkpoint is None):
            s = self.prepare(u, seqs)
        solution = self._solve(s)
        y_star, stats, f_y, h = solution
        all_is_there = f_y is not None and not self._regularised()
        if not torch.is_grad_enabled() and all_is_there:
            out, end = self.finish(s, f_y), self._end(s, y_star, f_y, h)
            return (out, stats, end) if seqs.return_state else (out, stats)
        if checkpoint is not None:
            del s
            out, first, penalty, end = checkpoint(
                lambda u, y: self._gradient_steps(self.prepare(u, seqs), y), u, y_star
            )
        else:
            out, first, penalty, end = self._gradient_steps(s, y_star)
        with torch.no_grad():  # the residual of what the solve returned, for free
            residual = relative_residual(y_star, first)
        stats = stats._replace(residual=residual, penalty=penalty)
        return (out, stats, end) if seqs.return_state else (out, stats)

    def contraction(self, u, seqs=Sequences(), power_iterations=10):  # noqa: B008
        """How contractive the iteration is at its fixed point, by power iteration (no training).

        Returns:
            mixing (b,): the largest ‖I − Q_t‖₂ over the tokens; lipschitz (b,): ‖∂f/∂y‖₂ at y*.
        """
        with torch.no_grad():
            s = self.prepare(u, seqs)
            y = self._solve(s).y
            raw = added(*self._parts(s, y)["mixer"])

        def off_identity(v):
            return v - self.mixer(raw, v, s.mixer)

        with torch.autocast(y.device.type, enabled=False):
            zero = torch.zeros_like(y)
            mixing = spectral_norm(
                off_identity, zero, power_iterations, per_token=True, linear=True
            )
            lipschitz = spectral_norm(lambda v: self.step(s, v), y, power_iterations)
        return mixing.amax(-1), lipschitz

    def _flops(self, once, scan):
        """(once, per_iteration) from what the subclass counts on top of mixer, gate and the maps of
        sh(y)."""
        c, d, m = self.config, self.config.d_inner, self.mixer.out_features

        def product(name):
            layer = getattr(self, name, None)
            return 0 if layer is None else 2 * layer.in_features * layer.out_features

        once += product("in_proj") + product("out_proj") + product("z_y_proj") + 2 * m * d
        per_step = (2 * d * m if c.mixer_h_dep else 0) + self.mixer.flops_per_token()
        per_step += product("bc_y_proj") + product("dt_y_proj")
        return once, per_step + scan + 12 * d


class Windows:
    """f of one solve on any window of its tokens: the solver's `Iteration`."""

    def __init__(self, block, s):
        self.block, self.s = block, s
        self.shape, self.dtype, self.device = s.x.shape, s.x.dtype, s.x.device
        self.wants_state = s.seqs.return_state
        self.spare = SPARE["cuda" if self.device.type == "cuda" else "cpu"]
        y, self.h_before = s.seqs.before("y"), s.seqs.before("h")
        self.y_before = s.x.new_zeros(s.x.shape[0], s.x.shape[2]) if y is None else y.to(s.x.dtype)

    def place(self, rows, position, valid, y_before, h):
        if y_before is self.y_before and position.shape == self.shape[:2]:  # all there is
            return self.s

        at = (rows[:, None] * self.shape[1] + position).flatten()

        def take(t):
            return t.flatten(0, 1).index_select(0, at).unflatten(0, position.shape)

        if h is not None and h.is_cpu and h.dim() == 3:  # as the CPU's scan reads it
            h = h.transpose(1, 2).contiguous().transpose(1, 2)
        # What lies beyond a sequence's end comes after all of it, and is not looked at.
        return self.block.cut(self.s, take, None, BlockState(y_before, None, h, ()))

    def step(self, window, y):
        return self.block.step_residual(window, y)

    def advance(self, window, carry, counts):
        x, parts = carry
        # On an accelerator the number would have to be waited for.
        n = max(1, int(counts.max())) if x.is_cpu else x.shape[1]
        mask = torch.arange(n, device=counts.device) < counts[:, None]
        part = self.block.cut(window, lambda t: t[:, :n], mask, window.seqs.state)
        parts = {
            name: tuple(None if t is None else t[:, :n] for t in pair)
            for name, pair in parts.items()
        }
        with torch.autocast(x.device.type, enabled=False):
            return self.block.scan_time(part, x[:, :n], **parts)[1]
