"""Mamba checkpoints of transformers and of state-spaces in our terms: configuration, names.

Their layers are `mamba` and `mamba2` of lm/model/diagonal.py, whose parameters have the same names,
shapes and meaning.
"""

from __future__ import annotations

import math
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lm.common.errors import BAD_CONFIG, UserError
from lm.common.files import parse_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from lm.model.configuration_fprnn import FPRNNConfig

EMBEDDING, HEAD = "backbone.embeddings.weight", "lm_head.weight"
RENAMES = [
    (r"^backbone\.embedding\.", "backbone.embeddings."),
    (r"^(backbone\.layers\.\d+)\.mixer\.", r"\1.block."),
]
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # beside them NAME.index.json: several files
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")  # one of them: there

# state-spaces' config.json: what we read, and what no function depends on.
OF_MODEL = {
    "d_model",
    "n_layer",
    "vocab_size",
    "ssm_cfg",
    "rms_norm",
    "residual_in_fp32",
    "norm_epsilon",
    "pad_vocab_size_multiple",
    "tie_embeddings",
    "attn_layer_idx",
    "d_intermediate",
}
OF_LAYER = {
    "layer",
    "d_state",
    "d_conv",
    "expand",
    "dt_rank",
    "bias",
    "conv_bias",
    "headdim",
    "ngroups",
    "d_ssm",
    "D_has_hdim",
    "rmsnorm",
    "norm_before_gate",
    "dt_limit",
    "process_group",
}
NO_EFFECT = {
    "fused_add_norm",
    "attn_cfg",
    "initializer_cfg",
    "architectures",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "dt_min",
    "dt_max",
    "dt_init",
    "dt_scale",
    "dt_init_floor",
    "A_init_range",
    "conv_init",
    "use_fast_path",
    "use_mem_eff_path",
    "chunk_size",
    "device",
    "layer_idx",
    "sequence_parallel",
}
LAYERS = {"Mamba1": "mamba", "Mamba": "mamba", "Mamba2": "mamba2"}


class SourceError(UserError, RuntimeError):
    """A checkpoint that cannot be started from; the message says which file and why."""

    exit_status = BAD_CONFIG


class Source(NamedTuple):
    """A language model in our terms.

    Args:
        path: where it lies. what: what it is, in words. config: the FPRNNConfig of our model that
            computes what it does. weights: under our names, in fp32, the head only where it is not
            the embedding; on the meta device where only shapes were asked for. tokenizer: the
            folder of its tokenizer, or None.
    """

    path: Path
    what: str
    config: Any
    weights: dict
    tokenizer: Path | None


def read_folder(folder: Path, shapes_only: bool = False) -> Source:
    """The Mamba or Mamba-2 of a folder as transformers or state-spaces write it.

    Raises:
        SourceError: files that are missing or damaged; a model that our layers cannot compute;
            weights that are not those of its config.json (missing, extra, misshapen, not finite).
    """
    folder = Path(folder)
    raw = read_config(folder)
    kind = raw.get("model_type")
    if kind in ("mamba", "mamba2"):
        what, (config, conv_bias) = f"transformers' {kind}", of_transformers(_their_config(folder))
    elif kind is None and "d_model" in raw:
        config, conv_bias = _of_state_spaces(folder, raw)
        what = f"state-spaces' {config.layers}"
    else:
        raise SourceError(
            f"{folder / 'config.json'} describes {f'a {kind}' if kind else 'no model known here'}:"
            " it must be mamba or mamba2 of transformers, or state-spaces' format (d_model,"
            " n_layer, ssm_cfg)"
        )
    weights = ours({name: t for file in _files(folder) for name, t in _tensors(file).items()})
    weights = settled(weights, config, folder, shapes_only, conv_bias)
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZER)
    return Source(folder, what, config, weights, folder if has_tokenizer else None)


def as_transformers(model: PreTrainedModel) -> PreTrainedModel:
    """A stack of nothing but Mamba, or Mamba-2, layers as transformers' own class, with the same
    weights; any other model as it is, and so one whose documents begin from an empty state."""
    from transformers import AutoModelForCausalLM

    theirs = _config_of_transformers(model.config)
    if theirs is None:
        return model
    other = AutoModelForCausalLM.from_config(theirs)
    names = {name: name.replace(".block.", ".mixer.") for name in model.state_dict()}
    other.load_state_dict({names[name]: t for name, t in model.state_dict().items()})
    return other.train(model.training)


