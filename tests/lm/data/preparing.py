"""A process that prepares a corpus, as the tests of the cache start several of them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from lm.config.load import build
from lm.data.corpus import tokenising
from lm.data.corpus.prepare import prepare
from lm.data.corpus.tokenizer import load_tokenizer


def main(cfg: str, kill_at: str, pause: str, go: str) -> None:
    """Prepares in batches of ten documents, at most one in `pause` seconds; kills itself when so
    many documents are done (0: never). It waits for the file `go` before it begins, and prints
    which documents it has done, and the checksums."""
    tokenising.BATCH = 10
    config, seen = build(json.loads(cfg)), []

    def progress(documents: int, _tokens: int) -> None:
        seen.append(documents)
        if int(kill_at) and documents >= int(kill_at):
            print("killed", documents, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(float(pause))

    tokenizer = load_tokenizer(config, config.run_dir, print)
    print("ready", flush=True)
    while not Path(go).exists():
        time.sleep(0.005)
    corpus = prepare(config, tokenizer, Path(config.run_dir), progress)
    print(json.dumps({"seen": seen, "sha256": corpus.meta.sha256}))


if __name__ == "__main__":
    main(*sys.argv[1:])
