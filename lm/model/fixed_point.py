"""Base class of the fixed-point layers: input projections, solve, output gate.

The output y of the recurrence is the fixed point of y = f(y): f mixes channels of the layer's input
and y, and runs a diagonal recurrence over time. At token t it also reads sh(y), the y of token t−1.
The forward pass has five numbered steps. blocks.py has the recurrences and their projections,
strategies.py has the solvers.

Shape suffixes: b batch, l length, d channels (d_inner), m columns of all projections.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .cell import TokenEquation
from .layers import (
    Projection,
    affine_map,
    build_centroids,
    collect_parameters,
    join_projections,
    padded_linear,
)
from .mixer_base import ReflectionOptions
from .mixers import Mixer, build_mixer
from .solver import measure_num_iters
from .state import BlockState, Sequences, cached, last_valid_tokens, shift, state_shapes
from .strategies import SolveInputs, Solver, choose_solver

# Layers whose matrices a WeightCache may hold.
MATERIALIZED_LAYERS = ("mixer", "bc_y_proj", "dt_y_proj", "z_y_proj")
UNKNOWN_LENGTH = 2**62  # longer than any window, so it does not limit the window's width


class BlockFlops(NamedTuple):
    """Forward FLOPs per token of a block; a multiply-add counts as two."""

    per_solve: int  # once per solve
    per_step: int  # once per evaluation of f


class TokenTrace(NamedTuple):
    """Quantities of a layer at every token, for inspection."""

    state_norm: torch.Tensor  # (b,l) ‖h_t‖₂ of the recurrence's state after the token
    gate: torch.Tensor | None  # (b,l) mean of the mixer's gates a_t; None if it has no gates
    decay: torch.Tensor  # (b,l) mean over the state of the factor on h_{t−1}


def choose_weight_like(x: torch.Tensor, wide_x: torch.Tensor, solver: Solver) -> torch.Tensor:
    """Return the tensor whose dtype the weights of a solve have.

    Weights in the dtype of matrix products save a copy of them, but under autocast only kernels
    with NARROW read them in this dtype.

    Args:
        x: Input in the dtype of matrix products, (b,l,d).
        wide_x: The same in fp32 or wider.
        solver: Solver that will read the weights.
    """
    is_narrow = solver.kernel is not None and solver.kernel.NARROW
    return x if is_narrow or not torch.is_autocast_enabled(x.device.type) else wide_x


class FixedPointBlock(nn.Module):
    """A layer whose output y is the fixed point of a recurrence that reads y.

    A subclass defines the methods that raise NotImplementedError here.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        d = config.d_inner
        self.mixer_width = 2 * d if config.mixer_h_dep and not config.symm_mixer else d
        self.mixer = build_mixer(config, d, self.mixer_width)
        self.out_proj = nn.Linear(d, config.d_model, bias=False)
        self.centroids = build_centroids(config, d)

    def state_vector(self, state: BlockState) -> torch.Tensor:
        """Return the vectors (b,d) of a state that centroids read."""
        return state.y

    def with_state_vector(self, state: BlockState, vector: torch.Tensor) -> BlockState:
        """Return a state with other vectors (b,d)."""
        return state._replace(y=vector)

    def forward(
        self,
        u: torch.Tensor,
        seqs: Sequences = Sequences(),  # noqa: B008
        checkpoint: Callable[..., Any] | None = None,
        count_iterations: bool = False,
    ) -> tuple[Any, ...]:
        """Map the layer's input to its output.

        Args:
            u: Input, (b,l,d_model).
            seqs: Padding, documents, state and solver options of the batch.
            checkpoint: Function like torch.utils.checkpoint.checkpoint. The backward then repeats
                the forward, but not the solve, unless the gradient goes through the solve
                (`ExactSequential`). None: the forward stores all activations.
            count_iterations: Whether to measure ℓ*, the iterations of the paper's procedure
                (solver.measure_num_iters).

        Returns:
            Output (b,l,d_model), FixedPointStats, and with `seqs.return_state` the BlockState after
            the last token.
        """
        solver = self.choose_solver(u, seqs)
        seqs = self._prepare_sequences(u, seqs)

        def solve(u):
            # 1. Compute everything that depends on u only: x and z (b,l,d), projections (b,l,m).
            inputs = self.prepare(u, seqs, solver)
            # 2. Solve for y (b,l,d).
            return inputs, solver.solve(inputs)

        def compute_output(inputs, solution):
            # 3. Attach the gradient of the solution, if `solve` has not.
            y, h, stats = solver.attach_gradient(inputs, solution)
            # 4. Apply the output gate, and project to (b,l,d_model).
            out = self.gate_and_project(inputs, y)
            return out, stats, self._make_end_state(inputs, solution.y, y, h)

        if checkpoint is None:
            out, stats, state = compute_output(*solve(u))
        elif solver.is_differentiable:
            out, stats, state = checkpoint(lambda u: compute_output(*solve(u)), u)
        else:  # solve once without a graph; the backward repeats steps 1, 3 and 4
            with torch.no_grad():
                solution = solve(u)[1]
            out, stats, state = checkpoint(
                lambda u: compute_output(self.prepare(u, seqs, solver), solution), u
            )

        # 5. Complete the statistics.
        stats = solver.rescale_shares(stats, seqs.mask)._replace(adjoint_norm=seqs.adjoint_norm)
        if count_iterations:
            stats = self._measure_num_iters(u, seqs, solver, stats)
        else:  # remove the count of PaperIteration, because ℓ* is measured with tolerance 0.1
            stats = stats._replace(
                num_iters=None, converged=None, token_iters=None, other_solution=None
            )
        return (out, stats, state) if seqs.return_state else (out, stats)

    # Methods of a subclass.

    def prepare(
        self,
        u: torch.Tensor,
        seqs: Sequences = Sequences(),  # noqa: B008
        solver: Solver | None = None,
    ) -> SolveInputs:
        """Compute everything that depends on the layer's input only.

        Args:
            u: Input, (b,l,d_model).
            seqs: Padding, documents, state and solver options of the batch.
            solver: Solver that will read the result. None: as `choose_solver`.
        """
        raise NotImplementedError

    def select_parameters(self, inputs: SolveInputs, rows: dict[str, torch.Tensor]) -> Any:
        """Return the parameters of the recurrence, such as dt, B and C, at every token.

        Args:
            inputs: Inputs of the solve.
            rows: Projections by name, (b,l,·) each.
        """
        raise NotImplementedError

    def run_recurrence(
        self, inputs: SolveInputs, params: Any, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the recurrence over the mixed input x (b,l,d).

        Returns:
            The recurrence's output o (b,l,d) and its state after the last token.
        """
        raise NotImplementedError

    def normalize(self, inputs: SolveInputs, o: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Compute f(y) from the recurrence's output o and the mixed input x, all (b,l,d)."""
        raise NotImplementedError

    def token_equation(self, inputs: SolveInputs, params: Any) -> TokenEquation:
        """Return the tokens' own equations, without the mixer and the history (cell.py)."""
        raise NotImplementedError

    def run_kernel(
        self, inputs: SolveInputs, mixer_options: ReflectionOptions
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Run the whole exact solve in one kernel of lm/kernels.

        Args:
            inputs: Inputs of the solve.
            mixer_options: Result of `Mixer.kernel_options`.

        Returns:
            y (b,l,d), the state after the last token, and the status of each token (b,l); None if
            no kernel can.
        """
        raise NotImplementedError

    def mean_decay(self, inputs: SolveInputs, params: Any) -> torch.Tensor:
        """Return the mean over the state of the factor on h_{t−1}, (b,l)."""
        raise NotImplementedError

    def flops_per_token(self) -> BlockFlops:
        """Count the forward FLOPs per token."""
        raise NotImplementedError

    def scale_noise(self, noise: torch.Tensor | None) -> torch.Tensor | None:
        """Convert noise (b,l,d) on the norm's output before its weights to noise on y (b,l,d)."""
        return noise

    def state_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors in the BlockState, without the batch dimension."""
        return state_shapes(self.config)

    # One evaluation of f.

    def mix_channels(
        self, inputs: SolveInputs, y: torch.Tensor
    ) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor]]:
        """Compute the mixed input x̃ = Q x + (I − Q) y, where Q depends on x and sh(y).

        Args:
            inputs: Inputs of the solve.
            y: Iterate, (b,l,d).

        Returns:
            x̃ (b,l,d), the parameters of the recurrence, and the projections by name.
        """
        y_before = shift(y.to(inputs.projections.weight_y.dtype), inputs.seqs)
        rows = inputs.projections.rows(y_before)
        with torch.autocast(y.device.type, enabled=False):
            x = self.mixer.mix(rows["mixer"], inputs.x, y, inputs.mixer)
            return x, self.select_parameters(inputs, rows), rows

    def step(
        self, inputs: SolveInputs, y: torch.Tensor, with_state: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute f(y), one iteration of the paper.

        Args:
            inputs: Inputs of the solve.
            y: Iterate, (b,l,d).
            with_state: Whether to return the recurrence's state after the last token as well.

        Returns:
            f(y), (b,l,d); with `with_state` the pair (f(y), state).
        """
        # 1. Mix channels.
        x, params, _ = self.mix_channels(inputs, y)  # (b,l,d)
        with torch.autocast(x.device.type, enabled=False):
            # 2. Mix time.
            o, h = self.run_recurrence(inputs, params, x)  # (b,l,d)
            # 3. Normalize.
            f_y = inputs.seqs.zero_padding(self.normalize(inputs, o, x))
        return (f_y, h) if with_state else f_y

    def gate_and_project(self, inputs: SolveInputs, y: torch.Tensor) -> torch.Tensor:
        """Apply the output gate and project y (b,l,d) to (b,l,d_model)."""
        y = y.to(inputs.z.dtype)
        if not self.config.glu_in_loop:
            y = F.silu(self._read_gate(inputs, y)) * y
        return self.out_proj(y)

    def _read_gate(self, inputs, y):
        """Return the gate before its silu, (b,l,d): z, plus a map of sh(y) with `gate_h_dep`."""
        if not self.config.gate_h_dep:
            return inputs.z
        y_before = shift(y.to(inputs.z.dtype), inputs.seqs, "f_y")
        cache = inputs.seqs.cache
        if cache is None:
            from_y = self.z_y_proj(y_before)
        else:
            matrix = cache.get_or_make(
                ("z_y_proj", y_before.dtype), lambda: affine_map(self.z_y_proj, y_before)
            )
            from_y = F.linear(y_before, *matrix)
        return inputs.z + from_y

    # Parts of `prepare` that all blocks share.

    def _join_projections(self, mixer_input, x, seqs, solver, *others):
        """Join the mixer's projection with others, so that one matrix product computes all.

        Args:
            mixer_input: Input of the mixer's map, (b,l,d).
            x: Input that the mixer mixes with y, (b,l,d).
            seqs: Properties of the batch.
            solver: Solver that will read the projections.
            others: Projection of each other map.

        Returns:
            Projections and the MixerWeights.
        """
        cfg, d, kernel = self.config, mixer_input.shape[-1], solver.kernel
        like = choose_weight_like(mixer_input, x, solver)

        def compute_weights():
            weights = self.mixer.weights(like)
            if kernel is None:
                return weights
            return self.mixer.merge_extra(weights)  # kernels do not read MixerWeights.extra

        weights = cached(seqs.cache, ("mixer", kernel is None, like.dtype), compute_weights)
        # The mixer's map reads [x, sh(y)], or x + sh(y) with symm_mixer.
        matrix_x, weight_y = weights.matrix, None
        if cfg.mixer_h_dep and cfg.symm_mixer:
            weight_y = matrix_x
        elif cfg.mixer_h_dep:
            matrix_x, weight_y = weights.matrix.split(d, dim=1)
        from_x = padded_linear(mixer_input, matrix_x, weights.bias)
        # A kernel with NARROW reads the projections in the dtype of matrix products.
        dtype = from_x.dtype if kernel is not None and kernel.NARROW else x.dtype
        padding = from_x.shape[-1] - len(weights.matrix)
        mixer = Projection("mixer", from_x, weight_y, padding)
        projections = join_projections([mixer, *others], d, dtype, seqs.cache)
        projections = projections._replace(centroids=self.centroids)
        return projections.add_noise(self.scale_noise(seqs.noise)), weights

    # The solver and the state.

    @property
    def noise_width(self) -> int:
        """Width of a token's state noise."""
        return self.config.d_inner

    def get_settings(self, seqs: Sequences) -> Any:
        """Return the configuration whose solver fields apply to this pass."""
        return self.config if seqs.options.settings is None else seqs.options.settings

    def choose_solver(self, u: torch.Tensor, seqs: Sequences = Sequences()) -> Solver:  # noqa: B008
        """Return the solver for the layer's input u (b,l,d_model)."""
        return choose_solver(self, self.get_settings(seqs), u.shape[1], u)

    def describe_solver(self, settings: Any, length: int | None = None) -> dict[str, Any]:
        """Return `Solver.describe` of the solver in the block's mode (training or evaluation).

        Args:
            settings: Configuration with the solver's fields.
            length: Tokens per sequence. None: unknown.
        """
        length = UNKNOWN_LENGTH if length is None else length
        return choose_solver(self, settings, length, self.out_proj.weight).describe()

    def kernel_rank(self) -> int:
        """Return the mixer's number of reflections; 0 if no compiled kernel can solve the block."""
        options = self.mixer.kernel_options()
        return 0 if options is None or self.config.dt_h_dep else options.rank

    def _prepare_sequences(self, u, seqs):
        """Add the noise, the adjoint's norm and the valid cache of weights of this pass to seqs."""
        seqs = seqs.with_noise(self, u)
        if torch.is_grad_enabled():
            dtype = torch.promote_types(u.dtype, torch.float32)
            seqs = seqs._replace(adjoint_norm=u.new_zeros(len(u), dtype=dtype))
        if seqs.cache is not None:
            seqs = seqs._replace(cache=seqs.cache.valid_for(self._materialized_parameters()))
        return seqs

    def _materialized_parameters(self):
        """Return the parameters that cached weights depend on, or None if they depend on more."""
        layers = [self._modules[name] for name in MATERIALIZED_LAYERS if name in self._modules]
        parameters = collect_parameters(layers, (Mixer, nn.ModuleList))
        A_log = self._parameters.get("A_log")
        if parameters is None or A_log is None:
            return parameters
        return [*parameters, A_log]

    def _make_end_state(self, inputs, y_star, y, h):
        """Return the BlockState after the last token, or None without `return_state`.

        It is detached: the gradient stops at the border of a segment (truncated backpropagation).
        y is the iterate that the output is computed from, f(y*) or y*, (b,l,d).
        """
        seqs = inputs.seqs
        if not seqs.return_state:
            return None

        def take_last(y, name):
            previous = seqs.get_state(name)
            previous = None if previous is None else previous.unsqueeze(1)
            return last_valid_tokens(y, 1, previous, seqs).squeeze(1)

        last_y = last_f_y = take_last(y_star, "y")
        # In a row of padding only, both fields keep their earlier values, which may differ.
        if y is not y_star or seqs.mask is not None:
            last_f_y = take_last(y, "f_y")
        return BlockState(last_y, last_f_y, h.detach().clone(), self._make_conv_state(inputs, y))

    def _make_conv_state(self, inputs, y):
        """Return `BlockState.conv`. y: As in `_make_end_state`."""
        return () if inputs.conv_tail is None else (inputs.conv_tail,)

    # Measurements.

    @torch.no_grad()
    def _measure_num_iters(self, u, seqs, solver, stats):
        """Add ℓ* to the statistics; see solver.measure_num_iters."""
        inputs = self.prepare(u, seqs, solver)
        y = solver.solve(inputs).y
        return measure_num_iters(
            lambda y: self.step(inputs, y), y, self.config.block, stats, seqs.mask
        )

    @torch.no_grad()
    def trace_tokens(self, u: torch.Tensor, seqs: Sequences = Sequences()) -> TokenTrace:  # noqa: B008
        """Measure the layer at every token of its solution.

        Args:
            u: Input, (b,l,d_model).
            seqs: Properties of the batch.
        """
        solver = self.choose_solver(u, seqs)
        inputs = self.prepare(u, seqs, solver)
        y = solver.solve(inputs).y
        gates = self.mixer.gates(inputs.projections.rows(shift(y, seqs))["mixer"])
        state, norms, decays = seqs.state, [], []
        for t in range(y.shape[1]):
            token = inputs.cut(t, t + 1, state)
            x, params, _ = self.mix_channels(token, y[:, t : t + 1])
            with torch.autocast(x.device.type, enabled=False):
                _, h = self.run_recurrence(token, params, x)
                decays.append(self.mean_decay(token, params))
            norms.append(torch.linalg.vector_norm(h.flatten(1), dim=-1, keepdim=True))
            state = BlockState(y[:, t], None, h, ())
        gate = None if gates is None else gates.mean(-1)
        return TokenTrace(torch.cat(norms, 1), gate, torch.cat(decays, 1))

    def _count_flops(self, per_solve, scan):
        """Add the FLOPs of mixer, gate and maps of sh(y) to the counts of a subclass."""
        c, d, m = self.config, self.config.d_inner, self.mixer.out_features

        def count_product(name):
            layer = getattr(self, name, None)
            return 0 if layer is None else 2 * layer.in_features * layer.out_features

        per_solve += sum(map(count_product, ("in_proj", "out_proj", "z_y_proj")))
        per_solve += 2 * d * m  # the mixer's map of x
        per_step = (2 * d * m if c.mixer_h_dep else 0) + self.mixer.flops_per_token()
        per_step += count_product("bc_y_proj") + count_product("dt_y_proj")
        per_step += 4 * c.state_centroids * d  # scores of the centroids, and their mean
        elementwise = 12 * d  # about: x − y, + y, D ⊙ x̃, norm
        return BlockFlops(per_solve, per_step + scan + elementwise)
