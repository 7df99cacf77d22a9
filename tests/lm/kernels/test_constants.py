"""Constants of the kernels in C++ and Triton against the values in Python."""

import re

import pytest

from lm.kernels import cell_arguments
from lm.kernels.cpu import build, cpu_cell
from lm.model import cell, certified_root, solver

RULE = solver.Rule()
# Constants of the search for a root: name → value in lm/model.
SEARCH_NAMES = (
    "MAX_PICARD_STEPS MAX_NEWTON_STEPS BISECTIONS MIN_INVERSE_NORM ROUNDING SOLVED"
    " MAX_PICARD_RATIO MAX_NEWTON_DISTANCE MAX_GAIN"
)
SEARCH = {name: getattr(cell, name) for name in SEARCH_NAMES.split()}
SEARCH |= {
    "MAX_DIRECT_STEPS": certified_root.MAX_DIRECT_STEPS,
    "STEPSIZE": RULE.stepsize,
    "STEPSIZE_DECAY": RULE.stepsize_decay,
    "PATIENCE": RULE.patience,
}
# The same for two reflections.
PAIR_NAMES = "MAX_PAIR_STEPS MAX_POLISH_STEPS MIN_SIDE CERTAIN STILL DEGREE DECIDE_AFTER"
PAIR = {name: getattr(certified_root, name) for name in PAIR_NAMES.split()}
PAIR |= {"PIECE_COUNT": len(certified_root.PIECES)}
OUTCOMES = {name: getattr(solver, name) for name in ("FAILED", "BISECTED", "GRAD_LIMITED")}


def read_constants(file):
    """Return the numeric constants of a C++ file, from constexpr definitions and enumerations."""
    source = re.sub(r"//.*", "", (build.HERE / file).read_text(encoding="utf-8"))
    constants_of_cpp = {}
    for definitions in re.findall(r"^constexpr (?:int|double|int64_t) ([^;]+);", source, re.M):
        for name, value in re.findall(r"(\w+) = ([^,]+)", definitions):
            if re.fullmatch(r"[\d.e+-]+", value):
                constants_of_cpp[name] = float(value)
    for _, members in re.findall(r"^enum (\w+)(?: : \w+)? \{([^}]+)\}", source, re.M):
        for index, member in enumerate(members.split(",")):
            name, _, value = member.partition("=")
            constants_of_cpp[name.strip()] = float(value or index)
    return constants_of_cpp


def number_names(names):
    return {name.upper(): index for index, name in enumerate(names)}


@pytest.mark.parametrize(
    "file, expected",
    [
        (
            "cell_equation.h",
            SEARCH | OUTCOMES | {"MAX_REFLECTIONS": cell_arguments.MAX_REFLECTIONS},
        ),
        ("cell_pair.h", PAIR),
        (
            "cell_token.h",
            {kind.upper(): number for kind, number in cpu_cell._KINDS.items()}
            | number_names(cell_arguments.NORMS)
            | number_names(cell_arguments.ACTS),
        ),
    ],
    ids=["cell_equation.h", "cell_pair.h", "cell_token.h"],
)
def test_cpp_has_the_constants_of_python(file, expected):
    """The comparison goes both ways: a new constant in C++ needs an entry here."""
    constants_of_cpp = read_constants(file)
    assert {name: constants_of_cpp.get(name) for name in expected} == expected
    if file == "cell_equation.h":
        assert constants_of_cpp.keys() == expected.keys()


def test_cpp_has_the_interval_pieces_of_python():
    source = (build.HERE / "cell_pair.h").read_text(encoding="utf-8")
    for name in ("PIECES", "WIDE_PIECES"):
        (values,) = re.findall(rf" {name}\[[^\]]+\] = \{{([^}}]+)\}}", source)
        assert tuple(map(float, values.split(","))) == getattr(certified_root, name)


@pytest.mark.parametrize("file", ["cell_equation.h", "cell_root.h"])
def test_cpp_search_has_no_unnamed_number(file):
    """After the definitions, the search itself contains only the digits 0 to 3."""
    source = re.sub(r"//.*", "", (build.HERE / file).read_text(encoding="utf-8"))
    search = source[source.index("struct Equation") if "struct Equation" in source else 0 :]
    search = search[search.index("namespace {") if "namespace {" in search else 0 :]
    assert set(re.findall(r"(?<![\w.])\d[\d.e-]*", search)) <= {"0", "1", "2", "3"}


def test_kernel_modules_have_the_constants_of_the_model():
    assert {name: getattr(cell_arguments, name) for name in OUTCOMES} == OUTCOMES


def test_triton_has_the_constants_of_python():
    pytest.importorskip("triton")
    from lm.kernels.triton import roots as triton_roots
    from lm.kernels.triton import token

    assert {name: getattr(triton_roots, name).value for name in SEARCH} == SEARCH
    assert {name: getattr(token, name).value for name in OUTCOMES} == OUTCOMES
