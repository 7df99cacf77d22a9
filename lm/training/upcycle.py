"""Start a model from the weights of another model: pair their layers and copy weights.

A layer with a partner in the source takes the partner's weights. A layer without a partner is new:
its out_proj is set to zero, so that it adds nothing to the residual stream at first. In this way
fixed-point layers are inserted into a Mamba (docs/recipes.md).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lm.common.errors import BAD_CONFIG, ConfigError, UserError
from lm.model.fields import FIELDS_BY_KIND, resolve_d_ff, resolve_n_heads
from lm.runs.exported import format_first_names

if TYPE_CHECKING:
    from torch import Tensor

    from lm.model.configuration_fprnn import FPRNNConfig
    from lm.model.modeling_fprnn import FPRNNForCausalLM

EMBEDDING, HEAD = "backbone.embeddings.weight", "lm_head.weight"
# These fields only choose initial weights.
INIT_FIELDS = ("mixer_gate_init_bias", "out_proj_init_scale", "short_conv_identity_init")
# Fields whose "auto" depends on other fields: {field: function of the config}.
DERIVED_FIELDS = {"n_heads": resolve_n_heads, "d_ff": resolve_d_ff}
LAYER_INDEX = re.compile(r"(?<=^backbone\.layers\.)\d+")
# Settings that may differ from the source's although they change outputs; the log lists them.
LOGGED_FIELDS = ("token", "stopping", "tol", "eval_tol", "max_iters", "reset_at_eos")


class SourceError(UserError, RuntimeError):
    """A folder that holds no model from which a run can start."""

    exit_status = BAD_CONFIG


class SourceModel(NamedTuple):
    """A language model whose weights another model can take.

    Attributes:
        path: Folder of the model.
        description: Kind of the folder, for messages.
        config: FPRNNConfig of the model.
        weights: State dict under our names, without the head if it is tied to the embedding.
        tokenizer: Folder of the tokenizer, or None.
    """

    path: Path
    description: str
    config: Any
    weights: dict
    tokenizer: Path | None = None


@dataclass
class WeightMatch:
    """Weights that a model takes from a source.

    Attributes:
        partners: For every layer of the model, the index of its partner in the source, or None.
        weights: {name in the model: tensor of the source}.
        new: Names of the model's weights that the source does not have.
        differences: Reasons why the outputs at the start differ from the source's.
    """

    source: SourceModel
    model: FPRNNForCausalLM
    partners: list[int | None]
    weights: dict[str, Tensor] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def apply(self) -> None:
        """Copy the weights into the model, and zero the out_proj of every new layer."""
        state = self.model.state_dict()  # the parameters themselves, not copies
        for name, tensor in self.weights.items():
            state[name].copy_(tensor)
        for layer, partner in zip(self.model.backbone.layers, self.partners):
            if partner is None:
                for p in layer.block.out_proj.parameters():
                    p.detach().zero_()

    def describe(self) -> list[str]:
        """Return lines for the log: the number of weights taken, new layers, differences."""
        size = sum(tensor.numel() for tensor in self.weights.values()) / 1e6
        counts = f"{len(self.weights)} weights ({size:.3f} M) taken, {len(self.new)} new"
        lines = [f"{self.source.path} ({self.source.description}): {counts}"]
        layers = enumerate(zip(self.model.config.layer_list(), self.partners))
        new_layers = [f"{i} ({layer.kind})" for i, (layer, partner) in layers if partner is None]
        if new_layers:
            lines.append(f"new layers, whose out_proj is zero: {', '.join(new_layers)}")
        outputs = "the source's"
        if self.differences:
            outputs = f"not the source's: {'; '.join(self.differences)}"
        elif self.other_settings:
            outputs += ", except for the effect of other settings"
        return [*lines, f"outputs at the start are {outputs}", *self.other_settings]

    @property
    def other_settings(self) -> list[str]:
        """Settings that differ from the source's, and may change outputs."""
        settings = []
        for name in LOGGED_FIELDS:
            value, source_value = (getattr(m.config, name) for m in (self.model, self.source))
            if value != source_value:
                settings.append(f"{name} is {value}, in the source {source_value}")
        return settings

    def record(self) -> dict:
        """Return the content of init_from.json."""
        layers = zip(self.model.config.layer_list(), self.partners)
        return {
            "path": str(self.source.path),
            "what": self.source.description,
            "layers": [{"kind": layer.kind, "from": partner} for layer, partner in layers],
            "outputs_equal": not self.differences and not self.other_settings,
            "differs": [*self.differences, *self.other_settings],
        }


