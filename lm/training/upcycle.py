"""Pair the layers of a run's model with those of a source, and take over the weights.

A layer with a partner takes its weights. A layer without a partner is new and adds nothing to the
residual stream: its out_proj is zero. So fixed-point layers are inserted into a Mamba
(docs/recipes.md).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lm.common.errors import ConfigError
from lm.model.fields import KINDS, heads_of, width_of_mlp
from lm.training.foreign import EMBEDDING, HEAD, Source

if TYPE_CHECKING:
    from lm.model.configuration_fprnn import FPRNNConfig
    from lm.model.modeling_fprnn import FPRNNForCausalLM

# Fields on which an output depends, and which may differ from the source's.
NOTED_FIELDS = (
    *("token", "stopping", "tol", "eval_tol", "max_iters", "eval_max_iters"),
    "reset_at_eos",
)
START_FIELDS = ("mixer_gate_init_bias", "out_proj_init_scale")  # only new weights depend on these
MAX_NAMES = 6  # names of weights that a message gives


@dataclass
class Match:
    """What a model takes from a Source.

    Attributes:
        taken: {name here: name there}.
        new: Names of the weights that keep their initial values.
        pairs: For every layer here the number of its partner, or None.
        silent: Layers whose out_proj is zeroed.
        differs: Reasons why the outputs at the start are not the source's; [] if they are.
        notes: Fields of the model and the solver that differ.
    """

    taken: dict[str, str] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    pairs: list[int | None] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def match(
    source: Source,
    model: FPRNNForCausalLM,
    partial: bool = False,
    vocabulary: int | None = None,
    other_tokens: str = "",
) -> Match:
    """Find out which weights a model takes, and change nothing.

    Args:
        source: Model that the weights are taken from.
        model: Model of the run; it may be on the meta device.
        partial: Take the weights that fit; otherwise the outputs must be the source's.
        vocabulary: Tokens of the model; None: not known yet, and taken to be the source's.
        other_tokens: Difference of the tokenizers, in words; "" if none is known.

    Raises:
        ConfigError: If something is missing, extra, misshapen or configured differently; under
            `partial` if d_model differs, or nothing fits.
    """
    theirs, ours = source.config, model.config
    if theirs.d_model != ours.d_model:
        raise ConfigError(
            f"init_from: {source.path} has d_model {theirs.d_model}, model.d_model is"
            f" {ours.d_model}: nothing of another width can be taken"
        )
    shapes = {name: t.shape for name, t in model.state_dict().items()}
    if ours.tie_embeddings:
        del shapes[HEAD]
    matched = Match(pairs=pair_layers(source, ours, partial))
    for name in NOTED_FIELDS:
        there, here = getattr(theirs, name), getattr(ours, name)
        if there != here:
            matched.notes.append(f"{name} is {here} here, and {there} there")
    wanted = {"backbone.norm_f.weight": "backbone.norm_f.weight"}
    wanted |= _match_vocabulary(matched, source, ours, vocabulary, other_tokens)
    for index in range(len(matched.pairs)):
        wanted |= _match_layer(matched, theirs, ours, index, shapes)
    problems = _take(matched, source, shapes, wanted)
    if (problems or matched.differs) and not partial:
        raise ConfigError(
            f"init_from: {source.path} ({source.what}) is not this run's model:"
            f" {'; '.join([*problems, *matched.differs])}; init_from.partial=true takes what fits,"
            " and says what that is"
        )
    if not matched.taken:
        raise ConfigError(f"init_from: nothing in {source.path} ({source.what}) fits the model")
    matched.differs[:0] = problems
    return matched


def pair_layers(source: Source, ours: FPRNNConfig, partial: bool) -> list[int | None]:
    """Return for every layer of a model the number of its partner in a source, or None.

    With equally many layers they are paired one to one; otherwise each layer in turn gets the next
    unused layer of its kind. Under `partial` layers of another kind in between are passed over.
    """
    here = [layer.kind for layer in ours.layer_list()]
    there = [layer.kind for layer in source.config.layer_list()]
    if len(here) == len(there):
        return list(range(len(here)))
    pairs: list[int | None] = []
    used = 0
    for kind in here:
        candidates = there[used:] if partial else there[used : used + 1]
        if kind in candidates:
            pairs.append(used + candidates.index(kind))
            used += candidates.index(kind) + 1
        else:
            pairs.append(None)
    return pairs


def _match_vocabulary(
    matched: Match, source: Source, ours: FPRNNConfig, vocabulary: int | None, other_tokens: str
) -> dict[str, str]:
    """Return {name here: name there} of embedding and head; {} if their rows are other tokens."""
    theirs = source.config
    if other_tokens:
        matched.differs.append(other_tokens)
        return {}
    if vocabulary not in (None, theirs.vocab_size):
        matched.differs.append(
            f"it has a vocabulary of {theirs.vocab_size} tokens, this run's model one of"
            f" {vocabulary} (model.vocab_size, or the tokenizer's)"
        )
        return {}
    wanted = {EMBEDDING: EMBEDDING}
    if not ours.tie_embeddings:
        wanted[HEAD] = HEAD if HEAD in source.weights else EMBEDDING
    elif HEAD in source.weights:
        matched.differs.append("its head is not its embedding, and model.tie_embeddings is true")
    return wanted


def _match_layer(
    matched: Match, theirs: FPRNNConfig, ours: FPRNNConfig, index: int, shapes: dict
) -> dict[str, str]:
    """Return {name here: name there} of a layer, and note the differences of the two."""
    layer, partner = ours.layer_list()[index], matched.pairs[index]
    if partner is not None:
        other = theirs.layer_list()[partner]
        label = f"layer {index} ({layer.kind}, of its layer {partner})"
        if layer.kind == other.kind:
            configs = ours.of_layer(layer), theirs.of_layer(other)
            for name in KINDS[layer.kind]:
                values = [_value(config, name) for config in configs]
                if values[0] != values[1] and name not in START_FIELDS:
                    matched.differs.append(f"{label}: {name} is {values[0]}, and {values[1]} there")
            here, there = f"backbone.layers.{index}.", f"backbone.layers.{partner}."
            return {n: n.replace(here, there, 1) for n in shapes if n.startswith(here)}
        # A weight of the same name would mean something else.
        matched.differs.append(f"{label}: it is a {other.kind} there")
        matched.pairs[index] = None
    if layer.kind == "lstm":
        raise ConfigError(f"layer {index} is a new lstm, which cannot begin by adding nothing")
    matched.silent.append(index)
    return {}


def _value(config: Any, name: str) -> Any:
    """Return a field of a layer's config, with the defaults that depend on other fields."""
    if name == "n_heads":
        return heads_of(config)
    if name == "d_ff":
        return width_of_mlp(config)
    return getattr(config, name)


