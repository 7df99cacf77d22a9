"""Tests of packing: every token is a target once, also across a resume."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.data.batches.packing import IGNORE, Packer, block_count, block_rows, micro_batch

DOCUMENTS = st.lists(st.lists(st.integers(0, 9), max_size=30), max_size=12)


@given(DOCUMENTS, st.integers(1, 9), st.integers(0, 12))
def test_targets_are_all_tokens_except_the_first(docs, seq_len, resume_at):
    packer, blocks = Packer(seq_len), []
    for i, doc in enumerate(docs):
        if i == resume_at:
            state = packer.state_dict()
            packer.add(np.arange(7))  # must not change the saved state
            packer = Packer(seq_len)
            packer.load_state_dict(state)
        blocks.append(packer.add(np.array(doc, dtype=np.int64)))
    stream = np.array([t for doc in docs for t in doc], dtype=np.int64)
    blocks = np.concatenate([np.empty((0, seq_len + 1), np.int64), *blocks])
    all_blocks = block_rows(stream, seq_len, np.arange(block_count(len(stream), seq_len)))
    labels, inputs = all_blocks[:, 1:], all_blocks[:, :-1]
    assert labels[labels != IGNORE].tolist() == stream[1:].tolist()
    assert inputs[labels != IGNORE].tolist() == stream[:-1].tolist()
    assert len(blocks) == max(0, len(stream) - 1) // seq_len  # complete blocks only
    assert np.array_equal(blocks, all_blocks[: len(blocks)])


def test_micro_batch_shifts_and_pads():
    stream = np.array([5, 6, 7, 8], np.uint16)
    batch = micro_batch(block_rows(stream, seq_len=2, indices=np.arange(3)))
    assert batch["input_ids"].tolist() == [[5, 6], [7, 8], [0, 0]]
    assert batch["labels"].tolist() == [[6, 7], [8, IGNORE], [IGNORE, IGNORE]]
    assert str(batch["labels"].dtype) == str(batch["input_ids"].dtype) == "torch.int64"


def test_state_with_another_seq_len_is_refused():
    with pytest.raises(ValueError, match="seq_len 4, not 5"):
        Packer(5).load_state_dict(Packer(4).state_dict())
