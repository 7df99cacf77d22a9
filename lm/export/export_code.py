"""Code in an export besides the files of lm/model: the kernels, and custom mixers.

An export is a folder without subfolders, whose files import each other by `from .file import name`.
Imports from lm.model in the file of a custom mixer are rewritten to this form, because an export
contains the files of lm/model. The file may also import installed packages, and nothing else.
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

KERNELS_LINE = "FILES: dict[str, str] = {}"  # in bundled_kernels.py; an export has the files here
# `from lm.model.FILE import NAME`, but not `import *`; group 1: indentation, group 2: FILE.
MODEL_IMPORT = re.compile(r"^(\s*)from\s+lm\.model\.(\w+)\s+import\b(?!\s*\*)", re.MULTILINE)


class ExportError(UserError, RuntimeError):
    """Model that cannot be exported, or folder that it cannot be exported to."""


def find_custom_mixers(model: PreTrainedModel) -> dict[str, type]:
    """Return the classes of a model's mixers that are not built in, by their name in the config."""
    from lm.model.fixed_point import FixedPointBlock
    from lm.model.mixer_base import MIXERS, is_built_in

    blocks = (module for module in model.modules() if isinstance(module, FixedPointBlock))
    mixers = {block.config.mixer: MIXERS[block.config.mixer] for block in blocks}
    return {name: cls for name, cls in mixers.items() if not is_built_in(cls)}


def flatten_mixer_files(mixers: dict[str, type]) -> dict[str, str]:
    """Return the files that define custom mixers, rewritten for a folder without subfolders.

    Args:
        mixers: As `find_custom_mixers` returns them.

    Returns:
        The text of each file by its name.

    Raises:
        ExportError: If a mixer is not defined in a file, or its file has the name of a file of
            lm/model, or imports a module that the export does not contain.
    """
    import lm.model

    model_files = {path.name for path in Path(lm.model.__file__).parent.glob("*.py")}
    paths: dict[str, Path] = {}  # file name in the export → file of the mixer
    for cls in mixers.values():
        path = _find_source_file(cls)
        name = f"{cls.__module__.rpartition('.')[2]}.py"
        if name in model_files or paths.get(name, path) != path:
            other = paths.get(name, f"the {name} that every export has")
            raise ExportError(
                f"the mixer {cls.__name__} is defined in {path}, but an export cannot contain both"
                f" this {name} and {other}: rename the mixer's file"
            )
        paths[name] = path
    return {name: _rewrite_imports(path, model_files) for name, path in paths.items()}


def write_mixers(folder: Path, mixers: dict[str, type], files: dict[str, str]) -> None:
    """Add custom mixers to a folder that `save_pretrained` has written.

    The folder's mixers.py then registers them, and its config.json gets the `model_type` of models
    that need the code of their folder.

    Args:
        folder: The folder.
        mixers: Classes by their name in the config.
        files: Texts of the mixers' files by file name.
    """
    from lm.model.configuration_fprnn import MODEL_TYPES

    if not mixers:
        return
    for file_name, text in files.items():
        (folder / file_name).write_text(text, encoding="utf-8")
    # 1. Register the mixers.
    lines = ["", "", "from .mixer_base import register"]
    for i, (name, cls) in enumerate(mixers.items()):
        module = cls.__module__.rpartition(".")[2]
        lines += [f"from .{module} import {cls.__name__} as custom_{i}"]
        lines += [f"register({name!r}, custom_{i})"]
    with (folder / "mixers.py").open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    # 2. Set the model type.
    _, custom_type = MODEL_TYPES  # of models without and with custom mixers
    built_in_line, custom_line = (f'    model_type = "{name}"\n' for name in MODEL_TYPES)
    _replace_line(folder / "configuration_fprnn.py", built_in_line, custom_line)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["model_type"] = custom_type
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def write_kernels(folder: Path) -> None:
    """Add the files of lm/kernels to a folder that `save_pretrained` has written.

    They become strings in its bundled_kernels.py, so that the model is also fast if fprnn is not
    installed.
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
    # Write each line as a separate string: transformers takes lines that start with `import` for
    # imports, also inside a string.
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


def _find_source_file(cls: type) -> Path:
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


def _rewrite_imports(path: Path, model_files: set[str]) -> str:
    """Return the text of a mixer's file, with `from lm.model.FILE` rewritten to `from .FILE`.

    Args:
        path: File of the mixer.
        model_files: Names of the files of lm/model.

    Raises:
        ExportError: If the file imports a module that the export does not contain.
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
            if not _is_external(module):
                raise ExportError(
                    f"{path}:{node.lineno} imports {module}, which the export does not contain:"
                    f" only {path.name} is exported; move the code into it, write `from"
                    " lm.model.FILE import NAME`, or import an installed package"
                )
    return MODEL_IMPORT.sub(r"\1from .\2 import", text)


def _is_external(module: str) -> bool:
    """Return whether a module belongs to Python or a package, not to lm or the user's code."""
    top_module = module.split(".")[0]
    if top_module in ("", "lm"):  # "": a relative import
        return False
    if top_module in sys.stdlib_module_names:
        return True
    spec = importlib.util.find_spec(top_module)
    if spec is None:  # an optional package that is not installed
        return True
    paths = [spec.origin] if spec.origin else list(spec.submodule_search_locations or [])
    package_folders = {"site-packages", "dist-packages"}
    return all(package_folders & set(Path(path).parts) for path in paths)
