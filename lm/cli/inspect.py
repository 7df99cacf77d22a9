"""`fprnn inspect`: show ℓ*, losses, predictions, states and gates of a model on a text."""

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
        help="show how a model processes a text: ℓ*, loss and predictions per token, states, gates",
        description="Run a model on a text and write an HTML page with these numbers for each"
        " token: ℓ* (the number of iterations that the paper's solver needs) in each layer, the"
        " loss in nats, the entropy, the most likely predictions, and states, gates and decays. In"
        " the terminal, print the text and means per layer. docs/inspect.md explains the numbers.",
    )
    command.add_argument("checkpoint", metavar="CKPT", help="a run directory or an exported folder")
    command.add_argument(
        "text",
        nargs="*",
        metavar="TEXT",
        help="the text; several TEXTs are joined by spaces; `-`: read the text from standard input",
    )
    command.add_argument(
        "--out",
        metavar="HTML",
        help="page to write (default: CKPT/inspect.html). An earlier page of this command is"
        " replaced; if HTML is any other file, the command stops",
    )
    add_trust(command)
    command.set_defaults(run_command=_inspect, list_argument="text")


def _inspect(args: argparse.Namespace) -> int:
    from lm.runs.path_checks import check_model

    text = _read_text(args.text)
    check_model(args.checkpoint)

    from lm.evaluation.inspection.show import choose_page, show
    from lm.evaluation.language_model import load

    page = choose_page(args.checkpoint, args.out)
    show(load(args.checkpoint, args.trust).inspect(text), page)
    return 0


def _read_text(words: list[str]) -> str:
    """Return the text to inspect.

    Raises:
        InspectArgumentError: If there is no text, or standard input is not UTF-8.
    """
    if not words:
        raise InspectArgumentError(
            "no text is given: write the text after CKPT, or `-` to read standard input"
        )
    if words != ["-"]:
        return " ".join(words)
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as e:
        raise InspectArgumentError(f"standard input is not UTF-8 (byte {e.start})") from None
