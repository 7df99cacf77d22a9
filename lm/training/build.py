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
from lm.config.schema import Config, Run

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def vocabulary(cfg: Config, tokenizer_size: int | None = None) -> int:
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
        cfg.train.precision,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )


def build_section(
    model: Model,
    solver: Solver,
    vocab_size: int,
    seq_len: int,
    precision: str,
    **token_ids: Any,
) -> PreTrainedModel:
    """The `model:` and `solver:` sections of a YAML → PreTrainedModel with freshly initialised
    weights.

    Args:
        solver: not read by the baselines, which have none. seq_len: tokens of a training sequence.
        precision: "fp32" or "bf16". token_ids: eos_token_id, pad_token_id.
    Raises:
        ConfigError: sizes, or settings of the solver, that do not go together.
    """
    # transformers says on every build which CUDA packages of Mamba are absent; `fprnn train` says
    # it once, in its own words.
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        if model.name == "fprnn":
            _check_options(model)
            _register_own_mixers(model)
        with contextlib.redirect_stdout(io.StringIO()):
            return _build(model, solver, vocab_size, seq_len, precision, **token_ids)
    finally:
        logger.setLevel(level)


def with_built_in_mixers(cfg: Config) -> tuple[Config, list[str]]:
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


def check_section(model: Model, solver: Solver, seq_len: int, precision: str) -> PreTrainedModel:
    """Find out whether a model can be built, before there is data or a run directory: it is, on the
    meta device, without weights, for a vocabulary of 8.

    Raises:
        ConfigError: as `build_section`.
    """
    import torch

    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return build_section(model, solver, 8, seq_len, precision)


def missing_kernels(cfg: Run) -> str | None:
    """A warning where a Mamba baseline would run transformers' slow reference scan on a GPU."""
    import importlib.util

    import torch

    if cfg.model.name not in ("mamba", "mamba2") or not torch.cuda.is_available():
        return None
    absent = [p for p in ("mamba_ssm", "causal_conv1d") if importlib.util.find_spec(p) is None]
    if not absent:
        return None
    return (
        f"warning: {' and '.join(absent)} not installed: transformers' Mamba falls back to a slow"
        " scan that keeps (b,l,d,n) tensors; pip install 'fprnn[gpu]'"
    )


def _build(
    model: Model,
    solver: Solver,
    vocab_size: int,
    seq_len: int,
    precision: str,
    **token_ids: Any,
) -> PreTrainedModel:
    from lm import baselines

    if model.name != "fprnn":
        return baselines.build_baseline(
            model, vocab_size, precision=precision, seq_len=seq_len, **token_ids
        )
    from lm.model.configuration_fprnn import FPRNNConfig
    from lm.model.mixer_base import MixerError
    from lm.model.modeling_fprnn import FPRNNForCausalLM

    others = {"name", "vocab_size", "gradient_checkpointing", *baselines.FIELDS}
    if model.layers is None and model.position == "alibi":
        raise ConfigError("model.position alibi is of model.name transformer, not of fprnn")
    if model.backend == "fla" and "gated_delta" in str(model.layers):
        raise ConfigError(
            "model.backend fla is of the baselines: layers of a pattern compute the delta rule in"
            " chunks of their own; leave it at auto"
        )
    try:
        config = FPRNNConfig(
            **model.model_dump(exclude=others),
            **solver.model_dump(),
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
