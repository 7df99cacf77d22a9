"""Checksums of runs and exports: a changed file is refused by name."""

import hashlib
import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lm.common.errors import BAD_DATA, FAILED
from lm.data.sources.errors import DataError
from lm.model.checksums import SUMS, read_sums, write_sums
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.report.report import report
from lm.runs.auto_classes import register_auto_classes
from lm.runs.checkpoint import MANIFEST
from lm.runs.exported import LoadError, load_model, load_tokenizer
from lm.runs.lease import Lease
from lm.runs.run_dir import RunDir, RunDirError
from lm.runs.written import CARD, EXPORT_RECORD
from lm.training.init_from import read_source
from tests.refusals import refused
from tests.running import ROOT, fprnn, losses, run, run_alone


@pytest.fixture
def copy(small_export, tmp_path):
    """A copy of an export that a test may damage."""
    return Path(shutil.copytree(small_export, tmp_path / "copy"))


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


# Exports.


def test_sha256sum_covers_all_files_except_the_card(small_export):
    checked = subprocess.run(
        ["sha256sum", "-c", SUMS], cwd=small_export, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr
    listed = {line.partition(":")[0] for line in checked.stdout.splitlines()}
    assert listed == {path.name for path in small_export.iterdir()} - {SUMS, CARD, EXPORT_RECORD}


def test_export_with_a_flipped_bit_is_refused(copy):
    """Without checksums, 37 of 40 flipped bits in the weights were not detected."""
    flips = random.Random(0)
    for name in read_sums(copy):
        path = copy / name
        whole = path.read_bytes()
        for _ in range(40 if name == "model.safetensors" else 2):
            flip(path, flips.randrange(8 * len(whole)))
            with pytest.raises(LoadError, match=f"{name} is damaged, or was changed"):
                load_model(copy)
            path.write_bytes(whole)
    load_model(copy)
    load_tokenizer(copy)


def test_export_with_changed_tokenizer_is_refused(capsys, copy):
    path = copy / "tokenizer.json"
    path.write_text(path.read_text().replace('"a"', '"aa"', 1))
    with pytest.raises(LoadError, match=r"tokenizer\.json is damaged, or was changed"):
        load_tokenizer(copy)
    output = refused(capsys, "generate", copy, "--prompt", "a")
    assert f"{path} is damaged, or was changed" in output and f"delete {SUMS}" in output
    (copy / SUMS).unlink()  # as the error advises for an intended change
    load_tokenizer(copy)


@pytest.mark.parametrize(
    "text, words",
    [
        ("x", f"{SUMS} is damaged"),
        ("\xff", f"{SUMS} is damaged"),
        ("0" * 64 + "  ../config.json\n", f"{SUMS} is damaged"),
        ("", "it is empty"),
        ("config.json", r"model\.safetensors is not listed in"),
    ],
)
def test_damaged_checksums_are_named(copy, text, words):
    if text == "config.json":  # the file lists nothing else
        text = f"{read_sums(copy)[text]}  {text}\n"
    (copy / SUMS).write_text(text, encoding="latin-1")
    with pytest.raises(LoadError, match=words):
        load_model(copy)


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_from_pretrained_refuses_unlisted_weights(copy, weights):
    (copy / "model.safetensors").rename(copy / weights)
    write_sums(copy, ["tokenizer.json"])
    with pytest.raises(ValueError, match=f"{weights} is not listed in {SUMS}"):
        FPRNNForCausalLM.from_pretrained(copy)


def test_missing_file_is_named_and_card_may_change(copy):
    (copy / CARD).write_text("Other words.")
    load_model(copy)
    (copy / "generation_config.json").unlink()
    with pytest.raises(LoadError, match=r"generation_config\.json is missing"):
        load_model(copy)


def test_from_pretrained_refuses_changed_weights(copy):
    register_auto_classes()
    for load in (FPRNNForCausalLM, AutoModelForCausalLM):
        load.from_pretrained(copy)
    flip(copy / "model.safetensors", 8 * 5000)
    for load in (FPRNNForCausalLM, AutoModelForCausalLM):
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged, or was changed"):
            load.from_pretrained(copy)
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged, or was changed"):
            load.from_pretrained(pretrained_model_name_or_path=str(copy.parent), subfolder="copy")


def test_from_pretrained_refuses_changed_shard(copy):
    FPRNNForCausalLM.from_pretrained(copy).save_pretrained(copy / "cut", max_shard_size="5KB")
    folder = copy / "cut"
    write_sums(folder, [path.name for path in folder.iterdir()])
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 2
    FPRNNForCausalLM.from_pretrained(folder)
    flip(folder / shards[1], 8 * ((folder / shards[1]).stat().st_size - 3))
    with pytest.raises(ValueError, match=f"{shards[1]} is damaged, or was changed"):
        FPRNNForCausalLM.from_pretrained(folder)


LOAD = """
from transformers import AutoModelForCausalLM
try:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
    print(type(model).__module__.partition(".")[0])
except ValueError as e:
    print(e)
"""


def test_exported_code_refuses_changed_weights(copy, tmp_path):
    """In a process that cannot import `lm`."""
    assert run_alone(LOAD, copy, cwd=tmp_path).stdout == "transformers_modules\n"
    flip(copy / "model.safetensors", 8 * 5000)
    printed = run_alone(LOAD, copy, cwd=tmp_path).stdout
    assert "model.safetensors is damaged, or was changed (its SHA-256 differs)" in printed


def test_export_saved_again_by_a_user_loads(copy, tmp_path):
    """A user saves after fine-tuning, into the same folder or another."""
    model = FPRNNForCausalLM.from_pretrained(copy)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    for folder in (copy, tmp_path / "another"):
        model.save_pretrained(folder)
        assert not (folder / SUMS).exists()
        loaded = load_model(folder)
        for name, weight in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], weight)


