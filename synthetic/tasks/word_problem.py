"""The word problem over a finite group: tokens are elements, answers the running products."""

from __future__ import annotations

import csv
import itertools
import re
from functools import lru_cache
from pathlib import Path

import numpy as np

from . import Batch, Task, TaskError, splits, task

MAX_ORDER = 5040  # S7; its table has 25 million entries


class Group:
    """A finite group as its multiplication table.

    Attributes:
        name; table (n,n) int32: table[i, j] is the element i·j; identity: its index.
    """

    def __init__(self, name: str, table: np.ndarray):
        self.name, self.table = name, table
        n = np.arange(len(table))
        self.identity = int(np.flatnonzero((table == n).all(1))[0])

    @property
    def order(self) -> int:
        return len(self.table)

    def products(self, x: np.ndarray) -> np.ndarray:
        """x (b,l) elements → (b,l): x_1 · x_2 ⋯ x_t at every t."""
        y = np.empty_like(x)
        state = np.full(len(x), self.identity, dtype=x.dtype)
        for t in range(x.shape[1]):
            state = y[:, t] = self.table[state, x[:, t]]
        return y


def permutations(n: int, even: bool = False) -> np.ndarray:
    """The permutations of 0…n−1 in lexicographic order, or the even ones → (count,n)."""
    p = np.array(list(itertools.permutations(range(n))), dtype=np.int8)
    if not even:
        return p
    inversions = sum((p[:, [i]] > p[:, i + 1 :]).sum(1) for i in range(n - 1))
    return p[inversions % 2 == 0] if n > 1 else p


def _of_permutations(name: str, p: np.ndarray) -> Group:
    """p·q is 'first p, then q': (p·q)[i] = q[p[i]]."""
    n = p.shape[1]
    weights = n ** np.arange(n - 1, -1, -1, dtype=np.int64)
    codes = p @ weights  # ascending, since p is in lexicographic order
    table = np.empty((len(p), len(p)), dtype=np.int32)
    for i, first in enumerate(p):
        table[i] = np.searchsorted(codes, p[:, first] @ weights)
    return Group(name, table)


def _product(a: Group, b: Group) -> Group:
    """The direct product; (i, j) is numbered i · |b| + j."""
    table = a.table[:, None, :, None] * b.order + b.table[None, :, None, :]
    n = a.order * b.order
    return Group(f"{a.name}_x_{b.name}", table.reshape(n, n).astype(np.int32))


def _order(name: str) -> int:
    """The number of elements of S_n, A_n, Z_n or a product."""
    order = 1
    for part in name.split("_x_"):
        found = re.fullmatch(r"([SAZ])([1-9][0-9]{0,5})", part)
        if not found:
            raise TaskError(
                f"unknown group `{name}`: groups are S<n> (all permutations of n), A<n> (the even"
                " ones), Z<n> (addition modulo n) and their products, as in S5, A5, Z60, A4_x_Z5"
            )
        kind, n = found[1], int(found[2])
        factor = n
        if kind != "Z":
            factor = 1
            for k in range(2 if kind == "S" else 3, n + 1):
                factor *= k
                if factor > MAX_ORDER:
                    break
        order *= factor
    return order


@lru_cache(maxsize=8)
def group(name: str) -> Group:
    """The group of a name: S5, A5, Z60, A4_x_Z5.

    Raises:
        TaskError: no such group, or one whose table would be too large.
    """
    order = _order(name)
    if order > MAX_ORDER:
        raise TaskError(f"group `{name}` has more than {MAX_ORDER} elements, too many to tabulate")
    parts = []
    for part in name.split("_x_"):
        n = int(part[1:])
        if part[0] == "Z":
            i = np.arange(n, dtype=np.int32)
            parts.append(Group(part, (i[:, None] + i) % n))
        else:
            parts.append(_of_permutations(part, permutations(n, even=part[0] == "A")))
    whole = parts[0]
    for part in parts[1:]:
        whole = _product(whole, part)
    return whole


def element_names(name: str) -> list[str]:
    """What the elements of a group of this name are called, in their order. A permutation: where
    1, 2, 3, … go, as in 213; a number modulo n: itself; of a product both, as in 213,4."""
    names = [""]
    for part in name.split("_x_"):
        n = int(part[1:])
        if part[0] == "Z":
            own = [str(i) for i in range(n)]
        else:
            ordered = permutations(n, even=part[0] == "A") + 1
            own = ["".join(map(str, p)) for p in ordered]
        names = [f"{left},{right}" if left else right for left in names for right in own]
    return names


