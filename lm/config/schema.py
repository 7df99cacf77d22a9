"""The sections of the YAML that describe a run, and the whole tree of them, `Config`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import yaml
from pydantic import (
    Field,
    PositiveInt,
    field_validator,
    model_validator,
)

from lm.common.errors import ConfigError
from lm.config.data import LARGEST, Data
from lm.config.model import Fraction, InitFrom, Model, Section, Solver
from lm.config.resuming import FIXED, FREE, NOTED
from lm.config.yaml_text import Dumper

# Bounds far above what anybody trains, and below what exhausts a machine before it is refused.
MOST = 10**9  # updates, sequences
# Of no folder's name: characters of control, of lines, of the direction of writing, and no text.
UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class Tokenizer(Section):
    """`name: bpe` trains a byte-level BPE of `vocab_size` on the corpus, once, and keeps it with
    the run; anything else is a HuggingFace tokenizer, by hub name or folder."""

    name: str = Field("bpe", min_length=1)
    vocab_size: int = Field(4096, gt=257, le=LARGEST)
    train_bytes: int = Field(20_000_000, gt=0)  # of text read to train a BPE


DECAY = 0.2  # of all updates: the end of `schedule: wsd` where `optim.wsd_decay` says nothing
MAX_LR = 1000.0  # of a rate, a factor of it, a decay: no training has more, and fp32 ends at 3e38
# Patterns of parameters' names → factors, {'*.A_log': 0.1}.
LrFactors = dict[Annotated[str, Field(min_length=1)], Annotated[float, Field(gt=0, le=MAX_LR)]]


class Optim(Section):
    """AdamW with decoupled weight decay and a schedule, counted in updates."""

    lr: float = Field(4e-3, gt=0, le=MAX_LR)
    min_lr: float = Field(1e-5, ge=0)
    warmup: float = Field(0.1, ge=0)  # below 1 a fraction of all updates, else their number
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    # of `wsd`: its last updates, below 1 a fraction of all of them; null: DECAY
    wsd_decay: float | None = Field(None, gt=0)
    lr_factors: LrFactors = {}  # noqa: RUF012 (of pydantic, which copies it)
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    weight_decay: float = Field(0.1, ge=0, le=MAX_LR)
    grad_clip: float = Field(1.0, ge=0)  # 0: off

    @model_validator(mode="after")
    def _floor_below_peak(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above the peak lr {self.lr:g}")
        return self

    @model_validator(mode="after")
    def _decay_of_wsd(self) -> Self:
        if self.wsd_decay is not None and self.schedule != "wsd":
            raise ValueError(
                f"`wsd_decay` is {self.wsd_decay:g}: only schedule wsd reads it,"
                f" not {self.schedule}; leave it out (null)"
            )
        return self

    @property
    def decay_of_wsd(self) -> float:
        return DECAY if self.wsd_decay is None else self.wsd_decay


class Train(Section):
    """How much is trained at once, and for how long."""

    steps: int = Field(4800, gt=0, le=MOST)  # optimizer updates
    # sequences an update, over all ranks: on any number of ranks the same training (a checkpoint
    # knows what it was, and another is refused)
    global_batch_size: int | None = Field(None, gt=0, le=MOST)
    micro_batch_size: int = Field(8, gt=0, le=65_536)  # sequences a forward pass, per rank
    # null: what makes the global batch, or 1 where that is not given
    grad_accum_steps: int | None = Field(None, gt=0, le=MOST)
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16: autocast over fp32 weights
    threads: int | None = Field(None, gt=0, le=4096)  # CPU threads per rank; null: torch's choice
    # A loss or gradient of NaN or infinity: so often back to the last checkpoint, and on with the
    # data after it.
    max_rollbacks: int = Field(2, ge=0)
    # κ of lm.model.state.Adversary, a second pass of every update; 0: none. With a curriculum from
    # its end on.
    adversarial_noise: Annotated[float, NOTED] = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _one_way_to_say_the_batch(self) -> Self:
        if self.global_batch_size and self.grad_accum_steps:
            raise ValueError(
                "`grad_accum_steps` follows from `global_batch_size`, the ranks and"
                " `micro_batch_size`: leave it out (null)"
            )
        return self

    def accumulation(self, world_size: int) -> int:
        """Forward passes of an update.

        Raises:
            ConfigError: the global batch cannot be made of such micro-batches.
        """
        if self.global_batch_size is None:
            return self.grad_accum_steps or 1
        at_once = self.micro_batch_size * world_size
        count, left = divmod(self.global_batch_size, at_once)
        if left or not count:
            ranks = f"{world_size} rank{'s' * (world_size > 1)}"
            raise ConfigError(
                f"train.global_batch_size {self.global_batch_size} is no multiple of"
                f" micro_batch_size {self.micro_batch_size} × {ranks} = {at_once}: set"
                " train.micro_batch_size so that it is"
            )
        return count

    def sequences(self, world_size: int) -> int:
        """Sequences of an update, over all ranks."""
        return self.micro_batch_size * self.accumulation(world_size) * world_size


class Engine(Section):
    """DeepSpeed. Its JSON is generated from the whole config; `deepspeed` (a mapping or the path of
    a JSON file) is merged over it last."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    deepspeed: dict[str, Any] | str | None = None
    timeout_s: int = Field(1800, gt=0, le=31_536_000)  # standing still for so long is an error


