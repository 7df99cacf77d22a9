"""`FPRNNConfig`: the architecture and solver of a fixed-point RNN, as HuggingFace expects them."""

import copy
import inspect
import math
import textwrap
from typing import Any

from transformers.configuration_utils import PretrainedConfig

from .checksums import forget
from .fields import (
    FIELDS,
    FIXED_POINT,
    GATED,
    KINDS,
    RENAMED_FIELDS,
    TOKENS,
    Layer,
    heads_of,
    parse,
    parse_schedule,
    rename_options,
)

# `model_type` of our models in a config.json: the second where a mixer travels along that no other
# code has, so that transformers takes the checkpoint's own code, if it is trusted, for ours.
MODEL_TYPES = ("fprnn", "fprnn_own_mixer")

# App. B.4: how the paper damps and stops, per block.
PAPER_RULES = {
    "fp_mamba1": {"quantile": 0.75, "stepsize": 0.99, "stepsize_decay": 0.9},
    "fp_mamba2": {"quantile": 0.9, "stepsize": 0.99, "stepsize_decay": 0.9},
    "fp_rnn": {"quantile": 0.9, "stepsize": 1.0, "stepsize_decay": 1.0},
}

# ‖I − Q‖ that FP-RNN's mixers are held to where nothing else bounds them (`contractive: auto`): it
# iterates its state without a norm, so an unbounded mixer makes the state grow from token to token.
FP_RNN_CONTRACTIVE = {"monarch": 0.95, "nonselective": 0.95}


def resolve_mixer_bounds(
    block: str, mixer: str, kronecker_norm: str, contractive: float | str | None
) -> tuple[str, float | str | None]:
    """kronecker_norm and contractive; where they are "auto", what that is for block and mixer."""
    if kronecker_norm == "auto":
        kronecker_norm = "spectral" if block == "fp_rnn" else "rows"
    if contractive == "auto":
        contractive = FP_RNN_CONTRACTIVE.get(mixer) if block == "fp_rnn" else None
    return kronecker_norm, contractive


# Mixers of full rank that have gates start near the identity: with open gates an untrained layer
# amplifies rounding from token to token (docs/model.md, "Where a token has several solutions").
NEAR_IDENTITY = {"kronecker": -3.0, "monarch": -3.0, "mixture": -3.0}


def resolve_gate_init_bias(
    block: str, mixer: str, iterates: bool, value: float | str
) -> float | str:
    """Return mixer_gate_init_bias, with "auto" replaced.

    Args:
        iterates: Whether the paper's map is iterated (`token: iterate`), which starts as the paper.
    """
    if value != "auto":
        return value
    return 0.0 if iterates or block == "fp_rnn" else NEAR_IDENTITY.get(mixer, 0.0)


