"""The loop over updates: what is due after each, NaN and the way back, saving, stopping.

Both trainers are such a loop: that of language models (train.py), and that of the validation suite
(synthetic/train.py), which brings its tasks, batches and metrics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn

from lm.common.console import say
from lm.common.errors import Diverged, DivergedOnOneRank, Stopped
from lm.config.schema import Run
from lm.runs.checkpoint import Checkpoints
from lm.runs.log import Writer
from lm.runs.profile import Profile
from lm.runs.run_dir import RunDir


class Loop(ABC):
    """A training under way.

    A subclass brings what one update does, what a checkpoint holds and how to go back to one, and
    the hooks of `after_update`: each is called after every update, in this order, and knows itself
    whether something is due.
    """

    # Opened when the run's directory is this process's.
    run: RunDir
    checkpoints: Checkpoints
    profile: Profile
    writer: Writer | None
    how_to_go_on: str  # of a run that was stopped, in words

    def __init__(self, cfg: Run):
        self.cfg: Any = cfg
        self.step = 0  # updates made
        self.seconds = 0.0  # of training, of the processes before this one
        self.rollbacks = 0
        self.went_back_to: int | None = None  # an update, and nothing was saved since
        self.num_iters: dict | None = None  # ℓ* of the layers, of the last probe
        self.stopping = False  # a signal has asked for a stop, on some rank
        self.after_update: tuple[Callable[[], object], ...] = ()

    @abstractmethod
    def update(self) -> None:
        """Make one update, and count it in `step`.

        Raises:
            Diverged: the loss or its gradient is NaN or infinite; no weight has moved.
        """

    @abstractmethod
    def check_finite(self) -> None:
        """Raises Diverged where what is to be saved holds NaN or infinity."""

    @abstractmethod
    def state_files(self) -> dict:
        """What a checkpoint holds: {file name: state}."""

    @abstractmethod
    def go_back(self) -> bool:
        """Take all but the data from the newest checkpoint that can be used, and go on with the
        data that comes next → whether there is one.

        Raises:
            Diverged: there is none, for a reason of its own.
        """

    @property
    def is_last(self) -> bool:
        """Whether no update is left to be made."""
        return self.step >= self.cfg.train.steps

    def make_updates(self) -> None:
        """The updates that are left, each with what is due after it; a save under way is finished.

        Raises:
            Diverged, DivergedOnOneRank, Stopped, LeaseError, CheckpointError, OutputError.
        """
        while not self.is_last:
            self.run.check_ours()
            number = self.step + 1
            try:
                with self.profile.update(number):
                    self.update()
                for hook in self.after_update:
                    hook()
            except DivergedOnOneRank:
                raise
            except Diverged as e:
                self._roll_back(e, number)
        self._finish_saves()

    def write(self, record: dict) -> None:
        """A line of metrics.jsonl, with the update's number; on rank 0."""
        if self.writer:
            self.writer.write({"step": self.step, **record})

    def save_if_due(self) -> bool:
        """A checkpoint every `checkpoint.every` updates, after the last, and before a stop →
        whether one was due.

        Raises:
            Diverged: what is to be saved is not finite. Stopped: a signal has asked for it.
        """
        is_due = self.step % self.cfg.checkpoint.every == 0 or self.is_last or self.stopping
        if is_due:
            self._save()
        if self.stopping and not self.is_last:
            self.stop()
        return is_due

    def stop(self) -> NoReturn:
        """Save the last update unless a checkpoint holds it already, and stop.

        Raises:
            Stopped: Always. Diverged: If the state to save is not finite.
        """
        self._finish_saves()
        if not self.step:
            raise Stopped(f"stopped by a signal before the first update: {self.how_to_go_on}")
        if self.checkpoints.published != self.step:
            self._save()
            self._finish_saves()
        raise Stopped(
            f"stopped by a signal after update {self.step}, checkpoint saved: {self.how_to_go_on}"
        )

    def _save(self) -> None:
        self.check_finite()
        self.checkpoints.save(self.step, self.state_files)
        self.went_back_to = None

    def log_saves(self) -> None:
        """A record of every checkpoint that was published since the last call."""
        for saved in self.checkpoints.news():
            self.write({"checkpoint": saved})

    def _finish_saves(self) -> None:
        self.checkpoints.finish()
        self.log_saves()

    def _roll_back(self, error: Diverged, failed: int) -> None:
        """Back to the last checkpoint, or where that did not help to the one before, and on with
        the data after what has spoilt the weights.

        Args: failed: the number of the update.
        Raises:
            Diverged: there is none, or `train.max_rollbacks` of them were made.
        """
        most, made = self.cfg.train.max_rollbacks, self.rollbacks
        self.checkpoints.finish()
        try:
            is_back = made < most and self.go_back()
        except Diverged as e:
            raise Diverged(f"stopped at update {failed}: {error}; {e}") from None
        if not is_back:
            stands = self.checkpoints.published
            kept = f"checkpoint of update {stands} stands" if stands else "nothing saved yet"
            raise Diverged(
                f"stopped at update {failed}: {error}; {kept}, {made} of {most} rollbacks"
                " (train.max_rollbacks) made"
            ) from None
        self.rollbacks, self.went_back_to = made + 1, self.step
        say(
            f"note: update {failed}: {error}: back to the checkpoint of update {self.step}, on with"
            f" the data that comes next (rollback {self.rollbacks} of {most})"
        )
        if self.writer:
            self.writer.keep_until(self.step)
        self.write({"rollback": {"number": self.rollbacks, "from": failed, "why": str(error)}})
