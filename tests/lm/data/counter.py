"""What the reader processes of the tests do; light to import."""

import itertools
import time

from lm.data.sources.open import documents


class Listed:
    """Documents of a local source, dealt to shards and resumed as those of the hub are."""

    def __init__(self, data, shard=(0, 1), state=None, order=None):
        self._read = state["read"] if state else 0
        index, count = shard
        self._texts = itertools.islice(documents(data), index + self._read * count, None, count)

    def __iter__(self):
        return self

    def __next__(self):
        text = next(self._texts)
        self._read += 1
        return text

    def state_dict(self):
        return {"read": self._read}


def counter(first: int):
    """Answers with the key and a number that goes up."""
    numbers = {}

    def answer(key):
        if key == "sleep":
            time.sleep(60)
        if key == "raise":
            raise ZeroDivisionError("in the worker")
        numbers[key] = numbers.get(key, first - 1) + 1
        return key, numbers[key]

    return answer