# Former fields and the values that the model has for them now: a config.json with these is read.
REMOVED = {
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
# What models of transformers have by convention; a recurrence has no longest input, but
# lm-evaluation-harness cuts contexts to max_position_embeddings.
BY_CONVENTION = {"max_position_embeddings": 2048, "use_cache": True}
TOKEN_IDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def refuse_solver_token(kwargs: dict[str, Any]) -> None:
    """Raise a ValueError where `token` of a `from_pretrained` names one of the solver's: to
    transformers it is a password, and nothing of the solver's would change."""
    token = kwargs.get("token")
    if token in TOKENS:
        raise ValueError(
            f"token is `{token}`: `from_pretrained` hands it to the hub, as a password, and not to"
            " the solver. Load without it, and use `with model.solving(token=…)`, or give"
            " `config=`, an FPRNNConfig with that token"
        )


class FPRNNConfig(PretrainedConfig):
    """Configuration of FPRNNModel and FPRNNForCausalLM. Every field has a default, and is given by
    name; `use_cache`: a forward pass outside training returns what the next one can go on from.

    Raises:
        ValueError: a size that no model can have, or a field that the block cannot have.

    Fields:
    """

    model_type = "fprnn"
    d_conv = 4  # width of every short convolution
    norm_epsilon = 1e-5  # of the norms of the residual stream
    # Aliases → the names that `to_dict` and config.json have. PEFT looks for `tie_word_embeddings`
    # in that dictionary; without the entry it trains the embedding apart from the tied head.
    attribute_map = {  # noqa: RUF012 (HuggingFace's convention)
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "state_size": "d_state",
        "tie_embeddings": "tie_word_embeddings",
        **RENAMED_FIELDS,
    }
    # What an output has besides logits is no prediction, to be gathered over an evaluation.
    keys_to_ignore_at_inference = ["fixed_point", "state", "past_key_values", "cache"]  # noqa: RUF012

    def __init__(self, **fields: Any) -> None:
        for name, default in REMOVED.items():
            if (value := fields.pop(name, default)) != default:
                raise ValueError(
                    f"{name} is {value!r}, and the field was removed: every model has {default!r}"
                )
        for old, new in RENAMED_FIELDS.items():
            if old in fields:
                fields[new] = fields.pop(old)
        for name, field in FIELDS.items():
            setattr(self, name, fields.pop(name, field.default))
        # Older exports have `tie_embeddings` alone, which the loop has read.
        self.tie_embeddings = fields.pop("tie_word_embeddings", self.tie_embeddings)
        self.settle()
        for name, default in BY_CONVENTION.items():
            setattr(self, name, fields.pop(name, default))
        super().__init__(**{**TOKEN_IDS, **fields}, tie_word_embeddings=self.tie_embeddings)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """PreTrainedConfig.from_pretrained; refuses a `token` that is meant for the solver."""
        refuse_solver_token(kwargs)
        return super().from_pretrained(*args, **kwargs)

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """PreTrainedConfig.get_config_dict; a model whose mixer travels along is one of ours."""
        found, unused = super().get_config_dict(*args, **kwargs)
        if found.get("model_type") in MODEL_TYPES:
            found["model_type"] = cls.model_type
        return found, unused

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """PretrainedConfig.save_pretrained. A model's own begins with it: what the folder's
        SHA256SUMS vouches for is replaced."""
        forget(save_directory)
        super().save_pretrained(save_directory, *args, **kwargs)

    def settle(self) -> None:
        """Replace each "auto" by what it is, and check what can be set; the model does so as well,
        since `from_pretrained` sets its overrides after `__init__`.

        Raises:
            ValueError: a value that its field cannot have, or sizes that do not go together.
        """
        if self.layers is not None:
            self.layers = rename_options(self.layers)
            kinds = [layer.kind for layer in self.layer_list()]
            self.block = next((kind for kind in kinds if kind in FIXED_POINT), self.block)
        self._settle_values()
        for layer in self.distinct_layers():
            self.of_layer(layer)
        self._settle_solver()

    def _settle_values(self):
        FIELDS["block"].check("block", self.block)
        for name, value in PAPER_RULES.get(self.block, PAPER_RULES["fp_mamba1"]).items():
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
            self.expand = round(self.expand)  # 2, where a YAML made 2.0 of it

    def _iterates(self):
        return self.token == "iterate" or (self.token == "auto" and self.stopping == "paper")

    def _check_values(self):
        for name, field in FIELDS.items():
            field.check(name, getattr(self, name))

    @property
    def d_inner(self) -> int:
        """Width of the recurrence, expand · d_model."""
        return round(self.expand * self.d_model)

    def layer_list(self) -> list[Layer]:
        """The Layers of the model, n_layer of them."""
        if self.layers is None:
            return [Layer(self.block, {})] * self.n_layer
        return parse(self.layers, self.n_layer)

    def distinct_layers(self) -> list[Layer]:
        """Those of the model that differ, each once."""
        layers = self.layer_list()
        return [layer for index, layer in enumerate(layers) if layer not in layers[:index]]

    def of_layer(self, layer: Layer) -> "FPRNNConfig":
        """The config of one of the layers: of equal ones this very config, else a copy with the
        layer's options.

        Raises:
            ValueError: an option that it cannot have, sizes that do not go together.
        """
        if self.layers is None:
            check_sizes(self, layer.kind)
            return self
        own = copy.copy(self)
        own.layers = None
        if (self.kronecker_norm, self.contractive) == resolve_mixer_bounds(
            self.block, self.mixer, "auto", "auto"
        ):  # of another mixer they may be others
            own.kronecker_norm = own.contractive = "auto"
        if self.mixer_gate_init_bias == resolve_gate_init_bias(
            self.block, self.mixer, self._iterates(), "auto"
        ):
            own.mixer_gate_init_bias = "auto"
        for name, value in layer.options.items():
            setattr(own, name, value)
        try:
            own._settle_values()
            check_sizes(own, layer.kind)
        except ValueError as e:
            raise ValueError(f"layers, {layer.kind}: {e}") from None
        return own

    def _settle_solver(self):
        """Replace "auto" in the solver's fields by what it is.

        Raises:
            ValueError: fields that do not go together, or a name that is none.
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
                    "stopping `paper` is of the paper's iteration: it needs token `iterate`, not"
                    " `exact`, whose tokens are solved one by one"
                )
            if width:  # neither auto nor all
                raise ValueError(
                    "stopping `paper` solves all tokens at once: its schedule must be parallel, not"
                    f" `{self.schedule}`"
                )
            self.schedule = "parallel"
        if self.gradient == "exact" and self.token == "iterate":
            raise ValueError(
                "gradient `exact` goes through tokens that are solved: it needs token `exact`; of"
                " the paper's iteration it is `implicit`"
            )


H_DEP = {"b_h_dep": True, "c_h_dep": True, "dt_h_dep": False, "gate_h_dep": True}  # of FP-Mamba
MAX_DENSE = 256  # d_inner above which selective_dense is refused: it costs O(d³) per token


def nearest_divisor(whole: int, wanted: int) -> int:
    """The divisor of `whole` that is nearest to `wanted`."""
    divisors = (m for m in range(1, whole + 1) if whole % m == 0)
    return min(divisors, key=lambda m: abs(m - wanted))


def check_sizes(config: Any, kind: str) -> None:
    """Find out whether the sizes of a layer of some kind go together.

    Args: config: the FPRNNConfig of the layer. kind: see fields.KINDS.
    Raises:
        ValueError: they do not; names the field, and what would do.
    """
    if "expand" in KINDS[kind]:
        _check_width(config)
    if "ngroups" in KINDS[kind]:
        _check_groups(config)
    if kind == "mamba3" and config.d_state < 4:
        raise ValueError(
            f"d_state is {config.d_state}: mamba3 turns pairs in half of its channels, so it must"
            " be 4 or more"
        )
    if kind.startswith("fp_"):
        _check_mixer(config, kind)
        _check_centroids(config, kind)
    if "n_heads" in KINDS[kind]:
        _check_heads(config, kind)


def _check_width(config):
    width = config.expand * config.d_model
    if config.d_inner < 1 or abs(config.d_inner - width) > 1e-6 * width:
        nearest = max(1, config.d_inner)
        raise ValueError(
            f"expand is {config.expand:g}: d_inner = expand · d_model must be a whole number, and"
            f" {config.expand:g} · {config.d_model} is none; {nearest / config.d_model:.9g} gives"
            f" {nearest}"
        )


def _check_groups(config):
    d = config.d_inner
    if d % config.headdim:
        raise ValueError(
            f"headdim is {config.headdim}: it must divide d_inner = expand · d_model = {d}, as"
            f" {nearest_divisor(d, config.headdim)} does"
        )
    heads = d // config.headdim
    if heads % config.ngroups:
        raise ValueError(
            f"ngroups is {config.ngroups}: it must divide the {heads} heads (d_inner / headdim),"
            f" as {nearest_divisor(heads, config.ngroups)} does"
        )


def _check_mixer(config, kind):
    d = config.d_inner
    if kind == "fp_rnn" and config.glu_in_loop:
        raise ValueError(
            "glu_in_loop is for fp_mamba1 and fp_mamba2: fp_rnn iterates its state itself"
        )
    for name, default in H_DEP.items():
        if kind == "fp_rnn" and getattr(config, name) != default:
            raise ValueError(
                f"{name} is {getattr(config, name)}, which only fp_mamba1 and fp_mamba2 can have;"
                f" of fp_rnn it must be {default}"
            )
    if config.glu_in_loop and not config.gate_h_dep:
        raise ValueError(
            "gate_h_dep is False: with glu_in_loop the gate is inside the iteration and reads x"
            " alone as it is; leave gate_h_dep True (in this layer's options)"
        )
    if config.mixer_gate_init_bias and config.mixer not in GATED:
        raise ValueError(
            f"mixer_gate_init_bias is {config.mixer_gate_init_bias}: it is for mixers with gates"
            f" ({', '.join(GATED)}), not for {config.mixer}: leave it 0 (in this layer's options)"
        )
    if config.mixer == "monarch" and d % config.mixer_rank:
        raise ValueError(
            f"mixer_rank is {config.mixer_rank}: of monarch it is the block size and must divide"
            f" d_inner = expand · d_model = {d}, as {nearest_divisor(d, config.mixer_rank)} does"
        )
    if config.mixer == "selective_dense" and d > MAX_DENSE:
        raise ValueError(
            f"selective_dense builds a {d}×{d} matrix per token and iteration: d_inner ="
            f" expand · d_model may be at most {MAX_DENSE}"
        )
    if config.mixer_proj_rank is not None and config.mixer not in ("householder", "dplr"):
        raise ValueError(f"mixer_proj_rank is for householder and dplr, not for {config.mixer}")


def _check_centroids(config, kind):
    k = config.state_centroids
    if k and "state_centroids" not in KINDS[kind]:
        raise ValueError(
            f"state_centroids is {k}: it is of fp_mamba1 and fp_mamba2, whose states have one"
            f" length, not of {kind}: leave it 0"
        )
    mixer_reads = config.mixer_h_dep and config.mixer != "nonselective"
    if k and not (mixer_reads or config.b_h_dep or config.c_h_dep or config.dt_h_dep):
        raise ValueError(
            f"state_centroids is {k}, and nothing reads sh(y): set b_h_dep, c_h_dep, dt_h_dep, or"
            " mixer_h_dep of a mixer that is not nonselective"
        )


def _check_heads(config, kind):
    d, heads = config.d_model, heads_of(config)
    if d % heads:
        raise ValueError(
            f"n_heads is {config.n_heads} ({heads} heads): it must divide d_model = {d},"
            f" as {nearest_divisor(d, heads)} does"
        )
    if "expand" in KINDS[kind] and config.d_inner % heads:
        raise ValueError(
            f"n_heads is {config.n_heads} ({heads} heads): it must divide d_inner = expand ·"
            f" d_model = {config.d_inner}, too, as {nearest_divisor(config.d_inner, heads)} does"
        )
    if kind in ("rwkv7", "slstm") and heads == d:
        raise ValueError(
            f"n_heads is {config.n_heads}: {kind} normalises each head, which must be wider than"
            f" one of the {d} channels"
        )
    if kind == "attention" and (d // heads) % 2:
        raise ValueError(
            f"d_model / n_heads is {d // heads}: RoPE rotates pairs, so it must be even"
        )


def _signature() -> inspect.Signature:
    """What `help` and an editor show in the place of `**fields`."""
    defaults = {name: field.default for name, field in FIELDS.items()} | BY_CONVENTION | TOKEN_IDS
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [inspect.Parameter(name, kind, default=default) for name, default in defaults.items()]
    )


def _documentation() -> str:
    """The class's own, and the table of its fields."""
    lines = [f"{name} ({field.default!r}): {field.meaning}" for name, field in FIELDS.items()]
    text = [textwrap.fill(line, 100, subsequent_indent=" " * 4) for line in lines]
    return inspect.cleandoc(FPRNNConfig.__doc__ or "") + "\n" + "\n".join(text)


FPRNNConfig.__signature__ = _signature()
FPRNNConfig.__doc__ = _documentation()
