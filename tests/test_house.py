"""House rules that a machine can check: floors, one home for DeepSpeed, sizes, stray paths."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(p for top in ("lm", "synthetic") for p in (ROOT / top).rglob("*.py"))

# The rooms, from the top floor down: a file imports from its own room and from those below it.
ROOMS = (
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
DOORS = ("lm", "lm.__main__", "lm.data", "synthetic.__main__")  # what is in no room


def module_name(path: Path) -> str:
    """lm/data/sources/hub.py → lm.data.sources.hub; lm/data/__init__.py → lm.data."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(p) for p in SOURCES}


def imports(source: str, name: str, is_package: bool = False) -> set[str]:
    """Absolute names of all modules imported anywhere in a source, also inside functions and by
    `importlib.import_module("name")`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".")
                here = parts[: len(parts) - node.level + is_package]
                base = ".".join([*here, base] if base else here)
            # `from lm.runs import lease` names a module, `from lm.config.load import load` none.
            below = {f"{base}.{alias.name}" for alias in node.names}
            modules = below & MODULES
            found |= modules
            if below - modules:
                found.add(base)
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rpartition(".")[2]
            value = getattr(node.args[0], "value", None)
            if called in ("import_module", "__import__") and isinstance(value, str):
                found.add(value)
    return found


def imports_of(path: Path) -> set[str]:
    """The modules that a file imports."""
    is_package = path.name == "__init__.py"
    return imports(path.read_text(encoding="utf-8"), module_name(path), is_package)


def room(module: str) -> str | None:
    """lm.data.sources.hub → lm.data.sources, the innermost room it lies in; None for a door."""
    if module in DOORS:
        return None
    around = [name for name in ROOMS if f"{module}.".startswith(f"{name}.")]
    return max(around, key=len) if around else None


def arrows() -> dict[tuple[str, str], set[tuple[str, str]]]:
    """(room, room that it imports from) → the imports, as (module, module)."""
    between: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for path in SOURCES:
        name = module_name(path)
        for imported in imports_of(path):
            here, there = room(name), room(imported)
            if here and there and here != there:
                between.setdefault((here, there), set()).add((name, imported))
    return between


def is_down(here: str, there: str) -> bool:
    """Whether the room `there` lies below the room `here`."""
    return ROOMS.index(there) > ROOMS.index(here)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_reader_of_imports_finds_them_all():
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
    assert imports(source, "lm.data.batches.loader") == {
        "lm.training.train", "lm.runs.checkpoint", "lm.runs", "lm.config.load",
        "lm.data.batches.stream", "lm.data.sources.hub", "lm.training.engine", "deepspeed.ops",
        "lm.cli.main",
    }  # fmt: skip
    assert imports("from .a import b\nfrom ..c import d", "lm.data", True) == {"lm.data.a", "lm.c"}


def test_rooms_tell_up_from_down():
    assert is_down("lm.training", "lm.data.batches") and not is_down("lm.data.batches", "lm.cli")
    assert is_down("synthetic", "lm.cli") and not is_down("lm.common", "lm.config")
    assert room("lm.data.sources.hub") == "lm.data.sources" and room("lm.datafile") is None
    assert room("lm.report.plan") == "lm.report" and room("lm.data.sources.hub") != "lm.report"
    assert room("torch.nn") is None and room("lm") is None


def test_every_file_lies_in_a_room():
    loose = [name for name in MODULES if room(name) is None]
    assert sorted(loose) == sorted(DOORS)
    for name in ROOMS:
        folder = ROOT / name.replace(".", "/")
        assert (folder / "__init__.py").is_file(), f"{name} does not say what lives there"


def test_no_import_runs_up():
    upward = {pair: imported for pair, imported in arrows().items() if not is_down(*pair)}
    assert upward == {}


def test_the_house_is_small():
    assert len(ROOMS) <= 20
    assert len(arrows()) <= 90


def test_the_doors_only_lead_in():
    """`import lm` costs milliseconds: it names the model classes, and nothing else."""
    through = {m for m in imports_of(ROOT / "lm/__init__.py") if m.startswith("lm.")}
    assert {room(module) for module in through} == {"lm.model"}


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The groups of modules each of which reaches every other by imports (Tarjan's algorithm).

    Args:
        graph: module → the modules that it imports; those that are no keys are left out.
    """
    found: set[frozenset[str]] = set()
    order: dict[str, int] = {}  # module → its number in the order of the visits
    lowest: dict[str, int] = {}  # module → the lowest number that it is known to reach
    path: list[str] = []  # visited, and not yet in a group

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        path.append(module)
        for imported in graph[module] & graph.keys():
            if imported not in order:
                visit(imported)
            if imported in path:
                lowest[module] = min(lowest[module], lowest[imported])
        if lowest[module] == order[module]:
            place = path.index(module)
            group = frozenset(path[place:])
            del path[place:]
            if len(group) > 1:
                found.add(group)

    for module in graph:
        if module not in order:
            visit(module)
    return found


