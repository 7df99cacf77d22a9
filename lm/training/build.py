"""Models built from a configuration: our models and the baselines."""

from __future__ import annotations

import contextlib
import io
import logging
import math
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from lm.common.errors import ConfigError
from lm.config.model import Model, Solver
from lm.config.plugin import is_class_path, load_class
from lm.config.schema import Config
from lm.model.fields import FIELDS_BY_KIND, STACKS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def model_vocab_size(cfg: Config, tokenizer_size: int | None = None) -> int:
    """Return `model.vocab_size`; if it is auto, the tokenizer's size as a multiple of 8.

    Args:
        cfg: Configuration of the run.
        tokenizer_size: Number of tokens of the tokenizer; None if it is not loaded (dry run).

    Raises:
        ConfigError: If the tokenizer has too many tokens, or no size is known.
    """
    size = cfg.model.vocab_size
    if size == "auto":
        if tokenizer_size is None and cfg.tokenizer.name == "bpe":
            tokenizer_size = cfg.tokenizer.vocab_size  # of the BPE that the run will train
        if not tokenizer_size:
            raise ConfigError(
                f"model.vocab_size is `auto` and tokenizer `{cfg.tokenizer.name}` is not loaded:"
                " set model.vocab_size (50264 for gpt2)"
            )
        return math.ceil(tokenizer_size / 8) * 8
    if tokenizer_size is not None and tokenizer_size > size:
        raise ConfigError(
            f"the tokenizer has {tokenizer_size} tokens but model.vocab_size is {size}:"
            f" set model.vocab_size to at least {tokenizer_size}, or to auto"
        )
    return size


def build_model(
    cfg: Config, vocab_size: int, eos_token_id: int | None = None, pad_token_id: int | None = None
) -> PreTrainedModel:
    """Build the model of a configuration with initial weights, on the default device."""
    return build_section(
        cfg.model,
        cfg.solver,
        vocab_size,
        cfg.data.seq_len,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )


def build_section(
    model: Model, solver: Solver, vocab_size: int, seq_len: int, **token_ids: Any
) -> PreTrainedModel:
    """Build the model of the sections `model` and `solver` with initial weights.

    Args:
        model: Section `model`.
        solver: Section `solver`.
        vocab_size: Size of the vocabulary.
        seq_len: Tokens of a training sequence.
        **token_ids: eos_token_id, pad_token_id.

    Raises:
        ConfigError: If sizes or settings of the solver do not fit together.
    """
    # transformers would log at every build that CUDA packages of Mamba are missing. `fprnn train`
    # prints the kernels once.
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        _check_options(model)
        _register_custom_mixers(model)
        with contextlib.redirect_stdout(io.StringIO()):
            return _construct(model, solver, vocab_size, seq_len, **token_ids)
    finally:
        logger.setLevel(level)


def replace_custom_mixers(cfg: Config) -> tuple[Config, list[str]]:
    """Replace every mixer named `module:Class` by `householder`, so that no user code is run.

    Returns:
        The configuration, and the names of the mixers that were replaced.
    """
    mixers = _custom_mixers(cfg.model)
    if not mixers:
        return cfg, mixers
    cfg = cfg.model_copy(deep=True)
    if is_class_path(cfg.model.mixer):
        cfg.model.mixer = "householder"
    for _, options in _layer_options(cfg.model):
        if is_class_path(str(options.get("mixer"))):
            options["mixer"] = "householder"
    cfg.init_from = None  # its layers would be compared with the wrong mixer
    return cfg, mixers


