"""The fields of a model and of its solver: name, default, what each can be, and what it means.

`FPRNNConfig`, the sections `model:` and `solver:` of the YAML and docs/config.md are made from it.
Below them: the kinds of layers, and the language of layer patterns, `"mamba*3 fp_mamba1 mlp"` or a
list with options.
"""

import difflib
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

AUTO_WINDOW = 128
TOKENS = ("auto", "exact", "iterate")
SCHEDULES = {
    "auto": "sequential with householder or dplr (on a GPU: where its kernel can), else window:128",
    "sequential": "one token after the other",
    "window:W": "W tokens at once, then the next W",
    "parallel": "all tokens at once",
}


def parse_schedule(text: str) -> int | None:
    """The width of the windows that a schedule (see SCHEDULES) solves at once: a number of tokens,
    0 for all, None for `auto`.

    Raises:
        ValueError: no such schedule, or an impossible width.
    """
    plain, text = {"auto": None, "sequential": 1, "parallel": 0}, str(text)
    if text in plain:
        return plain[text]
    kind, _, width = text.partition(":")
    if kind == "window" and width.isdecimal() and int(width) > 0:
        return int(width)
    known = "; ".join(f"{name} ({what})" for name, what in SCHEDULES.items())
    raise ValueError(f"schedule is `{text}`; W is at least 1, and the schedules are: {known}")


class Number(NamedTuple):
    """Finite numbers between two ends, which belong to them unless `open` names them."""

    least: float
    most: float = math.inf
    open: str = ""  # "left", "right" or "both"
    whole: bool = False

    def holds(self, value: Any) -> bool:
        """Return whether a value is one of these numbers."""
        is_number = isinstance(value, int if self.whole else int | float)
        if isinstance(value, bool) or not is_number:
            return False
        above = self.least < value if self.open in ("left", "both") else self.least <= value
        below = value < self.most if self.open in ("right", "both") else value <= self.most
        return above and below and abs(value) <= sys.float_info.max

    def words(self) -> str:
        """Describe the numbers: `a whole number from 1 to 65,536`."""
        kind = "a whole number" if self.whole else "a number"
        after = self.open in ("left", "both")
        if self.most == math.inf:
            return f"{kind} above {self.least:g}" if after else f"{kind} from {self.least:g} on"
        if not self.open:
            return f"{kind} from {self.least:g} to {self.most:,g}"
        before = "below" if self.open in ("right", "both") else "up to"
        return f"{kind} above {self.least:g} and {before} {self.most:g}"


class Parsed(NamedTuple):
    """Texts that a function reads: it raises a ValueError, whose sentence says what is known."""

    parse: Callable[[str], Any]
    forms: tuple[str, ...]


class Field(NamedTuple):
    """One field of a model or its solver.

    Args:
        takes: What its values are: some names, `bool`, numbers, texts that a function reads; None
            for what only the code that reads it can judge.
        or_else: Values besides these: "auto", None.
        free: A resumed run may have another value: nothing trained depends on it.
    """

    default: Any
    takes: tuple[str, ...] | type[bool] | Number | Parsed | None
    meaning: str
    or_else: tuple[Any, ...] = ()
    free: bool = False

    def words(self) -> str:
        """Describe the values: `one of rows, spectral, or auto`; "" for what `takes` None."""
        if isinstance(self.takes, Number):
            words = self.takes.words()
        elif isinstance(self.takes, Parsed):
            words = f"one of {', '.join(self.takes.forms)}"
        elif isinstance(self.takes, tuple):
            words = f"one of {', '.join(map(str, self.takes))}"
        else:
            words = "true or false" if self.takes is bool else ""
        return ", or ".join([words, *({None: "null"}.get(other, other) for other in self.or_else)])

    def takes_value(self, value: Any) -> bool:
        """Return whether the field can have a value.

        Raises:
            ValueError: A text that cannot be read, with a sentence of its own.
        """
        if any(value is other or value == other for other in self.or_else):
            return True
        if isinstance(self.takes, Parsed):
            self.takes.parse(value)
            return True
        if isinstance(self.takes, Number):
            return self.takes.holds(value)
        if self.takes is bool:
            return isinstance(value, bool)
        return self.takes is None or value in self.takes

    def check(self, name: str, value: Any) -> None:
        """Raise a ValueError, in a sentence, if the field cannot have a value."""
        if not self.takes_value(value):
            raise ValueError(f"{name} is {value!r}: it must be {self.words()}")


