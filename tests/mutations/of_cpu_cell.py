"""Mutations of the exact token, compiled for the CPU: forwards, its root, and each gradient."""

from tests.mutations import Mutation

CELL = "lm/kernels/cpu/cell.h"
FORWARD = "lm/kernels/cpu/cell.cpp"
ROOT = "lm/kernels/cpu/cell_root.h"
SMALL = "lm/kernels/cpu/cell_equation.h"
GRADIENT = "lm/kernels/cpu/cell_gradient.h"
BACKWARD = "lm/kernels/cpu/cell_backward.cpp"
TESTS = "tests/lm/kernels/test_cpu_cell.py::test_"

LOOP = (f"{TESTS}equals_the_loop_in_value_state_and_every_gradient[9-19-16]",)
RANKS = (f"{TESTS}ranks[3-householder]",)
TOGGLES = (f"{TESTS}toggles",)
HEADS = (f"{TESTS}mamba2",)
VECTOR = (f"{TESTS}rnn",)
PICARD = (f"{TESTS}it_is_the_root_that_picard_runs_into",)
FOLD = (f"{TESTS}near_a_fold_the_gradient_is_limited",)
ADJOINT = (f"{TESTS}the_largest_adjoint_is_reported",)
CENTROIDS = (f"{TESTS}centroids",)
KERNEL = "lm/kernels/cpu/cell.py"
PIECES = (f"{TESTS}token_by_token_is_the_whole_bit_for_bit",)

