"""The one base class of errors that are the user's to mend, and the sentence each leaves behind."""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import os
import re
import shlex
from pathlib import Path

from lm.common.secrets import mask_credentials

# Optional package, by the name it is imported under → the extra of pyproject.toml that has it.
EXTRAS = {
    "accelerate": "eval",
    "datasets": "train",
    "deepspeed": "train",
    "fastapi": "serve",
    "lm_eval": "eval",
    "matplotlib": "train",
    "openai": "serve",
    "pyarrow": "train",  # comes with datasets
    "pydantic": "train",
    "rich": "train",
    "tensorboard": "train",
    "tokenizers": "train",
    "uvicorn": "serve",
    "wandb": "train",
    "yaml": "train",
}
# What the package itself depends on, directly or through torch and transformers.
BASE = ("httpx", "huggingface_hub", "numpy", "safetensors", "torch", "transformers")
# What the system says of a path that a person gave, wherever it is first looked at.
OF_A_PLACE = (errno.EACCES, errno.EIO, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOSPC, errno.EROFS)

# Exit statuses of both command lines (docs/cluster.md); 2 is a wrong command line, or a bar
# that was missed. Numbers of sysexits.h where it has one that says the same.
FAILED = 1  # anything else that stopped it, a bug among them
BAD_DATA = 65
UNREACHABLE = 69  # the hub, or the network: the same command may do later
MACHINE = 71  # a process of the run is gone: killed, or its host; the same command continues
PREEMPTED = 75  # by a signal, and saved: the same command continues
DIVERGED = 76
HANG = 77
BAD_CONFIG = 78


class UserError(Exception):
    """Something asked for cannot be had. Every error class of this project derives from it, but for
    those of lm/model, which runs without the package around it.

    The message is a sentence: what was wrong, where, and what would be right. Both command lines
    print it alone, and end with its exit status; any other exception is a bug and keeps its
    traceback.
    """

    exit_status = FAILED


class ConfigError(UserError, ValueError):
    """A configuration that cannot be run; the message says which key, why, and what would do."""

    exit_status = BAD_CONFIG


class TrainingError(UserError, RuntimeError):
    """Training cannot go on; the message says at which step and what is left."""


class Diverged(TrainingError):
    """The loss or its gradient became NaN or infinite."""

    exit_status = DIVERGED


class DivergedOnOneRank(Diverged):
    """One rank found it in the middle of what the ranks do together: they cannot go back."""


class Stopped(TrainingError):
    """A signal asked for it; the checkpoint is saved."""

    exit_status = PREEMPTED


class MachineError(UserError, RuntimeError):
    """A process that the run needs is gone: neither the data nor the configuration is at fault, and
    the same command may well succeed."""

    exit_status = MACHINE


class MissingPackageError(UserError, ImportError):
    """A package that is needed and not installed."""

    exit_status = BAD_CONFIG


def describe_refused_pickle(path: object, error: Exception) -> str:
    """Return the sentence for a file that torch's safe reader of pickles refuses.

    Args:
        error: The reader's UnpicklingError, whose own advice is to run the code.
    """
    found = re.search(r"GLOBAL (\S+)", str(error))
    content = f"the object {found[1]}" if found else "more than tensors, or is damaged"
    return (
        f"{path} is not read: it is a pickle that holds {content}, and objects in a pickle can run"
        " code: save the weights as safetensors where you trust them"
    )


def install_command(*packages: str) -> str:
    """Return a command that installs packages of EXTRAS or BASE in the versions that fit.

    This project is on no package index, so that `pip install fprnn[train]` would fail: in a
    checkout the command installs the extras of the checkout, otherwise their requirements.
    """
    checkout = Path(__file__).parents[2]
    extras = sorted({EXTRAS[p] for p in packages if p in EXTRAS}, reverse=True)
    if (checkout / "pyproject.toml").is_file():
        target = f"{checkout}[{','.join(extras)}]" if extras else str(checkout)
        options = ("-c", str(checkout / "constraints.txt"), "-e", target)
        return shlex.join(["pip", "install", *options])
    try:
        requirements = importlib.metadata.requires("fprnn") or []
    except importlib.metadata.PackageNotFoundError:
        return shlex.join(["pip", "install", *packages])
    names = []
    for requirement in requirements:
        name, _, condition = requirement.partition(";")  # a condition names the extra
        if any(extra in condition for extra in extras) or not (extras or condition):
            names.append(name.strip())
    return shlex.join(["pip", "install", *names])


def missing_package(name: str, purpose: str = "this command") -> MissingPackageError:
    """The error to raise where package `name` (of EXTRAS or BASE) is missing."""
    return MissingPackageError(
        f"{purpose} needs the package {name}, which is not installed: {install_command(name)}"
    )


def require(name: str, purpose: str) -> None:
    """Find out now whether a package can be imported, not when it is needed, hours later.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        found = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent package
        found = False
    if not found:
        raise missing_package(name, purpose)


def describe_user_error(error: BaseException) -> str | None:
    """What a command line prints for an error that is the user's to mend; None for a bug.

    Besides UserError these are a place that the system refuses, a missing package of ours, wherever
    it was imported, numbers that became NaN or infinite (lm/model raises FloatingPointError for
    them), and a limit on memory or open files.
    """
    if isinstance(error, UserError | FloatingPointError):
        return mask_credentials(str(error))
    if isinstance(error, OSError) and error.errno in OF_A_PLACE:
        return f"{error.filename or 'the output, or a file'}: {error.strerror}"
    package = _missing(error)
    return _exhausted(error) if package is None else str(missing_package(package))


def _exhausted(error: BaseException) -> str | None:
    """Return a sentence for an error that a limit of this process causes; None for any other.

    PyTorch and gloo raise a RuntimeError with the system's own words in it.
    """
    text = str(error)
    is_system = isinstance(error, MemoryError | OSError | RuntimeError)
    has_words = "allocate memory" in text or "CUDA out of memory" in text
    if isinstance(error, MemoryError) or (is_system and has_words):
        return (
            f"this process cannot have more memory ({text.strip().partition(chr(10))[0]}): a"
            " smaller micro-batch, length or model needs less; `ulimit -v` prints its limit in KB"
        )
    if is_system and os.strerror(errno.EMFILE) in text:
        return (
            "this process cannot open more files: `ulimit -n` prints how many it may have open, and"
            " `ulimit -n 1024` raises that where the system allows it"
        )
    return None


def exit_status(error: BaseException) -> int:
    """With what a command line ends on an error."""
    if isinstance(error, FloatingPointError):
        return DIVERGED
    if _missing(error) is not None:
        return BAD_CONFIG
    return getattr(error, "exit_status", FAILED)


def _missing(error: BaseException | None) -> str | None:
    """The package whose absence is behind an import error, if it is one that we know."""
    while error is not None:  # transformers wraps the first error in one that names no package
        if isinstance(error, ModuleNotFoundError):
            package = (error.name or "").partition(".")[0]
            if package in EXTRAS or package in BASE:
                return package
        error = error.__cause__
    return None
