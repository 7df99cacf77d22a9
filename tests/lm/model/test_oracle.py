"""Every block × every mixer × every toggle against tests/oracle_blocks.py, an independent oracle.

One iteration f(y), the solved output under both stopping rules, every gradient by name, padding,
packed documents, the compiled and the interpreted kernels, and the language model around it.
"""

import functools
import importlib

import pytest
import torch

from lm import kernels
from lm.model.blocks import BLOCKS, Sequences, build_block
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from tests import oracle_blocks as oracle
from tests.kernels import skip_if_missing
from tests.marks import slow

B, L, D_MODEL = 2, 7, 6  # d_inner 12 = 3 × 4
MIXERS = {
    "householder1": {},
    "householder2_lowrank": dict(mixer_rank=2, mixer_proj_rank=5),
    "householder4": dict(mixer_rank=4),
    "dplr1": dict(mixer="dplr"),
    "dplr2": dict(mixer="dplr", mixer_rank=2),
    "dplr4_lowrank": dict(mixer="dplr", mixer_rank=4, mixer_proj_rank=3),
    "kronecker": dict(mixer="kronecker"),
    "kronecker_spectral": dict(mixer="kronecker", kronecker_norm="spectral"),
    "monarch": dict(mixer="monarch", mixer_rank=4),
    "nonselective": dict(mixer="nonselective"),
    "mixture3": dict(mixer="mixture", mixer_rank=3),
    "mixture2_spectral": dict(mixer="mixture", mixer_rank=2, kronecker_norm="spectral"),
    "selective_dense": dict(mixer="selective_dense"),
}
FIELDS_OF_EVERY_BLOCK = {
    "conv": dict(use_short_conv=True),
    "symm": dict(symm_mixer=True, mixer_rank=2),
    "symm_kronecker": dict(symm_mixer=True, mixer="kronecker"),
    "no_h_dep": dict(mixer_h_dep=False, mixer_rank=2),
    "positive": dict(eigen_range="positive", mixer_rank=2),
    "positive_kronecker": dict(eigen_range="positive", mixer="kronecker"),
    "positive_monarch": dict(eigen_range="positive", mixer="monarch", mixer_rank=3),
    "relu": dict(mixer_act="relu", mixer_rank=2),
    "relu_kronecker": dict(mixer_act="relu", mixer="kronecker"),
    "identity_dplr": dict(mixer_act="identity", mixer="dplr", mixer_rank=2),
    "identity_monarch": dict(mixer_act="identity", mixer="monarch", mixer_rank=3),
    "identity_dense": dict(mixer_act="identity", mixer="selective_dense"),
    "contractive": dict(contractive=0.4, mixer_rank=3),
    "contractive_dplr": dict(contractive=0.3, mixer="dplr", mixer_rank=2),
    "contractive_kronecker": dict(contractive=0.2, mixer="kronecker"),
    "contractive_monarch": dict(contractive=0.3, mixer="monarch", mixer_rank=4),
    "large_eps": dict(eps=1.2, mixer_rank=2),
    "large_eps_kronecker": dict(eps=0.6, mixer="kronecker"),
    "large_eps_monarch": dict(eps=0.6, mixer="monarch", mixer_rank=4),
    "large_norm_eps": dict(out_norm_epsilon=0.3),
    "square": dict(d_model=8, headdim=4, mixer="kronecker"),
    "expand1": dict(expand=1, dt_rank=3, headdim=1, mixer_rank=2),
}
FIELDS_OF_MAMBA = {
    "gate_inside": dict(glu_in_loop=True),
    "gate_inside_conv": dict(glu_in_loop=True, use_short_conv=True, mixer="kronecker"),
    "no_bc_norm": dict(bc_norm=False),
    "b_alone": dict(c_h_dep=False),
    "c_alone": dict(b_h_dep=False),
    "dt": dict(dt_h_dep=True),
    "dt_alone": dict(dt_h_dep=True, b_h_dep=False, c_h_dep=False, mixer_h_dep=False),
    "gate_reads_x_alone": dict(gate_h_dep=False),
    "centroids": dict(state_centroids=5, mixer_rank=2),
    "centroids_dt_kronecker": dict(state_centroids=4, dt_h_dep=True, mixer="kronecker"),
    "nothing": dict(
        gate_h_dep=False, b_h_dep=False, c_h_dep=False, mixer_h_dep=False, bc_norm=False
    ),
    "everything": dict(
        glu_in_loop=True,
        use_short_conv=True,
        symm_mixer=True,
        dt_h_dep=True,
        mixer="dplr",
        mixer_rank=2,
        mixer_proj_rank=3,
    ),
}
RULES = {
    "parallel": {},
    "window": dict(schedule="window:3"),
    "sequential": dict(schedule="sequential"),
    "auto": dict(schedule="auto"),
    "iterate": dict(token="iterate", stopping="causal"),
    "paper": dict(schedule="parallel", stopping="paper"),
}
FP32_RULE = dict(tol=2e-6, max_iters=300)  # the 1e-13 of `make_config` is for fp64
ONE_GROUP = {"one_group": dict(ngroups=1, headdim=6)}


