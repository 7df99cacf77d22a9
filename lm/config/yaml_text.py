"""YAML 1.1 with other rules for numbers. Duplicate keys are refused, and errors are readable.

PyYAML, which follows YAML 1.1, reads these forms differently:
- `1e-3` and `-.5` are numbers here (in PyYAML texts).
- `2:48` and `012` are texts here (in PyYAML 168, to base 60, and 10, to base 8).
Other forms are the same: `1_000` is 1000, `0b11` is 3, and `yes` and `on` are true.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from lm.common.errors import ConfigError
from lm.common.files import find_shipped
from lm.config.old_keys import rename_keys


class Loader(yaml.SafeLoader):
    """Loader that reads numbers as described above, and refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in keys:
                problem = f"key `{key.value}` appears twice in one section"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Dumper that quotes texts that look like numbers, and escapes unprintable characters."""

    def represent_text(self, value: str) -> yaml.ScalarNode:
        style = None if value.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", value, style=style)


Dumper.add_representer(str, Dumper.represent_text)

_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
for _class in (Loader, Dumper):
    # Remove PyYAML's patterns of numbers, then add those of the first lines of this file.
    _class.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT)]
        for first, resolvers in _class.yaml_implicit_resolvers.items()
    }
    for _tag, _pattern in [
        (_INT, r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)"),
        (_FLOAT, r"[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?|[-+]?\d+[eE][-+]?\d+"),
        (_FLOAT, r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
    ]:
        _class.add_implicit_resolver(_tag, re.compile(f"^({_pattern})$"), list("-+.0123456789"))


def parse(text: str, origin: str) -> Any:
    """Parse YAML.

    Raises:
        ConfigError: If the text is not valid YAML; the message begins with `origin`.
    """
    try:
        return yaml.load(text, Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        problem = e.problem or e.context
        if "\\t" in problem:  # PyYAML writes: found character '\t' that cannot start any token
            problem = "it is indented with a tab: YAML takes spaces only"
        place = f"line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(f"{origin} is not valid YAML, {place}: {problem}") from None
    except yaml.reader.ReaderError as e:
        reason = f"character {e.position + 1} is {chr(e.character)!r}, which must be escaped"
    except RecursionError:
        reason = "it is nested too deep"
    except (ValueError, LookupError, AttributeError, TypeError) as e:  # from PyYAML's constructors
        reason = f"a number, date or tag cannot be read ({e})"
    raise ConfigError(f"{origin} is not valid YAML: {reason}")


def load_tree(path: str | Path) -> dict:
    """Return the YAML file as a mapping, not validated; an empty file gives {}.

    Keys that were renamed since the file was written have their new names.

    Raises:
        ConfigError: If the file cannot be read, or holds no mapping.
    """
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: name a YAML file in it")
    if not path.is_file():
        shipped = find_shipped(str(path))
        hint = f"; the one that comes with fprnn is {shipped}" if shipped.is_file() else ""
        raise ConfigError(f"{path}: no such file; give a YAML file{hint}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ConfigError(
            f"{path} is not UTF-8 text: byte {e.start} is {e.object[e.start]:#x}"
        ) from None
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}") from None
    tree = parse(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values")
    return rename_keys(tree, str(path))
