"""`FPRNNConfig`, the HuggingFace configuration of a fixed-point RNN and its solver."""

import copy
import inspect
import math
import textwrap
from typing import Any

from transformers.configuration_utils import PretrainedConfig

from .checksums import delete_sums
from .fields import (
    FIELDS,
    FIELDS_BY_KIND,
    FIXED_POINT_KINDS,
    GATED_MIXERS,
    RENAMED_FIELDS,
    TOKEN_MODES,
    Layer,
    parse_layers,
    parse_schedule,
    reads_state,
    rename_options,
    resolve_n_heads,
)

# Values of `model_type` in config.json. Exports with a user's own mixer have the second, which no
# installed package registers: transformers then uses the code in the export, if the user trusts it.
MODEL_TYPES = ("fprnn", "fprnn_own_mixer")

# Damping and stopping rule of the paper for each block, App. B.4.
PAPER_RULES = {
    "fp_mamba1": {"quantile": 0.75, "stepsize": 0.99, "stepsize_decay": 0.9},
    "fp_mamba2": {"quantile": 0.9, "stepsize": 0.99, "stepsize_decay": 0.9},
    "fp_rnn": {"quantile": 0.9, "stepsize": 1.0, "stepsize_decay": 1.0},
}

# `contractive: auto` of FP-RNN, for mixers that have no other bound on ‖I − Q‖. FP-RNN iterates its
# state without a norm, so the state grows from token to token with an unbounded mixer.
FP_RNN_CONTRACTIVE = {"monarch": 0.95, "nonselective": 0.95}


def resolve_mixer_bounds(
    block: str, mixer: str, kronecker_norm: str, contractive: float | str | None
) -> tuple[str, float | str | None]:
    """Return (kronecker_norm, contractive), with "auto" replaced for this block and mixer."""
    if kronecker_norm == "auto":
        kronecker_norm = "spectral" if block == "fp_rnn" else "rows"
    if contractive == "auto":
        contractive = FP_RNN_CONTRACTIVE.get(mixer) if block == "fp_rnn" else None
    return kronecker_norm, contractive


# `mixer_gate_init_bias: auto` of the mixers of full rank. Their gates start almost closed, so Q is
# near the identity: with open gates an untrained layer amplifies rounding errors from token to
# token (docs/proofs.md, "Where a token has several solutions").
CLOSED_GATE_BIASES = {"kronecker": -3.0, "monarch": -3.0, "mixture": -3.0}


def resolve_gate_init_bias(
    block: str, mixer: str, iterates: bool, value: float | str
) -> float | str:
    """Return mixer_gate_init_bias, with "auto" replaced.

    Args:
        block: Kind of the fixed-point block.
        mixer: Name of the mixer.
        iterates: Whether the solver iterates the paper's map (`token: iterate`). Such a model
            starts with the paper's bias.
        value: The bias, or "auto".
    """
    if value != "auto":
        return value
    return 0.0 if iterates or block == "fp_rnn" else CLOSED_GATE_BIASES.get(mixer, 0.0)


# Removed fields and the only values that a config.json may have for them.
REMOVED_FIELDS = {
    "jacobian_reg": 0.0,
    "rms_norm": True,
    "bias": False,
    "residual_in_fp32": True,
    "d_conv": 4,
    "norm_epsilon": 1e-5,
    "patience": 15,
    "adjoint_clip": None,
    "position": "rope",
    "attention_window": None,
}
# Fields that models of transformers have by convention. A recurrence has no longest input, but
# lm-evaluation-harness cuts contexts to max_position_embeddings.
CONVENTIONAL_FIELDS = {"max_position_embeddings": 2048, "use_cache": True}
TOKEN_IDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def refuse_solver_token(kwargs: dict[str, Any]) -> None:
    """Raise a ValueError if `from_pretrained` was called with a value of the field `token`.

    The argument `token` of transformers is the access token of the hub: it would not reach the
    solver.
    """
    token = kwargs.get("token")
    if token in TOKEN_MODES:
        raise ValueError(
            f"token is `{token}`: `from_pretrained` passes it to the hub as an access token, not to"
            " the solver. Load without it and use `with model.solving(token=…)`, or pass `config=`,"
            " an FPRNNConfig with that token"
        )


