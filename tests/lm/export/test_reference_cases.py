"""Configurations of the paper's code of which there are no golden vectors: read as an independent
oracle reads them, whose options are written out here by hand."""

from types import SimpleNamespace

import pytest
import torch

from lm.export.reference import mismatch, reference_config, reference_name, settle_head
from lm.model.blocks import build_block
from lm.model.modeling_fprnn import FPRNNForCausalLM
from tests import oracle_blocks as oracle
from tests import paper

D_MODEL = 6  # d_inner 12 = 3 × 4
OPTIONS = dict(
    d_model=D_MODEL, d_inner=12, d_state=16, d_conv=4, dt_rank=1, headdim=64, ngroups=1,
    mixer_rank=1, mixer_proj_rank=None, mixer_act="silu", eigen_range="signed",
    kronecker_norm="rows", contractive=None, mixer_h_dep=True, symm_mixer=False, b_h_dep=True,
    c_h_dep=True, dt_h_dep=False, gate_h_dep=True, bc_norm=True, glu_in_loop=False,
    use_short_conv=False, out_norm_epsilon=1e-5, eps=1e-5, gradient="one_step", n_backwards=1,
    norm_epsilon=1e-5, rms_norm=True, tie_embeddings=True, eos_token_id=None, reset_at_eos=False,
)  # fmt: skip
MAMBA1 = dict(block="fp_mamba1", d_state=4)
MAMBA2 = dict(block="fp_mamba2", d_state=4)
RNN = dict(block="fp_rnn")
# name: (layer, the paper's keys, what they say in the oracle's options)
CASES = {
    "dplr2_no_h_dep_relu": (
        "FPMamba",
        dict(mixer_type="dplr", mixer_rank=2, mixer_h_dep=False, mixer_ac="relu", d_state=4),
        dict(MAMBA1, mixer="dplr", mixer_rank=2, mixer_h_dep=False, mixer_act="relu"),
    ),
    "householder2_lowrank_identity": (
        "FPMamba",
        dict(mixer_type="householderproduct", mixer_rank=2, mixer_proj_rank=5, symm_mixer=True,
             mixer_ac="Identity", bc_norm=False, d_state=4),
        dict(MAMBA1, mixer="householder", mixer_rank=2, mixer_proj_rank=5, symm_mixer=True,
             mixer_act="identity", bc_norm=False),
    ),
    "two_backward_steps_with_biases": (
        "FPMamba1",
        dict(mixer_type="householderproduct", n_backwards=2, bias=True, d_state=4, norm_eps="0.2"),
        dict(MAMBA1, mixer="householder", n_backwards=2, eps=0.2, out_norm_epsilon=0.2),
    ),
    "kronecker_by_default_relu_gate_inside": (
        "FPMamba",
        dict(mixer_ac="relu", glu_in_loop=True, use_short_conv=True, conv_bias=True, d_state=4),
        dict(MAMBA1, mixer="kronecker", mixer_act="relu", glu_in_loop=True, use_short_conv=True),
    ),
    "monarch_identity": (
        "FPMamba",
        dict(mixer_type="monarch", mixer_rank=4, mixer_ac="identity", d_state=4, norm_eps=0.1),
        dict(MAMBA1, mixer="monarch", mixer_rank=4, mixer_act="identity", eigen_range="positive",
             eps=0.1, out_norm_epsilon=0.1),
    ),
    "nonselective_biases": (
        "FPMamba",
        dict(mixer_type="nonselective", bias=True, mixer_proj_rank=3, d_state=4, norm_eps=2.0),
        dict(MAMBA1, mixer="nonselective", eps=2.0, out_norm_epsilon=2.0),
    ),
    "mamba2_groups_dplr": (
        "FPMamba2",
        dict(mixer_type="dplr", mixer_rank=2, ngroups=2, headdim=3, d_state=4, use_short_conv=True,
             bias=True, bc_norm=False, mixer_ac="relu", norm_eps=0.5),
        dict(MAMBA2, mixer="dplr", mixer_rank=2, ngroups=2, headdim=3, use_short_conv=True,
             mixer_act="relu", eps=0.5, out_norm_epsilon=0.5),
    ),
    "mamba2_defaults": (
        "FPMamba2",
        dict(headdim=6, norm_eps=0.5),
        dict(block="fp_mamba2", mixer="kronecker", headdim=6, d_state=128, eps=0.5,
             out_norm_epsilon=0.5),
    ),
    "rnn_mixture2": (
        "FPRNN",
        dict(mixer_type="mixture", mixer_rank=2, d_mixer=6, norm_eps=0.3),
        dict(RNN, mixer="mixture", mixer_rank=2, out_norm_epsilon=0.3),
    ),
    "rnn_mixture3_conv_relu": (
        "FPRNN",
        dict(mixer_type="mixture", mixer_rank=3, mixer_ac="relu", use_short_conv=True),
        dict(RNN, mixer="mixture", mixer_rank=3, mixer_act="relu", use_short_conv=True),
    ),
    "rnn_kronecker_identity": (
        "FPRNN",
        dict(mixer_type="kronecker", mixer_ac="identity", n_backwards=2, norm_eps=0.1),
        dict(RNN, mixer="kronecker", mixer_act="identity", kronecker_norm="spectral",
             n_backwards=2, eps=0.1, out_norm_epsilon=0.1),
    ),
    "rnn_monarch_no_h_dep": (
        "FPRNN",
        dict(mixer_type="monarch", mixer_rank=4, mixer_h_dep=False),
        dict(RNN, mixer="monarch", mixer_rank=4, eigen_range="positive", mixer_h_dep=False),
    ),
    "rnn_nonselective": (
        "FPRNN", dict(mixer_type="nonselective"), dict(RNN, mixer="nonselective"),
    ),
    "rnn_by_default_biases": (
        "FPRNN", dict(bias=True, mixer_rank=2), dict(RNN, mixer="householder", mixer_rank=2),
    ),
}  # fmt: skip


