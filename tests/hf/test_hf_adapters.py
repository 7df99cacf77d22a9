"""Tests with replaced, wrapped or hooked linear layers: LoRA, int8, offloading."""

import pytest
import torch
from torch import nn

from lm.model.layers import WNLinear
from tests.hf.models import BLOCKS, build, build_fp64, make_ids

every_block = pytest.mark.parametrize("name", BLOCKS)
IDS = make_ids(rows=1, length=5)
# Settings that together have every projection of a block.
VARIANTS = {
    "defaults": {},
    "dt reads y as well, convolutions": {"dt_h_dep": True, "use_short_conv": True},
    "kronecker": {"mixer": "kronecker"},
    "low rank dplr": {"mixer": "dplr", "mixer_rank": 2, "mixer_proj_rank": 3},
    "gate inside": {"glu_in_loop": True},
}


def list_variants():
    for block in BLOCKS:
        for variant, fields in VARIANTS.items():
            if block == "fp_rnn":  # it has neither field
                fields = {k: v for k, v in fields.items() if k != "dt_h_dep"}
                if variant == "gate inside":
                    continue
            marks = [pytest.mark.slow] if variant == "kronecker" else []
            yield pytest.param(block, fields, id=f"{block}, {variant}", marks=marks)


every_variant = pytest.mark.parametrize("block, fields", list_variants())


def build_far_from_bound(block, **fields):
    """Return a small fp64 model whose mixers are far from the bound of `contractive`.

    At the bound, the size of a reflection has no effect, so an adapter of it would have none.
    """
    model = build_fp64(block, **{"n_layer": 1, "tol": 1e-9, "eval_tol": 1e-9, **fields}).eval()
    for module in model.modules():
        if hasattr(module, "alpha_proj"):
            nn.init.constant_(module.alpha_proj.bias, -3.0)
    return model


def list_projections(model):
    """Return the names of the blocks' linear layers, without layer indices."""
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and ".block." in name
        }
    )


