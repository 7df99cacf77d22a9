"""Every schedule is the exact solution, on a trained state tracker, in training and evaluation."""

from types import SimpleNamespace

import pytest
import torch

from lm.model.fixed_point import FixedPointBlock
from tests.tracker import loss_and_gradient, tracker, words

LONGER = 272  # more than two windows of 128


def relative(ours, theirs):
    """‖ours − theirs‖ / ‖theirs‖ of two {name: gradient}."""
    pairs = [(ours[name] - t, t) for name, t in theirs.items()]
    off, size = (torch.cat([p[i].flatten() for p in pairs]).norm() for i in (0, 1))
    return (off / size).item()


@pytest.fixture
def as_on_cuda(monkeypatch):
    """`auto` chooses as it does on a GPU."""
    real = FixedPointBlock.width

    def width(self, length, like):
        return real(self, length, SimpleNamespace(device=torch.device("cuda")))

    monkeypatch.setattr(FixedPointBlock, "width", width)


@pytest.mark.parametrize("schedule", ["auto", "window:16", "window:128", "parallel"])
def test_in_training_loss_and_gradient_are_the_sequential_ones(schedule, as_on_cuda):
    model = tracker()
    given = words(2, LONGER)
    with model.solving(schedule="sequential"):
        loss, gradient = loss_and_gradient(model, *given)
    assert loss < 0.05
    with model.solving(schedule=schedule):
        assert model.solver(LONGER)["schedule"] != "sequential"
        ours, its_gradient = loss_and_gradient(model, *given)
    assert ours == pytest.approx(loss, rel=1e-3)
    assert relative(its_gradient, gradient) < 0.01  # tol 0.01


@pytest.mark.parametrize("schedule", ["auto", "window:16", "parallel"])
def test_in_evaluation_whole_chunks_and_windows_agree(schedule, as_on_cuda):
    """A chunk's end is a window's end."""
    model = tracker().eval()
    ids, _ = words(2, LONGER)
    with torch.no_grad():
        with model.solving(schedule="sequential"):
            expected = model(ids).logits
        with model.solving(schedule=schedule):
            output = model(ids)
            chunks, cache = [], None
            for chunk in ids.split(50, 1):
                found = model(chunk, past_key_values=cache, use_cache=True)
                cache = found.past_key_values
                chunks.append(found.logits)
    assert output.fixed_point.failed.max() == 0
    assert (output.logits - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (torch.cat(chunks, 1) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_few_iterations_are_the_papers_limit_and_not_a_windows():
    model = tracker(max_iters=5, eval_max_iters=5, schedule="window:64")
    ids, _ = words(1, 130)
    assert model(ids).fixed_point.failed.max() == 0
    assert model.eval()(ids).fixed_point.failed.max() == 0
    assert model.solver(130)["max_iters"] is None
