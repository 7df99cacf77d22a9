"""Copying and n-gram look-up: the generator against the oracle, packing, labels and metrics."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synthetic.config import Task
from synthetic.tasks import IGNORE, TaskError, build
from synthetic.tasks.copying import Copying

NAMES = ("copy", "suffix_ngram")


def oracle(text: str, task_name: str, ngram: int) -> str:
    """The answer to a prompt, or to the prompt that an example's text begins with."""
    s, key = text.removeprefix("$").split("|")
    if task_name == "copy":
        return s + "."
    key = key[:ngram]
    after = s.find(key) + ngram
    return s[after : after + ngram] + "."


def task(name: str, **fields) -> Copying:
    return build(Task(name=name, **fields))


def examples(row: str) -> list[str]:
    """`$…|….$…|….***` → its examples."""
    return [part + "." for part in row.rstrip("*").split(".")[:-1]]


def the_string(example: str) -> str:
    return example.strip("$").split("|")[0]


@st.composite
def cases(draw):
    name, letters, n = (
        draw(st.sampled_from(NAMES)),
        draw(st.integers(2, 30)),
        draw(st.integers(1, 4)),
    )
    shortest = draw(st.integers(1, 20))
    longest = max(shortest, 2 * n) + draw(st.integers(0, 10))
    fields = {"alphabet": letters, "ngram": n, "context": draw(st.integers(80, 200))}
    split = draw(st.sampled_from(["train", "valid"]))
    return task(name, **fields), draw(st.integers(0, 2**30)), split, (shortest, longest)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_example_is_a_prompt_and_the_oracles_answer(case):
    made, seed, split, lengths = case
    batch = made.batch(seed, split, 0, 5, lengths)
    for ids, labels in zip(batch.input_ids, batch.labels):
        expected = ""
        for example in examples(made.text(ids)):
            answer = oracle(example, made.name, made.n)
            s = the_string(example)
            assert max(lengths[0], made.min_length) <= len(s) <= lengths[1]
            assert example.endswith(answer) and len(example) == made.tokens(len(s))
            # One token ahead: the answer begins on the last token of the prompt.
            expected += " " * (len(example) - len(answer) - 1) + answer + " "
        written = "".join(made.text([i]) if i != IGNORE else " " for i in labels)
        assert written == expected.ljust(len(ids))


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 5), st.integers(1, 4), st.integers(0, 2**30))
def test_the_key_is_unique_wherever_that_leaves_the_string_to_chance(letters, n, seed):
    made = task("suffix_ngram", alphabet=letters, ngram=n)
    rows = made.batch(seed, "valid", 0, 20, (2 * n, 2 * n + 40)).input_ids
    for (example,) in (examples(made.text(ids)) for ids in rows):
        s, key = the_string(example), example.split("|")[1][:n]
        occurrences = [i for i in range(len(s) - n + 1) if s[i : i + n] == key]
        assert len(occurrences) == 1 or max(letters, n) == 2
        assert occurrences[0] <= len(s) - 2 * n


@pytest.mark.parametrize("letters, n", [(3, 1), (2, 3)])
def test_unique_keys_do_not_make_a_value_certain(letters, n):
    made = task("suffix_ngram", alphabet=letters, ngram=n)
    rows = made.batch(0, "valid", 0, 400, (64, 64)).input_ids
    pairs = {made.text(ids)[-2 * n - 1 : -1] for ids in rows}
    assert {p[:n] for p in pairs} == {p[n:] for p in pairs}  # every n-gram is a key and a value
    assert len({p[:n] for p in pairs}) == letters**n


def test_tokens_are_the_letters_and_four_more():
    made = task("copy")
    assert (made.vocab_size, made.chance) == (30, 1 / 26)
    assert made.text(range(30)) == "abcdefghijklmnopqrstuvwxyz$|.*"
    assert len(set(task("copy", alphabet=100).text(range(104)))) == 104
    ids = made.batch(0, "train", 0, 1000, (1, 30)).input_ids
    assert np.bincount(ids[ids < 26]).min() > 0.9 * (ids < 26).sum() / 26


