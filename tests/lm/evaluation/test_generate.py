"""Generation: cache, seeds, models of transformers, and damaged folders."""

import shutil

import pytest

from lm.cli.main import main
from lm.evaluation.language_model import LanguageModelError, load
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.runs.exported import LoadError
from lm.runs.path_checks import PathError


def test_generate_samples_by_seed_and_uses_the_cache(small_export, monkeypatch, capsys):
    calls, generate = [], FPRNNForCausalLM.generate

    def record_call(self, **kwargs):
        calls.append(kwargs)
        return generate(self, **kwargs)

    monkeypatch.setattr(FPRNNForCausalLM, "generate", record_call)
    texts = [load(small_export).generate("Mary", max_new_tokens=6, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    options = ["--temperature", "0", "--max-new-tokens", "2"]
    assert main(["generate", str(small_export), "--prompt", "Mary", *options]) == 0
    assert capsys.readouterr().out.startswith("Mary")
    assert all(kwargs["use_cache"] is True for kwargs in calls)
    assert [kwargs["do_sample"] for kwargs in calls] == [True, True, True, False]


def test_foreign_models_generate_and_bad_folders_are_refused(tmp_path, byte_tokenizer):
    from transformers import GPT2Config, GPT2LMHeadModel

    with pytest.raises(PathError, match="nowhere: no such folder; give a run or an export"):
        load(tmp_path / "nowhere")
    with pytest.raises(PathError, match=r"holds neither a run \(config.yaml\) nor an export"):
        load(tmp_path)
    gpt2 = tmp_path / "gpt2"
    shutil.copytree(byte_tokenizer, gpt2)
    config = GPT2Config(vocab_size=264, n_embd=8, n_layer=1, n_head=1)
    GPT2LMHeadModel(config).save_pretrained(gpt2)
    assert load(gpt2).generate("Mary", max_new_tokens=2).startswith("Mary")
    unknown = tmp_path / "unknown"
    shutil.copytree(byte_tokenizer, unknown)
    (unknown / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(LoadError, match="cannot load"):
        load(unknown)
    (unknown / "tokenizer.json").unlink()
    (unknown / "tokenizer_config.json").unlink()
    with pytest.raises(LanguageModelError, match="has no tokenizer"):
        load(unknown)
