"""Keys of earlier versions: in a YAML, in an override, in a sweep, in a config.json."""

import json

import pytest

import synthetic.config
from lm.common.errors import ConfigError
from lm.config import load as config
from lm.config import old_keys
from lm.config.messages import is_key
from lm.config.schema import Config
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.fields import RENAMED_FIELDS
from lm.runs.run_dir import flatten_config

OLD = {
    "model": {
        "embedding_start": 0.1,
        "n_layer": 2,
        "layers": [{"fp_mamba1": {"out_start": 0.5, "mixer_gate_start": -3}}, "mamba"],
    },
    "data": {
        "name": "sample-10BT",
        "download": "files",
        "cache": None,
        "mixture": {
            "web": {"source": "builtin", "weight": 1},
            "words": {"source": "traces", "weight": 1, "traces": {"letters": 3}},
        },
        "curriculum": [{"until": 5, "at": 0.9, "weights": {"words": 1}}],
    },
    "optim": {"schedule": "wsd", "decay": 0.3},
    "train": {"rollbacks": 1, "adversary": 0.05},
}
NEW = {
    "model": {
        "embedding_init_std": 0.1,
        "n_layer": 2,
        "layers": [
            {"fp_mamba1": {"out_proj_init_scale": 0.5, "mixer_gate_init_bias": -3}},
            "mamba",
        ],
    },
    "data": {
        "dataset_config": "sample-10BT",
        "download_dir": "files",
        "cache_dir": None,
        "mixture": {
            "web": {"source": "builtin", "weight": 1},
            "words": {"source": "traces", "weight": 1, "traces": {"num_elements": 3}},
        },
        "curriculum": [{"until": 5, "min_answer_prob": 0.9, "weights": {"words": 1}}],
    },
    "optim": {"schedule": "wsd", "wsd_decay": 0.3},
    "train": {"max_rollbacks": 1, "adversarial_noise": 0.05},
}
OLD_SYNTHETIC = {
    "train": {"length": 8, "curriculum": {"start": 3, "at": 0.9, "letters": 2}},
    "bars": [{"metric": "token_accuracy", "length": 4, "least": 0.5}],
}
NEW_SYNTHETIC = {
    "train": {"length": 8, "curriculum": {"start": 3, "min_accuracy": 0.9, "num_elements": 2}},
    "thresholds": [{"metric": "token_accuracy", "length": 4, "min": 0.5}],
}
SCHEMAS = pytest.mark.parametrize(
    "schema, old, new",
    [(Config, OLD, NEW), (synthetic.config.Config, OLD_SYNTHETIC, NEW_SYNTHETIC)],
)


def test_every_renamed_key_has_a_present_name():
    for old, new in old_keys.RENAMED.items():
        schemas = (Config, synthetic.config.Config)
        assert not any(is_key(old, schema) for schema in schemas)
        assert any(is_key(new, schema) for schema in schemas) or new in old_keys.REMOVED


@SCHEMAS
def test_an_old_yaml_is_the_present_config(tmp_path, schema, old, new):
    path = tmp_path / "old.yaml"
    path.write_text(json.dumps(old), encoding="utf-8")
    cfg = config.load(path, schema=schema)
    assert cfg == config.build(old, schema=schema) == config.build(new, schema=schema)
    assert flatten_config(cfg) == flatten_config(config.build(new, schema=schema))


@pytest.mark.parametrize("yaml_key", ["adversary", "adversarial_noise"])
def test_an_old_override_works_and_names_the_new_key(tmp_path, capsys, yaml_key):
    old_keys.note_renamed.cache_clear()
    path = tmp_path / "c.yaml"
    path.write_text(f"train: {{{yaml_key}: 0.1}}", encoding="utf-8")
    for override in ("train.adversary=0.2", "train.adversarial_noise=0.2"):
        assert config.load(path, [override]).train.adversarial_noise == 0.2
    line = "note: the key `train.adversary` is now called `train.adversarial_noise`; the old name"
    assert capsys.readouterr().out == f"{line} still works\n"


def test_a_sweep_over_an_old_key_keeps_its_directories(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("sweep: {model.mixer_gate_start: [-1, -2], m: {a: {optim.lr: 1e-3}}}")
    cfg = config.load(path, job_index=1)
    assert cfg.model.mixer_gate_init_bias == -2
    assert cfg.name == "run/001-mixer_gate_start=-2-a"


def test_both_names_of_a_key_are_refused():
    with pytest.raises(ConfigError, match="`rollbacks` is the old name of `max_rollbacks`"):
        config.build({"train": {"rollbacks": 1, "max_rollbacks": 1}})


def test_config_json_of_an_earlier_version_loads(tmp_path):
    fields = {"embedding_start": 0.1, "layers": OLD["model"]["layers"], "n_layer": 2}
    old = {**fields, "mixer_gate_start": -2.0, "out_start": 0.25, "model_type": "fprnn"}
    (tmp_path / "config.json").write_text(json.dumps(old), encoding="utf-8")
    loaded = FPRNNConfig.from_pretrained(tmp_path)
    assert loaded.embedding_init_std == 0.1 and loaded.layers == NEW["model"]["layers"]
    assert loaded.mixer_gate_init_bias == -2 and loaded.out_proj_init_scale == 0.25
    assert loaded.mixer_gate_start == -2, "the old name of an attribute still reads it"
    assert not loaded.to_dict().keys() & RENAMED_FIELDS.keys()
    changed = FPRNNConfig.from_pretrained(tmp_path, mixer_gate_start=-1.0)
    assert changed.mixer_gate_init_bias == -1
