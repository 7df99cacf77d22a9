"""The part of the YAML that mixes several sources of text: what one is, and what is refused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, field_validator, model_validator

from lm.config.model import Section

if TYPE_CHECKING:
    from lm.config.load import Data

NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
# Of `data`, what describes a single source: with a mixture each source has its own.
OF_A_SINGLE_SOURCE = ("source", "path", "dataset", "name", "text_field")
PREPARED = ("builtin", "parquet", "jsonl", "text")


class Source(Section):
    """A source of `data.mixture`: the text, as `data` describes a single one, and how much of each
    batch comes from it."""

    source: Literal["builtin", "parquet", "jsonl", "text"]  # always said: a name mistyped in an
    path: str | None = None  # override is no source of its own
    text_field: str = "text"
    # relative to the others; null: `data.temperature` makes it
    weight: float | None = Field(None, ge=0, le=1e9)

    @field_validator("source", mode="before")
    @classmethod
    def _no_stream(cls, value):
        if value == "fineweb":
            raise ValueError(
                "a stream (`fineweb`) cannot be in a mixture, whose sources are prepared: download"
                " its files and take `source: parquet` with their `path`"
            )
        return value

    @model_validator(mode="after")
    def _path_where_one_is_read(self) -> Self:
        if self.source == "builtin" and self.path is not None:
            raise ValueError("source `builtin` has no `path`: leave it out")
        if self.source != "builtin" and not self.path:
            raise ValueError(f"source `{self.source}` needs `path`: a file, folder or glob")
        return self


def check_names(mixture: dict) -> None:
    """Raises ValueError for a mixture without a source, or a name that no folder should have."""
    if not mixture:
        raise ValueError("it has no source: give at least one, or null for `data.source` alone")
    for name in mixture:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} cannot be a source's name, which is a folder of the run, too: lower-case"
                " letters, digits, `_` and `-`, a letter or digit first (digits alone in quotes)"
            )


def check_weights(mixture: dict[str, Source], temperature: float | None) -> None:
    """Raises ValueError unless all sources have a weight, not all 0; or under a temperature none
    has one."""
    given = {name: part.weight for name, part in mixture.items()}
    if temperature is not None:
        if said := [name for name, weight in given.items() if weight is not None]:
            raise ValueError(
                f"`data.mixture.{said[0]}.weight` and `data.temperature` both say how much is drawn"
                " from the sources: leave out one of them (null)"
            )
        return
    if missing := [name for name, weight in given.items() if weight is None]:
        raise ValueError(
            f"`data.mixture.{missing[0]}.weight` is missing: give every source a weight of at least"
            " 0, or `data.temperature`, which makes them of the sources' sizes"
        )
    if not any(given.values()):
        raise ValueError(
            f"the weights of `data.mixture` ({', '.join(given)}) sum to 0: one at least must be"
            " above 0"
        )


def check_mixture(data: Data) -> None:
    """What the keys of `data` must be together, where it may have a mixture.

    Raises:
        ValueError: they say two things, or one that cannot be.
    """
    if data.packing == "best_fit" and data.source == "fineweb":
        raise ValueError(
            "`data.packing: best_fit` must see all documents before the first batch, and `fineweb`"
            " streams them: leave it out, or download the files and take `source: parquet`"
        )
    if data.mixture is None:
        if data.temperature is not None:
            raise ValueError(
                "`data.temperature` weighs the sources of `data.mixture`, which is null: give"
                " several sources, or leave it out"
            )
        return
    check_weights(data.mixture, data.temperature)
    for key in OF_A_SINGLE_SOURCE:
        if getattr(data, key) != type(data).model_fields[key].default:
            raise ValueError(
                f"`data.{key}` is of a single source, and `data.mixture` has several: leave it out,"
                " or move it into one of them"
            )
