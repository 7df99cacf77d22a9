"""Small Mamba models of transformers, and our models with the same weights."""

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

from lm.model.modeling_fprnn import FPRNNForCausalLM

COMMON = dict(vocab_size=24, hidden_size=32, num_hidden_layers=2, state_size=4, use_cache=False)


def make_random_mamba(kind, **fields):
    """Make a Mamba ("mamba") or Mamba-2 of transformers with random weights, biases and norms."""
    torch.manual_seed(0)
    if kind == "mamba":
        model = MambaForCausalLM(MambaConfig(**{"time_step_rank": 3, **COMMON, **fields}))
    else:
        sizes = {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16}
        tied = {"tie_word_embeddings": True}
        model = Mamba2ForCausalLM(Mamba2Config(**{**sizes, **tied, **COMMON, **fields}))
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model.eval()


def save_hf_mamba(folder, kind, **fields):
    """Save a random model of transformers; return the folder and the model."""
    model = make_random_mamba(kind, **fields)
    model.save_pretrained(folder)
    return folder, model


def save_as_bin(folder, kind):
    """Save a random model as pytorch_model.bin, the format of older versions of transformers."""
    _, model = save_hf_mamba(folder, kind)
    (folder / "model.safetensors").unlink()
    torch.save(dict(model.state_dict()), folder / "pytorch_model.bin")
    return folder, model


def make_our_model(source):
    """Make our model with the weights that `lm.training.hf_mamba` read from a folder."""
    model = FPRNNForCausalLM(source.config)
    mismatch = model.load_state_dict(source.weights, strict=False)
    assert not mismatch.unexpected_keys and set(mismatch.missing_keys) <= {"lm_head.weight"}
    return model.eval()


def draw_ids(batch=2, length=20):
    return torch.randint(24, (batch, length), generator=torch.Generator().manual_seed(3))
