"""The model card: what it says is what the run's files say, its snippet runs, the hub reads it."""

import json
import re
import shutil
import tomllib

from huggingface_hub import ModelCard

from lm.export import model_card
from lm.export.export import export, write_export
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
    training = section(text, "Training")
    assert "path: tiny.jsonl" in training and "lr: 0.01" in training and str(ROOT) not in text
    means = re.findall(r"([\d.]+)†? \(layer \d+\)", validation)
    assert means == [f"{mean:.1f}" for mean in result["probe"]["num_iters"]["mean"]]
    assert model_card.PAPER in section(text, "Paper") and "Weights: cc-by-4.0" in text


def test_another_checkpoint_has_its_own_numbers_and_no_others(tiny_run, tmp_path):
    text = read(export(tiny_run, tmp_path / "hf", tiny_run / "checkpoints/step-000004")).text
    assert "4 of 8 updates, 256 tokens" in section(text, "Training")
    assert section(text, "Validation") == "Not validated at this update."
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
    text = read(export(run, tmp_path / "hf")).text
    assert "Not validated at this update." in text and "on what hardware is not known" in text


def test_a_model_that_is_not_the_papers_has_no_paper(tmp_path):
    config = FPRNNConfig(vocab_size=16, d_model=8, n_layer=1, d_state=2, layers="mamba")
    out = write_export(FPRNNForCausalLM(config), tmp_path / "hf", None, "mine", "From elsewhere.")
    text = read(out).text
    assert "From elsewhere." in text and "Paper" not in text and "## Training" not in text


def test_the_versions_needed_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert list(model_card.NEEDED) == project["dependencies"]
