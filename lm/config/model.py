"""The sections of the YAML that describe a model and its solver, and what a section is."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    field_validator,
    model_validator,
)

from lm.config.plugin import check_name
from lm.config.resuming import FREE


class Section(BaseModel):
    """A part of the YAML: typed, closed (no unknown keys), validated again on assignment."""

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_nul(cls, value):
        """Most texts are places of files, and no place holds a NUL."""
        if isinstance(value, str) and "\0" in value:
            raise ValueError(f"{value!r} holds the character NUL, which no place of a file has")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value, info):
        """Python counts true as 1, and `train.steps: true` would train for one step."""
        annotation = cls.model_fields[info.field_name].annotation
        elements = value if isinstance(value, list | tuple) else [value]
        a_switch = bool in (annotation, *get_args(annotation))
        if not a_switch and any(isinstance(element, bool) for element in elements):
            raise ValueError("true and false are only for what is switched on or off")
        return value


Fraction = Annotated[float, Field(ge=0, lt=1)]
Fraction1 = Annotated[float, Field(ge=0, le=1)]
OpenFraction = Annotated[float, Field(gt=0, lt=1)]
# Far above what a machine holds, and far below what no tensor can have.
Size = Annotated[int, Field(gt=0, le=65_536)]
Count = Annotated[int, Field(ge=0)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]


def registered_mixers() -> list[str]:
    """The names that `@mixer` has registered. Where the model's code is not loaded these are the
    built-in ones, and they are read from their file as text: a configuration needs no torch."""
    register = sys.modules.get("lm.model.mixer_base")
    if register is None or "lm.model.mixers" not in sys.modules:
        return _built_in_mixers()
    return list(register.MIXERS)


@cache
def _built_in_mixers() -> list[str]:
    source = (Path(__file__).parents[1] / "model" / "mixers.py").read_text(encoding="utf-8")
    decorators = re.findall(r"^@mixer\((.+)\)$", source, re.M)
    return [name for names in decorators for name in re.findall(r'"(\w+)"', names)]


class Model(Section):
    """The architecture. Field names and defaults are those of `FPRNNConfig` (a test compares them),
    as those of Solver are; the other names are short for a pattern of layers
    (docs/baselines.md)."""

    name: Literal[
        "fprnn",
        "mamba",
        "mamba2",
        "transformer",
        "lstm",
        "gated_deltanet",
        "deltaproduct",
        "gated_deltaproduct",
    ] = "fprnn"
    vocab_size: Annotated[int, Field(gt=0, le=2**24)] | Literal["auto"] = (
        "auto"  # auto: the tokenizer's, rounded up to 8
    )
    d_model: Size = 768
    n_layer: int = Field(12, gt=0, le=10_000)
    d_state: Size = 16
    expand: Size = 2
    dt_rank: Size | Literal["auto"] = "auto"
    d_conv: Size = 4
    norm_epsilon: float = Field(1e-5, gt=0)
    rms_norm: bool = True
    residual_in_fp32: bool = True
    tie_embeddings: bool = True
    bias: bool = False
    block: Literal["fp_mamba1", "fp_mamba2", "fp_rnn"] = "fp_mamba1"
    # another pattern than n_layer times `block`: "mamba*3 fp_mamba1", or a list with options
    layers: str | list[str | dict[str, dict[str, Any]]] | None = None
    headdim: Size = 64  # of fp_mamba2
    ngroups: Size = 1
    mixer: str = "householder"  # a registered name, or module:Class
    mixer_rank: Size = 1
    mixer_proj_rank: Size | None = None
    mixer_act: Literal["silu", "relu", "identity"] = "silu"
    mixer_gate_start: float = Field(0.0, ge=-20, le=20)
    eigen_range: Literal["signed", "positive"] = "signed"
    kronecker_norm: Literal["auto", "rows", "spectral"] = "auto"
    contractive: OpenFraction | Literal["auto"] | None = "auto"
    mixer_h_dep: bool = True
    symm_mixer: bool = False
    b_h_dep: bool = True
    c_h_dep: bool = True
    dt_h_dep: bool = False
    gate_h_dep: bool = True
    bc_norm: bool = True
    glu_in_loop: bool = False
    use_short_conv: bool = False
    out_norm_epsilon: float = Field(1e-5, gt=0)
    eps: float = Field(1e-5, gt=0)
    reset_at_eos: bool = True
    gradient_checkpointing: Annotated[bool, FREE] = False
    # Of layers of a pattern, and of what is short for one.
    n_heads: Size | Literal["auto"] = "auto"  # auto: as many of headdim as fit
    d_ff: Size | Literal["auto"] = "auto"  # auto: 8/3 d_model, rounded up to 64
    position: Literal["rope", "nope"] = "rope"
    attention_window: Size | None = None  # of a pattern's attention
    n_householder: Size = 2
    allow_neg_eigval: bool | Literal["auto"] = "auto"  # auto: for DeltaProduct

    @field_validator("mixer")
    @classmethod
    def _a_mixer_there_is(cls, value):
        return check_name(value, registered_mixers(), "mixer")

    @property
    def has_fixed_point(self) -> bool:
        """Whether some layer is solved."""
        kinds = get_args(type(self).model_fields["block"].annotation)
        named = self.layers is None or any(kind in str(self.layers) for kind in kinds)
        return self.name == "fprnn" and named


class Solver(Section):
    """How the fixed point is found, and how gradients go through it; of `fprnn` alone. No weight
    depends on it: a run can be resumed and evaluated with another."""

    token: Literal["auto", "exact", "iterate"] = "auto"  # auto: iterate under stopping: paper
    schedule: str = Field(
        "auto",
        pattern=r"^(auto|sequential|parallel|window:[1-9][0-9]*)$",
        description="auto, sequential, parallel or window:W (W: a number of tokens above 0)",
    )
    stopping: Literal["auto", "causal", "paper"] = "auto"
    tol: float = Field(0.1, gt=0)
    eval_tol: Annotated[PositiveFloat | Literal["auto"], FREE] = "auto"
    max_iters: int = Field(100, gt=0)
    eval_max_iters: Annotated[int, FREE] = Field(1000, gt=0)
    quantile: Fraction1 | Literal["auto"] = "auto"
    stepsize: PositiveFraction | Literal["auto"] = "auto"
    stepsize_decay: PositiveFraction | Literal["auto"] = "auto"
    patience: int = Field(15, gt=0)
    gradient: str = Field(
        "auto",  # exact; one_step of what is iterated
        pattern=r"^(auto|exact|one_step|implicit|adjoint:[0-9]+)$",
        description="auto, exact, adjoint:K, one_step or implicit (K: a whole number of terms)",
    )
    n_backwards: int = Field(1, gt=0)
    adjoint_clip: PositiveFloat | None = None
    state_noise: float = Field(0.0, ge=0)

    @property
    def iterates(self) -> bool:
        """Whether a token's equation is iterated (the paper's f), not solved exactly."""
        return self.token == "iterate" or (self.token == "auto" and self.stopping == "paper")

    def settled(self) -> dict:
        """The fields, each "auto" of token, stopping and gradient as what it is in FPRNNConfig: two
        that solve alike are equal."""
        iterated = ("iterate", "paper", "one_step")
        defaults = iterated if self.iterates else ("exact", "causal", "exact")
        fields = self.model_dump(mode="json")
        for name, value in zip(("token", "stopping", "gradient"), defaults):
            fields[name] = value if fields[name] == "auto" else fields[name]
        if fields["stopping"] == "paper" and fields["schedule"] == "auto":
            fields["schedule"] = "parallel"
        return fields


class InitFrom(Section):
    """What a run starts from instead of random weights (lm/training/init_from.py); not what it
    goes on from, which is `resume`."""

    path: str = Field(min_length=1)  # a run, checkpoint, export, or a folder with a Mamba
    # of each layer the number of the source's whose weights it takes, null: new; auto: by kind
    layers: Literal["auto"] | list[Count | None] = "auto"
    partial: bool = False  # take what fits; else the outputs at the start are the source's

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value):
        return {"path": value} if isinstance(value, str) else value