class FPRNNConfig(PretrainedConfig):
    """Configuration of FPRNNModel and FPRNNForCausalLM.

    Every field has a default and is passed by keyword. With `use_cache`, a forward pass outside
    training returns a cache from which the next pass continues.

    Raises:
        ValueError: If a field has a value that it cannot have, or fields do not fit together.

    Fields:
    """

    model_type = "fprnn"
    d_conv = 4  # width of every short convolution
    norm_epsilon = 1e-5  # of the norms of the residual stream
    # Alias → name in `to_dict` and config.json. PEFT looks for `tie_word_embeddings` in `to_dict`:
    # without it PEFT would train the embedding, but not the tied head.
    attribute_map = {  # noqa: RUF012 (HuggingFace's convention)
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "state_size": "d_state",
        "tie_embeddings": "tie_word_embeddings",
        **RENAMED_FIELDS,
    }
    # Trainer must not gather these outputs over an evaluation: they are not predictions.
    keys_to_ignore_at_inference = ["fixed_point", "state", "past_key_values", "cache"]  # noqa: RUF012

    def __init__(self, **fields: Any) -> None:
        for name, only_value in REMOVED_FIELDS.items():
            value = fields.pop(name, only_value)
            if value != only_value:
                raise ValueError(
                    f"{name} is {value!r}, and the field was removed: every model has"
                    f" {only_value!r}"
                )
        for old, new in RENAMED_FIELDS.items():
            if old in fields:
                fields[new] = fields.pop(old)
        for name, field in FIELDS.items():
            setattr(self, name, fields.pop(name, field.default))
        # Older exports have only `tie_embeddings`, which the loop above has read.
        self.tie_embeddings = fields.pop("tie_word_embeddings", self.tie_embeddings)
        self.settle()
        for name, default in CONVENTIONAL_FIELDS.items():
            setattr(self, name, fields.pop(name, default))
        super().__init__(**{**TOKEN_IDS, **fields}, tie_word_embeddings=self.tie_embeddings)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Call PretrainedConfig.from_pretrained; refuse a `token` that is meant for the solver."""
        refuse_solver_token(kwargs)
        return super().from_pretrained(*args, **kwargs)

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Call PretrainedConfig.get_config_dict; replace all MODEL_TYPES by this class's type."""
        fields, unused_kwargs = super().get_config_dict(*args, **kwargs)
        if fields.get("model_type") in MODEL_TYPES:
            fields["model_type"] = cls.model_type
        return fields, unused_kwargs

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Delete the folder's SHA256SUMS, and call PretrainedConfig.save_pretrained.

        `save_pretrained` of a model calls this first, before it replaces the files in SHA256SUMS.
        """
        delete_sums(save_directory)
        super().save_pretrained(save_directory, *args, **kwargs)

    def settle(self) -> None:
        """Replace "auto" by its value, except in fields that are resolved at use, and check all.

        The model calls this again, because `from_pretrained` sets its overrides after `__init__`.

        Raises:
            ValueError: If a field has a value that it cannot have, or sizes do not fit together.
        """
        if self.layers is not None:
            self.layers = rename_options(self.layers)
            kinds = [layer.kind for layer in self.layer_list()]
            self.block = next((kind for kind in kinds if kind in FIXED_POINT_KINDS), self.block)
        self._settle_values()
        for layer in self.distinct_layers():
            self.layer_config(layer)
        self._settle_solver()

    def _settle_values(self):
        """Replace "auto" in the fields of damping, mixer and dt_rank, and check each field."""
        FIELDS["block"].check("block", self.block)
        for name, value in PAPER_RULES[self.block].items():
            if getattr(self, name) == "auto":
                setattr(self, name, value)
        self.kronecker_norm, self.contractive = resolve_mixer_bounds(
            self.block, self.mixer, self.kronecker_norm, self.contractive
        )
        self.mixer_gate_init_bias = resolve_gate_init_bias(
            self.block, self.mixer, self._iterates(), self.mixer_gate_init_bias
        )
        if self.dt_rank == "auto":
            self.dt_rank = math.ceil(self.d_model / 16)
        self._check_values()
        if self.expand == round(self.expand):
            self.expand = round(self.expand)  # a float from YAML: config.json has 2, not 2.0

    def _iterates(self):
        """Return whether the solver iterates the paper's map; `token` may still be "auto"."""
        return self.token == "iterate" or (self.token == "auto" and self.stopping == "paper")

    def _check_values(self):
        for name, field in FIELDS.items():
            field.check(name, getattr(self, name))

    @property
    def d_inner(self) -> int:
        """Width of the recurrence, expand · d_model."""
        return round(self.expand * self.d_model)

    def layer_list(self) -> list[Layer]:
        """Return the n_layer layers of the model."""
        if self.layers is None:
            return [Layer(self.block, {})] * self.n_layer
        return parse_layers(self.layers, self.n_layer)

    def distinct_layers(self) -> list[Layer]:
        """Return the layers of the model without duplicates."""
        layers = self.layer_list()
        return [layer for index, layer in enumerate(layers) if layer not in layers[:index]]

    def layer_config(self, layer: Layer) -> "FPRNNConfig":
        """Return the configuration of a layer: a copy with the layer's options.

        Without the field `layers` all layers are equal, and the result is this object.

        Raises:
            ValueError: If the layer cannot have an option, or sizes do not fit together.
        """
        if self.layers is None:
            check_sizes(self, layer.kind)
            return self
        config = copy.copy(self)
        config.layers = None
        if (self.kronecker_norm, self.contractive) == resolve_mixer_bounds(
            self.block, self.mixer, "auto", "auto"
        ):  # they equal the values of "auto": resolve them again for the mixer of this layer
            config.kronecker_norm = config.contractive = "auto"
        if self.mixer_gate_init_bias == resolve_gate_init_bias(
            self.block, self.mixer, self._iterates(), "auto"
        ):
            config.mixer_gate_init_bias = "auto"
        for name, value in layer.options.items():
            setattr(config, name, value)
        try:
            config._settle_values()
            check_sizes(config, layer.kind)
        except ValueError as error:
            raise ValueError(f"layers, {layer.kind}: {error}") from None
        return config

    def _settle_solver(self):
        """Replace "auto" in token, stopping and gradient, and check the combination of fields.

        Raises:
            ValueError: If fields contradict each other, or the schedule is unknown.
        """
        if self.token == "auto":
            self.token = "iterate" if self.stopping == "paper" else "exact"
        if self.stopping == "auto":
            self.stopping = "paper" if self.token == "iterate" else "causal"
        if self.gradient == "auto":
            self.gradient = "one_step" if self.token == "iterate" else "exact"
        width = parse_schedule(self.schedule)
        if self.stopping == "paper":
            if self.token == "exact":
                raise ValueError(
                    "stopping `paper` ends the paper's iteration: it needs token `iterate`, not"
                    " `exact`, which solves each token's own equation"
                )
            if width not in (None, 0):  # `auto`, `parallel`
                raise ValueError(
                    "stopping `paper` solves all tokens at once: its schedule must be parallel, not"
                    f" `{self.schedule}`"
                )
            self.schedule = "parallel"
        if self.gradient == "exact" and self.token == "iterate":
            raise ValueError(
                "gradient `exact` differentiates solved tokens: it needs token `exact`; the"
                " gradient of the paper's iteration is `implicit`"
            )


