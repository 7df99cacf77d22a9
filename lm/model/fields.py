"""Fields of a model and its solver: name, default, accepted values and meaning.

`FPRNNConfig`, the sections `model:` and `solver:` of the YAML and docs/config.md are generated from
these tables. After the tables follow the kinds of layers, and the parser of layer patterns, which
are texts such as `"mamba*3 fp_mamba1 mlp"` or lists with options.
"""

import difflib
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

AUTO_WINDOW = 128  # tokens that `schedule: auto` solves at once, unless it is sequential
TOKEN_MODES = ("auto", "exact", "iterate")  # values of the field `token`
# Values of the field `schedule` → meaning.
SCHEDULES = {
    "auto": "sequential with householder or dplr (on a GPU: if its kernel can), else window:128",
    "sequential": "one token after the other",
    "window:W": "W tokens at once, then the next W",
    "parallel": "all tokens at once",
}


def parse_schedule(text: str) -> int | None:
    """Return the number of tokens that a schedule solves at once.

    Args:
        text: One of SCHEDULES.

    Returns:
        The number of tokens; 0 for all tokens, None for `auto`.

    Raises:
        ValueError: If there is no such schedule, or the width is not a whole number above 0.
    """
    text = str(text)
    width_by_name = {"auto": None, "sequential": 1, "parallel": 0}
    if text in width_by_name:
        return width_by_name[text]
    name, _, width = text.partition(":")
    if name == "window" and width.isdecimal() and int(width) > 0:
        return int(width)
    schedules = "; ".join(f"{name} ({meaning})" for name, meaning in SCHEDULES.items())
    raise ValueError(f"schedule is `{text}`; W is at least 1, and the schedules are: {schedules}")


class Number(NamedTuple):
    """Interval of finite numbers."""

    min: float
    max: float = math.inf
    open: str = ""  # ends that do not belong to it: "left", "right" or "both"
    is_whole: bool = False  # only whole numbers belong to it

    def contains(self, value: Any) -> bool:
        """Return whether a value is one of these numbers."""
        is_number = isinstance(value, int if self.is_whole else int | float)
        if isinstance(value, bool) or not is_number:
            return False
        is_above = self.min < value if self.open in ("left", "both") else self.min <= value
        is_below = value < self.max if self.open in ("right", "both") else value <= self.max
        is_finite = abs(value) <= sys.float_info.max  # also false for integers beyond any float
        return is_above and is_below and is_finite

    def describe(self) -> str:
        """Return a text such as `a whole number from 1 to 65,536`."""
        kind = "a whole number" if self.is_whole else "a number"
        is_left_open = self.open in ("left", "both")
        if self.max == math.inf:
            return f"{kind} above {self.min:g}" if is_left_open else f"{kind} ≥ {self.min:g}"
        if not self.open:
            return f"{kind} from {self.min:g} to {self.max:,g}"
        upper_end = "below" if self.open in ("right", "both") else "up to"
        return f"{kind} above {self.min:g} and {upper_end} {self.max:g}"


class ParsedText(NamedTuple):
    """Texts that a function parses."""

    parse: Callable[[str], Any]  # raises a ValueError, which lists the valid forms, for other texts
    forms: tuple[str, ...]  # valid forms, for the documentation


