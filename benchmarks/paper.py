"""Independent implementation of the paper's procedure for FP-Mamba-1, for comparison in benchmarks.

It shares no code with lm: parameters are given by name, as in a state_dict, and options by an
object with the fields of FPRNNConfig. tests/test_paper_procedure.py compares iteration counts,
iterates, outputs, losses and gradients with the authors' code (tests/golden).

All tokens of a batch are iterated at once, from zero, until the batch has converged (App. B.4). As
in the authors' code, every iteration computes everything again, including values that depend only
on the input: weight normalisation, the mixer's vectors, B, C, step sizes, decays. The gradient
passes through one more evaluation at the solution ("one-step").

Shape suffixes: b sequences, l tokens, d channels (d_inner), n states of a channel, r reflections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Parameters = dict[str, Tensor]
Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Rule(NamedTuple):
    """Stopping rule and damping of the iteration (App. B.4)."""

    tol: float  # a sequence has converged if its lowest relative residual is below tol
    max_iters: int
    quantile: float  # share of the sequences that must have converged
    stepsize: float = 0.99  # initial step size of the damped update
    stepsize_decay: float = 0.9  # factor on it after `patience` iterations without an improvement
    patience: int = 15
    min_stepsize: float = 1e-3  # the iteration stops if all step sizes are below


TRAINING_RULE = Rule(tol=0.1, max_iters=100, quantile=0.75)
EVALUATION_RULE = Rule(tol=0.1, max_iters=1000, quantile=1.0)


class Solution(NamedTuple):
    """Result of the iteration."""

    y_bld: Tensor
    iterations: int  # evaluations of the map f
    failed_b: Tensor  # bool: the sequence's lowest residual is not below the tolerance
    residual_b: Tensor  # residual of the last evaluation


def relative_residual(y_bld: Tensor, f_bld: Tensor) -> Tensor:
    """Return ‖y − f(y)‖∞ / (‖f(y)‖∞ + 1e-8), maximum over the tokens of a sequence, (b,)."""
    distance_bl = (y_bld - f_bld).abs().amax(-1)
    return (distance_bl / (f_bld.abs().amax(-1) + 1e-8)).amax(-1)


@torch.no_grad()
def solve(evaluate: Callable[[Tensor], Tensor], start_bld: Tensor, rule: Rule) -> Solution:
    """Iterate y ← s f(y) + (1 − s) y until the batch has converged or the rule stops it.

    Args:
        evaluate: The map f from y (b,l,d) to the same shape.
        start_bld: Initial iterate.
        rule: Stopping rule and damping.
    """
    y_bld = start_bld
    stepsize_b = start_bld.new_full((len(start_bld),), rule.stepsize)
    lowest_residual_b = torch.full_like(stepsize_b, torch.inf)
    stale_count_b = torch.zeros_like(stepsize_b, dtype=torch.long)  # iterations
    iterations = 0
    while True:
        # 1. Evaluate f for all tokens, and compute the residuals.
        f_bld = evaluate(y_bld)
        residual_b = relative_residual(y_bld, f_bld)
        iterations += 1

        # 2. Make the damped update with the current step size.
        s_b11 = stepsize_b[:, None, None]
        y_bld = s_b11 * f_bld + (1 - s_b11) * y_bld

        # 3. Reduce the step size of sequences without an improvement for `patience` iterations.
        stale_count_b = torch.where(residual_b < lowest_residual_b, 0, stale_count_b + 1)
        lowest_residual_b = torch.minimum(lowest_residual_b, residual_b)
        is_stale_b = stale_count_b >= rule.patience
        stepsize_b = torch.where(is_stale_b, stepsize_b * rule.stepsize_decay, stepsize_b)
        stale_count_b = torch.where(is_stale_b, 0, stale_count_b)

        # 4. Decide for the whole batch.
        has_converged = torch.quantile(lowest_residual_b, rule.quantile) < rule.tol
        is_step_too_small = stepsize_b.max() < rule.min_stepsize
        if has_converged or is_step_too_small or iterations >= rule.max_iters:
            return Solution(y_bld, iterations, lowest_residual_b >= rule.tol, residual_b)


def scan_over_time(
    x_bld: Tensor, dt_bld: Tensor, A_dn: Tensor, B_bln: Tensor, C_bln: Tensor
) -> Tensor:
    """Compute Mamba's recurrence in a loop over tokens.

    h_t = exp(Δ_t A) h_{t−1} + Δ_t x_t B_tᵀ

    Returns:
        The outputs h_t C_t (b,l,d).
    """
    h_bdn = x_bld.new_zeros(len(x_bld), *A_dn.shape)
    outputs = []
    for t in range(x_bld.shape[1]):
        decay_bdn = torch.exp(dt_bld[:, t, :, None] * A_dn)
        h_bdn = decay_bdn * h_bdn + (dt_bld[:, t] * x_bld[:, t])[..., None] * B_bln[:, t, None, :]
        outputs.append((h_bdn * C_bln[:, t, None, :]).sum(-1))
    return torch.stack(outputs, 1)


class Inputs(NamedTuple):
    """Projections of the input of a block, computed before the iteration."""

    x_bld: Tensor
    z_bld: Tensor  # input of the output gate


class Block:
    """FP-Mamba-1 block with a Householder mixer.

    Args:
        parameters: Parameters of the block by name.
        options: mixer_rank, mixer_act, symm_mixer, use_short_conv, bc_norm, glu_in_loop, dt_rank,
            d_state, eps and out_norm_epsilon, as in FPRNNConfig.
        scan: Function like `scan_over_time`.

    Raises:
        ValueError: If the mixer or an option is not in the paper's code.
    """

    def __init__(self, parameters: Parameters, options: Any, scan: Scan = scan_over_time) -> None:
        expected = dict(
            block="fp_mamba1",
            mixer="householder",
            eigen_range="signed",
            mixer_h_dep=True,
            mixer_proj_rank=None,
            b_h_dep=True,
            c_h_dep=True,
            dt_h_dep=False,
            contractive=None,
        )
        for name, value in expected.items():
            if getattr(options, name) != value:
                raise ValueError(
                    f"the paper's procedure is written for {name} {value!r}, not"
                    f" {getattr(options, name)!r}"
                )
        self.parameters = parameters
        self.options = options
        self.scan = scan

    def project(self, u: Tensor) -> Inputs:
        """Return the projections of the input u (b,l,d_model)."""
        x_bld, z_bld = self._linear("in_proj", u).chunk(2, dim=-1)
        if self.options.use_short_conv:
            x_bld = self._short_convolution(x_bld)
        return Inputs(x_bld, z_bld)

    def evaluate(self, inputs: Inputs, y_bld: Tensor) -> Tensor:
        """Return f(y), (b,l,d): Eq. 12 and 13."""
        options, parameters = self.options, self.parameters
        x_bld, z_bld = inputs
        previous_bld = _shift(y_bld)

        # 1. The mixer: x̃ = Q x + (I − Q) y = Q (x − y) + y.
        mixed_bld = self._mix(x_bld, previous_bld, x_bld - y_bld) + y_bld

        # 2. Step sizes from x; B and C from x and from the previous token.
        widths = [options.dt_rank, options.d_state, options.d_state]
        delta, B_bln, C_bln = self._linear("x_proj", x_bld).split(widths, dim=-1)
        B_of_y, C_of_y = F.linear(previous_bld, self._weight("bc_y_proj")).chunk(2, dim=-1)
        B_bln = B_bln + B_of_y
        C_bln = C_bln + C_of_y
        if options.bc_norm:
            B_bln = _unit(B_bln, options.eps)
            C_bln = _unit(C_bln, options.eps)
        dt_bld = F.softplus(self._linear("dt_proj", delta).to(y_bld.dtype))

        # 3. The recurrence over time, in the dtype of the iterate.
        A_dn = -torch.exp(parameters["A_log"])
        B_bln = B_bln.to(y_bld.dtype)
        C_bln = C_bln.to(y_bld.dtype)
        o_bld = self.scan(mixed_bld, dt_bld, A_dn, B_bln, C_bln) + parameters["D"] * mixed_bld

        # 4. The gate, if it is in the loop, and the norm.
        if options.glu_in_loop:
            o_bld = o_bld * F.silu(z_bld)
        weight, bias = parameters["out_norm.weight"], parameters["out_norm.bias"]
        return F.layer_norm(o_bld, weight.shape, weight, bias, options.out_norm_epsilon)

    def solve(self, inputs: Inputs, rule: Rule) -> Solution:
        """Iterate from zero, in fp32 or wider."""
        dtype = torch.promote_types(inputs.x_bld.dtype, torch.float32)
        start_bld = torch.zeros_like(inputs.x_bld, dtype=dtype)
        return solve(lambda y_bld: self.evaluate(inputs, y_bld), start_bld, rule)

    def output(self, inputs: Inputs, y_bld: Tensor) -> Tensor:
        """Apply the gate, if it is not in the loop, and the projection to (b,l,d_model)."""
        if not self.options.glu_in_loop:
            gate_bld = inputs.z_bld + F.linear(_shift(y_bld), self._weight("z_y_proj"))
            y_bld = F.silu(gate_bld) * y_bld
        return self._linear("out_proj", y_bld)

    def forward(self, u: Tensor, rule: Rule) -> tuple[Tensor, Solution]:
        """Return the output of the block, (b,l,d_model), and the solution.

        The gradient passes through one evaluation at the solution.
        """
        inputs = self.project(u)
        solution = self.solve(inputs, rule)
        return self.output(inputs, self.evaluate(inputs, solution.y_bld)), solution

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.parameters[f"{name}.weight"], self.parameters.get(f"{name}.bias"))

    def _weight(self, name: str) -> Tensor:
        """Return a weight-normalised matrix, whose rows are gain times unit vector."""
        direction = self.parameters[f"{name}.direction"]
        return self.parameters[f"{name}.gain"] * F.normalize(direction, dim=1, eps=0.0)

    def _short_convolution(self, x_bld: Tensor) -> Tensor:
        weight = self.parameters["conv1d.weight"]  # (d,1,taps)
        x_bdl = F.pad(x_bld.mT, (weight.shape[-1] - 1, 0))
        bias = self.parameters["conv1d.bias"]
        return F.silu(F.conv1d(x_bdl, weight, bias, groups=len(weight)).mT)

    def _mix(self, x_bld: Tensor, previous_bld: Tensor, v_bld: Tensor) -> Tensor:
        """Return Q v: the generalised Householder reflections I − 2 a u uᵀ, applied in order."""
        options = self.options
        if options.symm_mixer:
            argument = x_bld + previous_bld
        else:
            argument = torch.cat([x_bld.to(previous_bld.dtype), previous_bld], dim=-1)
        activation = {"silu": F.silu, "relu": F.relu, "identity": nn.Identity()}[options.mixer_act]
        flat = activation(F.linear(argument, self._weight("mixer.u_proj")))
        u_blrd = _unit(flat.unflatten(-1, (options.mixer_rank, -1)).to(v_bld.dtype), options.eps)
        bias = self.parameters["mixer.alpha_proj.bias"]
        a_blr = torch.sigmoid(F.linear(argument, self._weight("mixer.alpha_proj"), bias))
        for i in range(options.mixer_rank):
            u_bld = u_blrd[:, :, i]
            along_bl1 = (u_bld * v_bld).sum(-1, keepdim=True)
            v_bld = v_bld - 2 * a_blr[..., i : i + 1] * along_bl1 * u_bld
        return v_bld


def _shift(y_bld: Tensor) -> Tensor:
    """Return sh(y): the previous token's y at each token, zeros at the first."""
    return F.pad(y_bld, (0, 0, 1, 0))[:, :-1]


