"""`Config`, the configuration of a language-model run, and its sections."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import yaml
from pydantic import Field, PositiveInt, field_validator, model_validator

from lm.common.errors import ConfigError
from lm.config.data import MAX_TOKENS, Data
from lm.config.model import Fraction, InitFrom, Model, Section, Solver
from lm.config.resuming import FIXED_ON_RESUME, FREE_ON_RESUME, NOTED_ON_RESUME
from lm.config.yaml_text import Dumper

MAX_COUNT = 10**9  # largest number of updates and of sequences; catches slips
# Characters that names of folders must not contain: control characters, line separators, marks of
# the writing direction, and surrogates.
INVISIBLE_CHARACTERS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class Tokenizer(Section):
    """Tokenizer of the run.

    `name: bpe` trains a byte-level BPE of `vocab_size` once on the corpus and stores it in the run
    directory. Any other name is a HuggingFace tokenizer, a name on the hub or a folder.
    """

    name: str = Field("bpe", min_length=1)
    vocab_size: int = Field(4096, gt=257, le=MAX_TOKENS)
    train_bytes: int = Field(20_000_000, gt=0)  # bytes of text on which a BPE is trained


DEFAULT_WSD_DECAY = 0.2  # fraction of all updates
MAX_LR = 1000.0  # largest learning rate, factor of it, and weight decay; catches slips
# Pattern of parameter names → factor of the learning rate, such as {'*.A_log': 0.1}.
LrFactors = dict[Annotated[str, Field(min_length=1)], Annotated[float, Field(gt=0, le=MAX_LR)]]


class Optim(Section):
    """AdamW with decoupled weight decay and a schedule, counted in updates."""

    lr: float = Field(4e-3, gt=0, le=MAX_LR)  # at the peak
    min_lr: float = Field(1e-5, ge=0)  # at the last update, except with schedule `constant`
    warmup: float = Field(0.1, ge=0)  # updates, or below 1 a fraction of all updates
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    # for `wsd`: updates of the decay, or below 1 a fraction of all; null: DEFAULT_WSD_DECAY
    wsd_decay: float | None = Field(None, gt=0)
    lr_factors: LrFactors = {}  # noqa: RUF012 (pydantic copies it)
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    weight_decay: float = Field(0.1, ge=0, le=MAX_LR)
    grad_clip: float = Field(1.0, ge=0)  # largest norm of the gradient; 0: no limit

    @model_validator(mode="after")
    def _check_min_lr(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above the peak lr {self.lr:g}")
        return self

    @model_validator(mode="after")
    def _check_wsd_decay(self) -> Self:
        if self.wsd_decay is not None and self.schedule != "wsd":
            raise ValueError(
                f"`wsd_decay` is {self.wsd_decay:g}: only schedule wsd reads it,"
                f" not {self.schedule}; leave it out (null)"
            )
        return self

    @property
    def wsd_decay_or_default(self) -> float:
        """`wsd_decay`, or its default."""
        return DEFAULT_WSD_DECAY if self.wsd_decay is None else self.wsd_decay


class Train(Section):
    """Length of the training and size of its batches."""

    steps: int = Field(4800, gt=0, le=MAX_COUNT)  # optimizer updates
    # Sequences per update, over all ranks. If it is set, training is the same on any number of
    # ranks. A resumed run must have the same number.
    global_batch_size: int | None = Field(None, gt=0, le=MAX_COUNT)
    micro_batch_size: int = Field(8, gt=0, le=65_536)  # sequences per forward pass and rank
    # null: follows from global_batch_size, or 1 without it
    grad_accum_steps: int | None = Field(None, gt=0, le=MAX_COUNT)
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16: autocast over fp32 weights
    threads: int | None = Field(None, gt=0, le=4096)  # CPU threads per rank; null: torch's default
    # A loss or gradient that is not finite returns the run to its last checkpoint at most this
    # often. The run then continues with the data after the failure.
    max_rollbacks: int = Field(2, ge=0)
    # Largest norm of the adversarial noise on the state of a token, in units of √d_inner
    # (lm.model.state.Adversary; √d_model in lstm and slstm). If it is above 0, every update after
    # data.curriculum has a second pass with this noise.
    adversarial_noise: Annotated[float, NOTED_ON_RESUME] = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _check_batch_keys(self) -> Self:
        if self.global_batch_size and self.grad_accum_steps:
            raise ValueError(
                "`grad_accum_steps` follows from `global_batch_size`, the number of ranks and"
                " `micro_batch_size`: leave it out (null)"
            )
        return self

    def accumulation(self, world_size: int) -> int:
        """Return the number of micro-batches per update and rank.

        Raises:
            ConfigError: If the global batch is not a multiple of micro_batch_size · world_size.
        """
        if self.global_batch_size is None:
            return self.grad_accum_steps or 1
        size = self.micro_batch_size * world_size  # sequences in one pass of all ranks
        count, remainder = divmod(self.global_batch_size, size)
        if remainder or not count:
            ranks = f"{world_size} rank{'s' * (world_size > 1)}"
            raise ConfigError(
                f"train.global_batch_size {self.global_batch_size} is no multiple of"
                f" micro_batch_size {self.micro_batch_size} × {ranks} = {size}: change"
                " train.micro_batch_size or train.global_batch_size"
            )
        return count

    def sequences(self, world_size: int) -> int:
        """Return the sequences per update, over all ranks."""
        return self.micro_batch_size * self.accumulation(world_size) * world_size


class Engine(Section):
    """Settings of DeepSpeed, whose JSON is derived from the whole config.

    `deepspeed`, a mapping or the path of a JSON file, replaces values of that JSON.
    """

    zero_stage: Literal[0, 1, 2, 3] = 1
    deepspeed: dict[str, Any] | str | None = None
    timeout_s: int = Field(1800, gt=0, le=31_536_000)  # longest time without progress


class Checkpoint(Section):
    """Interval and number of checkpoints."""

    every: int = Field(500, gt=0)  # updates
    keep: int = Field(2, gt=0)  # number of newest checkpoints to keep
    # also keep the checkpoints at multiples of this number of updates
    keep_every: int | None = Field(None, gt=0)


class Log(Section):
    """Logging and profiling."""

    every: int = Field(10, gt=0)  # updates
    wandb: bool = False
    tensorboard: bool = False
    # updates between probes, which count the iterations ℓ* that the paper's procedure makes in
    # each fixed-point layer; 0: only at validations
    probe_every: int = Field(100, ge=0)
    # first and last update of the PyTorch profile that rank 0 writes; null: no profile
    profile: tuple[PositiveInt, PositiveInt] | None = None


class Eval(Section):
    """Interval of validations."""

    every: int = Field(500, gt=0)  # updates; there is always a validation at the end


WITH_STATE_NOISE = "only fixed-point layers that read sh(y), lstm and slstm"


class Run(Section):
    """Configuration that every kind of run has. `out_dir/name` is the run directory.

    Markers on fields and sections state whether a resumed run may change them (`Resume`).
    """

    name: Annotated[str, FREE_ON_RESUME] = Field("run", min_length=1)
    out_dir: Annotated[str, FREE_ON_RESUME] = Field("runs", min_length=1)
    seed: Annotated[int, FIXED_ON_RESUME] = Field(
        0, ge=0, le=2**64 - 1
    )  # the range of torch.manual_seed
    model: Annotated[Model, FIXED_ON_RESUME] = Model()
    solver: Annotated[Solver, NOTED_ON_RESUME] = Solver()
    sweep: Annotated[dict[str, list[Any] | dict[str, dict[str, Any]]], FREE_ON_RESUME] = Field(
        {}, description="a mapping of keys to lists, or of a name to variants"
    )
    if TYPE_CHECKING:  # subclasses define these fields, each with its own class
        resume: str
        optim: Optim
        train: Any
        log: Log

    @field_validator("model", mode="before")
    @classmethod
    def _model_by_name(cls, value):
        return {"name": value} if isinstance(value, str) else value

    @field_validator("out_dir")
    @classmethod
    def _expand_home(cls, value):
        """Expand ~, which shells do not do in `out_dir=~/runs`."""
        if INVISIBLE_CHARACTERS.search(value):
            raise ValueError(f"{value!r} contains a character that no folder name may contain")
        path = os.path.expanduser(value)
        if path.startswith("~"):
            raise ValueError(f"`{value}` begins with ~, but there is no such user: give the folder")
        return path

    @model_validator(mode="after")
    def _check_profile(self) -> Self:
        profile, steps = self.log.profile, self.train.steps
        if profile is not None and profile[0] > profile[1]:
            raise ValueError(
                f"`log.profile` is {list(profile)}: it must be the first and the last update to"
                " profile"
            )
        if profile is not None and profile[1] > steps:
            raise ValueError(
                f"`log.profile` ends at update {profile[1]}, but `train.steps` is only {steps}"
            )
        return self

    @model_validator(mode="after")
    def _check_adversary(self) -> Self:
        noise, model = self.train.adversarial_noise, self.model
        if noise and not model.has_state_noise:
            raise ValueError(
                f"`train.adversarial_noise` is {noise}, but {WITH_STATE_NOISE} have such noise,"
                f" and {model.layers or model.name} has none: set it to 0"
            )
        return self

    @field_validator("name")
    @classmethod
    def _check_name(cls, value):
        """Keep the run directory inside out_dir, because `--overwrite` deletes it."""
        parts = value.split("/")
        if "" in parts or "." in parts or ".." in parts:
            raise ValueError(
                f"`{value}` is not the name of a folder inside out_dir: give a name, or several"
                " names with `/` between them, such as mixers/first; set out_dir for another place"
            )
        if "\\" in value or INVISIBLE_CHARACTERS.search(value):
            raise ValueError(f"{value!r} contains a character that no folder name may contain")
        return value

    @property
    def run_dir(self) -> Path:
        """Run directory."""
        return Path(self.out_dir) / self.name

    def to_yaml(self) -> str:
        """Return the configuration as YAML, with all defaults."""
        tree = self.model_dump(mode="json")
        return yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True)


def convert_to_updates(value: float, steps: int) -> int:
    """Convert `optim.warmup` or `optim.wsd_decay` to updates; below 1 it is a fraction."""
    return round(value * steps if value < 1 else value)


def check_state_noise(cfg: Run) -> None:
    """Raise a ConfigError if `solver.state_noise` is above 0 and no layer of the model reads it.

    The schema does not check it, so that old runs of versions without this check still load.
    """
    if cfg.solver.state_noise and not cfg.model.has_state_noise:
        raise ConfigError(
            f"solver.state_noise is {cfg.solver.state_noise:g}, but {WITH_STATE_NOISE} have such"
            f" noise, and {cfg.model.layers or cfg.model.name} has none: set it to 0"
        )


def check_updates(cfg: Run) -> None:
    """Check settings that depend on the number of updates.

    The schema does not check them, so that old runs of versions without this check still load.

    Raises:
        ConfigError: If the warm-up is longer than the run or no whole number, the decay of `wsd`
            does not fit after the warm-up, or the adversarial noise would never begin.
    """
    if isinstance(cfg, Config):
        _check_adversary_begins(cfg)
    optim, steps = cfg.optim, cfg.train.steps
    decay = optim.wsd_decay_or_default if optim.schedule == "wsd" else 0.0
    for name, value in (("warmup", optim.warmup), ("wsd_decay", decay)):
        if value > 1 and value != int(value):
            raise ConfigError(
                f"optim.{name} is {value:g}: it must be a whole number of updates, or below 1 a"
                " fraction of all updates"
            )
    warmup_updates = convert_to_updates(optim.warmup, steps)
    decay_updates = convert_to_updates(decay, steps)
    if warmup_updates > steps:
        raise ConfigError(
            f"optim.warmup is {warmup_updates} updates, but train.steps is only {steps}: the"
            " learning rate would never reach optim.lr"
        )
    if warmup_updates + decay_updates > steps:
        raise ConfigError(
            f"optim.warmup and optim.wsd_decay are {warmup_updates} and {decay_updates} updates,"
            f" but train.steps is only {steps}: they do not fit one after the other"
        )


def _check_adversary_begins(cfg: Config) -> None:
    """Raise a ConfigError if the training ends before the adversarial noise begins."""
    if not cfg.train.adversarial_noise or cfg.adversarial_updates or cfg.can_end_stage_early:
        return
    raise ConfigError(
        "train.adversarial_noise begins after the last stage of data.curriculum, which ends with"
        f" update {cfg.data.curriculum[-1].until}, but train.steps is only {cfg.train.steps}: set"
        " train.adversarial_noise to 0, or let the last stage end earlier"
    )


class Config(Run):
    """Configuration of a language-model run."""

    # never, auto (newest complete checkpoint of this run), or the path of a checkpoint
    resume: Annotated[str, FREE_ON_RESUME] = Field("never", min_length=1)
    init_from: Annotated[InitFrom | None, FIXED_ON_RESUME] = None
    tokenizer: Annotated[Tokenizer, FIXED_ON_RESUME] = Tokenizer()
    data: Annotated[Data, FIXED_ON_RESUME] = Data()
    optim: Annotated[Optim, FIXED_ON_RESUME] = Optim()
    train: Annotated[Train, FREE_ON_RESUME] = Train()
    engine: Annotated[Engine, FREE_ON_RESUME] = Engine()
    checkpoint: Annotated[Checkpoint, FREE_ON_RESUME] = Checkpoint()
    log: Annotated[Log, FREE_ON_RESUME] = Log()
    eval: Annotated[Eval, FREE_ON_RESUME] = Eval()

    @property
    def can_end_stage_early(self) -> bool:
        """True if a stage of the curriculum ends as soon as its answers are learned."""
        return any(stage.min_answer_prob is not None for stage in self.data.curriculum)

    @property
    def adversarial_updates(self) -> int:
        """Number of updates with a second pass with adversarial noise.

        With `can_end_stage_early` it is a lower bound.
        """
        if not self.train.adversarial_noise:
            return 0
        start = self.data.curriculum[-1].until if self.data.curriculum else 0
        return max(0, self.train.steps - start)

    def tokens_per_step(self, world_size: int = 1) -> int:
        """Return the tokens per optimizer update, over all ranks."""
        return self.train.sequences(world_size) * self.data.seq_len
