"""The paper's own code in terms of ours: names of parameters, configurations, checkpoints."""

from __future__ import annotations

import difflib
import math
import pickle
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.common.errors import UserError, refused_pickle
from lm.common.files import parse_json

if TYPE_CHECKING:
    from lm.model.configuration_fprnn import FPRNNConfig

# Where the paper's implementation and ours call the same tensor differently, in order.
RENAMES = [
    (r"(^|\.)_orig_mod\.", r"\1"),  # torch.compile, which the paper's code also puts on mixers
    (r"\.parametrizations\.weight\.original0$", ".gain"),
    (r"\.parametrizations\.weight\.original1$", ".direction"),
    (r"\.parametrizations\.weight\.original$", ".weight"),
    (r"\.parametrizations\.weight\.0\.base$", ".base"),
    (r"^backbone\.embedding\.", "backbone.embeddings."),
    (r"^(backbone\.layers\.\d+)\.mixer\.", r"\1.block."),
    (r"\bmixer\.mixers\.", "mixer.parts."),
    (r"\b(mixer|parts\.\d+)\.u_proj\.0\.", r"\1.u_down."),
    (r"\b(mixer|parts\.\d+)\.u_proj\.1\.", r"\1.u_proj."),
    (r"\b(mixer|parts\.\d+)\.(uv_project|proj)\.", r"\1.uv_proj."),
    (r"\b(mixer|parts\.\d+)\.(diag|alpha)\.", r"\1.gate_proj."),
    (r"^(backbone\.layers\.\d+\.block\.|)(output_)?norm\.weight$", r"\1out_norm.weight"),
    (r"\binput_trans\.", "in_proj."),
    (r"\boutput_trans\.", "out_proj."),
]
EMBEDDING, HEAD = "backbone.embeddings.weight", "lm_head.weight"

LANGUAGE_MODEL = "FPLMHeadModel"
BLOCKS = {
    "FPMamba": "fp_mamba1",
    "FPMamba1": "fp_mamba1",
    "FPMamba2": "fp_mamba2",
    "FPRNN": "fp_rnn",
}
MIXERS = {
    "householderproduct": {"mixer": "householder"},
    "dplr": {"mixer": "dplr"},
    "kronecker": {"mixer": "kronecker"},
    "monarch": {"mixer": "monarch", "eigen_range": "positive"},
    "nonselective": {"mixer": "nonselective"},
    "mixture": {"mixer": "mixture"},
    "selectivedense": {"mixer": "selective_dense"},
}
ACTIVATIONS = {name: name for name in ("silu", "relu", "identity")}

# What the paper's constructors take for a key that is not given, where FPRNNConfig takes another.
DEFAULTS = {
    "fp_mamba1": {"mixer_type": "kronecker", "max_iter": 100},
    "fp_mamba2": {"mixer_type": "kronecker", "max_iter": 100, "d_state": 128},
    "fp_rnn": {"mixer_type": "householderproduct", "max_iter": 1000},
}
NORM_EPS = 1e-5  # theirs where a mixer is given none
# What the paper's code always does, where FPRNNConfig has a choice.
ALWAYS = {
    "token": "iterate",
    "schedule": "parallel",
    "stopping": "paper",
    "eval_max_iters": 1000,
    "gradient": "one_step",
    "contractive": None,
    "b_h_dep": True,
    "c_h_dep": True,
    "dt_h_dep": False,
    "gate_h_dep": True,
    "reset_at_eos": False,
}
# … but for the solver of an imported checkpoint, which is ours; the damping stays the paper's.
SOLVER = {"token": "exact", **dict.fromkeys(("schedule", "stopping", "gradient"), "auto")}
ORIGIN = (
    "Imported from a checkpoint of the paper's code. It is solved exactly (`token: exact`); the"
    " paper's own procedure, `model.solving(token='iterate')`, may find another solution."
)
DENSE_WIDTH = 256  # d_inner of their selectivedense, whatever expand says

