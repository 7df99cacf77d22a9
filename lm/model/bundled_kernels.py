"""Kernels in an export, for machines on which fprnn is not installed.

In the export's copy of this file, FILES contains the text of lm/kernels (lm/export/export_code.py);
in this repository FILES is empty. At first use, the files are written to a folder in the user's
cache and imported as a package, which compiles the CPU kernels with g++.
"""

import hashlib
import importlib.util
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType

from transformers.utils import logging

logger = logging.get_logger(__name__)

NOTE = "fprnn is not installed: the kernels that came with the model are used"
LOCK = threading.Lock()  # held during the first import
FILES: dict[str, str] = {}  # path within lm/kernels → text


def load_bundled_kernels() -> ModuleType | None:
    """Return the package with the text of FILES, or None if FILES is empty.

    Raises:
        OSError: If the files cannot be written to the cache.
        RuntimeError: If the user has no home directory.
    """
    if not FILES:
        return None
    content = "\0".join(f"{file}\0{text}" for file, text in sorted(FILES.items()))
    digest = hashlib.sha256(content.encode()).hexdigest()
    name = f"fprnn_kernels_{digest[:16]}"  # exports of two versions have two names
    with LOCK:
        return sys.modules.get(name) or _import_package(name)


def _import_package(name):
    """Write the package `name` to the cache and import it."""
    folder = _write_package(name)
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _write_package(name):
    """Write FILES into the folder `name` of the user's cache, and return the folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    parent = Path(cache) / "fprnn" / "kernels"
    # The files import each other as `lm.kernels.…` (two of them as `lm.common.…`); here these names
    # become the package's.
    texts = {
        file: text.replace("lm.kernels", name).replace("lm.common.", f"{name}.")
        for file, text in FILES.items()
    }
    folder = parent / name
    if all(_read(folder / file) == text for file, text in texts.items()):
        _refuse_if_writable_by_others(folder)
        return folder
    logger.warning(f"{NOTE}, from {folder}; on a CPU the first use compiles them (up to a minute)")
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Other processes may write the same files, so each file is written elsewhere and then moved.
    folder.mkdir(exist_ok=True, mode=0o700)
    _refuse_if_writable_by_others(folder)
    with tempfile.TemporaryDirectory(dir=parent) as temporary:
        for file, text in texts.items():
            copy = Path(temporary) / Path(file).name
            copy.write_text(text, encoding="utf-8")
            (folder / file).parent.mkdir(exist_ok=True, mode=0o700)
            os.replace(copy, folder / file)
    return folder


def _refuse_if_writable_by_others(folder):
    """Raise OSError if other users may write into the folder: their code would run."""
    if not hasattr(os, "getuid"):  # Windows
        return
    for checked in (folder, folder.parent):
        stat = checked.stat()
        if stat.st_uid != os.getuid() or stat.st_mode & 0o022:  # writable by group or others
            raise OSError(f"other users may write into {checked}")


def _read(file):
    """Return the text of a file, or None if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
