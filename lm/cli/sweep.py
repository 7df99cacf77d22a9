"""`fprnn sweep`: list the points of a sweep, or train them one after the other."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from lm.cli.arguments import GPU_COUNT, add_overrides
from lm.common.files import find_shipped

if TYPE_CHECKING:
    from lm.common.signals import StopSignals
    from lm.config.schema import Config
    from lm.runs.run_dir import RunDir

LAUNCH_SCRIPT = find_shipped("launch/deepspeed.sh")


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "sweep",
        help="list the points of a YAML's `sweep:` section, or train them on this machine (--run)",
        description="List the points of a YAML's sweep, one per line, or train them one after the"
        " other with --run. Each key=value applies to every point. `fprnn status CONFIG` shows the"
        " progress and results of each point.",
    )
    command.add_argument("config", metavar="CONFIG", help="a YAML with a `sweep:` section")
    command.add_argument(
        "--run",
        action="store_true",
        help="train every point that is neither finished nor diverged, each in its own process."
        " The exit status is 1 if a point failed. After an interruption, the same command"
        " continues",
    )
    command.add_argument(
        "--gpus",
        type=GPU_COUNT,
        metavar="N",
        help="with --run: train each point with the DeepSpeed launcher on N GPUs, at least 1"
        " (default: train it in one process, without the launcher)",
    )
    add_overrides(command)
    command.set_defaults(run_command=_sweep)


def _sweep(args: argparse.Namespace) -> int:
    from lm.common.errors import ConfigError
    from lm.config import load as config

    if args.gpus and not args.run:
        raise ConfigError("--gpus needs --run: listing the points uses no GPU")
    configs = config.load_sweep(args.config, args.override)[1]
    if args.run:
        return run_points(args.config, configs, args.override, args.gpus)
    for cfg in configs:
        print(cfg.name)
    return 0


def run_points(path: str, configs: list[Config], overrides: list[str], gpus: int | None) -> int:
    """Train the unfinished points of a sweep, one after the other.

    A finished or diverged point is continued if only `train.steps` differs. If it was trained with
    other settings, they are named, and the point counts as failed.

    Args:
        path: The YAML.
        configs: Configs of all points, in order.
        overrides: `key=value` for every point.
        gpus: Number of GPUs of the DeepSpeed launcher; None: one process without the launcher.

    Returns:
        1 if a point failed, otherwise 0. Diverged points do not count as failed.

    Raises:
        Stopped: If a signal requested a stop, after the point in training saved a checkpoint.
    """
    from lm.common.console import say
    from lm.common.errors import DIVERGED
    from lm.common.signals import StopSignals
    from lm.runs.run_dir import RunDir
    from lm.runs.status import sweep_status

    has_failure = False
    with StopSignals() as signals:
        for i, cfg in enumerate(configs):
            # Read the state again before each point: another process may be training the sweep.
            point = sweep_status(path, overrides)[i]
            run = RunDir(point.run_dir)
            is_over = point.state in ("done", "diverged")
            changes, has_other_steps = _find_changes(run, cfg) if is_over else ("", False)
            if changes:
                has_failure = True
                say(
                    f"{cfg.name}: {point.state}, with other settings ({changes}): delete {run}, or"
                    " choose another `name`"
                )
                continue
            if point.state == "running" or (is_over and not has_other_steps):
                say(f"{cfg.name}: {point.state}")
                continue
            say(f"{cfg.name}: point {i + 1} of {len(configs)}")
            exit_status = _train_point(_make_command(path, i, overrides, gpus), signals)
            if exit_status:
                has_failure |= exit_status != DIVERGED
                say(f"{cfg.name}: ended with exit status {exit_status}")
    return int(has_failure)


def _find_changes(run: RunDir, cfg: Config) -> tuple[str, bool]:
    """Compare the config of a trained run with a point's config.

    Returns:
        The settings that differ and that trained weights depend on, as text, and whether
        `train.steps` differs.
    """
    from lm.common.errors import ConfigError
    from lm.config.load import build
    from lm.config.resuming import Resume
    from lm.config.yaml_text import load_tree
    from lm.runs.run_dir import find_config_changes

    try:
        saved = build(load_tree(run.config), str(run.config), type(cfg))
    except ConfigError as e:
        return str(e), False
    changes = find_config_changes(saved, cfg)
    fixed_and_noted = [*changes[Resume.FIXED].values(), *changes[Resume.NOTED].values()]
    return "; ".join(fixed_and_noted), "train.steps" in changes[Resume.FREE]


def _train_point(command: list[str], signals: StopSignals) -> int:
    """Train a point in a new process and return its exit status.

    If this process is killed, the new process gets a stop signal.

    Raises:
        Stopped: If a signal requested a stop, after the point has saved a checkpoint.
    """
    from lm.common.errors import PREEMPTED, Stopped
    from lm.common.signals import stop_with_parent

    process = subprocess.Popen(command, preexec_fn=stop_with_parent())
    while process.poll() is None:
        time.sleep(0.2)
        # Repeat the signal, because a process that has just started does not handle it yet.
        if signals.is_stop_requested:
            process.terminate()
    if signals.is_stop_requested or process.returncode == PREEMPTED:
        raise Stopped("stopped by a signal: the same command continues")
    return process.returncode


def _make_command(path: str, index: int, overrides: list[str], gpus: int | None) -> list[str]:
    point_options = ["--job-index", str(index)]
    if gpus is not None:  # the script adds resume=auto itself
        return ["bash", str(LAUNCH_SCRIPT), path, str(gpus), *point_options, *overrides]
    train = [sys.executable, "-m", "lm", "train", "--config", path]
    return [*train, *point_options, "resume=auto", *overrides]
