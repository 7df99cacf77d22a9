"""Finite automata, given by their transition table."""

from __future__ import annotations

from string import ascii_lowercase

import numpy as np

from synthetic import config
from synthetic.tasks import TaskError, task
from synthetic.tasks.formal_language import FormalLanguage

# Each symbol permutes the states, and the permutations generate a group that is not solvable.
DEFAULT_TABLE = ((0, 0, 0, 2, 4), (4, 2, 0, 1, 3), (3, 1, 4, 2, 0))


@task("automaton")
class Automaton(FormalLanguage):
    """State of an automaton after the symbols read so far, starting in state 0.

    `task.automaton.table` has a row for each symbol, with the states that states 0, 1, … go to. A
    parallel model of fixed depth can follow an automaton if all its groups are solvable. The
    default table contains a group that is not solvable, like A5 and S5 (Liu et al. 2023,
    "Transformers Learn Shortcuts to Automata", arXiv 2210.10749; Merrill et al. 2024,
    arXiv 2404.08819).

    Symbols are a, b, c, …. `chance` is the frequency of the most frequent state after long random
    sequences.
    """

    def __init__(self, section: config.Task):
        super().__init__(section)
        table = section.automaton.table
        self.table = _check_table(DEFAULT_TABLE if table is None else table)
        self.symbols, states = self.table.shape
        self.characters = ascii_lowercase[: self.symbols]
        self.vocab_size = max(self.symbols, states) + 1
        self.chance = float(compute_state_frequencies(self.table).max())
        if self.chance > 1 - 1e-9:
            raise TaskError(
                "task.automaton.table ends in one state and never leaves it, so every answer is the"
                " same: give a table that keeps moving between states"
            )

    def answers(self, ids: np.ndarray) -> np.ndarray:
        state = np.zeros(len(ids), int)
        states = np.empty(ids.shape, int)
        for position in range(ids.shape[1]):
            state = self.table[ids[:, position], state]
            states[:, position] = state
        return states


def _check_table(rows: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """Return the table of a config as an array (symbols,states).

    Raises:
        TaskError: If the rows are not the transitions of an automaton.
    """
    states = len(rows[0]) if rows else 0
    has_states = all(len(row) == states and set(row) <= set(range(states)) for row in rows)
    if states < 2 or len(rows) > len(ascii_lowercase) or not has_states:
        raise TaskError(
            f"task.automaton.table is {rows}: it must have a row for each symbol, at most 26, and"
            " each row must list the states that states 0, 1, … go to, at least two"
        )
    return np.array(rows)


def compute_state_frequencies(table: np.ndarray) -> np.ndarray:
    """Return the frequency of each state after long random sequences, shape (states,).

    The mean over lengths 1,024 to 2,047 removes the effect of a period of the automaton. States
    that are left for good have frequency 0.
    """
    symbols, states = table.shape
    transition = np.zeros((states, states))  # probability from a state (row) to another
    np.add.at(transition, (np.arange(states), table), 1 / symbols)
    probabilities = np.eye(states)[0]  # the automaton starts in state 0
    total = np.zeros(states)
    for length in range(2048):
        if length >= 1024:
            total += probabilities
        probabilities = probabilities @ transition
    frequencies = total / 1024
    return np.where(frequencies < 1e-9, 0, frequencies)
