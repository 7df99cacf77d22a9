"""The `data` section of the YAML: one source of text, or a mixture of several."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from lm.config.model import Section, Size
from lm.config.resuming import FREE

# A source's name is the name of a folder of the run, too.
SourceName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
# Of `data`, what describes a single source: with a mixture each source has its own.
OF_A_SINGLE_SOURCE = ("source", "path", "dataset", "dataset_config", "text_field", "traces")
LARGEST = 2**24  # tokens in a row, in a vocabulary; blocks in a buffer
Gap = Annotated[int, Field(ge=0, le=2**14)]


class Traces(Section):
    """Text of `source: traces`, which is made, not read (lm/data/sources/traces.py)."""

    group: str = Field("S3", min_length=1)  # S5, A5, D4, Z60, A4_x_Z5, …; of a repl S2 to S9
    form: Literal["words", "repl"] = "words"
    # a number: up to so many, the longer the rarer
    gaps: Gap | Annotated[list[Gap], Field(min_length=1)] = [1]  # noqa: RUF012 (of pydantic)
    num_elements: int | None = Field(None, ge=2)  # of words: so many elements, those of low order
    answers: int = Field(8, gt=0, le=2**16)  # in a document at most
    documents: int = Field(20_000, gt=0, le=10**9)

    @model_validator(mode="after")
    def _letters_of_words(self) -> Self:
        if self.form == "repl" and self.num_elements is not None:
            raise ValueError("`num_elements` is of form `words`: a session has swaps, leave it out")
        return self

    @model_validator(mode="after")
    def _something_to_answer(self) -> Self:
        if self.form == "words" and (self.gaps == 0 or 0 in self.lengths):
            raise ValueError(
                "`gaps` of form `words` are at least 1: a product of no elements says nothing; of"
                " form `repl` a gap of 0 asks for a variable before any swap"
            )
        return self

    @property
    def lengths(self) -> list[int]:
        """The gaps that occur: a session may be asked before any swap."""
        if isinstance(self.gaps, list):
            return self.gaps
        return list(range(int(self.form == "words"), self.gaps + 1))


def check_source(source: Source | Data) -> None:
    """Raises ValueError unless a source has the keys that it reads, and no other."""
    if source.source in ("parquet", "jsonl", "text") and not source.path:
        raise ValueError(f"source `{source.source}` needs `path`: a file, folder or glob")
    if source.source == "traces" and source.path is not None:
        raise ValueError("source `traces` has no `path`, its text is made: leave it out")
    if source.source != "traces" and source.traces is not None:
        raise ValueError(f"`traces` is of source `traces`, not of `{source.source}`: leave it out")


class Source(Section):
    """A source of `data.mixture`: the text, as `data` describes a single one, and how much of each
    batch comes from it."""

    # always said: a name mistyped in an override is no source of its own
    source: Literal["builtin", "parquet", "jsonl", "text", "traces"]
    path: str | None = None
    text_field: str = "text"
    traces: Traces | None = None
    weight: float = Field(ge=0, le=1e9)  # relative to the others

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
        check_source(self)
        return self


class Stage(Section):
    """Of `data.curriculum`: weights of the mixture until an update, or until they are learned."""

    until: int = Field(gt=0, le=10**12)  # the first update that is not drawn by these weights
    weights: dict[str, Annotated[float, Field(ge=0, le=1e9)]]  # a source that is left out has none
    # ends sooner, once the right answers of each of its traces are so likely; null: it does not
    min_answer_prob: float | None = Field(None, gt=0, lt=1)

    def traces(self, mixture: dict[str, Source]) -> list[str]:
        """Its sources that have answers to wait for."""
        drawn = [name for name, weight in self.weights.items() if weight]
        return sorted(name for name in drawn if mixture[name].source == "traces")


def check_curriculum(stages: list[Stage], mixture: dict[str, Source] | None) -> None:
    """Raises ValueError where stages are not of the mixture, weigh nothing, or are out of order."""
    if stages and mixture is None:
        raise ValueError(
            "`data.curriculum` changes the weights of `data.mixture`, which is null: give several"
            " sources, or leave it out"
        )
    ended = 0
    for number, stage in enumerate(stages):
        where = f"`data.curriculum.{number}`"
        if unknown := sorted(set(stage.weights) - set(mixture or {})):
            raise ValueError(
                f"{where} weighs {', '.join(unknown)}, no source of `data.mixture`"
                f" ({', '.join(sorted(mixture or {}))})"
            )
        if not any(stage.weights.values()):
            raise ValueError(f"the weights of {where} sum to 0: one at least must be above 0")
        if stage.min_answer_prob is not None and not stage.traces(mixture or {}):
            raise ValueError(
                f"`data.curriculum.{number}.min_answer_prob` waits for the answers of its traces,"
                " and none of its sources (`weights` above 0) is `source: traces`: leave it out"
            )
        if stage.until <= ended:
            raise ValueError(
                f"{where} is until update {stage.until}, and the one before it until {ended}: put"
                " the stages in their order"
            )
        ended = stage.until


def check_mixture(data: Data) -> None:
    """What the keys of `data` must be together, where it may have a mixture.

    Raises:
        ValueError: they say two things, or one that cannot be.
    """
    if data.mixture is None:
        return
    if not any(part.weight for part in data.mixture.values()):
        raise ValueError(
            f"the weights of `data.mixture` ({', '.join(data.mixture)}) sum to 0: one at least must"
            " be above 0"
        )
    for key in OF_A_SINGLE_SOURCE:
        if getattr(data, key) != type(data).model_fields[key].default:
            raise ValueError(
                f"`data.{key}` is of a single source, and `data.mixture` has several: leave it out,"
                " or move it into one of them"
            )


class Data(Section):
    """Where text comes from and how it becomes blocks of seq_len + 1 tokens."""

    source: Literal["builtin", "fineweb", "parquet", "jsonl", "text", "traces"] = "builtin"
    path: str | None = None  # a file, folder or glob, for parquet / jsonl / text
    dataset: str = "HuggingFaceFW/fineweb"  # the hub dataset behind `fineweb`
    dataset_config: str = "sample-10BT"  # its configuration
    download_dir: Annotated[str | None, FREE] = None  # a folder for its files: whole and checked
    # a folder of tokenised corpora that runs share; auto: $FPRNN_CACHE, else in the home;
    # null: none, each run has its own
    cache_dir: Annotated[str | None, FREE] = Field("auto", min_length=1)
    text_field: str = "text"  # the column (parquet) or key (jsonl) that holds the text
    traces: Traces | None = None  # of source `traces`: which text is made; null: the defaults
    seq_len: int = Field(256, gt=0, le=LARGEST)
    leading_eos: bool = False  # EOS before each document as well as after it
    val_fraction: float = Field(0.05, gt=0, lt=1)  # of documents, chosen by a hash of their content
    val_tokens: int | None = Field(None, gt=0)  # evaluate on at most so many tokens
    shuffle_buffer: int = Field(1024, ge=1, le=LARGEST)  # blocks of all streams together
    streams: Size | Literal["auto"] = "auto"  # streams that a streamed source is dealt to
    workers: Annotated[Annotated[int, Field(ge=0, le=1024)] | Literal["auto"], FREE] = (
        "auto"  # threads per rank that read them
    )
    # several sources in the place of one
    mixture: dict[SourceName, Source] | None = Field(None, min_length=1)
    # other weights of the mixture at first, stage after stage
    curriculum: list[Stage] = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_source_or_a_mixture(self) -> Self:
        check_mixture(self)
        check_curriculum(self.curriculum, self.mixture)
        return self

    @model_validator(mode="after")
    def _path_for_local_sources(self) -> Self:
        check_source(self)
        return self
