"""The paper's procedure for FP-Mamba-1, written from the paper: what the benchmarks compare with.

Nothing of it is shared with lm: parameters come by name, as in a state_dict, and options from
anything with the fields of FPRNNConfig. tests/test_paper_procedure.py compares its iteration
counts, iterates, outputs, losses and gradients with those of the authors' code (tests/golden).

All tokens of a batch are iterated at once, from zero, until the batch has converged (App. B.4). As
in the authors' code everything is computed again in every iteration, also what depends on the input
alone: weight normalisation, the mixer's vectors, B, C, step sizes, decays. The gradient is that of
one more evaluation at the solution ("one-step").

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
    """When the iteration stops, and how it is damped (App. B.4)."""

    tol: float  # the relative residual at which a sequence has converged
    max_iters: int
    quantile: float  # of the batch's lowest residuals that must be below tol
    stepsize: float = 0.99  # of the damped update, at first
    stepsize_decay: float = 0.9  # its factor after `patience` iterations without an improvement
    patience: int = 15
    min_stepsize: float = 1e-3  # the iteration is given up below


def training_rule(tol: float = 0.1, max_iters: int = 100) -> Rule:
    """A batch has converged when three quarters of its sequences have."""
    return Rule(tol, max_iters, quantile=0.75)


def evaluation_rule(tol: float = 0.1, max_iters: int = 1000) -> Rule:
    """A batch has converged when all of its sequences have."""
    return Rule(tol, max_iters, quantile=1.0)


class Solution(NamedTuple):
    """What the iteration came to."""

    y_bld: Tensor
    iterations: int  # evaluations of the map
    failed_b: Tensor  # bool: the sequence's lowest residual is not below the tolerance
    residual_b: Tensor  # of the last evaluation


def relative_residual(y_bld: Tensor, f_bld: Tensor) -> Tensor:
    """‖y − f(y)‖∞ / (‖f(y)‖∞ + 1e-8) of the worst token of each sequence, (b,)."""
    distance_bl = (y_bld - f_bld).abs().amax(-1)
    return (distance_bl / (f_bld.abs().amax(-1) + 1e-8)).amax(-1)


@torch.no_grad()
def solve(evaluate: Callable[[Tensor], Tensor], start_bld: Tensor, rule: Rule) -> Solution:
    """Iterate y ← s f(y) + (1 − s) y until the batch has converged, or is given up.

    Args:
        evaluate: f, which maps y (b,l,d) to the same shape.
    """
    y_bld = start_bld
    stepsize_b = start_bld.new_full((len(start_bld),), rule.stepsize)
    lowest_b = torch.full_like(stepsize_b, torch.inf)
    waited_b = torch.zeros_like(stepsize_b, dtype=torch.long)
    iterations = 0
    while True:
        # 1. One evaluation for all tokens, and how far it is from y: the worst token counts.
        f_bld = evaluate(y_bld)
        residual_b = relative_residual(y_bld, f_bld)
        iterations += 1

        # 2. The damped update, by the step size as it was.
        s_b11 = stepsize_b[:, None, None]
        y_bld = s_b11 * f_bld + (1 - s_b11) * y_bld

        # 3. A sequence that has not improved for `patience` iterations is damped more from now on.
        waited_b = torch.where(residual_b < lowest_b, 0, waited_b + 1)
        lowest_b = torch.minimum(lowest_b, residual_b)
        is_stale_b = waited_b >= rule.patience
        stepsize_b = torch.where(is_stale_b, stepsize_b * rule.stepsize_decay, stepsize_b)
        waited_b = torch.where(is_stale_b, 0, waited_b)

        # 4. One decision for the whole batch.
        has_converged = torch.quantile(lowest_b, rule.quantile) < rule.tol
        is_given_up = stepsize_b.max() < rule.min_stepsize
        if has_converged or is_given_up or iterations >= rule.max_iters:
            return Solution(y_bld, iterations, lowest_b >= rule.tol, residual_b)


def scan_over_time(
    x_bld: Tensor, dt_bld: Tensor, A_dn: Tensor, B_bln: Tensor, C_bln: Tensor
) -> Tensor:
    """Mamba's recurrence, a loop over tokens: h_t = exp(Δ_t A) h_{t−1} + Δ_t x_t B_tᵀ, and its
    output h_t C_t (b,l,d)."""
    h_bdn = x_bld.new_zeros(len(x_bld), *A_dn.shape)
    outputs = []
    for t in range(x_bld.shape[1]):
        decay_bdn = torch.exp(dt_bld[:, t, :, None] * A_dn)
        h_bdn = decay_bdn * h_bdn + (dt_bld[:, t] * x_bld[:, t])[..., None] * B_bln[:, t, None, :]
        outputs.append((h_bdn * C_bln[:, t, None, :]).sum(-1))
    return torch.stack(outputs, 1)


class Inputs(NamedTuple):
    """What a block's projections make of its input, before the iteration."""

    x_bld: Tensor
    z_bld: Tensor  # of the output gate


