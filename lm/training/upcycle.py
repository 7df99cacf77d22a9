"""Which weights a model takes from another, which are its own, and whether its outputs stay equal.

Layers are paired; a paired layer takes the weights of its partner, one without a partner is new and
adds nothing to the residual stream: its out_proj is zero. A `mamba2` may become an `fp_mamba2`
whose mixing starts at the identity (docs/recipes.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from lm.common.errors import ConfigError
from lm.model.fields import heads_of, width_of_mlp
from lm.model.patterns import FIXED_POINT, KINDS
from lm.training.foreign import EMBEDDING, HEAD, Source, counted

if TYPE_CHECKING:
    from lm.model.configuration_fprnn import FPRNNConfig
    from lm.model.modeling_fprnn import FPRNNForCausalLM

# The gates a of a mixer that starts at the identity: σ(GATE) by their number, by which ‖I − Q‖ is
# at most 2 σ(GATE) ≈ 1.7e-6. It cannot be 0, and the smaller it is the longer it takes to open.
GATE = -14.0
GATE_OF_TWO = -8.0  # where two gates are multiplied
# (a kind there, a kind here) whose weights have the same meaning; only the first computes the same.
RELATED = [("mamba2", "fp_mamba2"), ("mamba", "fp_mamba1")]
# What an fp_mamba2 must be to compute what a mamba2 does when its mixing is the identity.
AS_MAMBA2 = {"bc_norm": False, "glu_in_loop": True, "use_short_conv": True}
OUT_NORM = {"block.out_norm.weight": "block.norm.weight"}  # its name in a mamba2
# Fields of the solver on which an output depends.
OF_THE_SOLUTION = ("token", "stopping", "tol", "eval_tol", "max_iters", "eval_max_iters")
# Mixers that `_start_at_identity` knows.
AT_IDENTITY = ("householder", "dplr", "kronecker", "monarch", "nonselective", "mixture")
# Off, or the identity, first.
NEW_IN_FP = (
    "block.mixer.",
    "block.bc_y_proj.",
    "block.dt_y_proj.",
    "block.z_y_proj.",
    "block.centroids.",
)


@dataclass
class Match:
    """What a model takes from a Source.

    Args:
        taken: {name here: name there}. new: what keeps its initial values. left: names of the
            source that are not taken. numbers: parameters of each of the three. pairs: of every
            layer here the number of its partner, or None. silent: layers whose out_proj is zeroed.
            converted: layers whose mixing starts at the identity. differs: why the outputs at the
            start are not the source's; [] where they are. notes: what else is to be known.
    """

    taken: dict[str, str] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    pairs: list[int | None] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)
    converted: list[int] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def match(
    source: Source,
    model: FPRNNForCausalLM,
    layers: Literal["auto"] | list[int | None] = "auto",
    partial: bool = False,
    vocabulary: int | None = None,
    other_tokens: str = "",
) -> Match:
    """Find out what a model takes, and change nothing.

    Args:
        model: an FPRNNForCausalLM; it may be on the meta device. layers: of every layer the number
            of its partner, or null; auto: see `paired`. partial: take what fits; else the outputs
            must be the source's. vocabulary: tokens of the model; None: not known yet, and taken
            for the source's. other_tokens: in what the tokenizers differ, in words; "": in nothing
            that is known.
    Raises:
        ConfigError: what is missing, extra, misshapen or configured otherwise; under `partial`
            another d_model, or where nothing fits.
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
    matched = Match(pairs=paired(source, ours, layers, partial))
    wanted = {"backbone.norm_f.weight": "backbone.norm_f.weight"}
    wanted |= _vocabulary(matched, source, ours, vocabulary, other_tokens)
    _compare_models(matched, theirs, ours)
    for index in range(len(matched.pairs)):
        prefix = f"backbone.layers.{index}."
        names = [name.removeprefix(prefix) for name in shapes if name.startswith(prefix)]
        wanted |= _of_layer(matched, theirs, ours, index, names)
    problems = _take(matched, source, shapes, wanted)
    if (problems or matched.differs) and not partial:
        raise ConfigError(
            f"init_from: {source.path} ({source.what}) is not this run's model:"
            f" {'; '.join([*problems, *matched.differs])}; init_from.partial=true takes what fits,"
            " and says what that is"
        )
    if not matched.taken:
        raise ConfigError(f"init_from: nothing in {source.path} ({source.what}) fits the model")
    matched.differs = [*problems, *matched.differs]
    return matched


