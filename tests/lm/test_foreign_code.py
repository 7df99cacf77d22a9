"""Files of others: what is in them is read, never run."""

import shutil
import subprocess

import pytest
import torch

from lm.checkpoint import _digest, read_state
from lm.engine import read_zero
from lm.outputs import read_json, write_json
from tests.refusals import refused
from tests.running import ENV, ROOT, command, fprnn

STEP = "checkpoints/step-000008"


class Planted:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return __import__("os").mkdir, (str(self.place),)


def plant(run, name, mark):
    """Put it into a file of a checkpoint, and the file's new checksum into the manifest."""
    file = run / STEP / name
    saved = torch.load(file, weights_only=False)
    torch.save({**saved, "more": Planted(mark)}, file)
    manifest = read_json(run / STEP / "manifest.json")
    manifest["files"][name] = [file.stat().st_size, _digest(file)]
    write_json(run / STEP / "manifest.json", manifest)


@pytest.fixture
def planted(tiny_run, tmp_path):
    """A function (name of a file) → (a copy of the tiny run with that file planted, the mark)."""

    def make(name):
        copy = tmp_path / "planted" / "tiny"
        shutil.copytree(tiny_run, copy)
        plant(copy, name, tmp_path / "mark")
        return copy, tmp_path / "mark"

    return make


OPTIMIZER = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
WEIGHTS = "mp_rank_00_model_states.pt"
RANK = "loader-rank0000.pt"


def test_what_a_training_writes_is_read(tiny_run):
    optimizer = read_zero(tiny_run / STEP / OPTIMIZER)["optimizer_state_dict"]
    assert type(optimizer["loss_scaler"]).__name__ == "LossScaler"
    assert "module" in read_state(tiny_run / STEP / WEIGHTS)
    assert read_state(tiny_run / STEP / RANK)["loader"]["micro_batch_size"] == 2


@pytest.mark.parametrize("name", [OPTIMIZER, WEIGHTS])
def test_no_command_runs_what_is_in_a_run_folder(planted, capsys, tmp_path, name):
    run, mark = planted(name)
    own = f"{name} is not read: it holds posix.mkdir, which no training of ours writes"
    config = ("--config", "configs/tiny/lm.yaml", f"out_dir={tmp_path / 'others'}")
    assert own in refused(capsys, "export", run, tmp_path / "hf")
    assert own in refused(capsys, "inspect", run, "a b")
    for override in (f"init_from={run}", f"resume={run / STEP}"):
        done = fprnn("train", *config, override)
        assert own in done.stderr and "Traceback" not in done.stderr, (override, done.stderr)
    assert not mark.exists()


@pytest.mark.parametrize("name", [OPTIMIZER, RANK])
@pytest.mark.parametrize("stage", [1, 0])
def test_resuming_runs_nothing_either(planted, name, stage):
    """As the checkpoint is laid out, and laid out anew."""
    run, mark = planted(name)
    overrides = ("resume=auto", "train.steps=10", f"engine.zero_stage={stage}")
    start = command(run.parent, *overrides)
    done = subprocess.run(start, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=300)
    assert f"{name} is not read" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not mark.exists()