def _config_of_transformers(c: FPRNNConfig) -> PretrainedConfig | None:
    """`of_transformers` the other way round; None where there is no such model."""
    from transformers import Mamba2Config, MambaConfig

    if c.model_type != "fprnn" or not c.rms_norm or (c.reset_at_eos and c.eos_token_id is not None):
        return None
    layers = c.distinct_layers()
    kind = layers[0].kind
    if len(layers) > 1 or layers[0].options or kind not in ("mamba", "mamba2"):
        return None
    fields = dict(
        vocab_size=c.vocab_size,
        hidden_size=c.d_model,
        num_hidden_layers=c.n_layer,
        state_size=c.d_state,
        expand=c.expand,
        conv_kernel=c.d_conv,
        use_bias=c.bias,
        layer_norm_epsilon=c.norm_epsilon,
        residual_in_fp32=c.residual_in_fp32,
        tie_word_embeddings=c.tie_embeddings,
        pad_token_id=c.pad_token_id,
        bos_token_id=c.bos_token_id,
        eos_token_id=c.eos_token_id,
        max_position_embeddings=c.max_position_embeddings,
    )
    if kind == "mamba":
        return MambaConfig(time_step_rank=c.dt_rank, **fields)
    if c.ngroups != 1:  # see _wrong_of_mamba2
        return None
    heads = c.d_inner // c.headdim
    return Mamba2Config(num_heads=heads, head_dim=c.headdim, n_groups=c.ngroups, **fields)


def ours(weights: dict) -> dict:
    """Their weights under our names."""
    named = {}
    for name, tensor in weights.items():
        for pattern, replacement in RENAMES:
            name = re.sub(pattern, replacement, name)
        named[name] = tensor
    return named


def settled(
    weights: dict,
    config: FPRNNConfig,
    path: Path,
    shapes_only: bool = False,
    conv_bias: bool = True,
) -> dict:
    """Weights under our names as a Source has them, checked against the model that config
    describes. conv_bias: whether its convolutions have a bias.

    Raises:
        SourceError: as `read_folder`.
    """
    import torch

    expected = expected_shapes(config)
    head = weights.get(HEAD)
    if config.tie_embeddings and head is not None:
        weights = {name: t for name, t in weights.items() if name != HEAD}
        if not shapes_only and not torch.equal(head, weights.get(EMBEDDING, head)):
            raise SourceError(
                f"{path}: its config.json says that the head is the embedding, but {HEAD} is not"
                f" {EMBEDDING}"
            )
    if not conv_bias:  # a bias of zero is none
        biases = (name for name in expected if name.endswith("conv1d.bias"))
        weights = {name: torch.zeros(expected[name]) for name in biases} | weights
    if wrong := mismatch({name: t.shape for name, t in weights.items()}, expected):
        raise SourceError(f"the weights in {path} are not those of its config.json: {wrong}")
    if shapes_only:
        return {name: t.to("meta") for name, t in weights.items()}
    weights = {name: t.to(torch.float32) for name, t in weights.items()}
    if spoilt := [name for name, t in weights.items() if not torch.isfinite(t).all()]:
        raise SourceError(f"the weights in {path} are NaN or infinite: {', '.join(spoilt)}")
    return weights


def expected_shapes(config: FPRNNConfig) -> dict:
    """The shapes of a model's weights by name; the head only where it is not the embedding."""
    import torch

    from lm.model.modeling_fprnn import FPRNNForCausalLM

    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        shapes = {name: t.shape for name, t in FPRNNForCausalLM(config).state_dict().items()}
    if config.tie_embeddings:
        del shapes[HEAD]
    return shapes


def mismatch(shapes: dict, expected: dict) -> str:
    """Every name that is missing, extra or misshapen, or ''. Both: {name: shape}."""
    both = sorted(expected.keys() & shapes.keys())
    misshapen = [
        f"{name} {list(shapes[name])}, not {list(expected[name])}"
        for name in both
        if shapes[name] != expected[name]
    ]
    return "; ".join(
        counted(what, names)
        for what, names in [
            ("missing", sorted(expected.keys() - shapes.keys())),
            ("extra", sorted(shapes.keys() - expected.keys())),
            ("of another shape", misshapen),
        ]
        if names
    )


