"""`FPRNNConfig`: the architecture and solver of a fixed-point RNN, as HuggingFace expects them."""

import copy
import math
from typing import Any

from transformers.configuration_utils import PretrainedConfig
from transformers.utils import logging

from .checksums import forget
from .patterns import FIXED_POINT, Layer, parse
from .sizes import H_DEP, check_sizes

logger = logging.get_logger(__name__)

# `model_type` of our models in a config.json: the second where a mixer travels along that no other
# code has, so that transformers takes the checkpoint's own code, if it is trusted, for ours.
MODEL_TYPES = ("fprnn", "fprnn_own_mixer")

# App. B.4: how the paper damps and stops, per block.
PAPER_RULES = {
    "fp_mamba1": {"quantile": 0.75, "stepsize": 0.99, "stepsize_decay": 0.9},
    "fp_mamba2": {"quantile": 0.9, "stepsize": 0.99, "stepsize_decay": 0.9},
    "fp_rnn": {"quantile": 0.9, "stepsize": 1.0, "stepsize_decay": 1.0},
}


NAMES = {
    "mixer_act": ("silu", "relu", "identity"),
    "eigen_range": ("signed", "positive"),
    "kronecker_norm": ("rows", "spectral"),
}
_TINY = 5e-324  # the least number above 0
_LARGE = 1.7e308  # and the largest there is, nearly
SIZES = (
    "vocab_size",
    "d_model",
    "n_layer",
    "d_state",
    "expand",
    "d_conv",
    "headdim",
    "ngroups",
    "mixer_rank",
)
RANGES = {  # field → (least, most, both in words)
    "contractive": (_TINY, 1 - 1e-9, "a number above 0 and below 1, null or auto"),
    "tol": (_TINY, _LARGE, "a number above 0"),
    "eval_tol": (_TINY, _LARGE, "a number above 0, or auto"),
    "quantile": (0, 1, "a number from 0 to 1, or auto"),
    "stepsize": (_TINY, 1, "a number above 0 and up to 1, or auto"),
    "stepsize_decay": (_TINY, 1, "a number above 0 and up to 1, or auto"),
    "mixer_gate_start": (-20, 20, "a number from -20 to 20"),
    "state_noise": (0, _LARGE, "a number from 0 on"),
    "adjoint_clip": (_TINY, _LARGE, "a number above 0, or null"),
    "norm_epsilon": (_TINY, _LARGE, "a number above 0"),
    "out_norm_epsilon": (_TINY, _LARGE, "a number above 0"),
    "eps": (_TINY, _LARGE, "a number above 0"),
    **dict.fromkeys(SIZES, (1, _LARGE, "a whole number from 1 on")),
    "max_iters": (1, _LARGE, "a whole number from 1 on"),
    "eval_max_iters": (1, _LARGE, "a whole number from 1 on"),
    "patience": (1, _LARGE, "a whole number from 1 on"),
    "n_backwards": (1, _LARGE, "a whole number from 1 on"),
    "dt_rank": (1, _LARGE, "a whole number from 1 on, or auto"),
    "n_heads": (1, _LARGE, "a whole number from 1 on, or auto"),
    "d_ff": (1, _LARGE, "a whole number from 1 on, or auto"),
    "attention_window": (1, _LARGE, "a whole number from 1 on, or null"),
    "n_householder": (1, _LARGE, "a whole number from 1 on"),
}

BOOLEANS = (
    "bias",
    "mixer_h_dep",
    "symm_mixer",
    *H_DEP,
    "bc_norm",
    "glu_in_loop",
    "use_short_conv",
)

UNSET = (
    ("contractive", None),
    ("eval_tol", "auto"),
    ("adjoint_clip", None),
    ("n_heads", "auto"),
    ("d_ff", "auto"),
    ("attention_window", None),
)

# ‖I − Q‖ that FP-RNN's mixers are held to where nothing else bounds them (`contractive: auto`): it
# iterates its state without a norm, so an unbounded mixer makes the state grow from token to token.
FP_RNN_CONTRACTIVE = {"monarch": 0.95, "nonselective": 0.95}


def mixer_bounds(
    block: str, mixer: str, kronecker_norm: str, contractive: float | str | None
) -> tuple[str, float | str | None]:
    """kronecker_norm and contractive; where they are "auto", what that is for block and mixer."""
    if kronecker_norm == "auto":
        kronecker_norm = "spectral" if block == "fp_rnn" else "rows"
    if contractive == "auto":
        contractive = FP_RNN_CONTRACTIVE.get(mixer) if block == "fp_rnn" else None
    return kronecker_norm, contractive


