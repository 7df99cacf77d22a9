"""Mutations of one token's equation, of the way through time and of the way back."""

from tests.mutations import Mutation
from tests.mutations.of_model import ORACLE

CELL = "lm/model/cell.py"
CERTIFIED = "lm/model/certified_root.py"
PAIR, CPU_PAIR = "lm/model/certified_root.py", "lm/kernels/cpu/cell_pair.h"
MIXERS = "lm/model/mixers.py"
BLOCKS = "lm/model/blocks.py"
BLOCK = "lm/model/fixed_point.py"
SOLVER = "lm/model/solver.py"
GRADIENT = "lm/model/gradient.py"
FULL = "lm/model/full_rank.py"
PROJECTIONS = "lm/model/layers.py"
STATE_NOISE = "lm/model/state.py"
TESTS = "tests/lm/model/"
CAUSAL = f"{TESTS}test_causal.py"


def of_cell(*tests):
    return tuple(f"{TESTS}test_cell.py::test_{test}" for test in tests)


def of_full(*tests):
    return tuple(f"{TESTS}test_full_rank.py::test_{test}" for test in tests)


def of_noise(test):
    return (f"{TESTS}test_state_noise.py::test_{test}",)


def of_models(*tests):
    return tuple(f"{CAUSAL}::test_{test}" for test in tests)


def solved(*cases):
    return tuple(f"{ORACLE}::test_the_solved_output[{case}-parallel]" for case in cases)


def by_token(case):
    """Token by token, by no kernel: the output, and the gradient through time."""
    return (f"{ORACLE}::test_the_exact_gradient[{case}]",)


AGAINST = of_noise("the_second_pass_goes_along_the_gradient_of_the_first[fp_mamba1-parallel-0.3]")
EQUATION = of_cell("a_solved_token_satisfies_its_own_equation")
ROOT = of_cell("every_root_solves_its_equation_and_is_the_one_picard_runs_into")
OF_SOLUTION = of_cell("the_gradient_is_that_of_the_solution")
FOLD = of_cell("near_a_fold_the_gradient_is_limited_and_this_is_counted")
COUNTED = (f"{TESTS}test_token.py::test_what_is_not_solved_is_counted_and_padding_never",)
ROUNDED = (f"{TESTS}test_token.py::test_the_adjoint_ends_at_its_tolerance_or_at_rounding",)
REACH = (f"{TESTS}test_token.py::test_k_terms_of_the_adjoint_reach_k_tokens_back",)
CLIPPED = (f"{TESTS}test_token.py::test_what_comes_back_is_clipped_relative_to_the_cotangent",)
NOISE = (f"{TESTS}test_token.py::test_noise_is_added_to_what_is_read_of_y_and_nothing_else",)

