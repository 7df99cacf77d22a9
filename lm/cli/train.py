"""`fprnn train`: train a run, or print its configuration and cost."""

from __future__ import annotations

import argparse

from lm.cli.arguments import Integer, add_overrides
from lm.cli.run_config import load_run_config


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "train",
        help="train a run, or continue it (resume=auto)",
        description="Train the run that a YAML describes. Each OVERRIDE sets a key of the YAML,"
        " e.g. optim.lr=1e-3 model.mixer=dplr solver.schedule=parallel resume=auto."
        " docs/config.md lists all keys, and which of them a resumed run may change.",
    )
    command.add_argument("--config", required=True, metavar="YAML", help="the run or sweep")
    command.add_argument(
        "--overwrite", action="store_true", help="delete an earlier run of this name first"
    )
    command.add_argument(
        "--dry-run", action="store_true", help="print the configuration and the cost; do not train"
    )
    command.add_argument(
        "--job-index",
        type=Integer(0),
        metavar="I",
        help="train point I of the YAML's sweep, counted from 0 (`fprnn sweep` lists the points)",
    )
    add_overrides(command)
    command.set_defaults(run_command=_train)


def _train(args: argparse.Namespace) -> int:
    cfg = load_run_config(args.config, args.override, args.job_index)
    if args.dry_run:
        from lm.cli.plan import make_plan
        from lm.common.console import say
        from lm.common.ranks import read_launcher_ranks

        say.enabled = read_launcher_ranks().rank == 0
        table, status = make_plan(cfg)
        say(cfg.to_yaml())
        say(table)
        return status

    from lm.training.train import train

    train(cfg, overwrite=args.overwrite)
    return 0