def counted(what: str, names: list[str], most: int = 6) -> str:
    """'2 missing: a, b'; of many the first."""
    shown = ", ".join(names[:most]) + (", …" if len(names) > most else "")
    return f"{len(names)} {what}: {shown}"


# Configurations.


def read_config(folder: Path) -> dict:
    """config.json of a folder.

    Raises:
        SourceError: it is not there, or holds something else.
    """
    file = Path(folder) / "config.json"
    try:
        raw = parse_json(file.read_text(encoding="utf-8"))
    except OSError:
        raise SourceError(f"{folder} has no config.json: it holds no model") from None
    except ValueError as e:  # JSONDecodeError and UnicodeDecodeError
        raise SourceError(f"{file} is damaged: it is not JSON ({e})") from None
    if not isinstance(raw, dict):
        raise SourceError(f"{file} must hold a mapping")
    return raw


def _their_config(folder: Path):
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder)
    except Exception as e:  # whatever its validation raises
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise SourceError(f"{folder / 'config.json'} cannot be read: {reason}") from None


def of_transformers(c: PretrainedConfig) -> tuple[FPRNNConfig, bool]:
    """MambaConfig or Mamba2Config → the FPRNNConfig of the same model, and whether convolutions
    have a bias.

    Raises:
        SourceError: something in it that our layers cannot do.
    """
    kind, width = c.model_type, int(c.expand * c.hidden_size)
    fields = dict(
        vocab_size=c.vocab_size,
        d_model=c.hidden_size,
        n_layer=c.num_hidden_layers,
        layers=kind,
        d_state=c.state_size,
        expand=int(c.expand),
        d_conv=c.conv_kernel,
        bias=c.use_bias,
        norm_epsilon=c.layer_norm_epsilon,
        residual_in_fp32=c.residual_in_fp32,
        tie_embeddings=c.tie_word_embeddings,
        pad_token_id=c.pad_token_id,
        bos_token_id=c.bos_token_id,
        eos_token_id=c.eos_token_id,
        max_position_embeddings=getattr(c, "max_position_embeddings", None) or 2048,
    )
    wrong = []
    if c.hidden_act not in ("silu", "swish"):
        wrong.append(f"hidden_act is {c.hidden_act}, ours is silu")
    if c.expand * c.hidden_size != width or getattr(c, "intermediate_size", width) != width:
        wrong.append("intermediate_size is not a whole multiple (expand) of hidden_size")
    if kind == "mamba":
        fields["dt_rank"] = int(c.time_step_rank)
    else:
        fields |= {"headdim": c.head_dim, "ngroups": c.n_groups}
        wrong += _wrong_of_mamba2(
            c.n_groups,
            c.time_step_limit,
            getattr(c, "norm_before_gate", False),
            getattr(c, "rms_norm", True),
        )
    return _built(fields, wrong, c.use_conv_bias)


def _wrong_of_mamba2(groups, dt_limit, norm_before_gate, rms_norm) -> list[str]:
    wrong = []
    if groups != 1:
        wrong.append(
            f"it has {groups} groups of B and C, each with a norm of its own; ours has one"
        )
    if dt_limit is not None and [float(limit) for limit in dt_limit] != [0.0, math.inf]:
        wrong.append(f"the step sizes are clamped to {list(dt_limit)}")
    if norm_before_gate:
        wrong.append("it norms before the gate (norm_before_gate)")
    if not rms_norm:
        wrong.append("it has no gated norm")
    return wrong