@task("word_problem")
class WordProblem(Task):
    """Running products of random elements of a group (Liu et al. 2023; Merrill, Petty & Sabharwal
    2024, "The Illusion of State in State-Space Models", whose files `task.csv` reads)."""

    source = "Merrill et al. 2024"

    def __init__(self, task):
        self.group = group(task.group)
        self.vocab_size, self.chance = self.group.order, 1 / self.group.order
        # Words of different splits differ within this many elements; shorter ones are shared.
        self.opening = splits.opening_length(lambda length: self.group.order**length)
        self.names = element_names(task.group)
        self.csv = task.csv
        self.rows = None  # of the file: split → inputs and targets, (rows,length) each
        if task.csv is not None:
            x, y = read_csv(task.csv, self.vocab_size)
            self.opening = min(self.opening or x.shape[1], x.shape[1])
            self.rows = split_rows(x, y, self.opening, task.csv)

    def check_length(self, length: int) -> None:
        if length < 1:
            raise TaskError(f"word problem: a sequence has at least 1 element, not {length}")
        if self.rows is not None and length > (longest := self.rows["train"][0].shape[1]):
            raise TaskError(f"word problem: length {length} is longer than the file's {longest}")

    def held_apart(self, length: int) -> bool:
        return self.opening is not None and length >= self.opening

    def token_name(self, number: int) -> str:
        return self.names[number]

    def typed(self, words: list[str]) -> Batch:
        """Elements by their names, see `element_names`."""
        numbers = {name: number for number, name in enumerate(self.names)}
        elements = [name for word in words for name in word.split()]
        for name in elements:
            if name not in numbers:
                some = ", ".join(self.names[:6]) + (", …" if len(self.names) > 6 else "")
                raise TaskError(f"`{name}` is no element of {self.group.name}: these are {some}")
        self.check_length(len(elements))
        ids = np.array([[numbers[name] for name in elements]])
        return Batch(ids, self.group.products(ids))

    def sample(self, rng, batch_size, lengths, split) -> Batch:
        # Every prefix is a word too: one length serves a batch, drawn anew for each.
        length = int(rng.integers(lengths[0], lengths[1] + 1))
        self.check_length(length)
        if self.rows is not None:
            x, y = self.rows[split]
            pick = rng.integers(0, len(x), batch_size)
            x, y = x[pick, :length], y[pick, :length]
            return Batch(x, y, shared=self._shared(x, split))
        order = self.group.order
        x = rng.integers(0, order, (batch_size, length))
        if self.held_apart(length):
            splits.hold_apart(
                split, (x[:, : self.opening],), np.ones(batch_size, bool),
                lambda rows: (rng.integers(0, order, (len(rows), self.opening)),),
            )  # fmt: skip
        return Batch(x, self.group.products(x), shared=self._shared(x, split))

    def _shared(self, x: np.ndarray, split: str) -> np.ndarray | None:
        """Of training words also their beginnings: the answers there are labels as well."""
        if split == "train":
            short = x[:, : self.opening - 1] if self.opening else x
            return splits.prefix_keys(short).ravel()
        return None if self.held_apart(x.shape[1]) else splits.keys(x)


def split_rows(
    x: np.ndarray, y: np.ndarray, opening: int, path: str
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The rows of a file by split: eight tenths of the different openings for training, one tenth
    each for validation and test, in the order of their hashes.

    Args: x, y: (rows,length). opening: elements that decide; rows that begin alike stay together.
    Raises:
        TaskError: too few different openings.
    """
    _, opening_of = np.unique(splits.keys(x[:, :opening]), return_inverse=True)
    count = int(opening_of.max()) + 1
    if count < 10:
        raise TaskError(
            f"{path}: its rows begin with only {count} different words of {opening} elements; at"
            " least 10 are needed, so that training, validation and test have different ones"
        )
    tenth = 10 * opening_of // count
    chosen = {"train": tenth < 8, "valid": tenth == 8, "test": tenth == 9}
    return {split: (x[rows], y[rows]) for split, rows in chosen.items()}


def read_csv(path: str | Path, order: int) -> tuple[np.ndarray, np.ndarray]:
    """A file of the original data (columns seed, input, target; elements separated by blanks).

    Returns:
        inputs and targets, (rows, length) int64.
    Raises:
        TaskError: no file, a column missing, rows of different lengths, elements the group lacks.
    """
    path = Path(path)
    if not path.is_file():
        raise TaskError(f"no word-problem file at {path}")
    columns: dict[str, list] = {"input": [], "target": []}
    with path.open(newline="", encoding="utf-8", errors="replace") as f:
        reader = csv.DictReader(f)
        if missing := columns.keys() - set(reader.fieldnames or ()):
            raise TaskError(f"{path} has no column {', '.join(sorted(missing))} (input, target)")
        for row in reader:
            for name, rows in columns.items():
                try:
                    rows.append([int(v) for v in row[name].split()])
                except (ValueError, AttributeError):  # None where the line is too short
                    raise TaskError(
                        f"{path}:{reader.line_num}: {name} must be numbers separated by blanks"
                    ) from None
    lengths = {len(r) for rows in columns.values() for r in rows}
    if len(lengths) != 1 or 0 in lengths:
        raise TaskError(f"{path}: inputs and targets must all have one length, not {lengths or 0}")
    if len(columns["input"]) < 5:
        raise TaskError(f"{path} has {len(columns['input'])} rows; at least 5 are needed")
    x, y = (np.array(columns[name], dtype=np.int64) for name in ("input", "target"))
    for found in (int(max(x.max(), y.max())), int(min(x.min(), y.min()))):
        if not 0 <= found < order:
            raise TaskError(f"{path} holds element {found}, the group has 0 to {order - 1}")
    return x, y
