"""`fprnn plan`: print the cost of a run before it is trained."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lm.cli.arguments import Integer, PositiveNumber, add_overrides
from lm.cli.run_config import load_run_config

if TYPE_CHECKING:
    from rich.table import Table

    from lm.config.schema import Config


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "plan",
        help="print the cost of a run: parameters, FLOPs, hours, and whether it fits the GPU",
        description="Print the cost of the run that a YAML describes, without training it. Nothing"
        " is downloaded and no GPU is needed. The exit status is 78 if the run does not fit the"
        " GPU's memory. `train --dry-run` prints the configuration as well. docs/scale.md explains"
        " how the numbers are computed.",
    )
    command.add_argument("config", metavar="CONFIG", help="the YAML of a run or sweep")
    command.add_argument(
        "--gpus",
        type=Integer(1, 1_000_000),
        metavar="N",
        help="total number of GPUs, at least 1 (default: the number of launched processes)",
    )
    command.add_argument(
        "--gpu",
        metavar="NAME",
        help="kind of GPU: a100-40g, a100-80g, l40s, h100-80g or h200; for any other"
        " NAME:TFLOPS:GIB from its data sheet (b200:2250:178 has 2,250 dense TFLOP/s and 178 GiB);"
        " cpu for this machine's CPU (default: the GPU of this machine, or a100-80g)",
    )
    command.add_argument(
        "--utilisation",
        type=PositiveNumber(),
        metavar="U",
        help="share of the GPU's peak FLOP/s that matrix products reach, above 0 and at most 1"
        " (default: 0.25, an assumption)",
    )
    command.add_argument(
        "--job-index",
        type=Integer(0),
        metavar="I",
        help="plan point I of the YAML's sweep, counted from 0",
    )
    add_overrides(command)
    command.set_defaults(run_command=_plan)


def _plan(args: argparse.Namespace) -> int:
    from lm.common.console import say

    cfg = load_run_config(args.config, args.override, args.job_index)
    table, status = make_plan(cfg, args.gpus, args.gpu, args.utilisation)
    say(table)
    return status


def make_plan(
    cfg: Config,
    gpus: int | None = None,
    gpu: str | None = None,
    utilisation: float | None = None,
) -> tuple[Table, int]:
    """Return the cost of a run as a table, and the exit status of the command.

    The status is BAD_CONFIG if the run does not fit the GPU's memory, otherwise 0.
    """
    from lm.common.errors import BAD_CONFIG
    from lm.common.files import check_folder
    from lm.common.ranks import read_launcher_ranks
    from lm.report.plan import describe, parse_hardware, plan
    from lm.training.build import replace_custom_mixers
    from lm.training.preflight import check_config

    gpus = gpus or read_launcher_ranks().world_size
    hardware = parse_hardware(gpus, gpu, utilisation)
    check_config(replace_custom_mixers(cfg)[0], gpus)
    check_folder(cfg.run_dir)
    costs = plan(cfg, hardware)
    return describe(costs, cfg), 0 if costs["fits"] else BAD_CONFIG
