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
def called(monkeypatch):
    """Record every solve of a block as (solver, width, tolerance, ℓmax)."""
    found = []

    def spy(name, describe):
        solve = getattr(strategies, name)

        def solver(*args, **kwargs):
            found.append((name, *describe(*args, **kwargs)))
            return solve(*args, **kwargs)

        monkeypatch.setattr(strategies, name, solver)

    spy("solve_paper", lambda f, y, rule: (None, rule.tol, rule.max_iters))
    spy("solve_windows", lambda f, s, rule, width: (width, rule.tol, rule.max_iters))
    spy("solve_sequential", lambda token, s: (1, None, None))
    return found


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
    called, fields, training, schedule, solver, width, monkeypatch
):
    monkeypatch.setenv("FPRNN_KERNELS", "plain")
    made = model(max_iters=7, eval_max_iters=9, **fields).train(training)
    name, config = made.solver(LENGTH), made.config
    if config.token == "exact":  # at most w + 1 evaluations
        tol, limit, most = 0.01 if training else 1e-5, None, width + 1
    else:
        loose = training or config.stopping == "paper"
        tol, limit = 0.1 if loose else 0.01, 7 if training else 9
        most = limit
    if solver == "solve_sequential":
        tol = most = None
    assert name == {
        "token": config.token,
        "schedule": schedule,
        "stopping": config.stopping,
        "tol": tol,
        "max_iters": limit,
        "gradient": config.gradient,
    }
    with torch.no_grad():
        made(input_ids=IDS)
    assert set(called) == {(solver, width, tol, most)}


@pytest.mark.parametrize("name", ["plain", "auto"])
def test_auto_is_sequential_on_a_cpu(called, name, monkeypatch):
    monkeypatch.setenv("FPRNN_KERNELS", name)
    if name == "auto" and find_backend("cell", torch.zeros(1)) is None:
        pytest.skip("no compiler")
    made = model().eval()
    assert made.solver(LENGTH)["schedule"] == "sequential"
    with torch.no_grad():
        made(input_ids=IDS)
    assert bool(called) == (name == "plain")  # the kernel replaces the loops of solver.py


def test_single_token_is_sequential_under_every_schedule():
    ids, results = torch.tensor([[3]]), []
    for schedule in ("auto", "window:8", "sequential", "parallel"):
        made = model(schedule=schedule).eval()
        assert made.solver(1)["schedule"] == "sequential" and made.solver(1)["tol"] is None
        with torch.no_grad():
            results.append(made(input_ids=ids).logits)
    assert all(torch.equal(result, results[0]) for result in results)


# solving


def settings_of(made):
    """Return the configuration with the solver fields that each layer uses in a pass."""
    seen = []

    def remember(block, given):
        seen.append(block.get_settings(given[1]))

    blocks = [layer.block for layer in made.backbone.layers]
    hooks = [block.register_forward_pre_hook(remember) for block in blocks]
    with torch.no_grad():
        made(IDS)
    for hook in hooks:
        hook.remove()
    assert len(seen) == len(blocks)
    return seen


@torch.no_grad()
def test_solving_changes_settings_and_nothing_else():
    made = model(schedule="sequential", contractive=0.5).double().eval()
    before, plain = made.config.to_dict(), made(IDS)
    with made.solving(schedule="parallel", eval_tol=1e-9) as inside:
        assert inside is made and made.solver(LENGTH)["schedule"] == "parallel"
        assert made.solver()["tol"] == 1e-9
        other = made(IDS)
        with made.solving(stopping="paper", token="iterate"):
            assert made.solver()["stopping"] == "paper"
            assert made.solver()["gradient"] == "one_step"
            with made.backbone.solving(eval_tol=0.5):
                assert made.solver()["tol"] == 0.5 and made.solver()["token"] == "iterate"
            assert made.solver()["tol"] == 1e-9
        assert made.solver()["token"] == "exact" and made.solver()["schedule"] == "parallel"
        assert all(s is settings_of(made)[0] for s in settings_of(made))
    assert made.config.to_dict() == before
    assert all(s is made.config for s in settings_of(made))
    assert (other.fixed_point.evaluations > 1).all() and (plain.fixed_point.evaluations == 1).all()
    torch.testing.assert_close(other.logits, plain.logits, rtol=0, atol=1e-7)
    assert torch.equal(made(IDS).logits, plain.logits)


def test_solving_ends_after_an_exception_and_checks_fields():
    made = model()
    with pytest.raises(RuntimeError, match="inside"), made.solving(schedule="window:3"):
        raise RuntimeError("inside")
    assert all(s is made.config for s in settings_of(made))
    for fields, kind, words in [
        (dict(d_model=3), TypeError, "d_model is not a solver field: these are "),
        (dict(shedule="auto"), TypeError, "shedule is not a solver field"),
        (dict(schedule="windows"), ValueError, "schedule is `windows`"),
        (dict(tol=-1.0), ValueError, "tol is -1.0: it must be a number above 0"),
        (dict(stopping="paper"), ValueError, "needs token `iterate`"),
        (dict(gradient="implicit:2"), ValueError, "gradient is 'implicit:2'"),
        (dict(token="iterate", gradient="exact"), ValueError, "needs token `exact`"),
    ]:
        with pytest.raises(kind, match=words), made.solving(**fields):
            pass
        assert all(s is made.config for s in settings_of(made)), fields
    assert set(SOLVER) >= {"token", "schedule", "stopping", "tol", "gradient"}


# ℓ*


@pytest.mark.parametrize("schedule", ["sequential", "window:5", "parallel"])
@torch.no_grad()
def test_iteration_count_does_not_depend_on_the_solver(schedule):
    made = model(schedule=schedule, n_layer=1, contractive=0.5).double().eval()
    assert made(IDS).fixed_point.num_iters is None
    report = made(IDS, count_iterations=True).fixed_point
    with made.solving(token="iterate", tol=0.1, eval_tol=0.1, eval_max_iters=1000):
        paper = made(IDS, count_iterations=True).fixed_point
    assert torch.equal(report.num_iters, paper.num_iters) and report.num_iters.shape == (1, 2)
    assert torch.equal(report.token_iters, paper.token_iters)
    assert report.token_iters.shape == (1, 2, LENGTH) and report.converged.all()
    assert torch.equal(paper.evaluations, paper.num_iters.max().expand(1, 2).double())
    for name in ("evaluations", "failed", "residual"):
        assert torch.equal(getattr(report, name), getattr(made(IDS).fixed_point, name)), name


@torch.no_grad()
def test_counts_of_padded_tokens_keep_their_positions():
    made = model(n_layer=1, contractive=0.5).double().eval()
    mask = torch.ones_like(IDS)
    mask[:, :5] = 0
    padded = made(IDS, attention_mask=mask, count_iterations=True).fixed_point
    alone = made(IDS[:, 5:], count_iterations=True).fixed_point
    assert torch.equal(padded.token_iters[..., 5:], alone.token_iters)
