"""Mambas of transformers in our terms: equal logits, and what is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from lm.cli.importing import import_mamba
from lm.runs.exported import load_model, load_tokenizer
from lm.training.foreign import SourceError, read_folder
from tests import oracle_mamba
from tests.foreign import SIZES, binary_folder, ids_of, theirs, transformers_folder
from tests.refusals import refused

FORMATS = {"safetensors": transformers_folder, "bin": binary_folder}


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
@pytest.mark.parametrize("form", FORMATS)
def test_an_import_has_their_logits(tmp_path, form, kind):
    """In fp64 those of the papers' equations, in fp32 those of transformers."""
    folder, state = FORMATS[form](tmp_path / "there", kind)
    ours = load_model(import_mamba(folder, tmp_path / "ours"))
    with torch.no_grad():
        torch.testing.assert_close(
            ours(ids_of()).logits, theirs(kind)(ids_of()).logits, atol=1e-5, rtol=0
        )
        expected = oracle_mamba.logits(state, ids_of(), kind, **SIZES[kind])
        found = ours.double()(ids_of()).logits
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    assert expected.std() > 0.5


@pytest.mark.parametrize(
    "kind, fields",
    [
        ("mamba", {"use_conv_bias": False, "tie_word_embeddings": False}),
        ("mamba2", {"use_conv_bias": False, "tie_word_embeddings": False}),
        ("mamba", {"expand": 4, "residual_in_fp32": False}),
    ],
)
def test_biases_and_heads_of_their_own_are_kept(tmp_path, kind, fields):
    folder, state = transformers_folder(tmp_path, kind, **fields)
    source = read_folder(folder)
    assert source.config.tie_embeddings is fields.get("tie_word_embeddings", True)
    ours = load_model(import_mamba(folder, tmp_path / "ours")).double()
    expected = oracle_mamba.logits(state, ids_of(), kind, **SIZES[kind])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids_of()).logits, expected, atol=1e-10, rtol=0)


def test_several_files_and_half_precision_are_read(tmp_path):
    folder, _ = transformers_folder(tmp_path / "whole", "mamba")
    whole = load_file(folder / "model.safetensors")
    cut, names = tmp_path / "cut", sorted(whole)
    cut.mkdir()
    shutil.copy(folder / "config.json", cut)
    places = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        part = {name: whole[name].half() for name in names if places[name] == file}
        save_file(part, cut / file)
    (cut / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for shapes_only in (False, True):
        found = read_folder(cut, shapes_only).weights
        assert {t.device.type for t in found.values()} == {"meta" if shapes_only else "cpu"}
        assert len(found) == len(whole)
    found = read_folder(cut).weights["backbone.layers.1.block.in_proj.weight"]
    there = whole["backbone.layers.1.mixer.in_proj.weight"]
    assert found.dtype == torch.float32 and torch.equal(found, there.half().float())


def test_the_tokenizer_comes_along_and_nothing_else(tmp_path, byte_tokenizer, capsys):
    from lm.cli.main import main

    folder, _ = transformers_folder(tmp_path / "there", "mamba", vocab_size=264)
    shutil.copytree(byte_tokenizer, folder, dirs_exist_ok=True)
    (folder / "optimizer.pt").write_text("large")
    assert main(["import", str(folder), str(tmp_path / "ours")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "ours")
    assert len(load_tokenizer(tmp_path / "ours")) == 257
    assert not (tmp_path / "ours/optimizer.pt").exists()
    config = json.loads((tmp_path / "ours/config.json").read_text())
    assert config["layers"] == "mamba" and config["reset_at_eos"] is False


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
        (lambda f: (f / "config.json").unlink(), "has no config.json: it holds no model"),
        (rewrite("config.json", "{"), "config.json is damaged: it is not JSON"),
        (rewrite("config.json", "[]"), "must hold a mapping"),
        (rewrite("config.json", '{"model_type": "gpt2"}'), "describes a gpt2: it must be mamba or"),
        (rewrite("config.json", "{}"), "describes no model known here"),
        (rewrite("pytorch_model.bin", "nothing"), r"pytorch_model.bin is not read: it is a pickle"),
        (lambda f: (f / "pytorch_model.bin").unlink(), "holds no weights: neither model.safe"),
        (change_weights(lambda s: s.pop(A_LOG)), "1 missing: backbone.layers.1.block.A_log$"),
        (
            change_weights(lambda s: s.update(extra=torch.ones(2), more=torch.ones(1))),
            "2 extra: extra, more$",
        ),
        (
            change_weights(lambda s: s.update({A_LOG: torch.ones(64, 5)})),
            r"1 of another shape: backbone.layers.1.block.A_log \[64, 5\], not \[64, 4\]$",
        ),
        (
            change_weights(lambda s: s[A_LOG].fill_(float("nan"))),
            "are NaN or infinite: backbone.layers.1.block.A_log",
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
    with pytest.raises(SourceError, match=said):
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


def test_the_command_refuses_in_a_sentence(capsys, tmp_path, small_export):
    out, folder = tmp_path / "out", binary_folder(tmp_path / "there", "mamba")[0]
    said = refused(capsys, "import", "nowhere/there", out)  # tests are offline
    assert said.startswith("nowhere/there: no such folder here, and no copy in the hub's cache")
    assert "is of ours already" in refused(capsys, "import", small_export, out)
    assert "holds no tokenizer" in refused(capsys, "import", folder, out, "--tokenizer", tmp_path)
    for same in (folder, folder.parent):
        said = refused(capsys, "import", folder, same)
        assert "holds the model that is to be imported" in said
    (folder / "pytorch_model.bin").unlink()
    assert "holds no weights" in refused(capsys, "import", folder, out)
    assert not out.exists()
