"""Ends a training that stands still, and leaves the stacks of all its threads behind."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

from lm.common.errors import HANG


class Watchdog:
    """A thread that ends this process when `alive` was not called for so long.

    The first rank to notice leaves a mark in the folder, on which every rank writes the stacks of
    its threads there (`rankNNNN.txt`) before all end with the exit status of a hang: whoever looks
    sees where each of them stood.

    Args:
        limit_s: seconds.
        folder: made when it is needed.
    """

    def __init__(self, limit_s: float, folder: Path, rank: int = 0):
        self.limit_s, self.folder, self.rank = limit_s, Path(folder), rank
        self.every_s = min(5.0, limit_s / 10)
        self._mark = self.folder / "hang"
        self._stop = threading.Event()
        self._last = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self):
        self._mark.unlink(missing_ok=True)
        self.alive()
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._stop.set()
        self._thread.join()

    def alive(self) -> None:
        """Training moves."""
        self._last = time.monotonic()

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._stop.wait(self.every_s):
            now = time.monotonic()
            if now - looked > 3 * self.every_s + 1:  # suspended, as a whole: that is no hang
                self._last += now - looked
            looked = now
            still_s = now - self._last
            if still_s > self.limit_s or self._is_marked():
                self._end(still_s)

    def _is_marked(self) -> bool:
        try:
            return self._mark.exists()
        except OSError:
            return False

    def _end(self, still_s: float) -> None:
        text = (
            f"error: rank {self.rank} has stood still for {still_s:.0f} s (engine.hang_s is"
            f" {self.limit_s:g}): the stacks of its threads are in {self.folder}"
        )
        anyhow = threading.Timer(60, os._exit, (HANG,))  # where the disk is what hangs
        anyhow.daemon = True
        anyhow.start()
        try:
            print(text, file=sys.stderr, flush=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._mark.touch()
            with (self.folder / f"rank{self.rank:04d}.txt").open("w") as f:
                f.write(text + "\n")
                f.flush()
                faulthandler.dump_traceback(f, all_threads=True)
            self._stop.wait(2 * self.every_s)  # the others see the mark; a launcher kills at once
        finally:
            os._exit(HANG)
