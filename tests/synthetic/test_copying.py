"""Copying and n-gram look-up: examples against an oracle, packing, labels and metrics."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synthetic.config import Task
from synthetic.tasks import IGNORE, TaskError, build_task
from synthetic.tasks.copying import Copying

NAMES = ("copy", "suffix_ngram")


def compute_answer(text: str, task_name: str, ngram: int) -> str:
    """Compute the answer to the prompt at the beginning of an example's text."""
    string, after_separator = text.removeprefix("$").split("|")
    if task_name == "copy":
        return string + "."
    key = after_separator[:ngram]
    start = string.find(key) + ngram
    return string[start : start + ngram] + "."


def make_task(name: str, **fields) -> Copying:
    return build_task(Task(name=name, **fields))


def split_examples(row: str) -> list[str]:
    """Split `$…|….$…|….***` into its examples."""
    return [part + "." for part in row.rstrip("*").split(".")[:-1]]


def read_string(example: str) -> str:
    return example.strip("$").split("|")[0]


@st.composite
def draw_cases(draw):
    name = draw(st.sampled_from(NAMES))
    alphabet = draw(st.integers(2, 30))
    n = draw(st.integers(1, 4))
    shortest = draw(st.integers(1, 20))
    longest = max(shortest, 2 * n) + draw(st.integers(0, 10))
    fields = {"alphabet": alphabet, "ngram": n, "context": draw(st.integers(80, 200))}
    split = draw(st.sampled_from(["train", "valid"]))
    return make_task(name, **fields), draw(st.integers(0, 2**30)), split, (shortest, longest)


@settings(max_examples=60, deadline=None)
@given(draw_cases())
def test_examples_and_labels_match_oracle(case):
    dataset, seed, split, lengths = case
    batch = dataset.batch(seed, split, 0, 5, lengths)
    for ids, labels in zip(batch.input_ids, batch.labels):
        expected = ""
        for example in split_examples(dataset.text(ids)):
            answer = compute_answer(example, dataset.name, dataset.n)
            s = read_string(example)
            assert max(lengths[0], dataset.min_length) <= len(s) <= lengths[1]
            assert example.endswith(answer) and len(example) == dataset.count_tokens(len(s))
            # One token ahead: the answer begins on the last token of the prompt.
            expected += " " * (len(example) - len(answer) - 1) + answer + " "
        actual = "".join(dataset.text([i]) if i != IGNORE else " " for i in labels)
        assert actual == expected.ljust(len(ids))


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 5), st.integers(1, 4), st.integers(0, 2**30))
def test_keys_are_unique_unless_the_alphabet_is_too_small(alphabet, n, seed):
    dataset = make_task("suffix_ngram", alphabet=alphabet, ngram=n)
    rows = dataset.batch(seed, "valid", 0, 20, (2 * n, 2 * n + 40)).input_ids
    for ids in rows:
        (example,) = split_examples(dataset.text(ids))
        s, key = read_string(example), example.split("|")[1][:n]
        occurrences = [i for i in range(len(s) - n + 1) if s[i : i + n] == key]
        assert len(occurrences) == 1 or max(alphabet, n) == 2
        assert occurrences[0] <= len(s) - 2 * n  # the value fits after it


@pytest.mark.parametrize("alphabet, n", [(3, 1), (2, 3)])
def test_unique_keys_leave_all_values_possible(alphabet, n):
    dataset = make_task("suffix_ngram", alphabet=alphabet, ngram=n)
    rows = dataset.batch(0, "valid", 0, 400, (64, 64)).input_ids
    pairs = {dataset.text(ids)[-2 * n - 1 : -1] for ids in rows}  # key and value, before the `.`
    assert {p[:n] for p in pairs} == {p[n:] for p in pairs}  # every n-gram is a key and a value
    assert len({p[:n] for p in pairs}) == alphabet**n


def test_vocabulary_is_the_alphabet_and_four_special_tokens():
    dataset = make_task("copy")
    assert (dataset.vocab_size, dataset.chance) == (30, 1 / 26)
    assert dataset.text(range(30)) == "abcdefghijklmnopqrstuvwxyz$|.*"
    assert len(set(make_task("copy", alphabet=100).text(range(104)))) == 104
    ids = dataset.batch(0, "train", 0, 1000, (1, 30)).input_ids
    assert np.bincount(ids[ids < 26]).min() > 0.9 * (ids < 26).sum() / 26


