"""Errors of text that cannot be read or used."""

from __future__ import annotations

from lm.common.errors import BAD_DATA, UNREACHABLE, UserError


class DataError(UserError, ValueError):
    """Text that cannot be read or used; the message names the fault, its place and a remedy."""

    exit_status = BAD_DATA


class HubUnreachable(DataError):
    """No network, or a hub that does not respond: the same command may succeed later."""

    exit_status = UNREACHABLE


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message, such as "OSError: no"."""
    message = str(error).strip()
    return f"{type(error).__name__}: {message.splitlines()[0] if message else ''}"
