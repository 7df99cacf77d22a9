"""One place that makes a model from a Config: ours, or a baseline."""

from __future__ import annotations

import contextlib
import io
import logging
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from lm.common.errors import ConfigError
from lm.config.model import Model, Solver
from lm.config.plugin import is_place, load_class
from lm.config.schema import Config
from lm.model.fields import KINDS, STACKS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def model_vocab_size(cfg: Config, tokenizer_size: int | None = None) -> int:
    """The model's vocabulary: as configured, or the tokenizer's rounded up to a multiple of 8.

    Args:
        tokenizer_size: number of ids the tokenizer uses; None when it is not at hand (dry run).
    Raises:
        ConfigError: the tokenizer does not fit, or nothing says how large the vocabulary is.
    """
    size = cfg.model.vocab_size
    if size == "auto":
        known = tokenizer_size or (cfg.tokenizer.vocab_size if cfg.tokenizer.name == "bpe" else 0)
        if not known:
            raise ConfigError(
                f"model.vocab_size is `auto` and tokenizer `{cfg.tokenizer.name}` is not loaded:"
                " set model.vocab_size (50264 for gpt2)"
            )
        return -(-known // 8) * 8
    if tokenizer_size is not None and tokenizer_size > size:
        raise ConfigError(
            f"the tokenizer has {tokenizer_size} tokens but model.vocab_size is {size}:"
            f" set model.vocab_size to at least {tokenizer_size}, or to auto"
        )
    return size


def build_model(
    cfg: Config,
    vocab_size: int,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> PreTrainedModel:
    """Config → PreTrainedModel with freshly initialised weights (on the current default device)."""
    return build_section(
        cfg.model,
        cfg.solver,
        vocab_size,
        cfg.data.seq_len,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )


def build_section(
    model: Model,
    solver: Solver,
    vocab_size: int,
    seq_len: int,
    **token_ids: Any,
) -> PreTrainedModel:
    """The `model:` and `solver:` sections of a YAML → PreTrainedModel with freshly initialised
    weights.

    Args:
        seq_len: tokens of a training sequence. token_ids: eos_token_id, pad_token_id.
    Raises:
        ConfigError: sizes, or settings of the solver, that do not go together.
    """
    # transformers says on every build which CUDA packages of Mamba are absent; `fprnn train` says
    # it once, in its own words.
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        _check_options(model)
        _register_own_mixers(model)
        with contextlib.redirect_stdout(io.StringIO()):
            return _build(model, solver, vocab_size, seq_len, **token_ids)
    finally:
        logger.setLevel(level)


def replace_custom_mixers(cfg: Config) -> tuple[Config, list[str]]:
    """(a configuration with `householder` in the place of every mixer that is named as
    `module:Class`, those names): what can be built without running anybody's code."""
    found = _own_mixers(cfg.model)
    if not found:
        return cfg, found
    cfg = cfg.model_copy(deep=True)
    for options in (*_options(cfg.model), cfg.model.__dict__):
        if is_place(str(options.get("mixer"))):
            options["mixer"] = "householder"
    cfg.init_from = None  # it would be compared with what is not there
    return cfg, found


def check_section(model: Model, solver: Solver, seq_len: int) -> PreTrainedModel:
    """Find out whether a model can be built, before there is data or a run directory: it is, on the
    meta device, without weights, for a vocabulary of 8.

    Raises:
        ConfigError: as `build_section`.
    """
    import torch

    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return build_section(model, solver, 8, seq_len)


def expand_stack(model: Model) -> Model:
    """The section with a short form of `model.name` as the layers that it stands for, which read
    packed documents as one text; any other section as it is.

    Raises:
        ConfigError: layers of a pattern beside a short form.
    """
    if model.name == "fprnn":
        return model
    if model.layers is not None:
        raise ConfigError(f"model.layers is of model.name fprnn, not of {model.name}")
    pattern = STACKS[model.name]
    fields: dict[str, Any] = {"name": "fprnn", "layers": pattern, "reset_at_eos": False}
    fields["n_layer"] = model.n_layer * len(pattern.split())
    if "ngroups" in KINDS[pattern.split()[0]]:
        fields["headdim"] = _headdim_of_d_inner(model)
    elif "mlp" in pattern and model.n_heads == "auto":
        _check_headdim(model)
    return model.model_copy(update=fields)


def _check_headdim(model: Model) -> None:
    if model.d_model > model.headdim and model.d_model % model.headdim:
        raise ConfigError(
            f"model.headdim is {model.headdim}: it must divide d_model = {model.d_model}; or set"
            " model.n_heads"
        )


def _headdim_of_d_inner(model: Model) -> int:
    """`n_heads` share d_inner; with auto, a layer narrower than headdim is one head."""
    d_inner = round(model.expand * model.d_model)
    if model.n_heads == "auto":
        return min(model.headdim, max(1, d_inner))
    if d_inner % model.n_heads:
        raise ConfigError(
            f"model.n_heads is {model.n_heads}: it must divide expand · d_model = {d_inner}"
        )
    return d_inner // model.n_heads


def _build(
    model: Model,
    solver: Solver,
    vocab_size: int,
    seq_len: int,
    **token_ids: Any,
) -> PreTrainedModel:
    from lm.model.configuration_fprnn import FPRNNConfig
    from lm.model.mixer_base import MixerError
    from lm.model.modeling_fprnn import FPRNNForCausalLM

    others = {"name", "vocab_size", "gradient_checkpointing"}
    solver_fields = solver.model_dump() if model.name == "fprnn" else {}
    model = expand_stack(model)
    try:
        config = FPRNNConfig(
            **model.model_dump(exclude=others),
            **solver_fields,
            vocab_size=vocab_size,
            max_position_embeddings=max(2048, seq_len),
            **token_ids,
        )
    except ValueError as e:
        of_solver = str(e).partition(" ")[0] in Solver.model_fields
        raise ConfigError(f"{'solver' if of_solver else 'model'}: {e}") from None
    try:
        return FPRNNForCausalLM(config)
    except MixerError as e:
        raise ConfigError(f"model: {e}") from None


def _register_own_mixers(model: Model) -> None:
    """Import the mixers that the section names as `module:Class`."""
    from lm.model.mixer_base import MixerError, register

    for name in _own_mixers(model):
        try:
            register(name, load_class(name, "model.mixer"))
        except MixerError as e:
            raise ConfigError(f"model.mixer: {e}") from None


def _options(model: Model) -> list[dict[str, Any]]:
    """The options of single layers."""
    layers = model.layers if isinstance(model.layers, list) else []
    return [options for item in layers if isinstance(item, dict) for options in item.values()]


def _own_mixers(model: Model) -> list[str]:
    """The mixers that a section names as `module:Class`, here and in options of layers."""
    named = (model.mixer, *(o["mixer"] for o in _options(model) if "mixer" in o))
    return [name for name in dict.fromkeys(named) if is_place(str(name))]


def _check_options(model: Model) -> None:
    """Refuse options of single layers that their fields cannot have."""
    for item in model.layers if isinstance(model.layers, list) else ():
        for kind, options in item.items() if isinstance(item, dict) else ():
            for name, value in options.items():
                if name not in Model.model_fields:
                    continue  # the pattern's own check names what there is
                try:
                    Model.model_validate({name: value})
                except ValidationError as e:
                    said = e.errors()[0]["msg"].removeprefix("Value error, ")
                    raise ConfigError(
                        f"model.layers, {kind}: {name} is {value!r}: {said}"
                    ) from None
