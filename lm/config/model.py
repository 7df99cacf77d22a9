"""The sections of the YAML that describe a model and its solver, and what a section is."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal, get_args

import pydantic
from pydantic import (
    BaseModel,
    ConfigDict,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from lm.config.plugin import check_name
from lm.config.resuming import FREE
from lm.model.fields import ARCHITECTURE, FIXED_POINT, MIXERS, SOLVER, Field, Number


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
        is_free = annotation is Any or bool in (annotation, *get_args(annotation))
        if not is_free and any(isinstance(element, bool) for element in elements):
            raise ValueError("true and false are only for what is switched on or off")
        return value


Fraction = Annotated[float, pydantic.Field(ge=0, lt=1)]
Fraction1 = Annotated[float, pydantic.Field(ge=0, le=1)]
Size = Annotated[int, pydantic.Field(gt=0, le=65_536)]  # above it, more than a machine holds


def registered_mixers() -> list[str]:
    """Return the names that `@mixer` has registered, without an import: a config needs no torch."""
    register = sys.modules.get("lm.model.mixer_base")
    if register is None or "lm.model.mixers" not in sys.modules:
        return list(MIXERS)
    return list(register.MIXERS)


def section_of(fields: dict[str, Field], base: type[Section], name: str) -> Any:
    """A Section with the fields of a table of lm/model/fields.py, after those of `base`."""
    annotated: Any = {key: (_annotation(field), field.default) for key, field in fields.items()}
    return create_model(name, __base__=base, **annotated)


def _annotation(field: Field) -> Any:
    """Return the annotation with which pydantic checks a field of the table."""

    def check(value: Any) -> Any:
        if not field.accepts(value):
            names = field.extra_values if isinstance(field.values, Number) else field.values
            raise PydanticCustomError(
                "field", "it must be {words}", {"words": field.describe(), "expected": names}
            )
        is_real = isinstance(field.values, Number) and not field.values.is_whole
        return float(value) if is_real and isinstance(value, int) else value

    annotation: Any = Annotated[Any if field.values else str, pydantic.AfterValidator(check)]
    return Annotated[annotation, FREE] if field.is_free else annotation


class _Named(Section):
    name: Literal[
        "fprnn",
        "mamba",
        "mamba2",
        "mamba3",
        "transformer",
        "lstm",
        "gated_deltanet",
        "deltaproduct",
        "gated_deltaproduct",
        "kda",
        "rwkv7",
        "slstm",
        "m2rnn",
    ] = "fprnn"
    vocab_size: Annotated[int, pydantic.Field(gt=0, le=2**24)] | Literal["auto"] = (
        "auto"  # auto: the tokenizer's, rounded up to 8
    )


class Model(section_of(ARCHITECTURE, _Named, "Architecture")):  # type: ignore[misc]
    """The architecture: fields of FPRNNConfig. The names besides `fprnn` are short for a pattern of
    layers (docs/baselines.md)."""

    # another pattern than n_layer times `block`: "mamba*3 fp_mamba1", or a list with options
    layers: str | list[str | dict[str, dict[str, Any]]] | None = None
    gradient_checkpointing: Annotated[bool, FREE] = False

    @field_validator("mixer")
    @classmethod
    def _a_mixer_there_is(cls, value):
        return check_name(value, registered_mixers(), "mixer")

    @property
    def has_fixed_point(self) -> bool:
        """Whether some layer is solved."""
        named = self.layers is None or any(kind in str(self.layers) for kind in FIXED_POINT)
        return self.name == "fprnn" and named


class Solver(section_of(SOLVER, Section, "HowToSolve")):  # type: ignore[misc]
    """How the fixed point is found, and how gradients go through it: fields of FPRNNConfig; of
    `fprnn` alone. No weight depends on it: a run can be resumed and evaluated with another."""

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

    path: str = pydantic.Field(min_length=1)  # a run, checkpoint, export, or a folder with a Mamba
    partial: bool = False  # take what fits; else the outputs at the start are the source's

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value):
        return {"path": value} if isinstance(value, str) else value
