"""Runs and exports of version 0.1 and of commit 91d61e6 load, and the runs continue.

tests/data/run_*.tar.xz contain runs of configs/tiny/lm.yaml that these versions trained and
exported.
"""

import tarfile
from pathlib import Path

import pytest
import torch

from tests.running import run


@pytest.fixture(params=["0.1", "91d61e6"])
def old_run(request, tmp_path):
    """Run directory of an earlier version, with its export in `hf`."""
    archive = Path(__file__).parent / f"data/run_{request.param}.tar.xz"
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    return tmp_path / "tiny"


@torch.no_grad()
def test_old_run_and_its_old_export_have_equal_logits(old_run, tmp_path):
    from transformers import AutoModelForCausalLM

    import fprnn  # noqa: F401  # registers our classes
    from lm.export.export import export

    ids = torch.arange(2, 42).view(2, 20)
    old = AutoModelForCausalLM.from_pretrained(old_run / "hf").eval()
    assert type(old).__module__ == "lm.model.modeling_fprnn"
    new = AutoModelForCausalLM.from_pretrained(export(old_run, tmp_path / "again")).eval()
    torch.testing.assert_close(new(ids).logits, old(ids).logits, rtol=0, atol=0)


def test_old_run_continues(old_run):
    records, _ = run(old_run.parent, "train.steps=10", "resume=auto")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert abs(records[-1]["loss"] - records[7]["loss"]) < 0.3
