"""Mamba models of transformers in our terms: configuration and names.

Their layers are `mamba` and `mamba2` of lm/model/diagonal.py, whose parameters have the same names,
shapes and meaning. Of state-spaces' checkpoints the hub has the same ones in this format.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lm.common.errors import BAD_CONFIG, UserError
from lm.common.files import read_mapping

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from lm.model.configuration_fprnn import FPRNNConfig

EMBEDDING, HEAD = "backbone.embeddings.weight", "lm_head.weight"
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")  # one of them: there

# (their field, ours) that say the same of a model.
FIELDS = (
    ("vocab_size", "vocab_size"),
    ("hidden_size", "d_model"),
    ("num_hidden_layers", "n_layer"),
    ("state_size", "d_state"),
    ("expand", "expand"),
    ("tie_word_embeddings", "tie_embeddings"),
    ("pad_token_id", "pad_token_id"),
    ("bos_token_id", "bos_token_id"),
    ("eos_token_id", "eos_token_id"),
)
# Their fields of which our layers have one value.
FIXED = {"conv_kernel": 4, "use_bias": False, "layer_norm_epsilon": 1e-5}
FIELDS_OF_KIND = {
    "mamba": (("time_step_rank", "dt_rank"),),
    "mamba2": (("head_dim", "headdim"), ("n_groups", "ngroups")),
}
IN_LAYERS = (".mixer.", ".block.")  # (their word, ours) in the name of a layer's weight


class SourceError(UserError, RuntimeError):
    """A checkpoint that a run cannot start from; the message names the file and the reason."""

    exit_status = BAD_CONFIG


class Source(NamedTuple):
    """A language model in our terms.

    Attributes:
        path: Its folder.
        what: Its kind, in words.
        config: FPRNNConfig of the model of ours that computes the same.
        weights: Under our names, in fp32, the head only where it is not the embedding; on the meta
            device if only shapes were requested.
        tokenizer: Folder of its tokenizer, or None.
    """

    path: Path
    what: str
    config: Any
    weights: dict
    tokenizer: Path | None


def check_source_folder(path: Path) -> None:
    """Refuse a path of `init_from` that is no folder.

    Raises:
        SourceError: It is none.
    """
    if not path.is_dir():
        raise SourceError(
            f"{path} is no folder: it must be a run, a checkpoint, an export, or a Mamba of"
            " transformers (`hf download NAME --local-dir FOLDER` copies one from the hub)"
        )


def model_type(folder: Path) -> str | None:
    """Return the kind of model that the config.json of a folder names; None if it names none."""
    return (read_mapping(folder / "config.json") or {}).get("model_type")


def tokenizer_folder(folder: Path) -> Path | None:
    """Return the folder if it holds a tokenizer."""
    return folder if any((folder / name).is_file() for name in TOKENIZER) else None


def read_folder(folder: Path, shapes_only: bool = False) -> Source:
    """Read the Mamba or Mamba-2 of a folder as transformers writes it.

    Args:
        folder: Its folder.
        shapes_only: Read config.json only, and leave the weights on the meta device.

    Raises:
        SourceError: If our layers cannot compute this model, or its head is not as config.json
            says.
        LoadError: If files are missing or damaged, or the weights do not fit config.json.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from lm.runs.exported import load_model

    folder = Path(folder)
    kind = model_type(folder)
    if kind not in FIELDS_OF_KIND:
        raise SourceError(
            f"{folder} holds no model known here (the model_type of its config.json is {kind}): it"
            " must be mamba or mamba2, as transformers writes them (of state-spaces' models the hub"
            " has these too, as NAME-hf)"
        )
    try:
        theirs = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as e:  # whatever its validation raises
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise SourceError(f"{folder / 'config.json'} cannot be read: {reason}") from None
    config = config_of_mamba(theirs)
    if shapes_only:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(theirs)
    else:
        model = load_model(folder)
    state = {name.replace(*IN_LAYERS): t for name, t in model.state_dict().items()}
    for index in () if theirs.use_conv_bias else range(config.n_layer):
        channels = state[f"backbone.layers.{index}.block.conv1d.weight"].shape[0]
        bias = torch.zeros(channels, device=model.device)
        state[f"backbone.layers.{index}.block.conv1d.bias"] = bias  # 0: the same as none
    weights = source_weights(state, config, folder)
    return Source(folder, f"transformers' {kind}", config, weights, tokenizer_folder(folder))


def source_weights(state: dict, config: FPRNNConfig, path: Path) -> dict:
    """Return a state dict as a Source has it.

    Args:
        state: Under our names.
        config: Of the model.
        path: Folder that the error message names.

    Raises:
        SourceError: If the head is not the embedding although the configuration ties them.
    """
    import torch

    weights = {name: t.to(torch.float32) for name, t in state.items()}
    if config.tie_embeddings:
        head, embedding = weights.pop(HEAD), weights[EMBEDDING]
        if not embedding.is_meta and not torch.equal(head, embedding):
            raise SourceError(
                f"{path}: its config.json says that the head is the embedding, but {HEAD} is not"
                f" {EMBEDDING}"
            )
    return weights


def config_of_mamba(c: PretrainedConfig) -> FPRNNConfig:
    """Return the FPRNNConfig of the model that a MambaConfig or Mamba2Config describes.

    Raises:
        SourceError: If our layers cannot compute it.
    """
    from lm.model.configuration_fprnn import FPRNNConfig

    kind, width = c.model_type, int(c.expand * c.hidden_size)
    wrong = [] if kind == "mamba" else _unsupported_by_mamba2(c)
    if c.hidden_act not in ("silu", "swish"):
        wrong.append(f"hidden_act is {c.hidden_act}, ours is silu")
    if c.expand * c.hidden_size != width or getattr(c, "intermediate_size", width) != width:
        wrong.append("intermediate_size is not a whole multiple (expand) of hidden_size")
    wrong += [
        f"{name} is {getattr(c, name)}, ours is {value}"
        for name, value in FIXED.items()
        if getattr(c, name) != value
    ]
    if wrong:
        raise SourceError(f"our layers cannot be this model: {'; '.join(wrong)}")
    fields = {ours: getattr(c, theirs) for theirs, ours in (*FIELDS, *FIELDS_OF_KIND[kind])}
    try:
        return FPRNNConfig(
            **{**fields, "expand": int(c.expand)},
            layers=kind,
            reset_at_eos=False,
            max_position_embeddings=getattr(c, "max_position_embeddings", None) or 2048,
        )
    except (TypeError, ValueError) as e:
        raise SourceError(f"the configuration describes no model of ours: {e}") from None


def _unsupported_by_mamba2(c: PretrainedConfig) -> list[str]:
    """Return the reasons, in words, why our mamba2 cannot compute a Mamba2Config's model."""
    wrong, limits = [], c.time_step_limit
    if c.n_groups != 1:
        wrong.append(
            f"it has {c.n_groups} groups of B and C, each with a norm of its own; ours has one"
        )
    if limits is not None and [float(limit) for limit in limits] != [0.0, math.inf]:
        wrong.append(f"the step sizes are clamped to {list(limits)}")
    if getattr(c, "norm_before_gate", False):
        wrong.append("it norms before the gate (norm_before_gate)")
    if not getattr(c, "rms_norm", True):
        wrong.append("it has no gated norm")
    return wrong
