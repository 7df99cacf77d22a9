"""Weights for which teacher forcing and generation disagree are not exported."""

import pytest
import torch

from lm.export.decoding import check_decoding
from lm.export.export_code import ExportError
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM


def model_of(**fields):
    torch.manual_seed(0)
    sizes = dict(vocab_size=32, d_model=16, n_layer=1, d_state=4)
    return FPRNNForCausalLM(FPRNNConfig(**{**sizes, **fields}))


@pytest.mark.slow
def test_a_layer_that_amplifies_rounding_is_refused():
    """An untrained monarch with open gates is chaotic."""
    model = model_of(mixer="monarch", mixer_rank=8, mixer_gate_init_bias=0.0).train()
    with pytest.raises(ExportError, match=r"generation disagree: at \d+% of 256 tokens"):
        check_decoding(model)


def test_a_start_near_the_identity_passes_and_the_mode_stays():
    model = model_of(mixer="monarch", mixer_rank=8).train()
    check_decoding(model)
    assert model.training


def test_what_cannot_disagree_is_not_run():
    """Reflections, and the paper's iteration, whose schedules differ by its own rule."""
    for fields in ({"mixer_rank": 2}, {"mixer": "kronecker", "token": "iterate"}):
        model = model_of(**fields)
        model.forward = None  # calling it would fail
        check_decoding(model)
