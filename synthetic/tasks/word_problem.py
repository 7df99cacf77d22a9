"""The word problem over a finite group: tokens are elements, answers the running products."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lm.data.sources.errors import DataError
from lm.data.sources.groups import element_names, group

from . import Batch, Task, TaskError, splits, task

if TYPE_CHECKING:
    from synthetic import config


@task("word_problem")
class WordProblem(Task):
    """Running products of random elements of a group (Liu et al. 2023; Merrill, Petty & Sabharwal
    2024, "The Illusion of State in State-Space Models", whose files `task.csv` reads)."""

    source = "Merrill et al. 2024"

    def __init__(self, task: config.Task):
        try:
            self.group = group(task.group)
        except DataError as e:
            raise TaskError(str(e)) from None
        self.vocab_size = self.group.order
        self.chance = 1 / self.group.order
        # Words of different splits differ within this many elements; shorter ones are shared.
        self.opening = splits.opening_length(lambda length: self.group.order**length)
        self.names = element_names(task.group)
        self.elements = np.arange(self.group.order)  # the elements that words are made of
        self.csv = task.csv
        # Of the file: split → inputs and targets, (rows,length) each.
        self.rows: dict[str, tuple[np.ndarray, np.ndarray]] | None = None
        if task.csv is not None:
            x, y = read_csv(task.csv, self.vocab_size)
            self.opening = min(self.opening or x.shape[1], x.shape[1])
            self.rows = split_rows(x, y, self.opening, task.csv)

    def check_length(self, length: int) -> None:
        if length < 1:
            raise TaskError(f"word problem: a sequence has at least 1 element, not {length}")
        if self.rows is not None:
            longest = self.rows["train"][0].shape[1]
            if length > longest:
                raise TaskError(
                    f"word problem: length {length} is longer than the file's {longest}"
                )

    def held_apart(self, length: int) -> bool:
        return self._all_letters and self.opening is not None and length >= self.opening

    def draw_from(self, letters: int | None) -> None:
        """See `Task.draw_from`: elements of low order come first.

        Until there are all, validation draws from training's words as well: it is to say whether
        words of so few letters are known, of which there may be a hundred beginnings."""
        if letters is None:
            self.elements = np.arange(self.group.order)
            return
        if self.rows is not None:
            raise TaskError("train.curriculum.letters: the words of task.csv are as they are")
        if letters > self.group.order:
            raise TaskError(
                f"train.curriculum.letters is {letters}, and the elements of {self.group.name} are"
                f" only {self.group.order}"
            )
        self.elements = self.group.simplest_first()[:letters]

    @property
    def _all_letters(self) -> bool:
        return len(self.elements) == self.group.order

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

    def sample(
        self, rng: np.random.Generator, batch_size: int, lengths: tuple[int, int], split: str
    ) -> Batch:
        # Every prefix is a word too: one length serves a batch, drawn anew for each.
        length = int(rng.integers(lengths[0], lengths[1] + 1))
        self.check_length(length)
        if self.rows is not None:
            x, y = self.rows[split]
            pick = rng.integers(0, len(x), batch_size)
            x, y = x[pick, :length], y[pick, :length]
            return Batch(x, y)

        def draw(*shape: int) -> np.ndarray:
            return self.elements[rng.integers(0, len(self.elements), shape)]

        x = draw(batch_size, length)
        opening = self.opening
        if opening is not None and length >= opening and (self._all_letters or split == "train"):
            splits.hold_apart(
                split,
                (x[:, :opening],),
                np.ones(batch_size, bool),
                lambda rows: (draw(len(rows), opening),),
            )
        return Batch(x, self.group.products(x))


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
    columns: dict[str, list[list[int]]] = {"input": [], "target": []}
    with path.open(newline="", encoding="utf-8", errors="replace") as f:
        reader = csv.DictReader(f)
        missing = columns.keys() - set(reader.fieldnames or ())
        if missing:
            raise TaskError(f"{path} has no column {', '.join(sorted(missing))} (input, target)")
        for line in reader:
            for name, rows in columns.items():
                try:
                    rows.append([int(element) for element in line[name].split()])
                except (ValueError, AttributeError):  # None where the line is too short
                    raise TaskError(
                        f"{path}:{reader.line_num}: {name} must be numbers separated by blanks"
                    ) from None
    lengths = {len(row) for rows in columns.values() for row in rows}
    if len(lengths) != 1 or 0 in lengths:
        raise TaskError(f"{path}: inputs and targets must all have one length, not {lengths or 0}")
    if len(columns["input"]) < 5:
        raise TaskError(f"{path} has {len(columns['input'])} rows; at least 5 are needed")
    x, y = (np.array(columns[name], dtype=np.int64) for name in ("input", "target"))
    for extreme in (int(max(x.max(), y.max())), int(min(x.min(), y.min()))):
        if not 0 <= extreme < order:
            raise TaskError(f"{path} holds element {extreme}, the group has 0 to {order - 1}")
    return x, y
