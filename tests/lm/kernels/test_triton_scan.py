"""The Triton scan against the plain one: values, states, gradients by name; and that it compiles.

Without a GPU Triton interprets the kernels, step by step: hence the small sizes.
"""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from lm.kernels import Unsupported
from lm.kernels.triton import scan as triton_scan
from lm.kernels.triton.build import INTERPRETED, make_dense
from lm.model.scan import selective_scan_plain
from tests.kernels import (
    assert_close,
    assert_nothing_spills,
    find_kernels,
    poisoned_memory,
    record_launches,
    skip_if_missing,
    slice_unaligned,
)
from tests.lm.kernels.test_scans import evaluate
from tests.oracles import scan_inputs

BF16_TOL = 1e-2  # Triton's interpreter truncates results in bf16 instead of rounding them
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def poison_memory():
    skip_if_missing(triton_scan)
    with poisoned_memory():
        yield


@pytest.fixture
def set_chunk(monkeypatch):
    """Return a function (steps) that sets the length of the chunks."""

    def set_steps(steps):
        monkeypatch.setattr(triton_scan, "_chunk_length", lambda b, length, d, n: steps or length)

    return set_steps


def make_inputs(b, length, d, n, dtype=torch.float32, device=DEVICE):
    tensors = scan_inputs(b, length, d, n)
    return {k: v.to(device, dtype) for k, v in tensors.items()}


def make_keep(b, length):
    """Return keep with resets at the first token of sequence 0, and at tokens 4, 5, 9, 10, …."""
    keep = torch.ones(b, length, dtype=torch.bool, device=DEVICE)
    keep[0, 0] = False
    keep[:, 4::5] = keep[:, 5::5] = False
    return keep


def run_plain_scan(tensors, keep=None):
    keep = None if keep is None else keep.double()
    return evaluate(selective_scan_plain, {k: v.double() for k, v in tensors.items()}, keep)


@pytest.mark.parametrize(
    "b, length, d, n, chunk",
    [
        (2, 1, 5, 16, None),
        (1, 16, 1, 1, None),
        (2, 17, 70, 1, None),
        (1, 9, 3, 64, None),
        (1, 34, 3, 16, 16),
    ],
)
def test_scan_and_gradients_equal_the_plain_scan(b, length, d, n, chunk, set_chunk):
    set_chunk(chunk)
    tensors, keep = make_inputs(b, length, d, n), make_keep(b, length)
    ours = evaluate(triton_scan.selective_scan, tensors, keep)
    assert_close(ours, run_plain_scan(tensors, keep), 1e-5)


def test_chunks_change_rounding_only(set_chunk):
    tensors, keep = make_inputs(1, 34, 5, 2), make_keep(1, 34)
    runs = []
    for chunk in (None, 16, 16, 32):
        set_chunk(chunk)
        runs.append(evaluate(triton_scan.selective_scan, tensors, keep))
    whole, first, again, other = runs
    for name in first:
        assert torch.equal(first[name], again[name]), name
    assert_close(first, whole, 2e-6)
    assert_close(other, whole, 2e-6)


def test_chunks_are_whole_tiles():
    chunk = triton_scan._chunk_length
    assert triton_scan.MIN_CHUNK % triton_scan.TILE == 0
    assert chunk(16, 2048, 1536, 16) == 512
    assert chunk(1, 2048, 1536, 16) == 64
    assert chunk(64, 2048, 1536, 16) == 2048  # the GPU is full as it is
    assert [chunk(1, length, 64, 16) for length in (0, 1, 16, 127)] == [0, 1, 16, 127]
    for b, length, d, n in [(1, 130, 64, 16), (3, 1000, 100, 64), (2, 777, 1, 1), (0, 99, 4, 4)]:
        steps = chunk(b, length, d, n)
        assert steps == length or (steps % triton_scan.MIN_CHUNK == 0 and steps < length)


def test_each_argument_may_have_its_own_dtype():
    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    dtypes = dict(x=bf16, dt=fp16, A=fp32, B=bf16, C=fp16, h0=bf16)
    tensors = {k: v.to(dtypes[k]) for k, v in make_inputs(2, 18, 5, 3).items()}
    ours, expected = evaluate(triton_scan.selective_scan, tensors), run_plain_scan(tensors)
    for name, value in ours.items():
        assert value.dtype == dtypes.get(name.removeprefix("grad "), fp32), name
        tol = 1e-5 if value.dtype == fp32 else BF16_TOL
        assert_close({name: value}, {name: expected[name]}, tol)


def test_bf16_equals_fp32_up_to_rounding():
    tensors = make_inputs(1, 20, 5, 4, torch.bfloat16)
    assert_close(evaluate(triton_scan.selective_scan, tensors), run_plain_scan(tensors), BF16_TOL)


