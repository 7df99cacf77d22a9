"""The persistent CUDA kernels, emulated on the CPU: values, gradients by name, synchronization."""

import itertools
import re
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
import torch

from lm import kernels
from lm.kernels import Unsupported, gpu_cell
from lm.kernels.cell_arguments import DIFFERENTIABLE, CellArguments, Readout
from lm.kernels.cpu import cpu_cell
from lm.kernels.cuda import cuda_cell
from lm.kernels.cuda.build import (
    MAX_REFLECTIONS,
    _make_alarm,
    choose_partition,
    compile_cubin,
    count_shared_bytes,
)
from lm.kernels.cuda.interface import INTEGERS, NUMBERS, POINTERS, Partition
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.solver import BISECTED, FAILED, GRAD_LIMITED
from tests import oracle_cell
from tests.emulated_cell import SOURCES, EmulatedKernels
from tests.kernels import poisoned_memory
from tests.lm.kernels import test_cpu_cell
from tests.lm.kernels.test_cpu_cell import cast, evaluate, solve

SMALL = Partition(64, channels=16, warps=2, crews=1, groups=1)
TWO_CREWS = Partition(64, channels=16, warps=2, crews=2, groups=1)
TWO_REFLECTIONS, FOUR_REFLECTIONS = (SMALL._replace(reflections=r) for r in (2, 4))
WIDE_BLOCKS = Partition(96, channels=32, warps=8, crews=1, groups=1, reflections=3)
H100, A100, B200 = (132, 232_448), (108, 166_912), (148, 232_448)  # multiprocessors, shared bytes


@pytest.fixture(autouse=True)
def poisoned():
    with poisoned_memory():
        yield


class Round(torch.autograd.Function):
    """Round a tensor to bf16; if `rounds_grad`, its gradient as well."""

    @staticmethod
    def forward(ctx, tensor, rounds_grad):
        ctx.rounds_grad = rounds_grad
        return tensor.float().bfloat16().to(tensor.dtype)

    @staticmethod
    def backward(ctx, grad):
        return (Round.apply(grad, False) if ctx.rounds_grad else grad), None


@pytest.fixture
def rounded_oracle(monkeypatch):
    """The oracle with the kernels' rounding: y before the product, rows and their gradients."""
    make_row = oracle_cell.make_row

    def make_rounded_row(t, keep, before, raw, weight_y, readout=None):
        row, keep_t = make_row(t, keep, Round.apply(before, False), raw, weight_y, readout)
        return Round.apply(row, True), keep_t

    monkeypatch.setattr(oracle_cell, "make_row", make_rounded_row)
    return oracle_cell.solve_cell


@pytest.fixture
def emulate(monkeypatch):
    """Return a function that makes `cell` use emulated kernels."""

    def use(partition=SMALL, seed=0, sources=SOURCES):
        kernels = EmulatedKernels(partition, seed, sources)
        monkeypatch.setattr(cuda_cell, "find_kernels", lambda *args: kernels)
        return kernels

    return use


def make_problem(b=3, length=5, d=64, **others):
    layout, options, tensors = test_cpu_cell.make_problem(b, length, d, 16, **others)
    for name in ("raw", "weight_y"):
        tensors[name] = tensors[name].bfloat16().double()
    return layout, options, tensors


def narrow_cell(arguments):
    """`cell` with raw and W_y in bf16."""
    raw, weight_y = arguments.raw.bfloat16(), arguments.weight_y.bfloat16()
    return cuda_cell.cell(arguments._replace(raw=raw, weight_y=weight_y))


def evaluate_emulated(given, **others):
    return evaluate(narrow_cell, given, torch.float32, **others)


def relative_error(ours, theirs):
    return ((ours.double() - theirs).norm() / theirs.norm()).item()


def errors_by_name(ours, theirs):
    """Return relative errors, a hundredth for W_y's gradient, which torch rounds to bf16."""
    errors = {name: relative_error(ours[name], theirs[name]) for name in theirs}
    errors["grad weight_y"] /= 100
    return errors


