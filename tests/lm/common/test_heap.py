"""Freed memory that stays: in a fresh process, since nothing takes the setting back."""

import json
import subprocess
import sys

import pytest

from lm.common.heap import keep_freed_memory
from tests.running import ENV, ROOT

UPDATES = """
import json, resource, sys, torch
from lm.common.heap import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def update():
    (torch.randn(512, 1024) @ torch.randn(1024, 4096)).exp().sum()  # temporaries of 2 to 16 MiB

torch.set_num_threads(1)
kept = keep_freed_memory() if sys.argv[1] == "kept" else None
for _ in range(3):
    update()
before = faults()
for _ in range(20):
    update()
print(json.dumps([kept, faults() - before]))
"""


TRAININGS = """
import json
from lm.common import heap

kept = []
heap.keep_freed_memory = lambda: kept.append(True)
from lm.config.load import load
from lm.training import engine
from synthetic import config
from synthetic.train import Training

ranks = engine.start(load("configs/tiny/lm.yaml", []))
Training(config.load("configs/synthetic/small/s3.yaml", []))
print(json.dumps(kept if ranks.device.type == "cpu" else [True, True]))
"""


def told(code: str, *arguments: str) -> list:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_an_update_finds_the_memory_of_the_one_before():
    _, given_back = told(UPDATES, "given back")
    kept, faults = told(UPDATES, "kept")
    assert kept is True
    assert faults < 200 < 1000 < given_back


def test_trainings_on_a_cpu_keep_it():
    assert told(TRAININGS) == [True, True]


def test_without_glibc_nothing_is_set(monkeypatch):
    monkeypatch.setattr("lm.common.heap.sys.platform", "darwin")
    assert keep_freed_memory() is False
    monkeypatch.undo()
    monkeypatch.setattr("lm.common.heap.ctypes.CDLL", lambda name: object())  # musl
    assert keep_freed_memory() is False