# Fields that only FP-Mamba has, with their defaults.
FP_MAMBA_FIELDS = {"b_h_dep": True, "c_h_dep": True, "dt_h_dep": False, "gate_h_dep": True}
MAX_DENSE_WIDTH = 256  # largest d_inner of selective_dense, which costs O(d_inner³) per token


def nearest_divisor(number: int, target: int) -> int:
    """Return the divisor of `number` that is nearest to `target`."""
    divisors = (m for m in range(1, number + 1) if number % m == 0)
    return min(divisors, key=lambda m: abs(m - target))


def check_sizes(config: Any, kind: str) -> None:
    """Check that the sizes and options of a layer fit together.

    Args:
        config: The FPRNNConfig of the layer.
        kind: The layer's kind, a key of fields.FIELDS_BY_KIND.

    Raises:
        ValueError: If they do not. The message names the field, and a valid value if there is one.
    """
    if "expand" in FIELDS_BY_KIND[kind]:
        _check_width(config)
    if "ngroups" in FIELDS_BY_KIND[kind]:
        _check_groups(config)
    if kind == "mamba3" and config.d_state < 4:
        raise ValueError(
            f"d_state is {config.d_state}: mamba3 rotates pairs in half of the state's channels, so"
            " it must be at least 4"
        )
    if kind.startswith("fp_"):
        _check_mixer(config, kind)
        _check_centroids(config, kind)
    if "n_heads" in FIELDS_BY_KIND[kind]:
        _check_heads(config, kind)


def _check_width(config):
    width = config.expand * config.d_model
    if config.d_inner < 1 or abs(config.d_inner - width) > 1e-6 * width:
        nearest = max(1, config.d_inner)
        raise ValueError(
            f"expand is {config.expand:g}: d_inner = expand · d_model must be a whole number, and"
            f" {config.expand:g} · {config.d_model} is not; {nearest / config.d_model:.9g} gives"
            f" {nearest}"
        )


def _check_groups(config):
    d = config.d_inner
    if d % config.headdim:
        raise ValueError(
            f"headdim is {config.headdim}: it must divide d_inner = expand · d_model = {d}, for"
            f" example {nearest_divisor(d, config.headdim)}"
        )
    heads = d // config.headdim
    if heads % config.ngroups:
        raise ValueError(
            f"ngroups is {config.ngroups}: it must divide the {heads} heads (d_inner / headdim),"
            f" for example {nearest_divisor(heads, config.ngroups)}"
        )


