"""Public behaviour that transformers' ModelTesterMixin and ConfigTester check for every model."""

import copy
import inspect

import pytest
import torch
from safetensors.torch import load_file

from lm.model.configuration_fprnn import FPRNNConfig
from tests.hf.models import BLOCKS, EOS, VOCAB, build, build_fp64, every_model, few_models, make_ids


def make_ids_with_eos(rows=2, length=9):
    ids = make_ids(rows, length)
    ids[0, 3] = EOS
    return ids


def list_tensors(output):
    """Return the tensors in nested lists, tuples and dicts, as transformers' tests do."""
    if isinstance(output, list | tuple):
        return [leaf for part in output for leaf in list_tensors(part)]
    if isinstance(output, dict):
        return [leaf for part in output.values() for leaf in list_tensors(part)]
    return [output] if isinstance(output, torch.Tensor) else []


# Outputs


@few_models
@pytest.mark.parametrize("base", [False, True], ids=["head", "base"])
def test_tuple_and_dict_outputs_hold_the_same(name, base):
    model = build(name).eval().base_model if base else build(name).eval()
    arguments = [{}, {"output_hidden_states": True}]
    if not base:
        arguments.append({"labels": make_ids()})
    for kwargs in arguments:
        with torch.no_grad():
            as_tuple = model(make_ids(), return_dict=False, **kwargs)
            as_dict = model(make_ids(), return_dict=True, **kwargs)
        assert isinstance(as_tuple, tuple)
        pairs = list(zip(list_tensors(as_tuple), list_tensors(as_dict.to_tuple()), strict=True))
        assert len(pairs) >= 1 + len(kwargs)
        for from_tuple, from_dict in pairs:
            assert from_tuple.is_floating_point() and torch.equal(from_tuple, from_dict)


@every_model
def test_hidden_states_are_layer_inputs_and_the_last(name):
    model = build(name)
    assert next(iter(inspect.signature(model.forward).parameters)) == "input_ids"
    output = model(make_ids(), output_hidden_states=True)
    assert isinstance(output.hidden_states, tuple)
    assert [h.shape for h in output.hidden_states] == [(2, 9, 16)] * (model.config.n_layer + 1)
    torch.testing.assert_close(output.hidden_states[0], model.get_input_embeddings()(make_ids()))
    torch.testing.assert_close(model.lm_head(output.hidden_states[-1]).float(), output.logits)
    for h in output.hidden_states[:-1]:
        h.retain_grad()
    output.logits.flatten()[0].backward(retain_graph=True)
    output.logits.flatten()[1].backward()
    assert all(h.grad.abs().sum() > 0 for h in output.hidden_states[:-1])


@every_model
@torch.no_grad()
def test_output_is_the_same_twice_and_in_any_batch(name):
    model, x = build_fp64(name).eval(), make_ids(3)
    first, second = (model(x, output_hidden_states=True) for _ in range(2))
    for a, b in zip(list_tensors(first), list_tensors(second), strict=True):
        assert torch.equal(a, b)
    for row in range(3):
        row_output = model(x[row : row + 1], output_hidden_states=True)
        for a, b in zip(list_tensors(first), list_tensors(row_output), strict=True):
            torch.testing.assert_close(a[row : row + 1], b, rtol=1e-7, atol=1e-8)


@few_models
@torch.no_grad()
def test_embeddings_give_the_same_as_their_ids(name):
    model, x = build_fp64(name).eval(), make_ids_with_eos()
    embeds = model.get_input_embeddings()(x)
    for part in (model, model.base_model):
        by_ids, by_embeds = part(x)[0], part(inputs_embeds=embeds)[0]
        torch.testing.assert_close(by_embeds, by_ids, rtol=1e-9, atol=1e-9)


# Training


@every_model
def test_every_parameter_learns(name):
    model = build(name, **({"use_short_conv": True} if name in BLOCKS else {})).train()
    loss = model(make_ids(), labels=make_ids(seed=1)).loss
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), key
    assert sum(p.grad.abs().sum() > 0 for p in model.parameters()) > 8


@every_model
def test_initialization_sets_every_weight_from_the_seed(name):
    """Also for a model on the meta device, as from_pretrained creates it."""
    model = build(name)
    assert all(p.isfinite().all() and p.abs().max() <= 8 for p in model.parameters())
    for key, tensor in build(name).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[key]), key
    assert any(
        not torch.equal(a, b) for a, b in zip(model.parameters(), build(name, 1).parameters())
    )
    with torch.device("meta"):
        empty = type(model)(model.config)
    empty.to_empty(device="cpu")
    for tensor in (*empty.parameters(), *empty.buffers()):
        tensor.data.fill_(float("nan"))
    for module in empty.modules():
        module._is_hf_initialized = False
    empty.initialize_weights()
    empty.tie_weights()
    assert all(t.isfinite().all() for t in empty.state_dict().values())