# Far above what a machine holds, and far below what no tensor can have.
SIZE = Number(1, 65_536, whole=True)
COUNT = Number(1, 10**9, whole=True)
EXPAND = Number(0, 65_536, open="left")
POSITIVE = Number(0, open="left")
FRACTION = Number(0, 1)
SHARE = Number(0, 1, open="left")
AUTO = ("auto",)

# The architecture: the section `model:` has these too.
ARCHITECTURE = {
    "d_model": Field(768, SIZE, "Width of the residual stream."),
    "n_layer": Field(12, Number(1, 10_000, whole=True), "Number of layers."),
    "d_state": Field(16, SIZE, "N, the state size of a channel."),
    "expand": Field(
        2, EXPAND, "The recurrence is d_inner = expand · d_model wide, which is a whole number."
    ),
    "tie_embeddings": Field(True, bool, "Embedding and head share their weights."),
    "embedding_init_std": Field(
        0.02,
        POSITIVE,
        "Standard deviation of the embedding at the start. What a layer adds to the residual stream"
        " is 0.02 of a Mamba layer and 0.2 of a fixed-point layer then"
        " (docs/language-model.md#who-speaks-first).",
    ),
    "block": Field("fp_mamba1", ("fp_mamba1", "fp_mamba2", "fp_rnn"), "The fixed-point block."),
    "layers": Field(
        None,
        None,
        "Which layers there are, `mamba*3 fp_mamba1` or a list with options"
        " (docs/model.md#layer-patterns); `null`: `n_layer` layers of `block`. Of `fprnn` alone.",
    ),
    "headdim": Field(
        64,
        SIZE,
        "Head dimension of `fp_mamba2`, `mamba2`, `mamba3` and `m2rnn`; divides d_inner. Of layers"
        " with `n_heads`: see there.",
    ),
    "mixer": Field(
        "householder",
        None,
        "The channel mixer Q (paper App. C.3): `householder`, `dplr`, `kronecker`, `monarch`,"
        " `nonselective`, `mixture` or `selective_dense`; `module:Class` is one of your own"
        " (docs/extending.md#add-a-mixer) and runs its code.",
    ),
    "mixer_rank": Field(1, SIZE, "r: number of reflections, or rank; of `monarch` the block size."),
    "mixer_proj_rank": Field(
        None, SIZE, "q of the low-rank map to the reflection vectors; `null`: a full map.", (None,)
    ),
    "mixer_gate_init_bias": Field(
        "auto",
        Number(-20, 20),
        "The bias that the gates of the mixer start with (of `householder`, `dplr`, `kronecker`,"
        " `monarch`, `mixture`). At −3 they are 0.05 at first instead of 0.5: the layer starts"
        " nearly as a diagonal one, and learns to mix. `auto`: −3 for `kronecker`, `monarch` and"
        " `mixture` of `fp_mamba1` and `fp_mamba2` with `token: exact`"
        " (docs/model.md#where-a-token-has-several-solutions), else 0, as in the paper"
        " (docs/language-model.md#one-change-at-a-time).",
        AUTO,
        free=True,  # of new weights alone
    ),
    "eigen_range": Field(
        "signed", ("signed", "positive"), "Eigenvalues of Q in [−1, 1] or in [0, 1]."
    ),
    "kronecker_norm": Field(
        "auto",
        ("rows", "spectral"),
        "Kronecker: rows normalised, or divided by the largest eigenvalue as well. `auto`:"
        " `spectral` for `fp_rnn`, else `rows`.",
        AUTO,
    ),
    "contractive": Field(
        "auto",
        Number(0, 1, open="both"),
        "κ: scales Q so that ‖I − Q‖ ≤ κ. `auto`: 0.95 for `fp_rnn` with `monarch` or"
        " `nonselective`, which nothing else bounds; else none.",
        ("auto", None),
    ),
    "mixer_h_dep": Field(
        True, bool, "The mixer reads sh(y), the previous token's iterate, as well as x."
    ),
    "b_h_dep": Field(
        True,
        bool,
        "B reads sh(y) as well as x (Table 1). This and the next three: of `fp_mamba1` and"
        " `fp_mamba2`.",
    ),
    "c_h_dep": Field(True, bool, "C reads sh(y) as well as x."),
    "dt_h_dep": Field(
        False,
        bool,
        "The step size Δ, and with it the decay λ = exp(Δ A), reads sh(y) as well as x. Costs time:"
        " the decays of an iteration are not those of the next.",
    ),
    "gate_h_dep": Field(
        True,
        bool,
        "The output gate, where it is outside the iteration, reads sh(y) as well as x, through"
        " d_inner² weights.",
    ),
    "glu_in_loop": Field(False, bool, "The output gate is inside the iteration."),
    "use_short_conv": Field(False, bool, "A causal convolution on x."),
    "state_centroids": Field(
        0,
        Number(0, 65_536, whole=True),
        "k > 0: mixer, B, C (and Δ with `dt_h_dep`) read sh(y) through k learned vectors: the"
        " nearest of them is read softly in its place, and zero where there is no token before."
        " That pulls a state back to where it was. For `fp_mamba1` and `fp_mamba2`; no GPU kernel"
        " supports it.",
    ),
    "n_heads": Field(
        "auto",
        SIZE,
        "Heads of `attention`, delta layers, `rwkv7` and `slstm`; divides d_model. Of"
        " `name: mamba2`, `mamba3` and `m2rnn` too: divides d_inner. `auto`: as many of `headdim`"
        " as fit; one where the layer is narrower.",
        AUTO,
    ),
    "d_ff": Field(
        "auto",
        SIZE,
        "Width inside `mlp` layers; `auto`: 8/3 · d_model, rounded up to a multiple of 64.",
        AUTO,
    ),
    "n_householder": Field(
        2, SIZE, "Steps a token of `deltaproduct` and `gated_deltaproduct`, the layers too."
    ),
    "out_norm_epsilon": Field(1e-5, POSITIVE, "Of the LayerNorm that ends an iteration."),
    "reset_at_eos": Field(
        True, bool, "A token after EOS starts from an empty state (packed documents)."
    ),
}

