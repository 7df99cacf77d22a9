"""Recall tasks: labels against a dictionary built from the names of the tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synthetic.config import Task
from synthetic.tasks import IGNORE, TaskError, build_task


def iterate_named_rows(task, batch):
    """Yield for each row the names of its tokens, and its answers by position."""
    for row, labels in zip(batch.input_ids, batch.labels):
        tokens = [task.token_name(int(i)) for i in row]
        yield tokens, {int(i): task.token_name(int(labels[i])) for i in np.flatnonzero(labels >= 0)}


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 40), st.integers(1, 5), st.integers(0, 40), st.integers(0, 2**20))
def test_mqar_queries_every_key_once(keys, pairs, more, seed):
    pairs = min(keys, pairs)
    task = build_task(Task(name="mqar", alphabet=keys, pairs=pairs))
    length = 4 * pairs + 2 * more
    batch = task.batch(seed, "test", 0, 8, (length, length))
    assert batch.input_ids.shape == (8, length) and batch.mask is None
    for tokens, answers in iterate_named_rows(task, batch):
        values = dict(zip(tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2]))
        assert len(values) == pairs == len(set(values.values()))
        assert all(k[0] == "k" and v[0] == "v" for k, v in values.items())
        assert sorted(tokens[position] for position in answers) == sorted(values)
        assert all(position >= 2 * pairs and position % 2 == 0 for position in answers)
        assert all(values[tokens[position]] == answer for position, answer in answers.items())


def test_mqar_pair_count_and_distance_distribution():
    task = build_task(Task(name="mqar", alphabet=64))
    for length, pairs in ((16, 1), (64, 4), (128, 8), (512, 32)):
        labels = task.batch(0, "test", 0, 5, (length, length)).labels
        assert (labels >= 0).sum(1).tolist() == [pairs] * 5
    labels = task.batch(0, "train", 0, 4000, (64, 64)).labels
    # The 4 queries have 28 possible positions with weights x^−0.99, drawn without replacement.
    query_frequency = (labels >= 0).mean(0)[8::2]  # four pairs have 8 tokens
    weights = np.arange(1, 29) ** -0.99
    first = weights[0] / weights.sum()
    assert 4 * first * 0.7 < query_frequency[0] < 1 - (1 - first) ** 4 + 0.3
    assert query_frequency[0] > 2 * query_frequency[3] > 4 * query_frequency[20] > 0
    assert query_frequency.sum() == pytest.approx(4)


@st.composite
def draw_recall_batches(draw):
    name = draw(st.sampled_from(["in_context_recall", "noisy_recall", "fuzzy_recall"]))
    alphabet = draw(st.integers(2, 8))
    ngram = draw(st.integers(1, min(3, alphabet)))
    task = build_task(
        Task(name=name, alphabet=alphabet, ngram=ngram, noise=draw(st.floats(0, 0.9)))
    )
    length = task.min_length + task.length_step * draw(st.integers(0, 40))
    split = draw(st.sampled_from(["train", "valid", "test"]))
    return task, split, task.batch(draw(st.integers(0, 2**20)), split, 0, 6, (length, length))


@settings(max_examples=80, deadline=None)
@given(draw_recall_batches())
def test_repeated_keys_are_answered_by_their_value(case):
    task, split, batch = case
    max_size = task.motifs.shape[1]
    for tokens, answers in iterate_named_rows(task, batch):
        tokens = [token for token in tokens if token != "_"]
        expected, values, position = {}, {}, 0
        while position < len(tokens):
            if tokens[position][0] == "n":  # noise tokens come in pairs
                assert tokens[position + 1][0] == "n" and task.name == "noisy_recall"
                position += 2
                continue
            key_end = position
            while tokens[key_end][0] == "k":
                key_end += 1
            end = key_end  # of the value
            while end < len(tokens) and tokens[end][0] == "v":
                end += 1
            key, value = tuple(tokens[position:key_end]), tuple(tokens[key_end:end])
            assert 1 <= len(key) <= max_size and 1 <= len(value) <= max_size
            assert len(set(key)) == len(key) and len(set(value)) == len(value)
            assert split == "train" or len(key) == max_size
            if key in values:
                assert values[key] == value
                expected |= {i: tokens[i + 1] for i in range(key_end - 1, end - 1)}
            values[key] = value
            position = end
        assert answers == expected
        assert answers, "the last key must be a repeated one"


def test_impossible_sizes_are_refused():
    for section, message in [
        ({"name": "mqar", "alphabet": 2, "pairs": 4}, "mqar: 4 pairs, at length 16, need as many"),
        (
            {"name": "fuzzy_recall", "alphabet": 3, "ngram": 4},
            "task.ngram is 4, and task.alphabet 3",
        ),
        ({"name": "fuzzy_recall", "alphabet": 26, "ngram": 5}, "at most 10,000 of them"),
    ]:
        with pytest.raises(TaskError, match=message):
            build_task(Task(**section))
    with pytest.raises(TaskError, match="mqar: 8 pairs, at length 128"):
        build_task(Task(name="mqar", alphabet=7)).check_length(128)


def test_chance_accounts_for_different_tokens_of_a_value():
    task = build_task(Task(name="fuzzy_recall", alphabet=4, ngram=2))
    # Of three value tokens two are the first of a value (one or two tokens, equally often): one of
    # four tokens. The third is a second token: one of the three others.
    assert task.chance == pytest.approx((2 / 4 + 1 / 3) / 3)


def test_noise_has_the_configured_frequency():
    task = build_task(Task(name="noisy_recall", alphabet=8, noise=0.2))
    ids = task.batch(0, "train", 0, 500, (128, 128)).input_ids
    noise = (ids >= 16).reshape(500, 64, 2)  # ids: 8 keys, 8 values, then noise
    # The first and the last pair of a row are never noise.
    assert noise.all(2).mean() == noise.any(2).mean() == pytest.approx(0.2 * 62 / 64, abs=0.01)
    assert not build_task(Task(name="in_context_recall")).noise


def test_values_are_uniform():
    task = build_task(Task(name="in_context_recall", alphabet=8))
    batch = task.batch(0, "test", 0, 2000, (32, 32))
    values = batch.labels[batch.labels != IGNORE] - 8
    counts = np.bincount(values, minlength=8) / len(values)
    assert np.abs(counts * 8 - 1).max() < 0.06
    assert task.chance == 1 / 8
