"""`bias` (on in_proj and out_proj) and `rms_norm: false` (LayerNorm in the residual stream)."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from lm.export.export import write_export
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.state import FPRNNCache, Sequences
from lm.training.optim import decays

EOS = 0
BLOCKS = pytest.mark.parametrize("block", ["fp_mamba1", "fp_mamba2", "fp_rnn"])
CONV = pytest.mark.parametrize("conv", [False, True], ids=["plain", "conv"])


def model_with(block="fp_mamba1", conv=False, **changes):
    """A small model in fp64 with both options, all biases and norms away from where they start."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=30, d_model=8, n_layer=2, d_state=4, headdim=4, eos_token_id=EOS)
    solver = dict(contractive=0.3, out_norm_epsilon=1.0, tol=1e-12, eval_tol=1e-12, max_iters=300)
    options = dict(block=block, use_short_conv=conv, bias=True, rms_norm=False)
    model = FPRNNForCausalLM(FPRNNConfig(**{**sizes, **solver, **options, **changes}))
    model = model.double().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            *_, owner, leaf = name.split(".")
            if leaf == "bias" and owner != "dt_proj":
                p.normal_()
            if owner in ("norm", "norm_f") and leaf == "weight":
                p.uniform_(0.5, 1.5)
            if name.endswith("bc_y_proj.gain"):
                p.mul_(0.1)
    return model


def tokens(length=9, batch=2):
    return torch.randint(1, 30, (batch, length), generator=torch.Generator().manual_seed(1))


def solved(output):
    assert (output.fixed_point.failed == 0).all()
    return output.logits


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-8)


@BLOCKS
@CONV
@pytest.mark.parametrize("pad", [(3, 0), (0, 3), (2, 3)], ids=["left", "right", "both"])
@torch.no_grad()
def test_padding_changes_nothing(block, conv, pad):
    """A padded position is not zero after a projection with a bias; it must be made so."""
    model, x = model_with(block, conv), tokens()
    mask = F.pad(torch.ones_like(x), pad)
    padded = model(F.pad(x, pad, value=7), attention_mask=mask).logits
    assert_same(padded[mask.bool()], solved(model(x)).flatten(0, 1))


@BLOCKS
@CONV
@pytest.mark.parametrize("pad", [(3, 0), (0, 3)], ids=["left", "right"])
@torch.no_grad()
def test_padding_changes_nothing_in_a_block_alone(block, conv, pad):
    """The model puts padding behind the tokens before its blocks see it; they need not trust it."""
    block = model_with(block, conv).backbone.layers[0].block
    hidden = torch.randn(2, 9, 8, dtype=torch.float64)
    mask = F.pad(torch.ones(2, 9), pad).bool()
    padded, _ = block(F.pad(hidden, (0, 0, *pad), value=0.7), Sequences(mask))
    assert_same(padded[mask], block(hidden)[0].flatten(0, 1))


@BLOCKS
@CONV
@torch.no_grad()
def test_a_batch_of_several_lengths_equals_each_row_alone(block, conv):
    model, x = model_with(block, conv), tokens(batch=3)
    mask = torch.tensor([[0] * 4 + [1] * 5, [1] * 6 + [0] * 3, [1] * 9])
    together = model(x, attention_mask=mask).logits
    for row, seen, logits in zip(x, mask.bool(), together):
        assert_same(logits[seen], solved(model(row[seen][None]))[0])


@BLOCKS
@CONV
@torch.no_grad()
def test_packed_documents_equal_each_alone(block, conv):
    model, first, second = model_with(block, conv), tokens(5), tokens(6)
    packed = torch.cat([first, torch.full((2, 1), EOS), second], 1)
    assert_same(solved(model(packed))[:, 6:], solved(model(second)))
    mask = torch.ones_like(packed)
    padded = model(F.pad(packed, (2, 0), value=EOS), attention_mask=F.pad(mask, (2, 0))).logits
    assert_same(padded[:, 2:], solved(model(packed)))


@BLOCKS
@CONV
@pytest.mark.parametrize("sizes", [(1,) * 9, (4, 5)], ids=["by one", "chunks"])
@torch.no_grad()
def test_cached_decoding_equals_the_forward_pass(block, conv, sizes):
    model, x = model_with(block, conv), tokens()
    whole, cache, mask = solved(model(x)), FPRNNCache(), F.pad(torch.ones_like(x), (2, 0))
    parts = [model(c, past_key_values=cache, use_cache=True).logits for c in x.split(sizes, 1)]
    assert_same(torch.cat(parts, 1), whole)
    cache, first = FPRNNCache(), F.pad(x[:, :4], (2, 0))  # a prompt padded on the left
    start = model(first, attention_mask=mask[:, :6], past_key_values=cache, use_cache=True).logits
    rest = model(x[:, 4:], attention_mask=mask, past_key_values=cache, use_cache=True).logits
    assert_same(torch.cat([start[:, 2:], rest], 1), whole)


