"""The `cell` kernels for GPUs: the exact solve of a whole layer, for all sequences at once.

lm/kernels/cell_arguments.py has the equations and the arguments; cell_kernels.py has the Triton
code. A token takes two launches: the product with W_y over the batch, and one program per sequence
for everything else. Its gradient takes two launches as well. The backward pass goes through chunks
of tokens from the last to the first, and recomputes the states of a chunk from the state before it.
The launches of a chunk are recorded as a CUDA graph (launches.py). The gradient of W_y is one
product at the end. The host never waits for the GPU.

Products use W_y's dtype and accumulate in fp32; rows (raw plus the product) are stored in raw's
dtype; everything else is fp32. The result of a sequence has the same bits in any batch, unless the
position of the sequence in a block of `tl.dot` changes them.

Shape suffixes: b batch, l length, d channels, n states, r reflections, K columns of raw.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lm.kernels import Unsupported, cell_arguments, gpu_cell
from lm.kernels.cell_arguments import (
    CellArguments,
    Layout,
    Options,
    Sizes,
    check_sizes,
    expected_shapes,
)
from lm.kernels.checks import cell_deviation
from lm.kernels.gpu_cell import SolvedLayer
from lm.kernels.triton import build as triton_build
from lm.kernels.triton import cell_kernels
from lm.kernels.triton.build import INTERPRETED, check
from lm.kernels.triton.launches import Launch, Schedule, get_schedule

CHUNK = 64  # tokens of a CUDA graph, and between two states that are saved for the backward pass
MAX_RECOMPUTED_BYTES = 512 * 2**20  # of the recomputed states of a chunk
TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
OPTIONAL = ("keep", "gate", "D", "norm_weight", "norm_bias", "h0")

# lm/model reads these three before it calls `cell`.
fits = cell_arguments.fits_a_gpu
NARROW = True  # raw and weight_y may have a narrower dtype than the other tensors
CENTROIDS = False  # y_{t−1} cannot be read through centroids


def _self_check():
    return cell_deviation(cell, torch.float32)


usable = functools.partial(triton_build.usable, _self_check)


class Plan(NamedTuple):
    """Everything that determines the launches of a chunk, except addresses.

    Calls with equal plans share a recorded CUDA graph.
    """

    layout: Layout
    options: Options
    sizes: Sizes  # with length 0, because graphs do not depend on it
    chunk: int  # tokens
    raw_dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    optional_names: tuple[str, ...]  # fields of OPTIONAL that are not None
    is_differentiable: bool  # save what the backward pass needs
    precision: str  # of products in fp32

    def token_arguments(self) -> dict[str, Any]:
        """Return the arguments of all kernels whose programs hold a whole token."""
        options, sizes = self.options, self.sizes
        return {
            "columns": sizes.columns,
            "vectors_column": self.layout.vectors,
            "gates_column": self.layout.gates,
            "B_column": self.layout.B,
            "C_column": self.layout.C,
            "scale": options.scale,
            "eps": options.eps,
            "kappa": options.contractive or 0.0,  # 0: no bound
            "headdim": sizes.d // sizes.heads,
            "d": sizes.d,
            "n": sizes.n,
            "r": options.rank,
            "KIND": sizes.kind,
            "GROUPS": options.groups,
            "ACT": options.act,
            "SEQUENTIAL": options.sequential,
            "BC_NORM": options.bc_norm,
            "ROW_DTYPE": TRITON_DTYPES[self.raw_dtype],
            "R": triton.next_power_of_2(options.rank),
            "D": triton.next_power_of_2(sizes.d),
            "N": triton.next_power_of_2(sizes.n),
            "STATES": min(4, triton.next_power_of_2(sizes.n)),  # loaded at once
        }

    def norm_arguments(self) -> dict[str, Any]:
        """Return further arguments of token_kernel and token_back_kernel."""
        return {
            "HAS_KEEP": "keep" in self.optional_names,
            "HAS_GATE": "gate" in self.optional_names,
            "norm_eps": self.options.norm_eps,
            "NORM": self.options.norm,
            "HAS_D": "D" in self.optional_names,
            "HAS_NORM_WEIGHT": "norm_weight" in self.optional_names,
            "HAS_NORM_BIAS": "norm_bias" in self.optional_names,
        }

    def choose_warp_count(self, max_channels: int) -> int:
        """Return the warps of a program that holds a whole token, a power of two up to 16.

        Fewer warps wait less for each other, as long as few registers spill
        (notes/2026-11-gpu-kernel.md).

        Args:
            max_channels: Channels per warp with one or two reflections. With more reflections a
                warp has fewer channels, because the program holds the vectors of all reflections.
        """
        per_rank = 2 * max_channels // triton.next_power_of_2(self.options.rank)
        channels = max(128, min(max_channels, per_rank))
        return max(1, min(16, triton.next_power_of_2(self.sizes.d) // channels))


def _product_arguments(plan, depth, max_block_depth=128):
    """Return the arguments of both product kernels, for a product that sums `depth` entries."""
    sizes = plan.sizes
    return {
        "b": sizes.b,
        "d": sizes.d,
        "columns": sizes.columns,
        "y_columns": sizes.y_columns,
        "HAS_KEEP": "keep" in plan.optional_names,
        "WEIGHT_DTYPE": TRITON_DTYPES[plan.weight_dtype],
        "ROW_DTYPE": TRITON_DTYPES[plan.raw_dtype],
        "PRODUCT_DTYPE": TRITON_DTYPES[torch.float32 if INTERPRETED else plan.weight_dtype],
        "PRECISION": plan.precision,
        # tl.dot needs at least 16 entries along each axis.
        "BLOCK_B": max(16, min(64, triton.next_power_of_2(sizes.b))),
        "BLOCK_COLUMNS": 16,
        "DEPTH": max(16, min(max_block_depth, triton.next_power_of_2(depth))),
        "num_warps": 4,
    }


def _product_grid(plan, columns):
    """Return the grid of a product whose result has `columns` columns."""
    blocks = _product_arguments(plan, depth=1)  # the grid does not depend on the depth
    column_blocks = triton.cdiv(columns, blocks["BLOCK_COLUMNS"])
    return column_blocks, triton.cdiv(plan.sizes.b, blocks["BLOCK_B"])


def _channel_grid(plan):
    """Return the grid of a kernel whose programs divide the channels, and the channels of each."""
    width = min(128, triton.next_power_of_2(plan.sizes.d))
    return (plan.sizes.b, triton.cdiv(plan.sizes.d, width)), width


def forward_launches(plan: Plan) -> list[Launch]:
    """Return the launches of a chunk, from its first token to its last."""
    sizes, launches = plan.sizes, []
    if plan.is_differentiable and sizes.kind != "rnn":
        launches.append(_add_inflow_launch(plan, is_checkpoint=True))
    max_block_depth = 512 // plan.weight_dtype.itemsize  # 512 bytes of a row of W_y
    product_arguments = {
        "SAVES": plan.is_differentiable,
        **_product_arguments(plan, sizes.d, max_block_depth),
    }
    token_arguments = {
        "SAVES": plan.is_differentiable,
        "WEIGHT_DTYPE": TRITON_DTYPES[plan.weight_dtype],
        "num_warps": plan.choose_warp_count(512),
        **plan.token_arguments(),
        **plan.norm_arguments(),
    }
    grid = _product_grid(plan, sizes.columns)
    for step in range(plan.chunk):
        arguments = {"step": step, **product_arguments}
        launches.append(Launch(cell_kernels.product_kernel, grid, arguments))
        arguments = {"step": step, **token_arguments}
        launches.append(Launch(cell_kernels.token_kernel, (sizes.b,), arguments))
    return launches


def _add_inflow_launch(plan, is_checkpoint):
    """Return the launch that stores the state before a chunk, or the final state."""
    sizes, groups = plan.sizes, plan.options.groups
    grid, width = _channel_grid(plan)
    arguments = {
        "chunk": plan.chunk,
        "d": sizes.d,
        "n": sizes.n,
        "group_width": sizes.d // groups,
        "IS_CHECKPOINT": is_checkpoint,
        "GROUPS": groups,
        "D": width,
        "STATES": min(16, triton.next_power_of_2(sizes.n)),
    }
    return Launch(cell_kernels.add_inflow_kernel, grid, arguments)


def final_launches(plan: Plan) -> list[Launch]:
    """Return the launches after the last token."""
    return [_add_inflow_launch(plan, is_checkpoint=False)]


def backward_launches(plan: Plan) -> list[Launch]:
    """Return the launches of a chunk's gradient, from its last token to its first."""
    sizes, groups = plan.sizes, plan.options.groups
    launches = []
    if sizes.kind != "rnn":
        num_warps = plan.choose_warp_count(512)
        arguments = {"chunk": plan.chunk, "num_warps": num_warps, **plan.token_arguments()}
        launches.append(Launch(cell_kernels.recompute_kernel, (sizes.b, plan.chunk), arguments))
        grid, width = _channel_grid(plan)
        arguments = {
            "chunk": plan.chunk,
            "d": sizes.d,
            "n": sizes.n,
            "group_width": sizes.d // groups,
            "headdim": sizes.d // sizes.heads,
            "KIND": sizes.kind,
            "GROUPS": groups,
            "HAS_KEEP": "keep" in plan.optional_names,
            "D": width,
            "STATES": triton.next_power_of_2(sizes.n),
        }
        launches.append(Launch(cell_kernels.states_kernel, grid, arguments))
    token_arguments = {
        "chunk": plan.chunk,
        "HAS_H0": "h0" in plan.optional_names,
        "num_warps": plan.choose_warp_count(256),
        **plan.token_arguments(),
        **plan.norm_arguments(),
    }
    product_arguments = _product_arguments(plan, sizes.y_columns)
    grid = _product_grid(plan, sizes.d)
    for step in reversed(range(plan.chunk)):
        arguments = {"step": step, **token_arguments}
        launches.append(Launch(cell_kernels.token_back_kernel, (sizes.b,), arguments))
        arguments = {"step": step, **product_arguments}
        launches.append(Launch(cell_kernels.product_back_kernel, grid, arguments))
    return launches


