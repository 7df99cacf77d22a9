"""Mamba checkpoints of transformers in our terms, and ours in theirs: configuration, names.

Their layers are `mamba` and `mamba2` of lm/model/diagonal.py, whose parameters have the same names,
shapes and meaning. Of state-spaces' checkpoints the hub has the same ones in this format.
"""

from __future__ import annotations

import math
import pickle
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lm.common.errors import BAD_CONFIG, UserError, refused_pickle
from lm.common.files import parse_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from lm.model.configuration_fprnn import FPRNNConfig

EMBEDDING, HEAD = "backbone.embeddings.weight", "lm_head.weight"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # beside them NAME.index.json: several files
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


def check_source_folder(path: Path) -> None:
    """Refuse a path of `init_from` that is no folder.

    Raises:
        SourceError: It is none.
    """
    if not path.is_dir():
        raise SourceError(
            f"{path} is no folder: it must be a run, a checkpoint, an export, or a Mamba of"
            " transformers (of a name on the hub `fprnn import` makes one)"
        )


def read_folder(folder: Path, shapes_only: bool = False) -> Source:
    """The Mamba or Mamba-2 of a folder as transformers writes it.

    Raises:
        SourceError: files that are missing or damaged; a model that our layers cannot compute;
            weights that are not those of its config.json (missing, extra, misshapen, not finite).
    """
    folder = Path(folder)
    raw = read_config(folder)
    kind = raw.get("model_type")
    if kind not in FIELDS_OF_KIND:
        raise SourceError(
            f"{folder / 'config.json'} describes {f'a {kind}' if kind else 'no model known here'}:"
            " it must be mamba or mamba2, as transformers writes them (of state-spaces' models the"
            " hub has these too, as NAME-hf)"
        )
    theirs = _their_config(folder)
    config = of_transformers(theirs)
    tensors = {name: t for file in _files(folder) for name, t in _tensors(file).items()}
    weights = {name.replace(*IN_LAYERS): t for name, t in tensors.items()}
    weights = settled(weights, config, folder, shapes_only, theirs.use_conv_bias)
    tokenizer = folder if any((folder / name).is_file() for name in TOKENIZER) else None
    return Source(folder, f"transformers' {kind}", config, weights, tokenizer)


def as_transformers(model: PreTrainedModel) -> PreTrainedModel:
    """A stack of nothing but Mamba, or Mamba-2, layers as transformers' own class, with the same
    weights; any other model as it is, and so one whose documents begin from an empty state."""
    from transformers import AutoModelForCausalLM

    theirs = _config_of_transformers(model.config)
    if theirs is None:
        return model
    other = AutoModelForCausalLM.from_config(theirs)
    there, here = IN_LAYERS
    weights = {name.replace(here, there): t for name, t in model.state_dict().items()}
    other.load_state_dict(weights)
    return other.train(model.training)


def _config_of_transformers(c: FPRNNConfig) -> PretrainedConfig | None:
    """`of_transformers` the other way round; None where there is no such model."""
    from transformers import Mamba2Config, MambaConfig

    if c.model_type != "fprnn" or (c.reset_at_eos and c.eos_token_id is not None):
        return None
    layers = c.distinct_layers()
    kind = layers[0].kind
    if len(layers) > 1 or layers[0].options or kind not in ("mamba", "mamba2"):
        return None
    if not isinstance(c.expand, int):  # theirs is a whole number
        return None
    fields = {their: getattr(c, our) for their, our in (*FIELDS, *FIELDS_OF_KIND[kind])}
    fields["max_position_embeddings"] = c.max_position_embeddings
    if kind == "mamba":
        return MambaConfig(**fields)
    if c.ngroups != 1:  # see `_wrong_of_mamba2`
        return None
    return Mamba2Config(num_heads=c.d_inner // c.headdim, **fields)


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
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as e:  # whatever its validation raises
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise SourceError(f"{folder / 'config.json'} cannot be read: {reason}") from None


def of_transformers(c: PretrainedConfig) -> FPRNNConfig:
    """MambaConfig or Mamba2Config → the FPRNNConfig of the same model.

    Raises:
        SourceError: something in it that our layers cannot do.
    """
    from lm.model.configuration_fprnn import FPRNNConfig

    kind, width = c.model_type, int(c.expand * c.hidden_size)
    wrong = [] if kind == "mamba" else _wrong_of_mamba2(c)
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
    longest = getattr(c, "max_position_embeddings", None) or 2048
    try:
        return FPRNNConfig(
            **{**fields, "expand": int(c.expand)},
            layers=kind,
            reset_at_eos=False,
            max_position_embeddings=longest,
        )
    except (TypeError, ValueError) as e:
        raise SourceError(f"the configuration describes no model of ours: {e}") from None


def _wrong_of_mamba2(c: PretrainedConfig) -> list[str]:
    """What ours cannot be, in words."""
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
    except pickle.UnpicklingError as e:
        raise SourceError(refused_pickle(file, e)) from None
    except Exception as e:  # the loaders raise whatever damage does
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise SourceError(f"{file} cannot be read: {reason}") from None
    if not isinstance(state, dict) or not all(torch.is_tensor(t) for t in state.values()):
        raise SourceError(f"{file} holds no weights (a mapping of names to tensors)")
    return state