# Every key of the paper's configuration is in exactly one of the tables below, or in `SPECIAL`.
# Keys that mean the same under our names: theirs → (ours, type).
MAPPED = {
    "d_model": ("d_model", int),
    "n_layer": ("n_layer", int),
    "vocab_size": ("vocab_size", int),
    "norm_epsilon": ("norm_epsilon", float),
    "rms_norm": ("rms_norm", bool),
    "residual_in_fp32": ("residual_in_fp32", bool),
    "tie_embeddings": ("tie_embeddings", bool),
    "d_state": ("d_state", int),
    "d_conv": ("d_conv", int),
    "expand": ("expand", int),
    "headdim": ("headdim", int),
    "ngroups": ("ngroups", int),
    "bias": ("bias", bool),
    "bc_norm": ("bc_norm", bool),
    "glu_in_loop": ("glu_in_loop", bool),
    "use_short_conv": ("use_short_conv", bool),
    "mixer_rank": ("mixer_rank", int),
    "symm_mixer": ("symm_mixer", bool),
    "mixer_h_dep": ("mixer_h_dep", bool),
    "n_backwards": ("n_backwards", int),
    "max_iter": ("max_iters", int),
    "convergence_threshold": ("tol", float),
    "damping_decay_rate": ("stepsize_decay", float),
    "stepsize0": ("stepsize", float),
    "stepsize_decay": ("stepsize_decay", float),
    "decay_patience": ("patience", int),
}
# Read by code of their own in `reference_config`.
SPECIAL = (
    "layer",
    "mixer_type",
    "mixer_ac",
    "mixer_proj_rank",
    "norm_eps",
    "dt_rank",
    "conv_bias",
    "outlier_quantile",
    "pad_vocab_size_multiple",
    "d_ssm",
    "d_inner",
)
# Keys that change no function that a checkpoint computes: key → why.
_START = "only where training starts from; a checkpoint has its weights"
_PLACE = "where and in which precision the paper's code computes"
_FASTER = "another kernel for the same function"
_RECORD = "a record of how the case was made and what it gave, not configuration"
NO_EFFECT = {
    "d_mixer": "taken by every layer, read by none",
    **dict.fromkeys(("dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor"), _START),
    **dict.fromkeys(("A_init_range", "conv_init", "initializer_cfg"), _START),
    **dict.fromkeys(("device", "dtype"), _PLACE),
    "layer_idx": "which layer asks for its inference state",
    "sequence_parallel": "acts with a process_group alone",
    **dict.fromkeys(("fused_add_norm", "use_mem_eff_path", "use_fast_path", "chunk_size"), _FASTER),
    "rmsnorm": "FPMamba2 always ends in an RMSNorm",
    "norm_before_gate": "FPMamba2 always gates before its norm",
    "attn_cfg": "of the attention layers, of which there may be none",
    **dict.fromkeys(
        ("name", "cls", "B", "L", "seed", "in_proj_scale", "tweak", "patched"), _RECORD
    ),
    **dict.fromkeys(("fixed_point_only", "loss", "losses", "params", "iters", "check"), _RECORD),
    "files": _RECORD,
}
# … and those that change nothing in a layer that does not read them: layer → key → why.
_NONE = "the layer has none"
UNREAD = {
    "fp_mamba1": dict.fromkeys(("headdim", "ngroups", "d_ssm", "D_has_hdim", "dt_limit"), _NONE),
    "fp_mamba2": {"bc_norm": "FPMamba2 always normalises B and C", "dt_rank": _NONE},
    "fp_rnn": {
        "damping_decay_rate": "FPRNN's solver is not damped",
        **dict.fromkeys(("headdim", "ngroups", "d_ssm", "D_has_hdim", "dt_limit"), _NONE),
        **dict.fromkeys(("d_state", "dt_rank", "bc_norm"), _NONE),
    },
}
# Keys of which we can have some values: key → (those, what any other would do).
ONLY = {
    "d_intermediate": ((0, None), "there would be an MLP after every block"),
    "attn_layer_idx": (([], (), None), "some layers would be attention"),
    "D_has_hdim": ((False,), "D would be one number a channel, not one a head"),
    "dt_limit": (([0.0, math.inf], (0.0, math.inf), None), "the step sizes would be clamped"),
    "process_group": ((None,), "the checkpoint would hold one rank's part of each matrix"),
    "stepsize_thresh": ((1e-3,), "the solver would stop at another step size"),
}
SECTIONS = ("model_config", "ssm_cfg", "config")


class ReferenceCheckpointError(UserError, RuntimeError):
    """A checkpoint or configuration of the paper's code that cannot be taken over."""


def reference_name(name: str) -> str:
    """The paper's parameter name → ours, e.g. mixer.u_proj.parametrizations.weight.original0 →
    mixer.u_proj.gain."""
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def known_keys() -> set[str]:
    """Every key that a configuration of the paper's code can have."""
    return {*MAPPED, *SPECIAL, *NO_EFFECT, *ONLY}


