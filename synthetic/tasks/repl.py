"""Python session that swaps variables: an operation is several tokens, an answer one value."""

from __future__ import annotations

import math

import numpy as np

from synthetic import config
from synthetic.tasks import IGNORE, task
from synthetic.tasks.uniform_length import Rows, UniformLengthTask

NAMES = "abcdefghi"


@task("repl")
class Repl(UniformLengthTask):
    """Variables hold the numbers 1, 2, …; the session prints one, then swaps two, and repeats.

    `task.variables` is the number of variables. Language models train on the same sessions with
    `source: traces` in the form `repl`.

        >>> a, b, c = 2, 3, 1
        >>> print(a)            the answer at the closing bracket is 2
        >>> a, c = c, a
        >>> print(b)            3

    Tokens are the same as in Python's tokenizer, except that `>>>` and `print(` are single tokens.
    The length counts swaps. The input does not contain the printed output. The state is a
    permutation: the model reads each swap from nine tokens, and an answer shows only one value.
    With five variables or more the task is as hard as the word problem of S5 (beyond TC⁰ if
    TC⁰ ≠ NC¹).

    The first print needs only a look-up. Without it, no model that we tried learned one swap.
    """

    def __init__(self, section: config.Task):
        self.name = section.name
        self.variables = section.variables
        self.tokens = [*NAMES[: self.variables], *map(str, range(1, self.variables + 1))]
        self.tokens += [">>>", ",", "=", "print(", ")", "\n"]
        self.token_names = [*self.tokens[:-1], "⏎"]
        self.vocab_size = len(self.tokens)
        self.chance = 1 / self.variables

    def count_contents(self, width: int) -> float:
        """Count the contents of `width` numbers: one for the first values, then one per swap."""
        first_values = math.factorial(self.variables)
        return first_values * float(math.comb(self.variables, 2)) ** (width - 1)

    def content_width(self, length: int) -> int:
        return 1 + length

    def draw(self, rng: np.random.Generator, count: int, length: int, split: str) -> Rows:
        n = self.variables
        prompt, comma, equals, call, bracket, newline = range(2 * n, 2 * n + 6)
        rows = np.arange(count)

        def column(token: int) -> np.ndarray:
            return np.full(count, token)

        def join_with_commas(tokens: list[np.ndarray]) -> list[np.ndarray]:
            with_leading_comma = [part for token in tokens for part in (column(comma), token)]
            return with_leading_comma[1:]

        # 1. The assignment of the first values.
        values = rng.random((count, n)).argsort(1)  # value of each variable, from 0 on
        content = [values @ (n ** np.arange(n))]  # the values as one number, in base n
        columns = [column(prompt), *join_with_commas([column(i) for i in range(n)])]
        columns.append(column(equals))
        columns += [*join_with_commas([n + values[:, i] for i in range(n)]), column(newline)]
        labels = [column(IGNORE) for _ in columns]

        # 2. Print, swap, print, swap, print, …
        def add_print() -> None:
            variable = rng.integers(n, size=count)
            columns.extend(
                [column(prompt), column(call), variable, column(bracket), column(newline)]
            )
            answer = n + values[rows, variable]  # at the closing bracket
            labels.extend([*[column(IGNORE)] * 3, answer, column(IGNORE)])

        add_print()
        for _ in range(length):
            a = rng.integers(n, size=count)
            b = (a + rng.integers(1, n, size=count)) % n
            content.append(np.minimum(a, b) * n + np.maximum(a, b))  # the same for (b, a)
            values[rows, a], values[rows, b] = values[rows, b], values[rows, a]
            line = [column(prompt), *join_with_commas([a, b]), column(equals)]
            line += [*join_with_commas([b, a]), column(newline)]
            columns.extend(line)
            labels.extend([column(IGNORE)] * len(line))
            add_print()
        return Rows(np.stack(content, 1), np.stack(columns, 1), np.stack(labels, 1))

    def text(self, ids: np.ndarray) -> str:
        """Return the session as text, with its prompts."""
        return "".join(self.tokens[i] for i in ids)
