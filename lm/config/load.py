"""The whole YAML schema as one typed tree: unknown keys are errors, dotted overrides, sweeps."""

from __future__ import annotations

import copy
import itertools
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, overload

import yaml
from pydantic import (
    Field,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from lm.common.errors import ConfigError
from lm.config.data import Source, check_mixture, check_names
from lm.config.messages import explain, is_key, nearest
from lm.config.model import Fraction, InitFrom, Model, OpenFraction, Section, Size, Solver
from lm.config.old_keys import is_old, moved, moved_tree
from lm.config.resuming import FIXED, FREE, NOTED
from lm.config.warmups import Growing, check_warmups
from lm.config.yaml_text import Dumper, load_tree, parse

# Bounds far above what anybody trains, and below what exhausts a machine before it is refused.
MOST = 10**9  # updates, sequences
LARGEST = 2**24  # tokens in a row, in a vocabulary; blocks in a buffer
# Of no folder's name: characters of control, of lines, of the direction of writing, and no text.
UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
Workers = Annotated[int, Field(gt=0, le=1024)]


class Tokenizer(Section):
    """`name: bpe` trains a byte-level BPE of `vocab_size` on the corpus, once, and keeps it with
    the run; anything else is a HuggingFace tokenizer, by hub name or folder."""

    name: str = Field("bpe", min_length=1)
    vocab_size: int = Field(4096, gt=257, le=LARGEST)
    train_bytes: int = Field(20_000_000, gt=0)  # of text read to train a BPE


class Data(Section):
    """Where text comes from and how it becomes blocks of seq_len + 1 tokens."""

    source: Literal["builtin", "fineweb", "parquet", "jsonl", "text"] = "builtin"
    path: str | None = None  # a file, folder or glob, for parquet / jsonl / text
    dataset: str = "HuggingFaceFW/fineweb"  # the hub dataset behind `fineweb`
    name: str = "sample-10BT"  # its configuration
    download: Annotated[str | None, FREE] = None  # a folder for its files: whole and checked
    # a folder of tokenised corpora that runs share; auto: $FPRNN_CACHE, else in the home;
    # null: none, each run has its own
    cache: Annotated[str | None, FREE] = Field("auto", min_length=1)
    # processes that tokenise a large corpus; auto: as many as CPUs
    prepare_workers: Annotated[Workers | Literal["auto"], FREE] = "auto"
    text_field: str = "text"  # the column (parquet) or key (jsonl) that holds the text
    seq_len: int = Field(256, gt=0, le=LARGEST)
    leading_eos: bool = False  # EOS before each document as well as after it
    val_fraction: float = Field(0.05, gt=0, lt=1)  # of documents, chosen by a hash of their content
    val_tokens: int | None = Field(None, gt=0)  # evaluate on at most so many tokens
    shuffle_buffer: int = Field(1024, ge=1, le=LARGEST)  # blocks of all streams together
    streams: Size | Literal["auto"] = "auto"  # streams that a streamed source is dealt to
    workers: Annotated[Annotated[int, Field(ge=0, le=1024)] | Literal["auto"], FREE] = (
        "auto"  # processes per rank that read them
    )
    # several sources in the place of one
    mixture: dict[str, Source] | None = Field(
        None, description="a mapping of names to sources, each with source, path, weight; or null"
    )
    temperature: float | None = Field(None, gt=0)  # weights ∝ (training tokens)^(1/temperature)
    # plain cuts the text every seq_len tokens; best_fit keeps documents that fit whole, and pads
    packing: Literal["plain", "best_fit"] = "plain"

    @field_validator("mixture", mode="before")
    @classmethod
    def _names_of_sources(cls, value):
        if isinstance(value, dict):
            check_names(value)
        return value

    @model_validator(mode="after")
    def _one_source_or_a_mixture(self) -> Self:
        check_mixture(self)
        return self

    @model_validator(mode="after")
    def _path_for_local_sources(self) -> Self:
        if self.source in ("parquet", "jsonl", "text") and not self.path:
            raise ValueError(f"source `{self.source}` needs `path`: a file, folder or glob")
        return self


MOST_POINTS = 10_000  # of a sweep
DECAY = 0.2  # of all updates: the end of `schedule: wsd` where `optim.decay` says nothing
LR_FACTORS = "a mapping of patterns of parameters' names to factors above 0, {'*.A_log': 0.1}"


class Muon(Section):
    """Of `optim.name: muon`, for the matrices of hidden layers."""

    lr: float | None = Field(None, gt=0)  # peak; null: optim.lr
    momentum: Fraction = 0.95
    nesterov: bool = True
    # what the orthogonalised gradient is scaled by, for a matrix of m × n: 0.2 √max(m, n), as large
    # as a step of AdamW; or √max(1, m / n)
    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"


class Optim(Section):
    """AdamW, or Muon beside it, with decoupled weight decay and a schedule, counted in updates."""

    lr: float = Field(4e-3, gt=0)
    min_lr: float = Field(1e-5, ge=0)
    warmup: float = Field(0.1, ge=0)  # below 1 a fraction of all updates, else their number
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    # of `wsd`: its last updates, below 1 a fraction of all of them; null: DECAY
    decay: float | None = Field(None, gt=0)
    lr_factors: dict[str, float] = Field({}, description=LR_FACTORS)
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    grad_clip: float = Field(1.0, ge=0)  # 0: off
    name: Literal["adamw", "muon"] = "adamw"  # muon: for matrices, AdamW for the rest
    muon: Muon = Muon()

    @model_validator(mode="after")
    def _floor_below_peak(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above the peak lr {self.lr:g}")
        return self

    @model_validator(mode="after")
    def _muon_of_muon(self) -> Self:
        if self.name != "muon" and self.muon != Muon():
            raise ValueError("`muon` is of `name: muon` alone: set optim.name to muon as well")
        return self

    @model_validator(mode="after")
    def _decay_of_wsd(self) -> Self:
        if self.decay is not None and self.schedule != "wsd":
            raise ValueError(
                f"`decay` is {self.decay:g}, and is of schedule wsd alone, not {self.schedule}:"
                " leave it out (null)"
            )
        return self

    @field_validator("lr_factors", mode="before")
    @classmethod
    def _factors_above_0(cls, value):
        for pattern, factor in value.items() if isinstance(value, dict) else ():
            is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
            if not is_number or not factor > 0 or not pattern:
                raise ValueError(f"{pattern!r}: {factor!r} will not do: it must be {LR_FACTORS}")
        return value

    @property
    def decay_of_wsd(self) -> float:
        return DECAY if self.decay is None else self.decay


class Skip(Section):
    """An update whose loss or gradient norm is more than `sigma` standard deviations above the mean
    of the last `window` updates is left out."""

    sigma: float = Field(6.0, gt=0)
    window: int = Field(128, ge=2, le=100_000)


class Train(Growing):
    """How much is trained at once, and for how long."""

    steps: int = Field(4800, gt=0, le=MOST)  # optimizer updates
    # sequences an update, over all ranks: on any number of ranks the same training (a checkpoint
    # knows what it was, and another is refused)
    global_batch_size: int | None = Field(None, gt=0, le=MOST)
    micro_batch_size: int = Field(8, gt=0, le=65_536)  # sequences a forward pass, per rank
    # null: what makes the global batch, or 1 where that is not given
    grad_accum_steps: int | None = Field(None, gt=0, le=MOST)
    world_size: int | None = Field(
        None, gt=0, le=1_000_000
    )  # ranks this config is meant for; others are refused
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16: autocast over fp32 weights
    device: Literal["auto", "cpu"] = "auto"  # auto: GPUs; without any, small models alone
    threads: int | None = Field(None, gt=0, le=4096)  # CPU threads per rank; null: torch's choice
    # A loss or gradient of NaN or infinity: so often back to the last checkpoint, and on with the
    # data after it.
    rollbacks: int = Field(2, ge=0)
    spike: float | None = Field(None, gt=1)  # a loss of so many times its running mean is one, too
    # so many times the mean of log²Z over the targets is added to the loss; 0: off
    z_loss: Annotated[float, NOTED] = Field(0.0, ge=0)
    skip: Annotated[Skip | None, NOTED] = None  # updates that are left out
    ema: Annotated[OpenFraction | None, NOTED] = None  # β of an average of the weights; null: none

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
    timeout_s: int = Field(1800, gt=0, le=31_536_000)  # a collective that takes longer is an error
    hang_s: int = Field(3600, gt=0, le=31_536_000)  # without a step: write all stacks, and end


class Checkpoint(Section):
    every: int = Field(500, gt=0)  # updates
    keep: int = Field(2, gt=0)  # newest checkpoints kept
    keep_every: int | None = Field(None, gt=0)  # updates; beside them all of its multiples


PROFILED = "two updates, the first and the last, counted from 1, as [10, 12]; or null"


class Log(Section):
    every: int = Field(10, gt=0)  # updates
    wandb: bool = False  # offline when no key is configured
    wandb_project: str = "fprnn"
    tensorboard: bool = False
    probe_every: int = Field(100, ge=0)  # updates between probes of ℓ*; 0: at validations alone
    contraction: bool = False  # per layer ‖I − Q‖ and ‖∂f/∂y‖ of one micro-batch, each log step
    # the first and the last update of which rank 0 writes a PyTorch profile; null: of none
    profile: tuple[PositiveInt, PositiveInt] | None = Field(None, description=PROFILED)

    @field_validator("profile")
    @classmethod
    def _first_to_last(cls, value):
        if value is not None and value[0] > value[1]:
            raise ValueError(f"{list(value)} will not do: it must be {PROFILED}")
        return value


class Eval(Section):
    every: int = Field(500, gt=0)  # updates; always once more at the end
    micro_batch_size: int | None = Field(None, gt=0, le=65_536)  # null: that of training


class Run(Section):
    """What every run has. `out_dir/name` is its run directory. Each field says whether a resumed
    run may change it, a section for all that is in it."""

    name: Annotated[str, FREE] = Field("run", min_length=1)
    out_dir: Annotated[str, FREE] = Field("runs", min_length=1)
    seed: Annotated[int, FIXED] = Field(0, ge=0, le=2**64 - 1)  # what torch takes
    model: Annotated[Model, FIXED] = Model()
    solver: Annotated[Solver, NOTED] = Solver()
    sweep: Annotated[dict[str, list[Any]], FREE] = {}  # noqa: RUF012 (of pydantic, which copies it)
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
    """`optim.warmup` or `optim.decay` in updates: below 1 it is a fraction of all of them."""
    return round(value * steps if value < 1 else value)


def check_profile(profile: tuple[int, int] | None, steps: int) -> None:
    """Raises ValueError for a `log.profile` of updates that a run of so many does not make."""
    if profile is not None and profile[1] > steps:
        raise ValueError(
            f"`log.profile` ends with update {profile[1]}, and `train.steps` is only {steps}"
        )


def check_warmup(cfg: Run) -> None:
    """Refuse a warm-up that no training can have. Not part of the schema: runs that were trained
    before this was checked are still read.

    Raises:
        ConfigError: it is longer than the run, or no whole number of updates; or there is no room
            for the decay of `wsd` after it.
    """
    _check_decay(cfg.optim, cfg.train.steps)
    if isinstance(cfg, Config):
        check_warmups(cfg)
    warmup = cfg.optim.warmup
    if warmup > 1 and warmup != int(warmup):
        raise ConfigError(
            f"optim.warmup: {warmup:g} updates cannot be: below 1 it is a fraction of all updates,"
            " else a whole number of them"
        )
    if warmup > cfg.train.steps:
        raise ConfigError(
            f"optim.warmup is {warmup:g} updates, and train.steps is only {cfg.train.steps}: the"
            " learning rate would never reach optim.lr"
        )


def _check_decay(optim: Optim, steps: int) -> None:
    if optim.schedule != "wsd":
        return
    decay = optim.decay_of_wsd
    if decay > 1 and decay != int(decay):
        raise ConfigError(
            f"optim.decay: {decay:g} updates cannot be: below 1 it is a fraction of all updates,"
            " else a whole number of them"
        )
    in_updates = [number_of_updates(value, steps) for value in (optim.warmup, decay)]
    if sum(in_updates) > steps:
        raise ConfigError(
            f"optim.warmup and optim.decay are {in_updates[0]} and {in_updates[1]} updates, and"
            f" train.steps is only {steps}: they do not fit one after the other"
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

    def tokens_per_step(self, world_size: int = 1) -> int:
        """Tokens an optimizer update sees, over all ranks."""
        return self.train.sequences(world_size) * self.data.seq_len


SHORT = {"model": "name", "init_from": "path"}  # sections that a text may stand for

# The functions below take the `schema` a YAML is read by: Config, or another tree of Sections
# (synthetic/config.py).
AnyRun = TypeVar("AnyRun", bound=Run)


def set_key(tree: dict, dotted: str, value: Any) -> None:
    """Put a value under a dotted key of a nested mapping."""
    if dotted in SHORT and isinstance(value, str):  # the shorthand keeps what is beside it
        dotted = f"{dotted}.{SHORT[dotted]}"
    *parents, last = dotted.split(".")
    for key in parents:
        if isinstance(tree.get(key), str) and key in SHORT:
            tree[key] = {SHORT[key]: tree[key]}
        if tree.get(key) is None:
            tree[key] = {}
        tree = tree[key]
        if not isinstance(tree, dict):
            raise ConfigError(f"override `{dotted}`: `{key}` is a value, not a section")
    tree[last] = value


def set_point(tree: dict, point: dict[str, Any]) -> None:
    """Put a sweep point into a tree. A mapping goes over the section it names, key by key."""
    for key, value in moved(point.items(), "sweep"):
        # The keys of optim.lr_factors are patterns with dots, no keys of ours.
        if isinstance(value, dict) and key != "optim.lr_factors":
            for below, v in value.items():
                set_key(tree, f"{key}.{below}", v)
        else:
            set_key(tree, key, value)


def set_overrides(tree: dict, overrides: Iterable[str], schema: type[Run] = Config) -> None:
    """Put `key=value` overrides into a tree.

    Raises:
        ConfigError: as `parse_override`, or a key under both its old and its new name.
    """
    pairs = [parse_override(text, schema) for text in overrides]
    for key, value in moved(pairs, "override"):
        set_key(tree, key, value)


def parse_override(text: str, schema: type[Run] = Config) -> tuple[str, Any]:
    """`optim.lr=1e-3` → ("optim.lr", 0.001); the value is YAML."""
    key, sep, value = text.partition("=")
    if not sep or not key:
        raise ConfigError(f"override `{text}` must read key=value, e.g. optim.lr=1e-3")
    known = is_key(key, schema) or is_old(key)
    if not known and not key.startswith("engine.deepspeed."):
        raise ConfigError(f"unknown key `{key}`{nearest(key, schema)}")
    return key, parse(value, f"override `{text}`: the value")


@overload
def build(tree: dict, where: str = "config") -> Config: ...
@overload
def build(tree: dict, where: str, schema: type[AnyRun]) -> AnyRun: ...
def build(tree: dict, where: str = "config", schema: type[Run] = Config) -> Run:
    """A mapping → Config (or the schema given).

    Raises:
        ConfigError: naming every key that is unknown, mistyped or out of range.
    """
    tree = moved_tree(tree, where)
    if schema is Config and {"models", "reference"} <= tree.keys():
        raise ConfigError(
            f"{where} compares several models, it is not the config of one run: fprnn compare"
            f" {where}"
        )
    try:
        return schema.model_validate(tree)
    except ValidationError as e:
        raise explain(e, tree, where, schema) from None


@overload
def load(
    path: str | Path, overrides: Sequence[str] = (), job_index: int | None = None
) -> Config: ...
@overload
def load(
    path: str | Path, overrides: Sequence[str], job_index: int | None, schema: type[AnyRun]
) -> AnyRun: ...
def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    job_index: int | None = None,
    schema: type[Run] = Config,
) -> Run:
    """Defaults, then the YAML, then the sweep point `job_index`, then `key=value` overrides.

    Raises:
        ConfigError: bad file, key, value or index.
    """
    tree = moved_tree(load_tree(path), str(path))
    if job_index is not None:
        points = sweep_points(tree, str(path), schema)
        if not 0 <= job_index < len(points):
            raise ConfigError(
                f"{path}: --job-index {job_index} is outside the sweep: 0 to {len(points) - 1}"
            )
        set_point(tree, points[job_index])
    set_overrides(tree, overrides, schema)
    if job_index is not None:  # last, so that every point has its own directory under any name
        tree["name"] = point_name(tree.get("name", "run"), job_index, points[job_index])
        tree["sweep"] = {}  # of which it is one point
    return build(tree, str(path), schema)


def refuse_sweep(cfg: Run, where: str | Path) -> None:
    """Raises ConfigError for a config that stands for the many runs of a grid, not for one."""
    if empty := [key for key, values in cfg.sweep.items() if not values]:
        raise ConfigError(f"{where}: sweep.{empty[0]} must be a non-empty list")
    if cfg.sweep:
        last = math.prod(len(values) for values in cfg.sweep.values()) - 1
        raise ConfigError(
            f"{where} is a sweep: say which of its points to train, --job-index 0 to {last}; or"
            " sweep={} for the config without it"
        )


def sweep_points(
    tree: dict, where: str = "config", schema: type[Run] = Config
) -> list[dict[str, Any]]:
    """The grid of `sweep:` (the last key varies fastest), each point a {dotted key: value}.

    Raises:
        ConfigError: no sweep, an empty list, or a key that does not exist.
    """
    sweep = tree.get("sweep") or {}
    if not isinstance(sweep, dict) or not sweep:
        raise ConfigError(f"{where} has no `sweep:` section (a mapping of dotted key to list)")
    for key, values in sweep.items():
        if not is_key(str(key), schema) and not is_old(str(key)):
            raise ConfigError(f"{where}: sweep over unknown key `{key}`{nearest(str(key), schema)}")
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{where}: sweep.{key} must be a non-empty list")
    if (count := math.prod(map(len, sweep.values()))) > MOST_POINTS:
        raise ConfigError(
            f"{where}: its sweep has {count:,} points: at most {MOST_POINTS:,} are trained as one"
            " sweep"
        )
    points = [dict(zip(sweep, combo)) for combo in itertools.product(*sweep.values())]
    for point in points:  # a bad value is found now, not by task 37 of the array
        candidate = copy.deepcopy(tree)
        set_point(candidate, point)
        check_warmup(build(candidate, where, schema))
    return points


def point_name(name: str, index: int, point: dict[str, Any]) -> str:
    """Directory name of a sweep point: `name/003-lr=0.001-mixer_rank=4`."""
    parts = []
    for key, value in point.items():
        text = "+".join(map(str, value.values())) if isinstance(value, dict) else value
        parts.append(f"{key.rpartition('.')[2]}={text}")
    text = "-".join(parts).replace("/", "_").replace(" ", "")
    return f"{name}/{index:03d}-" + UNSEEN.sub("_", text)
