"""Short forms of `model.name`: what they stand for, learning, export, and what is refused."""

import json
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM

from lm.config.model import Model
from lm.config.schema import Config
from lm.export.export import write_export
from lm.model.fields import STACKS
from lm.training.build import build_model, stacked
from lm.training.foreign import as_transformers

SIZES = {"d_model": 32, "n_layer": 2, "d_state": 8, "headdim": 16, "d_ff": 48}


def build(name, eos=0, **fields):
    torch.manual_seed(0)
    return build_model(Config(model={"name": name, **SIZES, **fields}), 24, eos, 1)


def ids():
    return torch.randint(2, 24, (4, 17), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_every_name_stands_for_a_pattern_that_learns():
    names = set(Model.model_fields["name"].annotation.__args__) - {"fprnn"}
    assert names == STACKS.keys()
    for name, pattern in STACKS.items():
        model = build(name).train()
        kinds = [layer.kind for layer in model.config.layer_list()]
        assert kinds == 2 * pattern.split() and not model.config.reset_at_eos
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        losses = []
        for _ in range(20):
            loss = model(input_ids=ids(), labels=ids()).loss
            optimizer.zero_grad()
            loss.backward()
            assert all(p.grad.isfinite().all() for p in model.parameters())
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0], (name, losses)


def test_fields_reach_the_layers():
    block = build("gated_deltaproduct", n_heads=4, expand=1).backbone.layers[2].block
    assert (block.heads, block.steps, block.v_proj.out_features) == (4, 2, 64)
    assert build("mamba2", n_heads=8).backbone.layers[0].block.heads == 8
    assert build("mamba2", headdim=128).backbone.layers[0].block.heads == 1  # 64 channels
    section = Model(name="fprnn", layers="mamba")
    assert stacked(section) is section


@pytest.mark.parametrize(
    "kind, fields", [("mamba", {}), ("mamba2", {}), ("mamba", {"tie_embeddings": False})]
)
def test_a_stack_of_mamba_is_exported_as_transformers_own(kind, fields, tmp_path):
    model = build(kind, **fields).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    write_export(as_transformers(model), tmp_path / "hf", None, kind, "")
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == kind
    assert not list((tmp_path / "hf").glob("*.py"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        found, expected = theirs(input_ids=ids()).logits, model(input_ids=ids()).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name, fields",
    [
        ("transformer", {}),
        ("mamba2", {"ngroups": 2}),
        ("fprnn", {"layers": "mamba"}),  # whose documents begin from an empty state
        ("fprnn", {"layers": [{"mamba": {"expand": 1}}, "mamba"]}),
    ],
)
def test_what_transformers_cannot_compute_stays_ours(name, fields):
    model = build(name, **fields)
    assert as_transformers(model) is model
