"""Updates, also with the adversary and under bf16, equal those of autograd; bad settings."""

import json

import pytest

from lm.common.errors import ConfigError
from lm.config.schema import check_updates
from tests.running import printed_by_ranks, run


@pytest.fixture(scope="module", params=[2, pytest.param(1, marks=pytest.mark.slow)])
def updates(request):
    """On two ranks or one: (their number, what tests/oracle_updates.py prints)."""
    return request.param, printed_by_ranks("tests.oracle_updates", request.param)


@pytest.mark.parametrize(
    "kind, tolerance", [("plain", 1e-5), ("against_adversary", 1e-5), ("under_bf16", 1e-6)]
)
def test_an_update_is_that_of_autograd(kind, tolerance, updates):
    """In all ZeRO stages, with micro-batches of unequal numbers of targets."""
    for name, case in updates[1][kind].items():
        assert case["found"] == pytest.approx(case["expected"], rel=tolerance), name


def test_an_update_against_the_adversary_solves_as_often_as_one_without(updates):
    processes, found = updates
    for stage, case in found["against_adversary"].items():
        assert case["solves"] == [4 // processes] * 3, stage


def test_gradients_are_accumulated_and_summed_in_fp32_under_bf16(updates):
    of_stages = updates[1]["under_bf16"].values()
    assert len(of_stages) == 4
    assert all(case["error"] < 1e-6 and case["bf16"] == 0.0 for case in of_stages)


def test_the_adversary_waits_for_the_end_of_the_curriculum(tmp_path):
    """Until then a run with one is the run without, to a bit."""
    mixture = {"s3": {"source": "traces", "weight": 1, "traces": {"documents": 400}}}
    settings = [
        "data.source=builtin", "data.path=null", f"data.mixture={json.dumps(mixture)}",
        'data.curriculum=[{"until": 3, "weights": {"s3": 1}}]', "data.val_tokens=300",
    ]  # fmt: skip
    (plain, _), (with_one, _) = (
        run(tmp_path / str(kappa), *settings, f"train.adversarial_noise={kappa}")
        for kappa in (0, 0.5)
    )
    same = [one["grad_norm"] == other["grad_norm"] for one, other in zip(plain, with_one)]
    assert same[:4] == [True, True, True, False]
    assert with_one[3]["loss"] == plain[3]["loss"], "the loss in the log is without it"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["model.name=mamba"], "which mamba has not: set it to 0"),
        (["model.gradient_checkpointing=true"], "leave out one of them"),
    ],
)
def test_an_adversary_that_cannot_work_is_refused(tiny, settings, said):
    with pytest.raises(ConfigError, match=said):
        tiny("train.adversarial_noise=0.05", *settings)


@pytest.mark.parametrize(
    "stage, begins", [({}, False), ({"min_answer_prob": 0.9}, True), ({"until": 7}, True)]
)
def test_an_adversary_that_would_never_begin_is_refused(tiny, stage, begins):
    mixture = {"s3": {"source": "traces", "weight": 1}}
    stages = [{"until": 8, "weights": {"s3": 1}} | stage]
    cfg = tiny(
        "data.source=builtin", "data.path=null", f"data.mixture={json.dumps(mixture)}",
        f"data.curriculum={json.dumps(stages)}", "train.adversarial_noise=0.1",
    )  # fmt: skip
    if begins:
        check_updates(cfg)
    else:
        with pytest.raises(ConfigError, match=r"after update 8, and train\.steps is only 8"):
            check_updates(cfg)
