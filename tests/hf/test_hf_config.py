"""What transformers' ConfigTester checks, for our configs."""

import json

import pytest
import torch
from transformers import AutoConfig

from lm.model.configuration_fprnn import FPRNNConfig
from tests.hf.models import BLOCKS

CASES = {
    **{block: (FPRNNConfig, {"block": block, "d_model": 32, "vocab_size": 99}) for block in BLOCKS},
}
# Settings of every model in transformers, none of which is our default.
COMMON = {
    "return_dict": False,
    "output_hidden_states": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 5,
    "architectures": ["Another"],
    "id2label": {0: "label"},
    "label2id": {"label": "0"},
    "problem_type": "regression",
}
every_config = pytest.mark.parametrize("case", CASES)


@every_config
def test_common_properties_are_there_and_can_be_set(case):
    kind, fields = CASES[case]
    config = kind(**fields)
    assert (config.hidden_size, config.vocab_size) == (32, 99) and config.num_hidden_layers >= 1
    config.hidden_size, config.num_hidden_layers = 48, 3
    assert (config.d_model, config.n_layer) == (48, 3)
    assert kind(**{**fields, "num_hidden_layers": 5}).num_hidden_layers == 5


@every_config
def test_common_settings_are_kept(case):
    config = CASES[case][0](**COMMON)
    for name, value in COMMON.items():
        assert getattr(config, name) == (torch.float16 if name == "dtype" else value), name
    config = CASES[case][0](num_labels=5)
    assert len(config.id2label) == len(config.label2id) == 5
    config.num_labels = 3
    assert len(config.id2label) == len(config.label2id) == 3


@every_config
def test_it_comes_back_from_json_from_a_folder_and_from_a_folder_below(case, tmp_path):
    kind, fields = CASES[case]
    config = kind(**fields, eos_token_id=7)
    assert json.loads(config.to_json_string()).items() >= fields.items()
    config.to_json_file(tmp_path / "one.json")
    assert kind.from_json_file(tmp_path / "one.json").to_dict() == config.to_dict()
    config.save_pretrained(tmp_path / "below")
    assert kind.from_pretrained(tmp_path / "below").to_dict() == config.to_dict()
    assert kind.from_pretrained(tmp_path, subfolder="below").to_dict() == config.to_dict()
    changed = kind.from_pretrained(tmp_path / "below", vocab_size=20)
    assert changed.to_dict() == {**config.to_dict(), "vocab_size": 20}
    with pytest.raises(OSError):
        kind.from_pretrained(f".{tmp_path}")


@every_config
def test_without_arguments_nothing_is_missing_and_nothing_is_said(case, capfd, caplog):
    kind, fields = CASES[case]
    assert kind().to_dict() and kind(**fields).to_dict()
    assert not caplog.records and not capfd.readouterr().err


def test_a_cache_is_made_unless_the_config_says_no():
    assert FPRNNConfig().use_cache and not FPRNNConfig(use_cache=False).use_cache
    assert AutoConfig.for_model("fprnn", use_cache=False).use_cache is False
