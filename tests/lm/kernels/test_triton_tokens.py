"""All tokens' equations at once in Triton against plain PyTorch: values, outcomes, residuals and
every gradient by name."""

import math

import pytest
import torch

pytest.importorskip("triton")

from lm.kernels import Unsupported
from lm.kernels.triton import tokens as triton_tokens
from lm.kernels.triton.build import INTERPRETED
from lm.model.cell import Norm, Own, find_root, solve_low_rank
from lm.model.mixers import ACTIVATIONS, nrm, reflections_of
from lm.model.solver import FAILED, token_residual
from tests.kernels import (
    assert_close,
    assert_nothing_spills,
    kernels_of,
    poisoned_memory,
    quicken_interpreter,
    recorded_launches,
    skip_where_missing,
    sliced,
)
from tests.marks import slow
from tests.tracker import loss_and_gradient, tracker, words

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
OPTIONS = triton_tokens.Options(1, 2.0, "silu", True, 1e-6, None, "layer", 1e-5)
NAMES = triton_tokens.NAMES

quicken_interpreter()


@pytest.fixture(autouse=True)
def poisoned():
    skip_where_missing(triton_tokens)
    with poisoned_memory():
        yield


def problem(b=2, length=3, d=19, heads=None, groups=1, without=(), seed=0, **options):
    """Options, and the tensors by name in fp64."""
    options = OPTIONS._replace(**options)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    wide = (b, length, d)
    given = dict(
        rows=normal(b, length, options.rank * (d + 1)), x=normal(*wide), o=normal(*wide),
        mixed=normal(*wide), dt=normal(b, length, heads or d).abs() / 4,
        bc=normal(b, length, groups), D=normal(d), z=normal(*wide), weight=normal(d) / 4 + 1,
        bias=normal(d) / 4,
    )  # fmt: skip
    return options, {name: None if name in without else t for name, t in given.items()}


def plain(options, tensors):
    """y and the outcome, by what lm.model computes."""
    rows, x, o, mixed, dt, bc, D, z, weight, bias = tensors.values()
    r, d = options.rank, x.shape[-1]
    own = Own(dt, bc, D, z, Norm(options.norm, weight, bias, options.norm_eps))
    a = options.scale * torch.sigmoid(rows[..., r * d :])
    u = ACTIVATIONS[options.act](rows[..., : r * d].unflatten(-1, (r, d)))
    reflections = reflections_of(a, nrm(u, options.eps), options.sequential)
    if options.contractive is not None:
        shrink = options.contractive / a.sum(-1, keepdim=True).clamp_min(options.contractive)
        reflections = reflections._replace(T=reflections.T * shrink.unsqueeze(-1))
    gain = own.gain(d)
    return solve_low_rank(own.token(x, o - gain * mixed, gain), reflections)[::2]


def results(compute, options, tensors, dtype=torch.float64):
    """y, the outcome and the gradient of every tensor."""
    tensors = {k: None if t is None else t.to(dtype) for k, t in tensors.items()}
    inputs = {k: t.requires_grad_() for k, t in tensors.items() if t is not None}
    y, outcome = compute(options, tensors)
    weights = torch.linspace(-3, 9, y.numel(), dtype=dtype, device=y.device).sin().view_as(y)
    grads = torch.autograd.grad(y, inputs.values(), weights)
    return {"y": y, "outcome": outcome, **dict(zip(inputs, grads))}


def ours(options, tensors):
    return triton_tokens.solve_tokens(options, *tensors.values())


def on_gpu(tensors):
    return {k: None if t is None else t.to(DEVICE) for k, t in tensors.items()}


@pytest.mark.parametrize(
    "given",
    [
        dict(b=1, length=1, d=1),
        dict(b=1, length=1, d=130, act="identity", without=("z",)),
        dict(d=64, heads=4, groups=2, rank=2, norm="rms", without=("bias",)),
        dict(d=24, heads=1, rank=3, sequential=False, contractive=0.9, act="relu"),
        dict(norm="none", scale=0.5, rank=2, without=("weight", "bias", "D", "z", "bc")),
        dict(eps=3.5, rank=2),  # some vectors are shorter, some longer
        slow(dict()),
        slow(dict(b=3, length=5, d=64, heads=4, groups=2, rank=2, norm="rms", without=("bias",))),
        slow(dict(d=24, heads=1, rank=3, sequential=False)),
        slow(dict(d=130, heads=13, groups=13, rank=4, act="identity", without=("z",))),
        slow(dict(contractive=0.9, rank=3, act="relu", without=("D",))),
    ],
    ids=str,
)
def test_equals_plain_pytorch_in_value_and_every_gradient(given):
    options, tensors = problem(**given)
    found = results(ours, options, on_gpu(tensors), torch.float32)
    assert_close({k: t.cpu() for k, t in found.items()}, results(plain, options, tensors), 3e-4)


