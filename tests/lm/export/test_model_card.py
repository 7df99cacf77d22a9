"""Model card: facts from the run's files, an example that runs, and front matter for the hub."""

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


def read_card(folder) -> ModelCard:
    return ModelCard((folder / "README.md").read_text(encoding="utf-8"))


def find_section(text: str, title: str) -> str:
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0].strip()


def find_example(folder) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", read_card(folder).text, re.S)
    return code


def test_example_of_the_card_runs_in_its_folder(tiny_export, tmp_path):
    done = run_alone(find_example(tiny_export), cwd=tiny_export, HF_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("The following")


def test_card_shows_the_facts_of_the_run_files(tiny_run, tmp_path):
    out = export(tiny_run, tmp_path / "hf", licence="cc-by-4.0")
    card, result = read_card(out), json.loads((tiny_run / "result.json").read_text())
    assert card.data.license == "cc-by-4.0" and card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["fprnn", "fixed-point-rnn"] and card.data.datasets is None
    text = card.text
    assert f"{result['parameters']:,} parameters" in find_section(text, "The model")
    updates = f"8 of 8 updates with 4 sequences each, {result['tokens']:,} tokens in all"
    assert updates in find_section(text, "Training")
    scores = result["validation"]
    validation = find_section(text, "Validation")
    assert f": {scores['perplexity']:.3f} on {scores['tokens']:,} tokens" in validation
    assert f"Bits per byte: {scores['bits_per_byte']:.4f}" in validation
    training = find_section(text, "Training")
    assert "- 1 rank; " in training
    assert "path: tiny.jsonl" in training and "lr: 0.01" in training and str(ROOT) not in text
    means = re.findall(r"([\d.]+)†? \(layer \d+\)", validation)
    assert means == [f"{mean:.1f}" for mean in result["probe"]["num_iters"]["mean"]]
    assert model_card.PAPER_URL in find_section(text, "Paper") and "Weights: cc-by-4.0" in text


def test_card_of_an_earlier_checkpoint_has_its_numbers_only(tiny_run, tmp_path):
    text = read_card(export(tiny_run, tmp_path / "hf", tiny_run / "checkpoints/step-000004")).text
    assert "4 of 8 updates with 4 sequences each, 256 tokens" in find_section(text, "Training")
    assert find_section(text, "Validation") == "This checkpoint was not validated."
    assert read_card(tmp_path / "hf").data.license == "unknown" and "Weights: unknown" in text


def test_card_counts_tokens_after_a_change_of_ranks(tmp_path, tiny):
    """The run was continued on fewer ranks with larger micro-batches."""
    cfg = tiny("train.global_batch_size=4", "train.grad_accum_steps=null")
    manifest = {"step": 3, "world_size": 4, "global_batch_size": 4}
    lines = model_card.read_facts(RunDir(tmp_path), cfg, manifest).training
    assert "3 of 8 updates with 4 sequences each, 192 tokens" in lines[0]


def test_run_with_missing_or_damaged_files_has_a_card(tiny_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run, ignore=shutil.ignore_patterns("hf"))
    (run / "metrics.jsonl").write_text('{"step": 8, "validation": 3, "probe": {"num_iters": 0}}')
    (run / "environment.json").unlink()
    (run / "result.json").write_text("[")
    text = read_card(export(run, tmp_path / "hf")).text
    assert "This checkpoint was not validated." in text and "unknown hardware" in text


def test_card_of_a_baseline_cites_no_paper(tmp_path):
    config = FPRNNConfig(vocab_size=16, d_model=8, n_layer=1, d_state=2, layers="mamba")
    model = FPRNNForCausalLM(config)
    out = write_export(model, tmp_path / "hf", tokenizer=None, name="x", origin="From elsewhere.")
    text = read_card(out).text
    assert "From elsewhere." in text and "Paper" not in text and "## Training" not in text


def test_requirements_are_the_dependencies_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert list(model_card.REQUIREMENTS) == project["dependencies"]


def test_paths_of_a_configuration_lose_their_folders():
    """Even globs and folders that are not on this machine."""
    config = {
        "data": {"path": "data/code/*.jsonl", "cache_dir": "my/cache"},
        "tokenizer": {"name": "runs/first/tokenizer"},
    }
    assert model_card._strip_folders(config) == {
        "data": {"path": "*.jsonl", "cache_dir": "cache"},
        "tokenizer": {"name": "tokenizer"},
    }
    assert model_card._strip_folders({"name": "EleutherAI/gpt-neox-20b"}) == {
        "name": "EleutherAI/gpt-neox-20b"
    }
