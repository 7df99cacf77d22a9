"""The folder of an export: who may write there, and how an earlier export of it is replaced.

Only files that an export wrote are replaced or deleted; `.fprnn.json` lists them. Everything else,
such as results of `fprnn eval` or a `.git` folder, stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import lm
from lm.common.files import check_folder, printable, read_mapping, write_json, writing
from lm.export.export_code import ExportError
from lm.model.checksums import SUMS, read_sums
from lm.runs.written import CARD, EVALUATIONS, EXPORT_RECORD, delete_files, export_files

# Earlier versions wrote the scores of `fprnn eval` between these lines of a card.
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def check_place(out: Path, source: dict | None, overwrite: bool) -> None:
    """Refuse a folder that this export must not be written to, before there is anything to write.

    Args:
        out: Folder of the export.
        source: Run or checkpoint that is exported, as recorded in `.fprnn.json`; None: not known
            yet.
        overwrite: Replace an export of another run, and a model card that a person has changed.

    Raises:
        ExportError: If `out` holds something else.
        OutputError: If it cannot be written.
    """
    with writing(out):
        is_file = out.is_file()
        is_filled = out.is_dir() and any(out.iterdir())
        own = export_files(out) if is_filled else set()
    if is_file:
        raise ExportError(f"{out} is a file: an export is a folder")
    if is_filled and not own:
        raise ExportError(f"{out} is not empty and holds no earlier export: choose another folder")
    check_folder(out)
    if own and source is not None and not overwrite:
        _refuse_other_source(out, source)
        _refuse_changed_card(out)


def _refuse_other_source(out: Path, source: dict) -> None:
    record = read_mapping(out / EXPORT_RECORD)
    if record is None:  # an earlier version's, whose card has the name as its title
        title = re.search(r"^# (.*)$", _card(out), re.MULTILINE)
        previous = {"name": title[1] if title else None}
        source = {"name": source["name"]}
    else:
        previous = record.get("source") or {}
    if previous != source:
        name, same = printable(str(previous.get("name"))), previous.get("name") == source["name"]
        kind = "another run of the same name" if same else f"another run, `{name}`"
        raise ExportError(
            f"{out} holds the export of {kind}: choose another folder, or replace it with"
            " --overwrite"
        )


def _refuse_changed_card(out: Path) -> None:
    written = (read_mapping(out / EXPORT_RECORD) or {}).get("card")
    if written is not None and (out / CARD).is_file() and written != _card_digest(_card(out)):
        raise ExportError(
            f"{out / CARD} was changed since it was exported: move it away, or replace it with"
            " --overwrite"
        )


def _card(out: Path) -> str:
    try:
        return (out / CARD).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _card_digest(text: str) -> str:
    """Return the checksum of a card, without the scores that an earlier version wrote into it."""
    before, _, rest = text.partition(BEGIN)
    return hashlib.sha256((before + rest.partition(END)[2]).encode()).hexdigest()


def write_record(folder: Path, source: dict | None) -> None:
    """Write `.fprnn.json`: the version, the source and the files of an export that is complete."""
    files = sorted(path.name for path in folder.iterdir() if path.name != EXPORT_RECORD)
    record = {"fprnn": lm.__version__, "source": source, "files": files}
    write_json(folder / EXPORT_RECORD, record | {"card": _card_digest(_card(folder))})
    shutil.copymode(folder / "config.json", folder / EXPORT_RECORD)


def publish(new: Path, out: Path) -> None:
    """Move a finished export into its place.

    A kill between two files leaves a folder that is still known for an export, and whose SHA256SUMS
    no model is loaded against: the same command exports it again.

    Args:
        new: Folder of the new export, in the same file system as `out`.
        out: Empty or absent, or an earlier export, whose files are replaced one by one.

    Raises:
        ExportError: If `out` has a file of the same name that no export wrote there, or another
            process exports there now.
    """
    if not out.exists() or not any(out.iterdir()):
        os.replace(new, out)
        return
    with _locked(out) as is_ours:
        if not is_ours:
            raise ExportError(f"{out} is being exported to by another process: try again")
        _replace(new, out)


def _replace(new: Path, out: Path) -> None:
    names = {path.name for path in new.iterdir()}
    own = export_files(out)
    if taken := sorted(name for name in names - own if os.path.lexists(out / name)):
        raise ExportError(
            f"{out} has a file {taken[0]} that no export wrote there: move it away, or choose"
            " another folder"
        )
    is_other = _source(out) is not None and _source(out) != _source(new)
    has_same_weights = not is_other and _weight_sums(out) == _weight_sums(new) != {}
    record = read_mapping(new / EXPORT_RECORD) or {}
    write_json(out / EXPORT_RECORD, record | {"files": sorted((names | own) - {EXPORT_RECORD})})
    for name in (SUMS, *sorted(names - {SUMS, EXPORT_RECORD})):
        os.replace(new / name, out / name)
    stale = own - names | (set(EVALUATIONS) if is_other else set())
    delete_files(out, stale.__contains__)
    os.replace(new / EXPORT_RECORD, out / EXPORT_RECORD)
    measured = [name for name in EVALUATIONS if (out / name).is_file()]
    if measured and not has_same_weights:
        kept = f"{', '.join(measured)} in {out}"
        print(f"note: {kept}: kept, and measured on the weights before", file=sys.stderr)


def _source(folder: Path) -> dict | None:
    return (read_mapping(folder / EXPORT_RECORD) or {}).get("source")


def _weight_sums(folder: Path) -> dict[str, str]:
    try:
        sums = read_sums(folder)
    except (OSError, ValueError):
        return {}
    return {name: sums[name] for name in sums if name.endswith((".safetensors", "config.json"))}


@contextlib.contextmanager
def draft(out: Path) -> Iterator[Path]:
    """Yield a new folder next to `out`, to be filled and published.

    Drafts that a killed export left there are deleted. A lock on a draft, which ends with its
    process, marks it as in use.
    """
    name = re.compile(rf"\.{re.escape(out.name)}-[a-z0-9_]{{8}}")
    for path in out.parent.iterdir():
        if name.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            with _locked(path) as is_ours:
                if is_ours and {entry.name for entry in path.iterdir()} <= {"export"}:
                    shutil.rmtree(path, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder,
        _locked(Path(folder)),
    ):
        yield Path(folder)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold a folder's lock within the block; yield False where another process has it."""
    number = os.open(folder, os.O_RDONLY)
    is_ours = False
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = True
        yield is_ours
    finally:
        os.close(number)