def test_the_residual_is_that_of_the_iterate_and_nan_stays():
    options, tensors = problem(b=3, length=4)
    y = 2 * tensors["x"]
    g, outcome = plain(options, tensors)
    given = [t.float().to(DEVICE) for t in (*tensors.values(), y)]
    found = triton_tokens.solve_tokens_residual(options, *given)
    expected = g.float(), outcome, token_residual(y, g).float()
    for a, b in zip(found, expected):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-3, atol=1e-4)
    given[2][1, 2, 5] = math.nan
    g, outcome, residual = triton_tokens.solve_tokens_residual(options, *given)
    assert residual.isnan().sum() == 1 and residual[1, 2].isnan() and g[1, 2].isnan().all()
    assert outcome[1, 2] & FAILED and not (outcome & FAILED).sum() > 1


def test_parts_of_wider_tensors_and_no_gradient_of_what_wants_none():
    options, tensors = problem(b=1, length=1, d=9, rank=2)
    tensors = {k: t.float() for k, t in tensors.items()}
    expected = results(ours, options, on_gpu(tensors), torch.float32)
    apart = {k: sliced(t) if t.dim() == 3 and k != "bc" else t for k, t in tensors.items()}
    found = results(ours, options, on_gpu(apart), torch.float32)
    assert_close(found, expected, 1e-6)
    for alone in NAMES:
        given = {k: t.detach().requires_grad_(k == alone) for k, t in on_gpu(tensors).items()}
        y, _ = ours(options, given)
        weights = torch.linspace(-3, 9, y.numel(), device=y.device).sin().view_as(y)
        y.backward(weights)
        assert_close({alone: given[alone].grad}, {alone: expected[alone]}, 1e-5)
        assert all(t.grad is None for k, t in given.items() if k != alone)


def test_rows_and_x_may_be_narrow_and_their_gradients_are():
    options, tensors = problem(d=32)
    half = {k: t.bfloat16().double() if k in ("rows", "x", "z") else t for k, t in tensors.items()}
    expected = results(plain, options, half)
    given = {k: t.float() for k, t in half.items()}
    given.update({k: given[k].bfloat16() for k in ("rows", "x", "z")})
    given = {k: t.detach().requires_grad_() for k, t in on_gpu(given).items()}
    y, _ = ours(options, given)
    weights = torch.linspace(-3, 9, y.numel(), device=y.device).sin().view_as(y)
    y.backward(weights)
    assert given["rows"].grad.dtype is given["x"].grad.dtype is torch.bfloat16
    assert_close({"y": y.cpu()}, {"y": expected["y"]}, 1e-3)
    for name in NAMES:
        assert_close({name: given[name].grad.cpu()}, {name: expected[name]}, 0.02)


def test_a_program_adds_up_what_its_tokens_give(monkeypatch):
    monkeypatch.setattr(triton_tokens, "MOST_PARTIALS", 2)
    options, tensors = problem(b=1, length=7)
    found = results(ours, options, on_gpu(tensors), torch.float32)
    assert_close({k: t.cpu() for k, t in found.items()}, results(plain, options, tensors), 3e-4)


def test_without_a_root_the_gradient_is_that_of_a_constant(monkeypatch):
    """Plain PyTorch's rule, for tokens that the search has given up."""
    options, tensors = problem(b=1, length=2)
    real = triton_tokens._forward

    def failed(*args):
        g, outcome, *others = real(*args)
        return g, outcome.fill_(FAILED), *others

    monkeypatch.setattr(triton_tokens, "_forward", failed)
    found = results(ours, options, on_gpu(tensors), torch.float32)

    def failed_plain(coefficients):
        roots, outcome = find_root(coefficients)
        return roots, outcome | FAILED

    monkeypatch.setattr("lm.model.cell.find_root", failed_plain)
    expected = results(plain, options, tensors)
    for name in NAMES:
        assert_close({name: found[name].cpu()}, {name: expected[name]}, 1e-3)


@pytest.mark.parametrize(
    "change, error, words_of_it",
    [
        (dict(options=dict(rank=9)), Unsupported, "9 reflections"),
        (dict(tensors=dict(x=torch.zeros(2, 5, 19))), ValueError, "expected"),
        (dict(tensors=dict(D=torch.zeros(19).double())), Unsupported, "float64"),
        (dict(tensors=dict(dt=torch.zeros(2, 3, 4))), ValueError, "4 heads"),
    ],
    ids=["rank", "length", "dtype", "heads"],
)
def test_refuses(change, error, words_of_it):
    options, tensors = problem()
    tensors = {**{k: t.float() for k, t in tensors.items()}, **change.get("tensors", {})}
    with pytest.raises(error, match=words_of_it):
        ours(options._replace(**change.get("options", {})), on_gpu(tensors))


