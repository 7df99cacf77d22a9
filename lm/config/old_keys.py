"""Keys that earlier versions had: renamed ones are translated, removed ones dropped."""

from __future__ import annotations

import copy
import functools
from typing import Any

from lm.common.console import say
from lm.common.errors import ConfigError
from lm.model.fields import FIELDS_BY_KIND, LAYER_OPTIONS, RENAMED_FIELDS, rename_options

# Old key → present key, of language models and of synthetic runs. The keys of a section that is
# renamed come before the section. `*` stands for any name in a mapping.
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
    "train.workers": 0,  # of a synthetic run
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
# Removed keys on which nothing trained depends: a YAML with any value of them is read without it.
WITHOUT_EFFECT = {"train.device", "eval.micro_batch_size", "data.prepare_workers"}
# Sections that describe the weights; the others matter only while a run trains.
MODEL_SECTIONS = ("model", "solver")


def current_key(key: str) -> str:
    """Return the present name of a dotted key."""
    return _translate(key, RENAMED.items())


def _translate(key, table):
    names = key.split(".")
    for source, target in table:
        pattern = source.split(".")
        if len(pattern) == len(names) and all(p in ("*", n) for p, n in zip(pattern, names)):
            return ".".join(n if p == "*" else p for p, n in zip(target.split("."), names))
    return key


@functools.cache
def note_renamed(old: str, new: str) -> None:
    """Print once that a key has another name now."""
    say(f"note: the key `{old}` is now called `{new}`; the old name still works")


def rename_keys(tree: dict, where: str) -> dict:
    """Return a copy of a whole YAML with the present names of its keys.

    Args:
        tree: The YAML.
        where: Its place, for the message.

    Raises:
        ConfigError: If a section holds a key under both of its names.
    """
    tree = copy.deepcopy(tree)
    for old, new in RENAMED.items():
        _rename(tree, old.split("."), new.rpartition(".")[2], where)
    model = tree.get("model")
    if isinstance(model, dict) and "layers" in model:
        model["layers"] = rename_options(model["layers"])
    return tree


def _rename(node: Any, path: list[str], name: str, where: str) -> None:
    """Give the key at the end of a path another name, also inside lists; its position stays."""
    if isinstance(node, list):
        for item in node:
            _rename(item, path, name, where)
    if not isinstance(node, dict):
        return
    first, *rest = path
    if rest:
        for key in list(node) if first == "*" else [first]:
            _rename(node.get(key), rest, name, where)
    elif first in node:
        if name in node:
            raise ConfigError(
                f"{where}: `{first}` is the old name of `{name}`, and both are there: leave out"
                f" `{first}`"
            )
        items = [(name if key == first else key, value) for key, value in node.items()]
        node.clear()
        node.update(items)


def with_first_names(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings by dotted keys under the names that the keys had when they were introduced.

    Checksums of settings are taken of these, so that renaming a key changes no checksum.
    """
    former = [(new, old) for old, new in RENAMED.items()]
    settings = {_translate(key, former): copy.deepcopy(v) for key, v in settings.items()}
    for old, new in RENAMED.items():
        section, _, name = new.rpartition(".")
        if isinstance(settings.get(section), list):
            _rename(settings[section], [name], old.rpartition(".")[2], section)
    if "model.layers" in settings:
        table = {new: old for old, new in RENAMED_FIELDS.items()}
        settings["model.layers"] = rename_options(settings["model.layers"], table)
    return settings


def replacement(key: str) -> str:
    """Return the advice that takes the place of a removed key, for a message."""
    section, _, name = key.partition(".")
    if section == "model" and name in LAYER_OPTIONS:
        return f"give it to layers, as in `model.layers: [KIND: {{{name}: …}}]`"
    return "leave it out, which trains with its default"


def drop_removed(tree: dict, where: str, trained: bool = False) -> dict:
    """Return a copy of a whole YAML without the keys of REMOVED.

    Args:
        tree: The YAML.
        where: Its place, for the message.
        trained: Whether only trained weights are read. The keys of training may then have any
            value.

    Raises:
        ConfigError: If a key has another value than its former default, and this has an effect.
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
        is_read = parents[0] in MODEL_SECTIONS if trained else key not in WITHOUT_EFFECT
        if value != default and is_read:
            raise ConfigError(
                f"{where}: `{key}` is {value!r}, but the key was removed (its default was"
                f" {default!r}): {replacement(key)}"
            )
    return tree


def _move_to_layers(model: dict) -> None:
    """Turn former keys of `model` into options of its layers, if these are all of one kind."""
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