class Field(NamedTuple):
    """One field of a model or its solver.

    Args:
        default: Its default.
        values: Accepted values: a tuple of names, `bool`, an interval of numbers, or texts that a
            function parses. None if only the code that reads the field can check them.
        meaning: Its description in docs/config.md.
        extra_values: Further accepted values, such as "auto" or None.
        is_free: Whether a resumed run may have another value, because nothing trained depends on
            it.
    """

    default: Any
    values: tuple[str, ...] | type[bool] | Number | ParsedText | None
    meaning: str
    extra_values: tuple[Any, ...] = ()
    is_free: bool = False

    def describe(self) -> str:
        """Return a text such as `one of rows, spectral, or auto`; "" if `values` is None."""
        if isinstance(self.values, Number):
            text = self.values.describe()
        elif isinstance(self.values, ParsedText):
            text = f"one of {', '.join(self.values.forms)}"
        elif isinstance(self.values, tuple):
            text = f"one of {', '.join(map(str, self.values))}"
        else:
            text = "true or false" if self.values is bool else ""
        extra = ["null" if value is None else value for value in self.extra_values]
        return ", or ".join([text, *extra])

    def accepts(self, value: Any) -> bool:
        """Return whether the field can have a value.

        Raises:
            ValueError: If the value is a text that cannot be parsed.
        """
        if any(value is extra or value == extra for extra in self.extra_values):
            return True
        if isinstance(self.values, ParsedText):
            self.values.parse(value)
            return True
        if isinstance(self.values, Number):
            return self.values.contains(value)
        if self.values is bool:
            return isinstance(value, bool)
        return self.values is None or value in self.values

    def check(self, name: str, value: Any) -> None:
        """Raise a ValueError if the field cannot have a value."""
        if not self.accepts(value):
            raise ValueError(f"{name} is {value!r}: it must be {self.describe()}")


# The upper limits are far above any model that a machine can hold. They catch typing errors.
SIZE = Number(1, 65_536, is_whole=True)
COUNT = Number(1, 10**9, is_whole=True)
POSITIVE = Number(0, open="left")
FRACTION = Number(0, 1)
POSITIVE_FRACTION = Number(0, 1, open="left")
AUTO = ("auto",)  # as `extra_values`

