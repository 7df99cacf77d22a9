"""A trained state tracker under torch.compile: its loss and gradients, and what is counted."""

import pytest
import torch

from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()


def test_what_is_bisected_or_limited_is_counted_alike():
    torch.manual_seed(0)
    model = FPRNNForCausalLM(FPRNNConfig(vocab_size=64, d_model=32, n_layer=1, mixer_rank=4))
    ids = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(0))
    plain = model(ids).fixed_point
    assert plain.bisected.any() and plain.limited.any()
    there = torch.compile(model, backend="eager", fullgraph=True)(ids).fixed_point
    for name in ("failed", "bisected", "limited"):
        torch.testing.assert_close(getattr(there, name), getattr(plain, name))
