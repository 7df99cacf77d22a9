"""Labels of sweep points for legends and tables.

A point is one run of a sweep: the values that the sweep sets, by dotted key.
"""

from __future__ import annotations

from typing import Any

from lm.config.load import Variant
from synthetic.config import GAMMA_SHAPE, Config, Model

_NAMES = {
    "mamba": "Mamba",
    "mamba2": "Mamba-2",
    "mamba3": "Mamba-3",
    "transformer": "Transformer",
    "lstm": "LSTM",
    "gated_deltanet": "Gated DeltaNet",
    "deltaproduct": "DeltaProduct",
    "gated_deltaproduct": "Gated DeltaProduct",
    "kda": "KDA",
    "rwkv7": "RWKV-7",
    "slstm": "sLSTM",
    "m2rnn": "M²RNN",
}
_BLOCKS = {"fp_mamba1": "FP-Mamba", "fp_mamba2": "FP-Mamba-2", "fp_rnn": "FP-RNN"}
_MIXERS_WITH_RANK = ("householder", "dplr", "mixture")
# Options that let a parameter depend on the layer's output y → symbol of the parameter.
_DEPENDENCE_ON_Y = {"dt_h_dep": "λ", "b_h_dep": "b", "c_h_dep": "c", "mixer_h_dep": "Q"}
# Keys of a point that `_describe_model_kind` describes.
_MODEL_KIND_KEYS = {"name", "block", "layers", "mixer", "mixer_rank", "n_householder"}
# Keys that add no text to a label, because another part of the label depends on them.
_KEYS_WITHOUT_TEXT = {*_MODEL_KIND_KEYS, *_DEPENDENCE_ON_Y, "n_layer", "headdim", "n_heads"}
_KEYS_WITHOUT_TEXT |= {"allow_neg_eigval"}


def label_model(cfg: Config, point: dict[str, Any]) -> str:
    """Describe the model and the training of a sweep point: "Mamba, 2 layers", "ℓmax 8".

    Runs that differ only in the seed have the same label and are drawn together.

    Args:
        cfg: Config of the point.
        point: Values of the point by dotted key.
    """
    model = cfg.model
    values = {k.removeprefix("model."): v for k, v in point.items() if k.startswith("model.")}
    parts = []
    if values.keys() & _MODEL_KIND_KEYS:
        parts.append(_describe_model_kind(model))
    if "n_layer" in values:
        parts.append("1 layer" if model.n_layer == 1 else f"{model.n_layer} layers")
    if values.keys() & _DEPENDENCE_ON_Y.keys():
        symbols = [s for key, s in _DEPENDENCE_ON_Y.items() if getattr(model, key, False)]
        parts.append(f"y in {', '.join(symbols)}" if symbols else "y in none")
    parts += [f"{key} {value}" for key, value in values.items() if key not in _KEYS_WITHOUT_TEXT]
    if "train.max_iters" in point:
        is_random = cfg.train.max_iters == "gamma"
        distribution = f"~ ⌈Γ({GAMMA_SHAPE:g}, 1)⌉"
        parts.append(f"ℓmax {distribution if is_random else cfg.train.max_iters}")
    for key, value in point.items():
        if isinstance(value, Variant):
            parts.append(value.name)
        elif key not in ("train.max_iters", "seed") and not key.startswith(("model.", "task.")):
            parts.append(f"{key.rpartition('.')[2]} {value}")
    return ", ".join(parts)


def label_model_kind(cfg: Config, point: dict[str, Any]) -> str:
    """Describe a sweep point like `label_model`, but without its width and number of layers."""
    sizes = ("model.d_model", "model.n_layer")
    return label_model(cfg, {key: value for key, value in point.items() if key not in sizes})


def _describe_model_kind(model: Model) -> str:
    """Return "Mamba" or "FP-Mamba householder 4"; for a mixed stack its layers."""
    text = _NAMES.get(model.name) or _BLOCKS[model.block]
    if model.layers is not None:
        text = str(model.layers)
    elif model.name == "fprnn" and model.block != "fp_rnn":
        text += f" {model.mixer}"
        if model.mixer in _MIXERS_WITH_RANK:
            text += f" {model.mixer_rank}"
    if "deltaproduct" in model.name:
        text += f" {model.n_householder}"
    return text


def label_task(cfg: Config, point: dict[str, Any]) -> str:
    """Describe the task of a sweep point; "" if the sweep does not vary the task."""
    values = {k.removeprefix("task."): v for k, v in point.items() if k.startswith("task.")}
    if "name" in values:
        group = f" {cfg.task.group}" if cfg.task.name == "word_problem" else ""
        return cfg.task.name.replace("_", " ") + group
    return " ".join(str(v) if k == "group" else f"{k} {v}" for k, v in values.items())
