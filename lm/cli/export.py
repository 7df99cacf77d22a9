"""`fprnn export`: write a run as a folder that `from_pretrained` loads."""

from __future__ import annotations

import argparse

from lm.cli.arguments import add_trust


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "export",
        help="write a run as a Hugging Face model folder",
        description="Write the weights of a run (fp32), its tokenizer, its code and a model card to"
        " a folder that from_pretrained of transformers loads. The command `hf upload` of"
        " huggingface_hub uploads the folder (docs/cluster-run.md).",
    )
    command.add_argument("run", metavar="RUN", help="a run directory")
    command.add_argument("out", metavar="OUT", help="the folder to write")
    command.add_argument(
        "--checkpoint",
        metavar="FOLDER",
        help="the checkpoint to export, such as RUN/checkpoints/step-000100 (default: the newest"
        " complete one)",
    )
    command.add_argument(
        "--overwrite",
        action="store_true",
        help="also replace an export of another run, and a model card that was edited by hand"
        " (default: refuse). Files in OUT that no export wrote are always kept",
    )
    command.add_argument(
        "--licence",
        metavar="ID",
        help="licence of the weights for the model card, by its name on the Hugging Face hub, such"
        " as apache-2.0 (default: unknown)",
    )
    add_trust(command)
    command.set_defaults(run_command=_export)


def _export(args: argparse.Namespace) -> int:
    from lm.runs.path_checks import check_folder, check_run

    check_run(args.run)
    check_folder("--checkpoint", args.checkpoint)

    from lm.export.export import export

    options = {"trust": args.trust, "overwrite": args.overwrite}
    print(export(args.run, args.out, args.checkpoint, args.licence, **options))
    return 0
