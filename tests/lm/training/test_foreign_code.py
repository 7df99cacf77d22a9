"""Files from other people are read without running code in them."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest
import torch

from lm.cli.main import main
from lm.common.files import read_json, write_json
from lm.evaluation import language_model
from lm.model.checksums import delete_sums, sha256
from lm.runs.checkpoint import read_state
from lm.runs.exported import LoadError, load_model, load_tokenizer
from lm.training.deepspeed_api import read_zero_file
from tests.refusals import refused
from tests.running import ROOT, command, fprnn

STEP = "checkpoints/step-000008"


class MaliciousPickle:
    """An object that creates the folder `mark` when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def plant_object(run, name, mark):
    """Put a MaliciousPickle into a file of a checkpoint, and the new checksum into the manifest."""
    file = run / STEP / name
    saved = torch.load(file, weights_only=False)
    torch.save({**saved, "more": MaliciousPickle(mark)}, file)
    manifest = read_json(run / STEP / "manifest.json")
    manifest["files"][name] = [file.stat().st_size, sha256(file)]
    write_json(run / STEP / "manifest.json", manifest)


@pytest.fixture
def copy_with_code(tiny_run, tmp_path):
    """Function that copies the tiny run, plants code in a file, and returns (copy, mark)."""

    def copy_and_plant(name):
        copy = tmp_path / "malicious" / "tiny"
        shutil.copytree(tiny_run, copy)
        plant_object(copy, name, tmp_path / "mark")
        return copy, tmp_path / "mark"

    return copy_and_plant


OPTIMIZER = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
WEIGHTS = "mp_rank_00_model_states.pt"
RANK = "loader-rank0000.pt"


def test_files_of_a_training_are_read(tiny_run):
    optimizer = read_zero_file(tiny_run / STEP / OPTIMIZER)["optimizer_state_dict"]
    assert type(optimizer["loss_scaler"]).__name__ == "LossScaler"
    assert "module" in read_state(tiny_run / STEP / WEIGHTS)
    assert read_state(tiny_run / STEP / RANK)["loader"]["micro_batch_size"] == 2


@pytest.mark.parametrize("name", [OPTIMIZER, WEIGHTS])
def test_commands_run_no_code_in_a_run_folder(copy_with_code, capsys, tmp_path, name):
    run, mark = copy_with_code(name)
    message = f"{name} is not read: it holds posix.mkdir, which fprnn never writes"
    config = ("--config", "configs/tiny/lm.yaml", f"out_dir={tmp_path / 'others'}")
    assert message in refused(capsys, "export", run, tmp_path / "hf")
    assert message in refused(capsys, "inspect", run, "a b")
    for override in (f"init_from={run}", f"resume={run / STEP}"):
        process = fprnn("train", *config, override)
        assert message in process.stderr, (override, process.stderr)
        assert "Traceback" not in process.stderr, override
    assert not mark.exists()


@pytest.mark.parametrize("name", [OPTIMIZER, RANK])
@pytest.mark.parametrize("stage", [1, 0])
def test_resume_runs_no_code_in_a_run_folder(copy_with_code, name, stage):
    """Resume with the checkpoint's ZeRO stage, 1, and with another."""
    run, mark = copy_with_code(name)
    overrides = ("resume=auto", "train.steps=10", f"engine.zero_stage={stage}")
    process = fprnn(*command(run.parent, *overrides)[3:])  # without `python -m lm`
    assert f"{name} is not read" in process.stderr, process.stderr
    assert "Traceback" not in process.stderr, process.stderr
    assert not mark.exists()


# Code in an export, or named in a configuration.

CODE = 'open({mark!r}, "w").close()\n'  # creates the file `mark`


@pytest.fixture
def export(small_export, tmp_path):
    copy = Path(shutil.copytree(small_export, tmp_path / "export"))
    delete_sums(copy)  # an attacker updates the checksums
    return copy


