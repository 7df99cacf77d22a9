"""`fprnn status`: show the progress of runs, and the results of sweeps."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "status",
        help="show the progress of runs or of the points of a sweep",
        description="Show the progress of runs from the files in their directories: state (done,"
        " running, stopped, failed, diverged or missing), updates, loss and validation loss in nats"
        " per token, tokens/s, ℓ*, time left, age of the last record, and why a run ended. For a"
        " sweep, also show the results of its finished points, with mean and standard deviation"
        " over seeds. Repeat overrides of `name` and `out_dir` with which the sweep was trained:"
        " they determine the run directories.",
    )
    command.add_argument(
        "place",
        nargs="+",
        metavar="PLACE",
        help="a run directory, or the YAML of a sweep followed by its key=value overrides",
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of tables")
    command.set_defaults(run_command=_status)


def _status(args: argparse.Namespace) -> int:
    from lm.config.messages import is_key
    from lm.config.schema import Config
    from lm.config.yaml_text import load_tree
    from lm.runs.path_checks import PathError, check_run

    # The run directory of a sweep's point may also contain `=`, but no key of the YAML before it.
    overrides = [p for p in args.place if "=" in p and is_key(p.partition("=")[0], Config)]
    places = [text for text in args.place if text not in overrides]
    if overrides and not places:
        raise PathError(
            f"`{overrides[0]}` sets a key of a sweep, but no sweep is named: give its YAML as well"
        )
    for place in places:
        if place.endswith((".yaml", ".yml")):
            load_tree(place)
        elif not Path(place, "lease.json").exists():  # a starting run has only this file
            check_run(place)

    from lm.report import status

    statuses = status.read_statuses(places, overrides)
    if args.json:
        print(status.to_json(statuses))
    else:
        status.show(statuses)
    return 0
