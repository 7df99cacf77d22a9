"""Import of a user's own classes, which a YAML names as `module:Class`.

Importing a class runs the code of its module. A configuration that the user passes to a command (a
YAML or an override) is trusted. The config.yaml of a run directory may come from somebody else, and
is trusted only with `--trust`. The config.json of a checkpoint is never trusted. Commands print the
module before they import it; `fprnn plan` imports nothing.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path

from lm.common.console import say
from lm.common.errors import ConfigError

CLASS_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")

# While the config.yaml of a run directory is read: its path, whether the caller trusts it, and the
# advice for the error message.
_run_config: ContextVar[tuple[Path, bool, str] | None] = ContextVar("_run_config", default=None)
TRUST_ADVICE = "check its origin, then allow it with --trust (in Python trust=True)"


@contextlib.contextmanager
def guard_imports(config: Path, trust: bool, advice: str = TRUST_ADVICE) -> Iterator[None]:
    """Allow `load_class` to import modules for a run directory only if the caller trusts it.

    A module that this process has already imported is always allowed, because no code runs.

    Args:
        config: The run's config.yaml.
        trust: True if the caller trusts the modules that config.yaml names.
        advice: Advice to the user, for the error message.
    """
    token = _run_config.set((config, trust, advice))
    try:
        yield
    finally:
        _run_config.reset(token)


def is_class_path(name: str) -> bool:
    """Return whether a name has the form `module:Class`."""
    return CLASS_PATH.fullmatch(name) is not None


def check_name(name: str, choices: Iterable[str], kind: str) -> str:
    """Return a name if it is one of the choices or has the form `module:Class`; import nothing.

    Args:
        name: The name.
        choices: Registered names.
        kind: "mixer" or "task", for the message.

    Raises:
        ValueError: If the name is neither. The message names the most similar choice.
    """
    choices = [choice for choice in choices if ":" not in choice]
    if name in choices or is_class_path(name):
        return name
    if ":" in name:
        raise ValueError(
            f"`{name}` does not have the form module:Class: it must be a module and a class of"
            f" Python, such as my_package.my_{kind}:MyClass"
        )
    matches = difflib.get_close_matches(name, choices, n=1, cutoff=0.4)
    hint = f"; did you mean `{matches[0]}`?" if matches else ""
    raise ValueError(
        f"unknown {kind} `{name}`: it must be one of {', '.join(choices)}, or module:Class for a"
        f" {kind} of your own{hint}"
    )


def load_class(class_path: str, key: str) -> type:
    """Return the class at `module:Class`, and print the module before importing it.

    Python searches its own folders and then the current directory. The current directory is not
    searched if it belongs to the run whose config.yaml names the module.

    Args:
        class_path: `module:Class`.
        key: Key of the YAML, for messages.

    Raises:
        ConfigError: If there is no such module or class, the module cannot be imported, or the
            caller does not trust it.
    """
    module_name, _, class_name = class_path.partition(":")
    current_folder = os.getcwd()
    is_imported = module_name in sys.modules
    run_config, is_trusted, advice = _run_config.get() or (None, True, "")
    if not is_imported and not is_trusted:
        raise ConfigError(
            f"{key} is {class_path} in {run_config}, and this would run the code of {module_name},"
            f" which has not been checked: {advice}"
        )
    if not is_imported:
        say(f"note: {key} is {class_path}: running the code of {module_name}")
    is_run_folder = run_config is not None and Path(current_folder).resolve().is_relative_to(
        run_config.parent.resolve()
    )
    if current_folder not in sys.path and "" not in sys.path and not is_run_folder:
        sys.path.append(current_folder)  # last, so that no file in it hides an installed package
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        # Otherwise the module exists, but imports a module that does not.
        is_requested_module = bool(e.name) and f"{module_name}.".startswith(f"{e.name}.")
        if is_requested_module:
            raise ConfigError(
                f"{key} is {class_path}: there is no module {e.name} in {current_folder} or in"
                " Python's search path: start from the folder that contains it, or add that folder"
                " to PYTHONPATH"
            ) from None
        raise _import_error(key, class_path, e) from e
    except Exception as e:  # the user's file may raise anything
        raise _import_error(key, class_path, e) from e
    cls = getattr(module, class_name, None)
    if not isinstance(cls, type):
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        matches = difflib.get_close_matches(class_name, classes, n=1, cutoff=0.4)
        hint = f"; did you mean `{module_name}:{matches[0]}`?" if matches else ""
        raise ConfigError(
            f"{key} is {class_path}: {module.__file__} has no class {class_name}{hint}"
        )
    return cls


def _import_error(key: str, class_path: str, error: Exception) -> ConfigError:
    """Return the error for a module that cannot be imported, with the failing line."""
    if isinstance(error, SyntaxError):
        line = f"{error.filename}:{error.lineno}"
    else:
        innermost = traceback.extract_tb(error.__traceback__)[-1]
        line = f"{innermost.filename}:{innermost.lineno}"
    reason = f"{type(error).__name__}: {error}"
    module_name = class_path.partition(":")[0]
    return ConfigError(
        f"{key} is {class_path}: {module_name} cannot be imported: {reason} ({line})"
    )
