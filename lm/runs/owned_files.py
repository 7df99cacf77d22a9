"""Files that fprnn writes into a run directory or an export. Only these are ever deleted.

A run directory has a fixed layout (`RUN_FILES`). An export lists its files in `.fprnn.json`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from lm.common.files import printable, read_mapping, writing
from lm.model.checksums import SUMS

EXPORT_RECORD = ".fprnn.json"  # lists the files of an export
CARD = "README.md"  # model card of an export
INSPECT_PAGE = "inspect.html"  # `fprnn inspect` writes it into an export
# Results of evaluations in the folder of an export; earlier versions wrote `agree.json`.
EVALUATIONS = ("eval/results.json", "eval/agree.json", INSPECT_PAGE)
MAX_NAMES = 3  # names in a message

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
)
# Figures of `fprnn report` (lm/report/figures.py).
FIGURES = (
    *("loss", "validation_loss", "bits_per_byte", "sources", "epochs", "shares", "z_loss"),
    *("iterations", "evaluations", "failed", "bisected", "limited", "residual", "adjoint"),
    *("lr", "grad_norm", "tokens_per_s", "mfu", "imbalance", "breakdown", "memory"),
)
_TOKENIZER_NAMES = "|".join(re.escape(name) for name in (*TOKENIZER_FILES, "made_from.json", SUMS))
RUN_FILES = re.compile(
    rf"""
      (config\.yaml | metrics\.jsonl | sample\.txt | wandb_id | inspect\.html)
    | (result|failure|environment|deepspeed|init_from|summary|eval|eval-max_iters-\d+)\.json
    | eval/ (results|agree)\.json                                   # of `fprnn eval`
    | (.*/)? lease\.json (\.\d+)?
    | (.*/)? \.[^/]+\.\d+\.tmp                                     # left by an interrupted write
    | report\.(html|markdown|tex)
    | figures/ ({"|".join(FIGURES)})\.(png|pdf)
    | (tokenizer | \.tokenizer-[a-z0-9_]{{8}}) / ({_TOKENIZER_NAMES})
    | data/ ([^/]+/)? (corpus-[0-9a-f]+/)? (                       # data/SOURCE/corpus-ADDRESS/
        (corpus|meta|verified|about|files|shards)\.json | (train|val)\.(bin|tmp)
        | shards\.jsonl | lock)
    | checkpoints/ (last\.pt | step-\d+(-\d+)?(\.partial)?/ [^/]+\.(pt|json))
    | stacks/ rank\d+\.txt
    | profile/ (\.\d+\.)? updates-\d+-\d+\.(trace\.json\.gz|txt)
    | tensorboard/ events\.out\.tfevents\.[^/]+
    | wandb/ ((offline-)?run-[^/]+/.+ | latest-run | debug[^/]*\.log)
    """,
    re.VERBOSE,
)


def list_files(folder: Path) -> Iterator[str]:
    """Yield the path of every file below a folder, relative to it; a link counts as a file."""
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        for name in (*names, *links):
            yield (Path(parent) / name).relative_to(folder).as_posix()


def make_run_file_test(folder: Path) -> Callable[[str], bool]:
    """Return a function that tells whether fprnn wrote the file with a relative path."""
    exported_files = set()  # files of exports in the run directory
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink() and (names := list_export_files(path)):
            exported_files |= {f"{path.name}/{name}" for name in (*names, *EVALUATIONS)}
    return lambda name: name in exported_files or RUN_FILES.fullmatch(name) is not None


def list_export_files(folder: Path) -> set[str]:
    """Return the names of the files of an export in a folder; an empty set without an export."""
    names = (read_mapping(folder / EXPORT_RECORD) or {}).get("files")
    is_valid = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return {*names, EXPORT_RECORD} if names and is_valid else set()


def describe_foreign_files(folder: Path, is_ours: Callable[[str], bool]) -> str:
    """Return the names of files that fprnn did not write, for a message, or "".

    Args:
        is_ours: Tells whether fprnn wrote a file, given its path relative to `folder`.
    """
    names = sorted(list_files(folder))
    our_folders = {parent for name in names if is_ours(name) for parent in Path(name).parents}
    # A folder without any file of fprnn is named instead of its files.
    entries: dict[str, None] = {}  # keeps the order, without duplicates
    for name in names:
        if not is_ours(name):
            foreign_folders = [p for p in Path(name).parents if p.name and p not in our_folders]
            entries[f"{foreign_folders[-1]}/" if foreign_folders else name] = None
    text = ", ".join(printable(list(entries)[:MAX_NAMES]))
    surplus = len(entries) - MAX_NAMES
    return f"{text} and {surplus} more" if surplus > 0 else text


def delete_files(
    folder: Path, is_ours: Callable[[str], bool], last_names: tuple[str, ...] = ()
) -> None:
    """Delete the files that fprnn wrote below a folder, and folders that become empty.

    Args:
        is_ours: Tells whether fprnn wrote a file, given its path relative to `folder`.
        last_names: Files to delete after all others, in this order.

    Raises:
        OutputError: If the system refuses.
    """
    names = sorted(name for name in list_files(folder) if is_ours(name))
    names = [
        *(name for name in names if name not in last_names),
        *(name for name in last_names if name in names),
    ]
    with writing(folder):
        for name in names:
            (folder / name).unlink(missing_ok=True)
        parents = {parent for name in names for parent in Path(name).parents if parent.name}
        for parent in sorted(parents, key=lambda path: len(path.parts), reverse=True):
            if not any((folder / parent).iterdir()):
                (folder / parent).rmdir()