CASES = {
    "one group": dict(),
    "two groups, one without sequences": dict(partition=SMALL._replace(groups=2), b=1),
    "two crews": dict(partition=TWO_CREWS, b=5, length=3),
    "several launches": dict(b=11, length=3),
    "several chunks": dict(length=37, b=2),
    "one token": dict(length=1),
    "blocks of 32 channels": dict(partition=Partition(96, 32, 3, 1, 1), d=96, b=9, length=3),
    "blocks of 48 channels": dict(partition=Partition(144, 48, 2, 1, 1), d=144, b=2),
    "more blocks than small rows": dict(
        partition=Partition(576, 16, 4, 1, 1), d=576, b=2, length=3
    ),
    "more warps than blocks": dict(partition=Partition(48, 16, 4, 1, 1), d=48),
    "RMSNorm": dict(norm="rms", without=("norm_bias",)),
    "no weights of the norm": dict(without=("norm_weight", "norm_bias")),
    "no gate, no documents": dict(without=("gate", "keep")),
    "no state": dict(without=("y0", "h0")),
    "contractive": dict(contractive=0.5),
    "dplr": dict(sequential=False, scale=1.0),
    "B and C not normalized": dict(bc_norm=False),
    "short vectors": dict(eps=7.0),
    "relu": dict(act="relu"),
    "identity": dict(act="identity"),
    "parts in another order": dict(order=("B", "pad", "C", "vectors", "pad", "gates")),
    "two reflections": dict(rank=2),
    "two reflections, dplr, RMSNorm, no gate": dict(
        rank=2, sequential=False, scale=1.0, norm="rms", without=("norm_bias", "gate")
    ),
    "three reflections, short vectors": dict(
        partition=WIDE_BLOCKS, d=96, b=2, length=3, rank=3, scale=1.0, eps=8.0
    ),
    "four reflections": dict(rank=4, scale=1.0, length=4),
    "four reflections, contractive, another order": dict(
        rank=4, contractive=0.8, order=("B", "pad", "C", "vectors", "pad", "gates")
    ),
    "four reflections, dplr": dict(rank=4, sequential=False, contractive=1.5, length=4),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients_equal_the_oracle(case, emulate, rounded_oracle):
    """Kernel and oracle may round a number near the middle of two bf16 numbers to different ones.

    Therefore one of up to four problems must agree to 4e-5 in every tensor, and each one to 2e-3.
    """
    case = dict(case)
    partition = case.pop("partition", SMALL)
    emulate(partition._replace(reflections=case.get("rank", 1)))
    largest = []
    for seed in range(4):
        given = make_problem(**{"seed": seed, **case})
        errors = errors_by_name(evaluate_emulated(given), evaluate(rounded_oracle, given))
        largest.append(torch.tensor([*errors.values()]).max().item())  # NaN if any is NaN
        assert largest[-1] < 2e-3, errors
        if largest[-1] < 4e-5:
            return
    raise AssertionError(f"no problem agrees: {largest}")


def test_outcome_and_adjoint_equal_the_cpu_kernel(emulate):
    emulate()
    layout, options, tensors = make_problem(b=3, length=6)
    our_adjoint, their_adjoint = torch.zeros(3), torch.zeros(3, dtype=torch.float64)
    # The CPU kernel does not round y. With a small W_y, this hardly matters.
    y0 = tensors["y0"].float().bfloat16().double()
    tensors = {**tensors, "y0": y0, "weight_y": tensors["weight_y"] * 0.01}
    outcomes = []
    for compute, adjoint, dtype in (
        (narrow_cell, our_adjoint, torch.float32),
        (cpu_cell.cell, their_adjoint, torch.float64),
    ):
        leaves = {k: v.to(dtype).requires_grad_(k == "x") for k, v in tensors.items()}
        y, _, outcome = solve(compute, layout, options, **leaves, adjoint=adjoint)
        y.square().sum().backward()
        outcomes.append(outcome)
    assert torch.equal(*outcomes)
    torch.testing.assert_close(our_adjoint.double(), their_adjoint, rtol=1e-2, atol=0)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_all_outcomes_equal_those_of_the_cpu_kernel(rank, emulate):
    """The equations of these tokens often have several roots, or a root near a fold."""
    emulate(SMALL._replace(reflections=rank))
    layout, options, tensors = make_problem(b=4096, length=1, rank=rank)
    for name, factor in dict(weight_y=0, D=3, x=0.5, h0=0.5, norm_bias=0.3).items():
        tensors[name] *= factor
    gates = torch.linspace(-4, 4, 4096 * rank, dtype=torch.float64).view(4096, 1, rank)
    tensors["raw"][..., layout.gates : layout.gates + rank] = gates.bfloat16()
    outcome = solve(cpu_cell.cell, layout, options, **tensors)[2].flatten()
    rows = [torch.nonzero(outcome == value)[:4, 0] for value in outcome.unique()]
    assert {0, GRAD_LIMITED} | ({BISECTED} if rank > 1 else set()) <= {*outcome.tolist()}
    per_sequence = ("raw", "x", "dt", "keep", "gate", "y0", "h0")
    chosen = {k: v[torch.cat(rows)] if k in per_sequence else v for k, v in tensors.items()}
    ours = solve(narrow_cell, layout, options, **cast(chosen, torch.float32))[2].flatten()
    assert torch.equal(ours, outcome[torch.cat(rows)])


def test_tokens_without_a_solution_are_marked_as_failed(emulate):
    emulate()
    layout, options, tensors = make_problem(b=2, length=3, norm="rms", without=("norm_bias",))
    tensors["norm_weight"][0] = torch.nan
    y, _, outcome = solve(narrow_cell, layout, options, **cast(tensors, torch.float32))
    assert y.isnan().any() and (outcome & FAILED).all()


@pytest.mark.parametrize("partition", [TWO_CREWS, FOUR_REFLECTIONS], ids=["1", "4"])
def test_bits_do_not_depend_on_the_order_of_threads(partition, emulate):
    given = make_problem(b=5, length=6, rank=partition.reflections, contractive=1.0)
    emulate(partition)
    expected = evaluate_emulated(given)
    for seed in range(1, 6):
        emulate(partition, seed)
        ours = evaluate_emulated(given)
        assert all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "partition, small", [(TWO_CREWS, SMALL), (TWO_REFLECTIONS, TWO_REFLECTIONS)], ids=["1", "2"]
)
def test_bits_do_not_depend_on_the_batch(partition, small, emulate):
    layout, options, tensors = make_problem(b=11, length=4, rank=partition.reflections)
    emulate(partition)
    expected = evaluate_emulated((layout, options, tensors))
    per_sequence = ("raw", "x", "dt", "keep", "gate", "y0", "h0")
    three = {k: v[4:7] if k in per_sequence else v for k, v in tensors.items()}
    emulate(small)
    ours = evaluate_emulated((layout, options, three))
    assert torch.equal(ours["y"], expected["y"][4:7])


