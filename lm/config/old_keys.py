"""Keys that earlier versions had: renamed ones are translated, removed ones dropped."""

from __future__ import annotations

import copy
import functools
from typing import Any

from lm.common.console import say
from lm.common.errors import ConfigError
from lm.model.fields import FIELDS_BY_KIND, LAYER_OPTIONS, RENAMED_FIELDS, rename_options

# {old key: present key} of all kinds of runs. `*` matches any name in a mapping. If a section is
# renamed, renamed keys inside it come first.
RENAMED = {
    **{f"model.{old}": f"model.{new}" for old, new in RENAMED_FIELDS.items()},
    "data.name": "data.dataset_config",
    "data.download": "data.download_dir",
    "data.cache": "data.cache_dir",
    "data.traces.letters": "data.traces.num_elements",
    "data.mixture.*.traces.letters": "data.mixture.*.traces.num_elements",
    "data.curriculum.at": "data.curriculum.min_answer_prob",
    "optim.decay": "optim.wsd_decay",
    "train.rollbacks": "train.max_rollbacks",
    "train.adversary": "train.adversarial_noise",
    "train.curriculum.at": "train.curriculum.min_accuracy",
    "train.curriculum.letters": "train.curriculum.num_elements",
    "bars.least": "thresholds.min",
    "bars": "thresholds",
}
# Removed keys and their former defaults. A config.yaml that holds one with its default is read
# without it.
REMOVED = {
    "data.packing": "plain",
    "data.prepare_workers": "auto",
    "data.temperature": None,
    "model.backend": "auto",
    "model.rms_norm": True,
    "model.bias": False,
    "model.residual_in_fp32": True,
    "model.d_conv": 4,
    "model.norm_epsilon": 1e-5,
    "model.position": "rope",
    "model.attention_window": None,
    "model.allow_neg_eigval": "auto",
    "model.dt_rank": "auto",
    "model.ngroups": 1,
    "model.mixer_act": "silu",
    "model.out_proj_init_scale": 1.0,
    "model.symm_mixer": False,
    "model.bc_norm": True,
    "model.eps": 1e-5,
    "solver.jacobian_reg": 0.0,
    "solver.patience": 15,
    "optim.eps": 1e-8,
    "optim.name": "adamw",
    "solver.adjoint_clip": None,
    "optim.muon": {"lr": None, "momentum": 0.95, "nesterov": True, "scale": "match_rms_adamw"},
    "train.batch_warmup": None,
    "train.length_warmup": None,
    "train.spike": None,
    "train.device": "auto",
    "train.skip": None,
    "train.ema": None,
    "train.z_loss": 0.0,
    "engine.hang_s": 3600,
    "init_from.layers": "auto",
    "train.world_size": None,
    "train.workers": 0,  # in a synthetic run
    "train.gamma_shape": 4.0,  # in a synthetic run
    "task.csv": None,
    "task.mode": "answers",
    "task.automaton.states": 5,
    "task.automaton.letters": 3,
    "task.automaton.kind": "unsolvable",
    "task.automaton.seed": 0,
    "log.wandb_project": "fprnn",
    "log.contraction": False,
    "eval.micro_batch_size": None,
}
# Removed keys that may have any value, because trained weights never depended on them.
WITHOUT_EFFECT = {"train.device", "eval.micro_batch_size", "data.prepare_workers"}
# Sections on which the outputs of trained weights depend; the others matter only in training.
MODEL_SECTIONS = ("model", "solver")


def current_key(key: str) -> str:
    """Return the present name of a dotted key: renamed by the first pattern that it matches."""
    names = key.split(".")
    for old_pattern, new_pattern in RENAMED.items():
        parts = old_pattern.split(".")
        is_match = all(part in ("*", name) for part, name in zip(parts, names))
        if len(parts) == len(names) and is_match:
            new_parts = new_pattern.split(".")
            return ".".join(name if part == "*" else part for part, name in zip(new_parts, names))
    return key


@functools.cache
def note_renamed(old: str, new: str) -> None:
    """Print once that a key has another name now."""
    say(f"note: the key `{old}` is now called `{new}`; the old name still works")


def rename_keys(tree: dict, origin: str) -> dict:
    """Return a copy of a whole YAML with the present names of its keys.

    Args:
        tree: The YAML.
        origin: File of the YAML, for the message.

    Raises:
        ConfigError: If a section holds a key under both of its names.
    """
    tree = copy.deepcopy(tree)
    for old, new in RENAMED.items():
        _rename(tree, old.split("."), new.rpartition(".")[2], origin)
    model = tree.get("model")
    if isinstance(model, dict) and "layers" in model:
        model["layers"] = rename_options(model["layers"])
    return tree


def _rename(node: Any, path: list[str], new_name: str, origin: str) -> None:
    """Rename the last key of a path in place, also in every item of a list on the path.

    The order of the keys stays.
    """
    if isinstance(node, list):
        for item in node:
            _rename(item, path, new_name, origin)
    if not isinstance(node, dict):
        return
    name, *rest = path
    if rest:
        for key in list(node) if name == "*" else [name]:
            _rename(node.get(key), rest, new_name, origin)
    elif name in node:
        if new_name in node:
            raise ConfigError(
                f"{origin}: `{name}` is the old name of `{new_name}`, and both are there: leave out"
                f" `{name}`"
            )
        items = [(new_name if key == name else key, value) for key, value in node.items()]
        node.clear()
        node.update(items)


def replacement(key: str) -> str:
    """Return advice for a message: what to write instead of a removed key."""
    section, _, name = key.partition(".")
    if section == "model" and name in LAYER_OPTIONS:
        return f"give it to layers, as in `model.layers: [KIND: {{{name}: …}}]`"
    return "leave it out, which trains with its default"


def drop_removed(tree: dict, origin: str, trained: bool = False) -> dict:
    """Return a copy of a whole YAML without the keys of REMOVED.

    Args:
        tree: The YAML.
        origin: File of the YAML, for the message.
        trained: True if the YAML belongs to trained weights and nothing will be trained. Then
            removed keys of training may have any value.

    Raises:
        ConfigError: If a removed key that matters has another value than its former default.
    """
    tree = copy.deepcopy(tree)
    if isinstance(tree.get("model"), dict):
        _move_to_layers(tree["model"])
    for key, default in REMOVED.items():
        *parents, last = key.split(".")
        section: Any = tree
        for name in parents:
            section = section.get(name) if isinstance(section, dict) else None
        if not isinstance(section, dict) or last not in section:
            continue
        value = section.pop(last)
        has_effect = parents[0] in MODEL_SECTIONS if trained else key not in WITHOUT_EFFECT
        if value != default and has_effect:
            raise ConfigError(
                f"{origin}: `{key}` is {value!r}, but the key was removed (its default was"
                f" {default!r}): {replacement(key)}"
            )
    return tree


def _move_to_layers(model: dict) -> None:
    """Move removed keys of `model` into `model.layers`, if all layers are of one kind."""
    kind = model.get("block", "fp_mamba1")
    options = {
        name: model[name]
        for name, field in LAYER_OPTIONS.items()
        if name in FIELDS_BY_KIND.get(kind, ()) and model.get(name, field.default) != field.default
    }
    if options and model.get("layers") is None and model.get("name", "fprnn") == "fprnn":
        model["layers"] = [{kind: options}]
        for name in options:
            del model[name]
