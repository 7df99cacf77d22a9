"""Questions about the state of traces, as micro-batches whose only targets are the answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from lm.config.data import Traces
from lm.data.batches.packing import IGNORE, MicroBatch, micro_batch
from lm.data.sources import traces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION_COUNT = 128  # questions about each source


def question_batches(
    source: Traces | None, tokenizer: PreTrainedTokenizerBase, micro_batch_size: int, seq_len: int
) -> list[MicroBatch]:
    """Make QUESTION_COUNT questions about a source's traces, each at the end of its own document.

    The gap before a question is the longest gap of the source with which every document fits into
    `seq_len` tokens, or the shortest gap if none fits. A micro-batch has at most as many tokens as
    a micro-batch of training, or a single document.
    """
    source = source or Traces()
    gap = _find_longest_gap(source, tokenizer, seq_len)
    turns = traces.iter_questions(source, gap, QUESTION_COUNT, "validation")
    documents = [_encode(turn, tokenizer) for turn in turns]
    width = max(len(document.ids) for document in documents)
    blocks = np.full((QUESTION_COUNT, width), IGNORE, dtype=np.int64)
    is_target = np.zeros((QUESTION_COUNT, width), dtype=bool)
    for row, (ids, answer_start) in enumerate(documents):
        blocks[row, : len(ids)] = ids
        is_target[row, answer_start : len(ids)] = True
    training_tokens = micro_batch_size * seq_len  # of a micro-batch
    size = max(1, min(micro_batch_size, training_tokens // width))
    return [
        _micro_batch(blocks[start : start + size], is_target[start : start + size])
        for start in range(0, QUESTION_COUNT, size)
    ]


def _find_longest_gap(source: Traces, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> int:
    for gap in sorted(set(source.possible_gaps), reverse=True):
        turns = traces.iter_questions(source, gap, QUESTION_COUNT, "validation")
        if all(len(_encode(turn, tokenizer).ids) <= seq_len for turn in turns):
            return gap
    return min(source.possible_gaps)


class _Document(NamedTuple):
    """Token ids of EOS, a question and its answer."""

    ids: list[int]
    answer_start: int  # index of the first token that encoding only the question does not give


def _encode(turn: traces.Turn, tokenizer: PreTrainedTokenizerBase) -> _Document:
    """Encode EOS, a question and its answer."""
    question, document = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (turn.question, turn.question + turn.answer)
    )
    # The tokenizer may merge the end of the question with the beginning of the answer.
    common_length = 0
    while common_length < len(question) and question[common_length] == document[common_length]:
        common_length += 1
    return _Document([tokenizer.eos_token_id, *document], answer_start=1 + common_length)


def _micro_batch(blocks: np.ndarray, is_target: np.ndarray) -> MicroBatch:
    """Make a micro-batch of blocks (batch, width) in which only tokens of answers are targets."""
    batch = micro_batch(blocks)
    batch["labels"][torch.from_numpy(~is_target[:, 1:])] = IGNORE
    return batch
