"""`fprnn sweep`: the points of a YAML's sweep, listed or trained one after the other."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from lm.cli.arguments import Whole, add_overrides
from lm.common.files import find_shipped

if TYPE_CHECKING:
    from lm.common.signals import StopSignals

LAUNCH = find_shipped("launch/deepspeed.sh")


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command to those of the command line."""
    c = commands.add_parser(
        "sweep",
        help="list the points of a YAML's sweep: section, or train them here (--run)",
        description="List the points of a YAML's sweep, one a line, or train them one after the"
        " other. `fprnn status YAML` says how far each is and what it has reached. OVERRIDES are of"
        " every point.",
    )
    c.add_argument("config", metavar="YAML", help="a YAML with a `sweep:`")
    c.add_argument(
        "--run",
        action="store_true",
        help="train what is not done yet, each point in a process of its own; one that diverged is"
        " left as it is; exit status 1 where one failed. The same command goes on after a stop",
    )
    c.add_argument(
        "--gpus",
        type=Whole(1, 1_000_000),
        metavar="N",
        help="with --run: launch each point under DeepSpeed on N GPUs, at least 1 (default: one"
        " process)",
    )
    add_overrides(c)
    c.set_defaults(run_command=_sweep)


def _sweep(args: argparse.Namespace) -> int:
    from lm.common.errors import ConfigError
    from lm.config import load as config

    if args.gpus and not args.run:
        raise ConfigError("--gpus is of --run: a list needs none")
    tree = config.load_tree(args.config)
    config.set_overrides(tree, args.override)
    points = config.sweep_points(tree, args.config)
    names = [config.point_name(tree.get("name", "run"), i, p) for i, p in enumerate(points)]
    if args.run:
        return run_points(args.config, names, args.override, args.gpus)
    for name in names:
        print(name)
    return 0


def run_points(path: str, names: list[str], overrides: list[str], gpus: int | None) -> int:
    """Train the points of a sweep that are left, one after the other → 1 where one failed, else 0.

    Args:
        names: of all points, in order. gpus: launch each under DeepSpeed on so many; None: one
            process, as `fprnn train`.
    Raises:
        Stopped: a signal asked for it, and the point that was training has saved.
    """
    from lm.common.console import say
    from lm.common.errors import DIVERGED
    from lm.common.files import read_mapping
    from lm.common.signals import StopSignals
    from lm.runs.run_dir import RunDir
    from lm.runs.status import sweep_status

    has_failed = False
    with StopSignals() as signals:
        for i, name in enumerate(names):
            point = sweep_status(path, overrides)[i]  # now: another process may have trained it
            failure = read_mapping(RunDir(point.run_dir).failure) or {}
            if not point.is_left or failure.get("exit_code") == DIVERGED:
                say(f"{name}: {point.state}")
                continue
            say(f"{name}: point {i + 1} of {len(names)}")
            status = _train_point(_command(path, i, overrides, gpus), signals)
            if status:
                has_failed |= status != DIVERGED
                say(f"{name}: ended with exit status {status}")
    return int(has_failed)


def _train_point(command: list[str], signals: StopSignals) -> int:
    """Train a point in a process of its own, which does not outlive this one → its exit status.

    Raises:
        Stopped: If a signal asked for it, and the point has saved.
    """
    from lm.common.errors import PREEMPTED, Stopped
    from lm.common.signals import stop_with_parent

    process = subprocess.Popen(command, preexec_fn=stop_with_parent())
    while process.poll() is None:
        time.sleep(0.2)
        # Repeat the signal: a process that is being started does not listen yet.
        if signals.is_stop_requested:
            process.terminate()
    if signals.is_stop_requested or process.returncode == PREEMPTED:
        raise Stopped("stopped by a signal: the same command continues")
    return process.returncode


def _command(path: str, index: int, overrides: list[str], gpus: int | None) -> list[str]:
    point = ["--job-index", str(index)]
    if gpus is not None:  # which resumes by itself
        return ["bash", str(LAUNCH), path, str(gpus), *point, *overrides]
    train = [sys.executable, "-m", "lm", "train", "--config", path]
    return [*train, *point, "resume=auto", *overrides]
