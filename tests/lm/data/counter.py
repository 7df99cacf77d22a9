"""Replacement for HubDocuments with a local source."""

import itertools

from lm.data.sources.open import iter_documents


class LocalShard:
    """Documents of a local source, sharded and resumable like HubDocuments."""

    def __init__(self, data, shard=(0, 1), state=None, order=None):
        self._read_count = state["read"] if state else 0
        index, count = shard
        start = index + self._read_count * count
        self._texts = itertools.islice(iter_documents(data), start, None, count)

    def __iter__(self):
        return self

    def __next__(self):
        text = next(self._texts)
        self._read_count += 1
        return text

    def state_dict(self):
        return {"read": self._read_count}