def _product_precision():
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _align(t):
    """Return a tensor that is contiguous and begins at a multiple of 16 bytes, or None."""
    if t is None:
        return None
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def _align_fp32(t):
    return None if t is None else _align(t.float())


def _prepare(arguments: CellArguments) -> tuple[Sizes, dict[str, Tensor | None]]:
    """Check the arguments; return their sizes and the tensors as the kernels read them."""
    options = arguments.options
    sizes = check_sizes(arguments)
    if arguments.readout is not None:
        raise Unsupported("the Triton kernels do not read y through centroids")
    if options.norm == "none":
        arguments = arguments._replace(norm_weight=None, norm_bias=None)
    if options.norm == "rms" and arguments.norm_bias is not None:
        raise ValueError("RMSNorm has no bias")
    shapes, values = expected_shapes(sizes), arguments._asdict()
    values["keep"] = None if arguments.keep is None else arguments.keep.float()  # may be bool
    check(**{name: (values[name], shape) for name, shape in shapes.items()})
    if not fits(options.rank, sizes.d):
        raise Unsupported(
            f"{options.rank} vectors of {sizes.d} channels: a Triton program holds at most"
            f" {cell_arguments.MAX_GPU_ENTRIES:,} numbers"
        )
    if arguments.weight_y.is_cuda and torch.cuda.is_current_stream_capturing():
        raise Unsupported(
            "the exact solve replays CUDA graphs, which another CUDA graph cannot record"
        )
    # Only raw and weight_y keep their dtype.
    tensors = {
        name: _align(values[name]) if name in ("raw", "weight_y") else _align_fp32(values[name])
        for name in shapes
    }
    if sizes.kind == "mamba1":
        tensors["A"] = _align_fp32(arguments.A.t())
    return sizes, tensors


