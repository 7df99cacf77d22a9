"""The Triton kernel `cell` against an independent loop: values, states, and gradients by name."""

import math

import pytest
import torch

pytest.importorskip("triton")

from lm.kernels import Unsupported
from lm.kernels.cell_arguments import CellArguments, Layout, Options, Sizes
from lm.kernels.cpu import cpu_cell
from lm.kernels.triton import launches, triton_cell
from lm.kernels.triton.build import INTERPRETED
from lm.model.solver import BISECTED, FAILED, GRAD_LIMITED
from tests import oracle_cell
from tests.kernels import (
    assert_close,
    assert_nothing_spills,
    describe_launch,
    find_kernels,
    poisoned_memory,
    quicken_interpreter,
    skip_if_missing,
)
from tests.lm.kernels.test_cpu_cell import (
    cast,
    evaluate,
    make_problem,
    make_rnn_problem,
    slice_tensors,
    solve,
)
from tests.marks import slow
from tests.tracker import compute_gradient, draw_words, load_tracker

DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter warns when a search goes through a pole.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


quicken_interpreter()


@pytest.fixture(autouse=True)
def poison_memory():
    skip_if_missing(triton_cell)
    with poisoned_memory():
        yield


def move_to_device(problem):
    layout, options, tensors = problem
    return layout, options, {k: None if v is None else v.to(DEVICE) for k, v in tensors.items()}


def run_kernel(problem, dtype=torch.float32, **others):
    computed = evaluate(triton_cell.cell, move_to_device(problem), dtype, **others)
    return {name: t.cpu() for name, t in computed.items()}


def run_oracle(problem):
    return evaluate(oracle_cell.solve_cell, problem)


def assert_equals_the_loop(problem, tol=3e-4):
    assert_close(run_kernel(problem), run_oracle(problem), tol)


@pytest.mark.parametrize(
    "sizes",
    [
        dict(b=2, length=1, d=8, n=1),
        dict(b=1, length=5, d=19, n=16),
        dict(b=2, length=3, d=130, n=9),
        slow(dict(b=3, length=5, d=64, n=33)),
        slow(dict(b=17, length=3, d=20, n=5)),
    ],
    ids=str,
)
def test_values_and_gradients_equal_the_loop(sizes):
    assert_equals_the_loop(make_problem(**sizes))


@pytest.mark.parametrize(
    "rank, sequential",
    [
        (2, True),
        (4, False),
        *(slow(rank, True) for rank in (1, 3, 4, 8)),
        *(slow(rank, False) for rank in (1, 2, 3, 8)),
    ],
)
def test_all_ranks_equal_the_loop(rank, sequential):
    scale = 1.0 if not sequential and rank > 2 else 2.0
    problem = make_problem(length=2, rank=rank, sequential=sequential, scale=scale)
    assert_equals_the_loop(problem)


@pytest.mark.parametrize(
    "others",
    [
        dict(norm="rms", without=("norm_bias",), contractive=0.9, act="relu", rank=2),
        dict(norm="none", without=("norm_weight", "norm_bias", "gate"), act="identity"),
        dict(without=("norm_weight", "norm_bias", "y0", "h0", "keep"), bc_norm=False, reading=0),
        dict(order=("gates", "C", "B", "vectors"), reading=2, sequential=False, rank=2),
        # some vectors are shorter than eps 3.5, some longer
        dict(order=("B", "pad", "C", "vectors", "pad", "gates"), eps=3.5, rank=2),
    ],
    ids=str,
)
def test_all_options_equal_the_loop(others):
    assert_equals_the_loop(make_problem(**{"length": 2, **others}))


@pytest.mark.parametrize(
    "sizes",
    [
        dict(d=24, heads=4, groups=2, rank=2),
        slow(dict(d=24, heads=4, groups=1)),
        slow(dict(d=64, heads=4, groups=4, n=16)),
        slow(dict(d=19, heads=19, groups=19, n=5)),
        slow(dict(d=64, heads=1, n=33, rank=4)),
    ],
    ids=str,
)
def test_mamba2_equals_the_loop(sizes):
    assert_equals_the_loop(make_problem(length=4, norm="rms", without=("norm_bias",), **sizes))


