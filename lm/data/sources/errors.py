"""The error of text that cannot be read or used, and how the error behind it is quoted."""

from __future__ import annotations

from lm.common.errors import BAD_DATA, UNREACHABLE, UserError


class DataError(UserError, ValueError):
    """Text that cannot be read or used; the message says what, where, and what would do."""

    exit_status = BAD_DATA


class HubUnreachable(DataError):
    """No network, or a hub in trouble: nothing is wrong with the data, and later it may be had."""

    exit_status = UNREACHABLE


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message, to be quoted in a sentence."""
    message = str(error).strip()
    return f"{type(error).__name__}: {message.splitlines()[0] if message else ''}"