MUTATIONS = [
    # I − Q as Uᵀ T U.
    Mutation(
        "token: T of a product of reflections with the wrong sign below its diagonal",
        MIXERS, "a.unsqueeze(-1) * below, T, upper=False",
        "-a.unsqueeze(-1) * below, T, upper=False",
        by_token("fp_mamba1-householder4"),
    ),
    Mutation(
        "token: T of a product of reflections by the gate of the column",
        MIXERS, "a.unsqueeze(-1) * below, T", "a.unsqueeze(-2) * below, T",
        by_token("fp_mamba1-householder4"),
    ),
    Mutation(
        "token: reflections of a product act side by side",
        MIXERS, "if sequential and a.shape[-1] > 1:", "if False:",
        by_token("fp_mamba1-householder4"),
    ),
    Mutation(
        "token: T transposed in Uᵀ T s",
        CELL, "((self.T @ s.unsqueeze(-1)).transpose(-1, -2) @ self.U)",
        "((self.T.mT @ s.unsqueeze(-1)).transpose(-1, -2) @ self.U)",
        EQUATION,
    ),
    Mutation(
        "token: T transposed in the m_j",
        CELL, "m = (T.transpose(-1, -2) @ U)", "m = (T @ U)",
        EQUATION,
    ),
    # φ.
    Mutation(
        "token: x added to its reflection",
        CELL, "reflected = token.x - low_rank", "reflected = token.x + low_rank",
        EQUATION,
    ),
    Mutation(
        "token: the m_j without the gain",
        CELL, "(T.transpose(-1, -2) @ U) * token.gain.unsqueeze(-2)",
        "(T.transpose(-1, -2) @ U)",
        EQUATION,
    ),
    Mutation(
        "token: the m_j without the gate",
        CELL, "c, m = c * gate, m * gate.unsqueeze(-2)", "c, m = c * gate, m",
        EQUATION,
    ),
    Mutation(
        "token: δ left out",
        CELL, "return top * inverse + self.delta,", "return top * inverse,",
        EQUATION,
    ),
    Mutation(
        "token: γ₁ counted once under the root",
        CELL, "((self.gamma1 + half_slope) * s)", "(half_slope * s)",
        EQUATION,
    ),
    Mutation(
        "token: γ₀ without eps",
        CELL, "c.square().mean((-2, -1)) + norm.eps", "c.square().mean((-2, -1))",
        EQUATION,
    ),
    Mutation(
        "token: Γ₂ a sum over channels, not a mean",
        CELL, "m @ m.transpose(-1, -2) / d", "m @ m.transpose(-1, -2)",
        EQUATION,
    ),
    Mutation(
        "token: Β without the norm's weight",
        CELL, "beta = (weighted @ c).squeeze(-1), weighted @ m",
        "beta = (weighted @ c).squeeze(-1), U @ m",
        EQUATION,
    ),
    Mutation(
        "token: nothing centred where the norm is LayerNorm",
        CELL, 'return v - v.mean(-1, keepdim=True) if self.kind == "layer" else v', "return v",
        EQUATION,
    ),
    Mutation(
        "token: x̃ without what the solution adds",
        CELL, "reflected + low_rank.combine(s), outcome", "reflected, outcome",
        EQUATION,
    ),
    Mutation(
        "token: the wrong sign where φ is linear",
        CELL, "rest = _rest_of(beta.detach())", "rest = _rest_of(-beta.detach())",
        EQUATION,
    ),
    # Its root.
    Mutation(
        "token: φ′ with the wrong sign of the root's slope",
        CELL, "self.beta * inverse - top", "self.beta * inverse + top",
        OF_SOLUTION,
    ),
    Mutation(
        "token: φ′ by 1/v, not 1/v^(3/2)",
        CELL, "half_slope.unsqueeze(-2) * inverse**3", "half_slope.unsqueeze(-2) * inverse**2",
        OF_SOLUTION,
    ),
    Mutation(
        "token: φ′ transposed",
        CELL, "top.unsqueeze(-1) * half_slope.unsqueeze(-2)",
        "top.unsqueeze(-2) * half_slope.unsqueeze(-1)",
        OF_SOLUTION,
    ),
    Mutation(
        "token: Newton may go to roots that Picard runs away from, of one reflection",
        CELL, "return slope[:, 0, 0] < 1", "return slope[:, 0, 0] < 1e9",
        of_cell("newton_takes_no_root_that_picard_runs_away_from"),
    ),
    Mutation(
        "token: Newton may go to roots that Picard runs away from, of several",
        CELL, "torch.linalg.eigvals(slope).real.amax(-1) < 1",
        "torch.linalg.eigvals(slope).real.amin(-1) < 1",
        of_cell("which_slopes_attract"),
    ),
    Mutation(
        "token: eigenvalues of φ′ below −1 forbid a root",
        CELL, "torch.linalg.eigvals(slope).real.amax(-1) < 1",
        "torch.linalg.eigvals(slope).abs().amax(-1) < 1",
        of_cell("which_slopes_attract"),
    ),
    Mutation(
        "token: Newton goes as far as it likes",
        CELL, "near = (s - start).abs().amax(-1) <= reach",
        "near = (s - start).abs().amax(-1) < torch.inf",
        of_cell("newton_goes_no_further_than_it_may"),
    ),
    Mutation(
        "token: Newton is tried from anywhere",
        CELL, "near = way <= NEAR * coefficients.size(s, there)", "near = way < torch.inf",
        ROOT,
    ),
    Mutation(
        "token: a Newton step need not halve the residual",
        CELL, "better = sound & (size <= 0.5 * best)", "better = sound & (size <= 1e9 * best)",
        of_cell("newton_stays_where_a_step_would_not_halve_the_residual"),
    ),
    Mutation(
        "token: Picard undamped however long it gets no nearer",
        CELL, "        damping.update(residual)\n        s = s", "        s = s",
        ROOT,
    ),
    Mutation(
        "token: the search starts elsewhere",
        CELL, "    s = torch.zeros_like(alpha)\n", "    s = torch.full_like(alpha, -0.5)\n",
        ROOT,
    ),
    Mutation(
        "token: bisection goes the other way",
        CELL, "low, high = torch.where(above, low, middle), torch.where(above, middle, high)",
        "low, high = torch.where(above, middle, low), torch.where(above, high, middle)",
        of_cell("what_picard_does_not_find_bisection_does"),
    ),
    Mutation(
        "token: bisection without δ",
        CELL, "right = g[:, None] * alpha + delta", "right = g[:, None] * alpha",
        of_cell("what_picard_does_not_find_bisection_does"),
    ),
    # The gradient in the token.
    Mutation(
        "token: the gradient of s by (I − φ′)⁻¹, not its transpose",
        CELL, "rest.transpose(-1, -2), grad", "rest, grad",
        OF_SOLUTION,
    ),
    Mutation(
        "token: the gradient of s without (I − φ′)⁻ᵀ",
        CELL, "return torch.where(sound, limited, grad), None", "return grad, None",
        OF_SOLUTION,
    ),
    Mutation(
        "token: the gradient of s of any size",
        CELL, "through * (MOST_GAIN * own / size.clamp_min(1e-30)).clamp_max(1.0)", "through",
        FOLD,
    ),
    Mutation(
        "token: the gradient of s lengthened to its limit",
        CELL, "through * (MOST_GAIN * own / size.clamp_min(1e-30)).clamp_max(1.0)",
        "through * (MOST_GAIN * own / size.clamp_min(1e-30))",
        OF_SOLUTION,
    ),
    Mutation(
        "token: the implicit gradient where there is no solution",
        CELL, "sound = solved.unsqueeze(-1) & torch.isfinite(limited)",
        "sound = torch.isfinite(limited)",
        of_cell("a_token_that_failed_has_the_gradient_of_one_step"),
    ),
    # The inner iteration.
    Mutation(
        "token: the inner adjoint with the wrong sign",
        FULL, "lambda g: v_some + torch.autograd.grad(f0, y0, g",
        "lambda g: v_some - torch.autograd.grad(f0, y0, g",
        of_full("each_of_the_three_ways_finds_a_solution_and_its_gradient"),
    ),
    Mutation(
        "token: the inner adjoint of any size",
        FULL, "limited = g * (MOST_GAIN * own / size.clamp_min(1e-30)).clamp_max(1.0)",
        "limited = g",
        of_full("the_adjoint_is_limited"),
    ),
    Mutation(
        "token: the inner iteration goes on where it has converged",
        FULL, "torch.lerp(iterate, value, (damping.step * moving).unsqueeze(-1))",
        "torch.lerp(iterate, value, damping.step.unsqueeze(-1))",
        of_full("a_token_that_iterates_depends_on_no_other"),
    ),
    Mutation(
        "token: the precision decides when Picard has chosen a full-rank solution",
        FULL, "is_near = is_near | (residual < ROOT_TOL)",
        "is_near = is_near | (residual < INNER_TOL[iterate.dtype])",
        of_full("every_precision_takes_the_same_of_several_solutions"),
    ),
    Mutation(
        "full-rank mixers start with open gates",
        "lm/model/configuration_fprnn.py", 'NEAR_IDENTITY.get(mixer, 0.0)', "0.0",
        ("tests/lm/model/test_modeling.py::test_full_rank_mixers_start_near_the_identity",),
    ),
    Mutation(
        "token: places of a full-rank search lie on the CPU",
        FULL, "torch.arange(len(y), device=y.device)", "torch.arange(len(y))",
        (f"{TESTS}test_devices.py::test_no_operation_mixes_devices[mixer-kronecker-True]",),
    ),
    Mutation(
        "token: bisection of a full-rank equation goes the other way",
        FULL, "low, high = torch.where(above, low, middle), torch.where(above, middle, high)",
        "low, high = torch.where(above, middle, low), torch.where(above, high, middle)",
        of_full("bisection_comes_near_without_newton"),
    ),
    Mutation(
        "token: the slope of a full-rank equation keeps what is along v",
        FULL, "unsqueeze(-1) * (moved - along)", "unsqueeze(-1) * moved",
        of_full("each_of_the_three_ways_finds_a_solution_and_its_gradient"),
    ),
    Mutation(
        "token: the dense adjoint not transposed",
        FULL, "_eye(slope) - slope.mT, right", "_eye(slope) - slope, right",
        of_full("each_of_the_three_ways_finds_a_solution_and_its_gradient"),
    ),
    Mutation(
        "token: Anderson adds the combination of changes",
        FULL, "moved = g - (torch.stack", "moved = g + (torch.stack",
        of_full(
            "anderson_solves_a_linear_map_that_expands_in_as_many_steps_as_it_has_directions"
        ),
    ),
    Mutation(
        "token: the gradient's limit is by the largest entry",
        CELL, "size, own = (torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t",
        "size, own = (t.abs().amax(-1, keepdim=True) for t",
        of_cell("the_limit_is_one_of_the_cotangents_euclidean_length"),
    ),
    Mutation(
        "token: what may be limited is not counted",
        CELL, "torch.where(limited, outcome | LIMITED, outcome)", "outcome",
        FOLD,
    ),
    Mutation(
        "token: what bisection found is not counted",
        CELL, "outcome[searched[found]] = BISECTED", "outcome[searched[found]] = 0",
        of_cell("what_picard_does_not_find_bisection_does"),
    ),
    # The recurrence around it.
    Mutation(
        "token: the history keeps the token's own part",
        BLOCK, "own.token(s.x, o - gain * x, gain)", "own.token(s.x, o, gain)",
        solved("fp_mamba1-householder1"),
    ),
    Mutation(
        "token: FP-Mamba-1's own gain without Δ",
        CELL, "gain = gain * of_heads", "gain = gain.sign() * of_heads",
        by_token("fp_mamba1-householder1"),
    ),
    Mutation(
        "token: FP-Mamba-2's heads assigned to groups in turn",
        CELL, "bc.repeat_interleave(heads // groups, -1)",
        "bc.repeat(1, 1, heads // groups)",
        by_token("fp_mamba2-householder1"),
    ),
    Mutation(
        "token: D missing from the gain",
        CELL, "gain + self.D.to(gain.dtype)", "gain",
        by_token("fp_mamba1-householder1"),
    ),
    Mutation(
        "token: the gate outside the loop is inside the token's equation",
        BLOCKS, "F.silu(s.z.to(s.x.dtype)) if self.gate_in_loop else None",
        "F.silu(s.z.to(s.x.dtype))",
        by_token("fp_mamba1-householder1"),
    ),
    Mutation(
        "the gate outside the loop reads no sh(y)",
        BLOCK, 'return s.z + self._of_y("z_y_proj", before, s.seqs.kept)', "return s.z",
        by_token("fp_mamba1-householder1"),
    ),
    Mutation(
        "layers without parameters of their own are not initialised",
        "lm/model/stack.py", "    model._init_weights(module)\n", "",
        (f"{TESTS}test_modeling.py::test_every_layers_output_starts_small_in_a_deep_stack",),
    ),
    Mutation(
        "the gates of a new mixer start at 0 whatever is asked",
        "lm/model/stack.py",
        "        _start_gates(module.mixer, cfg.mixer_gate_start)\n",
        "        _start_gates(module.mixer, 0.0)\n",
        (f"{TESTS}test_modeling.py::test_a_mixer_starts_near_the_identity[householder-fp_mamba1]",),
    ),
    Mutation(
        "a gate that reads x alone keeps its map of sh(y)",
        BLOCKS, "if cfg.gate_h_dep and not cfg.glu_in_loop:", "if not cfg.glu_in_loop:",
        (f"{TESTS}test_h_dep.py::test_the_gate_outside_reads_x_alone[fp_mamba1]",),
    ),
    Mutation(
        "token: the state after a token is of the x that is not mixed",
        BLOCK, "_, h = self.scan_time(s, parts, mixed)", "_, h = self.scan_time(s, parts, s.x)",
        by_token("fp_mamba1-householder1"),
    ),
    Mutation(
        "token: its sh(y) is not the state's",
        BLOCK, "shift(s.x, s.seqs))  # of", "shift(s.x, s.seqs._replace(state=None)))  # of",
        by_token("fp_mamba1-householder1"),
    ),
    Mutation(
        "token: padding that is not solved is counted as failed",
        BLOCK, "outcome if s.seqs.mask is None else outcome * s.seqs.mask", "outcome",
        COUNTED,
    ),
    Mutation(
        "token: windows of the exact token are damped",
        BLOCK, "rule._replace(stepsize=1.0, max", "rule._replace(stepsize=0.9, max",
        of_models("k_iterations_solve_the_first_k_tokens"),
    ),
    Mutation(
        "token: within the tolerance a token is solved, whatever is said of its equation",
        SOLVER, "torch.where(frozen, outcome, outcome | FAILED)",
        "torch.where(frozen, 0 * outcome, outcome | FAILED)",
        COUNTED,
    ),
    Mutation(
        "token: a window ends after the paper's ℓmax",
        BLOCK, "max_iters=width + 1)", "max_iters=min(rule.max_iters, width + 1))",
        (f"{TESTS}test_tracker.py::test_few_iterations_are_the_papers_limit_and_not_a_windows",),
    ),
    Mutation(
        "token: exact tokens are trained to the paper's tolerance",
        BLOCK, "tol = min(tol, COARSE)\n        if not", "pass\n        if not",
        (f"{TESTS}test_blocks.py::test_training_rule_and_evaluation_rule_differ",),
    ),
    Mutation(
        "token: a window carries f(y) for y",
        SOLVER, "state = BlockState(y[:, -1], None, h, ())",
        "state = BlockState(g[:, -1], None, h, ())",
        (f"{TESTS}test_tracker.py::test_a_window_hands_on_the_iterate_that_its_state_is_of",),
    ),
    Mutation(
        "ℓ* of another solution is not noticed",
        SOLVER, "apart = ~(distance <= FAR * size)", "apart = ~(distance <= 1e9 * size)",
        (f"{TESTS}test_tracker.py::test_iterations_that_lead_elsewhere_are_marked",),
    ),
    Mutation(
        "token: the state handed on is that before the token",
        SOLVER, "state = BlockState(y[:, 0], None, h, ())",
        "state = BlockState(y[:, 0], None, h if state is None else state.h, ())",
        by_token("fp_mamba1-householder1"),
    ),
    # ℓ*.
    Mutation(
        "ℓ*: a token alone, whatever those before it do",
        SOLVER, "of_tokens.cummax(1).values >= rule.tol", "of_tokens >= rule.tol",
        (f"{TESTS}test_solver.py::test_token_iters_is_the_iteration_after_which_a_token_and_all_before_it_stay_within",),
    ),
    Mutation(
        "ℓ*: a token's count is that of the last iterate outside",
        SOLVER, "outside & unfinished[:, None], iterations + 1",
        "outside & unfinished[:, None], iterations",
        (f"{TESTS}test_solver.py::test_token_iters_is_the_iteration_after_which_a_token_and_all_before_it_stay_within",),
    ),
    Mutation(
        "ℓ*: counted on after the sequence has converged",
        SOLVER, "torch.where(outside & unfinished[:, None], ", "torch.where(outside, ",
        (f"{TESTS}test_solver.py::test_the_count_of_a_sequence_ends_where_it_has_converged_whatever_others_need",),
    ),
    Mutation(
        "ℓ*: measured by the damping of the model's own solver",
        SOLVER, 'damping = {**PAPER_RULES[block], "quantile": 1.0}',
        'damping = {**PAPER_RULES[block], "quantile": 1.0, "stepsize": 0.5}',
        (f"{TESTS}test_solver_name.py::test_iterations_are_the_papers_whatever_solves_the_model",),
    ),
    Mutation(
        "ℓ*: measured to the tolerance of evaluation",
        SOLVER, "return Rule(tol=0.1,", "return Rule(tol=0.01,",
        (f"{TESTS}test_solver_name.py::test_iterations_are_the_papers_whatever_solves_the_model",),
    ),
    # The way back through time.
    Mutation(
        "adjoint: a term is added with the wrong sign",
        GRADIENT, "before, g = g, v + clipped(again, clip, longest)",
        "before, g = g, v - clipped(again, clip, longest)",
        of_models("every_schedule_has_one_gradient[fp_mamba1-parallel]"),
    ),
    Mutation(
        "adjoint: the cotangent itself is left out of the sum",
        GRADIENT, "before, g = g, v + clipped(again, clip, longest)",
        "before, g = g, clipped(again, clip, longest)",
        of_models("every_schedule_has_one_gradient[fp_mamba1-parallel]"),
    ),
    Mutation(
        "adjoint: in fp32 whatever the forward was in",
        GRADIENT, "with torch.enable_grad(), autocast:", "with torch.enable_grad():",
        ROUNDED,
    ),
    Mutation(
        "adjoint: what is rounding goes on",
        GRADIENT, "(change < tol) | (rounding & (change >= lowest))", "change < tol",
        ROUNDED,
    ),
    Mutation(
        "adjoint: K + 1 terms for K",
        GRADIENT, "most = v.shape[1] if terms is None else terms",
        "most = v.shape[1] if terms is None else terms + 1",
        REACH,
    ),
    Mutation(
        "adjoint: clipped to the length itself, not so many times as long as the cotangent",
        GRADIENT, "share = (clip * longest / size", "share = (clip / size",
        CLIPPED,
    ),
    Mutation(
        "adjoint: short ones are lengthened to the limit",
        GRADIENT, "(clip * longest / size.clamp_min(1e-30)).clamp_max(1.0)",
        "(clip * longest / size.clamp_min(1e-30))",
        CLIPPED,
    ),
    Mutation(
        "adjoint: its norm is that of the last token gone through",
        BLOCK, "adjoint_norm.copy_(torch.maximum(adjoint_norm, norms.detach()))",
        "adjoint_norm.copy_(norms.detach())",
        of_models("compiled_and_plain_give_the_same_gradients[fp_mamba1-torch.float64-1e-08]"),
    ),
    # The projections.
    Mutation(
        "projections: what reads sh(y) does not come first",
        PROJECTIONS, "key=lambda projection: projection.of_y is None",
        "key=lambda projection: projection.of_y is not None",
        by_token("fp_mamba1-b_alone"),
    ),
    Mutation(
        "projections: noise also where sh(y) is not read",
        PROJECTIONS, "F.pad(read, (0, self.raw.shape[-1] - k))",
        "F.pad(read, (self.raw.shape[-1] - k, 0))",
        NOISE,
    ),
    # Noise on sh(y).
    Mutation(
        "noise: of one size in all sequences",
        STATE_NOISE, "u.device, generators) * noise", "u.device, generators)",
        of_noise("it_is_noise_added_to_what_is_read_of_the_token_before[fp_mamba1-parallel-plain]"),
    ),
    Mutation(
        "noise: not in units of what the norm makes",
        BLOCKS, "None if noise is None else noise * self.out_norm().weight", "noise",
        of_noise("it_is_noise_added_to_what_is_read_of_the_token_before[fp_mamba1-parallel-plain]"),
    ),
    Mutation(
        "noise: the adversary lowers the loss",
        STATE_NOISE, "return noise.detach() + self.size", "return noise.detach() - self.size",
        AGAINST,
    ),
    Mutation(
        "noise: the adversary without the first pass's noise",
        STATE_NOISE, "return noise.detach() + self.size", "return self.size",
        AGAINST,
    ),
    Mutation(
        "noise: the adversary's vector as long as κ, whatever d is",
        STATE_NOISE, "self.size * math.sqrt(noise.shape[-1]) *", "self.size *",
        AGAINST,
    ),
    Mutation(
        "certified root: a root on the other side of zero is accepted",
        CERTIFIED, "(phi_0 > 0) & stays", "stays",
        (f"{TESTS}test_certified_root.py::test_of_three_roots_only_the_first_on_the_way_is_proven",),
    ),
    Mutation(
        "certified root: other roots on the way are not looked for",
        CERTIFIED, "is_lowest = falls | (phi_0 >= r) | _is_lowest(e, phi_0, r)",
        "is_lowest = phi_0 < torch.inf",
        (f"{TESTS}test_certified_root.py::test_a_root_behind_two_others_is_not_proven",),
    ),
    Mutation(
        "certified root: steps may lead below zero",
        CERTIFIED, " & (e.phi(max_phi) >= 0)", "",
        (f"{TESTS}test_certified_root.py::test_a_fall_below_zero_is_not_proven",),
    ),
    Mutation(
        "certified root: the floor of the square is not seen",
        CERTIFIED, "is_smooth = min_square >= e.floor", "is_smooth = min_square > 0",
        (f"{TESTS}test_certified_root.py::test_where_the_square_is_floored_nothing_is_proven",),
    ),
    Mutation(
        "certified root: φ may rise again beyond the root",
        CERTIFIED, "(n0 + n1 * max_phi <= 0) & ", "",
        (f"{TESTS}test_certified_root.py::test_roots_that_one_condition_alone_refuses[range]",),
    ),
    Mutation(
        "certified root: no step needs to reach the root",
        CERTIFIED, " & (r <= max_phi)", "",
        (f"{TESTS}test_certified_root.py::test_roots_that_one_condition_alone_refuses[reach]",),
    ),
    Mutation(
        "certified root: the largest value of φ is always φ(0)",
        CERTIFIED, "torch.where(falls, phi_0, e.phi(-n0 / n1))", "phi_0",
        (f"{TESTS}test_certified_root.py::test_roots_that_one_condition_alone_refuses[turn]",),
    ),
    Mutation(
        "certified root: φ that rises at zero counts as rising",
        CERTIFIED, "rises = (n0 >= 0) & (n0 + n1 * r >= 0)", "rises = n0 >= 0",
        (f"{TESTS}test_certified_root.py::test_roots_that_one_condition_alone_refuses[rises]",),
    ),
    Mutation(
        "certified root: roots between φ(0) and the root are not looked for",
        CERTIFIED, "falls | (phi_0 >= r) | _is_lowest(e, phi_0, r)", "falls | (phi_0 < r)",
        (f"{TESTS}test_certified_root.py::test_roots_that_one_condition_alone_refuses[between]",),
    ),
    # The certified root of two reflections.
    Mutation(
        "certified pair: α and δ may lie on two sides",
        PAIR, "(sides[0] * sides[1] > 0) & is_clear[0] & is_clear[1]",
        "is_clear[0] & is_clear[1]",
        (f"{TESTS}test_certified_root.py::test_what_is_not_proven[sides]",),
    ),
    Mutation(
        "certified pair: the side of α may be rounding",
        PAIR, "side.abs() > MIN_SIDE * length",
        "side.abs() > 0 * length",
        (f"{TESTS}test_certified_root.py::test_what_is_not_proven[line]",),
    ),
    Mutation(
        "certified pair: several roots may attract",
        PAIR, "(attracts.sum(1) <= 1)",
        "(attracts.sum(1) <= 9)",
        (f"{TESTS}test_certified_root.py::test_what_is_not_proven[several]",),
    ),
    Mutation(
        "certified pair: a piece may have three roots",
        PAIR, "(changes <= 1).all(1)",
        "(changes <= 3).all(1)",
        (f"{TESTS}test_certified_root.py::test_random_equations_have_the_root_that_picard_finds[20000]",),
    ),
    Mutation(
        "certified pair: a root that repels counts as one that attracts",
        PAIR, "(rest[..., 0, 0] + rest[..., 1, 1] > 0)",
        "(rest[..., 0, 0] + rest[..., 1, 1] > -1e9)",
        (f"{TESTS}test_certified_root.py::test_a_rotation_that_attracts_nowhere_is_decided_at_once",),
    ),
    Mutation(
        "certified pair: the normal belongs to no eigenvalue",
        PAIR, "torch.stack([largest - b[:, 1, 1], b[:, 0, 1]], -1)",
        "torch.stack([largest + b[:, 1, 1], b[:, 0, 1]], -1)",
        (f"{TESTS}test_certified_root.py::test_random_equations_have_the_root_that_picard_finds[20000]",),
    ),
    Mutation(
        "certified pair: γ₁ counts once",
        PAIR, "along = 2 * (v",
        "along = 1 * (v",
        (f"{TESTS}test_certified_root.py::test_the_polynomials_are_those_of_the_equation",),
    ),
    Mutation(
        "certified pair: the shift to a piece has the wrong sign",
        PAIR, "c[i] = c[i] + low * c[i + 1]",
        "c[i] = c[i] - low * c[i + 1]",
        (f"{TESTS}test_certified_root.py::test_bernstein_coefficients_count_zeros",),
    ),
    Mutation(
        "certified pair: C++ takes roots on the other side",
        CPU_PAIR, "side_alpha * side_delta > 0",
        "side_alpha * side_delta < 0",
        (f"{TESTS}test_certified_root.py::test_plain_pytorch_and_the_cpu_decide_alike",),
    ),
    Mutation(
        "certified pair: C++ has another γ₁",
        CPU_PAIR, "along[k] = 2 * (",
        "along[k] = 1 * (",
        (f"{TESTS}test_certified_root.py::test_plain_pytorch_and_the_cpu_decide_alike",),
    ),
    Mutation(
        "certified pair: C++ says that roots attract that do not",
        CPU_PAIR, "const bool attracting = attracts<2>(e, 2, at);",
        "const bool attracting = true;",
        (f"{TESTS}test_certified_root.py::test_plain_pytorch_and_the_cpu_decide_alike",),
    ),
]  # fmt: skip
