"""`model.solver()` describes the solver that runs, and `model.solving` changes it."""

import pytest
import torch

from lm.model import strategies
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.fields import SOLVER
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.scan import find_backend

LENGTH = 32
IDS = torch.randint(0, 11, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def model(**values):
    sizes = {"vocab_size": 11, "d_model": 16, "n_layer": 2, "d_state": 4}
    torch.manual_seed(0)
    return FPRNNForCausalLM(FPRNNConfig(**{**sizes, **values}))


@pytest.fixture
def solves(monkeypatch):
    """Record every solve of a block as (function, width, tol, max_iters)."""
    calls = []

    def spy(name, describe):
        solve = getattr(strategies, name)

        def solver(*args, **kwargs):
            calls.append((name, *describe(*args, **kwargs)))
            return solve(*args, **kwargs)

        monkeypatch.setattr(strategies, name, solver)

    spy("solve_paper", lambda f, y, rule: (None, rule.tol, rule.max_iters))
    spy("solve_windows", lambda f, s, rule, width: (width, rule.tol, rule.max_iters))
    spy("solve_sequential", lambda token, s: (1, None, None))
    return calls


@pytest.mark.parametrize(
    "fields, training, schedule, solver, width",
    [
        (dict(schedule="window:8"), False, "window:8", "solve_windows", 8),
        (dict(schedule="parallel"), True, "parallel", "solve_windows", LENGTH),
        (dict(schedule="sequential"), False, "sequential", "solve_sequential", 1),
        (dict(schedule="auto"), True, "sequential", "solve_sequential", 1),
        (dict(schedule="auto", mixer="kronecker"), True, "parallel", "solve_windows", LENGTH),
        (dict(stopping="paper"), False, "parallel", "solve_paper", None),
        (dict(stopping="paper"), True, "parallel", "solve_paper", None),
        (
            dict(token="iterate", stopping="causal", schedule="sequential"),
            False,
            "sequential",
            "solve_windows",
            1,
        ),
    ],
)
def test_description_equals_the_solver_that_runs(
    solves, fields, training, schedule, solver, width, monkeypatch
):
    monkeypatch.setenv("FPRNN_KERNELS", "plain")
    lm = model(max_iters=7, eval_max_iters=9, **fields).train(training)
    description, config = lm.solver(LENGTH), lm.config
    if config.token == "exact":  # at most w + 1 evaluations, which the description does not name
        tol, described_max_iters, max_iters = 0.01 if training else 1e-5, None, width + 1
    else:
        has_high_tol = training or config.stopping == "paper"
        tol = 0.1 if has_high_tol else 0.01
        described_max_iters = max_iters = 7 if training else 9
    if solver == "solve_sequential":
        tol = max_iters = None
    assert description == {
        "token": config.token,
        "schedule": schedule,
        "stopping": config.stopping,
        "tol": tol,
        "max_iters": described_max_iters,
        "gradient": config.gradient,
    }
    with torch.no_grad():
        lm(input_ids=IDS)
    assert set(solves) == {(solver, width, tol, max_iters)}


@pytest.mark.parametrize("kernels", ["plain", "auto"])
def test_auto_is_sequential_on_a_cpu(solves, kernels, monkeypatch):
    monkeypatch.setenv("FPRNN_KERNELS", kernels)
    if kernels == "auto" and find_backend("cell", torch.zeros(1)) is None:
        pytest.skip("no compiler")
    lm = model().eval()
    assert lm.solver(LENGTH)["schedule"] == "sequential"
    with torch.no_grad():
        lm(input_ids=IDS)
    assert bool(solves) == (kernels == "plain")  # the kernel replaces the loops of solver.py


def test_single_token_is_sequential_under_every_schedule():
    ids, results = torch.tensor([[3]]), []
    for schedule in ("auto", "window:8", "sequential", "parallel"):
        lm = model(schedule=schedule).eval()
        assert lm.solver(1)["schedule"] == "sequential" and lm.solver(1)["tol"] is None
        with torch.no_grad():
            results.append(lm(input_ids=ids).logits)
    assert all(torch.equal(result, results[0]) for result in results)


# `model.solving`.


def read_settings(lm):
    """Return the configuration with the solver fields that each layer uses in a pass."""
    settings = []

    def record(block, args):  # args: u, seqs, …
        settings.append(block.get_settings(args[1]))

    blocks = [layer.block for layer in lm.backbone.layers]
    hooks = [block.register_forward_pre_hook(record) for block in blocks]
    with torch.no_grad():
        lm(IDS)
    for hook in hooks:
        hook.remove()
    assert len(settings) == len(blocks)
    return settings


@torch.no_grad()
def test_solving_changes_settings_and_nothing_else():
    lm = model(schedule="sequential", contractive=0.5).double().eval()
    before, plain = lm.config.to_dict(), lm(IDS)
    with lm.solving(schedule="parallel", eval_tol=1e-9) as inside:
        assert inside is lm and lm.solver(LENGTH)["schedule"] == "parallel"
        assert lm.solver()["tol"] == 1e-9
        other = lm(IDS)
        with lm.solving(stopping="paper", token="iterate"):
            assert lm.solver()["stopping"] == "paper"
            assert lm.solver()["gradient"] == "one_step"
            with lm.backbone.solving(eval_tol=0.5):
                assert lm.solver()["tol"] == 0.5 and lm.solver()["token"] == "iterate"
            assert lm.solver()["tol"] == 1e-9
        assert lm.solver()["token"] == "exact" and lm.solver()["schedule"] == "parallel"
        assert all(s is read_settings(lm)[0] for s in read_settings(lm))
    assert lm.config.to_dict() == before
    assert all(s is lm.config for s in read_settings(lm))
    assert (other.fixed_point.evaluations > 1).all() and (plain.fixed_point.evaluations == 1).all()
    torch.testing.assert_close(other.logits, plain.logits, rtol=0, atol=1e-7)
    assert torch.equal(lm(IDS).logits, plain.logits)


def test_solving_ends_after_an_exception_and_checks_fields():
    lm = model()
    with pytest.raises(RuntimeError, match="inside"), lm.solving(schedule="window:3"):
        raise RuntimeError("inside")
    assert all(s is lm.config for s in read_settings(lm))
    for fields, kind, words in [
        (dict(d_model=3), TypeError, "d_model is not a solver field: these are "),
        (dict(shedule="auto"), TypeError, "shedule is not a solver field"),
        (dict(schedule="windows"), ValueError, "schedule is `windows`"),
        (dict(tol=-1.0), ValueError, "tol is -1.0: it must be a number above 0"),
        (dict(stopping="paper"), ValueError, "needs token `iterate`"),
        (dict(gradient="implicit:2"), ValueError, "gradient is 'implicit:2'"),
        (dict(token="iterate", gradient="exact"), ValueError, "needs token `exact`"),
    ]:
        with pytest.raises(kind, match=words), lm.solving(**fields):
            pass
        assert all(s is lm.config for s in read_settings(lm)), fields
    assert set(SOLVER) >= {"token", "schedule", "stopping", "tol", "gradient"}


# ℓ*, the iterations of the paper's procedure.


@pytest.mark.parametrize("schedule", ["sequential", "window:5", "parallel"])
@torch.no_grad()
def test_iteration_count_does_not_depend_on_the_solver(schedule):
    lm = model(schedule=schedule, n_layer=1, contractive=0.5).double().eval()
    assert lm(IDS).fixed_point.num_iters is None
    report = lm(IDS, count_iterations=True).fixed_point
    with lm.solving(token="iterate", tol=0.1, eval_tol=0.1, eval_max_iters=1000):
        paper = lm(IDS, count_iterations=True).fixed_point
    assert torch.equal(report.num_iters, paper.num_iters) and report.num_iters.shape == (1, 2)
    assert torch.equal(report.token_iters, paper.token_iters)
    assert report.token_iters.shape == (1, 2, LENGTH) and report.converged.all()
    assert torch.equal(paper.evaluations, paper.num_iters.max().expand(1, 2).double())
    for name in ("evaluations", "failed", "residual"):
        assert torch.equal(getattr(report, name), getattr(lm(IDS).fixed_point, name)), name


@torch.no_grad()
def test_unconverged_padding_does_not_count_as_failed():
    """Limited to two evaluations, every real token fails: the share is 1, not more."""
    lm = model(token="iterate", stopping="causal", schedule="window:8", eval_max_iters=2).eval()
    mask = torch.ones_like(IDS)
    mask[:, 10:] = 0
    assert torch.equal(lm(IDS, attention_mask=mask).fixed_point.failed, torch.ones(2, 2))


@torch.no_grad()
def test_counts_of_padded_tokens_keep_their_positions():
    lm = model(n_layer=1, contractive=0.5).double().eval()
    mask = torch.ones_like(IDS)
    mask[:, :5] = 0
    padded = lm(IDS, attention_mask=mask, count_iterations=True).fixed_point
    alone = lm(IDS[:, 5:], count_iterations=True).fixed_point
    assert torch.equal(padded.token_iters[..., 5:], alone.token_iters)