def _of_state_spaces(folder: Path, raw: dict) -> tuple:
    """state-spaces' config.json → as `of_transformers`. What is not said has the default of its
    code."""
    file, layer = folder / "config.json", raw.get("ssm_cfg") or {}
    if not isinstance(layer, dict):
        raise SourceError(f"{file}: ssm_cfg is {layer!r}; it must be a mapping")
    unknown = [f"`{key}`" for key in sorted(raw.keys() - OF_MODEL - NO_EFFECT)]
    unknown += [f"`ssm_cfg.{key}`" for key in sorted(layer.keys() - OF_LAYER - NO_EFFECT)]
    if unknown:
        raise SourceError(f"{file} has {', '.join(unknown)}: what they do is not known here")
    for key in ("d_model", "n_layer", "vocab_size", "pad_vocab_size_multiple"):
        _check_size(file, key, raw.get(key, 8 if key == "pad_vocab_size_multiple" else None))
    _check_size(file, "ssm_cfg.expand", layer.get("expand", 2))
    named = layer.get("layer", "Mamba1")
    if named not in LAYERS:
        raise SourceError(f"{file}: ssm_cfg.layer is {named!r}; known are {', '.join(LAYERS)}")
    kind = LAYERS[named]
    multiple = raw.get("pad_vocab_size_multiple", 8)
    fields = dict(
        vocab_size=-(-raw["vocab_size"] // multiple) * multiple,
        d_model=raw["d_model"],
        n_layer=raw["n_layer"],
        layers=kind,
        d_state=layer.get("d_state", 16),
        expand=layer.get("expand", 2),
        d_conv=layer.get("d_conv", 4),
        bias=layer.get("bias", False),
        dt_rank=layer.get("dt_rank", "auto"),
        norm_epsilon=raw.get("norm_epsilon", 1e-5),
        rms_norm=raw.get("rms_norm", True),
        residual_in_fp32=raw.get("residual_in_fp32", True),
        tie_embeddings=raw.get("tie_embeddings", True),
    )
    wrong = []
    if raw.get("attn_layer_idx"):
        wrong.append(f"layers {raw['attn_layer_idx']} are attention (attn_layer_idx)")
    if raw.get("d_intermediate"):
        wrong.append("there is an MLP after every layer (d_intermediate)")
    if kind == "mamba2":
        wrong += _complete_mamba2(fields, layer)
    try:
        return _built(fields, wrong, layer.get("conv_bias", True))
    except SourceError as e:
        raise SourceError(f"{file}: {e}") from None


def _complete_mamba2(fields: dict, layer: dict) -> list[str]:
    """Fill in the fields of a Mamba-2 from ssm_cfg → what ours cannot be."""
    fields |= {
        "d_state": layer.get("d_state", 128),
        "headdim": layer.get("headdim", 64),
        "ngroups": layer.get("ngroups", 1),
    }
    wrong = _wrong_of_mamba2(
        fields["ngroups"],
        layer.get("dt_limit"),
        layer.get("norm_before_gate", False),
        layer.get("rmsnorm", True),
    )
    if fields["norm_epsilon"] != 1e-5:
        wrong.append("norm_epsilon is not 1e-5, that of its gated norm")
    if layer.get("D_has_hdim"):
        wrong.append("D is one number a channel (D_has_hdim), ours one a head")
    if layer.get("d_ssm") not in (None, fields["expand"] * fields["d_model"]):
        wrong.append("part of its channels pass by the recurrence (d_ssm)")
    if layer.get("process_group") is not None:
        wrong.append("it holds one rank's part of each matrix (process_group)")
    return wrong


def _check_size(file: Path, key: str, value) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SourceError(f"{file}: {key} is {value!r}; it must be a whole number above 0")


def _built(fields: dict, wrong: list[str], conv_bias: bool) -> tuple:
    from lm.model.configuration_fprnn import FPRNNConfig

    if wrong:
        raise SourceError(f"our layers cannot be this model: {'; '.join(wrong)}")
    try:
        config = FPRNNConfig(**fields, reset_at_eos=False)
    except (TypeError, ValueError) as e:
        raise SourceError(f"the configuration describes no model of ours: {e}") from None
    return config, conv_bias


# Files.


def _files(folder: Path) -> list[Path]:
    """Those that hold the weights."""
    for name in WEIGHTS:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            try:
                listed = parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()
            except (ValueError, KeyError, TypeError, AttributeError):
                raise SourceError(f"{index} is damaged: it lists no weights") from None
            return [folder / name for name in sorted(set(listed))]
    raise SourceError(f"{folder} holds no weights: neither {' nor '.join(WEIGHTS)}")


def _tensors(file: Path) -> dict:
    """Of a file, read from the disk when they are used."""
    import torch

    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        lazily = zipfile.is_zipfile(file)  # as torch has written them for years
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=lazily)
    except FileNotFoundError:
        raise SourceError(f"{file} is missing, which the index of the weights names") from None
    except Exception as e:  # the loaders raise whatever damage does
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise SourceError(f"{file} cannot be read: {reason}") from None
    if not isinstance(state, dict) or not all(torch.is_tensor(t) for t in state.values()):
        raise SourceError(f"{file} holds no weights (a mapping of names to tensors)")
    return state
