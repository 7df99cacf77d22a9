"""The paper's own code in terms of ours: names of parameters, configurations, checkpoints."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path

from lm.errors import UserError

# Where the paper's implementation and ours call the same tensor differently, in order.
RENAMES = [
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
BLOCKS = {
    "FPMamba": "fp_mamba1", "FPMamba1": "fp_mamba1", "FPMamba2": "fp_mamba2", "FPRNN": "fp_rnn",
}  # fmt: skip
MIXERS = {
    "householderproduct": {"mixer": "householder"},
    "dplr": {"mixer": "dplr"},
    "kronecker": {"mixer": "kronecker"},
    "monarch": {"mixer": "monarch", "eigen_range": "positive"},
    "nonselective": {"mixer": "nonselective"},
    "mixture": {"mixer": "mixture"},
    "dense": {"mixer": "selective_dense"},
}
SAME = {
    "bc_norm", "glu_in_loop", "use_short_conv", "symm_mixer", "mixer_h_dep", "d_state", "d_conv",
    "expand", "dt_rank", "mixer_rank", "headdim", "ngroups", "n_backwards", "d_model", "n_layer",
    "vocab_size",
}  # fmt: skip


class ReferenceCheckpointError(UserError, RuntimeError):
    """A checkpoint or configuration of the paper's code that cannot be taken over."""


def reference_name(name: str) -> str:
    """The paper's parameter name → ours, e.g. mixer.u_proj.parametrizations.weight.original0 →
    mixer.u_proj.gain."""
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _look_up(table: dict, name: str, what: str):
    if name not in table:
        near = difflib.get_close_matches(str(name), table, 1, 0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ReferenceCheckpointError(f"unknown {what} `{name}`: one of {', '.join(table)}{hint}")
    return table[name]


def reference_config(description: dict, **overrides):
    """A configuration under the paper's names → FPRNNConfig.

    Args:
        description: {"model_config": {d_model, n_layer, vocab_size}, "ssm_cfg": {layer, mixer_type,
            mixer_rank, …}} for a language model, or {"cls", "config": {…}} for one block; with the
            solver's outlier_quantile, stepsize0, stepsize_decay, decay_patience beside them.
    Raises:
        ReferenceCheckpointError: an unknown layer or mixer.
    """
    from lm.model.configuration_fprnn import FPRNNConfig

    inner = description.get("ssm_cfg") or description.get("config") or description
    layer = inner.get("layer") or description.get("cls", "FPMamba1")
    block = _look_up(BLOCKS, "FPMamba1" if layer == "FPLMHeadModel" else layer, "layer")
    kwargs = {k: v for k, v in inner.items() if k in SAME and v is not None}
    kwargs.update(schedule="parallel", stopping="paper")  # solved as it was trained
    kwargs.update(block=block, **_look_up(MIXERS, inner.get("mixer_type"), "mixer_type"))
    if block == "fp_rnn":  # there the paper's code divides by the largest eigenvalue as well
        kwargs["kronecker_norm"] = "spectral"
    if (inner.get("mixer_proj_rank") or -1) > 0:
        kwargs["mixer_proj_rank"] = inner["mixer_proj_rank"]
    if "norm_eps" in inner:
        kwargs["out_norm_epsilon"] = float(inner["norm_eps"])
    for ours, theirs in [
        ("quantile", "outlier_quantile"),
        ("stepsize", "stepsize0"),
        ("stepsize_decay", "stepsize_decay"),
        ("patience", "decay_patience"),
    ]:
        if theirs in description:
            value = description[theirs]
            kwargs[ours] = 1 - value if ours == "quantile" else value
    kwargs.update({k: v for k, v in (description.get("model_config") or {}).items() if k in SAME})
    return FPRNNConfig(**{**kwargs, **overrides})


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


def _mismatch(state: dict, expected: dict) -> str:
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
    """A language model of the paper's code → our HuggingFace directory `out`.

    Args:
        checkpoint: its .pth (or state dict). config: its configuration as JSON or YAML, see
        `reference_config`. tokenizer: a folder whose files are copied beside the model.
    Raises:
        ReferenceCheckpointError: unreadable input, or a checkpoint of another architecture: lists
            the names that are missing, extra or misshapen; nothing is written then.
    """
    import yaml

    from lm.export import write_export
    from lm.model.modeling_fprnn import FPRNNForCausalLM

    config = Path(config)
    if not config.is_file():
        raise ReferenceCheckpointError(f"no config at {config}")
    try:
        text = config.read_text(encoding="utf-8")
        description = json.loads(text) if config.suffix == ".json" else yaml.safe_load(text)
    except (UnicodeDecodeError, json.JSONDecodeError, yaml.YAMLError) as e:
        reason = str(e).splitlines()[0]
        raise ReferenceCheckpointError(f"{config} is neither JSON nor YAML: {reason}") from None
    if not isinstance(description, dict):
        raise ReferenceCheckpointError(f"{config} must hold a mapping")
    state = read_checkpoint(checkpoint)
    embedding = "backbone.embeddings.weight"
    if embedding not in state:
        raise ReferenceCheckpointError(
            f"{checkpoint} is no language model of the paper's code: it has no {embedding};"
            f" its first names are {', '.join(list(state)[:3])}"
        )
    tied = "lm_head.weight" not in state or bool(
        (state["lm_head.weight"].shape == state[embedding].shape)
        and (state["lm_head.weight"] == state[embedding]).all()
    )
    state.setdefault("lm_head.weight", state[embedding])
    settings = {"vocab_size": state[embedding].shape[0], "tie_embeddings": tied}
    try:
        model = FPRNNForCausalLM(reference_config(description, **settings))
    except ValueError as e:
        raise ReferenceCheckpointError(f"{config}: {e}") from None
    wrong = _mismatch(state, model.state_dict())
    if wrong:
        raise ReferenceCheckpointError(f"{checkpoint} does not fit {config}: {wrong}")
    model.load_state_dict(state, strict=True)
    origin = "Imported from a checkpoint of the paper's code."
    return write_export(model.float(), out, tokenizer, Path(checkpoint).stem, origin)
