"""Baselines behind the same config, training and export as the fixed-point models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lm.common.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lm.config.model import Model

# Fields of `Model` that concern baselines alone; lm/training/build.py keeps them from FPRNNConfig.
FIELDS = ("backend",)
# Those that layers of a pattern (`model.layers`) read as well.
SHARED = ("n_heads", "d_ff", "position", "n_householder", "allow_neg_eigval")


def build_baseline(
    model: Model, vocab_size: int, precision: str = "fp32", **common: Any
) -> PreTrainedModel:
    """`lm.config.load.Model` → the baseline that `model.name` names, freshly initialised.

    Args:
        precision: that of training; flash-linear-attention's kernels have no fp32.
        common: eos_token_id, pad_token_id, seq_len.
    Raises:
        ConfigError: sizes that do not go together, or a backend that cannot run here; layers of a
            pattern, which `fprnn` alone has.
    """
    for name in ("layers", "attention_window"):
        if getattr(model, name) is not None:
            raise ConfigError(f"model.{name} is of model.name fprnn, not of {model.name}")
    if model.name == "mamba":
        from .mamba import build_mamba

        return build_mamba(model, vocab_size, **common)
    if model.name == "mamba2":
        from .mamba import build_mamba2

        return build_mamba2(model, vocab_size, **common)
    from .build import build_deltanet, build_lstm, build_transformer

    if model.name == "transformer":
        return build_transformer(model, vocab_size, **common)
    if model.name == "lstm":
        return build_lstm(model, vocab_size, **common)
    return build_deltanet(model, vocab_size, precision=precision, **common)