def test_contiguous_views_are_not_copied(set_chunk):
    set_chunk(16)
    t, keep = make_inputs(2, 20, 6, 3), make_keep(2, 20)

    def scan(keep, A, h0, x, dt, B, C):
        x, rest = torch.cat([x, dt, x], -1).split([6, 12], -1)
        _, B, C, _ = torch.cat([dt, B, C, dt], -1).split([6, 3, 3, 6], -1)
        dt, A = rest[..., :6], torch.stack([A, torch.full_like(A, torch.nan)], -1)[..., 0]
        views = x, dt, B, C
        assert all(make_dense(v) is v and not v.is_contiguous() for v in views)
        h0 = h0.transpose(1, 2).contiguous().transpose(1, 2)
        keep = keep.t().contiguous().t()
        return triton_scan.selective_scan(x, dt, A, B, C, h0, keep)

    views, plain = evaluate(scan, t, keep), evaluate(triton_scan.selective_scan, t, keep)
    for name in plain:
        assert torch.equal(views[name], plain[name]), name
    by_time = {k: v.transpose(0, 1).contiguous().transpose(0, 1) for k, v in t.items()}
    spread = {k: torch.stack([v, torch.full_like(v, torch.nan)], -1)[..., 0] for k, v in t.items()}
    for other in (by_time, spread):
        with torch.no_grad():
            y, h = triton_scan.selective_scan(**other, keep=keep)
        assert torch.equal(y, plain["y"]) and torch.equal(h, plain["final state"])


def test_wrong_shapes_are_refused():
    t = make_inputs(2, 4, 5, 3)
    with pytest.raises(TypeError, match=r"^B is on meta"):
        triton_scan.selective_scan(**{**t, "B": t["B"].to("meta")})
    with pytest.raises(Unsupported, match=r"at most 65535 sequences"):
        triton_scan.selective_scan(**make_inputs(65536, 1, 1, 1))


def make_launch_cases(d, n, dtype, in_two_chunks, length=128):
    """Return the launches of a forward and a backward pass as cases of `compile_kernels`.

    in_two_chunks: from a state, with resets. Otherwise: in one chunk from zero, on slices of
    projections, without resets.
    """
    tensors = make_inputs(1, length, d, n)
    tensors |= {name: tensors[name].to(dtype) for name in ("x", "dt", "B", "C")}
    keep = make_keep(1, length) if in_two_chunks else None
    if not in_two_chunks:
        del tensors["h0"]
        tensors |= {name: slice_unaligned(tensors[name]) for name in ("x", "dt", "B", "C")}
    for tensor in tensors.values():
        tensor.requires_grad_()
    with record_launches(triton_scan) as cases:
        y, h = triton_scan.selective_scan(**tensors, keep=keep)
        (y.sum() + h.sum()).backward()
    return cases


TRAINED = [(768, 16), (768, 64), (1536, 16), (1536, 64)]  # d, n


@pytest.mark.slow
def test_no_register_spills_at_the_default_shape():
    """Every kernel on one GPU: a compilation takes seconds."""
    cases = make_launch_cases(1536, 16, torch.bfloat16, in_two_chunks=True)
    assert {case["kernel"] for case in cases} == find_kernels(triton_scan)
    assert_nothing_spills(cases, [80])


@pytest.mark.slow
def test_no_register_spills_at_training_shapes():
    cases = []
    for (d, n), dtype in itertools.product(TRAINED, (torch.float32, torch.bfloat16)):
        cases += make_launch_cases(d, n, dtype, in_two_chunks=True, length=128)
        cases += make_launch_cases(d, n, dtype, in_two_chunks=False, length=64)
    assert_nothing_spills(cases)


@pytest.mark.slow
def test_single_channel_and_state_compile():
    """d = n = 1, which Triton compiles into the code."""
    assert_nothing_spills(make_launch_cases(1, 1, torch.float32, in_two_chunks=False, length=20))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tol", [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("chunk", [None, 512], ids=["its own chunks", "chunks of 512"])
def test_training_shape_equals_the_plain_scan(dtype, tol, chunk, set_chunk):
    if chunk:
        set_chunk(chunk)
    tensors = make_inputs(2, 2048, 1536, 16, dtype)
    tensors["dt"] = tensors["dt"] / 8
    keep = torch.rand(2, 2048, generator=torch.Generator().manual_seed(1)).to(DEVICE) > 0.01
    ours = evaluate(triton_scan.selective_scan, tensors, keep)
    expected = run_plain_scan(tensors, keep)
    assert_close(ours, expected, tol)
    assert_close({"y": ours["y"]}, {"y": expected["y"]}, 1e-4)
    for name, value in evaluate(triton_scan.selective_scan, tensors, keep).items():
        assert torch.equal(value, ours[name]), name
