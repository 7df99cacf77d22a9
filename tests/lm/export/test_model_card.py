"""The model card: what it says is what the run's files say, its snippet runs, the hub reads it."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from lm.cli.main import main
from lm.config.data import Data, Traces
from lm.export import model_card, push
from lm.export.export import ExportError, export, write_export
from lm.export.measured import BEGIN, END, NOTHING_MEASURED, add_measured
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.runs.run_dir import RunDir
from lm.runs.written import EXPORT_RECORD
from tests.test_layers import ROOT


def read(folder) -> ModelCard:
    return ModelCard((folder / "README.md").read_text(encoding="utf-8"))


def section(text: str, title: str) -> str:
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0].strip()


def snippet(folder) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", read(folder).text, re.S)
    return code


def test_the_snippet_runs_where_the_card_lies(tiny_export, tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", snippet(tiny_export)], cwd=tiny_export, env=env,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("The following")


def test_the_card_of_a_run_says_what_its_files_say(tiny_run, tmp_path):
    out = export(tiny_run, tmp_path / "hf", licence="cc-by-4.0")
    found, result = read(out), json.loads((tiny_run / "result.json").read_text())
    assert found.data.license == "cc-by-4.0" and found.data.library_name == "transformers"
    assert found.data.pipeline_tag == "text-generation"
    assert found.data.tags == ["fprnn", "fixed-point-rnn"] and found.data.datasets is None
    text = found.text
    assert f"{result['parameters']:,} parameters" in section(text, "The model")
    assert f"8 of 8 updates, {result['tokens']:,} tokens" in section(text, "Training")
    scores = result["validation"]
    validation = section(text, "Validation")
    assert f"perplexity {scores['perplexity']:.3f} a token on {scores['tokens']:,}" in validation
    assert f"{scores['bits_per_byte']:.4f} bits per byte" in validation
    corpus = json.loads((tiny_run / "data/corpus.json").read_text())
    data = section(text, "Data")
    assert corpus["sha256"]["train.bin"] in data and f"{corpus['tokens']:,} tokens" in data
    assert "`tiny.jsonl`" in data and str(ROOT) not in text
    means = re.findall(r"([\d.]+)†? \(layer \d+\)", validation)
    assert means == [f"{mean:.1f}" for mean in result["probe"]["num_iters"]["mean"]]
    assert model_card.PAPER in section(text, "Paper") and "Weights: cc-by-4.0" in text


def test_traces_are_named_with_all_that_makes_them():
    said = [
        model_card._source(Data(source="traces", traces=traces))
        for traces in (None, Traces(group="A5", letters=6, gaps=4), Traces(form="repl"))
    ]
    assert said == [
        "traces of the group S3 (words, gaps of 1), made by fprnn",
        "traces of the group A5 (words of 6 elements, gaps of up to 4), made by fprnn",
        "traces of the group S3 (repl, gaps of 1), made by fprnn",
    ]


def test_another_checkpoint_has_its_own_numbers_and_no_others(tiny_run, tmp_path):
    text = read(export(tiny_run, tmp_path / "hf", tiny_run / "checkpoints/step-000004")).text
    assert "4 of 8 updates, 256 tokens" in section(text, "Training")
    assert section(text, "Validation") == "Not validated at this update."
    assert "seconds" not in section(text, "Training")
    assert read(tmp_path / "hf").data.license == "unknown" and "has not said" in text


def test_a_checkpoint_of_other_ranks_than_the_config_can_have_keeps_its_count(tmp_path, tiny):
    """Such a run was continued on fewer ranks with larger micro-batches."""
    cfg = tiny("train.global_batch_size=4", "train.grad_accum_steps=null")
    manifest = {"step": 3, "world_size": 4, "global_batch_size": 4}
    lines = model_card.of_run(RunDir(tmp_path), cfg, manifest).training
    assert "3 of 8 updates, 192 tokens: 4 sequences" in lines[0]


def test_a_run_whose_files_are_gone_or_spoilt_still_has_a_card(tiny_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run, ignore=shutil.ignore_patterns("hf"))
    (run / "metrics.jsonl").write_text('{"step": 8, "validation": 3, "probe": {"num_iters": 0}}')
    (run / "environment.json").unlink()
    (run / "result.json").write_text("[")
    (run / "data/corpus.json").write_text('{"documents": "many"}')
    text = read(export(run, tmp_path / "hf")).text
    assert "Not validated at this update." in text and "On what hardware is not known." in text
    assert "sha256" not in text


def test_a_model_that_was_not_trained_here_says_so(tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    config = FPRNNConfig(vocab_size=16, d_model=8, n_layer=1, d_state=2, layers="mamba")
    out = write_export(FPRNNForCausalLM(config), tmp_path / "hf", None, "mine", "From elsewhere.")
    text = read(out).text
    assert "not trained by fprnn" in section(text, "Data")
    assert "not trained by fprnn" in section(text, "Training")
    assert "From elsewhere." in text and "Paper" not in text  # a Mamba is not the paper's
    monkeypatch.chdir(out)
    exec(compile(snippet(out), "card", "exec"), {})
    assert capsys.readouterr().out.startswith("tensor([[ 1,  2,  3, ")


def test_what_is_measured_is_added_and_replaced_and_stays_with_the_same_weights(tiny_run, tmp_path):
    out = export(tiny_run, tmp_path / "hf")
    whole = (out / "README.md").read_text()
    metric = {"value": 0.25, "stderr": 0.1, "higher_is_better": True}
    results = {"limit": 4, "device": "cpu", "versions": {"lm_eval": "0"}, "tasks": {}}
    for value in (0.25, 0.5):
        results["tasks"] = {"t": {"samples": 4, "metrics": {"acc": {**metric, "value": value}}}}
        (out / "eval").mkdir(exist_ok=True)
        (out / "eval/results.json").write_text(json.dumps(results))
        add_measured(out)
    text = (out / "README.md").read_text()
    assert "| t | 4 | acc | 0.5000 | 0.1000 |" in text and "0.2500" not in text
    assert "the first 4 documents" in text
    export(tiny_run, out)
    assert (out / "README.md").read_text() == text
    before, _, after = whole.partition(NOTHING_MEASURED)
    assert text.startswith(before) and text.endswith(after)
    earlier = "Agreement of schedules, by an earlier version:\n\n| a |"
    (out / "README.md").write_text(text.replace(END, f"{earlier}\n{END}"))
    add_measured(out)
    card = (out / "README.md").read_text()
    assert card.count(earlier) == 1 and "| t | 4 | acc | 0.5000 | 0.1000 |" in card
    (out / "README.md").write_text(text)
    (out / "eval/results.json").write_text('{"limit": 3')  # damaged: nothing is made up
    add_measured(out)
    assert (out / "README.md").read_text() == whole
    (out / "README.md").write_text("a card of somebody else")
    add_measured(out)
    assert (out / "README.md").read_text() == "a card of somebody else"
    export(tiny_run, out, overwrite=True)
    assert (out / "README.md").read_text() == whole and BEGIN in whole and END in whole


def test_a_licence_must_be_a_name_of_one(tiny_run, tmp_path):
    with pytest.raises(ExportError, match="`Apache 2` is no name of a licence"):
        export(tiny_run, tmp_path / "hf", licence="Apache 2")
    assert not (tmp_path / "hf").exists()


def test_the_versions_needed_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert list(model_card.NEEDED) == project["dependencies"]


class Hub:
    """What HfApi is to lm/export/push.py; keeps what was asked of it."""

    private: bool | None = None  # of the repository that is there; None: none
    fails = ""
    asked: list

    def whoami(self):
        return {"name": "me"}

    def _answer(self, what, *details):
        self.asked.append((what, *details))
        if self.fails == what:
            raise OSError("the line is dead")

    def model_info(self, name):
        if self.private is None:
            response = type("Response", (), {"headers": {}, "request": None, "status_code": 404})
            raise RepositoryNotFoundError("404", response=response)
        return type("Info", (), {"private": self.private})

    def create_repo(self, name, private, exist_ok):
        self._answer("create_repo", name, private)

    def create_commit(self, name, operations, commit_message):
        self._answer("create_commit", name, {o.path_in_repo: o for o in operations})
        return type("Commit", (), {"commit_url": f"https://hub/{name}/commit/1"})


@pytest.fixture
def hub(monkeypatch):
    fake = type("FakeHub", (Hub,), {"asked": []})
    monkeypatch.setattr("huggingface_hub.HfApi", fake)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_fake")
    return fake


def test_a_push_uploads_the_export_to_a_new_private_repository(hub, tiny_run, tmp_path, capsys):
    out = tmp_path / "hf"
    assert main(["export", str(tiny_run), str(out), "--push", "me/small"]) == 0
    (made, name, private), (_, to, uploaded) = hub.asked
    assert (made, name, private, to) == ("create_repo", "me/small", True, "me/small")
    assert uploaded.keys() == {path.name for path in out.iterdir()} - {EXPORT_RECORD}
    card = uploaded["README.md"].path_or_fileobj.decode()
    assert 'path = "me/small"' in card and 'path = "."' in (out / "README.md").read_text()
    said = capsys.readouterr()
    assert "to the new repository me/small (private)" in said.err
    assert "model.safetensors" in said.err and "as me" in said.err
    assert said.out.splitlines()[-1] == "https://hub/me/small/commit/1"


def test_an_export_is_pushed_as_it_is_without_its_folders(hub, tiny_export, tmp_path):
    out = tmp_path / "hf"
    shutil.copytree(tiny_export, out)
    (out / "eval").mkdir(exist_ok=True)
    (out / "eval/results.json").write_text("{}")
    (out / "inspect.html").write_text("a text of one's own")
    (out / ".env").write_text("HF_TOKEN=…")
    hub.private = True
    assert main(["export", str(out), "--push", "small"]) == 0
    ((_, name, uploaded),) = hub.asked  # the repository is there: none is made
    assert name == "me/small" and "config.json" in uploaded
    assert not any("eval" in file for file in uploaded)
    assert uploaded.keys().isdisjoint({"inspect.html", ".env"})


@pytest.mark.parametrize(
    ("private", "fails", "message"),
    [
        (False, "", "me/small is on the hub already and public: say --public"),
        (None, "create_repo", "cannot be made; nothing was uploaded: the line is dead"),
        (None, "create_commit", "failed; it was made, and is empty: the line is dead"),
        (True, "create_commit", "failed; it is as it was: the line is dead"),
    ],
)
def test_a_push_that_fails_says_what_is_there(hub, tiny_export, capsys, private, fails, message):
    hub.private, hub.fails = private, fails
    assert main(["export", str(tiny_export), "--push", "me/small"]) == 1
    assert message in capsys.readouterr().err
    assert [asked[0] for asked in hub.asked][-1:] == ([fails] if fails else [])


def test_nothing_is_exported_where_it_cannot_be_pushed(tiny_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert main(["export", str(tiny_run), str(tmp_path / "hf"), "--push", "me/small"]) == 1
    assert "no token of the hub" in capsys.readouterr().err and not (tmp_path / "hf").exists()
    assert main(["export", str(tiny_run), "--push", "me/small"]) == 1
    assert "is no export (it has no config.json" in capsys.readouterr().err
    assert main(["export", str(tiny_run), str(tmp_path / "hf"), "--push", "a/b/c"]) == 1
    assert "no name of a repository" in capsys.readouterr().err
    assert main(["export", str(tiny_run)]) == 1
    assert "OUT is missing" in capsys.readouterr().err
    assert main(["export", str(tiny_run), str(tmp_path / "hf"), "--public"]) == 1


def test_only_an_export_is_pushed(hub, tiny_run, tmp_path):
    with pytest.raises(push.PushError, match="is no export"):
        push.push(tiny_run, push.find("me/small"), print)
    assert hub.asked == []


def test_a_refusal_of_the_hub_is_a_sentence(hub, monkeypatch):
    def refuse(self):
        response = type("Response", (), {"headers": {}, "request": None, "status_code": 401})
        raise HfHubHTTPError("401 Unauthorized", response=response)

    monkeypatch.setattr(hub, "whoami", refuse)
    with pytest.raises(push.PushError, match=r"the token is not accepted.*401 Unauthorized"):
        push.find("me/small")
