"""Schema of a synthetic run's YAML: a task, with the model, solver and optimizer of `lm.config`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from lm.config import schema as lm_schema
from lm.config.load import load as load_yaml
from lm.config.model import Fraction1, InitFrom, Section
from lm.config.plugin import check_name, is_class_path
from lm.config.resuming import FIXED_ON_RESUME, FREE_ON_RESUME, NOTED_ON_RESUME
from synthetic.lengths import MAX_LENGTH, parse_ranges
from synthetic.tasks import registered_tasks

SingleLength = Annotated[int, Field(gt=0, le=MAX_LENGTH)]
LengthOrInterval = SingleLength | tuple[SingleLength, SingleLength]  # length, or its range
MAX_BATCH_IDS = 2**28  # 2 GiB of token ids, before the embedding


class Automaton(Section):
    """Transition table: for each symbol, the states that states 0, 1, … go to."""

    # null: synthetic.tasks.automaton.DEFAULT_TABLE
    table: tuple[tuple[int, ...], ...] | None = None


class Task(Section):
    """The task (synthetic/tasks) and its options."""

    name: str = "word_problem"  # a registered name, or module:Class
    group: str = "S3"  # word_problem: S5, A5, D4, Z60, A4_x_Z5, …
    alphabet: int = Field(26, ge=2)  # copying: characters; recall: keys, and as many values
    ngram: int = Field(2, ge=1)  # suffix_ngram: n; fuzzy_recall: tokens of the longest key or value
    context: int = Field(256, gt=0)  # copying: tokens per training row
    modulus: int = Field(5, ge=2)  # mod_arithmetic
    pairs: int | None = Field(None, gt=0)  # mqar: key-value pairs; null: length / 16
    noise: lm_schema.Fraction = 0.2  # noisy_recall: fraction of pairs that are noise
    content: int = Field(16, gt=0)  # selective_copying: tokens among the blanks
    variables: int = Field(5, ge=2, le=9)  # repl
    brackets: int = Field(2, gt=0, le=8)  # dyck: kinds of brackets
    depth: int = Field(8, gt=0, le=4096)  # dyck: maximum number of open brackets
    automaton: Automaton = Automaton()
    supervision: Literal["last", "every"] = "last"  # formal languages: labelled positions
    data: str | None = None  # catbabi: folder with qa*_train.txt
    stories: tuple[int, ...] = tuple(range(1, 21))  # catbabi: the bAbI tasks used
    options: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it); options of a `module:Class`

    @field_validator("name")
    @classmethod
    def _check_name(cls, value):
        return check_name(value, registered_tasks(), "task")

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.options and not is_class_path(self.name):
            raise ValueError(
                f"`options` is for a task of your own, named as module:Class: {self.name} reads the"
                " other fields of `task`; leave it out"
            )
        return self


class Model(lm_schema.Model):
    """Model options of lm/config, with defaults for these small tasks."""

    d_model: int = Field(64, gt=0)
    n_layer: int = Field(1, gt=0)
    tie_embeddings: bool = False  # an id has different meanings in inputs and answers
    headdim: int = Field(32, gt=0)


class Optim(lm_schema.Optim):
    """Optimizer options of lm/config, with defaults for small models."""

    lr: float = Field(1e-3, gt=0)
    min_lr: float = Field(1e-6, ge=0)
    betas: tuple[lm_schema.Fraction, lm_schema.Fraction] = (0.9, 0.999)
    weight_decay: float = Field(0.01, ge=0)


class Curriculum(Section):
    """Schedule of the longest training length.

    It begins at `start` and grows by `grow` whenever the headline metric at this length reaches
    `min_accuracy`, up to the upper end of train.length. With `num_elements`, the task begins with
    that many elements of low order. Their number then doubles in the same way, up to all.
    """

    start: int = Field(gt=0)
    grow: int = Field(2, gt=0)
    min_accuracy: Fraction1 = 0.98
    num_elements: int | None = Field(None, gt=1)  # word_problem: elements at the start
    # true: while the current longest length is below the upper end of train.length, a batch has
    # more sequences, so that its number of tokens stays the same
    constant_tokens: bool = False


# With `train.max_iters: gamma`, ℓmax = ⌈Γ(GAMMA_SHAPE, 1)⌉ is drawn again for each update (Fig. 6).
GAMMA_SHAPE = 4.0


class Train(Section):
    """Training: number of updates, batch size and sequence lengths."""

    steps: int = Field(2000, gt=0, le=10**9)  # optimizer updates
    batch_size: Annotated[int, FIXED_ON_RESUME] = Field(64, gt=0, le=65_536)
    length: Annotated[LengthOrInterval, FIXED_ON_RESUME] = 16  # one length, or [shortest, longest]
    curriculum: Annotated[Curriculum | None, FIXED_ON_RESUME] = None
    # ℓmax in training, for solver.token: iterate
    max_iters: Annotated[PositiveInt | Literal["config", "unlimited", "gamma"], NOTED_ON_RESUME] = (
        "config"
    )
    # Scale ν of the noise of a second pass in every update (lm.model.state.Adversary). With a
    # curriculum, the second pass starts after its end. 0: no second pass.
    adversarial_noise: Annotated[float, NOTED_ON_RESUME] = Field(0.0, ge=0)
    stop_at: Fraction1 | None = None  # end training when the headline metric reaches this
    # auto: bf16 on a GPU, fp32 on a CPU
    precision: Annotated[Literal["auto", "fp32", "bf16"], FIXED_ON_RESUME] = "auto"
    threads: int | None = Field(None, gt=0)  # CPU threads of PyTorch; null: its default
    # If a loss or gradient is NaN or infinite, training returns to the last checkpoint and
    # continues with the next batches, at most this many times.
    max_rollbacks: int = Field(2, ge=0)

    @field_validator("length")
    @classmethod
    def _check_interval(cls, value):
        if isinstance(value, tuple) and value[0] > value[1]:
            raise ValueError(
                f"length [{value[0]}, {value[1]}] is empty: the shortest length comes first"
            )
        return value

    @model_validator(mode="after")
    def _check_batch_memory(self) -> Self:
        if self.batch_size * self.lengths[1] > MAX_BATCH_IDS:
            raise ValueError(
                f"a batch of {self.batch_size:,} sequences of {self.lengths[1]:,} tokens has"
                f" {self.batch_size * self.lengths[1]:,} ids, and the maximum is"
                f" {MAX_BATCH_IDS:,}: lower `batch_size` or `length`"
            )
        return self

    @model_validator(mode="after")
    def _check_curriculum(self) -> Self:
        longest = self.lengths[1]
        if self.curriculum and self.curriculum.start > longest:
            raise ValueError(
                f"curriculum.start is {self.curriculum.start}, and the longest of train.length is"
                f" only {longest}: a curriculum starts at most there"
            )
        return self

    @property
    def lengths(self) -> tuple[int, int]:
        """Shortest and longest training length."""
        return (self.length, self.length) if isinstance(self.length, int) else self.length


class Eval(Section):
    """Evaluation, during training and at the end."""

    every: int = Field(200, gt=0)  # updates between validations, at the current longest length
    lengths: str = "2:48"  # at the end; see `synthetic.evaluate.parse_lengths`
    during: str | None = None  # lengths measured during training as well (Fig. 5 and 6)
    examples: int = Field(1000, gt=0)  # sequences per length
    batch_size: int = Field(100, gt=0, le=65_536)
    seeds: tuple[NonNegativeInt, ...] = Field((0,), min_length=1)  # seeds of the test data
    # ℓmax in evaluation, for solver.token: iterate; null: solver.eval_max_iters
    max_iters: PositiveInt | None = None
    sequential: bool = False  # also read token by token, as when decoding (Fig. 10)

    @field_validator("lengths", "during", mode="before")
    @classmethod
    def _join_list(cls, value):
        if isinstance(value, (list, tuple)):
            return ",".join(map(str, value))
        return str(value) if isinstance(value, int) else value

    @field_validator("lengths", "during")
    @classmethod
    def _check_lengths(cls, value):
        if value is not None:
            parse_ranges(value)
        return value

    @field_validator("seeds")
    @classmethod
    def _check_seeds(cls, value):
        if len(set(value)) < len(value):
            raise ValueError(f"{list(value)} has a seed twice, which gives the same test samples")
        return value


class Threshold(Section):
    """Condition for a passed run: `metric` at `length` is at least `min`."""

    metric: str
    length: int | None = Field(None, gt=0)  # null: all evaluated lengths
    min: Fraction1


class Checkpoint(lm_schema.Checkpoint):
    """Checkpoint options of lm/config, with another default interval."""

    every: int = Field(1000, gt=0)  # updates


class Log(lm_schema.Log):
    """Logging options of lm/config, with another default interval."""

    every: int = Field(50, gt=0)


class Config(lm_schema.Run):
    """Config of a run, whose directory is `out_dir/name`."""

    out_dir: Annotated[str, FREE_ON_RESUME] = "runs/synthetic"
    resume: Annotated[Literal["auto", "never"], FREE_ON_RESUME] = "auto"
    model: Annotated[Model, FIXED_ON_RESUME] = Model()
    init_from: Annotated[InitFrom | None, FIXED_ON_RESUME] = None  # another synthetic run
    task: Annotated[Task, FIXED_ON_RESUME] = Task()
    optim: Annotated[Optim, FIXED_ON_RESUME] = Optim()
    train: Annotated[Train, FREE_ON_RESUME] = Train()
    eval: Annotated[Eval, FREE_ON_RESUME] = Eval()
    checkpoint: Annotated[Checkpoint, FREE_ON_RESUME] = Checkpoint()
    log: Annotated[Log, FREE_ON_RESUME] = Log()
    thresholds: Annotated[tuple[Threshold, ...], FREE_ON_RESUME] = ()

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        lm_schema.check_updates(self)
        return self

    @property
    def defers_centroids(self) -> bool:
        """True if centroids, if the model has any, are attached only after the curriculum."""
        return self.train.curriculum is not None and self.init_from is None

    @model_validator(mode="after")
    def _check_iteration_limits(self) -> Self:
        limits = {"train.max_iters": self.train.max_iters, "eval.max_iters": self.eval.max_iters}
        for key, value in limits.items():
            if value not in (None, "config") and not self.solver.iterates:
                default = "config" if key == "train.max_iters" else "null"
                raise ValueError(
                    f"`{key}` is {value}, but solver.token: exact has no iterations to limit: set"
                    f" solver.token to iterate, or {key} to {default}"
                )
        return self


def load(path: str | Path, overrides: Sequence[str] = (), job_index: int | None = None) -> Config:
    """Load the YAML of a synthetic run; see `lm.config.load.load`."""
    return load_yaml(path, overrides, job_index, Config)
