"""Classes of a user's own, which a YAML names as `module:Class`: found, imported, or refused.

Naming a class runs the code of its module. A configuration that the user passes to a command (a
YAML, an override) is trusted. The config.yaml of a run directory, which may come from somebody
else, is trusted only with `--trust`, and the config.json of a checkpoint never. The command names
the module before it imports it; `fprnn plan` imports nothing.
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

PLACE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")

# The config.yaml of a run directory that is being read, and whether the caller trusts it.
_run_config: ContextVar[tuple[Path, bool, str] | None] = ContextVar("_run_config", default=None)
TRUST_ADVICE = "--trust (in Python trust=True) runs it, once you know whose it is"


@contextlib.contextmanager
def reading_run(config: Path, trust: bool, advice: str = TRUST_ADVICE) -> Iterator[None]:
    """Within the block `load_class` imports a module for a run directory only if that is trusted.

    A module that this process has imported before, such as the one that the user's own config
    names, runs no code and is always found.

    Args:
        config: The run's config.yaml.
        trust: Whether the caller trusts the code that it names.
        advice: What the user can do, for the message.
    """
    token = _run_config.set((config, trust, advice))
    try:
        yield
    finally:
        _run_config.reset(token)


def is_place(name: str) -> bool:
    """Whether a name is written as `module:Class`."""
    return PLACE.fullmatch(name) is not None


def check_name(name: str, known: Iterable[str], what: str) -> str:
    """The name, if it is a known one or written as `module:Class`; nothing is imported.

    Args: what: "mixer" or "task".
    Raises:
        ValueError: it is neither; says which known one is nearest.
    """
    known = [k for k in known if ":" not in k]
    if name in known or is_place(name):
        return name
    if ":" in name:
        raise ValueError(
            f"`{name}` is not written as module:Class: it must be a name of Python, such as"
            f" my_package.my_{what}:MyClass, with its module before the colon"
        )
    near = difflib.get_close_matches(name, known, 1, 0.4)
    hint = f"; did you mean `{near[0]}`?" if near else ""
    raise ValueError(
        f"unknown {what} `{name}`: one of {', '.join(known)}, or module:Class for one of your own"
        f"{hint}"
    )


def load_class(place: str, key: str) -> type:
    """Return the class at `module:Class`, and say so before its module is imported.

    Python looks for the module in its own folders, and then in the current directory, except in the
    directory of a run whose config.yaml names the module.

    Args:
        key: Key of the YAML, for messages.

    Raises:
        ConfigError: If there is no such module or class, the module cannot be imported, or nobody
            trusts it.
    """
    module_name, _, class_name = place.partition(":")
    folder = os.getcwd()
    is_imported = module_name in sys.modules
    run_config, is_trusted, advice = _run_config.get() or (None, True, "")
    if not is_imported and not is_trusted:
        raise ConfigError(
            f"{key} is {place} in {run_config}, and nothing here has checked the code of"
            f" {module_name}: {advice}"
        )
    if not is_imported:
        say(f"note: {key} is {place}: the code of {module_name} is run")
    is_run_folder = run_config is not None and Path(folder).resolve().is_relative_to(
        run_config.parent.resolve()
    )
    if folder not in sys.path and "" not in sys.path and not is_run_folder:
        sys.path.append(folder)  # last: nothing that is installed is hidden by a file of its name
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name and f"{module_name}.".startswith(f"{e.name}."):
            raise ConfigError(
                f"{key} is {place}: there is no module {e.name} in {folder} nor where Python looks"
                " for modules: start from the folder that it is in, or add that to PYTHONPATH"
            ) from None
        raise _not_importable(key, place, e) from e
    except Exception as e:  # whatever the user's own file raises
        raise _not_importable(key, place, e) from e
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        near = difflib.get_close_matches(class_name, classes, 1, 0.4)
        hint = f"; did you mean `{module_name}:{near[0]}`?" if near else ""
        raise ConfigError(f"{key} is {place}: {module.__file__} has no class {class_name}{hint}")
    return found


def _not_importable(key: str, place: str, error: Exception) -> ConfigError:
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}"
    else:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}:{last.lineno}"
    reason = f"{type(error).__name__}: {error}"
    return ConfigError(
        f"{key} is {place}: {place.partition(':')[0]} cannot be imported: {reason} ({where})"
    )
