"""Freed memory that stays: in a fresh process, since nothing takes the setting back."""

import ctypes
import json
import subprocess
import sys

import pytest

from lm.common.heap import keep_freed_memory
from tests.running import ENV, ROOT

BEGIN = """
import ctypes, json, resource, sys
from lm.common.heap import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "kept" else None
"""
TEMPORARIES = """
malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
free.argtypes = [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    temporaries = [malloc(2**24) for _ in range(4)]
    for block in temporaries:
        ctypes.memset(block, 1, 2**24)
    for block in temporaries:
        free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for _ in range(3):
    faults()
print(json.dumps([kept, [faults() for _ in range(3)]]))
"""
LARGE = """
import torch
for _ in range(6):
    torch.ones(2**26)  # 256 MiB
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
TRAININGS = """
import json, sys, torch
from lm.common import heap

kept = []
heap.keep_freed_memory = lambda: kept.append(True)
from lm.config.load import load
from lm.training import engine
from synthetic import config
from synthetic.train import Training

torch.cuda.set_device = engine._import_deepspeed = None
told = []
for device in sys.argv[1].split():
    torch.cuda.is_available = lambda: device == "cuda"
    kept.clear()
    for start in (
        lambda: engine.start(load("configs/tiny/lm.yaml", [])),
        lambda: Training(config.load("configs/synthetic/small/s3.yaml", [])),
    ):
        try:
            start()
        except (TypeError, RuntimeError, AssertionError):
            pass  # where DeepSpeed or the GPU would come
    told.append(list(kept))
print(json.dumps(told))
"""
has_mallopt = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt")
of_glibc = pytest.mark.skipif(not has_mallopt, reason="glibc's")


# glibc begins with this limit and raises it by what is freed, so that what it keeps by itself
# differs from process to process; set, it stays.
BEGINS_WITH = ENV | {"MALLOC_MMAP_THRESHOLD_": str(2**17)}


def told(code: str, argument: str, env: dict[str, str] = ENV) -> list:
    command = [sys.executable, "-c", code, argument]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@of_glibc
def test_temporaries_find_the_memory_of_those_before():
    _, given_back = told(BEGIN + TEMPORARIES, "given back", BEGINS_WITH)
    kept, faults = told(BEGIN + TEMPORARIES, "kept", BEGINS_WITH)
    assert kept is True
    # The least, since a busy system takes pages away on its own account.
    assert min(faults) < min(given_back) / 10


@pytest.mark.slow
@of_glibc
def test_large_tensors_leave_no_holes():
    assert told(BEGIN + LARGE, "kept") < told(BEGIN + LARGE, "given back") + 2**27


def test_trainings_on_a_cpu_keep_it():
    assert told(TRAININGS, "cpu cuda") == [[True, True], []]


def test_without_glibc_nothing_is_set(monkeypatch):
    monkeypatch.setattr("lm.common.heap.sys.platform", "darwin")
    assert keep_freed_memory() is False
    monkeypatch.undo()
    monkeypatch.setattr("lm.common.heap.ctypes.CDLL", lambda name: object())  # musl
    assert keep_freed_memory() is False