def _make_plan(arguments, sizes, tensors, is_differentiable):
    # A power of two, so that sequences of other lengths use the same recorded graphs.
    chunk = min(CHUNK, triton.next_power_of_2(max(1, sizes.length)))
    if is_differentiable:
        max_chunk = max(1, MAX_RECOMPUTED_BYTES // max(1, 4 * sizes.b * sizes.n * sizes.d))
        chunk = min(chunk, 1 << int(math.log2(max_chunk)))
    return Plan(
        layout=arguments.layout,
        options=arguments.options,
        sizes=sizes._replace(length=0),
        chunk=chunk,
        raw_dtype=tensors["raw"].dtype,
        weight_dtype=tensors["weight_y"].dtype,
        device=tensors["raw"].device,
        optional_names=tuple(name for name in OPTIONAL if tensors[name] is not None),
        is_differentiable=is_differentiable,
        precision=_product_precision(),
    )


def _copy_state(h0, sizes, like):
    """Return a copy of h0 in the order of the kernels: (b,n·d), or (b,d) for an FP-RNN."""
    b, d, n = sizes.b, sizes.d, sizes.n
    if h0 is None:
        return like.new_zeros(b, n * d)
    if sizes.kind == "mamba1":
        h0 = h0.transpose(1, 2)
    elif sizes.kind == "mamba2":
        h0 = h0.permute(0, 3, 1, 2)
    return h0.float().reshape(b, n * d).clone()


def _view_state(state, sizes):
    """Return a view of the kernels' state with the shape of h0."""
    if sizes.kind == "mamba1":
        return state.view(sizes.b, sizes.n, sizes.d).transpose(1, 2)
    if sizes.kind == "mamba2":
        return state.view(sizes.b, sizes.n, sizes.heads, -1).permute(0, 2, 3, 1)
    return state.view(sizes.b, sizes.d)


def _run(make_launches, plan, sizes, tensors, first_tokens):
    """Run the launches of several chunks.

    Args:
        make_launches: `forward_launches`, `final_launches` or `backward_launches`.
        plan: The Plan.
        sizes: The Sizes.
        tensors: Tensors by the names of SLOTS; missing ones are null.
        first_tokens: First token of every chunk.
    """

    def make_schedule():
        table = torch.zeros(len(cell_kernels.SLOTS), dtype=torch.int64, device=plan.device)
        return Schedule(table, make_launches(plan))

    if not sizes.b:
        return
    schedule = get_schedule((make_launches.__name__, plan), make_schedule)
    slot_tensors = [tensors.get(name) for name in cell_kernels.SLOTS[2:]]
    addresses = [0 if t is None else t.data_ptr() for t in slot_tensors]
    with schedule.lock:
        schedule.write_table([0, sizes.length, *addresses])
        for first_token in first_tokens:
            schedule.run(first_token)


def _forward(plan, sizes, tensors):
    """Run the forward pass.

    Returns:
        Tensors by the names of SLOTS, among them y, state and outcome, and for a backward pass
        rows, roots and checkpoints.
    """
    b, length, d, n = sizes.b, sizes.length, sizes.d, sizes.n
    like, y0 = tensors["x"], tensors["y0"]
    y_before = like.new_zeros(b, d) if y0 is None else y0.clone()
    row_shape = (b, length) if plan.is_differentiable else (b,)
    buffers = {
        "weight": tensors["weight_y"],
        "y": like.new_empty(b, length, d),
        "outcome": torch.empty(b, length, dtype=torch.uint8, device=plan.device),
        "rows": like.new_empty(*row_shape, sizes.columns, dtype=plan.raw_dtype),
        "y_before": y_before.to(plan.weight_dtype),
        "state": _copy_state(tensors["h0"], sizes, like),
    }
    if sizes.kind != "rnn":
        buffers["inflow"] = like.new_zeros(b, d)
        buffers["units"] = like.new_zeros(b, 4 * plan.options.groups * n)  # B, C of two tokens
    if plan.is_differentiable:
        buffers["roots"] = like.new_empty(b, length, plan.options.rank)
        if sizes.kind != "rnn":
            chunks = triton.cdiv(length, plan.chunk)
            buffers["checkpoints"] = like.new_empty(b, chunks, n * d)
    tensors = {**tensors, **buffers}
    _run(forward_launches, plan, sizes, tensors, range(0, length, plan.chunk))
    if sizes.kind != "rnn":
        _run(final_launches, plan, sizes, tensors, [0])
    return buffers


def _backward(plan, sizes, saved, grad_y):
    """Run the backward pass; see `compute_grads` of lm/kernels/gpu_cell.py.

    Args:
        plan: The Plan of the forward pass.
        sizes: The Sizes.
        saved: Tensors of `_prepare` and `_forward`, by name.
        grad_y: Gradient of y, (b,l,d).
    """
    b, length, d, n = sizes.b, sizes.length, sizes.d, sizes.n
    zeros, empty = saved["x"].new_zeros, saved["x"].new_empty
    unit_entries = 2 * plan.options.groups * n  # B and C of a token
    buffers = {
        "weight": saved["weight_y"],
        "grad_y": _align_fp32(grad_y),
        "max_lambda": zeros(b),
        "d_y_before": zeros(b, d),
        "mu": zeros(b, n * d),
        "d_raw": zeros(b, length, sizes.columns, dtype=plan.raw_dtype),
        "dx": empty(b, length, d),
        "ddt": empty(b, length, d),
    }
    if sizes.kind == "rnn":
        buffers["dA"] = empty(b, length, d)
        buffers["state"] = saved["h0"]
    else:
        buffers["H"] = empty(b, plan.chunk, n * d)
        buffers["history"] = empty(b, plan.chunk, d)
        buffers["inflows"] = empty(b, plan.chunk, d)
        buffers["all_units"] = empty(b, plan.chunk, unit_entries)
        buffers["d_units"] = empty(b, unit_entries)
        buffers["dA"] = zeros(b, n * d if sizes.kind == "mamba1" else d)
    # Gradients that the kernels compute per sequence, (b,d), by the names of their parameters.
    sum_slots = {"D": "dD", "norm_weight": "d_norm_weight", "norm_bias": "d_norm_bias"}
    sum_slots = {name: slot for name, slot in sum_slots.items() if saved[name] is not None}
    buffers |= {slot: zeros(b, d) for slot in sum_slots.values()}
    if saved["gate"] is not None:
        buffers["d_gate"] = empty(b, length, d)
    first_tokens = reversed(range(0, length, plan.chunk))
    _run(backward_launches, plan, sizes, {**saved, **buffers}, first_tokens)
    d_dt, d_A = _reduce_time_gradients(buffers["ddt"], buffers["dA"], sizes)
    grads = {
        "raw": buffers["d_raw"],
        "x": buffers["dx"],
        "dt": d_dt,
        "A": d_A,
        "gate": buffers.get("d_gate"),
        **{name: buffers[slot] for name, slot in sum_slots.items()},
    }
    return grads, buffers["max_lambda"]


def _reduce_time_gradients(ddt, dA, sizes):
    """Return the gradients of dt and A in the shapes of the arguments."""
    if sizes.kind == "mamba1":
        return ddt, dA.sum(0).view(sizes.n, sizes.d).t()
    if sizes.kind == "mamba2":
        heads = sizes.heads
        return ddt.unflatten(-1, (heads, -1)).sum(-1), dA.sum(0).view(heads, -1).sum(-1)
    return ddt, dA


def _solve(arguments, saves_for_backward):
    """Solve a layer; see `solve_layer` of lm/kernels/gpu_cell.py."""
    sizes, tensors = _prepare(arguments)
    plan = _make_plan(arguments, sizes, tensors, saves_for_backward)
    results = _forward(plan, sizes, tensors)
    solved = SolvedLayer(results["y"], _view_state(results["state"], sizes), results["outcome"])
    if not saves_for_backward:
        return solved
    saved_names = ("y", "outcome", "rows", "roots", "checkpoints")
    saved = {**tensors, "raw": None}  # the rows contain raw
    saved |= {name: results.get(name) for name in saved_names}
    return solved._replace(saved=saved, compute_grads=functools.partial(_backward, plan, sizes))


def cell(arguments: CellArguments | Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Solve an FP-Mamba-1, FP-Mamba-2 or FP-RNN layer, token by token; differentiable once.

    Args:
        arguments: CellArguments without a readout, or a mapping with its fields. All tensors are on
            one GPU, in fp32, bf16 or fp16.

    Returns:
        As `lm.kernels.cpu.cpu_cell.cell`; y and the state are in fp32.

    Raises:
        TypeError: If tensors are not on one GPU.
        ValueError: If a shape or an option is wrong.
        Unsupported: If the kernels do not support a dtype, the rank, the width or the readout.
    """
    return gpu_cell.solve(_solve, arguments)
