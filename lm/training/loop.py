"""The loop over updates, shared by both trainers: hooks, rollbacks, checkpoints, stopping.

The trainer of language models is train.py, the trainer of the synthetic tasks synthetic/train.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn

from lm.common.console import say
from lm.common.errors import Diverged, DivergedOnOneRank, Stopped
from lm.config.schema import Run
from lm.runs.checkpoint import Checkpoints
from lm.runs.log import MetricsWriter
from lm.runs.profile import Profile
from lm.runs.run_dir import RunDir


class Loop(ABC):
    """A training run.

    A subclass defines an update, the content of a checkpoint, how to roll back to one, and the
    `update_hooks`. All hooks are called after every update, in their order. Each hook decides
    itself whether it has something to do.
    """

    # Set by the subclass when the run directory is claimed.
    run: RunDir
    checkpoints: Checkpoints
    profile: Profile
    writer: MetricsWriter | None
    continue_advice: str  # how the user continues a stopped run, for messages

    def __init__(self, cfg: Run):
        self.cfg: Any = cfg
        self.step = 0  # updates made
        self.seconds = 0.0  # training time of earlier processes of this run
        self.rollbacks = 0  # rollbacks made
        # Update of the checkpoint of the last rollback; None if there was no rollback, or a
        # checkpoint was saved since.
        self.rollback_step: int | None = None
        self.num_iters: dict | None = None  # ℓ* (see hooks.py) of each layer in the last probe
        self.is_stop_requested = False  # a rank has received a stop signal
        self.update_hooks: tuple[Callable[[], object], ...] = ()

    @abstractmethod
    def update(self) -> None:
        """Make one update, and count it in `step`.

        Raises:
            Diverged: If the loss or gradient is NaN or infinite. Weights may be NaN then.
        """

    @abstractmethod
    def check_finite(self) -> None:
        """Check the state that a checkpoint would hold.

        Raises:
            Diverged: If it has NaN or infinity.
        """

    @abstractmethod
    def state_files(self) -> dict:
        """Return {file name: state} of the files of a checkpoint."""

    @abstractmethod
    def roll_back(self) -> bool:
        """Restore everything except the position in the data from the newest complete checkpoint.

        If `rollback_step` is set, an older checkpoint is used, if there is one.

        Returns:
            True if a checkpoint was restored, False if there is none.

        Raises:
            Diverged: If no checkpoint is usable, with the reason.
        """

    @property
    def is_finished(self) -> bool:
        """True if all updates are made."""
        return self.step >= self.cfg.train.steps

    def run_updates(self) -> None:
        """Make the remaining updates and call the hooks after each; finish the last save.

        Raises:
            Diverged: If the training diverges more often than `train.max_rollbacks`.
            DivergedOnOneRank: If only this rank knows that it diverged.
            Stopped: If a stop signal arrived.
            LeaseError: If another process has taken the run directory.
            CheckpointError, OutputError: If a file cannot be written.
        """
        while not self.is_finished:
            self.run.check_lease()
            update_number = self.step + 1
            try:
                with self.profile.update(update_number):
                    self.update()
                for hook in self.update_hooks:
                    hook()
            except DivergedOnOneRank:  # the other ranks do not know that they must roll back
                raise
            except Diverged as e:
                self._handle_divergence(e, update_number)
        self._finish_saves()

    def write(self, record: dict) -> None:
        """Write a record with the number of the update to metrics.jsonl; on rank 0 only."""
        if self.writer:
            self.writer.write({"step": self.step, **record})

    def save_if_due(self) -> bool:
        """Save a checkpoint every `checkpoint.every` updates, after the last, and before a stop.

        Returns:
            True if a checkpoint was due.
        """
        is_due = self.step % self.cfg.checkpoint.every == 0 or self.is_finished
        if is_due or self.is_stop_requested:
            self._save()
        if self.is_stop_requested and not self.is_finished:
            self.stop()
        return is_due

    def stop(self) -> NoReturn:
        """Save a checkpoint of the last update if there is none yet, and raise Stopped."""
        self._finish_saves()
        if not self.step:
            raise Stopped(f"stopped by a signal before the first update: {self.continue_advice}")
        if self.checkpoints.last_complete_step != self.step:
            self._save()
            self._finish_saves()
        raise Stopped(
            f"stopped by a signal after update {self.step}, checkpoint saved:"
            f" {self.continue_advice}"
        )

    def _save(self) -> None:
        self.check_finite()
        self.checkpoints.save(self.step, self.state_files)
        self.rollback_step = None

    def log_saves(self) -> None:
        """Write a record for each checkpoint that was completed since the last call."""
        for saved in self.checkpoints.pop_saves():
            self.write({"checkpoint": saved})

    def _finish_saves(self) -> None:
        self.checkpoints.finish()
        self.log_saves()

    def _handle_divergence(self, error: Diverged, failed_update: int) -> None:
        """Roll back to the last checkpoint, and continue with the next data.

        If nothing was saved since the last rollback, the checkpoint before it is used. The run ends
        if there is no checkpoint, or after `train.max_rollbacks` rollbacks.
        """
        limit = self.cfg.train.max_rollbacks
        count = self.rollbacks  # read now, because roll_back() restores the checkpoint's count
        self.checkpoints.finish()
        try:
            is_restored = count < limit and self.roll_back()
        except Diverged as e:
            raise Diverged(f"stopped at update {failed_update}: {error}; {e}") from None
        if not is_restored:
            step = self.checkpoints.last_complete_step
            checkpoint = f"the last checkpoint is of update {step}" if step else "no checkpoint"
            raise Diverged(
                f"stopped at update {failed_update}: {error}; {checkpoint}, {count} of {limit}"
                " rollbacks (train.max_rollbacks) made"
            ) from None
        self.rollbacks, self.rollback_step = count + 1, self.step
        say(
            f"note: update {failed_update}: {error}: back to the checkpoint of update {self.step},"
            f" then on with the next data (rollback {self.rollbacks} of {limit})"
        )
        if self.writer:
            self.writer.drop_records_after(self.step)
        self.write(
            {"rollback": {"number": self.rollbacks, "from": failed_update, "why": str(error)}}
        )
