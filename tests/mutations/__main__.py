"""The command line: try mutations, print what became of each, and the score."""

import argparse
import gc
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tests import mutations as m

_own_tree = None


def _start_worker(folder):
    """A copy of the tree for this process."""
    global _own_tree
    _own_tree = Path(folder) / f"copy-{os.getpid()}" / "repo"
    m.copy_tree(_own_tree)


def _attempt(job):
    mutation, last_resort = job
    return m.attempt(mutation, _own_tree, last_resort)


def _check_without(chosen):
    m.check_without(chosen, _own_tree)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--sample", type=int, metavar="N", help="only N of them, always the same")
    parser.add_argument("--only", metavar="TEXT", help="only those whose name or file has TEXT")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (1)")
    quick = "a mutation that its own tests let pass has survived: do not try all others as well"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--check", action="store_true", help="only check that none is stale")
    asked = parser.parse_args(arguments)
    chosen = m.all_mutations()
    if asked.only:
        chosen = [c for c in chosen if asked.only in c.name or asked.only in c.file]
        if not chosen:
            parser.error(f"no mutation has `{asked.only}` in its name or file")
    if asked.sample is not None:
        if asked.sample < 1:
            parser.error(f"--sample is {asked.sample}: it must be at least 1")
        chosen = m.sample(chosen, asked.sample)
    if asked.jobs < 1:
        parser.error(f"--jobs is {asked.jobs}: it must be at least 1")
    stale = m.stale(chosen)
    if stale:
        print(*stale, sep="\n", file=sys.stderr)
        return 2
    if asked.check:
        print(f"{len(chosen)} mutations, none stale")
        return 0
    return _run(chosen, asked.jobs, not asked.quick)


def _run(chosen, jobs, last_resort):
    began, verdicts = time.monotonic(), []
    m.prepare_process()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")  # for compiled mutants
        parts = [chosen[i::jobs] for i in range(jobs)]
        context = multiprocessing.get_context("fork")
        # A Pool's workers are daemons, whose tries may start no process of their own.
        with ProcessPoolExecutor(jobs, context, _start_worker, (folder,)) as pool:
            try:
                list(pool.map(_check_without, [part for part in parts if part]))
            except m.MutationError as wrong:
                print(wrong, file=sys.stderr)
                return 2
            passed = time.monotonic() - began
            print(f"the tests pass without a mutation ({passed:.0f} s)", flush=True)
            tries = [pool.submit(_attempt, (c, last_resort)) for c in chosen]
            for v in (done.result() for done in as_completed(tries)):
                verdicts.append(v)
                count = f"{len(verdicts)}/{len(chosen)}"
                what = f"{v.outcome} ({v.seconds:.0f} s) {v.mutation.name}: {v.why}"
                print(count, what, flush=True)
    gc.unfreeze()
    text, status = m.summary(verdicts)
    print(f"{text} ({time.monotonic() - began:.0f} s, {jobs} at a time)")
    return status


if __name__ == "__main__":
    sys.exit(main())