# The architecture: the section `model:` of the YAML.
ARCHITECTURE = {
    "d_model": Field(768, SIZE, "Width of the residual stream."),
    "n_layer": Field(12, Number(1, 10_000, is_whole=True), "Number of layers."),
    "d_state": Field(16, SIZE, "States per channel of the recurrence."),
    "expand": Field(
        2,
        Number(0, 65_536, open="left"),
        "Width of the recurrence relative to d_model: d_inner = expand · d_model must be a whole"
        " number.",
    ),
    "tie_embeddings": Field(True, bool, "Embedding and head share their weights."),
    "embedding_init_std": Field(
        0.02,
        POSITIVE,
        "Standard deviation of the embedding at initialization. For comparison: a Mamba layer"
        " initially adds values of about 0.02 to the residual stream, a fixed-point layer values"
        " of about 0.2.",
    ),
    "block": Field(
        "fp_mamba1", ("fp_mamba1", "fp_mamba2", "fp_rnn"), "The kind of fixed-point block."
    ),
    "layers": Field(
        None,
        None,
        "Pattern of layers: a text such as `mamba*3 fp_mamba1`, or a list with options"
        " (docs/baselines.md#layer-patterns). `null`: `n_layer` layers of `block`. Only for"
        " `name: fprnn`.",
    ),
    "headdim": Field(
        64,
        SIZE,
        "Channels per head of `fp_mamba2`, `mamba2`, `mamba3` and `m2rnn`, a divisor of d_inner."
        " Other layers with heads read it only if `n_heads` is `auto`.",
    ),
    "mixer": Field(
        "householder",
        None,
        "The channel mixer Q (docs/model.md#mixers): `householder`, `dplr`, `kronecker`,"
        " `monarch`, `nonselective`, `mixture` or `selective_dense`. `module:Class` is a mixer of"
        " your own (docs/extending.md#add-a-mixer); its module is imported.",
    ),
    "mixer_rank": Field(
        1, SIZE, "Rank r of I − Q: the number of reflections. For `monarch` the block size."
    ),
    "mixer_proj_rank": Field(
        None,
        SIZE,
        "Rank of the linear map from the mixer's input to the reflection vectors. `null`: full"
        " rank.",
        (None,),
    ),
    "mixer_gate_init_bias": Field(
        "auto",
        Number(-20, 20),
        "Initial bias of the gates of `householder`, `dplr`, `kronecker`, `monarch` and `mixture`."
        " With −3 the gates are 0.05 instead of 0.5 at initialization: the layer starts as a"
        " nearly diagonal recurrence and learns to mix channels"
        " (docs/results-language-models.md#one-change-at-a-time). `auto`: −3 for `kronecker`,"
        " `monarch` and `mixture` in `fp_mamba1` and `fp_mamba2` with `token: exact`"
        " (docs/proofs.md#where-a-token-has-several-solutions), otherwise 0, as in the paper.",
        AUTO,
        is_free=True,  # only new weights depend on it
    ),
    "eigen_range": Field(
        "signed",
        ("signed", "positive"),
        "Range of the eigenvalues of Q: [−1, 1] with `signed`, [0, 1] with `positive`.",
    ),
    "kronecker_norm": Field(
        "auto",
        ("rows", "spectral"),
        "Normalization of the factors of `kronecker`. `rows` divides each row by its norm,"
        " `spectral` also divides by the largest eigenvalue. `auto`: `spectral` for `fp_rnn`,"
        " otherwise `rows`.",
        AUTO,
    ),
    "contractive": Field(
        "auto",
        Number(0, 1, open="both"),
        "Upper bound of ‖I − Q‖: I − Q is scaled to it. `null`: no bound. `auto`: 0.95 for"
        " `fp_rnn` with `monarch` or `nonselective`, which have no other bound; otherwise no"
        " bound.",
        ("auto", None),
    ),
    "mixer_h_dep": Field(
        True,
        bool,
        "The mixer reads sh(y), the layer's own output at the previous token, as well as x.",
    ),
    "b_h_dep": Field(
        True,
        bool,
        "B reads sh(y) as well as x (Table 1 of the paper). This key, `c_h_dep`, `dt_h_dep` and"
        " `gate_h_dep` are for `fp_mamba1` and `fp_mamba2`.",
    ),
    "c_h_dep": Field(True, bool, "C reads sh(y) as well as x."),
    "dt_h_dep": Field(
        False,
        bool,
        "The step size Δ, and with it the decay exp(Δ A), reads sh(y) as well as x. This costs"
        " time, because every iteration computes the decays again.",
    ),
    "gate_h_dep": Field(
        True,
        bool,
        "The output gate reads sh(y) as well as x, through d_inner² weights. Not with"
        " `glu_in_loop`.",
    ),
    "glu_in_loop": Field(
        False,
        bool,
        "Apply the output gate inside the map that is iterated, instead of after the solve. Only"
        " for `fp_mamba1` and `fp_mamba2`.",
    ),
    "use_short_conv": Field(False, bool, "Apply a causal convolution of width 4 to x."),
    "state_centroids": Field(
        0,
        Number(0, 65_536, is_whole=True),
        "Number of learned vectors (centroids) of every layer that can have them. Above 0, such a"
        " layer reads a mean of the centroids instead of its state after the previous token (of"
        " `slstm` only the gates do). A learned classifier of the state weights them"
        " (docs/model.md#centroids). This corrects a state that has drifted from its centroid. Only"
        " for `fp_mamba1`, `fp_mamba2`, `lstm`, `slstm` and `m2rnn`; no GPU kernel supports it.",
    ),
    "n_heads": Field(
        "auto",
        SIZE,
        "Number of heads. For `attention`, delta layers, `rwkv7` and `slstm` a divisor of d_model;"
        " for `name: mamba2`, `mamba3` and `m2rnn` a divisor of d_inner. `auto`: as many heads of"
        " width `headdim` as fit, at least one.",
        AUTO,
    ),
    "d_ff": Field(
        "auto",
        SIZE,
        "Hidden width of `mlp` layers. `auto`: 8/3 · d_model, rounded up to a multiple of 64.",
        AUTO,
    ),
    "n_householder": Field(
        2, SIZE, "Householder steps per token in `deltaproduct` and `gated_deltaproduct` layers."
    ),
    "out_norm_epsilon": Field(1e-5, POSITIVE, "Epsilon of the norm that ends an iteration."),
    "reset_at_eos": Field(
        True,
        bool,
        "Start the next document of a packed sequence from an empty state, after each EOS token.",
    ),
}