def match_weights(
    source: SourceModel,
    model: FPRNNForCausalLM,
    partial: bool = False,
    vocab_size: int | None = None,
    token_difference: str = "",
) -> WeightMatch:
    """Find the weights that a model can take from a source, without changing the model.

    Args:
        source: Model from which the weights are taken.
        model: Model of the run; it may be on the meta device, with any vocabulary.
        partial: Take the weights that fit. Otherwise refuse a model with other outputs.
        vocab_size: Size of the run's vocabulary, or None if it is not known yet.
        token_difference: Reason why token ids mean other tokens in the source, or "".

    Raises:
        ConfigError: If a weight or an option does not match; with `partial`, only if d_model
            differs or a layer cannot be new.
    """
    source_config, config = source.config, model.config
    if source_config.d_model != config.d_model:
        raise ConfigError(
            f"init_from: {source.path} has d_model {source_config.d_model}, model.d_model is"
            f" {config.d_model}: weights of another width cannot be taken"
        )
    match = WeightMatch(source, model, pair_layers(source_config, config))
    if not token_difference and vocab_size not in (None, source_config.vocab_size):
        token_difference = (
            f"its vocabulary has {source_config.vocab_size} tokens, this run's {vocab_size}"
            " (model.vocab_size, or the tokenizer's)"
        )
    if token_difference:
        match.differences.append(token_difference)
    elif config.tie_embeddings and HEAD in source.weights:
        match.differences.append("its head is not its embedding, and model.tie_embeddings is true")
    for index, layer in enumerate(source_config.layer_list()):
        if index not in match.partners:
            match.differences.append(f"layer {index} of the source ({layer.kind}) is not used")
    for index, partner in enumerate(match.partners):
        match.differences += _compare_layers(source_config, config, index, partner)
    _match_names(match, {EMBEDDING, HEAD} if token_difference else set())
    if match.differences and not partial:
        raise ConfigError(
            f"init_from: {source.path} ({source.description}) does not match this run's model:"
            f" {'; '.join(match.differences)}; init_from.partial=true takes the weights that fit"
        )
    return match


def pair_layers(source_config: FPRNNConfig, config: FPRNNConfig) -> list[int | None]:
    """Pair each layer of a model with a layer of the same kind of the source, in their order.

    Returns:
        For each layer the index of its partner. It is None if the source has no layer of the same
        kind after the last partner.
    """
    source_kinds = [layer.kind for layer in source_config.layer_list()]
    partners: list[int | None] = []
    start = 0  # first layer of the source that may still become a partner
    for kind in (layer.kind for layer in config.layer_list()):
        partner = source_kinds.index(kind, start) if kind in source_kinds[start:] else None
        partners.append(partner)
        start = start if partner is None else partner + 1
    return partners


def _compare_layers(
    source_config: FPRNNConfig, config: FPRNNConfig, index: int, partner: int | None
) -> list[str]:
    """List the options in which a layer differs from its partner; refuse a new LSTM."""
    layer = config.layer_list()[index]
    if partner is None:
        if layer.kind == "lstm":  # has no out_proj that could be zeroed
            raise ConfigError(f"layer {index} is a new lstm, which cannot begin by adding nothing")
        return []
    layer_config = config.layer_config(layer)
    source_layer_config = source_config.layer_config(source_config.layer_list()[partner])
    differences = []
    for name in FIELDS_BY_KIND[layer.kind]:
        get_value = DERIVED_FIELDS.get(name, attrgetter(name))
        value, source_value = get_value(layer_config), get_value(source_layer_config)
        if value != source_value and name not in INIT_FIELDS:
            label = f"layer {index} ({layer.kind})"
            differences.append(f"{label}: {name} is {value}, in the source {source_value}")
    return differences


def _rename_layers(weights: dict[str, Tensor], partners: list[int | None]) -> dict[str, Tensor]:
    """Return the source's weights by their names in the model, without layers that are not used."""
    layer_by_partner = {partner: layer for layer, partner in enumerate(partners)}
    renamed = {}
    for name, tensor in weights.items():
        match = LAYER_INDEX.search(name)
        if match is None:  # not a weight of a layer
            renamed[name] = tensor
        elif (source_layer := int(match[0])) in layer_by_partner:
            renamed[LAYER_INDEX.sub(str(layer_by_partner[source_layer]), name)] = tensor
    return renamed


def _match_names(match: WeightMatch, excluded: set[str]) -> None:
    """Split the model's weights into taken and new ones; weights in `excluded` are new."""
    source_weights = _rename_layers(match.source.weights, match.partners)
    source_weights.setdefault(HEAD, source_weights[EMBEDDING])
    new_layer_prefixes = tuple(
        f"backbone.layers.{i}." for i, partner in enumerate(match.partners) if partner is None
    )
    unmatched = []
    for name, tensor in match.model.state_dict().items():
        if name == HEAD and match.model.config.tie_embeddings:
            continue
        source = source_weights.get(name)
        # `match_weights` compares the vocabularies; this model may have one of any size.
        fits = source is not None and (name in (EMBEDDING, HEAD) or source.shape == tensor.shape)
        if fits and name not in excluded:
            match.weights[name] = source
            continue
        match.new.append(name)
        if not fits and not name.startswith(new_layer_prefixes):
            unmatched.append(name)
    if unmatched:
        match.differences.append(f"no weight of the same shape for {format_first_names(unmatched)}")
