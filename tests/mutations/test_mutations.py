"""The mutations are up to date; what counts as caught; and a sample of three is caught."""

import shlex
import subprocess
import sys

import pytest

from tests import mutations
from tests.mutations import Mutation, Verdict, judge, sample, stale, summary
from tests.mutations.__main__ import main

ALL = mutations.all_mutations()


def test_every_mutation_fits_the_sources():
    assert stale(ALL) == []
    assert main(["--check"]) == 0


def test_there_are_many_each_with_a_name_and_tests_that_exist():
    assert len(ALL) >= 60
    assert len({m.name for m in ALL}) == len({(m.file, m.old, m.new) for m in ALL}) == len(ALL)
    for m in ALL:
        assert m.tests, m.name
        for arguments in m.tests:
            case = shlex.split(arguments)[0]
            assert case.count("[") == case.count("]"), f"{arguments}: a name with spaces is several"
            path, _, test = case.partition("[")[0].partition("::")
            source = (mutations.ROOT / path).read_text(encoding="utf-8")
            assert not test or f"def {test}(" in source, arguments


def test_a_stale_mutation_is_named():
    m = Mutation("the sign", "lm/model/solver.py", "no such text", "x", ())
    twice = m._replace(old="import")
    gone = m._replace(file="gone.py")
    same = m._replace(old="class Rule(", new="class Rule(")
    for wrong in (m, twice, gone, same):
        (sentence,) = stale([wrong])
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
def test_only_a_test_that_fails_is_a_catch(status, output, outcome):
    assert judge(status, output)[0] == outcome


def test_the_score_and_the_exit_status():
    def verdict(outcome):
        return Verdict(ALL[0], outcome, "why", 1.0)

    assert summary([verdict("caught")] * 2) == ("score: 2/2 mutations caught", 0)
    for other in ("survived", "broken"):
        text, status = summary([verdict("caught"), verdict(other)])
        assert status == 1 and "1/2" in text and f"{other}: {ALL[0].name} (why)" in text
    assert summary([])[1] == 1


def test_a_sample_is_spread_and_the_same_each_time():
    assert sample(ALL, 10) == sample(ALL, 10) and len(set(sample(ALL, 10))) == 10
    assert {m.file.split("/")[1] for m in sample(ALL, 10)} >= {"model", "kernels"}
    assert sample(ALL, 10**6) == ALL


@pytest.mark.parametrize("wrong", [["--only", "no such"], ["--sample", "0"], ["--jobs", "0"]])
def test_what_cannot_be_asked_is_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        main(wrong)
    assert "must be" in (said := capsys.readouterr().err) or "no mutation" in said


def score(*options, timeout):
    """The score that the command prints, which must end well; shown at the end of the tests."""
    command = [sys.executable, "-m", "tests.mutations", *options]
    done = subprocess.run(
        command, cwd=mutations.ROOT, capture_output=True, text=True, timeout=timeout
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_one_of_them_is_caught_without_shared():
    assert "score: 1/1 mutations caught" in score("--sample", "1", timeout=590)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_are_caught_without_shared():
    assert f"score: {len(ALL)}/{len(ALL)} mutations caught" in score("--jobs", "2", timeout=3500)