@pytest.mark.parametrize("name", NAMES)
def test_a_context_is_packed_with_as_many_examples_as_fit(name):
    made = task(name, context=100)
    batch = made.batch(0, "train", 0, 200, (4, 20))
    assert batch.input_ids.shape == batch.labels.shape == batch.mask.shape == (200, 100)
    assert ((batch.input_ids != made.pad) == batch.mask).all()
    assert (batch.labels[~batch.mask] == IGNORE).all()
    assert (np.diff(batch.mask.astype(int), axis=1) <= 0).all()  # only on the right
    assert (batch.mask.sum(1) > 100 - made.tokens(20)).all()
    rows = [examples(made.text(ids)) for ids in batch.input_ids]
    assert {len(the_string(e)) for row in rows for e in row} == set(range(4, 21))


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_has_one_example_a_row(name):
    made = task(name, context=10)  # which concerns training alone
    batch = made.batch(0, "valid", 0, 50, (10, 12))
    rows = [made.text(ids) for ids in batch.input_ids]
    assert all(len(examples(row)) == 1 for row in rows)
    assert batch.input_ids.shape[1] == made.tokens(12)
    assert batch.mask.sum(1).tolist() == [len(row.rstrip("*")) for row in rows]
    same = made.batch(0, "test", 0, 50, (10, 10))
    assert same.mask is None and same.input_ids.shape == (50, made.tokens(10))


def means(made: Copying, predicted: np.ndarray, batch) -> dict:
    return {name: values.mean() for name, values in made.score(predicted, batch).items()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("split", ["train", "valid"])
def test_perfect_answers_score_one_and_guesses_at_chance(name, split):
    made = task(name, alphabet=4)
    batch = made.batch(0, split, 0, 100, (10, 20))
    assert means(made, batch.labels, batch) == {"character_accuracy": 1, "string_accuracy": 1}
    guess = np.random.default_rng(0).integers(4, size=batch.labels.shape)
    scores = means(made, guess, batch)
    assert abs(scores["character_accuracy"] - made.chance) < 0.1
    assert scores["string_accuracy"] == 0  # letters alone never end a string


def test_a_mistake_costs_one_example_of_its_context():
    made = task("copy", context=100)
    batch = made.batch(0, "train", 0, 3, (5, 5))  # seven examples of 13 tokens a row
    row, ends = 1, np.flatnonzero(batch.labels[1] == made.end)
    for place, letters in [(ends[2], 0), (ends[3] - 1, 1), (ends[6] - 5, 1)]:
        predicted = batch.labels.copy()
        predicted[row, place] = made.pad
        scores = made.score(predicted, batch)
        assert scores["string_accuracy"].shape == (21,)
        assert (scores["string_accuracy"] == 0).sum() == 1
        assert (scores["character_accuracy"] == 0).sum() == letters
    predicted[row, ends[3]] = predicted[0, ends[0]] = made.pad
    assert made.score(predicted, batch)["string_accuracy"].sum() == 18


@pytest.mark.parametrize(
    "name, lengths, said",
    [
        ("copy", (0, 0), "copy has no sequences of length 0: it has lengths 1, 2, 3, …"),
        ("suffix_ngram", (2, 5), "suffix_ngram has no sequences of length 5: it has lengths 6, 7,"),
    ],
)
def test_too_short_strings_are_refused(name, lengths, said):
    with pytest.raises(TaskError, match=said):
        task(name, ngram=3).batch(0, "valid", 0, 2, lengths)


@pytest.mark.parametrize("name, longest", zip(NAMES, (126, 249)))
def test_strings_that_do_not_fit_the_context_are_refused(name, longest):
    made = task(name, context=256)
    made.batch(0, "train", 0, 2, (longest, longest))
    with pytest.raises(TaskError) as error:
        made.batch(0, "train", 0, 2, (longest, longest + 1))
    assert f"needs a context of {made.tokens(longest + 1)} tokens" in str(error.value)
    assert made.tokens(longest) <= 256 < made.tokens(longest + 1)
