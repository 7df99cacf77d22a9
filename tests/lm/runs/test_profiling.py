"""`log.profile`: a trace and a table of the updates asked for, and nothing that stops a run."""

import gzip
import json

import pytest
import torch

from lm.common.errors import ConfigError
from lm.config import load as config
from lm.config.schema import Config
from lm.runs import profile as profiling
from lm.runs.profile import Profile
from synthetic import config as synthetic_config
from tests.running import run


def train(profile, updates, first=1):
    """Updates in the place of real ones: one product of matrices each."""
    for number in range(first, updates + 1):
        with profile.update(number):
            torch.ones(4, 4) @ torch.ones(4, 4)


def names_in(trace):
    read = json.loads(gzip.decompress(trace.read_bytes()))
    return [event.get("name") for event in read["traceEvents"]]


def test_the_updates_asked_for_are_in_the_trace_and_no_others(tmp_path):
    said = []
    profile = Profile((3, 4), tmp_path / "profile", said.append)
    train(profile, 6)
    profile.close()
    written = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert written == ["updates-3-4.trace.json.gz"]
    names = names_in(tmp_path / "profile/updates-3-4.trace.json.gz")
    assert [n for n in names if n and n.startswith("update ")] == ["update 3", "update 4"]
    assert names.count("aten::mm") == 2
    assert len(said) == 1 and said[0].startswith("profile  of updates 3 to 4: ")


def test_a_run_that_is_taken_up_within_or_after_the_updates(tmp_path):
    said = []
    within = Profile((2, 4), tmp_path, said.append)
    train(within, 5, first=4)
    assert "updates 4 to 4" in said[0] and (tmp_path / "updates-4-4.trace.json.gz").exists()
    train(Profile((2, 4), tmp_path / "after", said.append), 6, first=5)
    assert len(said) == 1 and not (tmp_path / "after").exists()


def test_a_run_that_stops_before_the_end_leaves_no_half(tmp_path):
    said = []
    profile = Profile((2, 4), tmp_path / "profile", said.append)
    train(profile, 3)
    profile.close()
    assert said == ["note: the run ends before update 4: no profile is written"]
    assert not (tmp_path / "profile").exists()
    train(Profile((1, 2), tmp_path, said.append), 2)  # the profiler is free again
    assert said[1].startswith("profile  of updates 1 to 2")


@pytest.mark.parametrize("fault", ["start", "write"])
def test_a_profiler_that_fails_does_not_stop_the_run(tmp_path, monkeypatch, fault):
    said = []
    if fault == "start":

        def refuse(self):
            raise RuntimeError("no CUPTI")

        monkeypatch.setattr(profiling.profiler.profile, "start", refuse)
    else:
        (tmp_path / "profile").write_text("a file where the folder should be")
    profile = Profile((2, 3), tmp_path / "profile", said.append)
    train(profile, 5)
    profile.close()
    assert len(said) == 1 and said[0].startswith("warning: no profile (log.profile): ")
    assert ("no CUPTI" if fault == "start" else "cannot be written") in said[0]


@pytest.mark.parametrize("schema", [Config, synthetic_config.Config])
@pytest.mark.parametrize(
    "profile, words",
    [
        ([4, 3], "`log.profile` is [4, 3]: it must be the first and the last"),
        ([0, 3], "`log.profile[0]` is 0: it must be greater than 0"),
        (3, "`log.profile` is 3"),
        ([3, 21], "`log.profile` ends at update 21, but `train.steps` is only 20"),
    ],
)
def test_what_is_no_pair_of_updates_of_the_run_is_refused(schema, profile, words):
    tree = {"log": {"profile": profile}, "train": {"steps": 20}}
    with pytest.raises(ConfigError) as refused:
        config.build(tree, "config", schema)
    assert words in str(refused.value)


@pytest.mark.slow
def test_a_real_run_is_profiled_by_its_parts(tmp_path, tiny_losses):
    """And it has the losses of one without a profile, bit for bit."""
    records, done = run(tmp_path, "log.profile=[2,3]")
    assert [r["loss"] for r in records] == [r["loss"] for r in tiny_losses]
    assert "profile of updates 2 to 3" in " ".join(done.stdout.split())
    names = names_in(tmp_path / "tiny/profile/updates-2-3.trace.json.gz")
    assert [n for n in names if n and n.startswith("update ")] == ["update 2", "update 3"]
    # Two micro-batches an update, two layers; a part is named once in each.
    counts = {n: names.count(n) for n in ("data", "forward", "solve", "backward", "optimizer")}
    assert counts == {"data": 2, "forward": 4, "solve": 8, "backward": 4, "optimizer": 4}


def test_a_synthetic_run_is_profiled_too(tmp_path):
    from synthetic.train import train as train_task

    tree = {
        "out_dir": str(tmp_path),
        "model": {"d_model": 16, "d_state": 4},
        "task": {"name": "word_problem", "group": "Z3"},
        "train": {"steps": 3, "batch_size": 8, "length": 4},
        "eval": {"lengths": "4", "examples": 8},
        "log": {"profile": [1, 2]},
    }
    cfg = config.build(tree, "config", synthetic_config.Config)
    train_task(cfg)
    names = names_in(cfg.run_dir / "profile/updates-1-2.trace.json.gz")
    assert "update 1" in names and "update 2" in names and "update 3" not in names
