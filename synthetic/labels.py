"""What a point of a sweep says about its model and its task, as legends and tables name it."""

from __future__ import annotations

from typing import Any

from lm.config.load import Variant
from synthetic.config import Config, Model

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
_RANKED = ("householder", "dplr", "mixture")
_READS_Y = {"dt_h_dep": "λ", "b_h_dep": "b", "c_h_dep": "c", "mixer_h_dep": "Q"}
# Keys of a point that `_kind` says.
_SAID_BY_KIND = {"name", "block", "layers", "mixer", "mixer_rank", "n_householder"}
# Keys that are said by other words, or are no more than a consequence of the name.
_SILENT = {*_SAID_BY_KIND, *_READS_Y, "n_layer", "headdim", "n_heads", "allow_neg_eigval"}


def model_label(cfg: Config, point: dict[str, Any]) -> str:
    """What a sweep point says about the model and its training: "Mamba, 2 layers", "ℓmax 8". Runs
    that differ in the seed alone have one label: they are drawn together."""
    model = cfg.model
    keys = {k.removeprefix("model."): v for k, v in point.items() if k.startswith("model.")}
    parts = []
    if keys.keys() & _SAID_BY_KIND:
        parts.append(_kind(model))
    if "n_layer" in keys:
        parts.append(f"{model.n_layer} layer{'s' * (model.n_layer > 1)}")
    if keys.keys() & _READS_Y.keys():
        reads = [symbol for key, symbol in _READS_Y.items() if getattr(model, key, False)]
        parts.append(f"y in {', '.join(reads)}" if reads else "y in none")
    parts += [f"{key} {value}" for key, value in keys.items() if key not in _SILENT]
    if "train.max_iters" in point:
        drawn = f"~ ⌈Γ({cfg.train.gamma_shape:g}, 1)⌉"
        parts.append(f"ℓmax {drawn if cfg.train.max_iters == 'gamma' else cfg.train.max_iters}")
    for key, value in point.items():
        if isinstance(value, Variant):
            parts.append(value.name)
        elif key not in ("train.max_iters", "seed") and not key.startswith(("model.", "task.")):
            parts.append(f"{key.rpartition('.')[2]} {value}")
    return ", ".join(parts)


def _kind(model: Model) -> str:
    """ "Mamba", "FP-Mamba householder 4"; of a mixed stack its layers."""
    text = _NAMES.get(model.name) or _BLOCKS[model.block]
    if model.layers is not None:
        text = str(model.layers)
    elif model.name == "fprnn" and model.block != "fp_rnn":
        text += f" {model.mixer}"
        if model.mixer in _RANKED:
            text += f" {model.mixer_rank}"
    if "deltaproduct" in model.name:
        text += f" {model.n_householder}"
    return text


def task_label(cfg: Config, point: dict[str, Any]) -> str:
    """What a sweep point says about the task, "" for nothing."""
    keys = {k.removeprefix("task."): v for k, v in point.items() if k.startswith("task.")}
    if "name" in keys:
        group = f" {cfg.task.group}" if cfg.task.name == "word_problem" else ""
        return cfg.task.name.replace("_", " ") + group
    return " ".join(str(v) if k == "group" else f"{k} {v}" for k, v in keys.items())
