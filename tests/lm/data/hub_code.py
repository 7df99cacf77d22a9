"""Run the code in its argument, as the tests of the hub send it to a process of its own."""

from __future__ import annotations

import sys

from lm.config.data import Data
from lm.config.schema import Config
from lm.data.sources.errors import DataError
from lm.data.sources.hub_parquet import HubDocuments
from lm.data.sources.open import documents

if __name__ == "__main__":
    kinds = (Config, Data, DataError, HubDocuments)
    exec(sys.argv[1], {kind.__name__: kind for kind in kinds} | {"documents": documents})
