"""`import fprnn`: its names, the registration with transformers, and training from Python."""

import pytest
import torch

import fprnn
from tests.running import PLAIN_FORKS, ROOT

AUTO_CLASSES = """
import sys, transformers
if len(sys.argv) > 1:
    transformers.AutoModelForCausalLM  # imports the module, before fprnn does
import fprnn
config = transformers.AutoConfig.for_model("fprnn", d_model=16, n_layer=1, vocab_size=8)
assert type(config) is fprnn.FPRNNConfig
assert type(transformers.AutoModelForCausalLM.from_config(config)) is fprnn.FPRNNForCausalLM
assert type(transformers.AutoModel.from_config(config)).__name__ == "FPRNNModel"
"""
UNREGISTERED = """
import lm.kernels, lm.model.modeling_fprnn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
assert "fprnn" not in CONFIG_MAPPING
"""


def test_names_of_the_api():
    names = ["FPRNNConfig", "FPRNNForCausalLM", "FixedPointLayer", "LanguageModel"]
    assert sorted(fprnn.__all__) == [*names, "__version__", "load", "train"]
    assert all(hasattr(fprnn, name) for name in fprnn.__all__)


@pytest.mark.parametrize("arguments", [[], ["transformers first"]])
def test_import_fprnn_registers_the_auto_classes(arguments, tmp_path):
    done = PLAIN_FORKS.run("-c", [AUTO_CLASSES, *arguments], timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_import_lm_registers_nothing(tmp_path):
    """An export that imports the kernels keeps the classes of its own code."""
    done = PLAIN_FORKS.run("-c", [UNREGISTERED], timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_train_returns_a_run_that_load_reads(tmp_path):
    config = ROOT / "configs/tiny/lm.yaml"
    run = fprnn.train(config, [f"out_dir={tmp_path}", "train.steps=1"])
    assert run == tmp_path / "tiny"
    model = fprnn.load(run).model
    assert type(model) is fprnn.FPRNNForCausalLM
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_train_refuses_unknown_keys(tmp_path):
    with pytest.raises(ValueError, match=r"unknown key `train\.lr`"):
        fprnn.train(ROOT / "configs/tiny/lm.yaml", ["train.lr=1"])
