"""`fprnn train`: train a run, or print its configuration and cost."""

from __future__ import annotations

import argparse

from lm.cli.arguments import add_job_index, add_overrides


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "train",
        help="train a run, or continue it (resume=auto)",
        description="Train the run that a YAML describes, or continue it with resume=auto. Each"
        " key=value sets a key of the YAML, such as optim.lr=1e-3 or model.mixer=dplr."
        " docs/config.md lists all keys, and which of them a resumed run may change.",
    )
    command.add_argument(
        "--config",
        required=True,
        metavar="CONFIG",
        help="the YAML of a run, or of a sweep (required)",
    )
    command.add_argument(
        "--overwrite", action="store_true", help="first delete an earlier run in the same directory"
    )
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="print the configuration and the cost (as `fprnn plan`), and do not train",
    )
    add_job_index(
        command,
        "train point I of the sweep in the YAML, counted from 0 (needed for a sweep;"
        " `fprnn sweep` lists the points)",
    )
    add_overrides(command)
    command.set_defaults(run_command=_train)


def _train(args: argparse.Namespace) -> int:
    from lm.training.inputs import load_run_config

    cfg = load_run_config(args.config, args.override, args.job_index)
    if args.dry_run:
        from lm.cli.plan import plan_run
        from lm.common.console import say
        from lm.common.ranks import read_launcher_ranks

        say.enabled = read_launcher_ranks().rank == 0
        table, exit_status = plan_run(cfg)
        say(cfg.to_yaml())
        say(table)
        return exit_status

    from lm.training.train import train

    train(cfg, overwrite=args.overwrite)
    return 0
