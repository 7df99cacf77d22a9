"""An exported directory loads where `lm` does not exist, and computes what the checkpoint does."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoTokenizer

from lm.evaluation.facade import generate
from lm.evaluation.generate import GenerationError, load_exported
from lm.export.export import ExportError, export
from lm.runs.checkpoint import newest
from lm.runs.places import PlaceError
from lm.training.reshard import consolidated

ELSEWHERE = """
import importlib.util, json, sys
assert importlib.util.find_spec("lm") is None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = tokenizer("Mary went to the kitchen.", return_tensors="pt")["input_ids"]
text = tokenizer.decode(ids[0])
new = model.generate(ids, max_new_tokens=3, do_sample=False)
print(json.dumps([type(model).__module__, text, new.shape[1] - ids.shape[1],
                  model(ids).logits.double().sum().item()]))
"""


def test_loads_in_a_process_where_lm_is_not_importable(tiny_export, tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env.update(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf"), OMP_NUM_THREADS="1")
    # -P keeps the working directory off the path; a finder hides an editable install.
    hide = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in str(f)]\n"
    hide += "sys.path[:] = [p for p in sys.path if not __import__('os').path.isdir(p + '/lm')]\n"
    done = subprocess.run(
        [sys.executable, "-P", "-c", hide + ELSEWHERE, str(tiny_export)], cwd=tmp_path, env=env,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    module, text, new, total = json.loads(done.stdout.splitlines()[-1])
    assert module.startswith("transformers_modules") and text == "Mary went to the kitchen."
    assert new == 3
    model, tokenizer = load_exported(tiny_export)
    ids = tokenizer("Mary went to the kitchen.", return_tensors="pt")["input_ids"]
    assert model(ids).logits.double().sum().item() == pytest.approx(total, rel=1e-6)


def test_exported_weights_are_the_checkpoints(tiny_run, tiny_export):
    state = consolidated(newest(tiny_run / "checkpoints"))
    model, _ = load_exported(tiny_export)
    for name, tensor in model.state_dict().items():
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


def test_export_again_replaces_but_never_deletes_something_else(tiny_run, tmp_path):
    out = tmp_path / "out"
    export(tiny_run, out)
    (out / "stale.txt").write_text("old")
    export(tiny_run, out, newest(tiny_run / "checkpoints"))
    assert not (out / "stale.txt").exists() and (out / "model.safetensors").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(ExportError, match="is not empty and holds no earlier export"):
        export(tiny_run, other)
    assert (other / "thesis.txt").exists()
    with pytest.raises(ExportError, match="holds no run"):
        export(tmp_path, tmp_path / "new")


def test_generation_is_seeded_and_refuses_bad_input(tiny_export, tmp_path):
    texts = [generate(tiny_export, "Mary", max_new_tokens=5, seed=s) for s in (0, 0, 1, 2, 3)]
    assert texts[0] == texts[1] and len(set(texts)) > 1
    assert texts[0].startswith("Mary")
    assert generate(tiny_export, "Mary", max_new_tokens=5, temperature=0) == generate(
        tiny_export, "Mary", max_new_tokens=5, temperature=0, seed=9
    )
    with pytest.raises(GenerationError, match="the prompt is empty"):
        generate(tiny_export, "")
    with pytest.raises(PlaceError, match=r"holds neither a run \(config.yaml\) nor an export"):
        generate(tmp_path, "Mary")
