"""Names of schedules and gradients, what goes together, and what was called otherwise."""

import pytest

from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.fields import SCHEDULES, parse_schedule
from lm.model.modeling_fprnn import FPRNNForCausalLM


@pytest.mark.parametrize(
    "text, width",
    [("parallel", 0), ("sequential", 1), ("window:1", 1), ("window:32", 32), ("auto", None)],
)
def test_every_schedule_has_a_name(text, width):
    assert parse_schedule(text) == width
    assert FPRNNConfig(schedule=text).schedule == text


INVALID = ["window", "window:", "window:0", "window:-1", "window:1.5", "window:1,2", "windows:4"]
INVALID += ["parallel:3", "sequential:", "auto:2", "Parallel", "", None]


@pytest.mark.parametrize("text", INVALID)
def test_invalid_schedule_is_refused_with_a_list_of_valid_ones(text):
    for refuse in (parse_schedule, lambda text: FPRNNConfig(schedule=text)):
        with pytest.raises(ValueError) as error:
            refuse(text)
        message = str(error.value)
        assert f"schedule is `{text}`" in message and "at least 1" in message
        assert all(name in message for name in SCHEDULES) and "\n" not in message


@pytest.mark.parametrize("schedule", ["window:4", "sequential"])
def test_the_papers_stopping_is_of_the_parallel_schedule_alone(schedule):
    with pytest.raises(ValueError, match=f"its schedule must be parallel, not `{schedule}`"):
        FPRNNConfig(block="fp_rnn", schedule=schedule, stopping="paper")
    assert FPRNNConfig(stopping="paper").schedule == "parallel"
    with pytest.raises(ValueError, match="stopping is 'soon': it must be one of"):
        FPRNNConfig(stopping="soon")


def test_auto_is_settled_by_what_is_said():
    def settled(**fields):
        config = FPRNNConfig(**fields)
        return config.token, config.schedule, config.stopping, config.gradient

    assert settled() == ("exact", "auto", "causal", "exact")
    assert settled(stopping="paper") == ("iterate", "parallel", "paper", "one_step")
    assert settled(token="iterate") == ("iterate", "parallel", "paper", "one_step")
    assert settled(token="iterate", stopping="causal") == ("iterate", "auto", "causal", "one_step")


def test_what_does_not_go_together_is_a_sentence():
    with pytest.raises(ValueError, match="it needs token `iterate`"):
        FPRNNConfig(token="exact", stopping="paper")
    with pytest.raises(ValueError, match=r"gradient `exact` .* needs token `exact`"):
        FPRNNConfig(token="iterate", gradient="exact")


def test_what_from_pretrained_changes_is_checked_like_the_rest(tmp_path):
    model = FPRNNForCausalLM(FPRNNConfig(vocab_size=11, d_model=8, n_layer=1, d_state=2))
    model.save_pretrained(tmp_path)
    load = FPRNNForCausalLM.from_pretrained
    for value in (10**400, float("inf"), float("nan"), 1.5, 2.0, True):  # no float holds the first
        with pytest.raises(
            ValueError, match=r"max_iters is .*: it must be a whole number from 1 to 1e\+09"
        ):
            FPRNNConfig(max_iters=value)
    with pytest.raises(
        ValueError, match="mixer_rank is 0: it must be a whole number from 1 to 65,536"
    ):
        load(tmp_path, mixer_rank=0)
