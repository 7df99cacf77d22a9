"""Questions about the state of traces, as micro-batches whose only targets are the answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from lm.config.data import Traces
from lm.data.batches.packing import IGNORE, MicroBatch, micro_batch
from lm.data.sources import traces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COUNT = 128  # of a source


def asked(
    source: Traces | None, tokenizer: PreTrainedTokenizerBase, micro_batch_size: int, seq_len: int
) -> list[MicroBatch]:
    """COUNT questions, each the end of a document of its own, at the longest gap of a source whose
    questions fit into `seq_len` tokens (at its shortest where none do). A micro-batch has at most
    as many tokens as one of training."""
    source = source or Traces()
    gap = _longest_that_fits(source, tokenizer, seq_len)
    rows = [_tokens(turn, tokenizer) for turn in traces.questions(source, gap, COUNT)]
    width = max(len(ids) for ids, _ in rows)
    blocks = np.full((COUNT, width), IGNORE, dtype=np.int64)
    targets = np.zeros((COUNT, width), dtype=bool)
    for row, (ids, start) in enumerate(rows):
        blocks[row, : len(ids)] = ids
        targets[row, start : len(ids)] = True
    at_once = max(1, min(micro_batch_size, micro_batch_size * seq_len // width))
    return [
        _batch(blocks[start : start + at_once], targets[start : start + at_once])
        for start in range(0, COUNT, at_once)
    ]


def _longest_that_fits(source: Traces, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> int:
    for gap in sorted(set(source.lengths), reverse=True):
        # Every second question has another before it: these are the longer ones.
        _, longer = traces.questions(source, gap, 2)
        if len(_tokens(longer, tokenizer)[0]) <= seq_len:
            return gap
    return min(source.lengths)


def _tokens(turn: traces.Turn, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """The ids of a question with its answer, after EOS, and where those of the answer begin: with
    the first that the question alone does not have."""
    question, whole = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (turn.question, turn.question + turn.answer)
    )
    common = 0
    while common < len(question) and question[common] == whole[common]:
        common += 1
    return [tokenizer.eos_token_id, *whole], 1 + common


def _batch(blocks: np.ndarray, targets: np.ndarray) -> MicroBatch:
    batch = micro_batch(blocks)
    batch["labels"][torch.from_numpy(~targets[:, 1:])] = IGNORE
    return batch