def check_section(model: Model, solver: Solver, seq_len: int) -> PreTrainedModel:
    """Check sections by `build_section` on the meta device, with a vocabulary of 8 tokens."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return build_section(model, solver, 8, seq_len)


def expand_stack(model: Model) -> Model:
    """Replace a `model.name` such as `mamba` by the layers that it stands for.

    The models of STACKS do not reset their state between packed documents. A section with the name
    `fprnn` is returned unchanged.

    Raises:
        ConfigError: If `model.layers` is set as well, or sizes do not fit together.
    """
    if model.name == "fprnn":
        return model
    if model.layers is not None:
        raise ConfigError(f"model.layers needs model.name fprnn, not {model.name}")
    pattern = STACKS[model.name]
    fields: dict[str, Any] = {"name": "fprnn", "layers": pattern, "reset_at_eos": False}
    fields["n_layer"] = model.n_layer * len(pattern.split())
    if "ngroups" in FIELDS_BY_KIND[pattern.split()[0]]:  # these layers read headdim, not n_heads
        fields["headdim"] = _compute_headdim(model)
    elif "mlp" in pattern and model.n_heads == "auto":  # n_heads is derived from headdim
        _check_headdim(model)
    return model.model_copy(update=fields)


def _check_headdim(model: Model) -> None:
    """Refuse a headdim that does not divide d_model, unless there is only one head."""
    if model.d_model > model.headdim and model.d_model % model.headdim:
        raise ConfigError(
            f"model.headdim is {model.headdim}: it must divide d_model = {model.d_model}; or set"
            " model.n_heads"
        )


def _compute_headdim(model: Model) -> int:
    """Return the size of a head: d_inner / n_heads, or headdim if n_heads is auto."""
    d_inner = round(model.expand * model.d_model)
    if model.n_heads == "auto":
        return min(model.headdim, max(1, d_inner))
    if d_inner % model.n_heads:
        raise ConfigError(
            f"model.n_heads is {model.n_heads}: it must divide expand · d_model = {d_inner}"
        )
    return d_inner // model.n_heads


def _construct(
    model: Model, solver: Solver, vocab_size: int, seq_len: int, **token_ids: Any
) -> PreTrainedModel:
    from lm.model.configuration_fprnn import FPRNNConfig
    from lm.model.mixer_base import MixerError
    from lm.model.modeling_fprnn import FPRNNForCausalLM

    excluded = {"name", "vocab_size", "gradient_checkpointing"}
    solver_fields = {}
    if model.name == "fprnn":
        solver_fields = solver.model_dump()
    elif model.has_state_noise:  # lstm and slstm
        solver_fields = {"state_noise": solver.state_noise}
    model = expand_stack(model)
    try:
        config = FPRNNConfig(
            **model.model_dump(exclude=excluded),
            **solver_fields,
            vocab_size=vocab_size,
            # At least the default. No layer reads it; lm-evaluation-harness cuts contexts to it.
            max_position_embeddings=max(2048, seq_len),
            **token_ids,
        )
    except ValueError as e:  # its message begins with the name of the field
        section = "solver" if str(e).partition(" ")[0] in Solver.model_fields else "model"
        raise ConfigError(f"{section}: {e}") from None
    try:
        return FPRNNForCausalLM(config)
    except MixerError as e:
        raise ConfigError(f"model: {e}") from None


def _register_custom_mixers(model: Model) -> None:
    """Import the mixers named `module:Class`; raise ConfigError if one cannot be used."""
    from lm.model.mixer_base import MixerError, register

    for name in _custom_mixers(model):
        try:
            register(name, load_class(name, "model.mixer"))
        except MixerError as e:
            raise ConfigError(f"model.mixer: {e}") from None


def _layer_options(model: Model) -> list[tuple[str, dict[str, Any]]]:
    """Return (kind, options) of each layer in `model.layers` that has options."""
    layers = model.layers if isinstance(model.layers, list) else []
    return [pair for layer in layers if isinstance(layer, dict) for pair in layer.items()]


def _custom_mixers(model: Model) -> list[str]:
    """Return the mixers named `module:Class`, in the section and in options of single layers."""
    layer_mixers = [o["mixer"] for _, o in _layer_options(model) if "mixer" in o]
    mixers = dict.fromkeys([model.mixer, *layer_mixers])  # each once
    return [name for name in mixers if is_class_path(str(name))]


def _check_options(model: Model) -> None:
    """Raise a ConfigError if an option of a layer has a value that is not allowed."""
    for kind, options in _layer_options(model):
        for name, value in options.items():
            if name not in Model.model_fields:
                continue  # FPRNNConfig refuses unknown options
            try:
                Model.model_validate({name: value})
            except ValidationError as e:
                reason = e.errors()[0]["msg"].removeprefix("Value error, ")
                raise ConfigError(f"model.layers, {kind}: {name} is {value!r}: {reason}") from None
