"""Finite automata, given by their transition table."""

from __future__ import annotations

from string import ascii_lowercase

import numpy as np

from synthetic import config
from synthetic.tasks import TaskError, task
from synthetic.tasks.formal_language import FormalLanguage

# Symbol a merges states 0, 1 and 2. Symbols b and c permute the states and generate the group S5,
# which is not solvable.
DEFAULT_TABLE = ((0, 0, 0, 2, 4), (4, 2, 0, 1, 3), (3, 1, 4, 2, 0))


@task("automaton")
class Automaton(FormalLanguage):
    """State of an automaton after the symbols read so far, starting in state 0.

    `task.automaton.table` has a row for each symbol, with the states that states 0, 1, … go to. A
    parallel model of fixed depth can follow an automaton if every group in its transition monoid
    (the maps from states to states that sequences of symbols cause) is solvable. The monoid of the
    default table contains S5, a group that is not solvable (Liu et al. 2023,
    "Transformers Learn Shortcuts to Automata", arXiv 2210.10749; Merrill et al. 2024,
    arXiv 2404.08819).

    Symbols are a, b, c, …. `chance` is the frequency of the most frequent state after long random
    sequences.
    """

    def __init__(self, section: config.Task):
        super().__init__(section)
        self.answers_are_states = self.labels_every_token
        table = section.automaton.table
        self.table = _check_table(DEFAULT_TABLE if table is None else table)
        self.symbols, state_count = self.table.shape
        self.characters = ascii_lowercase[: self.symbols]
        self.vocab_size = max(self.symbols, state_count) + 1  # symbols or answers, and padding
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
    state_count = len(rows[0]) if rows else 0
    states = set(range(state_count))
    rows_are_valid = all(len(row) == state_count and set(row) <= states for row in rows)
    if state_count < 2 or len(rows) > len(ascii_lowercase) or not rows_are_valid:
        raise TaskError(
            f"task.automaton.table is {rows}: it must have a row for each symbol, at most 26, and"
            " each row must name, for each of two or more states, the state that follows it"
        )
    return np.array(rows)


def compute_state_frequencies(table: np.ndarray) -> np.ndarray:
    """Return the frequency of each state after long random sequences, shape (states,).

    The mean over lengths 1,024 to 2,047 removes the effect of a period of the automaton. States
    that are left for good have frequency 0.
    """
    symbol_count, state_count = table.shape
    transition = np.zeros((state_count, state_count))  # probability from a state (row) to another
    np.add.at(transition, (np.arange(state_count), table), 1 / symbol_count)
    probabilities = np.eye(state_count)[0]  # the automaton starts in state 0
    total = np.zeros(state_count)
    for length in range(2048):
        if length >= 1024:
            total += probabilities
        probabilities = probabilities @ transition
    frequencies = total / 1024
    return np.where(frequencies < 1e-9, 0, frequencies)
