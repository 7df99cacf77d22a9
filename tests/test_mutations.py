"""Mutations: they fit the sources, outcomes are judged correctly, and tests catch them."""

import shlex

import pytest

from tests import mutations
from tests.mutations import Mutation, Verdict
from tests.running import PLAIN_FORKS

MUTATIONS = mutations.read_mutations()


def test_every_mutation_fits_the_sources():
    assert mutations.find_stale(MUTATIONS) == []
    assert mutations.main(["--check"]) == 0


def test_every_mutation_has_tests_that_exist():
    assert len({(m.file, m.old, m.new) for m in MUTATIONS}) == len(MUTATIONS) >= 60
    for m in MUTATIONS:
        cases = [word for word in shlex.split(m.tests) if word.startswith("tests/")]
        assert cases, m.name
        for case in cases:
            assert case.count("[") == case.count("]"), f"{case}: quote a name with spaces"
            path, _, test = case.partition("[")[0].partition("::")
            source = (mutations.ROOT / path).read_text(encoding="utf-8")
            assert not test or f"def {test}(" in source, case


@pytest.mark.parametrize(
    "changes",
    [
        {"old": "no such text"},
        {"old": "import"},  # occurs several times
        {"file": "no_such_file.py"},
        {"new": "class Rule("},  # changes nothing
    ],
)
def test_a_stale_mutation_is_named(changes):
    fitting = Mutation("the sign", "lm/model/solver.py", "class Rule(", "class Role(", "")
    assert mutations.find_stale([fitting]) == []
    (sentence,) = mutations.find_stale([fitting._replace(**changes)])
    assert "`the sign`" in sentence


@pytest.mark.parametrize(
    "status, output, outcome",
    [
        (1, "FAILED a.py::test_x[1] - assert 1\n", "caught"),
        (1, "ERROR a.py::test_x - fixture\n", "broken"),
        (2, "ERROR a.py - SyntaxError\n", "broken"),
        (-11, "", "broken"),
        (0, "3 passed", "survived"),
        (5, "no tests ran", "survived"),
        (None, "", "survived"),
    ],
)
def test_only_a_failed_test_catches(status, output, outcome):
    assert mutations.judge(status, output)[0] == outcome


@pytest.mark.parametrize("outcome", ["survived", "broken"])
def test_the_summary_names_mutations_that_were_not_caught(outcome):
    caught, missed = (Verdict(MUTATIONS[0], o, "why", 1.0) for o in ("caught", outcome))
    assert mutations.summarize([caught, caught]) == ("score: 2/2 mutations caught", 0)
    text, status = mutations.summarize([caught, missed])
    assert status == 1 and "1/2" in text and f"{outcome}: {MUTATIONS[0].name} (why)" in text
    assert mutations.summarize([])[1] == 1


def test_a_text_that_no_mutation_has_is_refused(capsys):
    with pytest.raises(SystemExit):
        mutations.main(["--only", "no such"])
    assert "no mutation" in capsys.readouterr().err


def run_command(*options, timeout):
    """Return the output of the command, which must end with status 0."""
    result = PLAIN_FORKS.run("tests.mutations", options, timeout)
    print(result.stdout)  # conftest.py shows the score
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


def test_a_mutation_is_caught():
    output = run_command("--only", "mirror images are missing", timeout=590)
    assert "score: 1/1 mutations caught" in output


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_mutations_are_caught():
    score = f"score: {len(MUTATIONS)}/{len(MUTATIONS)} mutations caught"
    assert score in run_command("--jobs", "2", timeout=3500)