def _look_up(table: dict, name: str, what: str):
    if name not in table:
        near = difflib.get_close_matches(str(name), table, 1, 0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ReferenceCheckpointError(f"unknown {what} `{name}`: one of {', '.join(table)}{hint}")
    return table[name]


def _flat(description: dict) -> dict:
    """Every key of a description and of its sections, in one mapping.

    Raises:
        ReferenceCheckpointError: an unknown key, or a key that has two values.
    """
    flat: dict[str, Any] = {}
    places: dict[str, str] = {}
    unknown: list[str] = []

    def read(mapping, place):
        if not isinstance(mapping, dict):
            raise ReferenceCheckpointError(f"`{place}` must be a mapping, not {mapping!r}")
        for key, value in mapping.items():
            where = f"{place}.{key}" if place else str(key)
            if key in SECTIONS:
                read(value or {}, where)
            elif key not in known_keys():
                near = difflib.get_close_matches(str(key), known_keys(), 1, 0.6)
                unknown.append(f"`{where}`" + (f" (did you mean {near[0]}?)" if near else ""))
            elif key in flat and flat[key] != value and key not in NO_EFFECT:
                raise ReferenceCheckpointError(
                    f"the configuration contradicts itself: {places[key]} is {flat[key]!r},"
                    f" {where} is {value!r}"
                )
            else:
                flat[key], places[key] = value, where

    read(description, "")
    if unknown:
        raise ReferenceCheckpointError(
            f"the configuration has keys that are not known here: {', '.join(unknown)};"
            " what they do would be lost"
        )
    return flat


def _typed(key: str, value, kind: type):
    """The value as a bool, int or float; 2.0 is an int and "1e-6" a float, as in the paper's YAML.

    Raises:
        ReferenceCheckpointError: it is something else.
    """
    if kind is not bool and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if kind is float and math.isfinite(number):
            return number
        if kind is int and not isinstance(value, str) and number.is_integer():
            return int(number)
    if kind is bool and isinstance(value, bool):
        return value
    what = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
    raise ReferenceCheckpointError(f"`{key}` is {value!r}; it must be {what}")


def _count(key: str, value) -> int:
    """The value as a whole number above 0."""
    number = _typed(key, value, int)
    if number < 1:
        raise ReferenceCheckpointError(f"`{key}` is {number}; it must be at least 1")
    return number


def _block(flat: dict) -> str:
    """Our name of the layer that the description names."""
    named = {str(flat[k]) for k in ("layer", "cls") if k in flat and flat[k] != LANGUAGE_MODEL}
    if not named:
        raise ReferenceCheckpointError(
            f"the configuration names no layer: ssm_cfg.layer must be one of {', '.join(BLOCKS)}"
        )
    blocks = {_look_up(BLOCKS, name, "layer") for name in named}
    if len(blocks) > 1:
        raise ReferenceCheckpointError(
            f"the configuration contradicts itself: its layers are {' and '.join(sorted(named))}"
        )
    return blocks.pop()


def _mixer(flat: dict, block: str) -> dict:
    """Our fields of the mixer: its kind, activation, low rank, norm of S, floor of its norms."""
    named = flat["mixer_type"]
    fields = dict(_look_up(MIXERS, str(named).lower(), "mixer_type"))
    mixer = fields["mixer"]
    activation = str(flat.get("mixer_ac", "silu")).lower()
    fields["mixer_act"] = _look_up(ACTIVATIONS, activation, "activation mixer_ac")

    rank = flat.get("mixer_proj_rank")
    rank = -1 if rank is None else _typed("mixer_proj_rank", rank, int)
    if rank != -1 and rank < 1:
        raise ReferenceCheckpointError(
            f"`mixer_proj_rank` is {rank}; it must be at least 1, or -1 for a full map"
        )
    if rank != -1 and mixer in ("householder", "dplr"):
        fields["mixer_proj_rank"] = rank
    elif rank != -1 and mixer != "nonselective":  # which has no such map
        raise ReferenceCheckpointError(
            f"`mixer_proj_rank` is {rank}: a low-rank map is supported for householderproduct and"
            f" dplr, not for {named}"
        )

    eps = _typed("norm_eps", flat.get("norm_eps", NORM_EPS), float)
    fields["out_norm_epsilon"] = fields["eps"] = eps
    if mixer == "mixture":  # its parts are built without norm_eps
        fields["eps"] = NORM_EPS
    # FPRNN divides by the largest eigenvalue as well; not within a mixture.
    spectral = block == "fp_rnn" and mixer == "kronecker"
    fields["kronecker_norm"] = "spectral" if spectral else "rows"
    if mixer == "selective_dense" and block == "fp_rnn":
        d_model = _count("d_model", flat["d_model"])
        if DENSE_WIDTH % d_model:
            raise ReferenceCheckpointError(
                f"selectivedense is {DENSE_WIDTH} wide, which must be a multiple of d_model:"
                f" {d_model} does not divide it"
            )
        fields["expand"] = DENSE_WIDTH // d_model
    return fields


def _refuse_what_we_cannot_have(flat: dict, block: str) -> None:
    for key, (allowed, otherwise) in ONLY.items():
        if key in flat and key not in UNREAD[block] and flat[key] not in allowed:
            raise ReferenceCheckpointError(
                f"`{key}` is {flat[key]!r}: {otherwise}, which is not supported;"
                f" it may be {allowed[0]!r}"
            )
    conv_bias = _typed("conv_bias", flat.get("conv_bias", True), bool)
    if flat.get("use_short_conv", False) and not conv_bias:
        raise ReferenceCheckpointError(
            "`conv_bias` is False: a short convolution without a bias is not supported"
        )
    if flat.get("glu_in_loop", False) and block != "fp_mamba1":
        why = "FPRNN has no such gate" if block == "fp_rnn" else "FPMamba2 would gate twice there"
        raise ReferenceCheckpointError(f"`glu_in_loop` is True: {why}, which is not supported")


def reference_config(description: dict, **overrides: Any) -> FPRNNConfig:
    """A configuration under the paper's names → FPRNNConfig. Nothing of it is dropped: every key is
    mapped, is known to have no effect (NO_EFFECT, UNREAD), or is refused.

    Args:
        description: of a language model {"model_config": {d_model, n_layer, vocab_size, …},
            "ssm_cfg": {layer, mixer_type, mixer_rank, …}}, or as the paper's save_pretrained writes
            it, {d_model, n_layer, …, "ssm_cfg": {…}}; of one block {"cls", "config": {…}}. Beside
            them the solver's outlier_quantile, stepsize0, stepsize_decay, decay_patience. What is
            not given has the paper's default. overrides: fields of FPRNNConfig.
    Raises:
        ReferenceCheckpointError: an unknown key, layer, mixer or activation; a key with two values;
            a value that has an effect which we cannot have.
    """
    from lm.model.configuration_fprnn import FPRNNConfig

    flat = _flat(description)
    block = _block(flat)
    flat = {**DEFAULTS[block], **flat}
    is_lm = flat.get("cls") == LANGUAGE_MODEL or bool({"ssm_cfg", "model_config"} & {*description})
    for key in ("d_model", "n_layer") if is_lm else ("d_model",):
        if key not in flat:
            raise ReferenceCheckpointError(f"the configuration has no `{key}`")
    _refuse_what_we_cannot_have(flat, block)

    kwargs: dict[str, Any] = {"block": block, **ALWAYS}
    read = {k: v for k, v in flat.items() if k in MAPPED and k not in UNREAD[block]}
    for key, value in read.items():
        ours, kind = MAPPED[key]
        value = _typed(key, value, kind)
        if kwargs.setdefault(ours, value) != value:
            raise ReferenceCheckpointError(
                f"the configuration contradicts itself: `{key}` is {value!r}, but another key says"
                f" {kwargs[ours]!r}"
            )
    kwargs.update(_mixer(flat, block))
    if block == "fp_mamba2":
        kwargs["bc_norm"] = True
    rank = flat.get("dt_rank", "auto")
    if rank != "auto" and "dt_rank" not in UNREAD[block]:
        kwargs["dt_rank"] = _typed("dt_rank", rank, int)
    if "outlier_quantile" in flat:
        kwargs["quantile"] = 1 - _typed("outlier_quantile", flat["outlier_quantile"], float)
    if is_lm and "vocab_size" in kwargs:
        padded = flat.get("pad_vocab_size_multiple", 8)
        multiple = _count("pad_vocab_size_multiple", padded)
        kwargs["vocab_size"] = -(-kwargs["vocab_size"] // multiple) * multiple
    try:
        config = FPRNNConfig(**{**kwargs, **overrides})
    except ValueError as e:
        raise ReferenceCheckpointError(
            f"the configuration describes no model of ours: {e}"
        ) from None
    for key in ("d_inner", "d_ssm"):
        if key not in UNREAD[block] and flat.get(key) not in (None, config.d_inner):
            raise ReferenceCheckpointError(
                f"`{key}` is {flat[key]!r}, but expand · d_model is {config.d_inner}"
            )
    return config


def settle_head(state: dict, description: dict) -> bool:
    """Whether the head of a language model is its embedding. A head that is, and is not in the
    checkpoint, is added to `state` (under our names).

    Raises:
        ReferenceCheckpointError: the configuration says something else than the tensors.
    """
    import torch

    said = _flat(description).get("tie_embeddings")
    embedding, head = state[EMBEDDING], state.get(HEAD)
    if head is None and said is False:
        raise ReferenceCheckpointError(f"tie_embeddings is False, but the checkpoint has no {HEAD}")
    if head is None:
        state[HEAD] = embedding
        return True
    same = head.shape == embedding.shape and torch.equal(head, embedding)
    if said and not same:
        raise ReferenceCheckpointError(
            f"tie_embeddings is True, but {HEAD} is not the embedding of the checkpoint"
        )
    return same if said is None else said


def read_checkpoint(path: Path) -> dict:
    """The tensors of a .pth, .pt, .bin or .safetensors file under our names.

    Raises:
        ReferenceCheckpointError: no such file, or it holds no state dict.
    """
    import torch

    path = Path(path)
    if not path.is_file():
        raise ReferenceCheckpointError(f"no checkpoint at {path}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as e:
        raise ReferenceCheckpointError(refused_pickle(path, e)) from None
    except Exception as e:
        reason = str(e).splitlines()[0]
        raise ReferenceCheckpointError(f"{path} cannot be read as a checkpoint: {reason}") from None
    for key in ("state_dict", "model", "module", "model_state_dict"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not any(torch.is_tensor(v) for v in state.values()):
        raise ReferenceCheckpointError(
            f"{path} holds no state dict (a mapping of names to tensors)"
        )
    prefix = re.compile(r"^((module|_orig_mod|model)\.)+")
    return {reference_name(prefix.sub("", k)): v for k, v in state.items() if torch.is_tensor(v)}


def mismatch(state: dict, expected: dict) -> str:
    """Every name that is missing, extra or misshapen, or ''."""
    findings = []
    for what, names in [
        ("missing", sorted(expected.keys() - state.keys())),
        ("extra", sorted(state.keys() - expected.keys())),
        (
            "of another shape",
            [
                f"{n} {tuple(state[n].shape)}, not {tuple(expected[n].shape)}"
                for n in sorted(expected.keys() & state.keys())
                if state[n].shape != expected[n].shape
            ],
        ),
    ]:
        if names:
            findings.append(f"{len(names)} {what}: {', '.join(names)}")
    return "; ".join(findings)


def import_reference(
    checkpoint: Path, config: Path, out: Path, tokenizer: Path | None = None
) -> Path:
    """A language model of the paper's code → our HuggingFace directory `out`, solved as ours are.

    Args:
        checkpoint: its .pth (or state dict). config: its configuration as JSON or YAML, see
        `reference_config`. tokenizer: a folder whose files are copied beside the model.
    Raises:
        ReferenceCheckpointError: unreadable input, or a checkpoint of another architecture: lists
            the names that are missing, extra or misshapen; nothing is written then.
    """
    import yaml

    from lm.export.export import write_export
    from lm.model.modeling_fprnn import FPRNNForCausalLM

    config = Path(config)
    if not config.is_file():
        raise ReferenceCheckpointError(f"no config at {config}")
    try:
        text = config.read_text(encoding="utf-8")
        description = parse_json(text) if config.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as e:
        reason = str(e).splitlines()[0]
        raise ReferenceCheckpointError(f"{config} is neither JSON nor YAML: {reason}") from None
    if not isinstance(description, dict):
        raise ReferenceCheckpointError(f"{config} must hold a mapping")
    state = read_checkpoint(checkpoint)
    if EMBEDDING not in state:
        raise ReferenceCheckpointError(
            f"{checkpoint} is no language model of the paper's code: it has no {EMBEDDING};"
            f" its first names are {', '.join(list(state)[:3])}"
        )
    try:
        settings = {"tie_embeddings": settle_head(state, description), **SOLVER}
        if "vocab_size" not in _flat(description):
            settings["vocab_size"] = state[EMBEDDING].shape[0]
        model = FPRNNForCausalLM(reference_config(description, **settings))
    except (ReferenceCheckpointError, ValueError) as e:
        raise ReferenceCheckpointError(f"{config}: {e}") from None
    wrong = mismatch(state, model.state_dict())
    if wrong:
        raise ReferenceCheckpointError(f"{checkpoint} does not fit {config}: {wrong}")
    model.load_state_dict(state, strict=True)
    return write_export(model.float(), out, tokenizer, Path(checkpoint).stem, ORIGIN)
