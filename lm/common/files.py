"""Checks of output paths, atomic writes, and reading of JSON files that this program wrote."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lm.common.errors import UserError, exit_status

# Control characters C0 and C1, except tab and newline, and characters that change the direction of
# the text.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # one slash: Path turns `s3://a` into `s3:/a`


class OutputError(UserError, RuntimeError):
    """An output path that cannot be written; the message names the path and the reason."""


class DamagedError(UserError, RuntimeError):
    """A file of this program whose content was changed; the message names the file."""


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Convert every OSError in the block to an OutputError about `path`.

    Raises:
        OutputError: If the block raises OSError.
    """
    try:
        yield
    except OSError as e:
        error = OutputError(f"{path} cannot be written: {e.strerror or e}")
        error.exit_status = exit_status(e)
        raise error from None


def check_folder(path: Path | str) -> None:
    """Check that files can be written in a folder that exists or can be created.

    The check leaves no trace.

    Raises:
        OutputError: If they cannot be written.
    """
    path = Path(path)
    _refuse_url(path)
    missing = []  # folders to create, the innermost first
    with writing(path):
        for existing in (path, *path.parents):
            if existing.exists():
                break
            missing.append(existing)
        is_file = not existing.is_dir()
    if is_file:
        name = "it" if existing == path else str(existing)
        raise OutputError(f"{path} cannot be a folder to write to: {name} is a file")
    with writing(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        finally:
            for folder in missing:
                # Fails if the folder was not created, or another process has put files into it.
                with contextlib.suppress(OSError):
                    folder.rmdir()


def _refuse_url(path: Path) -> None:
    """Raise OutputError for `s3://…` or `https://…`, for which mkdir would create `s3:`."""
    if URL.match(str(path)) and not Path(path.parts[0]).exists():
        raise OutputError(f"{path} is not on this machine: name a local folder or file")


def check_file(path: Path | str) -> None:
    """Check that a file can be written. The check leaves no trace.

    Raises:
        OutputError: If it cannot be written.
    """
    path = Path(path)
    _refuse_url(path)
    with writing(path):
        is_folder = path.is_dir()
        is_special = _is_special(path)
    if is_folder:
        raise OutputError(f"{path} is a folder: name a file in it")
    if is_special:  # do not open it: opening a pipe would wait for its reader
        with writing(path):
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return
    with writing(path):
        target = resolve_link(path)
    check_folder(target.parent)
    with writing(path):
        if target.exists():
            with target.open("ab"):
                pass


def check_replaceable(path: Path | str, mark: str) -> None:
    """Check that a file can be written and that this program wrote the existing one, if any.

    The check leaves no trace.

    Args:
        path: Path of the file.
        mark: Text that every file of this kind contains if this program wrote it.

    Raises:
        OutputError: If it cannot be written, or if a file without the mark exists.
    """
    path = Path(path)
    check_file(path)
    with writing(path):
        text = path.read_bytes() if path.is_file() else b""
    if text and mark.encode() not in text:
        raise OutputError(
            f"{path} is there already, and this command did not write it: choose another path with"
            " --out, or move it away"
        )


def check_replaceable_with_record(record: Path, mark: str, *paths: Path) -> None:
    """Check that files can be written, and that existing ones were written by this program.

    Args:
        record: Text file that this program writes together with the files; it may be among them.
        mark: Text that the record contains if this program wrote it.
        paths: The files.

    Raises:
        OutputError: If a file cannot be written, or if a file exists without such a record.
    """
    check_replaceable(record, mark)
    for path in paths:
        check_file(path)
    with writing(record):
        existing = [path for path in paths if path.is_file()]
        has_record = record.is_file()
    if existing and not has_record:
        raise OutputError(
            f"{existing[0]} is there already, and this command did not write it (there is no"
            f" {record.name}): choose another folder, or move it away"
        )


@contextlib.contextmanager
def without_wildcards(folder: Path) -> Iterator[Path]:
    """Yield a path to `folder` without `*`, `?` and `[`, for a library that passes it to glob.

    glob reads `exp[1]` as a pattern: it does not match the folder of that name, but the folder
    `exp1` next to it.

    Raises:
        OutputError: If the path of the folder for temporary files contains such a character.
    """
    if not glob.has_magic(str(folder)):
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        if glob.has_magic(temporary):
            raise OutputError(
                f"{folder} has a `*`, `?` or `[` in its path, which DeepSpeed takes for a pattern,"
                f" and so has the folder for temporary files, {tempfile.gettempdir()}: set TMPDIR"
                " to a folder without them"
            )
        link = Path(temporary) / "link"
        link.symlink_to(folder.resolve(), target_is_directory=True)
        yield link


def find_shipped(name: str) -> Path:
    """Return the path of a file that is distributed with the program, in a checkout or a wheel.

    Args:
        name: Path from the repository's root, such as `configs/lm/demo.yaml`. In a checkout the
            package `fprnn` has links to the folders `configs` and `launch`, in a wheel copies.
    """
    # Path.resolve would raise for circular links.
    return Path(os.path.realpath(Path(__file__).parents[2] / "fprnn" / name))


def resolve_link(path: Path | str) -> Path:
    """Return the absolute path of a file, with links followed.

    Writing to this path instead of the link keeps the link.

    Raises:
        OSError: If links are circular.
    """
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return target


def _is_special(path: Path) -> bool:
    """Return True for a device, a pipe or a socket."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_text(path: Path | str, text: str | Iterable[str]) -> None:
    """Write a text file atomically.

    A reader sees the whole old file or the whole new file, even after a power failure. A link is
    followed. A device or a pipe is written directly.

    Args:
        path: File to write.
        text: The text, or its parts, which may be read lazily from the old file.

    Raises:
        OutputError: If it cannot be written; the old file is then unchanged.
    """
    path = Path(path)
    parts = [text] if isinstance(text, str) else text
    with writing(path):
        if _is_special(path):
            with path.open("w", encoding="utf-8") as f:
                f.writelines(parts)
            return
        path = resolve_link(path)
        tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with tmp.open("w", encoding="utf-8") as f:
                f.writelines(parts)
            sync(tmp)
            os.replace(tmp, path)
        except OSError:
            with contextlib.suppress(OSError):
                tmp.unlink()
            raise
        sync(path.parent)


def write_json(path: Path | str, value: Any) -> None:
    """Write a value as JSON, with `write_text`.

    Raises:
        OutputError: If the file cannot be written.
        TypeError: If JSON cannot represent the value. Then nothing is written.
    """
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: If the text is not JSON or not UTF-8, or if it is nested too deep.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_json(path: Path | str, keys: tuple[str, ...] = ()) -> dict:
    """Read a mapping that `write_json` wrote.

    Args:
        path: File to read.
        keys: Keys that the mapping must contain.

    Raises:
        DamagedError: If the file cannot be read, is not JSON, or lacks a key.
    """
    try:
        value = parse_json(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise DamagedError(f"{path} cannot be read: {e.strerror or e}") from None
    except ValueError as e:  # JSONDecodeError and UnicodeDecodeError
        raise DamagedError(f"{path} is damaged: it is not JSON ({e})") from None
    if not isinstance(value, dict) or not set(keys) <= value.keys():
        raise DamagedError(f"{path} is damaged: it must hold {', '.join(keys)}")
    return value


def read_mapping(path: Path | str) -> dict | None:
    """Read a JSON mapping that another process may be writing.

    Returns:
        The mapping, with control characters escaped. None if there is no file; {} if the file
        cannot be read or contains something else.
    """
    try:
        value = parse_json(Path(path).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return printable(value) if isinstance(value, dict) else {}


def printable(value: Any) -> Any:
    """Return a value with the control characters of all its strings escaped.

    Without this, text from a file could move the cursor of a terminal or set its title.
    """
    if isinstance(value, str):
        return CONTROL.sub(lambda match: repr(match[0])[1:-1], value)
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    return [printable(item) for item in value] if isinstance(value, list) else value


@contextlib.contextmanager
def lock_folder(folder: Path, timeout_s: float = 0.0) -> Iterator[bool]:
    """Lock a folder within the block against other processes that lock it.

    Yield True if this process has the lock. Yield False if another process still has it after
    `timeout_s` seconds, or if the file system has no locks.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    deadline = time.monotonic() + timeout_s
    has_lock = False
    try:
        while not has_lock:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                has_lock = True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.01)
            except OSError:  # the file system has no locks
                break
        yield has_lock
    finally:
        os.close(descriptor)  # releases the lock


def sync(path: Path | str) -> None:
    """Flush a file's content, or a folder's list of names, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno != errno.EINVAL:  # some file systems cannot flush a folder
            raise
    finally:
        os.close(fd)