MUTATIONS = [
    # Forwards.
    Mutation(
        "compiled cell: T of a product of reflections with the wrong sign",
        CELL, "entry -= k.gram[i][l] * k.own[l][j];\n            k.own",
        "entry += k.gram[i][l] * k.own[l][j];\n            k.own",
        RANKS,
    ),
    Mutation(
        "compiled cell: bounded by the largest gate, not the sum",
        CELL, "        sum += k.gate[i];\n    }", "        sum = std::max(sum, k.gate[i]);\n    }",
        TOGGLES,
    ),
    Mutation(
        "compiled cell: x̃ by the solution alone, not its way from U x",
        CELL, "k.map[i][j] * (k.root[j] - k.seen[j])", "k.map[i][j] * k.root[j]",
        LOOP,
    ),
    Mutation(
        "compiled cell: a document keeps the state of the one before it",
        CELL, "load<T>(A + at, lanes)) * kept;\n        });\n    if (p.kind == MAMBA2)",
        "load<T>(A + at, lanes));\n        });\n    if (p.kind == MAMBA2)",
        LOOP,
    ),
    Mutation(
        "compiled cell: a document reads the y of the one before it",
        FORWARD, "f.y_before[i * f.width + c] *= in<T>(p.keep)[at];",
        "f.y_before[i * f.width + c] *= T(1);",
        LOOP,
    ),
    Mutation(
        "compiled cell: history of the token before, not decayed",
        CELL, "past += H_i * C_g[i];", "past += ended * C_g[i];",
        LOOP,
    ),
    Mutation(
        "compiled cell: what a token adds to the state lacks Δ",
        FORWARD,
        "store<T>(inflow + c, load<T>(k.dt + c, lanes) * load<T>(k.mixed + c, lanes), lanes);",
        "store<T>(inflow + c, load<T>(k.mixed + c, lanes), lanes);",
        LOOP,
    ),
    Mutation(
        "compiled cell: the state handed on lacks the last token",
        CELL, "store<T>(H + at, load<T>(h + at, lanes) + in_c * B[g * p.states + i], lanes);",
        "store<T>(H + at, load<T>(h + at, lanes), lanes);",
        PIECES,
    ),
    Mutation(
        "compiled cell: D missing from the equation",
        FORWARD, "load<T>(k.dt + c, lanes) * k.bc[g] + load_or<T>(p.D, c, lanes, 0);",
        "load<T>(k.dt + c, lanes) * k.bc[g] + T(0) * load_or<T>(p.D, c, lanes, 0);",
        LOOP,
    ),
    Mutation(
        "compiled cell: eps missing from γ₀",
        FORWARD, "/ d + p.norm_eps;\n    e.floor", "/ d;\n    e.floor",
        (f"{TESTS}toggles", *PICARD),
    ),
    # The root.
    Mutation(
        "compiled cell: γ₁ counted once under the root",
        SMALL, "under += at.s[i] * (e.gamma1[i] + slant);", "under += at.s[i] * slant;",
        PICARD,
    ),
    Mutation(
        "compiled cell: φ′ with the wrong sign of the root's slope",
        SMALL, "e.beta[i][j] * at.inverse - at.numerator[i]",
        "e.beta[i][j] * at.inverse + at.numerator[i]",
        PICARD,
    ),
    Mutation(
        "compiled cell: Newton takes roots that Picard runs away from",
        ROOT, "return attracts<R>(e, r, at);", "return true;",
        PICARD,
    ),
    Mutation(
        "compiled cell: Routh's array one coefficient off",
        SMALL, "row[j] = coefficient[2 * j + 1];", "row[j] = coefficient[2 * j];",
        PICARD,
    ),
    Mutation(
        "compiled cell: Newton is tried from anywhere",
        ROOT, "if (q > 0 && q < SLOWEST && near) {", "if (q > 0 && q < SLOWEST) {",
        PICARD,
    ),
    Mutation(
        "compiled cell: Newton is tried ten times as far from the root as in Python",
        SMALL, "NEAR = 0.05;", "NEAR = 0.5;",
        ("tests/lm/kernels/test_constants.py::test_cpp_has_the_constants_of_python[cell_equation.h]",),
    ),
    Mutation(
        "compiled cell: bisection goes the other way",
        ROOT, "(above<R>(e, r, middle, at) ? high : low) = middle;",
        "(above<R>(e, r, middle, at) ? low : high) = middle;",
        (f"{TESTS}what_picard_does_not_find_bisection_does",),
    ),
    Mutation(
        "compiled cell: rows of Newton's system exchanged, its right-hand side not",
        SMALL, "std::swap(b[i], b[pivot]);", "",
        PICARD,
    ),
    # Backwards.
    Mutation(
        "compiled cell: ḡ without the state's part",
        GRADIENT, "z[l] = inverse * z[l] + across<T>(state[l]);", "z[l] = inverse * z[l];",
        LOOP,
    ),
    Mutation(
        "compiled cell: the gradient of the root by (I − φ′)⁻¹, not its transpose",
        GRADIENT, "M[i][j] = (i == j) - s.slope[j][i];", "M[i][j] = (i == j) - s.slope[i][j];",
        RANKS,
    ),
    Mutation(
        "compiled cell: the gradient of the root of any length",
        GRADIENT, "if (finite && after <= MOST_GAIN * MOST_GAIN * before) return;",
        "if (finite) return;",
        FOLD,
    ),
    Mutation(
        "compiled cell: the gradient's limit is by the sum of the entries",
        GRADIENT, "after += s.eta[i] * s.eta[i]",
        "after += std::abs(s.eta[i]) * std::abs(s.eta[0])",
        ("tests/lm/model/test_tracker.py::test_limited_gradients_are_those_of_plain_pytorch",),
    ),
    Mutation(
        "compiled cell: what may be limited is not counted",
        "lm/kernels/cpu/cell.cpp", "p.outcome[at] |= LIMITED;", "p.outcome[at] |= 0;",
        ("tests/lm/model/test_tracker.py::test_limited_gradients_are_those_of_plain_pytorch",),
    ),
    Mutation(
        "compiled cell: the norm's gradient keeps what is along v",
        GRADIENT, "- T(mean) - normed * T(along);", "- T(mean);",
        LOOP,
    ),
    Mutation(
        "compiled cell: Δ's gradient without what goes to the state",
        GRADIENT, "d_gamma * k.bc[g] + mixed * mu_B, lanes", "d_gamma * k.bc[g], lanes",
        LOOP,
    ),
    Mutation(
        "compiled cell: the vectors' gradient without y's own part",
        GRADIENT, "d_mixed * T(k.moves[i]) + y * T(s.eta[i]) + x", "d_mixed * T(k.moves[i]) + x",
        LOOP,
    ),
    Mutation(
        "compiled cell: the vectors' gradient without that of u_i·u_j",
        GRADIENT, "if (j != i) d_u += u[j] * T(s.d_gram[i][j]);", "",
        RANKS,
    ),
    Mutation(
        "compiled cell: the gates' gradient without the bound's",
        GRADIENT, "if (shrunk) s.d_gate[i] -= d_shrink * k.shrink / sum;", "",
        TOGGLES,
    ),
    Mutation(
        "compiled cell: the gradient of nrm where eps is its floor",
        GRADIENT, "const T along = floored ? T(0) : across<T>(dots[i]);",
        "const T along = across<T>(dots[i]);",
        TOGGLES,
    ),
    Mutation(
        "compiled cell: A's gradient reads the state after the step",
        GRADIENT, "sum += keep_log(at, lanes, dH * H_i, dt);",
        "sum += keep_log(at, lanes, dH * (H_i + dt * k.B[g * n + i]), dt);",
        LOOP,
    ),
    Mutation(
        "compiled cell: μ does not decay",
        GRADIENT, "store<T>(mu + at, dH * decay_of(at, lanes, dt, decay), lanes);",
        "store<T>(mu + at, dH, lanes);",
        LOOP,
    ),
    Mutation(
        "compiled cell: B's gradient without that of B·C",
        GRADIENT, "gradient[i] += T(d_bc[g]) * other[i];", "",
        LOOP,
    ),
    Mutation(
        "compiled cell: Δ of a head gets the gradient of its first channel",
        BACKWARD, "for (int64_t c = h * wide; c < (h + 1) * wide; ++c) sum += f.ddt[c];",
        "sum += f.ddt[h * wide];",
        HEADS,
    ),
    Mutation(
        "compiled cell: FP-RNN's λ gets the gradient by the state after the step",
        BACKWARD, "const T *h = t ? in<T>(p.y) + (at - 1) * d :",
        "const T *h = t ? in<T>(p.y) + at * d :",
        VECTOR,
    ),
    Mutation(
        "compiled cell: the cotangent crosses from one document to the one before",
        BACKWARD, "T times = p.keep ? in<T>(p.keep)[(first + i) * p.length + t] : T(1);",
        "T times = T(1);",
        LOOP,
    ),
    Mutation(
        "compiled cell: clipped relative to the limit of the first sequence",
        BACKWARD, "times = T(f.limit[i] / size);", "times = T(f.limit[0] / size);",
        TOGGLES,
    ),
    Mutation(
        "compiled cell: the gradient of the weight of sh(y) reads this token's y",
        BACKWARD, "const T *before = t ? in<T>(p.y) + (at - 1) * d :",
        "const T *before = t ? in<T>(p.y) + at * d :",
        LOOP,
    ),
    Mutation(
        "compiled cell: the adjoint's norm is not relative to the cotangent's",
        BACKWARD, "T(most[i] == 0 ? 0 : f.largest[i] / most[i])",
        "T(most[i] == 0 ? 0 : f.largest[i])",
        ADJOINT,
    ),
    Mutation(
        "compiled cell: one sequence's share of A's gradient left out",
        BACKWARD,
        "for (int64_t row = 0; row < rows; ++row)\n        for (int64_t i = 0; i < size; ++i) sum",
        "for (int64_t row = 1; row < rows; ++row)\n        for (int64_t i = 0; i < size; ++i) sum",
        LOOP,
    ),
    # Centroids.
    Mutation(
        "compiled cell: the noise is not read through the centroids",
        FORWARD, "+= in<T>(p.noise)[at * p.channels + c];",
        "+= 0 * in<T>(p.noise)[at * p.channels + c];",
        CENTROIDS,
    ),
    Mutation(
        "compiled cell: a centroid is read where there is no token before",
        FORWARD, "const T times = factor / across<T>", "const T times = 1 / across<T>",
        CENTROIDS,
    ),
    Mutation(
        "compiled cell: the centroids' softmax has no normaliser in its gradient",
        BACKWARD, "alpha[j] * (d_logit[j] - mean)", "alpha[j] * d_logit[j]",
        CENTROIDS,
    ),
    Mutation(
        "compiled cell: the weight's gradient is of y, not of what is read of it",
        BACKWARD, "if (p.reads) before = in<T>(p.reads) + at * d;", "",
        CENTROIDS,
    ),
    Mutation(
        "compiled cell: what the first token reads has no gradient",
        BACKWARD, "if (start + t > 0 || p.centroids)", "if (start + t > 0)",
        CENTROIDS,
    ),
    Mutation(
        "compiled cell: the keys' gradient is of the y of the document before",
        KERNEL, "before = before * keep.unsqueeze(-1)", "pass",
        CENTROIDS,
    ),
    Mutation(
        "compiled cell: the keys' gradient is of y without its noise",
        KERNEL, "return before if noise is None else before + noise", "return before",
        CENTROIDS,
    ),
    Mutation(
        "compiled cell: padding lanes count in the centroids' softmax",
        FORWARD, "sums += first_lanes<T>(e, lanes);", "sums += e;",
        CENTROIDS,
    ),
]  # fmt: skip