@BLOCKS
def test_each_option_adds_its_parameters_and_no_others(block):
    def names(**options):
        config = FPRNNConfig(vocab_size=9, d_model=8, n_layer=1, headdim=4, block=block, **options)
        return {name for name, _ in FPRNNForCausalLM(config).named_parameters()}

    plain, layer = names(), "backbone.layers.0."
    assert names(rms_norm=False) - plain == {layer + "norm.bias", "backbone.norm_f.bias"}
    ends = {layer + "block.in_proj.bias", layer + "block.out_proj.bias"}
    assert names(bias=True) - plain == ends
    assert not plain - names(rms_norm=False, bias=True)


@BLOCKS
@torch.no_grad()
def test_every_bias_acts_and_the_block_is_affine_in_that_of_out_proj(block):
    model, x = model_with(block), tokens()
    hidden = model.backbone.embeddings(x)
    block = model.backbone.layers[0].block
    before = block(hidden)[0]
    block.out_proj.bias += 2
    assert_same(block(hidden)[0], before + 2)
    block.in_proj.bias.zero_()
    assert (block(hidden)[0] - before - 2).abs().max() > 1e-3


@torch.no_grad()
def test_the_residual_stream_is_normalised_as_layer_norm_does():
    model, x = model_with(norm_epsilon=1e-3), tokens()
    seen = []
    hook = model.backbone.layers[1].block.register_forward_pre_hook(
        lambda _, args: seen.append(args[0])
    )
    out = model(x, output_hidden_states=True)
    hook.remove()

    def layer_norm(norm, v):
        centred = v - v.mean(-1, keepdim=True)
        unit = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()
        return unit * norm.weight + norm.bias

    stream = out.hidden_states[1]  # what enters the second layer
    assert_same(seen[0], layer_norm(model.backbone.layers[1].norm, stream))
    last = stream + model.backbone.layers[1].block(seen[0])[0]
    assert_same(out.logits, F.linear(layer_norm(model.backbone.norm_f, last), model.lm_head.weight))


@torch.no_grad()
def test_bf16_weights_on_an_fp32_residual_stream():
    model, x = model_with(tol=1e-2, eval_tol=1e-2, max_iters=20), tokens()
    exact = model.float()(x).logits
    logits = model.bfloat16()(x).logits
    assert logits.dtype == torch.float32 and (logits - exact).abs().max() < 0.1 * exact.abs().max()


def test_initialisation_and_weight_decay():
    config = FPRNNConfig(
        vocab_size=9, d_model=8, n_layer=1, block="fp_rnn", bias=True, rms_norm=False
    )
    named = dict(FPRNNForCausalLM(config).named_parameters())
    fresh = {
        "backbone.layers.0.norm.weight": 1, "backbone.layers.0.norm.bias": 0,
        "backbone.norm_f.weight": 1, "backbone.norm_f.bias": 0,
        "backbone.layers.0.block.in_proj.bias": 0, "backbone.layers.0.block.out_proj.bias": 0,
    }  # fmt: skip
    for name, value in fresh.items():
        assert (named[name] == value).all(), name
        assert not decays(name), name


def test_gradients_reach_every_new_parameter():
    model, x = model_with().train(), tokens()
    model(x, labels=x).loss.backward()
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert p.grad.abs().max() > 0, name


ELSEWHERE = """
import importlib.util, json, sys, torch
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in str(f)]  # no installed lm
assert importlib.util.find_spec("lm") is None
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).double().eval()
assert type(model).__module__.startswith("transformers_modules")
x = torch.tensor(json.loads(sys.argv[2]))
print(json.dumps([model.config.bias, model.config.rms_norm, model(x).logits.flatten().tolist()]))
"""


def test_both_travel_with_the_export(tmp_path):
    model, x = model_with().float(), tokens(batch=1)
    write_export(model, tmp_path / "hf", None, "options", "A test.")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env.update(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "home"), OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, "-P", "-c", ELSEWHERE, str(tmp_path / "hf"), json.dumps(x.tolist())],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    bias, rms_norm, logits = json.loads(done.stdout.splitlines()[-1])
    assert bias and not rms_norm
    with torch.no_grad():
        assert_same(torch.tensor(logits).double(), model.double()(x).logits.flatten())