@pytest.mark.parametrize(
    "others",
    [
        dict(rank=2, contractive=0.5),
        dict(rank=2, sequential=False, scale=0.5),
        slow(dict()),
        slow(dict(rank=3, scale=0.5)),
        slow(dict(without=("y0", "keep", "h0"), d=64, length=9)),
    ],
    ids=str,
)
def test_rnn_equals_the_loop(others):
    assert_equals_the_loop(make_rnn_problem(**{"scale": 1.0, "length": 4, **others}))


def solve_without_grad(problem, dtype=torch.float32, **others):
    """Return y, the state and the outcome, without a gradient."""
    layout, options, tensors = move_to_device((problem[0], problem[1], cast(problem[2], dtype)))
    computed = solve(triton_cell.cell, layout, options, **{**tensors, **others})
    return tuple(t.cpu() for t in computed)


@pytest.mark.parametrize(
    "others", [dict(), slow(dict(d=24, heads=4, groups=2, norm="rms"))], ids=str
)
def test_pieces_of_a_sequence_equal_the_whole(others):
    """Decoding uses chunks of a single token, after an even or odd number of tokens."""
    without = ("norm_bias",) if "norm" in others else ()
    problem = layout, options, tensors = make_problem(b=1, length=5, without=without, **others)
    y, h, _ = solve_without_grad(problem)
    before, state, ys = tensors["y0"], tensors["h0"], []
    for tokens in (slice(0, 2), slice(2, 3), slice(3, 5)):
        part = slice_tensors({**tensors, "y0": before, "h0": state}, tokens=tokens)
        y_part, state, _ = solve_without_grad((layout, options, part))
        before = y_part[:, -1]
        ys.append(y_part)
    torch.testing.assert_close(torch.cat(ys, 1), y, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, h, rtol=1e-5, atol=1e-6)


