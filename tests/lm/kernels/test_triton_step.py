"""The Triton kernels of an iteration and of the short convolution, against lm.model in fp64: values
and each gradient by name. Interpreted where there is no GPU."""

import math
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

pytest.importorskip("triton")

from lm.kernels import Unsupported
from lm.kernels.triton import step as triton_step
from lm.kernels.triton.build import INTERPRETED
from lm.kernels.triton.step import finish, finish_residual, mix, normalise
from lm.model.blocks import RMSNorm
from lm.model.mixers import MixerWeights, Reflections, nrm
from lm.model.solver import token_residual
from tests.kernels import (
    assert_close,
    assert_nothing_spills,
    kernels_of,
    poisoned_memory,
    recorded_launches,
    skip_where_missing,
)

DEVICE = "cpu" if INTERPRETED else "cuda"
TOL = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def poisoned():
    """What torch.empty returns is full of NaN throughout this file."""
    skip_where_missing(triton_step)
    with poisoned_memory():
        yield


class Random:
    """Tensors on the test's device, and slices of wider ones."""

    def __init__(self, seed=0):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape, dtype=torch.float32):
        t = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return t.to(DEVICE, dtype)

    def slice(self, *shape, dtype=torch.float32, before=3, after=5):
        """As a projection is: some columns of a tensor whose rest is NaN."""
        width = before + shape[-1] + after
        wide = torch.full((*shape[:-1], width), torch.nan, dtype=dtype, device=DEVICE)
        inner = wide[..., before : before + shape[-1]]
        return inner.copy_(self(*shape))


def compare(ours, plain, inputs, tol, spread=False, zero=()):
    """Outputs and gradients of `ours` on inputs {name: tensor or None} against `plain` on the same
    numbers in fp64. spread: the gradient that arrives is one number, with stride 0. zero: inputs
    whose gradient is zero but for rounding."""
    results = []
    for f, widen in ((ours, False), (plain, True)):
        leaves = {
            k: None if t is None else (t.double() if widen else t).detach().requires_grad_()
            for k, t in inputs.items()
        }
        out = f(**leaves)
        if spread:
            out.sum().backward()
        else:
            out.backward(Random(99)(*out.shape).to(out.dtype))
        tensors = {f"d{k}": t.grad for k, t in leaves.items() if t is not None}
        results.append({"out": out.detach(), **tensors})
    for k, t in inputs.items():
        assert t is None or results[0][f"d{k}"].dtype == t.dtype
    assert all(t.isfinite().all() for t in results[0].values())
    for k in zero:
        assert all(r.pop(f"d{k}").abs().max() < 1e-3 for r in results)
    assert_close(*results, tol)


# mix


def plain_mix(gates, vectors, x, y, rank, scale, eps, act, sequential):
    mixer = Reflections(x.shape[-1], 1, rank, None, act, eps, scale, sequential)
    return mixer(torch.cat([vectors, gates], -1), x - y, MixerWeights(None, None)) + y


def mix_inputs(b, length, d, rank, dtype=torch.float32, seed=0):
    r = Random(seed)
    return {
        "gates": r.slice(b, length, rank, dtype=dtype),
        "vectors": r.slice(b, length, rank * d, dtype=dtype),
        "x": r(b, length, d),
        "y": r.slice(b, length, d),
    }


def check_mix(inputs, tol=1e-5, spread=False, zero=(), **options):
    options = {"scale": 2.0, "eps": 1e-5, "act": "silu", "sequential": True, **options}
    options["rank"] = inputs["gates"].shape[-1]
    compare(
        lambda **t: mix(**t, **options), lambda **t: plain_mix(**t, **options), inputs, tol, spread,
        zero,
    )  # fmt: skip


@pytest.mark.parametrize("sequential", [True, False], ids=["householder", "dplr"])
@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("length, d", [(1, 5), (7, 1), (7, 48), (7, 100)])
def test_mix(sequential, rank, length, d):
    zero = ("vectors",) if d == 1 else ()  # u is ±1
    check_mix(mix_inputs(2, length, d, rank), zero=zero, sequential=sequential)


@pytest.mark.parametrize("act", ["silu", "relu", "identity"])
def test_mix_activations(act):
    check_mix(mix_inputs(2, 3, 48, 2), act=act, scale=1.0)