def test_two_calls_equal_one_call(emulate):
    emulate()
    layout, options, tensors = make_problem(b=2, length=40)
    tensors = cast(tensors, torch.float32)
    y, state, _ = solve(narrow_cell, layout, options, **tensors)
    per_token = ("raw", "x", "dt", "keep", "gate")
    first = {k: v[:, :17] if k in per_token else v for k, v in tensors.items()}
    y_first, state_first, _ = solve(narrow_cell, layout, options, **first)
    second = {k: v[:, 17:] if k in per_token else v for k, v in tensors.items()}
    second.update(y0=y_first[:, -1], h0=state_first)
    y_second, state_second, _ = solve(narrow_cell, layout, options, **second)
    assert torch.equal(torch.cat([y_first, y_second], 1), y) and torch.equal(state_second, state)


def test_no_tokens_and_no_sequences(emulate):
    emulate()
    for sizes in (dict(b=2, length=0), dict(b=0, length=2)):
        layout, options, tensors = make_problem(**sizes)
        tensors = cast(tensors, torch.float32)
        y, state, _ = solve(narrow_cell, layout, options, **tensors)
        assert y.shape == tensors["x"].shape and torch.equal(state, tensors["h0"])


def list_barriers():
    """Return (file, line, text without this barrier) of every barrier of the kernels."""
    barriers = []
    for file in ("cell_forward.h", "cell_backward.h", "team.h"):
        text = (SOURCES / file).read_text(encoding="utf-8")
        for match in re.finditer(r"(me\.)?\bsync(_block)?\(\);", text):
            line = text[: match.start()].count("\n") + 1
            barriers.append((file, line, text[: match.start()] + text[match.end() :]))
    return barriers


