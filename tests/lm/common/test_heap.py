"""Freed memory that stays: in a fresh process, since nothing takes the setting back."""

import ctypes
import json
import subprocess
import sys

import pytest
import torch

from lm.common.heap import keep_freed_memory
from lm.training import engine
from synthetic import config, train
from tests.running import ENV, ROOT

TEMPORARIES = """
import ctypes, json, resource, sys
from lm.common.heap import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "kept" else None
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
has_mallopt = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt")


@pytest.mark.skipif(not has_mallopt, reason="glibc's")
def test_temporaries_find_the_memory_of_those_before():
    # glibc raises this limit by what is freed, unless it is set.
    env = ENV | {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
    printed = [
        subprocess.check_output([sys.executable, "-c", TEMPORARIES, how], cwd=ROOT, env=env)
        for how in ("kept", "given back")
    ]
    (kept, faults), (_, given_back) = map(json.loads, printed)
    assert kept is True
    # The least, since a busy system takes pages away on its own account.
    assert min(faults) < min(given_back) / 10


@pytest.mark.parametrize("on_gpu", [False, True])
def test_trainings_on_a_cpu_keep_it(monkeypatch, tiny, on_gpu):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name, value in {"WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    calls = []

    def reached(name):
        calls.append(name)
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    for module in (engine, train):
        monkeypatch.setattr(module, "keep_freed_memory", lambda: reached("kept"))
    monkeypatch.setattr(engine, "_import_deepspeed", lambda: reached("later"))
    monkeypatch.setattr(train.tasks, "build", lambda task: reached("later"))
    task = config.load(ROOT / "configs/synthetic/small/s3.yaml", [])
    for start in (lambda: engine.start(tiny()), lambda: train.Training(task)):
        with pytest.raises(InterruptedError):
            start()
    assert calls == ["later" if on_gpu else "kept"] * 2


def test_without_glibc_nothing_is_set(monkeypatch):
    monkeypatch.setattr("lm.common.heap.sys.platform", "darwin")
    assert keep_freed_memory() is False
    monkeypatch.undo()
    monkeypatch.setattr("lm.common.heap.ctypes.CDLL", lambda name: object())  # musl
    assert keep_freed_memory() is False
