"""CatbAbI: streams, labels, segments, scores and invalid configs."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lm.evaluation.tasks import babi
from synthetic import config
from synthetic.tasks import IGNORE, SPLITS, TaskError, build_task

SHARED = Path(__file__).parents[3] / "shared/data/babi/en-valid"
STORY_COUNTS = {"train": 7, "valid": 3, "test": 5}  # of each bAbI task


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with stories of different lengths, no two of them equal."""
    path = tmp_path_factory.mktemp("en-valid")
    rng = np.random.default_rng(0)
    for task in babi.TASKS:
        for split, count in STORY_COUNTS.items():
            lines = []
            for story in range(count):
                lines.append(f"1 Story {task} {split} {story} begins.")
                for line_number in range(2, rng.integers(4, 12)):
                    place = rng.choice(["home", "office", "n,w"])
                    if line_number == 2 or rng.random() < 0.5:  # every story has a question
                        sentence = f"Where is Mary? \t{place}\t1"
                    else:
                        sentence = f"Mary went to {place}."
                    lines.append(f"{line_number} {sentence}")
            (path / f"qa{task}_{split}.txt").write_text("\n".join(lines) + "\n")
    return path


def make_task(folder, **fields):
    return build_task(config.Task(name="catbabi", data=folder and str(folder), **fields))


def read_epoch(data, split, batch_size, length, seed=0, epoch=0):
    count = data.segments(split, batch_size, length)
    indices = range(epoch * count, (epoch + 1) * count)
    return [data.batch(seed, split, i, batch_size, (1, length)) for i in indices]


def join(batches, field):
    """Join a field of the batches into streams; a mask of None is all True."""
    if field == "mask":
        rows = [np.ones(b.labels.shape, bool) if b.mask is None else b.mask for b in batches]
    else:
        rows = [getattr(b, field) for b in batches]
    return np.concatenate(rows, 1)


def split_stories(data, ids):
    """Return the stories of a sequence of ids, which must begin with `<eos>`, as text."""
    text = " ".join(data.vocabulary[i] for i in ids)
    assert text.startswith("<eos> ")
    return [story.strip() for story in text.split("<eos>")[1:]]


@pytest.mark.parametrize("batch_size, length", [(1, 200), (4, 50), (9, 33)])
@pytest.mark.parametrize("split", ["valid", "test"])
def test_evaluation_epoch_has_every_question_once(folder, split, batch_size, length):
    data = make_task(folder)
    batches = read_epoch(data, split, batch_size, length)
    fields = ("input_ids", "labels", "subtasks", "mask")
    ids, labels, subtasks, mask = (join(batches, field) for field in fields)
    stories = babi.read(folder, split)
    # Each row begins with a story.
    rows = [split_stories(data, row[is_token]) for row, is_token in zip(ids, mask)]
    texts = Counter(text for row in rows for text in row)
    assert texts == Counter(" ".join(s.tokens) for s in stories)
    questions = Counter(s.task for s in stories for _ in s.answers)
    assert Counter(subtasks[subtasks > 0].tolist()) == questions
    answers = Counter(s.tokens[i] for s in stories for i in s.answers)
    assert Counter(data.vocabulary[i] for i in labels[subtasks > 0]) == answers
    assert {data.vocabulary[i] for i in ids[subtasks > 0]} == {"?"}
    # Padding is on the right, and is never scored.
    assert (np.diff(mask.astype(int), axis=1) <= 0).all() and mask[:, 0].all()
    assert (labels[~mask] == IGNORE).all() and (ids[~mask] == data.pad).all()
    assert ((labels != IGNORE) == (subtasks > 0)).all()


@pytest.mark.parametrize("batch_size, length", [(1, 200), (4, 50), (9, 33)])
def test_training_epoch_has_all_stories_except_the_remainder(folder, batch_size, length):
    data = make_task(folder)
    stories = babi.read(folder, "train")
    total = sum(len(s.tokens) + 1 for s in stories)
    for epoch in (0, 1, 5):
        batches = read_epoch(data, "train", batch_size, length, seed=3, epoch=epoch)
        assert all(b.mask is None and b.labels.dtype == np.int64 for b in batches)
        ids, labels = join(batches, "input_ids").ravel(), join(batches, "labels").ravel()
        assert len(ids) == total // batch_size * batch_size
        # The answer is the next token, which may belong to the next stream.
        is_scored = labels[:-1] != IGNORE
        assert (labels[:-1] == ids[1:])[is_scored].all()
        *complete_stories, last = split_stories(data, ids)
        texts = {" ".join(s.tokens) for s in stories}
        assert len(set(complete_stories)) == len(complete_stories) and set(complete_stories) < texts
        # Fewer than batch_size tokens are dropped, and with them fewer stories.
        assert len(complete_stories) + 1 + batch_size >= len(texts)
        assert any(text.startswith(last) for text in texts - set(complete_stories))


