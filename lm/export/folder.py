"""Folder of an export: checks before writing, and replacement of an earlier export.

An export lists its files in `.fprnn.json`. A new export replaces or deletes only files that are
listed there. All other files, such as results of `fprnn eval` or a `.git` folder, are kept.

The *source* of an export is the run that was exported, as `identify_run` describes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import lm
from lm.common.files import check_folder, lock_folder, printable, read_mapping, write_json, writing
from lm.export.export_code import ExportError
from lm.model.checksums import SUMS, read_sums
from lm.runs.owned_files import CARD, EVALUATIONS, EXPORT_RECORD, delete_files, list_export_files


def check_out_folder(out: Path, source: dict | None, overwrite: bool) -> None:
    """Refuse a folder that an export must not overwrite.

    Args:
        out: Folder of the export.
        source: Source of the new export; None: not yet known, and not compared.
        overwrite: True to allow the export of another source, and a model card that was edited.

    Raises:
        ExportError: If `out` is not empty and no export, the export of another source, or its
            model card was edited.
        OutputError: If `out` cannot be written.
    """
    with writing(out):  # turns errors of the file system into OutputError
        is_file = out.is_file()
        has_files = out.is_dir() and any(out.iterdir())
        has_export = has_files and bool(list_export_files(out))
    if is_file:
        raise ExportError(f"{out} is a file: an export is a folder")
    if has_files and not has_export:
        raise ExportError(f"{out} is not empty and holds no earlier export: choose another folder")
    check_folder(out)
    if has_export and source is not None and not overwrite:
        _refuse_other_source(out, source)
        _refuse_changed_card(out)


def _refuse_other_source(out: Path, source: dict) -> None:
    """Raise ExportError if a folder holds the export of another source."""
    old_source = _read_source(out) or {}
    if old_source != source:
        has_same_name = old_source.get("name") == source["name"]
        old_name = printable(str(old_source.get("name")))
        old_run = "another run of the same name" if has_same_name else f"another run, `{old_name}`"
        raise ExportError(
            f"{out} holds the export of {old_run}: choose another folder, or replace it with"
            " --overwrite"
        )


def _refuse_changed_card(out: Path) -> None:
    """Raise ExportError if the model card was edited after it was exported."""
    digest = (read_mapping(out / EXPORT_RECORD) or {}).get("card")
    if digest is not None and (out / CARD).is_file() and digest != _digest_card(out):
        raise ExportError(
            f"{out / CARD} was changed since it was exported: move it away, or replace it with"
            " --overwrite"
        )


def _digest_card(out: Path) -> str:
    """Return the checksum of the model card, which may be absent."""
    path = out / CARD
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return hashlib.sha256(text.encode()).hexdigest()


def write_record(folder: Path, source: dict | None) -> None:
    """Write `.fprnn.json`: version, source, files and the card's checksum of a complete export."""
    record = {
        "fprnn": lm.__version__,
        "source": source,
        "files": sorted(path.name for path in folder.iterdir() if path.name != EXPORT_RECORD),
        "card": _digest_card(folder),
    }
    write_json(folder / EXPORT_RECORD, record)
    shutil.copymode(folder / "config.json", folder / EXPORT_RECORD)


def publish(new: Path, out: Path) -> None:
    """Move a finished export to its final folder.

    If the process is killed between two files, the folder still counts as an export, and loading
    the model fails because files do not match SHA256SUMS. Exporting again repairs the folder.

    Args:
        new: Folder of the new export, in the same file system as `out`.
        out: Empty or absent folder, or an earlier export, whose files are replaced one by one.

    Raises:
        ExportError: If `out` has a file of the same name that no export wrote, or another process
            is exporting to it.
    """
    if not out.exists() or not any(out.iterdir()):
        os.replace(new, out)
        return
    with lock_folder(out) as has_lock:
        if not has_lock:
            raise ExportError(f"another process is exporting to {out}: try again")
        _replace_export(new, out)


def _replace_export(new: Path, out: Path) -> None:
    """Replace the files of an earlier export in `out` by those in `new`."""
    names = {path.name for path in new.iterdir()}
    old_names = list_export_files(out)
    conflicts = sorted(name for name in names - old_names if os.path.lexists(out / name))
    if conflicts:
        raise ExportError(
            f"{out} has a file {conflicts[0]} that no export wrote there: move it away, or choose"
            " another folder"
        )
    is_other_source = _read_source(out) != _read_source(new)
    weight_sums = _read_weight_sums(new)
    has_same_weights = bool(weight_sums) and _read_weight_sums(out) == weight_sums
    # 1. List old and new files: if the process is killed, all of them belong to the export.
    record = read_mapping(new / EXPORT_RECORD) or {}
    all_names = sorted((names | old_names) - {EXPORT_RECORD})
    write_json(out / EXPORT_RECORD, record | {"files": all_names})
    # 2. Replace the checksums first: until all files are replaced, loading the model fails.
    for name in (SUMS, *sorted(names - {SUMS, EXPORT_RECORD})):
        os.replace(new / name, out / name)
    # 3. Delete files that the new export does not have, and evaluations of another source.
    stale_names = old_names - names | (set(EVALUATIONS) if is_other_source else set())
    delete_files(out, lambda name: name in stale_names)
    os.replace(new / EXPORT_RECORD, out / EXPORT_RECORD)
    evaluations = [name for name in EVALUATIONS if (out / name).is_file()]
    if evaluations and not has_same_weights:
        print(
            f"note: {', '.join(evaluations)} in {out} was measured on the previous weights",
            file=sys.stderr,
        )


def _read_source(folder: Path) -> dict | None:
    """Return the source that the record of an export names, or None without a record."""
    return (read_mapping(folder / EXPORT_RECORD) or {}).get("source")


def _read_weight_sums(folder: Path) -> dict[str, str]:
    """Return the checksums of the weights and of config.json, {} if they cannot be read."""
    try:
        sums = read_sums(folder)
    except (OSError, ValueError):
        return {}
    return {name: sums[name] for name in sums if name.endswith((".safetensors", "config.json"))}


@contextlib.contextmanager
def draft_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `out`, in which a new export is written.

    Also delete the temporary folders of killed exports: those that no process has locked. A process
    locks the folder that it uses, and the lock ends with the process.
    """
    pattern = re.compile(rf"\.{re.escape(out.name)}-[a-z0-9_]{{8}}")
    for path in out.parent.iterdir():
        if pattern.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            with lock_folder(path) as has_lock:
                # A folder with other files is not a draft.
                if has_lock and {entry.name for entry in path.iterdir()} <= {"export"}:
                    shutil.rmtree(path, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder,
        lock_folder(Path(folder)),
    ):
        yield Path(folder)
