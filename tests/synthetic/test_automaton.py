"""Automata: answers by walking, kinds by automata that are known and by sympy's groups."""

import numpy as np
import pytest
from sympy.combinatorics import Permutation, PermutationGroup

from synthetic.config import Task
from synthetic.tasks import TaskError, build
from synthetic.tasks.automaton import is_solvable, kind_of, long_run, monoid_of

KNOWN = {  # letters, and the states that states 0, 1, … go to
    "flip-flop": ([[0, 1], [0, 0], [1, 1]], "aperiodic"),
    "counter to three": ([[1, 2, 2], [0, 0, 1]], "aperiodic"),
    "parity": ([[0, 1], [1, 0]], "solvable"),
    "parity with reset": ([[1, 0], [0, 0]], "solvable"),
    "S3": ([[1, 0, 2], [1, 2, 0]], "solvable"),
    "S4": ([[1, 0, 2, 3], [1, 2, 3, 0]], "solvable"),
    "A5": ([[1, 2, 0, 3, 4], [0, 1, 3, 4, 2]], "unsolvable"),
    "S5": ([[1, 0, 2, 3, 4], [1, 2, 3, 4, 0]], "unsolvable"),
    "S5 with a dead state": ([[1, 0, 2, 3, 4, 5], [1, 2, 3, 4, 0, 5], [5] * 6], "unsolvable"),
    "permutes a part": ([[1, 0, 1], [0, 1, 0]], "solvable"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_kinds_of_automata_that_are_known(name):
    table, kind = KNOWN[name]
    assert kind_of(np.array(table)) == kind
    if "dead" not in name:  # which is refused
        task = build(Task(name="automaton", automaton={"table": table}))
        assert (task.table == table).all()


def test_groups_are_solvable_where_sympy_says_so():
    rng = np.random.default_rng(0)
    answers = []
    for _ in range(60):
        n = int(rng.integers(3, 7))
        generators = np.stack([rng.permutation(n) for _ in range(2)])
        group = monoid_of(generators)
        theirs = PermutationGroup([Permutation(g.tolist()) for g in generators])
        assert len(group) == theirs.order()
        if len(group) <= 360:
            answers.append(is_solvable(group))
            assert answers[-1] == theirs.is_solvable
    assert 5 < sum(answers) < len(answers) - 5


@pytest.mark.parametrize("kind", ["aperiodic", "solvable", "unsolvable"])
def test_what_is_drawn_is_of_the_kind_and_all_states_are_reached(kind):
    tables = set()
    for seed in range(4):
        section = Task(
            name="automaton", supervision="every", automaton={"kind": kind, "seed": seed}
        )
        task = build(section)
        tables.add(task.table.tobytes())
        assert task.table.shape == (3, 5) and kind_of(task.table) == kind
        assert (build(section).table == task.table).all()
        batch = task.batch(0, "train", 0, 50, (40, 40))
        for ids, labels in zip(batch.input_ids, batch.labels):
            state = 0
            for letter, answer in zip(ids, labels):
                state = task.table[letter][state]
                assert answer == state
        assert set(np.unique(batch.labels)) == set(range(5))
    assert len(tables) == 4


def test_guessing_is_the_most_frequent_state():
    assert build(Task(name="automaton", automaton={"table": KNOWN["A5"][0]})).chance == (
        pytest.approx(1 / 5, abs=1e-6)
    )
    resets = [[0, 0, 0], [0, 0, 0], [1, 2, 0]]  # two letters of three lead to 0
    share = long_run(np.array(resets))
    assert share == pytest.approx(np.array([9, 3, 1]) / 13, abs=0.005)
    task = build(Task(name="automaton", automaton={"table": resets}))
    labels = task.batch(0, "test", 0, 4000, (64, 64)).labels[:, -1]
    assert (labels == 0).mean() == pytest.approx(task.chance, abs=0.03)
    wandering = [[1, 2, 2], [1, 2, 2]]  # ends in state 2, for good
    assert long_run(np.array(wandering)).tolist() == [0, 0, 1]


def test_tables_that_are_none_are_refused():
    for table, message in [
        ([[0, 1], [0]], r"rows have \[1, 2\] numbers"),
        ([[0, 2]], "goes to state 2: its states are 0 to 1"),
        ([[-1, 0]], "goes to state -1"),
        ([[0]], r"two or more; its rows have \[1\]"),
        ([], r"its rows have \[\]"),
        ([[1, 0]] * 27, "has 27 letters: 26 are the most"),
    ]:
        with pytest.raises(TaskError, match=message):
            build(Task(name="automaton", automaton={"table": table}))
    for states, letters in [(4, 3), (5, 1)]:
        with pytest.raises(TaskError, match=f"of {states} states and {letters} letters is unsolv"):
            build(Task(name="automaton", automaton={"states": states, "letters": letters}))
    one = {"states": 3, "letters": 1, "kind": "aperiodic"}
    with pytest.raises(TaskError, match="no aperiodic automaton of 3 states and 1 letters was fou"):
        build(Task(name="automaton", automaton=one))
    with pytest.raises(TaskError, match="states is 7: at most 5 can be drawn"):
        build(Task(name="automaton", automaton={"states": 7}))
    with pytest.raises(TaskError, match="ends in one state, for good"):
        build(Task(name="automaton", automaton={"table": [[1, 2, 2], [1, 2, 2]]}))
    # What is saved of a run with a table can be read again.
    saved = Task(name="automaton", automaton={"table": [[1, 0], [0, 1]]}).model_dump(mode="json")
    assert Task(**saved).automaton.table == ((1, 0), (0, 1))
    with pytest.raises(ValueError, match="`table` is given, so `kind` and `states` would have no"):
        Task(name="automaton", automaton={"table": [[0, 1]], "states": 2, "kind": "solvable"})