def test_segments_continue_within_an_epoch(folder):
    data = make_task(folder)
    batches = read_epoch(data, "train", 4, 50)
    assert [b.input_ids.shape for b in batches[:-1]] == [(4, 50)] * (len(batches) - 1)
    assert 1 <= batches[-1].input_ids.shape[1] <= 50
    assert [b.is_continuation for b in batches] == [False] + [True] * (len(batches) - 1)
    next_epoch = data.batch(0, "train", len(batches), 4, (50, 50))
    assert next_epoch.is_continuation is False
    assert not np.array_equal(next_epoch.input_ids, batches[0].input_ids)


def are_equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b))


def test_batches_depend_only_on_their_arguments(folder):
    first, second = make_task(folder), make_task(folder)
    sizes = {"batch_size": 2, "lengths": (20, 20)}
    # (seed, split, index) of batches of several epochs, in mixed order.
    arguments = [(1, "train", 9), (2, "test", 0), (1, "train", 0), (1, "train", 100)]
    arguments.append((2, "train", 0))
    batches = {key: first.batch(*key, **sizes) for key in arguments}
    for key in reversed(arguments):
        assert are_equal(second.batch(*key, **sizes), batches[key])
    assert not are_equal(batches[1, "train", 0], batches[2, "train", 0])
    # In valid and test neither the seed nor the epoch matters.
    count = first.segments("test", batch_size=2, length=20)
    for seed, index in [(0, 0), (7, 0), (7, count), (7, 3 * count)]:
        fresh = make_task(folder)  # its cache is empty
        assert are_equal(fresh.batch(seed, "test", index, **sizes), batches[2, "test", 0])


def test_stories_option_selects_tasks_and_keeps_ids(folder):
    data, complete = make_task(folder, stories=[4, 2]), make_task(folder)
    assert data.babi_tasks == [2, 4]
    assert data.vocabulary == complete.vocabulary
    assert {"home", "n,w", "20", "?"} <= set(complete.vocabulary)
    assert data.vocab_size == len(data.vocabulary)
    subtasks = join(read_epoch(data, "train", 1, 100), "subtasks")
    assert set(np.unique(subtasks)) == {0, 2, 4}
    assert data.chance == complete.chance == 1 / 3  # home, office, n,w


def test_score_counts_all_answers_and_each_babi_task(folder):
    data = make_task(folder, stories=[1, 2, 3])
    assert data.headline == "accuracy" and data.streams
    batch = data.batch(0, "valid", index=0, batch_size=1, lengths=(1, 150))
    perfect = np.where(batch.labels == IGNORE, 0, batch.labels)
    scores = data.score(perfect, batch)
    assert set(scores) == {"accuracy", "qa1", "qa2", "qa3"}
    assert all((values == 1).all() for values in scores.values())
    assert len(scores["accuracy"]) == sum(len(scores[f"qa{n}"]) for n in (1, 2, 3)) > 3
    wrong = np.where(batch.subtasks == 2, 0, perfect)
    scores = data.score(wrong, batch)
    assert (scores["qa2"] == 0).all() and (scores["qa1"] == 1).all()
    assert (1 - scores["accuracy"]).sum() == len(scores["qa2"])


def test_missing_data_and_impossible_sizes_are_refused(folder, tmp_path):
    with pytest.raises(TaskError, match=r"set task\.data .* after `curl -L http.* tar -xz`"):
        make_task(None)
    with pytest.raises(TaskError, match=r"task\.data: .*nowhere holds no bAbI files"):
        make_task(tmp_path / "nowhere")
    (tmp_path / "part").mkdir()
    for name in ("qa1_train.txt", "qa1_valid.txt"):
        (tmp_path / "part" / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(TaskError, match=r"lacks qa2_train.*, qa2_valid.txt.*, qa1_test.txt"):
        make_task(tmp_path / "part")
    for stories in ([], [0], [3, 21]):
        with pytest.raises(TaskError, match=r"task\.stories is "):
            make_task(folder, stories=stories)
    data = make_task(folder)
    with pytest.raises(TaskError, match=r"100 streams in segments of 1000 .* train has only"):
        data.batch(0, "train", 0, 100, (1000, 1000))
    with pytest.raises(TaskError, match="test has only"):
        data.segments("test", 100, 1000)
    with pytest.raises(TaskError, match="no sequences of length 0"):
        data.check_length(0)
    with pytest.raises(TaskError, match="has only"):
        data.check_length(10**6)
    data.check_length(200)


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data/babi")
def test_real_babi_has_all_questions_and_tokens():
    data = make_task(SHARED)
    assert data.vocab_size == 178 and data.chance == 1 / 58  # 58 different answers
    for split in SPLITS:
        stories = babi.read(SHARED, split)
        # With a single stream, training drops no tokens.
        batches = read_epoch(data, split, batch_size=1 if split == "train" else 32, length=200)
        counts = Counter(join(batches, "subtasks").ravel().tolist())
        expected = Counter(story.task for story in stories for _ in story.answers)
        assert {n: counts[n] for n in babi.TASKS} == expected
        mask = join(batches, "mask")
        assert mask.sum() == sum(len(story.tokens) + 1 for story in stories)
    assert set(expected.values()) == {1000}  # questions of each bAbI task in test, the last split
