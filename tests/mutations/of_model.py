"""Mutations of the formulas of a step: mixers, layers, blocks, recurrences, convolution."""

from tests.mutations import Mutation

ORACLE = "tests/lm/model/test_oracle.py"
MIXERS = "lm/model/mixers.py"
MIXER_BASE = "lm/model/mixer_base.py"
LAYERS = "lm/model/layers.py"
STEP = "lm/model/blocks.py"
BLOCKS = "lm/model/blocks.py"
SCAN = "lm/model/scan.py"
STATE = "lm/model/state.py"


def iteration(*cases, backend="plain"):
    return tuple(f"{ORACLE}::test_one_iteration[{case}-{backend}]" for case in cases)


def packed(case, side):
    return (f"{ORACLE}::test_one_iteration_of_packed_documents[{case}-plain-{side}]",)


def output(*cases):
    return tuple(f"{ORACLE}::test_the_solved_output[{case}-parallel]" for case in cases)


def gradient(*cases):
    return tuple(f"{ORACLE}::test_the_other_gradients[{case}-one_step]" for case in cases)


MUTATIONS = [
    Mutation(
        "the host asks a GPU whether documents start",
        "lm/model/modeling_fprnn.py", "(return_state or on_cpu(starts))", "True",
        (
            "tests/lm/model/test_non_finite.py"
            "::test_forward_and_backward_wait_for_the_device_once[2-39-mamba-True]",
        ),
    ),
    # Mixers.
    Mutation(
        "nrm adds eps instead of dividing by no less",
        MIXERS, "keepdim=True).clamp_min(eps)", "keepdim=True).add(eps)",
        iteration("fp_mamba1-large_eps"),
    ),
    Mutation(
        "Kronecker factors of other sizes",
        MIXERS, "range(math.isqrt(d), 0, -1)", "range(d // 2, 0, -1)",
        iteration("fp_mamba1-kronecker"),
    ),
    Mutation(
        "S = Tᵀ T for S = T Tᵀ",
        MIXERS, "return T @ T.transpose(-1, -2)", "return T.transpose(-1, -2) @ T",
        iteration("fp_mamba1-kronecker"),
    ),
    Mutation(
        "triangles filled column by column",
        MIXERS, "flat.index_copy(-1, rows * m + cols, entries)",
        "flat.index_copy(-1, (m - 1 - cols) * m + m - 1 - rows, entries)",
        iteration("fp_mamba1-monarch"),
    ),
    Mutation(
        "the eigenvalue estimated by the last iterate alone",
        MIXERS, "return before.transpose(-1, -2) @ (S @ x)", "return x.transpose(-1, -2) @ (S @ x)",
        iteration("fp_mamba1-kronecker_spectral"),
    ),
    Mutation(
        "one power step too few",
        MIXERS, "(steps):\n        before", "(steps - 1):\n        before",
        iteration("fp_rnn-kronecker_spectral"),
    ),
    Mutation(
        "the iterates of selective_dense divided by their norm alone",
        MIXERS, "x = x / (stretch + eps)", "x = x / stretch",
        iteration("fp_mamba1-selective_dense"),
    ),
    Mutation(
        "x̃ = M(x − y) + x",
        MIXER_BASE, "self(raw.to(x.dtype), x - y, weights) + y",
        "self(raw.to(x.dtype), x - y, weights) + x",
        iteration("fp_mamba2-kronecker"),
    ),
    Mutation(
        "the last reflection acts first",
        MIXERS, "for i in range(self.rank):", "for i in reversed(range(self.rank)):",
        iteration("fp_mamba1-householder4"),
    ),
    Mutation(
        "one gate for all reflections",
        MIXERS, "v = v - a[..., i : i + 1] *", "v = v - a[..., :1] *",
        iteration("fp_mamba1-householder4"),
    ),
    Mutation(
        "reflections without the factor two",
        MIXERS, "return self.scale * torch.sigmoid(a), u", "return torch.sigmoid(a), u",
        iteration("fp_rnn-dplr2"),
    ),
    Mutation(
        "reflection vectors interleaved",
        MIXERS, "u.unflatten(-1, (self.rank, self.d_inner))",
        "u.unflatten(-1, (self.d_inner, self.rank)).transpose(-1, -2)",
        iteration("fp_mamba1-dplr2"),
    ),
    Mutation(
        "eigenvalues in [−1, 1] whatever eigen_range says",
        MIXERS, '2.0 if config.eigen_range == "signed" else 1.0', "2.0",
        iteration("fp_mamba1-positive_kronecker"),
    ),
    Mutation(
        "Kronecker factors not normalised by rows",
        MIXERS, "S = nrm(gram_of_triangle(triangle, m), self.eps)",
        "S = gram_of_triangle(triangle, m)",
        iteration("fp_mamba2-kronecker"),
    ),
    Mutation(
        "Kronecker gates scale columns, not rows",
        MIXERS, "return gate.unsqueeze(-1) * S", "return gate.unsqueeze(-2) * S",
        iteration("fp_mamba1-kronecker"),
    ),
    Mutation(
        "K₁ not transposed",
        MIXERS, "K1.transpose(-1, -2) @ X", "K1 @ X",
        iteration("fp_mamba1-kronecker"),
    ),
    Mutation(
        "K₂ not transposed",
        MIXERS, "@ X @ K2.transpose(-1, -2)", "@ X @ K2",
        iteration("fp_mamba1-square", "fp_mamba1-kronecker"),
    ),
    Mutation(
        "Kronecker without the factor two",
        MIXERS, "X - self.scale * K1", "X - K1",
        iteration("fp_mamba1-kronecker"),
    ),
    Mutation(
        "no activation in the second Kronecker factor",
        MIXERS, "self.act(t2), self.m2)", "t2, self.m2)",
        iteration("fp_mamba1-relu_kronecker"),
    ),
    Mutation(
        "monarch divided by the mean column norm, not the largest",
        MIXERS, "torch.linalg.vector_norm(S, dim=-2).amax(-1)",
        "torch.linalg.vector_norm(S, dim=-2).mean(-1)",
        iteration("fp_mamba2-monarch"),
    ),
    Mutation(
        "monarch's eps left out",
        MIXERS, "a * (S / (largest + self.eps))", "a * (S / largest)",
        iteration("fp_mamba1-large_eps_monarch"),
    ),
    Mutation(
        "the orthogonal matrix transposed",
        MIXERS, "F.linear(v, weights.extra[0].to(v.dtype))", "v @ weights.extra[0].to(v.dtype)",
        iteration("fp_mamba1-nonselective"),
    ),
    Mutation(
        "no activation in selective_dense",
        MIXERS, "gram_of_triangle(self.act(raw), self.d_inner)",
        "gram_of_triangle(raw, self.d_inner)",
        iteration("fp_mamba1-selective_dense"),
    ),
    Mutation(
        "the mixture's last part acts first",
        MIXERS, "zip(self.parts, raws, weights.extra)",
        "reversed(list(zip(self.parts, raws, weights.extra)))",
        iteration("fp_mamba1-mixture3"),
    ),
    Mutation(
        "the mixture begins with kronecker",
        MIXERS, '["householder", "kronecker"] *', '["kronecker", "householder"] *',
        iteration("fp_mamba1-mixture3"),
    ),
    Mutation(
        "what is contractive already is scaled up",
        MIXERS, ".clamp_min(self.kappa)", "",
        iteration("fp_mamba1-contractive", "fp_mamba1-contractive_kronecker"),
    ),
    Mutation(
        "the largest gate bounds several reflections, not the sum",
        MIXERS, "torch.sigmoid(raw[..., -self.rank :]).sum(-1, True)",
        "torch.sigmoid(raw[..., -self.rank :]).amax(-1, True)",
        iteration("fp_mamba1-contractive"),
    ),
    Mutation(
        "‖·‖_∞ alone bounds a matrix",
        MIXER_BASE, "(entries.sum(-1).amax(-1) * entries.sum(-2).amax(-1)).sqrt()",
        "entries.sum(-1).amax(-1)",
        iteration("fp_mamba1-contractive_kronecker"),
    ),
    # Layers.
    Mutation(
        "the gain of a weight-normalised map dropped",
        LAYERS, "return self.gain * (self.direction / norm", "return (self.direction / norm",
        iteration("fp_mamba1-householder1"),
    ),
    Mutation(
        "weight normalisation over the wrong axis",
        LAYERS, "norm = torch.linalg.vector_norm(self.direction, dim=1",
        "norm = torch.linalg.vector_norm(self.direction, dim=0",
        iteration("fp_mamba1-householder1"),
    ),
    Mutation(
        "a weight assigned to a weight-normalised map keeps the old gain",
        LAYERS, "self.gain.copy_(torch", "self.gain.clone().copy_(torch",
        ("tests/lm/model/test_layers.py",),
    ),
    Mutation(
        "exp(X + Xᵀ), which is not orthogonal",
        LAYERS, "torch.matrix_exp((X - X.T)", "torch.matrix_exp((X + X.T)",
        iteration("fp_mamba1-nonselective"),
    ),
    Mutation(
        "eps outside RMSNorm's root",
        LAYERS, "unit = F.rms_norm(x, self.weight.shape, None, self.eps)",
        "unit = x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)",
        output("fp_rnn-large_norm_eps"),
    ),
    Mutation(
        "RMSNorm divides by the mean size, not the root mean square",
        LAYERS, "unit = F.rms_norm(x, self.weight.shape, None, self.eps)",
        "unit = x / (x.abs().mean(-1, keepdim=True) + self.eps)",
        (f"{ORACLE}::test_the_language_model[tied]",),
    ),
    # The end of an iteration.
    Mutation(
        "D left out",
        STEP, "w = o + D.to(o.dtype) * x", "w = o + x",
        iteration("fp_mamba1-householder1"),
    ),
    Mutation(
        "a sigmoid gate where silu is meant",
        STEP, "w * F.silu(z.to(o.dtype))", "w * torch.sigmoid(z.to(o.dtype))",
        iteration("fp_mamba1-gate_inside"),
    ),
    Mutation(
        "a sum for a mean in the RMSNorm that ends an iteration",
        "lm/model/cell.py", "v.square().mean(-1, keepdim=True) + self.eps) * weight",
        "v.square().sum(-1, keepdim=True) + self.eps) * weight",
        iteration("fp_mamba2-householder1"),
    ),
    Mutation(
        "all groups of B and C normalised as one",
        STEP, "nrm(v.unflatten(-1, (groups, -1)), eps)", "nrm(v.unflatten(-1, (1, -1)), eps)",
        iteration("fp_mamba2-householder1"),
    ),
    # Blocks.
    Mutation(
        "fp_mamba1: FLOPs of a scan without the two that its parallel form adds",
        BLOCKS, "scan = 9 * d", "scan = 7 * d",
        ("tests/lm/model/test_h_dep.py::test_flops_of_the_scan_are_those_of_a_mamba_layer",),
    ),
    Mutation(
        "the decay rate by softplus, not exp",
        BLOCKS, "A = -torch.exp(self.A_log.to(dtype))", "A = -F.softplus(self.A_log.to(dtype))",
        iteration("fp_mamba1-householder1"),
    ),
    Mutation(
        "Δ of FP-Mamba-1 without softplus",
        BLOCKS, "F.softplus(self.dt_proj(delta))", "self.dt_proj(delta).abs()",
        iteration("fp_mamba1-householder1"),
    ),
    Mutation(
        "dt_bias left out",
        BLOCKS, "F.softplus(delta.to(acc) + self.dt_bias.to(acc))", "F.softplus(delta.to(acc))",
        iteration("fp_mamba2-householder1"),
    ),
    Mutation(
        "B and C in the other order",
        BLOCKS, "B, C = bc_x.chunk(2, dim=-1)", "C, B = bc_x.chunk(2, dim=-1)",
        iteration("fp_mamba1-b_alone"),
    ),
    Mutation(
        "per-head D spread over the wrong channels",
        BLOCKS, "self.D.repeat_interleave(self.config.headdim)",
        "self.D.repeat(self.config.headdim)",
        iteration("fp_mamba2-householder1"),
    ),
    Mutation(
        "D multiplies the x that is not mixed",
        BLOCKS, "combine(o, x, self._D()", "combine(o, s.x, self._D()",
        iteration("fp_mamba1-householder1"),
    ),
    Mutation(
        "a document keeps the state of the one before it",
        BLOCKS, "keep = None if seqs.starts is None else 1 - seqs.starts.to(acc)\n        dt =",
        "keep = None\n        dt =",
        packed("fp_mamba1-everything", "none"),
    ),
    Mutation(
        "padding passes through FP-Mamba-2's state",
        BLOCKS, "seqs.masked(F.softplus(delta.to(acc)", "(F.softplus(delta.to(acc)",
        packed("fp_mamba2-everything", "left"),
    ),
    Mutation(
        "λ and 1 − λ exchanged",
        BLOCKS, "torch.sigmoid(gate), torch.sigmoid(-gate)",
        "torch.sigmoid(-gate), torch.sigmoid(gate)",
        iteration("fp_rnn-householder1"),
    ),
    Mutation(
        "a document of FP-RNN keeps the state of the one before it",
        BLOCKS, "decay.masked_fill(seqs.starts.unsqueeze(-1), 0.0)",
        "decay.masked_fill(seqs.starts.unsqueeze(-1), 1.0)",
        packed("fp_rnn-conv", "none"),
    ),
    Mutation(
        "padding enters FP-RNN's state",
        BLOCKS, "fresh = seqs.masked(fresh)", "fresh = 1 * fresh",
        ("tests/lm/model/test_state.py::test_padding_changes_neither_state_nor_logits",),
    ),
    Mutation(
        "FP-RNN's b without silu",
        BLOCKS, "F.silu(self.b_proj(x_b))", "(self.b_proj(x_b))",
        iteration("fp_rnn-householder1"),
    ),
    Mutation(
        "FP-RNN's gate after its norm",
        BLOCKS, "self.out_norm(F.silu(s.z) * c * y)", "F.silu(s.z) * self.out_norm(c * y)",
        output("fp_rnn-householder1"),
    ),
    # Recurrences and convolution.
    Mutation(
        "Δ missing from the scan's input",
        SCAN, "u_c = _chunked(x * dt, c)", "u_c = _chunked(x, c)",
        iteration("fp_mamba1-householder1"),
    ),
    Mutation(
        "resets ignored within a chunk of the scan",
        SCAN, "return a if keep_bic is None else a * keep_bic[:, :, j, None, None]", "return a",
        packed("fp_mamba1-everything", "none"),
    ),
    Mutation(
        "the scan's gradient by the decay reads the state after the step",
        SCAN, "d_log = g * (hs[j - 1] if j else states)", "d_log = g * hs[j]",
        (f"{ORACLE}::test_in_single_precision[fp_mamba1-dplr2-plain]",),
    ),
    Mutation(
        "Δ's gradient through the scan's input without x",
        SCAN, "ddt += du * x_c", "ddt += du",
        (f"{ORACLE}::test_in_single_precision[fp_mamba1-dplr2-plain]",),
    ),
    Mutation(
        "the gradient of a decay reads the state after the step",
        SCAN, "return g * before, g, a[:, 0] * g[:, 0]", "return g * h, g, a[:, 0] * g[:, 0]",
        gradient("fp_rnn-kronecker"),
    ),
    Mutation(
        "cotangents carried with this step's decay, not the next one's",
        SCAN, "a_next = torch.cat([a[:, 1:], torch.zeros_like(a[:, :1])], 1)", "a_next = a",
        gradient("fp_rnn-kronecker"),
    ),
    Mutation(
        "Mamba-2's decay runs backwards",
        SCAN, "(log.unsqueeze(3) - log.unsqueeze(2))", "(log.unsqueeze(2) - log.unsqueeze(3))",
        iteration("fp_mamba2-householder1"),
    ),
    Mutation(
        "a token of Mamba-2's scan does not see itself",
        SCAN, "device=dt.device).tril()", "device=dt.device).tril(-1)",
        iteration("fp_mamba2-householder1"),
    ),
    Mutation(
        "what came before a reset reaches the end of Mamba-2's chunk",
        SCAN, "torch.exp(log[:, :, -1:] - log) * same_end", "torch.exp(log[:, :, -1:] - log)",
        ("tests/lm/model/test_scan.py::test_ssd_equals_the_recurrence",),
    ),
    Mutation(
        "heads assigned to groups in turn",
        SCAN, "scores.repeat_interleave(per_group, 2)", "scores.repeat(1, 1, per_group, 1, 1)",
        iteration("fp_mamba2-householder1"),
    ),
    Mutation(
        "the convolution's taps in reverse within documents",
        SCAN, "taps[:, -1 - lag], (0, 0, lag, 0)", "taps[:, lag - 1], (0, 0, lag, 0)",
        packed("fp_rnn-conv", "none"),
    ),
    Mutation(
        "the convolution reads across documents",
        SCAN, "F.pad(x[:, :-lag] * same *", "F.pad(x[:, :-lag] *",
        packed("fp_rnn-conv", "none"),
    ),
    # What crosses from token to token.
    Mutation(
        "sh(y) reads two tokens back",
        STATE, "y = torch.cat([first, y[:, :-1]], 1)",
        "y = torch.cat([first, first, y[:, :-2]], 1)",
        iteration("fp_mamba1-householder1"),
    ),
    Mutation(
        "sh(y) crosses from one document to the next",
        STATE, "return y if seqs.starts is None else y.masked_fill(seqs.starts.unsqueeze(-1), 0)",
        "return y",
        packed("fp_mamba1-dplr2", "none"),
    ),
    Mutation(
        "the gate of the next segment reads y* where it read f(y*)",
        STATE, "before = seqs.before(name)\n    first = ",
        'before = seqs.before("y")\n    first = ',
        ("tests/lm/model/test_token.py::test_segments_as_long_as_windows_are_the_same_computation_at_any_tolerance",),
    ),
    Mutation(
        "a segment's last inputs reach into the document before",
        STATE, "return tail * alive.reshape(*alive.shape, *[1] * (tail.dim() - 2))", "return tail",
        ("tests/lm/model/test_state.py::test_last_takes_the_last_tokens_of_each_row_within_its_document",),
    ),
    Mutation(
        "tokens that are solved together read the mean of all",
        "lm/model/fixed_point.py", "        x, parts, rows = self._mixed(s, y)",
        "        s = s._replace(x=s.x + 1e-3 * s.x.mean(1, keepdim=True))\n"
        "        x, parts, rows = self._mixed(s, y)",
        ("tests/lm/model/test_causal.py::test_later_tokens_change_no_other_schedules_result[fp_rnn-window:4]",),
    ),
    Mutation(
        "centroids: the longest is nearest",
        LAYERS,
        "-scale * c.square().sum(-1) / 2",
        "-scale * c.square().sum(-1) * 0",
        (f"{ORACLE} -k centroids",),
    ),
    Mutation(
        "centroids: the noise is lost",
        LAYERS,
        "(y if noise is None else y + noise).to(wide)",
        "y.to(wide)",
        ("tests/lm/model/test_centroids.py",),
    ),
    Mutation(
        "centroids: one of them is read where there is no token before",
        LAYERS,
        "keys, key_bias), -1) * has_token_before",
        "keys, key_bias), -1)",
        ("tests/lm/model/test_centroids.py", f"{ORACLE} -k centroids"),
    ),
    Mutation(
        "centroids: a window reads the noise of the first tokens",
        LAYERS,
        "noise = None if self.noise is None else self.noise[:, start:end]",
        "noise = None if self.noise is None else self.noise[:, : end - start]",
        ("tests/lm/model/test_centroids.py",),
    ),
]  # fmt: skip