def replace_source(file, text, folder):
    """Copy the kernels into a folder, with this text of one file."""
    for header in SOURCES.glob("*.h"):
        shutil.copy(header, folder)
    (folder / file).write_text(text, encoding="utf-8")


def is_missing_barrier_noticed(file, text, folder, emulate):
    """Return whether, with this text of a file, results change or no thread can continue."""
    replace_source(file, text, folder)
    given = make_problem(b=5, length=6)
    emulate(TWO_CREWS)
    expected = evaluate_emulated(given)
    for seed in range(8):
        emulate(TWO_CREWS, seed, folder)
        try:
            ours = evaluate_emulated(given)
        except (RuntimeError, AssertionError):  # a deadlock, or tokens without a solution
            return True
        if not all(torch.equal(ours[name], expected[name]) for name in expected):
            return True
    return False


BARRIERS = list_barriers()


@pytest.mark.parametrize("file, line, text", BARRIERS, ids=[f"{b[0]}:{b[1]}" for b in BARRIERS])
@pytest.mark.slow
def test_every_missing_barrier_is_noticed(file, line, text, tmp_path, emulate, monkeypatch):
    monkeypatch.setattr(cuda_cell, "CHUNK", 4)
    assert is_missing_barrier_noticed(file, text, tmp_path, emulate)


def test_a_missing_barrier_is_noticed(tmp_path, emulate, monkeypatch):
    monkeypatch.setattr(cuda_cell, "CHUNK", 4)
    file, _, text = BARRIERS[3]  # one of cell_forward.h; the slow test above removes each of them
    assert is_missing_barrier_noticed(file, text, tmp_path, emulate)


def change_source(folder, file, old, new):
    """Copy the kernels into a folder, with `old` replaced by `new` in one file."""
    text = (SOURCES / file).read_text(encoding="utf-8")
    assert old in text
    replace_source(file, text.replace(old, new), folder)


def test_words_that_never_arrive_are_a_deadlock(tmp_path, emulate):
    # Block 0 does not send its vectors.
    old = "store_word(mail.vectors"
    change_source(tmp_path, "team.h", old, f"if (block) {old}")
    emulate(SMALL, 0, tmp_path)
    with pytest.raises(RuntimeError, match=r"no thread can continue: .* waits"):
        evaluate_emulated(make_problem())


@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
def test_a_timeout_makes_every_result_nan(is_backward, tmp_path, emulate):
    file = "cell_backward.h" if is_backward else "cell_forward.h"
    call = "<D_ROW_ENTRIES>(step)" if is_backward else "<Y_ENTRIES>(step + 1)"
    # Block 0 does not send its vectors.
    old = f"me.send_vector{call}"
    change_source(tmp_path, file, old, f"if (me.block) {old}")
    kernels = emulate(SMALL, 0, tmp_path)
    kernels.waits_time_out = True
    layout, options, tensors = make_problem()
    leaves = {k: v.float().requires_grad_(k in DIFFERENTIABLE) for k, v in tensors.items()}
    y, state, _ = solve(narrow_cell, layout, options, **leaves)
    if not is_backward:
        assert y[:, 1:].isnan().all() and state.isnan().all()
        return
    assert not y.isnan().any()
    y.sum().backward()
    for name in DIFFERENTIABLE:
        assert leaves[name].grad.isnan().any(), name
    with pytest.raises(RuntimeError, match="waited for another one for more than two seconds"):
        evaluate_emulated(make_problem())
    assert not kernels.alarm_tensor.any()  # the next call may try again


