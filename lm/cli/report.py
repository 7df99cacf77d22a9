"""`fprnn report`: write the HTML page of one or several runs."""

from __future__ import annotations

import argparse


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "report",
        help="write an HTML page, figures and a summary of one or several runs",
        description="Write report.html, one file with all figures; figures/ (PNG and PDF); and"
        " summary.json. They show losses, ℓ*, work, speed, memory, evaluations, configuration and"
        " provenance of a finished run or of one that still trains. Several runs share one page;"
        " --out names its folder.",
    )
    command.add_argument("runs", nargs="+", metavar="RUN", help="run directories")
    command.add_argument("--out", metavar="FOLDER", help="the folder to write (default: RUN)")
    command.set_defaults(run_command=_report)


def _report(args: argparse.Namespace) -> int:
    from lm.runs import path_checks

    for folder in args.runs:
        path_checks.check_run(folder)

    from lm.common.console import say
    from lm.report.report import report

    for printed in report(args.runs, args.out):
        say(printed)
    return 0