def test_the_finder_of_circles_finds_long_ones_and_only_them():
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e", "numpy"}, "e": {"e"}}
    assert circles(graph) == {frozenset("abc")}
    assert circles(graph | {"e": {"d"}}) == {frozenset("abc"), frozenset("de")}
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == set()


def test_no_two_modules_import_each_other():
    graph = {module_name(path): imports_of(path) - {module_name(path)} for path in SOURCES}
    assert circles(graph) == set()


def test_deepspeed_is_imported_only_by_the_engine():
    users = [
        relative(p) for p in SOURCES if any(m.split(".")[0] == "deepspeed" for m in imports_of(p))
    ]
    assert users == ["lm/training/engine.py"]


def test_lm_never_imports_synthetic():
    users = [
        relative(p)
        for p in SOURCES
        if relative(p).startswith("lm/")
        and any(m.split(".")[0] == "synthetic" for m in imports_of(p))
    ]
    assert users == []


def test_model_imports_its_own_files_only_and_flat():
    """An exported checkpoint carries these files: they must run without the package around them."""
    folder = ROOT / "lm/model"
    own = {p.stem for p in folder.glob("*.py")} - {"__init__"}
    assert set(folder.rglob("*.py")) == set(folder.glob("*.py"))  # no package below
    relatives = 0
    for path in sorted(folder.glob("*.py")):
        kernels = [m for m in imports_of(path) if m.startswith("lm.kernels")]
        assert path.name == "scan.py" or not kernels, "scan.py chooses the backend"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{relative(path)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and node.module in own, where
                assert all(a.name != "*" for a in node.names), where
                relatives += 1
            elif isinstance(node, ast.ImportFrom):
                assert node.module.split(".")[0] not in ("lm", "synthetic"), where
            elif isinstance(node, ast.Import):
                assert all(a.name.split(".")[0] not in ("lm", "synthetic") for a in node.names), (
                    where
                )
    assert relatives > 5


def untyped(tree: ast.Module) -> list[str]:
    """The public functions and methods of a module that leave a type out. Those that Triton
    compiles have none; what a class with an underscore has is not public."""
    found = []

    def visit(body: list[ast.stmt], owner: str = "") -> None:
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                visit(node.body, f"{node.name}.")
            if not isinstance(node, ast.FunctionDef):
                continue
            is_init = node.name == "__init__"
            is_compiled = any("jit" in ast.unparse(mark) for mark in node.decorator_list)
            if (node.name.startswith("_") and not is_init) or is_compiled:
                continue
            every = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            own = [argument for argument in every if argument.arg not in ("self", "cls")]
            lacks_return = node.returns is None and not is_init
            if lacks_return or any(argument.annotation is None for argument in own):
                found.append(owner + node.name)

    visit(tree.body)
    return found


def test_public_functions_say_their_types():
    source = "def f(x): pass\nclass A:\n    def g(self, y: int) -> int: pass\n    def h(self): pass"
    assert untyped(ast.parse(source)) == ["f", "A.h"]
    files = [p for p in SOURCES if not p.is_symlink()]
    found = {relative(p): untyped(ast.parse(p.read_text(encoding="utf-8"))) for p in files}
    assert {name: functions for name, functions in found.items() if functions} == {}


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_a_file_says_in_one_line_what_lives_in_it(path):
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, "no module docstring"
    first, _, rest = docstring.partition("\n")
    assert first.endswith((".", ":")) and not rest.partition("\n")[0].strip(), first


def repository_files() -> list[Path]:
    """Tracked files and new ones that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.decode().split("\0") if name]


# A path of one machine: /home/…, /root/…, /work/… where no relative path or URL runs on.
STRAY = re.compile(r"(?<![\w.$}*/~-])/(?:home|root|work)/")


def test_the_pattern_of_stray_paths():
    for top in ("home", "root", "work"):
        for text in ("/{}/x", "see /{}/x", '"/{}/x"', "=/{}/", "file:/{}/a"):
            assert STRAY.search(text.format(top)), text
        for text in ("a/{}/x", "../{}/x", "$DIR/{}/x", "https://example.org/{}/x", "/{}book/"):
            assert not STRAY.search(text.format(top)), text


def test_no_path_of_one_machine():
    found = []
    for path in repository_files():
        if not path.is_file() or path == Path(__file__):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a binary
        for number, line in enumerate(text.splitlines(), 1):
            if STRAY.search(line):
                found.append(f"{relative(path)}:{number}: {line.strip()[:80]}")
    assert found == []
