"""What both command lines share: the kinds of their options, and how a command ends."""

from __future__ import annotations

import argparse
import io
import math
import os
import select
import sys
import time
from dataclasses import dataclass
from typing import TextIO

from lm.common.errors import FAILED, Stopped, describe_user_error, exit_status
from lm.common.files import printable
from lm.common.secrets import mask_logs

SAID_S = 1.0  # what a rank leaves rank 0 to say an error and end


@dataclass(frozen=True)
class Whole:
    """Whole numbers from `least` on, to `most` if there is one; or a `word` in their place."""

    least: int = 1
    most: int | None = None
    word: str | None = None

    def __call__(self, text: str) -> int | str:
        if text == self.word:
            return text
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < self.least or (self.most is not None and value > self.most):
            to = "on" if self.most is None else f"to {self.most}"
            word = "" if self.word is None else f", nor {self.word}"
            raise argparse.ArgumentTypeError(
                f"{text!r} is no whole number from {self.least} {to}{word}"
            )
        return value


@dataclass(frozen=True)
class Number:
    """Finite numbers above 0; with `zero` also 0."""

    zero: bool = False

    def __call__(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0 or (value == 0 and not self.zero):
            wanted = "finite number from 0 on" if self.zero else "finite number above 0"
            raise argparse.ArgumentTypeError(f"{text!r} is no {wanted}")
        return value


SEED = Whole(0, 2**64 - 1)  # what torch takes


class HelpFormatter(argparse.HelpFormatter):
    """argparse's formatter, which leaves the lines of examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("examples:") else super()._fill_text(text, width, indent)


def add_examples(commands: argparse._SubParsersAction, examples: str) -> None:
    """Show the examples of each command below its options.

    Args:
        commands: Commands; those that have an epilog keep it.
        examples: "examples:" and a line for each example.
    """
    head, *lines = examples.splitlines()
    for name, command in commands.choices.items():
        if command.epilog is None:
            matching = [line for line in lines if f" {name} " in f"{line} "]
            command.epilog = "\n".join([head, *matching])
            command.formatter_class = HelpFormatter


def add_overrides(c: argparse.ArgumentParser) -> None:
    """Add the overrides of a command that reads a YAML."""
    c.add_argument("override", nargs="*", metavar="key=value", help="overrides of the YAML's keys")


def add_trust(c: argparse.ArgumentParser) -> None:
    """Add the option of a command that loads a run or an export."""
    c.add_argument(
        "--trust",
        action="store_true",
        help="run the code of a run or export whose mixer, task or tokenizer is its author's own",
    )


def names(text: str) -> list[str]:
    """A comma-separated list that is not empty."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise argparse.ArgumentTypeError("the list is empty")
    return found


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Return the arguments; a list of them may stand before and after the options.

    A command names its list by `set_defaults(more=…)`; the default is `override`.
    """
    args, rest = parser.parse_known_args(argv)
    name = getattr(args, "more", "override")
    end = rest.index("--") if "--" in rest else len(rest)  # words, also with dashes, follow it
    has_option = any(text.startswith("-") and text != "-" for text in rest[:end])
    if has_option or (rest and not hasattr(args, name)):
        takes_keys = hasattr(args, "override")
        hint = ". Keys of the YAML are set without dashes: key=value" if takes_keys else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    if rest:
        setattr(args, name, [*getattr(args, name), *rest[:end], *rest[end + 1 :]])
    return args


def run(args: argparse.Namespace) -> int:
    """Run the command of parsed arguments. An error that is the user's to mend is printed as a
    sentence, and ends with its own exit status (`lm.common.errors`); any other is a bug, with its
    traceback. What a terminal's encoding does not have is printed by its number."""
    mask_logs()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        status = args.run_command(args)
        if sys.stdout is not None:  # closed
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as e:
        if isinstance(e, BrokenPipeError) and _drop_output():  # whoever reads has seen enough
            return FAILED
        text = describe_user_error(e)
        if text is None:
            raise
        if getattr(e, "is_reported_by_main", False):
            time.sleep(SAID_S)  # a launcher kills all ranks, rank 0 too, when the first has ended
        else:
            label = "" if isinstance(e, Stopped) else "error: "
            print(f"{label}{printable(text)}", file=sys.stderr)
        _drop_output()
        return exit_status(e)


def _drop_output() -> bool:
    """Discard the output that cannot be written, so that Python does not fail on it as it ends.

    Returns:
        Whether nobody reads the output any more.
    """
    if sys.stdout is None:
        return True
    try:
        sys.stdout.flush()
        is_closed = _has_no_reader(sys.stdout)
    except OSError:
        is_closed = True
    if is_closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_closed


def _has_no_reader(stream: TextIO) -> bool:
    """Return whether a stream is a pipe whose reader has ended.

    An unbuffered stream has nothing to flush, and does not notice it.
    """
    poll = select.poll()
    try:
        poll.register(stream.fileno(), 0)
    except io.UnsupportedOperation:  # no file: a test reads it
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))