# The fields that say how the layers are solved; the weights do not depend on them.
SOLVER_FIELDS = (
    "token",
    "schedule",
    "stopping",
    "tol",
    "eval_tol",
    "max_iters",
    "eval_max_iters",
    "quantile",
    "stepsize",
    "stepsize_decay",
    "patience",
    "gradient",
    "n_backwards",
    "adjoint_clip",
    "state_noise",
)

CHOICES = {
    "token": ("auto", "exact", "iterate"),
    "stopping": ("auto", "causal", "paper"),
    "position": ("rope", "nope"),
    "allow_neg_eigval": ("auto", True, False),
}
# Fields that are no longer there, and their defaults: a config.json of then is read with these.
REMOVED = {"jacobian_reg": 0.0}
SCHEDULES = {
    "auto": "sequential with householder or dplr on a CPU, else window:128",
    "sequential": "one token after the other",
    "window:W": "W tokens at once, then the next W",
    "parallel": "all tokens at once",
}
AUTO_WINDOW = 128
GRADIENTS = {
    "exact": "of the solution: backpropagation through time",
    "adjoint:K": "the first K + 1 terms of its Neumann series",
    "one_step": "the paper's, of n_backwards steps from the solution (App. B.2)",
    "implicit": "of the fixed point of the paper's iteration (Eq. 16)",
}


def parse_schedule(text: str) -> int | None:
    """The width of the windows that a schedule (see SCHEDULES) solves at once: a number of tokens,
    0 for all, None for `auto`.

    Raises:
        ValueError: no such schedule, or an impossible width.
    """
    plain = {"auto": None, "sequential": 1, "parallel": 0}
    if text in plain:
        return plain[text]
    kind, _, width = str(text).partition(":")
    if kind == "window" and width.isdecimal() and int(width) > 0:
        return int(width)
    known = "; ".join(f"{name} ({what})" for name, what in SCHEDULES.items())
    raise ValueError(f"schedule is `{text}`; W is at least 1, and the schedules are: {known}")


def parse_gradient(text: str) -> tuple[str, int | None]:
    """A gradient (see GRADIENTS) as (its kind, its K or None).

    Raises:
        ValueError: no such gradient, or an impossible K.
    """
    kind, colon, steps = str(text).partition(":")
    if not colon and kind in GRADIENTS:
        return kind, None
    if kind == "adjoint" and steps.isdecimal():
        return kind, int(steps)
    known = "; ".join(f"{name} ({what})" for name, what in GRADIENTS.items())
    raise ValueError(f"gradient is `{text}`; the gradients are: {known}")


def refuse_solver_token(kwargs: dict[str, Any]) -> None:
    """Raise a ValueError where `token` of a `from_pretrained` names one of the solver's: to
    transformers it is a password, and nothing of the solver's would change."""
    token = kwargs.get("token")
    if token in CHOICES["token"]:
        raise ValueError(
            f"token is `{token}`: `from_pretrained` hands it to the hub, as a password, and not to"
            " the solver. Load without it, and use `with model.solving(token=…)`, or give"
            " `config=`, an FPRNNConfig with that token"
        )


