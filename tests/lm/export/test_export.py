"""An exported directory loads where `lm` does not exist, and computes what the checkpoint does."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from lm.common.files import OutputError
from lm.evaluation.facade import load
from lm.export.export import ExportError, export, run_identity
from lm.export.folder import check_place, draft, publish, write_record
from lm.runs.checkpoint import newest
from lm.runs.written import EXPORT_RECORD, export_files
from lm.training.reshard import consolidated
from tests.running import run_alone

ELSEWHERE = """
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = tokenizer("Mary went to the kitchen.", return_tensors="pt")["input_ids"]
text = tokenizer.decode(ids[0])
new = model.generate(ids, max_new_tokens=3, do_sample=False)
print(json.dumps([type(model).__module__, text, new.shape[1] - ids.shape[1],
                  model(ids).logits.double().sum().item()]))
"""


def put(folder, name, text=""):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_loads_in_a_process_where_lm_is_not_importable(tiny_export, tmp_path):
    done = run_alone(ELSEWHERE, tiny_export, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    module, text, new, total = json.loads(done.stdout.splitlines()[-1])
    assert module.startswith("transformers_modules") and text == "Mary went to the kitchen."
    assert new == 3
    ours = load(tiny_export)
    ids = ours.tokenizer("Mary went to the kitchen.", return_tensors="pt")["input_ids"]
    assert ours.model(ids).logits.double().sum().item() == pytest.approx(total, rel=1e-6)


def test_exported_weights_are_the_checkpoints(tiny_run, tiny_export):
    state = consolidated(newest(tiny_run / "checkpoints"))
    for name, tensor in load(tiny_export).model.state_dict().items():
        assert torch.equal(tensor.cpu(), state[name]), name


def test_only_relative_paths_and_no_leftovers(tiny_run, tiny_export):
    text = (tiny_export / "config.json").read_text() + (tiny_export / "README.md").read_text()
    assert str(tiny_run) not in text
    assert not list(tiny_run.glob(".hf-*"))


def test_whoever_reads_one_file_reads_all(tiny_export):
    modes = {file.name: file.stat().st_mode & 0o777 for file in tiny_export.iterdir()}
    assert "model.safetensors" in modes and len(set(modes.values())) == 1, modes


def test_the_tokenizer_says_the_models_length(tiny_export):
    length = json.loads((tiny_export / "config.json").read_text())["max_position_embeddings"]
    assert AutoTokenizer.from_pretrained(tiny_export).model_max_length == length


def test_export_again_replaces_its_files_and_keeps_all_others(tiny_run, tmp_path):
    out = tmp_path / "out"
    export(tiny_run, out)
    names = {path.name for path in out.iterdir()}
    kept = {"eval/results.json": "{}", "inspect.html": "page", ".git/HEAD": "main", "notes.txt": ""}
    for name, text in kept.items():
        put(out, name, text)
    (out / "model.safetensors").write_bytes(b"")
    export(tiny_run, out, newest(tiny_run / "checkpoints"))
    assert (out / "model.safetensors").stat().st_size and load(out)
    assert {name: (out / name).read_text() for name in kept} == kept
    assert {path.name for path in out.iterdir()} == names | {name.split("/")[0] for name in kept}


def test_export_again_drops_a_file_that_the_new_one_lacks(small_export, tmp_path):
    out = Path(shutil.copytree(small_export, tmp_path / "out"))
    shutil.rmtree(out.parent / "new", ignore_errors=True)
    new = Path(shutil.copytree(small_export, tmp_path / "new"))
    (new / "tokenizer.json").unlink()
    write_record(new, {"name": "small"})
    publish(new, out)
    assert not (out / "tokenizer.json").exists() and (out / "config.json").exists()


@pytest.mark.parametrize("files", [("thesis.txt",), ("config.json", "notes.txt", ".git/HEAD"),
                                   ("config.json", "model.safetensors")])  # fmt: skip
def test_a_folder_that_is_no_export_is_refused(tiny_run, tmp_path, files):
    other = tmp_path / "other"
    for name in files:
        put(other, name, "{}")
    for overwrite in (False, True):
        with pytest.raises(ExportError, match="is not empty and holds no earlier export"):
            export(tiny_run, other, overwrite=overwrite)
    assert all((other / name).read_text() == "{}" for name in files)


def test_a_file_in_the_place_of_one_of_the_export_is_refused(small_export, tmp_path):
    out = Path(shutil.copytree(small_export, tmp_path / "out"))
    new = Path(shutil.copytree(small_export, tmp_path / "new"))
    put(new, "chat_template.jinja", "new")
    write_record(new, {"name": "small"})
    put(out, "chat_template.jinja", "mine")
    with pytest.raises(ExportError, match=r"chat_template\.jinja that no export wrote"):
        publish(new, out)
    assert (out / "chat_template.jinja").read_text() == "mine"


def test_the_export_of_another_run_is_replaced_only_with_overwrite(
    tiny_run, small_export, tmp_path
):
    out = Path(shutil.copytree(small_export, tmp_path / "out"))
    put(out, "eval/results.json", "{}")
    put(out, "notes.txt", "mine")
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(ExportError, match=r"another run, `small`.*--overwrite"):
        export(tiny_run, out)
    assert (out / "model.safetensors").read_bytes() == before
    export(tiny_run, out, overwrite=True)
    assert (out / "model.safetensors").read_bytes() != before and (out / "notes.txt").is_file()
    assert not (out / "eval/results.json").exists()  # of the other run


def test_other_weights_are_exported_next_to_old_results_with_a_note(tiny_run, tmp_path, capsys):
    out = export(tiny_run, tmp_path / "out", tiny_run / "checkpoints/step-000004")
    put(out, "eval/results.json", "{}")
    export(tiny_run, out)
    assert "eval/results.json in" in (said := capsys.readouterr().err) and "weights before" in said


def test_a_run_is_another_by_what_it_was_trained_with(tiny):
    same = run_identity(tiny())
    assert run_identity(tiny("out_dir=elsewhere", "train.steps=99", "log.every=7")) == same
    assert all(run_identity(tiny(key)) != same for key in ("name=b", "seed=1", "model.d_state=8"))


def test_a_card_that_a_person_has_changed_is_not_replaced(tiny_run, tmp_path):
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


def test_an_export_of_an_earlier_version_is_known(small_export, tmp_path):
    out = Path(shutil.copytree(small_export, tmp_path / "out"))
    expected = {path.name for path in out.iterdir()} - {EXPORT_RECORD}
    (out / EXPORT_RECORD).unlink()
    put(out, "train.py", "mine")
    assert export_files(out) == expected
    check_place(out, {"name": "small", "seed": 0}, overwrite=False)
    with pytest.raises(ExportError, match="another run, `small`"):
        check_place(out, {"name": "other", "seed": 0}, overwrite=False)
    (out / "SHA256SUMS").unlink()
    with pytest.raises(ExportError, match="holds no earlier export"):
        check_place(out, {"name": "small", "seed": 0}, overwrite=False)


def test_a_kill_amid_a_second_export_leaves_what_the_third_replaces(
    small_export, tmp_path, monkeypatch
):
    out = Path(shutil.copytree(small_export, tmp_path / "out"))
    put(out, "notes.txt", "mine")
    replace, count = os.replace, 0

    def fail_at_third(source, place):
        nonlocal count
        if Path(place).parent == out and not Path(place).name.startswith("."):
            count += 1
            if count == 3:
                raise KeyboardInterrupt
        replace(source, place)

    new = Path(shutil.copytree(small_export, tmp_path / "new"))
    monkeypatch.setattr(os, "replace", fail_at_third)
    with pytest.raises(KeyboardInterrupt):
        publish(new, out)
    monkeypatch.undo()
    publish(Path(shutil.copytree(small_export, tmp_path / "again")), out)
    assert {path.name for path in out.iterdir()} == {
        *(path.name for path in small_export.iterdir()), "notes.txt"
    }  # fmt: skip


def test_a_draft_of_a_killed_export_goes_and_a_folder_of_such_a_name_stays(tmp_path):
    put(tmp_path, ".out-abcd1234/export/config.json")
    put(tmp_path, ".out-backup/config.json")
    put(tmp_path, ".out-20261127/config.json")
    with draft(tmp_path / "out"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out-20261127", ".out-backup"]


def test_a_run_must_be_there(tmp_path):
    with pytest.raises(ExportError, match="holds no run"):
        export(tmp_path, tmp_path / "new")


@pytest.mark.parametrize("place", ["https://huggingface.co/me/model", "s3://bucket/model"])
def test_a_url_is_no_folder(tiny_run, tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError, match="is not on this machine"):
        export(tiny_run, place)
    assert not list(tmp_path.iterdir())
