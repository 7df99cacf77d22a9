"""`fprnn status`: how far runs are, and what a sweep has reached."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command to those of the command line."""
    c = commands.add_parser(
        "status",
        help="how far runs or the points of a sweep are",
        description="Show how far runs are, from the files in their directories: state (done,"
        " running, stopped, failed or missing), updates, loss, validation, tokens/s, iterations,"
        " time left, age of the last record; why one has ended; and what the finished points of a"
        " sweep have reached, with mean and standard deviation over seeds. OVERRIDES are those that"
        " a sweep's points are trained with: `name` and `out_dir` say where their runs are.",
    )
    c.add_argument(
        "place",
        nargs="+",
        metavar="PLACE",
        help="a run directory, also of a synthetic task, or a sweep's YAML and its key=value",
    )
    c.add_argument("--json", action="store_true", help="for a program to read")
    c.set_defaults(run_command=_status)


def _status(args: argparse.Namespace) -> int:
    from lm.config.messages import is_key
    from lm.config.schema import Config
    from lm.config.yaml_text import load_tree
    from lm.runs import places

    # The directory of a sweep's point has a `=` in its name, too.
    overrides = [text for text in args.place if is_key(text.partition("=")[0], Config)]
    places_given = [text for text in args.place if text not in overrides]
    if overrides and not places_given:
        raise places.PlaceError(
            f"`{overrides[0]}` sets a key of a sweep, and no sweep is named: give its YAML as well"
        )
    for place in places_given:
        if place.endswith((".yaml", ".yml")):
            load_tree(place)
        elif not Path(place, "lease.json").exists():  # a run that starts has nothing else
            places.check_run(place)

    from lm.report import status

    seen = status.look_at(places_given, overrides)
    if args.json:
        print(status.as_json(seen))
    else:
        status.show(seen)
    return 0
