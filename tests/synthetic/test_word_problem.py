"""Word problem: batches against step-by-step products, and refused configs."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data.sources.groups import element_names, get_group
from synthetic import tasks
from synthetic.config import Task
from synthetic.tasks import TaskError, splits

NAMES = ["S2", "S3", "A3", "A4", "S4", "A5", "S5", "Z1", "Z7", "Z60", "A4_x_Z5", "S3_x_Z2_x_Z2"]
NAMES += ["D4", "D7", "D3_x_Z2"]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 2**31), st.integers(1, 20), st.integers(1, 5))
def test_labels_are_running_products(name, seed, length, rows):
    task = tasks.build_task(Task(name="word_problem", group=name))
    batch = task.batch(seed, "train", 3, rows, (length, length))
    table = get_group(name).table
    assert batch.input_ids.shape == batch.labels.shape == (rows, length)
    for x, y in zip(batch.input_ids, batch.labels):
        state = x[0]
        assert y[0] == state
        for t in range(1, length):
            state = table[state, x[t]]
            assert y[t] == state


@pytest.mark.parametrize("n", [3, 4, 7])
def test_polygon_symmetries_are_complete_and_keep_neighbours(n):
    """A name lists the images of the corners 1 to n, in their order."""
    names = element_names(f"D{n}")
    assert len(set(names)) == get_group(f"D{n}").order == 2 * n
    for name in names:
        images = [int(digit) for digit in name]
        assert set(images) == set(range(1, n + 1))
        next_images = images[1:] + images[:1]
        steps = {(b - a) % n for a, b in zip(images, next_images)}
        assert steps in ({1}, {n - 1})  # a rotation, a reflection


@pytest.mark.parametrize("n", [3, 5])
def test_elements_are_sorted_by_order_then_class_size(n):
    """The expected order comes from the cycles of the permutations, not from the group's table."""

    def cycle_sizes(name):
        unvisited, sizes = {int(c) for c in name}, []
        while unvisited:
            element, size = unvisited.pop(), 1
            while (element := int(name[element - 1])) in unvisited:
                unvisited.remove(element)
                size += 1
            sizes.append(size)
        return tuple(sorted(sizes))

    names = element_names(f"S{n}")
    types = [cycle_sizes(name) for name in names]
    expected = sorted(
        range(len(names)), key=lambda i: (math.lcm(*types[i]), types.count(types[i]), i)
    )
    assert get_group(f"S{n}").simplest_first().tolist() == expected
    assert get_group("Z6").simplest_first().tolist() == [0, 3, 2, 4, 1, 5]


def test_few_elements_are_the_simplest_and_not_held_out():
    task = tasks.build_task(Task(name="word_problem", group="S5"))
    batch_of_all_elements = task.batch(0, "train", 0, 64, (9, 9))
    task.restrict_elements(11)
    simplest = set(get_group("S5").simplest_first()[:11].tolist())
    for split in ("train", "valid"):
        batch = task.batch(0, split, 0, 64, (9, 9))
        assert set(batch.input_ids.ravel().tolist()) == simplest
        assert (batch.labels == get_group("S5").products(batch.input_ids)).all()
    assert not task.is_held_out(9)
    # Training sequences have prefixes of the training split, with all elements and with few.
    for batch in (batch_of_all_elements, task.batch(0, "train", 0, 64, (9, 9))):
        prefixes = batch.input_ids[:, : task.prefix_length]
        assert splits.is_in_split("train", splits.hash_samples(prefixes)).all()
    task.restrict_elements(None)
    assert task.is_held_out(9)
    again = task.batch(0, "train", 0, 64, (9, 9))
    assert (again.input_ids == batch_of_all_elements.input_ids).all()


def test_impossible_element_counts_are_refused():
    with pytest.raises(TaskError, match="has only 6 elements"):
        tasks.build_task(Task(name="word_problem", group="S3")).restrict_elements(7)
    with pytest.raises(TaskError, match="only word_problem can start"):
        tasks.build_task(Task(name="parity")).restrict_elements(2)


def test_one_wrong_label_costs_one_token_and_one_sequence():
    task = tasks.build_task(Task(name="word_problem", group="S3"))
    batch = task.batch(0, "test", 0, 4, (5, 5))
    predicted = batch.labels.copy()
    predicted[0, 4] += 1  # wrong at the end of one of four sequences
    score = task.score(predicted, batch)
    assert score["sequence_accuracy"].mean() == 0.75
    assert score["token_accuracy"].mean() == 19 / 20


@pytest.mark.parametrize("name", ["B3", "S8", "D2", "D10"])
def test_unknown_groups_are_refused(name):
    with pytest.raises(TaskError, match=r"unknown group|more than 5040 elements"):
        tasks.build_task(Task(name="word_problem", group=name))
