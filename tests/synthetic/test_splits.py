"""Training, validation and test have no sample in common, unless there are too few samples."""

from typing import NamedTuple

import numpy as np
import pytest

from synthetic import tasks
from synthetic.config import Task
from synthetic.tasks import IGNORE, TaskError, splits
from synthetic.tasks.uniform_length import UniformLengthTask


class Case(NamedTuple):
    """A task and its lengths."""

    section: dict  # the task section of a config
    length: int  # has disjoint splits
    shared_length: int | None  # has too few samples for disjoint splits; None: not tested
    training_lengths: tuple[int, int]


ARITHMETIC = {"name": "mod_arithmetic", "modulus": 3, "supervision": "every"}
SEQUENCE_TASKS = {
    "S3": ({"name": "word_problem", "group": "S3"}, 8, 3, (2, 16)),
    "A5": ({"name": "word_problem", "group": "A5"}, 4, 2, (4, 8)),
    "copy": ({"name": "copy", "alphabet": 8, "context": 40}, 4, 3, (2, 8)),
    "recall": ({"name": "suffix_ngram", "alphabet": 16, "ngram": 1, "context": 40}, 4, 2, (2, 8)),
    "arithmetic": (ARITHMETIC, 11, 5, (3, 21)),
    "brackets": ({"name": "mod_arithmetic_brackets", "modulus": 3}, 15, 7, (3, 20)),
    "parity": ({"name": "parity", "supervision": "every"}, 12, 8, (3, 16)),
    "automaton": ({"name": "automaton"}, 8, 5, (3, 16)),
    "dyck": ({"name": "dyck", "supervision": "every"}, 24, 3, (3, 24)),
}
UNIFORM_LENGTH_TASKS = {
    "mqar": ({"name": "mqar", "alphabet": 16, "pairs": 2}, 12, None, (8, 20)),
    "in_context": ({"name": "in_context_recall", "alphabet": 4}, 14, 4, (4, 20)),
    "noisy": ({"name": "noisy_recall", "alphabet": 4}, 16, 4, (4, 20)),
    "fuzzy": ({"name": "fuzzy_recall", "alphabet": 4, "ngram": 2}, 18, 8, (8, 24)),
    "selective": ({"name": "selective_copying", "alphabet": 8, "content": 5}, 16, None, (11, 20)),
    "memorization": ({"name": "memorization", "alphabet": 8}, 12, 6, (2, 16)),
    "repl": ({"name": "repl", "variables": 3}, 8, 3, (2, 10)),
}
CASES = {name: Case(*case) for name, case in (SEQUENCE_TASKS | UNIFORM_LENGTH_TASKS).items()}
UPDATES = 150


def read_samples(task, batch) -> list[tuple]:
    """Return the samples of a batch: the prefix of a row up to each answer.

    For copying, a sample is the string of each example in a row.
    """
    samples = []
    for row, (ids, labels) in enumerate(zip(batch.input_ids, batch.labels)):
        if hasattr(task, "context"):  # a copying task
            for text in task.text(ids).rstrip("*").split(".")[:-1]:
                samples.append(text.strip("$").split("|")[0])
        else:
            ids = ids if batch.mask is None else ids[batch.mask[row]]
            ends = np.flatnonzero(labels[: len(ids)] != IGNORE) + 1
            if hasattr(
                task, "equals"
            ):  # the answer at `=` is the value of the expression before it
                ends = {int(end) - (ids[end - 1] == task.equals) for end in ends}
            samples += [tuple(map(int, ids[:end])) for end in ends]
    return samples


def read_content(task, ids) -> tuple:
    """Return the content of a row as the names of its tokens.

    It is the pairs in MQAR, the content tokens in selective copying, and the whole row otherwise.
    """
    names = [task.token_name(int(i)) for i in ids]
    if task.name == "mqar":
        return tuple(names[: 2 * task.pairs])
    return tuple(name for name in names if name not in ("_", "|"))


def collect_training_samples(task, lengths) -> set:
    """Return all samples of UPDATES training batches.

    For tasks with uniform lengths it is every prefix of the content, in a third of the batches.
    """
    updates = UPDATES // 3 if isinstance(task, UniformLengthTask) else UPDATES
    batches = [task.batch(0, "train", i, 64, lengths) for i in range(updates)]
    if not isinstance(task, UniformLengthTask):
        return {sample for batch in batches for sample in read_samples(task, batch)}
    rows = {read_content(task, ids) for batch in batches for ids in batch.input_ids}
    return {row[:end] for row in rows for end in range(1, len(row) + 1)}


def collect_evaluation_samples(task, batch) -> set:
    """Return the sample of each row of an evaluation batch."""
    if isinstance(task, UniformLengthTask):
        return {read_content(task, ids) for ids in batch.input_ids}
    rows = zip(batch.input_ids[:, None], batch.labels[:, None])
    return {max(read_samples(task, tasks.Batch(ids, labels)), key=len) for ids, labels in rows}