# Fields that only a pattern can set, as options of a layer (docs/baselines.md#layer-patterns).
LAYER_OPTIONS = {
    "dt_rank": Field("auto", SIZE, "Rank of the map to Δ; `auto`: ⌈d_model / 16⌉.", AUTO),
    "ngroups": Field(
        1,
        SIZE,
        "Number of groups of B and C in `fp_mamba2`, `mamba2` and `mamba3`, of keys and queries in"
        " `m2rnn`; it must divide the number of heads.",
    ),
    "mixer_act": Field("silu", ("silu", "relu", "identity"), "Activation of the mixer's vectors."),
    "out_proj_init_scale": Field(
        1.0,
        POSITIVE,
        "Factor on the initial `out_proj` of a fixed-point layer: the scale of its output at"
        " initialization (notes/2026-11-initial-output-scale.md).",
    ),
    "short_conv_identity_init": Field(
        False,
        bool,
        "Add 2 to the newest tap of the short convolutions of a fixed-point layer at"
        " initialization, so that they start near the identity. Otherwise x is much smaller than"
        " sh(y) at first, and gradients can become infinite. With `mixer_gate_init_bias: -3` it is"
        " not needed, and cost bits on text (notes/2026-11-state-in-text.md).",
    ),
    "symm_mixer": Field(False, bool, "The mixer reads the sum x + sh(y) instead of both."),
    "bc_norm": Field(True, bool, "Normalize B and C."),
    "eps": Field(
        1e-5, POSITIVE, "Lower bound of the norms by which the iteration divides vectors."
    ),
    "allow_neg_eigval": Field(
        "auto",
        bool,
        "Let β of `gated_deltanet`, `kda` and the DeltaProducts be in (0, 2) instead of (0, 1)."
        " `auto`: only for the DeltaProducts, as in flash-linear-attention.",
        AUTO,
    ),
}

