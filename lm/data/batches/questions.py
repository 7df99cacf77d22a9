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

COUNT = 128  # questions per source


def question_batches(
    source: Traces | None, tokenizer: PreTrainedTokenizerBase, micro_batch_size: int, seq_len: int
) -> list[MicroBatch]:
    """Make COUNT questions about a source's traces, each at the end of a document of its own.

    The gap before a question is the longest one whose questions fit into `seq_len` tokens; if none
    fits, the shortest. A micro-batch has at most as many tokens as a micro-batch of training.
    """
    source = source or Traces()
    gap = _longest_fitting_gap(source, tokenizer, seq_len)
    rows = [_encode(turn, tokenizer) for turn in traces.iter_questions(source, gap, COUNT)]
    width = max(len(ids) for ids, _ in rows)
    blocks = np.full((COUNT, width), IGNORE, dtype=np.int64)
    targets = np.zeros((COUNT, width), dtype=bool)
    for row, (ids, start) in enumerate(rows):
        blocks[row, : len(ids)] = ids
        targets[row, start : len(ids)] = True
    size = max(1, min(micro_batch_size, micro_batch_size * seq_len // width))
    return [
        _batch(blocks[start : start + size], targets[start : start + size])
        for start in range(0, COUNT, size)
    ]


def _longest_fitting_gap(source: Traces, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> int:
    for gap in sorted(set(source.lengths), reverse=True):
        # Every second document has two questions, which makes it longer.
        _, longer = traces.iter_questions(source, gap, 2)
        if len(_encode(longer, tokenizer)[0]) <= seq_len:
            return gap
    return min(source.lengths)


def _encode(turn: traces.Turn, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """Encode EOS, a question and its answer.

    Returns:
        Token ids, and the index of the answer's first token: the first difference from the ids of
        the question without its answer.
    """
    question, document = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (turn.question, turn.question + turn.answer)
    )
    common = 0
    while common < len(question) and question[common] == document[common]:
        common += 1
    return [tokenizer.eos_token_id, *document], 1 + common


def _batch(blocks: np.ndarray, targets: np.ndarray) -> MicroBatch:
    batch = micro_batch(blocks)
    batch["labels"][torch.from_numpy(~targets[:, 1:])] = IGNORE
    return batch
