"""Commands of the package in real processes that are forked from one which has it imported.

What a command does is a process's own: its files, output, signals and exit status. Only the seconds
that importing takes are spared. A fresh interpreter is what tests of imports, launchers and signals
start themselves.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

# A training in the process of the tests has named its own.
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _of_no_rank():
    return {name: value for name, value in os.environ.items() if name not in OF_RANKS}


class Forked:
    """A command under way, as subprocess.Popen has one; its output goes into files."""

    def __init__(self, pid, args, folder):
        self.pid, self.args, self.folder = pid, args, folder
        self.returncode = None

    def poll(self):
        """Its exit status, None while it runs."""
        status = Path(self.folder.name) / "status"
        if self.returncode is None and status.exists():
            self.returncode = int(status.read_text())
        return self.returncode

    def wait(self, timeout):
        """Its exit status, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not within so many seconds.
        """
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.005)
        return self.returncode

    def communicate(self, timeout):
        """What it has printed and its errors, once it has ended."""
        self.wait(timeout)
        return self.printed()

    def printed(self):
        """What it has printed and its errors so far."""
        files = [Path(self.folder.name) / name for name in ("out", "err")]
        return tuple(file.read_text(encoding="utf-8", errors="replace") for file in files)

    def send_signal(self, number):
        """As of subprocess.Popen: nothing where it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self):
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """One for each process of pytest; started when it is first asked.

    Args:
        modules: Modules that it imports; none: those of a training.
    """

    def __init__(self, root, environment, modules=()):
        self.root, self.environment, self.modules = root, environment, modules
        self.process = None

    def start(self, module, arguments, environment=(), cwd=None):
        """`python -m MODULE ARGUMENTS` → Forked.

        Args:
            environment: beside the server's own, or in its place. cwd: None: the server's root.
        """
        if self.process is None or self.process.poll() is not None:
            self._start()
        folder = tempfile.TemporaryDirectory(prefix="fprnn-forked-")
        arguments = list(map(str, arguments))
        asked = {
            "module": module,
            "arguments": arguments,
            "environment": {**_of_no_rank(), **self.environment, **dict(environment)},
            "cwd": str(cwd or self.root),
            "folder": folder.name,
        }
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        pid = int(self.process.stdout.readline())
        return Forked(pid, [sys.executable, "-m", module, *arguments], folder)

    def run(self, module, arguments, timeout, environment=(), cwd=None):
        """The same to its end → CompletedProcess, its output as text.

        Raises:
            subprocess.TimeoutExpired: it took longer than `timeout` seconds, and was killed.
        """
        started = self.start(module, arguments, environment, cwd)
        try:
            out, err = started.communicate(timeout)
        except subprocess.TimeoutExpired:
            started.kill()
            raise subprocess.TimeoutExpired(started.args, timeout, *started.printed()) from None
        return subprocess.CompletedProcess(started.args, started.returncode, out, err)

    def _start(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", *self.modules],
            cwd=self.root,
            env=os.environ | self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.process.kill)


SLOW_TO_IMPORT = (
    "lm.cli.main",
    "lm.data.batches.loader",
    "lm.data.corpus.corpora",
    "lm.data.corpus.tokenizer",
    "lm.export.export",
    "lm.model.modeling_fprnn",
    "lm.training.train",
    "synthetic.cli",
    "synthetic.train",
    # DeepSpeed imports it with the first optimizer, and it all that torch.compile may need.
    "deepspeed.runtime.zero.muon.muon_optimizer",
)


def _import_what_is_slow():
    """With one thread, so that a fork has all that this process has."""
    if len(sys.argv) == 1:
        from lm.training.engine import _import_deepspeed

        _import_deepspeed()
    for name in sys.argv[1:] or SLOW_TO_IMPORT:
        importlib.import_module(name)
    gc.freeze()
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    threads = [name for name in threads if name != "jemalloc_bg_thd"]  # pyarrow's begins again
    assert len(threads) == 1, "a thread would be lost in a fork"


def _become(asked):
    """Run the command, and end as its interpreter would. Never returns."""
    status = 1
    try:
        # Ignored by all that `nohup make test` starts.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        for number, name in enumerate(("out", "err"), 1):
            to = os.open(os.path.join(asked["folder"], name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(to, number)
            os.close(to)
        os.environ.clear()
        os.environ.update(asked["environment"])
        os.chdir(asked["cwd"])
        sys.argv = ["", *asked["arguments"]]
        status = _status_of(asked["module"])
        threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _status_of(module):
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _supervise(asked, answers):
    """Start the command, say its number, and leave its exit status where it is looked for."""
    for name in ("out", "err"):
        Path(asked["folder"], name).touch()
    child = os.fork()
    if child == 0:
        answers.close()
        _become(asked)
    print(child, file=answers, flush=True)
    _, ended = os.waitpid(child, 0)
    with contextlib.suppress(OSError):  # nobody waits for it any more
        written = Path(asked["folder"], "status.partial")
        written.write_text(str(os.waitstatus_to_exitcode(ended)))
        written.rename(written.with_name("status"))
    os._exit(0)


def _serve():
    _import_what_is_slow()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are waited for by nobody
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed by mistake is no answer
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _supervise(json.loads(line), answers)


if __name__ == "__main__":
    _serve()
