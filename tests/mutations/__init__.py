"""One-line mistakes in lm/model, lm/kernels and what keeps a run whole: a test must catch each.

    python -m tests.mutations [--sample N] [--only TEXT] [--jobs N] [--quick] [--check]

A mutation is tried in a copy of the working tree, beside which no ../shared lies. It is caught when
pytest says that a test failed. Every try is a process of its own, forked from one that has torch
imported and lm not: it starts in a moment and reads the mutated sources.
"""

import contextlib
import gc
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
# What a mutation that its own tests let pass has to face at last.
LAST_RESORT = "tests/lm/model tests/lm/kernels tests/golden"
LIMIT, LAST_LIMIT = 120, 900  # seconds a try may take


class Mutation(NamedTuple):
    """What is wrong, in a clause; in which file; the text that occurs there once, and what takes
    its place; and the arguments of pytest to try it with, one string a try, the likeliest first."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


class Verdict(NamedTuple):
    """What became of a mutation: "caught", "survived" or "broken"; why, in a few words."""

    mutation: Mutation
    outcome: str
    why: str
    seconds: float


class MutationError(Exception):
    """A mutation cannot be tried, or its tests fail without it."""


def all_mutations():
    """Every Mutation there is."""
    from tests.mutations import (
        of_cell,
        of_cpu_cell,
        of_kernels,
        of_layers,
        of_model,
        of_recipes,
        of_running,
        of_solver,
        of_tasks,
        of_triton_cell,
        of_upcycling,
    )

    parts = of_model, of_cell, of_solver, of_cpu_cell, of_kernels, of_running, of_recipes, of_layers
    parts += of_triton_cell, of_upcycling, of_tasks
    return [mutation for part in parts for mutation in part.MUTATIONS]


def sample(mutations, count):
    """So many of them, spread evenly over the list: always the same."""
    count = min(count, len(mutations))
    return [mutations[i * len(mutations) // count] for i in range(count)]


def stale(mutations, root=ROOT):
    """A sentence for each mutation whose text does not occur exactly once in its file."""
    found = []
    for m in mutations:
        path = Path(root) / m.file
        count = path.read_text(encoding="utf-8").count(m.old) if path.exists() else 0
        if count != 1:
            found.append(f"`{m.name}`: {m.file} has `{m.old}` {count} times, it must have it once")
        if m.old == m.new:
            found.append(f"`{m.name}` changes nothing")
    return found


def copy_tree(target):
    """Copy the tracked files and the new ones that git does not ignore.

    Raises:
        MutationError: this is not a git checkout.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as wrong:
        raise MutationError(f"mutations are tried in a copy of a git checkout: {wrong}") from wrong
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def prepare_process():
    """Import what is slow to import and is not mutated, once, before the tries are forked.

    All tries compute on the CPU, with one thread; Triton's kernels are interpreted.
    """
    os.environ.update(
        OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="",
        PYTHONDONTWRITEBYTECODE="1",  # a mutation may be as long as the line was, and as new
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",  # loading them takes longer than most tests here
    )  # fmt: skip
    for name in ("FPRNN_KERNELS", "PYTEST_ADDOPTS"):
        os.environ.pop(name, None)
    sys.dont_write_bytecode = True
    import pytest  # noqa: F401
    import torch
    import torch.utils.checkpoint
    import transformers.generation
    import transformers.modeling_utils  # noqa: F401

    torch.set_num_threads(1)
    with contextlib.suppress(ImportError):  # its mutations then survive, as their tests are skipped
        import triton.language  # noqa: F401
    gc.freeze()  # a try that collects garbage leaves these alone


def run_pytest(tree, arguments, limit):
    """pytest in a copy of the tree, in a process of its own → its exit status and output.

    The status is None where it took longer than `limit` seconds and was ended.
    """
    output = Path(tree).parent / f"output-{os.getpid()}.txt"
    child = os.fork()
    if child == 0:
        _become_pytest(tree, arguments, output)
    end, status = time.monotonic() + limit, None
    while status is None and time.monotonic() < end:
        done, waited = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(waited) if done else None
        time.sleep(0.02)
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return status, output.read_text(encoding="utf-8", errors="replace")


def _become_pytest(tree, arguments, output):
    """Never returns."""
    status = 70
    try:
        os.setpgid(0, 0)
        to = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(to, 1)
        os.dup2(to, 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        here = {"", str(ROOT), str(Path.cwd())}
        sys.path[:] = [str(tree), *(p for p in sys.path if p not in here)]
        for name in [n for n in sys.modules if n.partition(".")[0] in ("tests", "lm")]:
            del sys.modules[name]
        import pytest

        import lm

        if not Path(lm.__file__).is_relative_to(tree):
            raise MutationError(f"lm was imported from {lm.__file__}, not from the copy")
        options = ["-x", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "-rfE", "--tb=line"]
        status = int(pytest.main([*options, *shlex.split(arguments)]))
    except BaseException as wrong:  # the process ends here, whatever it was
        print(f"{type(wrong).__name__}: {wrong}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def judge(status, output):
    """What a run of pytest says of a mutation: the outcome and why, as in Verdict."""
    failed = re.search(r"^FAILED (.+?)(?: - |$)", output, re.MULTILINE)
    if status == 1 and failed:
        return "caught", failed[1]
    if status == 0:
        return "survived", "all tests passed"
    if status is None:
        return "survived", "no test failed before the time was up"
    if status == 5:
        return "survived", "no test was selected"
    said = [line for line in output.splitlines() if line.strip()]
    return "broken", f"pytest ended with {status}: {said[-1] if said else 'it said nothing'}"


def attempt(mutation, tree, last_resort=True):
    """Try one mutation in a copy of the tree, and put the file back."""
    began, path = time.monotonic(), Path(tree) / mutation.file
    sound = path.read_text(encoding="utf-8")
    path.write_text(sound.replace(mutation.old, mutation.new), encoding="utf-8")
    tries = [(arguments, LIMIT) for arguments in mutation.tests]
    tries += [(LAST_RESORT, LAST_LIMIT)] if last_resort else []
    try:
        for arguments, limit in tries:
            outcome, why = judge(*run_pytest(tree, arguments, limit))
            if outcome == "caught":
                break
    finally:
        path.write_text(sound, encoding="utf-8")
    return Verdict(mutation, outcome, why, time.monotonic() - began)


def check_without(mutations, tree):
    """Make sure that the tests that are to catch the mutations pass without them.

    Raises:
        MutationError: they do not; names what fails.
    """
    each = dict.fromkeys(arguments for m in mutations for arguments in m.tests)
    selecting = [arguments for arguments in each if " -k " in arguments]
    together = " ".join(arguments for arguments in each if arguments not in selecting)
    for arguments in filter(None, [together, *selecting]):
        status, output = run_pytest(tree, arguments, LAST_LIMIT)
        if status != 0:
            raise MutationError(
                f"`pytest {arguments[:500]}` does not pass without any mutation (status {status}):"
                f" {output.strip()[-1500:]}"
            )


def summary(verdicts):
    """The score in words, and the exit status: 0 where all were caught."""
    by = {o: [v for v in verdicts if v.outcome == o] for o in ("caught", "survived", "broken")}
    lines = [f"score: {len(by['caught'])}/{len(verdicts)} mutations caught"]
    for outcome in ("survived", "broken"):
        lines += [f"{outcome}: {v.mutation.name} ({v.why})" for v in by[outcome]]
    return "\n".join(lines), int(len(by["caught"]) < len(verdicts) or not verdicts)
