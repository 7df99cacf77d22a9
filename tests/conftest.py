"""Shared by all tests: one thread, offline, GPU tests skipped without a GPU, a tiny config."""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

if not torch.cuda.is_available():  # read when a kernel is defined
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.running import fprnn, losses, run

ROOT = Path(__file__).parent.parent
torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture
def tiny(tmp_path):
    """A function (override, …) → Config of configs/tiny/lm.yaml with its run under tmp_path."""
    from lm import config  # pydantic; the tests of kernels and models run without

    def build(*overrides):
        path = ROOT / "tests/data/tiny.jsonl"
        fixed = (f"out_dir={tmp_path / 'runs'}", f"data.path={path}")
        return config.load(ROOT / "configs/tiny/lm.yaml", (*fixed, *overrides))

    return build


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """The run directory of configs/tiny/lm.yaml, trained once for all tests; not to be changed."""
    out = tmp_path_factory.mktemp("tiny") / "runs"
    run(out)
    return out / "tiny"


@pytest.fixture(scope="session")
def tiny_losses(tiny_run):
    """Its training records."""
    return losses(tiny_run)


@pytest.fixture(scope="session")
def tiny_export(tiny_run):
    """Its HuggingFace directory."""
    done = fprnn("export", tiny_run, tiny_run / "hf")
    assert done.returncode == 0, done.stderr
    return tiny_run / "hf"
