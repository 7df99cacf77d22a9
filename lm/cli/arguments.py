"""Types and options of command-line arguments, and the execution of a parsed command.

`lm.cli.main` and `synthetic.cli` share them.
"""

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

# Delay in seconds before ranks other than 0 end after an error, which rank 0 prints meanwhile.
WAIT_FOR_RANK_0_S = 1.0


@dataclass(frozen=True)
class Integer:
    """Type of an argument for argparse: an integer within bounds, or a keyword instead."""

    min: int = 1
    max: int | None = None  # None: no upper bound
    keyword: str | None = None  # word that is accepted as well, such as "auto"

    def __call__(self, text: str) -> int | str:
        if text == self.keyword:
            return text
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < self.min or (self.max is not None and value > self.max):
            bounds = f"of at least {self.min}" if self.max is None else f"{self.min} to {self.max}"
            keyword = "" if self.keyword is None else f" or {self.keyword}"
            raise argparse.ArgumentTypeError(
                f"{text!r} is invalid: it must be an integer {bounds}{keyword}"
            )
        return value


@dataclass(frozen=True)
class PositiveNumber:
    """Type of an argument for argparse: a finite number above 0; with `allow_zero` also 0."""

    allow_zero: bool = False

    def __call__(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0 or (value == 0 and not self.allow_zero):
            bounds = "of at least 0" if self.allow_zero else "above 0"
            raise argparse.ArgumentTypeError(
                f"{text!r} is invalid: it must be a finite number {bounds}"
            )
        return value


SEED = Integer(min=0, max=2**64 - 1)  # the seeds that torch.manual_seed accepts
GPU_COUNT = Integer(min=1, max=1_000_000)  # a larger number is a typing error


class HelpFormatter(argparse.HelpFormatter):
    """Formatter of help texts that does not wrap the lines of examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("examples:") else super()._fill_text(text, width, indent)


def add_examples(commands: argparse._SubParsersAction, examples: str) -> None:
    """Add to the help of each command the examples that use it.

    Args:
        commands: Commands; a command that already has an epilog keeps it.
        examples: The line "examples:", followed by one line for each example.
    """
    head, *lines = examples.splitlines()
    for name, command in commands.choices.items():
        if command.epilog is None:
            matching = [line for line in lines if f" {name} " in f"{line} "]
            command.epilog = "\n".join([head, *matching])
            command.formatter_class = HelpFormatter


def add_overrides(command: argparse.ArgumentParser) -> None:
    """Add the argument `key=value …` to a command that reads a YAML."""
    command.add_argument(
        "override",
        nargs="*",
        metavar="key=value",
        help="set a key of the YAML to another value, such as optim.lr=1e-3",
    )


def add_job_index(command: argparse.ArgumentParser, help: str) -> None:
    """Add the option `--job-index` to a command that reads the YAML of a sweep."""
    command.add_argument("--job-index", type=Integer(min=0), metavar="I", help=help)


def add_trust(command: argparse.ArgumentParser) -> None:
    """Add the option `--trust` to a command that loads a run or an export."""
    command.add_argument(
        "--trust",
        action="store_true",
        help="allow running code that comes with the model, such as a custom mixer or tokenizer"
        " (default: refuse such a model)",
    )


def parse_names(text: str) -> list[str]:
    """Return the names of a comma-separated list.

    Raises:
        argparse.ArgumentTypeError: If the list is empty.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("the list is empty")
    return names


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Return the parsed arguments. Words of a list may precede and follow options.

    argparse does not add the words that follow an option to the list; this function adds them. The
    list is `override`, or the argument that the command names by `set_defaults(list_argument=…)`.
    """
    args, unparsed = parser.parse_known_args(argv)
    list_name = getattr(args, "list_argument", "override")
    # Words after `--` are no options, even if they start with a dash.
    end = unparsed.index("--") if "--" in unparsed else len(unparsed)
    has_option = any(word.startswith("-") and word != "-" for word in unparsed[:end])
    has_list = hasattr(args, list_name)
    if has_option or (unparsed and not has_list):
        has_overrides = hasattr(args, "override")
        hint = ". Keys of the YAML are set without dashes: key=value" if has_overrides else ""
        parser.error(f"unrecognized arguments: {' '.join(unparsed)}{hint}")
    if unparsed:
        words = [*getattr(args, list_name), *unparsed[:end], *unparsed[end + 1 :]]
        setattr(args, list_name, words)
    return args


def run(args: argparse.Namespace) -> int:
    """Run the command of parsed arguments and return its exit status.

    An error that the user can correct is printed without a traceback and has its own exit status
    (`lm.common.errors`). Any other error is a bug and keeps its traceback. Characters that the
    terminal's encoding lacks are printed as escape sequences.
    """
    mask_logs()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        status = args.run_command(args)
        if sys.stdout is not None:  # None: the shell has closed it
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # the status by which a shell reports a process that SIGINT has ended
    except Exception as e:
        if isinstance(e, BrokenPipeError) and _discard_unwritable_output():  # `| head` has ended
            return FAILED
        text = describe_user_error(e)
        if text is None:
            raise
        if getattr(e, "is_reported_by_main", False):  # rank 0 prints it
            # When the first rank ends, the launcher kills all ranks, also rank 0.
            time.sleep(WAIT_FOR_RANK_0_S)
        else:
            label = "" if isinstance(e, Stopped) else "error: "
            print(f"{label}{printable(text)}", file=sys.stderr)
        _discard_unwritable_output()
        return exit_status(e)


def _discard_unwritable_output() -> bool:
    """Discard output that cannot be written, so that Python does not fail on it at exit.

    Returns:
        True if stdout is closed: the process that reads the output has ended.
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

    Flushing does not detect this if the stream's buffer is empty.
    """
    poll = select.poll()
    try:
        poll.register(stream.fileno(), 0)
    except io.UnsupportedOperation:  # not a file: a test captures it
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))
