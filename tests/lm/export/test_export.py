"""Exports: they load without fprnn, match the checkpoint, and replace only their own files."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from lm.common.files import OutputError
from lm.evaluation.language_model import load
from lm.export.export import ExportError, export, identify_run
from lm.export.folder import draft_folder, publish, write_record
from lm.runs.checkpoint import find_newest_checkpoint
from lm.training.reshard import consolidate_weights
from tests.running import run_alone

LOAD_AND_GENERATE = """
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = tokenizer("Mary went to the kitchen.", return_tensors="pt")["input_ids"]
text = tokenizer.decode(ids[0])
new = model.generate(ids, max_new_tokens=3, do_sample=False)
print(json.dumps([type(model).__module__, text, new.shape[1] - ids.shape[1],
                  model(ids).logits.double().sum().item()]))
"""


def write_file(folder, name, text=""):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_export_loads_without_fprnn(tiny_export, tmp_path):
    done = run_alone(LOAD_AND_GENERATE, tiny_export, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    module, text, new_tokens, logit_sum = json.loads(done.stdout.splitlines()[-1])
    assert module.startswith("transformers_modules") and text == "Mary went to the kitchen."
    assert new_tokens == 3
    loaded = load(tiny_export)
    ids = loaded.tokenizer("Mary went to the kitchen.", return_tensors="pt")["input_ids"]
    assert loaded.model(ids).logits.double().sum().item() == pytest.approx(logit_sum, rel=1e-6)


def test_exported_weights_equal_the_checkpoint(tiny_run, tiny_export):
    state = consolidate_weights(find_newest_checkpoint(tiny_run / "checkpoints"))
    for name, tensor in load(tiny_export).model.state_dict().items():
        assert torch.equal(tensor.cpu(), state[name]), name


def test_export_has_no_absolute_paths_and_leaves_no_drafts(tiny_run, tiny_export):
    text = (tiny_export / "config.json").read_text() + (tiny_export / "README.md").read_text()
    assert str(tiny_run) not in text
    assert not list(tiny_run.glob(".hf-*"))


def test_all_files_have_the_same_permissions(tiny_export):
    modes = {file.name: file.stat().st_mode & 0o777 for file in tiny_export.iterdir()}
    assert "model.safetensors" in modes and len(set(modes.values())) == 1, modes


def test_tokenizer_has_the_length_of_the_model(tiny_export):
    length = json.loads((tiny_export / "config.json").read_text())["max_position_embeddings"]
    assert AutoTokenizer.from_pretrained(tiny_export).model_max_length == length


def test_second_export_replaces_only_exported_files(tiny_run, tmp_path):
    out = tmp_path / "out"
    export(tiny_run, out)
    names = {path.name for path in out.iterdir()}
    other_files = {"eval/results.json": "{}", "inspect.html": "page", ".git/HEAD": "main"}
    for name, text in other_files.items():
        write_file(out, name, text)
    (out / "model.safetensors").write_bytes(b"")
    export(tiny_run, out, find_newest_checkpoint(tiny_run / "checkpoints"))
    assert (out / "model.safetensors").stat().st_size and load(out)
    assert {name: (out / name).read_text() for name in other_files} == other_files
    other_names = {name.split("/")[0] for name in other_files}
    assert {path.name for path in out.iterdir()} == names | other_names


def test_second_export_deletes_stale_files(small_export, tmp_path):
    out = Path(shutil.copytree(small_export, tmp_path / "out"))
    new = Path(shutil.copytree(small_export, tmp_path / "new"))
    (new / "tokenizer.json").unlink()
    write_record(new, {"name": "small"})
    publish(new, out)
    assert not (out / "tokenizer.json").exists() and (out / "config.json").exists()


@pytest.mark.parametrize(
    "files", [("thesis.txt",), ("config.json", ".git/HEAD"), ("config.json", "model.safetensors")]
)
def test_folder_with_other_files_is_refused(tiny_run, tmp_path, files):
    other = tmp_path / "other"
    for name in files:
        write_file(other, name, "{}")
    for overwrite in (False, True):
        with pytest.raises(ExportError, match="is not empty and holds no earlier export"):
            export(tiny_run, other, overwrite=overwrite)
    assert all((other / name).read_text() == "{}" for name in files)


def test_conflicting_file_of_the_user_is_refused(small_export, tmp_path):
    out = Path(shutil.copytree(small_export, tmp_path / "out"))
    new = Path(shutil.copytree(small_export, tmp_path / "new"))
    write_file(new, "chat_template.jinja", "new")
    write_record(new, {"name": "small"})
    write_file(out, "chat_template.jinja", "mine")
    with pytest.raises(ExportError, match=r"chat_template\.jinja that no export wrote"):
        publish(new, out)
    assert (out / "chat_template.jinja").read_text() == "mine"


def test_another_runs_export_needs_overwrite(tiny_run, small_export, tmp_path):
    out = Path(shutil.copytree(small_export, tmp_path / "out"))
    write_file(out, "eval/results.json", "{}")
    write_file(out, "notes.txt", "mine")
    old_weights = (out / "model.safetensors").read_bytes()
    with pytest.raises(ExportError, match=r"another run, `small`.*--overwrite"):
        export(tiny_run, out)
    assert (out / "model.safetensors").read_bytes() == old_weights
    export(tiny_run, out, overwrite=True)
    assert (out / "model.safetensors").read_bytes() != old_weights
    assert (out / "notes.txt").is_file()
    assert not (out / "eval/results.json").exists()  # it belonged to the other run


def test_results_of_previous_weights_are_kept_with_a_note(tiny_run, tmp_path, capsys):
    out = export(tiny_run, tmp_path / "out", tiny_run / "checkpoints/step-000004")
    write_file(out, "eval/results.json", "{}")
    export(tiny_run, out)
    note = capsys.readouterr().err
    assert "eval/results.json in" in note and "was measured on the previous weights" in note


def test_run_identity_depends_on_fixed_settings(tiny):
    run = identify_run(tiny())
    assert identify_run(tiny("out_dir=elsewhere", "train.steps=99", "log.every=7")) == run
    assert all(identify_run(tiny(key)) != run for key in ("name=b", "seed=1", "model.d_state=8"))


def test_edited_card_is_replaced_only_with_overwrite(tiny_run, tmp_path):
    out = tmp_path / "out"
    card = export(tiny_run, out) / "README.md"
    text = card.read_text()
    export(tiny_run, out)
    card.write_text(text + "\nMy own words.\n")
    with pytest.raises(ExportError, match=r"README\.md was changed"):
        export(tiny_run, out)
    assert card.read_text().endswith("My own words.\n")
    export(tiny_run, out, overwrite=True)
    assert "My own words" not in card.read_text()


def test_export_after_a_killed_export_completes_it(small_export, tmp_path, monkeypatch):
    out = Path(shutil.copytree(small_export, tmp_path / "out"))
    write_file(out, "notes.txt", "mine")
    replace, count = os.replace, 0

    def fail_at_third_file(source, target):
        nonlocal count
        if Path(target).parent == out and not Path(target).name.startswith("."):
            count += 1
            if count == 3:
                raise KeyboardInterrupt
        replace(source, target)

    new = Path(shutil.copytree(small_export, tmp_path / "new"))
    monkeypatch.setattr(os, "replace", fail_at_third_file)
    with pytest.raises(KeyboardInterrupt):
        publish(new, out)
    monkeypatch.undo()
    publish(Path(shutil.copytree(small_export, tmp_path / "again")), out)
    names = {path.name for path in small_export.iterdir()}
    assert {path.name for path in out.iterdir()} == names | {"notes.txt"}


def test_drafts_of_killed_exports_are_deleted(tmp_path):
    write_file(tmp_path, ".out-abcd1234/export/config.json")
    write_file(tmp_path, ".out-backup/config.json")
    write_file(tmp_path, ".out-20261127/config.json")
    with draft_folder(tmp_path / "out"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out-20261127", ".out-backup"]


def test_export_of_a_missing_run_is_refused(tmp_path):
    with pytest.raises(ExportError, match="holds no run"):
        export(tmp_path, tmp_path / "new")


@pytest.mark.parametrize("url", ["https://huggingface.co/me/model", "s3://bucket/model"])
def test_url_as_folder_is_refused(tiny_run, tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError, match="is not on this machine"):
        export(tiny_run, url)
    assert not list(tmp_path.iterdir())
