"""Layer patterns in a YAML: what is refused, what a plan says, what the log calls a layer."""

import pytest

import synthetic.config
from lm.common.errors import ConfigError
from lm.config import load as config
from lm.report.estimate import kept_by_layers
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
    "model, said",
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
def test_what_cannot_be_is_a_sentence(model, said):
    assert said in refused(hybrid(**model))


def test_what_needs_a_fixed_point_is_refused_without_one():
    cfg = hybrid(layers="mamba attention")
    assert hybrid(layers="mamba fp_rnn").model.has_fixed_point and hybrid().model.has_fixed_point
    assert not cfg.model.has_fixed_point and not hybrid(name="mamba").model.has_fixed_point
    with pytest.raises(ConfigError, match="which mamba has not: set it to 0"):
        config.build(
            {"model": {"layers": "mamba"}, "train": {"adversarial_noise": 0.1}},
            schema=synthetic.config.Config,
        )


def test_the_plan_counts_every_layer():
    """Each as what it is alone; and Mamba's FLOPs do not depend on evaluations."""
    kinds = ("mamba", "mlp", "gated_deltaproduct")
    alone = [kept_by_layers(hybrid(layers=kind, n_layer=1), False) for kind in kinds]
    together = kept_by_layers(hybrid(layers=" ".join(kinds), n_layer=6), False)
    assert together == [kept for [kept] in alone] * 2
    narrow = kept_by_layers(hybrid(layers=[{"mamba": {"expand": 0.5}}], n_layer=1), False)
    assert narrow == [alone[0][0] / 4]
    mlp = [kept_by_layers(hybrid(layers="mlp", n_layer=1, expand=e), False)[0] * e for e in (1, 4)]
    assert mlp[0] == mlp[1], "it has no expand"
    found = plan(hybrid(layers="mamba"), 1)
    assert found["flops_per_token"] > 0 and found["evaluations"] is None
    assert found["parameters"] == sum(
        p.numel() for p in build_model(hybrid(layers="mamba"), 304).parameters()
    )
