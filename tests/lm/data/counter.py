"""What the reader processes of the tests do; light to import."""

import time


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
