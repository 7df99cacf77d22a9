"""Runs the code in its argument, as the tests of the hub send it to a process of its own."""

from __future__ import annotations

import sys

from lm.config.data import Data
from lm.config.schema import Config
from lm.data.sources.errors import DataError
from lm.data.sources.open import documents

if __name__ == "__main__":
    names = {"Data": Data, "Config": Config, "DataError": DataError, "documents": documents}
    exec(sys.argv[1], names | {"__name__": "__main__"})
