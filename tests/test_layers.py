"""Rules for the structure of the code: imports point downwards, public functions have types."""

import ast
import re
import subprocess
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for top in ("lm", "synthetic") for path in (ROOT / top).rglob("*.py"))

# Packages from top to bottom: a module imports from its own package and from those below it.
PACKAGES = (
    "synthetic",
    "lm.cli",
    "lm.evaluation",
    "lm.evaluation.inspection",
    "lm.evaluation.tasks",
    "lm.report",
    "lm.export",
    "lm.training",
    "lm.data.batches",
    "lm.data.corpus",
    "lm.data.sources",
    "lm.runs",
    "lm.config",
    "lm.model",
    "lm.kernels",
    "lm.common",
)
ENTRY_POINTS = ("lm", "lm.__main__", "lm.data", "synthetic.__main__")  # in none of the packages


def relative(path: Path) -> str:
    """Return a path relative to the repository."""
    return str(path.relative_to(ROOT))


def module_name(path: Path) -> str:
    """Return `lm.runs.log` for lm/runs/log.py, and `lm.data` for lm/data/__init__.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in SOURCES}


def find_imports(source: str, module: str, is_package: bool = False) -> set[str]:
    """Return the absolute names of all imported modules, also inside functions.

    Args:
        source: Text of the module; `importlib.import_module("name")` counts as an import.
        module: Name of the module, which relative imports start from.
        is_package: True if the text is of an __init__.py.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parent = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parent, base] if base else parent)
            # `from lm.runs import lease` imports a module, `from lm.config.load import load` none.
            children = {f"{base}.{alias.name}" for alias in node.names}
            names |= children & MODULES
            if children - MODULES:
                names.add(base)
        elif isinstance(node, ast.Call) and node.args:
            function = ast.unparse(node.func).rpartition(".")[2]
            value = getattr(node.args[0], "value", None)
            if function in ("import_module", "__import__") and isinstance(value, str):
                names.add(value)
    return names


def list_imports(path: Path) -> set[str]:
    """Return the modules that a file imports."""
    is_package = path.name == "__init__.py"
    return find_imports(path.read_text(encoding="utf-8"), module_name(path), is_package)


def find_package(module: str) -> str | None:
    """Return the innermost package of a module; None for an entry point or another library."""
    if module in ENTRY_POINTS:
        return None
    enclosing = [name for name in PACKAGES if f"{module}.".startswith(f"{name}.")]
    return max(enclosing, key=len) if enclosing else None


def test_find_imports():
    source = """
import lm.training.train
from lm.runs import checkpoint, nothing
from lm.config.load import load
from . import stream
from ..sources.hub import x
from ...training.engine import y
def f():
    import deepspeed.ops as d
    importlib.import_module("lm.cli.main")
"""
    assert find_imports(source, "lm.data.batches.loader") == {
        "lm.training.train",
        "lm.runs.checkpoint",
        "lm.runs",
        "lm.config.load",
        "lm.data.batches.stream",
        "lm.data.sources.hub",
        "lm.training.engine",
        "deepspeed.ops",
        "lm.cli.main",
    }
    in_package = find_imports("from .a import b\nfrom ..c import d", "lm.data", is_package=True)
    assert in_package == {"lm.data.a", "lm.c"}


def test_every_module_is_in_a_package():
    outside = [name for name in MODULES if find_package(name) is None]
    assert sorted(outside) == sorted(ENTRY_POINTS)
    for name in PACKAGES:
        assert (ROOT / name.replace(".", "/") / "__init__.py").is_file(), name
    assert find_package("lm.data.sources.hub") == "lm.data.sources"
    assert find_package("lm.datafile") is find_package("torch.nn") is None


def test_no_import_points_upwards():
    upward = []
    for path in SOURCES:
        importing = find_package(module_name(path))
        for module in list_imports(path):
            imported = find_package(module)
            if importing and imported and PACKAGES.index(imported) < PACKAGES.index(importing):
                upward.append(f"{relative(path)} imports {module}")
    assert upward == []


def test_import_lm_is_light():
    """`import lm` takes milliseconds, and with it `fprnn --help`."""
    assert list_imports(ROOT / "lm/__init__.py") == set()