def make_cases():
    """Return {"block-name": fields} of every block with every mixer and toggle."""
    cases = {}
    for block in BLOCKS:
        named_fields = MIXERS | FIELDS_OF_EVERY_BLOCK
        if block != "fp_rnn":
            named_fields |= FIELDS_OF_MAMBA
        if block == "fp_mamba2":
            named_fields |= ONE_GROUP
        for name, fields in named_fields.items():
            cases[f"{block}-{name}"] = dict(block=block, **fields)
    return cases


CASES = make_cases()
# A few cases that together run every formula, for expensive tests.
REPRESENTATIVES = {
    name: CASES[name]
    for name in (
        "fp_mamba1-householder2_lowrank",
        "fp_mamba1-everything",
        "fp_mamba1-kronecker_spectral",
        "fp_mamba1-dplr2",
        "fp_mamba1-gate_inside_conv",
        "fp_mamba1-mixture3",
        "fp_mamba2-householder4",
        "fp_mamba2-everything",
        "fp_mamba2-monarch",
        "fp_mamba2-one_group",
        "fp_mamba1-centroids",
        "fp_rnn-householder4",
        "fp_rnn-conv",
        "fp_rnn-kronecker",
        "fp_rnn-selective_dense",
    )
}
# For expensive tests: each toggle in a single block, in turn, and each mixer in FP-Mamba-1. The
# other cases are slow.
FAST = {f"{list(BLOCKS)[i % 3]}-{name}" for i, name in enumerate(FIELDS_OF_EVERY_BLOCK)}
FAST |= {f"{list(BLOCKS)[i % 2]}-{name}" for i, name in enumerate(FIELDS_OF_MAMBA)}
FAST |= {f"fp_mamba1-{name}" for name in MIXERS}
FAST |= set(REPRESENTATIVES)
every_case = pytest.mark.parametrize("name", [n if n in FAST else slow(n) for n in CASES])
representative_cases = pytest.mark.parametrize("name", REPRESENTATIVES)


def make_config(**kwargs):
    sizes = dict(vocab_size=9, d_model=D_MODEL, n_layer=1, d_state=3, dt_rank=2, headdim=3)
    solve = dict(schedule="parallel", tol=1e-13, max_iters=3000, stepsize=0.9)
    solve |= dict(quantile=1.0, stepsize_decay=1.0)
    return FPRNNConfig(**{**sizes, "ngroups": 2, **solve, **kwargs})


