"""Schedules, learning rates of their own, optimizers: against formulas, and refused where wrong."""

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
from tests.running import printed_by_ranks, run


@pytest.mark.parametrize(
    "decay, steps, expected",
    [
        (4, 10, [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]),  # by hand: T − D = 6
        (0.4, 10, [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]),
        (None, 10, [0.5, 1, 1, 1, 1, 1, 1, 1, 0.6, 0.2]),  # 0.2 of all
        (8, 10, [0.5, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]),
    ],
)
def test_wsd_is_flat_and_then_linear(decay, steps, expected):
    o = Optim(lr=1.0, min_lr=0.2, warmup=2, schedule="wsd", decay=decay)
    assert [optim.lr_factor(o, steps, k) for k in range(1, steps + 1)] == pytest.approx(expected)


def test_the_stable_part_of_wsd_does_not_depend_on_the_end():
    o = Optim(lr=1.0, warmup=5, schedule="wsd", decay=10)
    short, long = ([optim.lr_factor(o, steps, k) for k in range(1, 41)] for steps in (50, 500))
    assert short == long


def test_what_wsd_cannot_have_is_refused(tiny):
    with pytest.raises(ConfigError, match=r"`decay` is 0\.1, and is of schedule wsd alone"):
        tiny("optim.decay=0.1")
    for overrides, words in [
        (("optim.decay=7", "optim.warmup=2"), "are 2 and 7 updates, and train.steps is only 8"),
        (("optim.warmup=7",), "optim.warmup and optim.decay are 7 and 2 updates"),
        (("optim.decay=2.5",), "optim.decay: 2.5 updates cannot be"),
    ]:
        with pytest.raises(ConfigError, match=words):
            check_updates(tiny("optim.schedule=wsd", *overrides))
    check_updates(tiny("optim.schedule=wsd", "optim.decay=6", "optim.warmup=2"))


FACTORS = "optim.lr_factors={'*.A_log': 0.1, 'backbone.layers.1.*norm*': 3}"


def test_each_parameter_has_the_rate_of_its_pattern(tiny):
    model = build_model(tiny(), 32)
    names = {id(p): name for name, p in model.named_parameters()}
    rates, decay = {}, {}
    for group in optim.parameter_groups(model, tiny(FACTORS).optim):
        for p in group["params"]:
            assert names[id(p)] not in rates
            rates[names[id(p)]] = group["lr"]
            decay[names[id(p)]] = group["weight_decay"]
    assert rates.keys() == set(names.values())
    for name, rate in rates.items():
        factor = 0.1 if name.endswith(".A_log") else 1.0
        if name.startswith("backbone.layers.1.") and "norm" in name:
            factor = 3.0
        assert rate == pytest.approx(1e-2 * factor, rel=1e-12), name
        assert decay[name] == (0.1 if optim.decays(name) else 0.0), name
    assert sum(rate != 1e-2 for rate in rates.values()) >= 4


def test_groups_without_factors_are_the_two_there_always_were(tiny):
    model = build_model(tiny(), 32)
    with_decay, without = optim.groups(model, tiny().optim)
    assert with_decay.decays and not without.decays
    named = [name for name, _ in model.named_parameters()]
    assert with_decay.names == [name for name in named if optim.decays(name)]
    assert optim.optimizer_order(model, tiny().optim) == with_decay.names + without.names


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


@pytest.mark.parametrize("key, most", [("lr", 1000), ("weight_decay", 1000)])
def test_numbers_beyond_any_training_are_refused(tiny, key, most):
    with pytest.raises(ConfigError, match=rf"`optim.{key}` is 1e\+300: it must be .* {most}"):
        tiny(f"optim.{key}=1e300")


def test_patterns_with_dots_may_be_swept():
    tree = {"sweep": {"optim.lr_factors": [{"*.A_log": 0.5}, {}]}}
    for point, expected in zip(config.sweep_points(tree), ({"*.A_log": 0.5}, {})):
        chosen = {}
        config.set_point(chosen, point)
        assert config.build(chosen).optim.lr_factors == expected


def test_the_plan_says_which_parameters_a_pattern_took(tiny):
    assert plan(tiny(), 1)["optimizer"] == []
    first, second = plan(tiny(FACTORS), 1)["optimizer"]
    assert first.startswith("AdamW, learning rate × 0.1: 2 tensors, 256 numbers (backbone.")
    assert second.startswith("AdamW, learning rate × 3: ")


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    plain, own = (optim.signature(o) for o in (Optim(), Optim(lr_factors={"*.A_log": 0.1})))
    check_optimizer(tmp_path, {"optimizer": own}, own)
    for before, now in [(plain, own), (own, plain)]:
        with pytest.raises(CheckpointError, match=r"lr_factors=\{'\*.A_log': 0.1\}"):
            check_optimizer(tmp_path, {"optimizer": before}, now)