class FPRNNConfig(PretrainedConfig):
    """Configuration of FPRNNModel and FPRNNForCausalLM. Every field has a default.

    Args:
        vocab_size, d_model, n_layer, d_state (N), expand (d_inner = expand · d_model),
        dt_rank ("auto": ⌈d_model/16⌉), d_conv, norm_epsilon (of the residual stream's norms),
        residual_in_fp32, tie_embeddings: as in Mamba.
        rms_norm: the residual stream's norms, one before each block and one before the head, are
        RMSNorm; False: LayerNorm with weight and bias.
        bias: in_proj and out_proj of every block have one.
        block: "fp_mamba1", "fp_mamba2" or "fp_rnn". headdim, ngroups: of fp_mamba2 and mamba2.
        layers: None: n_layer equal layers of `block`; else which layers there are, see patterns.py;
        `block` is then their kind of fixed-point layer.
        n_heads: of attention and gated_deltanet; "auto": as many of headdim as fit in d_model.
        position: of attention, "rope" or "nope". attention_window: tokens it looks at; None: all.
        n_householder: steps a token of (gated_)deltaproduct. allow_neg_eigval: β in (0, 2), not
        (0, 1); "auto": of (gated_)deltaproduct.
        d_ff: width inside mlp; "auto": 8/3 d_model, rounded up to 64.
        mixer: "householder", "dplr", "kronecker", "monarch", "nonselective", "mixture" or
        "selective_dense" (paper App. C.3), or another that is registered (mixer_base.py).
        eigen_range: eigenvalues of Q in [−1, 1] ("signed") or in [0, 1] ("positive").
        kronecker_norm: "rows", or "spectral" to divide by the largest eigenvalue as well; "auto":
        "spectral" for fp_rnn, else "rows".
        contractive: κ < 1 scales Q so that ‖I − Q‖ ≤ κ; None leaves it as it is; "auto": None, but
        0.95 for fp_rnn with monarch or nonselective, which nothing else bounds.
        mixer_rank: r (monarch: the block size).
        mixer_proj_rank: q of the low-rank map to the reflection vectors; None: full.
        mixer_act: "silu", "relu" or "identity". mixer_gate_start: the bias that the gates of a new
        mixer have: at −3 they are near σ(−3) = 0.05, and Q near the identity.
        mixer_h_dep: the mixer reads sh(y) as well as x.
        symm_mixer: it reads x + sh(y), not [x, sh(y)]. bc_norm: B and C are normalised.
        b_h_dep, c_h_dep, dt_h_dep: B, C, and the step size Δ (with it the decay λ), read sh(y) as
        well as x (Table 1). gate_h_dep: so does the output gate, where it is outside the iteration.
        These four are of fp_mamba1 and fp_mamba2.
        glu_in_loop: the output gate is inside the iteration. use_short_conv: convolution on x.
        out_norm_epsilon: of the LayerNorm that ends an iteration. eps: floor of the norms that
        vectors inside the iteration are divided by.
        reset_at_eos: a token after `eos_token_id` starts from an empty state (packed documents).
        token: how a token's own equation is solved: "exact" (cell.py) or "iterate" (the paper's f);
        "auto": "iterate" where stopping is "paper". schedule: how time is gone through (SCHEDULES
        above). stopping: "causal", each token by what is before it, or "paper", the batch as one
        (solver.py), which needs token "iterate"; "auto": "causal", unless token is "iterate".
        tol: relative residual in training; with token "exact" at most 0.01. eval_tol: in evaluation
        "auto": at most 1e-5 with token "exact" (fp64 1e-9, bf16 products 0.01), 0.01 with "iterate"
        under "causal", else tol. max_iters: ℓmax of token "iterate" in training; eval_max_iters: in
        evaluation. Exact tokens have no limit: a window of W ends after W + 1.
        quantile: share of the batch that must converge in training, under "paper".
        stepsize, stepsize_decay, patience: damping (App. B.4).
        quantile, stepsize and stepsize_decay "auto": the paper's for the block.
        gradient: see GRADIENTS above; n_backwards: the steps of "one_step". "auto": "exact", under
        token "iterate" "one_step".
        adjoint_clip: what reaches a token's output from later tokens, in the exact gradient, is at
        most so many times the largest that reaches one of the sequence from above; None: no limit.
        state_noise: σ of Gaussian noise on sh(y) wherever the iteration reads it, in training, see
        noise.py; 0: off. States that survive it have margin (docs/fixed-point.md).
        max_position_embeddings: a recurrence has no limit, but lm-evaluation-harness cuts contexts
        to this length.
        use_cache: a forward pass outside training returns what the next one can go on from.
    Raises:
        ValueError: a size that no model can have, or a field that the block cannot have.
    """

    model_type = "fprnn"
    attribute_map = {  # noqa: RUF012 (HuggingFace's convention)
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "state_size": "d_state",
        "tie_word_embeddings": "tie_embeddings",
    }
    # What an output has besides logits is no prediction, to be gathered over an evaluation.
    keys_to_ignore_at_inference = ["fixed_point", "state", "past_key_values"]  # noqa: RUF012

    def __init__(
        self,
        vocab_size: int = 50280,
        d_model: int = 768,
        n_layer: int = 12,
        d_state: int = 16,
        expand: int = 2,
        dt_rank: int | str = "auto",
        d_conv: int = 4,
        norm_epsilon: float = 1e-5,
        rms_norm: bool = True,
        residual_in_fp32: bool = True,
        tie_embeddings: bool = True,
        bias: bool = False,
        block: str = "fp_mamba1",
        layers: str | list[Any] | None = None,
        headdim: int = 64,
        ngroups: int = 1,
        mixer: str = "householder",
        mixer_rank: int = 1,
        mixer_proj_rank: int | None = None,
        mixer_act: str = "silu",
        mixer_gate_start: float = 0.0,
        eigen_range: str = "signed",
        kronecker_norm: str = "auto",
        contractive: float | str | None = "auto",
        mixer_h_dep: bool = True,
        symm_mixer: bool = False,
        b_h_dep: bool = True,
        c_h_dep: bool = True,
        dt_h_dep: bool = False,
        gate_h_dep: bool = True,
        bc_norm: bool = True,
        glu_in_loop: bool = False,
        use_short_conv: bool = False,
        n_heads: int | str = "auto",
        d_ff: int | str = "auto",
        position: str = "rope",
        attention_window: int | None = None,
        n_householder: int = 2,
        allow_neg_eigval: bool | str = "auto",
        out_norm_epsilon: float = 1e-5,
        eps: float = 1e-5,
        reset_at_eos: bool = True,
        token: str = "auto",
        schedule: str = "auto",
        stopping: str = "auto",
        tol: float = 0.1,
        eval_tol: float | str = "auto",
        max_iters: int = 100,
        eval_max_iters: int = 1000,
        quantile: float | str = "auto",
        stepsize: float | str = "auto",
        stepsize_decay: float | str = "auto",
        patience: int = 15,
        gradient: str = "auto",
        n_backwards: int = 1,
        adjoint_clip: float | None = None,
        state_noise: float = 0.0,
        max_position_embeddings: int = 2048,
        use_cache: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        for name, default in REMOVED.items():
            if (value := kwargs.pop(name, default)) != default:
                raise ValueError(f"{name} is {value!r}, and is no longer there: leave it out")
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.n_layer = n_layer
        self.d_state = d_state
        self.expand = expand
        self.dt_rank = dt_rank
        self.d_conv = d_conv
        self.norm_epsilon = norm_epsilon
        self.rms_norm = rms_norm
        self.residual_in_fp32 = residual_in_fp32
        self.tie_embeddings = kwargs.pop("tie_word_embeddings", tie_embeddings)
        self.bias = bias
        self.block = block
        self.layers = layers
        self.headdim = headdim
        self.ngroups = ngroups
        self.mixer = mixer
        self.mixer_rank = mixer_rank
        self.mixer_proj_rank = mixer_proj_rank
        self.mixer_act = mixer_act
        self.mixer_gate_start = mixer_gate_start
        self.eigen_range = eigen_range
        self.kronecker_norm = kronecker_norm
        self.contractive = contractive
        self.mixer_h_dep = mixer_h_dep
        self.symm_mixer = symm_mixer
        self.b_h_dep = b_h_dep
        self.c_h_dep = c_h_dep
        self.dt_h_dep = dt_h_dep
        self.gate_h_dep = gate_h_dep
        self.bc_norm = bc_norm
        self.glu_in_loop = glu_in_loop
        self.use_short_conv = use_short_conv
        self.n_heads = n_heads
        self.d_ff = d_ff
        self.position = position
        self.attention_window = attention_window
        self.n_householder = n_householder
        self.allow_neg_eigval = allow_neg_eigval
        self.out_norm_epsilon = out_norm_epsilon
        self.eps = eps
        self.reset_at_eos = reset_at_eos
        self.token = token
        self.schedule = schedule
        self.stopping = stopping
        self.tol = tol
        self.eval_tol = eval_tol
        self.max_iters = max_iters
        self.eval_max_iters = eval_max_iters
        self.quantile = quantile
        self.stepsize = stepsize
        self.stepsize_decay = stepsize_decay
        self.patience = patience
        self.gradient = gradient
        self.n_backwards = n_backwards
        self.adjoint_clip = adjoint_clip
        self.state_noise = state_noise
        self.settle()
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=self.tie_embeddings,
            **kwargs,
        )

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
            kinds = [layer.kind for layer in self.layer_list()]
            self.block = next((kind for kind in kinds if kind in FIXED_POINT), self.block)
        self._settle_values()
        for layer in self.distinct_layers():
            self.of_layer(layer)
        self._settle_solver()

    def _settle_values(self):
        for name, value in PAPER_RULES.get(self.block, PAPER_RULES["fp_mamba1"]).items():
            if getattr(self, name) == "auto":
                setattr(self, name, value)
        self.kronecker_norm, self.contractive = mixer_bounds(
            self.block, self.mixer, self.kronecker_norm, self.contractive
        )
        if self.dt_rank == "auto":
            self.dt_rank = math.ceil(self.d_model / 16)
        self._check_values()

    def _check_values(self):
        for name, known in {**NAMES, **CHOICES}.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(
                    f"{name} is `{value}`: it must be one of {', '.join(map(str, known))}"
                )
        for name in BOOLEANS:
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} is {value!r}: it must be true or false")
        for name, (least, most, words) in RANGES.items():
            value = getattr(self, name)
            if (name, value) in UNSET:
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            whole = words.startswith("a whole number")
            if not number or not least <= value <= most or (whole and value % 1):  # NaN is not
                raise ValueError(f"{name} is {value!r}: it must be {words}")

    @property
    def d_inner(self) -> int:
        """Width of the recurrence, expand · d_model."""
        return self.expand * self.d_model

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
        if (self.kronecker_norm, self.contractive) == mixer_bounds(
            self.block, self.mixer, "auto", "auto"
        ):  # of another mixer they may be others
            own.kronecker_norm = own.contractive = "auto"
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
        kind, _ = parse_gradient(self.gradient)
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
        if kind in ("exact", "adjoint") and self.token == "iterate":
            raise ValueError(
                f"gradient `{self.gradient}` goes through tokens that are solved: it needs token"
                " `exact`; of the paper's iteration it is `implicit`"
            )
