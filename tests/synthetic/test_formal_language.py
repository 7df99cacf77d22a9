"""Formal languages: labels against oracles, supervision, padding and metrics."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synthetic.config import Task
from synthetic.tasks import IGNORE, TaskError, build_task
from synthetic.tasks.formal_language import FormalLanguage

ARITHMETIC = ("mod_arithmetic", "mod_arithmetic_brackets")
NAMES = (*ARITHMETIC, "parity")


def make_task(name: str, **fields) -> FormalLanguage:
    return build_task(Task(name=name, **fields))


def compute_answer(language: FormalLanguage, text: str) -> int:
    """Compute the answer at the end of a text from its characters."""
    if language.name in ARITHMETIC:
        return eval(text.partition("=")[0]) % language.modulus
    return text.count("1") % 2


@st.composite
def draw_cases(draw, names=NAMES, supervisions=("last", "every")):
    name = draw(st.sampled_from(names))
    supervision = (
        "last" if name == "mod_arithmetic_brackets" else draw(st.sampled_from(supervisions))
    )
    shortest = draw(st.integers(1, 40))
    lengths = shortest, shortest + draw(st.integers(1, 30))
    language = make_task(name, modulus=draw(st.integers(2, 13)), supervision=supervision)
    return language, language.batch(draw(st.integers(0, 2**30)), "train", 0, 6, lengths), lengths


@settings(max_examples=60, deadline=None)
@given(draw_cases())
def test_last_label_matches_oracle(case):
    language, batch, lengths = case
    for ids, labels in zip(batch.input_ids, batch.labels):
        tokens = ids[ids != language.pad]
        assert lengths[0] <= len(tokens) - (language.name in ARITHMETIC) <= lengths[1]
        assert labels[len(tokens) - 1] == compute_answer(language, language.text(tokens))
        assert (labels[len(tokens) :] == IGNORE).all()
        if not language.labels_every_token:
            assert (labels[: len(tokens) - 1] == IGNORE).all()
    assert batch.input_ids.min() >= 0 and batch.input_ids.max() < language.vocab_size
    assert batch.labels.max() < language.vocab_size - 1


@settings(max_examples=30, deadline=None)
@given(draw_cases(names=("mod_arithmetic", "parity"), supervisions=("every",)))
def test_every_label_matches_oracle(case):
    language, batch, _ = case
    for ids, labels in zip(batch.input_ids, batch.labels):
        for i in range((ids != language.pad).sum()):
            if language.name == "mod_arithmetic" and i % 2 and ids[i] != language.equals:
                assert labels[i] == IGNORE  # an operator
            else:
                assert labels[i] == compute_answer(language, language.text(ids[: i + 1]))


def test_supervision_every_with_brackets_is_refused():
    with pytest.raises(TaskError, match="no answer before its brackets are closed: set task"):
        make_task("mod_arithmetic_brackets", supervision="every")


def test_bracketed_expressions_have_the_documented_forms():
    language = make_task("mod_arithmetic_brackets")
    shapes = {1: {"d"}, 2: {"-d"}, 3: {"(d)"}, 4: {"(-d)"}, 5: {"(d±d)"}, 6: {"(-d±d)", "(d±-d)"}}
    shapes[7] = {"((d)±d)", "(-d±-d)", "(d±(d))"}
    for length, forms in shapes.items():
        batch = language.batch(0, "valid", 0, 100, (length, length))
        texts = {re.sub(r"\d", "d", language.text(ids)) for ids in batch.input_ids}
        assert texts == {form.replace("±", op) + "=" for form in forms for op in "+-"}
        assert batch.mask is None and (batch.input_ids[:, -1] == language.equals).all()


@pytest.mark.parametrize(
    "name, length", [*((name, 41) for name in NAMES), ("mod_arithmetic_brackets", 256)]
)
def test_answers_are_nearly_uniform(name, length):
    language = make_task(name)
    labels = language.batch(0, "valid", 0, 4000, (length, length)).labels[:, -1]
    counts = np.bincount(labels) / len(labels)
    assert len(counts) == round(1 / language.chance)
    assert np.abs(counts * len(counts) - 1).max() < 0.25


@pytest.mark.parametrize("name", NAMES)
def test_all_lengths_and_symbols_occur(name):
    language = make_task(name)
    batch = language.batch(0, "train", 0, 1000, (3, 12))
    lengths = batch.mask.sum(1) - (name in ARITHMETIC)
    assert set(lengths) == set(range(3, 13, 2 if name == "mod_arithmetic" else 1))
    symbols = {
        "mod_arithmetic": "01234+-*=",
        "mod_arithmetic_brackets": "01234+-()=",
        "parity": "01",
    }
    assert set(language.text(batch.input_ids.ravel())) == {*symbols[name], "_"}


def test_vocabulary_sizes():
    sizes = {name: make_task(name).vocab_size for name in NAMES}
    assert sizes == {"mod_arithmetic": 12, "mod_arithmetic_brackets": 12, "parity": 3}
    assert make_task("mod_arithmetic", modulus=12).text([11, 12, 10, 17, 18]) == "11+10=_"
    assert [make_task(n, modulus=4).chance for n in NAMES] == [1 / 4, 1 / 4, 1 / 2]


@pytest.mark.parametrize("name", NAMES)
def test_perfect_answers_score_one_and_guesses_zero_scaled(name):
    language = make_task(name)
    batch = language.batch(0, "valid", 0, 4000, (5, 21))
    perfect = language.score(batch.labels, batch)
    assert all(values.shape == (4000,) and (values == 1).all() for values in perfect.values())
    guess = np.random.default_rng(0).integers(round(1 / language.chance), size=batch.labels.shape)
    scores = language.score(guess, batch)
    assert abs(scores["scaled_accuracy"].mean()) < 0.05
    assert abs(scores["accuracy"].mean() - language.chance) < 0.05
    assert language.headline == "scaled_accuracy"


def test_only_the_last_label_is_scored():
    language = make_task("parity", supervision="every")
    batch = language.batch(0, "valid", 0, 3, (4, 9))
    predicted = np.full(batch.labels.shape, language.pad)
    last = batch.mask.sum(1) - 1
    predicted[[0, 1], last[:2]] = batch.labels[[0, 1], last[:2]]  # of three rows, two are right
    assert language.score(predicted, batch)["accuracy"].tolist() == [1, 1, 0]
    assert language.score(predicted, batch)["scaled_accuracy"].tolist() == [1, 1, -1]


def test_impossible_lengths_are_refused():
    for name in NAMES:
        with pytest.raises(TaskError, match=f"{name} has no .*of length 0: it has"):
            make_task(name).check_length(0)
        make_task(name).check_length(1)
    with pytest.raises(TaskError, match="length 4: it has lengths 1, 3, 5, …"):
        make_task("mod_arithmetic").check_length(4)
    with pytest.raises(TaskError, match="no length between 4 and 4: this task has lengths 1, 3, 5"):
        make_task("mod_arithmetic").batch(0, "train", 0, 2, (4, 4))
    make_task("mod_arithmetic_brackets").check_length(4)