def test_alarm_is_an_error_at_the_next_call(emulate):
    emulate().alarm_tensor.fill_(1)
    with pytest.raises(RuntimeError, match="waited for another one for more than two seconds"):
        evaluate_emulated(make_problem())


def test_fields_of_cell_are_those_of_the_header():
    text = (SOURCES / "team.h").read_text(encoding="utf-8")
    body = re.search(r"struct Cell \{(.*?)\n\};", text, re.DOTALL)[1]
    body = re.sub(r"//.*", "", body)
    fields = itertools.chain(*(d.split(",") for d in re.findall(r"(?:^|;)([^;]+)", body)))
    names = [re.findall(r"\w+", field)[-1] for field in fields if field.strip()]
    assert names == [*INTEGERS, *NUMBERS, *POINTERS]


def readout(d):
    return Readout(torch.zeros(2, d), torch.zeros(2), torch.zeros(2, d), None)


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(rank=5), "5 reflections"),
        (dict(n=3), "3 states"),
        (dict(norm="none", without=("norm_weight", "norm_bias")), "the norm `none`"),
        (dict(reading=1), "layers in which only some of mixer, B and C read sh"),
        (dict(d=56), "d_inner 56"),  # no multiple of 16
        (dict(d=64, heads=4), "mamba2 layers"),
    ],
    ids=str,
)
def test_other_layers_are_refused_by_name(changes, reason):
    values = dict(b=1, length=2, d=64, n=16) | changes
    layout, options, tensors = test_cpu_cell.make_problem(**values)
    tensors = cast(tensors, torch.float32)
    with pytest.raises(Unsupported, match=reason):
        solve(narrow_cell, layout, options, **tensors)


def test_wrong_dtypes_and_centroids_are_refused_by_name(emulate, monkeypatch):
    emulate()
    layout, options, tensors = make_problem()
    tensors = cast(tensors, torch.float32)
    with pytest.raises(Unsupported, match=r"raw in torch\.float32, W_y in torch\.float32"):
        solve(cuda_cell.cell, layout, options, **tensors)
    with pytest.raises(Unsupported, match="centroids"):
        solve(narrow_cell, layout, options, **tensors, **readout(64)._asdict())
    with monkeypatch.context() as small:
        small.setattr(cuda_cell, "MAX_ENTRIES", 3 * 16 * 64)  # sequences, states, channels
        with pytest.raises(Unsupported, match="3 × 5 tokens of 97 columns"):
            solve(narrow_cell, layout, options, **tensors)
    with pytest.raises(ValueError, match=r"dt is \(3, 5, 63\), but \(3, 5, 64\)"):
        solve(narrow_cell, layout, options, **{**tensors, "dt": tensors["dt"][..., 1:]})


@pytest.mark.parametrize(
    "partition",
    [
        Partition(64, 16, 8, 2, 1),
        Partition(144, 48, 8, 1, 1),
        WIDE_BLOCKS,
    ],
    ids=lambda partition: "-".join(map(str, partition)),
)
def test_shared_memory_is_counted_as_in_the_source(partition):
    d, channels, _, crews, _, reflections = partition
    counted = count_shared_bytes(d, channels, crews, reflections)
    assert counted == EmulatedKernels(partition).shared_bytes


