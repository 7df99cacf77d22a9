"""`fprnn inspect`: show per-token losses, predictions, ℓ* and states of a model on a text."""

from __future__ import annotations

import argparse
import sys

from lm.cli.arguments import add_trust
from lm.common.errors import UserError


class InspectArgumentError(UserError, ValueError):
    """Missing text, or text that is not UTF-8."""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "inspect",
        help="show ℓ*, loss, entropy and predictions of each token of a text, states and gates",
        description="Run a model on a text, and show in the terminal and on one HTML page the"
        " number of iterations that each token needs in each layer (ℓ*), its loss, the predictions"
        " for it, and the states, gates and decays over time. docs/inspect.md explains each number."
        " Several TEXTs are joined by spaces; `-` reads standard input (`- < FILE`).",
    )
    command.add_argument("checkpoint", metavar="CKPT", help="a run directory or an exported folder")
    command.add_argument(
        "text", nargs="*", metavar="TEXT", help="the text, or `-` for standard input"
    )
    command.add_argument(
        "--out",
        metavar="HTML",
        help="file of the page (default: CKPT/inspect.html); an earlier page of this command is"
        " replaced, any other file is kept",
    )
    add_trust(command)
    command.set_defaults(run_command=_inspect, list_argument="text")


def _inspect(args: argparse.Namespace) -> int:
    from lm.runs import places

    text = _read_text(args.text)
    places.check_model(args.checkpoint)

    from lm.evaluation.inspection.show import choose_page, show
    from lm.evaluation.language_model import load

    out = choose_page(args.checkpoint, args.out)
    show(load(args.checkpoint, args.trust).inspect(text), out)
    return 0


def _read_text(words: list[str]) -> str:
    """Return the text to inspect.

    Raises:
        InspectArgumentError: If there is no text, or standard input is not UTF-8.
    """
    if not words:
        raise InspectArgumentError(
            "no text is given: write it after the checkpoint, or `-` to read standard input"
        )
    if words != ["-"]:
        return " ".join(words)
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as e:
        raise InspectArgumentError(f"standard input is not UTF-8 (byte {e.start})") from None
