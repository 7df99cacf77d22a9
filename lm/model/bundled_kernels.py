"""Kernels in an export, for machines on which fprnn is not installed.

`fprnn export` writes the text of lm/kernels into FILES (lm/export/export_code.py); in this
repository FILES is empty. At first use the files are written to the user's cache as a package of
their own, in which g++ compiles the CPU kernels.
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

SAID = "fprnn is not installed: the kernels that came with the model are used"
LOCK = threading.Lock()  # held during the first import
FILES: dict[str, str] = {}  # path in the package → text


def load_bundled_kernels() -> ModuleType | None:
    """Return the package with the text of FILES, or None if FILES is empty.

    Raises:
        OSError: If the files cannot be written to the cache.
        RuntimeError: If the user has no home directory.
    """
    if not FILES:
        return None
    digest = hashlib.sha256("\0".join(f"{k}\0{v}" for k, v in sorted(FILES.items())).encode())
    name = f"fprnn_kernels_{digest.hexdigest()[:16]}"  # two exports may have two versions
    with LOCK:
        return sys.modules.get(name) or _import_package(name)


def _import_package(name):
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
    """Write FILES into a folder of the user's cache, replace changed files, and return it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    parent = Path(base) / "fprnn" / "kernels"
    # The files import each other and two modules of lm.common, which are in the same folder.
    texts = {
        file: text.replace("lm.kernels", name).replace("lm.common.", f"{name}.")
        for file, text in FILES.items()
    }
    folder = parent / name
    if all(_read(folder / file) == text for file, text in texts.items()):
        _refuse_if_open(folder)
        return folder
    logger.warning(f"{SAID}, from {folder}; on a CPU the first use compiles them (up to a minute)")
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Other processes may write the same files, so each is written elsewhere and then moved.
    folder.mkdir(exist_ok=True, mode=0o700)
    _refuse_if_open(folder)
    with tempfile.TemporaryDirectory(dir=parent) as temporary:
        for file, text in texts.items():
            copy = Path(temporary) / Path(file).name
            copy.write_text(text, encoding="utf-8")
            (folder / file).parent.mkdir(exist_ok=True, mode=0o700)
            os.replace(copy, folder / file)
    return folder


def _refuse_if_open(folder):
    """Raise OSError if other users may write into the folder: their code would run."""
    for place in (folder, folder.parent):
        stat = place.stat()
        if hasattr(os, "getuid") and (stat.st_uid != os.getuid() or stat.st_mode & 0o022):
            raise OSError(f"other users may write into {place}")


def _read(file):
    """Return the text of a file, or None if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
