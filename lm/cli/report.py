"""`fprnn report`: write the HTML page of runs."""

from __future__ import annotations

import argparse


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "report",
        help="write an HTML page, figures and a summary of one or several runs",
        description="Write report.html (one file that contains all figures), the folder figures"
        " (PNG and PDF) and summary.json. They show the losses, ℓ*, cost of the solver, speed,"
        " memory, scores of `fprnn eval`, configuration and files of runs that are finished or"
        " still train. Several runs are compared on one page, for which --out is required.",
    )
    command.add_argument("runs", nargs="+", metavar="RUN", help="run directories")
    command.add_argument(
        "--out", metavar="FOLDER", help="the folder to write (default for a single run: RUN)"
    )
    command.set_defaults(run_command=_report)


def _report(args: argparse.Namespace) -> int:
    from lm.runs import path_checks

    for folder in args.runs:
        path_checks.check_run(folder)

    from lm.common.console import say
    from lm.report.report import report

    for line in report(args.runs, args.out):
        say(line)
    return 0