# Embeddings


@few_models
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_vocabulary_can_be_resized(name, tied):
    model = build(name, tie_embeddings=tied).eval()
    before = model.get_input_embeddings().weight.detach().clone()
    for size in (VOCAB + 10, VOCAB - 15):
        resized = copy.deepcopy(model)
        resized.resize_token_embeddings(size)
        embedding, head = resized.get_input_embeddings(), resized.get_output_embeddings()
        assert resized.config.vocab_size == size == embedding.num_embeddings
        assert head.weight.shape[0] == size and (head.weight is embedding.weight) == tied
        kept_count = min(size, VOCAB)
        assert torch.equal(embedding.weight[:kept_count], before[:kept_count])
        out = resized(make_ids().clamp(max=size - 1), labels=make_ids().clamp(max=size - 1))
        assert out.logits.shape == (2, 9, size) and out.loss.isfinite()


# Saving and loading


@few_models
def test_base_model_loads_from_language_model_and_back(name, tmp_path):
    model = build(name, tie_embeddings=False).eval()
    model.save_pretrained(tmp_path / "whole")
    base = type(model.base_model)
    loaded, info = base.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(loaded.eval()(make_ids())[0], model.base_model(make_ids())[0])
    loaded.save_pretrained(tmp_path / "base")
    reloaded, info = type(model).from_pretrained(tmp_path / "base", output_loading_info=True)
    assert info["missing_keys"] == {"lm_head.weight"}
    assert torch.equal(reloaded.eval().base_model(make_ids())[0], model.base_model(make_ids())[0])


@few_models
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_weight_file_is_complete_and_loads_exactly(name, tied, tmp_path):
    model = build(name, tie_embeddings=tied).eval()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in saved) != tied
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied
    assert torch.equal(loaded.eval()(make_ids()).logits, model(make_ids()).logits)
    torch.save(model, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert torch.equal(whole(make_ids()).logits, model(make_ids()).logits)
    assert torch.equal(copy.deepcopy(model)(make_ids()).logits, model(make_ids()).logits)


@every_model
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_fp32_parameters(name, dtype, tmp_path):
    build(name).save_pretrained(tmp_path)
    for kind in (type(build(name)), type(build(name).base_model)):
        model = kind.from_pretrained(tmp_path, dtype=dtype)
        fp32_names = model._keep_in_fp32_modules_strict
        for key, parameter in model.named_parameters():
            expected = torch.float32 if any(f".{w}" in f".{key}" for w in fp32_names) else dtype
            assert parameter.dtype == expected, key
        keys = list(model.state_dict())
        assert all(any(key.endswith(f".{w}") for key in keys) for w in fp32_names), fp32_names
        if dtype == torch.bfloat16:
            assert model.eval()(make_ids())[0].isfinite().all()
    assert set(fp32_names) == {
        "fp_mamba1": {"A_log", "D", "dt_proj.bias"},
        "fp_mamba2": {"A_log", "D", "dt_bias"},
        "mamba": {"A_log", "D", "dt_proj.bias"},
        "mamba2": {"A_log", "D", "dt_bias"},
        "mamba3": {"D", "dt_bias"},
        "m2rnn": {"A_log", "D", "dt_bias"},
        "gated_deltanet": {"A_log", "dt_bias"},
        "kda": {"A_log", "dt_bias"},
    }.get(name, set())


# Configurations

SETTINGS = {"return_dict": False, "output_hidden_states": True, "num_labels": 5, "use_cache": False}


@pytest.mark.parametrize("block", BLOCKS)
def test_config_has_common_names_and_reloads(block, tmp_path, capfd):
    config = FPRNNConfig(block=block, d_model=32, vocab_size=99, eos_token_id=7, **SETTINGS)
    assert (config.hidden_size, config.vocab_size) == (32, 99)
    config.hidden_size, config.num_hidden_layers = 64, 3
    assert (config.d_model, config.n_layer) == (64, 3)
    assert {name: getattr(config, name) for name in SETTINGS} == SETTINGS
    config.save_pretrained(tmp_path)
    assert FPRNNConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()
    changed = FPRNNConfig.from_pretrained(tmp_path, vocab_size=20)
    assert changed.to_dict() == {**config.to_dict(), "vocab_size": 20}
    assert FPRNNConfig().use_cache and not capfd.readouterr().err