def normal(*shape, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


@torch.no_grad()
def perturb(module, seed=0):
    """Give every parameter and buffer different values, so that no mistake cancels.

    No gain is its direction's norm, no bias is zero, no D is one, and no two channels or heads are
    alike. Gates, norms and gains make f contract.
    """
    g = torch.Generator().manual_seed(seed)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        noise = torch.randn(tensor.shape, generator=g, dtype=torch.float64)
        last = name.rpartition(".")[2]
        if name.endswith("q_proj.base"):
            value = torch.matrix_exp(0.3 * (noise - noise.T))
        elif name.endswith("q_proj.weight"):
            value = 0.1 * noise
        elif last == "gain":
            value = 0.7 + 0.2 * noise
        elif name.endswith(("alpha_proj.bias", "gate_proj.bias")):
            value = 0.7 * noise - 2.5
        elif name.endswith(("dt_proj.bias", "dt_bias")):
            value = 0.5 * noise - 1.0
        elif last == "D":
            value = 1.0 + 0.5 * noise
        elif name.endswith("out_norm.weight"):
            value = 0.25 + 0.07 * noise
        elif name.endswith("lambda_proj.bias"):
            value = 1.0 + 0.5 * noise
        elif last == "A_log" or tensor.dim() < 2 or "conv1d" in name:
            value = 0.5 * noise
        else:
            value = noise / tensor.shape[-1] ** 0.5
        tensor.copy_(value)
    return module


def make_block(dtype=torch.float64, **kwargs):
    return perturb(build_block(make_config(**kwargs))).to(dtype).train()


def draw_inputs(block):
    """Return u (b,l,d_model) and y (b,l,d_inner)."""
    config = block.config
    return normal(B, L, config.d_model), normal(B, L, config.d_inner, seed=2)


def copy_parameters(module, requires_grad=False):
    """Return copies of a module's parameters and buffers in fp64, for the oracle."""
    copies = {k: v.detach().double().clone() for k, v in module.state_dict().items()}
    for name in dict(module.named_parameters()):
        copies[name].requires_grad_(requires_grad)
    return copies


def assert_alike(ours, theirs, tol, label=""):
    """Compare relative to the largest entry."""
    assert ours.shape == theirs.shape, label
    scale = theirs.detach().abs().max().clamp_min(1e-3)
    error = ((ours.detach().double() - theirs.detach()).abs().max() / scale).item()
    assert error < tol, f"{label}: {error:.1e} is not below {tol:.0e}"


def use_backend(backend, monkeypatch):
    """Use a backend by name; it is an error if its self-check fails."""
    monkeypatch.setenv("FPRNN_KERNELS", backend)
    for module in kernels.MODULES.get(backend, {}).values():
        try:
            kernel = importlib.import_module(f"lm.kernels.{module}")
        except ModuleNotFoundError as missing:
            pytest.skip(str(missing))
        skip_if_missing(kernel)


def mark_documents_and_padding(side):
    """Return starts and mask (b,l): documents within the rows, and padding on one side."""
    starts = torch.zeros(B, L, dtype=torch.bool)
    starts[0, 3] = starts[0, 4] = starts[1, 2] = True
    mask = torch.ones(B, L, dtype=torch.bool)
    if side == "left":
        mask[0, :2] = mask[1, :1] = False
    if side == "right":
        mask[0, 5:] = mask[1, 6:] = False
    return starts, None if side == "none" else mask


@pytest.mark.parametrize(
    "name, backend",
    [(name, "plain") for name in CASES]
    + [(name, "cpu") for name in ("fp_mamba1-householder1", *REPRESENTATIVES)],
)
@torch.no_grad()
def test_iteration_equals_the_oracle(name, backend, monkeypatch):
    use_backend(backend, monkeypatch)
    block = make_block(**CASES[name])
    u, y = draw_inputs(block)
    expected = oracle.apply_map(copy_parameters(block), block.config, u, y)
    assert_alike(block.step(block.prepare(u), y), expected, 1e-12)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("backend", ["plain", "cpu"])
@representative_cases
@torch.no_grad()
def test_iteration_of_packed_documents_equals_the_oracle(name, backend, side, monkeypatch):
    use_backend(backend, monkeypatch)
    block = make_block(**REPRESENTATIVES[name])
    starts, mask = mark_documents_and_padding(side)
    u, y = draw_inputs(block)
    y = y if mask is None else y * mask.unsqueeze(-1)  # as in every iterate
    expected = oracle.apply_map(copy_parameters(block), block.config, u, y, starts, mask)
    assert_alike(block.step(block.prepare(u, Sequences(mask, starts)), y), expected, 1e-12)


@functools.cache
@torch.no_grad()
def solve_by_oracle(name, side=None):
    """Return a block's output (b,l,d_model) from the oracle, which uses no stopping rule.

    side: Side of the padding, if there are documents and padding.
    """
    block = make_block(**CASES[name])
    starts, mask = (None, None) if side is None else mark_documents_and_padding(side)
    u, _ = draw_inputs(block)
    return oracle.block_output(copy_parameters(block), block.config, u, starts, mask)


@pytest.mark.parametrize(
    "name, rule",
    [
        (name, rule) if name in quick else slow(name, rule)
        for rule, quick in (("parallel", CASES), ("sequential", FAST), ("paper", REPRESENTATIVES))
        for name in CASES
    ],
)
@torch.no_grad()
def test_solved_output_equals_the_oracle(name, rule):
    block = make_block(**CASES[name], **RULES[rule])
    u, _ = draw_inputs(block)
    out, stats = block(u)
    assert (stats.failed == 0).all()
    assert_alike(out, solve_by_oracle(name), 1e-10)


@pytest.mark.parametrize(
    "name, side, rule",
    [
        (name, side, rule) if (i + j + k) % 3 == 0 else slow(name, side, rule)
        for i, name in enumerate(REPRESENTATIVES)
        for j, side in enumerate(("none", "left", "right"))
        for k, rule in enumerate(("sequential", "window", "iterate", "paper"))
    ],
)
@torch.no_grad()
def test_solved_packed_documents_equal_the_oracle(name, side, rule):
    block = make_block(**REPRESENTATIVES[name], **RULES[rule])
    starts, mask = mark_documents_and_padding(side)
    u, _ = draw_inputs(block)
    out, _ = block(u, Sequences(mask, starts))
    out = out if mask is None else out * mask.unsqueeze(-1)
    assert_alike(out, solve_by_oracle(name, side), 1e-10)


def gradients(output, leaves, cotangent):
    """Return gradients of the sum of output ⊙ cotangent, by name."""
    grads = torch.autograd.grad((output * cotangent).sum(), list(leaves.values()))
    return dict(zip(leaves, grads))


@functools.cache
def differentiate_oracle(name, side, dtype, n_backwards):
    """Return a block's output from the oracle and its gradients by name.

    Args:
        name: Key of CASES.
        side: Side of the padding, if there are documents and padding.
        dtype: Precision to which the input and the parameters are rounded.
        n_backwards: Number of steps of a one-step gradient, or 0 for the solution's gradient.
    """
    gradient = dict(gradient="one_step", n_backwards=n_backwards) if n_backwards else {}
    block = make_block(dtype, **{**CASES[name], **gradient})
    starts, mask = (None, None) if side is None else mark_documents_and_padding(side)
    u, _ = draw_inputs(block)
    parameters = copy_parameters(block, requires_grad=True)
    leaves = {"input": u.to(dtype).double().requires_grad_()}
    leaves |= {k: parameters[k] for k, _ in block.named_parameters()}
    output = oracle.block_output(parameters, block.config, leaves["input"], starts, mask)
    return output.detach(), gradients(output, leaves, draw_cotangent(u, mask))


def draw_cotangent(u, mask):
    cotangent = normal(*u.shape, seed=3)
    return cotangent if mask is None else cotangent * mask.unsqueeze(-1)


def compare_gradients(name, max_error, side=None, dtype=torch.float64, **fields):
    """Compare a block's output, and the gradients of its input and of every parameter.

    Args:
        name: Key of CASES.
        max_error: Largest permitted error, relative to the largest entry.
        side: Side of the padding, if there are documents and padding.
        dtype: Precision of the block.
        fields: Further fields of the model; the solution must not depend on them.
    """
    block = make_block(dtype, **{**CASES[name], **fields})
    starts, mask = (None, None) if side is None else mark_documents_and_padding(side)
    u, _ = draw_inputs(block)
    leaves = {"input": u.to(dtype).requires_grad_(), **dict(block.named_parameters())}
    out, stats = block(leaves["input"], Sequences(mask, starts))
    assert (stats.failed == 0).all()
    out = out if mask is None else out * mask.unsqueeze(-1)
    n_backwards = block.config.n_backwards if block.config.gradient == "one_step" else 0
    expected, expected_grads = differentiate_oracle(name, side, dtype, n_backwards)
    assert_alike(out, expected, max_error, "output")
    grads = gradients(out, leaves, draw_cotangent(u, mask).to(dtype))
    for name, grad in expected_grads.items():
        assert grad.abs().max() > 0, f"{name} has no gradient, so the comparison tests nothing"
        assert_alike(grads[name], grad, max_error, name)


@every_case
def test_exact_gradient_equals_the_oracle(name, monkeypatch):
    use_backend("plain", monkeypatch)
    compare_gradients(name, 1e-9, schedule="sequential")


@representative_cases
def test_kernels_exact_gradient_equals_the_oracle(name, monkeypatch):
    use_backend("cpu", monkeypatch)
    compare_gradients(name, 1e-9, schedule="sequential")


GRADIENTS = {
    "exact_parallel": dict(gradient="exact"),
    "exact_window": dict(gradient="exact", schedule="window:3"),
    "exact": dict(gradient="exact", schedule="sequential"),
    "one_step": dict(gradient="one_step"),
    "two_backwards": dict(gradient="one_step", n_backwards=2),
    "implicit": dict(gradient="implicit"),
    "implicit_paper": dict(gradient="implicit", stopping="paper"),
}


@pytest.mark.parametrize(
    "name, kind",
    [
        (name, kind) if (i + j) % 3 == 0 or kind == "exact_parallel" else slow(name, kind)
        for i, name in enumerate(REPRESENTATIVES)
        for j, kind in enumerate(GRADIENTS)
        if kind != "exact"  # tested above
    ],
)
def test_other_gradients_equal_the_oracle(name, kind):
    compare_gradients(name, 1e-9, **GRADIENTS[kind])


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("name", ["fp_mamba1-everything", "fp_mamba2-householder4", "fp_rnn-conv"])
def test_gradients_of_packed_documents_equal_the_oracle(name, kind):
    compare_gradients(name, 1e-9, "right", **GRADIENTS[kind])


@pytest.mark.parametrize("backend", ["plain", "cpu"])
@representative_cases
def test_fp32_equals_the_oracle_to_rounding(name, backend, monkeypatch):
    use_backend(backend, monkeypatch)
    # The inner iteration of full-rank mixers ends at a relative residual of 1e-5.
    compare_gradients(name, 2e-4, dtype=torch.float32, **FP32_RULE)


MODELS = {
    "tied": dict(n_layer=2),
    "untied": dict(n_layer=2, tie_embeddings=False, block="fp_mamba2", use_short_conv=True),
    "rnn": dict(n_layer=3, block="fp_rnn", use_short_conv=True),
    "kronecker": dict(n_layer=2, mixer="kronecker", glu_in_loop=True, n_backwards=2),
}


@pytest.mark.parametrize("name", MODELS)
def test_language_model_equals_the_oracle(name):
    options = make_config(**{"eos_token_id": 0, **MODELS[name]})
    model = perturb(FPRNNForCausalLM(options)).double().train()
    ids = torch.randint(1, 9, (B, L), generator=torch.Generator().manual_seed(1))
    ids[0, 2] = ids[1, 4] = 0  # ends of documents
    parameters = copy_parameters(model, requires_grad=True)
    expected = oracle.compute_logits(parameters, options, ids)
    out = model(ids, labels=ids)
    assert (out.fixed_point.failed == 0).all()
    assert_alike(out.logits, expected, 1e-9, "logits")
    loss = oracle.compute_loss(expected, ids)
    assert_alike(out.loss, loss, 1e-10, "loss")
    names, leaves = zip(*model.named_parameters())
    our_grads = torch.autograd.grad(out.loss, leaves)
    their_grads = torch.autograd.grad(loss, [parameters[name] for name in names])
    for name, ours, theirs in zip(names, our_grads, their_grads):
        assert_alike(ours, theirs, 1e-8, name)
