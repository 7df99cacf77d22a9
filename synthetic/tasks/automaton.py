"""Finite automata: from a transition table, or drawn with a known place in Krohn–Rhodes' order."""

from __future__ import annotations

from collections.abc import Iterator
from string import ascii_lowercase

import numpy as np

from synthetic import config
from synthetic.tasks import TaskError, task
from synthetic.tasks.formal_language import FormalLanguage

MAX_STATES = 5  # of an automaton that is drawn: its monoid has up to 5⁵ maps
TRIES = 300


@task("automaton")
class Automaton(FormalLanguage):
    """In which state is the automaton after these letters, from state 0?

    `task.automaton` is a table, of each letter the states that the states go to, or says what is
    drawn: `{states: 5, letters: 3, kind: unsolvable, seed: 0}`. The kinds are those that decide
    what a parallel model can do (Liu et al. 2023, "Transformers Learn Shortcuts to Automata", arXiv
    2210.10749; Merrill et al. 2024, arXiv 2404.08819):

        aperiodic    no word permutes any states: counter-free, its languages are star-free
        solvable     all permutation groups in it are solvable, and not all of them trivial: TC⁰
        unsolvable   some is not, as A5 and S5 are not: NC¹-complete

    Letters are a, b, c, …. Guessing is to say the state that is the most frequent one in long
    random words.
    """

    source = "Liu et al. 2023 (arXiv 2210.10749)"

    def __init__(self, task: config.Task):
        super().__init__(task)
        wanted = task.automaton
        if wanted.table is None:
            self.table = draw(wanted.states, wanted.letters, wanted.kind, wanted.seed)
        else:
            self.table = _checked(wanted.table)
        self.symbols, states = self.table.shape
        self.characters = ascii_lowercase[: self.symbols]
        self.vocab_size = max(self.symbols, states) + 1
        self.chance = float(long_run(self.table).max())
        if self.chance > 1 - 1e-9:
            raise TaskError(
                "task.automaton.table ends in one state, for good: there is nothing to be asked"
            )

    def answers(self, ids: np.ndarray) -> np.ndarray:
        state = np.zeros(len(ids), int)
        states = np.empty(ids.shape, int)
        for place in range(ids.shape[1]):
            state = self.table[ids[:, place], state]
            states[:, place] = state
        return states


def _checked(rows: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """The table (letters,states) of a config.

    Raises:
        TaskError: rows of several lengths, states that it has not, too many letters.
    """
    sizes = {len(row) for row in rows}
    if not rows or len(sizes) != 1 or sizes <= {0, 1}:
        raise TaskError(
            "task.automaton.table must have a row for each letter, and in each the state that"
            f" states 0, 1, … go to, two or more; its rows have {sorted(sizes)} numbers"
        )
    if len(rows) > len(ascii_lowercase):
        raise TaskError(f"task.automaton.table has {len(rows)} letters: 26 are the most")
    table = np.array(rows)
    wrong = table[(table < 0) | (table >= table.shape[1])]
    if len(wrong):
        raise TaskError(
            f"task.automaton.table goes to state {wrong[0]}: its states are 0 to"
            f" {table.shape[1] - 1}, as many as a row has numbers"
        )
    return table


def draw(states: int, letters: int, kind: str, seed: int) -> np.ndarray:
    """A random table (letters,states) of this kind, all of whose states are reached from state 0.

    A letter of an aperiodic one is a random map that keeps the order of the states, since what such
    maps make permutes nothing; else it is that, or any map, or a permutation, each as often.

    Raises:
        TaskError: none was found.
    """
    if states > MAX_STATES:
        raise TaskError(
            f"task.automaton.states is {states}: at most {MAX_STATES} can be drawn; larger ones"
            " must be given as a table"
        )
    if kind == "unsolvable" and (states < 5 or letters < 2):
        raise TaskError(
            f"task.automaton: no automaton of {states} states and {letters} letters is unsolvable:"
            " the smallest have 5 states and 2 letters"
        )
    rng = np.random.default_rng([seed, states, letters])
    for _ in range(TRIES):
        table = rng.integers(states, size=(letters, states))
        for letter, form in enumerate(rng.integers(3, size=letters)):
            if form == 0 or kind == "aperiodic":
                table[letter].sort()
            elif form == 1:
                table[letter] = rng.permutation(states)
        if (long_run(table) > 0).all() and kind_of(table) == kind:
            return table
    raise TaskError(
        f"task.automaton: in {TRIES} tries no {kind} automaton of {states} states and {letters}"
        " letters was found, all of whose states are taken again and again: try more letters"
    )


def long_run(table: np.ndarray) -> np.ndarray:
    """How often each state is taken in long random words, (states,); 0 where it never is for long.
    It is the mean over words of 1,024 to 2,047 letters, so that no period matters."""
    letters, states = table.shape
    step = np.zeros((states, states))
    np.add.at(step, (np.arange(states), table), 1 / letters)
    share = np.eye(states)[0]
    total = np.zeros(states)
    for length in range(2048):
        total += share * (length >= 1024)
        share = share @ step
    return np.where(total / 1024 < 1e-9, 0, total / 1024)


def kind_of(table: np.ndarray) -> str:
    """ "aperiodic", "solvable" or "unsolvable": by the groups in the automaton's monoid, each of
    which permutes the states that one of its idempotents keeps."""
    monoid = monoid_of(table)
    kind = "aperiodic"
    for group in _groups_in(monoid):
        if not is_solvable(group):
            return "unsolvable"
        if len(group) > 1:
            kind = "solvable"
    return kind


def monoid_of(maps: np.ndarray) -> np.ndarray:
    """All maps that words make, the empty one too: (count,states). A word's letters act in order,
    so that word w then v is v[w]."""
    found = {tuple(range(maps.shape[1]))}
    newest = list(found)
    while newest:
        products = {tuple(letter[list(word)].tolist()) for word in newest for letter in maps}
        newest = list(products - found)
        found |= products
    return np.array(sorted(found))


def _groups_in(monoid: np.ndarray) -> Iterator[np.ndarray]:
    """The largest group around each idempotent e: the maps s with e s = s = s e that permute what e
    keeps, as permutations of it (order,kept)."""
    for e in monoid:
        if (e[e] != e).any():
            continue
        kept = np.unique(e)
        is_around = (monoid[:, e] == monoid).all(1) & (e[monoid] == monoid).all(1)
        images = monoid[is_around][:, kept]
        permutes = (np.sort(images, 1) == kept).all(1)
        yield np.searchsorted(kept, images[permutes])


def is_solvable(group: np.ndarray) -> bool:
    """Whether the series of commutator subgroups of a permutation group (order,n) ends at 1."""
    while len(group) > 1:
        inverses = group.argsort(1)
        generators = set()
        for a, inverse_of_a in zip(group, inverses):
            # All b: a, then b, then a⁻¹, then b⁻¹.
            through = inverse_of_a[group[:, a]]
            generators |= set(map(tuple, np.take_along_axis(inverses, through, 1).tolist()))
        derived = monoid_of(np.array(sorted(generators)))
        if len(derived) == len(group):
            return False
        group = derived
    return True