class Checkpoint(Section):
    every: int = Field(500, gt=0)  # updates
    keep: int = Field(2, gt=0)  # newest checkpoints kept
    keep_every: int | None = Field(None, gt=0)  # updates; checkpoints of its multiples stay, too


class Log(Section):
    every: int = Field(10, gt=0)  # updates
    wandb: bool = False
    tensorboard: bool = False
    probe_every: int = Field(100, ge=0)  # updates between probes of ℓ*; 0: at validations alone
    # the first and the last update of which rank 0 writes a PyTorch profile; null: of none
    profile: tuple[PositiveInt, PositiveInt] | None = None


class Eval(Section):
    every: int = Field(500, gt=0)  # updates; always once more at the end


class Run(Section):
    """What every run has. `out_dir/name` is its run directory. Each field says whether a resumed
    run may change it, a section for all that is in it."""

    name: Annotated[str, FREE] = Field("run", min_length=1)
    out_dir: Annotated[str, FREE] = Field("runs", min_length=1)
    seed: Annotated[int, FIXED] = Field(0, ge=0, le=2**64 - 1)  # what torch takes
    model: Annotated[Model, FIXED] = Model()
    solver: Annotated[Solver, NOTED] = Solver()
    sweep: Annotated[dict[str, list[Any] | dict[str, dict[str, Any]]], FREE] = Field(
        {}, description="a mapping of keys to lists, or of a name to variants"
    )
    if TYPE_CHECKING:  # each kind of run has these at a place, and of a class, of its own
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
    def _home_of_out_dir(cls, value):
        """A shell that does not see ~ at the beginning of a word leaves it to us."""
        if UNSEEN.search(value):
            raise ValueError(f"{value!r} holds a character that no folder's name should have")
        place = os.path.expanduser(value)
        if place.startswith("~"):
            raise ValueError(f"`{value}` begins with ~, and there is no such user: give the folder")
        return place

    @field_validator("name")
    @classmethod
    def _name_below_out_dir(cls, value):
        """`--overwrite` deletes the run directory: it must be one of out_dir's own."""
        parts = value.split("/")
        if "" in parts or "." in parts or ".." in parts:
            raise ValueError(
                f"`{value}` is no name of a folder inside out_dir: give one, or several with `/`"
                " between them, as in mixers/first; another place is out_dir"
            )
        if "\\" in value or UNSEEN.search(value):
            raise ValueError(f"{value!r} holds a character that no folder's name should have")
        return value

    @property
    def run_dir(self) -> Path:
        return Path(self.out_dir) / self.name

    def to_yaml(self) -> str:
        tree = self.model_dump(mode="json")
        return yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True)


def number_of_updates(value: float, steps: int) -> int:
    """`optim.warmup` or `optim.wsd_decay` in updates: below 1 it is a fraction of all of them."""
    return round(value * steps if value < 1 else value)


def check_profile(profile: tuple[int, int] | None, steps: int) -> None:
    """Raises ValueError for a `log.profile` of updates that a run of so many does not make."""
    if profile is not None and profile[0] > profile[1]:
        raise ValueError(
            f"`log.profile` is {list(profile)}: it must be the first and the last of the updates"
        )
    if profile is not None and profile[1] > steps:
        raise ValueError(
            f"`log.profile` ends with update {profile[1]}, and `train.steps` is only {steps}"
        )