@pytest.mark.parametrize("processes", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_muon_is_active_in_every_stage_that_may_have_it(processes):
    """Three updates with clipping, momentum and decay. A gradient that is not orthogonalised, or in
    pieces, differs by about its own size; bf16 from fp64 by 0.025."""
    found = printed_by_ranks("tests.oracle_muon", processes)
    assert set(found) == {"0", "1", "2"}
    for of_matrices, of_others in found.values():
        assert of_matrices < 0.03 and of_others < 2e-4


MUON = ("optim.name=muon", "checkpoint.every=2", "checkpoint.keep=9", "log.every=1",
        "train.global_batch_size=4", "train.grad_accum_steps=null")  # fmt: skip


@pytest.fixture(scope="module")
def trained_by_muon(tmp_path_factory):
    """On one rank under ZeRO-1: (the folder of runs, its records, a checkpoint in the middle)."""
    out = tmp_path_factory.mktemp("muon")
    whole, done = run(out, *MUON, "engine.zero_stage=1")
    assert "Muon: 10 tensors, 8,256 numbers" in " ".join(done.stdout.split())
    return out, whole, out / "tiny/checkpoints/step-000004"


def test_muon_resumes_exactly(trained_by_muon, tmp_path):
    _, whole, checkpoint = trained_by_muon
    same, _ = run(tmp_path, *MUON, f"resume={checkpoint}", "name=same", name="same")
    assert [(r["loss"], r["grad_norm"]) for r in same] == [
        (r["loss"], r["grad_norm"]) for r in whole[4:]
    ]


@pytest.mark.slow
def test_muon_goes_on_on_other_ranks_and_stages(trained_by_muon, tmp_path):
    _, whole, checkpoint = trained_by_muon
    second = going_on(tmp_path, "second", checkpoint, "engine.zero_stage=2", processes=2)
    near(second, whole[4:])
    checkpoint = tmp_path / "second/checkpoints/step-000006"
    third = going_on(tmp_path, "third", checkpoint, "engine.zero_stage=0")
    near(third, second[2:])


def going_on(out, name, checkpoint, *overrides, processes=0):
    settings = (*MUON, f"name={name}", f"resume={checkpoint}", *overrides)
    records, done = run(out, *settings, processes=processes, name=name)
    assert "laid out anew" in done.stdout
    return records


def near(records, expected):
    """The rounding of a step in bf16 grows from update to update."""
    assert records[0]["loss"] == pytest.approx(expected[0]["loss"], abs=1e-5)
    for one, other in zip(records, expected, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=2e-3)


@pytest.mark.parametrize("name", ["fprnn", "mamba", "lstm", "transformer"])
def test_matrices_are_hidden_weights(tiny, name):
    model = build_model(tiny(f"model.name={name}", "model.headdim=8"), 32)
    shapes = {n: p.shape for n, p in model.named_parameters()}
    own = optim.matrices(model)
    for n, shape in shapes.items():
        beside = ("embed", "lm_head", "A_log", "norm", "bias", "gain", "conv1d", "alpha_proj", ".D")
        other = any(part in n for part in beside)
        assert (n in own) == (not other and len(shape) == 2 and min(shape) > 1), n
    assert len(own) >= 4


@pytest.mark.parametrize(
    "overrides, words",
    [
        (("optim.name=muon", "engine.zero_stage=3"), "ZeRO-3 has cut them apart: use engine.zero"),
        (
            ("optim.name=muon", "engine.deepspeed={zero_optimization: {stage: 3}}"),
            "ZeRO-3 has cut them apart",
        ),
        (
            ("optim.name=muon", "engine.deepspeed={bf16: {enabled: true}}"),
            "engine.deepspeed sets bf16.enabled, under which Muon",
        ),
        (
            (
                "optim.name=muon",
                "engine.deepspeed={zero_optimization: {offload_optimizer: {device: cpu}}}",
            ),
            "sets zero_optimization.offload_optimizer",
        ),
        (("optim.name=shampoo",), "it must be 'adamw' or 'muon'"),
    ],
)
def test_what_muon_cannot_have_is_refused(tiny, overrides, words):
    with pytest.raises(ConfigError, match=words):
        check_config(tiny(*overrides), 1)


def test_a_checkpoint_of_adamw_is_refused_under_muon(tmp_path):
    muon, adamw = (optim.signature(Optim(name=name)) for name in ("muon", "adamw"))
    for before, now in ((adamw, muon), (muon, adamw)):
        with pytest.raises(CheckpointError, match="trained with another optimizer"):
            check_optimizer(tmp_path, {"optimizer": before}, now)


def test_the_plan_counts_one_moment_of_muon(tiny):
    adamw, muon = (plan(tiny(*o, "engine.zero_stage=0"), 1) for o in ((), ("optim.name=muon",)))
    assert adamw["memory"].optimizer - muon["memory"].optimizer == 4 * 8256
    assert adamw["checkpoint_bytes"] - muon["checkpoint_bytes"] == 4 * 8256
    assert set(muon["stages"]) == {0, 1, 2} and set(adamw["stages"]) == {0, 1, 2, 3}
    assert muon["optimizer"][0].startswith("Muon: 10 tensors, 8,256 numbers (backbone.")
