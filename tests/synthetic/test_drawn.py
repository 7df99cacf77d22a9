"""Tasks whose rows are drawn whole: no test row is, or begins, a training row; shapes, lengths."""

import numpy as np
import pytest

from synthetic import tasks
from synthetic.config import Task
from synthetic.tasks import TaskError, splits

# Each task, a length at which its splits are held apart, one at which there are too few samples for
# that (None: there is none), and the training lengths.
HELD = {
    "mqar": ({"name": "mqar", "alphabet": 16, "pairs": 2}, 12, None, (8, 20)),
    "in_context": ({"name": "in_context_recall", "alphabet": 4}, 14, 4, (4, 20)),
    "noisy": ({"name": "noisy_recall", "alphabet": 4}, 16, 4, (4, 20)),
    "fuzzy": ({"name": "fuzzy_recall", "alphabet": 4, "ngram": 2}, 18, 8, (8, 24)),
    "selective": ({"name": "selective_copying", "alphabet": 8, "content": 5}, 16, None, (11, 20)),
    "memorization": ({"name": "memorization", "alphabet": 8}, 12, 6, (2, 16)),
    "repl": ({"name": "repl", "variables": 3}, 8, 3, (2, 10)),
}
UPDATES = 150


def task_of(name):
    return tasks.build(Task(**HELD[name][0]))


def content(task, ids):
    """What a row is about, read off its tokens: of MQAR the pairs, of selective copying the letters
    in order; else all of it."""
    words = [task.token_name(int(i)) for i in ids]
    if task.name == "mqar":
        return tuple(words[: 2 * task.pairs])
    if task.name == "selective_copying":
        return tuple(word for word in words if word not in "_|")
    return tuple(word for word in words if word != "_")


@pytest.mark.parametrize("name", HELD)
def test_no_row_of_a_test_or_validation_set_begins_a_row_of_training(name):
    task, (_, length, short, lengths) = task_of(name), HELD[name]
    assert task.held_apart(length) and not (short and task.held_apart(short))
    batches = [task.batch(0, "train", i, 64, lengths) for i in range(UPDATES)]
    trained = {content(task, ids) for batch in batches for ids in batch.input_ids}
    beginnings = {row[:end] for row in trained for end in range(1, len(row) + 1)}
    rows = {}
    for split, seed in [("valid", 0), ("test", 0), ("test", 5)]:
        batches = [task.batch(seed, split, i, 100, (length, length)) for i in range(5)]
        rows[split, seed] = {content(task, ids) for batch in batches for ids in batch.input_ids}
        assert len(rows[split, seed]) > 30
        assert not rows[split, seed] & beginnings
    assert not rows["valid", 0] & (rows["test", 0] | rows["test", 5])


@pytest.mark.parametrize("name", HELD)
def test_batches_are_whole_and_depend_on_their_arguments_alone(name):
    task, lengths = task_of(name), HELD[name][3]
    for split in tasks.SPLITS:
        batch = task.batch(3, split, 2, 16, lengths)
        tasks.check_batch(name, task, batch)
        again = task.batch(3, split, 2, 16, lengths)
        other = task.batch(3, split, 3, 16, lengths)
        assert (batch.input_ids == again.input_ids).all() and (batch.labels == again.labels).all()
        assert not np.array_equal(batch.input_ids, other.input_ids)
        if batch.mask is not None:
            assert (np.diff(batch.mask.astype(int), axis=1) <= 0).all()
            assert (batch.labels[~batch.mask] == tasks.IGNORE).all()


@pytest.mark.parametrize("name", HELD)
def test_lengths_that_no_row_has_are_refused(name):
    task = task_of(name)
    task.check_length(task.shortest)
    with pytest.raises(TaskError, match=f"has no sequences of length {task.shortest - 1}: it has"):
        task.check_length(task.shortest - 1)
    if task.apart == 2:
        with pytest.raises(TaskError, match=f"lengths {task.shortest}, {task.shortest + 2}, "):
            task.check_length(task.shortest + 1)


def test_rows_of_a_split_are_redrawn_whole():
    """Labels and content of a redrawn row are those of its new ids."""
    task = tasks.build(Task(name="selective_copying", alphabet=8, content=5))
    batch = task.batch(0, "valid", 0, 500, (16, 16))
    letters = np.array([row[row < 8] for row in batch.input_ids])
    assert (batch.labels[:, -5:] == letters).all()
    assert splits.is_of("valid", splits.keys(letters[:, : task.opening])).all()
