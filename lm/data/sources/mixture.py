"""Sources of a mixture: the config and the share of each source, by its name.

A curriculum (`data.curriculum`) has other shares in the first updates of a run.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator

from lm.config.data import SINGLE_SOURCE_KEYS, Data
from lm.config.schema import Config
from lm.data.sources.errors import DataError


def configs_by_source(cfg: Config) -> dict[str, Config]:
    """Return the config of each source by name; {"": cfg} for a run on a single source.

    The names are in alphabetic order, so the order in the YAML has no effect.
    """
    if cfg.data.mixture is None:
        return {"": cfg}
    return {
        name: cfg.model_copy(update={"data": data})
        for name, data in data_by_source(cfg.data).items()
    }


def data_by_source(data: Data) -> dict[str, Data]:
    """Return a section `data` for each source of a mixture, in alphabetic order of the names."""
    sections = {}
    for name, source in sorted((data.mixture or {}).items()):
        # A source in a mixture has no keys of a stream, such as `dataset`.
        values = {key: getattr(source, key) for key in SINGLE_SOURCE_KEYS if hasattr(source, key)}
        sections[name] = data.model_copy(update={**values, "mixture": None, "curriculum": []})
    return sections


def describe_data(data: Data) -> str:
    """Return the name of the source, or "a mixture of …"."""
    if data.mixture is None:
        return data.source
    return f"a mixture of {', '.join(sorted(data.mixture))}"


def tokenizer_bytes(cfg: Config) -> dict[str, int]:
    """Return how many bytes of each source train the tokenizer: its share of `train_bytes`."""
    total = cfg.tokenizer.train_bytes
    return {name: math.ceil(total * share) for name, share in source_shares(cfg.data).items()}


@contextlib.contextmanager
def name_source_in_errors(name: str) -> Iterator[None]:
    """Replace the keys of a single source in error messages by the keys of a mixture's source.

    In source "web", `data.path` becomes `data.mixture.web.path`; the other keys are
    `data.text_field` and `data.source`. A message without them begins with `data.mixture.web`.

    Args:
        name: Name of the source; "" for a single source, which changes nothing.

    Raises:
        DataError: With the replaced message, if the `with` block raises a DataError.
    """
    try:
        yield
    except DataError as e:
        if not name:
            raise
        key = f"data.mixture.{name}"
        message = re.sub(r"\bdata\.(path|text_field|source)\b", rf"{key}.\1", str(e))
        raise DataError(message if message != str(e) else f"{key}: {e}") from None


def source_shares(data: Data) -> dict[str, float]:
    """Return {name: share} of the sources after the end of the curriculum, in alphabetic order.

    The shares sum to 1; a run on a single source has {"": 1}.
    """
    if data.mixture is None:
        return {"": 1.0}
    weights = {name: source.weight for name, source in sorted(data.mixture.items())}
    total = math.fsum(weights.values())
    return {name: weight / total for name, weight in weights.items()}