def _check_mixer(config, kind):
    d = config.d_inner
    if kind == "fp_rnn" and config.glu_in_loop:
        raise ValueError(
            "glu_in_loop is only for fp_mamba1 and fp_mamba2: fp_rnn iterates its state itself"
        )
    for name, default in FP_MAMBA_FIELDS.items():
        if kind == "fp_rnn" and getattr(config, name) != default:
            raise ValueError(
                f"{name} is {getattr(config, name)}, which only fp_mamba1 and fp_mamba2 can have;"
                f" for fp_rnn it must be {default}"
            )
    if config.glu_in_loop and not config.gate_h_dep:
        raise ValueError(
            "gate_h_dep is False: with glu_in_loop the gate is inside the iteration and reads only"
            " x anyway; leave gate_h_dep True (in the options of this layer)"
        )
    if config.mixer_gate_init_bias and config.mixer not in GATED_MIXERS:
        raise ValueError(
            f"mixer_gate_init_bias is {config.mixer_gate_init_bias}: it is only for mixers with"
            f" gates ({', '.join(GATED_MIXERS)}), not for {config.mixer}; leave it 0 (in the"
            " options of this layer)"
        )
    if config.short_conv_identity_init and not config.use_short_conv:
        raise ValueError(
            "short_conv_identity_init is True, but use_short_conv is False: there is no convolution"
            " to initialize; set use_short_conv: true (in the options of this layer)"
        )
    if config.mixer == "monarch" and d % config.mixer_rank:
        raise ValueError(
            f"mixer_rank is {config.mixer_rank}: for monarch it is the block size and must divide"
            f" d_inner = expand · d_model = {d}, for example"
            f" {nearest_divisor(d, config.mixer_rank)}"
        )
    if config.mixer == "selective_dense" and d > MAX_DENSE_WIDTH:
        raise ValueError(
            f"selective_dense builds a {d}×{d} matrix per token and iteration: d_inner ="
            f" expand · d_model may be at most {MAX_DENSE_WIDTH}"
        )
    if config.mixer_proj_rank is not None and config.mixer not in ("householder", "dplr"):
        raise ValueError(
            f"mixer_proj_rank is only for householder and dplr, not for {config.mixer}"
        )


def _check_centroids(config, kind):
    count = config.state_centroids
    if count and "state_centroids" not in FIELDS_BY_KIND[kind]:
        raise ValueError(
            f"state_centroids is {count}: it is only for fp_mamba1, fp_mamba2, lstm, slstm and"
            f" m2rnn, not for {kind}; leave it 0"
        )
    if count and not reads_state(kind, config):
        raise ValueError(
            f"state_centroids is {count}, but nothing reads sh(y): set b_h_dep, c_h_dep, dt_h_dep,"
            " or mixer_h_dep with a mixer other than nonselective"
        )


def _check_heads(config, kind):
    d, heads = config.d_model, resolve_n_heads(config)
    if d % heads:
        raise ValueError(
            f"n_heads is {config.n_heads} ({heads} heads): it must divide d_model = {d},"
            f" for example {nearest_divisor(d, heads)}"
        )
    if "expand" in FIELDS_BY_KIND[kind] and config.d_inner % heads:
        raise ValueError(
            f"n_heads is {config.n_heads} ({heads} heads): it must also divide d_inner ="
            f" expand · d_model = {config.d_inner}, for example"
            f" {nearest_divisor(config.d_inner, heads)}"
        )
    if kind in ("rwkv7", "slstm") and heads == d:
        raise ValueError(
            f"n_heads is {config.n_heads}: {kind} normalises each head, so a head must have more"
            f" than one of the {d} channels"
        )
    if kind == "attention" and (d // heads) % 2:
        raise ValueError(
            f"d_model / n_heads is {d // heads}: RoPE rotates pairs, so it must be even"
        )


def _make_signature() -> inspect.Signature:
    """Return the signature that `help` and editors show instead of `**fields`."""
    defaults = (
        {name: field.default for name, field in FIELDS.items()} | CONVENTIONAL_FIELDS | TOKEN_IDS
    )
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [inspect.Parameter(name, kind, default=default) for name, default in defaults.items()]
    )


def _make_docstring() -> str:
    """Return the docstring of the class with the table of its fields."""
    lines = [f"{name} ({field.default!r}): {field.meaning}" for name, field in FIELDS.items()]
    table = [textwrap.fill(line, 100, subsequent_indent=" " * 4) for line in lines]
    return inspect.cleandoc(FPRNNConfig.__doc__ or "") + "\n" + "\n".join(table)


FPRNNConfig.__signature__ = _make_signature()
FPRNNConfig.__doc__ = _make_docstring()