# The solver of the layers: the section `solver:` of the YAML. These change no shape of a weight.
SOLVER = {
    "token": Field(
        "auto",
        TOKEN_MODES,
        "Method for the fixed point. `exact`: solve one equation per token, given the solutions of"
        " all earlier tokens; every schedule gives the same solution. `iterate`: iterate the"
        " paper's map f on all tokens. `auto`: `iterate` with `stopping: paper`, otherwise"
        " `exact`.",
    ),
    "schedule": Field(
        "auto",
        ParsedText(parse_schedule, tuple(SCHEDULES)),
        "Number of tokens that are solved at once. `sequential`: one token after the other;"
        " `window:W`: W tokens, then the next W; `parallel`: all tokens. `auto`: `sequential` with"
        " householder or dplr (on a GPU only if its kernel supports the layer: r ≤ 8, padded d·r ≤"
        " 65,536, `dt_h_dep: false`), otherwise `window:128`; with `stopping: paper` always"
        " `parallel`.",
    ),
    "stopping": Field(
        "auto",
        ("auto", "causal", "paper"),
        "Time at which an iteration ends. `causal`: a token has converged when it and all earlier"
        " tokens are below the tolerance. `paper`: all tokens of the batch stop at once (App. B.4"
        " of the paper); needs `token: iterate`. `auto`: `paper` with `token: iterate`, otherwise"
        " `causal`.",
    ),
    "tol": Field(
        0.1,
        POSITIVE,
        "Tolerance in training: a token (with `stopping: paper` a sequence) has converged when its"
        " relative residual is below it. With `token: exact` at most 0.01 is used; `schedule:"
        " sequential` needs no tolerance.",
    ),
    "eval_tol": Field(
        "auto",
        POSITIVE,
        "Tolerance in evaluation. `auto` with `token: exact`: at most 1e-5 (fp64 1e-9, products in"
        " bf16 0.01). `auto` with `token: iterate`: the value of `tol`, at most 0.01 with"
        " `stopping: causal`.",
        AUTO,
        is_free=True,
    ),
    "max_iters": Field(
        100,
        COUNT,
        "Maximum number of iterations (ℓmax) in training with `token: iterate`, per token (with"
        " `stopping: paper` per solve). `token: exact` needs no limit: a window of W tokens ends"
        " after W + 1 iterations.",
    ),
    "eval_max_iters": Field(1000, COUNT, "The same as `max_iters`, in evaluation.", is_free=True),
    "quantile": Field(
        "auto",
        FRACTION,
        "With `stopping: paper` in training: the iteration stops when this quantile of the"
        " residuals of the batch's sequences is below `tol`. In evaluation all must be. `auto`:"
        " the paper's value for the block.",
        AUTO,
    ),
    "stepsize": Field(
        "auto",
        POSITIVE_FRACTION,
        "Damping: the initial step size of an iteration. `auto`: the paper's value for the block.",
        AUTO,
    ),
    "stepsize_decay": Field(
        "auto",
        POSITIVE_FRACTION,
        "Damping: factor on the step size after 15 iterations without a smaller residual. `auto`:"
        " the paper's value for the block.",
        AUTO,
    ),
    "gradient": Field(
        "auto",
        ("auto", "exact", "one_step", "implicit"),
        "`exact`: backpropagation through time. `one_step`: the paper's gradient, through the last"
        " iterations only. `implicit`: the implicit gradient of the paper's map"
        " (docs/model.md#the-gradient). `auto`: `exact` with `token: exact`, otherwise `one_step`.",
    ),
    "n_backwards": Field(
        1,
        COUNT,
        "Number of iterations through which the `one_step` gradient goes (App. B.2 of the paper).",
    ),
    "state_noise": Field(
        0.0,
        Number(0),
        "Largest standard deviation σ of Gaussian noise that is added in training to sh(y) of"
        " fixed-point layers, to h of `lstm` and to y of `slstm` (docs/model.md#the-gradient). Each"
        " sequence draws its own standard deviation from U[0, σ], in units of the normalized state"
        " (`fp_rnn`, `lstm` and `slstm` add the noise without scaling).",
    ),
}

VOCAB_SIZE = Field(50280, Number(1, 2**24, is_whole=True), "Number of rows of the embedding.")
FIELDS = {"vocab_size": VOCAB_SIZE, **ARCHITECTURE, **LAYER_OPTIONS, **SOLVER}
# Old name → new name, for the config.json of an earlier version (lm/config/old_keys.py has the keys
# of YAML files).
RENAMED_FIELDS = {
    "embedding_start": "embedding_init_std",
    "out_start": "out_proj_init_scale",
    "mixer_gate_start": "mixer_gate_init_bias",
}


# Names of the mixers of lm/model/mixers.py (mixer_base.MIXERS: of all modules), in the same order.
MIXERS = (
    "householder",
    "dplr",
    "kronecker",
    "monarch",
    "nonselective",
    "selective_dense",
    "mixture",
)
GATED_MIXERS = ("householder", "dplr", "kronecker", "monarch", "mixture")  # mixers with gates a_t


