"""`Section`, the base class of the YAML's sections, and the sections for model and solver."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal, get_args

import pydantic
from pydantic import BaseModel, ConfigDict, create_model, field_validator, model_validator
from pydantic_core import PydanticCustomError

from lm.config.plugin import check_name
from lm.config.resuming import FREE_ON_RESUME
from lm.model.fields import (
    ARCHITECTURE,
    FIXED_POINT_KINDS,
    MIXERS,
    SOLVER,
    STACKS,
    Field,
    Number,
    parse_pattern,
    reads_state,
)


class Section(BaseModel):
    """Part of the YAML: typed, without unknown keys, validated again on assignment."""

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_nul(cls, value):
        """Refuse NUL, because most texts are paths and a path cannot contain it."""
        if isinstance(value, str) and "\0" in value:
            raise ValueError(f"{value!r} contains the character NUL, which no path may contain")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value, info):
        """Refuse true and false for numbers; in Python `train.steps: true` would be one step."""
        annotation = cls.model_fields[info.field_name].annotation
        elements = value if isinstance(value, list | tuple) else [value]
        accepts_bool = annotation is Any or bool in (annotation, *get_args(annotation))
        if not accepts_bool and any(isinstance(element, bool) for element in elements):
            raise ValueError("true and false are only for keys that switch something on or off")
        return value


Fraction = Annotated[float, pydantic.Field(ge=0, lt=1)]
Fraction1 = Annotated[float, pydantic.Field(ge=0, le=1)]
Size = Annotated[int, pydantic.Field(gt=0, le=65_536)]  # the limit catches slips


def registered_mixers() -> list[str]:
    """Return the names of the built-in mixers, and of those that this process has registered.

    It imports nothing, because lm.model.mixers would import torch.
    """
    mixer_base = sys.modules.get("lm.model.mixer_base")
    # mixer_base has the registry, and importing `mixers` adds the built-in ones to it.
    if mixer_base is None or "lm.model.mixers" not in sys.modules:
        return list(MIXERS)
    return list(mixer_base.MIXERS)


def create_section(fields: dict[str, Field], base: type[Section], name: str) -> Any:
    """Create a subclass of `base`, called `name`, with fields of a table of lm/model/fields.py."""
    annotated: Any = {key: (_annotation(field), field.default) for key, field in fields.items()}
    return create_model(name, __base__=base, **annotated)


def _annotation(field: Field) -> Any:
    """Return the annotation with which pydantic validates a field of the table."""

    def check(value: Any) -> Any:
        if not field.accepts(value):
            # messages.py compares the value with "expected" to suggest a similar word.
            choices = field.extra_values if isinstance(field.values, Number) else field.values
            raise PydanticCustomError(
                "field", "it must be {words}", {"words": field.describe(), "expected": choices}
            )
        is_real = isinstance(field.values, Number) and not field.values.is_whole
        return float(value) if is_real and isinstance(value, int) else value

    # `accepts` checks everything unless the field has no `values`, as the name of a mixer.
    value_type = str if field.values is None else Any
    annotation: Any = Annotated[value_type, pydantic.AfterValidator(check)]
    return Annotated[annotation, FREE_ON_RESUME] if field.is_free else annotation


class _Named(Section):
    name: Literal["fprnn", *STACKS] = "fprnn"  # type: ignore[valid-type]
    vocab_size: Annotated[int, pydantic.Field(gt=0, le=2**24)] | Literal["auto"] = (
        "auto"  # auto: the tokenizer's, rounded up to a multiple of 8
    )


class Model(create_section(ARCHITECTURE, _Named, "Architecture")):  # type: ignore[misc]
    """Architecture of the model: fields of FPRNNConfig.

    Names other than `fprnn` stand for a pattern of layers (docs/baselines.md).
    """

    # a pattern of layers, "mamba*3 fp_mamba1" or a list with options; null: n_layer times `block`
    layers: str | list[str | dict[str, dict[str, Any]]] | None = None
    gradient_checkpointing: Annotated[bool, FREE_ON_RESUME] = False

    @field_validator("mixer")
    @classmethod
    def _check_mixer(cls, value):
        return check_name(value, registered_mixers(), "mixer")

    @property
    def has_fixed_point(self) -> bool:
        """True if a layer is a fixed-point layer."""
        is_in_layers = any(kind in str(self.layers) for kind in FIXED_POINT_KINDS)
        return self.name == "fprnn" and (self.layers is None or is_in_layers)

    @property
    def has_state_noise(self) -> bool:
        """True if a layer reads a state to which `solver.state_noise` is added."""
        if self.name != "fprnn":
            return "lstm" in self.name  # or sLSTM
        try:
            layers = parse_pattern(self.layers or self.block)
        except ValueError:  # building the model raises it again
            return True
        return any(
            "lstm" in kind or reads_state(kind, self.model_copy(update=options))
            for kind, options in layers
        )


class Solver(create_section(SOLVER, Section, "SolverFields")):  # type: ignore[misc]
    """Solver and gradient of fixed-point layers: fields of FPRNNConfig.

    They change no shape of a weight, so a run can be resumed and evaluated with another solver.
    """

    @property
    def iterates(self) -> bool:
        """True if the fixed point is found by the paper's iteration, not exactly token by token."""
        return self.token == "iterate" or (self.token == "auto" and self.stopping == "paper")

    def resolve_auto(self) -> dict:
        """Return the fields, with every "auto" replaced that FPRNNConfig replaces.

        The others stay, such as `schedule: auto` of an exact solver: their values depend on the
        layer and the device.
        """
        exact = {"token": "exact", "stopping": "causal", "gradient": "exact"}
        paper = {"token": "iterate", "stopping": "paper", "gradient": "one_step"}
        fields = self.model_dump(mode="json")
        for name, value in (paper if self.iterates else exact).items():
            if fields[name] == "auto":
                fields[name] = value
        if fields["stopping"] == "paper" and fields["schedule"] == "auto":
            fields["schedule"] = "parallel"
        return fields


class InitFrom(Section):
    """Source of the initial weights of a new run: another model (lm/training/init_from.py).

    To continue a run, set the key `resume` instead.
    """

    path: str = pydantic.Field(min_length=1)  # a run, checkpoint, export, or folder with a Mamba
    # true: copy the weights that fit; false: refuse to start unless the new model has the same
    # outputs as the model at `path`
    partial: bool = False

    @model_validator(mode="before")
    @classmethod
    def _accept_path(cls, value):
        return {"path": value} if isinstance(value, str) else value