def _take(matched: Match, source: Source, shapes: dict, wanted: dict[str, str]) -> list[str]:
    """Fill in what is taken, new and left → what is missing, extra or misshapen, in words."""
    missing, misshapen, numbers = [], [], {"taken": 0, "new": 0}
    at_vocabulary = {EMBEDDING, HEAD}  # these are compared by their number of tokens
    accounted_for = set(at_vocabulary)
    for name, shape in shapes.items():
        there = wanted.get(name, "")  # no tensor's name: nothing there means the same
        tensor = source.weights.get(there)
        if tensor is not None and (tensor.shape == shape or name in at_vocabulary):
            matched.taken[name] = there
            numbers["taken"] += tensor.numel()
            continue
        matched.new.append(name)
        numbers["new"] += shape.numel()
        if tensor is not None:
            misshapen.append(f"{name} {list(tensor.shape)} there, {list(shape)} here")
            accounted_for.add(there)
        elif there:
            missing.append(name)
    used = set(matched.taken.values())
    matched.left = [name for name in source.weights if name not in used]
    numbers["left"] = sum(source.weights[name].numel() for name in matched.left)
    matched.numbers = numbers
    extra = [name for name in matched.left if name not in accounted_for]
    kinds = [("missing", missing), ("extra", extra), ("of another shape", misshapen)]
    return [counted(what, names) for what, names in kinds if names]


def _vocabulary(
    matched: Match, source: Source, ours: FPRNNConfig, vocabulary: int | None, other_tokens: str
) -> dict[str, str]:
    """Embedding and head: {name here: name there}; none where their rows are of other tokens."""
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


def _compare_models(matched: Match, theirs: FPRNNConfig, ours: FPRNNConfig) -> None:
    kinds = ({layer.kind for layer in config.layer_list()} for config in (theirs, ours))
    if set.intersection(*kinds) & set(FIXED_POINT):
        for name in OF_THE_SOLUTION:
            there, here = getattr(theirs, name), getattr(ours, name)
            if there != here:
                matched.notes.append(f"solver.{name} is {here} here, and {there} there")
    if ours.reset_at_eos != theirs.reset_at_eos:
        carried = "here" if theirs.reset_at_eos else "there"
        matched.notes.append(
            f"model.reset_at_eos is {str(ours.reset_at_eos).lower()}, and not there: within one"
            f" document outputs are the same, from the second on the state is carried on {carried}"
        )


# Layers.


def paired(
    source: Source,
    ours: FPRNNConfig,
    layers: Literal["auto"] | list[int | None],
    partial: bool,
) -> list[int | None]:
    """Of every layer of a model the number of its partner in a source, or None.

    auto: of as many layers one to one; else each layer in turn has the next one of its kind that
    is left, and those of the source that another kind stands in the way of have none.

    Raises:
        ConfigError: `layers` is no such list.
    """
    here = [layer.kind for layer in ours.layer_list()]
    there = [layer.kind for layer in source.config.layer_list()]
    if layers == "auto":
        if len(here) == len(there):
            return list(range(len(here)))
        pairs, used = [], 0
        for kind in here:
            following = used
            if partial:  # pass over what has no partner here
                while following < len(there) and there[following] != kind:
                    following += 1
            fits = following < len(there) and there[following] == kind
            pairs.append(following if fits else None)
            used = following + 1 if fits else used
        return pairs
    if len(layers) != len(here):
        raise ConfigError(
            f"init_from.layers has {len(layers)} entries, and the model {len(here)} layers: one"
            " each, the number of the source's layer (from 0 on) or null"
        )
    if bad := [n for n in layers if n is not None and not 0 <= n < len(there)]:
        raise ConfigError(
            f"init_from.layers names layer {bad[0]}: {source.path} has 0 to {len(there) - 1}"
        )
    numbers = [n for n in layers if n is not None]
    if not partial and numbers != sorted(set(numbers)):
        raise ConfigError(
            f"init_from.layers is {layers}: with layers twice or out of order the outputs are not"
            " the source's, which init_from.partial=true permits"
        )
    return list(layers)


def _of_layer(
    matched: Match, theirs: FPRNNConfig, ours: FPRNNConfig, index: int, names: list[str]
) -> dict[str, str]:
    """{name here: name there} of a layer; notes what becomes of it, and what is not equal.

    Args: names: of the layer's parameters, without what comes before.
    """
    partner = matched.pairs[index]
    if ours.layer_list()[index].kind == "lstm" and partner is None:
        raise ConfigError(f"layer {index} is a new lstm, which cannot begin by adding nothing")
    if partner is None:
        matched.silent.append(index)
        return {}
    layers = ours.layer_list()[index], theirs.layer_list()[partner]
    here, there = (layer.kind for layer in layers)
    configs = ours.of_layer(layers[0]), theirs.of_layer(layers[1])
    for said in _differences(here, there, *configs):
        matched.differs.append(f"layer {index} ({here}, of its layer {partner}): {said}")
    if here != there and (there, here) not in RELATED:  # an equal name would mean something else
        matched.pairs[index] = None
        matched.silent.append(index)
        return {}
    renamed: dict[str, str] = {}
    apart: tuple[str, ...] = ()
    if here != there:
        matched.converted.append(index)
        apart = NEW_IN_FP
        renamed = OUT_NORM if there == "mamba2" else {}
    return {
        f"backbone.layers.{index}.{name}": f"backbone.layers.{partner}.{renamed.get(name, name)}"
        for name in names
        if not name.startswith(apart or "-")
    }