def test_no_modules_import_each_other():
    graph = networkx.DiGraph()
    for path in SOURCES:
        name = module_name(path)
        graph.add_edges_from((name, m) for m in list_imports(path) if m in MODULES and m != name)
    cycles = [group for group in networkx.strongly_connected_components(graph) if len(group) > 1]
    assert cycles == []


def test_one_file_imports_deepspeed():
    users = []
    for path in SOURCES:
        if any(module.split(".")[0] == "deepspeed" for module in list_imports(path)):
            users.append(relative(path))
    assert users == ["lm/training/deepspeed_api.py"]


def test_model_imports_only_its_own_files():
    """An exported checkpoint carries these files: they must run without the package around them."""
    folder = ROOT / "lm/model"
    names = {p.stem for p in folder.glob("*.py")} - {"__init__"}
    assert set(folder.rglob("*.py")) == set(folder.glob("*.py"))  # no package below
    for path in sorted(folder.glob("*.py")):
        kernels = [m for m in list_imports(path) if m.startswith("lm.kernels")]
        assert path.name == "scan.py" or not kernels, "scan.py chooses the backend"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and node.module in names, relative(path)
                assert all(alias.name != "*" for alias in node.names), relative(path)
            elif isinstance(node, ast.ImportFrom | ast.Import):
                modules = [alias.name for alias in node.names]
                modules += [node.module] if isinstance(node, ast.ImportFrom) else []
                assert not {m.split(".")[0] for m in modules} & {"lm", "synthetic"}, relative(path)


def list_untyped(tree: ast.Module) -> list[str]:
    """Return the public functions and methods without a complete signature of types.

    Functions that Triton compiles have no types. Methods of a private class are not public.
    """
    names = []

    def visit(body: list[ast.stmt], prefix: str = "") -> None:
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                visit(node.body, f"{node.name}.")
            if not isinstance(node, ast.FunctionDef):
                continue
            is_init = node.name == "__init__"
            is_compiled = any("jit" in ast.unparse(mark) for mark in node.decorator_list)
            if (node.name.startswith("_") and not is_init) or is_compiled:
                continue
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            arguments = [argument for argument in arguments if argument.arg not in ("self", "cls")]
            has_return = node.returns is not None or is_init
            if not has_return or any(argument.annotation is None for argument in arguments):
                names.append(prefix + node.name)

    visit(tree.body)
    return names


def test_public_functions_have_types():
    source = "def f(x): pass\nclass A:\n    def g(self, y: int) -> int: pass\n    def h(self): pass"
    assert list_untyped(ast.parse(source)) == ["f", "A.h"]
    for path in SOURCES:
        assert list_untyped(ast.parse(path.read_text(encoding="utf-8"))) == [], relative(path)


def test_every_module_docstring_starts_with_one_sentence():
    for path in SOURCES:
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert docstring, f"{relative(path)} has no docstring"
        first, _, rest = docstring.partition("\n")
        assert first.endswith((".", ":")) and not rest.partition("\n")[0].strip(), relative(path)


def list_repository_files() -> list[Path]:
    """Return the tracked files, and new files that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.decode().split("\0") if name]


# An absolute path below /home, /root or /work that is no end of a relative path or URL.
LOCAL_PATH = re.compile(r"(?<![\w.$}*/~-])/(?:home|root|work)/")


def test_no_file_contains_a_local_path():
    for top in ("home", "root", "work"):
        for text in ("/{}/x", "see /{}/x", '"/{}/x"', "=/{}/", "file:/{}/a"):
            assert LOCAL_PATH.search(text.format(top)), text
        for text in ("a/{}/x", "../{}/x", "$DIR/{}/x", "https://example.org/{}/x", "/{}book/"):
            assert not LOCAL_PATH.search(text.format(top)), text
    lines = []
    for path in list_repository_files():
        if not path.is_file() or path == Path(__file__):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a binary file
        lines += [
            f"{relative(path)}: {line.strip()[:80]}"
            for line in text.splitlines()
            if LOCAL_PATH.search(line)
        ]
    assert lines == []
