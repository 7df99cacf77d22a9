"""The model card: what it says is what the run's files say, its snippet runs, the hub reads it."""

import json
import re
import shutil
import tomllib

import pytest
import torch
from huggingface_hub import ModelCard

from lm.config.data import Data, Traces
from lm.export import model_card
from lm.export.export import ExportError, export, write_export
from lm.export.measured import BEGIN, END, NOTHING_MEASURED, add_measured
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.runs.run_dir import RunDir
from tests.running import run_alone
from tests.test_layers import ROOT


def read(folder) -> ModelCard:
    return ModelCard((folder / "README.md").read_text(encoding="utf-8"))


def section(text: str, title: str) -> str:
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0].strip()


def snippet(folder) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", read(folder).text, re.S)
    return code


def test_the_snippet_runs_where_the_card_lies(tiny_export, tmp_path):
    done = run_alone(snippet(tiny_export), cwd=tiny_export, HF_HOME=str(tmp_path))
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
    said = model_card._source(Data(source="traces", traces=Traces(group="A5", letters=6, gaps=4)))
    assert said.startswith("traces, made by fprnn (group A5, form words, gaps 4, letters 6, ")


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
