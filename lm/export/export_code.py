"""Code that an export brings along next to the files of lm/model: kernels, and a user's own mixer.

An export is flat: its files import each other as `from .file import name`. So does the copy of a
mixer's file. The mixer may import names from lm.model, whose files are there too, and installed
packages.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lm.common.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KERNELS_LINE = "FILES: dict[str, str] = {}"  # of bundled_kernels.py
OF_MODEL = re.compile(r"^(\s*)from\s+lm\.model\.(\w+)\s+import\b(?!\s*\*)", re.MULTILINE)


class ExportError(UserError, RuntimeError):
    """An export that cannot be made; the message says why."""


def own_mixers(model: PreTrainedModel) -> dict[str, type]:
    """Return the mixers of a model that are not built in: `model.mixer` → class."""
    from lm.model.fixed_point import FixedPointBlock
    from lm.model.mixer_base import MIXERS, is_built_in

    blocks = (m for m in model.modules() if isinstance(m, FixedPointBlock))
    used = {block.config.mixer: MIXERS[block.config.mixer] for block in blocks}
    return {name: cls for name, cls in used.items() if not is_built_in(cls)}


def mixer_files(mixers: dict[str, type]) -> dict[str, str]:
    """Return the name and the flat text of the files that define these mixers.

    Raises:
        ExportError: If a mixer is not in a file, or its file has the name of one of ours or imports
            something that would not be there.
    """
    import lm.model

    ours = {path.name for path in Path(lm.model.__file__).parent.glob("*.py")}
    sources: dict[str, Path] = {}
    for cls in mixers.values():
        path, name = _source(cls), f"{cls.__module__.rpartition('.')[2]}.py"
        if name in ours or sources.get(name, path) != path:
            whose = sources.get(name, f"the {name} that every export has")
            raise ExportError(
                f"the mixer {cls.__name__} is in {path}, which would travel as {name}, and so does"
                f" {whose}: rename its file"
            )
        sources[name] = path
    return {name: _flatten(path, ours) for name, path in sources.items()}


def write_mixers(folder: Path, mixers: dict[str, type], files: dict[str, str]) -> None:
    """Put a user's mixers into a folder that `save_pretrained` has written.

    mixers.py registers them, and the model gets the `model_type` of checkpoints that need their own
    code.
    """
    from lm.model.configuration_fprnn import MODEL_TYPES

    if not mixers:
        return
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    lines = ["", "", "from .mixer_base import register"]
    for i, (name, cls) in enumerate(mixers.items()):
        module = cls.__module__.rpartition(".")[2]
        lines += [f"from .{module} import {cls.__name__} as own_{i}"]
        lines += [f"register({name!r}, own_{i})"]
    with (folder / "mixers.py").open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    plain, own = (f'    model_type = "{name}"\n' for name in MODEL_TYPES)
    _replace_line(folder / "configuration_fprnn.py", plain, own)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["model_type"] = MODEL_TYPES[1]
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def write_kernels(folder: Path) -> None:
    """Put the text of lm/kernels into the code of a folder that `save_pretrained` has written, so
    that it computes as fast where fprnn is not installed."""
    import lm.common.errors
    import lm.common.secrets
    import lm.kernels

    package = Path(lm.kernels.__file__).parent
    places = [path for path in sorted(package.rglob("*")) if path.suffix in (".py", ".h", ".cpp")]
    files = {path.relative_to(package).as_posix(): path for path in places}
    for module in (lm.common.errors, lm.common.secrets):  # the kernels import them
        assert module.__file__ is not None
        files[Path(module.__file__).name] = Path(module.__file__)
    # Line by line, and quoted: transformers looks for imports by the beginnings of lines.
    lines = ["FILES: dict[str, str] = {"]
    for name, path in files.items():
        text = path.read_text(encoding="utf-8")
        lines += [f"    {name!r}: ("]
        lines += [f"        {line!r}" for line in text.splitlines(keepends=True)]
        lines += ["    ),"]
    _replace_line(folder / "bundled_kernels.py", KERNELS_LINE, "\n".join([*lines, "}"]))


def _replace_line(file: Path, line: str, text: str) -> None:
    before = file.read_text(encoding="utf-8")
    count = before.count(line)
    assert count == 1, f"{file} has the line `{line.strip()}` {count} times"
    file.write_text(before.replace(line, text), encoding="utf-8")


def _source(cls: type) -> Path:
    """Return the file of a class.

    Raises:
        ExportError: If it is in none, or not at the top of its module.
    """
    file = getattr(sys.modules[cls.__module__], "__file__", None)
    if cls.__module__ == "__main__" or file is None or not file.endswith(".py"):
        raise ExportError(
            f"the mixer {cls.__name__} is defined in {cls.__module__}, which cannot travel with the"
            " export: put it into a .py file of its own and import it from there"
        )
    if "." in cls.__qualname__:
        raise ExportError(
            f"the mixer {cls.__qualname__} of {file} is defined inside something else: put it at"
            " the top of its module, so that an export can import it"
        )
    return Path(file)


def _flatten(path: Path, ours: set[str]) -> str:
    """Return the text of a mixer's file with its imports of lm.model as those of a flat folder.

    Args:
        path: The mixer's file.
        ours: Names of the files of lm/model.

    Raises:
        ExportError: If it imports something that will not be there.
    """
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = ["." * node.level + (node.module or "")]
            found = OF_MODEL.match(lines[node.lineno - 1])
            if found is not None and f"{found[2]}.py" in ours:
                continue
        else:
            continue
        for module in modules:
            if not _is_installed(module):
                raise ExportError(
                    f"{path}:{node.lineno} imports {module}, which would not be there: a mixer"
                    f" travels as one file, {path.name}; put what it needs into it, write `from"
                    " lm.model.FILE import NAME`, or import an installed package"
                )
    return OF_MODEL.sub(r"\1from .\2 import", text)


def _is_installed(module: str) -> bool:
    """Return whether a module is Python's own, an installed package, or an optional one."""
    top = module.split(".")[0]
    if top in ("", "lm"):
        return False
    spec = None if top in sys.stdlib_module_names else importlib.util.find_spec(top)
    if spec is None:  # Python's own, or an optional one that is not here
        return True
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or [])
    folders = {"site-packages", "dist-packages"}
    return all(folders & set(Path(place).parts) for place in places)
