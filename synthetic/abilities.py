"""The abilities that a model is tried for, and the small recipe that each is tried by."""

from __future__ import annotations

from typing import NamedTuple

from lm.common.files import find_shipped

RECIPES = find_shipped("configs/synthetic/small")


class Ability(NamedTuple):
    """One axis of a profile. The recipe's bars say what counts as having it."""

    recipe: str  # of RECIPES
    what: str  # is asked, in a few words
    is_quick: bool = False  # in the quick profile, too


ABILITIES = {
    "state": Ability("s3", "running products of S3", True),
    "automaton": Ability("automaton", "an automaton with unsolvable groups"),
    "session": Ability("repl", "swaps of variables in a Python session"),
    "parity": Ability("parity", "is the number of ones odd?"),
    "brackets": Ability("dyck", "which bracket is open?", True),
    "arithmetic": Ability("mod_arithmetic", "expressions modulo 3", True),
    "copying": Ability("copy", "a string, letter by letter", True),
    "selective copying": Ability("selective_copying", "letters among blanks"),
    "look-up": Ability("recall", "what followed this letter?", True),
    "recall": Ability("mqar", "values by their keys (MQAR)", True),
    "noisy recall": Ability("noisy_recall", "the same in noise"),
    "fuzzy recall": Ability("fuzzy_recall", "keys and values of several tokens"),
    "memorization": Ability("memorization", "a dictionary by heart"),
}
