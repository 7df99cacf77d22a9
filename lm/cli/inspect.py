"""`fprnn inspect`: what a language model makes of a text, in the terminal and as a page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lm.cli.arguments import add_trust
from lm.common.errors import UserError


class InspectArgumentError(UserError, ValueError):
    """A text that was not given, or given twice; the message says what would do."""


def add(commands: argparse._SubParsersAction) -> None:
    """The command, among those of `fprnn`."""
    c = commands.add_parser(
        "inspect",
        help="look inside: ℓ* of each token, loss, entropy, states and gates of a text",
        description="Read a text and show, in the terminal and on one HTML page, how many"
        " iterations each token needs in each layer (ℓ*), its loss, what was predicted in its"
        " place, and the states, gates and decays over time. docs/inspect.md says what each number"
        " is. TEXT: one or several, put together by spaces; `-` reads standard input.",
    )
    c.add_argument("checkpoint", metavar="CKPT", help="a run directory or an exported folder")
    c.add_argument("text", nargs="*", metavar="TEXT")
    c.add_argument("--file", metavar="F", help="read the text of this UTF-8 file instead")
    c.add_argument(
        "--out",
        metavar="HTML",
        help="the page (default: CKPT/inspect.html); an earlier page of this command is replaced,"
        " any other file is not",
    )
    add_trust(c)
    c.set_defaults(run_command=_inspect, words="text")


def _inspect(args: argparse.Namespace) -> int:
    from lm.runs import places

    text = _text(args.text, args.file)
    places.find_model(args.checkpoint)

    from lm.evaluation.facade import load
    from lm.evaluation.inspection.show import check_page, default_page, show

    out = Path(args.out) if args.out else default_page(args.checkpoint)
    check_page(out)
    show(load(args.checkpoint, args.trust).inspect(text), out)
    return 0


def _text(words: list[str], file: str | None) -> str:
    """The text to look at.

    Raises:
        InspectArgumentError: none, two, or a file that cannot be read.
    """
    if bool(words) == bool(file):
        what = "give either a TEXT or --file, not both" if file else "no text is given"
        raise InspectArgumentError(
            f"{what}: name it after the checkpoint, or --file F, or `-` for standard input"
        )
    if words == ["-"]:
        return _decoded(sys.stdin.buffer.read(), "standard input")
    return _of_file(file) if file else " ".join(words)


def _of_file(file: str) -> str:
    try:
        return _decoded(Path(file).read_bytes(), file)
    except OSError as e:
        raise InspectArgumentError(f"{file} cannot be read: {e.strerror or e}") from None


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        raise InspectArgumentError(f"{where} is not UTF-8 (byte {e.start})") from None
