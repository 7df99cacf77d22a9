"""Finite automata, by their transition table."""

from __future__ import annotations

from string import ascii_lowercase

import numpy as np

from synthetic import config
from synthetic.tasks import TaskError, task
from synthetic.tasks.formal_language import FormalLanguage

# Without a table: it permutes its states as a group that is not solvable does.
DEFAULT = ((0, 0, 0, 2, 4), (4, 2, 0, 1, 3), (3, 1, 4, 2, 0))


@task("automaton")
class Automaton(FormalLanguage):
    """In which state is the automaton after these letters, from state 0?

    `task.automaton.table` has a row for each letter, with the states that states 0, 1, … go to. A
    parallel model of fixed depth can follow an automaton if the groups in it are solvable; the
    default table has one that is not, as A5 and S5 are not (Liu et al. 2023, "Transformers Learn
    Shortcuts to Automata", arXiv 2210.10749; Merrill et al. 2024, arXiv 2404.08819).

    Letters are a, b, c, …. Guessing is to say the state that is the most frequent one in long
    random words.
    """

    def __init__(self, task: config.Task):
        super().__init__(task)
        table = task.automaton.table
        self.table = _checked(DEFAULT if table is None else table)
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
    """Return the table (letters,states) of a config.

    Raises:
        TaskError: The rows are not the transitions of an automaton.
    """
    states = len(rows[0]) if rows else 0
    has_states = all(len(row) == states and set(row) <= set(range(states)) for row in rows)
    if states < 2 or len(rows) > len(ascii_lowercase) or not has_states:
        raise TaskError(
            f"task.automaton.table is {rows}: it must have a row for each letter, 26 at most, and"
            " in each row the states, 0, 1, …, that the states 0, 1, … go to, two or more"
        )
    return np.array(rows)


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
