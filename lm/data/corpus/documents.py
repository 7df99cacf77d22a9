"""Encoding of documents as one row of token ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerFast


def encode_documents(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], leading_eos: bool = False
) -> np.ndarray:
    """Encode documents, each followed by EOS, as one row of token ids.

    Text that spells a special token is encoded as text, so no document can contain a boundary.

    Args:
        leading_eos: Put EOS before each document as well.

    Returns:
        Token ids, shape (n,), int64.
    """
    backend, eos = tokenizer.backend_tokenizer, tokenizer.eos_token_id
    backend.no_truncation()
    backend.no_padding()
    old_setting = backend.encode_special_tokens
    backend.encode_special_tokens = True
    try:
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    finally:
        backend.encode_special_tokens = old_setting
    ids: list[int] = []
    for encoding in encodings:
        if leading_eos:
            ids.append(eos)
        ids += encoding.ids
        ids.append(eos)
    return np.array(ids, dtype=np.int64)
