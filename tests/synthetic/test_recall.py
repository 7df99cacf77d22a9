"""Recall by keys: every label against a dictionary that the tokens' names alone fill."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synthetic.config import Task
from synthetic.tasks import IGNORE, TaskError, build


def names(task, batch):
    """Per row its words, and the answers by place."""
    for row, labels in zip(batch.input_ids, batch.labels):
        words = [task.token_name(int(i)) for i in row]
        yield words, {int(i): task.token_name(int(labels[i])) for i in np.flatnonzero(labels >= 0)}


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 40), st.integers(1, 5), st.integers(0, 40), st.integers(0, 2**20))
def test_mqar_asks_for_every_key_once_and_the_answer_is_its_value(keys, pairs, more, seed):
    pairs = min(keys, pairs)
    task = build(Task(name="mqar", alphabet=keys, pairs=pairs))
    length = 4 * pairs + 2 * more
    batch = task.batch(seed, "test", 0, 8, (length, length))
    assert batch.input_ids.shape == (8, length) and batch.mask is None
    for words, answers in names(task, batch):
        told = dict(zip(words[: 2 * pairs : 2], words[1 : 2 * pairs : 2]))
        assert len(told) == pairs == len(set(told.values()))
        assert all(k[0] == "k" and v[0] == "v" for k, v in told.items())
        assert sorted(words[place] for place in answers) == sorted(told)
        assert all(place >= 2 * pairs and place % 2 == 0 for place in answers)
        assert all(told[words[place]] == answer for place, answer in answers.items())


def test_mqar_has_a_sixteenth_of_its_length_as_pairs_and_asks_near_first():
    task = build(Task(name="mqar", alphabet=64))
    for length, pairs in ((16, 1), (64, 4), (128, 8), (512, 32)):
        assert (task.batch(0, "test", 0, 5, (length, length)).labels >= 0).sum(1).tolist() == [
            pairs
        ] * 5
    labels = task.batch(0, "train", 0, 4000, (64, 64)).labels
    asked = (labels >= 0).mean(0)[8::2]  # 28 places for 4 keys, by x^−0.99 without replacement
    weights = np.arange(1, 29) ** -0.99
    first = weights[0] / weights.sum()
    assert asked[0] > 4 * first * 0.7 and asked[0] < 1 - (1 - first) ** 4 + 0.3
    assert asked[0] > 2 * asked[3] > 4 * asked[20] > 0
    assert asked.sum() == pytest.approx(4)


@st.composite
def recalls(draw):
    name = draw(st.sampled_from(["in_context_recall", "noisy_recall", "fuzzy_recall"]))
    letters = draw(st.integers(2, 8))
    ngram = draw(st.integers(1, min(3, letters)))
    task = build(Task(name=name, alphabet=letters, ngram=ngram, noise=draw(st.floats(0, 0.9))))
    length = task.min_length + task.length_step * draw(st.integers(0, 40))
    split = draw(st.sampled_from(["train", "valid", "test"]))
    return task, split, task.batch(draw(st.integers(0, 2**20)), split, 0, 6, (length, length))


@settings(max_examples=80, deadline=None)
@given(recalls())
def test_a_key_that_came_before_is_answered_by_its_value(case):
    task, split, batch = case
    longest = task.motifs.shape[1]
    for words, answers in names(task, batch):
        words = [word for word in words if word != "_"]
        expected, told, place = {}, {}, 0
        while place < len(words):
            if words[place][0] == "n":  # noise comes in twos
                assert words[place + 1][0] == "n" and task.name == "noisy_recall"
                place += 2
                continue
            ends = [place]
            for kind in "kv":
                end = ends[-1]
                while end < len(words) and words[end][0] == kind:
                    end += 1
                ends.append(end)
            key, value = tuple(words[ends[0] : ends[1]]), tuple(words[ends[1] : ends[2]])
            assert 1 <= len(key) <= longest and 1 <= len(value) <= longest
            assert len(set(key)) == len(key) and len(set(value)) == len(value)
            assert split == "train" or len(key) == longest
            if key in told:
                assert told[key] == value
                expected |= {at: words[at + 1] for at in range(ends[1] - 1, ends[2] - 1)}
            told[key] = value
            place = ends[2]
        assert answers == expected
        assert answers, "the last key has come before"


def test_sizes_that_cannot_be_are_refused():
    for section, message in [
        (
            {"name": "mqar", "alphabet": 2, "pairs": 4},
            "mqar: 4 pairs, at length 16, have keys that",
        ),
        (
            {"name": "fuzzy_recall", "alphabet": 3, "ngram": 4},
            "task.ngram is 4, and task.alphabet 3",
        ),
        ({"name": "fuzzy_recall", "alphabet": 26, "ngram": 5}, "at most 10,000 different ones"),
    ]:
        with pytest.raises(TaskError, match=message):
            build(Task(**section))
    with pytest.raises(TaskError, match="mqar: 8 pairs, at length 128"):
        build(Task(name="mqar", alphabet=7)).check_length(128)


def test_guessing_a_letter_of_a_value_that_did_not_come_yet_is_chance():
    task = build(Task(name="fuzzy_recall", alphabet=4, ngram=2))
    assert task.chance == pytest.approx((2 / 4 + 1 / 3) / 3)


def test_noise_is_as_frequent_as_is_said():
    task = build(Task(name="noisy_recall", alphabet=8, noise=0.2))
    ids = task.batch(0, "train", 0, 500, (128, 128)).input_ids
    noise = (ids >= 16).reshape(500, 64, 2)
    assert noise.all(2).mean() == noise.any(2).mean() == pytest.approx(0.2 * 62 / 64, abs=0.01)
    assert not build(Task(name="in_context_recall")).noise


def test_values_are_uniform_whatever_the_key():
    task = build(Task(name="in_context_recall", alphabet=8))
    batch = task.batch(0, "test", 0, 2000, (32, 32))
    values = batch.labels[batch.labels != IGNORE] - 8
    counts = np.bincount(values, minlength=8) / len(values)
    assert np.abs(counts * 8 - 1).max() < 0.06
    assert task.chance == 1 / 8
