"""Where results go: whether they can be written there, found out before the work."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lm.errors import UserError


class OutputError(UserError, RuntimeError):
    """A place that results cannot be written to; the message says which, and why."""


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Within the block, what the system refuses is said of `path`, in a sentence.

    Raises:
        OutputError: instead of any OSError.
    """
    try:
        yield
    except OSError as e:
        raise OutputError(f"{path} cannot be written: {e.strerror or e}") from None


def check_folder(path: Path | str) -> None:
    """Find out whether files can be written in a folder, there or to be made; leaves no trace.

    Raises:
        OutputError: they cannot.
    """
    path = Path(path)
    new = []  # innermost first
    with writing(path):
        for place in (path, *path.parents):
            if place.exists():
                break
            new.append(place)
        blocked = not place.is_dir()
    if blocked:
        what = "it" if place == path else str(place)
        raise OutputError(f"{path} cannot be a folder to write to: {what} is a file")
    with writing(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        finally:
            for place in new:
                with contextlib.suppress(OSError):  # never made, or filled by another meanwhile
                    place.rmdir()


def check_file(path: Path | str) -> None:
    """Find out whether a file can be written; leaves no trace.

    Raises:
        OutputError: it cannot.
    """
    path = Path(path)
    with writing(path):
        is_folder = path.is_dir()
    if is_folder:
        raise OutputError(f"{path} is a folder: name a file in it")
    check_folder(path.parent)
    with writing(path):
        if path.exists():
            with path.open("ab"):
                pass
