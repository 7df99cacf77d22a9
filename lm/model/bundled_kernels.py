"""The kernels that an export brings along, for where fprnn is not installed.

`fprnn export` writes the text of lm/kernels into FILES (lm/export/export_code.py); here it is
empty. At first use they are written to the user's cache as a package of their own, and g++ compiles
the CPU's there.
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
LOCK = threading.Lock()  # around the first import
FILES: dict[str, str] = {}  # path in the package → text


def load_bundled_kernels() -> ModuleType | None:
    """Return the package made of FILES, or None if there are none.

    Raises:
        OSError, RuntimeError: there is no place to write them to.
    """
    if not FILES:
        return None
    digest = hashlib.sha256("\0".join(f"{k}\0{v}" for k, v in sorted(FILES.items())).encode())
    name = f"fprnn_kernels_{digest.hexdigest()[:16]}"  # two exports may bring two versions
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
    """The folder in the user's cache that holds FILES; what was changed there is not run."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    parent = Path(base) / "fprnn" / "kernels"
    # The name holds the digest of the texts: what they import of lm is beside them.
    texts = {
        file: text.replace("lm.kernels", name).replace("lm.common.", f"{name}.")
        for file, text in FILES.items()
    }
    folder = parent / name
    if all(_reads(folder / file) == text for file, text in texts.items()):
        _refuse_if_open(folder)
        return folder
    logger.warning(f"{SAID}, from {folder}; on a CPU the first use compiles them (up to a minute)")
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Other processes may do the same: each file is written beside its place, then moved there.
    folder.mkdir(exist_ok=True, mode=0o700)
    _refuse_if_open(folder)
    with tempfile.TemporaryDirectory(dir=parent) as own:
        for file, text in texts.items():
            written = Path(own) / Path(file).name
            written.write_text(text, encoding="utf-8")
            (folder / file).parent.mkdir(exist_ok=True, mode=0o700)
            os.replace(written, folder / file)
    return folder


def _refuse_if_open(folder):
    """Raises OSError where others than this user may write into it: their files would run."""
    for place in (folder, folder.parent):
        found = place.stat()
        if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o022):
            raise OSError(f"{place} is not this user's alone to write in")


def _reads(file):
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