def test_sequence_does_not_depend_on_the_batch():
    problem = layout, options, tensors = make_problem(b=20, length=1, d=19)
    y, h, _ = solve_without_grad(problem)
    for rows in (slice(0, 1), slice(17, 20)):
        y_part, h_part, _ = solve_without_grad((layout, options, slice_tensors(tensors, rows=rows)))
        torch.testing.assert_close(y_part, y[rows], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(h_part, h[rows], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [2, slow(1), slow(4)])
def test_chunk_length_of_the_backward_changes_nothing(chunk, monkeypatch):
    """The state that enters a chunk, and the gradient that leaves it, cross chunks."""
    problem = make_problem(length=5, d=16)
    monkeypatch.setattr(triton_cell, "CHUNK", chunk)
    assert_close(run_kernel(problem), run_oracle(problem), 3e-4)


def make_plan(problem, is_differentiable=True):
    layout, options, tensors = move_to_device(problem)
    arguments = CellArguments(layout, options, **cast(tensors, torch.float32))
    sizes, prepared = triton_cell._prepare(arguments)
    return triton_cell._make_plan(arguments, sizes, prepared, is_differentiable)


def test_memory_of_a_chunk_is_bounded(monkeypatch):
    problem = make_problem(b=2, length=64, d=8, n=2)
    assert make_plan(problem).chunk == 64
    token_bytes = 4 * 2 * 2 * 8  # states of a token in fp32: b · n · d
    monkeypatch.setattr(triton_cell, "MAX_RECOMPUTED_BYTES", 20 * token_bytes)
    assert make_plan(problem).chunk == 16  # the power of two below 20


@pytest.mark.parametrize("b, length", [(0, 3), (2, 0), (0, 0)])
def test_empty_batch_or_sequence(b, length):
    layout, options, tensors = move_to_device(make_problem(b=b, length=length))
    tensors = cast(tensors, torch.float32)
    tensors["raw"].requires_grad_()
    tensors["weight_y"].requires_grad_()
    y, h, outcome = solve(triton_cell.cell, layout, options, **tensors)
    assert y.shape == (b, length, 19) and outcome.shape == (b, length)
    assert torch.equal(h, tensors["h0"])
    y.sum().backward()
    assert not tensors["weight_y"].grad.any() and tensors["raw"].grad.shape == tensors["raw"].shape


def test_nan_gives_nan_and_a_failed_outcome():
    problem = make_problem(b=3, length=4, reading=0, without=("keep",))
    problem[2]["x"][1, 2, 5] = math.nan
    y, h, outcome = solve_without_grad(problem)
    failed = outcome & FAILED != 0
    assert y[1, 2:].isnan().all() and h[1].isnan().any() and failed[1, 2:].all()
    assert not failed[[0, 2]].any() and not failed[1, :2].any() and y[[0, 2]].isfinite().all()


@pytest.mark.slow
def test_outcomes_equal_the_cpu_kernel():
    """Some roots come from bisection, and some gradients may be limited."""
    skip_if_missing(cpu_cell)
    without = ("keep", "y0", "h0", "norm_bias")
    problem = make_problem(
        b=40, length=1, d=16, n=2, rank=4, norm="rms", reading=0, without=without
    )
    expected = solve(cpu_cell.cell, *problem[:2], **cast(problem[2], torch.float32))[2]
    _, _, outcome = solve_without_grad(problem)
    assert torch.equal(outcome, expected) and not (outcome & FAILED).any()
    assert (outcome & BISECTED).any() and (outcome & GRAD_LIMITED).any()


@pytest.mark.slow
def test_gradient_is_limited_near_a_fold():
    problem = make_problem(
        b=40, length=1, d=16, n=2, rank=4, reading=0, without=("keep", "y0", "h0")
    )
    skip_if_missing(cpu_cell)
    expected = evaluate(cpu_cell.cell, problem, torch.float32)
    assert_close(run_kernel(problem), expected, 1e-2)


@pytest.mark.slow
def test_largest_adjoint_is_reported():
    problem = make_problem(b=3, length=8, without=("keep",), y_scale=2.0)
    skip_if_missing(cpu_cell)
    adjoint = torch.full((3,), math.nan, device=DEVICE)
    run_kernel(problem, adjoint=adjoint)
    expected = torch.full((3,), math.nan)
    evaluate(cpu_cell.cell, problem, torch.float32, adjoint=expected)
    torch.testing.assert_close(adjoint.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_raw_and_weight_may_be_bf16():
    """Rows are rounded to raw's dtype and y to the weight's; nothing else is rounded."""
    layout, options, tensors = make_problem(b=1, length=2, d=32)
    half = {**tensors, **{k: tensors[k].bfloat16().double() for k in ("raw", "weight_y")}}
    expected = solve(oracle_cell.solve_cell, layout, options, **half)[0]
    problem = move_to_device((layout, options, cast(tensors, torch.float32)))[2]
    for name in ("raw", "weight_y"):
        problem[name] = problem[name].bfloat16().requires_grad_()
    y, h, _ = solve(triton_cell.cell, layout, options, **problem)
    assert y.dtype is h.dtype is torch.float32
    relative_error = (y.detach().cpu() - expected).norm() / expected.norm()
    assert 1e-5 < relative_error < 0.02
    y.square().sum().backward()
    assert problem["raw"].grad.dtype is problem["weight_y"].grad.dtype is torch.bfloat16


def test_any_strides_and_a_slice_of_raw():
    layout, options, tensors = make_problem(length=2)
    spaced = {  # every other entry in memory is NaN
        k: None if v is None else torch.stack([v, torch.full_like(v, torch.nan)], -1)[..., 0]
        for k, v in tensors.items()
    }
    assert_close(
        run_kernel((layout, options, spaced)), run_kernel((layout, options, tensors)), 1e-9
    )
    wide = torch.full((2, 2, tensors["raw"].shape[-1] + 5), torch.nan, dtype=torch.float64)
    wide[..., 2:-3] = tensors["raw"]
    y = solve_without_grad((layout, options, {**tensors, "raw": wide[..., 2:-3]}))[0]
    assert torch.equal(y, solve_without_grad((layout, options, tensors))[0])


def test_invalid_arguments_are_refused():
    """test_cpu_cell.py checks the refusals of lm/kernels/cell_arguments.py."""
    problem = make_problem()
    for change, error, message in (
        (dict(x=torch.zeros(2, 5, 19)), ValueError, "expected"),
        (dict(D=torch.zeros(19).double().to(DEVICE)), Unsupported, "float64"),
    ):
        with pytest.raises(error, match=message):
            solve_without_grad(problem, **change)


def test_too_wide_token_is_unsupported(monkeypatch):
    monkeypatch.setattr("lm.kernels.cell_arguments.MAX_GPU_ENTRIES", 16)
    with pytest.raises(Unsupported, match="1 vectors of 19 channels"):
        solve_without_grad(make_problem())


def compute_relative_error(ours, theirs):
    """Return the norm of the difference of two {name: gradient}, relative to the second."""
    difference = torch.cat([(ours[name] - theirs[name]).flatten() for name in theirs])
    return difference.norm() / torch.cat([theirs[name].flatten() for name in theirs]).norm()


@pytest.mark.parametrize("length", [6, slow(256), slow(1024)])
def test_trained_tracker_equals_plain_pytorch(length, monkeypatch):
    """Every token depends on all tokens before it; loss and gradient agree to 1e-5."""
    model, problem, computed = load_tracker().to(DEVICE), draw_words(2, length), {}
    for kernels in ("plain", "triton"):
        monkeypatch.setenv("FPRNN_KERNELS", kernels)
        with model.solving(schedule="sequential"):
            computed[kernels] = compute_gradient(model, *(t.to(DEVICE) for t in problem))
    (loss, gradient), (triton_loss, triton_gradient) = computed["plain"], computed["triton"]
    assert triton_loss == pytest.approx(loss, rel=1e-5) and loss < 0.05
    assert compute_relative_error(triton_gradient, gradient) < 1e-5


def test_autocast_passes_bf16_rows_and_weights(monkeypatch):
    """Nothing is converted to fp32 before the kernel."""
    model, problem, computed, dtypes = load_tracker().to(DEVICE), draw_words(1, 3), {}, []
    monkeypatch.setenv("FPRNN_KERNELS", "triton")
    real = triton_cell.cell

    def record_dtypes(arguments):
        dtypes.append(tuple(arguments[name].dtype for name in ("raw", "weight_y", "x")))
        return real(arguments)

    monkeypatch.setattr(triton_cell, "cell", record_dtypes)
    for is_bf16 in (False, True):
        autocast = torch.autocast(DEVICE, torch.bfloat16, enabled=is_bf16)
        with model.solving(schedule="sequential"), autocast:
            computed[is_bf16] = compute_gradient(model, *(t.to(DEVICE) for t in problem))
    fp32, bf16 = torch.float32, torch.bfloat16
    assert dtypes == [(fp32, fp32, fp32), (bf16, bf16, fp32)]
    (loss, gradient), (bf16_loss, bf16_gradient) = computed[False], computed[True]
    assert bf16_loss == pytest.approx(loss, rel=0.05)
    assert 0 < compute_relative_error(bf16_gradient, gradient) < 0.1


# Launches and CUDA graphs


class Graph:
    """Stand-in for a CUDA graph: it repeats recorded launches with the same arguments."""

    recording = None

    def capture_begin(self, **_):
        Graph.recording = self.launched = []

    def capture_end(self):
        Graph.recording = None

    def replay(self):
        for kernel, grid, args, named_args in self.launched:
            launches.launch.__wrapped__(kernel, grid, *args, **named_args)


@pytest.fixture
def recorded_graphs(monkeypatch):
    """Record schedules with Graph from their second run on; return the list of graphs."""
    real, graphs = launches.launch, []

    def launch(kernel, grid, *args, **named_args):
        if Graph.recording is None:
            return real(kernel, grid, *args, **named_args)
        Graph.recording.append((kernel, grid, args, named_args))

    def record(schedule):
        graph = Graph()
        graph.capture_begin()
        schedule._launch_all()
        graph.capture_end()
        schedule.graph = graph
        graphs.append(graph)

    launch.__wrapped__ = real
    monkeypatch.setattr(launches, "launch", launch)
    monkeypatch.setattr(launches.Schedule, "_record", record)
    monkeypatch.setattr(launches, "_schedules", type(launches._schedules)())
    can_always_record = property(lambda schedule: True, lambda schedule, value: None)
    monkeypatch.setattr(launches.Schedule, "can_record", can_always_record, raising=False)
    return graphs


def test_recorded_graph_serves_other_tensors_and_lengths(recorded_graphs, monkeypatch):
    """The arguments of a graph are fixed; everything that changes is in the table."""
    monkeypatch.setattr(triton_cell, "CHUNK", 2)
    for length, seed in ((3, 0), (3, 1), (5, 2)):
        problem = make_problem(b=2, length=length, d=12, seed=seed)
        assert_close(run_kernel(problem), run_oracle(problem), 3e-4)
    assert len(recorded_graphs) == 3  # forward, backward, the last state
    for graph in recorded_graphs:
        for _, _, args, named_args in graph.launched:
            fixed = (*args[1:], *named_args.values())
            assert len(args) == 1 and not any(torch.is_tensor(value) for value in fixed)


def test_token_takes_two_launches_per_direction():
    problem = make_problem(length=8)
    plan = make_plan(problem)
    assert len(triton_cell.forward_launches(plan)) == 2 * 8 + 1  # also saves the state before
    assert len(triton_cell.backward_launches(plan)) == 2 * 8 + 2  # also recomputes the states
    plan = make_plan(problem, is_differentiable=False)
    assert len(triton_cell.forward_launches(plan)) == 2 * 8


def test_least_recently_used_schedule_is_dropped(monkeypatch):
    monkeypatch.setattr(launches, "_schedules", type(launches._schedules)())
    monkeypatch.setattr(launches, "MAX_SCHEDULES", 2)
    schedules = [launches.get_schedule(key, object) for key in "abac"]
    assert schedules[0] is schedules[2] and len(launches._schedules) == 2
    assert launches.get_schedule("a", object) is schedules[0]
    assert launches.get_schedule("b", object) is not schedules[1]


@pytest.mark.parametrize("rank", range(1, 9))
def test_warps_are_a_power_of_two(rank):
    plan = make_plan(make_problem(length=1, rank=rank))
    for d in (8, 96, 512, 768, 1536, 4096, 65536):
        wide_plan = plan._replace(sizes=plan.sizes._replace(d=d))
        for max_channels in (256, 512):
            assert wide_plan.choose_warp_count(max_channels) in {1, 2, 4, 8, 16}


def test_table_is_written_under_any_default_device():
    """A self-check runs with the GPU as the default device."""
    schedule = launches.Schedule(torch.zeros(2, dtype=torch.int64), [])
    with torch.device("meta"):
        schedule.write_table([3, 4])
    assert schedule.table.tolist() == [3, 4]


def test_host_never_waits_for_the_device(monkeypatch):
    """The host never reads a number of a tensor, neither forward nor backward."""

    def fail(self, *args):
        raise AssertionError("the device was waited for")

    problem = make_problem(b=2, length=3, d=12)
    monkeypatch.setattr(torch.Tensor, "item", fail)
    monkeypatch.setattr(torch.Tensor, "tolist", fail)
    monkeypatch.setattr(torch.Tensor, "__bool__", fail)
    layout, options, tensors = move_to_device((*problem[:2], cast(problem[2], torch.float32)))
    tensors["x"].requires_grad_()
    y, _, _ = solve(triton_cell.cell, layout, options, **tensors)
    y.backward(torch.ones_like(y))


@pytest.mark.gpu
def test_replayed_graphs_on_a_gpu_equal_the_cpu(monkeypatch):
    """At d 1,536 the first chunk is launched kernel by kernel, the others from a graph."""
    if INTERPRETED:
        pytest.skip("the kernels are interpreted")
    skip_if_missing(cpu_cell)
    monkeypatch.setattr(launches, "_schedules", type(launches._schedules)())
    problem = make_problem(b=16, length=200, d=1536, n=16, y_scale=0.5)
    expected = evaluate(cpu_cell.cell, problem, torch.float32)
    for _ in range(2):
        assert_close(run_kernel(problem), expected, 1e-2)
    graphs = [schedule.graph for schedule in launches._schedules.values()]
    assert len(graphs) == 3 and all(graph is not None for graph in graphs)


# Compilation

DEFAULT = {"d": 1536, "n": 16, "r": 1, "kind": "mamba1"}
TRAINED = [DEFAULT, {**DEFAULT, "d": 768}, {**DEFAULT, "n": 64, "kind": "mamba2"}]
TRAINED += [{**DEFAULT, "d": 768, "n": 64}, {"d": 256, "n": 16, "r": 4, "kind": "mamba1"}]
TRAINED += [{**DEFAULT, "d": 1024, "r": 3}]


def make_launch_cases(d, n, r, kind):
    """Return one launch of each kernel, in bf16, as cases of `compile_kernels`."""
    norm, heads = ("layer", 1) if kind == "mamba1" else ("rms", d // 64)
    mixer = dict(rank=r, scale=2.0, act="silu", sequential=True, eps=1e-6, contractive=None)
    norms = dict(bc_norm=True, groups=1, norm=norm, norm_eps=1e-5)
    options = Options(**mixer, **norms, states=n)
    columns = r * d + r + 2 * n
    bias = ("norm_bias",) if norm == "layer" else ()
    plan = triton_cell.Plan(
        layout=Layout(vectors=0, gates=r * d, B=r * d + r, C=r * d + r + n),
        options=options,
        sizes=Sizes(kind, 16, 0, d, n, heads, columns=columns, y_columns=columns),
        chunk=1,
        raw_dtype=torch.float32,
        weight_dtype=torch.bfloat16,
        device=torch.device("cuda"),
        optional_names=("keep", "gate", "D", "norm_weight", *bias),
        is_differentiable=True,
        precision="tf32",
    )
    all_launches = triton_cell.forward_launches(plan) + triton_cell.backward_launches(plan)
    table = torch.empty(32, dtype=torch.int64)
    # A chunk of a single token launches every kernel once. The loop over a chunk is compiled with
    # the chunk length of training.
    cases = []
    for launch in all_launches:
        is_loop = launch.kernel is triton_cell.cell_kernels.states_kernel
        chunk = {"chunk": triton_cell.CHUNK} if is_loop else {}
        cases.append(describe_launch(launch.kernel, table, **launch.args | chunk))
    assert {case["kernel"] for case in cases} == find_kernels(triton_cell.cell_kernels)
    return cases


@pytest.mark.parametrize(
    "sizes, targets", [([DEFAULT], [80]), slow(TRAINED, [80, 90])], ids=["default", "all"]
)
def test_kernels_do_not_spill_and_products_load_asynchronously(sizes, targets, monkeypatch):
    """Loads of 16 bytes run while the tensor cores compute the block of channels before.

    With d = 256, the product has a single block, and thus nothing to load meanwhile.
    """
    monkeypatch.setattr(triton_cell, "INTERPRETED", False)
    cases = [case for arguments in sizes for case in make_launch_cases(**arguments)]
    results = [r for r in assert_nothing_spills(cases, targets) if r["target"] == 80]
    products = [r for r in results if "product" in r["case"]["kernel"]]
    copies = [r["copies"] for r in products if r["case"]["arguments"]["d"] > 256]
    assert len(copies) >= 2 and all(copies)
