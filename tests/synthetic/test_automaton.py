"""Automata: answers, chance level and invalid tables."""

import numpy as np
import pytest

from synthetic.config import Task
from synthetic.tasks import TaskError, build_task
from synthetic.tasks.automaton import DEFAULT_TABLE, compute_state_frequencies

A5 = [[1, 2, 0, 3, 4], [0, 1, 3, 4, 2]]


def make_task(table=None):
    return build_task(Task(name="automaton", supervision="every", automaton={"table": table}))


@pytest.mark.parametrize(
    "table", [DEFAULT_TABLE, A5, [[0, 1], [0, 0], [1, 1]], [[1, 0, 1], [0, 1, 0]]]
)
def test_answers_match_step_by_step_simulation(table):
    automaton = make_task(table)
    batch = automaton.batch(0, "train", 0, 50, (40, 40))
    for ids, labels in zip(batch.input_ids, batch.labels):
        state = 0
        for symbol, answer in zip(ids, labels):
            state = table[symbol][state]
            assert answer == state
    assert (make_task().table == np.array(DEFAULT_TABLE)).all()


def test_chance_is_the_most_frequent_state():
    assert make_task(A5).chance == pytest.approx(1 / 5, abs=1e-6)
    mostly_resetting = [[0, 0, 0], [0, 0, 0], [1, 2, 0]]  # two of three symbols lead to state 0
    frequencies = compute_state_frequencies(np.array(mostly_resetting))
    assert frequencies == pytest.approx(np.array([9, 3, 1]) / 13, abs=0.005)
    labels = make_task(mostly_resetting).batch(0, "test", 0, 4000, (64, 64)).labels[:, -1]
    assert (labels == 0).mean() == pytest.approx(make_task(mostly_resetting).chance, abs=0.03)
    absorbing = [[1, 2, 2], [1, 2, 2]]  # never leaves state 2
    assert compute_state_frequencies(np.array(absorbing)).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    "table", [[[0, 1], [0]], [[0, 2]], [[-1, 0]], [[0]], [], [[1, 0]] * 27], ids=str
)
def test_invalid_tables_are_refused(table):
    with pytest.raises(TaskError, match="it must have a row for each symbol, at most 26"):
        make_task(table)


def test_table_that_ends_in_one_state_is_refused():
    with pytest.raises(TaskError, match="ends in one state and never leaves it"):
        make_task([[1, 2, 2], [1, 2, 2]])
