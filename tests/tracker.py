"""A trained state tracker for tests: one layer, d_model 16, which solves the word problem of S3.

`python -m synthetic train --config configs/synthetic/small/s3.yaml model.d_model=16` trained
tests/data/s3.safetensors. In 97 of 100 sequences of 256 elements every answer is correct. Unlike
with random weights, the answer at a token depends on all tokens before it.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from lm.data.sources.groups import get_group
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM

WEIGHTS = Path(__file__).parent / "data" / "s3.safetensors"


def load_tracker(dtype=torch.float32, **fields):
    """Load the model in training mode; `fields` are fields of its FPRNNConfig."""
    config = FPRNNConfig(vocab_size=6, d_model=16, n_layer=1, tie_embeddings=False, **fields)
    model = FPRNNForCausalLM(config)
    model.load_state_dict(load_file(WEIGHTS))
    return model.to(dtype).train()


def draw_words(count, length, seed=0):
    """Draw sequences of S3; return them and their running products, shape (count,length) each."""
    elements = np.random.default_rng(seed).integers(6, size=(count, length), dtype=np.int64)
    return torch.from_numpy(elements), torch.from_numpy(get_group("S3").products(elements))


def compute_gradient(model, ids, answers):
    """Return the mean loss and {parameter name: gradient}."""
    model.zero_grad()
    logits = model(ids).logits
    loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}
