"""Padding changes nothing whatever the biases of the short convolutions are."""

import pytest
import torch
import torch.nn.functional as F

from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM


@pytest.mark.parametrize("pad", [(1, 0), (6, 0), (0, 6), (2, 3)], ids=str)
@pytest.mark.parametrize("block", ["fp_mamba1", "fp_mamba2", "fp_rnn"])
@torch.no_grad()
def test_padded_equals_unpadded_with_random_convolution_biases(block, pad):
    """A convolution makes silu(bias) of a padded zero; a second one (of fp_rnn) must not see it."""
    torch.manual_seed(0)
    config = FPRNNConfig(
        vocab_size=30, d_model=8, n_layer=2, d_state=4, headdim=4, block=block, use_short_conv=True,
        contractive=0.3, out_norm_epsilon=1.0, tol=1e-12, eval_max_iters=300,
    )  # fmt: skip
    model = FPRNNForCausalLM(config).double().eval()
    biases = [p for n, p in model.named_parameters() if "conv1d" in n and n.endswith("bias")]
    assert len(biases) == 2 * (5 if block == "fp_rnn" else 1)
    for bias in biases:
        bias.normal_()
    for name, p in model.named_parameters():
        if name.endswith("bc_y_proj.gain"):
            p.mul_(0.1)
    tokens = torch.randint(1, 30, (2, 9))
    alone = model(tokens)
    assert (alone.fixed_point.failed == 0).all()
    mask = F.pad(torch.ones_like(tokens), pad)
    padded = model(F.pad(tokens, pad, value=7), attention_mask=mask).logits
    torch.testing.assert_close(padded[mask.bool()], alone.logits.flatten(0, 1), rtol=0, atol=1e-8)
