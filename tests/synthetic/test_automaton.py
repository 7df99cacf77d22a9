"""Automata: answers by walking, the chance of guessing, tables that are none."""

import numpy as np
import pytest

from synthetic.config import Task
from synthetic.tasks import TaskError, build
from synthetic.tasks.automaton import DEFAULT, long_run

A5 = [[1, 2, 0, 3, 4], [0, 1, 3, 4, 2]]


def task(table=None):
    return build(Task(name="automaton", supervision="every", automaton={"table": table}))


@pytest.mark.parametrize("table", [DEFAULT, A5, [[0, 1], [0, 0], [1, 1]], [[1, 0, 1], [0, 1, 0]]])
def test_answers_are_the_states_of_a_walk(table):
    made = task(table)
    batch = made.batch(0, "train", 0, 50, (40, 40))
    for ids, labels in zip(batch.input_ids, batch.labels):
        state = 0
        for letter, answer in zip(ids, labels):
            state = table[letter][state]
            assert answer == state
    assert (task().table == np.array(DEFAULT)).all()


def test_guessing_is_the_most_frequent_state():
    assert task(A5).chance == pytest.approx(1 / 5, abs=1e-6)
    resets = [[0, 0, 0], [0, 0, 0], [1, 2, 0]]  # two letters of three lead to 0
    share = long_run(np.array(resets))
    assert share == pytest.approx(np.array([9, 3, 1]) / 13, abs=0.005)
    labels = task(resets).batch(0, "test", 0, 4000, (64, 64)).labels[:, -1]
    assert (labels == 0).mean() == pytest.approx(task(resets).chance, abs=0.03)
    wandering = [[1, 2, 2], [1, 2, 2]]  # ends in state 2, for good
    assert long_run(np.array(wandering)).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    "table", [[[0, 1], [0]], [[0, 2]], [[-1, 0]], [[0]], [], [[1, 0]] * 27], ids=str
)
def test_tables_that_are_none_are_refused(table):
    with pytest.raises(TaskError, match="it must have a row for each letter, 26 at most"):
        task(table)


def test_an_automaton_that_ends_in_one_state_asks_for_nothing():
    with pytest.raises(TaskError, match="ends in one state, for good"):
        task([[1, 2, 2], [1, 2, 2]])
