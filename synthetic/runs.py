"""Several runs after one another, or a few at once, each in its own process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lm import baselines
from lm import config as base
from lm.build import check_section
from lm.console import say
from lm.errors import Stopped, TrainingError
from lm.old_keys import moved_tree
from lm.outputs import check_folder
from lm.run_dir import RunDir, settled
from lm.signals import STOP
from synthetic.build import device_of
from synthetic.config import Config

# What baselines read of the model section, besides the fields that are theirs alone.
OF_BASELINES = {
    "name",
    "d_model",
    "n_layer",
    "d_state",
    "expand",
    "dt_rank",
    "d_conv",
    "headdim",
    "ngroups",
    "norm_epsilon",
    "residual_in_fp32",
    "tie_embeddings",
    *baselines.FIELDS,
    *baselines.SHARED,
}


def is_finished(cfg: Config) -> bool:
    """Whether a run has left its result."""
    return RunDir(cfg.run_dir).is_finished


def result(cfg: Config) -> dict | None:
    """What a finished run has found, or None."""
    run = RunDir(cfg.run_dir)
    return run.read_result(("eval",)) if run.is_finished else None


def differences(cfg: Config) -> list[str]:
    """Where the config a run was made with differs from this one, in what matters."""
    saved = RunDir(cfg.run_dir).config
    old = moved_tree(base.load_tree(saved), str(saved)) if saved.exists() else {}
    new, found = cfg.model_dump(mode="json"), []
    if "model" in old:
        old, new = ({**tree, "model": settled(tree["model"])} for tree in (old, new))
    if section := old.get("solver"):
        settled_solver = base.build({"solver": section}, str(saved), Config).solver.settled()
        old["solver"] = {key: settled_solver[key] for key in section}  # others are newer than it
        new["solver"] = cfg.solver.settled()
    for section in ("model", "solver", "task", "optim", "train", "eval"):
        for key, value in (old.get(section) or {}).items():
            of_fprnn = section == "solver" or (section == "model" and key not in OF_BASELINES)
            if of_fprnn and cfg.model.name != "fprnn":
                continue
            wanted = new[section].get(key, value)
            unsaid = key == "data" and wanted is None  # a folder, given when the run was started
            if wanted != value and key not in ("threads", "workers") and not unsaid:
                found.append(f"{section}.{key} was {value}, is {wanted}")
    return found


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
        check_section(cfg.model, cfg.solver, cfg.train.lengths[1], device_of(cfg)[1])
        check_folder(cfg.run_dir)
    failed = _in_turn(waiting) if jobs <= 1 else _at_once(waiting, jobs)
    if failed:
        raise TrainingError(f"{len(failed)} of {len(waiting)} runs failed; the first: {failed[0]}")


def _in_turn(waiting: list[Config]) -> list[str]:
    from synthetic.train import train

    failed = []
    for i, cfg in enumerate(waiting, 1):
        say(f"run {i} of {len(waiting)}")
        try:
            train(cfg)
        except Stopped:
            raise
        except (TrainingError, FloatingPointError) as e:
            say(f"FAILED {cfg.run_dir}: {e}")
            failed.append(f"{cfg.run_dir}: {e}")
    return failed


def _at_once(waiting: list[Config], jobs: int) -> list[str]:
    def stop(*_):
        raise Stopped("stopped by a signal: what was running is saved, the same command continues")

    handlers = {n: signal.signal(n, stop) for n in STOP}
    try:
        return _processes(waiting, jobs)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _processes(waiting: list[Config], jobs: int) -> list[str]:
    total, running, failed, numbers = len(waiting), {}, [], iter(range(1, len(waiting) + 1))
    threads = max(1, (os.cpu_count() or 1) // jobs)
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    waiting = list(waiting)
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    cfg, number = waiting.pop(0), next(numbers)
                    path = Path(folder) / f"{number}.yaml"
                    point = cfg.model_copy(update={"sweep": {}})  # of which it is one already
                    path.write_text(point.to_yaml(), encoding="utf-8")
                    log = cfg.run_dir.with_name(cfg.run_dir.name + ".log")
                    log.parent.mkdir(parents=True, exist_ok=True)
                    command = [sys.executable, "-m", "synthetic", "train", "--config", str(path)]
                    say(f"start  {number} of {total}  {cfg.run_dir}")
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
                        say(f"FAILED {cfg.run_dir} after {seconds:.0f} s: see {log}")
                        failed.append(f"see {log}")
        finally:  # of an interrupt: the runs save before they end
            for process in running:
                process.terminate()
            for process in running:
                process.wait()
    return failed
