"""The YAML of a synthetic run: a task, and the model, optimizer and loader of `lm.config`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from lm.config import schema as base
from lm.config.load import load as load_yaml
from lm.config.model import Fraction1, InitFrom, Section
from lm.config.plugin import check_name, is_place
from lm.config.resuming import FIXED, FREE, NOTED
from synthetic.lengths import MAX_LENGTH, parse_ranges
from synthetic.tasks import registered_tasks

OneLength = Annotated[int, Field(gt=0, le=MAX_LENGTH)]
Length = OneLength | tuple[OneLength, OneLength]  # one, or [shortest, longest]
MAX_BATCH_IDS = 2**28  # 2 GiB of token ids, before any of them is embedded


class Automaton(Section):
    """A transition table: for each letter, the states that states 0, 1, … go to."""

    table: tuple[tuple[int, ...], ...] | None = None  # null: synthetic.tasks.automaton.DEFAULT


class Task(Section):
    """Which dataset (synthetic/tasks), and the fields that concern it."""

    name: str = "word_problem"  # a registered name, or module:Class
    group: str = "S3"  # of word_problem: S5, A5, D4, Z60, A4_x_Z5, …
    alphabet: int = Field(26, ge=2)  # letters, of copying; keys, and as many values, of recall
    ngram: int = Field(2, ge=1)  # n of the n-gram tasks; longest key and value of fuzzy_recall
    context: int = Field(256, gt=0)  # tokens that copying packs its training strings into
    modulus: int = Field(5, ge=2)  # of modular arithmetic
    pairs: int | None = Field(None, gt=0)  # of mqar; null: a sixteenth of the length
    noise: base.Fraction = 0.2  # of noisy_recall: the share of pairs that are noise
    content: int = Field(16, gt=0)  # of selective_copying: the letters among the blanks
    variables: int = Field(5, ge=2, le=9)  # of repl
    brackets: int = Field(2, gt=0, le=8)  # of dyck: kinds
    depth: int = Field(8, gt=0, le=4096)  # of dyck: the most brackets open at once
    automaton: Automaton = Automaton()
    supervision: Literal["last", "every"] = "last"  # of the formal languages: where answers are due
    data: str | None = None  # of catbabi: the folder with qa*_train.txt
    stories: tuple[int, ...] = tuple(range(1, 21))  # of catbabi: the bAbI tasks used
    options: dict[str, Any] = {}  # noqa: RUF012 (of pydantic) of a task of one's own

    @field_validator("name")
    @classmethod
    def _a_task_there_is(cls, value):
        return check_name(value, registered_tasks(), "task")

    @model_validator(mode="after")
    def _options_of_ones_own(self) -> Self:
        if self.options and not is_place(self.name):
            raise ValueError(
                f"`options` is for a task of your own, named as module:Class: {self.name} reads the"
                " other fields of `task`; leave it out"
            )
        return self


class Model(base.Model):
    """As in lm/config, at the size of these tasks."""

    d_model: int = Field(64, gt=0)
    n_layer: int = Field(1, gt=0)
    tie_embeddings: bool = False  # inputs and answers share ids, not meanings
    headdim: int = Field(32, gt=0)


class Optim(base.Optim):
    """AdamW as in lm/config, with the constants of small models."""

    lr: float = Field(1e-3, gt=0)
    min_lr: float = Field(1e-6, ge=0)
    betas: tuple[base.Fraction, base.Fraction] = (0.9, 0.999)
    weight_decay: float = Field(0.01, ge=0)


class Curriculum(Section):
    """Longest training length: `start` at first, `grow` longer whenever the headline metric at that
    length reaches `min_accuracy`, up to the upper end of train.length.

    With `num_elements`, the task then draws from twice as many elements each time, up to all.
    """

    start: int = Field(gt=0)
    grow: int = Field(2, gt=0)
    min_accuracy: Fraction1 = 0.98
    num_elements: int | None = Field(None, gt=1)  # of word_problem: elements at first, of low order


class Train(Section):
    """How long, how much at once, and at which lengths."""

    steps: int = Field(2000, gt=0, le=10**9)  # optimizer updates
    batch_size: Annotated[int, FIXED] = Field(64, gt=0, le=65_536)
    length: Annotated[Length, FIXED] = 16  # one length, or [shortest, longest]
    curriculum: Annotated[Curriculum | None, FIXED] = None
    # ℓmax in training, of solver.token: iterate
    max_iters: Annotated[PositiveInt | Literal["config", "unlimited", "gamma"], NOTED] = "config"
    # of ⌈Γ(shape, 1)⌉, drawn anew each update (Fig. 6)
    gamma_shape: Annotated[float, NOTED] = Field(4.0, gt=0)
    # κ of lm.model.state.Adversary, a second pass of every update; 0: none. With a curriculum once
    # that is over.
    adversarial_noise: Annotated[float, NOTED] = Field(0.0, ge=0)
    stop_at: Fraction1 | None = None  # end when the headline metric reaches this in evaluation
    precision: Annotated[Literal["auto", "fp32", "bf16"], FIXED] = "auto"  # auto: bf16 on a GPU
    threads: int | None = Field(None, gt=0)
    # A loss or gradient of NaN or infinity: so often back to the last checkpoint, and on with the
    # batches after it.
    max_rollbacks: int = Field(2, ge=0)

    @field_validator("length")
    @classmethod
    def _interval(cls, value):
        if isinstance(value, tuple) and value[0] > value[1]:
            raise ValueError(f"length [{value[0]}, {value[1]}] is empty: shortest first")
        return value

    @model_validator(mode="after")
    def _batch_in_memory(self) -> Self:
        if self.batch_size * self.lengths[1] > MAX_BATCH_IDS:
            raise ValueError(
                f"a batch of {self.batch_size:,} sequences of {self.lengths[1]:,} tokens has"
                f" {self.batch_size * self.lengths[1]:,} ids, and at most {MAX_BATCH_IDS:,} are"
                " held in memory: lower `batch_size` or `length`"
            )
        return self

    @model_validator(mode="after")
    def _curriculum_within_lengths(self) -> Self:
        longest = self.lengths[1]
        if self.curriculum and self.curriculum.start > longest:
            raise ValueError(
                f"curriculum.start is {self.curriculum.start}, and the longest of train.length only"
                f" {longest}: a curriculum starts below it"
            )
        return self

    @property
    def lengths(self) -> tuple[int, int]:
        """The shortest and the longest."""
        return (self.length, self.length) if isinstance(self.length, int) else self.length


class Eval(Section):
    """What a model is tried on, while it trains and at the end."""

    every: int = Field(200, gt=0)  # updates; the model is tried at the longest training length
    lengths: str = "2:48"  # at the end: see `synthetic.evaluate.parse_lengths`
    during: str | None = None  # lengths tried at every evaluation as well (Fig. 5 and 6)
    examples: int = Field(1000, gt=0)  # sequences per length
    batch_size: int = Field(100, gt=0, le=65_536)
    seeds: tuple[NonNegativeInt, ...] = Field((0,), min_length=1)  # of the test data
    # ℓmax in evaluation, of solver.token: iterate; null: solver.eval_max_iters
    max_iters: PositiveInt | None = None
    sequential: bool = False  # also read token by token, as when decoding (Fig. 10)

    @field_validator("lengths", "during", mode="before")
    @classmethod
    def _one_or_several(cls, value):
        if isinstance(value, (list, tuple)):
            return ",".join(map(str, value))
        return str(value) if isinstance(value, int) else value

    @field_validator("lengths", "during")
    @classmethod
    def _lengths(cls, value):
        if value is not None:
            parse_ranges(value)
        return value

    @field_validator("seeds")
    @classmethod
    def _different_seeds(cls, value):
        if len(set(value)) < len(value):
            raise ValueError(f"a seed of {list(value)} is there twice, with the same test samples")
        return value


class Threshold(Section):
    """What counts as passed: `metric` at every one of `lengths` is at least `min`."""

    metric: str
    length: int | None = Field(None, gt=0)  # null: of the whole test set (catbabi)
    min: Fraction1


class Checkpoint(base.Checkpoint):
    every: int = Field(1000, gt=0)  # updates


class Log(base.Log):
    every: int = Field(50, gt=0)


class Config(base.Run):
    """One run. `out_dir/name` is its run directory."""

    out_dir: Annotated[str, FREE] = "runs/synthetic"
    resume: Annotated[Literal["auto", "never"], FREE] = "auto"
    model: Annotated[Model, FIXED] = Model()
    init_from: Annotated[InitFrom | None, FIXED] = None  # another synthetic run
    task: Annotated[Task, FIXED] = Task()
    optim: Annotated[Optim, FIXED] = Optim()
    train: Annotated[Train, FREE] = Train()
    eval: Annotated[Eval, FREE] = Eval()
    checkpoint: Annotated[Checkpoint, FREE] = Checkpoint()
    log: Annotated[Log, FREE] = Log()
    thresholds: Annotated[tuple[Threshold, ...], FREE] = ()

    @model_validator(mode="after")
    def _profile_within_training(self) -> Self:
        base.check_profile(self.log.profile, self.train.steps)
        return self

    @model_validator(mode="after")
    def _warmup_within_training(self) -> Self:
        base.check_updates(self)
        return self

    @model_validator(mode="after")
    def _adversary_of_what_solves(self) -> Self:
        if self.train.adversarial_noise:
            base.check_adversary(self.train.adversarial_noise, self.model)
        return self

    @model_validator(mode="after")
    def _limits_of_what_iterates(self) -> Self:
        limits = {"train.max_iters": self.train.max_iters, "eval.max_iters": self.eval.max_iters}
        for key, value in limits.items():
            if value not in (None, "config") and not self.solver.iterates:
                none = "config" if key == "train.max_iters" else "null"
                raise ValueError(
                    f"`{key}` is {value}, and limits iterations, which solver.token: exact has not:"
                    f" set solver.token to iterate, or {key} to {none}"
                )
        return self


def load(path: str | Path, overrides: Sequence[str] = (), job_index: int | None = None) -> Config:
    """`lm.config.load` for the YAML of a synthetic run."""
    return load_yaml(path, overrides, job_index, Config)
