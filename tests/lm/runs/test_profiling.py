"""`log.profile`: a trace of the requested updates; failures do not stop a run."""

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


def train(profile, last, first=1):
    """Run fake updates `first` to `last` of one matrix product each."""
    for number in range(first, last + 1):
        with profile.update(number):
            torch.ones(4, 4) @ torch.ones(4, 4)


def names_in(trace):
    read = json.loads(gzip.decompress(trace.read_bytes()))
    return [event.get("name") for event in read["traceEvents"]]


def test_trace_has_exactly_the_requested_updates(tmp_path, messages):
    profile = Profile((3, 4), tmp_path / "profile")
    train(profile, last=6)
    profile.close()
    written = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert written == ["updates-3-4.trace.json.gz"]
    names = names_in(tmp_path / "profile/updates-3-4.trace.json.gz")
    assert [n for n in names if n and n.startswith("update ")] == ["update 3", "update 4"]
    assert names.count("aten::mm") == 2
    assert len(messages) == 1 and messages[0].startswith("profile  of updates 3 to 4: ")


def test_resumed_run_profiles_the_remaining_updates(tmp_path, messages):
    within = Profile((2, 4), tmp_path)
    train(within, last=5, first=4)
    assert "updates 4 to 4" in messages[0] and (tmp_path / "updates-4-4.trace.json.gz").exists()
    train(Profile((2, 4), tmp_path / "after"), last=6, first=5)
    assert len(messages) == 1 and not (tmp_path / "after").exists()


def test_stopped_run_leaves_no_partial_profile(tmp_path, messages):
    profile = Profile((2, 4), tmp_path / "profile")
    train(profile, last=3)
    profile.close()
    assert messages == ["note: the run ends before update 4: no profile is written"]
    assert not (tmp_path / "profile").exists()
    train(Profile((1, 2), tmp_path), last=2)  # the profiler can start again
    assert messages[1].startswith("profile  of updates 1 to 2")


@pytest.mark.parametrize("fault", ["start", "write"])
def test_failing_profiler_does_not_stop_the_run(tmp_path, monkeypatch, messages, fault):
    if fault == "start":

        def refuse(self):
            raise RuntimeError("no CUPTI")

        monkeypatch.setattr(profiling.profiler.profile, "start", refuse)
    else:
        (tmp_path / "profile").write_text("a file where the folder should be")
    profile = Profile((2, 3), tmp_path / "profile")
    train(profile, last=5)
    profile.close()
    assert len(messages) == 1 and messages[0].startswith("warning: no profile (log.profile): ")
    assert ("no CUPTI" if fault == "start" else "cannot be written") in messages[0]


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
def test_wrong_profile_settings_are_refused(schema, profile, words):
    tree = {"log": {"profile": profile}, "train": {"steps": 20}}
    with pytest.raises(ConfigError) as refused:
        config.build(tree, "config", schema)
    assert words in str(refused.value)


@pytest.mark.slow
def test_profile_names_the_parts_of_an_update(tmp_path, tiny_losses):
    """The losses are bit for bit those without a profile."""
    records, process = run(tmp_path, "log.profile=[2,3]")
    assert [r["loss"] for r in records] == [r["loss"] for r in tiny_losses]
    assert "profile of updates 2 to 3" in " ".join(process.stdout.split())
    names = names_in(tmp_path / "tiny/profile/updates-2-3.trace.json.gz")
    assert [n for n in names if n and n.startswith("update ")] == ["update 2", "update 3"]
    # Two micro-batches per update and two layers; each names a part once.
    counts = {n: names.count(n) for n in ("data", "forward", "solve", "backward", "optimizer")}
    assert counts == {"data": 2, "forward": 4, "solve": 8, "backward": 4, "optimizer": 4}


def test_synthetic_run_is_profiled(tmp_path):
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
