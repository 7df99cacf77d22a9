"""Text that contains state, made here: words of a group, or swaps in a Python session."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from typing import NamedTuple

from lm.config.data import Traces
from lm.data.sources.errors import DataError
from lm.data.sources.groups import group

VERSION = 2  # of the text: other text is another number
CONSONANTS = "bcdfghjklmnprstvz"
VOWELS = "aeiou"


class Turn(NamedTuple):
    """A question with what was said since the answer before it, and its answer. Neither ends in
    white space, and an answer begins with what separates it from its question."""

    question: str
    answer: str


class Words:
    """Words of a group: "ba bo = bi ; bi be ca = bu ;". After "=" stands the product of all
    elements so far, the running product of the suite's word problem."""

    end = " ;"  # of a document

    def __init__(self, traces: Traces):
        self.group = group(traces.group)
        self.names = syllables(self.group.order)
        self.letters = range(self.group.order)
        if traces.num_elements is not None:
            self.letters = self.group.simplest_first()[: traces.num_elements].tolist()
            if len(self.letters) < traces.num_elements:
                raise DataError(
                    f"traces of {traces.group} have at most {self.group.order} `num_elements`, not"
                    f" {traces.num_elements}"
                )

    def turns(self, rng: random.Random, gaps: list[int]) -> list[Turn]:
        """One for each of `gaps`, which is the number of elements before its question."""
        state = self.group.identity
        turns: list[Turn] = []
        for gap in gaps:
            elements = [rng.choice(self.letters) for _ in range(gap)]
            for element in elements:
                state = int(self.group.table[state, element])
            asked = " ".join(self.names[element] for element in elements)
            separator = " ; " if turns else ""
            turns.append(Turn(f"{separator}{asked} =", f" {self.names[state]}"))
        return turns


class Repl:
    """A Python session. Variables hold the numbers 1, 2, …, two of them are swapped again and
    again, and one is printed. A swap is several tokens long, and an answer shows a part of the
    state."""

    end = "\n"

    def __init__(self, traces: Traces):
        if not re.fullmatch("S[2-9]", traces.group):
            raise DataError(
                "traces of form `repl` are of a group S2 to S9, of so many variables, not"
                f" `{traces.group}`"
            )
        self.variables = "abcdefghi"[: int(traces.group[1:])]

    def turns(self, rng: random.Random, gaps: list[int]) -> list[Turn]:
        """One for each of `gaps`, which is the number of swaps before its question."""
        count = len(self.variables)
        values = rng.sample(range(1, count + 1), count)
        said = f">>> {', '.join(self.variables)} = {', '.join(map(str, values))}\n"
        turns = []
        for gap in gaps:
            for _ in range(gap):
                i, j = rng.sample(range(count), 2)
                values[i], values[j] = values[j], values[i]
                left, right = self.variables[i], self.variables[j]
                said += f">>> {left}, {right} = {right}, {left}\n"
            asked = rng.randrange(count)
            question = f"{said}>>> print({self.variables[asked]})"
            turns.append(Turn(question, f"\n{values[asked]}"))
            said = "\n"
        return turns


FORMS: dict[str, type[Words] | type[Repl]] = {"words": Words, "repl": Repl}


def documents(traces: Traces) -> Iterator[str]:
    """The documents that a configuration describes, always the same ones.

    A document has 1 to `traces.answers` questions, each after a gap of `traces.gaps`. The state
    goes on from question to question.

    Raises:
        DataError: there is no such group, or none of this form.
    """
    form = FORMS[traces.form](traces)
    for number in range(traces.documents):
        rng = random.Random(f"{traces.form} {traces.group} {traces.gaps} {number}")
        gaps = [_gap(rng, traces) for _ in range(rng.randint(1, traces.answers))]
        turns = form.turns(rng, gaps)
        yield "".join(turn.question + turn.answer for turn in turns) + form.end


def _gap(rng: random.Random, traces: Traces) -> int:
    """One of a list, each as likely. Up to a number n: q^gap as likely, q = n / (n + 2), so that a
    question is nearly as likely after every element, and who reads it gains little by counting."""
    if isinstance(traces.gaps, list):
        return rng.choice(traces.gaps)
    q = traces.gaps / (traces.gaps + 2)
    return rng.choices(traces.lengths, [q**gap for gap in traces.lengths])[0]


def questions(traces: Traces, gap: int, count: int) -> Iterator[Turn]:
    """What a trained model is asked: `count` documents up to a last question, every gap of them
    `gap`, and its answer. Every second one has a question with its answer before.

    Raises:
        DataError: as `documents`.
    """
    form = FORMS[traces.form](traces)
    for number in range(count):
        rng = random.Random(f"questions {traces.form} {traces.group} {gap} {number}")
        *before, last = form.turns(rng, [gap] * (1 + number % 2))
        told = "".join(turn.question + turn.answer for turn in before)
        yield Turn(told + last.question, last.answer)


def syllables(count: int) -> list[str]:
    """So many different short words: ba, be, …, zu, then bab, bac, …"""
    kinds = ((CONSONANTS, VOWELS), (CONSONANTS, VOWELS, CONSONANTS), (CONSONANTS, VOWELS) * 2)
    words = itertools.chain.from_iterable(itertools.product(*letters) for letters in kinds)
    return ["".join(letters) for letters in itertools.islice(words, count)]


def described(traces: Traces | None) -> dict:
    """Return the settings that determine the text: they change whenever the text does."""
    settings = (traces or Traces()).model_dump(mode="json", exclude_none=True)
    if "num_elements" in settings:  # under its first name: cached corpora keep their address
        settings["letters"] = settings.pop("num_elements")
    return settings | {"version": VERSION}


def check(traces: Traces | None) -> None:
    """Raises DataError unless there is such a group, and it can be written in this form."""
    traces = traces or Traces()
    FORMS[traces.form](traces)