def _take(matched: Match, source: Source, shapes: dict, wanted: dict[str, str]) -> list[str]:
    """Fill in taken and new; return the missing, extra and misshapen names in words."""
    problems: dict[str, list[str]] = {"missing": [], "extra": [], "of another shape": []}
    at_vocabulary = {EMBEDDING, HEAD}  # these are compared by their number of tokens
    compared = set(at_vocabulary)
    for name, shape in shapes.items():
        there = wanted.get(name, "")  # no weight has this name
        tensor = source.weights.get(there)
        if tensor is not None and (tensor.shape == shape or name in at_vocabulary):
            matched.taken[name] = there
        else:
            matched.new.append(name)
            if tensor is not None:
                sizes = f"{list(tensor.shape)} there, {list(shape)} here"
                problems["of another shape"].append(f"{name} {sizes}")
            elif there:
                problems["missing"].append(name)
        compared.add(there)
    problems["extra"] = [name for name in source.weights if name not in compared]
    return [
        f"{len(names)} {what}: {', '.join(names[:MAX_NAMES])}{', …' * (len(names) > MAX_NAMES)}"
        for what, names in problems.items()
        if names
    ]


def apply(matched: Match, source: Source, model: FPRNNForCausalLM) -> None:
    """Give a model the weights that `match` has found for it."""
    import torch

    state = model.state_dict()  # the parameters themselves, under all their names
    with torch.no_grad():
        for name, there in matched.taken.items():
            state[name].copy_(source.weights[there])
        for index in matched.silent:
            for p in model.backbone.layers[index].block.out_proj.parameters():
                p.zero_()


def described(matched: Match, source: Source, config: FPRNNConfig) -> list[str]:
    """Return lines that say which weights are taken."""
    kinds = [layer.kind for layer in config.layer_list()]
    size = sum(source.weights[name].numel() for name in matched.taken.values()) / 1e6
    taken = f"{len(matched.taken)} weights ({size:.3f} M) taken, {len(matched.new)} new"
    lines = [f"{source.path} ({source.what}): {taken}"]
    if matched.silent:
        named = ", ".join(f"{index} ({kinds[index]})" for index in matched.silent)
        lines.append(f"new layers, whose out_proj is zero: {named}")
    if matched.differs:
        lines.append(f"outputs at the start are not the source's: {'; '.join(matched.differs)}")
    else:
        lines.append("outputs at the start are the source's")
    return [*lines, *matched.notes]


def record(matched: Match, source: Source, config: FPRNNConfig) -> dict:
    """Return the content of init_from.json."""
    layers = [
        {"kind": layer.kind, "from": partner, "adds_nothing": index in matched.silent}
        for index, (layer, partner) in enumerate(zip(config.layer_list(), matched.pairs))
    ]
    return {
        "path": str(source.path),
        "what": source.what,
        "layers": layers,
        "outputs_equal": not matched.differs,
        **asdict(matched),
    }
