"""Mambas of transformers in our terms: equal logits, and what is refused."""

import pytest
import torch

from lm.runs.exported import LoadError
from lm.training.foreign import SourceError, read_folder
from tests.foreign import binary_folder, ids_of, ours_of, theirs, transformers_folder

FORMATS = {"safetensors": transformers_folder, "bin": binary_folder}


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
@pytest.mark.parametrize("form", FORMATS)
@torch.no_grad()
def test_a_source_has_their_logits(tmp_path, form, kind):
    folder, model = FORMATS[form](tmp_path / "there", kind)
    expected = model(ids_of()).logits
    found = ours_of(read_folder(folder))(ids_of()).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert expected.std() > 0.5


@pytest.mark.parametrize(
    "kind, fields",
    [
        ("mamba", {"use_conv_bias": False, "tie_word_embeddings": False}),
        ("mamba2", {"use_conv_bias": False, "tie_word_embeddings": False}),
        ("mamba", {"expand": 4, "residual_in_fp32": False}),
    ],
)
@torch.no_grad()
def test_biases_and_heads_of_their_own_are_kept(tmp_path, kind, fields):
    folder, model = transformers_folder(tmp_path, kind, **fields)
    source = read_folder(folder)
    assert source.config.tie_embeddings is fields.get("tie_word_embeddings", True)
    found, expected = ours_of(source)(ids_of()).logits, model(ids_of()).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_several_files_and_half_precision_are_read(tmp_path):
    model = theirs("mamba").half()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    for shapes_only in (False, True):
        found = read_folder(tmp_path, shapes_only).weights
        assert {t.device.type for t in found.values()} == {"meta" if shapes_only else "cpu"}
        assert len(found) == 22
    found = read_folder(tmp_path).weights["backbone.layers.1.block.in_proj.weight"]
    there = model.state_dict()["backbone.layers.1.mixer.in_proj.weight"]
    assert found.dtype == torch.float32 and torch.equal(found, there.float())


def change_weights(change):
    """A damage of the weights: change(state)."""

    def damage(folder):
        state = torch.load(folder / "pytorch_model.bin")
        change(state)
        torch.save(state, folder / "pytorch_model.bin")

    return damage


def rewrite(name, text):
    return lambda folder: (folder / name).write_text(text)


A_LOG = "backbone.layers.1.mixer.A_log"


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda f: (f / "config.json").unlink(), "holds no model known here"),
        (rewrite("config.json", "{"), "holds no model known here"),
        (rewrite("config.json", '{"model_type": "gpt2"}'), "is gpt2.: it must be mamba or"),
        (rewrite("pytorch_model.bin", "nothing"), r"pytorch_model.bin is not read: it is a pickle"),
        (lambda f: (f / "pytorch_model.bin").unlink(), "no file named model.safetensors"),
        (
            change_weights(lambda s: s[A_LOG].fill_(float("nan"))),
            f"1 weight NaN or infinite .{A_LOG}",
        ),
        (
            change_weights(lambda s: s.update({"lm_head.weight": torch.ones(24, 32)})),
            "says that the head is the embedding, but lm_head.weight is not",
        ),
    ],
)
def test_a_damaged_folder_is_a_sentence(tmp_path, damage, said):
    folder, _ = binary_folder(tmp_path, "mamba")
    damage(folder)
    with pytest.raises((SourceError, LoadError), match=said):
        read_folder(folder)


@pytest.mark.parametrize(
    "kind, fields, said",
    [
        ("mamba2", {"n_groups": 2}, "2 groups of B and C"),
        ("mamba2", {"time_step_limit": (0.0, 1.0)}, "clamped to"),
        ("mamba2", {"norm_before_gate": True}, "norms before the gate"),
        ("mamba2", {"rms_norm": False}, "no gated norm"),
        ("mamba", {"hidden_act": "gelu"}, "hidden_act is gelu, ours is silu"),
        ("mamba", {"use_bias": True}, "use_bias is True, ours is False"),
        ("mamba2", {"conv_kernel": 3}, "conv_kernel is 3, ours is 4"),
    ],
)
def test_what_our_layers_cannot_be_of_transformers(tmp_path, kind, fields, said):
    folder, _ = transformers_folder(tmp_path, kind, **fields)
    with pytest.raises(SourceError, match=said):
        read_folder(folder)
