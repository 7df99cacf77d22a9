"""`fprnn watch`: runs that were started elsewhere, live."""

from __future__ import annotations

import argparse

from lm.cli.arguments import Number


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command to those of the command line."""
    c = commands.add_parser(
        "watch",
        help="follow runs that were started elsewhere, several at once",
        description="Show how far runs are, from the files in their directories: state, updates,"
        " loss, validation, learning rate, tokens/s, iterations, time left, age of the last"
        " record. On a terminal a table that is kept up to date, else a line for every new record."
        " Ends when all have ended: exit status 0 where all are done, else 1.",
    )
    c.add_argument(
        "run", nargs="+", metavar="RUN", help="a run directory, also of a synthetic task"
    )
    c.add_argument("--once", action="store_true", help="show one table and end (exit status 0)")
    c.add_argument(
        "--every",
        type=Number(),
        default=2.0,
        metavar="S",
        help="seconds between two looks, above 0 (default: 2)",
    )
    c.add_argument("--wait", action="store_true", help="wait for runs that are not there yet")
    c.set_defaults(run_command=_watch)


def _watch(args: argparse.Namespace) -> int:
    from lm.report.watch import watch

    return 0 if watch(args.run, args.every, args.once, args.wait) else 1