def test_code_next_to_builtin_export_is_not_run(export, tmp_path):
    """Such an export loads without --trust."""
    mark = tmp_path / "mark"
    for file in export.glob("*.py"):
        file.write_text(CODE.format(mark=str(mark)) + file.read_text())
    assert load_model(export).config.model_type == "fprnn"
    assert load_model(export, trust=True).config.model_type == "fprnn"
    assert not mark.exists()


def test_code_of_an_export_runs_only_with_trust(export, tmp_path, capsys):
    mark = tmp_path / "mark"
    file = export / "modeling_fprnn.py"
    file.write_text(CODE.format(mark=str(mark)) + file.read_text())
    config = read_json(export / "config.json")
    write_json(export / "config.json", config | {"model_type": "somebodys"})
    code = (export / "configuration_fprnn.py").read_text()
    (export / "configuration_fprnn.py").write_text(code.replace('"fprnn"', '"somebodys"'))
    for arguments in (
        ("generate", export, "--prompt", "a"),
        ("inspect", export, "a"),
        ("eval", export, "--tasks", "catbabi_mini"),
    ):
        output = refused(capsys, *arguments)
        assert "needs code of its own (" in output, output
        assert "--trust (in Python trust=True)" in output, output
    with pytest.raises(LoadError, match="needs code of its own"):
        language_model.load(export)
    assert not mark.exists()
    with contextlib.suppress(Exception):  # the code may make the model unusable
        load_model(export, trust=True)
    assert mark.exists()


def test_code_of_a_tokenizer_runs_only_with_trust(export, tmp_path):
    mark = tmp_path / "mark"
    settings = read_json(export / "tokenizer_config.json")
    custom_class = {"auto_map": {"AutoTokenizer": ["tok.Tok", None]}, "tokenizer_class": "Tok"}
    write_json(export / "tokenizer_config.json", settings | custom_class)
    code = (
        "from transformers import PreTrainedTokenizerFast\nclass Tok(PreTrainedTokenizerFast): ..."
    )
    (export / "tok.py").write_text(CODE.format(mark=str(mark)) + code)
    try:
        load_tokenizer(export)  # with a built-in class, or refused
    except LoadError as e:
        assert "needs code of its own" in str(e)
    assert not mark.exists()
    load_tokenizer(export, trust=True)
    assert mark.exists()


def test_unusable_tokenizer_is_refused(export):
    settings = read_json(export / "tokenizer_config.json")
    write_json(export / "tokenizer_config.json", settings | {"model_max_length": {"a": 1}})
    with pytest.raises(LoadError, match="cannot load the tokenizer of"):
        load_tokenizer(export)


def test_class_is_announced_before_import_and_not_run_by_plan(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_evil.py").write_text("open('mark', 'w').close()\nprint('it ran')\n")
    config = str(ROOT / "configs/tiny/lm.yaml")
    arguments = (config, "model.mixer=my_evil:Mixer", f"data.path={ROOT}/tests/data/tiny.jsonl")
    for start in (("plan",), ("train", "--dry-run", "--config")):
        assert main([*start, *arguments]) == 0
        assert "my_evil:Mixer is not imported by plan" in capsys.readouterr().out
    assert not (tmp_path / "mark").exists()
    assert main(["train", "--config", *arguments]) != 0
    captured = capsys.readouterr()
    announcement = "note: model.mixer is my_evil:Mixer: running the code of my_evil"
    assert captured.out.index(announcement) < captured.out.index("it ran")
    assert "has no class Mixer" in captured.err


@pytest.mark.parametrize("is_zip_file", [True, False])
def test_pickled_weights_are_refused(tmp_path, is_zip_file):
    """The message replaces torch's, which advises to run the pickle."""
    from transformers import MambaConfig

    from lm.training import init_from

    sizes = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    MambaConfig(**sizes).save_pretrained(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    mark = tmp_path / "mark"
    torch.save({"x": MaliciousPickle(mark)}, file, _use_new_zipfile_serialization=is_zip_file)
    for read in (init_from.read_source, load_model):
        with pytest.raises(LoadError, match=rf"{file} is not read: it is a pickle that holds the"):
            read(tmp_path)
    assert not mark.exists()
