"""Classes of a user's own, which a YAML names as `module:Class`: found, imported, or refused.

Naming one runs the code of its module. Only a configuration that somebody chose to run leads here
(a YAML, an override, a run directory); the config.json of a checkpoint never does. What is imported
is named first, and `fprnn plan` imports nothing.
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

from lm.common.console import say
from lm.common.errors import ConfigError

PLACE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")

_forbidden: ContextVar[str] = ContextVar("_forbidden", default="")  # by which command


@contextlib.contextmanager
def nothing_imported(by: str) -> Iterator[None]:
    """Within the block `load_class` refuses.

    Args:
        by: what does not import, for the message.
    """
    token = _forbidden.set(by)
    try:
        yield
    finally:
        _forbidden.reset(token)


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
    """The class at `module:Class`. Its module is looked for where Python looks, and then in the
    current directory. It is named before it is imported.

    Args: key: of the YAML, for messages.
    Raises:
        ConfigError: no such module or class, or the module cannot be imported, or must not be here.
    """
    module_name, _, class_name = place.partition(":")
    folder = os.getcwd()
    if by := _forbidden.get():
        raise ConfigError(f"{key} is {place}: {by} imports no code of others")
    if module_name not in sys.modules:
        say(f"note: {key} is {place}: the code of {module_name} is run")
    if folder not in sys.path and "" not in sys.path:
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