def check_adversary(kappa: float, model: Model) -> None:
    """Raises ValueError where there is no state that `train.adversarial_noise` could work on."""
    if not model.has_fixed_point:
        raise ValueError(
            f"`train.adversarial_noise` is {kappa}: it works on the state of fixed-point"
            f" blocks, which {model.layers or model.name} has not: set it to 0"
        )
    if model.gradient_checkpointing:
        raise ValueError(
            "`train.adversarial_noise` needs the gradient of the noise that a pass has drawn, and"
            " `model.gradient_checkpointing` draws it anew: leave out one of them"
        )


def check_updates(cfg: Run) -> None:
    """Refuse what a training of so many updates cannot have. Not part of the schema: runs that were
    trained before this was checked are still read.

    Raises:
        ConfigError: the warm-up is longer than the run, or no whole number of updates; there is no
            room for the decay of `wsd` after it; the adversary would never begin.
    """
    if isinstance(cfg, Config):
        _check_adversary_begins(cfg)
    optim, steps = cfg.optim, cfg.train.steps
    decay = optim.decay_of_wsd if optim.schedule == "wsd" else 0.0
    for name, value in (("warmup", optim.warmup), ("wsd_decay", decay)):
        if value > 1 and value != int(value):
            raise ConfigError(
                f"optim.{name}: {value:g} updates cannot be: below 1 it is a fraction of all"
                " updates, else a whole number of them"
            )
    warmup, decay = number_of_updates(optim.warmup, steps), number_of_updates(decay, steps)
    if warmup > steps:
        raise ConfigError(
            f"optim.warmup is {warmup} updates, and train.steps is only {steps}: the learning rate"
            " would never reach optim.lr"
        )
    if warmup + decay > steps:
        raise ConfigError(
            f"optim.warmup and optim.wsd_decay are {warmup} and {decay} updates, and train.steps is"
            f" only {steps}: they do not fit one after the other"
        )


def _check_adversary_begins(cfg: Config) -> None:
    if not cfg.train.adversarial_noise or cfg.updates_against or cfg.waits:
        return
    raise ConfigError(
        f"train.adversarial_noise begins when data.curriculum is over, after update"
        f" {cfg.data.curriculum[-1].until}, and train.steps is only {cfg.train.steps}: set it to 0,"
        " or let the last stage end sooner"
    )


class Config(Run):
    """A language-model run."""

    # never | auto (newest good checkpoint of this run) | a checkpoint's path
    resume: Annotated[str, FREE] = Field("never", min_length=1)
    init_from: Annotated[InitFrom | None, FIXED] = None
    tokenizer: Annotated[Tokenizer, FIXED] = Tokenizer()
    data: Annotated[Data, FIXED] = Data()
    optim: Annotated[Optim, FIXED] = Optim()
    train: Annotated[Train, FREE] = Train()
    engine: Annotated[Engine, FREE] = Engine()
    checkpoint: Annotated[Checkpoint, FREE] = Checkpoint()
    log: Annotated[Log, FREE] = Log()
    eval: Annotated[Eval, FREE] = Eval()

    @model_validator(mode="after")
    def _profile_within_training(self) -> Self:
        check_profile(self.log.profile, self.train.steps)
        return self

    @model_validator(mode="after")
    def _adversary_of_what_solves(self) -> Self:
        if self.train.adversarial_noise:
            check_adversary(self.train.adversarial_noise, self.model)
        return self

    @property
    def waits(self) -> bool:
        """Whether a stage of the curriculum may end sooner than its `until`."""
        return any(stage.min_answer_prob is not None for stage in self.data.curriculum)

    @property
    def updates_against(self) -> int:
        """Updates that have a second pass, against the adversary; at least, where a stage waits."""
        if not self.train.adversarial_noise:
            return 0
        learned = self.data.curriculum[-1].until if self.data.curriculum else 0
        return max(0, self.train.steps - learned)

    def tokens_per_step(self, world_size: int = 1) -> int:
        """Tokens an optimizer update sees, over all ranks."""
        return self.train.sequences(world_size) * self.data.seq_len
