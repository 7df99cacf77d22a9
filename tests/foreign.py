"""Small Mambas of transformers."""

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

COMMON = dict(vocab_size=24, hidden_size=32, num_hidden_layers=2, state_size=4, use_cache=False)
SIZES = {"mamba": dict(n=4, r=3), "mamba2": dict(n=4, p=8)}  # of tests/oracle_mamba.py


def theirs(kind, **fields):
    """A Mamba or Mamba-2 of transformers in which every weight, biases and norms too, is random."""
    torch.manual_seed(0)
    if kind == "mamba":
        model = MambaForCausalLM(MambaConfig(**{"time_step_rank": 3, **COMMON, **fields}))
    else:
        own = {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16}
        tied = {"tie_word_embeddings": True}
        model = Mamba2ForCausalLM(Mamba2Config(**{**own, **tied, **COMMON, **fields}))
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model.eval()


def transformers_folder(folder, kind, **fields):
    """→ the folder, and the state dict of what is in it."""
    model = theirs(kind, **fields)
    model.save_pretrained(folder)
    return folder, model.state_dict()


def binary_folder(folder, kind):
    """The same with its weights in a pytorch_model.bin, as older versions wrote them."""
    state = transformers_folder(folder, kind)[1]
    (folder / "model.safetensors").unlink()
    torch.save(dict(state), folder / "pytorch_model.bin")
    return folder, state


def ids_of(batch=2, length=20):
    return torch.randint(24, (batch, length), generator=torch.Generator().manual_seed(3))
