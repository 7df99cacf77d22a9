"""Schedules of the learning rate, factors of parameters, and settings that are refused."""

import pytest

from lm.common.errors import ConfigError
from lm.config import load as config
from lm.config.schema import Optim, check_updates
from lm.report.plan import plan
from lm.runs.checkpoint import CheckpointError
from lm.training import optim
from lm.training.build import build_model
from lm.training.preflight import check_config
from lm.training.resume import check_optimizer


@pytest.mark.parametrize(
    "decay, steps, expected",
    [
        (4, 10, [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]),
        (0.4, 10, [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]),  # 0.4 of 10 updates
        (None, 10, [0.5, 1, 1, 1, 1, 1, 1, 1, 0.6, 0.2]),  # 0.2 of all updates
        (8, 10, [0.5, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]),
    ],
)
def test_wsd_is_flat_and_then_linear(decay, steps, expected):
    """After 2 updates of warm-up; the last `decay` updates fall from 1 to 0.2."""
    settings = Optim(lr=1.0, min_lr=0.2, warmup=2, schedule="wsd", wsd_decay=decay)
    factors = [optim.lr_factor(settings, steps, k) for k in range(1, steps + 1)]
    assert factors == pytest.approx(expected)


def test_constant_part_of_wsd_does_not_depend_on_the_end():
    settings = Optim(lr=1.0, warmup=5, schedule="wsd", wsd_decay=10)
    # Of 50 updates, the last 10 decay.
    short, long = (
        [optim.lr_factor(settings, steps, k) for k in range(1, 41)] for steps in (50, 500)
    )
    assert short == long


def test_wrong_wsd_settings_are_refused(tiny):
    with pytest.raises(ConfigError, match=r"`wsd_decay` is 0\.1: only schedule wsd reads it"):
        tiny("optim.wsd_decay=0.1")
    for overrides, words in [
        (("optim.wsd_decay=7", "optim.warmup=2"), "are 2 and 7 updates, but train.steps is only 8"),
        (("optim.warmup=7",), "optim.warmup and optim.wsd_decay are 7 and 2 updates"),
        (("optim.wsd_decay=2.5",), "optim.wsd_decay is 2.5: it must be a whole number"),
    ]:
        with pytest.raises(ConfigError, match=words):
            check_updates(tiny("optim.schedule=wsd", *overrides))
    check_updates(tiny("optim.schedule=wsd", "optim.wsd_decay=6", "optim.warmup=2"))


FACTORS = "optim.lr_factors={'*.A_log': 0.1, 'backbone.layers.1.*norm*': 3}"


def test_parameters_have_the_rate_of_their_pattern(tiny):
    model = build_model(tiny(), vocab_size=32)
    names = {id(p): name for name, p in model.named_parameters()}
    rates, weight_decays = {}, {}
    for group in optim.torch_param_groups(model, tiny(FACTORS).optim):
        for p in group["params"]:
            assert names[id(p)] not in rates
            rates[names[id(p)]] = group["lr"]
            weight_decays[names[id(p)]] = group["weight_decay"]
    assert rates.keys() == set(names.values())
    for name, rate in rates.items():
        factor = 0.1 if name.endswith(".A_log") else 1.0
        if name.startswith("backbone.layers.1.") and "norm" in name:
            factor = 3.0
        assert rate == pytest.approx(1e-2 * factor, rel=1e-12), name
        assert weight_decays[name] == (0.1 if optim.has_weight_decay(name) else 0.0), name
    assert sum(rate != 1e-2 for rate in rates.values()) >= 4  # both patterns match parameters


def test_without_factors_there_are_two_groups(tiny):
    model = build_model(tiny(), vocab_size=32)
    with_decay, without_decay = optim.group_parameters(model, tiny().optim)
    assert with_decay.has_weight_decay and not without_decay.has_weight_decay
    names = [name for name, _ in model.named_parameters()]
    assert with_decay.names == [name for name in names if optim.has_weight_decay(name)]
    assert optim.optimizer_order(model, tiny().optim) == with_decay.names + without_decay.names


@pytest.mark.parametrize(
    "value, words",
    [
        ("{nothing*: 2}", "`nothing\\*` matches no parameter; there are, for example, backbone"),
        ("{'*.A_log': 2, '*A_log': 3}", r"`\*.A_log` and `\*A_log` both match backbone"),
        ("{'*.A_log': -1}", "it must be greater than 0"),
        ("{'*.A_log': 1.0e308}", "it must be less than or equal to 1000"),
        ("3", "is 3: it must be a valid dictionary"),
    ],
)
def test_a_bad_pattern_or_factor_is_refused(tiny, value, words):
    with pytest.raises(ConfigError, match=words):
        check_config(tiny(f"optim.lr_factors={value}"), 1)


@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_absurdly_large_numbers_are_refused(tiny, key):
    with pytest.raises(ConfigError, match=rf"`optim.{key}` is 1e\+300: it must be .* 1000"):
        tiny(f"optim.{key}=1e300")


def test_patterns_with_dots_can_be_swept():
    tree = {"sweep": {"optim.lr_factors": [{"*.A_log": 0.5}, {}]}}
    for point, expected in zip(config.sweep_points(tree), ({"*.A_log": 0.5}, {})):
        point_tree = {}
        config.set_point(point_tree, point)
        assert config.build(point_tree).optim.lr_factors == expected


def test_plan_lists_parameters_of_each_pattern(tiny):
    assert plan(tiny(), 1)["optimizer"] == []
    first, second = plan(tiny(FACTORS), 1)["optimizer"]
    assert first.startswith("AdamW, learning rate × 0.1: 2 tensors, 256 numbers (backbone.")
    assert second.startswith("AdamW, learning rate × 3: ")


def test_checkpoint_of_another_optimizer_is_refused(tmp_path):
    plain = optim.optimizer_signature(Optim())
    with_factor = optim.optimizer_signature(Optim(lr_factors={"*.A_log": 0.1}))
    check_optimizer(tmp_path, {"optimizer": with_factor}, with_factor)
    for saved, current in [(plain, with_factor), (with_factor, plain)]:
        with pytest.raises(CheckpointError, match=r"lr_factors=\{'\*.A_log': 0.1\}"):
            check_optimizer(tmp_path, {"optimizer": saved}, current)