def _unit(v: Tensor, eps: float) -> Tensor:
    """Return v / max(‖v‖₂, eps) over the last dimension."""
    return F.normalize(v, dim=-1, eps=eps)


class Statistics(NamedTuple):
    """Statistics of the solves of all layers, with the names of lm."""

    evaluations: Tensor  # (layers,) evaluations per token
    failed: Tensor  # (layers,b) True if the sequence did not converge


class Output(NamedTuple):
    """Output of the language model."""

    logits: Tensor  # (b,l,vocabulary)
    loss: Tensor | None  # the mean over the targets
    fixed_point: Statistics


class LanguageModel(nn.Module):
    """FP-Mamba-1 language model that uses the paper's procedure and the weights of another model.

    Args:
        weights: Language model of lm, of which only the parameters (not copied) and `config` are
            used.
        scan: Function like `scan_over_time`.

    Raises:
        ValueError: If the model has options that the paper's code does not have.
    """

    def __init__(self, weights: nn.Module, scan: Scan = scan_over_time) -> None:
        super().__init__()
        self.weights = weights
        self.scan = scan
        self.rule: Rule | None = None  # None: the rule of training or evaluation, by the mode
        self.block(0)  # raises ValueError for unsupported options

    @property
    def options(self) -> Any:
        return self.weights.config

    def block(self, layer: int) -> Block:
        return Block(self._under(f"backbone.layers.{layer}.block"), self.options, self.scan)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, shift_labels: Tensor | None = None
    ) -> Output:
        """Return logits, and a loss if there are labels.

        Args:
            input_ids: (b,l).
            labels: (b,l), the ids themselves: each is the target of the previous token.
            shift_labels: (b,l), the target at each token.
        """
        rule = self.rule or (TRAINING_RULE if self.training else EVALUATION_RULE)
        embedding = self._under("backbone.embeddings")["weight"]
        hidden = F.embedding(input_ids, embedding)
        residual = torch.zeros_like(hidden)
        solutions = []
        for layer in range(self.options.n_layer):
            residual = residual + hidden
            normed = self._norm(f"backbone.layers.{layer}.norm", residual)
            hidden, solution = self.block(layer).forward(normed, rule)
            solutions.append(solution)
        head = embedding if self.options.tie_embeddings else self._under("lm_head")["weight"]
        logits = F.linear(self._norm("backbone.norm_f", residual + hidden), head)

        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        elif shift_labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten())
        evaluations = torch.tensor([float(solution.iterations) for solution in solutions])
        failed = torch.stack([solution.failed_b for solution in solutions])
        return Output(logits, loss, Statistics(evaluations, failed))

    @torch.no_grad()
    def greedy(self, prompt: Tensor, new_tokens: int) -> Tensor:
        """Return the ids of new tokens (b,new_tokens) after a prompt (b,l), by greedy decoding.

        The paper has no cache, so the whole text is solved again for every token.
        """
        text = prompt
        for _ in range(new_tokens):
            next_token = self(text).logits[:, -1].argmax(-1, keepdim=True)
            text = torch.cat([text, next_token], dim=1)
        return text[:, prompt.shape[1] :]

    def _under(self, prefix: str) -> Parameters:
        """Return the parameters whose names start with `prefix.`, without the prefix."""
        start = f"{prefix}."
        return {
            name.removeprefix(start): parameter
            for name, parameter in self.weights.named_parameters()
            if name.startswith(start)
        }

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self._under(name)["weight"]
        return F.rms_norm(x, weight.shape, weight, self.options.norm_epsilon)