def test_alarm_is_on_the_cpu_whatever_the_default_device(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    with torch.device("meta"):
        assert _make_alarm("cuda:0").device.type == "cpu"


def test_partition_with_a_fault_is_refused(emulate, monkeypatch):
    find_kernels = cuda_cell.find_kernels
    kernels = emulate(SMALL)
    monkeypatch.setattr(cuda_cell, "find_kernels", find_kernels)
    monkeypatch.setattr(cuda_cell, "load_kernels", lambda *args: kernels)
    monkeypatch.setattr(cuda_cell, "_faults", {})
    evaluate_emulated(make_problem(b=1))
    assert cuda_cell._faults == {(SMALL, torch.device("cpu")): ""}
    cuda_cell._faults.clear()
    compute = gpu_cell.compute_weight_grad
    monkeypatch.setattr(gpu_cell, "compute_weight_grad", lambda *args: 1.5 * compute(*args))
    with pytest.raises(Unsupported, match="the persistent kernels differ from plain PyTorch"):
        evaluate_emulated(make_problem(b=1))


@pytest.mark.parametrize(
    "gpu, d, b, expected",
    [
        (H100, 1536, 16, Partition(1536, 16, 8, 2, 1, reflections=2)),
        (B200, 1536, 16, Partition(1536, 32, 8, 1, 3, reflections=2)),
        (H100, 1536, 16, Partition(1536, 16, 8, 1, 1, reflections=4)),
        (A100, 1536, 16, Partition(1536, 16, 8, 2, 1, reflections=2)),
        (H100, 1536, 16, Partition(1536, 48, 8, 1, 4)),
        (H100, 1536, 1, Partition(1536, 48, 8, 1, 1)),
        (H100, 1536, 64, Partition(1536, 48, 8, 2, 4)),
        (H100, 768, 64, Partition(768, 48, 8, 1, 8)),
        (A100, 1536, 16, Partition(1536, 32, 8, 1, 2)),
        (B200, 1536, 64, Partition(1536, 48, 8, 2, 4)),
        (A100, 3072, 16, None),  # W_y does not fit
    ],
)
def test_partition_of_known_gpus(gpu, d, b, expected):
    reflections = expected.reflections if expected else 1
    assert choose_partition(d, b, *gpu, reflections) == expected


@pytest.mark.parametrize(
    "gpu, most", [(A100, 2), (H100, 4), (B200, 4)], ids=["A100", "H100", "B200"]
)
def test_reflections_that_fit_a_gpu(gpu, most):
    """docs/kernels.md has these numbers, for d_inner 1,536."""
    fits = [choose_partition(1536, 16, *gpu, r) is not None for r in range(1, MAX_REFLECTIONS + 1)]
    assert fits == [r <= most for r in range(1, MAX_REFLECTIONS + 1)]


# Bytes that a thread may spill, by crews of a block and reflections. With two crews a thread has
# 128 registers. With several reflections the search for the root spills, in a thread per sequence.
MAX_SPILLS = {(1, 1): 0, (2, 1): 1800, (1, 2): 40, (2, 2): 1800, (2, 3): 3600, (1, 4): 3400}


@pytest.mark.parametrize(
    "capability, gpu",
    [((8, 0), A100), ((9, 0), H100), ((10, 0), B200)],
    ids=["A100", "H100", "B200"],
)
@pytest.mark.parametrize(
    "d, b, reflections",
    [*((d, b, 1) for d in (768, 1536) for b in (16, 64, 128)), *((1536, 16, r) for r in (2, 3, 4))],
)
@pytest.mark.slow
def test_nvrtc_splits_no_word_and_spills_little(d, b, reflections, capability, gpu, tmp_path):
    """A word must be loaded and stored in one access of 128 bits; the alarm has 8 bits."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="it comes with torch's CUDA wheels")
    partition = choose_partition(d, b, *gpu, reflections)
    if partition is None:
        pytest.skip("W_y does not fit; test_reflections_that_fit_a_gpu has the limits")
    cubin, log = compile_cubin(partition, capability, "--ptxas-options=-v")
    spills = [int(count) for count in re.findall(r"(\d+) bytes spill", log)]
    assert len(spills) == 6  # of three kernels
    assert max(spills) <= MAX_SPILLS[partition.crews, reflections]
    assert all(int(registers) <= 255 for registers in re.findall(r"Used (\d+) registers", log))
    triton = pytest.importorskip("triton", reason="it contains nvdisasm")
    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    (tmp_path / "cell.cubin").write_bytes(cubin)
    command = [disassembler, "-c", tmp_path / "cell.cubin"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    accesses = re.findall(r"\b(?:LDG|STG)\.E\S*STRONG\S*", listing)
    assert accesses and all(".128." in access or ".U8." in access for access in accesses)


def test_nvrtc_reports_the_line_of_a_fault():
    pytest.importorskip("cuda.bindings.nvrtc", reason="it comes with torch's CUDA wheels")
    with pytest.raises(RuntimeError, match=r"team\.h\(\d+\): error: static assertion"):
        compile_cubin(SMALL._replace(channels=20), (9, 0))


def test_model_uses_the_kernel_if_it_is_named(emulate, monkeypatch):
    kernel_runs = []
    emulated = emulate()
    run = emulated.run
    monkeypatch.setattr(emulated, "run", lambda *args: kernel_runs.append(args[0]) or run(*args))
    monkeypatch.setattr(cuda_cell, "usable", lambda: (True, ""))
    monkeypatch.setattr(kernels, "_get_device_type", lambda backend: "cpu")
    config = FPRNNConfig(vocab_size=11, d_model=32, n_layer=1, d_state=16, mixer_rank=1)
    torch.manual_seed(0)
    model = FPRNNForCausalLM(config).bfloat16()
    ids = torch.arange(12).view(2, 6) % 11
    losses = {}
    for name in ("plain", "cuda"):
        monkeypatch.setenv("FPRNN_KERNELS", name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss = model(ids, labels=ids).loss
            loss.backward()
        losses[name] = loss.item()
    assert kernel_runs == [False, True]
    assert losses["cuda"] == pytest.approx(losses["plain"], rel=0.01)


def test_self_check_passes_and_notices_a_fault(emulate, monkeypatch):
    emulate(Partition(192, 16, 8, 1, 1))
    assert cuda_cell._self_check() < 1
    compute = gpu_cell.compute_weight_grad
    monkeypatch.setattr(gpu_cell, "compute_weight_grad", lambda *args: 1.5 * compute(*args))
    assert not cuda_cell._self_check() < 1


def test_layer_that_the_named_backend_refuses_is_not_silent(monkeypatch):
    layout, options, tensors = make_problem(b=1, length=2)
    arguments = CellArguments(layout, options, **cast(tensors, torch.float32))
    modules = cuda_cell, cpu_cell  # cuda refuses rows in fp32
    monkeypatch.setattr(kernels, "_find_modules", lambda *args: modules)
    monkeypatch.setenv("FPRNN_KERNELS", "cuda")
    with pytest.warns(RuntimeWarning, match="cell is computed in another backend than cuda"):
        y, _, _ = kernels.compute("cell", "cell", arguments.x, arguments)
    assert y.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("d, b", [(1536, 16), (1536, 64), (1024, 16)])
def test_results_on_a_gpu_equal_triton(d, b):
    """With a chunk that is not full, two crews for 64 sequences, and blocks of 32 channels."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    works, reason = cuda_cell.usable()
    assert works, reason
    triton_cell = pytest.importorskip("lm.kernels.triton.triton_cell")
    layout, options, tensors = test_cpu_cell.make_problem(b, 600, d, 16, y_scale=0.5)
    given = layout, options, {name: t.cuda() for name, t in tensors.items()}

    def narrow_triton_cell(arguments):
        raw, weight_y = arguments.raw.bfloat16(), arguments.weight_y.bfloat16()
        return triton_cell.cell(arguments._replace(raw=raw, weight_y=weight_y))

    expected = evaluate(narrow_triton_cell, given, torch.float32)
    first = evaluate(narrow_cell, given, torch.float32)
    assert all(relative_error(first[name], expected[name]) < 2e-2 for name in expected)
    for _ in range(20):
        again = evaluate(narrow_cell, given, torch.float32)
        assert all(torch.equal(again[name], first[name]) for name in first)
