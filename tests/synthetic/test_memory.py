"""Selective copying and memorization, checked by the names of their tokens."""

import numpy as np

from synthetic.config import Task
from synthetic.tasks import IGNORE, build_task


def test_selective_copying_repeats_content_in_order():
    task = build_task(Task(name="selective_copying", alphabet=14, content=6))
    batch = task.batch(0, "train", 0, 400, (30, 30))
    for ids, labels in zip(batch.input_ids, batch.labels):
        names = [task.token_name(int(i)) for i in ids]
        separator = names.index("|")
        content = [name for name in names[:separator] if name != "_"]
        assert separator == 30 - 6 - 1 and len(content) == 6 and names[separator + 1 :] == ["_"] * 6
        assert [task.token_name(int(i)) for i in labels[separator + 1 :]] == content
        assert (labels[: separator + 1] == IGNORE).all()
    # All 23 positions before the separator are equally likely for the 6 content tokens.
    frequencies = (batch.input_ids[:, :23] < 14).mean(0)
    assert np.abs(frequencies * 23 / 6 - 1).max() < 0.4
    assert len(np.unique(batch.input_ids[batch.input_ids < 14])) == 14


def test_memorization_uses_one_fixed_dictionary():
    values = {}
    for seed, split, length in [(0, "train", 32), (1, "test", 32), (5, "valid", 8)]:
        task = build_task(Task(name="memorization", alphabet=20))
        batch = task.batch(seed, split, 0, 200, (length, length))
        assert (batch.labels[:, ::2] == IGNORE).all()
        for ids, labels in zip(batch.input_ids, batch.labels):
            names = [task.token_name(int(i)) for i in ids]
            assert set(names[1::2]) == {"?"}
            for key, value in zip(names[::2], labels[1::2]):
                assert values.setdefault(key, value) == value
    assert sorted(values) == sorted(f"k{i}" for i in range(20))
    assert sorted(values.values()) == list(range(20, 40))  # each value belongs to one key
    assert [values[f"k{i}"] - 20 for i in range(20)] != list(range(20))
