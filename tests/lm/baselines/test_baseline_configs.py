"""The configurations of our own baselines: defaults, names, and what comes back from a file."""

import pytest
import torch

from lm.baselines.causal_lm import BaselineConfig
from lm.baselines.deltanet import DeltaNetConfig
from lm.baselines.lstm import LSTMConfig, LSTMForCausalLM


class PlainConfig(BaselineConfig):
    """One without an __init__ of its own, and one below it."""

    model_type = "test_plain"


class PlainerConfig(PlainConfig):
    model_type = "test_plainer"


every_config = pytest.mark.parametrize(
    "cls", [LSTMConfig, DeltaNetConfig, PlainConfig, PlainerConfig]
)


@every_config
def test_a_config_has_every_default(cls):
    config = cls(vocab_size=10)
    assert config.vocab_size == 10 and cls().vocab_size == 50280
    assert (config.d_model, config.n_layer, config.norm_epsilon) == (768, 12, 1e-5)
    assert config.tie_embeddings is config.tie_word_embeddings is True
    assert config.max_position_embeddings == 2048
    assert config.pad_token_id is config.bos_token_id is config.eos_token_id is None
    assert (config.hidden_size, config.num_hidden_layers) == (768, 12)


@every_config
def test_a_config_comes_back_from_a_file(cls, tmp_path):
    fields = dict(
        vocab_size=11, d_model=24, n_layer=3, norm_epsilon=1e-3, tie_embeddings=False,
        max_position_embeddings=64, eos_token_id=5,
    )  # fmt: skip
    cls(**fields).save_pretrained(tmp_path)
    loaded = cls.from_pretrained(tmp_path)
    assert {name: getattr(loaded, name) for name in fields} == fields
    assert loaded.model_type == cls.model_type and loaded.tie_word_embeddings is False


def test_an_lstm_is_built_from_the_sizes_alone(tmp_path):
    model = LSTMForCausalLM(LSTMConfig(vocab_size=10, d_model=8, n_layer=2)).eval()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    model.save_pretrained(tmp_path)
    loaded, tokens = LSTMForCausalLM.from_pretrained(tmp_path).eval(), torch.arange(6).unsqueeze(0)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
