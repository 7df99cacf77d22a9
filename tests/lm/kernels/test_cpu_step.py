"""The compiled parts of an iteration against plain PyTorch in fp64, lm.model's own pieces."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from lm.kernels import Unsupported
from lm.kernels.cpu import step as cpu_step
from lm.kernels.cpu.build import token_step
from lm.model.mixers import Reflections, nrm
from lm.model.solver import token_residual
from tests.kernels import assert_close, poisoned_memory, skip_where_missing

EPS = 1e-5
ORDER = ("gates", "vectors", "x", "y")
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6}
SIZES = [(1, 1, 1), (1, 7, 5), (3, 171, 48), (2, 3, 100), (7, 1, 256)]  # b, l, d
SIZE_IDS = "{0[0]}x{0[1]}x{0[2]}".format


@pytest.fixture(autouse=True)
def without_gradient_in_poisoned_memory():
    skip_where_missing(cpu_step)
    with poisoned_memory(), torch.no_grad():
        yield


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def in_dtype(tensors, dtype):
    return {k: None if v is None else v.to(dtype) for k, v in tensors.items()}


def mix_inputs(b, length, d, rank):
    """As a block has them: slices of what one product made."""
    raw = random(b, length, 3 + rank + rank * d + 2)
    return {
        "gates": raw[..., 3 : 3 + rank],
        "vectors": raw[..., 3 + rank : -2],
        "x": random(b, length, d, seed=1),
        "y": random(b, length, d, seed=2),
    }


def plain_mix(gates, vectors, x, y, rank, scale, eps, act, sequential):
    mixer = Reflections(x.shape[-1], 1, rank, None, act, eps, scale, sequential)
    return mixer(torch.cat([vectors, gates], -1), x - y, mixer.weights(x)._replace(extra=())) + y


def finish_inputs(b, length, d):
    wide = random(b, length, 4 * d)
    parts = dict(zip(("o", "x", "z", "y"), wide.split(d, -1)))
    return {**parts, **dict(zip(("D", "weight", "bias"), random(3, d, seed=1)))}


def plain_finish(o, x, D, z, weight, bias, eps, kind, y, mask=None):
    w = o if D is None else o + D * x
    w = w if z is None else w * F.silu(z)
    if kind == "layer":
        g = F.layer_norm(w, weight.shape, weight, bias, eps)
    else:
        g = w * torch.rsqrt(w.square().mean(-1, keepdim=True) + eps) * weight
    g = g if mask is None else g * mask.unsqueeze(-1)
    return g, None if y is None else token_residual(y, g)


def alike(ours, theirs, tol):
    """Tensors, or tuples of them that may be None."""
    ours, theirs = ((t,) if torch.is_tensor(t) else t for t in (ours, theirs))
    assert [t is None for t in ours] == [t is None for t in theirs]
    assert_close(
        *({str(i): t for i, t in enumerate(s) if t is not None} for s in (ours, theirs)), tol
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sequential", [True, False], ids=["householder", "dplr"])
@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("size", SIZES, ids=SIZE_IDS)
def test_mix(size, rank, sequential, dtype):
    inputs = mix_inputs(*size, rank)
    for act in ("silu", "relu", "identity"):
        for scale in (1.0, 2.0):
            rest = (rank, scale, EPS, act, sequential)
            theirs = plain_mix(*map(inputs.get, ORDER), *rest)
            ours = cpu_step.mix(*map(in_dtype(inputs, dtype).get, ORDER), *rest)
            alike(ours, theirs, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("groups, width", [(1, 1), (2, 5), (2, 16), (4, 24), (3, 64)])
def test_normalise(groups, width, dtype):
    for shape in ((1, 1), (1, 7), (3, 171)):
        v = random(*shape, groups * width + 3)[..., 1:-2]
        ours = cpu_step.normalise(v.to(dtype), groups, EPS)
        theirs = nrm(v.unflatten(-1, (groups, width)), EPS).flatten(-2)
        alike(ours, theirs, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("size", SIZES, ids=SIZE_IDS)
def test_finish_residual(size, kind, dtype):
    # LayerNorm of one channel is its bias whatever comes in.
    inputs = finish_inputs(*size)
    inputs["bias"] = None if kind == "rms" else inputs["bias"]
    mask = random(*size[:2], seed=3) > -0.5
    for missing in ((), ("z",), ("x", "D"), ("y",), ("x", "D", "z", "y")):
        for extra in ({}, {"mask": mask}):
            some = {**inputs, **dict.fromkeys(missing), "kind": kind, "eps": EPS, **extra}
            same = {
                k: v.to(dtype) if torch.is_tensor(v) and k != "mask" else v for k, v in some.items()
            }
            alike(cpu_step.finish_residual(**same), plain_finish(**some), 5 * TOLERANCE[dtype])


def test_a_large_mean_does_not_cancel():
    inputs = {**finish_inputs(1, 3, 100), "z": None, "kind": "layer", "eps": EPS}
    inputs["o"] = inputs["o"] + 300
    theirs = plain_finish(**inputs)
    single = {k: v.float() if torch.is_tensor(v) else v for k, v in inputs.items()}
    alike(cpu_step.finish_residual(**single), theirs, 1e-4)  # 300 itself is rounded to 3e-5


def everything(dtype=torch.float32, b=3, length=171, d=100, rank=2, change=lambda t: t):
    """{name: result} of all three, each input through `change`."""

    def cast(tensors):
        return {k: change(v.to(dtype)) for k, v in tensors.items()}

    inputs, finish = cast(mix_inputs(b, length, d, rank)), cast(finish_inputs(b, length, d))
    found = {
        f"mix {name}": cpu_step.mix(*map(inputs.get, ORDER), rank, 2.0, EPS, "silu", sequential)
        for name, sequential in (("householder", True), ("dplr", False))
    }
    found["unit"] = cpu_step.normalise(inputs["vectors"], 4, EPS)
    for kind in ("layer", "rms"):
        g, residual = cpu_step.finish_residual(**finish, eps=EPS, kind=kind)
        found |= {f"{kind} g": g, f"{kind} residual": residual}
    return found


def same_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert not ours[name].isnan().any() and torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_number_of_threads_changes_nothing(dtype):
    runs = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            runs.append(everything(dtype, d=300))  # 153,900 entries: enough to be shared out
    finally:
        torch.set_num_threads(1)
    for other in runs[1:]:
        same_bits(runs[0], other)


def test_a_token_does_not_depend_on_what_is_around_it():
    def one(t):
        return t[1:2, 70:71] if t.ndim == 3 else t

    whole, alone = everything(), everything(change=one)
    same_bits({k: v[1:2, 70:71] for k, v in whole.items()}, alone)


STRIDES = {
    "wider rows": lambda t: torch.cat([t, t + torch.nan], -1)[..., : t.shape[-1]],
    "every other token": lambda t: torch.stack([t, t + torch.nan], 2)[:, :, 0],
    "more tokens": lambda t: torch.cat([t, t + torch.nan], 1)[:, : t.shape[1]],
    "channels first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "every other channel": lambda t: torch.stack([t, t + torch.nan], -1)[..., 0],
}


@pytest.mark.parametrize("layout", STRIDES)
def test_any_strides(layout):
    def lay_out(t):
        return STRIDES[layout](t) if t.ndim == 3 else t

    expected = everything(length=11, d=20)
    same_bits(everything(length=11, d=20, change=lay_out), expected)
    expected = everything(b=1, length=11, d=20)
    same_bits(everything(b=1, length=11, d=20, change=lay_out), expected)
    expected = everything(length=1, d=20)
    same_bits(everything(length=1, d=20, change=lay_out), expected)


def test_slices_of_rows_are_not_copied():
    t = random(3, 5, 20)
    parts = (t, t[..., 4:9], t[:, :, :1], t[:1, 1:3, 2:], t[:1, :, 3:].expand(1, 5, 17))
    for part, expected in (*((part, 20) for part in parts), (t[:, 2:3], 100)):
        same, step = token_step(part)
        assert same is part and step == expected
    for part in (t[:, :3], t[..., ::2], t.transpose(0, 1)):
        copy, step = token_step(part)
        assert copy is not part and copy.is_contiguous() and step == part.shape[2]


def test_what_is_zero_stays_zero_and_divides_nothing():
    zero = torch.zeros(1, 2, 20)
    x, y, gates = *random(2, 1, 2, 20).float(), torch.ones(1, 2, 1)
    for act in ("silu", "relu", "identity"):
        assert torch.equal(cpu_step.mix(gates, zero, x, y, 1, 2.0, EPS, act), x)
    below = cpu_step.mix(gates, -x.abs(), x, y, 1, 2.0, EPS, "relu")
    assert torch.equal(below, x)
    assert torch.equal(cpu_step.normalise(zero, 2, EPS), zero)
    weight, bias = random(2, 20).float()
    g, residual = cpu_step.finish_residual(zero, x, weight, zero, weight, bias, EPS, "layer", zero)
    assert torch.equal(g, bias.expand_as(g))
    assert torch.allclose(residual, torch.ones(1, 2))
    g, residual = cpu_step.finish_residual(zero, None, None, None, weight, None, EPS, "rms", zero)
    assert torch.equal(g, zero) and torch.equal(residual, zero[..., 0])


def test_activations_far_out():
    v = torch.tensor([-torch.inf, -1e30, -200.0, -90.0, -1e-30, 1e-30, 90.0, 200.0, 1e18])
    v = v.reshape(1, -1, 1)
    one, none = torch.ones_like(v), torch.zeros_like(v)
    weight, nothing = torch.ones(1), torch.zeros(1)
    for dtype in TOLERANCE:
        gate = cpu_step.finish_residual(
            *(t.to(dtype) for t in (one, one, nothing, v, weight)), None, 1.0, "rms", None
        )[0]
        assert torch.allclose(
            gate,
            plain_finish(one, None, None, v, weight, None, 1.0, "rms", None)[0].to(dtype),
            equal_nan=True,
        )
        a = cpu_step.mix(*(t.to(dtype) for t in (v, one, one, none)), 1, 1.0, EPS, "identity")
        assert torch.allclose(a, torch.sigmoid(-v).to(dtype), atol=1e-7)


@pytest.mark.parametrize("channel", [0, 15, 16, 19])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_token_and_is_seen(bad, channel):
    inputs, finish = mix_inputs(1, 3, 20, 2), finish_inputs(1, 3, 20)
    rest = (2, 2.0, EPS, "silu", True)
    clean = cpu_step.mix(*map(inputs.get, ORDER), *rest)
    for name in ORDER:
        broken = inputs[name].clone()
        broken[0, 1, channel % broken.shape[2]] = bad
        at = {**inputs, name: broken}
        for dtype, act in itertools.product(TOLERANCE, ("silu", "relu", "identity")):
            other = (*rest[:3], act, True)
            ours = cpu_step.mix(*map(in_dtype(at, dtype).get, ORDER), *other)
            theirs = plain_mix(*map(at.get, ORDER), *other)
            assert torch.equal(ours.isfinite(), theirs.isfinite()), name
        ours = cpu_step.mix(*map(at.get, ORDER), *rest)
        assert torch.equal(ours[:, ::2], clean[:, ::2])
    for name in ("o", "x", "z", "y"):
        for kind in ("layer", "rms"):
            at = {**finish, name: finish[name].clone(), "kind": kind, "eps": EPS}
            at["bias"] = finish["bias"] if kind == "layer" else None
            at[name][0, 1, channel] = bad
            ours, theirs = cpu_step.finish_residual(**at), plain_finish(**at)
            for o, t in zip(ours, theirs):
                torch.testing.assert_close(o, t, equal_nan=True)
            if bad != bad:
                assert ours[1].isnan().tolist() == [[False, True, False]]
    v = inputs["vectors"].clone()
    v[0, 1, channel] = bad
    torch.testing.assert_close(
        cpu_step.normalise(v, 2, EPS),
        nrm(v.unflatten(-1, (2, 20)), EPS).flatten(-2),
        equal_nan=True,
    )


@pytest.mark.parametrize("b, length", [(0, 4), (2, 0)], ids=["no rows", "no tokens"])
def test_nothing_to_do(b, length):
    for name, found in everything(b=b, length=length).items():
        assert found.shape[:2] == (b, length), name


def test_what_does_not_fit_is_refused():
    inputs, finish = mix_inputs(1, 3, 20, 2), finish_inputs(1, 3, 20)
    rest = (2, 2.0, EPS)
    mix = [inputs[name] for name in ORDER]
    with pytest.raises(ValueError, match=r"gates is \(1, 3, 2\) where \(1, 3, 1\) is expected"):
        cpu_step.mix(*mix, 1, 2.0, EPS)
    with pytest.raises(ValueError, match="act is `gelu` of silu, relu, identity"):
        cpu_step.mix(*mix, *rest, "gelu")
    with pytest.raises(Unsupported, match=r"^y is torch.float32, the first input .*64"):
        cpu_step.mix(*mix[:-1], mix[-1].float(), *rest)
    with pytest.raises(TypeError, match=r"^x is on meta"):
        cpu_step.mix(*mix[:-2], mix[-2].to("meta"), mix[-1], *rest)
    with pytest.raises(Unsupported, match=r"^v is torch.bfloat16"):
        cpu_step.normalise(mix[-1].bfloat16(), 1, EPS)
    with pytest.raises(ValueError, match="3 groups do not divide 20 entries"):
        cpu_step.normalise(mix[-1], 3, EPS)
    with pytest.raises(ValueError, match="kind is `batch` of layer, rms"):
        cpu_step.finish_residual(**finish, eps=EPS, kind="batch")
    with pytest.raises(ValueError, match="x and D go together"):
        cpu_step.finish_residual(**{**finish, "D": None}, eps=EPS, kind="layer")
    with pytest.raises(ValueError, match=r"mask is \(3, 1\) of torch.bool"):
        cpu_step.finish_residual(**finish, eps=EPS, kind="rms", mask=torch.ones(3, 1).bool())
    with torch.enable_grad(), pytest.raises(RuntimeError, match="no gradient"):
        cpu_step.normalise(mix[-1].requires_grad_(), 1, EPS)
