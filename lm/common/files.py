"""Where results go: whether they can be written there, and files that are whole or not there."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lm.common.errors import UserError

# Of C0 and C1, but for tab and newline; and what turns the direction of writing.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # Path makes one slash of two


class OutputError(UserError, RuntimeError):
    """A place that results cannot be written to; the message says which, and why."""


class DamagedError(UserError, RuntimeError):
    """A file of ours that no longer holds what was written; the message says which."""


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
    _refuse_url(path)
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


def _refuse_url(path: Path) -> None:
    """Raise OutputError for `s3://…` or `https://…`, which would make a folder `s3:` here."""
    if URL.match(str(path)) and not Path(path.parts[0]).exists():
        raise OutputError(f"{path} is no place on this machine: name a folder or a file of it")


def check_file(path: Path | str) -> None:
    """Find out whether a file can be written; leaves no trace.

    Raises:
        OutputError: it cannot.
    """
    path = Path(path)
    _refuse_url(path)
    with writing(path):
        is_folder = path.is_dir()
        special = _is_special(path)
    if is_folder:
        raise OutputError(f"{path} is a folder: name a file in it")
    if special:  # a pipe's other end may not be there yet
        with writing(path):
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return
    with writing(path):
        real = resolve_link(path)
    check_folder(real.parent)
    with writing(path):
        if real.exists():
            with real.open("ab"):
                pass


def check_replaceable(path: Path | str, mark: str) -> None:
    """Find out whether a file can be written, and is not somebody else's; leaves no trace.

    Args:
        path: Place of the file.
        mark: Text that every file of the same kind by this program holds.

    Raises:
        OutputError: If it cannot be written, or a file without the mark is there.
    """
    path = Path(path)
    check_file(path)
    with writing(path):
        text = path.read_bytes() if path.is_file() else b""
    if text and mark.encode() not in text:
        raise OutputError(
            f"{path} is there already, and this command did not write it: name another place by"
            " --out, or move it away"
        )


def check_together(record: Path, mark: str, *paths: Path) -> None:
    """Find out whether files can be written that are known to be this program's by one of them.

    Args:
        record: File of text among or next to them.
        mark: Text that it holds if this program wrote it, and the others with it.
        paths: The files.

    Raises:
        OutputError: If one cannot be written, or is there without such a record.
    """
    check_replaceable(record, mark)
    for path in paths:
        check_file(path)
    with writing(record):
        present = [] if record.is_file() else [path for path in paths if path.is_file()]
    if present:
        raise OutputError(
            f"{present[0]} is there already, and this command did not write it (there is no"
            f" {record.name}): choose another folder, or move it away"
        )


@contextlib.contextmanager
def without_wildcards(folder: Path) -> Iterator[Path]:
    """Yield a path to `folder` that holds none of `*`, `?` and `[`, for a library that globs it.

    glob reads `exp[1]` as a pattern, does not match the folder of that name, and matches the folder
    `exp1` next to it.

    Raises:
        OutputError: If the folder of temporary files has such a character in its own path.
    """
    if not glob.has_magic(str(folder)):
        yield folder
        return
    with tempfile.TemporaryDirectory() as place:
        if glob.has_magic(place):
            raise OutputError(
                f"{folder} has a `*`, `?` or `[` in its path, which DeepSpeed takes for a pattern,"
                f" and so has the folder of temporary files, {tempfile.gettempdir()}: set TMPDIR to"
                " a folder without them"
            )
        link = Path(place) / "link"
        link.symlink_to(folder.resolve(), target_is_directory=True)
        yield link


def find_shipped(name: str) -> Path:
    """Return the path of a file that travels with the program, inside the repository or a wheel.

    Args:
        name: Path from the repository's root, such as `configs/lm/demo.yaml`. The package `fprnn`
            links to the folders `configs` and `launch`, and a wheel holds copies there.
    """
    # Path.resolve would raise for links in a circle.
    return Path(os.path.realpath(Path(__file__).parents[2] / "fprnn" / name))


def resolve_link(path: Path | str) -> Path:
    """Where a link leads, so that it stays one; any other path as it is, made absolute.

    Raises:
        OSError: it leads to itself.
    """
    real = Path(os.path.realpath(path))
    if real.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return real


def _is_special(path: Path) -> bool:
    """Whether this is neither a file nor a folder: a device, a pipe, a socket."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_text(path: Path | str, text: str | Iterable[str]) -> None:
    """Write a text so that a reader, also one after a power failure, sees the old file or the new
    one, never half of it. Of a link what it leads to is written; into a device or a pipe the text
    goes as it is.

    Args:
        path: File to write.
        text: The text, or its parts, which may be read from the old file meanwhile.

    Raises:
        OutputError: it cannot be written; the old file stands.
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
    """`write_text` of a value as JSON.

    Raises:
        OutputError: it cannot be written. TypeError: JSON cannot hold it; nothing is written.
    """
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def parse_json(text: str | bytes) -> Any:
    """What JSON says.

    Raises:
        ValueError: it is no JSON, no UTF-8, or nested so deep that nobody has written it.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_json(path: Path | str, keys: tuple[str, ...] = ()) -> dict:
    """What `write_json` has written: a mapping with (at least) these keys.

    Raises:
        DamagedError: it is something else now.
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


def check_kinds(
    path: Path | str, value: Any, kinds: dict[str, type | tuple], key: str = ""
) -> None:
    """Refuse a value of a file that has other kinds of things in it than were written there.

    Args:
        kinds: dotted keys → what they hold where they are there and not null: float (any number),
            int, str, list, dict; `*` stands for every entry of a list or mapping.
    Raises:
        DamagedError: names the first that is something else.
    """
    for name, kind in kinds.items():
        first, _, rest = name.partition(".")
        entries: dict = {}
        if first == "*" and isinstance(value, dict | list):
            entries = value if isinstance(value, dict) else dict(enumerate(value))
        elif isinstance(value, dict) and first in value:
            entries = {first: value[first]}
        for entry, found in entries.items():
            place = f"{key}.{entry}" if key else str(entry)
            if rest:
                check_kinds(path, found, {rest: kind}, place)
            elif found is not None and not _is_kind(found, kind):
                raise DamagedError(
                    f"{path} is damaged: `{place}` is {found!r:.60}, and was written as"
                    f" {KINDS[kind]}"
                )


KINDS: dict = {float: "a number", int: "a whole number", str: "text", list: "a list"}
KINDS |= {dict: "a mapping", (str, dict): "text or a mapping"}


def _is_kind(value: Any, kind: type | tuple) -> bool:
    return isinstance(value, (int, float) if kind is float else kind) and value is not True


def read_mapping(path: Path | str) -> dict | None:
    """A JSON mapping as whoever looks on finds it: None where there is no file; {} where it holds
    something else, is being written, or cannot be read."""
    try:
        value = parse_json(Path(path).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return printable(value) if isinstance(value, dict) else {}


def printable(value: Any) -> Any:
    """A value with the control characters of its texts written out: what a file says of itself
    moves no cursor and sets no title of the terminal that it is shown on."""
    if isinstance(value, str):
        return CONTROL.sub(lambda found: repr(found[0])[1:-1], value)
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    return [printable(item) for item in value] if isinstance(value, list) else value


def sync(path: Path | str) -> None:
    """Have the system put on the disk what was written to a file, or the names in a folder."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as e:
        if e.errno != errno.EINVAL:  # file systems that know no such thing for a folder
            raise
    finally:
        os.close(number)
