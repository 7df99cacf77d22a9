"""Groups against brute-force composition of permutations; batches against a walk by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synthetic import tasks
from synthetic.config import Task
from synthetic.tasks import TaskError
from synthetic.tasks.word_problem import group, permutations

NAMES = ["S2", "S3", "A3", "A4", "S4", "A5", "S5", "Z1", "Z7", "Z60", "A4_x_Z5", "S3_x_Z2_x_Z2"]


def compose(p, q):
    """First p, then q."""
    return tuple(q[i] for i in p)


def sign(p):
    return (-1) ** sum(a > b for a, b in itertools.combinations(p, 2))


@pytest.mark.parametrize("name", NAMES)
def test_the_tables_are_groups(name):
    g = group(name)
    n, t = np.arange(g.order), g.table
    assert t.shape == (g.order, g.order) and t.min() == 0 and t.max() == g.order - 1
    assert (t[g.identity] == n).all() and (t[:, g.identity] == n).all()
    assert (np.sort(t, 0) == n[:, None]).all() and (np.sort(t, 1) == n).all()  # inverses exist
    some = np.random.default_rng(0).integers(0, g.order, (3, 5000))
    a, b, c = some
    assert (t[t[a, b], c] == t[a, t[b, c]]).all()


@pytest.mark.parametrize(
    "name, order",
    [
        ("S3", 6),
        ("A4", 12),
        ("S4", 24),
        ("A5", 60),
        ("S5", 120),
        ("Z60", 60),
        ("A4_x_Z5", 60),
        ("S6", 720),
        ("A1", 1),
        ("A2", 1),
    ],
)
def test_orders(name, order):
    assert group(name).order == order


@pytest.mark.parametrize("n, even", [(3, False), (4, False), (4, True), (5, True)])
def test_products_of_permutations_are_their_composition(n, even):
    elements = [p for p in itertools.permutations(range(n)) if not even or sign(p) == 1]
    assert [tuple(p) for p in permutations(n, even)] == elements
    table = group(f"{'A' if even else 'S'}{n}").table
    for i, p in enumerate(elements):
        for j, q in enumerate(elements):
            assert elements[table[i, j]] == compose(p, q)


def test_a_product_multiplies_component_by_component():
    g, a, z = group("A4_x_Z5"), group("A4").table, group("Z5").table
    for i, j in np.random.default_rng(1).integers(0, 60, (200, 2)):
        assert g.table[i, j] == a[i // 5, j // 5] * 5 + z[i % 5, j % 5]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 2**31), st.integers(1, 20), st.integers(1, 5))
def test_targets_are_running_products(name, seed, length, rows):
    task = tasks.build(Task(name="word_problem", group=name))
    batch = task.batch(seed, "train", 3, rows, (length, length))
    table = group(name).table
    assert batch.input_ids.shape == batch.labels.shape == (rows, length)
    for x, y in zip(batch.input_ids, batch.labels):
        state = x[0]
        assert y[0] == state
        for t in range(1, length):
            state = table[state, x[t]]
            assert y[t] == state


def test_the_same_arguments_give_the_same_batch_and_others_another():
    task = tasks.build(Task(name="word_problem", group="S5"))
    one = task.batch(0, "train", 7, 8, (12, 12)).input_ids
    assert (one == task.batch(0, "train", 7, 8, (12, 12)).input_ids).all()
    for other in [(1, "train", 7), (0, "valid", 7), (0, "train", 8)]:
        assert (one != task.batch(*other, 8, (12, 12)).input_ids).any()


def test_accuracies():
    task = tasks.build(Task(name="word_problem", group="S3"))
    batch = task.batch(0, "test", 0, 4, (5, 5))
    predicted = batch.labels.copy()
    predicted[0, 4] += 1  # wrong at the end of one of four sequences
    score = task.score(predicted, batch)
    assert score["sequence_accuracy"].mean() == 0.75
    assert score["token_accuracy"].mean() == 19 / 20


@pytest.mark.parametrize("name", ["B3", "S", "S0", "A5xZ5", "s3", "A5_x_", "Z-1", ""])
def test_an_unknown_group_is_refused(name):
    with pytest.raises(TaskError, match=r"unknown group .* S5, A5, Z60, A4_x_Z5"):
        group(name)


@pytest.mark.parametrize("name", ["S8", "A99999", "S5_x_S5", "Z6000"])
def test_a_group_whose_table_is_too_large_is_refused(name):
    with pytest.raises(TaskError, match="more than 5040 elements"):
        group(name)


def write(path, text):
    path.write_text(text)
    return Task(name="word_problem", group="S3", csv=str(path))


def test_the_files_of_the_original_data_are_read(tmp_path):
    g = group("S3")
    x = np.random.default_rng(0).integers(0, 6, (50, 9))
    y = g.products(x)
    rows = [
        f"{i},{' '.join(map(str, a))},{' '.join(map(str, b))}" for i, (a, b) in enumerate(zip(x, y))
    ]
    task = tasks.build(write(tmp_path / "S3=9.csv", "\n".join(["seed,input,target", *rows]) + "\n"))
    for split in tasks.SPLITS:  # which rows are of which split: test_splits.py
        batch = task.batch(0, split, 0, 16, (6, 6))
        assert (batch.labels == g.products(batch.input_ids)).all()
        prefixes = {tuple(r[:6]) for r in x}
        assert all(tuple(r) in prefixes for r in batch.input_ids)
    with pytest.raises(TaskError, match="length 10 is longer than the file's 9"):
        task.check_length(10)


@pytest.mark.parametrize(
    "text, message",
    [
        ("seed,input\n1,2\n", "no column target"),
        ("input,target\n1 2,1 2\n1,1\n", "one length"),
        ("input,target\n1 x,1 2\n", r":2: input must be numbers"),
        ("input,target\n" + "1 2,1 6\n" * 5, "holds element 6, the group has 0 to 5"),
        ("input,target\n1 2,1 2\n", "has 1 rows"),
        ("input,target\n1 2,1 2\n1 2\n", r":3: target must be numbers"),
        ("input,target\n" + "1 2,1 -2\n" * 5, "holds element -2, the group has 0 to 5"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, text, message):
    with pytest.raises(TaskError, match=message):
        tasks.build(write(tmp_path / "x.csv", text))


def test_a_missing_file_and_a_length_of_zero_are_refused(tmp_path):
    with pytest.raises(TaskError, match="no word-problem file"):
        tasks.build(Task(name="word_problem", group="S3", csv=str(tmp_path / "none.csv")))
    with pytest.raises(TaskError, match="at least 1 element"):
        tasks.build(Task(name="word_problem")).check_length(0)
