"""Training on a CPU keeps freed memory."""

import pytest
import torch

from lm.common.heap import keep_freed_memory
from lm.training import process_group
from synthetic import config, train
from tests.running import ROOT


@pytest.mark.parametrize("has_gpu", [False, True])
def test_training_on_a_cpu_keeps_freed_memory(monkeypatch, tiny, has_gpu):
    """Both packages call `keep_freed_memory` without a GPU, before anything else is built."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name, value in {"WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    calls = []

    def interrupt(name):
        calls.append(name)
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    for module in (process_group, train):
        monkeypatch.setattr(module, "keep_freed_memory", lambda: interrupt("kept"))
    monkeypatch.setattr(process_group, "import_deepspeed", lambda: interrupt("next step"))
    monkeypatch.setattr(train.tasks, "build_task", lambda task: interrupt("next step"))
    task = config.load(ROOT / "configs/synthetic/small/s3.yaml", [])
    for start in (lambda: process_group.join_process_group(tiny()), lambda: train.Training(task)):
        with pytest.raises(InterruptedError):
            start()
    assert calls == ["next step" if has_gpu else "kept"] * 2


def test_without_glibc_nothing_is_set(monkeypatch):
    monkeypatch.setattr("lm.common.heap.sys.platform", "darwin")
    assert keep_freed_memory() is False
    monkeypatch.undo()
    monkeypatch.setattr("lm.common.heap.ctypes.CDLL", lambda name: object())  # musl
    assert keep_freed_memory() is False
