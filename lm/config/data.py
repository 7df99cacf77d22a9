"""The `data` section of the YAML: one source of text, or a mixture of several."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from lm.config.model import Section, Size
from lm.config.resuming import FREE_ON_RESUME

# The name of a source is also the name of a folder in the run directory.
SourceName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
# Keys of `data` that describe a single source. With a mixture each source has its own.
SINGLE_SOURCE_KEYS = ("source", "path", "dataset", "dataset_config", "text_field", "traces")
MAX_TOKENS = 2**24  # largest sequence length, vocabulary and shuffle buffer
# Number of group elements before a question in a trace.
Gap = Annotated[int, Field(ge=0, le=2**14)]


class Traces(Section):
    """Generated text that asks for products of group elements (lm/data/sources/traces.py)."""

    group: str = Field("S3", min_length=1)  # S5, A5, D4, Z60, A4_x_Z5, …; for `repl` S2 to S9
    form: Literal["words", "repl"] = "words"
    # a list: each gap in it is equally likely; a number n: all gaps up to n, long gaps more rarely
    gaps: Gap | Annotated[list[Gap], Field(min_length=1)] = [1]  # noqa: RUF012 (pydantic copies it)
    # for `words`: number of group elements to use, the elements of lowest order; null: all
    num_elements: int | None = Field(None, ge=2)
    answers: int = Field(8, gt=0, le=2**16)  # largest number of answers in a document
    documents: int = Field(20_000, gt=0, le=10**9)

    @model_validator(mode="after")
    def _check_num_elements(self) -> Self:
        if self.form == "repl" and self.num_elements is not None:
            raise ValueError("`num_elements` is only for form `words`; leave it out for `repl`")
        return self

    @model_validator(mode="after")
    def _check_gaps(self) -> Self:
        if self.form == "words" and (self.gaps == 0 or 0 in self.possible_gaps):
            raise ValueError(
                "`gaps` must be at least 1 for form `words`: a gap of 0 would ask for a product of"
                " no elements; only form `repl` may ask before the first swap"
            )
        return self

    @property
    def possible_gaps(self) -> list[int]:
        """Gaps that `gaps` stands for."""
        if isinstance(self.gaps, list):
            return self.gaps
        smallest = 1 if self.form == "words" else 0
        return list(range(smallest, self.gaps + 1))


def check_source(source: Source | Data) -> None:
    """Raise a ValueError if a source lacks a key that it reads, or has a key that it ignores."""
    if source.source in ("parquet", "jsonl", "text") and not source.path:
        raise ValueError(f"source `{source.source}` needs `path`: a file, folder or glob")
    if source.source == "traces" and source.path is not None:
        raise ValueError("source `traces` generates its text and has no `path`: leave it out")
    if source.source != "traces" and source.traces is not None:
        raise ValueError(
            f"`traces` is only for source `traces`, not for `{source.source}`: leave it out"
        )


class Source(Section):
    """Source of `data.mixture`, with the keys of a single source in `data`, and its weight."""

    # Without a default, so that an override with a misspelt name of a source is refused.
    source: Literal["builtin", "parquet", "jsonl", "text", "traces"]
    path: str | None = None
    text_field: str = "text"
    traces: Traces | None = None
    weight: float = Field(ge=0, le=1e9)  # its share of sequences is weight / sum of all weights

    @field_validator("source", mode="before")
    @classmethod
    def _no_stream(cls, value):
        if value == "fineweb":
            raise ValueError(
                "a stream (`fineweb`) cannot be in a mixture, because the sources of a mixture are"
                " tokenised ahead: download its files and use `source: parquet` with their `path`"
            )
        return value

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        if self.source == "builtin" and self.path is not None:
            raise ValueError("source `builtin` has no `path`: leave it out")
        check_source(self)
        return self


class Stage(Section):
    """Stage of `data.curriculum`: weights of the sources up to an update."""

    until: int = Field(gt=0, le=10**12)  # last update of the stage; updates are counted from 1
    weights: dict[str, Annotated[float, Field(ge=0, le=1e9)]]  # sources not listed have weight 0
    # The stage ends earlier if the mean probability of the right answers reaches this value in each
    # of its `traces` sources; null: never earlier.
    min_answer_prob: float | None = Field(None, gt=0, lt=1)

    def trace_sources(self, mixture: dict[str, Source]) -> list[str]:
        """Return the names of the stage's `traces` sources with a weight above 0."""
        names = [name for name, weight in self.weights.items() if weight]
        return sorted(name for name in names if mixture[name].source == "traces")


