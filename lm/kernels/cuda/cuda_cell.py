"""The `cell` kernels for NVIDIA GPUs as persistent kernels: one launch per layer and direction.

lm/kernels/cell_arguments.py has the equations and the arguments; team.h and cell_forward.h describe
how blocks work together. Each token has a row, raw_t + W_y y_{t−1}, which holds its vectors, gates,
B and C; raw is the part of the row that does not depend on y. W_y stays in the shared memory of the
GPU, and blocks exchange the values of a token without barriers. The kernels solve FP-Mamba-1 with
up to four reflections, bf16 weights and rows, and 16 states; Triton solves the other layers.

The kernels were never run on a GPU: the tests emulate them on the CPU (tests/emulated_cell.py).
Therefore they are used only if FPRNN_KERNELS is `cuda`.

Products use bf16 factors and accumulate in fp32. Rows are rounded to bf16. Everything else is fp32,
except the root of a token's equation, which is fp64. On one GPU, a sequence has the same results,
bit for bit, in every batch.

Shape suffixes: b batch, l length, d channels, n states, K columns of raw.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm.kernels import Unsupported, cell_arguments, gpu_cell
from lm.kernels.cell_arguments import (
    ACTS,
    CellArguments,
    Sizes,
    check_sizes,
    expected_shapes,
)
from lm.kernels.checks import cell_deviation, find_fault, find_gpu_fault
from lm.kernels.cuda.build import MAX_REFLECTIONS, MIN_BLOCKS, load_kernels
from lm.kernels.cuda.interface import (
    INTEGERS,
    NUMBERS,
    PACKED,
    POINTERS,
    STATES,
    TEAM_SEQUENCES,
    WORD_BYTES,
    Kernels,
    Partition,
)
from lm.kernels.gpu_cell import SolvedLayer

# Tokens between two saved states; the backward pass recomputes the others. The recomputed states
# of a chunk (98 KB per sequence and token at d = 1,536) should fit into the L2 cache.
CHUNK = 16
# Largest deviation that the self-check accepts, relative to the largest entry of each tensor. The
# kernels round y and the rows to bf16; at d = 768 the deviation is 0.07.
ALLOWED_DEVIATION = 0.2
MAX_ENTRIES = 2**32  # of a tensor: the kernels' indices have 32 bits
# Two capability flags: lm/model reads them and `fits` before it calls `cell`. `fits` also accepts
# layers that these kernels refuse, because `compute` of lm.kernels then calls Triton.
CENTROIDS = False  # whether y_{t−1} may be read through centroids
NARROW = True  # whether raw and weight_y may have a narrower dtype than the other tensors
fits = cell_arguments.fits_a_gpu


def usable() -> tuple[bool, str]:
    """Return whether the kernels run here, and the reason if not."""
    try:
        from cuda.bindings import driver, nvrtc  # noqa: F401
    except ImportError as error:
        return False, f"cuda-bindings cannot be imported: {error}"
    fault = find_gpu_fault(_self_check, "the persistent kernels")
    return not fault, fault


def _self_check(d=192, b=2, r=1):
    """Return the `deviation` of a problem that is longer than a chunk."""
    return cell_deviation(
        _narrow_cell,
        torch.float32,
        b=b,
        length=CHUNK + 2,
        d=d,
        n=STATES,
        r=r,
        norm_scale=0.1,
        allowed=ALLOWED_DEVIATION,
    )


def _narrow_cell(arguments):
    narrow = {name: getattr(arguments, name).bfloat16() for name in ("raw", "weight_y")}
    return cell(arguments._replace(**narrow))


class Problem(NamedTuple):
    """A layer as the kernels read it."""

    arguments: CellArguments
    sizes: Sizes
    # Fields of CellArguments by name, contiguous: A (n,d) and h0 (b,n,d) are transposed, and all
    # tensors except raw and weight_y are fp32.
    tensors: dict[str, Tensor | None]
    kernels: Kernels
    saves_for_backward: bool


def _refuse_unsupported(arguments, sizes):
    """Raise Unsupported if the kernels have no code for this layer."""
    layout, options = arguments.layout, arguments.options
    refusals = {
        f"{sizes.kind} layers": sizes.kind != "mamba1",
        f"{options.rank} reflections": options.rank > MAX_REFLECTIONS,
        f"{sizes.n} states": sizes.n != STATES,
        f"{options.groups} groups of B and C": options.groups != 1,
        f"the norm `{options.norm}`": options.norm == "none",
        f"d_inner {sizes.d}": sizes.d % 16 != 0 or sizes.d < MIN_BLOCKS * 16,
        # Only the first y_columns columns of a row depend on y; the kernels multiply W_y with y for
        # all columns of all parts.
        "layers in which only some of mixer, B and C read sh(y)": any(
            getattr(layout, name) + width > sizes.y_columns
            for name, width in _part_widths(sizes, options.rank).items()
        ),
        "centroids": arguments.readout is not None,
        f"{sizes.b} × {sizes.length} tokens of {sizes.columns} columns": (
            sizes.b * max(sizes.length * sizes.columns, STATES * sizes.d) >= MAX_ENTRIES
        ),
        f"raw in {arguments.raw.dtype}": arguments.raw.dtype != torch.bfloat16,
        f"W_y in {arguments.weight_y.dtype}": arguments.weight_y.dtype != torch.bfloat16,
    }
    reasons = [reason for reason, is_refused in refusals.items() if is_refused]
    if reasons:
        raise Unsupported(f"the persistent kernels do not solve {', '.join(reasons)}")


def _part_widths(sizes, r):
    """Return the columns of each part of a row."""
    return {"vectors": r * sizes.d, "gates": r, "B": sizes.n, "C": sizes.n}


def _prepare(arguments, saves_for_backward):
    """Check the arguments and return the Problem."""
    sizes = check_sizes(arguments)
    _refuse_unsupported(arguments, sizes)
    shapes = expected_shapes(sizes)
    for name, shape in shapes.items():
        t = getattr(arguments, name)
        if t is not None and t.shape != shape:
            raise ValueError(f"{name} is {tuple(t.shape)}, but {tuple(shape)} is expected")
        if t is not None and t.device != arguments.raw.device:
            raise TypeError(f"{name} is on {t.device}, raw on {arguments.raw.device}")
    tensors = {name: getattr(arguments, name) for name in shapes}
    tensors["A"] = arguments.A.t()
    if arguments.h0 is not None:
        tensors["h0"] = arguments.h0.transpose(1, 2)
    narrow = ("raw", "weight_y")
    for name, t in tensors.items():
        if t is not None:
            t = t.detach()
            tensors[name] = t.contiguous() if name in narrow else t.float().contiguous()
    kernels = find_kernels(sizes, arguments.options.rank, arguments.raw)
    return Problem(arguments, sizes, tensors, kernels, saves_for_backward)


_faults: dict[tuple[Partition, torch.device], str] = {}  # "" for partitions that are right


def find_kernels(sizes: Sizes, r: int, like: Tensor) -> Kernels:
    """Return the kernels for a layer with r reflections on the device of a tensor. Check each once.

    Raises:
        Unsupported: If the GPU's shared memory cannot hold W_y, or if the self-check fails.
    """
    kernels = load_kernels(sizes.d, sizes.b, r, like.device)
    key = kernels.partition, like.device
    if key not in _faults:
        _faults[key] = ""  # because the self-check calls `cell` with this partition
        batch = kernels.partition.teams * TEAM_SEQUENCES
        self_check = functools.partial(_self_check, sizes.d, batch, r)
        _faults[key] = find_fault(self_check, str(like.device), "the persistent kernels")
    if _faults[key]:
        raise Unsupported(_faults[key])
    return kernels


def _run(problem, is_backward, tensors):
    """Run a pass for all sequences, as many per launch as the teams can solve.

    Args:
        problem: The Problem.
        is_backward: True for the backward pass, False for the forward pass.
        tensors: Tensors by the names of POINTERS; missing ones are null.

    Raises:
        RuntimeError: If a wait of an earlier launch took too long.
    """
    layout, options = problem.arguments.layout, problem.arguments.options
    sizes, kernels = problem.sizes, problem.kernels
    teams, like = kernels.partition.teams, tensors["x"]
    alarm = kernels.alarm(like)  # set by an earlier launch: this one has not started
    if alarm.item():
        alarm.zero_()
        raise RuntimeError(
            "a block of the exact solve waited for another one for more than two seconds: another"
            " program may use this GPU; FPRNN_KERNELS=triton solves without waits"
        )
    capacity = min(teams * TEAM_SEQUENCES, max(1, sizes.b))
    values = {
        "b": sizes.b,
        "length": sizes.length,
        "columns": sizes.columns,
        "team_sequences": math.ceil(capacity / teams),
        "chunk": CHUNK,
        **layout._asdict(),
        "act": ACTS.index(options.act),
        "sequential": options.sequential,
        "layer_norm": options.norm == "layer",
        "bc_norm": options.bc_norm,
        "scale": options.scale,
        "eps": options.eps,
        "kappa": options.contractive or 0.0,
        "norm_eps": options.norm_eps,
    }
    if not sizes.length:
        return
    for first in range(0, sizes.b, capacity):
        mail_shape = teams, kernels.mail_words, WORD_BYTES
        slots = {
            **tensors,
            "mail": torch.zeros(mail_shape, dtype=torch.uint8, device=like.device),
            "alarm": alarm,
        }
        present = {name: t for name, t in slots.items() if t is not None}
        pointers = (present[name].data_ptr() if name in present else 0 for name in POINTERS)
        values["first_sequence"] = first
        numbers = (values[name] for name in (*INTEGERS, *NUMBERS))
        kernels.run(is_backward, PACKED.pack(*numbers, *pointers), like)


def _forward(problem):
    """Run the forward pass, and return its results by the names of POINTERS (`Cell` in team.h)."""
    sizes, tensors = problem.sizes, problem.tensors
    b, length, d, n = sizes.b, sizes.length, sizes.d, sizes.n
    like = tensors["x"]
    results = {
        "y": like.new_empty(b, length, d),
        "state": like.new_empty(b, n, d),
        "outcome": like.new_empty(b, length, dtype=torch.uint8),  # outcome of each root search
    }
    if not length:
        results["state"].zero_()
        if tensors["h0"] is not None:
            results["state"].copy_(tensors["h0"])
    if problem.saves_for_backward:
        results |= {
            "rows": torch.empty_like(tensors["raw"]),
            "records": like.new_empty(b, length, problem.kernels.record_size),
            "units": like.new_empty(b, length, 2, n),  # B and C after their normalization
            "checkpoints": like.new_empty(b, math.ceil(length / CHUNK), n, d),  # states
        }
    _run(problem, False, {**tensors, "weight": tensors["weight_y"], **results})
    return results


def _backward(problem, saved, grad_y):
    """Run the backward pass; see `compute_grads` of lm/kernels/gpu_cell.py.

    Args:
        problem: The Problem, without tensors.
        saved: Tensors of the Problem and of `_forward`, by name.
        grad_y: Gradient of y, (b,l,d).
    """
    sizes, like, partition = problem.sizes, saved["x"], problem.kernels.partition
    b, length, d, n = sizes.b, sizes.length, sizes.d, sizes.n
    # Gradients that the kernels compute per sequence, (b,d), by the names of their parameters.
    summed = {"D": "dD", "norm_weight": "d_weight", "norm_bias": "d_bias"}
    summed = {name: slot for name, slot in summed.items() if saved[name] is not None}
    lanes = partition.blocks * partition.crews * partition.warps * 32
    buffers = {
        "grad_y": grad_y.float().contiguous(),
        "largest": like.new_zeros(b),
        "d_raw": _make_row_gradient(problem.arguments, sizes, saved["rows"]),
        "dx": like.new_empty(b, length, d),
        "ddt": like.new_empty(b, length, d),
        "d_gate": None if saved["gate"] is None else like.new_empty(b, length, d),
        "dA": like.new_zeros(b, n, d),
        # The states of a chunk, recomputed: a lane has four states of each of its items.
        "H": like.new_empty(lanes * CHUNK * problem.kernels.items * 4),
        **{slot: like.new_zeros(b, d) for slot in summed.values()},
    }
    _run(problem, True, {**saved, "weight": saved["weight_y"], **buffers})
    grads = {
        "raw": buffers["d_raw"],
        "x": buffers["dx"],
        "dt": buffers["ddt"],
        "A": buffers["dA"].sum(0).t(),
        "gate": buffers["d_gate"],
        **{name: buffers[slot] for name, slot in summed.items()},
    }
    return grads, buffers["largest"]


def _make_row_gradient(arguments, sizes, rows):
    """Return a tensor like `rows`: zero in columns outside all parts, uninitialized in others."""
    widths, firsts = _part_widths(sizes, arguments.options.rank), arguments.layout._asdict()
    parts = sorted((first, first + widths[name]) for name, first in firsts.items())
    d_raw, end = torch.empty_like(rows), 0
    for first, next_end in [*parts, (sizes.columns, 0)]:
        d_raw[..., end:first] = 0
        end = next_end
    return d_raw


def _solve(arguments, saves_for_backward):
    """Solve a layer; see `solve_layer` of lm/kernels/gpu_cell.py."""
    problem = _prepare(arguments, saves_for_backward)
    results = _forward(problem)
    y, outcome = results["y"], results["outcome"]
    state = results.pop("state").transpose(1, 2)
    if not saves_for_backward:
        return SolvedLayer(y, state, outcome)
    saved = {**problem.tensors, **results, "raw": None}  # the rows contain raw
    without_tensors = CellArguments(*arguments[:2], *(None for _ in arguments[2:]))
    problem = problem._replace(tensors={}, arguments=without_tensors)
    return SolvedLayer(y, state, outcome, saved, functools.partial(_backward, problem))


def cell(arguments: CellArguments | Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Solve an FP-Mamba-1 layer, token by token; differentiable once.

    Args:
        arguments: CellArguments, or a mapping with its fields. All tensors are on one GPU.

    Returns:
        As `lm.kernels.cpu.cpu_cell.cell`; y and the state are in fp32.

    Raises:
        RuntimeError: If a wait of an earlier launch took too long.
        TypeError: If tensors are not on one GPU.
        ValueError: If a shape or an option is wrong.
        Unsupported: If the kernels have no code for the layer, or do not fit the GPU.
    """
    return gpu_cell.solve(_solve, arguments)