def _differences(here: str, there: str, ours, theirs) -> list[str]:
    """Why a layer does not compute what its partner does; ours, theirs: their own configs."""
    if (there, here) == ("mamba", "fp_mamba1"):
        return ["fp_mamba1 has a LayerNorm in its loop, which Mamba has not"]
    if here != there and (there, here) not in RELATED:
        return [f"it is a {there} there"]
    said = []
    for name in KINDS[there]:
        if name in ("mixer_gate_start", "out_start"):  # of new weights alone
            continue
        value, wanted = (_value(config, name) for config in (ours, theirs))
        if value != wanted:
            said.append(f"{name} is {value}, and {wanted} there")
    if here != there:
        for name, wanted in AS_MAMBA2.items():
            if getattr(ours, name) != wanted:
                said.append(f"{name} must be {str(wanted).lower()} to start as a Mamba-2")
        if ours.out_norm_epsilon != theirs.norm_epsilon:
            said.append(
                f"out_norm_epsilon is {ours.out_norm_epsilon}, and {theirs.norm_epsilon} there"
            )
        if ours.mixer == "selective_dense":
            said.append("mixer selective_dense is never the identity")
        elif ours.mixer not in AT_IDENTITY:
            said.append(f"mixer {ours.mixer} does not start at the identity")
    return said


def _value(config, name: str):
    """What a field of a layer's config amounts to."""
    if name == "n_heads":
        return heads_of(config)
    if name == "d_ff":
        return width_of_mlp(config)
    return getattr(config, name)


# What is done.


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
        for index in matched.converted:
            _start_at_identity(model.backbone.layers[index].block)


def _start_at_identity(block) -> None:
    """Have a fixed-point block mix by Q = I at first, and read nothing of sh(y) else."""
    from lm.model.mixers import Contractive, Kronecker, Mixture, Monarch, NonSelective, Reflections

    for name in ("bc_y_proj", "dt_y_proj", "z_y_proj"):
        if hasattr(block, name):
            getattr(block, name).gain.zero_()
    mixer = block.mixer
    mixer = mixer.mixer if isinstance(mixer, Contractive) else mixer
    for part in mixer.parts if isinstance(mixer, Mixture) else [mixer]:
        if isinstance(part, NonSelective):
            part.q_proj.weight.zero_()
            part.q_proj.base.copy_(part.q_proj.base.new_ones(part.d_inner).diag())
        elif isinstance(part, Reflections):
            _shut(part.alpha_proj, GATE - math.log(part.rank))
        elif isinstance(part, Monarch):
            _shut(part.gate_proj, GATE - math.log(part.size))
        elif isinstance(part, Kronecker):
            _shut(part.gate_proj, GATE_OF_TWO)


def _shut(gate, value: float) -> None:
    """Have a gate be σ(value) of every token."""
    gate.gain.zero_()
    gate.bias.fill_(value)


# What is said.


def described(matched: Match, source: Source, config: FPRNNConfig) -> list[str]:
    """Lines that say what was taken."""
    numbers, kinds = matched.numbers, [layer.kind for layer in config.layer_list()]

    def amount(names, key):
        return f"{len(names)} weights ({numbers[key] / 1e6:.3f} M)"

    lines = [
        f"{source.path} ({source.what}): {amount(matched.taken, 'taken')} taken,"
        f" {amount(matched.new, 'new')} new, {amount(matched.left, 'left')} left"
    ]
    if matched.silent:
        named = ", ".join(f"{index} ({kinds[index]})" for index in matched.silent)
        lines.append(f"new layers, whose out_proj is zero: {named}")
    if matched.converted:
        named = ", ".join(f"{index} ({kinds[index]})" for index in matched.converted)
        lines.append(f"layers whose mixing starts at the identity: {named}")
    if matched.differs:
        lines.append(f"outputs at the start are not the source's: {'; '.join(matched.differs)}")
    else:
        lines.append("outputs at the start are the source's")
    return [*lines, *matched.notes]


def record(matched: Match, source: Source, config: FPRNNConfig) -> dict:
    """What is written down of it."""
    kinds = [layer.kind for layer in config.layer_list()]
    return {
        "path": str(source.path),
        "what": source.what,
        "layers": [
            {
                "kind": kind,
                "from": partner,
                "adds_nothing": index in matched.silent,
                "starts_at_identity": index in matched.converted,
            }
            for index, (kind, partner) in enumerate(zip(kinds, matched.pairs))
        ],
        "parameters": matched.numbers,
        "taken": matched.taken,
        "new": matched.new,
        "left": matched.left,
        "outputs_equal": not matched.differs,
        "differs": matched.differs,
        "notes": matched.notes,
    }
