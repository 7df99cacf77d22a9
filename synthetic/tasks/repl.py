"""A Python session of swaps: an operation is several tokens long, an answer shows a part."""

from __future__ import annotations

import math

import numpy as np

from synthetic import config
from synthetic.tasks import IGNORE, task
from synthetic.tasks.uniform_length import Drawn, UniformLengthTask

NAMES = "abcdefghi"


@task("repl")
class Repl(UniformLengthTask):
    """`task.variables` variables hold the numbers 1, 2, …; one is printed, then two of them are
    swapped and one is printed, again and again. The form is that of `source: traces` of the
    language models (form `repl`).

        >>> a, b, c = 2, 3, 1
        >>> print(a)            at the bracket the answer is due: 2
        >>> a, c = c, a
        >>> print(b)            3

    A token is what Python's own tokenizer would call one, but `>>>` is one, too, and `print(`. The
    length counts swaps; what would be printed is not in the input. So a swap must be put together
    from eight tokens, and no answer shows the whole state, a permutation: with five variables or
    more the task is as hard as the word problem of S5 (and so beyond TC⁰, if that is not NC¹).

    The first print asks for no more than a look-up. Without it no model that was tried learned even
    one swap.
    """

    def __init__(self, task: config.Task):
        self.name = task.name
        self.n = task.variables
        self.tokens = [*NAMES[: self.n], *map(str, range(1, self.n + 1))]
        self.tokens += [">>>", ",", "=", "print(", ")", "\n"]
        self.token_names = [*self.tokens[:-1], "⏎"]
        self.vocab_size = len(self.tokens)
        self.chance = 1 / self.n

    def count_contents(self, width: int) -> float:
        """The content: the first values as one number, then a number for each swap."""
        return math.factorial(self.n) * float(math.comb(self.n, 2)) ** (width - 1)

    def content_width(self, length: int) -> int:
        return 1 + length

    def draw(self, rng: np.random.Generator, count: int, length: int, split: str) -> Drawn:
        n = self.n
        start, comma, equals, ask, bracket, newline = range(2 * n, 2 * n + 6)
        rows = np.arange(count)

        def column(token: int) -> np.ndarray:
            return np.full(count, token)

        def listed(tokens: list[np.ndarray]) -> list[np.ndarray]:
            """With commas between them."""
            return [part for token in tokens for part in (column(comma), token)][1:]

        # 1. The first line.
        values = rng.random((count, n)).argsort(1)  # of each variable, from 0
        content = [values @ (n ** np.arange(n))]
        columns = [column(start), *listed([column(i) for i in range(n)]), column(equals)]
        columns += [*listed([n + values[:, i] for i in range(n)]), column(newline)]
        labels = [column(IGNORE) for _ in columns]

        # 2. Print, swap, print, swap, print, …
        def ask_for_one() -> None:
            asked = rng.integers(n, size=count)
            columns.extend([column(start), column(ask), asked, column(bracket), column(newline)])
            labels.extend([column(IGNORE)] * 3)
            labels.extend([n + values[rows, asked], column(IGNORE)])

        ask_for_one()
        for _ in range(length):
            left = rng.integers(n, size=count)
            right = (left + rng.integers(1, n, size=count)) % n
            content.append(np.minimum(left, right) * n + np.maximum(left, right))
            values[rows, left], values[rows, right] = values[rows, right], values[rows, left]
            line = [column(start), *listed([left, right]), column(equals), *listed([right, left])]
            line.append(column(newline))
            columns.extend(line)
            labels.extend([column(IGNORE)] * len(line))
            ask_for_one()
        return Drawn(np.stack(content, 1), np.stack(columns, 1), np.stack(labels, 1))

    def text(self, ids: np.ndarray) -> str:
        """The session as Python would read it."""
        return "".join(self.tokens[i] for i in ids)
