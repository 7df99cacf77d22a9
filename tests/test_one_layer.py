"""FixedPointLayer in other models: docs/one-layer.md, the layers of our models, padding."""

import re

import pytest
import torch

import fprnn
from lm.model.modeling_fprnn import FPRNNModel
from tests.hf.models import fprnn_config
from tests.running import ROOT

SOLVED = dict(d_state=4, contractive=0.2, schedule="sequential", eval_tol=1e-10, tol=1e-10)


def make_layer(**fields):
    torch.manual_seed(0)
    return fprnn.FixedPointLayer(16, **{**SOLVED, **fields}).double().eval()


@pytest.fixture
def x():
    return torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.slow
def test_page_runs_and_its_model_learns(capsys):
    text = (ROOT / "docs/one-layer.md").read_text(encoding="utf-8")
    page: dict = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.S)), page)
    assert page["x"].shape == page["y"].shape
    assert all(p.grad.abs().sum() > 0 for p in page["layer"].parameters())
    assert page["loss"] < 0.1 and capsys.readouterr().out == f"loss {page['loss']:.3f}\n"


@pytest.mark.parametrize("block", ["fp_mamba1", "fp_mamba2", "fp_rnn"])
@torch.no_grad()
def test_layer_equals_a_layer_of_the_model(block, x):
    torch.manual_seed(0)
    model = FPRNNModel(fprnn_config(block, **SOLVED, n_layer=1)).double().eval()
    layer = make_layer(block=block, headdim=8)
    layer.block.load_state_dict(model.layers[0].block.state_dict())
    normed = model.layers[0].norm(x)
    expected = model(inputs_embeds=x, output_hidden_states=True).last_hidden_state
    torch.testing.assert_close(model.norm_f(x + layer(normed)), expected)


def test_initialization_matches_a_layer_of_a_model():
    fields = dict(d_model=64, d_state=4, n_layer=1)
    torch.manual_seed(0)
    expected = FPRNNModel(fprnn_config("fp_mamba1", **fields)).layers[0].block.state_dict()
    state = fprnn.FixedPointLayer(**fields).block.state_dict()
    assert state.keys() == expected.keys() and torch.equal(state["A_log"], expected["A_log"])
    for name in (name for name, p in expected.items() if p.numel() >= 64):
        std, mean = expected[name].std().item(), expected[name].mean().item()
        assert state[name].std().item() == pytest.approx(std, rel=0.3, abs=1e-6), name
        assert state[name].mean().item() == pytest.approx(mean, abs=0.3 * std + 1e-6), name


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_layer_ignores_padding_and_is_causal(side, x):
    layer = make_layer(use_short_conv=True)
    mask = torch.ones(3, 7)
    padding = slice(0, 3) if side == "left" else slice(4, 7)
    mask[1, padding] = 0
    tokens = mask[1] != 0
    unpadded = layer(x[1:2, tokens])
    torch.testing.assert_close(layer(x, mask)[1, tokens], unpadded[0])
    changed = x.clone()
    changed[:, 5:] += 1
    output, changed_output = layer(x), layer(changed)
    torch.testing.assert_close(changed_output[:, :5], output[:, :5])
    assert (changed_output[:, 5:] - output[:, 5:]).abs().min() > 0


def test_invalid_fields_and_shapes_are_refused(x):
    with pytest.raises(ValueError, match="does not know the field d_sate"):
        fprnn.FixedPointLayer(16, d_sate=4)
    with pytest.raises(ValueError, match="mixer"):
        fprnn.FixedPointLayer(16, mixer="nope")
    with pytest.raises(ValueError, match=r"must be \(batch, length, 16\)"):
        make_layer()(x[..., :8])
    with pytest.raises(ValueError, match="attention_mask has shape"):
        make_layer()(x, torch.ones(3, 6))
    with pytest.raises(AttributeError, match="no attribute 'FixedPointLayr'"):
        _ = fprnn.FixedPointLayr
