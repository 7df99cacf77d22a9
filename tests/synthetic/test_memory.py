"""Selective copying and memorization, by the tokens' names."""

import numpy as np

from synthetic.config import Task
from synthetic.tasks import IGNORE, build


def test_selective_copying_says_the_letters_in_order():
    task = build(Task(name="selective_copying", alphabet=14, content=6))
    batch = task.batch(0, "train", 0, 400, (30, 30))
    for ids, labels in zip(batch.input_ids, batch.labels):
        words = [task.token_name(int(i)) for i in ids]
        bar = words.index("|")
        letters = [word for word in words[:bar] if word != "_"]
        assert bar == 30 - 6 - 1 and len(letters) == 6 and words[bar + 1 :] == ["_"] * 6
        assert [task.token_name(int(i)) for i in labels[bar + 1 :]] == letters
        assert (labels[: bar + 1] == IGNORE).all()
    share = (batch.input_ids[:, :23] < 14).mean(0)  # every place holds a letter as often
    assert np.abs(share * 23 / 6 - 1).max() < 0.4
    assert len(np.unique(batch.input_ids[batch.input_ids < 14])) == 14


def test_the_dictionary_of_memorization_is_one_for_all():
    told = {}
    for seed, split, length in [(0, "train", 32), (1, "test", 32), (5, "valid", 8)]:
        task = build(Task(name="memorization", alphabet=20))
        batch = task.batch(seed, split, 0, 200, (length, length))
        assert (batch.labels[:, ::2] == IGNORE).all()
        for ids, labels in zip(batch.input_ids, batch.labels):
            words = [task.token_name(int(i)) for i in ids]
            assert set(words[1::2]) == {"?"}
            for key, value in zip(words[::2], labels[1::2]):
                assert told.setdefault(key, value) == value
    assert sorted(told) == sorted(f"k{i}" for i in range(20))
    assert sorted(told.values()) == list(range(20, 40))  # each value is one key's
    assert [told[f"k{i}"] - 20 for i in range(20)] != list(range(20))
