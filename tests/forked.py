"""Run commands in processes that are forked from a server, which has imported the package.

This saves the seconds of importing. Each command has its own output files, signals and exit status.
Tests of imports, launchers and signals start a fresh interpreter instead.

A test connects to the server (`_serve`). For each connection, the server forks a supervisor
(`_supervise`), which forks the command (`_run_request`) and writes its exit status to a file.
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

# A training in the test process sets them; commands must not inherit them.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _environment_without_ranks():
    return {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}


class ForkedProcess:
    """A running command with the interface of subprocess.Popen; its output goes into files."""

    def __init__(self, pid, args, folder):
        self.pid, self.args, self.folder = pid, args, folder
        self.returncode = None

    def poll(self):
        """Return the exit status, or None while the command runs."""
        status_file = Path(self.folder.name) / "status"
        if self.returncode is None and status_file.exists():
            self.returncode = int(status_file.read_text())
        return self.returncode

    def wait(self, timeout):
        """Wait for the end of the command and return its exit status.

        Raises:
            subprocess.TimeoutExpired: If the command does not end within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.005)
        return self.returncode

    def communicate(self, timeout):
        """Wait for the end and return (stdout, stderr)."""
        self.wait(timeout)
        return self.read_output()

    def read_output(self):
        """Return (stdout, stderr) up to now."""
        files = [Path(self.folder.name) / name for name in ("out", "err")]
        return tuple(file.read_text(encoding="utf-8", errors="replace") for file in files)

    def send_signal(self, number):
        """Send a signal, unless the command has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A server for all processes of a pytest session, started at the first command.

    Args:
        root: Working directory of the server.
        environment: Variables of the server and of every command.
        modules: Modules that the server imports; (): the modules of a training.
        name: Name of the server's socket in the session's folder.
    """

    def __init__(self, root, environment, modules=(), name="training"):
        self.root, self.environment, self.modules, self.name = root, environment, modules, name

    def start(self, module, arguments, environment=(), cwd=None):
        """Start `python -m MODULE ARGUMENTS`, or `python -c CODE …`; return its ForkedProcess.

        Args:
            module: Name of the module, or "-c".
            arguments: Arguments of the command.
            environment: Variables that extend or replace the server's.
            cwd: Working directory; None: the server's root.
        """
        folder = tempfile.TemporaryDirectory(prefix="fprnn-forked-")
        arguments = list(map(str, arguments))
        request = {
            "module": module,
            "arguments": arguments,
            "environment": {
                **_environment_without_ranks(),
                **self.environment,
                **dict(environment),
            },
            "cwd": str(cwd or self.root),
            "folder": folder.name,
        }
        with self._connect() as connection, connection.makefile("rw") as stream:
            print(json.dumps(request), file=stream, flush=True)
            pid = int(stream.readline())
        words = ["-c", *arguments] if module == "-c" else ["-m", module, *arguments]
        return ForkedProcess(pid, [sys.executable, *words], folder)

    def run(self, module, arguments, timeout, environment=(), cwd=None):
        """Run a command as `start` does; return its CompletedProcess with output as text.

        Raises:
            subprocess.TimeoutExpired: If the command was killed after `timeout` seconds.
        """
        process = self.start(module, arguments, environment, cwd)
        try:
            out, err = process.communicate(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.read_output()
            raise subprocess.TimeoutExpired(process.args, timeout, *output) from None
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def _connect(self):
        """Connect to the server, which is started first if needed."""
        session = os.environ["FPRNN_TEST_SESSION"]
        address = Path(os.environ["FPRNN_TEST_CACHE"], f"{self.name}-{session}.socket")
        with address.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            connection = socket.socket(socket.AF_UNIX)
            if connection.connect_ex(str(address)) != 0:
                connection.close()
                self._start_server(address)
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(str(address))
        return connection

    def _start_server(self, address):
        address.unlink(missing_ok=True)
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", address, *self.modules],
            cwd=self.root,
            env=os.environ | self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        server.stdout.readline()  # the server prints it when it listens


SLOW_MODULES = (
    "lm.cli.main",
    "lm.data.batches.loader",
    "lm.data.corpus.corpora",
    "lm.data.corpus.tokenizer",
    "lm.export.export",
    "lm.model.modeling_fprnn",
    "lm.training.train",
    "synthetic.cli",
    "synthetic.train",
    # DeepSpeed imports it with the first optimizer, and with it the modules of torch.compile.
    "deepspeed.runtime.zero.muon.muon_optimizer",
)


def _import_modules():
    """Import the modules, and check that they start no thread, because a fork loses threads."""
    modules = sys.argv[2:]
    if not modules:
        from lm.training.deepspeed_api import import_deepspeed

        import_deepspeed()
    for name in modules or SLOW_MODULES:
        importlib.import_module(name)
    gc.freeze()
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    threads = [name for name in threads if name != "jemalloc_bg_thd"]  # pyarrow restarts it
    assert len(threads) == 1, "a thread would be lost in a fork"


def _run_request(request):
    """Run the command of a request in this process, and exit as an interpreter would."""
    status = 1
    try:
        # Under `nohup make test` all processes ignore these signals.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with open(os.devnull) as null:
            os.dup2(null.fileno(), 0)
        for target_fd, name in enumerate(("out", "err"), 1):
            path = os.path.join(request["folder"], name)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(fd, target_fd)
            os.close(fd)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["cwd"])
        sys.argv = ["", *request["arguments"]]
        status = _run_module(request["module"])
        threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _run_module(module):
    """Run a module or code and return its exit status."""
    try:
        if module == "-c":
            code = sys.argv.pop(1)
            sys.argv[0] = "-c"
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as e:
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
            return 1
        return int(e.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _supervise(connection):
    """Start the command, send its process id, and write its exit status to a file."""
    stream = connection.makefile("rw")
    request = json.loads(stream.readline())
    for name in ("out", "err"):
        Path(request["folder"], name).touch()
    child = os.fork()
    if child == 0:
        os.close(connection.fileno())
        _run_request(request)
    print(child, file=stream, flush=True)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):  # the folder is gone if the test has ended
        # Renamed when complete, because `poll` reads it at any time.
        file = Path(request["folder"], "status.partial")
        file.write_text(str(os.waitstatus_to_exitcode(status)))
        file.rename(file.with_name("status"))
    os._exit(0)


def _serve():
    """Fork a supervisor for each connection, until the session of pytest ends."""
    session = Path("/proc", os.environ["FPRNN_TEST_SESSION"])
    _import_modules()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors leave no zombies
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
    listener.settimeout(1)
    print("listens", flush=True)
    os.dup2(2, 1)  # nobody reads the pipe any more
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