def add_lora(model, targets, scale=0.3):
    """Return the model in evaluation mode with nonzero LoRA on the targets."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=targets, init_lora_weights=False)
    torch.manual_seed(7)
    wrapped = peft.get_peft_model(model, config).double().eval()
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=scale)
    return wrapped


@every_variant
def test_lora_on_each_projection_acts_learns_and_merges(block, fields):
    names = list_projections(build_far_from_bound(block, **fields))
    assert len(names) >= 4
    for target in names:
        model = build_far_from_bound(block, **fields)
        plain = model(IDS).logits.detach()
        wrapped = add_lora(model, [target])
        assert sum("lora_A" in n for n, _ in wrapped.named_parameters()) == 1, target
        with torch.no_grad():
            logits = wrapped(input_ids=IDS).logits
        assert (logits - plain).abs().max() > 1e-6, f"{target}: the adapter has no effect"
        wrapped.train()(input_ids=IDS, labels=IDS).loss.backward()
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                assert parameter.grad.abs().sum() > 0, name
        merged = wrapped.eval().merge_and_unload()
        with torch.no_grad():
            torch.testing.assert_close(merged(IDS).logits, logits, rtol=1e-6, atol=1e-7, msg=target)


@every_block
def test_all_linear_targets_mixers_and_unloads_cleanly(name):
    model = build_far_from_bound(name).eval()
    plain, names = model(IDS).logits.detach(), list_projections(model)
    weight_norm_names = {
        n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, WNLinear)
    }
    assert weight_norm_names and weight_norm_names < set(names)
    wrapped = add_lora(model, "all-linear")
    adapted_names = {
        n.split(".lora_A")[0].rpartition(".")[2]
        for n, _ in wrapped.named_parameters()
        if "lora_A" in n
    }
    assert adapted_names == set(names)
    with torch.no_grad():
        assert (wrapped(input_ids=IDS).logits - plain).abs().max() > 1e-3
        with wrapped.disable_adapter():
            torch.testing.assert_close(wrapped(input_ids=IDS).logits, plain)
        torch.testing.assert_close(wrapped.unload()(IDS).logits, plain)


TRAINED_IDS = [3, 5, 7]  # token ids whose embeddings are trained
# Kind of training → class of its configuration in peft, and arguments.
TRAINED_TOKENS = {
    "trainable tokens": ("TrainableTokensConfig", dict(token_indices=TRAINED_IDS)),
    "lora": ("LoraConfig", dict(r=2, trainable_token_indices={"embeddings": TRAINED_IDS})),
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", TRAINED_TOKENS)
def test_trained_tokens_merge_without_changing_logits(kind, tied):
    peft = pytest.importorskip("peft")
    name, fields = TRAINED_TOKENS[kind]
    targets = ["embeddings" if kind == "trainable tokens" else "out_proj"]
    model = build_fp64("fp_mamba1", tie_embeddings=tied)
    plain = model.eval()(IDS).logits.detach()
    wrapped = peft.get_peft_model(model, getattr(peft, name)(target_modules=targets, **fields))
    wrapped = wrapped.double().train()
    tokens = torch.tensor([[*TRAINED_IDS, 9, 5, 3]])
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    with torch.no_grad():
        logits = wrapped.eval()(input_ids=tokens).logits
        merged = wrapped.merge_and_unload()
        torch.testing.assert_close(merged(tokens).logits, logits, rtol=1e-9, atol=1e-9)
        assert (merged(IDS).logits - plain).abs().max() > 1e-3, "nothing was learned"
    head, embedding = merged.get_output_embeddings(), merged.get_input_embeddings()
    assert (head.weight is embedding.weight) == tied


@every_block
@pytest.mark.parametrize("variant", [{}, {"use_short_conv": True}], ids=["plain", "conv"])
def test_int8_by_bitsandbytes_is_close(name, variant, tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    # A low tolerance: otherwise rounding to int8 may lead to another solution.
    low_tolerance = {"schedule": "sequential", "eval_tol": 1e-6, "contractive": 0.2}
    model = build(name, tie_embeddings=False, d_model=32, **low_tolerance, **variant).eval()
    # With a head larger than the initial one, the loss depends more on the layers.
    nn.init.normal_(model.lm_head.weight, generator=torch.Generator().manual_seed(3))
    model.save_pretrained(tmp_path)
    quantised = type(model).from_pretrained(
        tmp_path, quantization_config=BitsAndBytesConfig(load_in_8bit=True)
    )
    kinds = {type(m).__name__ for n, m in quantised.named_modules() if n.endswith("out_proj")}
    assert kinds == {"Linear8bitLt"}
    with torch.no_grad():
        tokens = make_ids(rows=4, length=12)
        expected, out = (m(tokens, labels=tokens) for m in (model, quantised))
    assert out.loss.item() == pytest.approx(expected.loss.item(), rel=0.02)
    relative_error = (out.logits - expected.logits).norm() / expected.logits.norm()
    assert 0 < relative_error < 0.1, relative_error


@every_block
@pytest.mark.parametrize("place", ["cpu", "disk", "disk, layer by layer"])
@torch.no_grad()
def test_offloaded_weights_are_loaded_when_needed(name, place, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = build_far_from_bound(name, use_short_conv=True, n_layer=3)
    expected = model(IDS).logits
    if place == "cpu":
        model = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    elif place == "disk":
        model = accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    else:
        parts = ("backbone.embeddings", "backbone.layers.0", "backbone.norm_f", "lm_head")
        places = {**dict.fromkeys(parts, "cpu"), "backbone.layers.1": "disk"}
        places["backbone.layers.2"] = "disk"
        model = accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path)
    offloaded = {n for n, p in model.named_parameters() if p.device.type == "meta"}
    assert len(offloaded) > 10
    for _ in range(2):
        torch.testing.assert_close(model(IDS).logits, expected)
    assert {n for n, p in model.named_parameters() if p.device.type == "meta"} == offloaded
    assert model.generate(IDS, max_new_tokens=1, pad_token_id=0).shape[1] == 6
