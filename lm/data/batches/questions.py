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
    source: Traces | None, tokenizer: PreTrainedTokenizerBase, micro_batch_size: int
) -> list[MicroBatch]:
    """COUNT questions at the longest gap of a source, each the end of a document of its own."""
    source = source or Traces()
    turns = traces.questions(source.form, source.group, max(source.gaps), COUNT)
    rows = []
    for turn in turns:
        question = tokenizer(turn.question, add_special_tokens=False)["input_ids"]
        whole = tokenizer(turn.question + turn.answer, add_special_tokens=False)["input_ids"]
        rows.append(([tokenizer.eos_token_id, *whole], 1 + len(question)))
    width = max(len(ids) for ids, _ in rows)
    blocks = np.full((COUNT, width), IGNORE, dtype=np.int64)
    targets = np.zeros((COUNT, width), dtype=bool)
    for row, (ids, start) in enumerate(rows):
        blocks[row, : len(ids)] = ids
        targets[row, start : len(ids)] = True
    return [
        _batch(blocks[start : start + micro_batch_size], targets[start : start + micro_batch_size])
        for start in range(0, COUNT, micro_batch_size)
    ]


def _batch(blocks: np.ndarray, targets: np.ndarray) -> MicroBatch:
    batch = micro_batch(blocks)
    batch["labels"][torch.from_numpy(~targets[:, 1:])] = IGNORE
    return batch