class Block:
    """One FP-Mamba-1 block with a Householder mixer.

    Args:
        parameters: of the block, by name.
        options: mixer_rank, mixer_act, symm_mixer, use_short_conv, bc_norm, glu_in_loop, dt_rank,
            d_state, eps and out_norm_epsilon, as in FPRNNConfig.
        scan: a function like `scan_over_time`.

    Raises:
        ValueError: another mixer, or an option that the paper's code does not have.
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

    def inputs(self, u: Tensor) -> Inputs:
        """u: (b,l,d_model)."""
        x_bld, z_bld = self._linear("in_proj", u).chunk(2, dim=-1)
        if self.options.use_short_conv:
            x_bld = self._short_convolution(x_bld)
        return Inputs(x_bld, z_bld)

    def evaluate(self, inputs: Inputs, y_bld: Tensor) -> Tensor:
        """f(y) (b,l,d): Eq. 12 and 13."""
        options, parameters = self.options, self.parameters
        x_bld, z_bld = inputs
        before_bld = _shifted(y_bld)

        # 1. The mixer: x̃ = Q x + (I − Q) y = Q (x − y) + y.
        mixed_bld = self._mix(x_bld, before_bld, x_bld - y_bld) + y_bld

        # 2. Step sizes of x; B and C of x and of the token before.
        widths = [options.dt_rank, options.d_state, options.d_state]
        delta, B_bln, C_bln = self._linear("x_proj", x_bld).split(widths, dim=-1)
        B_of_y, C_of_y = F.linear(before_bld, self._weight("bc_y_proj")).chunk(2, dim=-1)
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

        # 4. The gate, where it is in the loop, and the norm that ends an iteration.
        if options.glu_in_loop:
            o_bld = o_bld * F.silu(z_bld)
        weight, bias = parameters["out_norm.weight"], parameters["out_norm.bias"]
        return F.layer_norm(o_bld, weight.shape, weight, bias, options.out_norm_epsilon)

    def solve(self, inputs: Inputs, rule: Rule) -> Solution:
        """The iteration from zero, in fp32 or wider."""
        wide = torch.promote_types(inputs.x_bld.dtype, torch.float32)
        start_bld = torch.zeros_like(inputs.x_bld, dtype=wide)
        return solve(lambda y_bld: self.evaluate(inputs, y_bld), start_bld, rule)

    def output(self, inputs: Inputs, y_bld: Tensor) -> Tensor:
        """The gate, where it is not in the loop, and the projection to (b,l,d_model)."""
        if not self.options.glu_in_loop:
            gate_bld = inputs.z_bld + F.linear(_shifted(y_bld), self._weight("z_y_proj"))
            y_bld = F.silu(gate_bld) * y_bld
        return self._linear("out_proj", y_bld)

    def forward(self, u: Tensor, rule: Rule) -> tuple[Tensor, Solution]:
        """u (b,l,d_model) → the block's output, of the same shape, and the solution. The gradient
        goes through one evaluation at the solution, and from there to the input."""
        inputs = self.inputs(u)
        solution = self.solve(inputs, rule)
        return self.output(inputs, self.evaluate(inputs, solution.y_bld)), solution

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.parameters[f"{name}.weight"], self.parameters.get(f"{name}.bias"))

    def _weight(self, name: str) -> Tensor:
        """A weight-normalised matrix: each row is its gain times its direction's unit vector."""
        direction = self.parameters[f"{name}.direction"]
        return self.parameters[f"{name}.gain"] * F.normalize(direction, dim=1, eps=0.0)

    def _short_convolution(self, x_bld: Tensor) -> Tensor:
        weight = self.parameters["conv1d.weight"]  # (d,1,taps)
        x_bdl = F.pad(x_bld.mT, (weight.shape[-1] - 1, 0))
        bias = self.parameters["conv1d.bias"]
        return F.silu(F.conv1d(x_bdl, weight, bias, groups=len(weight)).mT)

    def _mix(self, x_bld: Tensor, before_bld: Tensor, v_bld: Tensor) -> Tensor:
        """Q v: a product of generalised Householder reflections I − 2 a u uᵀ, the first first."""
        options = self.options
        if options.symm_mixer:
            argument = x_bld + before_bld
        else:
            argument = torch.cat([x_bld.to(before_bld.dtype), before_bld], dim=-1)
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