def test_unchanged_file_is_hashed_once(copy, monkeypatch):
    read, real = [], hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda f, how: (read.append(f.name), real(f, how))[1]
    )
    load_model(copy)
    load_tokenizer(copy)
    assert sorted(Path(name).name for name in read) == sorted(read_sums(copy))
    load_model(copy)
    assert len(read) == len(read_sums(copy))
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes())  # the same content with a new time
    FPRNNForCausalLM.from_pretrained(copy)
    assert len(read) == len(read_sums(copy)) + 1


# Runs.

TINY = ("train", "--config", "configs/tiny/lm.yaml", "resume=auto")


@pytest.fixture
def stopped(tiny_run, tmp_path):
    """A run that can continue after update 4."""
    folder = Path(shutil.copytree(tiny_run, tmp_path / "runs/tiny"))
    shutil.rmtree(folder / "checkpoints/step-000008")
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "hf", ignore_errors=True)
    return folder


def other_tokenizer(folder):
    """Swap two tokens, so that the same text has other tokens."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer))


def test_manifest_has_the_run_fingerprint(tiny_run):
    manifest = json.loads((tiny_run / "checkpoints/step-000008" / MANIFEST).read_text())
    tokenizer = (tiny_run / "tokenizer/tokenizer.json").read_bytes()
    assert manifest["tokenizer"]["tokenizer.json"] == hashlib.sha256(tokenizer).hexdigest()
    corpus = json.loads((tiny_run / "data/corpus.json").read_text())
    assert manifest["corpora"] == {"": corpus["sha256"]} and len(corpus["sha256"]) == 2
    assert manifest["config"]["model"]["d_model"] == 16


@pytest.mark.parametrize("vouched", ["its own checksums", "the checkpoint's"])
def test_run_with_changed_tokenizer_is_refused(capsys, stopped, tmp_path, vouched):
    """Otherwise the corpus would be tokenised again in the middle of the run."""
    folder = stopped / "tokenizer"
    other_tokenizer(folder)
    if vouched == "the checkpoint's":  # replace the tokenizer
        write_sums(folder, [path.name for path in folder.iterdir() if path.name != SUMS])
    record = (stopped / "data/corpus.json").read_text()
    done = fprnn(*TINY, f"out_dir={stopped.parent}")
    assert done.returncode in (BAD_DATA, FAILED)
    assert f"{folder / 'tokenizer.json'} is damaged, or was changed" in done.stderr
    assert (stopped / "data/corpus.json").read_text() == record
    for command in (["export", stopped, tmp_path / "out"], ["inspect", stopped, "a text"]):
        assert f"{folder / 'tokenizer.json'} is damaged" in refused(capsys, *command)
    assert not (tmp_path / "out").exists()
    with pytest.raises((DataError, RunDirError), match=r"tokenizer\.json is damaged"):
        read_source(stopped)


def test_run_with_changed_config_is_refused(capsys, stopped, tmp_path):
    """The changed config fits the weights, but describes another model."""
    config = stopped / "config.yaml"
    whole = config.read_text()
    config.write_text(whole.replace("reset_at_eos: true", "reset_at_eos: false"))
    assert config.read_text() != whole
    named = "config.yaml differs from"
    change = "(model.reset_at_eos was True, is False)"
    for command in (["export", stopped, tmp_path / "out"], ["inspect", stopped, "a text"]):
        output = refused(capsys, *command)
        assert named in output and change in output
    done = fprnn(*TINY, f"out_dir={stopped.parent}", "model.reset_at_eos=false")
    assert done.returncode == FAILED and named in done.stderr and change in done.stderr
    # Keys that may change may be changed in config.yaml.
    config.write_text(whole.replace("steps: 8", "steps: 6"))
    _, done = run(stopped.parent, "resume=auto", "train.steps=6")
    assert max(r["step"] for r in losses(stopped)) == 6


def test_run_with_changed_corpus_is_refused(stopped, tmp_path):
    """The corpus in the run directory is deleted, and the text has changed."""
    text = Path("tests/data/tiny.jsonl").read_text()
    lines = text.splitlines()
    (tmp_path / "tiny.jsonl").write_text("\n".join(lines[: len(lines) // 2]) + "\n")
    shutil.rmtree(stopped / "data")
    config = stopped / "config.yaml"
    config.write_text(config.read_text().replace("tests/data/tiny.jsonl", f"{tmp_path}/tiny.jsonl"))
    moved = f"data.path={tmp_path}/tiny.jsonl"
    done = fprnn(*TINY, f"out_dir={stopped.parent}", moved)
    assert done.returncode == FAILED
    assert f"{stopped / 'data'} holds another corpus than" in done.stderr
    # The same text at another path is accepted.
    (tmp_path / "tiny.jsonl").write_text(text)
    shutil.rmtree(stopped / "data")
    run(stopped.parent, "resume=auto", moved)


def test_run_of_version_0_1_resumes(stopped, tiny_losses):
    """Its manifests have no config and no checksums, and its tokenizer has no checksums."""
    (stopped / "tokenizer" / SUMS).unlink()
    path = stopped / "checkpoints/step-000004" / MANIFEST
    manifest = json.loads(path.read_text())
    for key in ("tokenizer", "corpora", "config"):
        del manifest[key]
    path.write_text(json.dumps(manifest))
    actual, _ = run(stopped.parent, "resume=auto")
    assert [r["loss"] for r in actual] == [r["loss"] for r in tiny_losses]


def test_report_notes_modified_files_of_a_run(capsys, stopped):
    assert not [line for line in report([stopped]) if "changed" in str(line)]
    other_tokenizer(stopped / "tokenizer")
    (line,) = [line for line in report([stopped]) if "tokenizer.json" in str(line)]
    assert line.startswith(f"note: {stopped}") and "was changed" in line


# Runs with missing files.


def claimed(tiny, folder, *overrides, overwrite=False):
    """Return the message when a run directory is claimed."""
    outputs = []
    directory = RunDir(folder)
    directory.claim(tiny(f"out_dir={folder.parent}", *overrides), overwrite, outputs.append)
    directory.release()
    return outputs


@pytest.fixture
def here(monkeypatch):
    monkeypatch.chdir(ROOT)


DEAD = {**Lease(Path("lease.json")).record, "pid": 2**22 + 1}  # larger than any process id
TEXT = ("data.path=tests/data/tiny.jsonl", "resume=auto")


def test_missing_checkpoints_do_not_restart_the_run(tiny, here, stopped):
    """Otherwise it would start at update 0 and drop the log."""
    log = (stopped / "metrics.jsonl").read_bytes()
    shutil.rmtree(stopped / "checkpoints")
    done = fprnn(*TINY, f"out_dir={stopped.parent}")
    assert done.returncode == FAILED
    assert f"{stopped} has made 8 updates" in done.stderr and "restore them" in done.stderr
    assert (stopped / "metrics.jsonl").read_bytes() == log
    (stopped / "checkpoints/step-000004.partial").mkdir(parents=True)
    with pytest.raises(RunDirError, match="has made 8 updates"):
        claimed(tiny, stopped, *TEXT)
    (stopped / "metrics.jsonl").unlink()
    (stopped / "result.json").write_text("{}")
    with pytest.raises(RunDirError, match=r"its checkpoints are gone .*--overwrite"):
        claimed(tiny, stopped, *TEXT)
    claimed(tiny, stopped, *TEXT, overwrite=True)
    assert not (stopped / "result.json").exists()


def test_run_killed_before_first_save_restarts(tiny, here, stopped, tmp_path):
    shutil.rmtree(stopped / "checkpoints")
    log = stopped / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:3]))
    assert "checkpoint" not in log.read_text()
    assert claimed(tiny, stopped, *TEXT) == []
    claim = tmp_path / "cut/tiny"  # only a lease
    (claim / "checkpoints").mkdir(parents=True)
    (claim / "lease.json").write_text(json.dumps(DEAD))
    claimed(tiny, claim, *TEXT)
    assert (claim / "config.yaml").exists()


@pytest.mark.parametrize("leased", [True, False])
@pytest.mark.parametrize("lost", ["config.yaml", "config.yaml and metrics.jsonl"])
def test_missing_config_does_not_restart_the_run(tiny, here, stopped, leased, lost):
    """Also if the lease of a killed run is still there."""
    for name in lost.split(" and "):
        (stopped / name).unlink()
    if leased:
        (stopped / "lease.json").write_text(json.dumps(DEAD))
    for overrides in (TEXT, TEXT[:1]):
        with pytest.raises(RunDirError, match=r"config\.yaml is gone: restore it"):
            claimed(tiny, stopped, *overrides)
    assert (stopped / "checkpoints/step-000004").is_dir()
    assert not (stopped / "config.yaml").exists()
