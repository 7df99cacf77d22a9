"""Disjoint splits: the hash of a sample's content decides which split the sample belongs to.

Shapes: b samples, w numbers of their content that are hashed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

# The hash puts each sample into one of PARTS parts: part 0 is validation, part 1 is test, and the
# other parts are training. With fewer than MIN_SAMPLES different samples a part would hold only a
# handful. In that case every split draws from all samples, and results report it
# (`evaluate.measure`).
PARTS = 16
MIN_SAMPLES = 4096
MAX_PREFIX_LENGTH = 64  # of `find_prefix_length`
HELD_OUT_PART = {"valid": 0, "test": 1}

# Candidates drawn at once to replace a sample that belongs to another split. Training rejects 1
# sample in 8; validation and test accept only 1 in PARTS.
CANDIDATES = {"train": 2, "valid": PARTS, "test": PARTS}


@lru_cache(maxsize=32)
def _factors(width: int) -> np.ndarray:
    """Return a random odd factor for each position, (w,) uint64; the first do not depend on w."""
    return np.random.default_rng(0).integers(0, 2**64, width, np.uint64) | np.uint64(1)


def hash_samples(ids: np.ndarray, sizes: np.ndarray | None = None) -> np.ndarray:
    """Hash the content of each sample.

    Args:
        ids: Numbers from 0 on, shape (b,w).
        sizes: Length of each sample, shape (b,); the ids after it do not change the hash. None:
            all ids count.

    Returns:
        The hashes, shape (b,), uint64.
    """
    content = ids.astype(np.uint64) + np.uint64(1)  # 0 marks the positions after a sample's end
    if sizes is not None:
        content[np.arange(ids.shape[1]) >= sizes[:, None]] = 0
    return content @ _factors(ids.shape[1])


def is_in_split(split: str, hashes: np.ndarray) -> np.ndarray:
    """Return True for hashes (b,) whose sample belongs to the split, (b,) bool."""
    part = hashes >> np.uint64(60)  # 16 parts; the highest bits depend on all numbers of a sample
    if split == "train":
        return part >= len(HELD_OUT_PART)
    return part == HELD_OUT_PART[split]


def redraw_samples(
    split: str,
    arrays: tuple[np.ndarray, ...],
    can_redraw: np.ndarray,
    draw: Callable[[np.ndarray], tuple[np.ndarray, ...]],
    sizes: np.ndarray | None = None,
) -> None:
    """Redraw samples of other splits, in place, until every sample belongs to the split.

    Args:
        split: "train", "valid" or "test".
        arrays: All arrays of the samples, each of shape (b,…). The first one, (b,w) ids, is hashed.
        can_redraw: False for samples that are too short for disjoint splits, (b,) bool.
        draw: Function of row numbers (n,) that returns `arrays` of n new samples for these rows.
        sizes: Length of each sample, as in `hash_samples`.
    """
    rows = np.flatnonzero(can_redraw & ~is_in_split(split, hash_samples(arrays[0], sizes)))
    count = CANDIDATES[split]
    while len(rows):
        # Draw several candidates for each row and use the first one of the split.
        candidate_rows = np.repeat(rows, count)
        candidates = draw(candidate_rows)
        hashes = hash_samples(candidates[0], None if sizes is None else sizes[candidate_rows])
        fits = is_in_split(split, hashes).reshape(-1, count)
        has_fit = fits.any(1)
        first_fit = np.arange(len(rows)) * count + fits.argmax(1)
        for array, candidate in zip(arrays, candidates):
            array[rows[has_fit]] = candidate[first_fit[has_fit]]
        rows = rows[~has_fit]


def redraw_prefixes(
    split: str, prefixes: np.ndarray, can_redraw: np.ndarray, draw: Callable[[int], np.ndarray]
) -> None:
    """Redraw the prefixes of samples, in place, until every sample belongs to the split.

    Args:
        split: "train", "valid" or "test".
        prefixes: First ids of each sample, shape (b,w).
        can_redraw: As in `redraw_samples`, (b,) bool.
        draw: Function of a count that returns the prefixes of that many new samples.
    """
    redraw_samples(split, (prefixes,), can_redraw, lambda rows: (draw(len(rows)),))


def find_prefix_length(count: Callable[[int], float]) -> int | None:
    """Return the shortest length, at least 2, with MIN_SAMPLES different samples, or None.

    A task that hashes this many first tokens has disjoint splits from this length on, because
    samples of different splits differ within these tokens. Therefore no test sample is a prefix of
    a training sample, whose labels could contain its answer.

    Args:
        count: Function of a length that returns the number of different samples (0 for none).
    """
    lengths = range(2, MAX_PREFIX_LENGTH + 1)
    return next((length for length in lengths if count(length) >= MIN_SAMPLES), None)
