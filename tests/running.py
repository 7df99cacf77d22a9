"""Run the tiny config in separate processes, as a user does."""

import json
import os
import subprocess
import sys
from pathlib import Path

from lm.common.errors import BAD_CONFIG, BAD_DATA, DIVERGED, FAILED
from tests.forked import ForkServer

ROOT = Path(__file__).parent.parent
REFUSED = {FAILED, BAD_CONFIG, BAD_DATA, DIVERGED}  # statuses of errors printed as a sentence
ENV = {
    **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
}


def command(out_dir, *overrides, processes=0, config="configs/tiny/lm.yaml"):
    """Return the command line of a training, with the `deepspeed` launcher if `processes` > 0."""
    from lm.training.process_group import find_free_port

    program = [sys.executable, "-m", "lm"]
    if processes:
        launcher = Path(sys.executable).parent / "deepspeed"
        port = find_free_port()
        program = [launcher, "--num_gpus", processes, "--master_port", port, "--module", "lm"]
    args = [*program, "train", "--config", ROOT / config, f"out_dir={out_dir}", *overrides]
    return [str(a) for a in args]


FORKS = ForkServer(ROOT, ENV)
# A server that has imported no module of this project.
LIBRARIES = ("torch", "transformers.generation", "transformers.modeling_utils")
PLAIN_FORKS = ForkServer(ROOT, ENV, LIBRARIES, "plain")
# Code that hides this checkout, an editable install, and cached code of exports.
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
    from lm.runs.metrics import read_metrics

    return [record for record in read_metrics(run_dir) if "loss" in record]


def start_ranks(module, arguments, processes, **environment):
    """Start the ranks of `python -m MODULE ARGUMENTS` in forks, without a launcher.

    Args:
        module: Name of the module, or a list with a name per rank.
        arguments: Arguments of the module, or a function of the rank that returns them.
        processes: Number of ranks.
        **environment: Further environment variables.

    Returns:
        The ForkedProcess of each rank.
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
        AssertionError: If the training fails; the message has its output.
    """
    full_command = command(out_dir, *overrides, processes=processes if launcher else 0)
    lm_arguments = full_command[3:]  # after `python -m lm`
    if launcher:
        path = f"{Path(sys.executable).parent}:{ENV['PATH']}"
        env = ENV | {"DS_ACCELERATOR": "cpu", "PATH": path}
        result = subprocess.run(
            full_command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
        )
    elif processes:
        ranks = start_ranks("lm", lm_arguments, processes)
        outputs = [rank.communicate(300) for rank in ranks]
        status = max((rank.returncode for rank in ranks), key=abs)
        out, err = ("".join(texts) for texts in zip(*outputs))
        result = subprocess.CompletedProcess(full_command, status, out, err)
    else:
        result = fprnn(*lm_arguments)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]
    return read_losses(Path(out_dir) / name), result


def run_ranks_for_json(module, processes):
    """Run a module on several ranks; return the last line that rank 0 prints, parsed as JSON."""
    outputs = [rank.communicate(120)[0] for rank in start_ranks(module, [], processes)]
    return json.loads(outputs[0].splitlines()[-1])