def _shifted(y_bld: Tensor) -> Tensor:
    """sh(y): every token has the one before it, the first has zeros."""
    return F.pad(y_bld, (0, 0, 1, 0))[:, :-1]


def _unit(v: Tensor, eps: float) -> Tensor:
    """v / max(‖v‖₂, eps) over the last dimension."""
    return F.normalize(v, dim=-1, eps=eps)


class Statistics(NamedTuple):
    """What the solves of all layers needed, under the names of lm's own statistics."""

    evaluations: Tensor  # (layers,) a token
    failed: Tensor  # (layers,b) whether the sequence did not converge


class Output(NamedTuple):
    """What the language model returns."""

    logits: Tensor  # (b,l,vocabulary)
    loss: Tensor | None  # the mean over the targets
    fixed_point: Statistics


class LanguageModel(nn.Module):
    """An FP-Mamba-1 language model solved by the paper's procedure, with the weights of another.

    Args:
        weights: a language model of lm, whose parameters (by name) and `config` are all that is
            used of it; they are not copied.
        scan: a function like `scan_over_time`.

    Raises:
        ValueError: the model has options that the paper's code does not have.
    """

    def __init__(self, weights: nn.Module, scan: Scan = scan_over_time) -> None:
        super().__init__()
        self.weights = weights
        self.scan = scan
        self.rule: Rule | None = None  # in the place of the mode's own
        self.block(0)  # refuses now what is not written here

    @property
    def options(self) -> Any:
        return self.weights.config

    def block(self, layer: int) -> Block:
        return Block(self._under(f"backbone.layers.{layer}.block"), self.options, self.scan)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, shift_labels: Tensor | None = None
    ) -> Output:
        """input_ids (b,l) → logits; with labels (b,l), each the target of the token before it, or
        shift_labels (b,l), each that of its own place, also the loss."""
        rule = self.rule or (training_rule() if self.training else evaluation_rule())
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
    def greedy(self, prompt: Tensor, new: int) -> Tensor:
        """The `new` most likely tokens (b,new) after a prompt (b,l). The paper has no cache: the
        whole text is solved again for every token."""
        text = prompt
        for _ in range(new):
            likeliest = self(text).logits[:, -1].argmax(-1, keepdim=True)
            text = torch.cat([text, likeliest], dim=1)
        return text[:, prompt.shape[1] :]

    def _under(self, prefix: str) -> Parameters:
        """The parameters whose names begin with `prefix.`, without it."""
        start = f"{prefix}."
        return {
            name.removeprefix(start): parameter
            for name, parameter in self.weights.named_parameters()
            if name.startswith(start)
        }

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self._under(name)["weight"]
        return F.rms_norm(x, weight.shape, weight, self.options.norm_epsilon)