@pytest.mark.parametrize("schedule", ["parallel", slow("window:3")])
def test_a_trained_tracker_in_training_mode(schedule, monkeypatch):
    """Loss and gradient of a model that is solved by it, beside plain PyTorch's."""
    model, given, found = tracker(tol=1e-6).to(DEVICE), words(1, 3), {}
    used, real = [], triton_tokens.solve_tokens
    monkeypatch.setattr(
        triton_tokens, "solve_tokens", lambda *a: used.append(a[2].dtype) or real(*a)
    )
    for kernels in ("plain", "triton"):
        monkeypatch.setenv("FPRNN_KERNELS", kernels)
        with model.solving(schedule=schedule):
            found[kernels] = loss_and_gradient(model, *(t.to(DEVICE) for t in given))
    (loss, gradient), (ours_, its_gradient) = found["plain"], found["triton"]
    assert used and ours_ == pytest.approx(loss, rel=1e-4)
    both = [torch.cat([g[name].flatten() for name in gradient]) for g in (gradient, its_gradient)]
    assert (both[0] - both[1]).norm() < 1e-4 * both[0].norm()


def test_under_autocast_rows_are_read_as_they_are_multiplied(monkeypatch):
    model, given, found, dtypes = tracker().to(DEVICE), words(1, 2), {}, []
    monkeypatch.setenv("FPRNN_KERNELS", "triton")
    real = triton_tokens.solve_tokens
    monkeypatch.setattr(
        triton_tokens, "solve_tokens", lambda *a: dtypes.append(a[1].dtype) or real(*a)
    )
    for narrow in (False, True):
        autocast = torch.autocast(DEVICE, torch.bfloat16, enabled=narrow)
        with model.solving(schedule="parallel"), autocast:
            found[narrow] = loss_and_gradient(model, *(t.to(DEVICE) for t in given))
    assert dtypes == [torch.float32] * 2 + [torch.bfloat16] * 2  # F, and again for its adjoint
    (loss, gradient), (ours_, its_gradient) = found[False], found[True]
    assert ours_ == pytest.approx(loss, rel=0.05)
    both = [torch.cat([g[name].flatten() for name in gradient]) for g in (gradient, its_gradient)]
    assert 0 < (both[0] - both[1]).norm() < 0.1 * both[0].norm()


def launched(d, heads, rank, dtype):
    """One launch of each kernel, as cases of `resources`: FP-Mamba-1, of heads FP-Mamba-2."""
    of_block = dict(heads=heads, norm="rms", without=("bias",)) if heads < d else {}
    if heads == d == 1536 and dtype == torch.float32:
        of_block = dict(without=("z",))  # with a gate in the loop as well 8 and 168 bytes spill
    options, tensors = problem(b=1, length=2, d=d, rank=rank, **of_block)
    tensors = {k: None if t is None else t.float() for k, t in tensors.items()}
    tensors["rows"] = tensors["rows"].to(dtype)
    if tensors["z"] is not None:
        tensors["z"] = tensors["z"].to(dtype)
    tensors = {k: None if t is None else t.requires_grad_() for k, t in on_gpu(tensors).items()}
    with recorded_launches(triton_tokens) as cases:
        ours(options, tensors)[0].sum().backward()
        given = [None if t is None else t.detach() for t in tensors.values()]
        triton_tokens.solve_tokens_residual(options, *given, given[1])
    assert {case["kernel"] for case in cases} == kernels_of(triton_tokens)
    return cases


def test_nothing_spills_at_the_default_shape():
    assert_nothing_spills(launched(1536, 1536, 1, torch.bfloat16), [80])


@pytest.mark.slow
@pytest.mark.parametrize("d", [768, 1536])
def test_nothing_spills_at_the_shapes_that_training_uses(d):
    dtypes = (torch.float32, torch.bfloat16)
    cases = [launched(d, heads, 1, dtype) for heads in (d, d // 64) for dtype in dtypes]
    assert_nothing_spills([case for each in cases for case in each])


@pytest.mark.gpu
def test_on_a_card_it_equals_plain_pytorch():
    if INTERPRETED:
        pytest.skip("the kernels are interpreted")
    for given in (dict(b=4, length=50, d=1536), dict(b=4, length=50, d=1024, heads=16, rank=4)):
        options, tensors = problem(**given)
        found = results(ours, options, on_gpu(tensors), torch.float32)
        assert_close({k: t.cpu() for k, t in found.items()}, results(plain, options, tensors), 1e-2)
