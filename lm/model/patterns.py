"""The language of layer patterns: `"mamba*3 fp_mamba1 attention mlp"`, or a list with options."""

import difflib
from typing import Any, NamedTuple

FIXED_POINT = ("fp_mamba1", "fp_mamba2", "fp_rnn")
_OF_MIXERS = (
    "mixer",
    "mixer_rank",
    "mixer_proj_rank",
    "mixer_act",
    "mixer_gate_start",
    "eigen_range",
    "kronecker_norm",
    "contractive",
    "mixer_h_dep",
    "symm_mixer",
)
_OF_BLOCKS = (
    "expand",
    "use_short_conv",
    "out_norm_epsilon",
    "out_start",
    "eps",
)
_OF_FP_MAMBA = (
    *_OF_MIXERS,
    *_OF_BLOCKS,
    "d_state",
    "b_h_dep",
    "c_h_dep",
    "dt_h_dep",
    "gate_h_dep",
    "bc_norm",
    "glu_in_loop",
    "state_centroids",
)
_OF_DELTA = ("n_heads", "headdim", "expand", "allow_neg_eigval")
# Every kind of layer, and the fields of FPRNNConfig that it reads: these may be its options.
KINDS = {
    "fp_mamba1": (*_OF_FP_MAMBA, "dt_rank"),
    "fp_mamba2": (*_OF_FP_MAMBA, "headdim", "ngroups"),
    "fp_rnn": (*_OF_MIXERS, *_OF_BLOCKS),
    "mamba": ("expand", "d_state", "dt_rank"),
    "mamba2": ("expand", "d_state", "headdim", "ngroups"),
    "mamba3": ("expand", "d_state", "headdim", "ngroups"),
    "gated_deltanet": _OF_DELTA,
    "gated_deltaproduct": (*_OF_DELTA, "n_householder"),
    "deltaproduct": (*_OF_DELTA, "n_householder"),
    "kda": _OF_DELTA,
    "rwkv7": ("n_heads", "headdim"),
    "slstm": ("n_heads", "headdim"),
    "m2rnn": ("expand", "d_state", "headdim", "ngroups"),
    "attention": ("n_heads", "position", "attention_window"),
    "mlp": ("d_ff",),
    "lstm": (),
}
_WIDE_MAMBA, _WIDE_MAMBA2 = ("A_log", "D", "dt_proj.bias"), ("A_log", "D", "dt_bias")
_WIDE_DELTA = ("A_log", "dt_bias")
# What the short forms of `model.name` stand for: n_layer times these layers.
STACKS = {
    "mamba": "mamba",
    "mamba2": "mamba2",
    "mamba3": "mamba3 mlp",
    "transformer": "attention mlp",
    "lstm": "lstm",
    "gated_deltanet": "gated_deltanet mlp",
    "deltaproduct": "deltaproduct mlp",
    "gated_deltaproduct": "gated_deltaproduct mlp",
    "kda": "kda mlp",
    "rwkv7": "rwkv7 mlp",
    "slstm": "slstm mlp",
    "m2rnn": "m2rnn mlp",
}
# Parameters whose exp() and softplus() need more digits than half precision has.
IN_FP32 = {
    "fp_mamba1": _WIDE_MAMBA,
    "mamba": _WIDE_MAMBA,
    "fp_mamba2": _WIDE_MAMBA2,
    "mamba2": _WIDE_MAMBA2,
    "gated_deltanet": _WIDE_DELTA,
    "gated_deltaproduct": _WIDE_DELTA,
    "kda": _WIDE_DELTA,
    "mamba3": ("D", "dt_bias"),
    "m2rnn": _WIDE_MAMBA2,
}


class Layer(NamedTuple):
    """One layer of a pattern."""

    kind: str  # of KINDS
    options: dict  # fields of FPRNNConfig that are others in this layer


def pattern_of(layers: Any) -> list[Layer]:
    """The Layers that a pattern names, once.

    Args:
        layers: a line of kinds, each with a count if it likes (`mamba*3`), or a list of such lines
            and of mappings {kind: {field: value}}.
    Raises:
        ValueError: as `parse`, but for n_layer.
    """
    pattern = []
    for item in [layers] if isinstance(layers, str) else _checked_list(layers):
        if isinstance(item, str):
            for word in item.split():
                pattern += _repeated(word, {})
        else:
            pattern += _with_options(item)
    if not pattern:
        raise ValueError("layers is empty: it must name a layer, as `mamba*3 fp_mamba1` does")
    kinds = sorted({layer.kind for layer in pattern} & set(FIXED_POINT))
    if len(kinds) > 1:
        raise ValueError(
            f"layers has {' and '.join(kinds)}: the fixed-point layers of one model are of one"
            " kind, since its solver's defaults are those of that kind"
        )
    return pattern


def parse(layers: Any, n_layer: int) -> list[Layer]:
    """The layers of a model, one after the other.

    Args: layers: see `pattern_of`. n_layer: how many there are; a pattern of fewer is repeated.
    Returns:
        n_layer Layers.
    Raises:
        ValueError: an unknown kind, an option that the kind does not have, several kinds of
            fixed-point layers, a pattern that does not fit n_layer.
    """
    pattern = pattern_of(layers)
    if n_layer % len(pattern):
        fitting = len(pattern) * max(1, round(n_layer / len(pattern)))
        raise ValueError(
            f"layers has {len(pattern)} layers, and n_layer is {n_layer}: n_layer must be"
            f" {len(pattern)}, or a multiple of it that repeats the pattern, as {fitting} is"
        )
    return pattern * (n_layer // len(pattern))


def _checked_list(layers):
    if isinstance(layers, list | tuple) and all(isinstance(item, str | dict) for item in layers):
        return layers
    raise ValueError(
        f"layers is {layers!r}: it must be a line such as `mamba*3 fp_mamba1`, or a list of kinds"
        " and of mappings {kind: {option: value}}"
    )


def _with_options(item):
    if len(item) != 1 or not isinstance(next(iter(item.values())), dict):
        raise ValueError(
            f"layers has {item!r}: a layer with options is a mapping of one kind to its options,"
            " {fp_mamba1: {mixer_rank: 2}}"
        )
    ((word, options),) = item.items()
    return _repeated(str(word), options)


def _repeated(word, options):
    kind, star, count = word.partition("*")
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"layers names `{kind}`{hint}: the kinds are {', '.join(KINDS)}")
    if star and not (count.isdecimal() and int(count) > 0):
        raise ValueError(f"layers has `{word}`: a count is a whole number above 0, as in {kind}*3")
    for name in options:
        if name not in KINDS[kind]:
            near = difflib.get_close_matches(name, KINDS[kind], 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(
                f"layers gives `{name}` to {kind}{hint}: its options are {', '.join(KINDS[kind])}"
            )
    return [Layer(kind, options)] * (int(count) if star else 1)
