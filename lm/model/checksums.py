"""Checksums of the files in a folder: written as `sha256sum -c SHA256SUMS` reads them, compared.

A run's tokenizer, its checkpoints and its exports are vouched for by these. The file travels with
an exported checkpoint, so that loading one can tell whether it is what was exported.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

SUMS = "SHA256SUMS"

# Device, inode, size and times of a file → its checksum, of those that this process has read. The
# change time is the system's own: a copy or `touch` cannot set it back.
_read: dict[tuple[int, ...], str] = {}


def sha256(path: Path, once: bool = False) -> str:
    """The checksum of a file.

    Args:
        once: where the file looks as it did when this process read it, it is not read again.
    """
    before = _fingerprint(path)
    if once and before in _read:
        return _read[before]
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if _fingerprint(path) == before:
        _read[before] = digest
    return digest


def trust(folder: Path, sums: Mapping[str, str]) -> None:
    """Take these for the checksums of files that were just written, until they change."""
    for name, digest in sums.items():
        _read[_fingerprint(folder / name)] = digest


def difference(folder: Path, sums: Mapping[str, str], once: bool = False) -> str:
    """What is wrong with the first file that is not what its checksum says; "" where all are.

    Args:
        sums: of each file, by its name in the folder. once: as `sha256`.
    """
    for name, digest in sums.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if sha256(path, once) != digest:
            return f"{name} is damaged, or was changed (its SHA-256 differs)"
    return ""


def write_sums(folder: Path, names: Iterable[str]) -> None:
    """Vouch for these files, as they are, in the folder's SHA256SUMS."""
    lines = [f"{sha256(folder / name)}  {name}\n" for name in sorted(names)]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def read_sums(folder: Path) -> dict[str, str]:
    """The checksums in a folder's SHA256SUMS, by the files' names; none where there is no such file
    (versions before it wrote none).

    Raises:
        ValueError: it is damaged.
    """
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    sums = {}
    for line in lines:
        digest, _, name = line.partition("  ")
        if len(digest) != 64 or not name or os.path.basename(name) != name:
            raise ValueError(f"{folder / SUMS} is damaged: {line[:80]!r} is no checksum of a file")
        sums[name] = digest
    if not sums:
        raise ValueError(f"{folder / SUMS} is damaged: it is empty")
    return sums


def refuse_changed(folder: Path | str, is_wanted: Callable[[str], bool] = lambda _: True) -> None:
    """Refuse a folder whose files are not what its SHA256SUMS says; one without such a file is
    taken. A file is read once, until it changes.

    Args:
        is_wanted: of those that it lists, which names are looked at.
    Raises:
        ValueError: a file is missing, damaged or was changed; or SHA256SUMS is damaged.
    """
    folder = Path(folder)
    sums = {name: digest for name, digest in read_sums(folder).items() if is_wanted(name)}
    how = difference(folder, sums, once=True)
    if sums and not how:  # a list that lost the line of the weights would vouch for any
        weights = (path.name for path in folder.glob("model*.safetensors") if is_wanted(path.name))
        how = next((f"{name} is not listed in {SUMS}" for name in weights if name not in sums), "")
    if how:
        raise ValueError(
            f"{folder / how}: bring back the file that {SUMS} is of, or where the change is meant,"
            f" delete {SUMS}"
        )


def forget(folder: Path | str) -> None:
    """Nobody vouches any more for the files in a folder: they are about to be replaced."""
    path = Path(folder) / SUMS
    if path.is_file():
        path.unlink()


def _fingerprint(path: Path) -> tuple[int, ...]:
    stat = os.stat(path)
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