def check_curriculum(stages: list[Stage], mixture: dict[str, Source] | None) -> None:
    """Raise a ValueError if stages are out of order, or their weights do not fit the mixture."""
    if stages and mixture is None:
        raise ValueError(
            "`data.curriculum` changes the weights of `data.mixture`, which is null: give several"
            " sources, or leave it out"
        )
    previous_end = 0
    for number, stage in enumerate(stages):
        key = f"`data.curriculum.{number}`"
        if unknown := sorted(set(stage.weights) - set(mixture or {})):
            raise ValueError(
                f"{key} has a weight for {', '.join(unknown)}, which is not in `data.mixture`"
                f" ({', '.join(sorted(mixture or {}))})"
            )
        if not any(stage.weights.values()):
            raise ValueError(f"the weights of {key} sum to 0: at least one must be above 0")
        if stage.min_answer_prob is not None and not stage.trace_sources(mixture or {}):
            raise ValueError(
                f"`data.curriculum.{number}.min_answer_prob` waits for the answers of its traces,"
                " and none of its sources (`weights` above 0) is `source: traces`: leave it out"
            )
        if stage.until <= previous_end:
            raise ValueError(
                f"{key} ends at update {stage.until}, but the stage before it at {previous_end}:"
                " sort the stages by `until`"
            )
        previous_end = stage.until


def check_mixture(data: Data) -> None:
    """Raise a ValueError if `data` has a mixture and keys that contradict it."""
    if data.mixture is None:
        return
    if not any(source.weight for source in data.mixture.values()):
        raise ValueError(
            f"the weights of `data.mixture` ({', '.join(data.mixture)}) sum to 0: at least one must"
            " be above 0"
        )
    for key in SINGLE_SOURCE_KEYS:
        if getattr(data, key) != type(data).model_fields[key].default:
            raise ValueError(
                f"`data.{key}` describes a single source, but `data.mixture` has several: leave it"
                " out, or move it into one of them"
            )


class Data(Section):
    """Sources of text, and the packing of text into blocks of seq_len + 1 tokens."""

    source: Literal["builtin", "fineweb", "parquet", "jsonl", "text", "traces"] = "builtin"
    path: str | None = None  # a file, folder or glob, for parquet, jsonl and text
    dataset: str = "HuggingFaceFW/fineweb"  # dataset on the hub, for `fineweb`
    dataset_config: str = "sample-10BT"  # configuration of the dataset on the hub
    download_dir: Annotated[str | None, FREE_ON_RESUME] = (
        None  # folder for files that are downloaded whole from the hub
    )
    # Folder of tokenised corpora that runs share. auto: $FPRNN_CACHE, or a folder in the home
    # directory; null: each run has its own corpus.
    cache_dir: Annotated[str | None, FREE_ON_RESUME] = Field("auto", min_length=1)
    text_field: str = "text"  # column (parquet) or key (jsonl) of the text
    traces: Traces | None = None  # for source `traces`; null: the defaults
    seq_len: int = Field(256, gt=0, le=MAX_TOKENS)
    leading_eos: bool = False  # EOS before each document, as well as after it
    val_fraction: float = Field(0.05, gt=0, lt=1)  # share of documents, chosen by hash
    val_tokens: int | None = Field(None, gt=0)  # largest number of tokens to validate on
    shuffle_buffer: int = Field(1024, ge=1, le=MAX_TOKENS)  # blocks, over all streams
    streams: Size | Literal["auto"] = "auto"  # parallel streams of a streamed source
    workers: Annotated[Annotated[int, Field(ge=0, le=1024)] | Literal["auto"], FREE_ON_RESUME] = (
        "auto"  # reader threads per rank
    )
    # {name: source}; null: the single source of the keys above
    mixture: dict[SourceName, Source] | None = Field(None, min_length=1)
    # stages with other weights; the weights in `mixture` apply after the last stage
    curriculum: list[Stage] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_mixture(self) -> Self:
        check_mixture(self)
        check_curriculum(self.curriculum, self.mixture)
        return self

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        check_source(self)
        return self
