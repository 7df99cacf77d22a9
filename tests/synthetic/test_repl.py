"""Sessions of the repl task, executed by Python itself."""

import contextlib
import io

import numpy as np
import pytest

from synthetic.config import Task
from synthetic.tasks import IGNORE, build_task


@pytest.mark.parametrize("variables", [2, 5, 9])
def test_answers_are_what_python_prints(variables):
    task = build_task(Task(name="repl", variables=variables))
    batch = task.batch(0, "train", 0, 40, (12, 12))
    for ids, labels in zip(batch.input_ids, batch.labels):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(task.text(ids).replace(">>>", ""), {})
        answer_positions = np.flatnonzero(labels != IGNORE)
        assert [task.tokens[i] for i in labels[answer_positions]] == output.getvalue().split()
        assert len(answer_positions) == 13  # before the first swap and after each of 12
        assert all(task.tokens[ids[i]] == ")" for i in answer_positions)


def test_all_swaps_and_assignments_occur():
    task = build_task(Task(name="repl", variables=4))
    ids = task.batch(0, "train", 0, 300, (1, 1)).input_ids
    swap_lines = [task.text(row).split("\n")[2] for row in ids]  # ">>>a,b=b,a"
    swaps = {tuple(sorted((line[3], line[5]))) for line in swap_lines}
    assert len(swaps) == 6  # pairs of four variables
    first = {task.text(row).split("\n")[0] for row in ids}
    assert len(first) == 24  # every order of the values
    assert task.vocab_size == 14 and task.chance == 1 / 4
    assert [task.token_name(i) for i in (0, 4, 8, 13)] == ["a", "1", ">>>", "⏎"]
