"""Files of others: what is in them is read, never run."""

import contextlib
import shutil
from pathlib import Path

import pytest
import torch

from lm.cli.main import main
from lm.common.files import read_json, write_json
from lm.evaluation import facade
from lm.model.checksums import delete_sums, sha256
from lm.runs.checkpoint import read_state
from lm.runs.exported import LoadError, load_model, load_tokenizer
from lm.training.deepspeed_api import read_zero_file
from tests.refusals import refused
from tests.running import ROOT, command, fprnn

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
    manifest["files"][name] = [file.stat().st_size, sha256(file)]
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
    optimizer = read_zero_file(tiny_run / STEP / OPTIMIZER)["optimizer_state_dict"]
    assert type(optimizer["loss_scaler"]).__name__ == "LossScaler"
    assert "module" in read_state(tiny_run / STEP / WEIGHTS)
    assert read_state(tiny_run / STEP / RANK)["loader"]["micro_batch_size"] == 2


@pytest.mark.parametrize("name", [OPTIMIZER, WEIGHTS])
def test_no_command_runs_what_is_in_a_run_folder(planted, capsys, tmp_path, name):
    run, mark = planted(name)
    own = f"{name} is not read: it holds posix.mkdir, which fprnn never writes"
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
    done = fprnn(*command(run.parent, *overrides)[3:])
    assert f"{name} is not read" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not mark.exists()


# Code that comes with an export, or that a configuration names.

RUNS = 'open({mark!r}, "w").close()\n'


@pytest.fixture
def export(small_export, tmp_path):
    copy = Path(shutil.copytree(small_export, tmp_path / "export"))
    delete_sums(copy)  # whoever means harm writes the checksums anew
    return copy


def test_the_code_beside_an_export_of_ours_is_not_run(export, tmp_path):
    """And what it would have been needs no --trust."""
    mark = tmp_path / "mark"
    for file in export.glob("*.py"):
        file.write_text(RUNS.format(mark=str(mark)) + file.read_text())
    assert load_model(export).config.model_type == "fprnn"
    assert load_model(export, trust=True).config.model_type == "fprnn"
    assert not mark.exists()


def test_foreign_code_of_an_export_runs_with_trust_alone(export, tmp_path, capsys):
    mark = tmp_path / "mark"
    for file in export.glob("modeling_fprnn.py"):
        file.write_text(RUNS.format(mark=str(mark)) + file.read_text())
    config = read_json(export / "config.json")
    write_json(export / "config.json", config | {"model_type": "somebodys"})
    code = (export / "configuration_fprnn.py").read_text()
    (export / "configuration_fprnn.py").write_text(code.replace('"fprnn"', '"somebodys"'))
    for words in (
        ("generate", export, "--prompt", "a"),
        ("inspect", export, "a"),
        ("eval", export, "--tasks", "catbabi_mini"),
    ):
        said = refused(capsys, *words)
        assert "runs code of its own (" in said and "--trust (in Python trust=True)" in said, said
    with pytest.raises(LoadError, match="runs code of its own"):
        facade.load(export)
    assert not mark.exists()
    with contextlib.suppress(Exception):  # what it is like then is its own matter
        load_model(export, trust=True)
    assert mark.exists()


def test_foreign_code_of_a_tokenizer_runs_with_trust_alone(export, tmp_path):
    mark = tmp_path / "mark"
    settings = read_json(export / "tokenizer_config.json")
    of_its_own = {"auto_map": {"AutoTokenizer": ["tok.Tok", None]}, "tokenizer_class": "Tok"}
    write_json(export / "tokenizer_config.json", settings | of_its_own)
    code = (
        "from transformers import PreTrainedTokenizerFast\nclass Tok(PreTrainedTokenizerFast): ..."
    )
    (export / "tok.py").write_text(RUNS.format(mark=str(mark)) + code)
    try:
        load_tokenizer(export)  # by a class that is known, or
    except LoadError as e:
        assert "runs code of its own" in str(e)
    assert not mark.exists()
    load_tokenizer(export, trust=True)
    assert mark.exists()


def test_a_tokenizer_that_loads_and_does_nothing(export):
    settings = read_json(export / "tokenizer_config.json")
    write_json(export / "tokenizer_config.json", settings | {"model_max_length": {"a": 1}})
    with pytest.raises(LoadError, match="cannot load the tokenizer of"):
        load_tokenizer(export)


def test_a_class_is_named_before_it_is_imported_and_never_by_a_plan(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_evil.py").write_text("open('mark', 'w').close()\nprint('it ran')\n")
    config = str(ROOT / "configs/tiny/lm.yaml")
    words = (config, "model.mixer=my_evil:Mixer", f"data.path={ROOT}/tests/data/tiny.jsonl")
    for start in (("plan",), ("train", "--dry-run", "--config")):
        assert main([*start, *words]) == 0
        assert "my_evil:Mixer is not imported by a plan" in capsys.readouterr().out
    assert not (tmp_path / "mark").exists()
    assert main(["train", "--config", *words]) != 0
    shown = capsys.readouterr()
    told = "note: model.mixer is my_evil:Mixer: running the code of my_evil"
    assert shown.out.index(told) < shown.out.index("it ran")
    assert "has no class Mixer" in shown.err


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_of_weights_is_refused_by_name(tmp_path, zipped):
    """By everything that reads the weights of others; torch's own sentence advises to run it."""
    from transformers import MambaConfig

    from lm.training import init_from

    sizes = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    MambaConfig(**sizes).save_pretrained(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    mark = tmp_path / "mark"
    torch.save({"x": Planted(mark)}, file, _use_new_zipfile_serialization=zipped)
    for read in (init_from.read_source, load_model):
        with pytest.raises(LoadError, match=rf"{file} is not read: it is a pickle that holds the"):
            read(tmp_path)
    assert not mark.exists()