# What a pattern gives to a layer as its option (docs/model.md#layer-patterns), and no key sets.
LAYER_OPTIONS = {
    "dt_rank": Field("auto", SIZE, "Rank of the map to Δ; `auto`: ⌈d_model / 16⌉.", AUTO),
    "ngroups": Field(
        1,
        SIZE,
        "Groups of B, C of `fp_mamba2`, `mamba2` and `mamba3`, of keys and queries of `m2rnn`;"
        " divides the heads.",
    ),
    "mixer_act": Field("silu", ("silu", "relu", "identity"), "Activation of the mixer's vectors."),
    "out_proj_init_scale": Field(
        1.0,
        POSITIVE,
        "Factor on `out_proj` of a fixed-point layer at the start: how loud it is at first"
        " (docs/language-model.md#who-speaks-first).",
    ),
    "symm_mixer": Field(False, bool, "The mixer reads x + sh(y) instead of [x, sh(y)]."),
    "bc_norm": Field(True, bool, "B and C are normalised."),
    "eps": Field(
        1e-5, POSITIVE, "Floor of the norms that vectors inside the iteration are divided by."
    ),
    "allow_neg_eigval": Field(
        "auto",
        bool,
        "β of `gated_deltanet`, `kda` and the DeltaProducts is in (0, 2), not (0, 1); `auto`: for"
        " the DeltaProducts only, as in flash-linear-attention.",
        AUTO,
    ),
}

