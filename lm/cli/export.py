"""`fprnn export`: write a run as a folder that `from_pretrained` loads."""

from __future__ import annotations

import argparse

from lm.cli.arguments import add_trust


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "export",
        help="write a run as a HuggingFace model folder",
        description="Write a run as a folder that from_pretrained loads, with a model card."
        " To upload it, use `hf upload` of huggingface_hub (docs/cluster-run.md).",
    )
    command.add_argument("run", metavar="RUN", help="a run directory")
    command.add_argument("out", metavar="OUT", help="the folder to write")
    command.add_argument(
        "--checkpoint", help="a checkpoint folder (default: the newest complete one)"
    )
    command.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the export of another run in OUT, or a model card that was edited by hand;"
        " files in OUT that no export wrote are kept in any case",
    )
    command.add_argument(
        "--licence",
        metavar="ID",
        help="licence of the weights by its name on the hub, e.g. apache-2.0 (default: unknown)",
    )
    add_trust(command)
    command.set_defaults(run_command=_export)


def _export(args: argparse.Namespace) -> int:
    from lm.runs import path_checks

    path_checks.check_run(args.run)
    path_checks.check_folders({"--checkpoint": args.checkpoint})

    from lm.export.export import export

    folder = export(
        args.run,
        args.out,
        args.checkpoint,
        args.licence,
        trust=args.trust,
        overwrite=args.overwrite,
    )
    print(folder)
    return 0
