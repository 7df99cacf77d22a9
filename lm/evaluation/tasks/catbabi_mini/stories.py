"""Stories of people, places and things with questions in between, several to a context.

As in CatbAbI, a context concatenates stories (one a line) and its questions stand among the facts,
each with its answer; the last question is left to the model. Every story starts from an unknown
world, so only the facts of the last line bear on that question.

lm-eval loads this file by its path: it imports nothing of the package, and defines no dataclass
(which would look for its module in sys.modules).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import DatasetDict

PEOPLE = ("Mary", "John", "Sandra", "Daniel")
PLACES = ("kitchen", "garden", "office", "bathroom", "hallway", "bedroom")
THINGS = ("apple", "football", "milk", "book")

# The kinds of question, and the answers each one can have.
CHOICES = {
    "where_person": PLACES,
    "where_thing": PLACES,
    "who_has": PEOPLE,
    "yes_no": ("yes", "no"),
}
KINDS = tuple(CHOICES)

GO = ("went to", "moved to", "travelled to", "walked to")
TAKE = ("picked up", "took", "grabbed")
DROP = ("dropped", "put down", "set down")
GIVE = ("gave", "handed", "passed")


class World:
    """What the facts told so far imply, and nothing that a reader could not know."""

    def __init__(self, people: list[str]):
        self.people = people  # the cast
        self.place: dict[str, str] = {}  # of a person
        self.before: dict[str, str] = {}  # where the person was before that
        self.holder: dict[str, str] = {}  # of a thing somebody carries
        self.lies: dict[str, str] = {}  # where a dropped thing is
        self.last = ("", "")  # the place and the person named last

    def fact(self, rng: random.Random) -> str:
        """Let one thing happen and say so."""
        take = [
            (who, thing)
            for who, place in self.place.items()
            for thing in THINGS
            if thing not in self.holder and self.lies.get(thing, place) == place
        ]
        drop = [(who, thing) for thing, who in self.holder.items()]
        give = [
            (who, other, thing)
            for who, thing in drop
            for other in self.place
            if other != who and self.place[other] == self.place[who]
        ]
        options = {"go": 5, "take": 3 if take else 0, "drop": 2 if drop else 0}
        options["give"] = 6 if give else 0  # rarely possible
        act = rng.choices(list(options), list(options.values()))[0]
        if act == "take":
            who, thing = rng.choice(take)
            self.last = (self.last[0], who)
            self.holder[thing] = who
            self.lies.pop(thing, None)
            return f"{who} {rng.choice(TAKE)} the {thing}."
        if act == "drop":
            who, thing = rng.choice(drop)
            self.last = (self.last[0], who)
            del self.holder[thing]
            self.lies[thing] = self.place[who]
            return f"{who} {rng.choice(DROP)} the {thing}."
        if act == "give":
            who, other, thing = rng.choice(give)
            self.last = (self.last[0], other)
            self.holder[thing] = other
            return f"{who} {rng.choice(GIVE)} the {thing} to {other}."
        who = rng.choice(self.people)
        # Half of the walks join somebody, so that things can change hands.
        away = [place for place in PLACES if place != self.place.get(who)]
        company = [place for place in away if place in self.place.values()]
        to = rng.choice(company if company and rng.random() < 0.5 else away)
        if who in self.place:
            self.before[who] = self.place[who]
        self.place[who] = to
        self.last = (to, who)
        return f"{who} {rng.choice(GO)} the {to}."

    def ask(
        self, rng: random.Random, kind: str, yes: bool | None = None, stale: bool = False
    ) -> tuple[str, str] | None:
        """A question of this kind and its answer, or None when the facts so far answer none. `yes`
        fixes the answer of a yes/no question; `stale` leaves out the questions that the place or
        the person named last would answer."""
        if kind == "where_thing":
            truth = {thing: self.place[who] for thing, who in self.holder.items()} | self.lies
        else:
            truth = self.holder if kind == "who_has" else self.place
        subjects = sorted(s for s in truth if not (stale and truth[s] in self.last))
        if not subjects:
            return None
        subject = rng.choice(subjects)
        answer = truth[subject]
        if kind == "where_person":
            return f"Where is {subject}?", answer
        if kind == "where_thing":
            return f"Where is the {subject}?", answer
        if kind == "who_has":
            return f"Who has the {subject}?", answer
        if yes is None:
            yes = rng.random() < 0.5
        # A wrong place is mostly the one just left, which a model that never updates would affirm.
        wrong = self.before.get(subject, answer)
        if wrong == answer or rng.random() < 0.2:
            wrong = rng.choice([place for place in PLACES if place != answer])
        return f"Is {subject} in the {answer if yes else wrong}?", "yes" if yes else "no"


def story(rng: random.Random, last: str | None = None, yes: bool | None = None) -> list[str]:
    """The sentences of one story, answered questions among them. With `last`, a kind of question,
    the final two entries are such a question and its answer."""
    world, sentences = World(rng.sample(PEOPLE, rng.randint(2, 3))), []
    facts = rng.randint(5, 10)
    stale = rng.random() < 0.6  # else the latest fact answers too many of the last questions
    final = None
    while facts > 0 or (last and final is None):
        sentences.append(world.fact(rng))
        facts -= 1
        if facts <= 0 and last:
            final = world.ask(rng, last, yes, stale)
        elif rng.random() < 0.3:
            question = world.ask(rng, rng.choice(KINDS))
            sentences += [f"{question[0]} {question[1]}."] if question else []
    return sentences + list(final or ())


def document(rng: random.Random, kind: str, yes: bool | None = None) -> dict:
    """One context of two or three stories that ends on a question of `kind`."""
    lines = [" ".join(story(rng)) for _ in range(rng.randint(1, 2))]
    *sentences, question, answer = story(rng, kind, yes)
    return {
        "context": "\n".join([*lines, " ".join(sentences)]),
        "question": question,
        "answer": answer,
        "choices": list(CHOICES[kind]),
        "kind": kind,
    }


def documents(count: int, seed: int | str) -> list[dict]:
    """`count` documents, the same for the same seed. Kinds take turns, and so do yes and no: any
    prefix (lm-eval's --limit) is balanced."""
    return [
        document(random.Random(f"{seed}/{i}"), KINDS[i % 4], yes=i // 4 % 2 == 0)
        for i in range(count)
    ]


def load(num_docs: int = 200, seed: int = 2026, **_: object) -> DatasetDict:
    """lm-eval's `custom_dataset`: `test` is scored, `train` gives few-shot examples. The
    arguments can be set on its command line: --metadata '{"num_docs": 1000}'."""
    from datasets import Dataset, DatasetDict

    splits = {"test": documents(num_docs, seed), "train": documents(40, f"train/{seed}")}
    return DatasetDict({name: Dataset.from_list(docs) for name, docs in splits.items()})
