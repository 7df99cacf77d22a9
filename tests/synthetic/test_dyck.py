"""Nested brackets: answers against an oracle that deletes matched pairs."""

import re

import numpy as np
import pytest

from synthetic.config import Task
from synthetic.tasks import IGNORE, TaskError, build_task


def find_open_brackets(text: str) -> str:
    """Return the brackets that remain after all matched pairs are deleted."""
    while (shorter := re.sub(r"\(\)|\[\]|\{\}|<>", "", text)) != text:
        text = shorter
    return text


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("brackets, depth", [(1, 2), (1, 4), (2, 3), (4, 8)])
def test_the_answer_is_the_innermost_open_bracket(brackets, depth, split):
    task = build_task(Task(name="dyck", brackets=brackets, depth=depth, supervision="every"))
    batch = task.batch(0, split, 0, 30, (20, 30))
    max_depth = 0
    for ids, labels in zip(batch.input_ids, batch.labels):
        text = task.text(ids).rstrip("_")
        for end in range(1, len(text) + 1):
            stack = find_open_brackets(text[:end])
            assert not re.search(r"[)\]}>]", stack), "a bracket closes one that is not open"
            assert labels[end - 1] == (1 + "([{<".index(stack[-1]) if stack else 0)
            max_depth = max(max_depth, len(stack))
        assert (labels[len(text) :] == IGNORE).all()
    assert max_depth == depth


def test_count_contents_counts_all_sequences():
    task = build_task(Task(name="dyck", brackets=2, depth=3))
    for length in range(1, 8):
        ids = task.draw(np.random.default_rng(0), 20_000, length)
        assert len(np.unique(ids, axis=0)) == task.count_contents(length)


def test_chance_is_the_most_frequent_answer():
    for brackets, depth in [(1, 3), (2, 8), (2, 4), (3, 2)]:
        task = build_task(Task(name="dyck", brackets=brackets, depth=depth))
        # With one kind of bracket, the answer at odd lengths is always the same.
        for length in (400, 401) if brackets > 1 else (400,):
            batch = task.batch(0, "train", 0, 3000, (length, length))
            frequencies = np.bincount(batch.labels[:, -1]) / 3000
            (chance,) = task.chance_at(np.array([length]))
            assert frequencies.max() == pytest.approx(chance, abs=0.04)
            guess = np.full(batch.labels.shape, frequencies.argmax())
            assert abs(task.score(guess, batch)["scaled_accuracy"].mean()) < 0.06
    with pytest.raises(
        TaskError, match=r"task\.depth is 1: after an even number of brackets all are"
    ):
        build_task(Task(name="dyck", brackets=1, depth=1))
