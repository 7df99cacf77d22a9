"""Code in an export besides the files of lm/model: the kernels, and custom mixers.

An export is a flat folder, whose files import each other by `from .file import name`. The file of a
custom mixer is rewritten accordingly. It may import names from lm.model, whose files are in the
export as well, and installed packages.
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

KERNELS_LINE = "FILES: dict[str, str] = {}"  # line of bundled_kernels.py that the kernels replace
MODEL_IMPORT = re.compile(r"^(\s*)from\s+lm\.model\.(\w+)\s+import\b(?!\s*\*)", re.MULTILINE)


class ExportError(UserError, RuntimeError):
    """Model that cannot be exported, or folder that it cannot be exported to."""


def find_custom_mixers(model: PreTrainedModel) -> dict[str, type]:
    """Return the mixers of a model that are not built in, as {name in the config: class}."""
    from lm.model.fixed_point import FixedPointBlock
    from lm.model.mixer_base import MIXERS, is_built_in

    blocks = (m for m in model.modules() if isinstance(m, FixedPointBlock))
    used = {block.config.mixer: MIXERS[block.config.mixer] for block in blocks}
    return {name: cls for name, cls in used.items() if not is_built_in(cls)}


def flatten_mixer_files(mixers: dict[str, type]) -> dict[str, str]:
    """Return the files that define custom mixers, rewritten for a flat folder.

    Args:
        mixers: As `find_custom_mixers` returns them.

    Returns:
        File name → text.

    Raises:
        ExportError: If a mixer is not defined in a file, or its file has the name of a file of
            lm/model, or imports a module that the export does not contain.
    """
    import lm.model

    model_files = {path.name for path in Path(lm.model.__file__).parent.glob("*.py")}
    sources: dict[str, Path] = {}
    for cls in mixers.values():
        path, name = _source(cls), f"{cls.__module__.rpartition('.')[2]}.py"
        if name in model_files or sources.get(name, path) != path:
            other = sources.get(name, f"the {name} that every export has")
            raise ExportError(
                f"the mixer {cls.__name__} is defined in {path}, which would be exported as {name},"
                f" like {other}: rename its file"
            )
        sources[name] = path
    return {name: _flatten(path, model_files) for name, path in sources.items()}


def write_mixers(folder: Path, mixers: dict[str, type], files: dict[str, str]) -> None:
    """Add custom mixers to a folder that `save_pretrained` has written.

    The folder's mixers.py then registers them, and its config.json gets the `model_type` of models
    that need the code of their folder.
    """
    from lm.model.configuration_fprnn import MODEL_TYPES

    if not mixers:
        return
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    lines = ["", "", "from .mixer_base import register"]
    for i, (name, cls) in enumerate(mixers.items()):
        module = cls.__module__.rpartition(".")[2]
        lines += [f"from .{module} import {cls.__name__} as custom_{i}"]
        lines += [f"register({name!r}, custom_{i})"]
    with (folder / "mixers.py").open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    built_in, custom = (f'    model_type = "{name}"\n' for name in MODEL_TYPES)
    _replace_line(folder / "configuration_fprnn.py", built_in, custom)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["model_type"] = MODEL_TYPES[1]
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def write_kernels(folder: Path) -> None:
    """Add the files of lm/kernels to a folder that `save_pretrained` has written.

    They become strings in operators.py, so that the model is as fast without fprnn installed.
    """
    import lm.common.errors
    import lm.common.secrets
    import lm.kernels

    package = Path(lm.kernels.__file__).parent
    sources = [
        path for path in sorted(package.rglob("*")) if path.suffix in (".py", ".h", ".cpp", ".cu")
    ]
    files = {path.relative_to(package).as_posix(): path for path in sources}
    for module in (lm.common.errors, lm.common.secrets):  # the kernels import them
        assert module.__file__ is not None
        files[Path(module.__file__).name] = Path(module.__file__)
    # One string per line: transformers takes lines of code that start with `import` for imports.
    lines = ["FILES: dict[str, str] = {"]
    for name, path in files.items():
        text = path.read_text(encoding="utf-8")
        lines += [f"    {name!r}: ("]
        lines += [f"        {line!r}" for line in text.splitlines(keepends=True)]
        lines += ["    ),"]
    _replace_line(folder / "bundled_kernels.py", KERNELS_LINE, "\n".join([*lines, "}"]))


def _replace_line(file: Path, line: str, text: str) -> None:
    """Replace a line of a file, which must contain it once."""
    content = file.read_text(encoding="utf-8")
    count = content.count(line)
    assert count == 1, f"{file} has the line `{line.strip()}` {count} times"
    file.write_text(content.replace(line, text), encoding="utf-8")


def _source(cls: type) -> Path:
    """Return the file that defines a class.

    Raises:
        ExportError: If there is no file, or the class is not at the top level of its module.
    """
    file = getattr(sys.modules[cls.__module__], "__file__", None)
    if cls.__module__ == "__main__" or file is None or not file.endswith(".py"):
        raise ExportError(
            f"the mixer {cls.__name__} is defined in {cls.__module__}, which cannot be exported:"
            " move it to a .py file and import it from there"
        )
    if "." in cls.__qualname__:
        raise ExportError(
            f"the mixer {cls.__qualname__} of {file} is nested: move it to the top level of its"
            " module, so that an export can import it"
        )
    return Path(file)


def _flatten(path: Path, model_files: set[str]) -> str:
    """Return the text of a mixer's file, with `from lm.model.file` rewritten to `from .file`.

    Args:
        path: File of the mixer.
        model_files: Names of the files of lm/model.

    Raises:
        ExportError: If it imports a module that the export does not contain.
    """
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = ["." * node.level + (node.module or "")]
            match = MODEL_IMPORT.match(lines[node.lineno - 1])
            if match is not None and f"{match[2]}.py" in model_files:
                continue
        else:
            continue
        for module in modules:
            if not _is_installed(module):
                raise ExportError(
                    f"{path}:{node.lineno} imports {module}, which the export does not contain:"
                    f" only {path.name} is exported; move the code into it, write `from"
                    " lm.model.FILE import NAME`, or import an installed package"
                )
    return MODEL_IMPORT.sub(r"\1from .\2 import", text)


def _is_installed(module: str) -> bool:
    """Return whether a module is in the standard library or an installed package, or optional."""
    top = module.split(".")[0]
    if top in ("", "lm"):
        return False
    spec = None if top in sys.stdlib_module_names else importlib.util.find_spec(top)
    if spec is None:  # in the standard library, or an optional package that is not installed
        return True
    paths = [spec.origin] if spec.origin else list(spec.submodule_search_locations or [])
    folders = {"site-packages", "dist-packages"}
    return all(folders & set(Path(path).parts) for path in paths)
