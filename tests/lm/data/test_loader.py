"""Tests of the loaders: every token once, the same order on any ranks, exact resuming."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.config.data import Data
from lm.data.batches.loader import build, single_source_loader, validation_blocks
from lm.data.batches.packing import IGNORE, block_count
from lm.data.batches.stream import BlockStream, StreamLoader, merge_states
from lm.data.corpus.documents import encode_documents
from lm.data.corpus.prepare import prepare
from lm.data.sources.errors import DataError
from lm.data.sources.open import is_validation
from tests.lm.data.counter import LocalShard

# Number of tokens, seq_len, micro-batch size.
SIZES = st.tuples(st.integers(2, 90), st.integers(1, 9), st.integers(1, 5))


def targets(batches) -> list[int]:
    return [t for b in batches for t in b["labels"].flatten().tolist() if t != IGNORE]


def is_equal(a, b) -> bool:
    return all(torch.equal(a[key], b[key]) for key in ("input_ids", "labels"))


def take(loader, count):
    return list(itertools.islice(loader, count))


@given(SIZES, st.integers(1, 3))
@settings(deadline=None)
def test_every_epoch_has_each_target_once(sizes, world_size):
    n, seq_len, size = sizes
    blocks = block_count(n, seq_len)
    loaders = [
        single_source_loader(np.arange(n), seq_len, size, rank=r, world_size=world_size)
        for r in range(world_size)
    ]
    rows = []
    while len(rows) < 2 * blocks:
        for loader in loaders:
            rows += list(next(loader)["labels"])
    for epoch in (rows[:blocks], rows[blocks : 2 * blocks]):
        assert sorted(t for r in epoch for t in r.tolist() if t != IGNORE) == list(range(1, n))


def test_epochs_and_seeds_have_different_orders():
    orders = [
        targets(take(single_source_loader(np.arange(101), 1, micro_batch_size=10, seed=seed), 20))
        for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1] != orders[2]
    # An epoch has 100 targets.
    assert orders[0][:100] != orders[0][100:] and orders[0][:100] != sorted(orders[0][:100])


@given(SIZES, st.integers(0, 40), st.integers(1, 3))
@settings(deadline=None)
def test_resume_is_exact_with_another_world_size(sizes, read_count, world_size):
    n, seq_len, size = sizes
    single = single_source_loader(np.arange(n), seq_len, size)
    take(single, read_count)
    state = json.loads(json.dumps(single.state_dict()))
    assert state["next_global_micro_batch"] == read_count
    ranks = [
        single_source_loader(np.arange(n), seq_len, size, rank=r, world_size=world_size)
        for r in range(world_size)
    ]
    for rank in ranks:
        rank.load_state_dict(state)
    for _ in range(block_count(n, seq_len) // size + 2):  # into the next epoch
        for rank in ranks:
            assert is_equal(next(single), next(rank))


def test_state_of_another_corpus_or_seed_is_refused():
    tokens, size = np.arange(500), 6
    state = single_source_loader(tokens, 4, size).state_dict()
    with pytest.raises(DataError, match="has blocks 125, this run has 63"):
        single_source_loader(tokens, 8, size).load_state_dict(state)  # another seq_len
    with pytest.raises(DataError, match="has seed 0, this run has 1"):
        single_source_loader(tokens, 4, size, seed=1).load_state_dict(state)
    with pytest.raises(DataError, match="no block"):
        single_source_loader(tokens[:1], 4, size)


@given(SIZES, st.sampled_from([1, 2, 3]), st.none() | st.integers(1, 100))
def test_ranks_validate_each_target_once(sizes, world_size, val_tokens):
    n, seq_len, size = sizes
    data = Data(seq_len=seq_len, val_tokens=val_tokens)
    shares = [validation_blocks(np.arange(n), data, size, r, world_size) for r in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    assert {tuple(b["labels"].shape) for s in shares for b in s} == {(size, seq_len)}
    end = min(n, val_tokens + 1) if val_tokens else n
    assert sorted(targets(itertools.chain(*shares))) == list(range(1, end))
    for batch in itertools.chain(*shares):
        has_target = batch["labels"] != IGNORE
        assert torch.equal(batch["input_ids"][has_target] + 1, batch["labels"][has_target])


def test_empty_validation_split_is_refused():
    with pytest.raises(DataError, match="validation split is empty"):
        validation_blocks(np.arange(1), Data(), 2)


def test_build_returns_loaders_of_a_prepared_corpus(cfg, bpe):
    corpus = prepare(cfg, bpe, cfg.run_dir)
    train, validation = build(cfg, bpe, cfg.run_dir)
    assert next(train)["input_ids"].shape == (3, 16)
    assert sorted(targets(validation[""])) == sorted(corpus.val[1:].tolist())
    assert validation[""][0]["labels"].shape == (3, 16)


def stream_loader(cfg, bpe, rank=0, world_size=1, seed=0):
    """Make a loader of micro-batches of 3 sequences of a local source."""
    return StreamLoader(cfg.data, bpe, 3, seed, rank, world_size, open_documents=LocalShard)


def count_epochs(loader) -> int:
    """Return the largest number of completed epochs among the streams."""
    return max((s.position["epoch"] for s in loader._streams.values() if s.position), default=0)


@pytest.mark.parametrize("buffer", [1, 8, 10_000])
@pytest.mark.parametrize("world_size", [1, 2])
def test_stream_resumes_exactly_at_every_point(cfg, bpe, buffer, world_size):
    cfg.data.shuffle_buffer = buffer
    rank = world_size - 1
    single = stream_loader(cfg, bpe, rank, world_size)
    batches, states = [], []
    for _ in range(120 // world_size):
        states.append(single.state_dict())
        batches.append(next(single))
    assert count_epochs(single) >= 1
    for start in (0, 1, 40, len(batches) - 3):
        resumed = stream_loader(cfg, bpe, rank, world_size, seed=9)  # the state has the generator
        resumed.load_state_dict(states[start])
        assert all(is_equal(next(resumed), batch) for batch in batches[start:])


def list_rows(batches) -> list[tuple]:
    return [tuple(row.tolist()) for batch in batches for row in batch["labels"]]


def test_unshuffled_stream_has_the_order_of_the_source(cfg, bpe, texts):
    cfg.data.shuffle_buffer = 1
    ids = encode_documents(bpe, [t for t in texts if not is_validation(t, 0.2)])
    ids = np.concatenate([ids, ids])  # two epochs without a gap
    batch_tokens = 16 * 3  # seq_len × micro-batch size
    count = (len(ids) - 1) // batch_tokens
    expected = ids[1 : count * batch_tokens + 1].tolist()
    assert targets(take(stream_loader(cfg, bpe), count)) == expected


def test_stream_shuffles_without_loss(cfg, bpe):
    cfg.data.shuffle_buffer = 1
    plain = list_rows(take(stream_loader(cfg, bpe), 90))
    cfg.data.shuffle_buffer = 50
    shuffled = list_rows(take(stream_loader(cfg, bpe), 60))
    assert not Counter(shuffled) - Counter(plain) and shuffled != plain[: len(shuffled)]


def test_ranks_of_a_stream_read_different_documents(cfg, bpe, texts):
    cfg.data.shuffle_buffer = 1
    shares = []
    for rank in range(2):
        loader = stream_loader(cfg, bpe, rank, 2)
        rows = []
        while not count_epochs(loader):
            rows += targets([next(loader)])
        shares.append({d for d in bpe.decode(rows).split("<|endoftext|>")[1:-1] if d in texts})
    assert shares[0] and shares[1]
    parities = [{texts.index(d) % 2 for d in share} for share in shares]
    assert parities == [{0}, {1}]  # document i is in shard i % 2


@pytest.mark.parametrize("old_size, new_size", [(1, 3), (3, 1), (2, 6), (6, 2), (3, 2), (2, 2)])
def test_stream_resumes_on_another_number_of_ranks(cfg, bpe, old_size, new_size):
    cfg.data.streams, cfg.data.shuffle_buffer = 6, 30
    single = stream_loader(cfg, bpe)
    ranks = [stream_loader(cfg, bpe, r, old_size) for r in range(old_size)]
    for _ in range(20):
        assert all(is_equal(next(single), next(rank)) for rank in ranks)
    merged = merge_states([rank.state_dict() for rank in ranks])
    ranks = [stream_loader(cfg, bpe, r, new_size) for r in range(new_size)]
    for rank in ranks:
        rank.load_state_dict(merged)
    for _ in range(24 // new_size):
        assert all(is_equal(next(single), next(rank)) for rank in ranks)


@pytest.mark.parametrize("old_workers, new_workers", [(2, 0), (0, 3)])
def test_workers_do_not_change_the_order(cfg, bpe, old_workers, new_workers):
    cfg.data.streams, cfg.data.shuffle_buffer, cfg.data.workers = 4, 20, old_workers
    single = stream_loader(cfg, bpe)
    take(single, 13)
    state = single.state_dict()
    batches = take(single, 40)
    single.close()
    cfg.data.workers = new_workers
    resumed = stream_loader(cfg, bpe)
    resumed.load_state_dict(state)
    assert all(is_equal(a, b) for a, b in zip(take(resumed, 40), batches))
    resumed.close()


def test_stream_errors_name_the_setting(cfg, bpe):
    cfg.data.streams = 6
    ranks = [stream_loader(cfg, bpe, r, 2) for r in range(2)]
    state = ranks[0].state_dict()
    with pytest.raises(DataError, match=r"lacks streams .1, 3, 5. of rank 1 of 2"):
        ranks[1].load_state_dict(state)
    with pytest.raises(DataError, match=r"evenly by 1, 2, 3, 6 ranks, not by 4; .*multiple of 4"):
        stream_loader(cfg, bpe, 0, 4).load_state_dict(state)
    with pytest.raises(DataError, match=r"micro_batch_size 3, this run has 4"):
        StreamLoader(cfg.data, bpe, 4, world_size=2).load_state_dict(state)
    old_state = {"rank": 0, "world_size": 1, "workers": 0, "streams": [None], "turn": 0}
    with pytest.raises(DataError, match=r"by an earlier version.*train from scratch"):
        stream_loader(cfg, bpe).load_state_dict(old_state)
    cfg.data.val_fraction = 0.9999999  # every document
    with pytest.raises(DataError, match="has no training document"):
        next(stream_loader(cfg, bpe))
    cfg.data.workers, cfg.data.path = 1, "nowhere.jsonl"
    with pytest.raises(DataError, match=r"^data\.path nowhere\.jsonl: no such file"):
        next(stream_loader(cfg, bpe))


@pytest.mark.parametrize("count", [0, 3])
def test_stream_returns_to_a_mark(cfg, bpe, count):
    """A signal may interrupt a later micro-batch in the middle."""
    cfg.data.shuffle_buffer, cfg.data.streams = 8, 2
    loader = stream_loader(cfg, bpe)
    take(loader, count)
    mark = loader.mark()
    expected = take(loader, 5)
    loader._streams[1].draw(loader._readers)
    loader.go_back(mark)
    assert all(is_equal(a, b) for a, b in zip(take(loader, 5), expected, strict=True))


def test_every_epoch_of_a_stream_reads_the_same_commit(bpe, texts):
    states = []

    class Texts:
        """Source on a hub with a new commit at every request."""

        def __init__(self, _data, _shard, state, _order):
            states.append(state)
            self.revision = state["revision"] if state else f"commit {len(states)}"
            self.texts = iter(texts[:30])

        def __next__(self):
            return next(self.texts)

        def __iter__(self):
            return self

        def state_dict(self):
            return {"revision": self.revision, "read": 0}

    stream = BlockStream(Data(seq_len=16), bpe, (0, 1), 0, open_documents=Texts)
    while len(states) < 3:
        next(stream)
    assert states == [None, {"revision": "commit 1"}, {"revision": "commit 1"}]
    BlockStream(Data(seq_len=16), bpe, (0, 1), 0, open_documents=Texts, revision="run commit")
    assert states[-1] == {"revision": "run commit"}
