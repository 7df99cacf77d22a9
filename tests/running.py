"""Runs of the tiny config in processes of their own, as a user starts them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from lm.common.errors import BAD_CONFIG, BAD_DATA, DIVERGED, FAILED
from tests.forked import ForkServer

ROOT = Path(__file__).parent.parent
REFUSED = {FAILED, BAD_CONFIG, BAD_DATA, DIVERGED}  # how a command ends that says one sentence
ENV = {
    **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
}


def command(out_dir, *overrides, processes=0, config="configs/tiny/lm.yaml"):
    """The command line of a training, under the `deepspeed` launcher if `processes` is set."""
    from lm.training.process_group import find_free_port

    start = [sys.executable, "-m", "lm"]
    if processes:
        launcher = Path(sys.executable).parent / "deepspeed"
        start = [
            launcher,
            "--num_gpus",
            processes,
            "--master_port",
            find_free_port(),
            "--module",
            "lm",
        ]
    args = [*start, "train", "--config", ROOT / config, f"out_dir={out_dir}", *overrides]
    return [str(a) for a in args]


FORKS = ForkServer(ROOT, ENV)
# It has imported nothing of this project.
LIBRARIES = ("torch", "transformers.generation", "transformers.modeling_utils")
PLAIN_FORKS = ForkServer(ROOT, ENV, LIBRARIES, "plain")
# Hides this checkout, an editable install, and code of earlier checkpoints.
ALONE = """
import importlib.util, json, os, sys
from transformers import dynamic_module_utils
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder)]
sys.path[:] = [place for place in sys.path if not os.path.isdir(place + "/lm")]
assert importlib.util.find_spec("lm") is None
dynamic_module_utils.HF_MODULES_CACHE = os.environ["HF_HOME"] + "/modules"
"""


def fprnn(*args, **environment):
    """`python -m lm ARGS`, forked → CompletedProcess."""
    return FORKS.run("lm", args, timeout=300, environment=environment)


def run_alone(code, *args, cwd, **environment):
    """Run Python code with transformers, but without this checkout's `lm` → CompletedProcess."""
    environment = {"HF_HOME": str(cwd / "hf"), **environment}
    return PLAIN_FORKS.run("-c", [ALONE + code, *args], 120, environment, cwd)


def losses(run_dir):
    """The training records of a run's metrics."""
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if "loss" in r]


def ranks_of(module, arguments, processes, **environment):
    """So many ranks of `python -m MODULE ARGUMENTS`, forked, without a launcher → [Forked]."""
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
    """Train the tiny config to its end → (training records, CompletedProcess).

    Args: processes: ranks, 0: one, without a group. launcher: started by `deepspeed`.
    Raises:
        AssertionError: it failed; the message holds its output.
    """
    full = command(out_dir, *overrides, processes=processes if launcher else 0)
    if launcher:
        path = f"{Path(sys.executable).parent}:{ENV['PATH']}"
        env = ENV | {"DS_ACCELERATOR": "cpu", "PATH": path}
        done = subprocess.run(full, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    elif processes:
        ranks = ranks_of("lm", full[3:], processes)
        said = [rank.communicate(300) for rank in ranks]
        status = max((rank.returncode for rank in ranks), key=abs)
        out, err = ("".join(texts) for texts in zip(*said))
        done = subprocess.CompletedProcess(full, status, out, err)
    else:
        done = fprnn(*full[3:])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return losses(Path(out_dir) / name), done


def printed_by_ranks(module, processes):
    """What a module prints last on rank 0, of so many processes, as JSON."""
    printed = [rank.communicate(120)[0] for rank in ranks_of(module, [], processes)]
    return json.loads(printed[0].splitlines()[-1])
