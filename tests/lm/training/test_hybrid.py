"""Layer patterns in a YAML: refused patterns and the counts of a plan."""

import pytest

import synthetic.config
from lm.common.errors import ConfigError
from lm.config import load as config
from lm.report.estimate import count_saved_floats
from lm.report.plan import plan
from lm.training.build import build_model, check_section


def hybrid(**model):
    sizes = {"d_model": 16, "n_layer": 4, "d_state": 4, "headdim": 8}
    return config.build({"model": sizes | model, "tokenizer": {"vocab_size": 300}})


def refused(cfg) -> str:
    with pytest.raises(ConfigError) as e:
        check_section(cfg.model, cfg.solver, 8)
    return str(e.value)


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
    assert message in refused(hybrid(**model))


def test_options_of_fixed_points_are_refused_without_them():
    cfg = hybrid(layers="mamba attention")
    assert hybrid(layers="mamba fp_rnn").model.has_fixed_point and hybrid().model.has_fixed_point
    assert not cfg.model.has_fixed_point and not hybrid(name="mamba").model.has_fixed_point
    with pytest.raises(ConfigError, match="mamba has none: set it to 0"):
        config.build(
            {"model": {"layers": "mamba"}, "train": {"adversarial_noise": 0.1}},
            schema=synthetic.config.Config,
        )


def test_the_plan_counts_every_layer():
    """Each layer counts as in a model of its own; Mamba's FLOPs do not depend on evaluations."""
    kinds = ("mamba", "mlp", "gated_deltaproduct")
    single = [count_saved_floats(hybrid(layers=kind, n_layer=1), False) for kind in kinds]
    combined = count_saved_floats(hybrid(layers=" ".join(kinds), n_layer=6), False)
    assert combined == [count for [count] in single] * 2
    narrow = count_saved_floats(hybrid(layers=[{"mamba": {"expand": 0.5}}], n_layer=1), False)
    assert narrow == [single[0][0] / 4]
    mlp = [
        count_saved_floats(hybrid(layers="mlp", n_layer=1, expand=e), False)[0] * e for e in (1, 4)
    ]
    assert mlp[0] == mlp[1], "it has no expand"
    actual = plan(hybrid(layers="mamba"), 1)
    assert actual["flops_per_token"] > 0 and actual["evaluations"] is None
    assert actual["parameters"] == sum(
        p.numel() for p in build_model(hybrid(layers="mamba"), 304).parameters()
    )
