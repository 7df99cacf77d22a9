"""Sampling: the cache, one seed one text, refusals; a model of transformers, damaged folders."""

import shutil

import pytest

from lm.cli.main import main
from lm.evaluation.language_model import LanguageModelError, load
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.runs.exported import LoadError
from lm.runs.path_checks import PathError


def test_generate_samples_by_seed_and_uses_the_cache(small_export, monkeypatch, capsys):
    calls, plain = [], FPRNNForCausalLM.generate

    def spy(self, **kwargs):
        calls.append(kwargs)
        return plain(self, **kwargs)

    monkeypatch.setattr(FPRNNForCausalLM, "generate", spy)
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
        load(tmp_path / "nowhere").generate("Mary")
    with pytest.raises(PathError, match=r"holds neither a run \(config.yaml\) nor an export"):
        load(tmp_path).generate("Mary")
    other = tmp_path / "other"
    shutil.copytree(byte_tokenizer, other)
    config = GPT2Config(vocab_size=264, n_embd=8, n_layer=1, n_head=1)
    GPT2LMHeadModel(config).save_pretrained(other)
    assert load(other).generate("Mary", max_new_tokens=2).startswith("Mary")
    bare = tmp_path / "bare"
    shutil.copytree(byte_tokenizer, bare)
    (bare / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(LoadError, match="cannot load"):
        load(bare).generate("Mary")
    (bare / "tokenizer.json").unlink()
    (bare / "tokenizer_config.json").unlink()
    with pytest.raises(LanguageModelError, match="has no tokenizer"):
        load(bare).generate("Mary")
