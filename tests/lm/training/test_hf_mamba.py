"""Mamba and Mamba-2 of transformers as sources: equal logits, and models that are refused."""

import pytest
import torch

from lm.runs.exported import LoadError
from lm.training.hf_mamba import read_folder
from lm.training.upcycle import SourceError
from tests.hf_models import draw_ids, make_our_model, save_as_bin, save_hf_mamba


@pytest.mark.parametrize(
    "kind, fields",
    [
        ("mamba", {}),
        ("mamba2", {"tie_word_embeddings": False}),
        ("mamba", {"expand": 4, "residual_in_fp32": False}),
    ],
)
@torch.no_grad()
def test_logits_equal_those_of_transformers(tmp_path, kind, fields):
    folder, model = save_hf_mamba(tmp_path, kind, **fields)
    source = read_folder(folder)
    assert source.config.tie_embeddings is fields.get("tie_word_embeddings", True)
    logits, expected = make_our_model(source)(draw_ids()).logits, model(draw_ids()).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    assert expected.std() > 0.5  # far above the tolerance


def overwrite(name, text):
    """Return a function that overwrites a file of a folder."""
    return lambda folder: (folder / name).write_text(text)


def add_other_head(folder):
    state = torch.load(folder / "pytorch_model.bin")
    state["lm_head.weight"] = torch.ones(24, 32)
    torch.save(state, folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    "damage, message",
    [
        (overwrite("config.json", "{"), "holds no model that init_from reads"),
        (overwrite("config.json", '{"model_type": "gpt2"}'), r"is gpt2\): it must be mamba or"),
        (lambda f: (f / "pytorch_model.bin").unlink(), "no file named model.safetensors"),
        (add_other_head, "ties lm_head.weight to backbone.embeddings.weight, but they differ"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path, damage, message):
    folder, _ = save_as_bin(tmp_path, "mamba")
    damage(folder)
    with pytest.raises((SourceError, LoadError), match=message):
        read_folder(folder)


@pytest.mark.parametrize(
    "kind, fields, message",
    [
        ("mamba2", {"n_groups": 2}, "n_groups is 2, not 1"),
        ("mamba2", {"time_step_limit": (0.0, 1.0)}, "time_step_limit is"),
        ("mamba2", {"norm_before_gate": True}, "norm_before_gate is True"),
        ("mamba2", {"rms_norm": False}, "rms_norm is False"),
        ("mamba", {"hidden_act": "gelu"}, "hidden_act is gelu, not silu"),
        ("mamba", {"use_bias": True}, "use_bias is True, not False"),
        ("mamba", {"use_conv_bias": False}, "use_conv_bias is False, not True"),
        ("mamba2", {"conv_kernel": 3}, "conv_kernel is 3, not 4"),
    ],
)
def test_models_that_our_layers_cannot_compute_are_refused(tmp_path, kind, fields, message):
    folder, _ = save_hf_mamba(tmp_path, kind, **fields)
    with pytest.raises(SourceError, match=message):
        read_folder(folder)
