"""Traces: generated text that contains state, as words of a group or as a Python session."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from lm.config.data import Traces
from lm.data.sources.errors import DataError
from lm.data.sources.groups import get_group

VERSION = 3  # of the text; increase it if the same settings give other text
CONSONANTS = "bcdfghjklmnprstvz"
VOWELS = "aeiou"


class Turn(NamedTuple):
    """A question and its answer. Neither ends in white space."""

    question: str  # the text from the previous answer to the end of the question
    answer: str  # begins with the separator after the question


class Words:
    """Text in which syllables stand for elements of a group: "ba bo = bo ; bi be ca = ca ;".

    The answer after "=" is the product of all elements in the questions up to there, as in the word
    problem of `synthetic/tasks/`.
    """

    end = " ;"  # at the end of a document

    def __init__(self, traces: Traces):
        self.group = get_group(traces.group)
        self.names = make_syllables(self.group.order)  # names of the elements
        self.elements = range(self.group.order)  # elements that occur in questions
        if traces.num_elements is not None:
            self.elements = self.group.simplest_first()[: traces.num_elements].tolist()
            if len(self.elements) < traces.num_elements:
                raise DataError(
                    f"traces of {traces.group} have at most {self.group.order} `num_elements`, not"
                    f" {traces.num_elements}"
                )

    def turns(self, rng: random.Random, gaps: list[int]) -> list[Turn]:
        """Make a turn for each gap, the number of elements before its question."""
        state = self.group.identity
        turns: list[Turn] = []
        for gap in gaps:
            elements = [rng.choice(self.elements) for _ in range(gap)]
            for element in elements:
                state = int(self.group.table[state, element])
            question = " ".join(self.names[element] for element in elements)
            separator = " ; " if turns else ""
            turns.append(Turn(f"{separator}{question} =", f" {self.names[state]}"))
        return turns


class Repl:
    """Text of a Python session in which variables with the values 1, 2, … are swapped and printed.

    A swap is several tokens long, and an answer reveals only one variable of the state.
    """

    end = "\n"

    def __init__(self, traces: Traces):
        if not re.fullmatch("S[2-9]", traces.group):
            raise DataError(
                "traces of form `repl` need a group S2 to S9 (S3 has three variables), not"
                f" `{traces.group}`"
            )
        self.variables = "abcdefghi"[: int(traces.group[1:])]

    def turns(self, rng: random.Random, gaps: list[int]) -> list[Turn]:
        """Make a turn for each gap, the number of swaps before its question."""
        count = len(self.variables)
        values = rng.sample(range(1, count + 1), count)
        text = f">>> {', '.join(self.variables)} = {', '.join(map(str, values))}\n"
        turns = []
        for gap in gaps:
            for _ in range(gap):
                i, j = rng.sample(range(count), 2)
                values[i], values[j] = values[j], values[i]
                a, b = self.variables[i], self.variables[j]
                text += f">>> {a}, {b} = {b}, {a}\n"
            index = rng.randrange(count)
            question = f"{text}>>> print({self.variables[index]})"
            turns.append(Turn(question, f"\n{values[index]}"))
            text = "\n"
        return turns


# {form of traces: its class}
FORMS: dict[str, type[Words] | type[Repl]] = {"words": Words, "repl": Repl}


def iter_documents(traces: Traces) -> Iterator[str]:
    """Yield the documents of a configuration, the same at every call.

    A document has 1 to `traces.answers` questions, each after a gap of `traces.gaps`. A question
    does not reset the state.

    Raises:
        DataError: If there is no such group, or the form does not support it.
    """
    form = FORMS[traces.form](traces)
    for number in range(traces.documents):
        rng = random.Random(f"{traces.form} {traces.group} {traces.gaps} {number}")
        gaps = [_draw_gap(rng, traces) for _ in range(rng.randint(1, traces.answers))]
        turns = form.turns(rng, gaps)
        yield "".join(turn.question + turn.answer for turn in turns) + form.end


def _draw_gap(rng: random.Random, traces: Traces) -> int:
    """Draw a gap: uniformly from a list, or up to a number n with probability ∝ 100^(−gap/n).

    With this geometric distribution a question is about equally likely after every element, and few
    gaps are near n. Otherwise a model would learn to count the elements and to predict an overdue
    question. In tests with longer gaps, that prediction can replace the answer.
    """
    if isinstance(traces.gaps, list):
        return rng.choice(traces.gaps)
    weights = [100 ** (-gap / max(traces.gaps, 1)) for gap in traces.possible_gaps]
    return rng.choices(traces.possible_gaps, weights)[0]


def iter_questions(
    traces: Traces, gap: int, count: int, split: Literal["validation", "test"]
) -> Iterator[Turn]:
    """Yield `count` test documents as turns.

    The question of a turn is the document up to its last question. The answer belongs to the last
    question. Every second document contains another question and its answer before the last one.

    Args:
        gap: Number of elements or swaps before each question.
        count: Number of documents.
        split: "validation" for questions during training, "test" for the tasks of lm-eval.

    Raises:
        DataError: As `iter_documents`.
    """
    form = FORMS[traces.form](traces)
    prefix = "" if split == "test" else f"{split} "  # version 1 of the tasks had no splits
    for number in range(count):
        rng = random.Random(f"{prefix}questions {traces.form} {traces.group} {gap} {number}")
        turn_count = 1 + number % 2
        *earlier_turns, last_turn = form.turns(rng, [gap] * turn_count)
        context = "".join(turn.question + turn.answer for turn in earlier_turns)
        yield Turn(context + last_turn.question, last_turn.answer)


def make_syllables(count: int) -> list[str]:
    """Return different syllables: ba, be, …, zu, then bab, bac, and so on."""
    patterns = ((CONSONANTS, VOWELS), (CONSONANTS, VOWELS, CONSONANTS), (CONSONANTS, VOWELS) * 2)
    syllables = itertools.chain.from_iterable(itertools.product(*pattern) for pattern in patterns)
    return ["".join(letters) for letters in itertools.islice(syllables, count)]


def describe_text(traces: Traces | None) -> dict:
    """Return all settings that determine the text."""
    settings = (traces or Traces()).model_dump(mode="json", exclude_none=True)
    if "num_elements" in settings:  # the key's first name, so that corpora keep their address
        settings["letters"] = settings.pop("num_elements")
    return settings | {"version": VERSION}


def check(traces: Traces | None) -> None:
    """Raise DataError unless there is such a group, and the form supports it."""
    traces = traces or Traces()
    FORMS[traces.form](traces)  # the constructor checks the group
