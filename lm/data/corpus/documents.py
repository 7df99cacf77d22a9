"""Documents → one row of token ids, each with EOS behind it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerFast


def encode_documents(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], leading_eos: bool = False
) -> np.ndarray:
    """Token ids (n,) int64 of the documents in a row, each `[eos] + tokens + eos`.

    Text that spells a special token stays text: no document can forge a boundary.
    """
    backend, eos = tokenizer.backend_tokenizer, tokenizer.eos_token_id
    backend.no_truncation()
    backend.no_padding()
    before, backend.encode_special_tokens = backend.encode_special_tokens, True
    try:
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    finally:
        backend.encode_special_tokens = before
    ids: list[int] = []
    for encoding in encodings:
        if leading_eos:
            ids.append(eos)
        ids += encoding.ids
        ids.append(eos)
    return np.array(ids, dtype=np.int64)