@pytest.mark.parametrize("name", CASES)
def test_splits_share_no_sample(name):
    section, length, shared_length, training_lengths = CASES[name]
    task = tasks.build_task(Task(**section))
    assert task.is_held_out(length)
    assert shared_length is None or not task.is_held_out(shared_length)
    training = collect_training_samples(task, training_lengths)
    samples = {}
    for split, seed in [("valid", 0), ("test", 0), ("test", 5)]:
        batches = [task.batch(seed, split, i, 100, (length, length)) for i in range(10)]
        evaluated = set().union(*(collect_evaluation_samples(task, batch) for batch in batches))
        assert len(evaluated) > 30 and not evaluated & training
        samples[split, seed] = evaluated
    assert not samples["valid", 0] & (samples["test", 0] | samples["test", 5])


@pytest.mark.parametrize("name", CASES)
def test_batches_are_valid_and_reproducible(name):
    section = CASES[name].section
    task = tasks.build_task(Task(**section))
    sizes = {"batch_size": 16, "lengths": CASES[name].training_lengths}
    for split in tasks.SPLITS:
        batch = task.batch(seed=3, split=split, index=2, **sizes)
        tasks.check_batch(name, task, batch)
        again = tasks.build_task(Task(**section)).batch(3, split, 2, **sizes)
        assert np.array_equal(batch.input_ids, again.input_ids)
        assert np.array_equal(batch.labels, again.labels)
        # Another seed, another index, another split.
        other_split = "test" if split == "train" else "train"
        for other in [(4, split, 2), (3, split, 3), (3, other_split, 2)]:
            assert not np.array_equal(batch.input_ids, task.batch(*other, **sizes).input_ids)
        if batch.mask is not None:
            assert (np.diff(batch.mask.astype(int), axis=1) <= 0).all()  # only on the right
            assert (batch.labels[~batch.mask] == IGNORE).all()
            if hasattr(task, "pad"):
                assert ((batch.input_ids == task.pad) == ~batch.mask).all()


def test_splits_share_all_samples_if_there_are_few():
    for split in tasks.SPLITS:
        task = tasks.build_task(Task(name="word_problem", group="S3"))
        assert not task.is_held_out(2)
        ids = task.batch(0, split, 0, 1000, (2, 2)).input_ids
        assert len(np.unique(ids, axis=0)) == 36  # all pairs of six elements
    trivial = tasks.build_task(Task(name="word_problem", group="Z1"))
    assert not trivial.is_held_out(100)


def test_redrawn_samples_stay_uniform():
    """Redrawing must not favour any symbol. The prefix that decides the split has 5 elements."""
    task = tasks.build_task(Task(name="word_problem", group="S3"))
    for split in tasks.SPLITS:
        ids = np.concatenate([task.batch(0, split, i, 500, (16, 16)).input_ids for i in range(20)])
        counts = np.bincount(ids[:, 5:].ravel(), minlength=6) / ids[:, 5:].size
        assert np.abs(6 * counts - 1).max() < 0.03
    ids = np.concatenate([task.batch(0, "train", i, 500, (16, 16)).input_ids for i in range(20)])
    for position in range(5):
        counts = np.bincount(ids[:, position], minlength=6) / len(ids)
        assert np.abs(6 * counts - 1).max() < 0.12


def test_hashes_depend_only_on_content():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 6, (5000, 9))
    sizes = rng.integers(1, 10, 5000)
    hashes = splits.hash_samples(ids, sizes)
    wider = np.hstack([ids, rng.integers(0, 6, (5000, 40))])
    assert (splits.hash_samples(wider, sizes) == hashes).all()
    contents = {tuple(row[:n].tolist()) for row, n in zip(ids, sizes)}
    assert len(np.unique(hashes)) == len(contents)
    shares = [splits.is_in_split(split, splits.hash_samples(ids)).mean() for split in tasks.SPLITS]
    assert sum(shares) == 1
    assert shares == pytest.approx([14 / 16, 1 / 16, 1 / 16], abs=0.015)


@pytest.mark.parametrize("name", UNIFORM_LENGTH_TASKS)
def test_impossible_lengths_are_refused(name):
    task = tasks.build_task(Task(**CASES[name].section))
    task.check_length(task.min_length)
    too_short = task.min_length - 1
    with pytest.raises(TaskError, match=f"has no sequences of length {too_short}: it has"):
        task.check_length(too_short)
    if task.length_step == 2:
        with pytest.raises(TaskError, match=f"lengths {task.min_length}, {task.min_length + 2}, "):
            task.check_length(task.min_length + 1)
