"""Checkpoints of the paper's code become ours number for number, or are refused name by name."""

import json

import pytest
import torch
from safetensors.torch import load_file

from lm.reference import (
    ReferenceCheckpointError,
    import_reference,
    reference_config,
    reference_name,
)
from tests.golden import HERE
from tests.running import fprnn

CASE = json.loads((HERE / "lm_hh1_default.json").read_text())
TENSORS = load_file(HERE / "lm_hh1_default.safetensors")
STATE = {k[6:]: v for k, v in TENSORS.items() if k.startswith("param/")}
CONFIG = {k: CASE[k] for k in ("model_config", "ssm_cfg")}


@pytest.fixture
def files(tmp_path):
    """A checkpoint and its config as the paper's code leaves them."""
    torch.save({"state_dict": {f"module.{k}": v for k, v in STATE.items()}}, tmp_path / "run.pth")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_names():
    for theirs, ours in [
        ("mixer.uv_project.parametrizations.weight.original1", "mixer.uv_proj.direction"),
        ("mixer.u_proj.0.parametrizations.weight.original0", "mixer.u_down.gain"),
        ("mixer.u_proj.1.parametrizations.weight.original1", "mixer.u_proj.direction"),
        ("mixer.mixers.1.diag.bias", "mixer.parts.1.gate_proj.bias"),
        ("mixer.q_proj.parametrizations.weight.original", "mixer.q_proj.weight"),
        ("mixer.q_proj.parametrizations.weight.0.base", "mixer.q_proj.base"),
        ("backbone.embedding.weight", "backbone.embeddings.weight"),
        (
            "backbone.layers.3.mixer.mixer.alpha.bias",
            "backbone.layers.3.block.mixer.gate_proj.bias",
        ),
        ("backbone.layers.3.norm.weight", "backbone.layers.3.norm.weight"),
        ("backbone.layers.3.mixer.norm.weight", "backbone.layers.3.block.out_norm.weight"),
        ("output_norm.weight", "out_norm.weight"),
    ]:
        assert reference_name(theirs) == ours


def test_the_imported_model_computes_the_golden_logits(files):
    from transformers import AutoModelForCausalLM

    done = fprnn("import-reference", files / "run.pth", "--config", files / "config.json",
                 files / "hf")  # fmt: skip
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(files / "hf").double().eval()
    model.config.tol = 1e-12
    with torch.no_grad():
        logits = model(TENSORS["input/input_ids"]).logits
    exact = TENSORS["exact_f64_eval/logits"]
    assert ((logits - exact).abs().max() / exact.abs().max()) < 1e-9


def test_every_wrong_name_is_listed_and_nothing_is_written(files):
    broken = dict(STATE)
    broken["backbone.layers.0.mixer.Delta"] = torch.zeros(3)
    del broken["backbone.layers.1.mixer.D"]
    broken["backbone.norm_f.weight"] = torch.zeros(7)
    torch.save(broken, files / "broken.pth")
    with pytest.raises(ReferenceCheckpointError) as e:
        import_reference(files / "broken.pth", files / "config.json", files / "hf")
    for part in ["1 missing: backbone.layers.1.block.D", "1 extra: backbone.layers.0.block.Delta",
                 "1 of another shape: backbone.norm_f.weight (7,), not (32,)"]:  # fmt: skip
        assert part in str(e.value)
    assert not (files / "hf").exists()


def test_another_architecture_is_refused(files):
    other = {**CONFIG, "ssm_cfg": {**CONFIG["ssm_cfg"], "mixer_type": "kronecker"}}
    (files / "other.json").write_text(json.dumps(other))
    with pytest.raises(ReferenceCheckpointError, match=r"does not fit .*uv_proj"):
        import_reference(files / "run.pth", files / "other.json", files / "hf")


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"mixer_type": "householderproducts"}, "did you mean householderproduct"),
        ({"layer": "FPMamba3"}, "unknown layer `FPMamba3`"),
    ],
)
def test_unknown_names(change, sentence):
    with pytest.raises(ReferenceCheckpointError, match=sentence):
        reference_config({**CONFIG, "ssm_cfg": {**CONFIG["ssm_cfg"], **change}})


def test_bad_files_are_sentences(files):
    (files / "text.pth").write_text("not a checkpoint")
    torch.save({"a": 1}, files / "empty.pth")
    torch.save({"w": torch.zeros(1)}, files / "other.pth")
    (files / "bad.json").write_text("{")
    good = files / "config.json"
    for checkpoint, config, sentence in [
        ("none.pth", good, "no checkpoint at"),
        ("text.pth", good, "cannot be read as a checkpoint"),
        ("empty.pth", good, "holds no state dict"),
        ("other.pth", good, "no language model of the paper's code"),
        ("run.pth", files / "none.json", "no config at"),
        ("run.pth", files / "bad.json", "neither JSON nor YAML"),
    ]:
        with pytest.raises(ReferenceCheckpointError, match=sentence):
            import_reference(files / checkpoint, config, files / "hf")
