"""Put one-line mistakes into the sources and check that tests catch them.

    python -m tests.mutations [--only TEXT] [--jobs N] [--check]

tests/mutations.yaml lists the mistakes: file → tests that must fail → name → old and new text. Each
mistake is tried in a copy of the working tree, without ../shared. The tests run in a process that
is forked from a process with torch imported, but nothing of this project.
"""

import argparse
import contextlib
import gc
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
TABLE_PATH = Path(__file__).with_suffix(".yaml")
TEST_TIMEOUT_S = 300  # for the tests of one mutation, which may compile the kernels
CHECK_TIMEOUT_S = 900  # for all these tests together, without a mutation


class Mutation(NamedTuple):
    """A mistake in a file: its text `old`, which occurs there once, is replaced by `new`."""

    name: str
    file: str
    old: str
    new: str
    tests: str  # arguments of pytest


class Verdict(NamedTuple):
    """The outcome of a mutation: "caught", "survived" or "broken", and the reason."""

    mutation: Mutation
    outcome: str
    reason: str
    seconds: float


class MutationError(Exception):
    """The mutations cannot be tried, or their tests fail without any."""


def read_mutations(path=TABLE_PATH):
    """Return every mutation of the table."""
    table = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    return [
        Mutation(name, file, mistake["old"], mistake["new"], tests)
        for file, groups in table.items()
        for tests, mistakes in groups.items()
        for name, mistake in mistakes.items()
    ]


def find_stale(mutations, root=ROOT):
    """Return a sentence for each mutation whose old text does not occur once in its file."""
    sentences = []
    for name, file, old, new, _ in mutations:
        path = Path(root) / file
        count = path.read_text(encoding="utf-8").count(old) if path.exists() else 0
        if count != 1:
            sentences.append(f"`{name}`: {file} has `{old}` {count} times, not once")
        if old == new:
            sentences.append(f"`{name}` changes nothing")
    return sentences


