"""House rules that a machine can check: floors, one home for DeepSpeed, sizes, stray paths."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(p for top in ("lm", "synthetic") for p in (ROOT / top).rglob("*.py"))

# A module imports only from floors below its own; those on the ground, and the files of one
# package, also from each other.
FLOORS = {
    0: (
        "arguments",
        "cards",
        "config",
        "config_data",
        "config_messages",
        "config_model",
        "console",
        "errors",
        "kernels",
        "latex",
        "lease",
        "measured",
        "metrics",
        "muon",
        "named_class",
        "old_keys",
        "outputs",
        "optim",
        "page",
        "profiling",
        "ranks",
        "resuming",
        "signals",
        "tasks",
        "update_times",
        "warmups",
        "watchdog",
        "yaml_text",
    ),
    1: ("doctor", "model"),
    2: ("baselines", "data", "run_dir"),
    3: (
        "build",
        "cli_tokenizer",
        "checkpoint",
        "deepspeed_json",
        "inspection",
        "log",
        "sweep_status",
    ),
    4: ("activations", "continuing", "ema", "engine", "foreign", "reports", "watch"),
    5: ("exported", "memory", "plots", "probes", "reshard", "travelling", "upcycle"),
    6: ("check_mixer", "cost", "init_from", "model_card", "validation"),
    7: ("preflight", "push"),
    8: ("train",),
    9: ("evaluate", "export", "generate", "plan", "report"),
    10: ("reference", "agree", "cli_eval", "cli_import", "cli_watch", "compare", "facade"),
    11: ("cli_compare", "cli_inspect"),
    12: ("cli",),
    13: ("__main__",),
}
FLOOR = {name: floor for floor, names in FLOORS.items() for name in names}
# What `synthetic` may use of lm: what builds a model, the pieces of training that do not know of
# DeepSpeed (schedule, parameter groups, run directories), and the reader of bAbI.
FOR_SYNTHETIC = {
    "", "arguments", "baselines", "build", "checkpoint", "config", "config_model", "console",
    "errors", "foreign", "inspection", "kernels", "latex", "lease", "log", "metrics", "model",
    "named_class", "old_keys", "optim", "outputs", "page", "profiling", "ranks", "resuming",
    "run_dir", "signals", "tasks", "upcycle",
}  # fmt: skip


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
            # `from lm import checkpoint` imports a module, `from lm.config.load import load` does not.
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


def of(path: Path) -> set[str]:
    return imports(path.read_text(encoding="utf-8"), module_name(path), path.name == "__init__.py")


def part(module: str) -> str:
    """lm.data.sources.hub → data; lm → ''."""
    return ".".join(module.split(".")[1:2])


def goes_up(importer: str, imported: str) -> bool:
    """Whether an import between two parts of lm goes up, or sideways above the ground."""
    if imported in ("", importer):  # the package itself only registers the model classes
        return False
    sideways_on_the_ground = FLOOR[importer] == FLOOR[imported] == 0
    return FLOOR[imported] >= FLOOR[importer] and not sideways_on_the_ground


def upward(path: Path) -> list[str]:
    name = module_name(path)
    inside = [m for m in of(path) if m.partition(".")[0] == "lm"]
    if name == "lm":
        return sorted(m for m in inside if part(m) != "model")
    return sorted(m for m in inside if goes_up(part(name), part(m)))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_reader_of_imports_finds_them_all():
    source = """
import lm.training.train
from lm.runs import checkpoint
from lm import nothing
from lm.config.load import load
from . import stream
from .hub import x
from ..engine import y
def f():
    import deepspeed.ops as d
    importlib.import_module("lm.cli.main")
"""
    assert imports(source, "lm.data.batches.loader") == {
        "lm.training.train", "lm.runs.checkpoint", "lm", "lm.config.load", "lm.data.batches.stream", "lm.data.sources.hub",
        "lm.training.engine", "deepspeed.ops", "lm.cli.main",
    }  # fmt: skip
    assert imports("from .a import b\nfrom ..c import d", "lm.data", True) == {"lm.data.a", "lm.c"}


def test_the_floors_tell_up_from_down():
    assert not goes_up("train", "engine") and goes_up("engine", "train")
    assert goes_up("model", "config") is False  # allowed here; lm/model's own rule is stricter
    assert goes_up("memory", "exported") and goes_up("exported", "memory")  # beside each other
    assert goes_up("build", "engine") and goes_up("config", "model")
    assert not goes_up("data", "config") and not goes_up("data", "data")


def test_every_part_of_lm_has_a_floor():
    parts = {part(m) for m in MODULES if m.startswith("lm.")}
    assert parts == FLOOR.keys()


@pytest.mark.parametrize("path", [p for p in SOURCES if relative(p).startswith("lm")], ids=relative)
def test_nothing_imports_upward(path):
    assert upward(path) == []


# Modules that import each other, and why that stays. Whatever else does is put where it belongs.
CIRCLES = {
    # A Config holds what warmups and config_data define; they name the types alone of Config and of
    # its Data, for the checker.
    frozenset({"lm.config.load", "lm.config.data", "lm.config.warmups"}),
    # An Inspection shows itself, by functions that read one; they are imported when it does.
    frozenset(
        {
            "lm.evaluation.inspection.result",
            "lm.evaluation.inspection.page",
            "lm.evaluation.inspection.words",
        }
    ),
}


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
    graph = {module_name(path): of(path) - {module_name(path)} for path in SOURCES}
    assert circles(graph) == CIRCLES


def test_deepspeed_is_imported_only_by_the_engine():
    users = [relative(p) for p in SOURCES if any(m.split(".")[0] == "deepspeed" for m in of(p))]
    assert users == ["lm/training/engine.py"]


def test_lm_never_imports_synthetic():
    users = [
        relative(p)
        for p in SOURCES
        if relative(p).startswith("lm/") and any(m.split(".")[0] == "synthetic" for m in of(p))
    ]
    assert users == []


def test_synthetic_uses_only_what_builds_a_model():
    used = {
        (relative(p), m)
        for p in SOURCES
        if relative(p).startswith("synthetic/")
        for m in of(p)
        if m.split(".")[0] == "lm" and part(m) not in FOR_SYNTHETIC
    }
    assert used == set()


def test_model_imports_its_own_files_only_and_flat():
    """An exported checkpoint carries these files: they must run without the package around them."""
    folder = ROOT / "lm/model"
    own = {p.stem for p in folder.glob("*.py")} - {"__init__"}
    assert set(folder.rglob("*.py")) == set(folder.glob("*.py"))  # no package below
    relatives = 0
    for path in sorted(folder.glob("*.py")):
        kernels = [m for m in of(path) if m.startswith("lm.kernels")]
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
