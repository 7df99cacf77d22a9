"""`fprnn plan`: print the cost of a run before it is trained."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lm.cli.arguments import GPU_COUNT, PositiveNumber, add_job_index, add_overrides

if TYPE_CHECKING:
    from rich.table import Table

    from lm.config.schema import Config


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "plan",
        help="print the cost of a run: parameters, FLOPs, hours, and whether it fits the GPU",
        description="Estimate the cost of the run that a YAML describes, without training it:"
        " parameters, FLOPs, hours, and GiB of memory per GPU. Nothing is downloaded and no GPU is"
        " needed. The exit status is 78 if the run does not fit the GPU's memory, otherwise 0."
        " docs/scale.md explains how the numbers are computed. `fprnn train --dry-run` also prints"
        " the whole configuration.",
    )
    command.add_argument("config", metavar="CONFIG", help="the YAML of a run, or of a sweep")
    command.add_argument(
        "--gpus",
        type=GPU_COUNT,
        metavar="N",
        help="total number of GPUs on all machines, at least 1 (default: the number of processes"
        " that a launcher has started, 1 without a launcher)",
    )
    command.add_argument(
        "--gpu",
        metavar="NAME",
        help="kind of GPU: a100-40g, a100-80g, l40s, h100-80g or h200; for another kind"
        " NAME:TFLOPS:GIB from its data sheet (b200:2250:178 for 2,250 dense TFLOP/s in the run's"
        " precision and 178 GiB); or cpu for the CPU of this machine (default: the GPU of this"
        " machine if it is one of these, otherwise a100-80g)",
    )
    command.add_argument(
        "--utilisation",
        type=PositiveNumber(),
        metavar="U",
        help="share of the GPU's peak FLOP/s that matrix products are assumed to reach, above 0 and"
        " at most 1 (default: 0.25)",
    )
    add_job_index(
        command, "plan point I of the sweep in the YAML, counted from 0 (needed for a sweep)"
    )
    add_overrides(command)
    command.set_defaults(run_command=_plan)


def _plan(args: argparse.Namespace) -> int:
    from lm.common.console import say
    from lm.training.inputs import load_run_config

    cfg = load_run_config(args.config, args.override, args.job_index)
    table, exit_status = plan_run(cfg, args.gpus, args.gpu, args.utilisation)
    say(table)
    return exit_status


def plan_run(
    cfg: Config,
    gpu_count: int | None = None,
    gpu_name: str | None = None,
    utilisation: float | None = None,
) -> tuple[Table, int]:
    """Check that a run can start, and estimate its cost.

    Args:
        cfg: Configuration of the run.
        gpu_count: Total number of GPUs; None: the number of launched processes.
        gpu_name: Name or description of the GPU; None: the GPU of this machine if it is a known
            kind, otherwise a100-80g.
        utilisation: Share of the peak FLOP/s that matrix products reach; None: the default.

    Returns:
        The table to print, and the exit status of the command: BAD_CONFIG if the run does not fit
        the GPU's memory, otherwise 0.
    """
    from lm.common.errors import BAD_CONFIG
    from lm.common.files import check_folder
    from lm.common.ranks import read_launcher_ranks
    from lm.report.plan import make_table, parse_hardware, plan
    from lm.training.build import replace_custom_mixers
    from lm.training.preflight import check_config

    if gpu_count is None:
        gpu_count = read_launcher_ranks().world_size
    hardware = parse_hardware(gpu_count, gpu_name, utilisation)
    # The check must not import custom code. `plan` below replaces custom mixers too.
    cfg_without_custom_mixers, _ = replace_custom_mixers(cfg)
    check_config(cfg_without_custom_mixers, gpu_count)
    check_folder(cfg.run_dir)
    costs = plan(cfg, hardware)
    exit_status = 0 if costs["fits"] else BAD_CONFIG
    return make_table(costs, cfg), exit_status