@pytest.mark.parametrize("sequential", [True, False], ids=["householder", "dplr"])
def test_mix_eight_reflections_of_many_channels(sequential):
    check_mix(mix_inputs(1, 2, 1500, 8), sequential=sequential, spread=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mix_of_narrow_projections(dtype):
    inputs = mix_inputs(2, 3, 100, 2, dtype=dtype)
    check_mix(inputs, TOL[dtype])
    for name in ("gates", "vectors"):  # each by itself may be fp32
        check_mix(inputs | {name: inputs[name].float()}, TOL[dtype])


@pytest.mark.parametrize("factor", [0.0, 1e-9], ids=["zero", "below eps"])
@pytest.mark.parametrize("act", ["silu", "identity"])
def test_mix_of_vectors_that_are_not_normalised(factor, act):
    inputs = mix_inputs(2, 3, 48, 2)
    inputs["vectors"][:, :, :48] *= factor  # the first of two
    check_mix(inputs, act=act)


@pytest.mark.parametrize("sequential", [True, False], ids=["householder", "dplr"])
def test_mix_of_vectors_around_eps(sequential):
    inputs = mix_inputs(2, 7, 48, 2)
    norms = inputs["vectors"].unflatten(-1, (2, 48)).norm(dim=-1)
    eps = norms.median().item() * 1.01
    assert (norms < eps).any() and (norms > eps).any()
    check_mix(inputs, eps=eps, act="identity", sequential=sequential)


def test_mix_keeps_a_nan():
    inputs = mix_inputs(1, 3, 48, 2)
    inputs["vectors"][0, 1, 5] = torch.nan
    for act in ("silu", "relu", "identity"):
        out = mix(**inputs, rank=2, scale=2.0, eps=1e-5, act=act, sequential=True)
        assert out.isnan().any(-1).tolist() == [[False, True, False]]


def test_mix_makes_only_the_gradients_that_are_needed():
    inputs = mix_inputs(1, 3, 5, 2)
    inputs["x"].requires_grad_()
    mix(**inputs, rank=2, scale=2.0, eps=1e-5, act="silu", sequential=True).sum().backward()
    assert inputs["x"].grad.isfinite().all() and inputs["y"].grad is None


def test_mix_without_a_gradient_is_the_same():
    inputs = mix_inputs(1, 3, 48, 2)
    options = {"rank": 2, "scale": 2.0, "eps": 1e-5, "act": "silu", "sequential": True}
    without = mix(**inputs, **options)
    inputs["x"].requires_grad_()
    assert torch.equal(without, mix(**inputs, **options).detach())


# normalise


def plain_normalise(v, groups, eps):
    return nrm(v.unflatten(-1, (groups, -1)), eps).flatten(-2)


def check_normalise(v, groups, tol=1e-5, eps=1e-5, spread=False, zero=()):
    compare(
        lambda **t: normalise(**t, groups=groups, eps=eps),
        lambda **t: plain_normalise(**t, groups=groups, eps=eps),
        {"v": v}, tol, spread, zero,
    )  # fmt: skip


@pytest.mark.parametrize("n", [1, 5, 8, 16, 64, 128])
@pytest.mark.parametrize("groups", [1, 3])
def test_normalise(n, groups):
    zero = ("v",) if n == 1 else ()  # the result is ±1
    check_normalise(Random().slice(2, 7, groups * n), groups, zero=zero)


def test_normalise_of_narrow_projections_and_a_spread_gradient():
    r = Random()
    check_normalise(r.slice(2, 3, 16, dtype=BF16), 2, TOL[BF16])
    check_normalise(r.slice(1, 1, 16), 1, spread=True)


@pytest.mark.parametrize("factor", [0.0, 1e-9], ids=["zero", "below eps"])
def test_normalise_of_vectors_below_eps(factor):
    v = Random()(2, 3, 16)
    v[:, 1] *= factor
    check_normalise(v, 1)


def test_normalise_of_vectors_around_eps():
    v = Random()(2, 7, 16)
    check_normalise(v, 1, eps=v.norm(dim=-1).median().item() * 1.01)


def test_normalise_keeps_a_nan():
    v = Random()(2, 3, 16)
    v[0, 1, 2] = torch.nan
    assert normalise(v, 1, 1e-5).isnan().sum(-1).tolist() == [[0, 16, 0], [0, 0, 0]]


# finish


def plain_finish(o, x, D, z, weight, bias, eps, kind):
    w = o + D * x
    w = w if z is None else w * F.silu(z)
    if kind == "layer":
        g = F.layer_norm(w, w.shape[-1:], weight, bias, eps)
    else:
        g = functional_call(RMSNorm(w.shape[-1], eps), {"weight": weight}, w)
    return g


def finish_inputs(b, length, d, kind="layer", gate=True, dtype=torch.float32, params=torch.float32):
    r = Random()
    return {
        "o": r(b, length, d),
        "x": r.slice(b, length, d),
        "D": r(d, dtype=params),
        "z": r.slice(b, length, d, dtype=dtype) if gate else None,
        "weight": r(d, dtype=params),
        "bias": r(d, dtype=params) if kind == "layer" else None,
    }


def check_finish(inputs, kind, tol=1e-5, eps=1e-5, spread=False):
    compare(
        lambda **t: finish(**t, eps=eps, kind=kind),
        lambda **t: plain_finish(**t, eps=eps, kind=kind),
        inputs, tol, spread,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("gate", [True, False], ids=["gate", "no gate"])
@pytest.mark.parametrize("length, d", [(1, 5), (7, 48), (7, 100), (2, 1500)])
def test_finish(kind, gate, length, d):
    check_finish(finish_inputs(2, length, d, kind, gate), kind)


def test_finish_of_one_channel():
    check_finish(finish_inputs(2, 7, 1, "rms"), "rms", 1e-4)  # of x / |x| the gradient is ~0


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_finish_of_narrow_inputs_and_a_spread_gradient(kind):
    check_finish(finish_inputs(2, 7, 100, kind, dtype=BF16, params=BF16), kind, TOL[BF16])
    check_finish(finish_inputs(2, 3, 100, kind), kind, 1e-4, spread=True)


def test_finish_sums_over_more_tokens_than_programs(monkeypatch):
    monkeypatch.setattr(triton_step, "MOST_PARTIALS", 3)
    check_finish(finish_inputs(3, 37, 100), "layer")


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_finish_of_zeros(kind):
    inputs = finish_inputs(1, 3, 5, kind)
    check_finish(inputs | {k: inputs[k] * 0 for k in ("o", "x", "z")}, kind)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("d", [1, 5, 100])
def test_finish_residual(kind, d):
    inputs, y = finish_inputs(2, 7, d, kind), Random(1).slice(2, 7, d)
    g, residual = finish_residual(**inputs, eps=1e-5, kind=kind, y=y)
    wide = {k: None if t is None else t.double() for k, t in inputs.items()}
    expected = plain_finish(**wide, eps=1e-5, kind=kind)
    theirs = {"g": expected, "residual": token_residual(y.double(), expected)}
    assert_close({"g": g, "residual": residual}, theirs, 1e-5)
    assert torch.equal(g, finish(**inputs, eps=1e-5, kind=kind))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", ["y", "o", "x", "z", "weight"])
@pytest.mark.parametrize("where", [0, 47])
def test_a_nan_reaches_the_residual(name, where, sign):
    inputs = finish_inputs(2, 3, 48) | {"y": Random(1)(2, 3, 48)}
    bad = inputs[name] if name == "weight" else inputs[name][1, 1]
    bad[where] = math.copysign(math.nan, sign)
    _, residual = finish_residual(**inputs, eps=1e-5, kind="layer")
    expected = torch.zeros(2, 3, dtype=torch.bool)
    expected[1, 1] = True
    assert torch.equal(residual.isnan().cpu(), expected | (name == "weight"))


def test_an_infinite_iterate_has_an_infinite_residual():
    inputs, y = finish_inputs(1, 2, 48), Random(1)(1, 2, 48)
    y[0, 1, 3] = -torch.inf
    _, residual = finish_residual(**inputs, eps=1e-5, kind="layer", y=y)
    assert residual.isinf().tolist() == [[False, True]] and not residual.isnan().any()


# what all share


def test_float64_is_refused_in_a_sentence():
    with pytest.raises(Unsupported, match=r"x is torch.float64.*float32"):
        finish(**finish_inputs(1, 2, 5) | {"x": Random()(1, 2, 5).double()}, eps=1e-5, kind="rms")
    with pytest.raises(Unsupported, match=r"v is torch.float64"):
        normalise(Random()(1, 2, 5).double(), 1, 1e-5)


def test_wrong_shapes_and_names_are_refused():
    inputs = mix_inputs(1, 2, 5, 2)
    options = {"rank": 2, "scale": 2.0, "eps": 1e-5, "act": "silu", "sequential": True}
    with pytest.raises(ValueError, match="unknown act `gelu`"):
        mix(**inputs, **options | {"act": "gelu"})
    with pytest.raises(ValueError, match=r"gates is \(1, 2, 2\) where \(1, 2, 3\)"):
        mix(**inputs, **options | {"rank": 3})
    with pytest.raises(ValueError, match=r"vectors is \(1, 2, 10\) where \(1, 2, 15\)"):
        mix(**inputs | {"gates": Random()(1, 2, 3)}, **options | {"rank": 3})
    with pytest.raises(ValueError, match="unknown kind `batch`"):
        finish(**finish_inputs(1, 2, 5), eps=1e-5, kind="batch")


def test_no_tokens():
    inputs = mix_inputs(2, 0, 5, 2)
    inputs["x"].requires_grad_()
    mix(**inputs, rank=2, scale=2.0, eps=1e-5, act="silu", sequential=True).sum().backward()
    assert inputs["x"].grad.shape == (2, 0, 5)
    tensors = finish_inputs(2, 0, 5)
    tensors["weight"].requires_grad_()
    finish(**tensors, eps=1e-5, kind="layer").sum().backward()
    assert not tensors["weight"].grad.any()


def test_in_inference_mode():
    with torch.inference_mode():
        inputs = mix_inputs(1, 3, 5, 2)
        y = mix(**inputs, rank=2, scale=2.0, eps=1e-5, act="silu", sequential=True)
        g, residual = finish_residual(**finish_inputs(1, 3, 5), eps=1e-5, kind="layer", y=y)
        assert residual.isfinite().all() and normalise(g, 1, 1e-5).isfinite().all()


def everything(b, length, d, rank, n, dtype):
    """Every function once or more, with gradients, at a real shape: yields (ours, plain, inputs,
    tolerance)."""
    options = {"rank": rank, "scale": 2.0, "eps": 1e-5, "act": "silu", "sequential": True}
    for sequential in (True, False):
        o = options | {"sequential": sequential}
        yield (
            lambda **t: mix(**t, **o), lambda **t: plain_mix(**t, **o),  # noqa: B023
            mix_inputs(b, length, d, rank, dtype=dtype), TOL[dtype],
        )  # fmt: skip
    yield (
        lambda **t: normalise(**t, groups=1, eps=1e-5),
        lambda **t: plain_normalise(**t, groups=1, eps=1e-5),
        {"v": Random().slice(b, length, n, dtype=dtype)}, TOL[dtype],
    )  # fmt: skip
    for kind in ("layer", "rms"):
        o = {"eps": 1e-5, "kind": kind}
        yield (
            lambda **t: finish(**t, **o), lambda **t: plain_finish(**t, **o),  # noqa: B023
            finish_inputs(b, length, d, kind, dtype=dtype), TOL[dtype],
        )  # fmt: skip


def with_gradients(f, inputs, **options):
    leaves = {k: None if t is None else t.detach().requires_grad_() for k, t in inputs.items()}
    f(**leaves, **options).sum().backward()


def launched(d, n, rank, dtype, stop=None):
    """What each of `everything` launches, up to `stop` and on slices or on whole tensors, and what
    the residual does."""
    with recorded_launches(triton_step) as cases:
        for ours, _, inputs, _ in islice(everything(1, 32, d, rank, n, dtype), stop):
            with_gradients(ours, inputs)
            with_gradients(ours, {k: None if t is None else +t for k, t in inputs.items()})
        inputs = finish_inputs(1, 32, d, dtype=dtype)
        finish_residual(**inputs, eps=1e-5, kind="layer", y=inputs["o"])
    return cases


@pytest.mark.slow
def test_nothing_spills_at_the_default_shape():
    cases = launched(1536, 16, 1, BF16)
    with recorded_launches(triton_step) as others:  # what may be left out
        inputs = mix_inputs(1, 3, 48, 1)
        options = {"rank": 1, "scale": 1.0, "eps": 1e-5, "act": "relu", "sequential": False}
        with_gradients(lambda x: mix(**inputs | {"x": x}, **options), {"x": inputs["x"]})
        with_gradients(normalise, {"v": Random()(1, 3, 15)}, groups=3, eps=1e-5)
        with_gradients(finish, finish_inputs(1, 3, 48, gate=False), eps=1e-5, kind="layer")
    assert {case["kernel"] for case in cases} == kernels_of(triton_step)
    assert_nothing_spills(cases + others)


@pytest.mark.slow
@pytest.mark.parametrize("d", [768, 1536])
def test_nothing_spills_at_the_shapes_that_training_uses(d):
    cases = []
    for dtype in (torch.float32, BF16):
        for rank, n, stop in [(1, 16, None), (2, 64, 3), (3, 64, 2), (4, 64, 2)]:
            new = launched(d, n, rank, dtype, stop)  # after the mixers rank is without effect
            cases += [case for case in new if case not in cases]
    assert_nothing_spills(cases)


@pytest.mark.gpu
def test_at_a_real_shape():
    for ours, plain, inputs, tol in everything(4, 2048, 1536, 2, 16, BF16):
        compare(ours, plain, inputs, tol)
    inputs, y = finish_inputs(4, 2048, 1536, dtype=BF16), Random(1)(4, 2048, 1536)
    g, residual = finish_residual(**inputs, eps=1e-5, kind="layer", y=y)
    torch.testing.assert_close(residual, token_residual(y, g))
