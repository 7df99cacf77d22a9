"""Run the tiny config in separate processes, as a user does."""

import json
import os
import subprocess
import sys
from pathlib import Path

from lm.common.errors import BAD_CONFIG, BAD_DATA, DIVERGED, FAILED
from tests.forked import ForkServer

ROOT = Path(__file__).parent.parent
REFUSED = {FAILED, BAD_CONFIG, BAD_DATA, DIVERGED}  # exit statuses of errors with one sentence
ENV = {
    **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
}


def command(out_dir, *overrides, processes=0, config="configs/tiny/lm.yaml"):
    """Return the command line of a training, with the `deepspeed` launcher if `processes` > 0."""
    from lm.training.process_group import find_free_port

    start = [sys.executable, "-m", "lm"]
    if processes:
        launcher = Path(sys.executable).parent / "deepspeed"
        port = find_free_port()
        start = [launcher, "--num_gpus", processes, "--master_port", port, "--module", "lm"]
    args = [*start, "train", "--config", ROOT / config, f"out_dir={out_dir}", *overrides]
    return [str(a) for a in args]


FORKS = ForkServer(ROOT, ENV)
# A server that has imported no module of this project.
LIBRARIES = ("torch", "transformers.generation", "transformers.modeling_utils")
PLAIN_FORKS = ForkServer(ROOT, ENV, LIBRARIES, "plain")
# Hides this checkout, an editable install, and cached code of exports.
HIDE_CHECKOUT = """
import importlib.util, json, os, sys
from transformers import dynamic_module_utils
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder)]
sys.path[:] = [place for place in sys.path if not os.path.isdir(place + "/lm")]
assert importlib.util.find_spec("lm") is None
dynamic_module_utils.HF_MODULES_CACHE = os.environ["HF_HOME"] + "/modules"
"""


def fprnn(*args, **environment):
    """Run `python -m lm ARGS` in a fork; return its CompletedProcess."""
    return FORKS.run("lm", args, timeout=300, environment=environment)


def run_alone(code, *args, cwd, **environment):
    """Run Python code that cannot import `lm`; return its CompletedProcess."""
    environment = {"HF_HOME": str(cwd / "hf"), **environment}
    return PLAIN_FORKS.run("-c", [HIDE_CHECKOUT + code, *args], 120, environment, cwd)


def read_losses(run_dir):
    """Return the records of metrics.jsonl with a loss."""
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if "loss" in r]


def start_ranks(module, arguments, processes, **environment):
    """Start the ranks of `python -m MODULE ARGUMENTS` in forks, without a launcher.

    Args:
        module: Name of the module, or a list with a name per rank.
        arguments: Its arguments, or a function of the rank that returns them.
        processes: Number of ranks.
        **environment: Additional variables.

    Returns:
        Forked of each rank.
    """
    from lm.training.process_group import find_free_port

    address = {"WORLD_SIZE": str(processes), "MASTER_PORT": str(find_free_port())}
    address |= {"MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu", **environment}
    return [
        FORKS.start(
            module if isinstance(module, str) else module[rank],
            arguments if not callable(arguments) else arguments(rank),
            {**address, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(processes)
    ]


def run(out_dir, *overrides, processes=0, name="tiny", launcher=False):
    """Train the tiny config; return (records with a loss, CompletedProcess).

    Args:
        out_dir: Folder of the run directory.
        *overrides: Overrides of the config.
        processes: Number of ranks; 0: a single process without RANK.
        name: Name of the run.
        launcher: Start the ranks with `deepspeed`.

    Raises:
        AssertionError: If it fails; the message has its output.
    """
    full = command(out_dir, *overrides, processes=processes if launcher else 0)
    if launcher:
        path = f"{Path(sys.executable).parent}:{ENV['PATH']}"
        env = ENV | {"DS_ACCELERATOR": "cpu", "PATH": path}
        done = subprocess.run(full, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    elif processes:
        ranks = start_ranks("lm", full[3:], processes)
        outputs = [rank.communicate(300) for rank in ranks]
        status = max((rank.returncode for rank in ranks), key=abs)
        out, err = ("".join(texts) for texts in zip(*outputs))
        done = subprocess.CompletedProcess(full, status, out, err)
    else:
        done = fprnn(*full[3:])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return read_losses(Path(out_dir) / name), done


def run_ranks_for_json(module, processes):
    """Run a module on several ranks; return the last line that rank 0 prints, parsed as JSON."""
    outputs = [rank.communicate(120)[0] for rank in start_ranks(module, [], processes)]
    return json.loads(outputs[0].splitlines()[-1])
