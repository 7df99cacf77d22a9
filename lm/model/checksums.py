"""Checksums of the files in a folder, in the format of `sha256sum -c SHA256SUMS`.

Tokenizers, checkpoints and exports have such a file. This module is part of every export, so that
loading an export detects changed files.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

SUMS = "SHA256SUMS"

# Fingerprint of a file (see `_fingerprint`) → checksum, for files that this process read or wrote.
_cache: dict[tuple[int, ...], str] = {}


def sha256(path: Path, use_cache: bool = False) -> str:
    """Return the SHA-256 checksum of a file.

    Args:
        path: The file.
        use_cache: Whether to return the cached checksum if size and times have not changed.
    """
    before = _fingerprint(path)
    if use_cache and before in _cache:
        return _cache[before]
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if _fingerprint(path) == before:  # otherwise the file changed while it was read
        _cache[before] = digest
    return digest


def cache_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Cache the checksums of files that were just written; sums: file name → checksum."""
    for name, digest in sums.items():
        _cache[_fingerprint(folder / name)] = digest


def describe_mismatch(folder: Path, sums: Mapping[str, str], use_cache: bool = False) -> str:
    """Describe the first file that does not match its checksum, name first; "" if all match.

    Args:
        folder: The folder.
        sums: File name → checksum.
        use_cache: As for `sha256`.
    """
    for name, digest in sums.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if sha256(path, use_cache) != digest:
            return f"{name} is damaged, or was changed (its SHA-256 differs)"
    return ""


def write_sums(folder: Path, names: Iterable[str]) -> None:
    """Write the checksums of these files to SHA256SUMS."""
    lines = [f"{sha256(folder / name)}  {name}\n" for name in sorted(names)]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def read_sums(folder: Path) -> dict[str, str]:
    """Return file name → checksum from SHA256SUMS; {} if there is no such file.

    Exports and tokenizers of the first versions have none.

    Raises:
        ValueError: If SHA256SUMS is damaged.
    """
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    sums = {}
    for line in lines:
        digest, _, name = line.partition("  ")
        is_file_name = name and os.path.basename(name) == name
        if len(digest) != 64 or not is_file_name:  # SHA-256 has 64 hexadecimal digits
            raise ValueError(f"{folder / SUMS} is damaged: {line[:80]!r} is no checksum of a file")
        sums[name] = digest
    if not sums:
        raise ValueError(f"{folder / SUMS} is damaged: it is empty")
    return sums


def refuse_changed(folder: Path | str, is_checked: Callable[[str], bool] = lambda _: True) -> None:
    """Refuse a folder whose files do not match its SHA256SUMS, or that has unlisted weights.

    A folder without SHA256SUMS is accepted. Cached checksums are used, so that a file is read once.

    Args:
        folder: The folder.
        is_checked: Function of a listed file's name that returns whether to check the file.

    Raises:
        ValueError: If a file is missing, damaged or changed, a file of weights is not listed, or
            SHA256SUMS is damaged.
    """
    folder = Path(folder)
    sums = read_sums(folder)
    checked = {name: digest for name, digest in sums.items() if is_checked(name)}
    problem = describe_mismatch(folder, checked, use_cache=True)
    if sums and not problem:  # weights that SHA256SUMS does not list would pass unchecked
        # transformers reads .bin files only without .safetensors files.
        weights = [*folder.glob("model*.safetensors")] or [*folder.glob("pytorch_model*.bin")]
        unlisted = sorted(path.name for path in weights if path.name not in sums)
        problem = f"{unlisted[0]} is not listed in {SUMS}" if unlisted else ""
    if problem:
        raise ValueError(
            f"{folder}/{problem}: restore the original file, or delete {SUMS} if the change is"
            " intended"
        )


def delete_sums(folder: Path | str) -> None:
    """Delete SHA256SUMS, before the files of the folder are replaced."""
    path = Path(folder) / SUMS
    if path.is_file():
        path.unlink()


def _fingerprint(path: Path) -> tuple[int, ...]:
    """Return device, inode, size and times of a file.

    Programs cannot set the change time (ctime), so `cp -p` and `touch` do not hide a change.
    """
    stat = os.stat(path)
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