# How the layers are solved: the section `solver:`. No weight depends on these.
SOLVER = {
    "token": Field(
        "auto",
        TOKENS,
        "`exact`: each token's own equation is solved, given all before it, so that every schedule"
        " has the same solution. `iterate`: the paper's iteration f. `auto`: `iterate` under"
        " `stopping: paper`, else `exact`.",
    ),
    "schedule": Field(
        "auto",
        Parsed(parse_schedule, tuple(SCHEDULES)),
        "How time is gone through: one token after the other; W tokens at once, then the next W;"
        " all at once. `auto`: `sequential` with householder or dplr (on a GPU where its kernel"
        " can: r ≤ 8, padded d·r ≤ 65,536, `dt_h_dep: false`), else `window:128`;"
        " under `stopping: paper` `parallel`, which it needs.",
    ),
    "stopping": Field(
        "auto",
        ("auto", "causal", "paper"),
        "`causal`: a token has converged when it and all before it have. `paper`: all tokens of the"
        " batch stop at once (App. B.4); needs `token: iterate`. `auto`: `causal`, or `paper` where"
        " `token` is `iterate`.",
    ),
    "tol": Field(
        0.1,
        POSITIVE,
        "Relative residual at which a token (`paper`: a sequence) has converged in training; with"
        " `token: exact` at most 0.01, and none with `schedule: sequential`.",
    ),
    "eval_tol": Field(
        "auto",
        POSITIVE,
        "The same in evaluation. `auto`: with `token: exact` at most 1e-5 (fp64 1e-9, bf16 products"
        " 0.01); with `iterate` `tol`, under `causal` at most 0.01.",
        AUTO,
        free=True,
    ),
    "max_iters": Field(
        100,
        COUNT,
        "ℓmax in training with `token: iterate`, of a token (`paper`: of the solve). Exact tokens"
        " have no limit: a window of W ends after W + 1.",
    ),
    "eval_max_iters": Field(1000, COUNT, "ℓmax in evaluation.", free=True),
    "quantile": Field(
        "auto",
        FRACTION,
        "Quantile of the batch's residuals that must be below `tol` in training under `stopping:"
        " paper`; in evaluation all must. `auto`: the paper's for the block.",
        AUTO,
    ),
    "stepsize": Field("auto", SHARE, "Damping: the first step size.", AUTO),
    "stepsize_decay": Field(
        "auto", SHARE, "Damping: factor on the step size after 15 iterations without gain.", AUTO
    ),
    "gradient": Field(
        "auto",
        ("auto", "exact", "one_step", "implicit"),
        "`exact`: backpropagation through time of the solution; `one_step`: the paper's;"
        " `implicit`: of the fixed point of the paper's iteration (docs/model.md). `auto`: `exact`,"
        " or `one_step` where `token` is `iterate`, which has no `exact`.",
    ),
    "n_backwards": Field(1, COUNT, "Steps of the `one_step` gradient (App. B.2)."),
    "state_noise": Field(
        0.0,
        Number(0),
        "Gaussian noise on sh(y) wherever the iteration reads it, in training alone, in units of"
        " the vector that the block's norm makes (fp_rnn: of y); every sequence has its own"
        " standard deviation from U[0, σ] (docs/fixed-point.md#noise-gives-states-a-margin).",
    ),
}

VOCAB_SIZE = Field(50280, Number(1, 2**24, whole=True), "Rows of the embedding.")
FIELDS = {"vocab_size": VOCAB_SIZE, **ARCHITECTURE, **LAYER_OPTIONS, **SOLVER}
# Former name → present name, for the config.json of an earlier version (lm/config/old_keys.py has
# the keys of YAML files).
RENAMED_FIELDS = {
    "embedding_start": "embedding_init_std",
    "out_start": "out_proj_init_scale",
    "mixer_gate_start": "mixer_gate_init_bias",
}


# The mixers of lm/model/mixers.py, in the order in which they are registered.
MIXERS = (
    "householder",
    "dplr",
    "kronecker",
    "monarch",
    "nonselective",
    "selective_dense",
    "mixture",
)
GATED = ("householder", "dplr", "kronecker", "monarch", "mixture")  # mixers with gates a_t


def heads_of(config: Any) -> int:
    """Of attention and of a delta layer: `n_heads`, or as many of `headdim` as fit in d_model, at
    least one."""
    return max(1, config.d_model // config.headdim) if config.n_heads == "auto" else config.n_heads


def negative_eigenvalues(config: Any, kind: str) -> bool:
    """Whether β of a delta layer is in (0, 2), not (0, 1)."""
    if config.allow_neg_eigval == "auto":
        return kind in ("deltaproduct", "gated_deltaproduct")
    return bool(config.allow_neg_eigval)


def width_of_mlp(config: Any) -> int:
    """Width inside the gated MLP: 8/3 · d_model rounded up to a multiple of 64 (Llama's rule)."""
    return -(-8 * config.d_model // (3 * 64)) * 64 if config.d_ff == "auto" else config.d_ff


FIXED_POINT = ("fp_mamba1", "fp_mamba2", "fp_rnn")
_OF_MIXERS = (
    "mixer",
    "mixer_rank",
    "mixer_proj_rank",
    "mixer_act",
    "mixer_gate_init_bias",
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
    "out_proj_init_scale",
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
    "attention": ("n_heads",),
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


def rename_options(layers: Any, table: dict[str, str] = RENAMED_FIELDS) -> Any:
    """Return a pattern whose options have other names, by a table of old name → new name."""
    if not isinstance(layers, list | tuple):
        return layers
    return [
        {
            kind: {table.get(name, name): value for name, value in options.items()}
            if isinstance(options, dict)
            else options
            for kind, options in item.items()
        }
        if isinstance(item, dict)
        else item
        for item in layers
    ]


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
