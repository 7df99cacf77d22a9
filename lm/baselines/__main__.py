"""`python -m lm.baselines`: parameters of every model at the paper's sizes, as a Markdown table."""

import contextlib
import io
from typing import Any

import torch

from lm.baselines import FIELDS, build_baseline
from lm.config.model import Model
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM

MODELS = {
    "fprnn: fp_mamba1, householder 1": {"block": "fp_mamba1", "mixer": "householder"},
    "fprnn: fp_mamba1, kronecker": {"block": "fp_mamba1", "mixer": "kronecker"},
    "fprnn: fp_mamba2, householder 1": {"block": "fp_mamba2", "mixer": "householder"},
    "fprnn: fp_mamba2, kronecker": {"block": "fp_mamba2", "mixer": "kronecker"},
    "mamba": {"name": "mamba"},
    "mamba2": {"name": "mamba2"},
    "transformer": {"name": "transformer"},
    "lstm": {"name": "lstm"},
    "gated_deltanet": {"name": "gated_deltanet"},
    "deltaproduct, 2 steps": {"name": "deltaproduct"},
    "gated_deltaproduct, 2 steps": {"name": "gated_deltaproduct"},
}
# vocabulary, layers of a fixed-point model and of a baseline, and the sizes they share.
LANGUAGE = (50264, 12, 12, {"d_model": 768, "d_state": 16})
WORDS = (64, 1, 2, {"d_model": 512, "d_state": 16})


def count(vocab_size: int, **fields: Any) -> tuple[int, int]:
    """Parameters in all, and without the (tied) embedding. Built on the meta device."""
    section = Model(**fields)
    with torch.device("meta"), contextlib.redirect_stdout(io.StringIO()):
        if section.name == "fprnn":
            others = {"name", "vocab_size", "gradient_checkpointing", *FIELDS}
            config = FPRNNConfig(vocab_size=vocab_size, **section.model_dump(exclude=others))
            model = FPRNNForCausalLM(config)
        else:
            model = build_baseline(section, vocab_size)
    total = sum(p.numel() for p in model.parameters())
    return total, total - model.get_input_embeddings().weight.numel()


def table() -> str:
    """One row a model: parameters of the language model and of the word problem's."""
    lines = [
        "| model | language model | … without embedding | word problem | layers there |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, fields in MODELS.items():
        cells = []
        for vocab_size, ours, theirs, sizes in (LANGUAGE, WORDS):
            layers = theirs if "name" in fields else ours
            cells.append((*count(vocab_size, n_layer=layers, **sizes, **fields), layers))
        (total, rest, _), (words, _, layers) = cells
        language = f"{total / 1e6:.1f} M | {rest / 1e6:.1f} M"
        lines.append(f"| {name} | {language} | {words / 1e6:.2f} M | {layers} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
