"""Keys of the solver that were in `model:` are still read, with a note of the new ones."""

import pytest

from lm.common.errors import ConfigError
from lm.config import load as config
from lm.config import old_keys
from lm.config.model import Solver
from lm.config.schema import Config

EVERY = {
    "schedule": "window:4", "stopping": "causal", "tol": 0.2, "eval_tol": 0.02, "max_iters": 7,
    "eval_max_iters": 8, "quantile": 0.5, "stepsize": 0.9, "stepsize_decay": 0.8, "patience": 3,
    "gradient": "phantom:2", "n_backwards": 2, "jacobian_reg": 0.1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch):
    monkeypatch.setattr(old_keys, "_said", set())


def load(folder, text: str, *overrides: str, job_index: int | None = None) -> Config:
    path = folder / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return config.load(path, overrides, job_index)


def solver(**fields) -> Solver:
    return Solver(**fields)


def test_every_old_key_is_read_where_it_is_now(capsys):
    cfg = config.build({"model": {"d_model": 8, **EVERY, "agreement_reg": 0.0}})
    assert cfg.solver == solver(**EVERY) and cfg.model.d_model == 8
    new = {"token", "adjoint_clip", "state_noise"}
    assert set(EVERY) == set(old_keys.MOVED) == Solver.model_fields.keys() - new
    said = capsys.readouterr().err
    for name in EVERY:
        assert f"model.{name} → solver.{name}" in said
    assert "agreement_reg" not in said
    assert "it was iterated, and is now solved with solver.token: exact" in said


def test_it_is_said_once_and_of_the_file(tmp_path, capsys):
    load(tmp_path, "model: {tol: 0.2}")
    assert f"note: {tmp_path / 'c.yaml'}: the solver has a section" in capsys.readouterr().err
    load(tmp_path, "model: {tol: 0.3}")
    assert capsys.readouterr().err == ""
    load(tmp_path, "model: {max_iters: 3}")
    assert "model.max_iters → solver.max_iters" in capsys.readouterr().err


def test_a_config_of_today_says_nothing(tmp_path, capsys):
    cfg = load(tmp_path, "solver: {tol: 0.2}", "solver.schedule=parallel")
    assert load(tmp_path, cfg.to_yaml()) == cfg
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "old, new",
    [("mixed", "auto"), ("mixed:1,4,L", "auto"), ("exact", "sequential"), ("window:3", "window:3")],
)
def test_schedules_that_are_gone_have_another_in_their_place(old, new, capsys, tmp_path):
    assert config.build({"model": {"schedule": old}}).solver.schedule == new
    said = capsys.readouterr().err
    assert (f"({old} → {new})" in said) == (old != new)
    assert load(tmp_path, "", f"model.schedule={old}").solver.schedule == new
    assert (
        load(tmp_path, f"sweep: {{model.schedule: ['{old}']}}", job_index=0).solver.schedule == new
    )
    with pytest.raises(ConfigError, match=r"`solver.schedule` is 'mixed'"):
        config.build({"solver": {"schedule": "mixed"}})


def test_the_papers_stopping_iterates(capsys):
    cfg = config.build({"model": {"schedule": "parallel", "stopping": "paper"}})
    assert cfg.solver.iterates and cfg.solver.settled()["token"] == "iterate"
    assert cfg.solver.settled()["gradient"] == "one_step"  # as it was
    assert "it was iterated" not in capsys.readouterr().err


def test_a_gradient_that_was_written_is_kept():
    assert config.build({"model": {"gradient": "one_step"}}).solver.gradient == "one_step"
    assert config.build({"model": {"tol": 0.2}}).solver.settled()["gradient"] == "exact"


def test_a_penalty_that_is_gone_is_refused_unless_it_was_off(tmp_path, capsys):
    assert load(tmp_path, "model: {agreement_reg: 0}") == Config()
    assert load(tmp_path, "", "model.agreement_reg=0.0") == Config()
    assert capsys.readouterr().err == ""
    for text, overrides, job in [
        ("model: {agreement_reg: 0.5}", [], None),
        ("", ["model.agreement_reg=0.5"], None),
        ("sweep: {model.agreement_reg: [0, 0.5]}", [], 0),
        ("sweep: {model: [{agreement_reg: 0.5}]}", [], 0),
    ]:
        with pytest.raises(
            ConfigError, match=r"`model.agreement_reg` is 0.5, and there is no such"
        ):
            load(tmp_path, text, *overrides, job_index=job)


@pytest.mark.parametrize(
    "text, overrides, job",
    [
        ("model: {tol: 0.2}\nsolver: {tol: 0.2}", [], None),
        ("solver: {tol: 0.2}\nmodel: {tol: 0.2}", [], None),
        ("", ["model.tol=0.2", "solver.tol=0.2"], None),
        ("", ["solver.tol=0.2", "model={tol: 0.2}"], None),
        ("", ["model.tol=0.2", "solver={tol: 0.2}"], None),
        ("sweep: {model.tol: [1], solver.tol: [1]}", [], 0),
        ("sweep: {model: [{tol: 1}], solver: [{tol: 1}]}", [], 0),
    ],
)
def test_a_key_under_both_names_is_refused(tmp_path, text, overrides, job):
    with pytest.raises(ConfigError, match=r"`model.tol` and `solver.tol` are one key"):
        load(tmp_path, text, *overrides, job_index=job)


def test_a_later_layer_wins_under_either_name(tmp_path):
    """The file, then the sweep point, then the overrides, as with any other key."""
    assert load(tmp_path, "model: {tol: 0.2}", "solver.tol=0.3").solver.tol == 0.3
    assert load(tmp_path, "solver: {tol: 0.2}", "model.tol=0.3").solver.tol == 0.3
    assert load(tmp_path, "", "model.tol=0.2", "model.tol=0.3").solver.tol == 0.3
    text = "model: {tol: 0.2}\nsweep: {solver.tol: [0.3]}"
    assert load(tmp_path, text, job_index=0).solver.tol == 0.3
    assert load(tmp_path, text, "model.tol=0.4", job_index=0).solver.tol == 0.4
    assert load(tmp_path, "model: mamba", "model.tol=0.4").solver.tol == 0.4


def test_a_bad_old_value_is_named_by_its_new_key(tmp_path):
    with pytest.raises(ConfigError, match=r"`solver.tol` is -1"):
        load(tmp_path, "model: {tol: -1}")
    with pytest.raises(ConfigError, match=r"`solver` is 3"):
        load(tmp_path, "model: {d_model: 8}\nsolver: 3")
    with pytest.raises(ConfigError, match=r"unknown key `model.tool`"):
        load(tmp_path, "model: {tool: 1}")
    with pytest.raises(ConfigError, match=r"unknown key `model.tol`"):  # no section: a dotted key
        load(tmp_path, "model.tol: 1")


def test_the_tree_that_is_read_is_left_as_it_is():
    tree = {"model": {"tol": 0.2, "d_model": 8}, "solver": {"patience": 3}}
    before = {key: dict(value) for key, value in tree.items()}
    assert config.build(tree).solver == solver(tol=0.2, patience=3)
    assert tree == before


def test_only_the_first_rank_says_it(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    config.build({"model": {"tol": 0.2}})
    assert capsys.readouterr().err == ""
