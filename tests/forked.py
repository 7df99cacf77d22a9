"""Commands of the package in real processes that are forked from one which has it imported.

What a command does is a process's own: its files, output, signals and exit status. Only the seconds
that importing takes are spared. A fresh interpreter is what tests of imports, launchers and signals
start themselves.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
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
    """One for all processes of a session of pytest; started when one of them first asks.

    Args:
        root: Folder that it runs in.
        environment: Variables of the server and of every command.
        modules: Modules that it imports; none: those of a training.
        name: Name of its socket in the session's folder.
    """

    def __init__(self, root, environment, modules=(), name="training"):
        self.root, self.environment, self.modules, self.name = root, environment, modules, name

    def start(self, module, arguments, environment=(), cwd=None):
        """Start `python -m MODULE ARGUMENTS`, or `python -c CODE …` if module is "-c" → Forked.

        Args:
            environment: beside the server's own, or in its place. cwd: None: the server's root.
        """
        folder = tempfile.TemporaryDirectory(prefix="fprnn-forked-")
        arguments = list(map(str, arguments))
        asked = {
            "module": module,
            "arguments": arguments,
            "environment": {**_of_no_rank(), **self.environment, **dict(environment)},
            "cwd": str(cwd or self.root),
            "folder": folder.name,
        }
        with self._connect() as connection, connection.makefile("rw") as stream:
            print(json.dumps(asked), file=stream, flush=True)
            pid = int(stream.readline())
        words = arguments if module == "-c" else [module, *arguments]
        return Forked(pid, [sys.executable, "-c" if module == "-c" else "-m", *words], folder)

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

    def _connect(self):
        """Return a connection to the server, which is started if there is none."""
        session = os.environ["FPRNN_TEST_SESSION"]
        address = Path(os.environ["FPRNN_TEST_CACHE"], f"{self.name}-{session}.socket")
        with address.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            connection = socket.socket(socket.AF_UNIX)
            if connection.connect_ex(str(address)) != 0:
                connection.close()
                self._start(address)
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(str(address))
        return connection

    def _start(self, address):
        address.unlink(missing_ok=True)
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", address, *self.modules],
            cwd=self.root,
            env=os.environ | self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        server.stdout.readline()  # it listens


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
    modules = sys.argv[2:]
    if not modules:
        from lm.training.deepspeed_api import import_deepspeed

        import_deepspeed()
    for name in modules or SLOW_TO_IMPORT:
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
        if module == "-c":
            code = sys.argv.pop(1)
            sys.argv[0] = "-c"
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        else:
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


def _supervise(connection):
    """Start the command, say its number, and leave its exit status where it is looked for."""
    stream = connection.makefile("rw")
    asked = json.loads(stream.readline())
    for name in ("out", "err"):
        Path(asked["folder"], name).touch()
    child = os.fork()
    if child == 0:
        os.close(connection.fileno())
        _become(asked)
    print(child, file=stream, flush=True)
    _, ended = os.waitpid(child, 0)
    with contextlib.suppress(OSError):  # nobody waits for it any more
        written = Path(asked["folder"], "status.partial")
        written.write_text(str(os.waitstatus_to_exitcode(ended)))
        written.rename(written.with_name("status"))
    os._exit(0)


def _serve():
    """Fork a supervisor for each connection, until the session of pytest ends."""
    session = Path("/proc", os.environ["FPRNN_TEST_SESSION"])
    _import_what_is_slow()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are waited for by nobody
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
    listener.settimeout(1)
    print("listens", flush=True)
    os.dup2(2, 1)  # nobody reads any more
    while session.exists():
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.settimeout(None)
            _supervise(connection)
        connection.close()


if __name__ == "__main__":
    _serve()
