"""Models whose teacher forcing and generation disagree are not exported."""

import pytest
import torch

from lm.export.decoding import check_decoding
from lm.export.export_code import ExportError
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM


def make_model(**fields):
    torch.manual_seed(0)
    sizes = dict(vocab_size=32, d_model=16, n_layer=1, d_state=4)
    return FPRNNForCausalLM(FPRNNConfig(**{**sizes, **fields}))


@pytest.mark.slow
def test_layer_that_amplifies_rounding_is_refused():
    """An untrained monarch mixer with open gates is chaotic."""
    model = make_model(mixer="monarch", mixer_rank=8, mixer_gate_init_bias=0.0).train()
    with pytest.raises(ExportError, match=r"generation disagree: at \d+% of 256 tokens"):
        check_decoding(model)


def test_start_near_the_identity_passes_and_keeps_the_mode():
    model = make_model(mixer="monarch", mixer_rank=8).train()
    check_decoding(model)
    assert model.training


def test_models_that_cannot_disagree_are_not_run():
    """Neither low-rank mixers nor the paper's iteration are checked."""
    for fields in ({"mixer_rank": 2}, {"mixer": "kronecker", "token": "iterate"}):
        model = make_model(**fields)
        model.forward = None  # calling it would fail
        check_decoding(model)
