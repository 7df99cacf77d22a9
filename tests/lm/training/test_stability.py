"""Updates with adversarial noise and under bf16, compared with plain autograd; wrong settings."""

import json

import pytest

from lm.common.errors import ConfigError
from lm.config.schema import check_updates
from tests.running import run, run_ranks_for_json


@pytest.fixture(scope="module", params=[2, pytest.param(1, marks=pytest.mark.slow)])
def updates(request):
    """(number of ranks, output of tests/oracle_updates.py), for one rank and for two.

    The output has for each kind of update {ZeRO stage and model: its comparison}.
    """
    return request.param, run_ranks_for_json("tests.oracle_updates", request.param)


@pytest.mark.parametrize(
    "kind, tolerance", [("plain", 1e-5), ("against_adversary", 1e-5), ("under_bf16", 1e-6)]
)
def test_update_equals_plain_autograd(kind, tolerance, updates):
    """All ZeRO stages, with different numbers of targets in the micro-batches."""
    _, comparisons = updates
    for name, case in comparisons[kind].items():
        assert case["found"] == pytest.approx(case["expected"], rel=tolerance), name


def test_adversarial_update_reports_only_its_first_passes(updates):
    """Each update has four sequences, one per micro-batch; an LSTM has no solve."""
    processes, comparisons = updates
    for name, case in comparisons["against_adversary"].items():
        solves = 0 if "lstm" in name else 4 // processes
        assert case["solves"] == [solves] * 3, name


def test_gradients_are_accumulated_and_summed_in_fp32_under_bf16(updates):
    _, comparisons = updates
    cases = comparisons["under_bf16"].values()
    assert len(cases) == 4  # ZeRO stages
    # "bf16" is the share of parameters with gradients that look rounded to bf16.
    assert all(case["error"] < 1e-6 and case["bf16"] == 0.0 for case in cases)


def test_adversary_starts_after_the_curriculum(tmp_path):
    """Until then, the gradients are bit for bit those without adversarial noise."""
    mixture = {"s3": {"source": "traces", "weight": 1, "traces": {"documents": 400}}}
    settings = [
        "data.source=builtin",
        "data.path=null",
        f"data.mixture={json.dumps(mixture)}",
        'data.curriculum=[{"until": 3, "weights": {"s3": 1}}]',
        "data.val_tokens=300",
    ]
    (plain, _), (adversarial, _) = (
        run(tmp_path / str(noise), *settings, f"train.adversarial_noise={noise}")
        for noise in (0, 0.5)
    )
    is_equal = [a["grad_norm"] == b["grad_norm"] for a, b in zip(plain, adversarial)]
    assert is_equal[:4] == [True, True, True, False]
    assert adversarial[3]["loss"] == plain[3]["loss"], "the logged loss is of the first pass"


WITHOUT_STATE = [f"model.{part}_h_dep=false" for part in ("mixer", "b", "c")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.name=mamba"], "mamba has none: set it to 0"),
        ([*WITHOUT_STATE, "model.layers=fp_mamba1 mamba"], "fp_mamba1 mamba has none"),
    ],
)
def test_adversary_without_layer_that_reads_its_state_is_refused(tiny, settings, message):
    with pytest.raises(ConfigError, match=message):
        tiny("train.adversarial_noise=0.05", *settings)
    reads_state = "model.layers=[{fp_mamba1: {c_h_dep: true}}, mamba]"
    assert tiny("train.adversarial_noise=0.05", *WITHOUT_STATE, reads_state)


@pytest.mark.parametrize(
    "stage, can_begin", [({}, False), ({"min_answer_prob": 0.9}, True), ({"until": 7}, True)]
)
def test_adversary_after_the_last_update_is_refused(tiny, stage, can_begin):
    """The tiny run has 8 updates, and `min_answer_prob` may end the stage before them."""
    mixture = {"s3": {"source": "traces", "weight": 1}}
    stages = [{"until": 8, "weights": {"s3": 1}} | stage]
    cfg = tiny(
        "data.source=builtin",
        "data.path=null",
        f"data.mixture={json.dumps(mixture)}",
        f"data.curriculum={json.dumps(stages)}",
        "train.adversarial_noise=0.1",
    )
    if can_begin:
        check_updates(cfg)
    else:
        with pytest.raises(ConfigError, match=r"ends with update 8, but train\.steps is only 8"):
            check_updates(cfg)
