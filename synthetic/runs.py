"""Several runs after one another, or a few at once, each in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lm.console import say
from lm.engine import TrainingError
from synthetic.config import Config


def is_finished(cfg: Config) -> bool:
    """Whether a run has left its result."""
    return (cfg.run_dir / "result.json").exists()


def result(cfg: Config) -> dict | None:
    """What a finished run has found, or None."""
    path = cfg.run_dir / "result.json"
    return json.loads(path.read_text()) if path.exists() else None


def run_all(configs: list[Config], jobs: int = 1) -> None:
    """Train the configs that are not finished.

    Args:
        jobs: processes at once; with more than one, each has its share of the CPU's threads and
            its output goes to RUN.log beside the run's directory.
    Raises:
        TrainingError: a process failed; the others were let finish.
    """
    waiting = [cfg for cfg in configs if not is_finished(cfg)]
    if jobs <= 1:
        from synthetic.train import train

        for i, cfg in enumerate(waiting, 1):
            say(f"run {i} of {len(waiting)}")
            train(cfg)
        return
    total, running, failed = len(waiting), {}, []
    threads = max(1, (os.cpu_count() or 1) // jobs)
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                cfg = waiting.pop(0)
                path = Path(folder) / f"{total - len(waiting)}.yaml"
                path.write_text(cfg.to_yaml(), encoding="utf-8")
                log = cfg.run_dir.with_name(cfg.run_dir.name + ".log")
                log.parent.mkdir(parents=True, exist_ok=True)
                command = [sys.executable, "-m", "synthetic", "train", "--config", str(path)]
                say(f"start  {total - len(waiting)} of {total}  {cfg.run_dir}")
                with log.open("w") as f:
                    started = subprocess.Popen(command, stdout=f, stderr=f, env=env)
                running[started] = (cfg, log, time.monotonic())
            time.sleep(0.2)
            for process in [p for p in running if p.poll() is not None]:
                cfg, log, began = running.pop(process)
                seconds = time.monotonic() - began
                if is_finished(cfg):  # exit status 2 is a missed bar, not a failure
                    say(f"done   {cfg.run_dir} in {seconds:.0f} s")
                else:
                    failed.append(log)
                    say(f"FAILED {cfg.run_dir} after {seconds:.0f} s: see {log}")
    if failed:
        raise TrainingError(f"{len(failed)} of {total} runs failed; the first: see {failed[0]}")
