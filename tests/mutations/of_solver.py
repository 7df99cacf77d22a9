"""Mutations of the solve, of its gradients, and of the language model around the blocks."""

from tests.mutations import Mutation
from tests.mutations.of_model import ORACLE, output

SOLVER = "lm/model/solver.py"
GRADIENT = "lm/model/gradient.py"
BLOCK = "lm/model/fixed_point.py"
MODEL = "lm/model/modeling_fprnn.py"
INITIAL = "lm/model/stack.py"
LOSS = "lm/model/batch.py"
INPUTS = "lm/model/batch.py"
LAYERS = "lm/model/layers.py"
TESTS = "tests/lm/model/"
CAUSAL = f"{TESTS}test_causal.py"


def other_gradient(case, kind):
    return (f"{ORACLE}::test_the_other_gradients[{case}-{kind}]",)


def language_model(case):
    return (f"{ORACLE}::test_the_language_model[{case}]",)


MUTATIONS = [
    # The solver.
    Mutation(
        "a residual relative to y, not to f(y)",
        SOLVER, "/ (g.abs().amax(-1) + RESIDUAL_FLOOR)", "/ (y.abs().amax(-1) + RESIDUAL_FLOOR)",
        (f"{TESTS}test_solver.py", f"{ORACLE}::test_one_iteration[fp_rnn-householder1-plain]"),
    ),
    Mutation(
        "padding counts among the tokens that are solved elsewhere",
        SOLVER, "return (apart & real).sum(1)", "return apart.sum(1)",
        (f"{TESTS}test_solver.py::test_padding_is_not_among_the_tokens_solved_elsewhere",),
    ),
    Mutation(
        "padding counts among the tokens of which some are solved elsewhere",
        SOLVER, "/ real.sum(1).clamp_min(1)", "/ real.shape[1]",
        (f"{TESTS}test_solver.py::test_padding_is_not_among_the_tokens_solved_elsewhere",),
    ),
    Mutation(
        "a sequence's residual the mean of its tokens', not the largest",
        SOLVER, "return token_residual(y, g).amax(-1)", "return token_residual(y, g).mean(-1)",
        (f"{TESTS}test_solver.py::test_relative_residual_is_the_worst_token",),
    ),
    Mutation(
        "the quantile from the wrong end",
        SOLVER, "torch.quantile(damping.lowest, rule.quantile)",
        "torch.quantile(damping.lowest, 1 - rule.quantile)",
        (f"{TESTS}test_solver.py",),
    ),
    Mutation(
        "the paper's patience counts the step that improved",
        SOLVER, "torch.where(residual < self.lowest, 0, self.waited + 1)",
        "torch.where(residual < self.lowest, 1, self.waited + 1)",
        (f"{TESTS}test_solver.py",),
    ),
    Mutation(
        "the paper's solver undamped",
        SOLVER, "y = torch.lerp(y, g, damping.step[:, None, None])", "y = g",
        (f"{TESTS}test_solver.py",),
    ),
    Mutation(
        "the paper's solver stops one iteration late",
        SOLVER, "iterations >= rule.max_iters:", "iterations > rule.max_iters:",
        (f"{TESTS}test_solver.py",),
    ),
    Mutation(
        "a token is frozen before those ahead of it",
        SOLVER, "(frozen | (residual < rule.tol)).cumprod(1).bool()",
        "frozen | (residual < rule.tol)",
        (f"{CAUSAL}::test_the_residual_is_that_of_what_is_returned[fp_mamba1-parallel-0.1]",),
    ),
    Mutation(
        "tokens move once more after they were frozen",
        SOLVER, "y = torch.where(frozen.unsqueeze(-1), y, moved)", "y = moved",
        (f"{TESTS}test_token.py::test_where_a_token_stops_later_ones_do_not_say",),
    ),
    Mutation(
        "a window makes one iteration too many",
        SOLVER, "iterations >= rule.max_iters or done",
        "iterations > rule.max_iters or done",
        (f"{CAUSAL}::test_k_iterations_solve_the_first_k_tokens",),
    ),
    Mutation(
        "the next window reads the iterate of the wrong token",
        SOLVER, "state = BlockState(y[:, -1], None, h, ())",
        "state = BlockState(y[:, 0], None, h, ())",
        (f"{ORACLE}::test_the_solved_output_of_packed_documents[fp_mamba1-dplr2-right-window]",),
    ),
    Mutation(
        "the implicit gradient with the wrong sign",
        GRADIENT, "return v + torch.autograd.grad(f0", "return v - torch.autograd.grad(f0",
        other_gradient("fp_mamba1-householder2_lowrank", "implicit"),
    ),
    # The block.
    Mutation(
        "with symm_mixer false, sh(y) goes through the weights of x",
        BLOCK, "weights.first if cfg.symm_mixer else weights.first[:, d:]",
        "weights.first if cfg.symm_mixer else weights.first[:, :d]",
        (f"{ORACLE}::test_one_iteration[fp_mamba1-householder1-plain]",),
    ),
    Mutation(
        "the gate outside reads this token's y, not the one before",
        BLOCK, 'shift(y.to(s.z.dtype), s.seqs, "f_y")', "y.to(s.z.dtype)",
        output("fp_mamba1-householder1"),
    ),
    Mutation(
        "one gradient step too many",
        BLOCK, "range(c.n_backwards - 1)", "range(c.n_backwards)",
        other_gradient("fp_mamba1-dplr2", "two_backwards"),
    ),
    Mutation(
        "evaluation stops at training's share of the batch",
        BLOCK, "max_iters, quantile = c.eval_max_iters, 1.0", "max_iters = c.eval_max_iters",
        (f"{TESTS}test_blocks.py::test_training_rule_and_evaluation_rule_differ",),
    ),
    Mutation(
        "the state left behind is of padding",
        "lm/model/state.py", "at = seqs.mask.sum(1, keepdim=True) +", "at = x.shape[1] +",
        (f"{TESTS}test_state.py::test_padding_changes_neither_state_nor_logits",),
    ),
    Mutation(
        "y* left behind where the output's iterate is meant",
        BLOCK, 'f_y = at_the_end(y, "f_y")', 'f_y = at_the_end(y_star, "f_y")',
        (f"{TESTS}test_token.py::test_segments_as_long_as_windows_are_the_same_computation_at_any_tolerance",),
    ),
    # The language model.
    Mutation(
        "the residual stream drops what came before",
        "lm/model/stack.py", "is None else residual + hidden", "is None else hidden",
        language_model("tied"),
    ),
    Mutation(
        "the loss is of the token itself, not of the next",
        LOSS, "F.pad(labels[:, 1:], (0, 1), value=IGNORED)", "labels",
        language_model("tied"),
    ),
    Mutation(
        "the loss is divided by this micro-batch's targets, not by the update's",
        LOSS, "if num_items_in_batch is None:", "if True:",
        ("tests/hf/test_hf_trainer.py::test_the_sum_is_divided_by_what_the_trainer_counts",),
    ),
    Mutation(
        "a document of one token is not told from the one before",
        INPUTS, "after <= before", "after < before",
        ("tests/hf/test_hf_packing.py::test_where_documents_start",),
    ),
    Mutation(
        "the end of a document belongs to the next one",
        INPUTS, "F.pad(_is_end(input_ids[:, :-1], eos_token_id), (1, 0))",
        "_is_end(input_ids, eos_token_id)",
        language_model("tied"),
    ),
    Mutation(
        "a document that ended with the segment before goes on",
        INPUTS, "after[:, 0] = _is_end(last_token, eos_token_id)", "after[:, 0] = False",
        (f"{TESTS}test_state.py::test_documents_inside_a_segment_and_at_its_border_start_afresh[fp_mamba1]",),
    ),
    Mutation(
        "dt's bias starts as dt itself, not as softplus⁻¹ of it",
        INITIAL, "dt + torch.log(-torch.expm1(-dt))", "dt",
        (f"{TESTS}test_modeling.py::test_initialisation_is_mambas",),
    ),
    Mutation(
        "out_proj is not scaled by the number of layers",
        INITIAL, "/ math.sqrt(cfg.n_layer)", "/ 1.0",
        (f"{TESTS}test_modeling.py::test_initialisation_is_mambas",),
    ),
    Mutation(
        "every state of a channel starts with the same rate",
        INITIAL, "n.log().expand(cfg.d_inner, -1)", "(0 * n).expand(cfg.d_inner, -1)",
        (f"{TESTS}test_modeling.py::test_initialisation_is_mambas",),
    ),
    # The flags of a pass.
    Mutation(
        "the head does not read the backbone's flags",
        MODEL, "self.backbone.refuse_nonfinite(flags[: len(of_backbone)])", "pass",
        (f"{TESTS}test_non_finite.py::test_a_damaged_parameter_is_named",),
    ),
    Mutation(
        "a refused pass has changed the cache",
        MODEL, "not defer_check or cache is not None or compiling()",
        "not defer_check or compiling()",
        (f"{TESTS}test_non_finite.py::test_a_refused_pass_leaves_the_cache_as_it_was",),
    ),
    Mutation(
        "the backbone waits for the device as well as the head",
        MODEL, "            defer_check=True,\n", "",
        (f"{TESTS}test_non_finite.py::test_forward_and_backward_wait_for_the_device_once",),
    ),
]  # fmt: skip
