"""Warm-ups of the batch and of the sequences' length: what each update of a run sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator

from lm.common.errors import ConfigError
from lm.config.model import Section
from lm.config.resuming import FIXED, NOTED

if TYPE_CHECKING:
    from lm.config.schema import Config


class Warmup(Section):
    """From `start` on, over the first `updates` updates."""

    start: int = Field(gt=0)
    updates: int = Field(gt=0)


class Growing(Section):
    """The part of `train:` that lets the first updates be smaller."""

    # sequences an update, up to global_batch_size. Fixed: the tokens of a record are counted by it.
    batch_warmup: Annotated[Warmup | None, FIXED] = None
    if TYPE_CHECKING:  # `train:` has it beside these
        global_batch_size: int | None = None
    # tokens a sequence is cut into, up to data.seq_len
    length_warmup: Annotated[Warmup | None, NOTED] = None

    @model_validator(mode="after")
    def _whole_multiples_of_the_start(self) -> Self:
        warmup, whole = self.batch_warmup, self.global_batch_size
        if warmup is None:
            return self
        if whole is None:
            raise ValueError(
                "`batch_warmup` ends at `global_batch_size`, which is not set: set it, in the place"
                " of grad_accum_steps"
            )
        if warmup.start >= whole or whole % warmup.start:
            raise ValueError(
                f"`batch_warmup` starts at {warmup.start} sequences: that must divide"
                f" global_batch_size {whole}, and be below it"
            )
        return self


def check_warmups(cfg: Config) -> None:
    """Refuse warm-ups that do not fit the rest of the config, on whatever ranks.

    Raises:
        ConfigError: one that is not over before the run, or starts at a length that does not
            divide data.seq_len.
    """
    for name in ("batch_warmup", "length_warmup"):
        warmup = getattr(cfg.train, name)
        if warmup is not None and warmup.updates >= cfg.train.steps:
            raise ConfigError(
                f"train.{name} takes {warmup.updates} updates, and train.steps is only"
                f" {cfg.train.steps}: it must be over before the last update"
            )
    warmup, whole = cfg.train.length_warmup, cfg.data.seq_len
    if warmup is not None and (warmup.start >= whole or whole % warmup.start):
        raise ConfigError(
            f"train.length_warmup starts at {warmup.start} tokens: that must divide data.seq_len"
            f" {whole}, and be below it"
        )


def check_batch_warmup(cfg: Config, world_size: int, deepspeed: dict) -> None:
    """Refuse a batch warm-up that such ranks, or such a DeepSpeed JSON, cannot have.

    Args:
        deepspeed: what `deepspeed_config` has made of cfg.
    Raises:
        ConfigError: its start is no whole number of forward passes; the optimizer is offloaded.
    """
    warmup = cfg.train.batch_warmup
    if warmup is None:
        return
    at_once = cfg.train.micro_batch_size * world_size
    if warmup.start % at_once:
        ranks = f"{world_size} rank{'s' * (world_size > 1)}"
        raise ConfigError(
            f"train.batch_warmup starts at {warmup.start} sequences, no multiple of"
            f" micro_batch_size {cfg.train.micro_batch_size} × {ranks} = {at_once}: set"
            " train.micro_batch_size so that it is"
        )
    if deepspeed["zero_optimization"].get("offload_optimizer"):
        raise ConfigError(
            "engine.deepspeed sets zero_optimization.offload_optimizer, under which updates of"
            " changing numbers of forward passes were never compared with whole ones: leave it"
            " out, or train.batch_warmup"
        )


def _begin(warmup: Warmup, value: int, whole: int) -> int:
    """Updates after which a warm-up, linear in time, has come to a value: ⌈U (v − s) / (w − s)⌉."""
    return -(-warmup.updates * (value - warmup.start) // (whole - warmup.start))


class Growth:
    """What each update of a run on so many ranks sees; updates are counted from 1."""

    def __init__(self, cfg: Config, world_size: int):
        self.train, self.world_size = cfg.train, world_size
        self.whole, self.seq_len = cfg.train.sequences(world_size), cfg.data.seq_len
        # {sequences of an update, tokens of a sequence: updates before the first that has so many}
        self.batches, self.begins = {self.whole: 0}, {self.seq_len: 0}
        if batch := cfg.train.batch_warmup:
            sizes = range(batch.start, self.whole + 1, batch.start)
            self.batches = {size: _begin(batch, size, self.whole) for size in sizes}
        if length := cfg.train.length_warmup:
            divisors = [n for n in range(length.start, self.seq_len + 1) if self.seq_len % n == 0]
            begins = {n: _begin(length, n, self.seq_len) for n in divisors}
            # Of those that begin together the longest.
            self.begins = {n: begin for begin, n in {b: n for n, b in begins.items()}.items()}

    @property
    def lengths(self) -> list[int]:
        """Tokens of a sequence, from the first updates' on."""
        return list(self.begins)

    def sequences(self, update: int) -> int:
        """Of an update, over all ranks, each of data.seq_len tokens."""
        return max(size for size, begin in self.batches.items() if begin < update)

    def micro_batches(self, update: int) -> int:
        """Forward passes of an update, on each rank."""
        return self.sequences(update) // (self.train.micro_batch_size * self.world_size)

    def length(self, update: int) -> int:
        """Tokens of the pieces that the sequences of an update are cut into."""
        return max(n for n, begin in self.begins.items() if begin < update)

    def cut(self, batches: list, update: int) -> list:
        """Micro-batches of (b,seq_len) tokens, each tensor as (b·seq_len/n,n) of the length n of
        this update: rows are cut, and every token and target stays."""
        length = self.length(update)
        if length == self.seq_len:
            return batches
        return [{k: v.reshape(-1, length) for k, v in batch.items()} for batch in batches]

    def sequences_until(self, updates: int) -> int:
        """Of the first so many updates."""
        total = before = 0
        for size, begin in self.batches.items():
            total += (size - before) * max(0, updates - begin)
            before = size
        return total

    def tokens(self, update: int) -> int:
        """Of an update, over all ranks."""
        return self.sequences(update) * self.seq_len

    def tokens_until(self, updates: int) -> int:
        """Of the first so many updates."""
        return self.sequences_until(updates) * self.seq_len

    def tokens_by_length(self, updates: int) -> dict[int, int]:
        """Of the first so many updates, how many tokens were seen in sequences of each length."""
        ends = [*list(self.begins.values())[1:], updates]
        return {
            n: self.tokens_until(min(end, updates)) - self.tokens_until(min(begin, updates))
            for (n, begin), end in zip(self.begins.items(), ends)
        }

    def record(self, update: int) -> dict[str, int]:
        """What the log says of an update, where warm-ups make it differ from others."""
        found = {}
        if self.train.batch_warmup:
            found["batch_size"] = self.sequences(update)
        if self.train.length_warmup:
            found["length"] = self.length(update)
        return found

    def announce(self, say: Callable[[str], None]) -> None:
        for what, how in self.described():
            say(f"{what}: {how}")

    def described(self) -> list[tuple[str, str]]:
        """(what grows, in words how) of each warm-up."""
        rows = []
        if batch := self.train.batch_warmup:
            over = f"sequences an update over the first {batch.updates:,} updates"
            rows.append(("batch warm-up", f"from {batch.start:,} to {self.whole:,} {over}"))
        if length := self.train.length_warmup:
            over = f"tokens a sequence over the first {length.updates:,} updates"
            rows.append(("length warm-up", f"{', '.join(map(str, self.lengths))} {over}"))
        return rows