def copy_tree(target):
    """Copy all files that git tracks or does not ignore.

    Raises:
        MutationError: If this is no git checkout.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        output = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise MutationError(f"mutations need a git checkout to copy: {error}") from error
    for name in filter(None, output.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def prepare_process():
    """Import the slow libraries before the attempts are forked.

    All attempts compute on the CPU with one thread, and interpret the Triton kernels.
    """
    os.environ.update(
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        TRITON_INTERPRET="1",
        CUDA_VISIBLE_DEVICES="",
        # Bytecode is matched by size and time of the source, which a mutation may not change.
        PYTHONDONTWRITEBYTECODE="1",
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",  # loading plugins takes longer than most tests here
    )
    for name in ("FPRNN_KERNELS", "FPRNN_TEST_CACHE", "FPRNN_TEST_SESSION", "PYTEST_ADDOPTS"):
        os.environ.pop(name, None)
    sys.dont_write_bytecode = True
    import pytest  # noqa: F401
    import torch
    import torch.utils.checkpoint
    import transformers.generation
    import transformers.modeling_utils  # noqa: F401

    torch.set_num_threads(1)
    with contextlib.suppress(ImportError):  # without Triton the mutations of its kernels survive
        import triton.language  # noqa: F401
    gc.freeze()  # the attempts need not look at these objects again


def run_pytest(tree, arguments, timeout_s):
    """Run pytest in a copy of the tree, in a forked process.

    Returns:
        The exit status, None if the time limit ended the process, and the output.
    """
    output = Path(tree).parent / f"output-{os.getpid()}.txt"
    child = os.fork()
    if child == 0:
        _become_pytest(tree, arguments, output)
    deadline = time.monotonic() + timeout_s
    status = None
    while status is None and time.monotonic() < deadline:
        ended_pid, wait_status = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(wait_status) if ended_pid else None
        time.sleep(0.02)
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return status, output.read_text(encoding="utf-8", errors="replace")


def _become_pytest(tree, arguments, output):
    """Run pytest on the copy of the tree, and end this process with its exit status."""
    status = 70
    try:
        os.setpgid(0, 0)
        fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        checkout_paths = {"", str(ROOT), str(Path.cwd())}
        sys.path[:] = [str(tree), *(path for path in sys.path if path not in checkout_paths)]
        for name in [n for n in sys.modules if n.partition(".")[0] in ("tests", "lm")]:
            del sys.modules[name]
        import pytest

        import lm

        if not Path(lm.__file__).is_relative_to(tree):
            raise MutationError(f"lm was imported from {lm.__file__}, not from the copy")
        options = ["-x", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "-rfE", "--tb=line"]
        status = int(pytest.main([*options, *shlex.split(arguments)]))
    except BaseException as error:  # the process ends below in any case
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def judge(status, output):
    """Return the outcome and the reason, as in Verdict, for an exit status of pytest."""
    failed = re.search(r"^FAILED (.+?)(?: - |$)", output, re.MULTILINE)
    if status == 1 and failed:
        return "caught", failed[1]
    if status == 0:
        return "survived", "all tests passed"
    if status is None:
        return "survived", "no test failed within the time limit"
    if status == 5:
        return "survived", "no test was selected"
    last_line = [line for line in output.splitlines() if line.strip()][-1:]
    return "broken", f"pytest ended with {status}: {''.join(last_line) or 'no output'}"


def attempt(mutation, tree):
    """Try one mutation in a copy of the tree, and restore the file."""
    start = time.monotonic()
    path = Path(tree) / mutation.file
    source = path.read_text(encoding="utf-8")
    path.write_text(source.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        outcome, reason = judge(*run_pytest(tree, mutation.tests, TEST_TIMEOUT_S))
    finally:
        path.write_text(source, encoding="utf-8")
    return Verdict(mutation, outcome, reason, time.monotonic() - start)


def check_tests(mutations, tree):
    """Check that the tests pass without any mutation.

    Raises:
        MutationError: If a test fails.
    """
    distinct = dict.fromkeys(mutation.tests for mutation in mutations)
    # Arguments with options such as -k run alone; all others run together.
    with_options = [arguments for arguments in distinct if " -" in arguments]
    joined = " ".join(arguments for arguments in distinct if arguments not in with_options)
    for arguments in filter(None, [joined, *with_options]):
        status, output = run_pytest(tree, arguments, CHECK_TIMEOUT_S)
        if status != 0:
            raise MutationError(
                f"`pytest {arguments[:500]}` fails without any mutation (status {status}):"
                f" {output.strip()[-1500:]}"
            )


def summarize(verdicts):
    """Return the score as text, and the exit status: 0 if every mutation was caught."""
    caught_count = sum(verdict.outcome == "caught" for verdict in verdicts)
    lines = [f"score: {caught_count}/{len(verdicts)} mutations caught"]
    for outcome in ("survived", "broken"):
        lines += [
            f"{outcome}: {v.mutation.name} ({v.reason})" for v in verdicts if v.outcome == outcome
        ]
    return "\n".join(lines), int(caught_count < len(verdicts) or not verdicts)


_worker_copy = None


def _start_worker(folder):
    """Copy the tree for this worker process."""
    global _worker_copy
    _worker_copy = Path(folder) / f"copy-{os.getpid()}" / "repo"
    copy_tree(_worker_copy)


def _attempt_in_worker(mutation):
    return attempt(mutation, _worker_copy)


def _check_in_worker(mutations):
    check_tests(mutations, _worker_copy)


def try_mutations(mutations, jobs):
    """Try mutations in `jobs` processes, print every verdict, and return the exit status."""
    start = time.monotonic()
    verdicts = []
    prepare_process()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")  # for compiled mutants
        context = multiprocessing.get_context("fork")
        # The workers of a multiprocessing.Pool are daemons, which may not start processes.
        with ProcessPoolExecutor(jobs, context, _start_worker, (folder,)) as pool:
            shares = [share for i in range(jobs) if (share := mutations[i::jobs])]
            try:
                list(pool.map(_check_in_worker, shares))
            except MutationError as error:
                print(error, file=sys.stderr)
                return 2
            seconds = time.monotonic() - start
            print(f"the tests pass without a mutation ({seconds:.0f} s)", flush=True)
            futures = [pool.submit(_attempt_in_worker, mutation) for mutation in mutations]
            for future in as_completed(futures):
                verdicts.append(v := future.result())
                count = f"{len(verdicts)}/{len(mutations)}"
                text = f"{v.outcome} ({v.seconds:.0f} s) {v.mutation.name}: {v.reason}"
                print(count, text, flush=True)
    gc.unfreeze()
    text, status = summarize(verdicts)
    print(f"{text} ({time.monotonic() - start:.0f} s, {jobs} processes)")
    return status


def main(argv=None):
    """Run the command line, and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="TEXT", help="only mutations with TEXT in name or file")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default: 1)")
    parser.add_argument("--check", action="store_true", help="only check that no mutation is stale")
    args = parser.parse_args(argv)
    mutations = read_mutations()
    if args.only:
        mutations = [m for m in mutations if args.only in m.name or args.only in m.file]
        if not mutations:
            parser.error(f"no mutation has `{args.only}` in its name or file")
    if stale := find_stale(mutations):
        print(*stale, sep="\n", file=sys.stderr)
        return 2
    if args.check:
        print(f"{len(mutations)} mutations, none stale")
        return 0
    return try_mutations(mutations, args.jobs)


if __name__ == "__main__":
    sys.exit(main())