def resolve_n_heads(config: Any) -> int:
    """Return the number of heads of attention and delta layers, with "auto" replaced."""
    return max(1, config.d_model // config.headdim) if config.n_heads == "auto" else config.n_heads


def has_negative_eigenvalues(config: Any, kind: str) -> bool:
    """Return whether β of a delta layer is in (0, 2) instead of (0, 1)."""
    if config.allow_neg_eigval == "auto":
        return kind in ("deltaproduct", "gated_deltaproduct")
    return bool(config.allow_neg_eigval)


def resolve_d_ff(config: Any) -> int:
    """Return the hidden width of the gated MLP; "auto" is Llama's rule, in multiples of 64."""
    if config.d_ff != "auto":
        return config.d_ff
    return math.ceil(8 * config.d_model / (3 * 64)) * 64


FIXED_POINT_KINDS = ("fp_mamba1", "fp_mamba2", "fp_rnn")
_MIXER_FIELDS = (
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
_BLOCK_FIELDS = (
    "expand",
    "use_short_conv",
    "short_conv_identity_init",
    "out_norm_epsilon",
    "out_proj_init_scale",
    "eps",
)
_FP_MAMBA_FIELDS = (
    *_MIXER_FIELDS,
    *_BLOCK_FIELDS,
    "d_state",
    "b_h_dep",
    "c_h_dep",
    "dt_h_dep",
    "gate_h_dep",
    "bc_norm",
    "glu_in_loop",
    "state_centroids",
)
_DELTA_FIELDS = ("n_heads", "headdim", "expand", "allow_neg_eigval")
# Kind of layer → fields of FPRNNConfig that it reads. A pattern may set them as its options.
FIELDS_BY_KIND = {
    "fp_mamba1": (*_FP_MAMBA_FIELDS, "dt_rank"),
    "fp_mamba2": (*_FP_MAMBA_FIELDS, "headdim", "ngroups"),
    "fp_rnn": (*_MIXER_FIELDS, *_BLOCK_FIELDS),
    "mamba": ("expand", "d_state", "dt_rank"),
    "mamba2": ("expand", "d_state", "headdim", "ngroups"),
    "mamba3": ("expand", "d_state", "headdim", "ngroups"),
    "gated_deltanet": _DELTA_FIELDS,
    "gated_deltaproduct": (*_DELTA_FIELDS, "n_householder"),
    "deltaproduct": (*_DELTA_FIELDS, "n_householder"),
    "kda": _DELTA_FIELDS,
    "rwkv7": ("n_heads", "headdim"),
    "slstm": ("n_heads", "headdim", "state_centroids"),
    "m2rnn": ("expand", "d_state", "headdim", "ngroups", "state_centroids"),
    "attention": ("n_heads",),
    "mlp": ("d_ff",),
    "lstm": ("state_centroids",),
}
# Short form of `model.name` → pattern, which is repeated n_layer times.
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
_MAMBA_FP32, _MAMBA2_FP32 = ("A_log", "D", "dt_proj.bias"), ("A_log", "D", "dt_bias")
_DELTA_FP32 = ("A_log", "dt_bias")
# Kind of layer → parameters that stay in fp32: exp() and softplus() of them need more digits than
# bf16 has.
FP32_PARAMETERS = {
    "fp_mamba1": _MAMBA_FP32,
    "mamba": _MAMBA_FP32,
    "fp_mamba2": _MAMBA2_FP32,
    "mamba2": _MAMBA2_FP32,
    "gated_deltanet": _DELTA_FP32,
    "gated_deltaproduct": _DELTA_FP32,
    "kda": _DELTA_FP32,
    "mamba3": ("D", "dt_bias"),
    "m2rnn": _MAMBA2_FP32,
}


class Layer(NamedTuple):
    """One layer of a pattern."""

    kind: str  # a key of FIELDS_BY_KIND
    options: dict  # fields of FPRNNConfig with another value in this layer


def parse_pattern(layers: Any) -> list[Layer]:
    """Return the layers of a pattern, without repeating it.

    Args:
        layers: A text of kinds with optional counts (`mamba*3 fp_mamba1`), or a list of such texts
            and of mappings {kind: {field: value}}.

    Raises:
        ValueError: If a kind is unknown, a kind does not have an option, or there are several kinds
            of fixed-point layers.
    """
    pattern = []
    for item in [layers] if isinstance(layers, str) else _check_list(layers):
        if isinstance(item, str):
            for element in item.split():
                pattern += _parse_element(element, {})
        else:
            pattern += _parse_mapping(item)
    if not pattern:
        raise ValueError("layers is empty: it must name a layer, as `mamba*3 fp_mamba1` does")
    kinds = sorted({layer.kind for layer in pattern} & set(FIXED_POINT_KINDS))
    if len(kinds) > 1:
        raise ValueError(
            f"layers has {' and '.join(kinds)}: all fixed-point layers of a model must be of one"
            " kind, because the kind sets the defaults of the solver"
        )
    return pattern


def parse_layers(layers: Any, n_layer: int) -> list[Layer]:
    """Return the layers of a model, one after the other.

    Args:
        layers: As for `parse_pattern`.
        n_layer: Number of layers; a shorter pattern is repeated.

    Raises:
        ValueError: As for `parse_pattern`, or if n_layer is no multiple of the pattern's length.
    """
    pattern = parse_pattern(layers)
    if n_layer % len(pattern):
        nearest = len(pattern) * max(1, round(n_layer / len(pattern)))
        raise ValueError(
            f"layers has {len(pattern)} layers, and n_layer is {n_layer}: n_layer must be"
            f" {len(pattern)}, or a multiple of it that repeats the pattern, such as {nearest}"
        )
    return pattern * (n_layer // len(pattern))


def rename_options(layers: Any) -> Any:
    """Return a pattern with the present names of its layers' options (RENAMED_FIELDS)."""
    if not isinstance(layers, list | tuple):
        return layers

    def rename(options):
        if not isinstance(options, dict):
            return options
        return {RENAMED_FIELDS.get(name, name): value for name, value in options.items()}

    return [
        {kind: rename(options) for kind, options in item.items()}
        if isinstance(item, dict)
        else item
        for item in layers
    ]


def reads_state(kind: str, config: Any) -> bool:
    """Return True if the equation of a fixed-point layer reads sh(y).

    Args:
        kind: The layer's kind.
        config: Its fields, as of FPRNNConfig.
    """
    if kind not in FIXED_POINT_KINDS:
        return False
    does_mixer_read = config.mixer_h_dep and config.mixer != "nonselective"
    do_others_read = config.b_h_dep or config.c_h_dep or config.dt_h_dep
    return does_mixer_read or (kind != "fp_rnn" and do_others_read)


def _check_list(layers):
    """Return the pattern; raise a ValueError unless it is a list of texts and mappings."""
    if isinstance(layers, list | tuple) and all(isinstance(item, str | dict) for item in layers):
        return layers
    raise ValueError(
        f"layers is {layers!r}: it must be a text such as `mamba*3 fp_mamba1`, or a list of kinds"
        " and of mappings {kind: {option: value}}"
    )


def _parse_mapping(item):
    """Return the layers of a mapping {kind: options}."""
    if len(item) != 1 or not isinstance(next(iter(item.values())), dict):
        raise ValueError(
            f"layers has {item!r}: a layer with options is a mapping of one kind to its options,"
            " {fp_mamba1: {mixer_rank: 2}}"
        )
    ((element, options),) = item.items()
    return _parse_element(str(element), options)


def _parse_element(element, options):
    """Return the layers of an element, such as `mamba*3`."""
    kind, star, count = element.partition("*")
    if kind not in FIELDS_BY_KIND:
        matches = difflib.get_close_matches(kind, FIELDS_BY_KIND, 1)
        hint = f" (did you mean {matches[0]}?)" if matches else ""
        raise ValueError(f"layers names `{kind}`{hint}: the kinds are {', '.join(FIELDS_BY_KIND)}")
    if star and not (count.isdecimal() and int(count) > 0):
        raise ValueError(
            f"layers has `{element}`: a count is a whole number above 0, as in {kind}*3"
        )
    fields = FIELDS_BY_KIND[kind]
    for name in options:
        if name not in fields:
            matches = difflib.get_close_matches(name, fields, 1)
            hint = f" (did you mean {matches[0]}?)" if matches else ""
            raise ValueError(
                f"layers gives `{name}` to {kind}{hint}: its options are {', '.join(fields)}"
            )
    return [Layer(kind, options)] * (int(count) if star else 1)
