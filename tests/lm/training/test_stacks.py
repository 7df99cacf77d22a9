"""Short forms of `model.name`: their layers, and that they learn."""

import pytest
import torch

from lm.config.model import Model
from lm.config.schema import Config
from lm.model.fields import STACKS
from lm.training.build import build_model, expand_stack

SIZES = {"d_model": 32, "n_layer": 2, "d_state": 8, "headdim": 16, "d_ff": 48}


def build(name, **fields):
    torch.manual_seed(0)
    cfg = Config(model={"name": name, **SIZES, **fields})
    return build_model(cfg, vocab_size=24, eos_token_id=0, pad_token_id=1)


def draw_ids():
    """Return 4 sequences of 17 tokens without EOS and padding."""
    return torch.randint(2, 24, (4, 17), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_every_short_name_builds_a_model_that_learns():
    names = set(Model.model_fields["name"].annotation.__args__) - {"fprnn"}
    assert names == STACKS.keys()
    for name, pattern in STACKS.items():
        model = build(name).train()
        kinds = [layer.kind for layer in model.config.layer_list()]
        assert kinds == 2 * pattern.split() and not model.config.reset_at_eos
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        losses = []
        for _ in range(20):
            loss = model(input_ids=draw_ids(), labels=draw_ids()).loss
            optimizer.zero_grad()
            loss.backward()
            assert all(p.grad.isfinite().all() for p in model.parameters())
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0], (name, losses)


def test_fields_reach_the_layers():
    # Layer 1 is an MLP. DeltaProduct has 2 steps per token by default, and a value for each.
    block = build("gated_deltaproduct", n_heads=4, expand=1).backbone.layers[2].block
    assert (block.heads, block.steps, block.v_proj.out_features) == (4, 2, 2 * 32)
    assert build("mamba2", n_heads=8).backbone.layers[0].block.heads == 8
    # The layer has expand · d_model = 64 channels, which fit into one head.
    assert build("mamba2", headdim=128).backbone.layers[0].block.heads == 1
    section = Model(name="fprnn", layers="mamba")
    assert expand_stack(section) is section
