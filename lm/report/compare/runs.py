"""The trainings of a comparison: which are done, and starting those that are not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from lm.common.cards import usable_cores
from lm.common.console import say
from lm.common.errors import DIVERGED, PREEMPTED, Stopped, TrainingError
from lm.common.files import DamagedError, read_mapping, write_text
from lm.common.signals import StopSignals
from lm.config.load import load
from lm.config.resuming import FREE, resume_rule
from lm.config.schema import Config
from lm.report.compare.settings import Training
from lm.runs.metrics import read_metrics
from lm.runs.run_dir import RunDir, RunDirError, comparable

# Sections and keys that change neither what is trained nor what it takes.
OUTSIDE = ("name", "out_dir", "resume", "log")
LAUNCH = Path(__file__).parents[3] / "launch" / "deepspeed.sh"


class Measured(NamedTuple):
    """What a finished training reached and took."""

    updates: int
    tokens: int
    loss: float  # validation, nats a token
    bits_per_byte: float | None  # where the validation text's bytes are known
    seconds: float  # of updates
    processor_seconds: float
    evaluations: float  # of a layer's map a token, mean; 0 where none is solved
    curve: list[dict]  # per validation: tokens, loss, bits_per_byte, seconds, processor_seconds


def measured(training: Training) -> Measured | None:
    """Of a finished training; None of one that is not.

    Raises:
        DamagedError: its files do not say what it took. RunDirError: as `check_config`.
    """
    check_config(training)
    run = RunDir(training.run_dir)
    result = read_mapping(run.result)
    if result is None or result.get("updates") != training.cfg.train.steps:
        return None
    records = read_metrics(run.path)
    timed = [r for r in records if r.get("spent")]
    if not timed or timed[-1]["step"] != result["updates"]:
        raise DamagedError(
            f"{run.metrics} does not say what the updates of this run took: delete {run}, and"
            " compare anew"
        )
    work = [r["evaluations"] for r in timed if r.get("evaluations")]
    of_layers = [sum(layers) / len(layers) for layers in work]
    validations = [r for r in records if "validation" in r]
    return Measured(
        updates=result["updates"],
        tokens=result["tokens"],
        loss=result["validation"]["loss"],
        bits_per_byte=result["validation"].get("bits_per_byte"),
        seconds=timed[-1]["spent"]["seconds"],
        processor_seconds=timed[-1]["spent"]["processor_seconds"],
        evaluations=sum(of_layers) / len(of_layers) if of_layers else 0.0,
        curve=[_at(r, timed, result) for r in validations],
    )


def _at(record: dict, timed: list[dict], result: dict) -> dict:
    """A validation, with what the updates until then had taken (linear between two records)."""
    step = record["step"]
    before = max((r for r in timed if r["step"] <= step), key=lambda r: r["step"], default=None)
    after = min((r for r in timed if r["step"] >= step), key=lambda r: r["step"])
    spent = {}
    for name, end in after["spent"].items():
        begin = 0.0 if before is None else before["spent"][name]
        first = 0 if before is None else before["step"]
        share = (step - first) / max(1, after["step"] - first)
        spent[name] = begin + (end - begin) * share
    return {
        "step": step,
        "tokens": result["tokens"] * step / result["updates"],
        "loss": record["validation"]["loss"],
        "bits_per_byte": record["validation"].get("bits_per_byte"),
        **spent,
    }


def check_config(training: Training) -> None:
    """Raises RunDirError where the directory holds a run of another config: the comparison's
    settings have changed since."""
    run = RunDir(training.run_dir)
    if not run.holds_run or not (run.is_finished or run.is_started):
        return  # what a failed start has left is made anew
    was, now = comparable(load(run.config)), comparable(training.cfg)
    changed = [
        f"{key} was {was.get(key)!r}, is {now.get(key)!r}"
        for key in sorted(was.keys() | now.keys())
        if was.get(key) != now.get(key) and not _has_no_effect(key)
    ]
    if changed:
        raise RunDirError(
            f"{run} was trained with another config ({'; '.join(changed)}): give the comparison"
            " another `name`, or delete that run"
        )


def _has_no_effect(key: str) -> bool:
    section = key.partition(".")[0]
    return section in OUTSIDE or (section == "data" and resume_rule(Config, key) is FREE)


def has_diverged(training: Training) -> bool:
    """Whether it ended with a loss that is no number, or kept rolling back."""
    check_config(training)
    failure = read_mapping(RunDir(training.run_dir).failure)
    return failure is not None and failure.get("exit_code") == DIVERGED


def is_left(training: Training) -> bool:
    """Whether it is still to be trained."""
    return measured(training) is None and not has_diverged(training)


def run_all(trainings: Iterable[Training], jobs: int, gpus: int | None) -> None:
    """Train those that are left, `jobs` at once. One that diverges is left as it is.

    Args:
        gpus: launch each under DeepSpeed on so many; None: one process, as `fprnn train`.
    Raises:
        TrainingError: one failed otherwise; the others that were running have ended first.
        Stopped: a signal asked for it, and the trainings have saved.
    """
    left = [training for training in trainings if is_left(training)]
    failed: list[Exception] = []
    began = time.perf_counter()
    running: dict[Path, subprocess.Popen] = {}

    def one(training: Training) -> None:
        if failed or signals.asked:
            return
        process = _start(training, jobs, gpus)
        running[training.run_dir] = process
        status = process.wait()
        del running[training.run_dir]
        if status not in (0, DIVERGED):
            raise TrainingError(_why(training, status))
        say(_ended(training, status, len(left), time.perf_counter() - began))

    def one_of_several(training: Training) -> None:
        try:
            one(training)
        except Exception as e:
            failed.append(e)

    with StopSignals() as signals, ThreadPoolExecutor(jobs) as pool:
        ends = [pool.submit(one_of_several, training) for training in left]
        while not all(end.done() for end in ends):
            time.sleep(0.2)
            # Again and again: one that is being started does not listen yet, others ignore it.
            for process in list(running.values()) if signals.asked else ():
                process.terminate()
    if signals.asked:
        raise Stopped("stopped by a signal: the same command continues")
    if failed:
        raise failed[0]


def _start(training: Training, jobs: int, gpus: int | None) -> subprocess.Popen:
    folder = training.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    config = folder.parent / f"{folder.name}.yaml"
    write_text(config, training.cfg.to_yaml())
    command = [sys.executable, "-m", "lm", "train", "--config", str(config)]
    if gpus is not None:
        command = ["bash", str(LAUNCH), str(config), str(gpus)]
    threads = str(max(1, usable_cores() // jobs))
    environment = {"OMP_NUM_THREADS": threads, **os.environ}
    with (folder.parent / f"{folder.name}.log").open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def _ended(training: Training, status: int, of: int, seconds: float) -> str:
    name = label(training)
    if status == DIVERGED:
        return f"{name}: diverged ({seconds:.0f} s since the first of {of} was started)"
    found = measured(training)
    if found is None:
        raise TrainingError(f"{training.run_dir}: its training ended, and left no whole result")
    bits = "" if found.bits_per_byte is None else f", {found.bits_per_byte:.4f} bits per byte"
    return (
        f"{name}: validation loss {found.loss:.4f}{bits}, {found.updates:,} updates in"
        f" {found.seconds:,.0f} s ({seconds:.0f} s since the first of {of} was started)"
    )


def label(training: Training) -> str:
    """Such as "mamba lr=0.004 seed=0, equal processor"."""
    point = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in training.point)
    return f"{training.model} {point} seed={training.seed}, equal {training.budget}"


def _why(training: Training, status: int) -> str:
    """What a training that failed has left behind."""
    if status == PREEMPTED:
        return f"{label(training)} was stopped by a signal: the same command continues"
    failure = read_mapping(RunDir(training.run_dir).failure) or {}
    log = training.run_dir.parent / f"{training.run_dir.name}.log"
    sentence = failure.get("sentence") or f"exit status {status}, its last words are in {log}"
    return f"{label(training)} failed: {sentence}"
