"""Layer patterns in a YAML: refused patterns and the counts of a plan."""

import pytest

import synthetic.config
from lm.common.errors import ConfigError
from lm.config import load as config
from lm.report.estimate import count_saved_floats
from lm.report.plan import plan
from lm.training.build import build_model, check_section


def make_cfg(**model):
    sizes = {"d_model": 16, "n_layer": 4, "d_state": 4, "headdim": 8}
    return config.build({"model": sizes | model, "tokenizer": {"vocab_size": 300}})


@pytest.mark.parametrize(
    "model, message",
    [
        ({"layers": "mamba*3 fp_mambo1"}, "did you mean fp_mamba1?"),
        ({"layers": "mamba*3"}, "n_layer must be 3, or a multiple of it"),
        ({"layers": [{"mamba": {"expand": "two"}}]}, "model.layers, mamba: expand is 'two': "),
        ({"layers": [{"fp_mamba1": {"bc_norm": 3}}]}, "layers, fp_mamba1: bc_norm is 3: "),
        ({"layers": [{"gated_deltanet": {"allow_neg_eigval": 3}}]}, "allow_neg_eigval is 3: "),
        ({"layers": "gated_deltanet", "n_heads": 3}, "it must divide d_model = 16, for example 2"),
        ({"layers": "mamba", "name": "lstm"}, "model.layers needs model.name fprnn, not lstm"),
    ],
)
def test_wrong_layer_patterns_are_refused(model, message):
    cfg = make_cfg(**model)
    with pytest.raises(ConfigError) as e:
        check_section(cfg.model, cfg.solver, seq_len=8)
    assert message in str(e.value)


def test_adversarial_noise_is_refused_without_fixed_point_layers():
    for model in ({"layers": "mamba fp_rnn"}, {}):
        assert make_cfg(**model).model.has_fixed_point
    for model in ({"layers": "mamba attention"}, {"name": "mamba"}):
        assert not make_cfg(**model).model.has_fixed_point
    with pytest.raises(ConfigError, match="mamba has none: set it to 0"):
        config.build(
            {"model": {"layers": "mamba"}, "train": {"adversarial_noise": 0.1}},
            schema=synthetic.config.Config,
        )


def test_the_plan_counts_every_layer():
    """Each layer counts as in a model of its own; Mamba's FLOPs do not depend on evaluations."""

    def count(layers, n_layer=1, **model):
        cfg = make_cfg(layers=layers, n_layer=n_layer, **model)
        return count_saved_floats(cfg, on_gpu=False)

    kinds = ("mamba", "mlp", "gated_deltaproduct")
    single = [count(kind)[0] for kind in kinds]
    assert count(" ".join(kinds), n_layer=6) == single * 2
    assert count([{"mamba": {"expand": 0.5}}]) == [single[0] / 4], "the model's expand is 2"
    # Counts are per channel of the model's d_inner = expand · d_model. An MLP has no expand.
    assert count("mlp", expand=1)[0] == 4 * count("mlp", expand=4)[0]
    actual = plan(make_cfg(layers="mamba"), 1)
    assert actual["flops_per_token"] > 0 and actual["evaluations"] is None
    model = build_model(make_cfg(layers="mamba"), vocab_size=304)  # 300, as a multiple of 8
    assert actual["parameters"] == sum(p.numel() for p in model.parameters())
