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

    It writes the stacks of all threads to `folder/rankNNNN.txt` and ends with the exit status of a
    hang, after which launchers start again. (`faulthandler.dump_traceback_later` would end with
    status 1.)

    Args:
        limit_s: seconds. Time in which the whole process is suspended does not count.
        folder: made when it is needed.
    """

    def __init__(self, limit_s: float, folder: Path, rank: int = 0):
        self.limit_s, self.folder, self.rank = limit_s, Path(folder), rank
        self.tick_s = min(1.0, limit_s / 20)
        self._moved = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._stop.set()
        self._thread.join()

    def alive(self) -> None:
        """Training moves."""
        self._moved = True

    def _watch(self) -> None:
        ticks = 0
        while not self._stop.wait(self.tick_s):
            ticks = 0 if self._moved else ticks + 1
            self._moved = False
            if ticks * self.tick_s > self.limit_s:
                self._end()

    def _end(self) -> None:
        text = (
            f"error: rank {self.rank} has stood still for {self.limit_s:g} s (engine.timeout_s):"
            f" the stacks of its threads are in {self.folder}"
        )
        threading.Timer(60, os._exit, (HANG,)).start()  # where the disk is what hangs
        try:
            print(text, file=sys.stderr, flush=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f"rank{self.rank:04d}.txt").open("w") as file:
                file.write(text + "\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            time.sleep(5 * self.tick_s)  # a launcher kills the others when the first has ended
        finally:
            os._exit(HANG)
