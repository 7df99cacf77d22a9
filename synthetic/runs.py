"""Several runs, one after another or a few at once in separate processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lm.common.console import say
from lm.common.errors import Stopped, TrainingError, UserError
from lm.common.files import check_folder
from lm.common.signals import StopSignals, stop_with_parent
from lm.config.load import build as build_config
from lm.config.load import load_tree
from lm.runs.run_dir import RunDir, find_config_changes
from lm.training.build import check_section
from synthetic.config import Config

RESULT_SECTIONS = ("model", "solver", "task", "optim", "train", "eval")  # they affect the result


def is_finished(cfg: Config) -> bool:
    """Return True if the run has written its result."""
    return RunDir(cfg.run_dir).is_finished


def read_result(cfg: Config) -> dict:
    """Return the result of a finished run.

    Raises:
        DamagedError: If its result cannot be read.
    """
    return RunDir(cfg.run_dir).read_result(("eval", "headline", "chance", "bars", "updates"))


def find_differences(cfg: Config) -> list[str]:
    """Describe how the config that a run was trained with differs from `cfg` in RESULT_SECTIONS.

    A key that did not exist when the run was trained counts as its default.
    """
    path = RunDir(cfg.run_dir).config
    saved = build_config(load_tree(path), str(path), Config)
    changes: dict[str, str] = {}  # key → description
    for changes_of_kind in find_config_changes(saved, cfg).values():
        changes |= changes_of_kind
    changes.pop("train.threads", None)
    if cfg.task.data is None:  # the folder may have been an override of the run
        changes.pop("task.data", None)
    prefixes = tuple(f"{section}." for section in RESULT_SECTIONS)
    return [text for key, text in sorted(changes.items()) if key.startswith(prefixes)]


def read_seed(cfg: Config) -> int:
    """Return the seed that a finished run was trained with; `cfg` may have another one."""
    saved = RunDir(cfg.run_dir).config
    return load_tree(saved).get("seed", cfg.seed) if saved.exists() else cfg.seed


def run_all(configs: list[Config], jobs: int = 1) -> None:
    """Train all configs that are not finished; a failed run does not stop the others.

    Args:
        configs: Configs of the runs.
        jobs: Number of processes at once. If there are several, each has its share of the CPU's
            threads and writes its output to RUN.log next to the run's directory.

    Raises:
        ConfigError, OutputError: If a model or a run directory is impossible; then no run starts.
        TrainingError: If some runs failed, for example because they diverged.
        Stopped: If a signal asked for a stop; the runs in progress are saved.
    """
    unfinished = [cfg for cfg in configs if not is_finished(cfg)]
    for cfg in unfinished:
        check_section(cfg.model, cfg.solver, cfg.train.lengths[1])
        check_folder(cfg.run_dir)
    failed = _train_one_by_one(unfinished) if jobs <= 1 else _train_in_processes(unfinished, jobs)
    if failed:
        raise TrainingError(
            f"{len(failed)} of {len(unfinished)} runs failed; the first: {failed[0]}"
        )


def _train_one_by_one(unfinished: list[Config]) -> list[str]:
    """Train in this process, one after another, and return a line for each failed run."""
    from synthetic.train import train

    failed = []
    for number, cfg in enumerate(unfinished, 1):
        say(f"run {number} of {len(unfinished)}")
        try:
            train(cfg)
        except Stopped:
            raise
        except (UserError, FloatingPointError) as e:
            say(f"FAILED {cfg.run_dir}: {e}")
            failed.append(f"{cfg.run_dir}: {e}")
    return failed


def _train_in_processes(unfinished: list[Config], jobs: int) -> list[str]:
    """Train up to `jobs` runs at once, each in a process; return a line for each failed run."""
    queue = list(unfinished)
    running: dict[subprocess.Popen, Config] = {}
    failed: list[str] = []
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with StopSignals() as signals, tempfile.TemporaryDirectory() as folder:
        try:
            while (queue or running) and not signals.is_stop_requested:
                if queue and len(running) < jobs:
                    cfg = queue.pop(0)
                    number = len(unfinished) - len(queue)  # from 1 on
                    say(
                        f"start  {number} of {len(unfinished)}  {cfg.run_dir}, log {_find_log(cfg)}"
                    )
                    running[_start_process(cfg, Path(folder) / f"{number}.yaml", threads)] = cfg
                    continue
                time.sleep(0.2)
                for process in [process for process in running if process.poll() is not None]:
                    cfg = running.pop(process)
                    if is_finished(cfg):  # exit status 2 means a missed threshold, not a failure
                        say(f"done   {cfg.run_dir}")
                        continue
                    say(f"FAILED {cfg.run_dir}: see {_find_log(cfg)}")
                    failed.append(f"see {_find_log(cfg)}")
        finally:  # on SIGTERM the runs save before they end
            for process in running:
                process.terminate()
            for process in running:
                process.wait()
    if signals.is_stop_requested:
        raise Stopped(
            "stopped by a signal: the runs in progress are saved, the same command continues"
        )
    return failed


def _find_log(cfg: Config) -> Path:
    """Return the path of a run's output."""
    return cfg.run_dir.with_name(cfg.run_dir.name + ".log")


def _start_process(cfg: Config, path: Path, threads: int) -> subprocess.Popen:
    """Start the training of a run in a new process, from a YAML that is written to `path`."""
    point_cfg = cfg.model_copy(update={"sweep": {}})  # `cfg` already is one point of the sweep
    path.write_text(point_cfg.to_yaml(), encoding="utf-8")
    log = _find_log(cfg)
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "synthetic", "train", "--config", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with log.open("w") as f:
        return subprocess.Popen(
            command, stdout=f, stderr=f, env=environment, preexec_fn=stop_with_parent()
        )
