"""Errors that a user can fix: their base class, their messages and their exit statuses."""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import os
import re
import shlex
from pathlib import Path

from lm.common.secrets import mask_credentials

# Import name of an optional package → the extra of pyproject.toml that contains it.
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
# Packages that every installation has, directly or through torch and transformers.
BASE_PACKAGES = ("httpx", "huggingface_hub", "numpy", "safetensors", "torch", "transformers")
# Errors of the operating system that need no traceback: the user named a wrong path (exit status
# BAD_CONFIG), or the disk is full or broken.
PATH_ERRNOS = (errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS)
DISK_ERRNOS = (errno.EIO, errno.ENOSPC)

# Exit statuses of both command lines, of lm and synthetic (docs/cluster.md). Errors that
# sysexits.h knows have its numbers. Status 2 is a wrong command line, or a missed threshold.
FAILED = 1  # any other error, including a bug
BAD_DATA = 65  # damaged, or too short
UNREACHABLE = 69  # the hub or the network; the same command may succeed later
MACHINE = 71  # a process of the run was killed, or its host is down; the same command continues
PREEMPTED = 75  # stopped by a signal after saving; the same command continues
DIVERGED = 76  # the loss or its gradient became NaN or infinite
HANG = 77  # no update for too long
BAD_CONFIG = 78  # a wrong configuration, path, environment or package


class UserError(Exception):
    """An error that the user can fix, and the base of all error classes of this project.

    Only the error classes of lm/model have another base, because an export runs without this
    package. The message is a sentence that names the mistake, its place, and a correct value. Both
    command lines print only the message and exit with `exit_status`. Exceptions for which
    `describe_user_error` has no message are bugs and keep their traceback.
    """

    exit_status = FAILED


class ConfigError(UserError, ValueError):
    """A configuration that cannot be run; the message names the key, the reason and a fix."""

    exit_status = BAD_CONFIG


class TrainingError(UserError, RuntimeError):
    """Training cannot continue; the message names the step and the files that remain."""


class Diverged(TrainingError):
    """The loss or its gradient became NaN or infinite."""

    exit_status = DIVERGED


class DivergedOnOneRank(Diverged):
    """Divergence that only one rank knows of; the ranks cannot return to a checkpoint together."""


class Stopped(TrainingError):
    """A signal stopped the training, after it had saved a checkpoint."""

    exit_status = PREEMPTED


class MachineError(UserError, RuntimeError):
    """A process of the run was killed, or its host is down; the same command may succeed."""

    exit_status = MACHINE


class MissingPackageError(UserError, ImportError):
    """A package that is required but not installed."""

    exit_status = BAD_CONFIG


def describe_refused_pickle(path: object, error: Exception) -> str:
    """Return the message for a file that torch's safe reader of pickles refuses.

    Args:
        path: The file.
        error: The reader's UnpicklingError. Its message advises `weights_only=False`, which would
            run the code.
    """
    match = re.search(r"GLOBAL (\S+)", str(error))
    content = f"the object {match[1]}" if match else "more than tensors, or is damaged"
    return (
        f"{path} is not read: it is a pickle that holds {content}, and objects in a pickle can run"
        " code; if you trust the file, save its weights as safetensors"
    )


def install_command(*packages: str) -> str:
    """Return a command that installs packages of EXTRAS or BASE_PACKAGES in compatible versions.

    `pip install fprnn[train]` would fail, because this project is on no package index. In a
    checkout the command installs the checkout with the extras; otherwise it installs the
    requirements of the extras.
    """
    checkout = Path(__file__).parents[2]
    extras = sorted({EXTRAS[name] for name in packages if name in EXTRAS}, reverse=True)
    if (checkout / "pyproject.toml").is_file():
        target = f"{checkout}[{','.join(extras)}]" if extras else str(checkout)
        options = ("-c", str(checkout / "constraints.txt"), "-e", target)
        return shlex.join(["pip", "install", *options])
    try:
        requirements = importlib.metadata.requires("fprnn") or []
    except importlib.metadata.PackageNotFoundError:
        return shlex.join(["pip", "install", *packages])
    specifiers = []
    for requirement in requirements:  # such as `datasets>=3; extra == "train"`
        specifier, _, condition = requirement.partition(";")
        # Requirements of the base installation have no condition.
        is_required = any(extra in condition for extra in extras) if extras else not condition
        if is_required:
            specifiers.append(specifier.strip())
    return shlex.join(["pip", "install", *specifiers])


def missing_package(name: str, purpose: str = "this command") -> MissingPackageError:
    """Return the error to raise if package `name` (of EXTRAS or BASE_PACKAGES) is missing."""
    return MissingPackageError(
        f"{purpose} needs the package {name}, which is not installed: {install_command(name)}"
    )


def require(name: str, purpose: str) -> None:
    """Check that a package can be imported, at the start of a command instead of hours later.

    Raises:
        MissingPackageError: If the package is not installed.
    """
    try:
        is_installed = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is missing
        is_installed = False
    if not is_installed:
        raise missing_package(name, purpose)


def describe_user_error(error: BaseException) -> str | None:
    """Return the message that a command line prints for an error, or None for a bug.

    The user can fix a UserError, a path that the system refuses, a missing package of EXTRAS or
    BASE_PACKAGES, NaN or infinite numbers (lm/model raises FloatingPointError), and a limit on
    memory or open files.
    """
    if isinstance(error, UserError | FloatingPointError):
        return mask_credentials(str(error))
    if isinstance(error, OSError) and error.errno in PATH_ERRNOS + DISK_ERRNOS:
        return f"{error.filename or 'the output, or a file'}: {error.strerror}"
    package = _find_missing_package(error)
    return _describe_limit(error) if package is None else str(missing_package(package))


def _describe_limit(error: BaseException) -> str | None:
    """Return the message for an error that a limit of this process causes, or None."""
    text = str(error)
    # PyTorch and gloo raise a RuntimeError that contains the system's message.
    may_be_limit = isinstance(error, MemoryError | OSError | RuntimeError)
    is_about_memory = "allocate memory" in text or "CUDA out of memory" in text
    if isinstance(error, MemoryError) or (may_be_limit and is_about_memory):
        return (
            f"this process cannot allocate more memory ({text.strip().partition(chr(10))[0]}): a"
            " smaller micro-batch, length or model needs less; `ulimit -v` prints its limit in KB"
        )
    if may_be_limit and os.strerror(errno.EMFILE) in text:
        return (
            "this process cannot open more files: `ulimit -n` prints how many it may have open, and"
            " `ulimit -n 1024` raises that where the system allows it"
        )
    return None


def exit_status(error: BaseException) -> int:
    """Return the exit status of a command line for an error."""
    if isinstance(error, FloatingPointError):
        return DIVERGED
    if _find_missing_package(error) is not None:
        return BAD_CONFIG
    if isinstance(error, OSError) and error.errno in PATH_ERRNOS:
        return BAD_CONFIG
    return getattr(error, "exit_status", FAILED)


def _find_missing_package(error: BaseException | None) -> str | None:
    """Return the package of EXTRAS or BASE_PACKAGES whose absence caused an error, or None."""
    while error is not None:  # transformers wraps the original error, which names the package
        if isinstance(error, ModuleNotFoundError):
            package = (error.name or "").partition(".")[0]
            if package in EXTRAS or package in BASE_PACKAGES:
                return package
        error = error.__cause__
    return None
