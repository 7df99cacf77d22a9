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
from lm.runs.owned_files import CARD, EXPORT_RECORD
from lm.runs.run_dir import RunDir, RunDirError
from lm.training.init_from import read_source
from tests.refusals import refused
from tests.running import ROOT, fprnn, read_losses, run, run_alone


@pytest.fixture
def export_copy(small_export, tmp_path):
    """A copy of an export that a test may damage."""
    return Path(shutil.copytree(small_export, tmp_path / "copy"))


def flip_bit(path, bit):
    """Flip a bit of a file, counted from its beginning; bit 8·n is in byte n."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


# Exports.

WEIGHT_BIT = 8 * 5000  # in a weight of the export, after the header of the file


def test_sha256sum_covers_all_files_except_the_card(small_export):
    command = ["sha256sum", "-c", SUMS]
    process = subprocess.run(command, cwd=small_export, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    listed = {line.partition(":")[0] for line in process.stdout.splitlines()}
    assert listed == {path.name for path in small_export.iterdir()} - {SUMS, CARD, EXPORT_RECORD}


def test_export_with_a_flipped_bit_is_refused(export_copy):
    """Without checksums, 37 of 40 flipped bits in the weights were not detected."""
    rng = random.Random(0)
    for name in read_sums(export_copy):
        path = export_copy / name
        whole = path.read_bytes()
        for _ in range(40 if name == "model.safetensors" else 2):
            flip_bit(path, rng.randrange(8 * len(whole)))
            with pytest.raises(LoadError, match=f"{name} is damaged, or was changed"):
                load_model(export_copy)
            path.write_bytes(whole)
    load_model(export_copy)
    load_tokenizer(export_copy)


def test_export_with_changed_tokenizer_is_refused(capsys, export_copy):
    path = export_copy / "tokenizer.json"
    path.write_text(path.read_text().replace('"a"', '"aa"', 1))
    with pytest.raises(LoadError, match=r"tokenizer\.json is damaged, or was changed"):
        load_tokenizer(export_copy)
    output = refused(capsys, "generate", export_copy, "--prompt", "a")
    assert f"{path} is damaged, or was changed" in output and f"delete {SUMS}" in output
    (export_copy / SUMS).unlink()  # as the error advises for an intended change
    load_tokenizer(export_copy)


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
def test_damaged_checksums_are_named(export_copy, text, words):
    if text == "config.json":  # the file lists nothing else
        text = f"{read_sums(export_copy)[text]}  {text}\n"
    (export_copy / SUMS).write_text(text, encoding="latin-1")
    with pytest.raises(LoadError, match=words):
        load_model(export_copy)


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_from_pretrained_refuses_unlisted_weights(export_copy, weights):
    (export_copy / "model.safetensors").rename(export_copy / weights)
    write_sums(export_copy, ["tokenizer.json"])
    with pytest.raises(ValueError, match=f"{weights} is not listed in {SUMS}"):
        FPRNNForCausalLM.from_pretrained(export_copy)


def test_missing_file_is_named_and_card_may_change(export_copy):
    (export_copy / CARD).write_text("Other words.")
    load_model(export_copy)
    (export_copy / "generation_config.json").unlink()
    with pytest.raises(LoadError, match=r"generation_config\.json is missing"):
        load_model(export_copy)


def test_from_pretrained_refuses_changed_weights(export_copy):
    register_auto_classes()
    for load in (FPRNNForCausalLM, AutoModelForCausalLM):
        load.from_pretrained(export_copy)
    flip_bit(export_copy / "model.safetensors", WEIGHT_BIT)
    for load in (FPRNNForCausalLM, AutoModelForCausalLM):
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged, or was changed"):
            load.from_pretrained(export_copy)
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged, or was changed"):
            load.from_pretrained(
                pretrained_model_name_or_path=str(export_copy.parent), subfolder="copy"
            )


def test_from_pretrained_refuses_changed_shard(export_copy):
    folder = export_copy / "cut"
    model = FPRNNForCausalLM.from_pretrained(export_copy)
    model.save_pretrained(folder, max_shard_size="5KB")
    write_sums(folder, [path.name for path in folder.iterdir()])
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 2
    FPRNNForCausalLM.from_pretrained(folder)
    flip_bit(folder / shards[1], 8 * ((folder / shards[1]).stat().st_size - 3))
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


def test_exported_code_refuses_changed_weights(export_copy, tmp_path):
    """In a process that cannot import `lm`."""
    assert run_alone(LOAD, export_copy, cwd=tmp_path).stdout == "transformers_modules\n"
    flip_bit(export_copy / "model.safetensors", WEIGHT_BIT)
    printed = run_alone(LOAD, export_copy, cwd=tmp_path).stdout
    assert "model.safetensors is damaged, or was changed (its SHA-256 differs)" in printed


def test_export_saved_again_by_a_user_loads(export_copy, tmp_path):
    """A user saves after fine-tuning, into the same folder or another."""
    model = FPRNNForCausalLM.from_pretrained(export_copy)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    for folder in (export_copy, tmp_path / "another"):
        model.save_pretrained(folder)
        assert not (folder / SUMS).exists()
        loaded = load_model(folder)
        for name, weight in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], weight)


def test_unchanged_file_is_hashed_once(export_copy, monkeypatch):
    read_files, file_digest = [], hashlib.file_digest

    def record_digest(file, algorithm):
        read_files.append(file.name)
        return file_digest(file, algorithm)

    monkeypatch.setattr(hashlib, "file_digest", record_digest)
    load_model(export_copy)
    load_tokenizer(export_copy)
    assert sorted(Path(name).name for name in read_files) == sorted(read_sums(export_copy))
    load_model(export_copy)
    assert len(read_files) == len(read_sums(export_copy))
    weights = export_copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes())  # the same content with a new time
    FPRNNForCausalLM.from_pretrained(export_copy)
    assert len(read_files) == len(read_sums(export_copy)) + 1


# Runs.

TINY = ("train", "--config", "configs/tiny/lm.yaml", "resume=auto")


@pytest.fixture
def stopped_run(tiny_run, tmp_path):
    """A run that can continue after update 4."""
    folder = Path(shutil.copytree(tiny_run, tmp_path / "runs/tiny"))
    shutil.rmtree(folder / "checkpoints/step-000008")
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "hf", ignore_errors=True)
    return folder


def swap_tokens(folder):
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


@pytest.mark.parametrize("checksums", ["its own checksums", "the checkpoint's"])
def test_run_with_changed_tokenizer_is_refused(capsys, stopped_run, tmp_path, checksums):
    """Otherwise the corpus would be tokenised again in the middle of the run."""
    folder = stopped_run / "tokenizer"
    swap_tokens(folder)
    if checksums == "the checkpoint's":  # replace the tokenizer
        write_sums(folder, [path.name for path in folder.iterdir() if path.name != SUMS])
    record = (stopped_run / "data/corpus.json").read_text()
    process = fprnn(*TINY, f"out_dir={stopped_run.parent}")
    assert process.returncode in (BAD_DATA, FAILED)
    assert f"{folder / 'tokenizer.json'} is damaged, or was changed" in process.stderr
    assert (stopped_run / "data/corpus.json").read_text() == record
    for command in (["export", stopped_run, tmp_path / "out"], ["inspect", stopped_run, "a text"]):
        assert f"{folder / 'tokenizer.json'} is damaged" in refused(capsys, *command)
    assert not (tmp_path / "out").exists()
    with pytest.raises((DataError, RunDirError), match=r"tokenizer\.json is damaged"):
        read_source(stopped_run)


def test_run_with_changed_config_is_refused(capsys, stopped_run, tmp_path):
    """The changed config fits the weights, but describes another model."""
    config = stopped_run / "config.yaml"
    whole = config.read_text()
    config.write_text(whole.replace("reset_at_eos: true", "reset_at_eos: false"))
    assert config.read_text() != whole
    named = "config.yaml differs from"
    change = "(model.reset_at_eos was True, is False)"
    for command in (["export", stopped_run, tmp_path / "out"], ["inspect", stopped_run, "a text"]):
        output = refused(capsys, *command)
        assert named in output and change in output
    process = fprnn(*TINY, f"out_dir={stopped_run.parent}", "model.reset_at_eos=false")
    assert process.returncode == FAILED and named in process.stderr and change in process.stderr
    # Keys that may change may be changed in config.yaml.
    config.write_text(whole.replace("steps: 8", "steps: 6"))
    run(stopped_run.parent, "resume=auto", "train.steps=6")
    assert max(r["step"] for r in read_losses(stopped_run)) == 6


def test_run_with_changed_corpus_is_refused(stopped_run, tmp_path):
    """The corpus in the run directory is deleted, and the text has changed."""
    text = Path("tests/data/tiny.jsonl").read_text()
    lines = text.splitlines()
    (tmp_path / "tiny.jsonl").write_text("\n".join(lines[: len(lines) // 2]) + "\n")
    shutil.rmtree(stopped_run / "data")
    config = stopped_run / "config.yaml"
    config.write_text(config.read_text().replace("tests/data/tiny.jsonl", f"{tmp_path}/tiny.jsonl"))
    moved = f"data.path={tmp_path}/tiny.jsonl"
    process = fprnn(*TINY, f"out_dir={stopped_run.parent}", moved)
    assert process.returncode == FAILED
    assert f"{stopped_run / 'data'} holds another corpus than" in process.stderr
    # The same text at another path is accepted.
    (tmp_path / "tiny.jsonl").write_text(text)
    shutil.rmtree(stopped_run / "data")
    run(stopped_run.parent, "resume=auto", moved)


def test_report_notes_modified_files_of_a_run(capsys, stopped_run, undrawn):
    assert not [line for line in report([stopped_run]) if "changed" in str(line)]
    swap_tokens(stopped_run / "tokenizer")
    (line,) = [line for line in report([stopped_run]) if "tokenizer.json" in str(line)]
    assert line.startswith(f"note: {stopped_run}") and "was changed" in line


# Runs with missing files.


def claim(tiny, folder, *overrides, overwrite=False):
    """Claim and release a run directory."""
    run_dir = RunDir(folder)
    run_dir.claim(tiny(f"out_dir={folder.parent}", *overrides), overwrite)
    run_dir.release()


@pytest.fixture
def in_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


DEAD_LEASE = {**Lease(Path("lease.json")).record, "pid": 2**22 + 1}  # larger than any process id
# Overrides: the text of the tiny run, and `resume`.
RESUME_TEXT = ("data.path=tests/data/tiny.jsonl", "resume=auto")


def test_missing_checkpoints_do_not_restart_the_run(tiny, in_repository, stopped_run):
    """Otherwise it would start at update 0 and drop the log."""
    log = (stopped_run / "metrics.jsonl").read_bytes()
    shutil.rmtree(stopped_run / "checkpoints")
    process = fprnn(*TINY, f"out_dir={stopped_run.parent}")
    assert process.returncode == FAILED
    assert f"{stopped_run} has made 8 updates" in process.stderr
    assert "restore them" in process.stderr
    assert (stopped_run / "metrics.jsonl").read_bytes() == log
    (stopped_run / "checkpoints/step-000004.partial").mkdir(parents=True)
    with pytest.raises(RunDirError, match="has made 8 updates"):
        claim(tiny, stopped_run, *RESUME_TEXT)
    (stopped_run / "metrics.jsonl").unlink()
    (stopped_run / "result.json").write_text("{}")
    with pytest.raises(RunDirError, match=r"its checkpoints are gone .*--overwrite"):
        claim(tiny, stopped_run, *RESUME_TEXT)
    claim(tiny, stopped_run, *RESUME_TEXT, overwrite=True)
    assert not (stopped_run / "result.json").exists()


def test_run_killed_before_first_save_restarts(
    tiny, in_repository, stopped_run, tmp_path, messages
):
    shutil.rmtree(stopped_run / "checkpoints")
    log = stopped_run / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:3]))
    assert "checkpoint" not in log.read_text()
    claim(tiny, stopped_run, *RESUME_TEXT)
    assert messages == []
    folder = tmp_path / "cut/tiny"  # only a lease
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "lease.json").write_text(json.dumps(DEAD_LEASE))
    claim(tiny, folder, *RESUME_TEXT)
    assert (folder / "config.yaml").exists()


@pytest.mark.parametrize("has_lease", [True, False])
@pytest.mark.parametrize("lost_files", ["config.yaml", "config.yaml and metrics.jsonl"])
def test_missing_config_does_not_restart_the_run(
    tiny, in_repository, stopped_run, has_lease, lost_files
):
    """Also if the lease of a killed run is still there."""
    for name in lost_files.split(" and "):
        (stopped_run / name).unlink()
    if has_lease:
        (stopped_run / "lease.json").write_text(json.dumps(DEAD_LEASE))
    for overrides in (RESUME_TEXT, RESUME_TEXT[:1]):  # with and without resume=auto
        with pytest.raises(RunDirError, match=r"config\.yaml is gone: restore it"):
            claim(tiny, stopped_run, *overrides)
    assert (stopped_run / "checkpoints/step-000004").is_dir()
    assert not (stopped_run / "config.yaml").exists()
