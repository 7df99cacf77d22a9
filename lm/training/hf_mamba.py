"""Mamba and Mamba-2 in transformers' format, read as models of ours.

Their layers are `mamba` and `mamba2` of lm/model/diagonal.py, whose parameters have the same names,
shapes and meaning. The hub has state-spaces' checkpoints in this format as NAME-hf.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from lm.common.files import read_mapping
from lm.training.upcycle import EMBEDDING, HEAD, SourceError, SourceModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from lm.model.configuration_fprnn import FPRNNConfig

# {field of FPRNNConfig: field of MambaConfig and Mamba2Config}
FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "n_layer": "num_hidden_layers",
    "d_state": "state_size",
    "tie_embeddings": "tie_word_embeddings",
}
KIND_FIELDS = {  # further fields of each kind
    "mamba": {"dt_rank": "time_step_rank"},
    "mamba2": {"headdim": "head_dim", "ngroups": "n_groups"},
}
# {field of MambaConfig and Mamba2Config: value that our layers assume}
REQUIRED = {
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
}
KIND_REQUIRED = {  # further values of each kind
    "mamba": {},
    "mamba2": {
        "n_groups": 1,  # with several groups, transformers has a norm per group; we have one norm
        "norm_before_gate": False,
        "rms_norm": True,
        "time_step_limit": [0.0, math.inf],
    },
}


def read_folder(folder: Path) -> SourceModel:
    """Read the Mamba or Mamba-2 in a folder.

    Raises:
        SourceError: If our layers cannot compute the model.
        LoadError: If files are missing or damaged, or the weights do not fit config.json.
    """
    from lm.runs.exported import load_model

    kind = (read_mapping(folder / "config.json") or {}).get("model_type")
    if kind not in KIND_FIELDS:
        raise SourceError(
            f"{folder} holds no model that init_from reads (the model_type in its config.json is"
            f" {kind}): it must be mamba or mamba2 in transformers' format (on the hub: NAME-hf)"
        )
    model = load_model(folder)
    config = convert_config(model.config)
    weights = {name.replace(".mixer.", ".block."): t for name, t in model.state_dict().items()}
    head = weights.pop(HEAD) if config.tie_embeddings else None
    if head is not None and not head.equal(weights[EMBEDDING]):
        raise SourceError(f"{folder}: config.json ties {HEAD} to {EMBEDDING}, but they differ")
    return SourceModel(folder, f"transformers' {kind}", config, weights)


def convert_config(source: PretrainedConfig) -> FPRNNConfig:
    """Return the FPRNNConfig of the model that a MambaConfig or Mamba2Config describes.

    Raises:
        SourceError: If our layers cannot compute the model.
    """
    from lm.model.configuration_fprnn import FPRNNConfig

    kind, expand = source.model_type, int(source.expand)
    required = REQUIRED | KIND_REQUIRED[kind] | {"expand": expand}
    if kind == "mamba":
        required["intermediate_size"] = expand * source.hidden_size
    problems = []
    for name, value in required.items():
        source_value = getattr(source, name, value)  # Mamba2Config lacks fields with one value
        if isinstance(source_value, tuple):
            source_value = list(source_value)
        if source_value != value:
            problems.append(f"{name} is {source_value}, not {value}")
    if problems:
        raise SourceError(f"our {kind} layer cannot compute this model: {'; '.join(problems)}")
    fields = {field: getattr(source, name) for field, name in (FIELDS | KIND_FIELDS[kind]).items()}
    try:
        return FPRNNConfig(**fields, expand=expand, layers=kind, reset_at_eos=False)
    except (TypeError, ValueError) as error:
        raise SourceError(f"its configuration is no model of ours: {error}") from None
