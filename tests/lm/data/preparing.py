"""Process that prepares a corpus; the tests of the cache start several of them."""

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
    """Prepare the corpus of a config; print the progress and the checksums as JSON.

    Args:
        cfg: Config as JSON.
        kill_at: Number of documents after which the process kills itself; 0: never.
        pause: Seconds after each batch of ten documents.
        go: File that the process waits for before it begins.
    """
    tokenising.DOCUMENTS_AT_A_TIME = 10
    config = build(json.loads(cfg))
    seen = []

    def progress(documents: int, _tokens: int) -> None:
        seen.append(documents)
        if int(kill_at) and documents >= int(kill_at):
            print("killed", documents, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(float(pause))

    tokenizer = load_tokenizer(config, config.run_dir)
    print("ready", flush=True)
    while not Path(go).exists():
        time.sleep(0.005)
    corpus = prepare(config, tokenizer, Path(config.run_dir), progress)
    print(json.dumps({"seen": seen, "sha256": corpus.meta.sha256}))


if __name__ == "__main__":
    main(*sys.argv[1:])
