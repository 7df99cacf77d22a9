"""Several runs after one another, or a few at once, each in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lm.common.console import say
from lm.common.errors import Stopped, TrainingError
from lm.common.files import check_folder
from lm.common.signals import StopSignals, stop_with_parent
from lm.config import load as base
from lm.runs.run_dir import RunDir, config_differences
from lm.training.build import check_section
from synthetic.config import Config

SECTIONS = ("model", "solver", "task", "optim", "train", "eval")  # decide about a result


def is_finished(cfg: Config) -> bool:
    """Whether a run has left its result."""
    return RunDir(cfg.run_dir).is_finished


def result_of(cfg: Config) -> dict:
    """What a finished run has found.

    Raises:
        RunDirError: it has not finished. DamagedError: its result cannot be read.
    """
    return RunDir(cfg.run_dir).read_result(("eval", "headline", "chance", "bars", "updates"))


def differences(cfg: Config) -> list[str]:
    """Return how the config that a run was made with differs from this one, in what matters.

    A key that is newer than the run had the effect of its default.
    """
    path = RunDir(cfg.run_dir).config
    was = base.build(base.load_tree(path), str(path), Config)
    changed: dict[str, str] = {}
    for keys in config_differences(was, cfg).values():
        changed |= keys
    changed.pop("train.threads", None)
    if cfg.task.data is None:  # the folder was given when the run was started
        changed.pop("task.data", None)
    prefixes = tuple(f"{section}." for section in SECTIONS)
    return [text for key, text in sorted(changed.items()) if key.startswith(prefixes)]


def seed_of(cfg: Config) -> int:
    """The seed that a finished run was made with, whatever the config asks for today."""
    saved = RunDir(cfg.run_dir).config
    return base.load_tree(saved).get("seed", cfg.seed) if saved.exists() else cfg.seed


def run_all(configs: list[Config], jobs: int = 1) -> None:
    """Train the configs that are not finished; one that fails does not keep the others from it.

    Args:
        jobs: processes at once; with more than one, each has its share of the CPU's threads and
            its output goes to RUN.log beside the run's directory.
    Raises:
        ConfigError, OutputError: a model or a place that cannot be; no run has been started then.
        TrainingError: some runs failed (they diverged, say).
        Stopped: a signal asked for a stop; what was running is saved.
    """
    waiting = [cfg for cfg in configs if not is_finished(cfg)]
    for cfg in waiting:
        check_section(cfg.model, cfg.solver, cfg.train.lengths[1])
        check_folder(cfg.run_dir)
    failed = _one_by_one(waiting) if jobs <= 1 else _in_processes(waiting, jobs)
    if failed:
        raise TrainingError(f"{len(failed)} of {len(waiting)} runs failed; the first: {failed[0]}")


def _one_by_one(waiting: list[Config]) -> list[str]:
    """Train in this process, one after another → a line for each run that failed."""
    from synthetic.train import train

    failed = []
    for number, cfg in enumerate(waiting, 1):
        say(f"run {number} of {len(waiting)}")
        try:
            train(cfg)
        except Stopped:
            raise
        except (TrainingError, FloatingPointError) as e:
            say(f"FAILED {cfg.run_dir}: {e}")
            failed.append(f"{cfg.run_dir}: {e}")
    return failed


def _in_processes(waiting: list[Config], jobs: int) -> list[str]:
    """Train `jobs` runs at once, each in a process, and return a line for each run that failed."""
    left = list(waiting)
    running: dict[subprocess.Popen, Config] = {}
    failed: list[str] = []
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with StopSignals() as signals, tempfile.TemporaryDirectory() as folder:
        try:
            while (left or running) and not signals.is_stop_requested:
                if left and len(running) < jobs:
                    cfg = left.pop(0)
                    number = len(waiting) - len(left)
                    say(f"start  {number} of {len(waiting)}  {cfg.run_dir}, log {_log_of(cfg)}")
                    running[_start(cfg, Path(folder) / f"{number}.yaml", threads)] = cfg
                    continue
                time.sleep(0.2)
                for process in [process for process in running if process.poll() is not None]:
                    cfg = running.pop(process)
                    if is_finished(cfg):  # exit status 2 is a missed bar, not a failure
                        say(f"done   {cfg.run_dir}")
                        continue
                    say(f"FAILED {cfg.run_dir}: see {_log_of(cfg)}")
                    failed.append(f"see {_log_of(cfg)}")
        finally:  # the runs save before they end
            for process in running:
                process.terminate()
            for process in running:
                process.wait()
    if signals.is_stop_requested:
        raise Stopped("stopped by a signal: what was running is saved, the same command continues")
    return failed


def _log_of(cfg: Config) -> Path:
    """Return the file of a run's output."""
    return cfg.run_dir.with_name(cfg.run_dir.name + ".log")


def _start(cfg: Config, path: Path, threads: int) -> subprocess.Popen:
    """Train a run in a process of its own, from a YAML that is written to `path`."""
    point = cfg.model_copy(update={"sweep": {}})  # the config is one of its points
    path.write_text(point.to_yaml(), encoding="utf-8")
    log = _log_of(cfg)
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "synthetic", "train", "--config", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with log.open("w") as f:
        return subprocess.Popen(
            command, stdout=f, stderr=f, env=environment, preexec_fn=stop_with_parent()
        )
