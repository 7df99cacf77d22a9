"""`fprnn inspect`: what a language model makes of a text, in the terminal and as a page."""

from __future__ import annotations

import argparse
import sys

from lm.cli.arguments import add_trust
from lm.common.errors import UserError


class InspectArgumentError(UserError, ValueError):
    """No text is given, or it is not UTF-8."""


def add(commands: argparse._SubParsersAction) -> None:
    """The command, among those of `fprnn`."""
    c = commands.add_parser(
        "inspect",
        help="look inside: ℓ* of each token, loss, entropy, states and gates of a text",
        description="Read a text and show, in the terminal and on one HTML page, how many"
        " iterations each token needs in each layer (ℓ*), its loss, what was predicted in its"
        " place, and the states, gates and decays over time. docs/inspect.md says what each number"
        " is. TEXT: one or several, put together by spaces; `-` reads standard input (`- < FILE`).",
    )
    c.add_argument("checkpoint", metavar="CKPT", help="a run directory or an exported folder")
    c.add_argument("text", nargs="*", metavar="TEXT", help="the text; `-`: standard input")
    c.add_argument(
        "--out",
        metavar="HTML",
        help="the page (default: CKPT/inspect.html); an earlier page of this command is replaced,"
        " any other file is not",
    )
    add_trust(c)
    c.set_defaults(run_command=_inspect, more="text")


def _inspect(args: argparse.Namespace) -> int:
    from lm.runs import places

    text = _read_text(args.text)
    places.find_model(args.checkpoint)

    from lm.evaluation.facade import load
    from lm.evaluation.inspection.show import choose_page, show

    out = choose_page(args.checkpoint, args.out)
    show(load(args.checkpoint, args.trust).inspect(text), out)
    return 0


def _read_text(words: list[str]) -> str:
    """Return the text to look at.

    Raises:
        InspectArgumentError: There is none, or standard input is not UTF-8.
    """
    if not words:
        raise InspectArgumentError(
            "no text is given: name it after the checkpoint, or `-` for standard input"
        )
    if words != ["-"]:
        return " ".join(words)
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as e:
        raise InspectArgumentError(f"standard input is not UTF-8 (byte {e.start})") from None
