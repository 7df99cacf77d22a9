"""Which samples are of training, of validation and of test: a hash of their content says it.

b samples, w tokens of each that are hashed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

# Samples fall into PARTS parts by their hash: part 0 is validation's, part 1 test's, the others are
# training's. Where there are fewer than LEAST different samples, parts would be a handful each:
# there all splits draw from all samples, and results say so (`evaluate.measure`).
PARTS = 16
LEAST = 4096
HELD_OUT = {"valid": 0, "test": 1}

# Samples drawn at once for each that is of another split: one in 8 is, of those drawn for training,
# and all but one in PARTS, of those drawn for validation or test.
TRIES = {"train": 2, "valid": PARTS, "test": PARTS}


@lru_cache(maxsize=32)
def _factors(width: int) -> np.ndarray:
    """Random odd factors of the places of a sample, (w,) uint64; a wider sample has more."""
    return np.random.default_rng(0).integers(0, 2**64, width, np.uint64) | np.uint64(1)


def keys(ids: np.ndarray, sizes: np.ndarray | None = None) -> np.ndarray:
    """A hash of the content of each sample → (b,) uint64.

    Args:
        ids: (b,w), at least 0.
        sizes: (b,) how many ids of each sample are its own; None: all. The hash does not depend on
            those behind them.
    """
    content = ids.astype(np.uint64) + np.uint64(1)  # not 0, which stands for no token
    if sizes is not None:
        content[np.arange(ids.shape[1]) >= sizes[:, None]] = 0
    return content @ _factors(ids.shape[1])


def is_of(split: str, keys: np.ndarray) -> np.ndarray:
    """Whether samples of these hashes (b,) are of the split, (b,) bool."""
    part = keys >> np.uint64(60)  # the highest bits depend on all of a sample
    if split == "train":
        return part >= len(HELD_OUT)
    return part == HELD_OUT[split]


def redraw_samples(
    split: str,
    arrays: tuple[np.ndarray, ...],
    apart: np.ndarray,
    draw: Callable[[np.ndarray], tuple[np.ndarray, ...]],
    sizes: np.ndarray | None = None,
) -> None:
    """Draw samples anew, in place, until all are of the split.

    Args:
        arrays: (b,…) each, all that a sample is made of; the first one, (b,w) ids, is hashed.
        apart: (b,) bool, False where a sample is too short to be held apart.
        draw: rows (n,) → `arrays` of n new samples, each for the row of that number.
        sizes: as of `keys`.
    """
    rows = np.flatnonzero(apart & ~is_of(split, keys(arrays[0], sizes)))
    tries = TRIES[split]
    while len(rows):
        # Several new samples for each row; the first that is of the split is taken.
        rows_of_drawn = np.repeat(rows, tries)
        drawn = draw(rows_of_drawn)
        hashes = keys(drawn[0], None if sizes is None else sizes[rows_of_drawn])
        fits = is_of(split, hashes).reshape(-1, tries)
        some_fit = fits.any(1)
        first_fit = np.arange(len(rows)) * tries + fits.argmax(1)
        for array, new in zip(arrays, drawn):
            array[rows[some_fit]] = new[first_fit[some_fit]]
        rows = rows[~some_fit]


def redraw_prefixes(
    split: str, openings: np.ndarray, apart: np.ndarray, draw: Callable[[int], np.ndarray]
) -> None:
    """Draw the openings of samples anew, in place, until all are of the split.

    Args:
        split: Of the samples.
        openings: (b,w), the first ids of each.
        apart: (b,) bool, as of `redraw_samples`.
        draw: A number of samples → openings of so many new ones.
    """
    redraw_samples(split, (openings,), apart, lambda rows: (draw(len(rows)),))


def find_prefix_length(count: Callable[[int], float], longest: int = 64) -> int | None:
    """The shortest length, at least 2, of which there are LEAST different samples.

    A task that hashes so many first tokens of its samples holds the splits apart from this length
    on: samples of different splits differ within them. So no test sample is the beginning of a
    training sample either, where its answer might be a label, too.

    Args: count: length → number of different samples of it (0 for none).
    Returns: None if there is none up to `longest`.
    """
    lengths = range(2, longest + 1)
    return next((length for length in lengths if count(length) >= LEAST), None)
