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


def main(config_json: str, kill_at: str, pause_s: str, go_file: str) -> None:
    """Prepare the corpus of a config; print the progress and the checksums as JSON.

    Args:
        config_json: Config as JSON.
        kill_at: Number of documents after which the process kills itself; 0: never.
        pause_s: Seconds of sleep after each batch of ten documents.
        go_file: File that the process waits for before it begins.
    """
    tokenising.DOCUMENTS_AT_A_TIME = 10
    cfg = build(json.loads(config_json))
    document_counts = []

    def progress(documents: int) -> None:
        document_counts.append(documents)
        if int(kill_at) and documents >= int(kill_at):
            print("killed", documents, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(float(pause_s))

    tokenizer = load_tokenizer(cfg, cfg.run_dir)
    print("ready", flush=True)
    while not Path(go_file).exists():
        time.sleep(0.005)
    corpus = prepare(cfg, tokenizer, Path(cfg.run_dir), progress)
    print(json.dumps({"document_counts": document_counts, "sha256": corpus.meta.sha256}))


if __name__ == "__main__":
    main(*sys.argv[1:])