def ours_of(theirs):
    return {reference_name(name): tensor for name, tensor in theirs.items()}


def assert_close(ours, theirs, what):
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < 1e-9, f"{what}: {error:.1e}"


def exactly(config):
    config.tol = config.eval_tol = 1e-13
    config.max_iters = config.eval_max_iters = 3000


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_a_block(name, train):
    layer, keys, said = CASES[name]
    description = {"cls": layer, "config": {"d_model": D_MODEL, **keys}}
    options = SimpleNamespace(**{**OPTIONS, **said})
    state = ours_of(paper.checkpoint(description))
    block = build_block(reference_config(description)).double().train(train)
    assert not mismatch(state, block.state_dict())
    block.load_state_dict(state)
    exactly(block.config)
    block.config.quantile = 1.0

    u = torch.randn(2, 5, D_MODEL, dtype=torch.float64)
    out, stats = block(u)
    assert not stats.failed.any()
    parameters = {k: v.clone().requires_grad_(not k.endswith("base")) for k, v in state.items()}
    theirs = oracle.block_output(parameters, options, u)
    assert_close(out.detach(), theirs.detach(), "output")
    cotangent = torch.randn_like(out)
    (out * cotangent).sum().backward()
    (theirs * cotangent).sum().backward()
    for name, parameter in block.named_parameters():
        assert_close(parameter.grad, parameters[name].grad, name)


SIZES = dict(d_model=D_MODEL, n_layer=2, vocab_size=13)
MODELS = {
    "layer_norm_and_biases": (
        dict(rms_norm=False),
        dict(layer="FPMamba1", mixer_type="householderproduct", bias=True, d_state=4),
        dict(MAMBA1, mixer="householder", rms_norm=False),
    ),
    "untied": (
        dict(tie_embeddings=False, residual_in_fp32=True, fused_add_norm=True, d_intermediate=0),
        dict(layer="FPMamba1", mixer_type="dplr", mixer_rank=2, d_state=4),
        dict(MAMBA1, mixer="dplr", mixer_rank=2, tie_embeddings=False),
    ),
    "mamba2_layer_norm_untied": (
        dict(rms_norm=False, tie_embeddings=False),
        dict(layer="FPMamba2", headdim=4, d_state=4, use_short_conv=True, norm_eps=0.5),
        dict(MAMBA2, mixer="kronecker", headdim=4, use_short_conv=True, rms_norm=False,
             tie_embeddings=False, eps=0.5, out_norm_epsilon=0.5),
    ),
    "rnn_mixture_layer_norm": (
        dict(rms_norm=False),
        dict(layer="FPRNN", d_mixer=6, mixer_type="mixture", mixer_rank=2, use_short_conv=True),
        dict(RNN, mixer="mixture", mixer_rank=2, use_short_conv=True, rms_norm=False),
    ),
}  # fmt: skip


def compiled(name):
    """A name as torch.compile around the mixers leaves it."""
    return name.replace(".mixer.mixer.", ".mixer.mixer._orig_mod.")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("flat", [False, True], ids=["sections", "as saved"])
@torch.no_grad()
def test_a_language_model(name, flat):
    model_keys, layer_keys, said = MODELS[name]
    sizes = {**SIZES, **model_keys}
    description = {"model_config": sizes, "ssm_cfg": layer_keys}
    theirs = paper.checkpoint(description)
    if flat:
        description = {**sizes, "ssm_cfg": layer_keys}
        theirs = {compiled(k): v for k, v in theirs.items()}
    options = SimpleNamespace(**{**OPTIONS, **said}, n_layer=2)
    state = ours_of(theirs)
    tied = settle_head(state, description)
    assert tied == options.tie_embeddings
    model = FPRNNForCausalLM(reference_config(description, tie_embeddings=tied)).double().eval()
    assert model.config.vocab_size == 16  # a multiple of 8
    assert not mismatch(state, model.state_dict())
    model.load_state_dict(state)
    model.tie_weights()
    exactly(model.config)
    tokens = torch.randint(13, (2, 5))
    out = model(tokens)
    assert not out.fixed_point.failed.any()
    assert_close(out.logits, oracle.logits_of(state, options, tokens), "logits")


def test_selectivedense_is_as_wide_as_theirs():
    description = {"cls": "FPRNN", "config": {"d_model": 64, "mixer_type": "selectivedense"}}
    config = reference_config(description)
    assert (config.mixer, config.d_inner) == ("selective_dense", 256)
    with torch.device("meta"):
        block = build_block(config)
        state = ours_of(paper.LAYERS["FPRNN"](
            {**paper.DEFAULTS, **description["config"]}).state_dict())  # fmt: skip
    assert not mismatch(state, block.state_dict())
