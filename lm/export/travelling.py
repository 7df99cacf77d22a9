"""What travels in an export beside the files of lm/model: the kernels, and a mixer of one's own.

An export is flat: its files import each other as `from .file import name`. So does, in its copy,
the file of a mixer: what it imports of lm.model is there too, and of other modules it may import
those that are installed.
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

REGISTER = "own_mixers.py"  # of lm/model: what is written in its place registers the mixers
KERNELS = "carried.py"  # of lm/model: brings the text of lm/kernels along
EMPTY = "FILES: dict[str, str] = {}"  # its line for it
HOW = "write `from lm.model.FILE import NAME`"


class ExportError(UserError, RuntimeError):
    """An export that cannot be made; the message says why."""


def own_mixers(model: PreTrainedModel) -> dict[str, type]:
    """`model.mixer` → its class, of those mixers of a model that are not built in."""
    from lm.model.fixed_point import FixedPointBlock
    from lm.model.mixer_base import MIXERS, is_built_in

    blocks = (m for m in model.modules() if isinstance(m, FixedPointBlock))
    used = {block.config.mixer: MIXERS[block.config.mixer] for block in blocks}
    return {name: cls for name, cls in used.items() if not is_built_in(cls)}


def flat_files(model: PreTrainedModel) -> dict[str, str]:
    """Name → text of the files that a model's own mixers travel in; {} where it has none.

    Raises:
        ExportError: a mixer that cannot travel: it is not in a file, its file has the name of one
            of ours or imports what would not be there.
    """
    import lm.model

    mixers = own_mixers(model)
    if not mixers:
        return {}
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
    files = {name: _flattened(path, ours) for name, path in sources.items()}
    return {**files, REGISTER: _register(mixers)}


def write(files: dict[str, str], folder: Path) -> None:
    """Put the files of `flat_files` into a folder that `save_pretrained` has written, and give the
    model the `model_type` of one whose code is the checkpoint's own."""
    from lm.model.configuration_fprnn import MODEL_TYPES

    if not files:
        return
    plain, own = MODEL_TYPES
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    code = folder / "configuration_fprnn.py"
    text = code.read_text(encoding="utf-8")
    line = f'    model_type = "{plain}"\n'
    if text.count(line) != 1:
        raise AssertionError(f"{code} no longer has the line `{line.strip()}` once")
    code.write_text(text.replace(line, f'    model_type = "{own}"\n'), encoding="utf-8")
    described = folder / "config.json"
    config = json.loads(described.read_text(encoding="utf-8"))
    config["model_type"] = own
    described.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def carry_kernels(folder: Path) -> None:
    """Put the text of lm/kernels into the code of a folder that `save_pretrained` has written, so
    that it computes as fast where fprnn is not installed."""
    import lm.common.errors
    import lm.common.secrets
    import lm.kernels

    package = Path(lm.kernels.__file__).parent
    kinds = (".py", ".h", ".cpp")
    places = {
        place.relative_to(package).as_posix(): place
        for place in sorted(package.rglob("*"))
        if place.suffix in kinds
    }
    for module in (lm.common.errors, lm.common.secrets):  # the kernels import them
        assert module.__file__ is not None
        places[Path(module.__file__).name] = Path(module.__file__)
    texts = {name: place.read_text(encoding="utf-8") for name, place in places.items()}
    # Line by line, and quoted: transformers looks for imports by the beginnings of lines.
    lines = ["FILES: dict[str, str] = {"]
    for name, text in texts.items():
        lines += [f"    {name!r}: ("]
        lines += [f"        {line!r}" for line in text.splitlines(keepends=True)]
        lines += ["    ),"]
    code = folder / KERNELS
    text = code.read_text(encoding="utf-8")
    if text.count(EMPTY) != 1:
        raise AssertionError(f"{code} no longer has the line `{EMPTY}` once")
    code.write_text(text.replace(EMPTY, "\n".join([*lines, "}"])), encoding="utf-8")


def _source(cls: type) -> Path:
    """The file of a class."""
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


def _register(mixers: dict[str, type]) -> str:
    """The file in the place of own_mixers.py."""
    lines = [
        '"""The mixers that this model\'s code brings along: built-in ones and its author\'s."""',
        "",
        "from .mixer_base import register",
        "from .mixers import build_mixer",
    ]
    aliases = {cls: f"own_{i}" for i, cls in enumerate(dict.fromkeys(mixers.values()))}
    lines += [
        f"from .{cls.__module__.rpartition('.')[2]} import {cls.__name__} as {alias}"
        for cls, alias in aliases.items()
    ]
    lines += ["", '__all__ = ["build_mixer"]', ""]
    lines += [f"register({name!r}, {aliases[cls]})" for name, cls in mixers.items()]
    return "\n".join(lines) + "\n"


def _flattened(path: Path, ours: set[str]) -> str:
    """The text of a mixer's file, its imports of lm.model made those of a flat folder.

    Raises:
        ExportError: it imports something that will not be there.
    """
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            where = f"{path}:{node.lineno}"
            if node.level:
                raise ExportError(
                    f"{where} imports {'.' * node.level}{node.module or ''}, a module of its own"
                    f" package: {_alone(path)}"
                )
            module = node.module or ""
            if module.split(".")[0] == "lm":
                line = lines[node.lineno - 1]
                lines[node.lineno - 1] = _flat_import(line, node, where, ours)
            else:
                _check_installed(module, where, path)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                where = f"{path}:{node.lineno}"
                if alias.name.split(".")[0] == "lm":
                    raise ExportError(
                        f"{where}: `import {alias.name}` cannot travel with an export: {HOW}"
                    )
                _check_installed(alias.name, where, path)
    return "".join(lines)


def _flat_import(line: str, node: ast.ImportFrom, where: str, ours: set[str]) -> str:
    """`from lm.model.file import …` → `from .file import …`."""
    found = re.match(r"(\s*)from\s+lm\.model\.(\w+)\s+import\b", line)
    if found is None or any(alias.name == "*" for alias in node.names):
        raise ExportError(
            f"{where}: `{line.strip()}` cannot travel with an export, which has the files of"
            f" lm/model alone: {HOW}, on a line of its own"
        )
    if f"{found[2]}.py" not in ours:
        raise ExportError(f"{where}: lm/model has no {found[2]}.py")
    return f"{found[1]}from .{found[2]} import{line[found.end() :]}"


def _check_installed(module: str, where: str, path: Path) -> None:
    """Refuse a module that is neither Python's own nor an installed package."""
    top = module.split(".")[0]
    if top in sys.stdlib_module_names:
        return
    spec = importlib.util.find_spec(top)
    if spec is None:  # an optional one, that is not here
        return
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or [])
    folders = {"site-packages", "dist-packages"}
    if not all(folders & set(Path(place).parts) for place in places):
        raise ExportError(
            f"{where} imports {module} from {places[0]}, which is not installed as a package and"
            f" would not be there: {_alone(path)}"
        )


def _alone(path: Path) -> str:
    return (
        f"a mixer travels as one file, {path.name}: put what it needs into it, or import it from"
        " lm.model or an installed package"
    )
