"""A mixture of sources: what each of them is, by name, and its share."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator

from lm.config.data import SINGLE_SOURCE_KEYS, Data
from lm.config.schema import Config
from lm.data.sources.errors import DataError


def parts(cfg: Config) -> dict[str, Config]:
    """The config of each source alone, by name in alphabetic order, so that nothing depends on the
    order of the YAML; of a run on a single source {"": the config itself}."""
    if cfg.data.mixture is None:
        return {"": cfg}
    return {name: cfg.model_copy(update={"data": data}) for name, data in single(cfg.data).items()}


def single(data: Data) -> dict[str, Data]:
    """`data` as each source of the mixture has it, in alphabetic order."""
    found = {}
    for name, source in sorted((data.mixture or {}).items()):
        own = {key: getattr(source, key) for key in SINGLE_SOURCE_KEYS if hasattr(source, key)}
        of_several: dict = {"mixture": None, "curriculum": []}
        found[name] = data.model_copy(update=own | of_several)
    return found


def described(data: Data) -> str:
    """Which text it is, in a few words."""
    if data.mixture is None:
        return data.source
    return f"a mixture of {', '.join(sorted(data.mixture))}"


def tokenizer_bytes(cfg: Config) -> dict[str, int]:
    """Return how many bytes of each source a tokenizer is trained on: `tokenizer.train_bytes` in
    all, by weight."""
    total = cfg.tokenizer.train_bytes
    return {name: math.ceil(total * share) for name, share in shares(cfg.data).items()}


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Has a sentence about a source's data name the key of that source; "" is a single source.

    Raises:
        DataError: instead of one that names `data.path`.
    """
    try:
        yield
    except DataError as e:
        if not name:
            raise
        said = re.sub(r"\bdata\.(path|text_field|source)\b", rf"data.mixture.{name}.\1", str(e))
        raise DataError(said if said != str(e) else f"data.mixture.{name}: {e}") from None


def shares(data: Data) -> dict[str, float]:
    """Return the share of each source once the curriculum is over, in alphabetic order.

    They sum to 1; a run on a single source has {"": 1}.
    """
    if data.mixture is None:
        return {"": 1.0}
    weights = {name: source.weight for name, source in sorted(data.mixture.items())}
    total = math.fsum(weights.values())
    return {name: weight / total for name, weight in weights.items()}
