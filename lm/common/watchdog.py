"""Watchdog that ends a hanging training process and writes the stacks of its threads."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

from lm.common.errors import HANG


class Watchdog:
    """Thread that ends this process if `alive` is not called for a given time.

    It writes the stacks of all threads to `folder/rankNNNN.txt` and exits with the status of a
    hang, after which launchers restart the run. (`faulthandler.dump_traceback_later` would exit
    with status 1.)

    Args:
        limit_s: Seconds without a call of `alive`. Time in which the whole process is suspended
            does not count.
        folder: Folder for the stacks, created when the process hangs.
        rank: Rank of this process.
    """

    def __init__(self, limit_s: float, folder: Path, rank: int = 0):
        self.limit_s, self.folder, self.rank = limit_s, Path(folder), rank
        self.tick_s = min(1.0, limit_s / 20)
        self._is_alive = False  # whether `alive` was called since the last tick
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._stop.set()
        self._thread.join()

    def alive(self) -> None:
        """Record that training makes progress."""
        self._is_alive = True

    def _watch(self) -> None:
        # Ticks are counted, not seconds, so that a suspended process is not taken for a hang.
        idle_ticks = 0
        while not self._stop.wait(self.tick_s):
            idle_ticks = 0 if self._is_alive else idle_ticks + 1
            self._is_alive = False
            if idle_ticks * self.tick_s > self.limit_s:
                self._end_process()

    def _end_process(self) -> None:
        text = (
            f"error: rank {self.rank} has stood still for {self.limit_s:g} s (engine.timeout_s):"
            f" the stacks of its threads are in {self.folder}"
        )
        # If the disk is the cause of the hang, writing the stacks hangs too: exit after 60 s.
        threading.Timer(60, os._exit, (HANG,)).start()
        try:
            print(text, file=sys.stderr, flush=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f"rank{self.rank:04d}.txt").open("w") as file:
                file.write(text + "\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            # A launcher kills all ranks when the first has ended: give the others time to write.
            time.sleep(5 * self.tick_s)
        finally:
            os._exit(HANG)
