"""Mutations of the compiled and of the Triton kernels."""

from tests.mutations import Mutation
from tests.mutations.of_model import iteration

CPU_SCAN = "lm/kernels/cpu/scan.cpp"
CPU_VECTOR = "lm/kernels/cpu/vector.h"
SCAN = "lm/kernels/triton/scan.py"
CPU_ROOTS = "lm/kernels/cpu/roots.cpp"
ROOTS = "lm/kernels/triton/roots.py"
PAIR = "lm/kernels/triton/pair.py"
TESTS = "tests/lm/kernels/"


def compiled(*cases):
    return iteration(*cases, backend="cpu")


def triton(file, *tests):
    return tuple(f"{TESTS}test_triton_{file}.py::{test}" for test in tests)


WHOLE_SCAN = triton("scan", "test_whatever_is_left_out")

SIDE_BY_SIDE = (
    f"{TESTS}test_kernels.py::test_gpu_kernels_are_checked_side_by_side_after_the_first[choice]",
)

MUTATIONS = [
    Mutation(
        "kernels: a GPU's are checked one after the other",
        "lm/kernels/__init__.py",
        "run_in_clean_threads(*(functools.partial(_load, *load) for load in others))",
        "[_load(*load) for load in others]",
        SIDE_BY_SIDE,
    ),
    Mutation(
        "kernels: several initialize Triton at once",
        "lm/kernels/__init__.py",
        "    for load in first:\n        _load(*load)\n",
        "",
        SIDE_BY_SIDE,
    ),
    Mutation(
        "kernels: the CPU's are loaded side by side",
        "lm/kernels/__init__.py",
        'if _device_of(backend) == "cuda" and _import',
        "if _import",
        (f"{TESTS}test_kernels.py::test_cpu_kernels_are_loaded_one_after_the_other[auto-cpu]",),
    ),
    # Compiled for the CPU.
    Mutation(
        "compiled scan: Δ missing from the input",
        CPU_SCAN, "const Vec<T> u = dt_t * x_t;\n        const T *B_t",
        "const Vec<T> u = x_t;\n        const T *B_t",
        compiled("fp_mamba1-householder1"),
    ),
    Mutation(
        "compiled scan: resets ignored in the forward",
        CPU_SCAN, "h[k] *= keep[t];", "h[k] *= T(1);",
        (f"{TESTS}test_cpu.py::test_a_reset_forgets_and_dt_zero_keeps",),
    ),
    Mutation(
        "compiled scan: resets ignored in the backward",
        CPU_SCAN, "const T kept = keep ? keep[t] : T(1);", "const T kept = T(1);",
        (f"{TESTS}test_cpu.py::test_equals_the_plain_scan_whatever_is_left_out",),
    ),
    Mutation(
        "compiled scan: C's gradient reads the state before the step",
        CPU_SCAN, "dC[k] += h[k] * gy_t;", "dC[k] += before[k] * gy_t;",
        (f"{TESTS}test_cpu.py::test_equals_the_plain_scan_whatever_is_left_out",),
    ),
    Mutation(
        "compiled scan: the cotangent does not decay",
        CPU_SCAN, "g[k] = g_k * a[k];", "g[k] = g_k;",
        (f"{TESTS}test_cpu.py::test_equals_the_plain_scan_whatever_is_left_out",),
    ),
    Mutation(
        "compiled scan: Δ's gradient without the input's part",
        CPU_SCAN, "d_dt + du * x_t, lanes", "d_dt, lanes",
        (f"{TESTS}test_cpu.py::test_equals_the_plain_scan_whatever_is_left_out",),
    ),
    Mutation(
        "compiled scan: D missing from x's gradient",
        CPU_SCAN, "p.D ? du * dt_t + D * gy_t : du * dt_t", "du * dt_t",
        (f"{TESTS}test_cpu.py::test_equals_the_plain_scan_whatever_is_left_out",),
    ),
    Mutation(
        "compiled scan: the state before starts from zero",
        CPU_SCAN, "p.h0 ? in<T>(p.h0) + row * n * d + c0 : nullptr", "nullptr",
        (f"{TESTS}test_cpu.py::test_equals_the_plain_scan_whatever_is_left_out",),
    ),
    Mutation(
        "compiled exponential: the last term of the series left out",
        CPU_VECTOR, "i = F::terms - 2; i >= 0", "i = F::terms - 3; i >= 0",
        (f"{TESTS}test_cpu.py::test_the_exponential", *compiled("fp_mamba1-householder1")),
    ),
    # Triton: the selective scan.
    Mutation(
        "Triton scan: Δ missing from the input",
        SCAN, "h + (r * v)[None, :] * w[:, None]", "h + v[None, :] * w[:, None]",
        WHOLE_SCAN,
    ),
    Mutation(
        "Triton scan: a chunk forgets that it had a reset",
        SCAN, "total_keep += log_keep", "total_keep += 0.0 * r",
        WHOLE_SCAN,
    ),
    Mutation(
        "Triton scan: the entering states do not decay over a chunk",
        SCAN, "state = decay * state + added", "state = state + added",
        WHOLE_SCAN,
    ),
    Mutation(
        "Triton scan: the gradient by the decay reads the state after the step",
        SCAN, "d_log = p * hs[j]", "d_log = p * hs[j + 1]",
        WHOLE_SCAN,
    ),
    Mutation(
        "Triton scan: B's gradient from a cotangent that has decayed",
        SCAN, "tl.sum(p * us[j], axis=0)", "tl.sum(p * decays[j] * us[j], axis=0)",
        WHOLE_SCAN,
    ),
    Mutation(
        "Triton scan: Δ's gradient without the input's part",
        SCAN, "ddts[TILE - 1 - j] + dus[TILE - 1 - j] * v", "ddts[TILE - 1 - j]",
        WHOLE_SCAN,
    ),
    # The packages of others.
    Mutation(
        "causal-conv1d: documents are one text",
        "lm/kernels/mamba_ssm/conv.py", "None if segments is None else segments.to(torch.int32)",
        "None if segments is None else 0 * segments.to(torch.int32)",
        (f"{TESTS}test_mamba_ssm.py::test_the_short_convolution",),
    ),
    Mutation(
        "mamba-ssm: a reset is one token late",
        "lm/kernels/mamba_ssm/ssd.py", "(keep == 0).cumsum(1", "(keep.roll(1, 1) == 0).cumsum(1",
        (f"{TESTS}test_mamba_ssm.py::test_the_chunked_scan",),
    ),
    Mutation(
        "mamba-ssm: the bias of Δ has the other sign",
        "lm/kernels/mamba_ssm/scan.py", "delta_bias=bias", "delta_bias=-bias",
        (f"{TESTS}test_mamba_ssm.py::test_a_layer_through_it_is_the_plain_one",),
    ),
    Mutation(
        "mamba-ssm: Mamba-2's skip has the other sign",
        "lm/kernels/mamba_ssm/ssd.py", "D=D, z=z", "D=-D, z=z",
        (f"{TESTS}test_mamba_ssm.py::test_a_layer_through_it_is_the_plain_one",),
    ),
    Mutation(
        "Mamba: padding reaches the fused scan",
        "lm/model/diagonal.py", "plain = seqs.mask is None and", "plain =",
        (f"{TESTS}test_mamba_ssm.py::test_a_layer_through_it_is_the_plain_one",),
    ),
    # The search for roots.
    Mutation(
        "compiled roots: Β is read transposed",
        CPU_ROOTS, "e.beta[i][j] = beta[i * r + j];", "e.beta[i][j] = beta[j * r + i];",
        (f"{TESTS}test_cpu_roots.py::test_it_is_the_plain_search",),
    ),
    Mutation(
        "compiled roots: γ1 is another token's",
        CPU_ROOTS, "(p.gamma1) + token * r;", "(p.gamma1);",
        (f"{TESTS}test_cpu_roots.py::test_it_is_the_plain_search",),
    ),
    Mutation(
        "roots in Triton: Newton goes back",
        ROOTS, "        near = tl.sum((tl.abs(ahead",
        "        ahead = 2.0 * s - ahead\n        near = tl.sum((tl.abs(ahead",
        triton("roots", "test_it_is_the_search_of_the_cpu_step_for_step"),
    ),
    Mutation(
        "roots in Triton: no rows are exchanged",
        ROOTS, "eligible = (row >= k) &", "eligible = (row == k) &",
        triton("roots", "test_rows_are_exchanged"),
    ),
    Mutation(
        "roots in Triton: whatever Newton finds is taken",
        ROOTS, "found = found | (ended & _attracts(", "found = found | (ended | _attracts(",
        triton("roots", "test_it_is_the_search_of_the_cpu_step_for_step"),
    ),
    Mutation(
        "roots in Triton: Newton goes ten times as far",
        ROOTS, "most = (2.0 * residual", "most = (20.0 * residual",
        triton("roots", "test_newton_goes_no_further_than_twice_the_way_that_is_left"),
    ),
    Mutation(
        "two reflections in Triton: F rises in every piece",
        PAIR, "is_below = (value > 0.0) ^ (rises == 0)", "is_below = value > 0.0",
        triton("pair", "test_it_is_the_plain_version"),
    ),
    Mutation(
        "two reflections in Triton: any root with a positive trace attracts",
        PAIR, "attracts = has_zero & (m00 + m11 > 0.0) & (determinant > 0.0)",
        "attracts = has_zero & (m00 + m11 > 0.0)",
        triton("pair", "test_it_is_the_plain_version"),
    ),
    Mutation(
        "two reflections in Triton: a row of Γ2 is read wrongly",
        PAIR, "_multiply(w, _combine(v, e10, w, e11))", "_multiply(w, _combine(v, e10, v, e11))",
        triton("pair", "test_it_is_the_plain_version"),
    ),
    Mutation(
        "two reflections in Triton: a root that repels Picard is not `bisected`",
        ROOTS, "        bisected = is_proven & (attracts == 0)\n", "",
        triton("roots", "test_two_reflections_have_the_roots_and_outcomes_of_the_cpu"),
    ),
]  # fmt: skip
