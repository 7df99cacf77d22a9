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
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path


class ForkServer:
    """One for each process of pytest; started when it is first asked."""

    def __init__(self, root, environment):
        self.root, self.environment = root, environment
        self.process = None

    def run(self, module, arguments, timeout, environment=(), cwd=None):
        """`python -m MODULE ARGUMENTS` → CompletedProcess, its output as text.

        Args:
            environment: beside the server's own, or in its place. cwd: None: the server's root.
        Raises:
            subprocess.TimeoutExpired: it took longer than `timeout` seconds, and was killed.
        """
        with tempfile.TemporaryDirectory(prefix="fprnn-forked-") as folder:
            said = [Path(folder) / name for name in ("out", "err")]
            arguments = list(map(str, arguments))
            asked = {
                "module": module,
                "arguments": arguments,
                "environment": {**os.environ, **self.environment, **dict(environment)},
                "cwd": str(cwd or self.root),
                "output": list(map(str, said)),
            }
            ended = self._ask(asked, timeout)
            out, err = (path.read_text(encoding="utf-8", errors="replace") for path in said)
        args = [sys.executable, "-m", module, *arguments]
        if ended is None:
            raise subprocess.TimeoutExpired(args, timeout, out, err)
        return subprocess.CompletedProcess(args, ended, out, err)

    def _ask(self, asked, timeout):
        if self.process is None or self.process.poll() is not None:
            self._start()
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        child = int(self.process.stdout.readline())
        timer = threading.Timer(timeout, os.kill, (child, 9))
        timer.start()
        ended = int(self.process.stdout.readline())
        in_time = timer.is_alive()
        timer.cancel()
        return ended if in_time else None

    def _start(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked"],
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
    from lm.training.engine import _import_deepspeed

    _import_deepspeed()
    for name in SLOW_TO_IMPORT:
        importlib.import_module(name)
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be lost in a fork"


def _become(asked):
    """Run the command, and end as its interpreter would. Never returns."""
    status = 1
    try:
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        for number, path in enumerate(asked["output"], 1):
            to = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
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


def _serve():
    _import_what_is_slow()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed by mistake is no answer
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            answers.close()
            _become(json.loads(line))
        print(child, file=answers, flush=True)
        _, ended = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(ended), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
