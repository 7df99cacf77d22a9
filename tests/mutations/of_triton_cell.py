"""Mutations of the exact token in Triton, forwards and back."""

from tests.mutations import Mutation

TOKEN = "lm/kernels/triton/token.py"
KERNELS = "lm/kernels/triton/cell_kernels.py"
CELL = "lm/kernels/triton/cell.py"
TESTS = "tests/lm/kernels/test_triton_cell.py::test_"
CHUNKS = (f"{TESTS}chunks_of_the_backward_change_nothing[2]",)
TWO = (f"{TESTS}ranks[2-True]",)
OUTCOMES = (f"{TESTS}outcomes_are_those_of_the_cpu",)
ADJOINT = (f"{TESTS}the_largest_adjoint_is_reported",)

TOKENS = "lm/kernels/triton/tokens.py"
OF_TOKENS = "tests/lm/kernels/test_triton_tokens.py::test_"
EQUAL = (f"{OF_TOKENS}equals_plain_pytorch_in_value_and_every_gradient[{{}}]",)

OFF_CPU = "tests/lm/model/test_off_cpu.py::test_"

MUTATIONS = [
    Mutation(
        "rows: what is of two dtypes is added by one product",
        "lm/model/layers.py", "if on_cpu(raw) or not of_one_dtype:", "if on_cpu(raw):",
        (
            f"{OFF_CPU}plain_pytorch_is_the_same_with_weights_of_any_dtype"
            "[torch.bfloat16-window:3]",
        ),
    ),
    Mutation(
        "rows: a token by itself is solved in the dtype that they are read in",
        "lm/model/fixed_point.py",
        'raw = rows["mixer"].to(token.x.dtype)', 'raw = rows["mixer"]',
        (f"{OFF_CPU}after_windows_a_token_is_decoded_in_any_dtype",),
    ),
    Mutation(
        "rows: maps of y kept in one dtype serve another",
        "lm/model/layers.py", 'once(kept, ("weight_y", dtype), joined)',
        'once(kept, "weight_y", joined)',
        (f"{OFF_CPU}after_windows_a_token_is_decoded_in_any_dtype",),
    ),
    Mutation(
        "the adjoint's terms give D and the norm a gradient",
        "lm/model/fixed_point.py", "self.explicit(constants, y, of_y_alone=True)",
        "self.explicit(constants, y)",
        (f"{OFF_CPU}a_term_of_the_adjoint_has_no_gradient_but_that_of_y",),
    ),
    Mutation(
        "tokens in Triton: the history keeps the token's own part",
        TOKENS, "history = _line(o, t * o_row + col, live) - step * times * before",
        "history = _line(o, t * o_row + col, live)", EQUAL,
    ),
    Mutation(
        "tokens' gradient in Triton: x̃ gives nothing to Δ",
        TOKENS, "d_own = d_gain - e * before", "d_own = d_gain", EQUAL,
    ),
    Mutation(
        "tokens' gradient in Triton: x̃'s with the wrong sign",
        TOKENS, "-e * step * times, mask=live)", "e * step * times, mask=live)", EQUAL,
    ),
    Mutation(
        "tokens' gradient in Triton: a program keeps the last token's part alone",
        TOKENS, "_line(to + d, 0, live) + of_weight", "of_weight",
        (f"{OF_TOKENS}a_program_adds_up_what_its_tokens_give",),
    ),
    Mutation(
        "tokens in Triton: the residual is not relative",
        TOKENS, "(_largest(g[None, :]) + RESIDUAL_FLOOR)", "1.0",
        (f"{OF_TOKENS}the_residual_is_that_of_the_iterate_and_nan_stays",),
    ),
    Mutation(
        "token in Triton: a reflection adds what the one before has taken",
        TOKEN, "line -= apply_transposed(own, row_of(gram, k, R))",
        "line += apply_transposed(own, row_of(gram, k, R))", TWO,
    ),
    Mutation(
        "token in Triton: γ1 with the wrong sign",
        TOKEN, "gamma1 = (tl.sum(m * c, 1) / d)", "gamma1 = (-tl.sum(m * c, 1) / d)", CHUNKS,
    ),
    Mutation(
        "token in Triton: what may be limited is not counted",
        TOKEN, "outcome + LIMITED, outcome)", "outcome, outcome)", OUTCOMES,
    ),
    Mutation(
        "token in Triton: LayerNorm's bias is not in δ",
        TOKEN, "delta = tl.sum(u * bias[None, :], 1)", "delta = 0.0 * tl.sum(u, 1)", CHUNKS,
    ),
    Mutation(
        "token's gradient in Triton: what the norm takes off s is added",
        TOKEN, "received -= along * into_along", "received += along * into_along", CHUNKS,
    ),
    Mutation(
        "token's gradient in Triton: φ′ is not transposed",
        TOKEN, "rest = (eye - tl.trans(slope))", "rest = (eye - slope)", TWO,
    ),
    Mutation(
        "token's gradient in Triton: nothing through u_i·u_j",
        TOKEN, "d_u += rows_combined(d_gram, u, R)", "d_u += 0.0 * rows_combined(d_gram, u, R)",
        TWO,
    ),
    Mutation(
        "token's gradient in Triton: the gate before the norm is forgotten",
        TOKEN, "    e *= gate\n", "    e *= 1.0\n", CHUNKS,
    ),
    Mutation(
        "loop in Triton: B of the token before is this one's",
        KERNELS, "B_before = units + ((t + 1) % 2)", "B_before = units + (t % 2)", CHUNKS,
    ),
    Mutation(
        "loop in Triton: states computed again go on over a document's border",
        KERNELS, "h *= tl.exp(dt[None, :] * A) * _kept(table, at, KEEP)",
        "h *= tl.exp(dt[None, :] * A)", CHUNKS,
    ),
    Mutation(
        "loop in Triton: what later tokens send is not limited",
        KERNELS, "carried *= tl.where(size > limit, limit / size, 1.0)", "carried *= 1.0", ADJOINT,
    ),
    Mutation(
        "loop in Triton: A's gradient without Δ",
        KERNELS, "d_A += d_H * H * dt[None, :]", "d_A += d_H * H", CHUNKS,
    ),
    Mutation(
        "loop in Triton: A's gradient forgets the chunks after",
        KERNELS, "    tl.store(d_state, mu, mask=some)\n", "", CHUNKS,
    ),
    Mutation(
        "loop in Triton: A's gradient crosses a document's border",
        KERNELS, "            mu = d_H * tl.exp(dt[None, :] * A) * _kept(table, at, KEEP)\n",
        "            mu = d_H * tl.exp(dt[None, :] * A)\n", CHUNKS,
    ),
    Mutation(
        "loop in Triton: C's gradient without what B·C gives it",
        KERNELS, "_through_units(row, d_row, sums, units, C_at, 1, g, d_bc,",
        "_through_units(row, d_row, sums, units, C_at, 1, g, 0.0 * d_bc,", CHUNKS,
    ),
    Mutation(
        "loop in Triton: every chunk is the first",
        "lm/kernels/triton/launches.py", "self.table[0].fill_(first)", "self.table[0].fill_(0)",
        CHUNKS,
    ),
    Mutation(
        "loop in Triton: the weight's gradient reads over a document's border",
        CELL, "before *= keep.unsqueeze(-1)", "before *= 1.0", CHUNKS,
    ),
    Mutation(
        "loop in Triton: chunks from the first to the last in the backward",
        CELL, "firsts = reversed(range(0, length, plan.chunk))",
        "firsts = range(0, length, plan.chunk)", CHUNKS,
    ),
    Mutation(
        "auto on a GPU: token by token whatever the mixer",
        "lm/model/fixed_point.py", "        if kernel is None or not r:\n            return False",
        "        if kernel is None:\n            return True",
        ("tests/lm/model/test_tracker.py::test_auto_on_a_gpu_is_what_its_kernels_can",),
    ),
]  # fmt: skip