@pytest.mark.parametrize("name", NAMES)
def test_contexts_hold_as_many_examples_as_fit(name):
    dataset = make_task(name, context=100)
    batch = dataset.batch(0, "train", 0, 200, (4, 20))
    assert batch.input_ids.shape == batch.labels.shape == batch.mask.shape == (200, 100)
    assert ((batch.input_ids != dataset.pad) == batch.mask).all()
    assert (batch.labels[~batch.mask] == IGNORE).all()
    assert (np.diff(batch.mask.astype(int), axis=1) <= 0).all()  # only on the right
    assert (batch.mask.sum(1) > 100 - dataset.count_tokens(20)).all()
    rows = [split_examples(dataset.text(ids)) for ids in batch.input_ids]
    assert {len(read_string(e)) for row in rows for e in row} == set(range(4, 21))


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_has_one_example_per_row(name):
    dataset = make_task(name, context=10)  # evaluation ignores the context
    batch = dataset.batch(0, "valid", 0, 50, (10, 12))
    rows = [dataset.text(ids) for ids in batch.input_ids]
    assert all(len(split_examples(row)) == 1 for row in rows)
    assert batch.input_ids.shape[1] == dataset.count_tokens(12)
    assert batch.mask.sum(1).tolist() == [len(row.rstrip("*")) for row in rows]
    equal_lengths = dataset.batch(0, "test", 0, 50, (10, 10))
    assert equal_lengths.mask is None
    assert equal_lengths.input_ids.shape == (50, dataset.count_tokens(10))


def average_scores(dataset: Copying, predicted: np.ndarray, batch) -> dict:
    return {name: values.mean() for name, values in dataset.score(predicted, batch).items()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("split", ["train", "valid"])
def test_perfect_answers_score_one_and_guesses_chance(name, split):
    dataset = make_task(name, alphabet=4)
    batch = dataset.batch(0, split, 0, 100, (10, 20))
    perfect = average_scores(dataset, batch.labels, batch)
    assert perfect == {"character_accuracy": 1, "string_accuracy": 1}
    guess = np.random.default_rng(0).integers(4, size=batch.labels.shape)
    scores = average_scores(dataset, guess, batch)
    assert abs(scores["character_accuracy"] - dataset.chance) < 0.1
    assert scores["string_accuracy"] == 0  # guesses never include the end token


def test_one_mistake_costs_one_example():
    dataset = make_task("copy", context=100)
    batch = dataset.batch(0, "train", 0, 3, (5, 5))  # seven examples of 13 tokens a row
    row, ends = 1, np.flatnonzero(batch.labels[1] == dataset.end)
    # At an end token, at the last character of an example, and at the first.
    for position, wrong_characters in [(ends[2], 0), (ends[3] - 1, 1), (ends[6] - 5, 1)]:
        predicted = batch.labels.copy()
        predicted[row, position] = dataset.pad
        scores = dataset.score(predicted, batch)
        assert scores["string_accuracy"].shape == (21,)
        assert (scores["string_accuracy"] == 0).sum() == 1
        assert (scores["character_accuracy"] == 0).sum() == wrong_characters
    predicted[row, ends[3]] = predicted[0, ends[0]] = dataset.pad
    # Three of 21 examples are wrong: these two, and the last one of the loop.
    assert dataset.score(predicted, batch)["string_accuracy"].sum() == 18


@pytest.mark.parametrize(
    "name, lengths, message",
    [
        ("copy", (0, 0), "copy has no sequences of length 0: it has lengths 1, 2, 3, …"),
        ("suffix_ngram", (2, 5), "suffix_ngram has no sequences of length 5: it has lengths 6, 7,"),
    ],
)
def test_short_strings_are_refused(name, lengths, message):
    with pytest.raises(TaskError, match=message):
        make_task(name, ngram=3).batch(0, "valid", 0, 2, lengths)


@pytest.mark.parametrize("name, longest", [("copy", 126), ("suffix_ngram", 249)])
def test_strings_longer_than_the_context_are_refused(name, longest):
    dataset = make_task(name, context=256)
    dataset.batch(0, "train", 0, 2, (longest, longest))
    with pytest.raises(TaskError) as error:
        dataset.batch(0, "train", 0, 2, (longest, longest + 1))
    assert f"needs a context of {dataset.count_tokens(longest + 1)} tokens" in str(error.value)
    assert dataset.count_tokens(longest) <= 256 < dataset.count_tokens(longest + 1)
