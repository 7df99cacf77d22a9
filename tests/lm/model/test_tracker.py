"""Every schedule gives the exact solution on a trained state tracker."""

from types import SimpleNamespace

import pytest
import torch

from lm.kernels.cell_arguments import fits_a_gpu
from lm.kernels.cpu import cpu_cell
from lm.model import strategies
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from tests.kernels import skip_if_missing
from tests.tracker import compute_gradient, draw_words, load_tracker

LENGTH = 272  # more than two windows of 128


def relative_distance(ours, theirs):
    """Return ‖ours − theirs‖ / ‖theirs‖ of two {name: gradient}."""
    pairs = [(ours[name] - t, t) for name, t in theirs.items()]
    distance, size = (torch.cat([p[i].flatten() for p in pairs]).norm() for i in (0, 1))
    return (distance / size).item()


class FakeCudaBatch:
    """The attributes of a batch on a GPU by which `auto` chooses."""

    device, dtype = torch.device("cuda"), torch.float32

    def __len__(self):
        return 8


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Let `auto` choose as on a GPU without kernels."""
    real = strategies.choose_window_width
    like = FakeCudaBatch()
    monkeypatch.setattr(strategies, "choose_window_width", lambda *args: real(*args[:-1], like))


@pytest.mark.parametrize("schedule", ["auto", "window:16", "window:128", "parallel"])
def test_loss_and_gradient_equal_the_sequential_ones(schedule, as_on_cuda):
    model = load_tracker()
    batch = draw_words(2, LENGTH)
    with model.solving(schedule="sequential"):
        loss, gradient = compute_gradient(model, *batch)
    assert loss < 0.05
    with model.solving(schedule=schedule):
        assert model.solver(LENGTH)["schedule"] != "sequential"
        window_loss, window_gradient = compute_gradient(model, *batch)
    assert window_loss == pytest.approx(loss, rel=1e-3)
    assert relative_distance(window_gradient, gradient) < 0.01  # tol 0.01


@pytest.mark.parametrize("schedule", ["auto", "window:16", "parallel"])
def test_chunks_and_windows_agree_in_evaluation(schedule, as_on_cuda):
    """The end of a chunk ends a window."""
    model = load_tracker().eval()
    ids, _ = draw_words(2, LENGTH)
    with torch.no_grad():
        with model.solving(schedule="sequential"):
            expected = model(ids).logits
        with model.solving(schedule=schedule):
            output = model(ids)
            chunks, cache = [], None
            for chunk in ids.split(50, 1):
                chunk_output = model(chunk, past_key_values=cache, use_cache=True)
                cache = chunk_output.past_key_values
                chunks.append(chunk_output.logits)
    assert output.fixed_point.failed.max() == 0
    assert (output.logits - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (torch.cat(chunks, 1) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_window_passes_on_the_iterate_of_its_state(monkeypatch):
    """At a high tolerance y and F(y) differ, and h belongs to y."""
    model = load_tracker(schedule="window:8", eval_tol=2.0).eval()  # y stays 0
    (block,) = model.fixed_point_blocks()
    u = model.backbone.embeddings(draw_words(2, 16)[0])
    solver = block.choose_solver(u)
    state_ys, solve_all_tokens = [], solver.solve_all_tokens

    def record_state_y(inputs, *others):
        if inputs.seqs.state is not None:
            state_ys.append(inputs.seqs.state.y)
        return solve_all_tokens(inputs, *others)

    monkeypatch.setattr(solver, "solve_all_tokens", record_state_y)
    with torch.no_grad():
        solution = solver.solve(block.prepare(u))
    assert torch.equal(state_ys[0], solution.y[:, 7])
    assert not torch.equal(solution.y[:, 7], solution.f_y[:, 7])


def test_iterations_to_another_solution_are_counted():
    """On a state tracker the paper's iteration gives other answers, converged or not."""
    model = load_tracker().eval()
    ids, answers = draw_words(10, 64)
    with torch.no_grad():
        exact = model(ids, count_iterations=True)
        with model.solving(token="iterate"):
            iterated = model(ids, count_iterations=True)
    accuracy, iterated_accuracy = (
        (output.logits.argmax(-1) == answers).float().mean() for output in (exact, iterated)
    )
    assert accuracy > 0.95 and iterated_accuracy < 0.5
    assert exact.fixed_point.other_solution.mean() > 0.5
    assert iterated.fixed_point.other_solution.max() == 0
    torch.testing.assert_close(exact.fixed_point.num_iters, iterated.fixed_point.num_iters)


@pytest.mark.parametrize("rank", [1, 4])
def test_limited_gradients_equal_plain_pytorch(rank, monkeypatch):
    """Random reflections have tokens with a nearly singular equation."""
    skip_if_missing(cpu_cell)
    torch.manual_seed(0)
    sizes = {"vocab_size": 6, "d_model": 16, "n_layer": 1, "d_state": 4}
    model = FPRNNForCausalLM(FPRNNConfig(**sizes, mixer_rank=rank)).double()
    ids, answers = draw_words(6, 12)
    results = []
    for kernels in ("plain", "auto"):
        monkeypatch.setenv("FPRNN_KERNELS", kernels)
        stats = model(ids).fixed_point
        results.append((compute_gradient(model, ids, answers)[1], stats))
    (plain, plain_stats), (compiled, stats) = results
    assert (stats.grad_limited.mean() > 0.005) == (rank > 1)
    for name in ("failed", "bisected", "grad_limited"):
        torch.testing.assert_close(getattr(stats, name), getattr(plain_stats, name))
    assert relative_distance(compiled, plain) < 1e-6


def test_max_iters_does_not_limit_exact_windows():
    model = load_tracker(max_iters=5, eval_max_iters=5, schedule="window:64")
    ids, _ = draw_words(1, 130)
    assert model(ids).fixed_point.failed.max() == 0
    assert model.eval()(ids).fixed_point.failed.max() == 0
    assert model.solver(130)["max_iters"] is None


@pytest.mark.parametrize(
    "fields, schedule",
    [
        ({}, "sequential"),
        ({"mixer": "dplr", "mixer_rank": 8}, "sequential"),
        ({"mixer_rank": 9}, "window:128"),
        ({"mixer": "kronecker"}, "window:128"),
        ({"dt_h_dep": True}, "window:128"),
    ],
    ids=str,
)
def test_auto_on_a_gpu_is_sequential_if_kernels_can(fields, schedule, as_on_cuda, monkeypatch):
    sizes = {"vocab_size": 6, "d_model": 16, "n_layer": 1}
    model = FPRNNForCausalLM(FPRNNConfig(**sizes, **fields))
    assert model.solver(LENGTH)["schedule"] == "window:128"  # no GPU kernels are available
    monkeypatch.setattr(strategies, "find_backend", lambda *_: SimpleNamespace(fits=fits_a_gpu))
    assert model.solver(LENGTH)["schedule"] == schedule
