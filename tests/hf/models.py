"""Small models of every kind, for the tests of HuggingFace features."""

import pytest
import torch

from lm.config.schema import Config
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.training.build import build_model
from tests.marks import slow

VOCAB, EOS, PAD = 40, 2, 0
BLOCKS = ("fp_mamba1", "fp_mamba2", "fp_rnn")
BASELINES = ("mamba", "mamba2", "mamba3", "lstm", "slstm", "m2rnn", "transformer")
BASELINES += ("gated_deltanet", "deltaproduct", "kda", "rwkv7")
every_model = pytest.mark.parametrize("name", [*BLOCKS, *BASELINES])
# For tests of code that all kinds of layers share.
FEW = ("fp_mamba1", "lstm", "transformer")
few_models = pytest.mark.parametrize(
    "name", [name if name in FEW else slow(name) for name in (*BLOCKS, *BASELINES)]
)


def fprnn_config(block, **fields):
    sizes = {"vocab_size": VOCAB, "d_model": 16, "n_layer": 2, "d_state": 4, "headdim": 8}
    tokens = {"eos_token_id": EOS, "pad_token_id": PAD, "bos_token_id": 1}
    return FPRNNConfig(**{"block": block, **sizes, **tokens, **fields})


def build(name, seed=0, **fields):
    """Return a new model, one of BLOCKS or of BASELINES."""
    torch.manual_seed(seed)
    if name in BLOCKS:
        return FPRNNForCausalLM(fprnn_config(name, **fields))
    sizes = {"d_model": 16, "n_layer": 2, "d_state": 4, "headdim": 8, "d_ff": 24}
    section = {"name": name, **sizes, **fields}
    return build_model(Config(model=section, data={"seq_len": 32}), VOCAB, EOS, PAD)


def build_fp64(name, **fields):
    """Return the model in fp64; fixed-point models have a single layer and a low tolerance."""
    if name in BLOCKS:
        low_tolerance = {"tol": 1e-10, "eval_tol": 1e-10, "schedule": "sequential"}
        fields = {"n_layer": 1, "contractive": 0.2, **low_tolerance, **fields}
    return build(name, **fields).double()


def make_ids(rows=2, length=9, seed=0):
    """Return tokens (rows,length) that are neither EOS nor padding."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
